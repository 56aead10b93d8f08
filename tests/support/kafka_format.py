"""Kafka's record batch of version 2, byte by byte: what a broker would be sent."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple


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
