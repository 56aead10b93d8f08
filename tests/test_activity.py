"""The topic ``__activity``: it reports each event once, and nothing else."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing

import pytest
from support.children import PausedChild, in_child, meanwhile
from support.clock import START
from support.forks import until
from support.patience import patient
from support.roots import encoded, fill, make_log, open_root, rows

import embedlog
from embedlog import kv
from embedlog.catalog import ACTIVITY
from embedlog.errors import DiskFullError, FencedError, InvalidTopicError
from embedlog.failures import Failures
from embedlog.keyspace import REPORTED_TOPICS
from embedlog.maintenance import Maintenance, activity, owner
from embedlog.maintenance.jobs import JOBS, JobContext, MaintenanceJob
from embedlog.record import TopicPartition

SIZE = encoded(b"v0").size
DAY = 86_400_000
SMALL = {"segment.bytes": 2 * SIZE, "file.delete.delay.ms": 0, "retention.ms": DAY}
FAILURES = Failures(logging.getLogger("embedlog.test"))
LOOK = next(job for job in JOBS if job.name == "activity")


@pytest.fixture
def log(tmp_path, clock):
    """A log without housekeeping of its own; verified at the end."""
    with embedlog.open(tmp_path / "log", clock=clock, maintenance=False) as log:
        yield log
        assert log.housekeeping.verify() == []


def reported(log, *kinds):
    """Return kind, key and facts of each reported event."""
    if ACTIVITY not in log:
        return []
    parsed = [(record.key.decode(), json.loads(record.value)) for record in log.topic(ACTIVITY)]
    events = [(facts.pop("kind"), key, facts) for key, facts in parsed]
    return [event for event in events if not kinds or event[0] in kinds]


def short(log, *kinds):
    return [event[:2] for event in reported(log, *kinds)]


# Events


def test_created_altered_and_deleted_topics_are_reported(log, clock):
    """Housekeeping of any process reports them from the catalogue, with the log's clock."""
    log.create_topic("t", partitions=2, config={"retention.ms": 5})
    log.housekeeping.run()
    log.alter_topic("t", {"retention.ms": None, "segment.bytes": 1 << 20})
    log.create_partitions("t", 3)
    clock.advance(1_000)
    log.housekeeping.run()
    log.delete_topic("t")
    log.create_topic("t")
    log.housekeeping.run()

    first, second = {"topic": "t", "id": 1}, {"topic": "t", "id": 3}
    assert reported(log)[1:] == [
        ("created", "t", first | {"partitions": 2, "config": {"retention.ms": 5}, **made()}),
        (
            "altered",
            "t",
            first
            | {
                "config": {"retention.ms": [5, None], "segment.bytes": [None, 1 << 20]},
                "partitions": [2, 3],
            },
        ),
        ("deleted", "t", first),
        ("created", "t", second | {"partitions": 1, "config": {}, **made(1_000)}),
    ]
    times = [record.timestamp for record in log.topic(ACTIVITY)]
    assert times == [START, START] + [START + 1_000] * 3


def made(after=0):
    return {"created_ms": START + after}


def test_rolls_are_reported_with_the_base_of_the_active_segment(log):
    """Rolls since the last look become one event, and each roll is counted once."""
    log.create_topic("t", config=SMALL)
    fill(log.partition("t", 0), 7)
    log.housekeeping.run()
    fill(log.partition("t", 0), 2, first=7)
    log.housekeeping.run()

    at = {"topic": "t", "partition": 0}
    assert reported(log, "rolled") == [
        ("rolled", "t-0", at | {"offset": 6, "segments": 3}),
        ("rolled", "t-0", at | {"offset": 8, "segments": 1}),
    ]


def test_retention_is_reported(log, clock):
    """C2: with the new start of the partition."""
    log.create_topic("t", config=SMALL)
    fill(log.partition("t", 0), 6)
    clock.advance(2 * DAY)
    log.housekeeping.run()

    (event,) = reported(log, "retained")
    expected = {"topic": "t", "partition": 0, "start_offset": 6, "segments": 3}
    assert event[:2] == ("retained", "t-0")
    assert {name: event[2][name] for name in expected} == expected


