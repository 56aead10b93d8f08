"""Maintenance: its owner, fencing, jobs, and clocks that jump."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from contextlib import closing, contextmanager
from functools import partial

import pytest
from support.children import PausedChild, in_child
from support.clock import START, ManualClock, MovedUptime
from support.forks import until
from support.patience import patient
from support.roots import encoded, fill, make_log, open_root

import embedlog
from embedlog.api import housekeeping
from embedlog.config import MaintenanceConfig
from embedlog.errors import CorruptionError, DurabilityError, FencedError, ReadOnlyError
from embedlog.keyspace import JOB_RUNS, PRODUCERS
from embedlog.maintenance import Maintenance, owner
from embedlog.maintenance.jobs import JOBS, OWNER, JobContext, MaintenanceJob, MaintenanceOwner
from embedlog.partition import tail, unnamed_files
from embedlog.partition.producer_state import SNAPSHOTS, expire_producers
from embedlog.partition.state import CLOCK_READING, last_reading
from embedlog.record import TopicPartition

pytestmark = pytest.mark.tier("test")  # its threads wait for each other

SIZE = encoded(b"v0").size
DAY = 86_400_000
OLD = {"segment.bytes": 2 * SIZE, "file.delete.delay.ms": 0, "retention.ms": DAY}
T0 = TopicPartition("t", 0)


@pytest.fixture(autouse=True)
def start_jobs_at_once(monkeypatch):
    """Start the jobs without the usual delay of a second, and with no thread of earlier tests."""
    # Logs of earlier tests may wait for the collector; this file counts threads.
    gc.collect()
    monkeypatch.setattr(owner, "_FIRST_SECONDS", 0.01)


@pytest.fixture
def begins_soon(monkeypatch):
    """Let the jobs of a log that was opened begin without the second that it waits for its use."""
    monkeypatch.setattr(housekeeping, "_FIRST_SECONDS", 0.01)


@pytest.fixture
def log(tmp_path, clock):
    """A log with a manual clock and without background jobs."""
    with embedlog.open(tmp_path / "log", clock=clock, maintenance=False) as log:
        yield log


eventually = partial(until, seconds=20)


def threads(name="embedlog-"):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def current_owner(root):
    """Return the maintenance owner of a log; None if there was none since the boot."""
    return OWNER.get(root.context.live)


def often(run=lambda context: None, name="often"):
    return MaintenanceJob(name, 0.01, run)


@contextmanager
def running(root, jobs, **options):
    """Run jobs in the background of a root."""
    with closing(Maintenance(root, jobs, **options)) as maintenance:
        maintenance.start()
        yield maintenance


# One owner


def test_a_moment_after_a_log_is_opened_its_jobs_start(tmp_path):
    """Before that, only a thread waits that will start them, also if the log is used."""
    before = threads()
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        assert log.topics() == ["t"]
        eventually(lambda: current_owner(log.root))
        assert len(threads("embedlog-maintenance")) == 1
    with embedlog.open(tmp_path / "log") as log:
        assert len(threads()) == len(threads("embedlog-open")) == 1
    assert threads() == before


def test_maintain_works_without_background_jobs(log, clock):
    """With maintenance=False there is no thread; `maintain` runs each job once."""
    log.create_topic("t", config=OLD)
    fill(log.partition("t", 0), 6)
    assert (threads(), current_owner(log.root)) == ([], None)
    assert log.housekeeping.run()["retention"] == []
    clock.advance(DAY + 1_000)
    results = log.housekeeping.run()["retention"]
    assert [(result.topic, result.start_offset, result.segments) for result in results] == [
        ("t", 6, 3)
    ]
    assert log.partition("t", 0).start_offset() == 6


def test_the_background_runs_the_jobs_of_maintain(root):
    """Retention deletes segments without a call of `maintain`."""
    log = make_log(root, OLD)
    fill(log, 6)
    root.clock.advance(2 * DAY)
    with running(root, [JOBS[0]._replace(every_seconds=0.05)]) as maintenance:
        eventually(lambda: log.start_offset() == 6)
        assert current_owner(root).pid == os.getpid()
        assert maintenance.epoch == current_owner(root).epoch == 1
    assert threads() == []


def test_one_of_several_handles_is_the_owner(tmp_path, monkeypatch):
    """Of two handles, one is the owner; when it closes, the other takes over."""
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.3)
    with (
        closing(open_root(tmp_path / "log")) as first_root,
        closing(open_root(tmp_path / "log")) as second_root,
    ):
        runs = []
        first_maintenance = Maintenance(first_root, [often(lambda context: runs.append(1))])
        second_maintenance = Maintenance(second_root, [often(lambda context: runs.append(2))])
        first_maintenance.start()
        eventually(lambda: runs)
        second_maintenance.start()
        eventually(lambda: len(runs) > 50)
        assert set(runs) == {1}
        first_maintenance.close()
        del runs[:]
        eventually(lambda: 2 in runs)
        assert 1 not in runs
        assert current_owner(second_root).epoch == 2
        second_maintenance.close()


def child_that_owns(path, ready):
    root = open_root(path)
    maintenance = Maintenance(root, [often()])
    maintenance.start()
    eventually(lambda: maintenance.epoch)
    ready()


def test_when_the_owner_is_killed_another_takes_over_at_once(tmp_path):
    """P15: the kernel reports the death and frees the lock before the deadline."""
    path = tmp_path / "log"
    open_root(path).close()
    with (
        PausedChild(lambda ready: child_that_owns(path, ready)) as child,
        closing(open_root(path)) as root,
    ):
        maintenance = Maintenance(root, [often()])
        maintenance.start()
        eventually(lambda: maintenance._watch._watched)
        assert maintenance.epoch is None
        os.kill(child.pid, signal.SIGKILL)
        killed = time.monotonic()
        eventually(lambda: maintenance.epoch)
        seconds = time.monotonic() - killed
        assert current_owner(root).epoch == 2
        maintenance.close()
    assert seconds < patient(1)


def test_a_stopped_owner_is_replaced_and_deletes_nothing_when_it_resumes(tmp_path, monkeypatch):
    """P14, R3: it is past its deadline; the transaction that deletes checks its epoch."""
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.3)
    path = tmp_path / "log"
    with closing(open_root(path)) as root:
        log = make_log(root, OLD)
        fill(log, 6)
    read_end, write_end = os.pipe()

    def work(ready):
        other = open_root(path)
        maintenance = Maintenance(other, [], session_ms=200)
        maintenance.start()
        eventually(lambda: maintenance.epoch)
        context = JobContext(other, maintenance.epoch, lambda: START + 2 * DAY, bool)
        ready_then_stopped = threading.Thread(target=ready, daemon=True)
        ready_then_stopped.start()
        eventually(lambda: current_owner(other).epoch > 1)
        try:
            JOBS[0].run(context)
            os.write(write_end, b"deleted")
        except FencedError:
            os.write(write_end, b"fenced")
        eventually(lambda: maintenance.epoch is None)
        os.write(write_end, b" and out")
        time.sleep(60)

    with PausedChild(work) as child, closing(open_root(path)) as root:
        child.stop()
        maintenance = Maintenance(root, [often()], session_ms=60_000)
        maintenance.start()
        eventually(lambda: maintenance.epoch)
        assert current_owner(root).epoch == 2
        os.kill(child.pid, signal.SIGCONT)
        answer = b""
        while not answer.endswith(b"out"):
            answer += os.read(read_end, 100)
        assert answer == b"fenced and out"
        assert root.partition("t", 0).start_offset() == 0
        # The next heartbeat takes the lock, which the stopped process held.
        eventually(lambda: "maintenance" in held_locks(path))
        maintenance.close()


def held_locks(path):
    """Return "maintenance" if a process holds that lock, or else an empty string."""
    with open(path / "locks" / "maintenance") as file:
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "maintenance"
    return ""


def test_a_fenced_owner_stops_its_jobs(root, monkeypatch):
    """R3: it notices at its next heartbeat, and waits to become the owner again."""
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.05)
    runs = []
    with running(root, [often(lambda context: runs.append(1))]) as maintenance:
        eventually(lambda: runs)
        deadline_ms = root.context.files.uptime_ms() + 10_000_000
        # Another process seems to be the owner: the parent of this one.
        root.context.live.write(
            lambda txn: OWNER.put(txn, value=MaintenanceOwner(7, deadline_ms, os.getppid()))
        )
        eventually(lambda: maintenance.epoch is None or maintenance.epoch > 7)
        # The lock is free, so this process becomes the owner again.
        eventually(lambda: maintenance.epoch == 8)


def test_maintain_takes_over_from_the_owner_for_a_while(tmp_path, monkeypatch):
    """`maintain` runs the jobs as the owner; then the background owner takes over again."""
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.05)
    path = tmp_path / "log"
    with closing(open_root(path)) as first, closing(open_root(path)) as second:
        background = Maintenance(first, [often()])
        background.start()
        eventually(lambda: background.epoch == 1)
        epochs = []

        def note_epochs(context):
            eventually(lambda: background.epoch is None)
            context.should_stop()
            epochs.append((context.epoch, current_owner(second).epoch))
            second.context.live.read(context.fence)
            return "looked"

        with closing(
            Maintenance(second, [often(note_epochs, "look")], background=False)
        ) as maintenance:
            assert maintenance.maintain() == {"look": "looked"}
        assert epochs == [(2, 2)]
        eventually(lambda: background.epoch == 3)
        background.close()


def test_maintain_uses_the_epoch_of_its_own_background(root):
    """One process never runs the same job twice at a time."""
    running_jobs, running_counts = [], []

    def work(context):
        running_jobs.append(context.epoch)
        running_counts.append(len(running_jobs))
        time.sleep(0.001)
        running_jobs.pop()

    with running(root, [often(work)]) as maintenance:
        eventually(lambda: running_counts)
        for _ in range(20):
            maintenance.maintain()
        assert current_owner(root).epoch == 1
    assert max(running_counts) == 1


def test_a_long_maintain_stays_the_owner(root, monkeypatch):
    """It extends its deadline, and takes the lock as soon as that is free."""
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.02)

    def long_job(context):
        for _ in range(30):
            time.sleep(0.01)
            assert not context.should_stop()
            root.context.live.read(context.fence)

    with closing(open_root(root.path)) as other:
        waiting = Maintenance(other, [often()])
        with closing(Maintenance(root, [often(long_job)], session_ms=100)) as maintenance:
            timer = threading.Timer(0.05, waiting.start)
            timer.start()
            maintenance.maintain()
            timer.join()
        eventually(lambda: waiting.epoch)
        waiting.close()


# Jobs


def test_a_failed_job_is_logged_and_the_others_continue(root, caplog):
    """The error only appears in the program's log; the job is tried again."""
    rounds = []

    def bad(context):
        rounds.append(1)
        if len(rounds) < 3:
            raise (DurabilityError("the disk is bad") if len(rounds) == 1 else ValueError("a bug"))

    good_runs = []
    jobs = [often(bad, "bad"), often(lambda context: good_runs.append(1), "good")]
    with caplog.at_level(logging.WARNING), closing(Maintenance(root, jobs)) as maintenance:
        maintenance.start()
        eventually(lambda: maintenance.failures.errors or len(rounds) > 3)
        eventually(lambda: len(rounds) > 4 and good_runs)
        assert maintenance.failures.errors == {}
    assert "the disk is bad" in caplog.text
    assert "a bug" in caplog.text


