"""Retention and compaction do not pull files from under a query, for as long as it may read."""

import json
import os
import signal

import pytest
from support.children import in_child
from support.clock import START, ManualClock
from support.roots import encoded
from support.sparks import read_all, values_of

import embedlog
from embedlog.errors import DataLossError
from embedlog.spark.batch_scan import plan_batch
from embedlog.spark.datasource import StreamReader
from embedlog.spark.micro_batch import MicroBatchStream
from embedlog.spark.source import LogSource
from embedlog.spark.source_options import parse

DAY = 86_400_000


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def log(tmp_path, clock):
    """A topic of small segments that are kept for a day; nothing is done in the background."""
    config = {"segment.bytes": 2000, "retention.ms": DAY, "file.delete.delay.ms": 0}
    with embedlog.open(tmp_path / "log", clock=clock, maintenance=False) as log:
        log.create_topic("t", 1, config)
        for number in range(60):
            log.partition("t", 0).append([encoded(b"%d" % number, at=START)])
        yield log
        assert log.verify() == []


@pytest.fixture
def grow_old(log, clock):
    def grow_old():
        clock.now += 3 * DAY
        log.maintain()

    return grow_old


def start_of(log):
    return log.partition("t", 0).start_offset()


def test_retention_waits_for_a_batch_that_was_planned(log, options, grow_old):
    """Spark says nothing when the last task is done, so the lease ends by its time."""
    tasks = plan_batch(parse(options()))
    grow_old()

    assert start_of(log) == 0
    assert values_of(read_all(tasks)) == list(range(60))
    (lease,) = log.leases()
    assert lease.name.startswith("spark-")
    assert 3_500_000 < lease.ms_left <= 3_600_000


def test_a_short_lease_ends_and_what_is_gone_is_a_loss(log, options, grow_old):
    """readLeaseMs, as short as it can be."""
    tasks = plan_batch(parse(options(readLeaseMs=1)))
    grow_old()
    grow_old()

    assert start_of(log) > 0
    with pytest.raises(DataLossError, match="was deleted after the query was planned"):
        read_all(tasks)
    assert len(read_all(tasks, fail=False)) < 60


def test_a_batch_that_loses_a_race_is_planned_again(log, options, grow_old, monkeypatch):
    """Retention moves the start after it was looked up: the earliest offset is another one."""
    hold, passed = embedlog.Log.hold, []

    def late(self, *given, **more):
        if not passed:
            passed.append(grow_old())
        return hold(self, *given, **more)

    monkeypatch.setattr(embedlog.Log, "hold", late)
    tasks = plan_batch(parse(options()))

    assert values_of(read_all(tasks)) == list(range(start_of(log), 60))
    assert start_of(log) > 0


def test_retention_waits_for_a_stream_until_it_went_on(log, options, grow_old):
    """From the start of its last batch on; what is before may go."""
    now = [0]
    stream = MicroBatchStream(
        parse(options(startingOffsets="earliest", maxOffsetsPerTrigger=30)), lambda: now[0]
    )
    begin = stream.initial_offset()
    grow_old()
    assert start_of(log) == 0

    end = json.loads(json.dumps(stream.latest_offset(begin)))
    assert len(read_all(stream.plan_input_partitions(begin, end))) == 30
    now[0] += 10_000
    stream.latest_offset(end)
    grow_old()
    assert 0 < start_of(log) <= 30

    assert len(read_all(stream.plan_input_partitions(end, stream.latest_offset(end)))) == 30
    stream.close()
    assert log.leases() == []


def test_an_idle_stream_renews_its_lease_now_and_then(log, options):
    """Not at each of ninety looks a second."""
    now = [0]
    stream = MicroBatchStream(
        parse(options(startingOffsets="latest", readLeaseMs=60_000)), lambda: now[0]
    )
    position = stream.latest_offset(stream.initial_offset())
    held = []
    stream.source.hold = lambda name, offsets: held.append(now[0]) or True
    for now[0] in range(0, 20_000, 100):
        position = stream.latest_offset(position)

    assert 2 <= len(held) <= 4
    stream.close()


def test_retention_that_passed_a_stopped_stream_is_a_loss(log, options, grow_old):
    """It fails, or goes on at the earliest record without reading one twice."""
    given = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 5}
    stream = MicroBatchStream(parse(options(**given)))
    end = json.loads(json.dumps(stream.latest_offset(stream.initial_offset())))
    assert len(read_all(stream.plan_input_partitions(stream.initial_offset(), end))) == 5
    stream.close()
    log.partition("t", 0).append([encoded(b"60", at=START + 3 * DAY)])
    grow_old()
    assert start_of(log) > 5

    strict, lenient = (
        MicroBatchStream(parse(options(**given, failOnDataLoss=fails)))
        for fails in ("true", "false")
    )
    with pytest.raises(DataLossError, match="was read up to offset 5, and begins at"):
        strict.latest_offset(end)
    after = lenient.latest_offset(end)
    assert values_of(read_all(lenient.plan_input_partitions(end, after)))[0] == start_of(log)
    strict.close()
    lenient.close()


def test_compacted_gaps_are_no_losses(tmp_path, options, clock):
    """Keys that were written again are gone; the rest is read, and nothing fails."""
    path = tmp_path / "compacted"
    with embedlog.open(path, clock=clock, maintenance=False) as log:
        log.create_topic("t", 1, {"cleanup.policy": "compact", "segment.bytes": 2000})
        for number in range(200):
            key = b"%d" % (number % 10)
            log.partition("t", 0).append([encoded(b"%d" % number, keys=[key], at=START)])
        stream = MicroBatchStream(
            parse({"path": str(path), "subscribe": "t", "startingOffsets": "earliest"})
        )
        begin = stream.initial_offset()
        stream.close()
        clock.now += DAY
        log.maintain()
        kept = [record.offset for record in log.topic("t")]
        assert len(kept) < 100

        found = read_all(plan_batch(parse({"path": str(path), "subscribe": "t"})))
        assert [row["offset"] for row in found] == kept
        middle = kept[3]
        cut = {"startingOffsets": json.dumps({"t": {"0": middle - 1}})}
        some = read_all(plan_batch(parse({"path": str(path), "subscribe": "t", **cut})))
        assert [row["offset"] for row in some] == [one for one in kept if one >= middle - 1]
        end = stream.latest_offset(begin)
        assert [row["offset"] for row in read_all(stream.plan_input_partitions(begin, end))] == kept
        stream.close()
        assert log.verify() == []


def test_a_signal_while_it_lets_go_changes_nothing(log, options, monkeypatch):
    """Spark closes the socket of a source's process and signals it, at about the same time."""
    release = LogSource.release

    def signalled(source):
        os.kill(os.getpid(), signal.SIGTERM)
        release(source)

    def work():
        reader = object.__new__(StreamReader)
        reader.__setstate__({"options": parse(options(startingOffsets="earliest")), "names": ()})
        reader.initialOffset()
        held = len(log.leases())
        monkeypatch.setattr(LogSource, "release", signalled)
        reader.stop()
        return held

    assert in_child(work) == 1
    assert log.leases() == []
