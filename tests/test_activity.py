"""The topic ``__activity``: each event is reported once, and none that did not happen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing

import pytest
from support.children import PausedChild, assert_killed, in_child, meanwhile
from support.clock import START
from support.patience import patient
from support.roots import encoded, fill, make_log, open_root, rows

import embedlog
from embedlog import kv
from embedlog.catalog import ACTIVITY
from embedlog.errors import DiskFullError, FencedError, InvalidTopicError
from embedlog.keyspace import REPORTED_TOPICS
from embedlog.maintenance import Maintenance, activity, owner
from embedlog.maintenance.jobs import JOBS, JobContext, MaintenanceJob
from embedlog.record import TopicPartition

SIZE = encoded(b"v0").size
DAY = 86_400_000
SMALL = {"segment.bytes": 2 * SIZE, "file.delete.delay.ms": 0, "retention.ms": DAY}
LOOK = next(job for job in JOBS if job.name == "activity")


@pytest.fixture
def log(tmp_path, clock):
    """A log that nobody looks after unless a test does; healthy at the end."""
    with embedlog.open(tmp_path / "log", clock=clock, maintenance=False) as log:
        yield log
        assert log.verify() == []


def reported(log, *kinds):
    """Return kind, key and facts of each reported event."""
    if ACTIVITY not in log:
        return []
    found = [(record.key.decode(), json.loads(record.value)) for record in log.topic(ACTIVITY)]
    events = [(facts.pop("kind"), key, facts) for key, facts in found]
    return [each for each in events if not kinds or each[0] in kinds]


def short(log, *kinds):
    return [each[:2] for each in reported(log, *kinds)]


# What is reported


def test_created_altered_and_deleted_topics_are_reported(log, clock):
    """By whichever process: the housekeeping sees it in the catalogue, with the log's clock."""
    log.create_topic("t", partitions=2, config={"retention.ms": 5})
    log.maintain()
    log.alter_topic("t", {"retention.ms": None, "segment.bytes": 1 << 20})
    log.create_partitions("t", 3)
    clock.advance(1_000)
    log.maintain()
    log.delete_topic("t")
    log.create_topic("t")
    log.maintain()

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
    """Several since the last look are one event, and each of them is counted once."""
    log.create_topic("t", config=SMALL)
    fill(log.partition("t", 0), 7)
    log.maintain()
    fill(log.partition("t", 0), 2, first=7)
    log.maintain()

    at = {"topic": "t", "partition": 0}
    assert reported(log, "rolled") == [
        ("rolled", "t-0", at | {"offset": 6, "segments": 3}),
        ("rolled", "t-0", at | {"offset": 8, "segments": 1}),
    ]


def test_retention_is_reported(log, clock):
    """C2: with where the partition begins since."""
    log.create_topic("t", config=SMALL)
    fill(log.partition("t", 0), 6)
    clock.advance(2 * DAY)
    log.maintain()

    (found,) = reported(log, "retained")
    wanted = {"topic": "t", "partition": 0, "start_offset": 6, "segments": 3}
    assert found[:2] == ("retained", "t-0")
    assert {name: found[2][name] for name in wanted} == wanted


def test_compaction_is_reported():
    """Of partitions that it cleaned; of the others there is nothing to say."""
    from embedlog.compaction.cleaner import CleanResult

    did = [
        CleanResult("t", 1, first_dirty=9, passes=1, records_read=9, records_kept=2),
        CleanResult("t", 2, why="nothing to do"),
        CleanResult("t", 3, why="another compacts it", error=FencedError("no")),
        CleanResult("t", 4, why="not compacted: damaged", error=DiskFullError("damaged")),
        CleanResult(ACTIVITY, 0, passes=1),
    ]
    found, bad = activity.events_of(did)

    assert bad == ("failed", "t-4", bad.facts)
    assert (bad.facts["job"], bad.facts["error"]) == ("compaction", "not compacted: damaged")
    assert (found.kind, found.key) == ("compacted", "t-1")
    assert (found.facts["records_read"], found.facts["records_kept"]) == (9, 2)


