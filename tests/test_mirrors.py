"""Mirrors between logs: exact copies, standby topics, failover, and sites that are merged."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.clock import START, ManualClock
from support.faulty_files import FaultyFiles
from support.forks import Child, until, was_killed
from support.manual_compaction import keep
from support.patience import patient
from support.replicas import assignment, values
from support.roots import encoded, healthy, open_root
from support.staged_files import stage
from support.tiers import choose

import embedlog
from embedlog import keyspace
from embedlog.api import Log
from embedlog.catalog import ACTIVITY
from embedlog.cli import main
from embedlog.config import TopicConfig
from embedlog.errors import (
    CorruptBatchError,
    DiskFullError,
    GroupIdNotFoundError,
    IllegalStateError,
    InvalidConfigError,
    InvalidGroupIdError,
    InvalidPartitionError,
    InvalidTopicError,
    LockTimeoutError,
    MirrorConflictError,
    MirrorDivergedError,
    MirroredTopicError,
    NonEmptyGroupError,
    NotALogError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from embedlog.group import Group
from embedlog.kafka import KafkaAdminClient
from embedlog.kafka import errors as kafka_errors
from embedlog.kafka.admin import NewPartitions
from embedlog.kafka.confluent import admin as confluent
from embedlog.mirrors import mirror as mirror_module
from embedlog.mirrors import root_target
from embedlog.mirrors.hops import HEADER, hops_of
from embedlog.mirrors.root_source import RootSource
from embedlog.mirrors.root_target import RootTarget
from embedlog.partition import partition_log, recovery
from embedlog.publish.transaction import Publication, publish
from embedlog.record import TopicPartition
from embedlog.replication import root as recovery_of_replicas

P0 = TopicPartition("t", 0)


@pytest.fixture(autouse=True)
def look_again_soon(monkeypatch):
    """Look for groups, starts, errors and the end more often than once a second."""
    monkeypatch.setattr(mirror_module, "_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(mirror_module, "_RETRY_SECONDS", 0.1)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def a(tmp_path, clock):
    """The source."""
    with embedlog.open(tmp_path / "a", maintenance=False, clock=clock) as log:
        yield log


@pytest.fixture
def b(tmp_path, clock):
    """The target."""
    with embedlog.open(tmp_path / "b", maintenance=False, clock=clock) as log:
        yield log


def mirror(source: Any, target: Any, **options: Any) -> embedlog.MirrorRun:
    """Copy, without a progress bar."""
    return embedlog.mirror(source, target, **{"progress": False, **options})


def records(log: Log, topic: str) -> list[tuple[Any, ...]]:
    """Return all of a record but for the name of its topic and the epoch."""
    return [tuple(record[1:-1]) for record in log.topic(topic)]


def send(log: Log, topic: str, *values: Any, **options: Any) -> None:
    """Send values, and wait for them."""
    with log.producer() as producer:
        for value in values:
            producer.send(topic, value, **options)


def events(log: Log, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind."""
    if ACTIVITY not in log.topics(internal=True):
        return []
    facts = [json.loads(record.value) for record in log.topic(ACTIVITY)]
    return [fact for fact in facts if fact["kind"] == kind]


def settled(check: Any) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + patient(10)
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# Exact copies


def test_a_copy_has_the_records_of_its_source(a, b):
    """Offsets, keys, values, headers, timestamps and partitions, of every kind of batch."""
    a.create_topic("t", partitions=3)
    for number in range(3):
        log = a.partition("t", number)
        log.append([encoded(b"1", None, b"", keys=[b"k", None, b""], at=[START, -1, 5])])
        log.append([encoded(b"2", headers=[[("h", b"x"), ("h", None)]])])
        log.append([encoded(*(b"%d" % n for n in range(500)), compression="lz4")])
        log.append([encoded(b"z", compression="zstd", producer=(7, 0, 0))])

    run = mirror(a, b)

    assert records(b, "t") == records(a, "t")
    assert b.topic("t").partitions == a.topic("t").partitions
    assert (run.status.records, run.status.state, run.status.lag) == (len(a["t"]), "finished", 0)


def test_a_copy_keeps_the_append_times_of_its_source(a, b, clock):
    """They are those of the source's clock, though the target has the same setting."""
    a.create_topic("t", config={"message.timestamp.type": "LogAppendTime", "segment.ms": 1000})
    send(a, "t", b"1")
    clock.advance(500)
    send(a, "t", b"2")
    clock.advance(86_400_000)

    mirror(a, b)

    assert records(b, "t") == records(a, "t")
    assert [record.timestamp_type for record in b["t"]] == [1, 1]
    assert len(b.partition("t", 0).segments) == 1


def test_a_compacted_source_is_copied_with_its_gaps(a, b):
    """In batches and segments like those of the source, not in one for each gap."""
    a.create_topic("t", config={"cleanup.policy": "compact"})
    for number in range(300):
        send(a, "t", b"%d" % number, key=b"%d" % (number % 70 if number % 3 else number))
    a.housekeeping.compact("t", force=True, progress=False)
    send(a, "t", b"dirty", key=b"x")
    source = a.partition("t", 0)

    mirror(a, b)

    copy = b.partition("t", 0)
    assert records(b, "t") == records(a, "t")
    assert copy.end_offset() == source.end_offset()
    assert len(copy.segments) <= len(source.segments) + 1
    b.housekeeping.compact("t", force=True, progress=False)
    a.housekeeping.compact("t", force=True, progress=False)
    assert records(b, "t") == records(a, "t")


def test_a_copy_goes_on_inside_a_batch_that_compaction_gathered(a, b):
    """Of a batch that begins below the position, the records from there on are copied."""
    a.create_topic("t", config={"cleanup.policy": "compact"})
    log = a.partition("t", 0)
    for number in range(4):
        log.append([encoded(b"%d" % number, keys=[b"%d" % number])])
    mirror(a, b)
    for number in range(4, 10):
        log.append([encoded(b"%d" % number, keys=[b"%d" % number])])
    log.roll()
    keep(log, [0, 2, 3, 5, 8])

    assert mirror(a, b).status.records == 2
    assert [record.offset for record in b["t"]] == [0, 1, 2, 3, 5, 8]
    assert b.partition("t", 0).end_offset() == 10


def test_a_typed_topic_is_copied_with_its_schemas(a, b):
    """All versions, with defaults and names; old records are not written anew."""
    first = pa.schema([("id", pa.int64()), ("name", pa.string())])
    a.create_topic("t", schema=first, key="id")
    send(a, "t", {"id": 1, "name": "x"}, {"id": 2, "name": None})
    with a.producer() as producer:
        producer.send("t", None, key={"id": 1})
    mirror(a, b)
    second = pa.schema([("id", pa.int64()), ("title", pa.string()), ("n", pa.int32())])
    a.alter_topic("t", schema=second, rename={"name": "title"}, defaults={"n": 7})
    send(a, "t", {"id": 3, "title": "y", "n": 1})

    mirror(a, b)

    assert b.topic("t").to_arrow().equals(a.topic("t").to_arrow())
    assert records(b, "t") == records(a, "t")
    assert b.describe_topic("t")["schema"] == a.describe_topic("t")["schema"]
    assert [info.schema_version for info in b.partition("t", 0).segments.values()] == [1, 2] or [
        info.schema_version for info in b.partition("t", 0).segments.values()
    ] == [1, 1, 2]


def record_schema(name: str, *fields: str) -> dict[str, Any]:
    """Return a schema of Avro whose fields are ints that may be missing."""
    items = [{"name": field, "type": "int", "default": 0} for field in fields]
    return {"type": "record", "name": name, "fields": items}


def fill_with_avro(log: Log) -> None:
    """Write keys and values of Avro in two versions, in batches of each kind."""
    log.create_topic("t", key="avro", value="avro")
    log.schema_registry.register("t-key", record_schema("Key", "k"))
    log.schema_registry.set_compatibility("FULL", "t-value")
    with log.producer() as producer:
        for number in range(2):
            log.schema_registry.register("t-value", record_schema("Value", *"xy"[: number + 1]))
            for codec in ("none", "lz4"):
                log.alter_topic("t", {"compression.type": codec})
                values = [{"x": n} if n % 3 else None for n in range(20)]
                producer.send_batch("t", values, keys=[{"k": n % 7} for n in range(20)])
                producer.flush()
    log.partition("t", 0).roll()
    keep(log.partition("t", 0), range(0, log.partition("t", 0).end_offset(), 2))
    send(log, "t", {"x": 5}, key={"k": 99}, headers=[("h", b"1")])


