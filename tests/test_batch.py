"""Batches return what was encoded, and detect damage."""

from __future__ import annotations

import random
import struct
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlog import batch
from embedlog.batch import wire
from embedlog.batch.encode import lengths_of
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
HEADER = struct.Struct("<4sIIHHIHHIqqqIhhiqqqq")
FIELDS = (
    *("magic", "block_crc", "metadata_crc", "version", "flags", "count", "columns", "_1"),
    *("block_length", "size", "base_offset", "next_offset", "leader_epoch", "producer_epoch"),
    *("_2", "base_sequence", "min_timestamp", "max_timestamp", "producer_id", "delete_horizon"),
)


def written(encoded, base=0, **stamp):
    """The bytes of a batch, as they go to the file."""
    data = b"".join(map(bytes, encoded.stamp(base, 3, **stamp)))
    assert len(data) == encoded.size
    return data


def parsed(data, schema=None, **more):
    buffer = pa.py_buffer(data)
    return batch.parse(
        buffer, 0, buffer.size, path="t.arrows", position=0, schema=schema or batch.schema(), **more
    )


def resealed(data, *, header=None, edit=None, table=None):
    """The batch after a change by someone who can compute CRCs: what a hostile file holds.

    ``edit(head, body)`` changes bytes in place; ``header`` and ``table`` replace facts.
    """
    end = 8 + struct.unpack_from("<i", data, 4)[0]
    start = end - struct.unpack_from("<I", data, end - 8)[0]
    head, body = bytearray(data[:start]), bytearray(data[end:])
    facts = dict(zip(FIELDS, HEADER.unpack_from(data, start), strict=True))
    entries = [list(one) for one in struct.iter_unpack("<QII", data[start + 96 : end - 8])]
    if edit:
        edit(head, body)
    begin = 0
    for entry in entries:
        entry[1] = crc32c(bytes(body[begin : entry[0]]))
        begin = entry[0]
    if table:
        table(entries)
    facts |= {"metadata_crc": crc32c(bytes(head)), **(header or {})}
    block = HEADER.pack(*facts.values())[8:]
    block += b"".join(struct.pack("<QII", *entry) for entry in entries) + data[end - 8 : end]
    return bytes(head) + b"EMBL" + struct.pack("<I", crc32c(block)) + block + bytes(body)


def parts_of(data):
    """The head and the body of a batch, without the block."""
    end = 8 + struct.unpack_from("<i", data, 4)[0]
    return data[: end - struct.unpack_from("<I", data, end - 8)[0]], data[end:]


@pytest.fixture
def small():
    """Three records that have a null key, an empty key, a null value and an empty value."""
    return written(
        batch.encode_lists([b"one", None, b""], [None, b"", b"k"], [NOW, NOW + 2, NOW + 1]), 10
    )


# What goes in comes out


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("many", [1, 50], ids="times={}".format)
def test_null_and_empty_are_four_distinct_things(compression, many):
    """A3: null key, null value, empty key and empty value come back as they were."""
    keys, values = [None, b"", b"k", None] * many, [b"v", None, b"", None] * many

    found = parsed(
        written(batch.encode_lists(values, keys, NOW, None, compression)), batch.schema()
    )

    found.verify()
    assert found.lists() == ([NOW] * len(keys), keys, values, None)


def rows_or_refusal(data):
    """Return what `lists` returns, or that the batch is corrupt."""
    try:
        return parsed(data).lists()
    except CorruptBatchError:
        return "corrupt"


@pytest.mark.parametrize("rows", range(1, 11), ids="rows={}".format)
def test_a_small_batch_is_read_alike_with_and_without_arrow(rows, monkeypatch):
    """`decode_small.lists_fast` returns what Arrow's columns do (A3)."""
    some = random.Random(rows)
    for _ in range(30):
        keys, values = (
            [some.choice([None, b"", b"k", some.randbytes(9)]) for _ in range(rows)]
            for _ in range(2)
        )
        data = written(batch.encode_lists(values, keys, [NOW + row for row in range(rows)]), 10)
        with monkeypatch.context() as patch:
            short = parsed(data).lists()
            patch.setattr("embedlog.batch.decode_small.MAX_ROWS", 0)
            assert short == parsed(data).lists()
        assert short == ([NOW + row for row in range(rows)], keys, values, None)


