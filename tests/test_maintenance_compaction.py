"""Compaction as a maintenance job: it runs in the background, is fenced and respects leases."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial
from time import monotonic

import pytest
from support.clock import START
from support.forks import until
from support.patience import patient
from support.roots import encoded, make_log, rows, segment_files

import embedlog
from embedlog.compaction import CleanOptions, clean, explain, try_clean
from embedlog.config import MaintenanceConfig
from embedlog.errors import InvalidConfigError
from embedlog.maintenance import Maintenance, jobs, jobs_of, owner
from embedlog.maintenance.jobs import (
    OWNER,
    CompactionJob,
    JobContext,
    MaintenanceJob,
    MaintenanceOwner,
)
from embedlog.partition import unnamed_files
from embedlog.partition.leases import hold
from embedlog.record import TopicPartition

COMPACT = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.1}
T0 = TopicPartition("t", 0)

eventually = partial(until, seconds=20)


@pytest.fixture(autouse=True)
def start_jobs_at_once(monkeypatch):
    """Start the jobs without the usual delay of a second."""
    monkeypatch.setattr(owner, "_FIRST_SECONDS", 0.01)


def compaction_jobs(**settings):
    """Return the compaction job, with almost no pause between two runs."""
    config = MaintenanceConfig(log_cleaner_backoff_ms=10, **settings)
    return [job for job in jobs_of(config) if job.name == "compaction"]


def dirty(log, count=6):
    """Append sealed segments of two batches each, all with the same key."""
    for number in range(count):
        for half in (0, 1):
            value = b"%d" % (2 * number + half)
            log.append([encoded(value, keys=[b"k"], at=log.context.clock())])
        log.roll()


def values(log):
    return [row[3] for row in rows(log)]


def job_context(root, should_stop=bool, epoch=1):
    return JobContext(root, epoch, root.clock, should_stop)


def own_maintenance(root):
    """Make this test the owner of the maintenance, and return the context of its jobs."""
    root.context.live.write(lambda txn: OWNER.put(txn, value=MaintenanceOwner(1, 1 << 60, 1)))
    return job_context(root)


@pytest.mark.parametrize("thread_count", [1, 3])
def test_the_background_compacts_what_is_due(root, thread_count):
    """D3: with one thread or several, each partition has only the last value of its key."""
    logs = [make_log(root, COMPACT, name) for name in ("a", "b", "c")]
    for log in logs:
        dirty(log)
    background_jobs = compaction_jobs(log_cleaner_threads=thread_count)
    with closing(Maintenance(root, background_jobs)) as maintenance:
        maintenance.start()
        eventually(lambda: all(len(values(log)) == 1 for log in logs))
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("embedlog-compaction") == thread_count
    assert [values(log) for log in logs] == [[b"11"]] * 3
    assert not maintenance.failures.errors


def test_maintain_compacts_and_says_what_it_did(tmp_path):
    """`maintain` returns one result for each compacted partition."""
    with embedlog.open(tmp_path / "log", maintenance={"log.cleaner.threads": 2}) as log:
        log.create_topic("t", config=COMPACT)
        dirty(log.partition("t", 0))
        (result,) = log.housekeeping.run()["compaction"]
        assert (result.topic, result.records_kept, result.error) == ("t", 1, None)
        assert log.housekeeping.run()["compaction"] == []
        assert log.housekeeping.verify() == []


def test_compaction_can_be_turned_off_and_settings_are_checked(tmp_path):
    """log.cleaner.enable turns it off; the error for an unknown name suggests the nearest one."""
    with embedlog.open(tmp_path / "log", maintenance={"log.cleaner.enable": False}) as log:
        assert "compaction" not in log.housekeeping.run()
    with pytest.raises(InvalidConfigError, match=r"log\.cleaner\.threads"):
        embedlog.open(tmp_path / "log", maintenance={"log.cleaner.thread": 1})


def test_a_fenced_process_swaps_nothing(root):
    """R3: the job checks its epoch under the partition's lock, before each swap."""
    log = make_log(root, COMPACT)
    dirty(log)
    own_maintenance(root)
    before = values(log)

    (result,) = CompactionJob(MaintenanceConfig())(job_context(root, epoch=7))

    assert "took over the maintenance" in str(result.error)
    assert values(log) == before


def test_stopping_maintenance_ends_a_long_compaction(root):
    """A thread that has to stop does not read a large partition to its end."""
    log = make_log(root, COMPACT)
    dirty(log)
    own_maintenance(root)
    job, calls = CompactionJob(MaintenanceConfig()), []

    def should_stop():
        calls.append(1)
        return len(calls) > 2

    (interrupted,) = job(job_context(root, should_stop))
    assert "Maintenance ends" in str(interrupted.error)
    assert len(values(log)) == 12
    # An interrupted compaction has not failed: the next run does it.
    assert [result.error for result in job(job_context(root))] == [None]
    assert values(log) == [b"11"]