@pytest.mark.parametrize("merge", [False, True], ids=["copies", "merges"])
@pytest.mark.parametrize("before", ["nothing", "others", "equal ones", "more"])
def test_a_copy_of_avro_can_be_read_at_any_target(a, b, merge, before):
    """Its schemas come with it; where the ids are taken, the records have other ones (H2)."""
    fill_with_avro(a)
    own = [record_schema("Own", "n"), record_schema("Value", "x"), record_schema("Key", "k")]
    for schema in {"nothing": [], "others": own[:1], "equal ones": own[1:], "more": own}[before]:
        b.schema_registry.register(f"own-{schema['name']}", schema)
    if before != "nothing":
        b.create_topic("own", value="avro")
        b.schema_registry.register("own-value", own[0])
        send(b, "own", {"n": 7})

    mirror(a, b, merge=merge)
    send(a, "t", {"x": 1, "y": 2}, key={"k": 1})
    mirror(a, b, merge=merge)

    pairs = [[(r.key, r.value, r.timestamp) for r in log["t"]] for log in (a, b)]
    assert pairs[0] == pairs[1]
    assert len(pairs[0]) == 42
    if before != "nothing":
        assert b["own"][0].value == {"n": 7}
    assert b.schema_registry.versions("t-value") == [1, 2]
    assert b.schema_registry.compatibility("t-value") == "FULL"
    if not merge:
        assert [r.offset for r in b["t"]] == [r.offset for r in a["t"]]
        b.mirrors.failover(dry_run=False)
    send(b, "t", {"x": 3}, key={"k": 2})
    assert b["t"][-1].value == {"x": 3, "y": 0}
    assert healthy(b.root)


def test_two_sites_with_equal_ids_share_a_hub(a, b, tmp_path):
    """And a standby of the hub has its ids."""
    with embedlog.open(tmp_path / "c", maintenance=False) as c:
        for name, log in (("a", a), ("b", b)):
            log.create_topic("t", value="avro")
            log.schema_registry.register("t-value", record_schema(name.upper(), name))
            send(log, "t", {name: 1})
        for name, log in (("a", a), ("b", b)):
            mirror(log, c, site=name)
        mirror(c, tmp_path / "d")
        with embedlog.open(tmp_path / "d", maintenance=False) as d:
            for log in (c, d):
                assert log["a.t"][0].value == {"a": 1}
                assert log["b.t"][0].value == {"b": 1}
                assert log.schema_registry.subjects() == ["a.t-value", "b.t-value"]


def test_a_schema_that_is_registered_while_a_round_runs_comes_before_its_records(a, b, monkeypatch):
    """The topics were listed before, without it."""
    b.schema_registry.register("own", record_schema("Own", "n"))
    a.create_topic("t", value="avro")
    a.create_topic("u")
    fetch = RootSource.fetch

    def register_first(source, *arguments):
        monkeypatch.setattr(RootSource, "fetch", fetch)
        a.schema_registry.register("t-value", record_schema("Value", "x", "y"))
        send(a, "t", {"x": 1})
        return fetch(source, *arguments)

    a.partition("t", 0).append([encoded(b"no avro"), encoded(None)])
    monkeypatch.setattr(RootSource, "fetch", register_first)
    mirror(a, b)
    assert RootSource.fetch is fetch
    assert b["t"][-1].value == a["t"][-1].value == {"x": 1, "y": 0}


def test_a_record_whose_schema_is_lost_is_not_copied_under_the_id_of_another(a, b):
    """Where ids are others, it cannot be told what it means; the rest of the topics is copied."""
    for number in range(3):
        b.schema_registry.register(f"own{number}", record_schema(f"Own{number}", "n"))
    a.create_topic("t", value="avro")
    a.create_topic("u")
    a.schema_registry.register("t-value", record_schema("Value", "x"))
    send(a, "t", {"x": 1})
    a.partition("t", 0).append([encoded(b"\0\0\0\0\3\2")])
    send(a, "u", b"1")

    with pytest.raises(MirrorConflictError, match="begins with 3, which is the id of no schema"):
        mirror(a, b)
    assert records(b, "u") == records(a, "u")
    assert b.partition("t", 0).end_offset() <= 1


def test_changes_of_the_source_reach_the_copy_and_those_of_the_copy_stay(a, b):
    """Settings, partitions and schemas; only what changed is applied."""
    a.create_topic("t", config={"retention.ms": 1_000_000, "segment.ms": 5000})
    mirror(a, b)
    b.alter_topic("t", {"retention.ms": 9_000_000})
    a.alter_topic("t", {"segment.ms": None, "compression.type": "zstd"})
    a.create_partitions("t", 3)
    send(a, "t", *(b"%d" % number for number in range(30)))

    mirror(a, b)

    config = b.topic("t").config
    assert (config["retention.ms"], config["compression.type"]) == (9_000_000, "zstd")
    assert config["segment.ms"] == a.topic("t").config["segment.ms"]
    assert records(b, "t") == records(a, "t")
    assert b.root.partitions("t") == 3


def test_a_copy_begins_where_its_source_begins(a, b):
    """Also if the source has no record any more."""
    a.create_topic("t", partitions=2)
    for number in range(2):
        a.partition("t", number).append([encoded(*(b"%d" % n for n in range(10)))])
    a.delete_records({P0: 10, TopicPartition("t", 1): 4})

    run = mirror(a, b)

    bounds = [(p["start_offset"], p["end_offset"]) for p in b.describe_topic("t")["partitions"]]
    assert bounds == [(10, 10), (4, 10)]
    assert records(b, "t") == records(a, "t")
    assert run.status.skipped == 0
    assert events(b, "skipped") == []


def test_a_copy_follows_the_start_of_its_source_by_segments(a, b):
    """As long as it has the retention settings of the source."""
    a.create_topic("t")
    log = a.partition("t", 0)
    for number in range(4):
        log.append([encoded(b"%d" % number)])
        log.roll()
    mirror(a, b)
    b.partition("t", 0).roll()
    a.delete_records({P0: 4})

    mirror(a, b)
    assert b.partition("t", 0).start_offset() == 4

    b.alter_topic("t", {"retention.ms": -1})
    send(a, "t", b"x", b"y")
    mirror(a, b)
    a.delete_records({P0: 6})
    mirror(a, b)
    assert b.partition("t", 0).start_offset() == 4


def test_what_retention_took_before_it_was_copied_is_reported_in_numbers(a, b, caplog):
    """In the status, in the log, as an event, and as a metric; the copy goes on."""
    a.create_topic("t")
    send(a, "t", *(b"%d" % number for number in range(10)))
    mirror(a, b)
    send(a, "t", *(b"%d" % number for number in range(10, 30)))
    a.delete_records({P0: 25})

    with caplog.at_level(logging.WARNING, "embedlog.mirrors"):
        run = mirror(a, b, name="m")

    assert run.status.skipped == run.status.by_topic["t"].skipped == 15
    assert [r.offset for r in b["t"]] == [*range(25, 30)], "it follows the start, too"
    assert "offsets [10, 25) of t-0" in caplog.text
    (event,) = events(b, "skipped")
    assert (event["first_offset"], event["next_offset"], event["offsets"]) == (10, 25, 15)
    assert b.metrics()["mirror.m"]["record-skipped-total"] == 15


@pytest.mark.parametrize("grown", [6, 9, 10, 11, 15])
@pytest.mark.parametrize("merge", [False, True], ids=["copies", "merges"])
def test_a_source_that_was_cut_and_has_grown_to_any_length_is_noticed(a, b, grown, merge):
    """Also to exactly the length of the copy, at a start and by a mirror that runs (H4)."""
    a.create_topic("t")
    log = a.partition("t", 0)
    for number in range(10):
        log.append([encoded(b"%d" % number)])
    mirror(a, b, merge=merge)
    with mirror(a, b, merge=merge, follow=True) as run:
        settled(lambda: run.status.updated_ms)
        log.truncate_to(6)
        for number in range(6, grown):
            log.append([encoded(b"new %d" % number)])
        settled(lambda: run.errors)
        assert isinstance(run.errors[0], MirrorDivergedError)
    with pytest.raises(MirrorDivergedError) as caught:
        mirror(a, b, merge=merge)
    assert caught.value.next_offset == 6
    assert [record.value for record in b["t"]] == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("seed", range(choose(test=10, all=300)))
def test_a_copy_that_is_cut_where_the_error_says_is_equal_to_its_source_again(a, b, seed):
    """Random appends, cuts, deletions and recoveries of the source; each difference is named."""
    dice = random.Random(seed)
    a.create_topic("t")
    log, number = a.partition("t", 0), 0
    for _ in range(25):
        action = dice.choice(["append", "append", "cut", "mirror", "recover", "delete"])
        if action == "append":
            for _ in range(dice.randrange(4)):
                count = dice.choice([1, 1, 3])
                log.append([encoded(*(b"%d %d" % (number, n) for n in range(count)))])
                number += 1
        elif action == "cut" and log.end_offset() > log.start_offset():
            log.truncate_to(dice.randrange(log.start_offset(), log.end_offset()))
        elif action == "recover":
            recovery.discard_tail(log)
        elif action == "delete" and dice.random() < 0.3:
            a.delete_records({P0: dice.randint(log.start_offset(), log.end_offset())})
        elif action == "mirror":
            try:
                mirror(a, b)
            except MirrorDivergedError as error:
                b.partition("t", 0).truncate_to(error.next_offset or 0)
                mirror(a, b)
            start = max(part.start_offset() for part in (log, b.partition("t", 0)))
            copies = [[r for r in records(each, "t") if r[1] >= start] for each in (a, b)]
            assert copies[0] == copies[1]


