"""Running a function over topics in several processes, as one consumer group.

The parent keeps no state of its own about records: what is done is what the
group committed.  So a process may be killed at any instant and another one
goes on from there, and the run itself may be started again.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from time import monotonic
from types import FrameType
from typing import Any, Literal, NamedTuple, Self

from embedlog.api.group_worker import SIGNALS, GroupJob, WorkerFailure, work
from embedlog.api.log import Log
from embedlog.config import ConsumerConfig
from embedlog.consumer.group_client import open_group
from embedlog.errors import (
    IllegalStateError,
    InvalidConfigError,
    ProcessDiedError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups.offsets import check_group_id
from embedlog.record import TopicPartition

CHECK_SECONDS = 0.05
"""How often to look whether everything was handled, with ``until="end"``."""
STOP_SECONDS = 30.0
"""How long a handler may go on after it was asked to stop, before its process is killed."""
LOOK_SECONDS = 1.0
"""How often to look at the processes where none of them says that it ended."""
_OURS = ("group_id", "enable_auto_commit", "consumer_timeout_ms")
_EACH_POLL = {"auto_commit_interval_ms": 0}

_log = logging.getLogger(__name__)
_starting = threading.Lock()
_runs: weakref.WeakSet[GroupRun] = weakref.WeakSet()


def run_group(
    log: Log,
    topics: str | Iterable[str],
    group_id: str,
    handler: Callable[[Any], object],
    *,
    processes: int = 2,
    batch: bool = False,
    until: Literal["end"] | None = None,
    restarts: int = 3,
    start_method: str | None = None,
    **config: Any,
) -> GroupRun:
    """Call a function with every record of topics, in several processes that share them.

    At least once: an offset is committed only after the handler returned.  What
    a handler sends elsewhere must be safe by then, so wait for its future.  A
    record whose handler raises ends the run, uncommitted, and so does whatever
    ends a process more than ``restarts`` times.

    Returns at once; the run ends with `GroupRun.wait`, `GroupRun.stop`, its
    ``with`` block, the log, or this process, however that ends.

    Args:
        log: The processes open it anew, by its path and options.
        topics: Whose records.
        group_id: Which group reads them; what it committed before is not handled again.
        handler: Called with a `Record`, or with a list of them.
        processes: How many.
        batch: Give the handler a list, of records of one partition in their order.
        until: ``"end"`` ends the run when everything that is there now was handled.
        restarts: How many processes that were killed are replaced, in all.
        start_method: Of `multiprocessing`.  ``"fork"``, where nothing else is said, lets a
            handler be anything, as one from a notebook; the others need one that pickles.
        config: Settings of the consumers; see `embedlog.Consumer`.  ``max_poll_records`` is
            how many at most are handled between two commits.

    Raises:
        InvalidConfigError: A setting is wrong, or not for the caller to choose.
        InvalidGroupIdError: The group cannot have that name.
        ValueError, TypeError: As `multiprocessing` refuses to start a process.
    """
    job = _job(log, topics, group_id, handler, batch, config)
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"{processes!r} processes: there is at least one")
    if until not in (None, "end"):
        raise ValueError(f"until is 'end' or None, not {until!r}")
    left = None if until is None else UncommittedRecords(log, group_id, job.topics, job.config)
    run = GroupRun(job, multiprocessing.get_context(start_method or _usual()), restarts, left)
    run._start(processes)
    # Closing the log ends the run, as does the exit of this process.
    log._children.add(run)
    _runs.add(run)
    return run


def _after_fork_in_child() -> None:
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _close_all() -> None:
    # Before multiprocessing waits for processes that nobody would end.
    for run in list(_runs):
        run.close()


def _usual() -> str:
    return "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"


def _job(
    log: Log,
    topics: str | Iterable[str],
    group_id: str,
    handler: Callable[[Any], object],
    batch: bool,
    config: Mapping[str, Any],
) -> GroupJob:
    given = {name.replace(".", "_"): value for name, value in config.items()}
    for name in set(_OURS) & given.keys():
        raise InvalidConfigError(f"{name} is set by run_group", setting=name)
    check_group_id(group_id)
    parsed = ConsumerConfig.parse(_EACH_POLL | given | {"group_id": group_id})
    if not callable(handler):
        raise TypeError(f"a handler is a function, not {handler!r}")
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    reopen, arguments = log.__reduce__()
    return GroupJob(partial(reopen, *arguments), names, parsed, handler, batch, os.getpid())


class UncommittedRecords:
    """What of the topics, as they are now, the group has not committed yet.

    Args:
        log: Where they are.
        group_id: Whose commits count.
        topics: Their names.
        config: Of the consumers: without a commit, ``"latest"`` leaves nothing to handle.
    """

    def __init__(
        self, log: Log, group_id: str, topics: Iterable[str], config: ConsumerConfig
    ) -> None:
        self._root, self._group = log.root, open_group(log.root, group_id)
        self._ends: dict[TopicPartition, int] = {}
        known = log.root.topics()
        parts = [
            TopicPartition(name, number)
            for name in topics
            if name in known
            for number in range(known[name].partitions)
        ]
        for one, committed in self._group.committed(parts).items():
            if committed is not None or config.auto_offset_reset == "earliest":
                self._ends[one] = log.root.partition(*one).end_offset()

    def done(self) -> bool:
        """Whether nothing is left."""
        while self._ends:
            one = next(iter(self._ends))
            if not self._is_handled(one):
                return False
            del self._ends[one]
        return True

    def _is_handled(self, one: TopicPartition) -> bool:
        try:
            log = self._root.partition(*one)
            committed = self._group.committed([one])[one]
        except UnknownTopicOrPartitionError:
            return True  # deleted
        at = log.start_offset() if committed is None else committed.position.offset
        # It may have been cut meanwhile.
        return max(at, log.start_offset()) >= min(self._ends[one], log.end_offset())


class WorkerProcess(NamedTuple):
    """One process, and what it says when it fails."""

    number: int
    process: Any
    pipe: Connection
    """Closed once it said something, or ended."""


class GroupRun:
    """Processes that handle records until they are stopped; made by `run_group`.

    Any thread may use it.  Leaving its ``with`` block stops it.
    """

    def __init__(
        self, job: GroupJob, context: BaseContext, restarts: int, left: UncommittedRecords | None
    ) -> None:
        self._job, self._context, self._left = job, context, left
        self._restarts = restarts
        self._running: list[WorkerProcess] = []
        self._error: BaseException | None = None
        self._stop_by = inf
        """When a process that still runs is killed; endless while nobody asked to stop."""
        self._bell, self._ring = context.Pipe(duplex=False)
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="embedlog-run", daemon=True)

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [each.process.pid for each in list(self._running)]

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended.is_set()

    # Ending

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, and tell whether it came; Ctrl-C and SIGTERM stop the run first.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            Exception: What a handler raised, caused by its traceback in words.
            ProcessDiedError: Processes were killed too often.
        """
        with SigtermHandler(self):
            try:
                ended = self._ended.wait(timeout)
            except BaseException:
                self._finish(STOP_SECONDS)
                raise
        if ended:
            self._raise()
        return ended

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Let each process end with the record in hand, commit and leave; wait for them.

        Args:
            timeout: Seconds, after which a process is killed: its records come again.

        Raises:
            Exception: As `wait`.
        """
        self._finish(timeout)
        self._raise()

    def close(self) -> None:
        """As `stop`, but say nothing of errors that were raised before, or by others."""
        if os.getpid() == self._job.parent:
            self._finish(STOP_SECONDS)

    def _finish(self, timeout: float) -> None:
        self._ask(timeout)
        self._ended.wait()

    def _ask(self, timeout: float) -> None:
        self._stop_by = min(self._stop_by, monotonic() + timeout)
        if not self._ended.is_set():
            self._ring.send_bytes(b".")

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.close()  # the error that is on its way counts

    def __reduce__(self) -> tuple[Any, ...]:
        raise IllegalStateError("a run belongs to the process that started it")

    def __repr__(self) -> str:
        told = f"processes {', '.join(map(str, self.pids))}" if self.running else "ended"
        return f"<GroupRun of {', '.join(self._job.topics)}: {told}>"

    # The thread that watches over the processes

    def _start(self, count: int) -> None:
        try:
            for number in range(count):
                self._begin(number)
        except BaseException:
            self._kill(self._running)
            raise
        self._watcher.start()

    def _begin(self, number: int) -> None:
        name = f"embedlog-{self._job.config.group_id}-{number}"
        # One at a time: another run's process must not inherit this one's end of the pipe,
        # or it would not be seen to end.
        with _starting:
            pipe, end = self._context.Pipe(duplex=False)
            process = self._context.Process(  # type: ignore[attr-defined]
                target=work, args=(self._job.numbered(number), end), name=name
            )
            # A signal waits until the new process knows what to do about it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                end.close()
        self._running.append(WorkerProcess(number, process, pipe))

    def _watch(self) -> None:
        try:
            while self._running and self._stop_by == inf:
                self._turn()
            self._end_all()
        except BaseException as error:  # noqa: BLE001 - kept, and raised by `wait`
            self._error = self._error or error
            self._kill(self._running)
        finally:
            self._ended.set()

    def _turn(self) -> None:
        """Sleep until something happens, and see to it."""
        told = [each.pipe for each in self._running]
        ready = wait([self._bell, *told], LOOK_SECONDS if self._left is None else CHECK_SECONDS)
        for each in list(self._running):
            # A pipe ends with its process, if that left it to no child of its own.
            if each.pipe in ready or not each.process.is_alive():
                self._see(each)
        if self._left is not None and self._left.done():
            self._stop_by = min(self._stop_by, monotonic() + STOP_SECONDS)

    def _see(self, each: WorkerProcess) -> None:
        if self._hear(each):
            # It is a member still: it leaves last, so that no other gets that record.
            self._stop_by = monotonic() + STOP_SECONDS
            return
        each.process.join()
        code = each.process.exitcode
        self._running.remove(each)
        if code == 0 or self._stop_by < inf:
            return  # it was asked to end, by somebody else perhaps
        if self._restarts <= 0:
            self._error = self._error or _died(code, each.process.pid, self._job)
            self._stop_by = monotonic() + STOP_SECONDS
            return
        self._restarts -= 1
        _log.warning("%s ended with %s; starting another", each.process.name, code)
        self._begin(each.number)

    def _hear(self, each: WorkerProcess) -> bool:
        """Keep the error that a process tells of; False if it ended without a word."""
        try:
            failure: WorkerFailure = each.pipe.recv()
        except (EOFError, OSError):
            return False
        finally:
            each.pipe.close()
        self._error = self._error or failure.error()
        return True

    def _end_all(self) -> None:
        """Ask all to end: first those that did not fail, then whoever waits for that."""
        failed = [each for each in self._running if each.pipe.closed]
        for some in ([each for each in self._running if each not in failed], failed):
            for each in some:
                each.process.terminate()
            while alive := [each for each in some if each.process.is_alive()]:
                left = self._stop_by - monotonic()
                if left <= 0:
                    break
                self._listen(alive, min(left, CHECK_SECONDS))
            self._kill(some)
        self._running.clear()

    def _listen(self, some: list[WorkerProcess], seconds: float) -> None:
        """Wait for one of these to end; a handler may have failed just now."""
        pipes = {each.pipe: each for each in some if not each.pipe.closed}
        for pipe in wait([*pipes, *(each.process.sentinel for each in some)], seconds):
            if pipe in pipes:
                self._hear(pipes[pipe])

    def _kill(self, some: Iterable[WorkerProcess]) -> None:
        for each in some:
            if each.process.is_alive():
                _log.warning("%s did not end; killing it", each.process.name)
                each.process.kill()
            each.process.join()


def _died(code: int, pid: int, job: GroupJob) -> ProcessDiedError:
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    return ProcessDiedError(
        f"process {pid} ended by {how}, as others did before",
        group=job.config.group_id,
        todo="start the run again: it goes on from what was committed",
    )


class SigtermHandler:
    """Has SIGTERM stop a run before it ends this process, if nobody else sees to that."""

    def __init__(self, run: GroupRun) -> None:
        self._run = run
        self._installed = self._came = False

    def _terminate(self, _signal: int, _frame: FrameType | None) -> None:
        self._came = True
        self._run._ask(STOP_SECONDS)

    def __enter__(self) -> None:
        ours = threading.current_thread() is threading.main_thread()
        if ours and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)
            self._installed = True

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._came:
            signal.raise_signal(signal.SIGTERM)
