"""Record batches of the wire: to the columns of a log and back, and bytes that are none."""

from __future__ import annotations

import random
import struct
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.random_messages import random_records
from support.tiers import choose

from embedlog.batch import encode_lists, parse, schema
from embedlog.batch.wire import headers_type
from embedlog.checksum import crc32c
from embedlog.errors import EmbedlogError
from embedlog.kafka.kafka_python import kafka
from embedlog.server import record_batches
from embedlog.server.codecs import decompress
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.record_batches import HEAD, WireRows, read_batch, write_batches, write_rows

BASE, EPOCH = 100, 3


def stored(records: list[Any], base: int = BASE) -> Any:
    """Return records as a batch of a log."""
    keys, values, times, headers = map(list, zip(*records, strict=True))
    encoded = encode_lists(values, keys, times, headers if any(headers) else None)
    message = pa.py_buffer(b"".join(encoded.stamp(base, EPOCH)))
    columns = schema(headers=encoded.has_headers)
    return parse(message, 0, message.size, path="", position=0, schema=columns)


def read_by_kafka_python(data: bytes) -> list[Any]:
    """Return the offsets and the records of batches, as kafka-python reads them."""
    records, found = kafka.record.MemoryRecords(data), []
    while records.has_next():
        found += [
            (each.offset, (each.key, each.value, each.timestamp, each.headers))
            for each in records.next_batch()
        ]
    return found


def compressed(data: bytes, codec: int, compress: Any) -> bytes:
    """Return a batch whose records are compressed."""
    head = bytearray(data[: HEAD.size])
    body = compress(data[HEAD.size :])
    struct.pack_into(">i", head, 8, HEAD.size - 12 + len(body))
    struct.pack_into(">h", head, 21, codec)
    struct.pack_into(">I", head, 17, crc32c(bytes(head[21:]) + body))
    return bytes(head) + body


def xerial(data: bytes) -> bytes:
    """Compress as Java's snappy streams do."""
    blocks = [data[at : at + 1000] for at in range(0, len(data), 1000)]
    packed = [pa.Codec("snappy").compress(block, asbytes=True) for block in blocks]
    head = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    return head + b"".join(struct.pack(">i", len(each)) + each for each in packed)


