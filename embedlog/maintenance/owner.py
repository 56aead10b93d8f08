"""Decides which process does the maintenance of a log, and runs its threads.

One of all attached processes is the owner: it holds the lock ``locks/maintenance``, and
its *epoch* is in `live`.  The lock is free as soon as the owner dies, and a thread of each
other process waits for that.  A process that was stopped keeps the lock, but must renew a
deadline, by a clock that also advances while the machine sleeps: after the deadline another
process raises the epoch.  Every transaction that deletes checks the epoch, so a former
owner that continues deletes nothing.

A job that fails is tried again, after pauses that grow (`Failures`); its thread does not end.
If a thread ends nevertheless, or could not be started, the process gives up being the owner and
lets another one take over.

The time when a job was last done is in `live` too, so that processes that end after a few
seconds do not run each job again.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic

from embedlog import kv
from embedlog.display import public_names
from embedlog.errors import ClosedError, EmbedlogError, FencedError
from embedlog.failures import Failures
from embedlog.files import ProcessWatch
from embedlog.keyspace import JOB_RUNS
from embedlog.lazy import logging
from embedlog.maintenance import activity
from embedlog.maintenance.jobs import (
    JOBS,
    OWNER,
    JobContext,
    MaintenanceJob,
    MaintenanceOwner,
    owner_in,
)
from embedlog.partition.state import CLOCK_READING, ClockReading, last_reading
from embedlog.root.root import Root

SESSION_MS = 15_000
"""An owner without a heartbeat for so long is replaced."""
HEARTBEAT_SECONDS = 3.0
"""The interval of the owner's heartbeats, and of the checks of other processes."""
LOCK_SECONDS = 1.0
"""How long the threads wait for the lock of a partition: the next round tries again."""
_RETRY_SECONDS = 0.01
"""The death of a process is reported a moment before its locks are free."""
_MAX_BLIND_TRIES = 100
"""Tries while the owner's process is not found; after them, it counts as one that is not
visible from here, as in another container."""
_FIRST_SECONDS = 1.0
"""The thread waits this long first, so that a short program does no maintenance."""
_LONGEST_PAUSE = 60.0
"""A job that fails is tried again at least as often as this, or as it is due."""
_FORK_SECONDS = 1.0
_MAX_TRIES = 3

_LOCK = "locks/maintenance"
_log = logging.getLogger("embedlog.maintenance")
_instances: weakref.WeakSet[Maintenance] = weakref.WeakSet()


