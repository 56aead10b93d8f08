"""Batches return what was encoded, and detect damage."""

from __future__ import annotations

import random
import struct
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support import random_columns
from support.hostile_batches import with_right_checksums, with_shifted_buffer
from support.tiers import choose, sample

from embedlog import batch
from embedlog.batch import decode_rows, messages, wire
from embedlog.batch.encode import lengths_of
from embedlog.batch.encode_headers import encode_headers
from embedlog.checksum import crc32c
from embedlog.errors import (
    CorruptBatchError,
    InvalidConfigError,
    RecordTooLargeError,
    SerializationError,
    UnsupportedFormatError,
)

COMPRESSIONS = ["none", "lz4", "zstd"]
NOW = 1_700_000_000_000
HEADER = struct.Struct("<4sIIHHIHHIqqqIhHiqqqq")
FIELDS = (
    *("magic", "block_crc", "metadata_crc", "version", "flags", "count", "columns", "_1"),
    *("block_length", "size", "base_offset", "next_offset", "leader_epoch", "producer_epoch"),
    *("_2", "base_sequence", "min_timestamp", "max_timestamp", "producer_id", "delete_horizon"),
)


def written(encoded, base=0, **stamp):
    """Return the bytes of a batch, as they are written to the file."""
    data = b"".join(map(bytes, encoded.stamp(base, 3, **stamp)))
    assert len(data) == encoded.size
    return data


def parsed(data, schema=None, **more):
    buffer = pa.py_buffer(data)
    return batch.parse(
        buffer, 0, buffer.size, path="t.arrows", position=0, schema=schema or batch.schema(), **more
    )


def resealed(data, *, header=None, edit=None, table=None):
    """Change a batch and recompute its CRCs, as the author of a hostile file can.

    ``edit(head, body)`` changes bytes in place; ``header`` and ``table`` replace header fields and
    entries of the column table.
    """
    end = 8 + struct.unpack_from("<i", data, 4)[0]
    start = end - struct.unpack_from("<I", data, end - 8)[0]
    head, body = bytearray(data[:start]), bytearray(data[end:])
    fields = dict(zip(FIELDS, HEADER.unpack_from(data, start), strict=True))
    entries = [list(entry) for entry in struct.iter_unpack("<QII", data[start + 96 : end - 8])]
    if edit:
        edit(head, body)
    start_of_column = 0
    for entry in entries:
        entry[1] = crc32c(bytes(body[start_of_column : entry[0]]))
        start_of_column = entry[0]
    if table:
        table(entries)
    fields |= {"metadata_crc": crc32c(bytes(head)), **(header or {})}
    block = HEADER.pack(*fields.values())[8:]
    block += b"".join(struct.pack("<QII", *entry) for entry in entries) + data[end - 8 : end]
    return bytes(head) + b"EMBL" + struct.pack("<I", crc32c(block)) + block + bytes(body)


def parts_of(data):
    """Return the head and the body of a batch, without the block."""
    end = 8 + struct.unpack_from("<i", data, 4)[0]
    return data[: end - struct.unpack_from("<I", data, end - 8)[0]], data[end:]


@pytest.fixture
def small():
    """Three records that have a null key, an empty key, a null value and an empty value."""
    return written(
        batch.encode_lists([b"one", None, b""], [None, b"", b"k"], [NOW, NOW + 2, NOW + 1]), 10
    )


# Round trips


def rows_or_refusal(data, read):
    """Return the lists of a batch, or "corrupt" if it is refused."""
    try:
        return read(parsed(data))
    except CorruptBatchError:
        return "corrupt"


def lists_by_arrow(part):
    """Return what `Batch.lists` does, decoded and checked by Arrow."""
    columns = part.columns()
    part.check(columns)
    times, keys, values = columns
    return times.view(pa.int64()).to_pylist(), keys.to_pylist(), values.to_pylist(), None


