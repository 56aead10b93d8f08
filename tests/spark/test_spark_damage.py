"""Damaged and hostile files: the JVM reader fails and says where, or its rows are right.

It neither dies nor takes gigabytes, whatever the bytes are; `JvmTasks` finds that out.
"""

import os
import random
import re
import threading
from collections import Counter

import pytest
from support.clock import START
from support.damage import scrambled
from support.hostile_batches import CHANGES, block_of, with_number, with_right_checksums
from support.jvm_tasks import python_rows
from support.manual_compaction import keep
from support.roots import encoded
from support.spark_reads import ALL
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
from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.source_options import parse

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
STORED = ("timestamp", "key", "value", "headers", "offset")
"""The columns of a batch, in their order."""


class Segment:
    """A segment file of a topic, the plan to read it, and its healthy bytes and rows."""

    def __init__(self, log, topic):
        self.root = log.path
        options = {"path": log.path, "subscribe": topic}
        self.tasks = plan_batch(parse(options), cores=1)
        ((part,),) = [task.slices for task in self.tasks]
        (self.chunk,) = part.chunks
        self.path = os.path.join(log.path, self.chunk.path)
        with open(self.path, "rb") as file:
            self.data = file.read()
        self.rows = python_rows(self.tasks)
        source = SegmentFile(Files(log.path, writable=False), self.chunk.path)
        self.schema = source.schema
        self.start = source.start
        self.batches = list(source.scan(self.start, self.chunk.end_position))

    def write(self, data):
        with open(self.path, "wb") as file:
            file.write(data)

    def restore(self):
        self.write(self.data)

    def expected(self, names):
        return [tuple(row[ALL.index(name)] for name in names) for row in self.rows]

    def regions(self, decoded):
        """Return the parts of a batch: name, begin and end in the file."""
        begin, data = decoded.position, self.data[decoded.position :][: decoded.size]
        block, body = block_of(data)
        regions = [("prefix", 0, 8), ("flatbuffer", 8, block), ("block", block, body)]
        start, names = body, [name for name in STORED if name in self.schema.names]
        for number, name in enumerate(names):
            end = body + ENTRY.unpack_from(data, block + HEADER.size + 16 * number)[0]
            regions.append((name, start, end))
            start = end
        return [(name, begin + low, begin + high) for name, low, high in regions if low < high]


def kinds(log):
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


@pytest.fixture(scope="module")
def segments(tmp_path_factory):
    """A segment of each kind; the one in "plain" is active, as most of them are."""
    with embedlog.open(tmp_path_factory.mktemp("damage") / "log", maintenance=False) as log:
        yield [Segment(log, name) for name in kinds(log)]


@pytest.fixture
def damage(segments):
    """The segments; their files are healthy again after the test."""
    yield segments
    for segment in segments:
        segment.restore()


def outcome(read, *args):
    """Return the rows that a reader reads, or the error of embedlog that it raises."""
    try:
        return read(*args)
    except EmbedlogError as error:
        return error


def some_names(dice):
    return tuple(dice.sample(ALL, dice.choice([1, 2, 3, len(ALL)])))


def check_place(error, segment, position=None):
    """Check that an error names the file and a position in it."""
    assert isinstance(error, DAMAGED), repr(error)
    match = re.search(r"\[(\S+), byte (\d+)\]", str(error))
    assert match, str(error)
    assert match[1] == segment.chunk.path
    if position is not None:
        assert int(match[2]) == position, str(error)


# Damage


def test_each_region_of_each_batch_is_checked_if_it_is_read(jvm, damage):
    """A column that is not wanted may be damaged: it is not read."""
    dice, tried = random.Random(2), Counter()
    for segment in damage:
        for decoded in segment.batches:
            for region, begin, end in segment.regions(decoded):
                for _ in range(choose(test=1, all=6, nightly=60)):
                    at, names = dice.randrange(begin, end), some_names(dice)
                    changed = bytearray(segment.data)
                    changed[at] ^= 1 << dice.randrange(8)
                    segment.write(changed)
                    result = outcome(jvm.read, segment.tasks, names)
                    read = region not in STORED or region in names
                    if region == "timestamp" and decoded.is_log_append_time:
                        read = False
                    where = (segment.chunk.path, region, at, names)
                    if read and decoded.count:
                        check_place(result, segment, decoded.position)
                    elif region in STORED:
                        assert result == segment.expected(names), where
                    tried[region] += 1
        segment.restore()
    assert tried.keys() >= {"prefix", "flatbuffer", "block", *STORED}


