"""Snapshots: what `log.at` shows stays the same, whatever happens to the log."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from support.clock import START, ManualClock
from support.faulty_files import REBOOTED
from support.roots import encoded
from support.staged_files import publish as publish_staged
from support.staged_files import stage
from support.tiers import choose

import embedlog
from embedlog.errors import (
    InvalidConfigError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    SnapshotAlreadyExistsError,
    UnknownSnapshotError,
    UnknownTopicOrPartitionError,
)
from embedlog.keyspace import LEASES
from embedlog.partition import leases

DAY = 86_400_000
COLUMNS = pa.schema([("id", pa.string()), ("n", pa.int64())])
SMALL = {"segment.bytes": 2000, "retention.ms": DAY, "file.delete.delay.ms": 0}
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": 2000, "file.delete.delay.ms": 0}


def open_log(path, clock, **options):
    return embedlog.open(path, clock=clock, maintenance=False, **options)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def log(tmp_path, clock):
    """Topics of bytes, of columns and compacted ones, with small segments."""
    with open_log(tmp_path / "log", clock) as log:
        log.create_topic("plain", 3, SMALL)
        log.create_topic("compacted", 2, COMPACTED)
        log.create_topic("typed", 2, COMPACTED, schema=COLUMNS, key="id")
        send(log, 0)
        yield log
        if not log.root.closed:
            assert log.housekeeping.verify() == []


def send(log, first, count=120):
    """Append records to all topics: their keys recur."""
    for number in range(first, first + count):
        value, at = b"v%d" % number, START + number
        log.partition("plain", number % 3).append([encoded(value, at=at)])
        key = [b"k%d" % (number % 5)]
        log.partition("compacted", number % 2).append([encoded(value, keys=key, at=at)])
    with log.producer() as producer:
        for number in range(first, first + count):
            row = {"id": f"k{number % 5}", "n": number}
            producer.send("typed", row, partition=number % 2, timestamp_ms=START + number)


def frames(at):
    """What each topic has, in all forms."""
    return {
        name: (
            at[name].to_arrow().to_pylist(),
            at[name].to_arrow(latest=True).to_pylist(),
            list(at[name]),
            pa.Table.from_batches(
                [batch for split in at[name].splits(3) for batch in split.to_batches()]
            ).num_rows,
        )
        for name in at
    }


def shake(log, clock):
    """Delete and compact what may be."""
    clock.now += 30 * DAY
    log.housekeeping.run()
    for name in ("compacted", "typed"):
        log.housekeeping.compact(name, force=True, progress=False)


def test_the_records_of_a_snapshot_do_not_change(log, clock):
    """Not by appends, retention, compaction, or a new version of a schema (C1, D2)."""
    snapshot = log.snapshot("report", expires=None)
    before = frames(log.at(snapshot))
    assert {name: len(log.at(snapshot)[name]) for name in before} == dict.fromkeys(before, 120)

    send(log, 120)
    log.alter_topic("typed", schema=COLUMNS.append(pa.field("more", pa.int8())))
    shake(log, clock)

    assert frames(log.at(log.snapshots["report"])) == before
    with pytest.raises(ValueError, match=r"is log\.snapshots\['report'\]"):
        log.at("report")
    assert "snapshot 'report' holds them" in str(log["plain"].describe_retention())
    assert "snapshot 'report' holds them" in str(log["compacted"].explain_compaction())
    assert log.housekeeping.leases() == []

    log.snapshots.delete("report")
    shake(log, clock)
    assert len(log["plain"]) < 200
    with pytest.raises(OffsetOutOfRangeError):
        log.at(snapshot)["plain"].to_arrow()


def test_a_snapshot_holds_its_records_after_a_reboot(clock, log):
    """Its leases are in `live` again before anything else can be there."""
    log.snapshot("report", expires=None)
    before = frames(log.at(log.snapshots["report"]))
    path = log.path
    log.close()
    for _ in range(2):
        with open_log(path, clock, files=REBOOTED) as log:
            assert dict(log.snapshots).keys() == {"report"}
            shake(log, clock)
            assert frames(log.at(log.snapshots["report"])) == before
            send(log, 200)
    with open_log(path, clock) as log:
        log.snapshots.delete("report")
        shake(log, clock)
        assert not log.root.context.live.read(LEASES.any)
        assert len(log["plain"]) == 0


def test_a_hold_that_ends_with_the_boot_would_be_noticed(log, clock, monkeypatch):
    """A planted bug: `live` begins without the leases of snapshots."""
    monkeypatch.setattr(leases, "rows_of_snapshots", lambda txn: {})
    with pytest.raises((OffsetOutOfRangeError, AssertionError)):
        test_a_snapshot_holds_its_records_after_a_reboot(clock, log)


def test_a_view_of_several_partitions_is_of_one_instant(tmp_path):
    """Of a publication it has all or nothing, although nobody asked for a snapshot (P1)."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", 3)
        done = threading.Event()

        def publish():
            for _ in range(choose(quick=100, all=300)):
                publish_staged(log.root, [stage(log.root, t_0=[b"x"], t_1=[b"x"], t_2=[b"x"])])
            done.set()

        looks = 0
        thread = threading.Thread(target=publish)
        thread.start()
        while not done.is_set():
            ends = [part.stop for part in log["t"].ranges()]
            assert len(set(ends)) == 1
            looks += 1
        thread.join()
        assert looks > choose(quick=50, all=300)


