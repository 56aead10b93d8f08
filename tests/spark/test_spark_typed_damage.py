"""Damaged and hostile segments of typed topics: an error that says where, or the right rows.

The JVM neither dies nor takes gigabytes; `JvmTasks` finds that out.
"""

import datetime as dt
import json
import os
import random
import re
from collections import Counter
from decimal import Decimal

import pyarrow as pa
import pytest
from support.damage import scrambled
from support.hostile_batches import CHANGES, block_of, with_number, with_right_checksums
from support.tiers import choose

import embedlog
from embedlog.batch.wire import ENTRY, HEADER
from embedlog.errors import (
    CorruptBatchError,
    CorruptionError,
    DataLossError,
    EmbedlogError,
    InvalidRecordError,
    UnsupportedFormatError,
)
from embedlog.files import Files
from embedlog.segment import SegmentFile
from embedlog.spark.query_planner import QueryPlanner

DAMAGED = (CorruptBatchError, CorruptionError, UnsupportedFormatError)
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
COLUMNS = {
    "number": (pa.int32(), [1, None, -3, 7, 0]),
    "text": (pa.string(), ["a", "", None, "ü" * 40, "b"]),
    "flag": (pa.bool_(), [True, None, False, True, True]),
    "half": (pa.float16(), [1.5, None, -2.0, 0.0, 8.0]),
    "price": (pa.decimal128(30, 4), [Decimal("1.5"), None, Decimal("-9"), Decimal(7), Decimal(0)]),
    "fixed": (pa.binary(3), [b"abc", None, b"def", b"ghi", b"jkl"]),
    "at": (pa.timestamp("ms", tz="UTC"), [NOW] * 5),
    "numbers": (pa.list_(pa.int64()), [[1, 2], None, [], [None, 3], [4]]),
    "pair": (pa.list_(pa.string(), 2), [["a", "b"], None, ["c", None], ["d", "e"], ["f", "g"]]),
    "nested": (
        pa.struct([("x", pa.int8()), ("y", pa.list_(pa.struct([("z", pa.string())])))]),
        [{"x": 1, "y": [{"z": "q"}, None]}, None, {"x": None, "y": []}, {"x": 3, "y": None}, {}],
    ),
    "map": (pa.map_(pa.string(), pa.int16()), [[("k", 1)], None, [], [("a", None)], [("b", 2)]]),
}
TABLE = pa.table({name: pa.array(values, kind) for name, (kind, values) in COLUMNS.items()})


@pytest.fixture(scope="module")
def planner():
    planner = QueryPlanner()
    yield planner
    planner.close()


class TypedSegment:
    """A segment file of a typed topic, its plan, and its healthy bytes and rows."""

    def __init__(self, log, planner, topic, jvm):
        self.jvm, self.root = jvm, log.path
        options = {"path": log.path, "subscribe": topic, "includeHeaders": "true"}
        self.reader = planner.check_reader(options)
        self.plan = planner.plan_batch(options, cores=1)
        ((part,),) = self.plan["tasks"]
        # Of several segments the last one, which has all columns that there are.
        part[7] = part[7][-1:]
        (chunk,) = part[7]
        self.chunk, end = chunk[0], chunk[4]
        self.path = os.path.join(log.path, self.chunk)
        with open(self.path, "rb") as file:
            self.data = file.read()
        self.fields = json.loads(self.reader["schema"])["fields"]
        self.rows = self.read(self.fields)
        source = SegmentFile(Files(log.path, writable=False), self.chunk)
        self.schema, self.start = source.schema, source.start
        self.batches = list(source.scan(self.start, end))

    def read(self, fields):
        schema = {"type": "struct", "fields": fields}
        return self.jvm.read_typed(self.reader, self.plan, schema)

    def outcome(self, fields):
        try:
            return self.read(fields)
        except EmbedlogError as error:
            return error

    def expected(self, fields):
        at = [self.fields.index(field) for field in fields]
        return [tuple(row[number] for number in at) for row in self.rows]

    def some_fields(self, dice):
        return dice.sample(self.fields, dice.choice([1, 2, 3, len(self.fields)]))

    def stored(self, fields):
        """Return the names of the stored columns that a query of some fields reads."""
        names = {field["name"] for field in fields} | {"_tombstone"}
        time = self.schema.metadata[b"embedlog.timestamp"].decode()
        renamed = {"headers": "_headers", "offset": "_offset", "timestamp": time}
        return {renamed.get(name, name) for name in names}

    def write(self, data):
        with open(self.path, "wb") as file:
            file.write(data)

    def restore(self):
        self.write(self.data)

    def regions(self, decoded):
        """Return the parts of a batch: name, begin and end in the file."""
        begin, data = decoded.position, self.data[decoded.position :][: decoded.size]
        block, body = block_of(data)
        regions = [("prefix", 0, 8), ("flatbuffer", 8, block), ("block", block, body)]
        start = body
        for number, name in enumerate(self.schema.names):
            end = body + ENTRY.unpack_from(data, block + HEADER.size + 16 * number)[0]
            regions.append((name, start, end))
            start = end
        return [(name, begin + low, begin + high) for name, low, high in regions if low < high]


