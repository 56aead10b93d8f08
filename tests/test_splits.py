"""`TopicView.splits`: parts of a topic that other processes read from its files alone."""

from __future__ import annotations

import pickle
import shutil
import sys
from itertools import pairwise, product

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.children import run_python
from support.tiers import sample

import embedlog
from embedlog.errors import (
    DataLossError,
    NotALogError,
    OffsetOutOfRangeError,
    RecordDeserializationError,
    UnsupportedFormatError,
)

COLUMNS = pa.schema([("number", pa.int32()), ("name", pa.string())])
SMALL = {"segment.bytes": 20_000, "file.delete.delay.ms": 0}
ROWS = 6_000
READS = """
import pickle, sys
splits = pickle.load(open(sys.argv[1], "rb"))
print(sum(split.to_table().num_rows for split in splits))
print(*{"lmdb", "embedlog.api"} & {*sys.modules})
"""


def send_rows(log, topic, rows, columns=COLUMNS):
    """Append rows in batches of 100, from partition to partition."""
    with log.producer() as plain, log.producer(compression_type="lz4") as packed:
        for start in range(rows.start, rows.stop, 100):
            numbers = range(start, start + 100)
            table = pa.table([numbers, [f"n{number}" for number in numbers]], schema=columns)
            producer = plain if start % 200 else packed
            producer.append_table(topic, table, partition=start // 100 % 3).result()


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Topics of each kind; the typed ones have small segments."""
    with embedlog.open(tmp_path_factory.mktemp("splits") / "log", maintenance=False) as log:
        log.create_topic("plain", 3, SMALL, schema=COLUMNS)
        send_rows(log, "plain", range(ROWS))
        log.create_topic(
            "changed", 3, {**SMALL, "cleanup.policy": "compact"}, schema=COLUMNS, key="name"
        )
        send_rows(log, "changed", range(ROWS // 2))
        send_rows(log, "changed", range(ROWS // 2))
        producer = log.producer()
        producer.send("changed", None, key="n7").result()
        wider = COLUMNS.set(0, pa.field("number", pa.int64()))
        log.alter_topic("changed", schema=wider)
        log.housekeeping.compact("changed", force=True, progress=False)
        send_rows(log, "changed", range(ROWS // 2, ROWS), wider)
        log.create_topic("bytes", 2, SMALL)
        log.create_topic("values", 2, SMALL, key="int", value="str")
        log.create_topic("json", 2, SMALL, key="int", value="json")
        log.create_topic("avro", value="avro")
        log.create_topic("empty", 2)
        for number in range(ROWS // 3):
            headers = [("h", b"x")] if number % 7 == 0 else None
            producer.send("bytes", b"%d" % number, headers=headers)
            producer.send("values", f"v{number}" if number % 5 else None, key=number)
            producer.send("json", {"n": number}, key=number)
        producer.flush()
        yield log


def read(splits):
    """Return the rows of splits that went to another process, in order."""
    splits = pickle.loads(pickle.dumps(splits))
    return pa.concat_tables([split.to_table() for split in splits])


@pytest.mark.parametrize(
    ("topic", "n"), sample([*product(["plain", "changed", "bytes", "values"], [1, 2, 7, 50])], 8)
)
def test_splits_have_each_record_once(log, topic, n):
    """Together the rows of `to_arrow`, in its order, and about as many parts as wanted."""
    view = log.topic(topic)
    splits = view.splits(n)

    table = view.to_arrow()
    assert read(splits).equals(table)
    assert {split.schema for split in splits} == {table.schema}
    assert len({(split.partition, split.start_offset) for split in splits}) == len(splits)
    assert max(n // 2, view.partitions) <= len(splits) <= max(2 * n, view.partitions)
    largest = max(split.size for split in splits)
    assert largest <= 2 * sum(split.size for split in splits) / len(splits) + 20_000
    for one, other in pairwise(splits):
        assert one.partition < other.partition or one.end_offset == other.start_offset
    for split in splits:
        assert split.num_rows in (split.to_table().num_rows, None)
    # Compaction left gaps in the older segments of one topic.
    known = [split.num_rows is not None for split in splits]
    assert all(known) == (topic != "changed")
    assert any(known) or n < 7


def test_json_is_text_as_in_a_scan(log):
    """The fields of objects follow from all values, which no process has."""
    rows = pl.DataFrame(read(log.topic("json").splits(3)))

    assert rows.equals(log.topic("json").scan().collect())


CONDITIONS = {
    "plain": [pc.field("number") >= 5900, "number < 150 or number > 5800", pl.col("name") == "n7"],
    "changed": [pc.field("number") >= 5900, "number < 150", pl.col("name") == "n7"],
    "bytes": [pc.field("offset") < 30, pc.field("value") == b"7"],
    "values": [pc.field("key") == 7, "value like 'v1%'", pl.col("value").is_null()],
}


@pytest.mark.parametrize(
    ("topic", "where"), [(topic, where) for topic, all_of in CONDITIONS.items() for where in all_of]
)
def test_a_condition_and_columns_are_those_of_a_table(log, topic, where):
    """Also a condition on a column that is not selected; its splits do not know their rows."""
    view = log.topic(topic)
    for columns in (None, ["partition", "timestamp"]):
        splits = view.splits(4, columns, where=where)
        expected = view.to_arrow(columns, where=where)
        parts = [expected.schema.empty_table(), *(split.to_table() for split in splits)]
        assert pa.concat_tables(parts).equals(expected)
        assert {split.num_rows for split in splits} <= {None}


def test_bytes_that_a_condition_excludes_are_not_planned(log):
    """By the statistics of a typed topic; what is left of a partition stays together."""
    view = log.topic("plain")
    whole, ends = view.splits(3), view.splits(3, where="number < 150 or number > 5800")

    assert sum(split.size for split in ends) < sum(split.size for split in whole) / 2
    assert len(ends) <= 6
    assert view.splits(3, where="number > 100000") == []


def test_splits_of_a_view_have_its_records(log):
    """Slices, times, and ranges of offsets that a program has noted."""
    topic = log.topic("plain")
    time = topic.to_arrow(["timestamp"])["timestamp"][ROWS // 2].as_py()
    noted = [tuple(part) for part in topic[100:4000].ranges()]

    assert read(topic[100:4000].splits(5)).equals(topic[100:4000].to_arrow())
    assert read(topic.in_ranges(noted).splits(2)).equals(topic[100:4000].to_arrow())
    assert read(topic.splits(5, since=time)).equals(topic.to_arrow(since=time))
    assert log.topic("empty").splits(3) == []


def test_a_split_continues_where_a_program_stopped(log):
    """From any offset on; at its end nothing is left."""
    for topic in ("plain", "changed"):
        for split in log.topic(topic).splits(4, where="number <> 5" if topic == "plain" else None):
            whole = split.to_table()
            offsets = range(split.start_offset, split.end_offset + 2)
            for offset in sample(offsets, 6):
                left = pickle.loads(pickle.dumps(split.starting_at(offset)))
                assert left.to_table().equals(whole.filter(pc.field("offset") >= offset))
                assert left.start_offset == min(offset, split.end_offset)
                assert left.end_offset == split.end_offset
                assert left.num_rows in (left.to_table().num_rows, None)
            assert split.starting_at(0) == split


def test_batches_are_at_most_as_large_as_wanted(log):
    """Small batches of the log are combined, and large ones are cut."""
    (split,) = log.topic("plain").partition(0).splits(1)

    assert [batch.num_rows for batch in split.to_batches()] == [split.num_rows]
    assert [batch.num_rows for batch in split.to_batches(300)] == [300] * 6 + [200]
    assert next(split.to_batches()).schema == split.schema


def test_a_split_is_small_and_says_what_it_is(log):
    """It is sent to each worker."""
    splits = log.topic("plain").splits(8)

    assert max(len(pickle.dumps(split)) for split in splits) < 2_000
    assert len(pickle.dumps(splits)) < 600 * len(splits)
    assert repr(splits[0]).startswith("<Split of plain-0, offsets [0, ")
    assert splits[0].topic == "plain"


def test_a_worker_reads_files_and_opens_no_database(log, tmp_path):
    """Nor does it import LMDB: it reads a copy of the directory that has no databases."""
    splits = log.topic("plain").splits(4)
    (tmp_path / "splits").write_bytes(pickle.dumps(splits))
    root, hidden = log.root.context.files.path(""), tmp_path / "hidden"
    hidden.mkdir()
    for name in ("state", "live"):
        shutil.move(f"{root}/{name}", hidden)
    try:
        rows, imported = run_python("-c", READS, tmp_path / "splits").split("\n")[:2]
    finally:
        for name in ("state", "live"):
            shutil.move(hidden / name, root)

    assert (int(rows), imported) == (ROWS, "")
    assert "lmdb" in sys.modules


def test_nothing_is_read_before_it_is_used(tmp_path):
    """A split of a log that is on another host is an error only when it is read."""
    with embedlog.open(tmp_path / "log") as log:
        log.producer().send("t", b"v").result()
        (split,) = log.topic("t").splits(1)
    shutil.move(tmp_path / "log", tmp_path / "elsewhere")

    batches = pickle.loads(pickle.dumps(split)).to_batches()
    assert split.num_rows == 1
    with pytest.raises(NotALogError, match="mount the log's disk"):
        next(batches)


def test_records_that_are_deleted_meanwhile_are_an_error(tmp_path):
    """What was planned is read whole, or the error says what to do."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", 3, SMALL, schema=COLUMNS)
        send_rows(log, "t", range(ROWS))
        topic = log.topic("t")
        first, *_, last = topic.partition(0).splits(4)
        before = topic.partition(0)
        log.delete_records({embedlog.TopicPartition("t", 0): last.start_offset})
        log.housekeeping.run()

        assert last.to_table().num_rows == last.num_rows
        with pytest.raises(DataLossError, match=r"was deleted.*plan it again") as caught:
            first.to_table()
        assert (caught.value.topic, caught.value.partition, caught.value.offset) == ("t", 0, 0)
        with pytest.raises(OffsetOutOfRangeError):
            before.splits(2)
        assert sum(split.num_rows for split in topic.partition(0).splits(2)) == len(
            topic.partition(0)
        )


