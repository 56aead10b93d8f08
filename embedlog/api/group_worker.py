"""One process of a `GroupRun`: a member of the group that calls the handler."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog.api.log import Log
from embedlog.callbacks import check_ran
from embedlog.config import ConsumerConfig
from embedlog.consumer.consumer import Consumer
from embedlog.errors import (
    CommitFailedError,
    EmbedlogError,
    IllegalStateError,
    ProcessDiedError,
    UnknownTopicOrPartitionError,
    WakeupError,
)
from embedlog.files import ProcessWatch
from embedlog.record import OffsetAndMetadata, Record, TopicPartition

if TYPE_CHECKING:
    from embedlog.producer import Producer

COMMIT_SECONDS = 1.0
"""How often the work of a slow handler is committed between two polls."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""End a process after its current record; Ctrl-C signals all processes of a terminal."""
_LONG_SECONDS = 3600.0

_log = logging.getLogger("embedlog.api")


class GroupJob(NamedTuple):
    """What all processes of a run share."""

    reopen: Callable[[], Log]
    topics: tuple[str, ...]
    config: ConsumerConfig
    handler: Callable[[Any], Any]
    batch: bool
    parent: int
    """The id of the process that started the run; the run ends when that process does."""
    outputs: bool = False
    """Whether the handler returns records to send."""

    def for_process(self, number: int) -> GroupJob:
        """Return the job for one process, with its own instance id if members are static."""
        name = self.config.group_instance_id
        if name is None:
            return self
        config = self.config.changed({"group_instance_id": f"{name}-{number}"})
        return self._replace(config=config)


