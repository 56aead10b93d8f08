"""Runs of small batches are decoded at once as batches are decoded one by one."""

import random
import struct
import tempfile
from dataclasses import replace
from itertools import accumulate, pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import START
from support.roots import encoded
from support.tiers import sample

from embedlog import batch
from embedlog.batch import BatchRun
from embedlog.batch.decode_run import MIN_BATCHES, SMALL_BYTES
from embedlog.batch.wire import ENTRY, HEADER, MAGIC, TRAILER, bytes_layout
from embedlog.checksum import crc32c
from embedlog.errors import CorruptBatchError, EmbedlogError, UnsupportedFormatError
from embedlog.files import Files
from embedlog.files.paths import FORMAT_FILE
from embedlog.segment import END_MARK, SegmentFile, create
from embedlog.spark import columns as spark_columns
from embedlog.spark.partition_reader import LogInputPartition, read_input_partition
from embedlog.splits.slices import FileChunk, PartitionSlice

PATH = "segment.arrows"
NAMES = ("timestamp", "key", "value")


# Batches


def item(rng, most=30):
    return None if rng.random() < 0.2 else rng.randbytes(rng.randrange(most))


def one(rng):
    return batch.encode_one(item(rng), item(rng), START + rng.randrange(1 << 40))


def equal_sizes(rng):
    return batch.encode_one(rng.randbytes(100), rng.randbytes(10), START)


def several(rng):
    return rows(rng, rng.randint(1, 20))


def nine(rng):
    return rows(rng, 9)


def rows(rng, count, **options):
    keys, values = ([item(rng) for _ in range(count)] for _ in range(2))
    return encoded(*values, keys=keys, at=[START + n for n in range(count)], **options)


def without_nulls(rng):
    return encoded(*[b"v"] * 9, keys=[b"k"] * 9)


def from_arrow(rng):
    count = rng.randint(1, 12)
    values = [item(rng) for _ in range(count)]
    return batch.encode(batch.from_lists(values, None, START))


def null_times(rng):
    times = pa.array([START, None], batch.schema().field("timestamp").type)
    columns = [times, *(pa.array([item(rng), item(rng)], pa.binary()) for _ in range(2))]
    return batch.encode(pa.RecordBatch.from_arrays(columns, schema=batch.schema()))


def with_producer(rng):
    return rows(rng, 1, producer=(5, 0, 0))


def compressed(rng):
    return rows(rng, rng.randint(1, 9), compression=rng.choice(("lz4", "zstd")))


def control(rng):
    marker = one(rng)
    marker.flags |= batch.CONTROL
    return marker


def large(rng):
    return encoded(rng.randbytes(SMALL_BYTES), b"", None)


KINDS = (
    one,
    equal_sizes,
    several,
    without_nulls,
    from_arrow,
    with_producer,
    compressed,
    control,
    null_times,
)
stretch = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([*KINDS, large]),
        "count": st.integers(1, 3 * MIN_BATCHES),
        "append_time": st.none() | st.just(START + 5),
        "epoch": st.integers(0, 1),
        "gap": st.sampled_from([0, 0, 0, 7]),
        "seed": st.integers(0, 1 << 32),
    }
)
stretches = st.lists(stretch, min_size=1, max_size=5)


def stamped(parts):
    """Return the bytes of batches, and the offsets at which they begin, with the last end."""
    messages, offsets, epoch = [], [0], 0
    for part in parts:
        rng = random.Random(part["seed"])
        epoch += part["epoch"]
        for _ in range(part["count"]):
            one_batch = part["kind"](rng)
            messages.append(b"".join(one_batch.stamp(offsets[-1], epoch, part["append_time"])))
            offsets.append(offsets[-1] + one_batch.count)
        offsets[-1] += part["gap"]
    return messages, offsets


# Damage