def test_a_recovery_of_the_source_that_loses_nothing_is_no_cut(a, b):
    """It begins a leader epoch, also if the mirror was killed before it copied a record of it."""
    a.create_topic("t")
    log = a.partition("t", 0)
    for number in range(4):
        log.append([encoded(b"%d" % number)])
        if number == 1:
            mirror(a, b)
    recovery.discard_tail(log)
    epoch = log.tail().leader_epoch
    assert epoch > 0
    target, source = RootTarget(b.root), RootSource(a.root)
    topic = source.topics()["t"]
    assert target.prepare(topic, "t", source)
    # As a mirror that was killed after it noted the epoch.
    fetch = source.fetch("t", 0, target.position("t", 0), 1 << 20)
    assert target.append("t", 0, fetch._replace(batches=[])) == 0
    assert RootTarget(b.root).prepare(topic, "t", source)
    mirror(a, b)
    assert records(b, "t") == records(a, "t")
    recovery.discard_tail(b.partition("t", 0))
    log.append([encoded(b"5")])
    mirror(a, b)
    assert records(b, "t") == records(a, "t")


def test_a_topic_that_was_created_again_is_no_more_of_the_copy(a, b):
    """The copy of the deleted topic stays as it is."""
    a.create_topic("t")
    send(a, "t", b"1", b"2")
    mirror(a, b)
    a.delete_topic("t")
    mirror(a, b)
    a.create_topic("t")
    send(a, "t", b"other", b"other", b"other")

    with pytest.raises(MirrorDivergedError):
        mirror(a, b)
    assert [record.value for record in b["t"]] == [b"1", b"2"]
    b.delete_topic("t")
    mirror(a, b)
    assert records(b, "t") == records(a, "t")


def test_damage_is_not_copied(a, b):
    """The records before it are, and the next run goes on there once it is repaired."""
    a.create_topic("t", partitions=2)
    log = a.partition("t", 0)
    log.append([encoded(b"good" * 2000)])
    log.append([encoded(b"bad" * 2000)])
    a.partition("t", 1).append([encoded(b"other")])
    a.flush()
    path = Path(a.path, log.path_of(log.active_segment))
    data = bytearray(path.read_bytes())
    data[data.rindex(b"badbad")] ^= 1
    path.write_bytes(data)

    with pytest.raises(CorruptBatchError):
        mirror(a, b)
    assert b.partition("t", 0).end_offset() == 1
    assert b.partition("t", 1).end_offset() == 1


def test_topics_are_chosen_by_their_whole_names(a, b):
    """And internal ones are never copied."""
    for name in ("orders", "orders-eu", "clicks"):
        a.create_topic(name)
    mirror(a, b, topics="orders|cl.*")
    assert b.topics() == ["clicks", "orders"]
    a.housekeeping.run()
    assert ACTIVITY in a.topics(internal=True)
    mirror(a, b)
    assert not events(b, "created")


def test_a_pattern_that_matches_no_topic_is_an_error_and_creates_no_target(tmp_path, a):
    """It is mistyped; a log without topics can be copied as a whole."""
    mirror(a, tmp_path / "empty")
    a.create_topic("orders")
    with pytest.raises(UnknownTopicOrPartitionError, match="matches 'ordrs'; it has orders"):
        mirror(a, tmp_path / "new", topics="ordrs")
    assert not (tmp_path / "new").exists()
    assert main(["mirror", a.path, str(tmp_path / "new"), "--topics", "ordrs"]) == 3


def test_a_mirror_that_follows_waits_for_topics_and_says_so(a, b, caplog):
    """Once."""
    a.create_topic("u")
    with (
        caplog.at_level(logging.WARNING, "embedlog.mirrors"),
        mirror(a, b, topics="t", follow=True, name="m") as run,
    ):
        settled(lambda: caplog.records)
        a.create_topic("t")
        send(a, "t", b"1")
        settled(lambda: run.status.records == 1)
    assert caplog.messages == [
        "Mirror m: No topic of the source matches 't'; it has u; the mirror waits for one"
    ]


def test_a_root_is_a_path_too_and_a_missing_source_is_not_created(tmp_path, a, capsys):
    """The target is created."""
    a.create_topic("t")
    send(a, "t", b"1")
    mirror(tmp_path / "a", tmp_path / "new")
    with embedlog.open(tmp_path / "new", mode="r") as log:
        assert records(log, "t") == records(a, "t")

    (tmp_path / "plain").mkdir()
    for name in ("missing", "plain", "a/embedlog.toml"):
        with pytest.raises(NotALogError):
            mirror(tmp_path / name, tmp_path / "other")
        assert main(["mirror", str(tmp_path / name), str(tmp_path / "other")]) == 3
        error = capsys.readouterr().err
        assert f"There is no log to copy from [{tmp_path / name}]. Check the path" in error
    (tmp_path / "plain" / "embedlog.toml").write_text("format =")
    with pytest.raises(NotALogError, match="not readable"):
        mirror(tmp_path / "plain", tmp_path / "other")
    assert not (tmp_path / "missing").exists()
    assert not (tmp_path / "other").exists()
    with pytest.raises(NotALogError):
        mirror("localhost:9092", tmp_path / "new")


@pytest.mark.parametrize(
    "options",
    [
        {"topics": "("},
        {"topics": ["t"]},
        {"topics": None},
        {"topics": re.compile("t")},
        {"groups": ["g"]},
        {"site": 7},
        {"name": 7},
        {"follow": "yes"},
        {"merge": "yes"},
        {"merge": True, "relay": 1},
        {"durability": "disk"},
        {"groups": "*"},
        {"site": "a.b"},
        {"site": ""},
        {"site": "x", "merge": True},
        {"groups": ".*", "merge": True},
        {"relay": True},
        {"name": "\0"},
        {"name": "n" * 5000},
    ],
    ids=lambda options: repr(options)[:40],
)
def test_wrong_options_are_refused(a, b, options):
    """Before anything is copied."""
    a.create_topic("t")
    with pytest.raises(InvalidConfigError):
        mirror(a, b, **options)
    assert b.topics() == []


def test_a_log_is_not_mirrored_to_itself(a, tmp_path):
    """Nor to a handle on the same directory."""
    with pytest.raises(InvalidConfigError):
        mirror(a, tmp_path / "a")


def test_a_target_inside_of_the_source_is_refused_and_not_created(a, tmp_path):
    """Also through a link; a directory with a name that begins in the same way is none."""
    a.create_topic("t")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for target in ("a/sub", "a/topics/sub", "link/sub"):
        with pytest.raises(InvalidConfigError, match="inside of the source"):
            mirror(tmp_path / "a", tmp_path / target)
        assert not (tmp_path / target).exists()
    mirror(a, tmp_path / "ab")


def test_a_target_inside_of_any_directory_of_the_source_is_refused(replicated_log, directories):
    """Whichever of them the source was opened with; also if the target has several."""
    replicated_log.create_topic("t")
    for target in (directories.path(2) / "sub", [directories.path(3) / "x", directories.path(1)]):
        with pytest.raises(InvalidConfigError, match="inside of the source"):
            mirror(directories.path(1), target)
    assert not (directories.path(2) / "sub").exists()


def test_a_mirror_needs_a_log_at_one_end():
    """Neither cluster is contacted."""
    began = time.monotonic()
    with pytest.raises(InvalidConfigError, match="MirrorMaker"):
        mirror("kafka://127.0.0.1:9", "kafka://127.0.0.1:10")
    assert time.monotonic() - began < patient(5)


# Standby topics


def test_only_the_mirror_writes_to_a_copy(a, b):
    """Every other way to write is refused: producers, publications, appends at offsets."""
    a.create_topic("t")
    send(a, "t", b"1")
    mirror(a, b)
    log, before = b.partition("t", 0), records(b, "t")

    with b.producer() as producer, pytest.raises(MirroredTopicError) as caught:
        producer.send("t", b"x").result(patient(10))
    assert caught.value.source == b.topic("t").config["mirror.source"]
    for append in (
        lambda: log.append([encoded(b"x")]),
        lambda: log.append([encoded(b"x"), encoded(b"y")], durability="fsync"),
        lambda: log.append_at([(9, encoded(b"x"))]),
        lambda: log.append_at([(9, encoded(b"x"))], identical=True),
        lambda: log.skip_to(9),
        lambda: publish(b.root, [stage(b.root, t_0=[b"x"])], Publication("app", 1)),
    ):
        with pytest.raises(MirroredTopicError):
            append()
    assert records(b, "t") == before
    assert log.end_offset() == 1