def kinds(log):
    """Write a topic of each kind of batch, in one segment each, and return their names."""
    made = []
    for compression in ("none", "lz4", "zstd"):
        for time in (None, "at"):
            name = f"{compression}-{time}"
            log.create_topic(name, schema=TABLE.schema, key="text", timestamp=time)
            with log.producer(compression_type=compression) as producer:
                for _ in range(3):
                    producer.append_table(name, pa.concat_tables([TABLE] * 3), partition=0).result()
            made.append(name)
    # Headers and tombstones are columns of their own; compaction adds that of the offsets.
    config = {"cleanup.policy": "compact"}
    log.create_topic("added", 1, config, schema=TABLE.schema, key="text", timestamp="at")
    part, gone = log.partition("added", 0), {"text": "gone", "at": NOW}
    with log.producer() as producer:
        producer.send("added", gone, headers=[("h", b"1"), ("i", None)]).result()
        producer.send("added", None, key="gone", headers=[("h", None)]).result()
        keyed = TABLE.filter(pa.compute.is_valid(TABLE["text"]))
        producer.append_table("added", pa.concat_tables([keyed, keyed]), partition=0).result()
    part.roll()
    log.compact("added", force=True)
    made.append("added")
    log.create_topic("stamped", 1, {"message.timestamp.type": "LogAppendTime"}, schema=TABLE.schema)
    with log.producer() as producer:
        producer.append_table("stamped", TABLE).result()
    return [*made, "stamped"]


@pytest.fixture(scope="module")
def segments(tmp_path_factory, planner, jvm):
    path = tmp_path_factory.mktemp("damage") / "log"
    with embedlog.open(path, maintenance=False) as log:
        yield [TypedSegment(log, planner, name, jvm) for name in kinds(log)]


@pytest.fixture
def damage(segments):
    """The segments; their files are healthy again after the test."""
    yield segments
    for segment in segments:
        segment.restore()


def check_place(error, segment, position=None):
    """Check that an error names the file and a position in it."""
    assert isinstance(error, DAMAGED), repr(error)
    match = re.search(r"\[(\S+), byte (\d+)\]", str(error))
    assert match, str(error)
    assert match[1] == segment.chunk
    if position is not None:
        assert int(match[2]) == position, str(error)


def test_the_rows_are_those_that_were_written(segments):
    """Without damage."""
    for segment in segments:
        numbers = [
            row for (row,) in segment.read([f for f in segment.fields if f["name"] == "text"])
        ]
        assert Counter(numbers)[b"b".hex()] in (1, 9)


def test_each_region_of_each_batch_is_checked_if_it_is_read(damage):
    """Damage in a column that is not read does no harm; the error names the column."""
    dice, tried = random.Random(1), Counter()
    for segment in damage:
        for decoded in segment.batches:
            for region, begin, end in segment.regions(decoded):
                for _ in range(choose(test=1, all=6, nightly=60)):
                    fields = segment.some_fields(dice)
                    changed = bytearray(segment.data)
                    changed[dice.randrange(begin, end)] ^= 1 << dice.randrange(8)
                    segment.write(changed)
                    result = segment.outcome(fields)
                    is_column = region in segment.schema.names
                    read = not is_column or region in segment.stored(fields)
                    if region == "_timestamp" and decoded.is_log_append_time:
                        read = False
                    if read:
                        check_place(result, segment, decoded.position)
                        assert not is_column or f"column {region} " in str(result)
                    else:
                        assert result == segment.expected(fields), (region, fields)
                    tried[region] += 1
        segment.restore()
    added = ("_timestamp", "_headers", "_tombstone", "_offset")
    assert tried.keys() >= {"prefix", "flatbuffer", "block", *COLUMNS, *added}


def test_damage_in_the_schema_of_the_file_changes_no_row(damage):
    """No checksum covers it: the columns come with the plan."""
    dice = random.Random(2)
    for segment in damage:
        for _ in range(choose(test=5, all=60)):
            changed = bytearray(segment.data)
            changed[dice.randrange(segment.start)] ^= 1 << dice.randrange(8)
            segment.write(changed)
            result = segment.outcome(segment.fields)
            if isinstance(result, EmbedlogError):
                check_place(result, segment)
            else:
                assert result == segment.rows
        segment.restore()


def test_noise_is_an_error_or_leaves_the_rows_as_they_were(damage):
    """Bytes are changed and moved about at random."""
    dice = random.Random(3)
    for segment in damage:
        for _ in range(choose(test=10, all=150, nightly=2000)):
            fields = segment.some_fields(dice)
            segment.write(scrambled(segment.data, dice))
            result = segment.outcome(fields)
            if isinstance(result, EmbedlogError):
                check_place(result, segment)
            else:
                assert result == segment.expected(fields)
        segment.restore()


def test_hostile_batches_with_right_checksums_do_no_harm(damage):
    """Lengths and offsets are checked although a checksum says that they were written.

    What is wrong inside of a buffer may be a value: only its place is checked.
    """
    dice, results = random.Random(4), Counter()
    for segment in damage:
        for _ in range(choose(test=80, all=1500, nightly=30_000)):
            decoded = dice.choice(segment.batches)
            begin, end = decoded.position, decoded.position + decoded.size
            change = dice.choice([with_number, with_number, *CHANGES])
            changed = change(segment.data[begin:end], dice)
            changed = with_right_checksums(changed, len(segment.schema.names))
            segment.write(segment.data[:begin] + changed + segment.data[end:])
            result = segment.outcome(segment.some_fields(dice))
            if not isinstance(result, list | InvalidRecordError | DataLossError):
                check_place(result, segment)
            results[type(result)] += 1
        segment.restore()
    assert results[list] and results[CorruptBatchError]