@pytest.mark.parametrize("part", [0, 1], ids=["head", "body"])
def test_a_damaged_small_batch_is_checked_by_arrow(small, monkeypatch, part):
    """`decode_small.lists_fast` accepts and refuses what Arrow does."""
    some = random.Random(part)
    size = [len(data) for data in parts_of(small)][part]
    for place in range(8 * (1 - part), size):
        for _ in range(3):
            byte = some.choice([0, 1, 7, 0x7F, 0x80, 0xFF, some.randrange(256)])

            def edit(*parts, place=place, byte=byte):
                parts[part][place] = byte

            data = resealed(small, edit=edit)
            with monkeypatch.context() as patch:
                short = rows_or_refusal(data)
                patch.setattr("embedlog.batch.decode_small.MAX_ROWS", 0)
                assert short == rows_or_refusal(data), (place, byte)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_headers_keep_their_order_their_duplicates_and_a_null_value(compression):
    """A3: headers are a list, not a mapping; none and an empty list are the same."""
    headers = [[("b", b"1"), ("a", None), ("b", b"")], None, [], [("", b"x")]]

    encoded = batch.encode_lists([b"v"] * 4, None, NOW, headers, compression)
    found = parsed(written(encoded), batch.schema(headers=True))

    assert (encoded.has_headers, found.has_headers) == (True, True)
    assert found.lists()[3] == [headers[0], [], [], headers[3]]


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


@pytest.mark.parametrize("strange", ["text", 5, ["list"], memoryview(b"1234").cast("i"), b"x".hex])
@pytest.mark.parametrize("others", [[], [None], [b"v"] * 99], ids=["alone", "null", "many"])
def test_what_is_not_bytes_is_refused(strange, others):
    """G2: text is not accepted as bytes, however the batch is built."""
    values = [*others, strange]
    with pytest.raises(SerializationError):
        batch.encode_lists(values, None, NOW)
    with pytest.raises(SerializationError):
        batch.encode_lists([b"v"] * len(values), values, NOW)


@pytest.mark.parametrize("strange", [["x"], [1.5], [None], [1 << 63], [1, 2]])
def test_a_timestamp_is_an_int64_for_each_record(strange):
    """A7: nothing is rounded, parsed or guessed."""
    for count in (1, 3):
        times = strange if len(strange) == count else strange * 2
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
    found = parsed(written(encoded, 7), batch.schema(headers=headers is not None))

    found.verify()
    assert found.lists() == (times, keys, values, headers)
    assert (found.min_timestamp, found.max_timestamp) == (min(times), max(times))
    assert (found.base_offset, found.next_offset) == (7, 7 + len(times))
    assert found.offsets().to_pylist() == list(range(7, 7 + len(times)))


@given(st.lists(RECORD, min_size=1, max_size=70))
def test_lists_and_arrow_columns_encode_to_the_same_bytes(records):
    """`encode_lists` writes the bytes that Arrow writes."""
    times, keys, values = map(list, zip(*records, strict=True))
    by_arrow = pa.RecordBatch.from_arrays(
        [
            pa.array(times, pa.int64()).view(wire.TIMESTAMP),
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
        ],
        schema=batch.schema(),
    )

    by_hand = written(batch.encode_lists(values, keys, times))

    assert by_hand == written(batch.encode(by_arrow))
    assert batch.from_lists(values, keys, times).equals(by_arrow)


@given(st.lists(RECORD, min_size=1, max_size=70), st.booleans())
def test_lengths_that_are_known_already_change_nothing(records, even):
    """Lengths that the caller has measured give the same bytes."""
    times, _, values = map(list, zip(*records, strict=True))
    keys = [b"k" * (1 if even else n % 5) for n in range(len(times))]
    lengths = lengths_of(values), lengths_of(keys)

    assert lengths == (None if None in values else [*map(len, values)], [*map(len, keys)])
    told = batch.encode_lists(values, keys, times, lengths=lengths)
    assert written(told) == written(batch.encode_lists(values, keys, times))
    columns = batch.from_lists(values, keys, times, lengths=lengths)
    assert columns.equals(batch.from_lists(values, keys, times))