def test_compaction_is_reported():
    """Only partitions that were cleaned: those that failed are reported by the job."""
    from embedlog.compaction.cleaner import CleanResult

    results = [
        CleanResult("t", 1, first_dirty=9, passes=1, records_read=9, records_kept=2),
        CleanResult("t", 2, why="nothing to do"),
        CleanResult("t", 3, why="another compacts it", error=FencedError("no")),
        CleanResult("t", 4, why="not compacted: damaged", error=DiskFullError("damaged")),
        CleanResult(ACTIVITY, 0, passes=1),
    ]
    (compacted,) = activity.events_of(results)

    assert (compacted.kind, compacted.key) == ("compacted", "t-1")
    assert (compacted.facts["records_read"], compacted.facts["records_kept"]) == (9, 2)


def test_generations_of_groups_are_reported(log):
    """M2: each generation with its members, or the newest of several since the last look."""
    log.create_topic("t", partitions=2)
    with log.consumer("t", group_id="g") as consumer:
        consumer.poll(0)
        log.housekeeping.run()
        consumer.commit()
        log.housekeeping.run()
        with log.consumer("t", group_id="g") as other:
            other.poll(0)
            log.housekeeping.run()
    log.housekeeping.run()
    log.groups["g"].delete()
    log.housekeeping.run()

    generations = [
        (facts["generation"], facts["members"]) for _, _, facts in reported(log, "rebalanced")
    ]
    assert generations[:2] == [(1, 1), (2, 2)]
    assert generations[-1][1] == 0
    assert len(generations) == len(dict(generations))


def test_expired_offsets_are_reported(log, clock):
    """M15: for each group."""
    log.create_topic("t")
    fill(log.partition("t", 0), 1)
    log.groups["idle"].reset_offsets("latest", topics="t", dry_run=False)
    clock.advance(7 * DAY + 1)
    assert log.housekeeping.run()["offsets"] == 1

    assert reported(log, "expired") == [("expired", "idle", {"group": "idle", "offsets": 1})]


def test_a_truncation_is_reported_with_its_leader_epoch(log):
    """A36: a truncation by recovery and one by request are reported alike."""
    log.create_topic("t", config=SMALL)
    partition = log.partition("t", 0)
    fill(partition, 5)
    log.housekeeping.run()
    partition.truncate_to(3)
    log.housekeeping.run()

    at = {"topic": "t", "partition": 0}
    assert reported(log, "recovered") == [
        ("recovered", "t-0", at | {"leader_epoch": 1, "offset": 3})
    ]
    assert len(reported(log, "rolled")) == 1


def test_a_rebuilt_live_is_reported_and_nothing_is_repeated(tmp_path, clock):
    """After a reboot: reports on topics are durable, reports on groups restart with the groups."""
    path = tmp_path / "log"
    with embedlog.open(path, clock=clock, maintenance=False) as log:
        log.create_topic("t", config=SMALL)
        fill(log.partition("t", 0), 5)
        log.housekeeping.run()
    (path / "live" / "boot").write_text("another boot")
    with embedlog.open(path, clock=clock, maintenance=False) as log:
        log.housekeeping.run()
        log.housekeeping.run()
        events = short(log)
    assert events == [
        ("owner", "maintenance"),
        ("created", "t"),
        ("rolled", "t-0"),
        ("owner", "maintenance"),
        ("recovered", "live"),
        ("recovered", "t-0"),
    ]


def test_a_new_owner_is_reported(log):
    """Only with an event of its own: a new owner of an idle log is not reported."""
    log.create_topic("a")
    log.housekeeping.run()
    log.create_topic("b")
    log.housekeeping.run()

    def elsewhere():
        log.housekeeping.run()
        log.create_topic("c")
        log.housekeeping.run()
        return os.getpid()

    child = in_child(elsewhere)
    pids = [facts["pid"] for _, _, facts in reported(log, "owner")]
    assert pids == [os.getpid(), child]