def flipped(message, rng):
    """Change one byte, which a checksum covers."""
    changed = bytearray(message)
    changed[rng.randrange(len(message))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def body_of(message):
    """Return where the block and the body of a batch begin."""
    block = message.index(MAGIC)
    return block, block + struct.unpack_from("<I", message, block + 24)[0]


def with_word(message, at, word):
    """Change a word, and the checksums that cover it: an attacker, or an encoder with a bug."""
    block, body = body_of(message)
    changed = bytearray(message)
    struct.pack_into("<I", changed, at, word % 2**32)
    begin = body
    for entry in range(block + HEADER.size, body - TRAILER.size, ENTRY.size):
        (end,) = struct.unpack_from("<Q", message, entry)
        if begin <= at < body + end:
            struct.pack_into("<I", changed, entry + 8, crc32c(bytes(changed[begin : body + end])))
        begin = body + end
    struct.pack_into("<I", changed, block + 8, crc32c(bytes(changed[:block])))
    struct.pack_into("<I", changed, block + 4, crc32c(bytes(changed[block + 8 : body])))
    return bytes(changed)


def words_near(message, at):
    (old,) = struct.unpack_from("<I", message, at)
    return old + 1, old - 1, old + 8, old - 8, 0, 2**31


def hostile(message, rng):
    """Change a number before the body, with the checksums that belong to it."""
    at = rng.randrange(0, body_of(message)[1], 4)
    return with_word(message, at, rng.choice(words_near(message, at)))


def ended(message, rng):
    return END_MARK + message[8:]


def cut(message, rng):
    return message[: rng.randrange(len(message))]


damage = st.none() | st.tuples(
    st.sampled_from([flipped, flipped, hostile, hostile, ended, cut]),
    st.floats(0, 1),
    st.integers(0, 1 << 32),
)


def damaged(messages, how):
    """Return the messages with one of them changed; what follows one that is cut is missing."""
    if how is None:
        return messages
    change, where, seed = how
    number = int(where * (len(messages) - 1))
    changed = change(messages[number], random.Random(seed))
    rest = [] if change is cut else messages[number + 1 :]
    return [*messages[:number], changed, *rest]


# Batches and runs


def source_of(messages):
    data = batch.schema().serialize().to_pybytes()  # anything of that many bytes
    return batch.BatchSource(b"".join(messages), PATH, len(data), bytes_layout())


def decoded_in_turns(source, decode, max_bytes):
    """Return all batches and runs, as lists of each call, and the error that ends them."""
    calls, start = [], 0
    while start < len(source.view):
        try:
            pieces = decode(source, start, len(source.view), max_bytes)
        except (CorruptBatchError, UnsupportedFormatError) as error:
            return calls, outcome(error)
        if not pieces:
            break
        calls.append(pieces)
        start = pieces[-1].position + pieces[-1].size - source.shift
    return calls, None


def outcome(error):
    return type(error), str(error), vars(error)


def facts(pieces):
    """Return what all pieces of one call have in common with the batches in them."""
    first, last = pieces[0], pieces[-1]
    rows_of = [(piece.is_log_append_time, piece.count) for piece in pieces]
    return (
        (first.position, first.base_offset),
        (last.position + last.size, last.next_offset, last.leader_epoch),
        [flag for flag, count in rows_of for _ in range(count)],
    )


def columns_of(pieces, names):
    """Return the rows of the pieces up to the first damaged one, and the error of that one."""
    records = []
    for piece in pieces:
        try:
            offsets = piece.offsets().to_pylist()
            lists = [items_of(column) for column in piece.columns(names).columns]
        except CorruptBatchError as error:
            return records, outcome(error)
        records += zip(offsets, *lists, strict=True)
    return records, None


def damage_of(pieces):
    """Return the error of the first piece that has a wrong checksum."""
    try:
        for piece in pieces:
            piece.check_crcs()
    except CorruptBatchError as error:
        return outcome(error)
    return None


def items_of(column):
    is_time = pa.types.is_timestamp(column.type)
    # Not every number is a time that Python has.
    return (column.view(pa.int64()) if is_time else column).to_pylist()


def assert_equal(source, max_bytes, names):
    """Decode all batches one by one and in runs, and compare the calls, the rows, the errors."""
    general, error = decoded_in_turns(source, batch.BatchSource.batches, max_bytes)
    fast, error_of_fast = decoded_in_turns(source, batch.batches_fast, max_bytes)

    assert error_of_fast == error
    assert [facts(pieces) for pieces in fast] == [facts(pieces) for pieces in general]
    for pieces, batches in zip(fast, general, strict=True):
        records, error = columns_of(batches, names)
        records_of_fast, error_of_fast = columns_of(pieces, names)
        assert error_of_fast == error
        assert damage_of(pieces) == damage_of(batches)
        # A run is decoded whole, or not at all.
        assert records_of_fast == (records if error is None else records[: len(records_of_fast)])


@pytest.mark.parametrize("kind", [one, nine])
def test_no_word_of_a_batch_is_believed(kind):
    """Each, or in `test` some, is changed in a batch that could continue a run, with checksums."""
    part = {"kind": kind, "count": MIN_BATCHES + 9, "append_time": None, "epoch": 0, "gap": 0}
    messages, _ = stamped([{**part, "seed": 2}])
    number = next(n for n in range(MIN_BATCHES, len(messages)) if has_null(messages[n]))
    message, rng = messages[number], random.Random(7)
    # Arrow does not check the offsets within a column, only the first and the last.
    end = len(message) if kind is one else body_of(message)[1]
    for at in sample(range(0, end, 4), 20):
        for word in words_near(message, at):
            changed = with_word(message, at, word)
            source = source_of([*messages[:number], changed, *messages[number + 1 :][:1]])
            assert_equal(source, 1 << 20, rng.sample(NAMES, rng.randint(1, 3)))


def test_no_bit_of_a_batch_may_be_lost():
    """Each byte is damaged in turn (in `test` some), and the error is the same."""
    part = {"kind": one, "count": MIN_BATCHES + 9, "append_time": None, "epoch": 0, "gap": 0}
    messages, _ = stamped([{**part, "seed": 2}])
    number, rng = MIN_BATCHES + 3, random.Random(7)
    for at in sample(range(len(messages[number])), 50):
        changed = bytearray(messages[number])
        changed[at] ^= 1 << rng.randrange(8)
        source = source_of([*messages[:number], bytes(changed), *messages[number + 1 :][:1]])
        assert_equal(source, 1 << 20, NAMES)
        assert decoded_in_turns(source, batch.batches_fast, 1 << 20)[1] or [
            error
            for piece in batch.batches_fast(source, 0, 1 << 20, 1 << 20)
            if (error := columns_of([piece], NAMES)[1]) and damage_of([piece])
        ]


def has_null(message):
    (decoded,) = source_of([message]).batches(0, 1 << 20, 1)
    return decoded.null_count("key") and not decoded.null_count("value")


@given(stretches, damage, st.sampled_from([0, 600, 10_000, 1 << 20]), st.permutations(NAMES))
def test_runs_are_decoded_as_their_batches_are(parts, how, max_bytes, names):
    """Each call ends where it would, with the same error; columns have the same rows."""
    assert_equal(source_of(damaged(stamped(parts)[0], how)), max_bytes, names[:2])


@pytest.mark.parametrize("kind", [one, equal_sizes, several, without_nulls, from_arrow])
@pytest.mark.parametrize("append_time", [None, START])
def test_common_small_batches_are_one_run(kind, append_time, monkeypatch):
    """Otherwise the other tests would compare batches with themselves."""
    part = {"kind": kind, "count": 200, "append_time": append_time}
    messages, offsets = stamped([{**part, "epoch": 0, "gap": 0, "seed": 1}])

    (run,) = batch.batches_fast(source_of(messages), 0, 1 << 30, 1 << 20)

    assert type(run) is BatchRun
    assert (run.base_offset, run.next_offset) == (0, offsets[-1])
    monkeypatch.delattr(batch.Batch, "columns")
    assert run.columns(["value"]).num_rows == run.count


@pytest.mark.parametrize(
    "made",
    [
        [compressed] * MIN_BATCHES,
        [control] * MIN_BATCHES,
        [large] * MIN_BATCHES,
        [null_times] * MIN_BATCHES,
        [one] * (MIN_BATCHES - 1),
        [one, control] * MIN_BATCHES,
    ],
    ids=["compressed", "control", "large", "null times", "few", "mixed"],
)
def test_other_batches_are_decoded_one_by_one(made):
    """Numpy gains nothing for few batches, and checks only one shape of them."""
    rng = random.Random(1)
    offset, messages = 0, []
    for kind in made:
        one_batch = kind(rng)
        messages.append(b"".join(one_batch.stamp(offset, 0)))
        offset += one_batch.count

    pieces = batch.batches_fast(source_of(messages), 0, 1 << 30, 1 << 20)

    assert [type(piece) for piece in pieces] == [batch.Batch] * len(made)


@given(stretches, st.data())
def test_a_run_is_trimmed_to_the_batches_with_the_rows(parts, data):
    """Batches without any of these rows are not even checked."""
    messages, _ = stamped(parts)
    source = source_of(messages)
    for run in batch.batches_fast(source, 0, 1 << 30, 1 << 20):
        if type(run) is not BatchRun:
            continue
        first = data.draw(st.integers(0, run.count - 1))
        last = data.draw(st.integers(first + 1, run.count))

        trimmed, new_first, new_last = run.trim(first, last)

        assert (
            trimmed.columns(NAMES)
            .slice(new_first, new_last - new_first)
            .equals(run.columns(NAMES).slice(first, last - first))
        )
        assert trimmed.base_offset + new_first == run.base_offset + first
        expected = [
            decoded
            for decoded in source.batches(run.start, 1 << 30, run.size)
            if decoded.next_offset > run.base_offset + first
            and decoded.base_offset < run.base_offset + last
        ]
        assert facts([trimmed]) == facts(expected)
        assert repr(trimmed).startswith(f"<{len(expected)} batches [")


# Reading for Spark


@pytest.fixture(scope="module")
def root():
    with tempfile.TemporaryDirectory() as directory:
        files = Files(directory)
        files.write_file(FORMAT_FILE, b"")
        yield files


def written(root, messages, *, sealed):
    """Write a segment; return the positions of its batches, and the end."""
    file = create(root, PATH, batch.schema().serialize())
    positions = [*accumulate(map(len, messages), initial=file.start)]
    file.write([b"".join(messages)], file.start)
    if sealed:
        file.write([END_MARK], positions[-1])
    return positions


def read_by_spark(root, part, names, *, fast):
    """Return the rows of a slice, and the error at their end."""
    partition = LogInputPartition(root.root, (part,))
    records = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not fast:
            monkeypatch.setattr(SegmentFile, "read_fast", SegmentFile.read)
            monkeypatch.setattr(SegmentFile, "mapped_fast", SegmentFile.mapped)
        try:
            for rows_batch in read_input_partition(partition, names, True):
                rows_batch.validate(full=True)
                records += rows_batch.to_pylist()
        except EmbedlogError as error:
            return records, outcome(error)
    return records, None


@given(
    stretches,
    damage,
    st.booleans(),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.integers(0, 5),
    st.lists(st.sampled_from([*spark_columns.SPARK_TYPES]), min_size=1, unique=True),
)
def test_spark_reads_the_same_rows_or_the_same_error(
    root, parts, how, sealed, bounds, epoch, names
):
    """The error names the same file and byte, also with only some of the rows or columns."""
    messages, offsets = stamped(parts)
    positions = written(root, messages, sealed=sealed)
    first, last = sorted(int(bound * offsets[-1]) for bound in bounds)
    begin = max(
        position for offset, position in zip(offsets, positions, strict=True) if offset <= first
    )
    written(root, damaged(messages, how), sealed=sealed)
    chunk = FileChunk(PATH, sealed, False, begin, positions[-1])
    part = PartitionSlice("t", 0, first, last + 1, epoch, (chunk,))

    for these in (part, replace(part, chunks=(chunk._replace(position=0),))):
        fast = read_by_spark(root, these, tuple(names), fast=True)
        assert fast == read_by_spark(root, these, tuple(names), fast=False)


def test_damage_in_a_long_run_names_the_byte_of_its_batch(root):
    """The batches before it are good, and there are several runs of a megabyte."""
    part = {"kind": one, "count": 9000, "append_time": None, "epoch": 0, "gap": 0, "seed": 3}
    messages, offsets = stamped([part])
    positions = written(root, messages, sealed=True)
    slice_ = PartitionSlice("t", 0, 0, 9000, 0, (FileChunk(PATH, True, False, 0, positions[-1]),))
    names = ("offset", "value", "timestamp")
    records, error = read_by_spark(root, slice_, names, fast=True)
    assert (len(records), error) == (9000, None)
    assert [row["offset"] for row in records] == offsets[:-1]

    for number, at in ((7000, -1), (8000, HEADER.size)):
        changed = bytearray(messages[number])
        changed[at] ^= 1
        written(root, [*messages[:number], bytes(changed), *messages[number + 1 :]], sealed=True)
        with pytest.raises(CorruptBatchError) as raised:
            [*read_input_partition(LogInputPartition(root.root, (slice_,)), names, True)]
        assert (raised.value.path, raised.value.position) == (PATH, positions[number])
    assert all(begin < end for begin, end in pairwise(positions))