@pytest.mark.parametrize("rows", [*range(1, 11), 100, 256, 1000], ids="rows={}".format)
def test_the_rows_of_a_batch_are_those_that_arrow_reads(rows, monkeypatch):
    """A3: for items of one length, of any lengths, and nulls; as long as pyarrow is not loaded."""
    monkeypatch.setattr(decode_rows, "FEW_ROWS", decode_rows.MANY_ROWS)
    rng = random.Random(rows)
    mixed = [None, b"", b"k", b"key"]
    for items in (mixed, mixed[1:], [None, b"key"], [b"key"], [b""], [None]):
        for _ in range(8):
            keys, values = ([rng.choice(items) for _ in range(rows)] for _ in range(2))
            times = [NOW + rng.randrange(9) for _ in range(rows)]
            data = written(batch.encode_lists(values, keys, times), 10)
            assert parsed(data).lists() == lists_by_arrow(parsed(data))
            assert parsed(data).lists() == (times, keys, values, None)


@pytest.mark.parametrize("part", [0, 1], ids=["head", "body"])
def test_the_rows_of_a_damaged_batch_are_checked_as_by_arrow(small, part):
    """What Arrow refuses is refused, and what is read is what Arrow reads."""
    rng = random.Random(part)
    size = [len(data) for data in parts_of(small)][part]
    for position in range(8 * (1 - part), size):
        for _ in range(3):
            byte = rng.choice([0, 1, 7, 0x7F, 0x80, 0xFF, rng.randrange(256)])

            def edit(*parts, position=position, byte=byte):
                parts[part][position] = byte

            data = resealed(small, edit=edit)
            rows = rows_or_refusal(data, batch.Batch.lists)
            assert rows in (rows_or_refusal(data, lists_by_arrow), "corrupt"), (position, byte)


def test_a_header_without_a_key_is_refused():
    """A3: the header value may be null, the header key may not."""
    with pytest.raises(SerializationError):
        batch.encode_lists([b"v"], None, NOW, [[(None, b"v")]])


@pytest.mark.parametrize(
    "pair", [("one",), ("a", b"b", b"c"), (b"a", b"b"), ("a", "b"), 5, "\ud800b"]
)
def test_a_header_that_is_not_a_pair_is_refused(pair):
    """A3: the error says what a header must be."""
    with pytest.raises(SerializationError, match="pairs of str and bytes"):
        batch.encode_lists([b"v"], None, NOW, [[("fine", b"v"), pair]])


@pytest.mark.parametrize("value", ["text", 5, ["list"], memoryview(b"1234").cast("i"), b"x".hex])
@pytest.mark.parametrize("others", [[], [None], [b"v"] * 99], ids=["alone", "null", "many"])
def test_what_is_not_bytes_is_refused(value, others):
    """G2: text is not accepted as bytes, however the batch is built."""
    values = [*others, value]
    with pytest.raises(SerializationError):
        batch.encode_lists(values, None, NOW)
    with pytest.raises(SerializationError):
        batch.encode_lists([b"v"] * len(values), values, NOW)


@pytest.mark.parametrize("value", [["x"], [1.5], [None], [1 << 63], [1, 2]])
def test_a_timestamp_is_an_int64_for_each_record(value):
    """A7: nothing is rounded, parsed or guessed."""
    for count in (1, 3):
        times = value if len(value) == count else value * 2
        with pytest.raises(SerializationError):
            batch.encode_lists([b"v"] * count, None, times)


BYTES = st.none() | st.binary(max_size=40)
RECORD = st.tuples(st.integers(-(1 << 63), (1 << 63) - 1), BYTES, BYTES)
HEADER_LIST = st.lists(st.tuples(st.text(max_size=5), BYTES), max_size=3)