def test_generations_of_groups_are_reported(log):
    """M2: each with its members, or the newest one if there were several since the last look."""
    log.create_topic("t", partitions=2)
    with log.consumer("t", group_id="g") as consumer:
        consumer.poll(0)
        log.maintain()
        consumer.commit()
        log.maintain()
        with log.consumer("t", group_id="g") as other:
            other.poll(0)
            log.maintain()
    log.maintain()
    log.group("g").delete()
    log.maintain()

    found = [(facts["generation"], facts["members"]) for _, _, facts in reported(log, "rebalanced")]
    assert found[:2] == [(1, 1), (2, 2)]
    assert found[-1][1] == 0
    assert len(found) == len(dict(found))


def test_expired_offsets_are_reported(log, clock):
    """M15: by group."""
    log.create_topic("t")
    fill(log.partition("t", 0), 1)
    log.group("idle").reset_offsets("latest", topics="t", dry_run=False)
    clock.advance(7 * DAY + 1)
    assert log.maintain()["offsets"] == 1

    assert reported(log, "expired") == [("expired", "idle", {"group": "idle", "offsets": 1})]


def test_a_truncation_is_reported_with_its_leader_epoch(log):
    """A36: whether it was recovery that cut, or somebody asked for it."""
    log.create_topic("t", config=SMALL)
    part = log.partition("t", 0)
    fill(part, 5)
    log.maintain()
    part.truncate_to(3)
    log.maintain()

    at = {"topic": "t", "partition": 0}
    assert reported(log, "recovered") == [
        ("recovered", "t-0", at | {"leader_epoch": 1, "offset": 3})
    ]
    assert len(reported(log, "rolled")) == 1


def test_a_rebuilt_live_is_reported_and_nothing_is_repeated(tmp_path, clock):
    """After a reboot: what was told of topics is durable, of groups it begins anew with them."""
    path = tmp_path / "log"
    with embedlog.open(path, clock=clock, maintenance=False) as log:
        log.create_topic("t", config=SMALL)
        fill(log.partition("t", 0), 5)
        log.maintain()
    (path / "live" / "boot").write_text("another boot")
    with embedlog.open(path, clock=clock, maintenance=False) as log:
        log.maintain()
        log.maintain()
        found = short(log)
    assert found == [
        ("owner", "maintenance"),
        ("created", "t"),
        ("rolled", "t-0"),
        ("owner", "maintenance"),
        ("recovered", "live"),
        ("recovered", "t-0"),
    ]


def test_a_new_owner_is_reported(log):
    """Only with something that it does: to look after an idle log is no event."""
    log.create_topic("a")
    log.maintain()
    log.create_topic("b")
    log.maintain()

    def elsewhere():
        log.maintain()
        log.create_topic("c")
        log.maintain()
        return os.getpid()

    child = in_child(elsewhere)
    pids = [facts["pid"] for _, _, facts in reported(log, "owner")]
    assert pids == [os.getpid(), child]


def test_a_failure_is_reported_once(tmp_path):
    """Again if it fails otherwise."""
    errors = iter([ValueError("a"), ValueError("a"), ValueError("b"), None])

    def run(context):
        error = next(errors, None)
        if error is not None:
            raise error

    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        job = MaintenanceJob("bad", 1.0, run)
        mine = Maintenance(log.root, [job])
        worker = owner.MaintenanceThread(mine, job, 1, log.root.clock)
        for _ in range(4):
            with worker.busy:
                worker._run_job()
        mine.close()
        assert [facts["error"] for _, _, facts in reported(log, "failed")] == ["a", "b"]


# What is not


def test_nothing_is_written_to_an_idle_log(tmp_path):
    """Not even in `live`, whose every commit has all who append look at it."""
    with closing(open_root(tmp_path / "log")) as root:
        make_log(root)
        mine = Maintenance(root, [LOOK._replace(every_seconds=0.001)])
        mine.maintain()
        before = root.context.state.version(), root.partition(ACTIVITY, 0).end_offset()
        context = JobContext(root, 1, root.clock, bool)
        mine.run_job(LOOK, context)  # which sees what it wrote itself
        live = root.context.live.version()
        for _ in range(10):
            assert mine.run_job(LOOK, context) == []
        assert root.context.live.version() == live
        assert (root.context.state.version(), root.partition(ACTIVITY, 0).end_offset()) == before
        mine.close()