def test_maintain_raises_the_first_error_after_all_jobs(root):
    """The other partitions and jobs are done first."""
    failed, healthy = make_log(root, OLD, "failed"), make_log(root, OLD, "healthy")
    for log in (failed, healthy):
        fill(log, 6)
    row = root.context.live.get(failed.tail_key)
    failed_row = tail.unpack(row)._replace(failed=True).pack()
    root.context.live.write(lambda txn: txn.put(failed.tail_key, failed_row))
    root.clock.advance(2 * DAY)
    with (
        closing(Maintenance(root, background=False)) as maintenance,
        pytest.raises(DurabilityError),
    ):
        maintenance.maintain()
    assert (failed.start_offset(), healthy.start_offset()) == (0, 6)
    root.context.live.write(lambda txn: txn.put(failed.tail_key, row))


def test_the_interval_of_a_job_counts_across_processes(root, monkeypatch):
    """`live` has the time of the last run of each job, by any process."""
    job = MaintenanceJob("hourly", 3600.0, lambda context: None)
    maintenance = Maintenance(root, [job])
    assert maintenance.due_seconds(job) == 3600.0
    assert 3590 < maintenance.due_seconds(job) <= 3600
    long_ago = max(root.context.files.uptime_ms() - 3_600_000, 0)
    root.context.live.write(lambda txn: JOB_RUNS.put(txn, "hourly", value=long_ago))
    assert maintenance.due_seconds(job._replace(every_seconds=1e-9)) == 0.01
    maintenance.run_job(job, JobContext(root, 1, root.clock, bool))
    assert maintenance.due_seconds(job) > 3590
    maintenance.close()


