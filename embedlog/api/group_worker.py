"""One process of a run: it reads as a member of the group, and calls the handler."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, NamedTuple

from embedlog.api.log import Log
from embedlog.config import ConsumerConfig
from embedlog.consumer import Consumer
from embedlog.errors import CommitFailedError, EmbedlogError, ProcessDiedError, WakeupError
from embedlog.files import ProcessWatch
from embedlog.record import OffsetAndMetadata, Record, TopicPartition

COMMIT_SECONDS = 1.0
"""A handler that is slow has what it did committed so often, without waiting for the next poll."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""What ends a process after the record in hand; Ctrl-C comes to all processes of a terminal."""
_LONG_SECONDS = 3600.0

_log = logging.getLogger(__name__)


class GroupJob(NamedTuple):
    """What all processes of a run do."""

    reopen: Callable[[], Log]
    topics: tuple[str, ...]
    config: ConsumerConfig
    handler: Callable[[Any], object]
    batch: bool
    parent: int
    """The process that started the run: when it is gone, so is the run."""

    def numbered(self, number: int) -> GroupJob:
        """Return it for one process; a static member's name is for one member only."""
        name = self.config.group_instance_id
        if name is None:
            return self
        config = self.config.changed({"group_instance_id": f"{name}-{number}"})
        return self._replace(config=config)


class ChildTraceback(Exception):  # noqa: N818 - a cause, to be read and never caught
    """Where in another process an error was raised, in words."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class WorkerFailure(NamedTuple):
    """What a process says when it fails."""

    what: Exception | None
    """The error, if it can be sent."""
    name: str
    told: str
    """The traceback."""

    @staticmethod
    def of(error: BaseException) -> WorkerFailure:
        """Make one of the error that was just raised."""
        told = "".join(traceback.format_exception(error))
        name = traceback.format_exception_only(error)[-1].strip()
        try:
            sent = pickle.loads(pickle.dumps(error)) if isinstance(error, Exception) else None
        except Exception:  # noqa: BLE001 - whatever a class of the user's own raises
            sent = None
        return WorkerFailure(sent, name, told)

    def error(self) -> Exception:
        """Return the error to raise in the parent."""
        error = self.what or ProcessDiedError(f"a handler raised {self.name}")
        error.__cause__ = ChildTraceback(self.told)
        return error


def work(job: GroupJob, pipe: Connection) -> None:
    """Be one process of a run: until a signal, the end of the parent, or an error."""
    worker = GroupWorker(job)
    for each in SIGNALS:
        signal.signal(each, worker.stop)
    # Whoever started this process held them back until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with, args=(job.parent,), daemon=True).start()
    try:
        with job.reopen() as log:
            worker.run(log.consumer(*job.topics, **job.config.overrides()), pipe)
    except BaseException as error:  # noqa: BLE001 - it is sent to the parent
        worker.fail(error, pipe)


def _end_with(parent: int) -> None:
    """End this process when its parent ends, however that did."""
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

    The consumer commits by itself, in each poll, what the polls before returned
    (E20), and all of that was handled by then.  What is left is a poll that is
    not handled to its end.
    """

    def __init__(self, job: GroupJob) -> None:
        self._handler, self._batch = job.handler, job.batch
        self._bell = ProcessWatch()
        self._consumer: Consumer | None = None
        self._stopping = False
        self._whole = True
        """Whether all was handled that the last poll returned."""
        self._handled: dict[TopicPartition, OffsetAndMetadata] = {}
        """What of the records in hand is to be committed."""
        self._committed = False
        """Whether some of the records in hand were committed before the others were handled."""
        self._due = 0.0

    def stop(self, *_: object) -> None:
        """End after the record in hand; a signal handler."""
        self._stopping = True
        self._bell.ring()
        if self._consumer is not None:
            self._consumer.wakeup()

    def run(self, consumer: Consumer, pipe: Connection) -> None:
        """Handle records until `stop`, or until one fails."""
        self._consumer = consumer
        try:
            while not self._stopping:
                try:
                    found = consumer.poll(None)
                except WakeupError:
                    continue
                self._handle(consumer, found)
        except BaseException as error:  # noqa: BLE001 - it is sent to the parent
            self._whole = False
            self.fail(error, pipe)
        finally:
            self._consumer = None
            # The positions may be past records that were not handled.
            consumer.close(autocommit=self._whole)

    def _handle(self, consumer: Consumer, found: Mapping[TopicPartition, list[Record]]) -> None:
        self._handled, self._due = {}, monotonic() + COMMIT_SECONDS
        lists = iter(found.values())
        turns = lists if self._batch else ([one] for records in lists for one in records)
        self._whole = self._committed = False
        try:
            self._whole = all(self._call(consumer, turn) for turn in turns)
        finally:
            # Auto-commit leaves what was committed here as it is until more records come.
            if self._committed or not self._whole:
                self._commit(consumer)

    def _call(self, consumer: Consumer, records: list[Record]) -> bool:
        """Handle some records of a partition; tell whether to go on with those in hand."""
        last = records[-1]
        self._handler(records if self._batch else last)
        after = OffsetAndMetadata(last.offset + 1, "", last.leader_epoch)
        self._handled[TopicPartition(last.topic, last.partition)] = after
        if monotonic() >= self._due:
            self._due, self._committed = monotonic() + COMMIT_SECONDS, True
            return self._commit(consumer) and not self._stopping
        return not self._stopping

    def _commit(self, consumer: Consumer) -> bool:
        """Commit what was handled; tell whether the partitions are still those of this process."""
        if self._handled:
            try:
                consumer.commit(self._handled)
            except CommitFailedError as error:
                # The next poll joins the group anew, and goes on where that is.
                _log.warning("%s", error)
                self._handled = {}
                return False
            except EmbedlogError as error:
                _log.warning("a commit failed, and is made up for by the next: %s", error)
        return True

    def fail(self, error: BaseException, pipe: Connection) -> None:
        """Tell the parent, and stay a member until it has ended the others.

        Or one of them would get the record that failed, and go on after it.
        """
        try:
            pipe.send(WorkerFailure.of(error))
        except OSError:
            return  # nobody listens
        while not self._stopping:
            self._bell.wait(_LONG_SECONDS)
