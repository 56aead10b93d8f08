"""Damaged and hostile files: the JVM reader fails and says where, or its rows are right.

It neither dies nor takes gigabytes, whatever the bytes are; `JvmTasks` finds that out.
"""

import datetime as dt
import json
import os
import random
import re
import threading
from collections import Counter
from decimal import Decimal

import pyarrow as pa
import pytest
from support.clock import START
from support.damage import scrambled
from support.hostile_batches import (
    CHANGES,
    block_of,
    with_number,
    with_right_checksums,
    with_shifted_buffer,
    without_null_counts,
)
from support.jvm_tasks import python_rows
from support.manual_compaction import keep
from support.roots import encoded
from support.spark_reads import ALL
from support.tiers import choose, sample

import embedlog
from embedlog.batch.wire import COLUMN_FLAGS, ENTRY, HEADER
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
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.options import SourceOptions
from embedlog.spark.query_planner import QueryPlanner

DAMAGED = (CorruptBatchError, CorruptionError, UnsupportedFormatError)
HARMLESS = ("null_count value", "UTF8", "non-monotonic offset")
"""Contradictions that nothing depends on: a count of nulls, bytes that are no text, and where a
null value would be.  The places of other values are compared with their column."""
STRICTER = (
    *("written again", "outside of its column", "follows offset"),
    *("does not decompress to", "its metadata is that of another batch"),
)
"""What the JVM refuses and Python does not: epochs of a batch among others, overlapping columns,
bytes behind a compressed buffer, buffers that no column has."""
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


class Segment:
    """A segment file of a topic, the plan to read it, and its healthy bytes and rows.

    A subclass has what may be read (`names`), and reads some of that in the JVM.
    """

    def __init__(self, root, path, end):
        self.root, self.file, self.end = root, path, end
        self.path = os.path.join(root, path)
        with open(self.path, "rb") as file:
            self.data = file.read()
        source = SegmentFile(Files(root, writable=False), path)
        self.schema, self.start = source.schema, source.start
        self.batches = list(source.scan(self.start, end))
        self.rows = self.read(self.names)

    def some_names(self, dice):
        return tuple(dice.sample(self.names, dice.choice([1, 2, 3, len(self.names)])))

    def expected(self, names):
        return [tuple(row[self.names.index(name)] for name in names) for row in self.rows]

    def outcome(self, names, *options):
        return outcome(self.read, names, *options)

    def write(self, data):
        with open(self.path, "wb") as file:
            file.write(data)

    def restore(self):
        self.write(self.data)

    def change(self, decoded, changed):
        """Replace a batch, with right checksums."""
        changed = with_right_checksums(changed, len(self.schema.names))
        begin, end = decoded.position, decoded.position + decoded.size
        self.write(self.data[:begin] + changed + self.data[end:])

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


class BytesSegment(Segment):
    """A segment of a topic of bytes."""

    names, times = ALL, "timestamp"

    def __init__(self, log, topic, jvm):
        self.jvm = jvm
        self.tasks = plan_batch(
            SourceOptions.parse({"path": log.path, "subscribe": topic}), cores=1
        )
        ((part,),) = [task.slices for task in self.tasks]
        (chunk,) = part.chunks
        super().__init__(log.path, chunk.path, chunk.end_position)
        assert self.rows == python_rows(self.tasks)

    def read(self, names, *options):
        return self.jvm.read(self.tasks, names, *options)

    def stored(self, names):
        return set(names)

    def hostile_problem(self, names, result, is_single):
        # Of several changes some may be to bytes that one of the readers ignores.
        return hostile_problem(self, names, result) if is_single else None


class TypedSegment(Segment):
    """A segment of a typed topic."""

    times = "_timestamp"

    def __init__(self, log, topic, jvm, planner):
        self.jvm = jvm
        options = {"path": log.path, "subscribe": topic, "includeHeaders": "true"}
        self.reader = planner.check_reader(options)
        self.plan = planner.plan_batch(options, cores=1)
        ((part,),) = self.plan["tasks"]
        # Of several segments the last one, which has all columns that there are.
        part[7] = part[7][-1:]
        (chunk,) = part[7]
        self.fields = {
            field["name"]: field for field in json.loads(self.reader["schema"])["fields"]
        }
        self.names = tuple(self.fields)
        super().__init__(log.path, chunk[0], chunk[4])

    def read(self, names):
        schema = {"type": "struct", "fields": [self.fields[name] for name in names]}
        return self.jvm.read_typed(self.reader, self.plan, schema)

    def stored(self, names):
        """Return the names of the stored columns that a query reads."""
        time = self.schema.metadata[b"embedlog.timestamp"].decode()
        renamed = {"headers": "_headers", "offset": "_offset", "timestamp": time}
        return {renamed.get(name, name) for name in {*names, "_tombstone"}}

    def hostile_problem(self, names, result, is_single):
        """Check the place only: what is wrong inside of a buffer may be a value."""
        if not isinstance(result, list | InvalidRecordError | DataLossError):
            check_place(result, self)