class Maintenance:
    """What one process does for the maintenance of one log.

    Args:
        root: The open log.
        jobs: The jobs.
        bound_clock: Whether to bound jumps of the root's clock; not for a clock that the
            program passed.
        background: Whether this process may become the owner; if not, only `maintain` runs jobs.
        session_ms: How long the owner may be without a heartbeat.
    """

    def __init__(
        self,
        root: Root,
        jobs: Sequence[MaintenanceJob] = JOBS,
        *,
        bound_clock: bool = False,
        background: bool = True,
        session_ms: int = SESSION_MS,
    ) -> None:
        self.root, self.jobs, self.session_ms = root, tuple(jobs), session_ms
        self.background = background and root.mode == "rw"
        self._bound_clock = bound_clock
        self.failures = Failures(_log)
        """What failed in the last run of a job, or in the last heartbeat; it is tried again."""
        self._closed = False
        self._reset()
        _instances.add(self)

    def _reset(self) -> None:
        """Begin without threads and locks: when new, or in a forked child."""
        self.epoch: int | None = None
        """The epoch of this process as owner; None if it is not the owner."""
        self._lock_fd: int | None = None
        self._start_lock = threading.Lock()
        self._owner_lock = threading.Lock()
        """Held while this process becomes the owner, gives that up, or sends a heartbeat."""
        self._thread: threading.Thread | None = None
        self._watch: ProcessWatch | None = None
        self._workers: list[MaintenanceThread] = []
        self._blind_tries = 0
        self._running = {job.name: threading.Semaphore(job.threads) for job in self.jobs}

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self, "background", "epoch", "failures", "jobs", "root", "session_ms")

    def __repr__(self) -> str:
        state = "not the owner" if self.epoch is None else f"the owner, in epoch {self.epoch}"
        names = ", ".join(job.name for job in self.jobs)
        return f"<Maintenance of {self.root.path}: {'closed' if self._closed else state}; {names}>"

    # Start and stop

    def start(self) -> None:
        """Start the thread unless it runs already; it does nothing in its first second."""
        if self._is_running() or not self.background or self._closed:
            return
        with self._start_lock:
            if not self._is_running() and not self._closed:
                try:
                    self._watch = ProcessWatch()
                    thread = threading.Thread(
                        target=self._run, name="embedlog-maintenance", daemon=True
                    )
                    thread.start()
                    self._thread = thread
                except (OSError, RuntimeError) as error:
                    # A program that only reads or writes must not fail because there is no
                    # descriptor or thread left; the next use of the log tries again.
                    _log.warning("Cannot start the maintenance of %s: %s", self.root.path, error)

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def request_stop(self) -> None:
        """Let the threads end soon, without waiting: the log is no longer used."""
        self._closed = True
        if self._watch is not None:
            self._watch.ring()

    def close(self) -> None:
        """End the threads and wait for them; a job ends at its next `should_stop`."""
        with self._start_lock:
            self.request_stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # Ownership

    def _run(self) -> None:
        assert self._watch is not None
        watch, wait_seconds = self._watch, _FIRST_SECONDS
        try:
            while not self._closed and not self.root.closed:
                watch.wait(wait_seconds)
                if not self._closed:
                    wait_seconds = self._step()
        finally:
            self._resign(release=True)
            watch.close()

    def _step(self) -> float:
        """Try to become the owner, or send a heartbeat; return how many seconds to wait."""
        if not self._owner_lock.acquire(blocking=False):
            return HEARTBEAT_SECONDS  # `maintain` runs.
        try:
            wait_seconds = self._own()
            missing = [worker.name for worker in self._workers if not worker.is_alive()]
            if self.epoch is None or not missing:
                return wait_seconds
            _log.warning(
                "Process %d gives up the housekeeping of %s: it lacks the threads %s",
                *(os.getpid(), self.root.path, ", ".join(missing)),
            )
            self._resign(release=True)
            return 2 * HEARTBEAT_SECONDS  # The others look once in that time.
        finally:
            self._owner_lock.release()

    @property
    def _work(self) -> str:
        return f"Maintenance of {self.root.path}"

    def _own(self) -> float:
        try:
            if self.epoch is None:
                wait_seconds = self._try_own()
            else:
                wait_seconds = HEARTBEAT_SECONDS
                self._lock()  # A former owner may have released it since.
                self._set_deadline(self.epoch)
        except FencedError as error:
            _log.info("%s", error)
            self._resign(release=False)
        except Exception as error:  # noqa: BLE001 - there is no caller to raise it to
            if not self.root.closed:
                self.failures.note(self._work, error)
        else:
            self.failures.end(self._work)
            return wait_seconds
        return HEARTBEAT_SECONDS

    def _try_own(self) -> float:
        """Become the owner if there is none; otherwise watch for the end of its process."""
        assert self._watch is not None
        before = owner_in(self.root.context.live)
        epoch = self._claim(force=self._lock())
        if epoch is not None:
            self.epoch = epoch
            # An owner that ends by itself moves its deadline to 0.
            former = f" in place of process {before.pid}" if before.deadline_ms else ""
            _log.info(
                "Process %d runs the housekeeping of %s from now on%s",
                *(os.getpid(), self.root.path, former),
            )
            self._watch.watch(())
            self._start_workers(epoch)
            return HEARTBEAT_SECONDS
        owner = owner_in(self.root.context.live)
        self._watch.watch({owner.pid} if owner.pid else ())
        self._blind_tries = self._blind_tries + 1 if self._watch.blind else 0
        if 0 < self._blind_tries <= _MAX_BLIND_TRIES:
            return _RETRY_SECONDS
        seconds_left = (owner.deadline_ms - self._uptime_ms()) / 1000
        return max(min(seconds_left, HEARTBEAT_SECONDS), _RETRY_SECONDS)

    def _lock(self) -> bool:
        files = self.root.context.files
        if self._lock_fd is None:
            self._lock_fd = files.open(_LOCK, write=True, create=True)
        return files.try_lock(self._lock_fd)

    def _unlock(self) -> None:
        if self._lock_fd is not None and not self.root.closed:
            self.root.context.files.unlock(self._lock_fd)

    def _claim(self, *, force: bool) -> int | None:
        """Raise the epoch and return it; without ``force`` only past the deadline, else None."""
        now_ms = self._uptime_ms()

        def step(txn: kv.Txn) -> int | None:
            owner = owner_in(txn)
            if not force and owner.deadline_ms > now_ms:
                return None
            epoch = owner.epoch + 1
            OWNER.put(txn, value=MaintenanceOwner(epoch, now_ms + self.session_ms, os.getpid()))
            return epoch

        # First without a write transaction, since all other processes do this repeatedly.
        if not force and owner_in(self.root.context.live).deadline_ms > now_ms:
            return None
        return self._write(step)

    def _set_deadline(self, epoch: int, deadline_ms: int | None = None) -> None:
        """Move the deadline, by default to `session_ms` from now."""
        if deadline_ms is None:
            deadline_ms = self._uptime_ms() + self.session_ms
        context = JobContext(self.root, epoch, self.root.clock, bool)

        def step(txn: kv.Txn) -> None:
            context.fence(txn)
            OWNER.put(txn, value=MaintenanceOwner(epoch, deadline_ms, os.getpid()))

        self._write(step)

    def _resign(self, *, release: bool) -> None:
        """Stop the workers; with ``release``, let others take over immediately."""
        epoch, self.epoch = self.epoch, None
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            if worker.ident is not None:
                worker.join()
        self._workers = []
        try:
            if epoch is not None and release:
                self._set_deadline(epoch, 0)
        except EmbedlogError:
            pass  # There is a new owner, or the log is closed; the lock shows that too.
        finally:
            self._unlock()
        if epoch is not None:
            _log.info(
                "Process %d no longer runs the housekeeping of %s", os.getpid(), self.root.path
            )

    def _write(self, step: kv.Step[kv.T]) -> kv.T:
        """Run a step on `live`, with the help of the reserve if the disk is full."""
        context = self.root.context
        return context.reserve.used_by(lambda: context.live.write(step))

    def _uptime_ms(self) -> int:
        return self.root.context.files.uptime_ms()

    def _job_clock(self) -> Callable[[], int]:
        context, clock = self.root.context, self.root.clock
        if self._bound_clock:
            clock = BoundedClock(context.live, clock, context.files.uptime_ms)
        return clock

    # Jobs

    def _start_workers(self, epoch: int) -> None:
        clock = self._job_clock()
        self._workers = [
            MaintenanceThread(self, job, epoch, clock)
            for job in self.jobs
            for _ in range(job.threads)
        ]
        if isinstance(clock, BoundedClock):
            # Before the first round, so that a jump meanwhile is noticed.
            clock.begin()
        for worker in self._workers:
            worker.start()

    def due_seconds(self, job: MaintenanceJob) -> float:
        """Return in how many seconds a job is due, whichever process did it last."""
        last_ms = JOB_RUNS.get(self.root.context.live, job.name)
        if last_ms is None:
            # The first interval begins now.
            self._note_done(job)
            return job.every_seconds
        return max(job.every_seconds - (self._uptime_ms() - last_ms) / 1000, _FIRST_SECONDS)

    def _note_done(self, job: MaintenanceJob) -> None:
        if job.every_seconds < HEARTBEAT_SECONDS:
            return  # Not worth it; and an idle log gets no writes.
        now_ms = self._uptime_ms()
        self._write(lambda txn: JOB_RUNS.put(txn, job.name, value=now_ms))

    def run_job(self, job: MaintenanceJob, context: JobContext) -> object:
        """Run a job once; a process runs at most ``job.threads`` of them at the same time."""
        began = monotonic()
        with self._running[job.name]:
            result = self.root.context.reserve.used_by(lambda: job.run(context))
            self._note_done(job)
        _log.debug("Job %s of %s took %.3f s", job.name, self.root.path, monotonic() - began)
        if events := activity.events_of(result):
            context.report(events)
        self.failures.end(self._run_of(job))
        return result

    def _run_of(self, job: MaintenanceJob) -> str:
        return f"Job {job.name} of {self.root.path}"

    def note_failure(self, job: MaintenanceJob, context: JobContext, error: Exception) -> float:
        """Note the error of a job, and report it if it is another one than the last time.

        Returns after how many seconds to try again.
        """
        work = self._run_of(job)
        is_partial = any(error is each for each in self.failures.errors.values())
        if self.failures.note(work, error):
            facts = {"job": job.name, "error": str(error)}
            with suppress(ClosedError):
                context.report([activity.Event("failed", job.name, facts)])
        if is_partial:
            return job.every_seconds  # The rest was done.
        return self.failures.pause_seconds(
            work,
            min(job.every_seconds, _FIRST_SECONDS),
            job.longest_pause or max(job.every_seconds, _LONGEST_PAUSE),
        )

    def maintain(self) -> dict[str, object]:
        """Run every job once, in this thread, and return their results by name.

        If another process is the owner, this one takes over until it is done.

        Raises:
            FencedError: Other processes took over meanwhile, at each of several attempts.
            EmbedlogError: The first error of a job; all other jobs were run.
        """
        self.root.context.check_writable()
        for _ in range(_MAX_TRIES - 1):
            with suppress(FencedError), self._owned() as context:
                return self._run_all(context)
        with self._owned() as context:
            return self._run_all(context)

    def _run_all(self, context: JobContext) -> dict[str, object]:
        failures: list[EmbedlogError] = []
        results: dict[str, object] = {}
        for job in self.jobs:
            try:
                results[job.name] = self.run_job(job, context)
            except (ClosedError, FencedError):
                raise
            except EmbedlogError as error:
                failures.append(error)
                self.note_failure(job, context, error)
        if failures:
            raise failures[0]
        return results

    def _context_of(self, epoch: int, should_stop: Callable[[], bool]) -> JobContext:
        return JobContext(self.root, epoch, self._job_clock(), should_stop, failures=self.failures)

    @contextmanager
    def _owned(self) -> Iterator[JobContext]:
        """Be the owner during the block: with the epoch of the background thread, or a new one."""
        with self._owner_lock:
            epoch = self.epoch
            if epoch is None:
                yield from self._take_over()
                return
        yield self._context_of(epoch, bool)

    def _take_over(self) -> Iterator[JobContext]:
        """Raise the epoch: this fences the owner, which may take over again later."""
        locked, last_heartbeat = self._lock(), monotonic()
        epoch = self._claim(force=True)
        assert epoch is not None

        def should_stop() -> bool:
            nonlocal locked, last_heartbeat
            locked = locked or self._lock()
            if monotonic() - last_heartbeat > HEARTBEAT_SECONDS:
                last_heartbeat = monotonic()
                self._set_deadline(epoch)
            return False

        try:
            yield self._context_of(epoch, should_stop)
        finally:
            try:
                if not self.root.closed and owner_in(self.root.context.live).epoch == epoch:
                    self._set_deadline(epoch, 0)
            finally:
                self._unlock()