@given(st.lists(RECORD, min_size=1, max_size=70), st.sampled_from(COMPRESSIONS), st.data())
def test_any_records_come_back(records, compression, data):
    """A3: encode, write, parse, read is the identity."""
    times, keys, values = map(list, zip(*records, strict=True))
    headers = data.draw(st.none() | st.lists(HEADER_LIST, min_size=len(times), max_size=len(times)))

    encoded = batch.encode_lists(values, keys, times, headers, compression)
    decoded = parsed(written(encoded, 7), batch.schema(headers=headers is not None))

    decoded.verify()
    assert decoded.lists() == (times, keys, values, headers)
    assert (decoded.min_timestamp, decoded.max_timestamp) == (min(times), max(times))
    assert (decoded.base_offset, decoded.next_offset) == (7, 7 + len(times))
    assert decoded.offsets().to_pylist() == list(range(7, 7 + len(times)))


@given(st.lists(RECORD, min_size=1, max_size=70))
def test_lists_and_arrow_columns_encode_to_the_same_bytes(records):
    """`encode_lists` writes the bytes that Arrow writes."""
    times, keys, values = map(list, zip(*records, strict=True))
    columns = pa.RecordBatch.from_arrays(
        [
            pa.array(times, pa.int64()).view(wire.timestamp_type()),
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
        ],
        schema=batch.schema(),
    )

    from_lists = written(batch.encode_lists(values, keys, times))

    assert from_lists == written(batch.encode(columns))
    assert batch.from_lists(values, keys, times).equals(columns)


@given(st.lists(RECORD, min_size=1, max_size=70), st.booleans())
def test_measured_lengths_change_nothing(records, even):
    """Lengths that the caller has measured give the same bytes."""
    times, _, values = map(list, zip(*records, strict=True))
    keys = [b"k" * (1 if even else number % 5) for number in range(len(times))]
    lengths = lengths_of(values), lengths_of(keys)

    assert lengths == (None if None in values else [*map(len, values)], [*map(len, keys)])
    with_lengths = batch.encode_lists(values, keys, times, lengths=lengths)
    assert written(with_lengths) == written(batch.encode_lists(values, keys, times))
    columns = batch.from_lists(values, keys, times, lengths=lengths)
    assert columns.equals(batch.from_lists(values, keys, times))


@given(RECORD)
def test_one_record_encodes_to_the_bytes_of_a_list_of_one(record):
    """`encode_one` writes the bytes of `encode_lists`, also for None."""
    time, key, value = record

    encoded = batch.encode_one(value, key, time)

    other = batch.encode_lists([value], [key], time)
    for name in batch.EncodedBatch.__slots__:
        assert getattr(encoded, name) == getattr(other, name), name
    assert written(encoded) == written(batch.encode_lists([value], [key], [time]))


NAMED = st.lists(st.tuples(st.text(max_size=3), st.none() | st.binary(max_size=9)), max_size=3)


@given(st.lists(st.tuples(RECORD, st.none() | NAMED), min_size=1, max_size=12))
def test_records_with_headers_encode_to_the_bytes_of_arrow(rows):
    """`encode_headers` writes the bytes of `encode`."""
    records, headers = zip(*rows, strict=True)
    assume(any(headers))
    times, keys, values = map(list, zip(*records, strict=True))

    encoded = encode_headers(values, keys, times, headers)

    assert written(encoded) == written(batch.encode(batch.from_lists(values, keys, times, headers)))


def test_a_slice_of_a_record_batch_is_encoded_alone():
    """Rows of the buffers outside of the slice are neither stored nor counted."""
    whole = batch.from_lists([b"%d" % i for i in range(100)], None, list(range(100)))

    encoded = batch.encode(whole.slice(40, 3))
    decoded = parsed(written(encoded))

    assert decoded.lists() == ([40, 41, 42], [None] * 3, [b"40", b"41", b"42"], None)
    assert (encoded.min_timestamp, encoded.max_timestamp, encoded.count) == (40, 42, 3)