def test_other_topics_pay_nothing_for_copies(a, b):
    """Their appends take the fast way still."""
    a.create_topic("t")
    mirror(a, b)
    b.create_topic("own")
    send(b, "own", b"1")
    assert b.partition("own", 0).rules.fast_max_bytes > 0
    b.partition("t", 0).refresh()
    assert b.partition("t", 0).rules.fast_max_bytes == -1


def test_after_a_failover_the_copy_is_written_to_and_no_longer_mirrored(a, b):
    """The mirror is refused, also one that was running, and says why."""
    a.create_topic("t")
    send(a, "t", b"1")
    with mirror(a, b, follow=True) as run:
        settled(lambda: run.status.records == 1)
        b.mirrors.failover(dry_run=False)
        send(a, "t", b"late")
        settled(lambda: run.errors)
        assert isinstance(run.errors[0], MirrorConflictError)
    send(b, "t", b"2")
    with pytest.raises(MirrorConflictError):
        mirror(a, b)

    assert [record.value for record in b["t"]] == [b"1", b"2"]
    assert b.topic("t").config["mirror.source"] == ""


def test_after_a_failover_the_mirror_moves_no_commits(a, b, monkeypatch):
    """A mirror that runs says that the topic is no copy any more, also without new records."""
    monkeypatch.setattr(mirror_module, "_GROUPS_SECONDS", 0.05)
    for name in ("t", "u"):
        a.create_topic(name)
        send(a, name, *(b"%d" % number for number in range(10)))
        commit(a, 4, topic=name)
    with mirror(a, b, follow=True, groups=".*") as run:
        settled(lambda: run.status.commits == 2)
        b.mirrors.failover("g", "earliest", topics=["t"], dry_run=False)
        commit(a, 7)
        commit(a, 7, topic="u")
        settled(lambda: committed(b)[TopicPartition("u", 0)] == 7)
        assert committed(b)[P0] == 0
        settled(lambda: run.errors)
        assert isinstance(run.errors[0], MirrorConflictError)
    assert committed(b)[P0] == 0


def test_commits_that_a_failover_makes_while_a_mirror_copies_them_stay(a, b, monkeypatch):
    """It happens between the look at the topics and the transaction."""
    a.create_topic("t")
    send(a, "t", b"1", b"2", b"3")
    commit(a, 1)
    mirror(a, b, groups=".*")
    commit(a, 2)
    encode = Group.encode

    def fail_over_first(group, positions):
        monkeypatch.setattr(Group, "encode", encode)
        b.mirrors.failover("g", "earliest", dry_run=False)
        return encode(group, positions)

    monkeypatch.setattr(Group, "encode", fail_over_first)
    mirror(a, b, groups=".*")
    assert Group.encode is encode
    assert committed(b) == {P0: 0}


def test_after_a_failover_the_mirror_can_go_into_the_other_direction(a, b):
    """Once the topic of the old source is deleted, which has records that were never copied."""
    a.create_topic("t")
    send(a, "t", b"1")
    mirror(a, b)
    send(a, "t", b"never copied")
    b.mirrors.failover(dry_run=False)
    send(b, "t", b"2")

    with pytest.raises(MirrorConflictError, match=r"until a failover.* delete it, and mirror aga"):
        mirror(b, a)
    assert [record.value for record in a["t"]] == [b"1", b"never copied"]
    a.delete_topic("t")
    mirror(b, a)
    assert records(a, "t") == records(b, "t")


def test_a_copy_can_be_converted(a, b):
    """The target is no copy."""
    a.create_topic("t", value="json")
    send(a, "t", {"x": 1})
    mirror(a, b)
    b.convert("t", "columns")
    assert b.topic("columns")[0].value == {"x": 1}


def test_a_copy_may_be_made_a_copy_again_if_nothing_was_written(a, b):
    """With its setting."""
    a.create_topic("t")
    send(a, "t", b"1")
    mirror(a, b)
    source = b.topic("t").config["mirror.source"]
    b.mirrors.failover(dry_run=False)
    b.alter_topic("t", {"mirror.source": source})
    send(a, "t", b"2")
    mirror(a, b)
    assert records(b, "t") == records(a, "t")


def test_a_topic_of_the_target_is_not_overwritten(a, b):
    """One with records of its own is refused; an empty one becomes a copy."""
    for name in ("mine", "empty"):
        a.create_topic(name)
        send(a, name, b"1")
        b.create_topic(name, config={"retention.ms": 5})
    send(b, "mine", b"own")

    with pytest.raises(MirrorConflictError) as caught:
        mirror(a, b)
    assert caught.value.topic == "mine"
    assert "Mirror as a site" in str(caught.value)
    assert [record.value for record in b["mine"]] == [b"own"]
    assert records(b, "empty") == records(a, "empty")
    assert b.topic("empty").config["retention.ms"] == a.topic("empty").config["retention.ms"]


def test_two_sources_do_not_share_a_copy(a, b, tmp_path):
    """The second one is refused; as a site it has a copy of its own."""
    with embedlog.open(tmp_path / "c", maintenance=False) as c:
        for log in (a, c):
            log.create_topic("t")
            send(log, "t", log.path.encode())
        mirror(a, b)
        with pytest.raises(MirrorConflictError):
            mirror(c, b)
        mirror(c, b, site="c")
        assert b.topics() == ["c.t", "t"]
        assert records(b, "c.t") == records(c, "t")


def test_copies_do_not_go_round_in_circles(a, b, tmp_path):
    """Over three sites, in any order, no topic comes back to where its records were."""
    with embedlog.open(tmp_path / "c", maintenance=False) as c:
        sites = {"a": a, "b": b, "c": c}
        for name, log in sites.items():
            log.create_topic("t")
            send(log, "t", name.encode())
        for _ in range(3):
            for source, target in permutations("abc", 2):
                mirror(sites[source], sites[target], site=source)
        for name, log in sites.items():
            others = [other for other in "abc" if other != name]
            paths = [f"{other}." for other in others]
            paths += [f"{x}.{y}." for x, y in permutations(others)]
            assert log.topics() == sorted(["t", *(f"{path}t" for path in paths)])


def test_a_mirror_with_a_name_runs_once_at_a_time(a, b, monkeypatch):
    """The second one is told so."""
    monkeypatch.setattr(root_target, "_LOCK_SECONDS", 0.1)
    a.create_topic("t")
    with mirror(a, b, follow=True) as run:
        settled(lambda: b.mirrors)
        for follow in (False, True):
            with pytest.raises(LockTimeoutError):
                mirror(a, b, follow=follow)
        assert run.running
    mirror(a, b)


# Groups, and failing over


def committed(log: Log, group: str = "g") -> dict[TopicPartition, int]:
    """Return the committed offsets of a group."""
    partitions = log.groups[group].describe().partitions
    return {TopicPartition(p.topic, p.partition): p.current_offset for p in partitions}


def commit(log: Log, offset: int, group: str = "g", topic: str = "t") -> None:
    """Set the committed offset of a group in partition 0."""
    log.groups[group].reset_offsets(offset, topics=topic, dry_run=False)


def test_the_offsets_of_groups_are_copied(a, b):
    """Of those that match, also under another name of the topic."""
    a.create_topic("t")
    send(a, "t", *(b"%d" % number for number in range(10)))
    commit(a, 4)
    commit(a, 7, "other")

    mirror(a, b, groups="g.*")
    assert committed(b) == {P0: 4}
    assert list(b.groups) == ["g"]
    mirror(a, b, site="a", groups=".*")
    assert committed(b, "other") == {TopicPartition("a.t", 0): 7}
    with b.consumer("t", group_id="g", consumer_timeout_ms=100) as consumer:
        assert next(consumer).offset == 4


def test_offsets_of_groups_never_move_back(a, b):
    """After a failback the group at the target may be further than at the source."""
    a.create_topic("t")
    send(a, "t", *(b"%d" % number for number in range(10)))
    commit(a, 4)
    mirror(a, b, groups=".*")
    commit(b, 9)
    mirror(a, b, groups=".*")
    assert committed(b) == {P0: 9}
    commit(a, 10)
    assert mirror(a, b, groups=".*").status.commits == 1
    assert committed(b) == {P0: 10}


def test_the_offsets_of_a_group_with_members_at_the_target_stay(a, b):
    """Its members would not notice."""
    a.create_topic("t")
    send(a, "t", *(b"%d" % number for number in range(10)))
    mirror(a, b)
    with b.consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.poll(timeout_ms=int(patient(5) * 1000), max_records=1)
        commit(a, 8)
        mirror(a, b, groups=".*")
        assert committed(b) == {P0: None}
        consumer.close(autocommit=False)
    mirror(a, b, groups=".*")
    assert committed(b) == {P0: 8}


