"""Batches of an attacker: lengths and counts that a parser fears, and right checksums."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

from embedlog.batch.wire import ENTRY, HEADER, I64, SEAL, TRAILER, find_message
from embedlog.checksum import crc32c

FIELDS = (0, 1, 2, 7, 8, 64, 255, 2**15, 2**16, 2**31 - 8, 2**31, 2**32 - 1, 2**32, 2**40)
LARGE = (2**62, 2**63 - 8, 2**63, 2**64 - 8, 2**64 - 1, 5 << 30, 65 << 20, 64 << 20)


def block_of(data: bytes) -> tuple[int, int] | None:
    """Where the block begins and ends, if the prefix and trailer still say so."""
    end = 8 + int.from_bytes(data[4:8], "little", signed=True)
    if not HEADER.size + 16 <= end <= len(data):
        return None
    start = end - TRAILER.unpack_from(data, end - 8)[0]
    return (start, end) if 8 <= start <= end - HEADER.size - 8 else None


def with_right_checksums(data: bytes, columns: int) -> bytes:
    """Changed bytes with the checksums that an attacker would compute for them."""
    bounds = block_of(data)
    if bounds is None:
        return data
    block, end = bounds
    changed = bytearray(data)
    begin = end
    for column in range(columns):
        entry = block + HEADER.size + 16 * column
        if entry + 16 > end:
            break
        stop, _, nulls = ENTRY.unpack_from(changed, entry)
        body = changed[begin : end + stop] if end + stop <= len(data) else b""
        ENTRY.pack_into(changed, entry, stop, crc32c(bytes(body)), nulls)
        begin = min(end + stop, len(data))
    struct.pack_into("<I", changed, block + 8, crc32c(bytes(changed[:block])))
    SEAL.pack_into(changed, block, b"EMBL", crc32c(bytes(changed[block + 8 : end])))
    return bytes(changed)


def with_number(data: bytes, rng: random.Random) -> bytes:
    """Set a length, count, offset or raw size to what a parser fears."""
    changed = bytearray(data)
    bounds = block_of(data) or (8, len(data))
    low, high = rng.choice(((0, bounds[0]), bounds, (bounds[1], len(data))))
    size = rng.choice((2, 4, 8))
    at = low + rng.randrange(max(high - low - size, 1)) // size * size
    old = int.from_bytes(changed[at : at + size], "little")
    near = (old + 1, old - 1, old + 8, old - 8, old * 2, old // 2)
    new = rng.choice((*FIELDS, *LARGE, *near)) % (1 << 8 * size)
    changed[at : at + size] = new.to_bytes(size, "little")
    return bytes(changed[: len(data)])


def with_numbers(data: bytes, rng: random.Random) -> bytes:
    """Set up to three such numbers."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = with_number(data, rng)
    return data


def with_bombs(data: bytes, rng: random.Random) -> bytes:
    """Claim raw sizes of gigabytes at the head of what may be compressed buffers."""
    changed, bounds = bytearray(data), block_of(data)
    if bounds is not None:
        for at in range(bounds[1], len(data) - 8, 8):
            if rng.random() < 0.3:
                I64.pack_into(changed, at, rng.choice((5 << 30, 1 << 62, 65 << 20, 63 << 20, -2)))
    return bytes(changed)


def with_shifted_buffer(data: bytes) -> bytes | None:
    """Move a buffer by one byte into its padding, where Arrow lets none begin; None without any."""
    message, bounds = find_message(data), block_of(data)
    assert bounds is not None
    changed, body = bytearray(data), bounds[1]
    for at in range(message.buffers, message.buffers + 16 * message.buffer_count, 16):
        begin, length = struct.unpack_from("<2q", data, at)
        if length & 7:
            buffer = data[body + begin : body + begin + length]
            changed[body + begin + 1 : body + begin + 1 + length] = buffer
            I64.pack_into(changed, at, begin + 1)
            return bytes(changed)
    return None


def without_null_counts(data: bytes) -> bytes:
    """Say that no column has a null, whatever its bitmap says."""
    message, changed = find_message(data), bytearray(data)
    for node in range(message.node_count):
        I64.pack_into(changed, message.nodes + 16 * node + 8, 0)
    return bytes(changed)


def with_noise(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 4, 16))):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed[: rng.choice((len(data), len(data), rng.randrange(len(data))))])


CHANGES: list[Callable[[bytes, random.Random], bytes]] = [
    with_numbers,
    with_numbers,
    with_bombs,
    with_noise,
]