@given(RECORD)
def test_one_record_encodes_to_the_bytes_of_a_list_of_one(record):
    """`encode_one` writes the bytes of `encode_lists`, also for None."""
    time, key, value = record

    alone = batch.encode_one(value, key, time)

    assert alone == batch.encode_lists([value], [key], time)
    assert written(alone) == written(batch.encode_lists([value], [key], [time]))


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 34, 4096, 4097])
@pytest.mark.parametrize("even", [True, False])
def test_every_size_takes_its_path_to_the_same_content(count, even):
    """Small and big batches, of even and uneven lengths, differ in speed only."""
    values = [b"x" * (5 if even else i % 300) for i in range(count)]
    keys = [None if i % 3 == 0 else b"%d" % i for i in range(count)]

    found = parsed(written(batch.encode_lists(values, keys, NOW)))

    assert found.lists() == ([NOW] * count, keys, values, None)
    found.verify()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_plain_arrow_reads_the_batches(compression):
    """A segment is an Arrow stream to other programs."""
    data = [written(batch.encode_lists([b"v", None], None, NOW, None, compression)) for _ in "ab"]
    stream = batch.schema(metadata={"a": "b"}).serialize().to_pybytes() + b"".join(data)

    for end in (b"", wire.END_OF_STREAM):
        table = pa.ipc.open_stream(stream + end).read_all()
        assert table["value"].to_pylist() == [b"v", None] * 2


def test_a_slice_of_a_record_batch_is_encoded_alone():
    """Rows of the buffers outside of the slice are neither stored nor counted."""
    whole = batch.from_lists([b"%d" % i for i in range(100)], None, list(range(100)))

    encoded = batch.encode(whole.slice(40, 3))
    found = parsed(written(encoded))

    assert found.lists() == ([40, 41, 42], [None] * 3, [b"40", b"41", b"42"], None)
    assert (encoded.min_timestamp, encoded.max_timestamp, encoded.count) == (40, 42, 3)


