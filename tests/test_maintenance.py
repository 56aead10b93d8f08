"""Maintenance: the owner, fencing, the jobs, and clocks that jump."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from support.children import PausedChild, in_child
from support.clock import START, ManualClock
from support.patience import patient
from support.roots import encoded, fill, make_log, open_root

import embedlog
from embedlog.config import MaintenanceConfig
from embedlog.errors import DurabilityError, FencedError, ReadOnlyError
from embedlog.files import Files
from embedlog.keyspace import JOB_RUNS, PRODUCERS
from embedlog.maintenance import Maintenance, owner
from embedlog.maintenance.jobs import JOBS, OWNER, JobContext, MaintenanceJob, MaintenanceOwner
from embedlog.partition import pending_deletes, tail
from embedlog.partition.bounded_clock import CLOCK_READING, last_reading
from embedlog.partition.producer_state import SNAPSHOTS
from embedlog.partition.producers import expire_producers
from embedlog.record import TopicPartition

pytestmark = pytest.mark.tier("test")  # its threads wait for each other

SIZE = encoded(b"v0").size
DAY = 86_400_000
OLD = {"segment.bytes": 2 * SIZE, "file.delete.delay.ms": 0, "retention.ms": DAY}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Jobs start at once here, not after a second."""
    # Threads are counted here: those of what earlier tests left to the collector go now.
    gc.collect()
    monkeypatch.setattr(owner, "_FIRST_SECONDS", 0.01)


def eventually(holds: Callable[[], object], seconds: float = 20) -> float:
    """Wait until something holds, and return how many seconds that took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < patient(seconds), "it never came"
        time.sleep(0.001)
    return time.monotonic() - began


def threads(name="embedlog-"):
    return [each for each in threading.enumerate() if each.name.startswith(name)]


def current_owner(root):
    """Return the maintenance owner of a log; None if there was none since the boot."""
    return OWNER.get(root.context.live)


def often(run=lambda context: None, name="often"):
    return MaintenanceJob(name, 0.01, run)


# One owner


def test_a_log_that_is_only_opened_starts_nothing(tmp_path):
    """A program that opens and closes pays nothing; the first use starts the thread."""
    before = threads()
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        assert log.topics() == ["t"]
        # `create_topic` returned a view of the topic: from then on it runs.
        assert len(threads("embedlog-maintenance")) == 1
        eventually(lambda: current_owner(log.root))
    with embedlog.open(tmp_path / "log") as log:
        assert threads() == before
    assert threads() == before


def test_maintain_works_without_background_jobs(tmp_path):
    """maintenance=False: no thread; `maintain` does one round with the log's clock."""
    clock = ManualClock()
    with embedlog.open(tmp_path / "log", clock=clock, maintenance=False) as log:
        log.create_topic("t", config=OLD)
        fill(log.partition("t", 0), 6)
        assert (threads(), current_owner(log.root)) == ([], None)
        assert log.maintain()["retention"] == []
        clock.advance(DAY + 1_000)
        done = log.maintain()["retention"]
        assert [(one.topic, one.start_offset, one.segments) for one in done] == [("t", 6, 3)]
        assert log.partition("t", 0).start_offset() == 6


def test_the_background_runs_the_jobs_of_maintain(tmp_path):
    """Retention, without anybody asking."""
    with closing(open_root(tmp_path / "log")) as root:
        log = make_log(root, OLD)
        fill(log, 6)
        root.clock.advance(2 * DAY)
        with closing(Maintenance(root, [JOBS[0]._replace(every_seconds=0.05)])) as mine:
            mine.start()
            eventually(lambda: log.start_offset() == 6)
            assert current_owner(root).pid == os.getpid()
            assert mine.epoch == current_owner(root).epoch == 1
    assert threads() == []


def test_a_changed_setting_applies_at_the_next_round(tmp_path):
    """C10: without a reopen."""
    with closing(open_root(tmp_path / "log")) as root:
        log = make_log(root, OLD | {"retention.ms": -1})
        fill(log, 6)
        root.clock.advance(2 * DAY)
        rounds = []
        job = often(lambda context: rounds.append(JOBS[0].run(context)))
        with closing(Maintenance(root, [job])) as mine:
            mine.start()
            eventually(lambda: len(rounds) > 2)
            assert log.start_offset() == 0
            root.alter_topic("t", {"retention.ms": DAY})
            eventually(lambda: log.start_offset() == 6)