def test_a_damaged_row_of_the_last_runs_is_reported_as_damage(root):
    """The error names the table, and says what to do."""
    job = MaintenanceJob("hourly", 3600.0, lambda context: None)
    root.context.live.write(lambda txn: txn.put(JOB_RUNS.key("hourly"), b"short"))
    with pytest.raises(CorruptionError, match=r"job runs in live is damaged.*delete its directory"):
        Maintenance(root, [job]).due_seconds(job)


def test_partitions_without_appends_are_flushed_too(log, clock):
    """A22: after flush.ms the flush job flushes a partition without a further append."""
    log.create_topic("t", 2, {"flush.ms": 1000})
    log.create_topic("never")
    flushed, empty, unflushed = (
        log.partition("t", 0),
        log.partition("t", 1),
        log.partition("never", 0),
    )
    fill(flushed, 2)
    fill(unflushed, 2)
    assert [partition.tail().durable_offset for partition in (flushed, empty, unflushed)] == [
        1,
        0,
        0,
    ]
    clock.advance(999)
    assert log.housekeeping.run()["flush"] == []
    clock.advance(1)
    assert log.housekeeping.run()["flush"] == [flushed]
    assert log.housekeeping.run()["flush"] == []
    assert [partition.tail().durable_offset for partition in (flushed, empty, unflushed)] == [
        2,
        0,
        0,
    ]
    fill(flushed, 1, first=2)
    assert log.housekeeping.run()["flush"] == []