TYPED = pa.schema(
    [
        pa.field("_timestamp", wire.TIMESTAMP, nullable=False),
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
    """A batch knows its schema only from the topic; nested types are columns like others."""
    rows = pa.RecordBatch.from_pylist(ROWS, schema=TYPED)
    found = parsed(written(batch.encode(rows, compression)), TYPED)

    found.verify()
    assert found.columns().equals(rows)
    for names in (*([name] for name in TYPED.names), ["pair", "place", "_key"], TYPED.names[::-1]):
        assert found.columns(names).equals(rows.select(names))


def test_a_type_without_a_fixed_place_in_the_message_is_refused():
    """Dictionaries need messages of their own; a batch must stand alone."""
    rows = pa.RecordBatch.from_pylist(
        [{"t": 1, "d": "a"}],
        schema=pa.schema([("t", wire.TIMESTAMP), ("d", pa.dictionary(pa.int8(), pa.string()))]),
    )
    with pytest.raises(InvalidConfigError, match="dictionary"):
        batch.encode(rows)


def test_the_time_column_may_be_another_one_in_another_unit():
    """The range of timestamps is in milliseconds, whatever the unit of the column."""
    fields = [("n", pa.int32()), ("at", pa.timestamp("us", tz="UTC"))]
    schema = pa.schema(fields, metadata={"embedlog.timestamp": "at"})
    rows = pa.RecordBatch.from_pylist([{"n": 1, "at": 5_999}, {"n": 2, "at": None}], schema=schema)

    found = parsed(written(batch.encode(rows)), schema)

    assert (found.min_timestamp, found.max_timestamp) == (5, 5)


# The stamp


def test_the_stamp_sets_offsets_producer_and_epoch():
    """G16: the batch has its producer, epoch and sequence."""
    encoded = batch.encode_lists([b"v"], None, NOW)

    plain = parsed(written(encoded, 5))
    encoded.set_producer(1 << 40, 6, 7)
    sent = parsed(written(encoded, 9))

    assert (plain.producer_id, plain.producer_epoch, plain.base_sequence) == (None, None, None)
    assert (sent.producer_id, sent.producer_epoch, sent.base_sequence) == (1 << 40, 6, 7)
    assert (plain.base_offset, sent.base_offset, sent.leader_epoch) == (5, 9, 3)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_log_append_time_overrides_every_record(compression):
    """A7: the log append time replaces all timestamps, and sets a flag."""
    encoded = batch.encode_lists([b"v"] * 3, None, [1, 2, 3], None, compression)

    found = parsed(written(encoded, append_time=NOW))

    assert found.is_log_append_time
    assert found.lists()[0] == [NOW] * 3
    assert (found.min_timestamp, found.max_timestamp) == (NOW, NOW)
    assert found.columns(["value", "timestamp"]).column(1).cast(pa.int64()).to_pylist() == [NOW] * 3


def test_a_compacted_batch_keeps_its_offsets_and_its_range():
    """D10, D11: offsets do not change, nor does the range of the batch."""
    schema = batch.schema(offsets=True)
    rows = batch.from_lists([b"a", b"b"], None, [1, 2])
    rows = pa.RecordBatch.from_arrays([*rows.columns, pa.array([12, 17])], schema=schema)
    encoded = batch.encode(rows, offsets=True)
    encoded.delete_horizon = 99

    found = parsed(written(encoded, 10, next_offset=20), schema)

    assert (found.base_offset, found.next_offset, found.count) == (10, 20, 2)
    assert (found.has_offsets, found.delete_horizon) == (True, 99)
    assert found.offsets().to_pylist() == [12, 17]
    assert found.columns().schema.names == ["timestamp", "key", "value"]
    found.verify()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_batch_may_be_kept_empty(compression):
    """D11: the last batch stays without records, so that the log end is known."""
    schema = batch.schema(offsets=True)
    nothing = pa.RecordBatch.from_pylist([], schema=schema)
    encoded = batch.encode(nothing, compression, offsets=True, timestamps=(5, 8))

    found = parsed(written(encoded, 10, next_offset=20), schema)

    found.verify()
    assert (found.count, found.base_offset, found.next_offset) == (0, 10, 20)
    assert (found.min_timestamp, found.max_timestamp) == (5, 8)
    assert found.lists() == ([], [], [], None)
    assert found.columns(["value"]).num_rows == 0


def test_columns_are_chosen_by_name(small):
    """Some of the stored columns; a name that is not one of them is refused."""
    found = parsed(small)

    assert found.columns().schema.names == ["timestamp", "key", "value"]
    assert found.columns(["key"]).to_pylist() == [{"key": None}, {"key": b""}, {"key": b"k"}]
    with pytest.raises(ValueError, match="nope"):
        found.columns(["nope"])


# Damage


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_flipped_bit_is_detected(compression):
    """P12: every byte of a batch is covered by a check."""
    headers = [[("h", b"x")], None]
    encoded = batch.encode_lists([b"one", None], [None, b"k"], NOW, headers, compression)
    data, schema = written(encoded, 10), batch.schema(headers=True)
    for place in range(len(data)):
        for flip in (0x01, 0x10, 0x80, 0x55, 0xFF):
            bad = bytearray(data)
            bad[place] ^= flip
            with pytest.raises(CorruptBatchError):
                parsed(bytes(bad), schema).verify()


def test_damage_is_detected_only_in_columns_that_are_read(small):
    """P12: reading keys does not check values, reading values does."""
    bad = bytearray(small)
    bad[bad.index(b"one")] ^= 1

    found = parsed(bytes(bad))

    assert found.columns(["key", "timestamp"]).column(0).to_pylist() == [None, b"", b"k"]
    assert found.columns(["value"], verify=False).num_rows == 3
    for read in (found.verify, found.lists, found.columns, lambda: found.columns(["value"])):
        with pytest.raises(CorruptBatchError, match="column value"):
            read()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_only_the_wanted_columns_are_decompressed(compression):
    """P12: damage in a compressed column does not affect reading another."""
    noise = random.Random(5).randbytes(5000)
    data = written(batch.encode_lists([noise] * 3, [b"k"] * 3, NOW, None, compression))

    found = parsed(data[:-300] + bytes(300))

    assert found.columns(["key"]).column(0).to_pylist() == [b"k"] * 3
    with pytest.raises(CorruptBatchError):
        found.columns(["value"])


def test_a_batch_that_is_cut_off_anywhere_is_truncated(small):
    """A5: an incomplete last batch is distinguished from a damaged one."""
    for end in range(len(small)):
        for data, limit in ((small[:end], end), (small, end)):
            with pytest.raises(CorruptBatchError) as caught:
                batch.parse(
                    pa.py_buffer(data), 0, limit, path="f", position=8, schema=batch.schema()
                )
            assert (caught.value.reason, caught.value.position) == ("truncated", 8)


@pytest.mark.parametrize("data", [bytes(600), b"\xff" * 600, random.Random(1).randbytes(600)])
def test_bytes_that_never_were_a_batch_are_refused(data):
    """P12: a zeroed page, an erased one, and noise."""
    with pytest.raises(CorruptBatchError, match="no batch begins here"):
        parsed(data)


def test_an_error_says_where_and_why(small):
    """P12: the path and the position in the file, not in the buffer."""
    bad = bytearray(bytes(16) + small)
    bad[-1] ^= 1
    found = batch.parse(
        pa.py_buffer(bad), 16, len(bad), path="a.arrows", position=5000, schema=batch.schema()
    )

    assert found.position == 5000
    with pytest.raises(CorruptBatchError) as caught:
        found.columns()
    assert (caught.value.path, caught.value.position) == ("a.arrows", 5000)
    assert "value" in caught.value.reason


# Walking


def source(data, shift=0):
    return batch.BatchSource(pa.py_buffer(data), "p", shift, batch.schema())


def test_a_source_returns_batches_up_to_the_end_of_the_stream(small):
    """A sealed segment ends with Arrow's end marker, an active one without."""
    data = small * 3
    for end, stop in (
        (wire.END_OF_STREAM, len(data) + 8),
        (b"", len(data)),
        (b"rest", len(data)),
    ):
        found = source(b"schema!!" + data + end, 100).batches(8, 8 + stop, 1 << 20)
        assert [one.position - 108 for one in found] == [0, len(small), 2 * len(small)]


def test_a_source_returns_about_max_bytes(small):
    """The batch that reaches the size is the last one; at least one is returned (A18)."""
    whole = source(small * 4)
    size = len(small)

    counts = [len(whole.batches(0, 4 * size, most)) for most in (0, 1, size, size + 1, 9 * size)]
    assert counts == [1, 1, 1, 2, 4]


def test_a_source_returns_the_good_batches_before_the_bad_one(small):
    """A5, E10: the whole batches before the damage are usable."""
    cut = source(small + small[:-8])

    assert [one.count for one in cut.batches(0, 1 << 20, 1 << 20)] == [3]
    with pytest.raises(CorruptBatchError, match="truncated"):
        cut.batches(len(small), 1 << 20, 1 << 20)


def test_a_head_is_checked_however_often_its_equal_was_read(small):
    """P12: the cached head of one batch does not hide damage in the next."""
    head = batch.decode.head_length(small[:8], path="p", position=0)
    for place in range(head):
        bad = bytearray(small * 2)
        bad[len(small) + place] ^= 1
        both = source(bad)
        assert [one.position for one in both.batches(0, len(bad), 1 << 20)] == [0]
        with pytest.raises(CorruptBatchError):
            both.batches(len(small), len(bad), 1 << 20)


def test_batches_with_heads_of_many_lengths_lie_side_by_side():
    """Batches of different compression and size are read in one stream."""
    kinds = [("none", 1), ("lz4", 9), ("none", 2), ("zstd", 9), ("zstd", 1), ("none", 900)] * 2
    made = [
        bytes(b"".join(map(bytes, encoded_batch(count, kind).stamp(0, 0)))) for kind, count in kinds
    ]
    found = source(b"".join(made)).batches(0, 1 << 30, 1 << 30)

    assert [one.count for one in found] == [count for _, count in kinds]
    for one, (_, count) in zip(found, kinds, strict=True):
        assert one.columns(["value"]).column(0).to_pylist() == [b"v" * 100] * count
        assert one.columns(["timestamp", "key"]).column(1).to_pylist() == [None] * count
        assert one.lists()[0] == [7] * count


def encoded_batch(count, compression):
    return batch.encode_lists([b"v" * 100] * count, None, 7, None, compression)


def test_head_and_message_length_are_checked(small):
    """P22: a length is used only if its CRC is correct and it is within the limits."""
    where = {"path": "p", "position": 0}
    head = batch.decode.head_length(small[:8], **where)

    assert batch.message_length(small[:head], **where) == len(small)
    assert batch.decode.head_length(wire.END_OF_STREAM, **where) is None
    for bad in (small[:7], bytes(8), b"\xff\xff\xff\xff\xf8\xff\xff\x7f"):
        with pytest.raises(CorruptBatchError):
            batch.decode.head_length(bad, **where)
    flipped = bytearray(small[:head])
    flipped[head - 100] ^= 1
    for bad in (bytes(flipped), small[: head - 1]):
        with pytest.raises(CorruptBatchError):
            batch.message_length(bad, **where)


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
    for place in (0, 4, 8, 12):
        for value in (-1, 1 << 30, 0x7FFFFFFF):

            def edit(_, body, place=place, value=value):
                struct.pack_into("<i", body, body.index(b"one") - 16 + place, value)

            with pytest.raises(CorruptBatchError):
                parsed(resealed(small, edit=edit)).verify()
            with pytest.raises(CorruptBatchError):
                parsed(resealed(small, edit=edit)).lists()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("claim", [1 << 62, 65 << 20, -2, -(1 << 63), 5])
def test_a_claim_to_decompress_to_much_is_refused_before_it_is_tried(compression, claim):
    """P22: no more than the limit is allocated, whatever length a buffer has."""
    data = written(batch.encode_lists([b"x" * 999], [b"k"], NOW, None, compression))

    def edit(_, body):
        # The raw length before the last buffer, the data of the values.
        struct.pack_into("<q", body, body.rindex(struct.pack("<q", 999)), claim)

    before = pa.total_allocated_bytes()
    found = parsed(resealed(data, edit=edit))
    with pytest.raises(CorruptBatchError):
        found.columns()
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_no_change_by_someone_who_knows_the_crc_crashes_a_reader(compression):
    """P22: the result is a typed error, or other records; never anything else."""
    chance = random.Random(20)
    values, keys = [b"one", None, b"xyz" * 30], [None, b"", b"k"]
    rows = batch.from_lists(values, keys, NOW, [[("h", b"x")], None, []])
    encoded = batch.encode(rows, compression)
    data, schema = written(encoded), batch.schema(headers=True)
    refused = 0
    for _ in range(3000):

        def edit(head, body):
            for _ in range(chance.choice((1, 1, 2, 4))):
                where = chance.choice((head, head, body))
                place = chance.randrange(8 if where is head else 0, len(where))
                where[place] = chance.choice((0, 1, 4, 8, 0x7F, 0x80, 0xFF, chance.randrange(256)))

        try:
            found = parsed(resealed(data, edit=edit), schema)
            found.columns(["key"])
            found.verify()
            found.lists()
        except CorruptBatchError:
            refused += 1
    assert refused > 500


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
        [pa.array(np.zeros(9 << 20, np.int64)).view(wire.TIMESTAMP)], names=["t"]
    )
    for compression in COMPRESSIONS:
        with pytest.raises(RecordTooLargeError):
            batch.encode(rows, compression)


def test_an_unknown_compression_is_refused():
    """Only codecs that every Arrow reader has are accepted."""
    with pytest.raises(InvalidConfigError, match="gzip"):
        batch.encode_lists([b"v"], None, NOW, None, "gzip")


def test_a_thread_gets_the_layout_of_its_own_schema(monkeypatch):
    """A10: also while other threads encode; with the layout of another schema it is unreadable."""
    plain, wide = (wire.BufferLayout(batch.schema(headers=headers)) for headers in (False, True))

    class Overtaken:
        """A layout of the schema that is asked for; while it is compared, another comes in."""

        def __init__(self):
            self.original = self

        def equals(self, given, metadata):
            wire._recent[:] = [self, plain]
            return True

    mine = Overtaken()
    monkeypatch.setattr(wire, "_layouts", {})
    monkeypatch.setattr(wire, "_recent", [mine])

    assert wire.layout_of(wide.original) is mine