def test_the_offset_of_a_group_is_never_past_the_end_of_the_copy(a, b):
    """A program may have committed anything."""
    a.create_topic("t")
    send(a, "t", b"1", b"2")
    with a.consumer(group_id="g") as consumer:
        consumer.assign([P0])
        consumer.commit({P0: embedlog.OffsetAndMetadata(50, "note")})
    mirror(a, b, groups=".*")
    assert committed(b) == {P0: 2}


@pytest.fixture
def standby(a, b, clock):
    """A copy of ten records, of which a group has read four; five more are not copied."""
    a.create_topic("t")
    for number in range(10):
        send(a, "t", b"%d" % number, timestamp_ms=START + number * 1000)
    commit(a, 4)
    mirror(a, b, groups=".*")
    clock.advance(60_000)
    return b


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("offsets", {}, (4, 0, 6, 0)),
        ("earliest", {}, (0, 4, 10, 0)),
        ("latest", {}, (10, 0, 0, 6)),
        ("time", {"at": "58s"}, (2, 2, 8, 0)),
        ("time", {"at": "53s"}, (7, 0, 3, 3)),
        ("time", {"at": "1s"}, (10, 0, 0, 6)),
        ({P0: 6}, {}, (6, 0, 4, 2)),
        ({}, {}, (4, 0, 6, 0)),
    ],
    ids=repr,
)
def test_a_failover_says_in_numbers_what_it_repeats_and_skips(standby, strategy, options, expected):
    """Before it does it: a dry run is the default, and the same numbers come true."""
    plan = standby.mirrors.failover("g", strategy, **options)
    (part,) = plan.partitions
    assert (part.offset, part.repeats, part.may_repeat, part.may_skip) == expected
    assert plan.dry_run
    assert committed(standby) == {P0: 4}
    assert standby.topic("t").config["mirror.source"]

    done = standby.mirrors.failover("g", strategy, **options, dry_run=False)
    assert done.partitions == plan.partitions
    assert committed(standby) == {P0: expected[0]}
    send(standby, "t", b"written here")
    kinds = [(event.get("group"), event.get("topics")) for event in events(standby, "failover")]
    assert kinds == [(None, ["t"]), ("g", None)]


def test_a_failover_says_how_much_was_not_copied(a, b):
    """As the mirror last reported it; without a report it is unknown."""
    a.create_topic("t", partitions=2)
    mirror(a, b, groups=".*")
    assert b.mirrors.failover().not_copied == {"t": 0}
    log = a.partition("t", 1)
    log.append([encoded(b"good" * 2000)])
    log.append([encoded(b"bad" * 2000, b"bad")])
    a.flush()
    path = Path(a.path, log.path_of(log.active_segment))
    data = bytearray(path.read_bytes())
    data[data.rindex(b"badbad")] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptBatchError):
        mirror(a, b)

    plan = b.mirrors.failover("g", "earliest", topics="t")
    assert [part.not_copied for part in plan.partitions] == [0, 2]
    assert plan.not_copied == {"t": 2}
    assert "2 offsets of the source not copied" in plan.title
    b.root.context.live.write(lambda txn: txn.delete(b"y" + b.mirrors[0].mirror.encode()))
    assert b.mirrors.failover().not_copied == {"t": None}


def test_a_group_without_commits_is_moved_by_the_other_strategies(standby):
    """Of topics that are named; with "offsets" its consumers' auto_offset_reset decides."""
    with standby.consumer("t", group_id="new", auto_offset_reset="earliest") as consumer:
        consumer.poll(timeout_ms=int(patient(5) * 1000), max_records=1)
        consumer.close(autocommit=False)
    (part,) = standby.mirrors.failover("new", topics="t").partitions
    assert (part.committed, part.offset, part.may_repeat, part.may_skip) == (None, None, 10, 10)
    (part,) = standby.mirrors.failover("new", "latest", topics="t").partitions
    assert (part.offset, part.may_skip) == (10, 10)
    for strategy in ("offsets", "latest", {}):
        with pytest.raises(IllegalStateError, match="not known which it reads"):
            standby.mirrors.failover(["g", "new"], strategy, dry_run=False)
    assert standby.topic("t").config["mirror.source"]


def test_a_group_that_does_not_exist_is_refused_unless_its_topics_are_named(standby):
    """Its name may be mistyped; but a mirror without `groups` has copied none."""
    for arguments, options in (
        (("gg",), {}),
        (("gg",), {"topics": "t"}),
        (("gg", "latest"), {}),
        (("gg", {P0: 3}), {}),
        ((["g", "gg"], "latest"), {}),
    ):
        for dry_run in (True, False):
            with pytest.raises(GroupIdNotFoundError):
                standby.mirrors.failover(*arguments, **options, dry_run=dry_run)
    assert standby.topic("t").config["mirror.source"]
    assert committed(standby) == {P0: 4}

    standby.mirrors.failover("gg", "time", at="58s", topics="t", dry_run=False)
    assert committed(standby, "gg") == {P0: 2}


def test_an_offset_in_a_topic_without_commits_counts(standby, a):
    """A group that has commits reads the topics that it has commits in, and those named."""
    a.create_topic("u", partitions=2)
    a.create_topic("v")
    a.partition("u", 1).append([encoded(b"1", b"2")])
    mirror(a, standby)

    standby.mirrors.failover("g", {TopicPartition("u", 1): 1}, dry_run=False)

    assert committed(standby) == {P0: 4, TopicPartition("u", 1): 1}


def test_a_failover_that_is_not_possible_changes_nothing(standby, a):
    """Members, unknown strategies and topics, offsets outside of the copy."""
    with standby.consumer("t", group_id="g") as consumer:
        consumer.poll(timeout_ms=int(patient(5) * 1000), max_records=1)
        for dry_run in (True, False):
            with pytest.raises(NonEmptyGroupError):
                standby.mirrors.failover("g", dry_run=dry_run)
    standby.create_topic("own")
    for error, arguments, options in (
        (InvalidConfigError, ("g", "newest"), {}),
        (InvalidConfigError, ("g", "time"), {}),
        (InvalidConfigError, ("g", "latest"), {"at": "1m"}),
        (InvalidConfigError, ("g", "time"), {"at": "yesterday"}),
        (InvalidConfigError, (None, "latest"), {}),
        (InvalidConfigError, (None, {P0: 1}), {}),
        (InvalidConfigError, ("g", {P0: "1"}), {}),
        (InvalidGroupIdError, (7,), {}),
        (InvalidGroupIdError, (["g", 7],), {}),
        (InvalidPartitionError, ("g", {"t": 1}), {}),
        (UnknownTopicOrPartitionError, ("g", {TopicPartition("t", 9): 1}), {}),
        (UnknownTopicOrPartitionError, ("g", {TopicPartition("missing", 0): 1}), {}),
        (UnknownTopicOrPartitionError, ("g", {TopicPartition("own", 0): 0}), {}),
        (InvalidTopicError, ("g",), {"topics": 7}),
        (OffsetOutOfRangeError, ("g", {P0: 11}), {}),
        (UnknownTopicOrPartitionError, ("g",), {"topics": "own"}),
        (UnknownTopicOrPartitionError, ("g",), {"topics": ["missing"]}),
    ):
        with pytest.raises(error):
            standby.mirrors.failover(*arguments, **options, dry_run=False)
    with pytest.raises(IllegalStateError):
        a.mirrors.failover()
    assert standby.topic("t").config["mirror.source"]


def test_the_groups_of_a_failover_may_come_from_an_iterator(standby):
    """It is read once."""
    assert standby.mirrors.failover(iter(["g"]), "earliest").partitions


def test_a_failover_can_be_repeated_for_more_groups(standby):
    """The copies are found although they are no copies any more."""
    standby.mirrors.failover(topics="t", dry_run=False)
    standby.mirrors.failover(["g", "h"], "earliest", topics="t", dry_run=False)
    assert committed(standby, "h") == committed(standby, "g") == {P0: 0}


def test_a_failover_says_which_topics_it_released(standby, a):
    """And whether there was anything left to do."""
    for name in ("u", "v"):
        a.create_topic(name)
    mirror(a, standby)

    first = standby.mirrors.failover(topics="t", dry_run=False)
    assert (first.released, "done; 1 topic to write to;" in first.title) == (("t",), True)
    second = standby.mirrors.failover()
    assert (second.topics, second.released) == (("t", "u", "v"), ("u", "v"))
    assert "3 topics to write to, 1 of them since an earlier failover" in second.title
    standby.mirrors.failover(dry_run=False)
    third = standby.mirrors.failover(dry_run=False)
    assert third.released == ()
    assert "nothing to do; programs may write to 3 topics since an earlier" in third.title
    fourth = standby.mirrors.failover("g", dry_run=False)
    assert "done; programs may write to 1 topic since an earlier failover" in fourth.title