def test_one_of_several_handles_is_the_owner(tmp_path):
    """Two handles, in one process or in two: one owner, and another one once it closes."""
    with closing(open_root(tmp_path / "log")) as first, closing(open_root(tmp_path / "log")) as two:
        done = []
        one = Maintenance(first, [often(lambda context: done.append(1))])
        other = Maintenance(two, [often(lambda context: done.append(2))])
        one.start()
        eventually(lambda: done)
        other.start()
        eventually(lambda: len(done) > 50)
        assert set(done) == {1}
        one.close()
        del done[:]
        eventually(lambda: 2 in done)
        assert 1 not in done
        assert current_owner(two).epoch == 2
        other.close()


def child_that_owns(path, ready):
    root = open_root(path)
    mine = Maintenance(root, [often()])
    mine.start()
    eventually(lambda: mine.epoch)
    ready()


def test_when_the_owner_is_killed_another_takes_over_at_once(tmp_path):
    """P15: the kernel tells, and its lock is free; no deadline is waited for."""
    path = tmp_path / "log"
    open_root(path).close()
    with (
        PausedChild(lambda ready: child_that_owns(path, ready)) as child,
        closing(open_root(path)) as root,
    ):
        mine = Maintenance(root, [often()])
        mine.start()
        eventually(lambda: mine._watch._watched)
        assert mine.epoch is None
        os.kill(child.pid, signal.SIGKILL)
        took = eventually(lambda: mine.epoch)
        assert current_owner(root).epoch == 2
        mine.close()
    assert took < patient(1)


def test_a_stopped_owner_is_replaced_and_deletes_nothing_when_it_resumes(tmp_path):
    """P14, R3: past its deadline; its epoch is checked in the transaction that deletes."""
    path = tmp_path / "log"
    with closing(open_root(path)) as root:
        log = make_log(root, OLD)
        fill(log, 6)
    told, say = os.pipe()

    def work(ready):
        other = open_root(path)
        mine = Maintenance(other, [], session_ms=200)
        mine.start()
        eventually(lambda: mine.epoch)
        context = JobContext(other, mine.epoch, lambda: START + 2 * DAY, bool)
        ready_then_stopped = threading.Thread(target=ready, daemon=True)
        ready_then_stopped.start()
        eventually(lambda: current_owner(other).epoch > 1)
        try:
            JOBS[0].run(context)
            os.write(say, b"deleted")
        except FencedError:
            os.write(say, b"fenced")
        eventually(lambda: mine.epoch is None)
        os.write(say, b" and out")
        time.sleep(60)

    with PausedChild(work) as child, closing(open_root(path)) as root:
        child.stop()
        mine = Maintenance(root, [often()], session_ms=60_000)
        mine.start()
        eventually(lambda: mine.epoch)
        assert current_owner(root).epoch == 2
        os.kill(child.pid, signal.SIGCONT)
        said = b""
        while not said.endswith(b"out"):
            said += os.read(told, 100)
        assert said == b"fenced and out"
        assert root.partition("t", 0).start_offset() == 0
        # The lock that the stopped one kept is taken with the next beat.
        eventually(lambda: "maintenance" in held_locks(path))
        mine.close()


def held_locks(path):
    """Tell whether the lock of the housekeeping is held by anybody."""
    with open(path / "locks" / "maintenance") as file:
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "maintenance"
    return ""


def test_a_fenced_owner_stops_its_jobs(tmp_path, monkeypatch):
    """R3: it hears of it at its next beat, and becomes one of those who wait."""
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.05)
    with closing(open_root(tmp_path / "log")) as root:
        done = []
        with closing(Maintenance(root, [often(lambda context: done.append(1))])) as mine:
            mine.start()
            eventually(lambda: done)
            far = root.context.files.uptime_ms() + 10_000_000
            # As if another machine's worth of processes had it: the pid is of nobody.
            root.context.live.write(
                lambda txn: OWNER.put(txn, value=MaintenanceOwner(7, far, os.getppid()))
            )
            eventually(lambda: mine.epoch is None or mine.epoch > 7)
            # Its lock was free again, so it could be had.
            eventually(lambda: mine.epoch == 8)