def test_a_partition_that_failed_is_skipped_for_a_while(root, monkeypatch):
    """D4: it is tried again later, since it may have been repaired."""
    log = make_log(root, COMPACT)
    dirty(log)
    own_maintenance(root)
    path = segment_files(root.path)[0]
    file_bytes = path.read_bytes()
    path.write_bytes(file_bytes[:700] + bytes([file_bytes[700] ^ 255]) + file_bytes[701:])
    job = CompactionJob(MaintenanceConfig())

    (failed,) = job(job_context(root))
    assert failed.error is not None
    path.write_bytes(file_bytes)
    assert job(job_context(root)) == []

    monkeypatch.setattr(jobs, "monotonic", lambda: monotonic() + jobs.RETRY_SECONDS)
    assert [result.error for result in job(job_context(root))] == [None]


def test_an_idle_segment_is_rolled_to_be_compacted(root):
    """D6: the job rolls it: no append does, and the active segment is never compacted."""
    log = make_log(root, {**COMPACT, "max.compaction.lag.ms": 1000})
    for value in (b"1", b"2"):
        log.append([encoded(value, keys=[b"k"], at=START)])
    job, context = CompactionJob(MaintenanceConfig()), own_maintenance(root)
    assert job(context) == []
    root.clock.advance(1001)
    (result,) = job(context)
    assert (result.records_kept, values(log)) == (1, [b"2"])


# Replaced files and leases


def test_replaced_files_are_unlinked_after_their_delay(root):
    """file.delete.delay.ms: a reader that has looked up a file has time to open it."""
    log = make_log(root, COMPACT)
    dirty(log, 3)
    old_files = segment_files(root.path)[:3]

    clean(log, START)

    assert all(path.exists() for path in old_files)
    assert unnamed_files.pending_paths(root.context.live) == {
        str(path.relative_to(root.path)) for path in old_files
    }
    assert unnamed_files.sweep(root.context) == 0
    assert unnamed_files.sweep(root.context, early=True) == 3
    assert not any(path.exists() for path in old_files)


def test_leased_segments_are_not_compacted(root):
    """Segments below the lease are compacted, and all when it is released."""
    log = make_log(root, {**COMPACT, "file.delete.delay.ms": 0})
    dirty(log, 4)
    with hold(root, "query", {T0: 4}, 60):
        clean(log, START)
        assert values(log) == [b"3", b"4", b"5", b"6", b"7"]
        assert "lease 'query' holds them for another" in explain(log, START)
    clean(log, START)
    assert values(log) == [b"7"]


def test_a_lease_made_during_a_compaction_is_respected(root):
    """Leases are checked under the partition's lock, right before the swap."""
    log = make_log(root, COMPACT)
    dirty(log, 3)
    leases = []

    def progress(done_bytes, total_bytes):
        if not leases:
            leases.append(hold(root, "query", {T0: 0}, 60))

    result = try_clean(log, START, CleanOptions(progress=progress))
    assert "lease 'query' holds it" in str(result.error)
    assert len(values(log)) == 6


def test_leased_files_are_not_unlinked(root):
    """A lease made right after the swap protects the files of its records."""
    log = make_log(root, COMPACT)
    dirty(log, 3)
    clean(log, START)
    with hold(root, "query", {T0: 2}, 60):
        assert unnamed_files.sweep(root.context, early=True) == 1
    assert unnamed_files.sweep(root.context, early=True) == 2


def test_a_partition_over_its_hard_limit_ignores_leases(root):
    """The limit is retention.bytes.hard."""
    log = make_log(root, {**COMPACT, "retention.bytes.hard": 1})
    dirty(log, 3)
    with hold(root, "query", {T0: 0}, 60):
        clean(log, START)
    assert values(log) == [b"5"]


def test_a_job_never_runs_more_often_at_once_than_it_has_threads(root):
    """Runs of `maintain` count, too."""
    entered, leave = threading.Semaphore(0), threading.Event()

    def run(context):
        entered.release()
        leave.wait(patient(10))

    with closing(Maintenance(root, [MaintenanceJob("slow", 60.0, run, threads=2)])) as maintenance:
        threads = [
            threading.Thread(target=maintenance.run_job, args=(maintenance.jobs[0], None))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert entered.acquire(timeout=patient(5))
        assert entered.acquire(timeout=patient(5))
        assert not entered.acquire(timeout=0.1)
        leave.set()
        for thread in threads:
            thread.join()