class ChildTraceback(Exception):  # noqa: N818 - a cause, to be read and never caught
    """The traceback of an error in another process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def send_error(error: BaseException, pipe: Connection) -> None:
    """Send an error to the parent, as a `ProcessDiedError` if it cannot be pickled.

    Raises:
        OSError: The parent has ended.
    """
    text = "".join(traceback.format_exception(error))
    try:
        exception = pickle.loads(pickle.dumps(error)) if isinstance(error, Exception) else None
    except Exception:  # noqa: BLE001 - whatever the user's class raises
        exception = None
    if exception is None:
        summary = traceback.format_exception_only(error)[-1].strip()
        exception = ProcessDiedError(f"A handler raised {summary}")
    pipe.send((exception, text))


def receive_error(pipe: Connection) -> Exception:
    """Return the error that a process sends, with its traceback as the cause.

    Raises:
        EOFError, OSError: The process ended without an error.
    """
    error: Exception
    error, text = pipe.recv()
    error.__cause__ = ChildTraceback(text)
    return error


def work(job: GroupJob, pipe: Connection) -> None:
    """Run one process, until a signal, the end of the parent, or an error."""
    worker = GroupWorker(job)
    for number in SIGNALS:
        signal.signal(number, worker.stop)
    # The parent blocked them until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_terminate_with, args=(job.parent,), daemon=True).start()
    try:
        with job.reopen() as log:
            if job.outputs:
                # The members of the group fence each other, so no name is needed.
                worker.producer = log.producer(transactional_id="")
                worker.producer.init_transactions()
            worker.run(log.consumer(*job.topics, **job.config.overrides()), pipe)
    except BaseException as error:  # noqa: BLE001 - it is sent to the parent
        worker.fail(error, pipe)


def _terminate_with(parent: int) -> None:
    """Terminate this process when its parent ends, for whatever reason."""
    watch = ProcessWatch()
    watch.watch({parent})
    while not watch.wait(_LONG_SECONDS):
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            break
    os.kill(os.getpid(), signal.SIGTERM)


class GroupWorker:
    """Polls, calls the handler, and commits what was handled.

    Each poll auto-commits the records of the polls before it, which were all handled.
    If a poll ends early or its records take long, this class commits those that were handled.
    With outputs, each poll is a transaction.
    """

    producer: Producer | None = None
    """Sends what the handler returns."""

    def __init__(self, job: GroupJob) -> None:
        self._handler, self._batch = job.handler, job.batch
        self._wakeup = ProcessWatch()
        self._consumer: Consumer | None = None
        self._stopping = False
        self._poll_done = True
        """Whether all records of the last poll were handled."""
        self._handled: dict[TopicPartition, OffsetAndMetadata] = {}
        """The positions after the handled records of the last poll."""
        self._committed = False
        """Whether some records of the last poll were committed before all were handled."""
        self._commit_at = 0.0

    def stop(self, *_: object) -> None:
        """End after the current record; a signal handler."""
        self._stopping = True
        self._wakeup.ring()
        if self._consumer is not None:
            self._consumer.wakeup()

    def run(self, consumer: Consumer, pipe: Connection) -> None:
        """Handle records until `stop`, or until one fails."""
        self._consumer = consumer
        try:
            while not self._stopping:
                try:
                    records = consumer.poll(None)
                except WakeupError:
                    continue
                if self.producer is None:
                    self._handle(consumer, records)
                elif records:
                    self._transform(consumer, self.producer, records)
        except BaseException as error:  # noqa: BLE001 - it is sent to the parent
            self._poll_done = False
            self.fail(error, pipe)
        finally:
            self._consumer = None
            # The positions may be past records that were not handled.
            consumer.close(autocommit=self._poll_done)

    def _handle(self, consumer: Consumer, polled: Mapping[TopicPartition, list[Record]]) -> None:
        self._handled, self._commit_at = {}, monotonic() + COMMIT_SECONDS
        self._poll_done = self._committed = False
        try:
            self._poll_done = all(self._call(consumer, each) for each in self._calls(polled))
        finally:
            # After a commit here, auto-commit would not commit the rest before more records come.
            if self._committed or not self._poll_done:
                self._commit(consumer)

    def _transform(
        self,
        consumer: Consumer,
        producer: Producer,
        polled: Mapping[TopicPartition, list[Record]],
    ) -> None:
        """Send what the handler returns for the records of a poll, and commit, in a transaction."""
        member = consumer.group_metadata()
        handled: dict[TopicPartition, OffsetAndMetadata] = {}
        producer.begin_transaction()
        try:
            for records in self._calls(polled):
                for output in self._handler(records if self._batch else records[-1]) or ():
                    producer.send(*_checked(output))
                handled.update([_position_after(records[-1])])
                if self._stopping:
                    break
            producer.send_offsets_to_transaction(handled, member)
        except BaseException:
            producer.abort_transaction()
            raise
        try:
            producer.commit_transaction()
        except EmbedlogError as error:
            producer.abort_transaction()
            if not isinstance(error, CommitFailedError) and not error.retriable:
                raise
            _log.warning("A transaction failed; its records are handled again: %s", error)
            for partition, records in polled.items():
                # A partition that was lost is read again where its next owner has committed.
                with suppress(IllegalStateError, UnknownTopicOrPartitionError):
                    committed = consumer.committed(partition)
                    consumer.seek(partition, records[0].offset if committed is None else committed)

    def _calls(self, polled: Mapping[TopicPartition, list[Record]]) -> Iterator[list[Record]]:
        lists = iter(polled.values())
        return lists if self._batch else ([record] for records in lists for record in records)

    def _call(self, consumer: Consumer, records: list[Record]) -> bool:
        """Handle some records of a partition; return whether to continue with those of the poll."""
        last = records[-1]
        result = self._handler(records if self._batch else last)
        if result is not None:
            check_ran(result, "handler")
        self._handled.update([_position_after(last)])
        if monotonic() >= self._commit_at:
            self._commit_at, self._committed = monotonic() + COMMIT_SECONDS, True
            return self._commit(consumer) and not self._stopping
        return not self._stopping

    def _commit(self, consumer: Consumer) -> bool:
        """Commit what was handled; return False if the partitions have another owner now."""
        if self._handled:
            try:
                consumer.commit(self._handled)
            except CommitFailedError as error:
                # The next poll joins the group again and continues at its committed offsets.
                _log.warning("%s", error)
                self._handled = {}
                return False
            except EmbedlogError as error:
                _log.warning("A commit failed; the next one includes its offsets: %s", error)
        return True

    def fail(self, error: BaseException, pipe: Connection) -> None:
        """Send an error to the parent, and stay a member until the other processes have ended.

        Otherwise one of them would get the failed record, and continue after it.
        """
        try:
            send_error(error, pipe)
        except OSError:
            return  # The parent has ended.
        while not self._stopping:
            self._wakeup.wait(_LONG_SECONDS)


def _position_after(record: Record) -> tuple[TopicPartition, OffsetAndMetadata]:
    """Return the partition of a record, and the position after it."""
    position = OffsetAndMetadata(record.offset + 1, "", record.leader_epoch)
    return TopicPartition(record.topic, record.partition), position


def _checked(output: object) -> tuple[Any, ...]:
    """Return what a handler returned for `Producer.send`.

    Raises:
        TypeError: It is no tuple.
    """
    if not isinstance(output, tuple):
        raise TypeError(
            "A handler with outputs=True must return tuples of topic, value and key, got "
            f"{output!r}"
        )
    return output