TYPED = pa.schema(
    [
        pa.field("_timestamp", wire.timestamp_type(), nullable=False),
        ("_key", pa.binary()),
        ("count", pa.int32()),
        ("nothing", pa.null()),
        ("flag", pa.bool_()),
        ("names", pa.list_(pa.string())),
        ("place", pa.struct([("x", pa.float64()), ("tags", pa.map_(pa.string(), pa.int8()))])),
        ("pair", pa.list_(pa.int16(), 2)),
        ("code", pa.decimal128(10, 2)),
    ]
)
ROWS = [
    {
        "_timestamp": datetime(2024, 1, day, tzinfo=UTC),
        "_key": b"k",
        "count": day,
        "nothing": None,
        "flag": None if day == 2 else day > 2,
        "names": ["a", None],
        "place": {"x": 0.5, "tags": [("t", 1)]},
        "pair": [day, 2],
        "code": None,
    }
    for day in (1, 2, 3)
]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_columns_of_any_type_can_be_read_alone_and_in_any_order(compression):
    """The batch reads its schema from the topic only; nested types are columns like others."""
    rows = pa.RecordBatch.from_pylist(ROWS, schema=TYPED)
    decoded = parsed(written(batch.encode(rows, compression)), TYPED)

    decoded.verify()
    assert decoded.columns().equals(rows)
    for names in (*([name] for name in TYPED.names), ["pair", "place", "_key"], TYPED.names[::-1]):
        assert decoded.columns(names).equals(rows.select(names))


def test_a_type_without_a_fixed_position_in_the_message_is_refused():
    """Dictionaries need messages of their own, and a batch is one message."""
    rows = pa.RecordBatch.from_pylist(
        [{"t": 1, "d": "a"}],
        schema=pa.schema(
            [("t", wire.timestamp_type()), ("d", pa.dictionary(pa.int8(), pa.string()))]
        ),
    )
    with pytest.raises(InvalidConfigError, match="dictionary"):
        batch.encode(rows)


def test_the_time_column_may_be_another_one_in_another_unit():
    """The range of timestamps is in milliseconds, whatever the unit of the column."""
    fields = [("n", pa.int32()), ("at", pa.timestamp("us", tz="UTC"))]
    schema = pa.schema(fields, metadata={"embedlog.timestamp": "at"})
    rows = pa.RecordBatch.from_pylist([{"n": 1, "at": 5_999}, {"n": 2, "at": None}], schema=schema)

    decoded = parsed(written(batch.encode(rows)), schema)

    assert (decoded.min_timestamp, decoded.max_timestamp) == (5, 5)


# The stamp


@given(st.lists(random_columns.types(), max_size=3), st.sampled_from(COMPRESSIONS))
def test_a_batch_of_any_columns_may_be_kept_empty(types, compression):
    """D11: also one whose body then has no bytes at all, as with columns of numbers alone."""
    fields = [("_timestamp", wire.timestamp_type()), *((f"c{i}", t) for i, t in enumerate(types))]
    metadata = {"embedlog.timestamp": "_timestamp"}
    schema = pa.schema([*fields, ("_offset", pa.int64())], metadata=metadata)
    nothing = pa.RecordBatch.from_pylist([], schema=schema)
    encoded = batch.encode(nothing, compression)

    decoded = parsed(written(encoded, 10, next_offset=20), schema)

    decoded.verify()
    assert decoded.columns(schema.names).equals(nothing)


def test_columns_are_chosen_by_name(small):
    """Any subset of the stored columns; an unknown name is refused."""
    decoded = parsed(small)

    assert decoded.columns().schema.names == ["timestamp", "key", "value"]
    assert decoded.columns(["key"]).to_pylist() == [{"key": None}, {"key": b""}, {"key": b"k"}]
    with pytest.raises(ValueError):  # of list.index: it has no name from Python 3.14 on
        decoded.columns(["nope"])


