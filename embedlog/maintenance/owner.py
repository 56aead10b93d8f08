"""Who does the housekeeping of a log, and when.

Of all attached processes one owns it: it holds the lock ``locks/maintenance``,
and its *epoch* stands in `live`.  The lock is free the moment its process
dies, and a thread of each other process waits for that death.  A process that
was stopped keeps the lock, so its deadline counts (by the clock that goes on
while a machine sleeps): past it another one raises the epoch.  Every
transaction that deletes checks the epoch, so that one that wakes deletes
nothing (R3, P14).

When a job was last done stands in `live` too, so that processes that live for
seconds only do their share.  Nothing starts before a program does something
with its log.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

from embedlog import kv
from embedlog.errors import ClosedError, EmbedlogError, FencedError
from embedlog.files import ProcessWatch
from embedlog.keyspace import JOB_RUNS
from embedlog.maintenance import activity
from embedlog.maintenance.job_context import (
    OWNER,
    JobContext,
    MaintenanceJob,
    MaintenanceOwner,
    owner_in,
)
from embedlog.maintenance.jobs import JOBS
from embedlog.retention import BoundedClock
from embedlog.root.root import Root

SESSION_MS = 15_000
"""An owner that is silent for so long is overtaken."""
BEAT_SECONDS = 3.0
"""How often an owner shows that it lives, and the others look whether it left."""
PATIENCE_SECONDS = 1.0
"""How long the background waits for a partition: the next round tries again."""
_SOON_SECONDS = 0.01
"""A process that ends is told a moment before its locks are free."""
_MOST_BLIND = 100
"""Looks at a lock whose process is gone; after that it is one that cannot be seen from here."""
_LEAST_SECONDS = 1.0
"""A program does its own things first; one that ends before this does no housekeeping."""
_FORK_SECONDS = 1.0
_TRIES = 3

T = TypeVar("T")

_LOCK = "locks/maintenance"
_log = logging.getLogger("embedlog")
_all: weakref.WeakSet[Maintenance] = weakref.WeakSet()


class Maintenance:
    """One process's part in the housekeeping of one log.

    Args:
        root: The open log.
        doubting: Whether to doubt the root's clock when it jumps: not one that a program passed.
        jobs: What there is to do.
        background: Whether this process may own it; if not, only `maintain` does anything.
        session_ms: How long the owner may be silent.
    """

    def __init__(
        self,
        root: Root,
        jobs: Sequence[MaintenanceJob] = JOBS,
        *,
        doubting: bool = False,
        background: bool = True,
        session_ms: int = SESSION_MS,
    ) -> None:
        self.root, self.jobs, self.session_ms = root, tuple(jobs), session_ms
        self.background = background and root.mode == "rw"
        self._doubting = doubting
        self.failures: dict[str, Exception] = {}
        """By job, why it failed the last time; it is logged too, and tried again."""
        self._closed = False
        self._renew()
        _all.add(self)

    def _renew(self) -> None:
        """Begin without threads and locks: new, or in a forked child, whose parent has them."""
        self.epoch: int | None = None
        """By which this process owns the housekeeping now; None if it does not."""
        self._fd: int | None = None
        self._starting = threading.Lock()
        self._claims = threading.Lock()
        self._keeper: threading.Thread | None = None
        self._watch: ProcessWatch | None = None
        self._workers: list[MaintenanceThread] = []
        self._blind = 0
        self._running = {job.name: threading.Semaphore(job.threads) for job in self.jobs}

    # The life of it

    def ensure(self) -> None:
        """Start the thread, if it may and none runs; it does nothing in its first second."""
        if self._keeper is not None or not self.background or self._closed:
            return
        with self._starting:
            if self._keeper is None and not self._closed:
                try:
                    self._watch = ProcessWatch()
                    keeper = threading.Thread(
                        target=self._keep, name="embedlog-maintenance", daemon=True
                    )
                    keeper.start()
                    self._keeper = keeper
                except (OSError, RuntimeError) as error:
                    # Not for want of a descriptor or a thread does a program fail that asked
                    # for none; the next use of the log tries again.
                    _log.warning("no housekeeping of %s from here: %s", self.root.path, error)

    def forsake(self) -> None:
        """End soon: nobody has the log any more."""
        self._closed = True
        if self._watch is not None:
            self._watch.ring()

    def close(self) -> None:
        """End the threads, and wait for them; what they do ends after the piece in hand."""
        with self._starting:
            self.forsake()
        keeper = self._keeper
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join()

    # Owning it

    def _keep(self) -> None:
        assert self._watch is not None
        watch, nap = self._watch, _LEAST_SECONDS
        try:
            while not self._closed:
                watch.wait(nap)
                if not self._closed:
                    nap = self._look()
        except ClosedError:
            pass  # the log was closed under it
        finally:
            self._give_up(release=True)
            watch.close()

    def _look(self) -> float:
        """Take the housekeeping over, or show that this process has it; return how long to wait."""
        if not self._claims.acquire(blocking=False):
            return BEAT_SECONDS  # `maintain` has it
        try:
            if self.epoch is not None:
                self._beat()
                return BEAT_SECONDS
            return self._try()
        except FencedError as error:
            _log.info("%s", error)
            self._give_up(release=False)
            return BEAT_SECONDS
        except ClosedError:
            raise
        except EmbedlogError as error:
            _log.warning("housekeeping of %s: %s", self.root.path, error)
            return BEAT_SECONDS
        except RuntimeError as error:
            # No thread can be started: somebody else may have more luck.
            _log.warning("housekeeping of %s: %s", self.root.path, error)
            self._give_up(release=True)
            return BEAT_SECONDS
        finally:
            self._claims.release()

    def _try(self) -> float:
        """Own it if nobody does; else wait for the end of who does."""
        assert self._watch is not None
        epoch = self._claim(free=self._lock())
        if epoch is not None:
            self.epoch = epoch
            self._watch.watch(())
            self._start_workers(epoch)
            return BEAT_SECONDS
        owner = owner_in(self.root.context.live)
        self._watch.watch({owner.pid} if owner.pid else ())
        self._blind = self._blind + 1 if self._watch.blind else 0
        if 0 < self._blind <= _MOST_BLIND:
            return _SOON_SECONDS
        left = (owner.until - self._uptime()) / 1000
        return max(min(left, BEAT_SECONDS), _SOON_SECONDS)

    def _lock(self) -> bool:
        files = self.root.context.files
        if self._fd is None:
            self._fd = files.open(_LOCK, write=True, create=True)
        return files.try_lock(self._fd)

    def _unlock(self) -> None:
        if self._fd is not None:
            self.root.context.files.unlock(self._fd)

    def _claim(self, *, free: bool) -> int | None:
        """Raise the epoch, if the lock is free or its holder silent; None if it is neither."""
        now = self._uptime()

        def step(txn: kv.Txn) -> int | None:
            owner = owner_in(txn)
            if not free and owner.until > now:
                return None
            claim = MaintenanceOwner(owner.epoch + 1, now + self.session_ms, os.getpid())
            OWNER.put(txn, value=claim)
            return owner.epoch + 1

        if not free and owner_in(self.root.context.live).until > now:
            return None
        return self._write(step)

    def _beat(self) -> None:
        """Show that this process lives, and take the lock of one that it overtook."""
        assert self.epoch is not None
        self._lock()
        self._extend(self.epoch, self._uptime() + self.session_ms)

    def _extend(self, epoch: int, until: int) -> None:
        turn = JobContext(self.root, epoch, self.root.clock, bool)

        def step(txn: kv.Txn) -> None:
            turn.fence(txn)
            OWNER.put(txn, value=MaintenanceOwner(epoch, until, os.getpid()))

        self._write(step)

    def _give_up(self, *, release: bool) -> None:
        epoch, self.epoch = self.epoch, None
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            if worker.ident is not None:
                worker.join()
        self._workers = []
        try:
            if epoch is not None and release:
                # So that the others need not wait for the end of the session.
                self._extend(epoch, 0)
        except EmbedlogError:
            pass  # it is another's, or the log is closed: by the lock they see it too
        finally:
            if not self.root.closed:
                self._unlock()

    def _write(self, step: kv.Step[T]) -> T:
        """Run a step on `live`, on a full disk without the reserve."""
        context = self.root.context
        return context.reserve.used_by(lambda: context.live.write(step))

    def _uptime(self) -> int:
        return self.root.context.files.uptime_ms()

    def _clock(self) -> Callable[[], int]:
        return self._believed_clock() if self._doubting else self.root.clock

    def _believed_clock(self) -> BoundedClock:
        context = self.root.context
        return BoundedClock(context.live, self.root.clock, context.files.uptime_ms)

    # The jobs

    def _start_workers(self, epoch: int) -> None:
        if self._doubting:
            # Before the first round: a clock that is set meanwhile is seen to jump.
            self._believed_clock().begin()
        self._workers = [
            MaintenanceThread(self, job, epoch) for job in self.jobs for _ in range(job.threads)
        ]
        for worker in self._workers:
            worker.start()

    def due_seconds(self, job: MaintenanceJob) -> float:
        """Return when a job is to be done next: so long after it was last, by whichever process."""
        now, before = self._uptime(), JOB_RUNS.get(self.root.context.live, job.name)
        if before is None:
            # The first time counts from when somebody was first there to do it.
            self._note(job)
            return job.every_seconds
        return max(job.every_seconds - (now - before) / 1000, _LEAST_SECONDS)

    def _note(self, job: MaintenanceJob) -> None:
        if job.every_seconds < BEAT_SECONDS:
            return  # it need not be known, and nothing is written where nothing happens
        now = self._uptime()
        self._write(lambda txn: JOB_RUNS.put(txn, job.name, value=now))

    def do(self, job: MaintenanceJob, turn: JobContext) -> object:
        """Do a job once; never more of them at a time in one process than its ``threads``."""
        with self._running[job.name]:
            done = self.root.context.reserve.used_by(lambda: job.run(turn))
            self._note(job)
        if events := activity.done(done):
            turn.tell(events)
        return done

    def maintain(self) -> dict[str, object]:
        """Do every job once, now and in this thread, and return what each of them did, by name.

        Another process that owns the housekeeping is overtaken for so long.

        Raises:
            FencedError: Others came in between, again and again.
            EmbedlogError: A job failed; the others were done.  The first error is raised.
        """
        self.root.context.check_writable()
        for attempt in range(_TRIES):
            try:
                with self._owning() as turn:
                    return self._do_all(turn)
            except FencedError:
                if attempt == _TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _note_failure(self, job: MaintenanceJob, turn: JobContext, error: Exception) -> None:
        before, self.failures[job.name] = self.failures.get(job.name), error
        if str(before) != str(error):
            turn.tell([activity.failed(job.name, error)])

    def _do_all(self, turn: JobContext) -> dict[str, object]:
        failures: list[EmbedlogError] = []
        done: dict[str, object] = {}
        for job in self.jobs:
            try:
                done[job.name] = self.do(job, turn)
                self.failures.pop(job.name, None)
            except (ClosedError, FencedError):
                raise
            except EmbedlogError as error:
                failures.append(error)
                self._note_failure(job, turn, error)
        if failures:
            raise failures[0]
        return done

    @contextmanager
    def _owning(self) -> Iterator[JobContext]:
        """Own it for a while: by the background's epoch, or by one that is taken from whoever."""
        with self._claims:
            epoch = self.epoch
            if epoch is None:
                yield from self._taking()
                return
        yield JobContext(self.root, epoch, self._clock(), bool)

    def _taking(self) -> Iterator[JobContext]:
        """Raise the epoch: who has it is fenced, lets go of the lock, and has it again after."""
        locked, beaten = self._lock(), monotonic()
        epoch = self._take()

        def stopping() -> bool:
            nonlocal locked, beaten
            locked = locked or self._lock()
            if monotonic() - beaten > BEAT_SECONDS:
                beaten = monotonic()
                self._extend(epoch, self._uptime() + self.session_ms)
            return False

        try:
            yield JobContext(self.root, epoch, self._clock(), stopping)
        finally:
            if not self.root.closed:
                if owner_in(self.root.context.live).epoch == epoch:
                    self._extend(epoch, 0)
                self._unlock()

    def _take(self) -> int:
        until = self._uptime() + self.session_ms

        def step(txn: kv.Txn) -> int:
            epoch = owner_in(txn).epoch + 1
            OWNER.put(txn, value=MaintenanceOwner(epoch, until, os.getpid()))
            return epoch

        return self._write(step)