def test_maintain_takes_over_from_the_owner_for_a_while(tmp_path, monkeypatch):
    """One round now, exclusively; then they have it back."""
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.05)
    path = tmp_path / "log"
    with closing(open_root(path)) as first, closing(open_root(path)) as second:
        background = Maintenance(first, [often()])
        background.start()
        eventually(lambda: background.epoch == 1)
        seen = []

        def look(context):
            eventually(lambda: background.epoch is None)
            context.should_stop()
            seen.append((context.epoch, current_owner(second).epoch))
            second.context.live.read(context.fence)
            return "looked"

        with closing(Maintenance(second, [often(look, "look")], background=False)) as mine:
            assert mine.maintain() == {"look": "looked"}
        assert seen == [(2, 2)]
        eventually(lambda: background.epoch == 3)
        background.close()


def test_maintain_uses_the_epoch_of_its_own_background(tmp_path):
    """And waits for the same job there: never two at a time in one process."""
    with closing(open_root(tmp_path / "log")) as root:
        running, most = [], []

        def work(context):
            running.append(context.epoch)
            most.append(len(running))
            time.sleep(0.001)
            running.pop()

        with closing(Maintenance(root, [often(work)])) as mine:
            mine.start()
            eventually(lambda: most)
            for _ in range(20):
                mine.maintain()
            assert current_owner(root).epoch == 1
        assert max(most) == 1


def test_a_long_maintain_stays_the_owner(tmp_path, monkeypatch):
    """Its deadline moves along, and it takes the lock as soon as that is free."""
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.02)
    with closing(open_root(tmp_path / "log")) as root:

        def long(context):
            for _ in range(30):
                time.sleep(0.01)
                assert not context.should_stop()
                root.context.live.read(context.fence)

        with closing(open_root(root.path)) as other:
            waiting = Maintenance(other, [often()])
            with closing(Maintenance(root, [often(long)], session_ms=100)) as mine:
                late = threading.Timer(0.05, waiting.start)
                late.start()
                mine.maintain()
                late.join()
            eventually(lambda: waiting.epoch)
            waiting.close()


# Jobs


def test_a_failed_job_is_logged_and_the_others_continue(tmp_path, caplog):
    """Nobody would hear of it otherwise; the job is tried again."""
    with closing(open_root(tmp_path / "log")) as root:
        rounds = []

        def bad(context):
            rounds.append(1)
            if len(rounds) < 3:
                raise (
                    DurabilityError("the disk is bad") if len(rounds) == 1 else ValueError("a bug")
                )

        good = []
        jobs = [often(bad, "bad"), often(lambda context: good.append(1), "good")]
        with caplog.at_level(logging.WARNING), closing(Maintenance(root, jobs)) as mine:
            mine.start()
            eventually(lambda: mine.failures or len(rounds) > 3)
            eventually(lambda: len(rounds) > 4 and good)
            assert mine.failures == {}
        assert "the disk is bad" in caplog.text
        assert "a bug" in caplog.text


def test_maintain_raises_the_first_error_after_all_jobs(tmp_path):
    """To the caller, who asked for it."""
    with closing(open_root(tmp_path / "log")) as root:
        bad, good = make_log(root, OLD, "bad"), make_log(root, OLD, "good")
        for log in (bad, good):
            fill(log, 6)
        row = root.context.live.get(bad.tail_key)
        failed = tail.unpack(row)._replace(failed=True).pack()
        root.context.live.write(lambda txn: txn.put(bad.tail_key, failed))
        root.clock.advance(2 * DAY)
        with closing(Maintenance(root, background=False)) as mine, pytest.raises(DurabilityError):
            mine.maintain()
        assert (bad.start_offset(), good.start_offset()) == (0, 6)
        root.context.live.write(lambda txn: txn.put(bad.tail_key, row))


def test_the_interval_of_a_job_counts_across_processes(tmp_path, monkeypatch):
    """When a job was last done stands in `live`: the time between is that of the log."""
    with closing(open_root(tmp_path / "log")) as root:
        job = MaintenanceJob("hourly", 3600.0, lambda context: None)
        mine = Maintenance(root, [job])
        assert mine.due_seconds(job) == 3600.0
        assert 3590 < mine.due_seconds(job) <= 3600
        long_ago = max(root.context.files.uptime_ms() - 3_600_000, 0)
        root.context.live.write(lambda txn: JOB_RUNS.put(txn, "hourly", value=long_ago))
        assert mine.due_seconds(job._replace(every_seconds=1e-9)) == 0.01
        mine.run_job(job, JobContext(root, 1, root.clock, bool))
        assert mine.due_seconds(job) > 3590
        mine.close()


