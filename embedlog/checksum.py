"""CRC-32C, from the fastest library that computes it correctly, and the rows it seals.

The only module that imports the CRC libraries.  A checksum goes to disk, so a
library is used only if it gets the published check value right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Extend: TypeAlias = Callable[[int, Any], int]
"""``extend(value, data)`` continues the checksum ``value`` over ``data``."""

CHECK_INPUT, CHECK_VALUE = b"123456789", 0xE3069283
"""The check value that every catalog of CRCs lists for CRC-32C (Castagnoli)."""

_COPY_BYTES = 1 << 20
"""Data that a library does not read in place is copied in pieces of this size."""


def _crc32c() -> Extend:
    """Load the package ``crc32c``, if it is installed."""
    import crc32c as library

    compute = library.crc32c
    return lambda value, data: int(compute(data, value))


def _google_crc32c() -> Extend:
    """Load google-crc32c, unless only its slow Python implementation is installed."""
    import google_crc32c

    if google_crc32c.implementation != "c":
        raise ImportError("google_crc32c was built without its C extension")
    extend: Extend = google_crc32c.extend
    return extend


def _crcmod() -> Extend:
    """Load crcmod: the reference, and the fallback where no other library is installed."""
    from crcmod.predefined import mkPredefinedCrcFun

    compute = mkPredefinedCrcFun("crc-32c")
    return lambda value, data: int(compute(data, value))


_LOADERS = {"crc32c": _crc32c, "google_crc32c": _google_crc32c, "crcmod": _crcmod}
"""Fastest first."""


def backends() -> Iterator[tuple[str, Extend]]:
    """Yield name and function of each library that is installed and correct, fastest first."""
    for name, load in _LOADERS.items():
        with suppress(ImportError):
            extend = load()
            if extend(extend(0, CHECK_INPUT[:4]), CHECK_INPUT[4:]) == CHECK_VALUE:
                yield name, extend


def _choose() -> tuple[str, Extend]:
    for backend in backends():
        return backend
    raise ImportError("no library computes CRC-32C correctly: reinstall crcmod or google-crc32c")


BACKEND, extend = _choose()
"""The library in use, and its own function, for bytes and Arrow buffers only.

`crc32c` takes any buffer, but its call in Python takes as long as a kilobyte of data.
"""


def crc32c(data: ReadableBuffer, value: int = 0) -> int:
    """Return the CRC-32C of ``data``, as an unsigned 32-bit number.

    Reads bytes and Arrow buffers in place, and other buffers (bytearray, memoryview,
    mmap) through copies of 1 MiB at a time.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    >>> hex(crc32c(b"456789", crc32c(b"123")))
    '0xe3069283'

    Args:
        data: Any buffer.
        value: The checksum of the data before ``data``; 0 if there is none.

    Raises:
        TypeError: ``data`` is not a buffer.
    """
    try:
        return extend(value, data)
    except (TypeError, BufferError):
        pass  # the library accepts bytes only
    with memoryview(data) as whole:
        if not whole.c_contiguous:
            return extend(value, whole.tobytes())
        view = whole.cast("B")
        for start in range(0, len(view), _COPY_BYTES):
            value = extend(value, bytes(view[start : start + _COPY_BYTES]))
    return value


def seal(value: bytes, key: bytes) -> bytes:
    """Prepend the checksum of key and value to a durable row: LMDB has no checksums.

    The key is covered too, so that damage cannot turn a row into another one.
    """
    return crc32c(value, crc32c(key)).to_bytes(4, "big") + value


def is_sealed(row: bytes, key: bytes) -> bool:
    """Return whether `seal` returned ``row`` for this key."""
    return row[:4] == crc32c(row[4:], crc32c(key)).to_bytes(4, "big")