def test_damage_before_the_first_batch_changes_no_row(jvm, damage):
    """No checksum covers the schema; a reader that does not find the batches says so."""
    dice = random.Random(3)
    for segment in damage:
        for _ in range(choose(test=10, all=100)):
            changed = bytearray(segment.data)
            changed[dice.randrange(segment.start)] ^= 1 << dice.randrange(8)
            segment.write(changed)
            for read in (jvm.read, python_rows):
                result = outcome(read, segment.tasks)
                if isinstance(result, EmbedlogError):
                    check_place(result, segment)
                else:
                    assert result == segment.rows
        segment.restore()


def test_noise_is_an_error_or_leaves_the_rows_as_they_were(jvm, damage):
    """Bytes are changed and moved about at random."""
    dice = random.Random(4)
    for segment in damage:
        for _ in range(choose(test=15, all=150, nightly=2000)):
            names = some_names(dice)
            segment.write(scrambled(segment.data, dice))
            result = outcome(jvm.read, segment.tasks, names)
            if isinstance(result, EmbedlogError):
                check_place(result, segment)
            else:
                assert result == segment.expected(names)
        segment.restore()


# Files that are cut


def test_a_file_that_is_cut_is_an_error_of_the_same_class_as_in_python(jvm, damage):
    """Of a file that is not sealed, records were lost; without failOnDataLoss the rest is read."""
    dice = random.Random(5)
    for segment in damage:
        for _ in range(choose(test=8, all=60)):
            names, size = some_names(dice), dice.randrange(segment.chunk.end_position)
            segment.write(segment.data[:size])
            by_jvm = outcome(jvm.read, segment.tasks, names)
            by_python = outcome(python_rows, segment.tasks, names)
            if isinstance(by_jvm, list):
                # What is missing are columns of the last batch, behind those that are read.
                assert by_jvm == segment.expected(names)
                assert size > segment.batches[-1].position
            elif size > segment.start:
                assert type(by_jvm) is type(by_python), (size, by_jvm, by_python)
            kept = outcome(jvm.read, segment.tasks, names, False)
            if isinstance(by_jvm, DataLossError):
                whole = [b for b in segment.batches if b.position + b.size <= size]
                least = sum(decoded.count for decoded in whole)
                assert kept == segment.expected(names)[: len(kept)]
                assert len(kept) >= least
        segment.restore()


@pytest.mark.parametrize("reader", ["jvm"])
def test_a_file_that_is_cut_while_it_is_read_is_no_crash(jvm, damage, reader):
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
            for _ in range(choose(test=15, all=200)):
                names = some_names(dice)
                result = outcome(jvm.read, segment.tasks, names)
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


def test_hostile_batches_with_right_checksums_are_refused_or_read_as_python_reads_them(jvm, damage):
    """Lengths, counts and offsets are checked although a checksum says that they were written."""
    dice, results = random.Random(8), Counter()
    for segment in damage:
        for _ in range(choose(test=40, all=600, nightly=20_000)):
            names, decoded = some_names(dice), dice.choice(segment.batches)
            begin, end = decoded.position, decoded.position + decoded.size
            change = dice.choice([with_number, with_number, *CHANGES])
            changed = change(segment.data[begin:end], dice)
            changed = with_right_checksums(changed, len(segment.schema.names))
            segment.write(segment.data[:begin] + changed + segment.data[end:])
            result = outcome(jvm.read, segment.tasks, names)
            # Of several changes some may be to bytes that one of the readers ignores.
            is_single = change is with_number
            problem = hostile_problem(segment, names, result) if is_single else None
            assert not problem, f"{problem}: {segment.chunk.path} {begin} {names} {changed.hex()}"
            results[type(result)] += 1
        segment.restore()
    assert results[list] and results[CorruptBatchError]


def test_a_batch_of_a_newer_version_is_not_called_damaged(jvm, damage):
    """Nobody must repair it: a newer embedlog can read it."""
    segment = damage[0]
    first = segment.batches[0]
    data = bytearray(segment.data[first.position : first.position + first.size])
    block, _ = block_of(bytes(data))
    data[block + 12 : block + 14] = (2).to_bytes(2, "little")
    newer = with_right_checksums(bytes(data), len(segment.schema.names))
    segment.write(
        segment.data[: first.position] + newer + segment.data[first.position + first.size :]
    )
    for read in (jvm.read, python_rows):
        result = outcome(read, segment.tasks, ("value",))
        assert isinstance(result, UnsupportedFormatError)
        assert "format version 2" in str(result)
    segment.restore()


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
    file = SegmentFile(Files(segment.root, writable=False), segment.chunk.path)
    names = [name for name in segment.schema.names if name in names]
    position, stop = file.start, segment.chunk.end_position
    try:
        while position < stop:
            batches = file.read(position, stop)
            for decoded in batches:
                decoded.columns(names).validate(full=True)
            position = batches[-1].position + batches[-1].size
    except Exception as error:  # noqa: BLE001 - Arrow raises several
        return repr(error)
    return None