def test_the_activity_topic_itself_is_not_reported(log, clock):
    """That would never end; its size is bounded as that of any topic."""
    log.create_topic("t")
    log.maintain()
    log.alter_topic(ACTIVITY, {"segment.bytes": 1_000, "retention.bytes": 4_000})
    for number in range(40):
        log.alter_topic("t", {"retention.ms": number + 1})
        log.maintain()

    assert log.partition(ACTIVITY, 0).size_bytes() < 6_000
    assert log.partition(ACTIVITY, 0).start_offset() > 0
    assert {key for _, key in short(log)} == {"t"}


def test_a_short_program_does_not_create_the_activity_topic(tmp_path):
    """It does its own things only: nothing of it is slower than before."""
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
    """maintenance=False, however long it lives; a process that is willing tells for it."""
    monkeypatch.setattr(owner, "_FIRST_SECONDS", 0.01)
    path = tmp_path / "log"
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("t")
        fill(log.partition("t", 0), 3)
        time.sleep(0.2)
        assert log.topics(internal=True) == ["t"]
    with closing(open_root(path)) as root:
        mine = Maintenance(root, [LOOK._replace(every_seconds=0.01)])
        mine.start()
        wait_for(lambda: ACTIVITY in root.topics())
        mine.close()


def wait_for(holds, seconds=20):
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < patient(seconds), "it never came"
        time.sleep(0.001)


def test_an_event_that_cannot_be_written_fails_no_job(log, clock, monkeypatch, caplog):
    """P10: a full disk takes the event, not the round."""
    log.create_topic("t", config=SMALL)
    fill(log.partition("t", 0), 6)
    log.maintain()
    clock.advance(2 * DAY)

    def full(*_, **__):
        raise DiskFullError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(embedlog.partition.PartitionLog, "append", full)
        assert log.maintain()["retention"]
    assert "Cannot report" in caplog.text
    log.maintain()
    assert "retained" not in dict(short(log))


def test_events_that_cannot_be_noted_are_reported_later(log, monkeypatch):
    """They are in it: nothing is lost as long as nothing was noted."""
    log.create_topic("t")

    def full(*_):
        raise DiskFullError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(activity, "_note", full)
        assert log.maintain()["activity"] == []
    log.maintain()
    assert short(log, "created") == [("created", "t")]


def test_a_damaged_note_is_rewritten_without_events(log):
    """What happened before is not known any more, so nothing is said of it."""
    log.create_topic("t", config=SMALL)
    log.maintain()
    fill(log.partition("t", 0), 5)
    state = log.root.context.state
    (key,) = state.read(lambda txn: [key for key, _ in kv.rows(txn, REPORTED_TOPICS.prefix())])
    state.write(lambda txn: txn.put(key, b"damaged"))
    log.maintain()
    fill(log.partition("t", 0), 2, first=5)
    log.maintain()

    (found,) = reported(log, "rolled")
    assert found[2]["segments"] == 1


# Once


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


MINE, THEIRS = {("retained", "t-0")}, {("created", "u"), ("rolled", "t-0")}


@pytest.mark.parametrize(
    ("where", "what", "lost"),
    [
        ("_note", None, set()),
        ("report", "retained", MINE),
        ("report", "created", THEIRS),
        ("_topic", None, MINE),
    ],
)
def test_an_owner_killed_before_its_report_loses_at_most_that_report(
    log, clock, monkeypatch, where, what, lost
):
    """Its report may be lost; everything else is reported once, before or after."""
    log.create_topic("t", config=SMALL)
    fill(log.partition("t", 0), 6)
    log.maintain()
    before = len(reported(log))
    log.create_topic("u")
    fill(log.partition("t", 0), 2, first=6)
    clock.advance(2 * DAY)

    real = getattr(activity, where)

    def reached(*args):
        if what is None or any(event.kind == what for event in args[1]):
            die()
        real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(activity, where, reached)
        assert_killed(log.maintain)
    assert log.partition("t", 0).start_offset() >= 6
    log.maintain()
    log.maintain()

    found = [each for each in short(log)[before:] if each[0] != "owner"]
    assert sorted(found) == sorted((MINE | THEIRS) - lost)


