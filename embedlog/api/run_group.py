"""Calls a function for the records of topics in several processes, as one consumer group.

The parent keeps no state about records: the committed offsets say which ones were handled.
So if a process is killed, another one continues from there, and the run can be repeated.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self, Unpack, overload

from embedlog.api.group_worker import SIGNALS, GroupJob, receive_error, work
from embedlog.api.log import Log
from embedlog.callbacks import check_callback
from embedlog.config import ConsumerConfig
from embedlog.consumer.open_group import open_group
from embedlog.display import plural, public_names
from embedlog.errors import (
    IllegalStateError,
    InvalidConfigError,
    ProcessDiedError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import thread_names
from embedlog.forks import new_lock
from embedlog.groups.offsets import check_group_id
from embedlog.record import K, Record, TopicPartition, V

if TYPE_CHECKING:
    from embedlog.config.options import GroupOptions

CHECK_SECONDS = 0.05
"""How often to check whether everything was handled, with ``until="end"``."""
STOP_SECONDS = 30.0
"""How long a handler may continue after a stop before its process is killed."""
POLL_SECONDS = 1.0
"""How often to check whether processes that reported nothing are still alive."""
StartMethod = Literal["fork", "spawn", "forkserver"]
"""Of `multiprocessing`."""
_RESERVED = ("group_id", "enable_auto_commit", "consumer_timeout_ms")

_log = logging.getLogger("embedlog.api")
_start_lock = new_lock()
_runs: weakref.WeakSet[GroupRun] = weakref.WeakSet()


@overload
def run_group(
    log: Log,
    topics: str | Iterable[str],
    group_id: str,
    handler: Callable[[Record[K, V]], object],
    *,
    processes: int = 2,
    batch: Literal[False] = False,
    outputs: bool = False,
    until: Literal["end"] | None = None,
    restarts: int = 3,
    start_method: StartMethod | None = None,
    **config: Unpack[GroupOptions[K, V]],
) -> GroupRun: ...
@overload
def run_group(
    log: Log,
    topics: str | Iterable[str],
    group_id: str,
    handler: Callable[[list[Record[K, V]]], object],
    *,
    processes: int = 2,
    batch: Literal[True],
    outputs: bool = False,
    until: Literal["end"] | None = None,
    restarts: int = 3,
    start_method: StartMethod | None = None,
    **config: Unpack[GroupOptions[K, V]],
) -> GroupRun: ...
def run_group(
    log: Log,
    topics: str | Iterable[str],
    group_id: str,
    handler: Callable[[Any], object],
    *,
    processes: int = 2,
    batch: bool = False,
    outputs: bool = False,
    until: Literal["end"] | None = None,
    restarts: int = 3,
    start_method: StartMethod | None = None,
    **config: Unpack[GroupOptions[K, V]],
) -> GroupRun:
    """Call a function for every record of topics, in several processes that share them.

    Each record is handled at least once: its offset is committed only after the handler
    returned.  If the handler sends records elsewhere, it must wait for their futures.  A
    handler that raises ends the run, without a commit of its record; so does a process that
    ends unexpectedly after ``restarts`` others.

    With ``outputs`` the handler returns records, which are sent exactly once: together with the
    offsets of those that it was called for, in a transaction for each poll.  What it does
    besides may happen again.

    Returns immediately.  The run ends with `GroupRun.wait`, `GroupRun.stop`, its ``with`` block,
    `Log.close`, or the end of this process, whatever its cause.

    Args:
        log: The log; the processes open it again, with the same path and options.
        topics: The topics.
        group_id: The consumer group; records before its committed offsets are not handled.
        handler: Called with a `Record`, or with a list of them.
        processes: The number of processes.
        batch: Pass lists to the handler, with records of one partition in their order.
        outputs: The handler returns or yields tuples, or returns None: topic, value, key and so
            on, as `Producer.send` takes them.
        until: ``"end"`` ends the run once every record that exists now was handled.
        restarts: How many processes that ended unexpectedly are replaced, in total.
        start_method: A start method of `multiprocessing`.  With ``"fork"``, the default, the
            handler can be any function, also one of a notebook; otherwise it must pickle.
        config: Settings of the consumers; see `embedlog.Consumer`.  At most
            ``max_poll_records`` records are handled between two commits.

    Raises:
        InvalidConfigError: A setting is wrong, or reserved for `run_group`.
        InvalidGroupIdError: The group id is not valid.
        UnknownTopicOrPartitionError: With ``until="end"``: there is no such topic.
        IllegalStateError: This process has used Polars, and ``start_method`` is not given.
        ValueError, TypeError: An argument is wrong, the handler is async or a generator, or
            `multiprocessing` cannot start a process.
    """
    settings = {name.replace(".", "_"): value for name, value in config.items()}
    for name in set(_RESERVED) & settings.keys():
        raise InvalidConfigError(f"run_group sets {name} itself", setting=name)
    check_group_id(group_id)
    # Each poll commits what the polls before it returned.
    settings = {"auto_commit_interval_ms": 0, **settings, "group_id": group_id}
    if outputs:
        settings["enable_auto_commit"] = False
    parsed = ConsumerConfig.parse(settings)
    check_callback(handler, "handler", iterated=outputs)
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"processes must be an int of at least 1, got {processes!r}")
    if until not in (None, "end"):
        raise ValueError(f"until must be 'end' or None, got {until!r}")
    backlog = None if until is None else UncommittedRecords(log, names, parsed)
    if start_method is None:
        start_method = "fork"
        _check_forkable()
    context = multiprocessing.get_context(start_method)
    reopen, arguments = log.__reduce__()
    how = batch, os.getpid(), outputs
    job = GroupJob(partial(reopen, *arguments), names, parsed, handler, *how)
    run = GroupRun(job, context, restarts, backlog)
    run._start(processes)
    # Closing the log ends the run, and so does the exit of this process.
    log._children.add(run)
    _runs.add(run)
    return run


def _check_forkable() -> None:
    """Raise if a handler that uses Polars would hang.

    Raises:
        IllegalStateError: This process has used Polars, whose threads no forked child has.
    """
    if "polars-0" in thread_names():
        raise IllegalStateError(
            "This process has used Polars, so a handler that uses Polars would hang in a forked "
            "process",
            todo="If the handler does not use Polars, pass start_method='fork'. Otherwise define "
            "it in a module, pass start_method='forkserver', and start the run under "
            "`if __name__ == '__main__':`.",
        )


@atexit.register
def _close_all() -> None:
    # Runs before multiprocessing waits for the processes at exit: nothing else ends them.
    for run in list(_runs):
        run.close()


class UncommittedRecords:
    """The records that exist now and that a group has not committed yet.

    Args:
        log: The log.
        topics: The names of the topics.
        config: Of the consumers: with ``auto_offset_reset="latest"``, partitions without a
            commit have nothing to handle.
    """

    def __init__(self, log: Log, topics: Iterable[str], config: ConsumerConfig) -> None:
        assert config.group_id is not None
        self._root, self._group = log.root, open_group(log.root, config.group_id)
        self._ends: dict[TopicPartition, int] = {}
        partitions = [
            TopicPartition(name, number)
            for name in topics
            for number in range(log.root.topic(name).partitions)
        ]
        for partition, committed in self._group.committed(partitions).items():
            if committed is not None or config.auto_offset_reset == "earliest":
                self._ends[partition] = log.root.partition(*partition).end_offset()

    def done(self) -> bool:
        """Whether everything was committed, apart from topics that were deleted."""
        while self._ends:
            partition, end = next(iter(self._ends.items()))
            with suppress(UnknownTopicOrPartitionError):
                log = self._root.partition(*partition)
                committed = self._group.committed([partition])[partition]
                position = 0 if committed is None else committed.position.offset
                # The log may have been truncated, or its start moved, meanwhile.
                if max(position, log.start_offset()) < min(end, log.end_offset()):
                    return False
            del self._ends[partition]
        return True


class WorkerProcess(NamedTuple):
    """One process of a run."""

    number: int
    process: Any
    pipe: Connection
    """Carries the error if the process fails; closed after that, or after its end."""


class GroupRun:
    """Processes that handle records until they are stopped; returned by `run_group`.

    Any thread may use it.  Leaving its ``with`` block stops it.
    """

    def __init__(
        self,
        job: GroupJob,
        context: BaseContext,
        restarts: int,
        backlog: UncommittedRecords | None,
    ) -> None:
        self._job, self._context, self._backlog = job, context, backlog
        self._restarts_left = restarts
        self._workers: list[WorkerProcess] = []
        self._error: BaseException | None = None
        self._kill_at = inf
        """When processes that still run are killed; infinite until a stop is requested."""
        self._wakeup_receiver, self._wakeup_sender = context.Pipe(duplex=False)
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="embedlog-run", daemon=True)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run now."""
        return [worker.process.pid for worker in list(self._workers)]

    @property
    def running(self) -> bool:
        """Whether the run has not ended yet."""
        return not self._ended.is_set()

    # Stop

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the run, and return whether it has ended.

        Ctrl-C and SIGTERM stop the run first.

        Args:
            timeout: Seconds; None waits without a limit.

        Raises:
            Exception: The error of a handler; its ``__cause__`` is the traceback, as text.
            ProcessDiedError: Too many processes ended unexpectedly.
        """
        with self._stop_on_sigterm():
            try:
                ended = self._ended.wait(timeout)
            except BaseException:
                self._finish(STOP_SECONDS)
                raise
        if ended:
            self._raise()
        return ended

    @contextmanager
    def _stop_on_sigterm(self) -> Iterator[None]:
        """Let SIGTERM stop the run before this process, unless the program handles SIGTERM."""
        received = False

        def stop(*_: object) -> None:
            nonlocal received
            received = True
            self._request_stop(STOP_SECONDS)

        is_main = threading.current_thread() is threading.main_thread()
        replaced = is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if replaced:
            signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            if replaced:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if received:
                signal.raise_signal(signal.SIGTERM)

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Let each process finish its current record, commit and leave the group; wait for that.

        Args:
            timeout: Seconds after which a process is killed; its records are handled again.

        Raises:
            Exception: As `wait`.
        """
        self._finish(timeout)
        self._raise()

    def close(self) -> None:
        """Stop the run, without raising the errors of handlers."""
        if os.getpid() == self._job.parent:
            self._finish(STOP_SECONDS)

    def _finish(self, timeout: float) -> None:
        self._request_stop(timeout)
        self._ended.wait()

    def _request_stop(self, timeout: float) -> None:
        self._kill_at = min(self._kill_at, monotonic() + timeout)
        if not self._ended.is_set():
            self._wakeup_sender.send_bytes(b".")

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
            self.close()  # The exception of the block is the one to raise.

    def __reduce__(self) -> NoReturn:
        raise IllegalStateError("A GroupRun cannot be pickled: it belongs to its process")

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)

    def __repr__(self) -> str:
        state = f"processes {', '.join(map(str, self.pids))}" if self.running else "ended"
        return f"<GroupRun of {', '.join(self._job.topics)}: {state}>"

    # The thread that watches the processes

    def _start(self, count: int) -> None:
        try:
            for number in range(count):
                self._start_worker(number)
            self._watcher.start()
        except BaseException:
            self._kill(self._workers)
            raise

    def _start_worker(self, number: int) -> None:
        name = f"embedlog-{self._job.config.group_id}-{number}"
        # One at a time: if another process inherited this one's end of the pipe, the pipe
        # would stay open after the end of this one.
        with _start_lock:
            pipe, end = self._context.Pipe(duplex=False)
            process = self._context.Process(  # type: ignore[attr-defined]
                target=work, args=(self._job.for_process(number), end), name=name
            )
            # Signals wait until the new process has its handlers.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                end.close()
        self._workers.append(WorkerProcess(number, process, pipe))

    def _watch(self) -> None:
        try:
            while self._workers and self._kill_at == inf:
                self._wait_for_events()
            self._stop_workers()
        except BaseException as error:  # noqa: BLE001 - kept, and raised by `wait`
            self._error = self._error or error
            self._kill(self._workers)
        finally:
            self._ended.set()

    def _wait_for_events(self) -> None:
        """Wait for a stop, a failure or the end of a process, and handle it."""
        pipes = [worker.pipe for worker in self._workers]
        seconds = POLL_SECONDS if self._backlog is None else CHECK_SECONDS
        ready = wait([self._wakeup_receiver, *pipes], seconds)
        for worker in list(self._workers):
            # A pipe ends with its process, unless a child of the process has inherited it.
            if worker.pipe in ready or not worker.process.is_alive():
                self._handle_event(worker)
        if self._backlog is not None and self._backlog.done():
            self._kill_at = min(self._kill_at, monotonic() + STOP_SECONDS)

    def _handle_event(self, worker: WorkerProcess) -> None:
        if self._receive_error(worker):
            # It stays a member and leaves last, so that no other process gets its record.
            self._kill_at = monotonic() + STOP_SECONDS
            return
        process = worker.process
        process.join()
        self._workers.remove(worker)
        code = process.exitcode
        if code == 0 or self._kill_at < inf:
            return  # It ended after a signal, perhaps from another program.
        group = self._job.config.group_id
        signals = {-number: number.name for number in signal.Signals}  # not the real-time ones
        cause = signals.get(code) or f"exit code {code}"
        if self._restarts_left > 0:
            self._restarts_left -= 1
            _log.warning(
                "Process %d of group %s ended with %s; starting another one; %s left",
                *(process.pid, group, cause, plural(self._restarts_left, "restart")),
            )
            self._start_worker(worker.number)
            return
        self._kill_at = monotonic() + STOP_SECONDS
        self._error = self._error or ProcessDiedError(
            f"Process {process.pid} ended with {cause}, and no restarts are left",
            group=group,
            todo="Start the run again: it continues from the committed offsets. "
            "Pass a larger number of restarts to a run without end.",
        )

    def _receive_error(self, worker: WorkerProcess) -> bool:
        """Keep the error that a process sends; return False if it ended without one."""
        try:
            error = receive_error(worker.pipe)
        except (EOFError, OSError):
            return False
        finally:
            worker.pipe.close()
        _log.error(
            "Group %s ends, because process %d failed: %s",
            *(self._job.config.group_id, worker.process.pid, error),
            exc_info=error,
        )
        self._error = self._error or error
        return True

    def _stop_workers(self) -> None:
        """Stop all processes: first those that did not fail, then those that wait for that."""
        failed = [worker for worker in self._workers if worker.pipe.closed]
        for workers in ([worker for worker in self._workers if worker not in failed], failed):
            for worker in workers:
                worker.process.terminate()
            while alive := [worker for worker in workers if worker.process.is_alive()]:
                seconds = self._kill_at - monotonic()
                if seconds <= 0:
                    break
                self._wait_for_end(alive, min(seconds, CHECK_SECONDS))
            self._kill(workers)
        self._workers.clear()

    def _wait_for_end(self, workers: list[WorkerProcess], seconds: float) -> None:
        """Wait for the end of one of these; its handler may have failed just now."""
        pipes = {worker.pipe: worker for worker in workers if not worker.pipe.closed}
        for pipe in wait([*pipes, *(worker.process.sentinel for worker in workers)], seconds):
            if pipe in pipes:
                self._receive_error(pipes[pipe])

    def _kill(self, workers: Iterable[WorkerProcess]) -> None:
        for worker in workers:
            if worker.process.is_alive():
                _log.warning("%s did not end in time; killing it", worker.process.name)
                worker.process.kill()
            worker.process.join()