def kinds_of_bytes(log):
    """Write a topic of each kind of batch, in one segment each, and return their names."""
    dice = random.Random(1)
    values = [b"value" * 30, None, b"", b"x" * 100, b"y"]
    keys = [b"k", b"", None, b"key", b"k"]
    headers = [[("k", b"v")], [], [("a", None), ("b", b"")], [("ü", b"1")] * 3, []]
    plain = {"keys": keys, "at": [START, START + 1, START, -1, START + 9]}
    made = {
        "plain": [encoded(*values, **plain)] * 3,
        "headers": [encoded(*values, headers=headers, **plain)] * 3,
        "zstd": [encoded(*values * 9, compression="zstd")] * 2,
        "lz4": [encoded(*values, headers=headers, compression="lz4", **plain)] * 2,
        "linked": [encoded(dice.randbytes(100) * 1500, b"x" * 70_000, compression="lz4")],
        "tiny": [encoded(b"%d" % number) for number in range(9)],
        "stamped": [encoded(*values, **plain)] * 2,
        "gaps": [encoded(*values, **plain)] * 3,
        "gaps-headers": [encoded(*values, headers=headers, compression="zstd", **plain)] * 3,
    }
    for name, batches in made.items():
        kind = "LogAppendTime" if name == "stamped" else "CreateTime"
        log.create_topic(name, 1, {"message.timestamp.type": kind})
        part = log.partition(name, 0)
        for encoded_batch in batches:
            part.append([encoded_batch])
        if name.startswith("gaps"):
            part.roll()
            keep(part, {1, 2, 5, 9, 10, 11, 13}, parts=2)
    return list(made)


def kinds_of_rows(log):
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
    log.housekeeping.compact("added", force=True)
    made.append("added")
    log.create_topic("stamped", 1, {"message.timestamp.type": "LogAppendTime"}, schema=TABLE.schema)
    with log.producer() as producer:
        producer.append_table("stamped", TABLE).result()
    return [*made, "stamped"]


@pytest.fixture(scope="module", params=["bytes", "typed"])
def segments(request, tmp_path_factory, jvm):
    """A segment of each kind; the first one of bytes is active, as most of them are."""
    planner = QueryPlanner()
    with embedlog.open(tmp_path_factory.mktemp("damage") / "log", maintenance=False) as log:
        if request.param == "bytes":
            yield [BytesSegment(log, name, jvm) for name in kinds_of_bytes(log)]
        else:
            yield [TypedSegment(log, name, jvm, planner) for name in kinds_of_rows(log)]
    planner.close()


@pytest.fixture
def damage(segments):
    """The segments; their files are healthy again after the test."""
    yield segments
    for segment in segments:
        segment.restore()


OF_BYTES = pytest.mark.parametrize("segments", ["bytes"], indirect=True)


def outcome(read, *args):
    """Return the rows that a reader reads, or the error of embedlog that it raises."""
    try:
        return read(*args)
    except EmbedlogError as error:
        return error


def check_place(error, segment, position=None):
    """Check that an error names the file and a position in it."""
    assert isinstance(error, DAMAGED), repr(error)
    match = re.search(r"\[(\S+), byte (\d+)\]", str(error))
    assert match, str(error)
    assert match[1] == segment.file
    if position is not None:
        assert int(match[2]) == position, str(error)


# Damage


@pytest.mark.parametrize("segments", ["typed"], indirect=True)
def test_the_rows_are_those_that_were_written(segments):
    """Without damage; those of bytes are compared with Python's."""
    for segment in segments:
        assert Counter(row for (row,) in segment.read(["text"]))[b"b".hex()] in (1, 9)


def test_each_region_of_each_batch_is_checked_if_it_is_read(damage):
    """A column that is not wanted may be damaged: it is not read."""
    dice, tried, columns = random.Random(2), Counter(), set()
    for segment in damage:
        columns |= {*segment.schema.names}
        for decoded in sample(segment.batches, 2):
            for region, begin, end in segment.regions(decoded):
                for _ in range(choose(test=1, all=6, nightly=60)):
                    at, names = dice.randrange(begin, end), segment.some_names(dice)
                    changed = bytearray(segment.data)
                    changed[at] ^= 1 << dice.randrange(8)
                    segment.write(changed)
                    result = segment.outcome(names)
                    is_column = region in segment.schema.names
                    read = not is_column or region in segment.stored(names)
                    if region == segment.times and decoded.is_log_append_time:
                        read = False
                    if read and decoded.count:
                        check_place(result, segment, decoded.position)
                        assert not is_column or f"column {region} " in str(result)
                    elif is_column:
                        assert result == segment.expected(names), (segment.file, region, at, names)
                    tried[region] += 1
        segment.restore()
    assert tried.keys() >= {"prefix", "flatbuffer", "block", *columns}