def test_the_work_of_a_killed_process_is_reported_by_another(log):
    """It is in the catalogue, so nobody needs to have had the time to tell it."""
    path = log.path

    def work(ready):
        with closing(open_root(path)) as root:
            part = make_log(root, SMALL, "t")
            fill(part, 5)
            ready()

    with PausedChild(work) as child:
        child.kill()
    log.maintain()

    assert short(log)[1:] == [("created", "t"), ("rolled", "t-0")]


def test_two_concurrent_rounds_report_a_change_once(tmp_path):
    """One that was overtaken as well as its follower: the note decides."""
    path = tmp_path / "log"
    roots = [open_root(path) for _ in range(3)]
    done = [[], []]

    def look(number):
        done[number] += activity.detect_changes(roots[number], lambda _: None)

    with meanwhile(lambda: look(0)), meanwhile(lambda: look(1)):
        for number in range(30):
            make_log(roots[2], topic=f"t{number}")
    done[0] += activity.detect_changes(roots[0], lambda _: None)

    found = [(each.kind, each.key) for each in done[0] + done[1]]
    assert sorted(found) == sorted(("created", f"t{number}") for number in range(30))
    for root in roots:
        root.close()


def test_a_fenced_owner_notes_nothing(log):
    """R3: the other one tells it."""
    log.create_topic("t")
    with pytest.raises(FencedError):
        LOOK.run(JobContext(log.root, 99, log.root.clock, bool))
    log.maintain()
    assert short(log, "created") == [("created", "t")]


# A topic like any other, nearly


def test_the_activity_topic_is_internal(log):
    """Hidden from lists and patterns; made, written and deleted by nobody else, as in Kafka."""
    log.create_topic("t")
    log.maintain()

    assert log.topics() == ["t"]
    assert log.topics(internal=True) == [ACTIVITY, "t"]
    assert ACTIVITY in log
    assert ACTIVITY not in repr(log)
    for refused in (
        lambda: log.create_topic(ACTIVITY, exist_ok=True),
        lambda: log.delete_topic(ACTIVITY),
        lambda: log.create_partitions(ACTIVITY, 2),
        lambda: log.producer().send(ACTIVITY, b"x"),
    ):
        with pytest.raises(InvalidTopicError, match="housekeeping"):
            refused()
    with log.consumer(group_id="g", auto_offset_reset="earliest") as consumer:
        assert consumer.topics() == {"t"}
        consumer.subscribe(pattern=".*")
        consumer.poll(0)
        assert consumer.assignment() == {TopicPartition("t", 0)}
    with log.hold("all") as lease:
        assert lease.offsets.keys() == {TopicPartition("t", 0)}


def test_a_consumer_can_subscribe_before_the_topic_exists(log):
    """Who subscribes to it does not make it: it has settings of its own."""
    with log.consumer(ACTIVITY, group_id="g", auto_offset_reset="earliest") as consumer:
        assert consumer.poll(0) == {}
        assert ACTIVITY not in log
        log.create_topic("t")
        log.maintain()
        found = [record for some in consumer.poll(int(patient(5_000))).values() for record in some]
    assert [json.loads(record.value)["kind"] for record in found][:2] == ["owner", "created"]
    assert log.describe_topic(ACTIVITY)["overrides"] == {
        "segment.bytes": 4 << 20,
        "retention.bytes": 16 << 20,
    }


def test_rows_are_json(log):
    """One object a record: kind, and the facts."""
    log.create_topic("t")
    log.maintain()
    for _, _, key, value, _ in rows(log.partition(ACTIVITY, 0)):
        assert key
        assert json.loads(value)["kind"] in activity.KINDS