def test_commits_are_saved_by_the_owner(tmp_path):
    """P4: the checkpoint job also saves commits of consumers that are no members."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t")
        with log.consumer(group_id="g", enable_auto_commit=False) as consumer:
            consumer.assign([T0])
            consumer.commit({T0: embedlog.OffsetAndMetadata(0, "", None)})
            assert log.housekeeping.run()["checkpoint"] == 1


def send(log, number, pid=7):
    """Append the next record of a producer."""
    return log.append([encoded(b"x", producer=(pid, 0, number))])[0]


def producers(log):
    """Return the ids of the producers whose state the partition has."""
    keys = log.context.live.read(lambda txn: list(PRODUCERS.keys(txn, log.key)))
    return [number for _, number in keys]


def test_a_producer_that_is_idle_is_forgotten_without_a_roll(log, clock):
    """G19: the producers job expires it in a partition without further appends."""
    log.create_topic("t", 2, {"producer.id.expiration.ms": DAY})
    log.create_topic("later", config={"producer.id.expiration.ms": 3 * DAY})
    first, second, later = (log.partition(*at) for at in (("t", 0), ("t", 1), ("later", 0)))
    for partition in (first, second, later):
        send(partition, 0)
    clock.advance(DAY - 1)
    assert log.housekeeping.run()["producers"] == 0
    send(second, 1)
    send(second, 0, pid=8)
    clock.advance(1)
    assert log.housekeeping.run()["producers"] == 1
    assert [producers(partition) for partition in (first, second, later)] == [[], [7, 8], [7]]
    # A forgotten producer may begin with any number; an active one continues its sequence.
    assert send(first, 5).base_offset == 1
    assert send(second, 1).duplicate
    assert send(second, 2).base_offset == 3
    assert len(list(first.segments)) == 1
    version = log.root.context.live.version()
    jobs = [job for job in log.housekeeping.background.jobs if job.name == "producers"]
    with closing(Maintenance(log.root, jobs, background=False)) as maintenance:
        assert maintenance.maintain() == {"producers": 0}
    # Only the commits of `maintain` itself.
    assert log.root.context.live.version() - version <= 3


def test_a_clock_that_jumps_forgets_no_producer_at_once(tmp_path):
    """P17, G19: a roll, a flush and a truncation after the jump forget none either."""
    clock, MovedUptime.ms = ManualClock(), 0
    with closing(open_root(tmp_path / "log", clock=clock, files=MovedUptime)) as root:
        log = make_log(root, {"producer.id.expiration.ms": DAY})
        jobs = [job for job in JOBS if job.name == "producers"]
        with closing(Maintenance(root, jobs, bound_clock=True, background=False)) as maintenance:
            for number in range(3):
                send(log, number)
            assert maintenance.maintain()["producers"] == 0
            clock.advance(30 * DAY)
            assert maintenance.maintain()["producers"] == 0
            log.flush()
            assert producers(log) == [7]
            snapshot = root.context.state.read(lambda txn: SNAPSHOTS.get(txn, log.key))
            assert snapshot.keys() == {7}
            log.truncate_to(2)
            assert producers(log) == [7]
            log.roll()
            assert producers(log) == [7]
            assert send(log, 1).duplicate


def test_a_producer_is_forgotten_once_the_time_has_really_passed(tmp_path):
    """P17, G19: time that also passed by the uptime counts, after a jump as before it."""
    clock, MovedUptime.ms = ManualClock(), 0
    with closing(open_root(tmp_path / "log", clock=clock, files=MovedUptime)) as root:
        log = make_log(root, {"producer.id.expiration.ms": DAY})
        jobs = [job for job in JOBS if job.name == "producers"]
        with closing(Maintenance(root, jobs, bound_clock=True, background=False)) as maintenance:
            send(log, 0)
            assert maintenance.maintain()["producers"] == 0
            clock.advance(30 * DAY)
            assert maintenance.maintain()["producers"] == 0
            MovedUptime.ms += DAY
            clock.advance(DAY)
            assert maintenance.maintain()["producers"] == 1
            assert producers(log) == []


def test_the_clock_is_read_before_the_first_round(root, clock):
    """P17: so a clock that is corrected soon after the boot counts as a jump."""
    job = JOBS[0]._replace(every_seconds=3600)
    log = make_log(root, OLD)
    fill(log, 6)
    with running(root, [job], bound_clock=True) as maintenance:
        eventually(lambda: last_reading(root.context.live))
        clock.advance(30 * DAY)
        assert maintenance.maintain() == {"retention": []}
        assert last_reading(root.context.live).believed_ms < START + DAY
        assert log.start_offset() == 0


def test_a_producer_is_forgotten_by_the_owner_alone(root, clock):
    """P14: a fenced owner forgets nothing."""
    log = make_log(root, {"producer.id.expiration.ms": DAY})
    send(log, 0)
    clock.advance(DAY)

    def fence(txn):
        raise FencedError("another process does that now")

    with pytest.raises(FencedError):
        expire_producers(log, clock(), fence=fence)
    assert producers(log) == [7]


def test_offsets_of_unused_groups_expire_after_a_week(log, clock):
    """M15: a week after the last member left or the last commit; not for subscribed topics."""
    week = MaintenanceConfig().offsets_retention_minutes * 60_000
    log.create_topic("t")
    log.partition("t", 0).append([encoded(b"x")])
    with log.consumer(group_id="alone", enable_auto_commit=False) as consumer:
        consumer.assign([T0])
        consumer.commit({T0: embedlog.OffsetAndMetadata(1, "", None)})
    active = log.consumer("t", group_id="active", enable_auto_commit=False)
    active.poll(0)
    log.groups["idle"].reset_offsets("latest", topics="t", dry_run=False)
    active.commit({T0: embedlog.OffsetAndMetadata(1, "", None)})
    clock.advance(week)
    assert log.housekeeping.run()["offsets"] == 0
    clock.advance(1)
    assert log.housekeeping.run()["offsets"] == 2
    assert list(log.groups) == ["active"]
    active.close()
    clock.advance(week)
    assert log.housekeeping.run()["offsets"] == 0
    clock.advance(1)
    assert log.housekeeping.run()["offsets"] == 1
    assert list(log.groups) == []


# Life


def test_close_waits_for_running_jobs_and_can_be_repeated(root):
    """`close` joins the threads, so none uses the log afterwards."""
    started, topics = threading.Event(), []

    def work(context):
        started.set()
        while not context.should_stop():
            time.sleep(0.001)
        topics.append(root.topics())

    maintenance = Maintenance(root, [often(work)])
    maintenance.start()
    assert started.wait(patient(10))
    maintenance.close()
    maintenance.close()
    assert topics == [{}]
    assert threads() == []
    maintenance.start()
    assert threads() == []


@pytest.mark.usefixtures("begins_soon")
def test_a_log_that_was_garbage_collected_runs_no_jobs(tmp_path):
    """The maintenance thread does not keep the log alive."""
    log = embedlog.open(tmp_path / "log")
    log.create_topic("t")
    root = log.root
    eventually(lambda: current_owner(root))
    del log
    gc.collect()
    eventually(lambda: not threads())
    root.close()


@pytest.mark.usefixtures("begins_soon")
def test_a_forked_child_starts_its_own_threads(tmp_path):
    """P18: the child has neither the threads nor the locks of its parent."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        eventually(lambda: log.housekeeping.background.epoch)

        def work():
            inherited = (log.housekeeping.background.epoch, threads())
            log.topic("t")
            started = len(threads("embedlog-maintenance"))
            eventually(lambda: log.housekeeping.background._watch._watched)
            epoch = log.housekeeping.background.epoch
            log.close()
            return inherited, started, epoch, threads()

        assert in_child(work) == ((None, []), 1, None, [])
        assert current_owner(log.root).epoch == log.housekeeping.background.epoch == 1