class MaintenanceThread(threading.Thread):
    """Runs one job as long as this process is the owner."""

    def __init__(
        self, maintenance: Maintenance, job: MaintenanceJob, epoch: int, clock: Callable[[], int]
    ) -> None:
        super().__init__(name=f"embedlog-{job.name}", daemon=True)
        self._maintenance, self._job = maintenance, job
        self._stopped = threading.Event()
        # Held while the job runs.  A fork waits for it: a child copied in the middle of a job
        # would hang, for example in Arrow's own locks.
        self.busy = threading.Lock()
        # Not _context: that is a field of threading.Thread, from Python 3.14 on.
        self._job_context = JobContext(
            *(maintenance.root, epoch, clock, self._should_stop, LOCK_SECONDS),
            failures=maintenance.failures,
        )

    def stop(self) -> None:
        """Let the thread end at the job's next `should_stop`."""
        self._stopped.set()

    def _should_stop(self) -> bool:
        self.busy.release()
        self.busy.acquire()
        return self._stopped.is_set()

    def run(self) -> None:
        """Run the job whenever it is due, and again if it fails, until `stop`."""
        maintenance, seconds, is_first = self._maintenance, 0.0, True
        while not self._stopped.wait(seconds):
            with self.busy:
                try:
                    if is_first:
                        seconds, is_first = maintenance.due_seconds(self._job), False
                    else:
                        maintenance.run_job(self._job, self._job_context)
                        seconds = self._job.every_seconds
                except Exception as error:  # noqa: BLE001 - there is no caller to raise it to
                    seconds = self._note_failure(error)

    def _note_failure(self, error: Exception) -> float:
        """Note an error, and return after how many seconds to try again."""
        if isinstance(error, (ClosedError, FencedError)):
            try:
                self._job_context.check()
            except EmbedlogError:
                return HEARTBEAT_SECONDS  # The next heartbeat finds that too, and ends this thread.
        return self._maintenance.note_failure(self._job, self._job_context, error)