def test_a_failure_is_reported_once(tmp_path, monkeypatch):
    """A different failure is reported again."""
    monkeypatch.setattr(owner, "_FIRST_SECONDS", 0.01)
    errors, done = iter([ValueError("a"), ValueError("a"), ValueError("b")]), threading.Event()

    def run(context):
        error = next(errors, None)
        if error is not None:
            raise error
        done.set()

    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        with closing(Maintenance(log.root, [MaintenanceJob("bad", 0.01, run)])) as maintenance:
            maintenance.start()
            assert done.wait(patient(20))
        assert [facts["error"] for _, _, facts in reported(log, "failed")] == ["a", "b"]


# Changes without an event, and lost events


def test_nothing_is_written_to_an_idle_log(tmp_path):
    """Not even to `live`: each of its commits makes all appends read it again."""
    with closing(open_root(tmp_path / "log")) as root:
        make_log(root)
        maintenance = Maintenance(root, [LOOK._replace(every_seconds=0.001)])
        maintenance.maintain()
        before = root.context.state.version(), root.partition(ACTIVITY, 0).end_offset()
        context = JobContext(root, 1, root.clock, bool)
        maintenance.run_job(LOOK, context)  # sees its own writes
        live = root.context.live.version()
        for _ in range(10):
            assert maintenance.run_job(LOOK, context) == []
        assert root.context.live.version() == live
        assert (root.context.state.version(), root.partition(ACTIVITY, 0).end_offset()) == before
        maintenance.close()


def test_the_activity_topic_itself_is_not_reported(log, clock):
    """Its own events would never end; its size is bounded like that of any topic."""
    log.create_topic("t")
    log.housekeeping.run()
    log.alter_topic(ACTIVITY, {"segment.bytes": 1_000, "retention.bytes": 4_000})
    for number in range(40):
        log.alter_topic("t", {"retention.ms": number + 1})
        log.housekeeping.run()

    assert log.partition(ACTIVITY, 0).size_bytes() < 6_000
    assert log.partition(ACTIVITY, 0).start_offset() > 0
    assert {key for _, key in short(log)} == {"t"}


