"""`max.message.bytes` and `max_request_size` mean what they mean in Kafka, to the byte."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.producer_calls import buffered_bytes, totals
from support.roots import encoded, segment_files, values
from support.tiers import sample

from embedlog import batch
from embedlog.config import TopicConfig
from embedlog.errors import RecordBatchTooLargeError, RecordTooLargeError
from embedlog.producer import Producer


class Record(NamedTuple):
    """A record to be sent; times in ms."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    timestamp: int = 1_700_000_000_000


def record_batch(records: Sequence[Record]) -> bytes:
    """Return the batch without compression, of a producer that is not idempotent."""
    first = records[0].timestamp
    times = [record.timestamp for record in records]
    body = b"".join(_record(record, row, first) for row, record in enumerate(records))
    after_crc = struct.pack(
        ">hiqqqhii", 0, len(records) - 1, first, max(times), -1, -1, -1, len(records)
    )
    # Partition leader epoch, magic 2, and a checksum that is not computed.
    after_length = struct.pack(">ibI", -1, 2, 0) + after_crc + body
    return struct.pack(">qi", 0, len(after_length)) + after_length


def _record(record: Record, row: int, first: int) -> bytes:
    body = b"\0" + _varint(record.timestamp - first) + _varint(row)
    body += _field(record.key) + _field(record.value) + _varint(len(record.headers))
    for name, data in record.headers:
        body += _field(name.encode()) + _field(data)
    return _varint(len(body)) + body


def _field(data: bytes | None) -> bytes:
    return _varint(-1) if data is None else _varint(len(data)) + data


def _varint(number: int) -> bytes:
    rest, out = (number << 1) ^ (number >> 63), bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest])


BIG = 1 << 30
TIME = 1_700_000_000_000
HEADERS = [("h", b"1"), ("h", None), ("a longer name " * 5, bytes(100))]


def make(root, name, **config):
    names = {name.replace("_", "."): number for name, number in config.items()}
    root.create_topic(name, 1, TopicConfig.parse(names))


data = st.none() | st.binary(max_size=200) | st.sampled_from([8191, 8192, 20_000]).map(bytes)
times = st.integers(0, 3) | st.integers(-(1 << 63), (1 << 63) - 1)
header = st.tuples(st.text(max_size=80), data)
record = st.builds(Record, data, data, st.lists(header, max_size=3), times)


@given(st.lists(record, min_size=1, max_size=80), st.booleans())
def test_a_batch_counts_what_kafkas_bytes_of_it_are(records, with_headers):
    """The sizes of random records are equal, and `is_over` agrees to the byte."""
    if not with_headers:
        records = [record._replace(headers=()) for record in records]
    header_lists = [list(record.headers) for record in records] if with_headers else None
    encoded_batch = batch.encode_lists(
        [record.value for record in records],
        [record.key for record in records],
        [record.timestamp for record in records],
        header_lists,
    )
    size = len(record_batch(records))
    assert batch.kafka_size(encoded_batch) == size
    assert not batch.is_over(encoded_batch, size)
    assert batch.is_over(encoded_batch, size - 1)


CASES = [
    Record(b"", b""),
    Record(None, b"k"),
    Record(b"v" * 63),
    Record(b"v" * 64),
    Record(b"v" * 100, b"key-000001"),
    Record(b"v" * 1000, b"k" * 64, HEADERS),
    Record(b"v" * 8191),
    Record(b"v" * 8192, b"k" * 8192),
    Record(b"v" * 1_000_000, None, HEADERS),
    Record(b"v" * ((1 << 20) - 100)),
]


@pytest.mark.parametrize("record", CASES, ids=lambda record: f"{len(record.value or b'')}")
@pytest.mark.parametrize("method", ["send", "send_batch", "append_table"])
def test_a_topic_takes_the_largest_record_that_kafkas_takes_and_none_larger(root, record, method):
    """A4: the limit is the same to the byte, for each method of the producer."""
    size = len(record_batch([record]))
    make(root, "fits", max_message_bytes=size)
    make(root, "small", max_message_bytes=size - 1)

    def send(producer, topic):
        if method == "send":
            return producer.send(topic, record.value, record.key, list(record.headers))
        if method == "send_batch":
            return producer.send_batch(topic, [record.value], [record.key], [record.headers])
        header_lists = [list(record.headers)] if record.headers else None
        columns = batch.from_lists([record.value], [record.key], TIME, header_lists)
        return producer.append_table(topic, columns)

    with Producer(root, max_request_size=BIG) as producer:
        send(producer, "fits").result()
        with pytest.raises(RecordTooLargeError, match="as Kafka counts them"):
            send(producer, "small").result()
    assert values(root.partition("fits", 0)) == [record.value]
    assert values(root.partition("small", 0)) == []