def test_partitions_without_appends_are_flushed_too(tmp_path):
    """A22: flush.ms counts on when the last append is long ago; the work of the scheduler."""
    clock = ManualClock()
    with embedlog.open(tmp_path / "log", clock=clock, maintenance=False) as log:
        log.create_topic("t", 2, {"flush.ms": 1000})
        log.create_topic("never")
        some, none, never = log.partition("t", 0), log.partition("t", 1), log.partition("never", 0)
        fill(some, 2)
        fill(never, 2)
        assert [one.tail().durable_offset for one in (some, none, never)] == [1, 0, 0]
        clock.advance(999)
        assert log.maintain()["flush"] == []
        clock.advance(1)
        assert log.maintain()["flush"] == [some]
        assert log.maintain()["flush"] == []
        assert [one.tail().durable_offset for one in (some, none, never)] == [2, 0, 0]
        fill(some, 1, first=2)
        assert log.maintain()["flush"] == []


def test_commits_are_saved_by_the_owner(tmp_path):
    """P4: also of consumers that are no members, which nobody saves for otherwise."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t")
        with log.consumer(group_id="g", enable_auto_commit=False) as consumer:
            one = TopicPartition("t", 0)
            consumer.assign([one])
            consumer.commit({one: embedlog.OffsetAndMetadata(0, "", None)})
            assert log.maintain()["checkpoint"] == 1


def send(log, number, pid=7):
    """Append the next record of a producer."""
    return log.append([encoded(b"x", producer=(pid, 0, number))])[0]


def producers(log):
    """Those that the partition remembers."""
    keys = log.context.live.read(lambda txn: list(PRODUCERS.keys(txn, log.key)))
    return [number for _, number in keys]


def test_a_producer_that_is_idle_is_forgotten_without_a_roll(tmp_path):
    """G19: by the housekeeping, of a partition to which nothing is appended any more."""
    clock = ManualClock()
    with embedlog.open(tmp_path / "log", clock=clock, maintenance=False) as log:
        log.create_topic("t", 2, {"producer.id.expiration.ms": DAY})
        log.create_topic("later", config={"producer.id.expiration.ms": 3 * DAY})
        first, second, later = (log.partition(*at) for at in (("t", 0), ("t", 1), ("later", 0)))
        for here in (first, second, later):
            send(here, 0)
        clock.advance(DAY - 1)
        assert log.maintain()["producers"] == 0
        send(second, 1)
        send(second, 0, pid=8)
        clock.advance(1)
        assert log.maintain()["producers"] == 1
        assert [producers(here) for here in (first, second, later)] == [[], [7, 8], [7]]
        # As a new producer: with any number; and one that was active goes on counting.
        assert send(first, 5).base_offset == 1
        assert send(second, 1).duplicate
        assert send(second, 2).base_offset == 3
        assert len(list(first.segments)) == 1
        version = log.root.context.live.version()
        jobs = [job for job in log.maintenance.jobs if job.name == "producers"]
        with closing(Maintenance(log.root, jobs, background=False)) as mine:
            assert mine.maintain() == {"producers": 0}
        # Only what `maintain` itself notes.
        assert log.root.context.live.version() - version <= 3


class Moved(Files):
    """A machine whose uptime a test moves."""

    ms = 0

    def uptime_ms(self):
        return super().uptime_ms() + Moved.ms


def test_a_clock_that_jumps_forgets_no_producer_at_once(tmp_path):
    """P17, G19: nor where the partition rolls, is flushed or recovered meanwhile."""
    clock, Moved.ms = ManualClock(), 0
    with closing(open_root(tmp_path / "log", clock=clock, files=Moved)) as root:
        log = make_log(root, {"producer.id.expiration.ms": DAY})
        jobs = [job for job in JOBS if job.name == "producers"]
        with closing(Maintenance(root, jobs, bound_clock=True, background=False)) as mine:
            for number in range(3):
                send(log, number)
            assert mine.maintain()["producers"] == 0
            clock.advance(30 * DAY)
            assert mine.maintain()["producers"] == 0
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
    """P17, G19: time that passes by the uptime too is believed, after a jump as before it."""
    clock, Moved.ms = ManualClock(), 0
    with closing(open_root(tmp_path / "log", clock=clock, files=Moved)) as root:
        log = make_log(root, {"producer.id.expiration.ms": DAY})
        jobs = [job for job in JOBS if job.name == "producers"]
        with closing(Maintenance(root, jobs, bound_clock=True, background=False)) as mine:
            send(log, 0)
            assert mine.maintain()["producers"] == 0
            clock.advance(30 * DAY)
            assert mine.maintain()["producers"] == 0
            Moved.ms += DAY
            clock.advance(DAY)
            assert mine.maintain()["producers"] == 1
            assert producers(log) == []


def test_the_clock_is_read_before_the_first_round(tmp_path):
    """P17: a clock that is set right soon after the boot is seen to jump."""
    clock = ManualClock()
    with closing(open_root(tmp_path / "log", clock=clock)) as root:
        job = JOBS[0]._replace(every_seconds=3600)
        log = make_log(root, OLD)
        fill(log, 6)
        with closing(Maintenance(root, [job], bound_clock=True)) as mine:
            mine.start()
            eventually(lambda: last_reading(root.context.live))
            clock.advance(30 * DAY)
            assert mine.maintain() == {"retention": []}
            assert last_reading(root.context.live).believed_ms < START + DAY
            assert log.start_offset() == 0


def test_a_producer_is_forgotten_by_the_owner_alone(tmp_path):
    """P14: an owner that was overtaken forgets nothing."""
    clock = ManualClock()
    with closing(open_root(tmp_path / "log", clock=clock)) as root:
        log = make_log(root, {"producer.id.expiration.ms": DAY})
        send(log, 0)
        clock.advance(DAY)

        def fence(txn):
            raise FencedError("another process does that now")

        with pytest.raises(FencedError):
            expire_producers(log, clock(), fence=fence)
        assert producers(log) == [7]


def test_offsets_of_unused_groups_expire_after_a_week(tmp_path):
    """M15: from when the last member left, or the last commit; not of topics that members read."""
    clock = ManualClock()
    week = MaintenanceConfig().offsets_retention_minutes * 60_000
    with embedlog.open(tmp_path / "log", clock=clock, maintenance=False) as log:
        log.create_topic("t")
        log.partition("t", 0).append([encoded(b"x")])
        one = TopicPartition("t", 0)
        with log.consumer(group_id="alone", enable_auto_commit=False) as consumer:
            consumer.assign([one])
            consumer.commit({one: embedlog.OffsetAndMetadata(1, "", None)})
        active = log.consumer("t", group_id="active", enable_auto_commit=False)
        active.poll(0)
        log.group("idle").reset_offsets("latest", topics="t", dry_run=False)
        active.commit({one: embedlog.OffsetAndMetadata(1, "", None)})
        clock.advance(week)
        assert log.maintain()["offsets"] == 0
        clock.advance(1)
        assert log.maintain()["offsets"] == 2
        assert log.groups() == ["active"]
        active.close()
        clock.advance(week)
        assert log.maintain()["offsets"] == 0
        clock.advance(1)
        assert log.maintain()["offsets"] == 1
        assert log.groups() == []


# Life


def test_close_waits_for_running_jobs_and_can_be_repeated(tmp_path):
    """Joined by close(), and no thread uses the log after."""
    with closing(open_root(tmp_path / "log")) as root:
        at_work, done = threading.Event(), []

        def work(context):
            at_work.set()
            while not context.should_stop():
                time.sleep(0.001)
            done.append(root.topics())

        mine = Maintenance(root, [often(work)])
        mine.start()
        assert at_work.wait(patient(10))
        mine.close()
        mine.close()
        assert done == [{}]
        assert threads() == []
        mine.start()
        assert threads() == []


def test_a_log_that_was_garbage_collected_runs_no_jobs(tmp_path):
    """Its thread does not keep it alive."""
    log = embedlog.open(tmp_path / "log")
    log.create_topic("t")
    root = log.root
    eventually(lambda: current_owner(root))
    del log
    gc.collect()
    eventually(lambda: not threads())
    root.close()


def test_a_forked_child_starts_its_own_threads(tmp_path):
    """P18: it has neither the threads nor the locks of its parent."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        eventually(lambda: log.maintenance.epoch)

        def work():
            inherited = (log.maintenance.epoch, threads())
            log.topic("t")
            started = len(threads("embedlog-maintenance"))
            eventually(lambda: log.maintenance._watch._watched)
            epoch = log.maintenance.epoch
            log.close()
            return inherited, started, epoch, threads()

        assert in_child(work) == ((None, []), 1, None, [])
        assert current_owner(log.root).epoch == log.maintenance.epoch == 1


