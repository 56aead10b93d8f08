"""Calls a function for the records of topics in several processes, as one consumer group.

The parent keeps no state about records: the committed offsets say which ones were handled.
So if a process is killed, another one continues from there, and the run can be repeated.
"""

from __future__ import annotations

import atexit
import linecache
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self, Unpack, overload

from embedlog.api.group_worker import SIGNALS, GroupJob, receive_error, work
from embedlog.api.log import Log
from embedlog.callbacks import check_callback
from embedlog.config import ConsumerConfig, GroupConfig
from embedlog.consumer.arguments import explicitly_enabled
from embedlog.consumer.open_group import open_group
from embedlog.dead_letter_queue import ensure_topic
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
from embedlog.retry import OnError, Retry, check_on_error
from embedlog.workers.handling import Handling

if TYPE_CHECKING:
    from datetime import datetime

    from embedlog.config.options import RunGroupOptions

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
    concurrency: int = 1,
    on_error: OnError = "stop",
    batch: Literal[False] = False,
    outputs: bool = False,
    initializer: Callable[[], object] | None = None,
    delay: float = 0.0,
    not_before: Callable[[Record[K, V]], datetime | float | None] | None = None,
    until: Literal["end"] | None = None,
    restarts: int = 3,
    restart_window: float = 300.0,
    start_method: StartMethod | None = None,
    **config: Unpack[RunGroupOptions[K, V]],
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
    initializer: Callable[[], object] | None = None,
    until: Literal["end"] | None = None,
    restarts: int = 3,
    restart_window: float = 300.0,
    start_method: StartMethod | None = None,
    **config: Unpack[RunGroupOptions[K, V]],
) -> GroupRun: ...
def run_group(
    log: Log,
    topics: str | Iterable[str],
    group_id: str,
    handler: Callable[[Any], object],
    *,
    processes: int = 2,
    concurrency: int = 1,
    on_error: OnError = "stop",
    batch: bool = False,
    outputs: bool = False,
    initializer: Callable[[], object] | None = None,
    delay: float = 0.0,
    not_before: Callable[[Record[K, V]], datetime | float | None] | None = None,
    until: Literal["end"] | None = None,
    restarts: int = 3,
    restart_window: float = 300.0,
    start_method: StartMethod | None = None,
    **config: Unpack[RunGroupOptions[K, V]],
) -> GroupRun:
    """Call a function for every record of topics, in several processes that share them.

    Each record is handled at least once: its offset is committed only after the handler
    returned.  If the handler sends records elsewhere, it must wait for their futures.  By default
    a handler that raises ends the run, without a commit of its record; so does a process that
    ends unexpectedly after ``restarts`` others.

    With ``outputs`` the handler returns records, which are sent exactly once: together with the
    offsets of those that it was called for, in one transaction.  What it does besides may happen
    again.

    With ``on_error``, ``concurrency``, ``delay``, ``not_before`` or an async handler, the handler
    is called in other threads than the main one, records of different keys in any order, and those
    of one key one after another.  The offset that is committed is that of the first record that is
    not finished.

    Returns immediately.  The run ends with `GroupRun.wait`, `GroupRun.stop`, its ``with`` block,
    `Log.close`, or the end of this process, whatever its cause.

    Args:
        log: The log; the processes open it again, with the same path and options.
        topics: The topics.
        group_id: The consumer group; records before its committed offsets are not handled.
        handler: Called with a `Record`, or with a list of them.  An ``async def`` function is
            awaited, on an event loop of its process.
        processes: The number of processes.
        concurrency: How many records a process handles at once: the number of its threads, or of
            tasks for an async handler.
        on_error: What becomes of a record whose handler raises, or that cannot be deserialized:
            ``"stop"`` ends the run, ``"skip"`` logs a warning and goes on, and an
            `embedlog.Retry` has it handled again, and then puts it into a topic of dead letters.
        batch: Pass lists to the handler, with records of one partition in their order.
        outputs: The handler returns or yields tuples, or returns None: topic, value, key and so
            on, as `Producer.send` takes them.
        initializer: Called in each process before its first record; for an async handler on its
            event loop, where it may be async too.
        delay: Seconds after its timestamp before which no record is handled.
        not_before: Returns the time before which a record is not handled, as a `datetime` or in
            milliseconds since 1970; None is at once.
        until: ``"end"`` ends the run once every record that exists now was handled.
        restarts: How many processes that ended unexpectedly are replaced within
            ``restart_window``.
        restart_window: Seconds after which a restart does not count any more.
        start_method: A start method of `multiprocessing`.  By default ``"forkserver"`` if the
            program can be imported again and the handler can be pickled, by cloudpickle if that is
            installed; and ``"fork"`` otherwise, as for functions of a notebook.
        config: Settings of the group, see `embedlog.config.GroupConfig`, and of the consumers, see
            `embedlog.Consumer`.  A partition with ``max_poll_records`` records that are not
            committed is not read further.

    Raises:
        InvalidConfigError: A setting is wrong, reserved for `run_group`, or contradicts another
            one.
        InvalidGroupIdError: The group id is not valid.
        UnknownTopicOrPartitionError: There is no such topic.
        IllegalStateError: This process has used Polars and would be forked, or it imports a
            program again that starts a run.
        ValueError, TypeError: An argument is wrong, the handler is a generator, or
            `multiprocessing` cannot start a process.
    """
    handling, settings = _parse(handler, on_error, config)
    handling = handling._replace(
        concurrency=_checked_count("concurrency", concurrency),
        outputs=outputs,
        initializer=initializer,
        delay=delay,
        not_before=not_before,
    )
    _check(handling, batch)
    _checked_count("processes", processes)
    check_group_id(group_id)
    parsed = _consumer_config(handling, group_id, settings)
    if until not in (None, "end"):
        raise ValueError(f"until must be 'end' or None, got {until!r}")
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    creates = explicitly_enabled(settings, "allow_auto_create_topics")
    for name in names:
        # Otherwise the group would wait for a misspelt one.
        (log.root.ensure_topic if creates else log.root.topic)(name)
    if handling.dead_letter is not None:
        ensure_topic(log.root, handling.config, names)
    backlog = None if until is None else UncommittedRecords(log, names, parsed)
    reopen, arguments = log.__reduce__()
    job = GroupJob(partial(reopen, *arguments), names, parsed, handling, batch, os.getpid())
    method, pickled = (start_method, job) if start_method else _chosen_start_method(job)
    _check_forkable(method, chosen=start_method is None)
    context = multiprocessing.get_context(method)
    run = GroupRun(job, pickled, context, restarts, restart_window, backlog)
    run._start(processes)
    # Closing the log ends the run, and so does the exit of this process.
    log._children.add(run)
    _runs.add(run)
    return run


