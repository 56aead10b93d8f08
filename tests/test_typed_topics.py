"""Typed topics do what topics of bytes do: damage, old writers, compaction, recovery, others."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import struct
import subprocess
import sys
import textwrap
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.children import in_child
from support.clock import ManualClock
from support.random_columns import KeyPart, arrow, key_of, key_types, or_none, values
from support.roots import abandon, encoded, segment_files
from support.tiers import sample

import embedlog
from embedlog.batch.key_bytes import key_bytes
from embedlog.cli import main
from embedlog.cli.dump import DumpedSegment
from embedlog.errors import (
    CorruptBatchError,
    EmbedlogError,
    InvalidRecordError,
    OutOfOrderSequenceError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files
from embedlog.partitioner import partition_for_key
from embedlog.record import TopicPartition
from embedlog.retention import retain
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.typed_batch import encode_typed

UTC = dt.UTC
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), False),
        ("name", pa.string()),
        ("delay", pa.int32()),
        ("tags", pa.list_(pa.struct([("a", pa.int64())]))),
    ]
)
WIDER = pa.schema(
    [
        pa.field("id", pa.int64(), False),
        ("title", pa.string()),
        ("delay", pa.int64()),
        ("gate", pa.string()),
    ]
)


def row(number, **others):
    """A row of `SCHEMA`."""
    tags = [{"a": number}, None]
    return {"id": number, "name": f"n{number}", "delay": number % 5, "tags": tags, **others}


def wider(number, name=None, gate=None):
    """The same row through `WIDER`."""
    title = f"n{number}" if name is None else name
    return {"id": number, "title": title, "delay": number % 5, "gate": gate}


@pytest.fixture
def clock():
    """A clock that a test moves."""
    return ManualClock()


@pytest.fixture
def log(tmp_path, clock):
    """A log that is healthy when the test is done."""
    log = embedlog.open(tmp_path / "log", maintenance=False, clock=clock)
    yield log
    if not log.root.closed:
        assert log.housekeeping.verify() == []
        log.close()


def create(log, config=None, partitions=1, **arguments):
    """Create the topic of most tests."""
    return log.create_topic("t", partitions, config, schema=SCHEMA, key="id", **arguments)


def send(log, *numbers, topic="t", **options):
    """Send rows, each in a batch of its own."""
    with log.producer(**options) as producer:
        return [producer.send(topic, row(number)).result() for number in numbers]


def ids(topic):
    """The column ``id``."""
    return topic.to_arrow(["id"])["id"].to_pylist()


def test_a_time_that_python_does_not_have_stops_no_reader(log, tmp_path, capsys):
    """It is one of numpy, its neighbours are as usual, and it can be sent on."""
    utc = pa.timestamp("s", "UTC")
    fields = [("id", pa.int64()), ("until", utc), ("day", pa.date32()), ("all", pa.list_(utc))]
    schema, year_10000, infinity = pa.schema(fields), 253_402_300_800, (1 << 63) - 1
    topic = log.create_topic("t", schema=schema, key=["id", "until"])
    copy = log.create_topic("u", schema=schema, key=["id", "until"])
    counts = [0, year_10000, infinity, -infinity]
    columns = {"id": range(4), "until": counts, "day": [0, 1 << 30, 0, 0]}
    table = pa.table({**columns, "all": [[count, None] for count in counts]}, schema=schema)
    with log.producer() as producer:
        producer.append_table("t", table).result()
        for record in topic:
            producer.send("u", record.value).result()
            producer.send("u", record.value).result()

    assert topic.to_arrow(schema.names).equals(table)
    assert copy.to_arrow(schema.names, latest=True).sort_by("id").equals(table)
    with closing(log.consumer("t", auto_offset_reset="earliest")) as consumer:
        polled = list(consumer.iter_records(until="end"))
    first, second = polled[0].value, polled[1].value
    assert first["until"] == dt.datetime(1970, 1, 1, tzinfo=UTC)
    assert second["until"] == second["all"][0] == np.datetime64("10000-01-01T00:00:00")
    assert second["day"] == np.datetime64(1 << 30, "D")
    assert topic.get((1, second["until"])) == topic[1].value == dict(topic.items())[polled[1].key]
    assert "10000-01-01T00:00:00" in topic._repr_html_()
    log.close()
    for command in (["consume", "t"], ["consume", "t", "--columns", "until,all"]):
        assert main([*command, "--root", str(tmp_path / "log")]) == 0
        assert "10000-01-01T00:00:00" in capsys.readouterr().out


# Keys


@given(st.data())
def test_keys_are_those_of_kafkas_serializers(data):
    """UTF-8 for text, big-endian for numbers; of several columns each has its length before it."""
    kinds = data.draw(st.lists(key_types(), min_size=1, max_size=3))
    rows = data.draw(
        st.lists(st.tuples(*(or_none(values(kind)) for kind in kinds)), min_size=1, max_size=5)
    )
    start = data.draw(st.integers(0, len(rows) - 1))
    columns = [
        arrow([row[index] for row in rows], kind).slice(start) for index, kind in enumerate(kinds)
    ]
    expected = [key_of([KeyPart(*part) for part in zip(row, kinds, strict=True)]) for row in rows]
    assert key_bytes(columns).to_pylist() == expected[start:]


@pytest.mark.parametrize(
    ("data_type", "value", "expected"),
    [
        (pa.string(), "N14228", b"N14228"),
        (pa.int32(), 258, struct.pack(">i", 258)),
        (pa.int64(), -1, struct.pack(">q", -1)),
        (pa.int16(), 7, struct.pack(">h", 7)),
        (pa.float64(), 1.5, struct.pack(">d", 1.5)),
    ],
)
def test_a_record_is_where_kafka_would_put_it(log, data_type, value, expected):
    """By `send` and by `append_table`, in the partition of the bytes of its key."""
    log.create_topic("t", 7, schema=pa.schema([("k", data_type)]), key="k")
    with log.producer() as producer:
        sent = producer.send("t", {"k": value}).result()
        (appended,) = producer.append_table(
            "t", pa.table({"k": pa.array([value], data_type)})
        ).result()
    assert sent.partition == appended.partition == partition_for_key(expected, 7)
    (batch, *_) = log.partition("t", sent.partition).reader(0).read()
    assert batch.keys().to_pylist() == [expected]


# Without embedlog

READERS = {
    "pyarrow": """
        import pyarrow as pa
        def read(path):
            with pa.ipc.open_stream(path) as stream:
                table = stream.read_all()
            table.validate(full=True)
            return table.select(["id", "name", "delay", "tags"]).to_pylist()
    """,
    "polars": """
        import polars as pl
        def read(path):
            return pl.read_ipc_stream(path).select("id", "name", "delay", "tags").to_dicts()
    """,
    "duckdb": """
        import duckdb, pyarrow as pa
        def read(path):
            stream = pa.ipc.open_stream(path)
            table = duckdb.sql("select id, name, delay, tags from stream").to_arrow_table()
            return table.to_pylist()
    """,
}


@pytest.mark.tier("test")
@pytest.mark.parametrize("reader", sample([*READERS], 1))
def test_segments_are_read_without_embedlog(tmp_path, reader):
    """With the user's own columns, whatever the compression, sealed or not."""
    expected = []
    for compression in ("none", "lz4", "zstd"):
        with embedlog.open(tmp_path / compression, maintenance=False) as log:
            create(log)
            send(log, 1, 2, compression_type=compression)
            log.partition("t", 0).roll()
            with log.producer(compression_type=compression) as producer:
                producer.send("t", row(3), headers=[("h", b"x")])
                producer.send("t", None, key=1)
        tombstone = {"id": 1, "name": None, "delay": None, "tags": None}
        expected += [row(1), row(2), row(3), tombstone]
    files = [
        str(path)
        for name in ("none", "lz4", "zstd")
        for path in segment_files(tmp_path / name)
        if path.stat().st_size > 1500
    ]
    code = textwrap.dedent("import json, sys") + textwrap.dedent(READERS[reader])
    code += "\nfound = [read(path) for path in sys.argv[1:]]\n"
    code += 'assert "embedlog" not in sys.modules\nprint(json.dumps(found))'
    command = [sys.executable, "-P", "-c", code, *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    assert [row for rows in json.loads(done.stdout) for row in rows] == expected


# Damage


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_damage_in_a_column_harms_only_those_who_read_it(tmp_path, compression):
    """A flipped bit is named by `verify`: segment, byte and column."""
    log = embedlog.open(tmp_path / "log", maintenance=False)
    topic = create(log)
    send(log, *range(20), compression_type=compression, linger_ms=1000)
    log.close()
    (path,) = segment_files(tmp_path / "log")
    first, position = middle_of_column(path, "delay")
    path.write_bytes(flipped(path.read_bytes(), position))

    log = embedlog.open(tmp_path / "log", maintenance=False)
    topic = log.topic("t")
    others = topic.to_arrow(["id", "name", "tags"], where=pc.field("id") < 10)
    assert others.num_rows
    for read in (
        lambda: topic.to_arrow(["delay"]),
        lambda: topic.to_arrow(["id"], where=pc.field("delay") > 1),
        lambda: list(topic),
        lambda: list(topic.iter_batches(["delay"])),
    ):
        with pytest.raises(CorruptBatchError, match="delay"):
            read()
    with closing(log.consumer("t", auto_offset_reset="earliest")) as consumer:
        assert sum(b.num_rows for b in consumer.iter_batches(until="end", columns=["id"])) == 20
    with closing(log.consumer("t", auto_offset_reset="earliest")) as consumer:
        with pytest.raises(CorruptBatchError):
            list(consumer.iter_batches(until="end", columns=["delay"]))
    (finding,) = log.housekeeping.verify()
    assert finding.path.endswith(path.name)
    assert finding.position == first
    assert "delay" in finding.what
    log.housekeeping.repair(dry_run=False)
    assert log.housekeeping.verify() == []
    log.close()


def middle_of_column(path, name):
    """Return the position in the middle of a column of the first batch of a segment."""
    files = Files(path.parent, writable=False)
    facts = next(DumpedSegment(files, path.name).items())
    files.close_all()
    position = facts["position"] + facts["head_size"]
    for column in facts["columns"]:
        if column["name"] == name:
            return facts["position"], position + column["bytes"] // 2
        position += column["bytes"]
    raise AssertionError(name)


def flipped(content, position):
    """Return bytes with one bit flipped."""
    changed = bytearray(content)
    changed[position] ^= 0x10
    return bytes(changed)


# Writers with an old schema


def test_rows_collected_before_a_change_are_converted(log, tmp_path):
    """Of a producer in another process that has not heard of the change yet."""
    topic = create(log)
    with embedlog.open(tmp_path / "log", maintenance=False) as other:
        producer = other.producer(linger_ms=60_000)
        sent = [producer.send("t", row(number)) for number in range(3)]
        log.alter_topic("t", schema=WIDER, rename={"name": "title"}, defaults={"gate": "A1"})
        producer.flush()
        assert [future.result().offset for future in sent] == [0, 1, 2]
        producer.send("t", wider(3, gate="B2")).result()
        with pytest.raises(EmbedlogError):
            producer.send("t", row(4))
        producer.close()
    assert [record.value for record in topic] == [
        *(wider(number, gate="A1") for number in range(3)),
        wider(3, gate="B2"),
    ]


def test_a_process_that_was_open_before_a_change_writes_as_of_now(log, tmp_path):
    """Its rows are checked against the schema of today."""
    topic = create(log)

    def write():
        with embedlog.open(tmp_path / "log", maintenance=False) as other:
            producer = other.producer(linger_ms=60_000)
            first = producer.send("t", row(1))

            def alter():
                with embedlog.open(tmp_path / "log", maintenance=False) as third:
                    third.alter_topic("t", schema=WIDER, rename={"name": "title"})

            in_child(alter)
            second = producer.send("t", wider(2, gate="C"))
            producer.flush()
            return first.result().offset, second.result().offset

    assert in_child(write) == (0, 1)
    assert [record.value for record in topic] == [wider(1), wider(2, gate="C")]


def old_batch(log, *numbers):
    """Encode a batch with the schema that the topic has now."""
    schema = log.topic("t").schema_history()[-1]
    columns = pa.RecordBatch.from_pylist(
        [{"_timestamp": dt.datetime.now(UTC), **row(number)} for number in numbers],
        schema=segment_schema(schema),
    )
    return encode_typed(columns, schema, "lz4")


def test_batches_encoded_before_a_change_are_converted(log):
    """Also between two changes, and with a producer's sequence numbers."""
    topic = create(log)
    first, second = old_batch(log, 1), old_batch(log, 2, 3)
    second.set_producer(7, 0, 0)
    log.alter_topic("t", schema=WIDER, rename={"name": "title"})
    log.partition("t", 0).append([first])
    log.alter_topic("t", rename={"gate": "door"})
    log.partition("t", 0).append([second])
    (again,) = log.partition("t", 0).append([second])
    assert again.duplicate
    door = [{**wider(n), "door": None} for n in (1, 2, 3)]
    for value in door:
        del value["gate"]
    assert [record.value for record in topic] == door
    assert [s.schema_version for s in log.partition("t", 0).segments.values()][-1] == 3


@pytest.mark.parametrize("after", ["bytes", "typed"])
def test_a_batch_for_a_topic_that_was_deleted_is_refused(log, after):
    """Another topic of the name may have other columns with the same numbers."""
    create(log)
    batch = old_batch(log, 1)
    log.delete_topic("t")
    other = pa.schema([pa.field("x", pa.int64(), False), ("y", pa.string())])
    topic = log.create_topic("t", schema=other if after == "typed" else None)
    with pytest.raises(InvalidRecordError):
        log.partition("t", 0).append([batch])
    assert len(topic) == 0


def test_a_batch_of_bytes_is_refused_by_a_typed_topic(log):
    """The topic was deleted and created again as a typed one."""
    log.create_topic("t")
    log.delete_topic("t")
    topic = create(log)
    with pytest.raises(InvalidRecordError):
        log.partition("t", 0).append([encoded(b"v")])
    assert len(topic) == 0


@pytest.mark.parametrize("before", ["bytes", "typed"])
@pytest.mark.parametrize("after", ["bytes", "typed"])
def test_records_collected_for_a_deleted_topic_are_not_misread(log, tmp_path, before, after):
    """They go to a topic of bytes as before, and never into columns of another topic."""
    schemas = {"bytes": None, "typed": SCHEMA}
    log.create_topic("t", schema=schemas[before])
    with embedlog.open(tmp_path / "log", maintenance=False) as other:
        producer = other.producer(linger_ms=60_000)
        value = row(1) if before == "typed" else b"v"
        future = producer.send("t", value)
        log.delete_topic("t")
        reordered = pa.schema([pa.field("x", pa.int64()), ("y", pa.string())])
        topic = log.create_topic("t", schema=reordered if after == "typed" else None)
        if (before, after) == ("bytes", "bytes"):
            producer.flush()
            assert future.result().offset == 0
        else:
            producer.flush()
            with pytest.raises((InvalidRecordError, UnknownTopicOrPartitionError)):
                future.result()
            assert len(topic) == 0
            producer.send("t", {"x": 1} if after == "typed" else b"w").result()
            assert len(topic) == 1
        producer.close()


def test_readers_see_a_change_at_once(log, tmp_path):
    """Views, and consumers in the middle of a topic."""
    topic = create(log)
    send(log, *range(6))
    consumer = log.consumer("t", auto_offset_reset="earliest", max_poll_records=2)
    (first,) = consumer.poll(1000).values()
    assert first[0].value == row(0)
    log.alter_topic("t", schema=WIDER, rename={"name": "title"})
    # What was fetched before the change is as of then.
    (fetched,) = consumer.poll(1000).values()
    assert fetched[0].value == row(2)
    consumer.seek(TopicPartition("t", 0), 2)
    (again,) = consumer.poll(1000).values()
    assert again[0].value == wider(2)
    assert topic.to_arrow(["title"])["title"].to_pylist() == [f"n{n}" for n in range(6)]
    consumer.seek_to_beginning()
    (batch, *_) = consumer.iter_batches(until="end", columns=["title"])
    assert batch.schema.names == ["title"]
    consumer.close()


# What a topic of bytes has too


def test_time_offsets_and_groups(log, clock):
    """Seeking by time, `since`, committed offsets, and the lag."""
    topic = log.create_topic(
        "t",
        schema=pa.schema([("at", pa.timestamp("us", tz="UTC")), ("n", pa.int8())]),
        timestamp="at",
    )
    start = dt.datetime(2020, 1, 1, tzinfo=UTC)
    with log.producer() as producer:
        for number in range(10):
            producer.send("t", {"at": start + dt.timedelta(hours=number), "n": number}).result()
    part = TopicPartition("t", 0)
    with closing(log.consumer("t", group_id="g", auto_offset_reset="earliest")) as consumer:
        third = int((start + dt.timedelta(hours=3)).timestamp() * 1000)
        assert consumer.offsets_for_times({part: third})[part].offset == 3
        records = consumer.poll(1000, max_records=4)[part]
        assert [record.value["n"] for record in records] == [0, 1, 2, 3]
        consumer.commit()
    with closing(log.consumer("t", group_id="g")) as consumer:
        (batch, *_) = consumer.poll_batches(1000, columns=["n"], where=pc.field("n") > 5)[part]
        assert batch["n"].to_pylist() == [6]
    recent = topic.between(start + dt.timedelta(hours=8), start + dt.timedelta(days=1))
    assert recent.to_arrow(["n"])["n"].to_pylist() == [8, 9]
    assert topic[2:4].to_arrow(["n"])["n"].to_pylist() == [2, 3]
    assert log.delete_records({part: 5})
    assert topic.to_arrow(["n"])["n"].to_pylist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("timestamp", [None, "at"])
def test_retention_deletes_by_time_and_size(log, clock, timestamp):
    """By the timestamps of the records, whoever stores them."""
    config = {"segment.bytes": 3000, "retention.ms": 1000, "file.delete.delay.ms": 0}
    schema = pa.schema([pa.field("id", pa.int64()), ("at", pa.timestamp("ns", tz="UTC"))])
    topic = log.create_topic("t", config=config, schema=schema, timestamp=timestamp)
    with log.producer() as producer:
        for number in range(20):
            at = dt.datetime.fromtimestamp(clock() / 1000, UTC)
            producer.send("t", {"id": number, "at": at}).result()
            clock.advance(10)
    clock.advance(900)
    retain(log.root, clock())
    kept = ids(topic)
    assert 10 < len(kept) < 20
    assert kept == list(range(20 - len(kept), 20))


def test_numbered_batches_are_written_once(log):
    """`sequence=` works for tables and for lists of rows."""
    topic = create(log)
    with log.producer(producer_name="writer") as producer:
        table = pa.table({"id": [1, 2]})
        producer.append_table("t", table, partition=0, sequence=0).result()
        (again,) = producer.append_table("t", table, partition=0, sequence=0).result()
        assert again.duplicate
        producer.send_batch("t", [row(3)], partition=0, sequence=2).result()
        with pytest.raises(OutOfOrderSequenceError):
            producer.send_batch("t", [row(4)], partition=0, sequence=9).result()
    assert ids(topic) == [1, 2, 3]


# Lost rows of the catalogue, and damaged files


def restore_old_state(path, work):
    """Do some work on a log, and replace `state` by what it was before."""
    saved = path.with_name("saved")
    shutil.copytree(path / "state", saved)
    log = embedlog.open(path, maintenance=False)
    work(log)
    abandon(log.root)
    shutil.rmtree(path / "state")
    shutil.copytree(saved, path / "state")


def test_versions_that_were_lost_are_found_in_the_segments(tmp_path):
    """An old copy of `state` does not know them, nor the ids of columns that were dropped."""
    path = tmp_path / "log"
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("t", schema=pa.schema([("a", pa.int8()), ("b", pa.int8())]))
        with log.producer() as producer:
            producer.send("t", {"a": 1, "b": 2}).result()

    def work(log):
        with log.producer() as producer:
            log.alter_topic(
                "t",
                schema=pa.schema([("a", pa.int16()), ("b", pa.int8()), ("c", pa.string())]),
                defaults={"c": "d"},
            )
            producer.send("t", {"a": 300, "c": "x"}).result()
            log.alter_topic("t", schema=pa.schema([("a", pa.int16()), ("b", pa.int8())]))
            producer.send("t", {"a": 4}, headers=[("h", b"x")]).result()

    restore_old_state(path, work)
    with embedlog.open(path, maintenance=False) as log:
        topic = log.topic("t")
        assert [record.value for record in topic] == [
            {"a": 1, "b": 2},
            {"a": 300, "b": None},
            {"a": 4, "b": None},
        ]
        assert topic.schema().field("a").type == pa.int16()
        # A new column is not taken for the one that was dropped.
        log.alter_topic("t", schema=pa.schema([("a", pa.int16()), ("e", pa.string())]))
        assert topic.to_arrow(["e"])["e"].to_pylist() == [None] * 3
        with log.producer() as producer:
            producer.send("t", {"a": 5, "e": "f"}).result()
        assert [record.value["e"] for record in topic] == [None, None, None, "f"]
        assert log.housekeeping.verify() == []


def test_a_typed_topic_that_was_lost_is_found(tmp_path):
    """With its schema, key and timestamp, from its segments."""
    path = tmp_path / "log"
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("other")

    at = dt.datetime(2020, 1, 1, tzinfo=UTC)

    def work(log):
        schema = pa.schema([*SCHEMA, pa.field("at", pa.timestamp("ms", tz="UTC"))])
        log.create_topic("t", 2, {"segment.bytes": 3000}, schema=schema, key="id", timestamp="at")
        with log.producer() as producer:
            for number in range(10):
                producer.send("t", row(number, at=at)).result()
            producer.send("t", None, key=3).result()
            log.alter_topic("t", rename={"name": "title"})
            producer.send("t", {"id": 11, "title": "x", "at": at}).result()

    restore_old_state(path, work)
    with embedlog.open(path, maintenance=False) as log:
        topic = log.topic("t")
        assert topic.get(5) == {
            **{("title" if k == "name" else k): v for k, v in row(5).items()},
            "at": at,
        }
        assert topic.get(3) is None
        assert sorted(ids(topic)) == [*range(10), 11]
        with log.producer() as producer:
            producer.send("t", {"id": 12, "title": "y", "at": at}).result()
        assert topic.get(12)["title"] == "y"
        assert log.housekeeping.verify() == []


def break_head(path):
    """Damage the schema at the head of a segment."""
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[4:8], "little")
    content[8 : 8 + length] = bytes(length)
    path.write_bytes(content)