def test_a_fork_waits_for_a_pause_of_the_jobs(tmp_path):
    """P18: what is copied in the middle of Arrow's work would hang the child."""
    with closing(open_root(tmp_path / "log")) as root:
        inside = []

        def work(context):
            for _ in range(10):
                inside.append(1)
                time.sleep(0.002)
                inside.pop()
                context.should_stop()

        with closing(Maintenance(root, [often(work)])) as mine:
            mine.start()
            eventually(lambda: inside)
            for _ in range(10):
                assert in_child(lambda: list(inside)) == []


@pytest.mark.parametrize("what", ["ProcessWatch", "threading.Thread"])
def test_a_program_does_not_fail_if_no_thread_can_be_started(tmp_path, monkeypatch, caplog, what):
    """P19: it asked for none; the next use of the log tries again."""

    def refuse(*_, **__):
        raise OSError(24, "too many open files") if what == "ProcessWatch" else RuntimeError("no")

    with embedlog.open(tmp_path / "log") as log:
        monkeypatch.setattr(f"embedlog.maintenance.owner.{what}", refuse)
        with caplog.at_level(logging.WARNING):
            log.create_topic("t")
        assert "Cannot start the maintenance" in caplog.text
        assert threads() == []
        monkeypatch.undo()
        log.topic("t")
        assert len(threads("embedlog-maintenance")) == 1