def _parse(
    handler: Callable[[Any], object], on_error: OnError, config: Mapping[str, Any]
) -> tuple[Handling, dict[str, Any]]:
    """Return what becomes of records that fail, and the settings that are of the consumers.

    Raises:
        InvalidConfigError: A setting is wrong, reserved, or contradicts another one.
    """
    check_on_error(on_error)
    settings = {name.replace(".", "_"): value for name, value in config.items()}
    for name in set(_RESERVED) & settings.keys():
        raise InvalidConfigError(f"run_group sets {name} itself", setting=name)
    names = GroupConfig.__settings__.keys() & settings.keys()
    group = GroupConfig.parse({name: settings.pop(name) for name in names})
    topic = group.errors_deadletterqueue_topic_name
    if isinstance(on_error, Retry):
        if topic is not None and on_error.dead_letter not in (None, topic):
            raise InvalidConfigError(
                f"The topic of dead letters is {on_error.dead_letter!r} in Retry, and {topic!r} in "
                "errors.deadletterqueue.topic.name",
                setting="errors_deadletterqueue_topic_name",
            )
        group = group.changed({"errors.deadletterqueue.topic.name": on_error.dead_letter or topic})
    elif topic is not None:
        raise InvalidConfigError(
            f"With on_error={on_error!r} there are no dead letters",
            todo="Pass on_error=embedlog.Retry(...).",
            setting="errors_deadletterqueue_topic_name",
        )
    return Handling(handler, on_error, config=group), settings