# Damage


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_only_requested_columns_are_decompressed(compression):
    """P12: damage in a compressed column does not affect reading another."""
    noise = random.Random(5).randbytes(5000)
    data = written(batch.encode_lists([noise] * 3, [b"k"] * 3, NOW, None, compression))

    decoded = parsed(data[:-300] + bytes(300))

    assert decoded.columns(["key"]).column(0).to_pylist() == [b"k"] * 3
    with pytest.raises(CorruptBatchError):
        decoded.columns(["value"])


def test_a_batch_that_is_cut_off_anywhere_is_truncated(small):
    """A5: an incomplete last batch is distinguished from a damaged one."""
    for end in range(len(small)):
        for data, limit in ((small[:end], end), (small, end)):
            with pytest.raises(CorruptBatchError) as caught:
                batch.parse(
                    pa.py_buffer(data), 0, limit, path="f", position=8, schema=batch.schema()
                )
            assert (caught.value.reason, caught.value.position) == ("truncated", 8)


def test_an_error_says_where_and_why(small):
    """P12: the path and the position in the file, not in the buffer."""
    damaged = bytearray(bytes(16) + small)
    damaged[-1] ^= 1
    decoded = batch.parse(
        pa.py_buffer(damaged),
        16,
        len(damaged),
        path="a.arrows",
        position=5000,
        schema=batch.schema(),
    )

    assert decoded.position == 5000
    with pytest.raises(CorruptBatchError) as caught:
        decoded.columns()
    assert (caught.value.path, caught.value.position) == ("a.arrows", 5000)
    assert "value" in caught.value.reason


# Sequences of batches


def source(data, shift=0):
    return batch.BatchSource(pa.py_buffer(data), "p", shift, wire.bytes_layout())


def test_a_head_is_checked_even_if_an_equal_one_was_read(small):
    """P12: the cached head of one batch does not hide damage in the next."""
    head = batch.decode.head_length(small[:8], path="p", position=0)
    for position in range(head):
        damaged = bytearray(small * 2)
        damaged[len(small) + position] ^= 1
        stream = source(damaged)
        assert [decoded.position for decoded in stream.batches(0, len(damaged), 1 << 20)] == [0]
        with pytest.raises(CorruptBatchError):
            stream.batches(len(small), len(damaged), 1 << 20)


def test_head_and_message_length_are_checked(small):
    """P22: a length is used only if its CRC is correct and it is within the limits."""
    location = {"path": "p", "position": 0}
    head = batch.decode.head_length(small[:8], **location)

    assert batch.message_length(small[:head], **location) == len(small)
    assert batch.decode.head_length(wire.END_OF_STREAM, **location) is None
    for damaged in (small[:7], bytes(8), b"\xff\xff\xff\xff\xf8\xff\xff\x7f"):
        with pytest.raises(CorruptBatchError):
            batch.decode.head_length(damaged, **location)
    flipped = bytearray(small[:head])
    flipped[head - 100] ^= 1
    for damaged in (bytes(flipped), small[: head - 1]):
        with pytest.raises(CorruptBatchError):
            batch.message_length(damaged, **location)


# Hostile files


@pytest.mark.parametrize(
    "header",
    [
        {"count": 4},
        {"count": 0xFFFFFFFF, "next_offset": 10 + 0xFFFFFFFF},
        {"next_offset": 10},
        {"next_offset": 1 << 62},
        {"base_offset": -1, "next_offset": 2},
        {"columns": 2},
        {"columns": 0xFFFF},
        {"block_length": 96},
        {"size": 16},
        {"size": -8},
        {"size": 1 << 62},
        {"size": 501},
        {"version": 0},
    ],
    ids=str,
)
def test_numbers_that_contradict_each_other_are_refused_below_a_good_crc(small, header):
    """P22: a correct CRC does not exclude a manipulated file."""
    with pytest.raises(CorruptBatchError):
        parsed(resealed(small, header=header)).columns()