@pytest.mark.parametrize("strategy", ["offsets", "latest", {TopicPartition("a.u", 0): 1}])
def test_a_failover_of_a_group_leaves_the_copies_of_other_sites(a, b, tmp_path, strategy):
    """Only what the group reads is opened; the mirror of the healthy site goes on (H7)."""
    with embedlog.open(tmp_path / "hub", maintenance=False) as hub:
        for name, log in (("a", a), ("b", b)):
            for topic in ("t", "u"):
                log.create_topic(topic)
                send(log, topic, b"1", b"2")
            mirror(log, hub, site=name)
        commit(a, 1)
        mirror(a, hub, site="a", groups=".*")
        expected = ["a.t"] if isinstance(strategy, str) else ["a.t", "a.u"]
        assert hub.mirrors.failover("g", strategy).released == tuple(expected)
        assert hub.mirrors.failover("g", strategy, dry_run=False).released == tuple(expected)

        for topic in ("t", "u"):
            send(b, topic, b"more")
        mirror(b, hub, site="b")
        assert len(hub["b.t"]) == len(hub["b.u"]) == 3
        opened = [name for name in hub.topics() if not hub.topic(name).config["mirror.source"]]
        assert opened == expected


# Following, and what can be seen of it


def test_a_mirror_that_follows_copies_what_comes(a, b):
    """New records, topics and offsets of groups, until it is stopped."""
    a.create_topic("t")
    with mirror(a, b, follow=True, groups=".*") as run:
        send(a, "t", b"1")
        settled(lambda: run.status.records == 1)
        a.create_topic("later")
        send(a, "later", b"2")
        settled(lambda: run.status.records == 2)
        commit(a, 1)
        assert run.running
    assert (run.status.state, run.running, run.errors) == ("stopped", False, [])
    assert records(b, "later") == records(a, "later")
    assert committed(b) == {P0: 1}


def test_what_an_unclean_election_took_from_a_copy_is_copied_again(a, replicated_log, directories):
    """Its log ends earlier than the mirror knew, and must have no gap there."""
    a.create_topic("t")
    send(a, "t", b"1")
    b = replicated_log
    b.create_topic("t", replication_factor=2)
    leader, follower = assignment(b, "t").replicas
    with mirror(a, b, follow=True) as run:
        settled(lambda: run.status.records == 1)
        directories.lose(b, follower)
        send(a, "t", b"2")
        settled(lambda: run.status.records == 2)
        directories.put_back(follower)
        recovery_of_replicas.try_bring_back(b.root)
        directories.lose(b, leader)
        b.replicas.elect_leaders(election="unclean")
        assert values(b, "t") == [b"1"]

        send(a, "t", b"3")

        settled(lambda: values(b, "t")[-1:] == [b"3"])
    assert records(b, "t") == records(a, "t")
    directories.put_back(leader)


def test_what_a_mirror_does_can_be_seen_by_other_processes(a, b, tmp_path):
    """Its status, its metrics, and its events; of one that was killed, too."""
    a.create_topic("t")
    send(a, "t", b"1", b"2")

    def follow() -> None:
        embedlog.mirror(tmp_path / "a", tmp_path / "b", follow=True, name="m").wait()

    child = Child(follow)
    try:
        settled(lambda: any(status.records == 2 for status in b.mirrors))
        (status,) = b.mirrors
        assert (status.state, status.pid, status.lag) == ("running", child.pid, 0)
        assert b.metrics()["mirror.m"]["running"] == 1
        assert b.metrics()["mirror.m.t"]["record-total"] == 2
    finally:
        child.kill()
    assert [status.state for status in b.mirrors] == ["died"]
    assert b.metrics()["mirror.m"]["running"] == 0
    assert 'embedlog_mirror_record_total{mirror="m"} 2' in b.prometheus()
    mirror(a, b, name="m")
    assert [status.state for status in b.mirrors] == ["finished"]
    (event,) = events(b, "mirrored")[-1:]
    assert (event["mirror"], event["records"], event["state"]) == ("m", 0, "finished")


def test_errors_are_counted_and_reported_once(a, b):
    """A mirror that follows tries again, and the rest goes on."""
    for name in ("t", "u"):
        a.create_topic(name)
    b.create_topic("t")
    send(b, "t", b"own")
    with mirror(a, b, follow=True, name="m") as run:
        send(a, "u", b"1")
        settled(lambda: run.status.records == 1 and run.errors)
        settled(lambda: b.mirrors[0].error_count)
        assert [str(error) for error in run.errors] == b.mirrors[0].errors[-1:]
    assert len(events(b, "failed")) == 1
    assert b.metrics()["mirror.m"]["error-total"] >= 1


def test_a_run_shows_what_it_copied(a, b):
    """As text, and in notebooks."""
    a.create_topic("t")
    send(a, "t", b"1")
    run = mirror(a, b, name="m")
    assert repr(run).startswith("Mirror m: finished, 1 record")
    assert "<table" in run._repr_html_()
    assert "t" in repr(b.mirrors.failover("g", "latest", topics="t"))
    assert "<table" in b.mirrors.failover("g", "latest", topics="t")._repr_html_()