def _check(handling: Handling, batch: bool) -> None:
    """Check the functions of a program, and where they are called.

    Raises:
        TypeError: A call does not run a function.
        InvalidConfigError: A list of records cannot be handled so.
        IllegalStateError: A new process imports its program again.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise IllegalStateError(
            "This process imports its program again, which starts a run",
            todo="Start it under `if __name__ == '__main__':`, or pass start_method='fork'.",
        )
    check_callback(handling.handler, "handler", iterated=handling.outputs, awaited=not batch)
    if handling.initializer is not None:
        check_callback(handling.initializer, "initializer", awaited=handling.is_async)
    if handling.not_before is not None:
        check_callback(handling.not_before, "not_before")
    if isinstance(handling.delay, bool) or not isinstance(handling.delay, int | float):
        raise TypeError(f"delay must be seconds, got {handling.delay!r}")
    if batch and not handling.is_plain:
        raise InvalidConfigError(
            "With batch=True nobody knows which record of a list failed, or has to wait",
            todo="Leave on_error, concurrency, delay and not_before out, or batch.",
            setting="batch",
        )


def _consumer_config(
    handling: Handling, group_id: str, settings: Mapping[str, Any]
) -> ConsumerConfig:
    """Return the settings of the consumers."""
    # Each poll commits what the polls before it returned.
    settings = {"auto_commit_interval_ms": 0, **settings, "group_id": group_id}
    if handling.outputs or not handling.is_plain:
        settings["enable_auto_commit"] = False
    if not handling.is_plain:
        # A rebalance then interrupts only what moves.
        settings.setdefault("partition_assignment_strategy", ("cooperative-sticky", "range"))
    return ConsumerConfig.parse(settings)


def _checked_count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    return value


def _chosen_start_method(job: GroupJob) -> tuple[StartMethod, GroupJob | bytes]:
    """Return how processes are started, and the job, as bytes if only cloudpickle pickles it."""
    main, handling = sys.modules["__main__"], job.handling
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    # As multiprocessing decides: `python -m package` is not imported again, nor is a notebook.
    is_imported = path is not None and not (spec and spec.name.endswith("__main__"))
    guard = _line_of_guard(path) if path is not None and is_imported else None
    if is_imported and guard is None:
        return "fork", job  # The program would start the run again where it is imported.
    functions = handling.handler, handling.initializer, handling.not_before
    if not any(_is_hidden(function, guard) for function in functions):
        with suppress(Exception):
            ForkingPickler.dumps(job)
            return "forkserver", job
    # Functions of a notebook, and those within functions, can only be pickled by value.
    with suppress(Exception):
        import cloudpickle  # type: ignore[import-untyped]

        return "forkserver", cloudpickle.dumps(job)
    return "fork", job


def _line_of_guard(path: str) -> int | None:
    """Return where a program begins to do what it does only as the main module; None if nowhere."""
    guard = re.compile(r"if\b(?=.*\b__name__\b).*__main__")
    lines = enumerate(linecache.getlines(path), 1)
    return next((number for number, line in lines if guard.match(line)), None)


def _is_hidden(function: Any, guard: int | None) -> bool:
    """Whether a function is of the main module, and not there where that is imported, if it is."""
    function = getattr(function, "func", function)  # of a partial
    if getattr(function, "__module__", None) != "__main__":
        return False
    code = getattr(function, "__code__", None)
    return guard is None or (code is not None and code.co_firstlineno > guard)


def _check_forkable(method: StartMethod, *, chosen: bool) -> None:
    """Raise, or warn if the program wants to fork, where a handler that uses Polars would hang.

    Raises:
        IllegalStateError: This process has used Polars, whose threads no forked child has.
    """
    if method != "fork" or "polars-0" not in thread_names():
        return
    what = "This process has used Polars, so a handler that uses Polars hangs in a forked process"
    if not chosen:
        _log.warning("%s", what)
        return
    raise IllegalStateError(
        what,
        todo="If the handler does not use Polars, pass start_method='fork'. Otherwise install "
        "cloudpickle, or define it in a module, and start the run under "
        "`if __name__ == '__main__':`.",
    )


def _forget_fork_server() -> None:
    """Let a forked child start a fork server of its own: it cannot wait for that of its parent."""
    module = sys.modules.get("multiprocessing.forkserver")
    if module is not None:
        vars(module)["_forkserver"].__init__()


os.register_at_fork(after_in_child=_forget_fork_server)


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
        pickled: GroupJob | bytes,
        context: BaseContext,
        restarts: int,
        restart_window: float,
        backlog: UncommittedRecords | None,
    ) -> None:
        self._job, self._context, self._backlog = job, context, backlog
        self._pickled = pickled
        """What the processes get."""
        self._restarts, self._restart_window = restarts, restart_window
        self._restarted_at: deque[float] = deque()
        """When processes were replaced within the window."""
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
                target=work, args=(self._pickled, number, end), name=name
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
        now, restarted_at = monotonic(), self._restarted_at
        while restarted_at and now - restarted_at[0] > self._restart_window:
            restarted_at.popleft()
        if len(restarted_at) < self._restarts:
            restarted_at.append(now)
            left = self._restarts - len(restarted_at)
            _log.warning(
                "Process %d of group %s ended with %s; starting another one; %s left within %.0f s",
                *(process.pid, group, cause, plural(left, "restart"), self._restart_window),
            )
            self._start_worker(worker.number)
            return
        self._kill_at = monotonic() + STOP_SECONDS
        self._error = self._error or ProcessDiedError(
            f"Process {process.pid} ended with {cause}, and no restarts are left within "
            f"{self._restart_window:.0f} s",
            group=group,
            todo="Start the run again: it continues from the committed offsets. "
            "A larger number of restarts, or a shorter restart_window, lets it go on for longer.",
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