def test_damage_before_the_first_batch_changes_no_row(damage):
    """No checksum covers the schema; a reader that does not find the batches says so."""
    dice = random.Random(3)
    for segment in damage:
        for _ in range(choose(test=4, all=80)):
            changed = bytearray(segment.data)
            changed[dice.randrange(segment.start)] ^= 1 << dice.randrange(8)
            segment.write(changed)
            results = [segment.outcome(segment.names)]
            if isinstance(segment, BytesSegment):
                results.append(python_outcome(segment, ALL))
            for result in results:
                if isinstance(result, EmbedlogError):
                    check_place(result, segment)
                else:
                    assert result == segment.rows
        segment.restore()


def test_noise_is_an_error_or_leaves_the_rows_as_they_were(damage):
    """Bytes are changed and moved about at random."""
    dice = random.Random(4)
    for segment in damage:
        for _ in range(choose(test=6, all=150, nightly=2000)):
            names = segment.some_names(dice)
            segment.write(scrambled(segment.data, dice))
            result = segment.outcome(names)
            if isinstance(result, EmbedlogError):
                check_place(result, segment)
            else:
                assert result == segment.expected(names)
        segment.restore()


# Files that are cut


@OF_BYTES
def test_a_file_that_is_cut_is_an_error_of_the_same_class_as_in_python(damage):
    """Of a file that is not sealed, records were lost; without failOnDataLoss the rest is read."""
    dice = random.Random(5)
    for segment in damage:
        for _ in range(choose(test=5, all=60)):
            names, size = segment.some_names(dice), dice.randrange(segment.end)
            segment.write(segment.data[:size])
            by_jvm = segment.outcome(names)
            by_python = python_outcome(segment, names)
            if isinstance(by_jvm, list):
                # What is missing are columns of the last batch, behind those that are read.
                assert by_jvm == segment.expected(names)
                assert size > segment.batches[-1].position
            elif size > segment.start:
                assert type(by_jvm) is type(by_python), (size, by_jvm, by_python)
            kept = segment.outcome(names, False)
            if isinstance(by_jvm, DataLossError):
                whole = [b for b in segment.batches if b.position + b.size <= size]
                least = sum(decoded.count for decoded in whole)
                assert kept == segment.expected(names)[: len(kept)]
                assert len(kept) >= least
        segment.restore()


@OF_BYTES
def test_a_file_that_is_cut_while_it_is_read_is_no_crash(damage):
    """Nor one that is written again meanwhile."""
    dice, results = random.Random(6), Counter()
    for segment in damage:
        end = threading.Event()

        def cut_again_and_again(segment=segment, end=end):
            numbers = random.Random(7)
            with open(segment.path, "r+b", buffering=0) as file:
                while not end.is_set():
                    file.truncate(numbers.randrange(len(segment.data)))
                    file.seek(0)
                    file.write(segment.data)

        cutter = threading.Thread(target=cut_again_and_again)
        cutter.start()
        try:
            for _ in range(choose(test=8, all=200)):
                names = segment.some_names(dice)
                result = segment.outcome(names)
                results[type(result)] += 1
                if isinstance(result, list):
                    assert result == segment.expected(names)
                else:
                    assert isinstance(result, (*DAMAGED, DataLossError)), repr(result)
        finally:
            end.set()
            cutter.join()
        segment.restore()
    assert results[list]
    assert len(results) > 1


# Hostile bytes


def test_hostile_batches_with_right_checksums_do_no_harm(damage):
    """Lengths, counts and offsets are checked although a checksum says that they were written.

    The rows of topics of bytes are also those that Python reads, unless it refuses the batch.
    """
    dice, results = random.Random(8), Counter()
    for segment in damage:
        for _ in range(choose(test=8, all=800, nightly=20_000)):
            names, decoded = segment.some_names(dice), dice.choice(segment.batches)
            change = dice.choice([with_number, with_number, *CHANGES])
            changed = change(segment.data[decoded.position :][: decoded.size], dice)
            segment.change(decoded, changed)
            result = segment.outcome(names)
            problem = segment.hostile_problem(names, result, change is with_number)
            where = f"{segment.file} {decoded.position} {names} {changed.hex()}"
            assert not problem, f"{problem}: {where}"
            results[type(result)] += 1
        segment.restore()
    assert results[list] and results[CorruptBatchError]