def test_topics_before_a_time_do_not_move(log):
    """In each partition, what is before the first record at or after it (B10)."""
    time = datetime.fromtimestamp((START + 60) / 1000, UTC)
    at = log.at(time)
    assert sorted(record.timestamp for record in at["plain"]) == [START + n for n in range(60)]
    assert at["typed"].to_arrow(["n"])["n"].to_pylist() == [*range(0, 60, 2), *range(1, 60, 2)]
    assert at["compacted"].get(b"k4") in (b"v54", b"v59")  # by the partition
    assert at["compacted"].get(b"k4") == log["compacted"].get(b"k4", as_of=time)

    later = log.at(START + DAY)
    send(log, 120)
    assert len(later["plain"]) == 120
    assert len(log["plain"]) == 240


def test_a_query_in_sql_reads_the_snapshot(log):
    """All tables of it are of one instant."""
    at = log.at(log.snapshot("s"))
    send(log, 120)
    assert at.sql("select count(*) as c, max(n) as m from typed").rows() == [(120, 119)]
    assert at.sql("select count(*) from plain", eager=False).collect().item() == 120
    with pytest.raises(UnknownTopicOrPartitionError):
        at.sql("select * from other")


def test_a_consumer_of_a_snapshot_ends_where_it_ends(log):
    """By iteration, by polls, as columns, and for a group, which continues."""
    at = log.at(log.snapshot("s"))
    expected = sorted(at["plain"])
    send(log, 120)

    assert sorted(at.consumer("plain")) == expected
    consumer = at.consumer("plain")
    polled = []
    while records := consumer.poll(max_records=7):
        polled += [record for each in records.values() for record in each]
    assert sorted(polled) == expected
    assert sum(batch.num_rows for batch in at.consumer("typed").iter_batches()) == 120
    assert sum(
        batch.num_rows
        for batches in at.consumer("typed").poll_batches().values()
        for batch in batches
    )
    assert sum(1 for _ in at.consumer()) == 360

    with at.consumer("plain", group_id="g") as consumer:
        first = [next(consumer) for _ in range(20)]
        consumer.commit()
    with at.consumer("plain", group_id="g") as consumer:
        assert sorted([*first, *consumer]) == expected

    middle = log.at(START + 50).consumer("plain")
    assert sum(1 for _ in middle.iter_records("end")) == 50


def test_a_name_is_taken_once(log, clock):
    """Nothing is replaced, and a wrong name or time changes nothing."""
    log.snapshot("s", "plain", expires="1h")
    with pytest.raises(SnapshotAlreadyExistsError, match="Delete it with log"):
        log.snapshot("s")
    assert list(log.snapshots["s"].topics) == ["plain"]
    for name in ("", "a/b", ".x", "__x", 7, "x" * 201):
        with pytest.raises(InvalidConfigError):
            log.snapshot(name)
    for expires in ("soon", "-1h", 5):
        with pytest.raises(InvalidConfigError):
            log.snapshot("t", expires=expires)
    with pytest.raises(UnknownTopicOrPartitionError):
        log.snapshot("t", ["plain", "missing"])
    for call in (log.snapshots.delete, log.snapshots.__getitem__):
        with pytest.raises(UnknownSnapshotError, match="lists all"):
            call("t")
    with pytest.raises(ValueError, match="Only snapshots"):
        log.housekeeping.hold("snapshot:s")
    with open_log(log.path, clock, mode="r") as reader:
        assert list(reader.snapshots) == ["s"]
        assert len(reader.at(reader.snapshots["s"])["plain"]) == 120
        with pytest.raises(ReadOnlyError):
            reader.snapshot("t")
        with pytest.raises(ReadOnlyError):
            reader.snapshots.delete("s")
    with pytest.raises(UnknownTopicOrPartitionError, match="no such topic then"):
        log.at(log.snapshots["s"])["typed"]


def test_a_snapshot_expires(log, clock):
    """By the log's clock; housekeeping deletes it, with its file."""
    log.snapshot("hour", expires="1h")
    log.snapshot("week")
    clock.now += 3_600_000 - 1
    log.housekeeping.run()
    assert list(log.snapshots) == ["hour", "week"]
    clock.now += 1
    log.housekeeping.run()
    assert list(log.snapshots) == ["week"]
    files = log.root.context.files
    assert files.list("snapshots") == ["week.json"]
    assert json.loads(files.read_file("snapshots/week.json"))["expires_ms"] == START + 7 * DAY


def test_a_topic_that_was_deleted_is_in_no_snapshot_any_more(log):
    """Also if there is another one of its name."""
    at = log.at(log.snapshot("s"))
    log.delete_topic("plain")
    with pytest.raises(UnknownTopicOrPartitionError):
        at["plain"]
    log.create_topic("plain", 3)
    with pytest.raises(UnknownTopicOrPartitionError, match="created again"):
        at["plain"]
    assert len(at["typed"]) == 120
    log.snapshots.delete("s")


def test_a_partition_that_was_never_written_to_stays_so(tmp_path, clock):
    """And the snapshot does not see what is written to it later."""
    with open_log(tmp_path / "log", clock) as log:
        log.create_topic("t", 5)
        at = log.at(log.snapshot("s"))
        assert not log.root.context.files.exists(log.root.topic("t").directory)
        log.partition("t", 3).append([encoded(b"x")])
        assert len(at["t"]) == 0
        assert at["t"].to_arrow().num_rows == 0