def test_a_short_program_does_not_create_the_activity_topic(tmp_path):
    """Nothing in it is slower because of the topic."""
    script = """
        import embedlog, sys
        with embedlog.open(sys.argv[1]) as log:
            log.create_topic("t")
            with log.producer() as producer:
                producer.send("t", b"x").result()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), tmp_path / "log"], check=True)
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        assert log.topics(internal=True) == ["t"]


def test_a_process_without_maintenance_reports_nothing(tmp_path, monkeypatch):
    """With maintenance=False, at any age; another process with maintenance reports its changes."""
    monkeypatch.setattr(owner, "_FIRST_SECONDS", 0.01)
    path = tmp_path / "log"
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("t")
        fill(log.partition("t", 0), 3)
        time.sleep(0.2)
        assert log.topics(internal=True) == ["t"]
    with closing(open_root(path)) as root:
        maintenance = Maintenance(root, [LOOK._replace(every_seconds=0.01)])
        maintenance.start()
        until(lambda: ACTIVITY in root.topics(), 20.0)
        maintenance.close()


def test_an_event_that_cannot_be_written_fails_no_job(log, clock, monkeypatch, caplog):
    """P10: on a full disk the event is lost, and the round succeeds."""
    log.create_topic("t", config=SMALL)
    fill(log.partition("t", 0), 6)
    log.housekeeping.run()
    clock.advance(2 * DAY)

    def full(*_, **__):
        raise DiskFullError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(embedlog.partition.PartitionLog, "append", full)
        assert log.housekeeping.run()["retention"]
    assert "Report of what happened" in caplog.text
    log.housekeeping.run()
    assert "retained" not in dict(short(log))


def test_events_that_cannot_be_noted_are_reported_later(log, monkeypatch):
    """No event is lost while none is noted."""
    log.create_topic("t")

    def full(*_):
        raise DiskFullError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(activity, "_note", full)
        assert log.housekeeping.run()["activity"] == []
    log.housekeeping.run()
    assert short(log, "created") == [("created", "t")]


def test_a_damaged_note_is_rewritten_without_events(log):
    """Earlier events are unknown, so none of them is reported."""
    log.create_topic("t", config=SMALL)
    log.housekeeping.run()
    fill(log.partition("t", 0), 5)
    state = log.root.context.state
    (key,) = state.read(lambda txn: [key for key, _ in kv.rows(txn, REPORTED_TOPICS.prefix())])
    state.write(lambda txn: txn.put(key, b"damaged"))
    log.housekeeping.run()
    fill(log.partition("t", 0), 2, first=5)
    log.housekeeping.run()

    (event,) = reported(log, "rolled")
    assert event[2]["segments"] == 1


# Each event once


def test_the_work_of_a_killed_process_is_reported_by_another(log):
    """The reports come from the catalogue, so the process that made the change is not needed."""
    path = log.path

    def work(ready):
        with closing(open_root(path)) as root:
            partition = make_log(root, SMALL, "t")
            fill(partition, 5)
            ready()

    with PausedChild(work) as child:
        child.kill()
    log.housekeeping.run()

    assert short(log)[1:] == [("created", "t"), ("rolled", "t-0")]


def test_two_concurrent_rounds_report_a_change_once(tmp_path):
    """Also if one round overtakes the other: the note decides."""
    path = tmp_path / "log"
    roots = [open_root(path) for _ in range(3)]
    events = [[], []]

    def detect(number):
        events[number] += activity.detect_changes(roots[number], lambda _: None, FAILURES)

    with meanwhile(lambda: detect(0)), meanwhile(lambda: detect(1)):
        for number in range(30):
            make_log(roots[2], topic=f"t{number}")
    events[0] += activity.detect_changes(roots[0], lambda _: None, FAILURES)

    changes = [(event.kind, event.key) for event in events[0] + events[1]]
    assert sorted(changes) == sorted(("created", f"t{number}") for number in range(30))
    for root in roots:
        root.close()


def test_a_fenced_owner_notes_nothing(log):
    """R3: the new owner reports it."""
    log.create_topic("t")
    with pytest.raises(FencedError):
        LOOK.run(JobContext(log.root, 99, log.root.clock, bool))
    log.housekeeping.run()
    assert short(log, "created") == [("created", "t")]


# The topic


def test_the_activity_topic_is_internal(log):
    """Hidden from lists and patterns; only embedlog itself may create, write and delete it."""
    log.create_topic("t")
    log.housekeeping.run()

    assert log.topics() == ["t"]
    assert log.topics(internal=True) == [ACTIVITY, "t"]
    assert ACTIVITY in log
    assert ACTIVITY not in repr(log)
    for call in (
        lambda: log.create_topic(ACTIVITY, exist_ok=True),
        lambda: log.delete_topic(ACTIVITY),
        lambda: log.create_partitions(ACTIVITY, 2),
        lambda: log.producer().send(ACTIVITY, b"x"),
    ):
        with pytest.raises(InvalidTopicError, match="embedlog itself"):
            call()
    with log.consumer(group_id="g", auto_offset_reset="earliest") as consumer:
        assert consumer.topics() == {"t"}
        consumer.subscribe(pattern=".*")
        consumer.poll(0)
        assert consumer.assignment() == {TopicPartition("t", 0)}
    with log.housekeeping.hold("all") as lease:
        assert lease.offsets.keys() == {TopicPartition("t", 0)}


def test_a_consumer_can_subscribe_before_the_topic_exists(log):
    """The subscription does not create it: the topic has settings of its own."""
    with log.consumer(ACTIVITY, group_id="g", auto_offset_reset="earliest") as consumer:
        assert consumer.poll(0) == {}
        assert ACTIVITY not in log
        log.create_topic("t")
        log.housekeeping.run()
        records = [
            record for batch in consumer.poll(int(patient(5_000))).values() for record in batch
        ]
    assert [json.loads(record.value)["kind"] for record in records][:2] == ["owner", "created"]
    assert log.describe_topic(ACTIVITY)["overrides"] == {
        "segment.bytes": 4 << 20,
        "retention.bytes": 16 << 20,
    }


def test_rows_are_json(log):
    """Each record is one object: kind and facts."""
    log.create_topic("t")
    log.housekeeping.run()
    for _, _, key, value, _ in rows(log.partition(ACTIVITY, 0)):
        assert key
        assert json.loads(value)["kind"] in activity.KINDS