def test_flags_that_contradict_the_columns_are_refused_by_both_readers(damage):
    """Else headers, or the gaps of a compacted batch, would be passed over in silence."""
    for segment in damage:
        first = segment.batches[0]
        healthy = segment.data[first.position : first.position + first.size]
        at = block_of(healthy)[0] + 14
        for bit in range(16):
            if not 1 << bit & COLUMN_FLAGS:
                continue
            data = bytearray(healthy)
            data[at + bit // 8] ^= 1 << bit % 8
            segment.change(first, bytes(data))
            result = segment.outcome(segment.names)
            check_place(result, segment, first.position)
            file = SegmentFile(Files(segment.root, writable=False), segment.file)
            with pytest.raises(CorruptBatchError, match="contradict each other"):
                file.read(first.position, segment.end)
        segment.restore()


def test_a_buffer_that_is_not_aligned_is_refused_by_both_readers(damage):
    """Arrow demands that each one begins at a multiple of 8."""
    shifted = 0
    for segment in damage:
        decoded = segment.batches[0]
        data = segment.data[decoded.position : decoded.position + decoded.size]
        changed = with_shifted_buffer(data)
        if changed is None:
            continue
        shifted += 1
        segment.change(decoded, changed)
        check_place(segment.outcome(segment.names), segment, decoded.position)
        file = SegmentFile(Files(segment.root, writable=False), segment.file)
        with pytest.raises(CorruptBatchError, match=r"multiple of 8|8-byte aligned"):
            file.read(decoded.position, segment.end)[0].columns(segment.schema.names)
        segment.restore()
    assert shifted >= len(damage) // 2


@OF_BYTES
def test_a_bitmap_counts_only_if_there_are_nulls(damage):
    """As in Arrow: without nulls a column need not have one, and readers do not look at it."""
    for segment in damage:
        decoded = segment.batches[0]
        data = segment.data[decoded.position : decoded.position + decoded.size]
        segment.change(decoded, without_null_counts(data))
        result = segment.outcome(segment.names)
        assert result == python_outcome(segment, segment.names)
        if decoded.null_count("key"):
            assert result != segment.rows
        segment.restore()


@OF_BYTES
def test_a_batch_of_a_newer_version_is_not_called_damaged(damage):
    """Nobody must repair it: a newer embedlog can read it."""
    segment = damage[0]
    first = segment.batches[0]
    data = bytearray(segment.data[first.position : first.position + first.size])
    block, _ = block_of(bytes(data))
    data[block + 12 : block + 14] = (2).to_bytes(2, "little")
    segment.change(first, bytes(data))
    for result in (segment.outcome(("value",)), python_outcome(segment, ("value",))):
        assert isinstance(result, UnsupportedFormatError)
        assert "format version 2" in str(result)


def hostile_problem(segment, names, result):
    """Return what is wrong with the rows or the error for a hostile file; None if nothing is."""
    if isinstance(result, InvalidRecordError):
        return None if "timestamp" in names else f"timestamps are not read: {result}"
    if isinstance(result, EmbedlogError):
        if not isinstance(result, DataLossError):
            check_place(result, segment)
        expected = (
            None if invalid(segment, segment.schema.names) else python_outcome(segment, names)
        )
        is_stricter = any(reason in str(result) for reason in STRICTER)
        if isinstance(expected, list) and not is_stricter:
            return f"{result}, but it is valid"
        return None
    if result == segment.expected(names):
        return None
    problem = invalid(segment, names)
    if problem and not set(names) & {"key", "value", "headers"}:
        return None  # maybe only the head is read, which does not contradict itself
    if problem and any(harmless in problem for harmless in HARMLESS):
        return None
    if problem:
        return f"rows of an invalid batch: {problem}"
    expected = python_outcome(segment, names)
    if isinstance(expected, InvalidRecordError):
        return None  # the head says that all timestamps are such as Spark can hold
    if isinstance(expected, EmbedlogError):
        return f"rows where Python has none: {expected}"
    return None if result == expected else f"{result} instead of {expected}"


def python_outcome(segment, names):
    return outcome(python_rows, segment.tasks, names)


def invalid(segment, names):
    """Return why columns of a file cannot be read, by Arrow's full checks; None if they can."""
    file = SegmentFile(Files(segment.root, writable=False), segment.file)
    names = [name for name in segment.schema.names if name in names]
    position, stop = file.start, segment.end
    try:
        while position < stop:
            batches = file.read(position, stop)
            for decoded in batches:
                decoded.columns(names).validate(full=True)
            position = batches[-1].position + batches[-1].size
    except Exception as error:  # noqa: BLE001 - Arrow raises several
        return repr(error)
    return None