def test_a_lease_keeps_the_records_of_splits(tmp_path):
    """Also those that retention would delete."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", 3, {**SMALL, "retention.bytes": 1}, schema=COLUMNS)
        send_rows(log, "t", range(ROWS))
        with log.housekeeping.hold("training"):
            splits = log.topic("t").splits(4)
            log.housekeeping.run()
            assert read(splits).num_rows == ROWS
        log.housekeeping.run()
        with pytest.raises(DataLossError):
            read(splits)


def test_a_log_in_several_directories_is_read_in_either(tmp_path):
    """If the leader's directory is gone, the rows come from the copy."""
    paths = [tmp_path / "a", tmp_path / "b"]
    with embedlog.open(paths, maintenance=False) as log:
        log.create_topic("t", 3, SMALL, schema=COLUMNS)
        send_rows(log, "t", range(ROWS))
        log.flush()
        splits, rows = log.topic("t").splits(4), log.topic("t").to_arrow()
    for path in paths:
        path.rename(tmp_path / "gone")
        assert read(splits).equals(rows)
        (tmp_path / "gone").rename(path)


def test_what_cannot_be_planned_is_refused(log, tmp_path):
    """Before any process begins to read."""
    topic = log.topic("plain")
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        topic.splits(0)
    with pytest.raises(TypeError, match="columns must be a list of names, got 'number'"):
        topic.splits(1, "number")
    with pytest.raises(ValueError, match="A column is named twice: number, number"):
        topic.splits(1, ["number", "number"])
    with pytest.raises(KeyError, match="There is no column 'none'"):
        topic.splits(1, ["none"])
    with pytest.raises(UnsupportedFormatError, match=r"do not decode Avro.*raw=True"):
        log.topic("avro").splits(1)
    assert log.topic("avro", raw=True).splits(1) == []


def test_a_value_that_cannot_be_decoded_is_named(tmp_path):
    """With its partition and offset, as in any other reader."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", value="json")
        log.producer(value_serializer="bytes").send("t", b"{").result()
        (split,) = log.topic("t").splits(1)

        with pytest.raises(RecordDeserializationError) as caught:
            split.to_table()
        assert caught.value.offset == 0