class MaintenanceThread(threading.Thread):
    """Does one job, as long as this process owns the housekeeping."""

    def __init__(self, maintenance: Maintenance, job: MaintenanceJob, epoch: int) -> None:
        super().__init__(name=f"embedlog-{job.name}", daemon=True)
        self._of, self._job = maintenance, job
        self._stopped = threading.Event()
        # Held while it works.  A fork waits for it: what is copied in the middle of a piece
        # of work, as Arrow's own locks, would hang the child.
        self.busy = threading.Lock()
        self._turn = JobContext(
            maintenance.root, epoch, maintenance._clock(), self._stopping, PATIENCE_SECONDS
        )

    def stop(self) -> None:
        self._stopped.set()

    def _stopping(self) -> bool:
        self.busy.release()
        self.busy.acquire()
        return self._stopped.is_set()

    def run(self) -> None:
        try:
            due = self._of.due_seconds(self._job)
            while not self._stopped.wait(due):
                with self.busy:
                    self._work()
                due = self._job.every_seconds
        except (ClosedError, FencedError):
            pass  # the thread that beats sees it as well, and ends this one

    def _work(self) -> None:
        try:
            self._of.do(self._job, self._turn)
            self._of.failures.pop(self._job.name, None)
        except (ClosedError, FencedError):
            raise
        except Exception as error:  # noqa: BLE001 - nobody else would hear of it
            self._of._note_failure(self._job, self._turn, error)
            trace = None if isinstance(error, EmbedlogError) else error
            _log.warning("%s of %s: %s", self._job.name, self._of.root.path, error, exc_info=trace)


def _before_fork() -> None:
    for each in list(_all):
        for worker in each._workers:
            _held.extend([worker.busy] if worker.busy.acquire(timeout=_FORK_SECONDS) else [])


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().release()


def _after_fork_in_child() -> None:
    _held.clear()
    for each in list(_all):
        each._renew()


_held: list[threading.Lock] = []
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