@pytest.mark.parametrize("extra", [False, True])
def test_a_repair_needs_no_schema_in_the_file(tmp_path, extra):
    """The catalogue has it."""
    path = tmp_path / "log"
    with embedlog.open(path, maintenance=False) as log:
        topic = create(log, {"segment.bytes": 4000})
        send(log, *range(20))
        if extra:
            with log.producer() as producer:
                producer.send("t", row(20), headers=[("h", b"x")]).result()
                producer.send("t", None, key=1).result()
                producer.send("t", row(21)).result()
        before = list(topic)
    for file in segment_files(path):
        break_head(file)
    with embedlog.open(path, maintenance=False) as log:
        assert log.housekeeping.verify() != []
        log.housekeeping.repair(dry_run=False)
        assert log.housekeeping.verify() == []
        assert list(log.topic("t")) == before


@pytest.mark.parametrize("compacted", [False, True])
def test_a_dump_shows_the_batches_of_a_segment_without_its_schema(
    tmp_path, command_line, compacted
):
    """It takes the schema from the catalogue, or from other segments of the topic."""
    path = tmp_path / "log"
    with embedlog.open(path, maintenance=False) as log:
        create(log, {"cleanup.policy": "compact"} if compacted else None)
        send(log, 1, 1, 2)
        with log.producer() as producer:
            producer.send("t", row(3), headers=[("h", b"x")]).result()
            producer.send("t", None, key=2).result()
        if compacted:
            log.partition("t", 0).roll()
            log.housekeeping.compact("t", force=True, progress=False)
    for file in [file for file in segment_files(path) if file.stat().st_size > 1500]:
        _, whole, _ = command_line("dump", file, "--json")
        break_head(file)
        code, damaged, _ = command_line("dump", file, "--json")
        batches = [json.loads(line) for line in whole.splitlines() if '"count"' in line]
        found = [json.loads(line) for line in damaged.splitlines() if '"count"' in line]
        assert batches
        assert found == batches
        assert code != 0
