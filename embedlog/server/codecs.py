"""Kafka's codecs, by pyarrow; nothing grows past a limit that it was given."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

from embedlog.batch.wire import MAX_BATCH_BYTES
from embedlog.lazy import pa
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.protocol import read_uvarint

NAMES = ("none", "gzip", "snappy", "lz4", "zstd")
"""By the number in the attributes of a batch."""
_XERIAL = b"\x82SNAPPY\0"
"""Begins the stream of blocks in which Java's clients write snappy."""
_XERIAL_HEAD = 16
_CHUNK_BYTES = 1 << 20


def decompress(codec: str, data: memoryview, limit: int = MAX_BATCH_BYTES) -> bytes:
    """Return decompressed bytes.

    Raises:
        ApiError: The data is damaged, or would be larger than ``limit`` if it is compressed.
    """
    try:
        return _DECOMPRESS[codec](data, limit)
    except (OSError, struct.error, IndexError, ValueError, pa.ArrowException) as error:
        raise ApiError(
            ErrorCode.CORRUPT_MESSAGE, f"The batch is not compressed by {codec}: {error}"
        ) from error


def _too_large(limit: int) -> ApiError:
    return ApiError(
        ErrorCode.MESSAGE_TOO_LARGE, f"The batch would decompress to more than {limit} bytes"
    )


def _stream(codec: str, data: memoryview, limit: int) -> bytes:
    chunks, left = [], limit + 1
    with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), codec) as stream:
        while left > 0 and (chunk := stream.read(min(left, _CHUNK_BYTES))):
            chunks.append(chunk)
            left -= len(chunk)
    if left <= 0:
        raise _too_large(limit)
    return b"".join(chunks)


def _snappy(data: memoryview, limit: int) -> bytes:
    if data[: len(_XERIAL)] != _XERIAL:
        return _snappy_block(data, limit)
    blocks, at, left = [], _XERIAL_HEAD, limit
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        at += 4
        if not 0 <= size <= len(data) - at:
            raise OSError(f"a block of {size} bytes where {len(data) - at} are left")
        block = _snappy_block(data[at : at + size], left)
        blocks.append(block)
        left -= len(block)
        at += size
    return b"".join(blocks)


def _snappy_block(data: memoryview, limit: int) -> bytes:
    size, _ = read_uvarint(data, 0)
    if size > limit:
        raise _too_large(limit)
    result: bytes = pa.Codec("snappy").decompress(pa.py_buffer(data), size, asbytes=True)
    return result


_DECOMPRESS: dict[str, Callable[[memoryview, int], bytes]] = {
    "none": lambda data, _: bytes(data),
    "snappy": _snappy,
    **{name: partial(_stream, name) for name in ("gzip", "lz4", "zstd")},
}