def test_an_owner_that_cannot_start_threads_resigns(tmp_path, monkeypatch):
    """P19: and tries again later."""
    monkeypatch.setattr(owner, "HEARTBEAT_SECONDS", 0.02)
    with closing(open_root(tmp_path / "log")) as root:
        start, tries = owner.MaintenanceThread.start, []

        def refuse(self):
            tries.append(1)
            if len(tries) < 3:
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(owner.MaintenanceThread, "start", refuse)
        done = []
        with closing(Maintenance(root, [often(lambda context: done.append(1))])) as mine:
            mine.start()
            eventually(lambda: done)
            assert mine.epoch == 3


def test_a_read_only_log_runs_no_jobs(tmp_path):
    """P19."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
    with embedlog.open(tmp_path / "log", mode="r") as log:
        log.topic("t")
        assert threads() == []
        with pytest.raises(ReadOnlyError):
            log.maintain()
        with pytest.raises(ReadOnlyError):
            log.retention_bytes = 5


def test_only_the_systems_clock_is_bounded(tmp_path):
    """P17: what a program passes is what it wants to go by."""
    with embedlog.open(tmp_path / "a") as log:
        log.maintain()
        assert log.root.context.live.get(CLOCK_READING.key()) is not None
    with embedlog.open(tmp_path / "b", clock=ManualClock()) as log:
        log.maintain()
        assert log.root.context.live.get(CLOCK_READING.key()) is None


def test_what_a_log_offers_to_its_users(tmp_path):
    """delete_records, leases, budgets and describe_retention, from the top floor."""
    clock = ManualClock()
    with embedlog.open(tmp_path / "log", clock=clock) as log:
        topic = log.create_topic("t", config=OLD)
        fill(log.partition("t", 0), 6)
        one = TopicPartition("t", 0)
        with log.hold("snapshot") as lease:
            assert lease.offsets == {one: 0}
            assert [each.name for each in log.leases()] == ["snapshot"]
            clock.advance(2 * DAY)
            assert log.maintain()["retention"] == []
            assert any("lease 'snapshot'" in line for line in topic.describe_retention())
        assert log.delete_records({one: 3}) == {one: 3}
        assert log.delete_records({one: -1}) == {one: 6}
        assert log.retention_bytes is None
        log.retention_bytes = 1 << 30
        assert log.retention_bytes == 1 << 30
        log.retention_bytes = None
        with pytest.raises(ValueError, match="retention_bytes"):
            log.retention_bytes = -5
        assert pending_deletes.paths(log.root.context.live) == set()
        assert log.verify() == []