def test_a_fork_waits_for_a_pause_of_the_jobs(root):
    """P18: a fork during Arrow's work would copy its locks, and the child would hang."""
    inside = []

    def work(context):
        for _ in range(10):
            inside.append(1)
            time.sleep(0.002)
            inside.pop()
            context.should_stop()

    with running(root, [often(work)]):
        eventually(lambda: inside)
        for _ in range(10):
            assert in_child(lambda: list(inside)) == []


@pytest.mark.usefixtures("begins_soon")
@pytest.mark.parametrize("failing", ["ProcessWatch", "threading.Thread"])
def test_a_program_does_not_fail_if_no_thread_can_be_started(
    tmp_path, monkeypatch, caplog, failing
):
    """P19: a warning is logged; the next use of the log tries again."""

    def refuse(*_, **__):
        raise (
            OSError(24, "too many open files") if failing == "ProcessWatch" else RuntimeError("no")
        )

    with embedlog.open(tmp_path / "log") as log:
        monkeypatch.setattr(f"embedlog.maintenance.owner.{failing}", refuse)
        with caplog.at_level(logging.WARNING):
            log.create_topic("t")
            eventually(lambda: "Cannot start the maintenance" in caplog.text)
        assert threads("embedlog-maintenance") == []
        monkeypatch.undo()
        eventually(lambda: not log.topic("t") and len(threads("embedlog-maintenance")) == 1)