def gzip(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


def by_arrow(codec: str) -> Any:
    def compress(data: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, codec) as stream:
            stream.write(data)
        return sink.getvalue().to_pybytes()

    return compress


CODECS = {
    "gzip": (1, gzip),
    "members": (1, lambda data: gzip(data[:9]) + gzip(data[9:])),
    "snappy": (2, lambda data: pa.Codec("snappy").compress(data, asbytes=True)),
    "xerial": (2, xerial),
    "lz4": (3, by_arrow("lz4")),
    "zstd": (4, by_arrow("zstd")),
}


@pytest.mark.parametrize("count", [1, 2, 24, 25, 300])
def test_records_are_the_same_on_the_wire_and_back(count):
    """Null keys and values, headers, times that go back, and lengths of all sizes."""
    dice = random.Random(count)
    for _ in range(choose(test=2, all=60)):
        records = random_records(count, dice)
        batch = stored(records)
        (wire,) = map(b"".join, write_batches([batch]))
        expected = list(zip(range(BASE, BASE + count), records, strict=True))
        assert read_by_kafka_python(wire) == expected
        read = read_batch(memoryview(wire))
        again = parse_encoded(read.encoded("none"))
        assert again == records
        columns = read._read(record_batches._read_columns)
        assert columns.column("value").to_pylist() == [record[1] for record in records]


def parse_encoded(encoded: Any) -> list[Any]:
    """Return the records of an encoded batch."""
    message = pa.py_buffer(b"".join(encoded.stamp(0, 0)))
    columns = schema(headers=encoded.has_headers)
    batch = parse(message, 0, message.size, path="", position=0, schema=columns)
    times, keys, values, headers = batch.lists()
    return list(zip(keys, values, times, headers or [[]] * len(keys), strict=True))


def test_small_batches_are_merged():
    """The offsets stay, with and without headers, and up to another leader epoch."""
    dice = random.Random(5)
    parts = [random_records(count, dice) for count in (3, 40, 1, 200)]
    batches, base = [], BASE
    for part in parts:
        batches.append(stored(part, base))
        base += len(part)
    written = list(map(b"".join, write_batches(batches)))
    assert len(written) == 1
    expected = [record for part in parts for record in part]
    assert read_by_kafka_python(written[0]) == list(zip(range(BASE, base), expected, strict=True))


def test_batches_that_one_cannot_hold_are_not_merged():
    """Those of another leader epoch, and those whose offsets are too far apart."""
    records = [(b"k", b"v", 5, [])]
    far = BASE + (1 << 31)
    for batches in ([stored(records), stored(records, far)], [stored(records), of_epoch(4)]):
        written = list(map(b"".join, write_batches(batches)))
        found = [offset for wire in written for offset, _ in read_by_kafka_python(wire)]
        assert found == [batch.base_offset for batch in batches]
        assert len(written) == 2


def of_epoch(epoch: int) -> Any:
    encoded = encode_lists([b"v"], [b"k"], [5])
    message = pa.py_buffer(b"".join(encoded.stamp(BASE + 1, epoch)))
    return parse(message, 0, message.size, path="", position=0, schema=schema())


def test_a_timestamp_must_fit_in_64_bits():
    (wire,) = map(
        b"".join, write_batches([stored([(b"k", b"v", 5 + number, []) for number in range(30)])])
    )
    head = bytearray(wire[: HEAD.size])
    struct.pack_into(">q", head, 27, (1 << 63) - 3)
    with pytest.raises(ApiError):
        read_batch(memoryview(compressed(bytes(head) + wire[HEAD.size :], 0, bytes))).columns()


@pytest.mark.parametrize("headers", [[], None, [("a", b"x"), ("b", None)]], ids=repr)
@pytest.mark.parametrize("value", [None, b"", b"vv"], ids=repr)
@pytest.mark.parametrize("key", [None, b"k"], ids=repr)
def test_parts_of_columns_are_written(key, value, headers):
    """Also of one row, and where all items of a column are missing."""
    given = [[("q", b"1")], *[headers] * 3]
    arrays = {
        "timestamp": pa.array(range(4), pa.int64()),
        "key": pa.array([key] * 4, pa.binary()),
        "value": pa.array([value] * 4, pa.binary()),
        "headers": pa.array(given, headers_type()),
    }
    rows = WireRows(pa.RecordBatch.from_pydict(arrays), np.arange(4) + 5, 9, (0, False))
    for part in (slice(0, 4), slice(0, 1), slice(1, 4), slice(3, 4)):
        read = read_batch(memoryview(b"".join(write_rows(rows.part(part)))))
        values, keys, _, found = read.lists()
        count = part.stop - part.start
        assert (values, keys) == ([value] * count, [key] * count)
        assert (found or [[]] * count) == [each or [] for each in given[part]]


@pytest.mark.parametrize("codec", CODECS)
def test_each_codec_is_read(codec):
    dice = random.Random(6)
    number, compress = CODECS[codec]
    for count in (2, 500):
        records = random_records(count, dice)
        (wire,) = map(b"".join, write_batches([stored(records)]))
        read = read_batch(memoryview(compressed(wire, number, compress)))
        assert parse_encoded(read.encoded("none")) == records


@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_is_refused_before_it_grows(codec):
    """At the limit of a batch, whatever its compressed size is."""
    number, compress = CODECS[codec]
    name = ("none", "gzip", "snappy", "lz4", "zstd")[number]
    bomb = compress(bytes(1 << 20))
    assert len(decompress(name, memoryview(bomb), 1 << 20)) == 1 << 20
    with pytest.raises(ApiError) as refused:
        decompress(name, memoryview(bomb), (1 << 20) - 1)
    assert refused.value.code == ErrorCode.MESSAGE_TOO_LARGE
    for bad in (b"", bomb[:-7], b"\xff" * 40, bomb[:9] + b"\xff\xff\xff\xff" + bomb[13:]):
        with suppress(ApiError):
            decompress(name, memoryview(bad), 1 << 20)


def batch_of(**changes: Any) -> bytes:
    """Return a batch of one record with other fields, and a CRC that fits."""
    names = "base length epoch magic crc attributes last first_time max_time pid pepoch seq count"
    (wire,) = map(b"".join, write_batches([stored([(b"k", b"v", 5, [])])]))
    fields = dict(zip(names.split(), HEAD.unpack_from(wire), strict=True)) | changes
    data = bytearray(HEAD.pack(*fields.values()) + wire[HEAD.size :])
    if "crc" not in changes:
        struct.pack_into(">I", data, 17, crc32c(bytes(data[21:])))
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (None, ErrorCode.INVALID_RECORD),
        (b"", ErrorCode.INVALID_RECORD),
        (b"abc", ErrorCode.INVALID_RECORD),
        (batch_of(magic=1), ErrorCode.INVALID_RECORD),
        (batch_of(magic=3), ErrorCode.CORRUPT_MESSAGE),
        (batch_of(pid=5, pepoch=0, seq=-1), ErrorCode.INVALID_RECORD),
        (batch_of(crc=1), ErrorCode.CORRUPT_MESSAGE),
        (batch_of(length=1 << 30), ErrorCode.INVALID_RECORD),
        (batch_of(length=-1), ErrorCode.CORRUPT_MESSAGE),
        (batch_of() * 2, ErrorCode.INVALID_RECORD),
        (batch_of(attributes=5), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        (batch_of(attributes=8), ErrorCode.INVALID_TIMESTAMP),
        (batch_of(attributes=32), ErrorCode.INVALID_RECORD),
        (batch_of(count=0), ErrorCode.INVALID_RECORD),
        (batch_of(count=-1, last=-2), ErrorCode.INVALID_RECORD),
        (batch_of(count=1 << 30, last=(1 << 30) - 1), ErrorCode.INVALID_RECORD),
        (batch_of(count=2, last=1), ErrorCode.INVALID_RECORD),
        (batch_of(last=5), ErrorCode.INVALID_RECORD),
    ],
)
def test_what_no_producer_may_send_is_refused(data, code):
    with pytest.raises(ApiError) as refused:
        read_batch(None if data is None else memoryview(data)).encoded("none")
    assert refused.value.code == code


@pytest.mark.parametrize("count", [3, 200])
def test_damaged_records_are_refused(count):
    """The CRC fits, so whoever made them is wrong; each byte that changes is refused, or read."""
    dice = random.Random(count)
    (wire,) = map(b"".join, write_batches([stored(random_records(count, dice))]))
    for _ in range(choose(test=30, all=20_000)):
        body = bytearray(wire[HEAD.size :])
        for _ in range(dice.randrange(1, 4)):
            body[dice.randrange(len(body))] = dice.choice((0, 1, 127, 128, 255))
        bad = compressed(wire[: HEAD.size] + bytes(body), 0, bytes)
        with suppress(ApiError, EmbedlogError):
            encoded = read_batch(memoryview(bad)).encoded("none")
            assert encoded.count == count