def test_progress_is_counted_in_offsets(a, b):
    """From nothing to all."""
    a.create_topic("t", partitions=2)
    for number in range(2):
        a.partition("t", number).append([encoded(b"1", b"2", b"3")])
    calls: list[tuple[int, int]] = []
    mirror(a, b, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (6, 6)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


# Sites that are merged


@pytest.fixture
def sites(a, b, tmp_path):
    with embedlog.open(tmp_path / "c", maintenance=False) as c:
        yield {"a": a, "b": b, "c": c}


def counts(log: Log, topic: str) -> Counter[Any]:
    """Return how often each value is there."""
    return Counter(r.value["v"] if isinstance(r.value, dict) else r.value for r in log[topic])


@pytest.mark.parametrize("typed", choose(quick=[True], all=[False, True]), ids="typed: {}".format)
def test_three_sites_that_write_to_one_topic_have_each_record_once(sites, typed):
    """A mirror for each pair, in both directions, again and again."""
    for name, log in sites.items():
        schema = pa.schema([("v", pa.string()), ("n", pa.int64())]) if typed else None
        log.create_topic("t", partitions=2, schema=schema, key="v" if typed else None)
        for number in range(20):
            value = {"v": f"{name}{number}", "n": number} if typed else f"{name}{number}".encode()
            send(log, "t", value, headers=[("h", b"x")] if number % 3 else [])

        if typed:
            log.partition("t", 0).roll()
            with log.producer() as producer:
                producer.send("t", None, key=name, partition=0)

    for round_ in range(3):
        for source, target in permutations("abc", 2):
            mirror(sites[source], sites[target], merge=True)
        send(sites["b"], "t", {"v": f"late {round_}", "n": 0} if typed else b"late %d" % round_)

    for source, target in permutations("abc", 2):
        mirror(sites[source], sites[target], merge=True)
    for log in sites.values():
        tombstones = counts(log, "t").pop(None, 0)
        assert (len(counts(log, "t")), tombstones) == ((64, 3) if typed else (63, 0))
        assert {n for value, n in counts(log, "t").items() if value is not None} == {1}


def test_a_ring_of_three_sites_has_each_record_once(sites):
    """With relay a mirror passes on what came from other sites, but never back to them."""
    for name, log in sites.items():
        log.create_topic("t")
        send(log, "t", *(f"{name}{number}".encode() for number in range(20)))

    for _ in range(4):
        for source, target in ("ab", "bc", "ca"):
            mirror(sites[source], sites[target], merge=True, relay=True)

    for log in sites.values():
        assert len(counts(log, "t")) == 60
        assert set(counts(log, "t").values()) == {1}
    passed = next(record for record in sites["c"]["t"] if record.value == b"a3")
    hops = [
        hop.offset for name, value in passed.headers if name == HEADER for hop in hops_of(value)
    ]
    first = next(record for record in sites["b"]["t"] if record.value == b"a3")
    assert hops == [3, first.offset]


def test_merged_records_keep_everything_but_their_offsets(a, b):
    """Keys, values, headers, timestamps and partitions; one header more."""
    a.create_topic("t", partitions=2)
    for number in range(2):
        log = a.partition("t", number)
        log.append([encoded(b"1", None, keys=[b"k", None], at=[START, -1], compression="zstd")])
        log.append([encoded(b"2", b"3", headers=[[("h", None), ("h", b"y")], []])])
    b.create_topic("t", partitions=2)
    b.partition("t", 0).append([encoded(b"own")])

    mirror(a, b, merge=True)

    copied = [record for record in b["t"] if record.value != b"own"]
    for ours, theirs in zip(copied, a["t"], strict=True):
        assert ours[:2] + ours[3:7] == theirs[:2] + theirs[3:7]
        *headers, (name, value) = ours.headers
        assert (headers, name) == (theirs.headers, HEADER)
        assert hops_of(value)[-1].offset == theirs.offset


def test_merging_keeps_append_times_and_compacted_gaps(a, b):
    """The times are those of the source where they were the log's."""
    a.create_topic("t", config={"message.timestamp.type": "LogAppendTime"})
    send(a, "t", *(b"%d" % number for number in range(8)), key=b"k", timestamp_ms=5)
    b.create_topic("t")
    log = a.partition("t", 0)
    log.roll()
    keep(log, [1, 5, 6])

    mirror(a, b, merge=True)

    assert [r.timestamp for r in b["t"]] == [r.timestamp for r in a["t"]]
    assert [hops_of(r.headers[-1][1])[-1].offset for r in b["t"]] == [1, 5, 6]


@pytest.mark.parametrize("moment", ["topics", "fetch"])
def test_a_topic_that_is_created_again_is_merged_from_its_start(a, b, monkeypatch, moment):
    """Also if it has more records by then than were copied of the one before."""
    a.create_topic("t")
    send(a, "t", b"old", b"old")
    calls, call = [], getattr(RootSource, moment)

    def create_again(self, *arguments):
        calls.append(arguments)
        if (len(calls) == 3 and moment == "topics") or (len(calls) == 2 and moment == "fetch"):
            a.delete_topic("t")
            a.create_topic("t")
            send(a, "t", *(b"%d" % number for number in range(9)))
        return call(self, *arguments)

    monkeypatch.setattr(RootSource, moment, create_again)
    with embedlog.mirror(a, b, topics="t", merge=True, follow=True):
        until(lambda: "t" in b and len(b["t"]) == 2)
        if moment == "fetch":
            send(a, "t", b"old")
        until(lambda: b["t"][-1].value == b"8")

    values = [record.value for record in b["t"]]
    assert values == [b"old", b"old", *(b"%d" % number for number in range(9))]


def test_a_merging_mirror_finds_its_place_in_the_records(a, b):
    """Without its row, which is written from time to time only."""
    a.create_topic("t")
    send(a, "t", *(b"%d" % number for number in range(10)))
    mirror(a, b, merge=True)
    send(a, "t", b"more")
    log = b.partition("t", 0)
    b.root.context.state.write(keyspace.MIRROR_POSITIONS.delete_all)

    assert mirror(a, b, merge=True).status.records == 1
    assert set(counts(b, "t").values()) == {1}
    log.truncate_to(10)
    assert mirror(a, b, merge=True).status.records == 1
    assert set(counts(b, "t").values()) == {1}
    log.truncate_to(10)
    send(b, "t", b"own", b"own 2", b"own 3")
    assert mirror(a, b, merge=True).status.records == 1, "the log is longer than it was"
    assert set(counts(b, "t").values()) == {1}


@pytest.mark.parametrize(
    ("durability", "visibility"), [("os", "append"), ("fsync", "append"), ("os", "durable")]
)
def test_a_merging_mirror_repeats_nothing_of_an_append_that_failed_between_two_batches(
    a, tmp_path, monkeypatch, durability, visibility
):
    """What was appended before the failure is found, also if readers do not see it yet."""
    root = open_root(
        tmp_path / "target", files=FaultyFiles, durability=durability, visibility=visibility
    )
    a.create_topic("t")
    root.create_topic("t", 1, TopicConfig.parse({"segment.bytes": 4000}))
    send(a, "t", b"first")
    with a.producer(linger_ms=1000) as producer:
        for number in range(4):
            producer.send("t", b"%d" % number * 2000)
    monkeypatch.setattr(mirror_module, "FETCH_BYTES", 1)

    steps: list[int] = []

    def fail_between(done: int, total: int) -> None:
        steps.append(done)
        if len(steps) == 1:
            root.context.files.fail_at(1, errno.ENOSPC, only={"create"})

    with pytest.raises(DiskFullError):
        mirror(a, Log(root), merge=True, progress=fail_between)
    assert 1 < root.partition("t", 0).tail().log_end_offset < 5
    for end in (5, 6):
        mirror(a, Log(root), merge=True)
        assert [hops_of(r.headers[-1][1])[-1].offset for r in Log(root)["t"]] == list(range(end))
        send(a, "t", b"next")
    root.close()


@pytest.mark.parametrize("merge", [False, True], ids=["copies", "merges"])
def test_a_mirror_finishes_the_append_of_one_that_was_killed_before_its_flush(
    a, b, monkeypatch, merge
):
    """The record is there already; when the mirror is done, readers see it, once."""
    monkeypatch.setattr(mirror_module, "FETCH_BYTES", 1)
    # A writer that is alone for long publishes after its flush only.
    monkeypatch.setattr(partition_log, "UNDISPUTED", 1 << 30)
    a.create_topic("t")
    for value in (b"1", b"2"):
        send(a, "t", value)

    def copy() -> None:
        root = open_root(b.path, files=FaultyFiles)
        mirror(
            *(a.path, Log(root)),
            merge=merge,
            durability="fsync",
            progress=lambda done, total: root.context.files.kill_at(0, only={"sync"}),
        )

    assert was_killed(copy)
    assert [record.value for record in b["t"]] == [b"1"]
    assert b.partition("t", 0).tail().log_end_offset == 2
    mirror(a, b, merge=merge)
    assert [record.value for record in b["t"]] == [b"1", b"2"]


def forward_by_sends(log: Log, records: list[Any], topic: str, path: Path) -> None:
    """Send records with the headers that they have, as a program does that makes others of them."""
    with log.producer() as producer:
        for record in records:
            producer.send(topic, b"fwd " + record.value, headers=record.headers, partition=0)


def forward_by_batches(log: Log, records: list[Any], topic: str, path: Path) -> None:
    """The same with many at once."""
    with log.producer() as producer:
        values = [b"fwd " + record.value for record in records]
        headers = [record.headers for record in records]
        producer.send_batch(topic, values, headers=headers, partition=0)


def forward_by_files(log: Log, records: list[Any], topic: str, path: Path) -> None:
    """Export a topic, and import the file into another one, with its headers."""
    (source,) = {record.topic for record in records}
    root = ["--root", log.path]
    assert main(["export", source, str(path / "file.parquet"), *root]) == 0
    assert main(["import", topic, str(path / "file.parquet"), *root]) == 0


@pytest.mark.parametrize("door", [forward_by_sends, forward_by_batches, forward_by_files])
@pytest.mark.parametrize("same_topic", [False, True], ids=["another topic", "the same topic"])
def test_a_program_that_forwards_headers_moves_no_mirror(a, b, tmp_path, door, same_topic):
    """Neither the position of the mirror that wrote them, nor what its site sends back (H6)."""
    for log in (a, b):
        for topic in ("t", "u"):
            log.create_topic(topic)
    into = "t" if same_topic else "u"
    for topic, count in (("t", 30), ("u", 3)):
        a.partition(topic, 0).append([encoded(*(b"%d" % n for n in range(count)))])
    mirror(a, b, merge=True)
    door(b, list(b["t"]), into, tmp_path)
    a.partition("u", 0).append([encoded(*(b"late %d" % n for n in range(50)))])
    for _ in range(2):
        # Without its rows the mirror reads all of the topic to find its position.
        for log in (a, b):
            log.root.context.state.write(keyspace.MIRROR_POSITIONS.delete_all)
        mirror(a, b, merge=True)
        mirror(b, a, merge=True)

    sent = 30 + 3 + 50 + 30
    for log in (a, b):
        assert sum(len(log[topic]) for topic in ("t", "u")) == sent
    assert counts(a, into) == counts(b, into)


def test_what_merged_is_known_after_compaction_and_gathering(a, b):
    """The batches are other ones then, but not whose records they have."""
    sites = {"a": a, "b": b}
    for log in sites.values():
        log.create_topic("t", config={"cleanup.policy": "compact"})
        log.create_topic("u")
    for number in range(20):
        for name, log in sites.items():
            value = f"{name}{number}".encode()
            for topic in ("t", "u"):
                key = f"{name}{number % 15}".encode()
                log.partition(topic, 0).append([encoded(value, keys=[key])])
        if number % 3 == 0:
            mirror(a, b, merge=True)
            mirror(b, a, merge=True)
    for _ in range(3):
        for log in sites.values():
            log.housekeeping.compact("t", force=True, progress=False)
            log.partition("u", 0).roll()
            log.topic("u").optimize()
            log.root.context.state.write(keyspace.MIRROR_POSITIONS.delete_all)
        mirror(a, b, merge=True)
        mirror(b, a, merge=True)

    for log in sites.values():
        log.housekeeping.compact("t", force=True, progress=False)
        values = [f"{name}{number}".encode() for name in sites for number in range(20)]
        assert counts(log, "u") == dict.fromkeys(values, 1)
        values = [f"{name}{number}".encode() for name in sites for number in range(5, 20)]
        assert counts(log, "t") == dict.fromkeys(values, 1)


def test_a_source_that_was_cut_is_noticed_by_a_mirror_that_was_killed(a, b):
    """Its last records say in which epoch they were read, without a row (H4)."""
    a.create_topic("t")
    for number in range(10):
        send(a, "t", b"%d" % number)
    mirror(a, b, merge=True)
    a.partition("t", 0).truncate_to(6)
    send(a, "t", *(b"new %d" % number for number in range(9)))
    b.root.context.state.write(keyspace.MIRROR_POSITIONS.delete_all)

    with pytest.raises(MirrorDivergedError) as caught:
        mirror(a, b, merge=True)
    assert caught.value.next_offset == 6


def test_a_topic_that_was_created_again_is_merged_from_its_start(a, b):
    """Its records are others than those that were merged, at the same offsets."""
    for value in (b"first", b"second"):
        a.create_topic("t")
        send(a, "t", *[value] * 5)
        mirror(a, b, merge=True)
        a.delete_topic("t")
    assert counts(b, "t") == {b"first": 5, b"second": 5}


@pytest.mark.parametrize("seed", range(choose(test=2, all=100)))
def test_sites_whose_programs_forward_records_have_each_record_once(sites, seed):
    """Random sends, forwards with headers, mirrors, lost rows and compacted topics."""
    dice, sent = random.Random(seed), Counter[tuple[str, bytes]]()
    for log in sites.values():
        for topic in "tu":
            log.create_topic(topic, partitions=2)
    for number in range(60):
        log, topic = sites[dice.choice("abc")], dice.choice("tu")
        action = dice.choice(["send", "forward", "forward", "mirror", "mirror", "lose", "gather"])
        if action == "mirror":
            source, target = dice.sample(sorted(sites), 2)
            mirror(sites[source], sites[target], merge=True)
        elif action == "lose":
            log.root.context.state.write(keyspace.MIRROR_POSITIONS.delete_all)
        elif action == "gather":
            log.partition(topic, 0).roll()
            log.topic(topic).optimize()
        else:
            old = list(log.topic(dice.choice("tu"))) if action == "forward" else []
            headers = dice.choice(old).headers if old else []
            send(log, topic, b"%d" % number, headers=headers, partition=dice.randrange(2))
            sent[topic, b"%d" % number] += 1
    for source, target in permutations("abc", 2):
        mirror(sites[source], sites[target], merge=True)
    for log in sites.values():
        assert Counter((r.topic, r.value) for topic in "tu" for r in log[topic]) == sent


def test_what_cannot_be_merged_is_refused(a, b, tmp_path):
    """Copies, and topics with other columns."""
    a.create_topic("t")
    a.create_topic("u", schema=pa.schema([("x", pa.int64())]))
    b.create_topic("u", schema=pa.schema([("y", pa.int64())]))
    mirror(a, b, topics="t")
    for topic in ("t", "u"):
        with pytest.raises(MirrorConflictError):
            mirror(a, b, topics=topic, merge=True)
    with embedlog.open(tmp_path / "c", maintenance=False) as c:
        with pytest.raises(MirrorConflictError):
            mirror(b, c, topics="t", merge=True)
        assert c.topics() == []


def test_one_mirror_merges_a_source_into_a_topic_at_a_time(a, b, monkeypatch):
    """The error names the topic and the source, also if the mirrors have different names."""
    monkeypatch.setattr(root_target, "_LOCK_SECONDS", 0.1)
    a.create_topic("t")
    send(a, "t", b"1")
    with mirror(a, b, merge=True, follow=True, name="m") as run:
        settled(lambda: run.status.records == 1)
        with pytest.raises(LockTimeoutError) as caught:
            mirror(a, b, merge=True, name="n")
    expected = rf"Another mirror \(process {os.getpid()}\) copies from {a.path} to the topic \[t\]"
    assert re.match(expected, str(caught.value))
    assert caught.value.pid == os.getpid()
    mirror(a, b, merge=True, name="n")
    assert counts(b, "t") == {b"1": 1}


def test_two_mirrors_do_not_copy_the_same_topic(a, b):
    """The second one to write notices the first, and writes nothing."""
    a.create_topic("t")
    source, first, second = RootSource(a.root), RootTarget(b.root), RootTarget(b.root)
    topic = source.topics()["t"]
    for target in (first, second):
        assert target.prepare(topic, "t", source)
    send(a, "t", b"1")
    position = second.position("t", 0)
    fetch = source.fetch("t", 0, first.position("t", 0), 1 << 20)
    first.append("t", 0, fetch)

    with pytest.raises(MirrorConflictError, match="another mirror"):
        second.append("t", 0, source.fetch("t", 0, position, 1 << 20))
    assert records(b, "t") == records(a, "t")


# The command line


def test_a_mirror_on_the_command_line(a, b, tmp_path, capsys):
    """Copy, status, failover: text and JSON, and exit codes."""
    a.create_topic("t")
    send(a, "t", b"1", b"2")
    commit(a, 1)
    ends = [str(tmp_path / "a"), str(tmp_path / "b")]

    assert main(["mirror", *ends, "--groups", ".*", "--name", "m"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^m +finished +\d+ +2 ", out, re.MULTILINE)
    assert main(["mirror", "status", ends[1], "--json"]) == 0
    (status,) = json.loads(capsys.readouterr().out)
    assert (status["records"], status["lag"], status["state"]) == (2, 0, "finished")
    assert main(["mirror", "status", "--root", ends[0]]) == 0
    assert "No mirror has reported" in capsys.readouterr().err

    assert main(["failover", "g", "--root", ends[1]]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^g +t +0 +1 +1 +0 +1 +0 +0$", out, re.MULTILINE)
    assert "repeat the command with --execute" in err
    assert b.topic("t").config["mirror.source"]
    args = ["failover", "g", "--offset", "t:0=2", "--root", ends[1], "--execute", "--json"]
    assert main(args) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["topics"], result["partitions"][0]["may_skip"]) == (["t"], 1)
    assert committed(b) == {P0: 2}
    assert main(["mirror", *ends]) == 1
    assert "since a failover" in capsys.readouterr().err
    assert main(["mirror", "status", ends[1]]) == 1
    again = f"embedlog topics alter t -c mirror.source={a.root.id}/t`"
    assert again in capsys.readouterr().out
    # What is logged, and why it ended.
    command = [sys.executable, "-m", "embedlog", "mirror", *ends]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count(again)) == (1, 2), done.stderr
    assert main(["mirror", ends[0]]) == 2
    for bad in ("t=2", "t:0", "t:0=²", "t:0=-1"):
        assert main(["failover", "g", "--offset", bad, "--root", ends[1]]) == 2
    assert main(["failover", "g", "--strategy", "time", "--root", ends[1]]) == 2
    for options in (["--strategy", "offsets"], ["--offset", "t:0=1"]):
        capsys.readouterr()
        assert main(["failover", *options, "--root", ends[1]]) == 2
        assert "no GROUP is named" in capsys.readouterr().err
    for words in (["gg"], ["g", "--offset", "tt:0=1"], ["g", "--offset", "t:5=1"]):
        assert main(["failover", *words, "--root", ends[1]]) == 3
    assert main(["failover", "--root", ends[1], "--execute"]) == 0
    assert "nothing to do; programs may write to 1 topic since" in capsys.readouterr().out
    b.housekeeping.run()
    assert main(["activity", "--root", ends[1], "--kind", "failover", "--kind", "mirrored"]) == 0
    assert "may be written to" in capsys.readouterr().out


def test_only_the_mirror_adds_partitions_to_a_copy(a, b, command_line):
    """H3: by every door; a copy that has more than its source would be no copy any more."""
    a.create_topic("t", partitions=2)
    mirror(a, b)
    root = str(b.path)

    with pytest.raises(MirroredTopicError, match="only its mirror adds partitions") as caught:
        b.create_partitions("t", 3)
    assert caught.value.source == b.topic("t").config["mirror.source"]
    code, _, err = command_line("--root", root, "topics", "alter", "t", "-p", "3")
    assert code == 1
    assert "run `embedlog failover`" in err
    admin = KafkaAdminClient(bootstrap_servers=f"embedlog://{root}")
    with pytest.raises(kafka_errors.KafkaError, match="only its mirror adds partitions"):
        admin.create_partitions({"t": NewPartitions(3)})
    admin.close()
    with confluent.AdminClient({"bootstrap.servers": f"embedlog://{root}"}) as client:
        future = client.create_partitions([confluent.NewPartitions("t", 3)])["t"]
        with pytest.raises(confluent.KafkaException, match="only its mirror adds partitions"):
            future.result()
    assert b.topic("t").partitions == 2

    a.create_partitions("t", 4)
    mirror(a, b)
    assert b.topic("t").partitions == 4
    b.mirrors.failover(topics=["t"], dry_run=False)
    b.create_partitions("t", 5)
    assert b.topic("t").partitions == 5