@pytest.mark.parametrize("bit", [bit for bit in range(16) if 1 << bit & wire.COLUMN_FLAGS])
@pytest.mark.parametrize(
    "kinds", [(), ("headers",), ("offsets",), ("headers", "offsets")], ids="+".join
)
def test_flags_that_contradict_the_columns_are_refused_below_a_good_crc(kinds, bit):
    """P22: else headers, or the gaps of a compacted batch, would be passed over in silence."""
    schema = batch.schema(**dict.fromkeys(kinds, True))
    row = {"timestamp": NOW, "value": b"v", "headers": [("h", b"1")], "offset": 0}
    encoded = batch.encode(pa.RecordBatch.from_pylist([row], schema=schema))
    data = written(encoded)
    assert parsed(data, schema).count == 1

    with pytest.raises(CorruptBatchError, match="contradict each other"):
        parsed(resealed(data, header={"flags": encoded.flags ^ 1 << bit}), schema)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_buffer_begins_at_a_multiple_of_8(compression):
    """P22: Arrow demands it, also of a compressed batch, which embedlog decodes itself."""
    data = written(batch.encode_lists([b"x" * 99], [b"k"], NOW, None, compression))
    shifted = with_right_checksums(with_shifted_buffer(data), 3)

    with pytest.raises(CorruptBatchError, match="Arrow cannot read it"):
        parsed(shifted).columns()


def test_a_newer_version_is_not_called_damage(small):
    """A batch of a newer embedlog is refused, and the error says what to do."""
    with pytest.raises(UnsupportedFormatError, match="newer"):
        parsed(resealed(small, header={"version": 2}))


@pytest.mark.parametrize("ends", [(8, 4, 72), (24, 1 << 63, 72), (24, 56, 1 << 20)])
def test_columns_cannot_lie_outside_the_body(small, ends):
    """P22: no length makes a reader look outside the batch."""

    def move(entries):
        for entry, end in zip(entries, ends, strict=True):
            entry[0] = end

    with pytest.raises(CorruptBatchError):
        parsed(resealed(small, table=move)).columns()


def test_offsets_beyond_the_data_are_refused(small):
    """P22: Arrow never follows an offset out of its buffer."""
    for position in (0, 4, 8, 12):
        for value in (-1, 1 << 30, 0x7FFFFFFF):

            def edit(_, body, position=position, value=value):
                struct.pack_into("<i", body, body.index(b"one") - 16 + position, value)

            with pytest.raises(CorruptBatchError):
                parsed(resealed(small, edit=edit)).verify()
            with pytest.raises(CorruptBatchError):
                parsed(resealed(small, edit=edit)).lists()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("raw_length", [1 << 62, 65 << 20, -2, -(1 << 63), 5])
def test_an_excessive_raw_length_is_refused_before_it_is_allocated(compression, raw_length):
    """P22: no more than the limit is allocated, whatever length a buffer has."""
    data = written(batch.encode_lists([b"x" * 999], [b"k"], NOW, None, compression))

    def edit(_, body):
        # The raw length precedes the last buffer, which has the data of the values.
        struct.pack_into("<q", body, body.rindex(struct.pack("<q", 999)), raw_length)

    before = pa.total_allocated_bytes()
    decoded = parsed(resealed(data, edit=edit))
    with pytest.raises(CorruptBatchError):
        decoded.columns()
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("compression", sample([*COMPRESSIONS], 2))
def test_no_change_with_recomputed_crcs_crashes_a_reader(compression):
    """P22: the result is a typed error, or other records."""
    rng = random.Random(20)
    values, keys = [b"one", None, b"xyz" * 30], [None, b"", b"k"]
    rows = batch.from_lists(values, keys, NOW, [[("h", b"x")], None, []])
    encoded = batch.encode(rows, compression)
    data, schema = written(encoded), batch.schema(headers=True)
    refused = 0
    rounds = choose(quick=1000, all=3000)
    for _ in range(rounds):

        def edit(head, body):
            for _ in range(rng.choice((1, 1, 2, 4))):
                target = rng.choice((head, head, body))
                position = rng.randrange(8 if target is head else 0, len(target))
                target[position] = rng.choice((0, 1, 4, 8, 0x7F, 0x80, 0xFF, rng.randrange(256)))

        try:
            decoded = parsed(resealed(data, edit=edit), schema)
            decoded.columns(["key"])
            decoded.verify()
            decoded.lists()
        except CorruptBatchError:
            refused += 1
    assert refused > rounds / 6