def test_an_owner_that_cannot_start_threads_resigns(root, monkeypatch):
    """P19: it tries again later."""
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.02)
    start, tries = owner.MaintenanceThread.start, []

    def refuse(self):
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(owner.MaintenanceThread, "start", refuse)
    runs = []
    with running(root, [often(lambda context: runs.append(1))]) as maintenance:
        eventually(lambda: runs)
        assert maintenance.epoch == 3


def test_a_read_only_log_runs_no_jobs(tmp_path):
    """P19: with mode="r" there is no thread, and maintenance calls raise."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
    with embedlog.open(tmp_path / "log", mode="r") as log:
        log.topic("t")
        assert threads() == []
        with pytest.raises(ReadOnlyError):
            log.housekeeping.run()
        with pytest.raises(ReadOnlyError):
            log.housekeeping.retention_bytes = 5


def test_only_the_systems_clock_is_bounded(tmp_path):
    """P17: a clock that the program passes is used as it is."""
    with embedlog.open(tmp_path / "a") as log:
        log.housekeeping.run()
        assert log.root.context.live.get(CLOCK_READING.key()) is not None
    with embedlog.open(tmp_path / "b", clock=ManualClock()) as log:
        log.housekeeping.run()
        assert log.root.context.live.get(CLOCK_READING.key()) is None


def test_what_a_log_offers_to_its_users(tmp_path):
    """`delete_records`, leases, `retention_bytes` and `describe_retention` work together."""
    clock = ManualClock()
    with embedlog.open(tmp_path / "log", clock=clock) as log:
        topic = log.create_topic("t", config=OLD)
        fill(log.partition("t", 0), 6)
        with log.housekeeping.hold("snapshot") as lease:
            assert lease.offsets == {T0: 0}
            assert [lease.name for lease in log.housekeeping.leases()] == ["snapshot"]
            clock.advance(2 * DAY)
            assert log.housekeeping.run()["retention"] == []
            assert any("lease 'snapshot'" in line for line in topic.describe_retention())
        assert log.delete_records({T0: 3}) == {T0: 3}
        assert log.delete_records({T0: -1}) == {T0: 6}
        assert log.housekeeping.retention_bytes is None
        log.housekeeping.retention_bytes = 1 << 30
        assert log.housekeeping.retention_bytes == 1 << 30
        log.housekeeping.retention_bytes = None
        with pytest.raises(ValueError, match="retention_bytes"):
            log.housekeeping.retention_bytes = -5
        assert unnamed_files.pending_paths(log.root.context.live) == set()
        assert log.housekeeping.verify() == []


@pytest.mark.usefixtures("begins_soon")
def test_a_process_that_only_opens_a_log_does_its_housekeeping(tmp_path):
    """As one that is started to do it for short programs; a child that it forks may close it."""
    with embedlog.open(tmp_path / "log") as log:

        def owner_pid():
            return owner.owner_in(log.root.context.live).pid

        def close_in_child():
            log.topics()
            log.close()

        in_child(close_in_child)
        until(lambda: owner_pid() == os.getpid(), 30)
        assert threads("embedlog-open") == []


def test_a_log_that_is_closed_or_dropped_soon_starts_no_jobs(tmp_path):
    """Its thread does not keep it, and ends with it."""
    embedlog.open(tmp_path / "log").close()
    assert threads() == []
    embedlog.open(tmp_path / "log")
    gc.collect()
    until(lambda: not threads("embedlog-open"), 30)
    assert threads() == []
