"""Compaction as a maintenance job: in the background, fenced, and respecting leases."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
from support.clock import START
from support.patience import patient
from support.roots import encoded, make_log, open_root, rows, segment_files

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
from embedlog.partition import pending_deletes
from embedlog.partition.leases import hold
from embedlog.record import TopicPartition

COMPACT = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.1}
HERE = TopicPartition("t", 0)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Nobody here waits for a second before the first thing is done."""
    monkeypatch.setattr(owner, "_FIRST_SECONDS", 0.01)


def often(**settings):
    """The job of compaction, all the time."""
    config = MaintenanceConfig(log_cleaner_backoff_ms=10, **settings)
    return [job for job in jobs_of(config) if job.name == "compaction"]


def dirty(log, count=6):
    """Sealed segments of two batches each, all of them of one key."""
    for number in range(count):
        for half in (0, 1):
            value = b"%d" % (2 * number + half)
            log.append([encoded(value, keys=[b"k"], at=log.context.clock())])
        log.roll()


def eventually(holds):
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < patient(20), "it never came"
        time.sleep(0.002)


def values(log):
    return [row[3] for row in rows(log)]


def job_context(root, should_stop=bool, epoch=1):
    return JobContext(root, epoch, root.clock, should_stop)


def owned(root):
    """Let this test own the housekeeping, and return its context."""
    root.context.live.write(lambda txn: OWNER.put(txn, value=MaintenanceOwner(1, 1 << 60, 1)))
    return job_context(root)


@pytest.mark.parametrize("number", [1, 3])
def test_the_background_compacts_what_is_due(tmp_path, number):
    """D3, with one thread and with several: each partition once, by the last value of its key."""
    with closing(open_root(tmp_path / "log")) as root:
        logs = [make_log(root, COMPACT, name) for name in ("a", "b", "c")]
        for log in logs:
            dirty(log)
        with closing(Maintenance(root, often(log_cleaner_threads=number))) as mine:
            mine.start()
            eventually(lambda: all(len(values(log)) == 1 for log in logs))
            names = [each.name for each in threading.enumerate()]
            assert names.count("embedlog-compaction") == number
        assert [values(log) for log in logs] == [[b"11"]] * 3
        assert not mine.failures


def test_maintain_compacts_and_says_what_it_did(tmp_path):
    """By the log's clock; settings are a broker's."""
    with embedlog.open(tmp_path / "log", maintenance={"log.cleaner.threads": 2}) as log:
        log.create_topic("t", config=COMPACT)
        dirty(log.partition("t", 0))
        (done,) = log.maintain()["compaction"]
        assert (done.topic, done.records_kept, done.error) == ("t", 1, None)
        assert log.maintain()["compaction"] == []
        assert log.verify() == []


def test_compaction_can_be_turned_off_and_settings_are_checked(tmp_path):
    """log.cleaner.enable; a name that is unknown names the nearest known one."""
    with embedlog.open(tmp_path / "log", maintenance={"log.cleaner.enable": False}) as log:
        assert "compaction" not in log.maintain()
    with pytest.raises(InvalidConfigError, match=r"log\.cleaner\.threads"):
        embedlog.open(tmp_path / "log", maintenance={"log.cleaner.thread": 1})


def test_a_fenced_process_swaps_nothing(root):
    """R3: its epoch is read under the partition's lock, before each swap."""
    log = make_log(root, COMPACT)
    dirty(log)
    owned(root)
    before = values(log)

    (done,) = CompactionJob(MaintenanceConfig())(job_context(root, epoch=7))

    assert "took over the maintenance" in str(done.error)
    assert values(log) == before


def test_stopping_maintenance_ends_a_long_compaction(root):
    """A thread that is to stop does not first read a large partition to its end."""
    log = make_log(root, COMPACT)
    dirty(log)
    owned(root)
    job, asked = CompactionJob(MaintenanceConfig()), []

    def should_stop():
        asked.append(1)
        return len(asked) > 2

    (done,) = job(job_context(root, should_stop))
    assert "Maintenance ends" in str(done.error)
    assert len(values(log)) == 12
    # It did not fail: the next round does it.
    assert [one.error for one in job(job_context(root))] == [None]
    assert values(log) == [b"11"]