def test_a_batch_beyond_the_limit_is_not_made():
    """A4: a batch that could not be read back is not written."""
    block = bytes(33 << 20)
    with pytest.raises(RecordTooLargeError):
        batch.encode_lists([block, block], None, NOW)
    with pytest.raises(RecordTooLargeError):
        batch.encode_lists([block], [block], NOW)
    with pytest.raises(RecordTooLargeError):
        batch.encode_one(block, block, NOW)
    rows = pa.RecordBatch.from_arrays(
        [pa.array(np.zeros(9 << 20, np.int64)).view(wire.timestamp_type())], names=["t"]
    )
    for compression in COMPRESSIONS:
        with pytest.raises(RecordTooLargeError):
            batch.encode(rows, compression)


def test_an_unknown_compression_is_refused():
    """Only codecs that every Arrow reader has are accepted."""
    with pytest.raises(InvalidConfigError, match="gzip"):
        batch.encode_lists([b"v"], None, NOW, None, "gzip")


@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=9), st.binary(max_size=9), min_size=1, max_size=5
    ),
    st.integers(0),
)
def test_a_segment_begins_as_arrow_would_write_it(metadata, bit):
    """The message of its schema; that of any other one is left to Arrow."""
    message = batch.schema(metadata=metadata).serialize().to_pybytes()
    assert messages.schema_message(metadata) == message
    assert messages.is_of_bytes(message)

    changed = bytearray(message)
    changed[bit // 8 % len(message)] ^= 1 << bit % 8
    if messages.is_of_bytes(bytes(changed)):
        assert pa.ipc.read_schema(pa.py_buffer(bytes(changed))).equals(batch.schema())
    assert not messages.is_of_bytes(message[: bit % len(message)])


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("headers", [False, True])
def test_the_layout_of_bytes_is_that_of_the_batches_that_arrow_writes(headers, offsets):
    """It is made without Arrow."""
    layout = wire.bytes_layout(headers, offsets)
    nulls = [pa.nulls(1, data_type) for data_type in layout.schema.types]
    message = pa.RecordBatch.from_arrays(nulls, names=layout.names).serialize().to_pybytes()

    assert layout.is_plain(message)
    assert wire.find_message(message) == layout.message
    of_arrow = vars(wire.BufferLayout.of_schema(layout.original))
    for name in vars(layout).keys() & of_arrow.keys() - {"table", "head_layout", "selections"}:
        assert getattr(layout, name) == of_arrow[name], name
    assert wire.layout_of(batch.schema(headers=headers, offsets=offsets)) is layout


def test_a_thread_gets_the_layout_of_its_own_schema(monkeypatch):
    """A10: also while other threads encode; the layout of another schema would be unreadable."""
    plain, wide = (wire.bytes_layout(headers) for headers in (False, True))

    class Overtaken:
        """A layout of the requested schema; another one is put before it during the comparison."""

        typed = False

        def __init__(self):
            self.original = self

        def equals(self, other, metadata):
            wire._recent[:] = [self, plain]
            return True

    overtaken = Overtaken()
    monkeypatch.setattr(wire, "_layouts", {})
    monkeypatch.setattr(wire, "_recent", [overtaken])

    assert wire.layout_of(wide.original) is overtaken
