"""Housekeeping whose disk fails: no job ends in silence, and no log is flooded (P24)."""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections import Counter
from contextlib import closing, contextmanager
from types import TracebackType

import pytest
from support.clock import START
from support.failing_disks import FailingDisks
from support.forks import until
from support.patience import patient
from support.replicas import Directories, assignment
from support.roots import encoded, open_root
from support.tiers import sample

import embedlog
from embedlog.config import MaintenanceConfig
from embedlog.errors import DurabilityError
from embedlog.files import Files
from embedlog.keyspace import JOB_RUNS
from embedlog.maintenance import Maintenance, jobs_of, owner
from embedlog.maintenance.jobs import MaintenanceJob, owner_in
from embedlog.replication import catch_up
from embedlog.replication import jobs as replication_jobs
from embedlog.replication import root as replicated_root


class LogLines(logging.Handler):
    """Counts the warnings of embedlog by their text, in which numbers are alike.

    >>> with LogLines() as lines:                                         # doctest: +SKIP
    ...     work()
    >>> lines.repeated(3)                                                 # doctest: +SKIP
    {}
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.counts[re.sub(r"\d+", "N", record.getMessage())] += 1

    def repeated(self, most: int) -> dict[str, int]:
        """Return the texts that were logged more often, with their numbers."""
        return {text: count for text, count in self.counts.items() if count > most}

    def __enter__(self) -> LogLines:
        logging.getLogger("embedlog").addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logging.getLogger("embedlog").removeHandler(self)


pytestmark = pytest.mark.tier("test")  # its threads wait for each other

EXHAUSTIVE = pytest.mark.tier("all")


@pytest.fixture(autouse=True)
def at_short_intervals(monkeypatch):
    monkeypatch.setattr(owner, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(owner, "_LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(replication_jobs, "RETRY_SECONDS", 0.05)


@pytest.fixture
def disks():
    return FailingDisks()


@pytest.fixture(params=[1, 3], ids=["one directory", "three directories"])
def log(tmp_path, disks, request):
    """A log with something to do for each job."""
    directories = Directories(tmp_path, request.param)
    where = directories.paths if request.param > 1 else directories.paths[0]
    with embedlog.open(where, files=disks, maintenance=False) as log:
        config = {"retention.bytes": 3000, "segment.bytes": 1000, "file.delete.delay.ms": 0}
        log.create_topic("t", config=config | {"flush.ms": 1})
        log.create_topic("c", config={"cleanup.policy": "compact", "segment.bytes": 1000})
        for number in range(5):
            for name in ("t", "c"):
                log.root.partition(name, 0).append([encoded(b"%d" % number, keys=[b"k"])])
        yield log


class Runs:
    """The jobs of a log, at short intervals, and which of them have run."""

    def __init__(self, log) -> None:
        found = jobs_of(MaintenanceConfig(), replicated=log.root.replicated)
        self.jobs = [self._counted(job) for job in found]
        self.names = {job.name for job in found}
        self.begun: set[str] = set()

    def _counted(self, job: MaintenanceJob) -> MaintenanceJob:
        def run(context):
            self.begun.add(job.name)
            return job.run(context)

        return job._replace(run=run, every_seconds=0.06)

    def wait_for_all(self) -> None:
        """Wait until each job was begun, and one more time: it was done, or tried again."""
        for _ in range(2):
            self.begun.clear()
            until(lambda: self.begun == self.names, 30)


def forget_runs(log, runs):
    """Have the jobs note at first when they were due."""
    live = log.root.context.live
    live.write(lambda txn: [JOB_RUNS.delete(txn, name) for name in runs.names])


@contextmanager
def housekeeping(log, runs):
    """Run the jobs in the background."""
    with closing(Maintenance(log.root, runs.jobs, bound_clock=True)) as maintenance:
        maintenance.start()
        yield maintenance


def still_failing(maintenance):
    """Return what fails, but for what a partition whose flush failed refuses (P9), and events."""
    return {
        work: error
        for work, error in maintenance.failures.errors.items()
        if not isinstance(error, DurabilityError) and not work.startswith("Report of")
    }


def paths(log):
    return (
        [directory.path for directory in log.root.controller.online]
        if log.root.replicated
        else [log.root.path]
    )


@pytest.mark.parametrize("databases", [pytest.param(False, marks=EXHAUSTIVE), True])
def test_no_job_ends_because_an_operation_failed(log, disks, databases):
    """P24: whichever it is, from the moment when the process becomes the owner."""
    runs = Runs(log)
    for after in sample(range(40), 3):
        forget_runs(log, runs)
        disks.break_disk(paths(log)[0], errno.EIO, after=after, times=1, databases=databases)
        with housekeeping(log, runs):
            runs.wait_for_all()
            disks.broken.clear()
            runs.wait_for_all()
            if log.root.replicated:
                until(lambda: len(log.root.controller.current().image.online) == 3, 30)


@pytest.mark.parametrize(
    "number",
    [errno.EIO, *(pytest.param(each, marks=EXHAUSTIVE) for each in (errno.ENOSPC, errno.EROFS))],
)
def test_a_disk_that_fails_for_long_is_logged_once(log, disks, number):
    """P24: and all goes on when it works again: without a new program, or a call."""
    runs = Runs(log)
    with LogLines() as lines, housekeeping(log, runs) as maintenance:
        runs.wait_for_all()
        for path in paths(log)[-2:]:
            disks.break_disk(path, number)
        until(lambda: maintenance.failures.errors, 30)
        for _ in range(3):
            runs.wait_for_all()
        disks.broken.clear()
        runs.wait_for_all()
        until(lambda: not still_failing(maintenance), 30)
    assert lines.counts
    assert lines.repeated(2) == {}


def test_a_directory_that_does_not_stay_is_tried_less_and_less_often(
    directories, disks, monkeypatch
):
    """P24: one of whose files the disk refuses; each return elects leaders, and logs two lines."""
    # Here it refuses all operations; what one refuses that looks well would be seen later only.
    monkeypatch.setattr(replicated_root, "_drop_caches", lambda directory: None)
    monkeypatch.setattr(replication_jobs, "RETRY_SECONDS", 1.0)
    now = [0.0]
    monkeypatch.setattr(replication_jobs, "monotonic", lambda: now[0])
    with directories.open(files=disks) as log, LogLines() as lines:
        log.create_topic("t", replication_factor=3)
        controller, partition = log.root.controller, log.root.partition("t", 0)
        job = replication_jobs.ReplicationJob(MaintenanceConfig())

        def keep_house(seconds):
            for _ in range(seconds):
                now[0] += 1
                job.run(log.root, lambda: False)

        def returns():
            return sum(count for text, count in lines.counts.items() if "is online" in text)

        disks.break_disk(controller.directories[3].path, errno.EIO, folder="topics/")
        partition.append([encoded(b"a")])
        keep_house(200)
        assert 5 <= returns() <= 12
        disks.broken.clear()
        keep_house(100)
        assert controller.current().image.online == (1, 2, 3)
        before = returns()
        directories.lose(log, 3)
        directories.put_back(3)
        keep_house(2)
        assert returns() == before + 1
        directories.assert_equal_copies("t")


def test_a_copy_that_cannot_be_made_does_not_stop_the_others(directories, monkeypatch):
    """P24: here another process holds the lock of one partition, as one that is stopped."""
    monkeypatch.setattr(catch_up, "PAUSES", (0, 0))
    with (
        directories.open(lock_timeout=0.1) as log,
        directories.open() as other,
        LogLines() as lines,
    ):
        for name in ("first", "held", "last"):
            log.create_topic(name, replication_factor=3)
            log.root.partition(name, 0).append([encoded(b"a")])
        directories.lose(log, 3)
        for name in ("first", "held", "last"):
            log.root.partition(name, 0).append([encoded(b"b")])
        directories.put_back(3)
        replicated_root.try_bring_back(log.root)
        job = replication_jobs.ReplicationJob(MaintenanceConfig())

        with other.root.partition("held", 0).locked():
            for _ in range(3):
                job.run(log.root, lambda: False)
            in_sync = {name: len(assignment(log, name).isr) for name in log.topics()}
        assert in_sync == {"first": 3, "held": 2, "last": 3}
        assert [text for text in lines.counts if "Copying held-N" in text]
        assert lines.repeated(2) == {}
        job.run(log.root, lambda: False)
        assert len(assignment(log, "held").isr) == 3


# The owner's role

ended_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@ended_thread
def test_a_thread_that_ends_takes_the_role_with_it(tmp_path):
    """P24: another process takes over, although the one that lost the thread is alive."""
    ended, took_over = threading.Event(), threading.Event()

    def end(context):
        ended.set()
        raise SystemExit

    with closing(open_root(tmp_path)) as first, closing(open_root(tmp_path)) as second:
        jobs = [MaintenanceJob("ends", 0.01, end), MaintenanceJob("idles", 0.01, bool)]
        works = MaintenanceJob("works", 0.01, lambda context: took_over.set())
        with (
            LogLines() as lines,
            closing(Maintenance(first, jobs)) as broken,
            closing(Maintenance(second, [works])) as other,
        ):
            broken.start()
            assert ended.wait(patient(20))
            other.start()
            assert took_over.wait(patient(20))
            assert owner_in(second.context.live).epoch == other.epoch
            assert broken.epoch is None
    assert [text for text in lines.counts if "gives up" in text]


@ended_thread
def test_an_owner_without_another_process_takes_the_role_again(tmp_path):
    """It stands back for a moment only."""
    runs = []

    def end_once(context):
        runs.append(1)
        if len(runs) == 1:
            raise SystemExit

    with closing(open_root(tmp_path)) as root:
        with closing(Maintenance(root, [MaintenanceJob("ends", 0.01, end_once)])) as maintenance:
            maintenance.start()
            until(lambda: len(runs) > 1, 30)
            assert maintenance.epoch == 2


class NoClock(Files):
    """Files whose uptime cannot be read for a while, with an error that is not embedlog's."""

    failures = 0

    def uptime_ms(self) -> int:
        if NoClock.failures > 0:
            NoClock.failures -= 1
            raise OSError(errno.EIO, "no clock")
        return super().uptime_ms()


