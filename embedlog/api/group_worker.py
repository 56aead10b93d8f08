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
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog.api.log import Log
from embedlog.callbacks import check_ran
from embedlog.config import ConsumerConfig
from embedlog.consumer.consumer import Consumer
from embedlog.dead_letter_queue import ensure_topic
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
from embedlog.workers.handling import Handling, checked_output

if TYPE_CHECKING:
    from embedlog.producer import Producer
    from embedlog.workers.record_worker import RecordWorker

COMMIT_SECONDS = 1.0
"""How often the work of a slow handler is committed between two polls."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""End a process after its current record; Ctrl-C signals all processes of a terminal."""
STALLED_SECONDS = 30.0
"""A handler that has not returned for this long is logged, with its stack."""
_LONG_SECONDS = 3600.0
_LOOKS = 6
"""How often to look at the handlers in that time."""

_log = logging.getLogger("embedlog.api")


class GroupJob(NamedTuple):
    """What all processes of a run share."""

    reopen: Callable[[], Log]
    topics: tuple[str, ...]
    config: ConsumerConfig
    handling: Handling
    batch: bool
    parent: int
    """The id of the process that started the run; the run ends when that process does."""

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


def work(pickled: GroupJob | bytes, number: int, pipe: Connection) -> None:
    """Run one process, until a signal, the end of the parent, or an error.

    Args:
        pickled: The job; as bytes if only cloudpickle can pickle it.
        number: Of the process, from 0.
        pipe: Takes the error.
    """
    job: GroupJob = pickle.loads(pickled) if isinstance(pickled, bytes) else pickled
    job = job.for_process(number)
    worker = GroupWorker(job)
    for each in SIGNALS:
        signal.signal(each, worker.stop)
    # The parent blocked them until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_watch, args=(job, worker), daemon=True).start()
    try:
        with job.reopen() as log:
            worker.run(log, pipe)
    except BaseException as error:  # noqa: BLE001 - it is sent to the parent
        worker.fail(error, pipe)


def _watch(job: GroupJob, worker: GroupWorker) -> None:
    """Name handlers that do not return; end this process when its parent ends, for any reason."""
    watch = ProcessWatch()
    watch.watch({job.parent})
    seen: dict[tuple[Any, ...], float] = {}
    while not watch.wait(STALLED_SECONDS / _LOOKS):
        seen = _name_stalled(job, worker, seen, monotonic())
        try:
            os.kill(job.parent, 0)
        except ProcessLookupError:
            break
    os.kill(os.getpid(), signal.SIGTERM)


def _name_stalled(
    job: GroupJob, worker: GroupWorker, seen: dict[tuple[Any, ...], float], now: float
) -> dict[tuple[Any, ...], float]:
    """Log the handlers that have not returned for long, once each.

    Args:
        job: The job.
        worker: What calls the handlers.
        seen: When each record was first seen with its handler; infinite once it was named.
        now: The monotonic clock.

    Returns:
        The same for the records that are being handled now.
    """
    running = {}
    for record, runner in worker.running():
        key = record.topic, record.partition, record.offset, runner
        since = seen.get(key, now)
        if now - since >= STALLED_SECONDS:
            from embedlog.workers.stacks import stack_of

            since = inf
            _log.warning(
                "Group %s, process %d: the handler of %s-%d, offset %d, has not returned for %.0f "
                "s; it is here:\n%s",
                *(job.config.group_id, os.getpid(), record.topic, record.partition, record.offset),
                *(STALLED_SECONDS, stack_of(runner)),
            )
        running[key] = since
    return running


class GroupWorker:
    """Polls, calls the handler, and commits what was handled.

    Each poll auto-commits the records of the polls before it, which were all handled.
    If a poll ends early or its records take long, this class commits those that were handled.
    With outputs, each poll is a transaction.
    """

    def __init__(self, job: GroupJob) -> None:
        self._job, self._handler, self._batch = job, job.handling.handler, job.batch
        self._wakeup = ProcessWatch()
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        """Sends what the handler returns."""
        self._records: RecordWorker | None = None
        """Handles the records, unless they are handled here."""
        self._stopping = False
        self._polled: Mapping[TopicPartition, list[Record]] = {}
        """The records of the last poll, until they are handled."""
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

    def running(self) -> list[tuple[Record, Any]]:
        """Return the records that are being handled, with their thread or task; any thread may."""
        if self._records is not None:
            return self._records.running()
        for partition, records in self._polled.items():
            handled = self._handled.get(partition)
            left = [each for each in records if handled is None or each.offset >= handled.offset]
            if left:
                return [(left[0], threading.main_thread().ident)]
        return []

    def run(self, log: Log, pipe: Connection) -> None:
        """Handle records until `stop`, or until one fails."""
        job, handling = self._job, self._job.handling
        if handling.outputs or handling.dead_letter is not None:
            # The members of the group fence each other, so no name is needed.
            self._producer = log.producer(transactional_id="")
            self._producer.init_transactions()
        if handling.is_plain:
            if handling.initializer is not None:
                check_ran(handling.initializer(), "initializer")
            consumer = log.consumer(*job.topics, **job.config.overrides())
            steps = partial(self._poll_until_stopped, consumer)
        else:
            from embedlog.workers.record_worker import RecordWorker

            stored = {"key_deserializer": "bytes", "value_deserializer": "bytes"}
            consumer = log.consumer(**job.config.changed(stored).overrides())
            letters = 0
            if handling.dead_letter is not None:
                letters = ensure_topic(log.root, handling.config, job.topics)
            self._records = RecordWorker(
                *(log.root, job.topics, job.config, handling, consumer, self._producer, letters)
            )
            steps = partial(self._records.run, lambda: self._stopping)
        self._consumer = consumer
        try:
            steps()
        except BaseException as error:  # noqa: BLE001 - it is sent to the parent
            self._poll_done = False
            self.fail(error, pipe)
        finally:
            self._consumer = None
            # The positions may be past records that were not handled.
            consumer.close(autocommit=self._poll_done)

    def _poll_until_stopped(self, consumer: Consumer) -> None:
        while not self._stopping:
            try:
                records = consumer.poll(None)
            except WakeupError:
                continue
            self._handled, self._polled = {}, records
            if self._producer is None:
                self._handle(consumer, records)
            elif records:
                self._transform(consumer, self._producer, records)
            self._polled = {}

    def _handle(self, consumer: Consumer, polled: Mapping[TopicPartition, list[Record]]) -> None:
        self._commit_at = monotonic() + COMMIT_SECONDS
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
        handled = self._handled
        producer.begin_transaction()
        try:
            for records in self._calls(polled):
                for output in self._handler(records if self._batch else records[-1]) or ():
                    producer.send(*checked_output(output))
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