def test_a_partition_that_failed_is_skipped_for_a_while(root, monkeypatch):
    """D4: and tried again, for somebody may have repaired it."""
    log = make_log(root, COMPACT)
    dirty(log)
    owned(root)
    path = segment_files(root.path)[0]
    good = path.read_bytes()
    path.write_bytes(good[:700] + bytes([good[700] ^ 255]) + good[701:])
    job = CompactionJob(MaintenanceConfig())

    (done,) = job(job_context(root))
    assert done.error is not None
    path.write_bytes(good)
    assert job(job_context(root)) == []

    monkeypatch.setattr(jobs, "RETRY_SECONDS", -1)
    assert [one.error for one in job(job_context(root))] == [None]


def test_an_idle_segment_is_rolled_to_be_compacted(root):
    """D6: no append comes that would roll it, and the active segment is never compacted."""
    log = make_log(root, {**COMPACT, "max.compaction.lag.ms": 1000})
    for value in (b"1", b"2"):
        log.append([encoded(value, keys=[b"k"], at=START)])
    job, context = CompactionJob(MaintenanceConfig()), owned(root)
    assert job(context) == []
    root.clock.advance(1001)
    (done,) = job(context)
    assert (done.records_kept, values(log)) == (1, [b"2"])


# Files that were replaced, and leases


def test_replaced_files_are_unlinked_after_their_delay(root):
    """file.delete.delay.ms: whoever looked one up has time to open it."""
    log = make_log(root, COMPACT)
    dirty(log, 3)
    old = segment_files(root.path)[:3]

    clean(log, START)

    assert all(path.exists() for path in old)
    assert pending_deletes.paths(root.context.live) == {
        str(path.relative_to(root.path)) for path in old
    }
    assert pending_deletes.sweep(root.context) == 0
    assert pending_deletes.sweep(root.context, early=True) == 3
    assert not any(path.exists() for path in old)


def test_leased_segments_are_not_compacted(root):
    """Segments below it are, and all once it is released; it is told why."""
    log = make_log(root, {**COMPACT, "file.delete.delay.ms": 0})
    dirty(log, 4)
    with hold(root, "query", {HERE: 4}, 60):
        clean(log, START)
        assert values(log) == [b"3", b"4", b"5", b"6", b"7"]
        assert "lease 'query' holds the records from offset 4" in explain(log, START)
    clean(log, START)
    assert values(log) == [b"7"]


def test_a_lease_made_during_a_compaction_is_respected(root):
    """It is looked at under the partition's lock, right before the swap."""
    log = make_log(root, COMPACT)
    dirty(log, 3)
    leases = []

    def progress(done, total):
        if not leases:
            leases.append(hold(root, "query", {HERE: 0}, 60))

    done = try_clean(log, START, CleanOptions(progress=progress))
    assert "lease 'query' holds it" in str(done.error)
    assert len(values(log)) == 6


def test_leased_files_are_not_unlinked(root):
    """A lease that came right after the swap: its files were looked up before."""
    log = make_log(root, COMPACT)
    dirty(log, 3)
    clean(log, START)
    with hold(root, "query", {HERE: 2}, 60):
        assert pending_deletes.sweep(root.context, early=True) == 1
    assert pending_deletes.sweep(root.context, early=True) == 2


def test_a_partition_over_its_hard_limit_ignores_leases(root):
    """retention.bytes.hard."""
    log = make_log(root, {**COMPACT, "retention.bytes.hard": 1})
    dirty(log, 3)
    with hold(root, "query", {HERE: 0}, 60):
        clean(log, START)
    assert values(log) == [b"5"]


def test_a_job_runs_at_most_as_often_at_once_as_it_has_threads(root):
    """And `maintain` is one of them."""
    entered, leave = threading.Semaphore(0), threading.Event()

    def run(context):
        entered.release()
        leave.wait(patient(10))

    with closing(Maintenance(root, [MaintenanceJob("slow", 60.0, run, threads=2)])) as mine:
        turns = [threading.Thread(target=mine.run_job, args=(mine.jobs[0], None)) for _ in range(3)]
        for each in turns:
            each.start()
        assert entered.acquire(timeout=patient(5))
        assert entered.acquire(timeout=patient(5))
        assert not entered.acquire(timeout=0.1)
        leave.set()
        for each in turns:
            each.join()