def test_the_thread_of_the_heartbeats_survives_any_error(tmp_path):
    """P24: it tries again at the next heartbeat."""
    runs = []
    with closing(open_root(tmp_path, files=NoClock)) as root, LogLines() as lines:
        NoClock.failures = 5
        job = MaintenanceJob("works", 0.01, lambda context: runs.append(1))
        with closing(Maintenance(root, [job])) as maintenance:
            maintenance.start()
            until(lambda: runs, 30)
            NoClock.failures = 5
            until(lambda: NoClock.failures == 0, 30)
            before = len(runs)
            until(lambda: len(runs) > before, 30)
    assert lines.repeated(2) == {}


@ended_thread
def test_the_next_use_of_the_log_starts_a_thread_that_ended(tmp_path, monkeypatch):
    """Whatever ended it; it had given the role up."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        maintenance = log.housekeeping.background
        until(lambda: maintenance.epoch == 1, 30)
        with monkeypatch.context() as patched:
            patched.setattr(maintenance._watch, "wait", iter(()).__next__)
            until(lambda: not maintenance._thread.is_alive(), 30)
        assert owner_in(log.root.context.live).deadline_ms == 0
        log.topic("t")
        until(lambda: maintenance.epoch == 2, 30)


def test_a_clock_that_is_behind_is_logged_once(tmp_path, caplog):
    """P17: until it has followed; each job of each round asks for it."""
    now = [START]
    with closing(open_root(tmp_path)) as root:
        clock = owner.BoundedClock(root.context.live, lambda: now[0], root.context.files.uptime_ms)
        clock.begin()
        for _ in range(2):
            now[0] += 3 * 3_600_000
            for _ in range(6):
                clock()
            assert clock() == now[0]
    assert len([text for text in caplog.messages if "jumped" in text]) == 2
