"""The audit: each tier counts, and each difference is named with its window, tier and number."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import suppress
from functools import partial
from itertools import product

import pyarrow as pa
import pytest
from support import forks
from support.audit_faults import double, lose
from support.tiers import sample

import embedlog
from embedlog import TopicPartition
from embedlog.audit import audit_topic
from embedlog.audit.reporter import reporter_of
from embedlog.catalog import AUDIT
from embedlog.cli import main
from embedlog.compaction.rebatch import rebatch
from embedlog.errors import InvalidConfigError, InvalidTopicError
from embedlog.listeners import MIRROR, Client, CopiedRange, count_minutes

HOUR = 3_600_000
NOON = 1_700_049_600_000 // HOUR * HOUR
TIMES = [NOON + HOUR * (number % 3) + number for number in range(300)]
"""100 records in each of three hours, in turns."""
MS = pa.timestamp("ms", tz="UTC")
ALL = {0: 100, 1: 100, 2: 100}


@pytest.fixture
def log(tmp_path):
    """A log with an audited topic of one partition, whose clock stands at noon."""
    with embedlog.open(tmp_path / "log", clock=lambda: NOON, maintenance=False) as log:
        log.create_topic("t", config={"audit": True})
        yield log


def write(log, times=TIMES, topic="t", **config):
    """Write records with these timestamps, and close the producer."""
    with log.producer(**config) as producer:
        producer.send_batch(topic, [b"v"] * len(times), timestamps=times).result()


def group(log, topic="t", name="g", **config):
    """Return a consumer of a group that begins at the start and commits when it is told to."""
    settings = {"auto_offset_reset": "earliest", "enable_auto_commit": False} | config
    return log.consumer(topic, group_id=name, **settings)


def take(consumer, count):
    """Poll until so many records were returned."""
    while count:
        count -= sum(map(len, consumer.poll(5000, max_records=count).values()))


def read(log, count, topic="t", name="g", **config):
    """Read and commit so many records in a group, and leave it."""
    with group(log, topic, name, **config) as consumer:
        take(consumer, count)
        consumer.commit()


def counts(result, tier, name=None):
    """Return the counts of a tier, by hour."""
    return {
        (row.window - NOON) // HOUR: row.counts
        for row in result.rows
        if row.who.tier == tier and name in (None, row.who.name or row.who.client)
    }


def values(result, tier, field="records", name=None):
    """Return one of the counts of a tier by hour, where it is not 0."""
    by_hour = {hour: getattr(row, field) for hour, row in counts(result, tier, name).items()}
    return {hour: value for hour, value in by_hour.items() if value}


def in_killed_child(work):
    """Run work in a forked child that is killed (SIGKILL) at the end of it."""

    def run():
        work()
        os.kill(os.getpid(), signal.SIGKILL)

    assert forks.run(run).was_killed()


# What is counted


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_all_tiers_count_the_same(log, compression):
    """Batches that span windows are counted by their timestamps."""
    write(log, client_id="writer", compression_type=compression)
    read(log, 300)

    result = log.audit("t", "1h")

    assert values(result, "log") == ALL
    assert values(result, "producer", name="writer") == ALL
    assert values(result, "group", name="g") == ALL
    assert result.differences == []
    assert all(row.counts.log_records == 100 for row in result.rows)
    (producer,) = {row.who for row in result.rows if row.who.tier == "producer"}
    assert producer.process == os.getpid()
    assert producer.host


def test_each_way_to_send_is_counted(log):
    """One at a time, waited for or not, with headers, in lists and in tables."""
    table = pa.table({"value": [b"v"] * 90, "timestamp": pa.array(TIMES[:90], MS)})
    with log.producer(client_id="p") as producer:
        for number in range(10):
            producer.send("t", b"v", timestamp_ms=NOON + number * HOUR)
            producer.send("t", b"v", headers=[("h", b"x")], timestamp_ms=NOON)
        producer.flush()
        for _ in range(600):
            producer.send("t", b"v").result()
        producer.append_table("t", table).result()

    result = log.audit("t", "1h")

    assert values(result, "producer") == values(result, "log")
    assert sum(values(result, "producer").values()) == 20 + 600 + 90
    assert result.differences == []
    assert values(result, "producer", "unreported") == {}


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("unit", ["s", "us", "ns"])
def test_a_typed_topic_is_counted_by_its_column_of_timestamps(log, compression, unit):
    """In any unit, and wherever the column is."""
    kind = pa.timestamp(unit, tz="UTC")
    schema = pa.schema([("a", pa.string()), ("at", kind)])
    log.create_topic("typed", config={"audit": True}, schema=schema, timestamp="at")
    times = pa.array([time // 1000 * 1000 for time in TIMES], MS).cast(kind)
    with log.producer(compression_type=compression) as producer:
        producer.append_table("typed", pa.table({"a": ["x"] * 300, "at": times})).result()
        producer.send("typed", {"a": "y", "at": times[0].as_py()}).result()
    read(log, 301, "typed")

    result = log.audit("typed", "1h")

    assert values(result, "producer") == values(result, "group") == ALL | {0: 101}
    assert result.differences == []


def test_with_log_append_time_the_time_of_the_append_counts(log):
    """As in the log, whatever the producer sent."""
    log.create_topic("a", config={"audit": True, "message.timestamp.type": "LogAppendTime"})
    write(log, topic="a")
    with log.producer() as producer:
        producer.send("a", b"v", timestamp_ms=5).result()
        producer.send("a", b"v", timestamp_ms=5).result()

    result = log.audit("a", "1h")

    assert values(result, "producer") == values(result, "log")
    assert sum(values(result, "log").values()) == 302
    assert set(values(result, "log")) == {0, 1} or set(values(result, "log")) == {0}
    assert result.differences == []


def test_times_far_apart_and_before_1970_are_counted(log):
    """Windows are not counted one by one over centuries."""
    times = [-5_000_000_000_000, -1, 0, 1, 4_000_000_000_000] * 20
    write(log, times)
    read(log, 100)

    result = log.audit("t", "1d")

    assert len(counts(result, "log")) == 4
    assert values(result, "producer") == values(result, "group") == values(result, "log")
    assert result.differences == []


def test_a_topic_without_the_setting_is_not_counted(log):
    """The log is; nobody reports, and there is no topic for it."""
    log.create_topic("quiet")
    write(log, topic="quiet")
    read(log, 300, "quiet")

    result = log.audit("quiet", "1h")

    assert {row.who.tier for row in result.rows} == {"log"}
    assert AUDIT not in log.topics(internal=True)


def test_a_topic_without_the_setting_is_said_to_be_none(log, capsys):
    """So that no row of a producer does not look like no producer."""
    hint = "quiet has no audit=true, so producers and groups do not report"
    log.create_topic("quiet")
    write(log, topic="quiet")
    result = log.audit("quiet")
    assert repr(result).splitlines()[-1] == hint
    assert hint in result._repr_html_()
    assert result.to_dict()["audited"] is False
    assert main(["audit", "quiet", "-r", log.path, "--differences"]) == 0
    out, err = capsys.readouterr()
    assert (out, hint in err) == ("", True)
    command = err.rpartition(": embedlog ")[2].split()
    assert main([*command, "-r", log.path]) == 0

    assert log.audit("quiet").hint is None
    assert main(["audit", "quiet", "-r", log.path]) == 0
    assert hint not in "".join(capsys.readouterr())


def test_the_setting_takes_effect_while_clients_run(log):
    """What was written and read before is counted from batches and commits, and is no loss."""
    log.create_topic("later")
    with log.producer() as producer, group(log, "later") as consumer:
        producer.send_batch("later", [b"v"] * 300, timestamps=TIMES).result()
        take(consumer, 300)
        consumer.commit()
        log.alter_topic("later", {"audit": True})
        producer.send_batch("later", [b"v"] * 300, timestamps=TIMES).result()
        take(consumer, 300)
        consumer.commit()

    result = log.audit("later", "1h")

    assert result.differences == []
    assert sum(values(result, "producer").values()) == 600
    assert sum(values(result, "producer", "unreported").values()) == 300
    assert sum(values(result, "group").values()) == 300


def test_a_topic_that_is_not_audited_any_more_has_no_differences(log):
    """What is written and read without being counted is neither doubled nor missing."""
    with log.producer() as producer, group(log) as consumer:
        for audited in (True, False, True, False):
            log.alter_topic("t", {"audit": audited})
            producer.send_batch("t", [b"v"] * 300, timestamps=TIMES).result()
            take(consumer, 300)
            consumer.commit()

    result = log.audit("t", "1h")

    assert result.differences == []
    for tier in ("producer", "group"):
        assert sum(values(result, tier).values()) == 1200
        assert sum(values(result, tier, "unreported").values()) == 600


def test_retries_and_repeated_calls_count_once(log):
    """A call with sequence numbers that is repeated writes nothing, and counts nothing."""
    for _ in range(3):
        with log.producer(producer_name="loader") as producer:
            for _ in range(2):
                producer.send_batch("t", [b"v"] * 300, timestamps=TIMES, sequence=0).result()

    result = log.audit("t", "1h")

    assert values(result, "producer") == values(result, "log") == ALL
    assert result.differences == []


def test_a_batch_whose_first_answer_was_lost_counts(log, monkeypatch):
    """The log has it at the first attempt; the second one finds that."""
    partition = log.root.partition("t", 0)
    append, failed = partition.append, []

    def lost_answer(*args, **options):
        receipts = append(*args, **options)
        if not failed:
            failed.append(receipts)
            raise embedlog.errors.LockTimeoutError("The answer was lost")
        return receipts

    with log.producer(retry_backoff_ms=1) as producer:
        producer.send("t", b"first").result()
        monkeypatch.setattr(partition, "append", lost_answer)
        producer.send_batch("t", [b"v"] * 300, timestamps=TIMES).result()

    result = log.audit("t", "1h")

    assert failed
    assert result.differences == []
    assert values(result, "producer") == values(result, "log")


# Killed


def test_a_producer_that_was_killed_is_counted_from_its_batches(log):
    """With its name and process: it said who it is before its first batch."""
    pids = []
    for name in ("first", "second"):
        child = forks.Child(partial(_write_and_die, log, name))
        pids.append(child.pid)
        assert child.end().was_killed()
    write(log, client_id="third")

    result = log.audit("t", "1h")

    for name, pid in zip(("first", "second"), pids, strict=True):
        assert values(result, "producer", "records", name) == ALL
        assert values(result, "producer", "unreported", name) == ALL
        assert {row.who.process for row in result.rows if row.who.client == name} == {pid}
    assert values(result, "producer", "unreported", "third") == {}
    assert result.differences == []


def _write_and_die(log, name):
    producer = log.producer(client_id=name)
    producer.send_batch("t", [b"v"] * 300, timestamps=TIMES).result()
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_producer_reported_before_is_not_counted_twice(log):
    """Its reports say up to where."""

    def work():
        producer = log.producer(client_id="p")
        producer.send_batch("t", [b"v"] * 300, timestamps=TIMES).result()
        reporter_of(log.root).report_all()
        producer.send_batch("t", [b"v"] * 150, timestamps=TIMES[:150]).result()

    in_killed_child(work)

    result = log.audit("t", "1h")

    assert values(result, "producer") == {0: 150, 1: 150, 2: 150}
    assert values(result, "producer", "unreported") == {0: 50, 1: 50, 2: 50}
    assert result.differences == []


def test_a_member_that_was_killed_after_a_commit_is_counted_from_the_commit(log):
    """Nothing is missing: the next member goes on at the commit."""
    write(log)

    def work():
        consumer = group(log)
        take(consumer, 150)
        consumer.commit()
        take(consumer, 50)

    in_killed_child(work)
    result = log.audit("t", "1h")
    assert values(result, "group") == {0: 50, 1: 50, 2: 50}
    assert values(result, "group", "unread") == {0: 50, 1: 50, 2: 50}
    assert result.differences == []

    read(log, 150)
    result = log.audit("t", "1h")

    assert values(result, "group") == ALL
    assert values(result, "group", "unreported") == {0: 50, 1: 50, 2: 50}
    assert result.differences == []


def test_a_forked_child_reports_what_it_does_itself(log):
    """What the parent wrote and read before the fork is reported by the parent."""
    with log.producer(client_id="p") as producer, group(log) as consumer:
        producer.send_batch("t", [b"v"] * 300, timestamps=TIMES).result()
        take(consumer, 150)

        def work():
            producer.send_batch("t", [b"v"] * 30, timestamps=TIMES[:30]).result()
            producer.close()
            consumer.close()
            return os.getpid()

        child = forks.run(work).result()
        consumer.commit()

    result = log.audit("t", "1h")

    by_process = {}
    for row in result.rows:
        if row.who.tier == "producer":
            sums = by_process.setdefault(row.who.process, [0, 0])
            sums[0] += row.counts.records
            sums[1] += row.counts.unreported
    assert by_process == {os.getpid(): [300, 0], child: [30, 0]}
    assert sum(values(result, "group").values()) == 150
    assert result.differences == []


# Groups


def test_only_what_is_committed_counts(log):
    """What is given back is read again by the next member: that is doubled, with the number."""
    write(log)
    with group(log) as consumer:
        take(consumer, 150)
        consumer.commit({TopicPartition("t", 0): 30})
    result = log.audit("t", "1h")
    assert values(result, "group") == {0: 10, 1: 10, 2: 10}
    assert result.differences == []

    read(log, 270)
    result = log.audit("t", "1h")

    assert values(result, "group") == ALL
    assert values(result, "group", "doubled") == {0: 40, 1: 40, 2: 40}
    assert "group g read 40 records more than once" in result.differences[0]


@pytest.mark.parametrize("how", ["seek", "commit", "reset"])
def test_what_a_group_leaves_out_is_missing(log, how):
    """Whether a program seeks over it, commits beyond it, or an administrator resets the group."""
    write(log)
    partition = TopicPartition("t", 0)
    with group(log) as consumer:
        take(consumer, 90)
        consumer.commit()
        if how == "seek":
            consumer.seek(partition, 150)
            take(consumer, 1)
            consumer.commit()
        elif how == "commit":
            consumer.commit({partition: 150})
    if how == "reset":
        log.groups["g"].reset_offsets(150, topics="t", dry_run=False)
    read(log, 149 if how == "seek" else 150)

    result = log.audit("t", "1h")

    assert values(result, "group", "missing") == {0: 20, 1: 20, 2: 20}
    assert values(result, "group") == {0: 80, 1: 80, 2: 80}
    assert len(result.differences) == 3
    assert "group g did not read 20 records" in result.differences[0]


def test_a_group_that_begins_at_the_end_lacks_nothing(log):
    """It is compared from where it began."""
    write(log)
    with group(log, auto_offset_reset="latest") as consumer:
        consumer.poll(0)
        write(log)
        take(consumer, 300)
        consumer.commit()

    result = log.audit("t", "1h")

    assert values(result, "group") == ALL
    assert result.differences == []


@pytest.mark.parametrize("how", ["records", "batches", "columns", "where"])
def test_each_way_to_read_is_counted(log, how):
    """Iterators hand out records one by one; a filter passes over records, which are read too."""
    write(log)
    where = pa.compute.field("offset") < 10 if how == "where" else None
    with group(log, enable_auto_commit=True) as consumer:
        if how == "records":
            for number, _ in enumerate(consumer.iter_records()):
                if number == 149:
                    break
        else:
            consumer.poll(5000, max_records=150)
            for _ in consumer.iter_batches(["offset"] if how != "batches" else None, "end", where):
                pass

    result = log.audit("t", "1h")

    count = 50 if how == "records" else 100
    assert values(result, "group") == dict.fromkeys(range(3), count)
    assert result.differences == []


def test_members_of_a_group_are_counted_together(log):
    """Whoever reads a partition."""
    log.create_topic("two", partitions=2, config={"audit": True})
    with log.producer() as producer:
        for partition in range(2):
            producer.send_batch("two", [b"v"] * 300, timestamps=TIMES, partition=partition)
    with group(log, "two") as first, group(log, "two") as second:
        left = 600
        while left:
            for consumer in (first, second):
                left -= sum(map(len, consumer.poll(10).values()))
                consumer.commit()

    result = log.audit("two", "1h")

    assert values(result, "group") == dict.fromkeys(range(3), 200)
    assert result.differences == []


# Planted differences


@pytest.mark.parametrize("kind", ["bytes", "typed"])
def test_lost_and_doubled_records_of_a_copy_are_named_exactly(log, tmp_path, kind):
    """The window, whose records they are, and how many."""
    if kind == "typed":
        schema = pa.schema([("a", pa.string()), ("at", MS)])
        log.create_topic("c", config={"audit": True}, schema=schema, timestamp="at")
        table = pa.table({"a": ["x"] * 300, "at": pa.array(TIMES, MS)})
    else:
        log.create_topic("c", config={"audit": True})
        table = pa.table({"value": [b"v"] * 300, "timestamp": pa.array(TIMES, MS)})
    for name in ("one", "two"):
        with log.producer(client_id=name) as producer:
            producer.append_table("c", table).result()
    log.close()
    shutil.copytree(log.path, tmp_path / "copy")

    with embedlog.open(tmp_path / "copy", clock=lambda: NOON, maintenance=False) as copy:
        assert copy.audit("c", "1h").differences == []
        partition = copy.root.partition("c", 0)
        double(partition, 0)
        lose(partition, {3, 6, 301, *range(302, 330, 3)})
        result = copy.audit("c", "1h")

    assert values(result, "producer", "missing", "one") == {0: 2}
    assert values(result, "producer", "doubled", "one") == ALL
    assert values(result, "producer", "missing", "two") == {1: 1, 2: 10}
    assert values(result, "producer", "doubled", "two") == {}
    assert len(result.differences) == 6
    who = f"producer two (process {os.getpid()} on "
    assert any(f"the log has lost 10 records of {who}" in text for text in result.differences)


def test_a_loss_after_it_was_read_is_named_without_producers_that_report(log):
    """What a group has read, and the log does not have any more."""
    log.create_topic("r")
    write(log, topic="r")
    log.alter_topic("r", {"audit": True})
    read(log, 300, "r")
    lose(log.root.partition("r", 0), {1, 2, 3, 4})

    result = log.audit("r", "1h")

    assert sum(values(result, "log", "missing").values()) == 4
    assert "the log has lost" in result.differences[0]


def test_a_loss_before_a_group_reads_is_not_the_fault_of_the_group(log):
    """The group has read what the log has."""
    write(log)
    lose(log.root.partition("t", 0), {3, 6})
    read(log, 298)

    result = log.audit("t", "1h")

    assert values(result, "producer", "missing") == {0: 2}
    assert values(result, "group") == {0: 98, 1: 100, 2: 100}
    assert len(result.differences) == 1


# What is deleted is not lost


def test_what_retention_deletes_is_said_to_be_deleted(log):
    """Also a window of which a part is deleted."""
    log.create_topic("old", config={"audit": True, "segment.bytes": 4000})
    for _ in range(10):
        write(log, TIMES[:30], topic="old", client_id="p")
    read(log, 300, "old")
    log.delete_records({TopicPartition("old", 0): 200})

    result = log.audit("old", "1h")

    start = log.topic("old").ranges()[0].start
    assert 0 < start <= 200
    deleted = values(result, "producer", "deleted")
    assert sum(deleted.values()) == start
    assert values(result, "log", "deleted") == deleted
    assert sum(values(result, "log").values()) == 300 - start
    assert values(result, "producer") == ALL
    assert result.differences == []


def test_what_compaction_removes_is_said_to_be_deleted(log):
    """Records that a later one of their key replaces are no loss."""
    log.create_topic("k", config={"audit": True, "cleanup.policy": "compact"})
    keys = [b"%d" % (number % 30) for number in range(300)]
    with log.producer(client_id="p") as producer:
        producer.send_batch("k", [b"v"] * 300, keys, timestamps=TIMES).result()
    read(log, 200, "k")
    log.housekeeping.compact("k", force=True)
    read(log, 30, "k")

    result = log.audit("k", "1h")

    assert sum(values(result, "log").values()) == 30
    assert sum(values(result, "producer", "deleted").values()) == 270
    assert result.differences == []


def test_gathered_batches_lose_their_producers_but_no_records(log):
    """Housekeeping drops ids of producers from small batches; a loss is still found."""
    for number in range(3):
        with log.producer(client_id=f"p{number}") as producer:
            for start in range(0, 300, 10):
                times = TIMES[start : start + 10]
                producer.send_batch("t", [b"v"] * 10, timestamps=times).result()
    partition = log.root.partition("t", 0)
    partition.roll()
    assert rebatch(partition, 1000).segments == 1
    assert log.audit("t", "1h").differences == []

    lose(partition, {3, 6})
    result = log.audit("t", "1h")

    assert values(result, "producer", "missing") == {0: 2}


# Mirrors and others


def test_a_mirror_reports_what_it_copied(log):
    """From the heads of batches; what it did not copy yet is unread, and a gap was not reported."""
    for _ in range(3):
        write(log)
    partition = log.root.partition("t", 0)
    whole = partition.reader(0).read()

    def counted(first, stop):
        batches = [b for b in whole if first <= b.base_offset < stop]
        return CopiedRange(partition, first, stop, count_minutes(batches))

    client = Client(MIRROR, "north")
    (listener,) = log.root.listeners.of(partition.config, client)
    listener.copied(counted(0, 300))
    reporter_of(log.root).report_all()
    assert values(log.audit("t", "1h"), "mirror", "unread") == dict.fromkeys(range(3), 200)
    listener.copied(counted(600, 900))
    client.close()

    result = log.audit("t", "1h")

    assert values(result, "mirror") == dict.fromkeys(range(3), 300)
    assert values(result, "mirror", "unreported") == ALL
    assert result.differences == []


# The result, the topic, and bad input


def test_windows_and_tiers_can_be_selected(log):
    """By time, with windows that begin before or end after it."""
    write(log)
    read(log, 150)

    result = log.audit("t", "1h", since=NOON + HOUR + 5, until=NOON + HOUR + 6, tiers=["group"])

    assert values(result, "group") == {1: 50}
    assert {row.who.tier for row in result.rows} == {"group"}
    for since in range(3):
        some = log.audit("t", "1h", since=NOON + since * HOUR)
        assert values(some, "log") == dict.fromkeys(range(since, 3), 100)
        assert values(some, "group") == dict.fromkeys(range(since, 3), 50)
        assert values(some, "group", "unread") == dict.fromkeys(range(since, 3), 50)
        assert some.differences == []


def test_the_result_is_a_frame(log):
    """Of pandas, Polars and Arrow, with a row per window and tier."""
    write(log)

    result = log.audit("t", "1h")

    table = result.to_arrow()
    assert table.column_names[:3] == ["window", "tier", "name"]
    assert table.num_rows == len(result) == 6
    assert pa.table(result) == table
    assert result.to_pandas()["records"].tolist() == [100] * 6
    assert result.to_polars()["records"].to_list() == [100] * 6
    assert "producer" in repr(result)
    assert "no differences" in result._repr_html_()


@pytest.mark.parametrize("window", ["30s", 90_000, "soon", 1.5, "0m"])
def test_a_window_must_be_whole_minutes(log, window):
    """Since producers and groups count by minute."""
    with pytest.raises(InvalidConfigError, match="window must be"):
        log.audit("t", window)


@pytest.mark.parametrize("time", ["yesterday", 1.5, True])
def test_a_time_must_be_one(log, time):
    """The error names the argument."""
    for name in ("since", "until"):
        with pytest.raises(InvalidConfigError, match=f"{name} is not a time: A time must be"):
            log.audit("t", **{name: time})


def test_a_tier_must_exist(log):
    """The error names those that do."""
    with pytest.raises(InvalidConfigError, match="There is no tier 'spark'"):
        log.audit("t", tiers=["spark"])


def test_the_topic_of_the_audit_is_internal(log):
    """Programs can read it and change its settings, but not write to it."""
    write(log)

    assert AUDIT not in log.topics()
    assert AUDIT in log.topics(internal=True)
    assert log.describe_topic(AUDIT)["config"]["retention.ms"] == 30 * 86_400_000
    for call in (
        lambda: log.create_topic(AUDIT, exist_ok=True),
        lambda: log.delete_topic(AUDIT),
        lambda: log.producer().send(AUDIT, b"x"),
    ):
        with pytest.raises(InvalidTopicError, match="embedlog itself"):
            call()
    log.alter_topic(AUDIT, {"retention.ms": 1000})
    assert log.topic(AUDIT).to_arrow()["tier"].to_pylist()[0] == "producer"


def test_a_report_that_was_appended_twice_counts_once(log, monkeypatch):
    """As when its append seemed to fail, and is tried again."""
    append, failures = audit_topic.append, []

    def failing(root, reports):
        append(root, reports)
        if len(failures) < 3:
            failures.append(len(reports))
            raise embedlog.errors.DurabilityError("The flush failed")

    monkeypatch.setattr(audit_topic, "append", failing)
    for _ in range(3):
        write(log)
    reporter_of(log.root).report_all()

    result = log.audit("t", "1h")

    assert failures
    assert values(result, "producer") == dict.fromkeys(range(3), 300)
    assert values(result, "producer", "unreported") == {}
    assert result.differences == []


def test_a_failing_report_does_not_fail_the_client(log, monkeypatch, caplog):
    """It is logged, and the log is counted from its batches."""

    def failing(root, reports):
        raise embedlog.errors.DiskFullError("The disk is full")

    monkeypatch.setattr(audit_topic, "append", failing)
    write(log)
    read(log, 300)

    assert "Cannot append" in caplog.text
    assert values(log.audit("t", "1h"), "log") == ALL


def test_the_command_prints_the_table_and_the_differences(log, capsys):
    """And exits with 1 if there are differences."""
    write(log, client_id="p")
    read(log, 300)
    root = ["-r", log.path]

    assert main(["audit", "t", *root]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["WINDOW", "TIER", "NAME"]
    assert [line.split()[2] for line in lines[1:4]] == ["log", "producer", "group"]

    lose(log.root.partition("t", 0), {1})
    assert main(["audit", "t", *root, "--differences"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "the log has lost 1 record of producer p" in line
    assert main(["audit", "t", *root, "--json", "--window", "1d"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert sum(row["missing"] for row in document["rows"]) == 1
    assert main(["audit", "t", *root, "--format", "csv", "--tier", "log"]) == 0
    assert capsys.readouterr().out.count("\n") == 4
    assert main(["audit", "t", *root, "--window", "30s"]) == 2
    assert main(["audit", "nothing", *root]) == 3


# Publications


def test_a_transaction_is_counted_by_its_name(log):
    """It is a publication, whose batches have no id of a producer."""
    for _ in range(2):
        with log.transaction("payments") as transaction:
            for time in TIMES:
                transaction.send("t", b"v", None, None, 0, time)
    with suppress(ZeroDivisionError), log.transaction("payments") as transaction:
        transaction.send("t", b"v", None, None, 0, NOON)
        raise ZeroDivisionError

    result = log.audit("t", "1h")

    assert values(result, "producer", "records", "payments") == dict.fromkeys(range(3), 200)
    assert values(result, "producer", "unreported") == {}
    assert result.differences == []


def test_a_conversion_is_counted_by_its_name(log):
    """With the timestamps of the records that it copies."""
    log.create_topic("json", value="json")
    with log.producer() as producer:
        producer.send_batch("json", [{"a": 1}] * 300, timestamps=TIMES).result()
    log.convert("json", "columns")
    log.alter_topic("columns", {"audit": True})
    with log.producer() as producer:
        producer.send_batch("json", [{"a": 2}] * 300, timestamps=TIMES).result()
    log.convert("json", "columns")

    result = log.audit("columns", "1h")

    assert values(result, "log") == dict.fromkeys(range(3), 200)
    names = {row.who.name for row in result.rows if row.who.tier == "producer"}
    assert any(name.startswith("conversion of ") for name in names)
    unnamed = values(result, "producer", "unreported", "(no producer id)")
    assert sum(unnamed.values()) == 300
    assert result.differences == []


def test_writers_without_an_id_are_compared_together(log):
    """A loss is found; what nobody reported has no name."""
    write(log, enable_idempotence=False, client_id="plain")

    in_killed_child(
        lambda: (
            log.producer(enable_idempotence=False)
            .send_batch("t", [b"v"] * 30, timestamps=TIMES[:30])
            .result()
        )
    )
    result = log.audit("t", "1h")
    assert values(result, "producer", name="plain") == ALL
    assert values(result, "producer", name="(no producer id)") == {0: 10, 1: 10, 2: 10}
    assert result.differences == []

    lose(log.root.partition("t", 0), set(range(1, 100)))
    assert sum(values(log.audit("t", "1h"), "producer", "missing").values()) == 99 - 30


# Mirrors


def test_a_mirror_reports_to_its_source(log, tmp_path):
    """By its name: what it copied is compared with the log, in each run from where it went on."""
    for _ in range(2):
        write(log)
        embedlog.mirror(log, tmp_path / "copy", topics="t", name="north", progress=False)

    result = log.audit("t", "1h")

    twice = {hour: 2 * count for hour, count in ALL.items()}
    assert values(result, "log") == values(result, "mirror", name="north") == twice
    assert result.differences == []


def test_what_a_mirror_has_not_copied_yet_is_no_loss(log, tmp_path):
    """It is compared up to where it is."""
    write(log)
    embedlog.mirror(log, tmp_path / "copy", topics="t", name="north", progress=False)
    write(log)

    result = log.audit("t", "1h", tiers=["mirror"])

    assert values(result, "mirror", name="north") == ALL
    assert result.differences == []


@pytest.mark.parametrize(
    ("settings", "how", "merge"),
    sample(
        [
            *product(
                [{}, {"message.timestamp.type": "LogAppendTime"}],
                ["lost at its end", "lost inside", "deleted"],
                [False, True],
            )
        ],
        5,
    ),
)
def test_the_audit_of_a_copy_names_what_it_lost(log, tmp_path, merge, how, settings):
    """What a mirror wrote is compared with what is there: in each run, and beside producers."""
    log.alter_topic("t", settings)
    with embedlog.open(tmp_path / "copy", clock=lambda: NOON, maintenance=False) as copy:
        for _ in range(2):
            write(log)
            embedlog.mirror(log, copy, topics="t", merge=merge, name="north", progress=False)
        if merge:
            write(copy)
        before = copy.audit("t", "1h")
        assert before.differences == []
        expected = {0: 600} if settings else {hour: 2 * count for hour, count in ALL.items()}
        assert values(before, "copy", name="north") == expected
        assert not values(before, "producer", name="(no producer id)")
        at_source = log.audit("t", "1h")
        assert values(at_source, "mirror", name="north") == expected

        partition = copy.partition("t", 0)
        if how == "lost at its end" and not merge:
            partition.truncate_to(500)
            lost = 600 - 300 if settings == {} else 300
        elif how == "deleted":
            copy.delete_records({TopicPartition("t", 0): 90})
            lost = 0
        else:
            lost = len(lose(partition, range(50, 120)))
        after = copy.audit("t", "1h")
        assert sum(values(after, "copy", "missing").values()) == lost
        assert sum(values(after, "copy", "deleted").values()) == (90 if how == "deleted" else 0)
        assert bool(after.differences) is bool(lost)
        assert all("that mirror north copied to it" in text for text in after.differences)


def test_what_a_mirror_copies_again_is_no_difference(log, tmp_path):
    """The audit of a copy that lost records is as before once it has them again."""
    write(log)
    with embedlog.open(tmp_path / "copy", clock=lambda: NOON, maintenance=False) as copy:
        embedlog.mirror(log, copy, topics="t", name="north", progress=False)
        copy.partition("t", 0).truncate_to(0)
        assert sum(values(copy.audit("t", "1h"), "copy", "missing").values()) == 300
        embedlog.mirror(log, copy, topics="t", name="north", progress=False)
        result = copy.audit("t", "1h")
        assert result.differences == []
        assert values(result, "copy", "log_records") == {hour: 2 * n for hour, n in ALL.items()}


def test_what_was_deleted_before_a_mirror_copied_it_is_missing(log, tmp_path):
    """As the mirror says itself, before it goes on and afterwards."""
    write(log, [NOON + 2 * HOUR] * 300)
    mirror = {"topics": "t", "name": "north", "progress": False}
    embedlog.mirror(log, tmp_path / "copy", **mirror)
    write(log, [NOON] * 60)
    write(log, [NOON + HOUR] * 20)
    log.delete_records({TopicPartition("t", 0): 350})

    for _ in range(3):
        result = log.audit("t", "1h")
        assert values(result, "mirror", "missing") == {0: 50}
        assert values(result, "mirror", "deleted_unread") == {0: 50}
        assert len(result.differences) == 1
        embedlog.mirror(log, tmp_path / "copy", **mirror)
    assert embedlog.mirror(log, tmp_path / "copy", **mirror).status.skipped == 0


# What retention deletes before it is read


@pytest.mark.parametrize("reports", [True, False], ids=["producers report", "without reports"])
def test_what_retention_deletes_before_a_group_reads_it_is_missing(log, reports):
    """While the group has not come there, when it has gone on, and once all else is deleted."""
    log.alter_topic("t", {"audit": reports})
    for hour in range(3):
        write(log, [NOON + HOUR * hour] * 100)
    log.alter_topic("t", {"audit": True})
    read(log, 20)
    log.delete_records({TopicPartition("t", 0): 80})
    window = 0

    for step in range(3):
        result = log.audit("t", "1h")
        assert values(result, "group", "missing") == {window: 60}, step
        assert values(result, "group", "deleted_unread") == {window: 60}
        (text,) = result.differences
        assert "group g did not read 60 records, of which retention has deleted 60" in text
        if step == 0:
            read(log, 10)
            read(log, 210)
        else:
            log.delete_records({TopicPartition("t", 0): 150})
            window = 0 if reports else 1


def test_a_group_that_commits_behind_what_was_deleted_without_reading_anything_has_missed_it(log):
    """All was deleted, so its member is reset to the end, and finds nothing to read."""
    write(log)
    read(log, 100)
    log.delete_records({TopicPartition("t", 0): 300})
    with group(log) as consumer:
        assert not consumer.poll(100)
        consumer.commit()
    (text, *more) = log.audit("t", "1h").differences
    assert "group g did not read" in text
    assert sum(values(log.audit("t", "1h"), "group", "missing").values()) == 200, more


def test_what_retention_deletes_after_it_was_read_or_before_a_group_began_is_not_missing(log):
    """Nor if a group was deleted, which does not go on."""
    write(log)
    log.delete_records({TopicPartition("t", 0): 50})
    read(log, 100)
    read(log, 100, name="gone")
    log.delete_records({TopicPartition("t", 0): 150})
    assert log.audit("t", "1h").differences == []
    log.delete_records({TopicPartition("t", 0): 160})
    assert len(log.audit("t", "1h").differences) >= 2
    log.groups["gone"].delete()
    assert {row.who.name for row in log.audit("t", "1h").rows if row.counts.missing} == {"g"}
