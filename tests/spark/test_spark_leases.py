"""Leases keep retention and compaction from deleting records that a query has yet to read."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
from support.children import in_child
from support.clock import START
from support.roots import encoded
from support.spark_reads import read_all, values_of

import embedlog
from embedlog.errors import DataLossError, OffsetOutOfRangeError
from embedlog.files import Files
from embedlog.keyspace import LEASES
from embedlog.partition.leases import extend
from embedlog.record import TopicPartition
from embedlog.spark.datasource import StreamReader
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.micro_batch import MicroBatchStream
from embedlog.spark.options import SourceOptions
from embedlog.spark.source import LogSource

DAY = 86_400_000
HOUR = 3_600_000


@pytest.fixture
def log(tmp_path, clock):
    """A log with a topic of small segments, a retention of one day and no background jobs."""
    config = {"segment.bytes": 2000, "retention.ms": DAY, "file.delete.delay.ms": 0}
    with embedlog.open(tmp_path / "log", clock=clock, maintenance=False) as log:
        log.create_topic("t", 1, config)
        for number in range(60):
            log.partition("t", 0).append([encoded(b"%d" % number, at=START)])
        yield log
        assert log.housekeeping.verify() == []


@pytest.fixture
def expire_records(log, clock):
    def expire_records():
        clock.now += 3 * DAY
        log.housekeeping.run()

    return expire_records


@pytest.fixture
def uptime(monkeypatch):
    """The uptime of the machine, which stands still until the test moves it."""
    uptime = SimpleNamespace(ms=0)
    monkeypatch.setattr(Files, "uptime_ms", lambda _: 1_000_000_000 + uptime.ms)
    return uptime


def plan_from(options, start, session="s"):
    starting = json.dumps({"t": {"0": start}})
    return plan_batch(SourceOptions.parse(options(startingOffsets=starting)), session=session)


def start_of(log):
    return log.partition("t", 0).start_offset()


def test_retention_waits_for_a_batch_that_was_planned(log, options, expire_records):
    """Spark does not report the end of the last task, so the lease ends by its timeout."""
    tasks = plan_batch(SourceOptions.parse(options()))
    expire_records()

    assert start_of(log) == 0
    assert values_of(read_all(tasks)) == list(range(60))
    (lease,) = log.housekeeping.leases()
    assert lease.name.startswith("spark-batch-")
    assert HOUR - 60_000 < lease.ms_left <= HOUR * 9 // 8


def test_batches_of_a_session_share_a_lease_on_the_records_of_all(log, options, expire_records):
    """It begins with the first record that one of them reads, whichever was planned last."""
    starts = [40, 10, 50, 20]
    tasks = [plan_from(options, start, session="one") for start in starts]
    other = plan_from(options, 30, session="two")
    expire_records()

    assert [lease.offsets for lease in log.housekeeping.leases()] == [
        {("t", 0): 10},
        {("t", 0): 30},
    ]
    assert 0 < start_of(log) <= 10
    for start, planned in zip([*starts, 30], [*tasks, other], strict=True):
        assert values_of(read_all(planned)) == list(range(start, 60))


def test_a_lease_that_is_extended_keeps_what_it_kept(log, uptime):
    """Neither a later record nor an earlier end takes anything away from others."""
    now, key = 1_000_000_000, TopicPartition("t", 0)
    for offset, until, kept in [(20, 50, 20), (30, 70, 20), (10, 60, 10), (40, 90, 10)]:
        extend(log.root, "shared", {key: offset}, now + until)
        (lease,) = log.housekeeping.leases()
        assert lease.offsets[key] == kept
    assert lease.ms_left == 90
    uptime.ms = 90
    extend(log.root, "shared", {key: 30}, now + 200)
    assert log.housekeeping.leases()[0].offsets[key] == 30
    for offset in (-1, 61):
        with pytest.raises(OffsetOutOfRangeError, match=r"The log holds offsets \[0, 60\)"):
            extend(log.root, "shared", {key: offset}, now + 300)


def test_a_covered_batch_writes_no_lease(log, options, monkeypatch):
    """Thousands of short queries take one transaction, not one each."""
    plan_from(options, 10)
    monkeypatch.setattr(log.root.context.live.__class__, "write", lambda *_: 1 / 0)
    for start in (10, 30):
        assert values_of(read_all(plan_from(options, start))) == list(range(start, 60))
    with pytest.raises(ZeroDivisionError):
        plan_from(options, 9)


def test_the_lease_of_batches_lets_go_of_what_old_ones_read(log, options, expire_records, uptime):
    """There are never more than nine of them, and each ends an hour after its queries or later."""
    plan_from(options, 5)
    for minute in range(0, 300, 5):
        uptime.ms = minute * 60_000
        plan_from(options, 30)
        leases = log.housekeeping.leases()
        assert len(leases) <= 9
        assert max(lease.ms_left for lease in leases) >= HOUR
        assert minute >= 60 or min(lease.offsets["t", 0] for lease in leases) == 5
        # A lease begins for the rest of an eighth of an hour, and an hour.
        assert minute < 68 or min(lease.offsets["t", 0] for lease in leases) == 30
    # Nobody keeps house here: who takes a lease deletes the rows of those that have ended.
    assert len(log.root.context.live.read(lambda txn: list(LEASES.keys(txn)))) <= 10
    expire_records()
    assert 5 < start_of(log) <= 30


def test_a_batch_of_a_topic_that_was_created_again_has_a_lease(log, options, clock, expire_records):
    """Its records are others, and the lease for the deleted topic does not keep them."""
    plan_from(options, 0)
    log.delete_topic("t")
    config = {"segment.bytes": 2000, "retention.ms": DAY, "file.delete.delay.ms": 0}
    log.create_topic("t", 1, config)
    for number in range(60):
        log.partition("t", 0).append([encoded(b"%d" % number, at=clock.now)])
    tasks = plan_from(options, 0)
    expire_records()
    assert values_of(read_all(tasks)) == list(range(60))


def test_a_lease_of_batches_that_was_ended_is_taken_again(log, options, expire_records):
    """A program may end any lease by its name."""
    plan_from(options, 0)
    (lease,) = log.housekeeping.leases()
    log.housekeeping.hold(lease.name, {("t", 0): 0}, seconds=1).release()
    assert log.housekeeping.leases() == []
    tasks = plan_from(options, 0)
    expire_records()
    assert values_of(read_all(tasks)) == list(range(60))


def test_records_deleted_after_a_short_lease_are_a_loss(log, options, expire_records):
    """The lease has the shortest readLeaseMs."""
    tasks = plan_batch(SourceOptions.parse(options(readLeaseMs=1)))
    expire_records()
    expire_records()

    assert start_of(log) > 0
    with pytest.raises(DataLossError, match="was deleted after the query was planned"):
        read_all(tasks)
    assert len(read_all(tasks, fail_on_data_loss=False)) < 60


def test_a_batch_that_loses_a_race_is_planned_again(log, options, expire_records, monkeypatch):
    """If retention moves the start after it was looked up, the earliest offset changes."""
    hold, calls = LogSource.hold_for_batch, []

    def late_hold(self, *args):
        if not calls:
            calls.append(expire_records())
        return hold(self, *args)

    monkeypatch.setattr(LogSource, "hold_for_batch", late_hold)
    tasks = plan_batch(SourceOptions.parse(options()))

    assert values_of(read_all(tasks)) == list(range(start_of(log), 60))
    assert start_of(log) > 0


def test_retention_waits_for_a_stream_until_its_next_batch(log, options, expire_records):
    """The lease begins at the start of the last batch; earlier records may be deleted."""
    now_ms = [0]
    stream = MicroBatchStream(
        SourceOptions.parse(options(startingOffsets="earliest", maxOffsetsPerTrigger=30)),
        lambda: now_ms[0],
    )
    start = stream.initial_offset()
    expire_records()
    assert start_of(log) == 0

    end = json.loads(json.dumps(stream.latest_offset(start)))
    assert len(read_all(stream.plan_input_partitions(start, end))) == 30
    now_ms[0] += 10_000
    stream.latest_offset(end)
    expire_records()
    assert 0 < start_of(log) <= 30

    assert len(read_all(stream.plan_input_partitions(end, stream.latest_offset(end)))) == 30
    stream.close()
    assert log.housekeeping.leases() == []


def test_an_idle_stream_renews_its_lease_every_few_seconds(log, options):
    """Spark calls `latestOffset` ninety times a second; most calls do not renew the lease."""
    now_ms = [0]
    stream = MicroBatchStream(
        SourceOptions.parse(options(startingOffsets="latest", readLeaseMs=60_000)),
        lambda: now_ms[0],
    )
    offset = stream.latest_offset(stream.initial_offset())
    renewals = []
    stream.source.hold = lambda name, offsets: renewals.append(now_ms[0]) or True
    for now_ms[0] in range(0, 20_000, 100):
        offset = stream.latest_offset(offset)

    assert 2 <= len(renewals) <= 4
    stream.close()


def test_retention_that_passed_a_stopped_stream_is_a_loss(log, options, expire_records):
    """The query fails, or continues at the earliest record and reads none twice."""
    stream_options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 5}
    stream = MicroBatchStream(SourceOptions.parse(options(**stream_options)))
    end = json.loads(json.dumps(stream.latest_offset(stream.initial_offset())))
    assert len(read_all(stream.plan_input_partitions(stream.initial_offset(), end))) == 5
    stream.close()
    log.partition("t", 0).append([encoded(b"60", at=START + 3 * DAY)])
    expire_records()
    assert start_of(log) > 5

    strict, lenient = (
        MicroBatchStream(SourceOptions.parse(options(**stream_options, failOnDataLoss=fail)))
        for fail in ("true", "false")
    )
    with pytest.raises(DataLossError, match="was read up to offset 5, and begins at"):
        strict.latest_offset(end)
    end_after_loss = lenient.latest_offset(end)
    assert values_of(read_all(lenient.plan_input_partitions(end, end_after_loss)))[0] == start_of(
        log
    )
    strict.close()
    lenient.close()


def test_compacted_gaps_are_no_losses(tmp_path, options, clock):
    """Records that were compacted away are no data loss; the others are read."""
    path = tmp_path / "compacted"
    with embedlog.open(path, clock=clock, maintenance=False) as log:
        log.create_topic("t", 1, {"cleanup.policy": "compact", "segment.bytes": 2000})
        for number in range(200):
            key = b"%d" % (number % 10)
            log.partition("t", 0).append([encoded(b"%d" % number, keys=[key], at=START)])
        stream = MicroBatchStream(
            SourceOptions.parse(
                {"path": str(path), "subscribe": "t", "startingOffsets": "earliest"}
            )
        )
        start = stream.initial_offset()
        stream.close()
        clock.now += DAY
        log.housekeeping.run()
        offsets = [record.offset for record in log.topic("t")]
        assert len(offsets) < 100

        rows = read_all(plan_batch(SourceOptions.parse({"path": str(path), "subscribe": "t"})))
        assert [row["offset"] for row in rows] == offsets
        start_offset = offsets[3]
        starting = {"startingOffsets": json.dumps({"t": {"0": start_offset - 1}})}
        rows = read_all(
            plan_batch(SourceOptions.parse({"path": str(path), "subscribe": "t", **starting}))
        )
        assert [row["offset"] for row in rows] == [
            offset for offset in offsets if offset >= start_offset - 1
        ]
        end = stream.latest_offset(start)
        assert [
            row["offset"] for row in read_all(stream.plan_input_partitions(start, end))
        ] == offsets
        stream.close()
        assert log.housekeeping.verify() == []


def test_a_signal_during_stop_does_not_interrupt_it(log, options, monkeypatch):
    """Spark closes the socket of the source's process and signals it at about the same time."""
    release = LogSource.release

    def release_with_signal(source):
        os.kill(os.getpid(), signal.SIGTERM)
        release(source)

    def stop_reader():
        reader = object.__new__(StreamReader)
        parsed = SourceOptions.parse(options(startingOffsets="earliest"))
        reader.__dict__.update(options=parsed, fields=[], _schemas=None)
        reader.initialOffset()
        lease_count = len(log.housekeeping.leases())
        monkeypatch.setattr(LogSource, "release", release_with_signal)
        reader.stop()
        return lease_count

    assert in_child(stop_reader) == 1
    assert log.housekeeping.leases() == []