class BoundedClock:
    """Milliseconds since 1970; follows a jump ahead of the wall clock in steps.

    A round deletes at most what is an hour older than the machine's uptime suggests, so
    that an administrator who notices a wrong clock in time loses little.

    Args:
        live: Where all processes store the last reading.
        clock: The wall clock.
        uptime: Milliseconds since boot.
    """

    def __init__(self, live: kv.Store, clock: Callable[[], int], uptime: Callable[[], int]) -> None:
        self._live, self._clock, self._uptime = live, clock, uptime
        self._is_behind = False

    def __call__(self) -> int:
        """Return the time for one round; each call moves the clock by one step."""
        wall_ms, uptime_ms = self._clock(), self._uptime()
        reading = last_reading(self._live)
        bounded_ms = wall_ms if reading is None else reading.bound(wall_ms, uptime_ms)
        if bounded_ms < wall_ms and not self._is_behind:
            _log.warning(
                "The clock jumped %.1f hours ahead; retention follows it in steps of an hour",
                (wall_ms - bounded_ms) / 3_600_000,
            )
        self._is_behind = bounded_ms < wall_ms
        self._save(ClockReading(bounded_ms, uptime_ms))
        return bounded_ms

    def begin(self) -> None:
        """Save a first reading, if there is none: jumps are detected by comparing with it."""
        if last_reading(self._live) is None:
            self._save(ClockReading(self._clock(), self._uptime()))

    def _save(self, reading: ClockReading) -> None:
        self._live.write(lambda txn: CLOCK_READING.put(txn, value=reading))


def _before_fork() -> None:
    for maintenance in list(_instances):
        for worker in maintenance._workers:
            _locked.extend([worker.busy] if worker.busy.acquire(timeout=_FORK_SECONDS) else [])


def _after_fork_in_parent() -> None:
    while _locked:
        _locked.pop().release()


def _after_fork_in_child() -> None:
    _locked.clear()
    for maintenance in list(_instances):
        maintenance._reset()


_locked: list[threading.Lock] = []
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