@pytest.mark.parametrize("record", CASES, ids=lambda record: f"{len(record.value or b'')}")
def test_a_request_may_be_as_large_as_kafkas_producer_estimates_it(root, record):
    """G7: 61 bytes for the batch, 21 for the record, and key, value and headers with lengths."""
    batch_size = len(record_batch([record._replace(timestamp=0)]))
    # The estimate has 21 bytes for attributes, two deltas (3 bytes) and a length.
    estimate = batch.limits.request_size(record.value, record.key, record.headers) - 82
    assert batch_size - 64 - 5 <= estimate < batch_size - 64
    make(root, "t", max_message_bytes=BIG)
    for limit, fits in ((82 + estimate, True), (82 + estimate - 1, False)):
        with Producer(root, max_request_size=limit) as producer:
            future = producer.send("t", record.value, record.key, list(record.headers))
            producer.flush()
            assert future.succeeded() == fits
            assert fits or isinstance(future.exception, RecordTooLargeError)
            assert buffered_bytes(producer) == 0


@pytest.mark.parametrize(
    ("method", "spread"),
    sample([*product(["send", "send_batch", "append_table"], [0, 1 << 40])], 3),
)
def test_a_large_load_is_split_into_batches_that_kafka_would_take(root, method, spread):
    """G13: each record fits by itself, so all are written, and no batch is over the limit."""
    times = [TIME + (n * 7919 * spread) % (spread + 1) for n in range(3000)]
    payloads = [b"%04d" % n + bytes(n % 50) for n in range(3000)]
    limit = len(record_batch([Record(payloads[-1], None, (), TIME)])) + 400
    make(root, "t", max_message_bytes=limit)
    sizes = []
    append = root.partition("t", 0).append

    def append_and_note(encoded, **named):
        sizes.extend(batch.kafka_size(encoded_batch) for encoded_batch in encoded)
        return append(encoded, **named)

    root.partition("t", 0).append = append_and_note
    with Producer(root) as producer:
        if method == "send":
            for value, time in zip(payloads, times, strict=True):
                producer.send("t", value, timestamp_ms=time)
            producer.flush()
        elif method == "send_batch":
            producer.send_batch("t", payloads, timestamps=times).result()
        else:
            columns = [pa.array(payloads, pa.binary()), pa.array(times, pa.int64())]
            producer.append_table("t", pa.table(columns, names=["value", "timestamp"])).result()
        assert totals(producer)["record-error-total"] == 0
    assert values(root.partition("t", 0)) == payloads
    assert max(sizes) <= limit and len(sizes) < 1000


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_what_is_compressed_counts_compressed(root, compression):
    """A4: a record that compression makes larger counts with its uncompressed size."""
    zeros, noise = bytes(500_000), os.urandom(5000)
    make(root, "t", max_message_bytes=10_000)
    limit = len(record_batch([Record(noise)]))
    make(root, "noise", max_message_bytes=limit)
    with Producer(root, compression_type=compression, max_request_size=BIG) as producer:
        producer.send("t", zeros).result()
        producer.send("noise", noise).result()
        with pytest.raises(RecordTooLargeError):
            producer.send("t", os.urandom(20_000)).result()
    assert values(root.partition("t", 0)) == [zeros]
    encoded_batch = encoded(zeros, compression=compression)
    assert batch.kafka_size(encoded_batch) < encoded_batch.size < 10_000


@pytest.mark.parametrize("excess", [0, 1])
def test_a_segment_bounds_what_a_batch_takes_on_the_disk(root, excess):
    """A4, A13: segment.bytes limits the bytes on the disk, not those that Kafka would count."""
    size = encoded(bytes(10_000)).size
    make(root, "t", segment_bytes=size - excess, max_message_bytes=BIG)
    with Producer(root) as producer:
        future = producer.send("t", bytes(10_000))
        producer.flush()
        if excess:
            assert type(future.exception) is RecordBatchTooLargeError
        else:
            producer.send("t", bytes(10_000)).result()
            files = segment_files(root.path)
            # Each file has one batch after its schema.
            assert [file.stat().st_size - size < 512 for file in files] == [True, True]
