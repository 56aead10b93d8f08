"""128-bit hashes of keys, for all keys of a chunk at once.

Two different keys must never have the same hash: the older one's last value would be lost.
Kafka relies on MD5 for that; embedlog uses a *multilinear* hash: the sum of the key's 32-bit
words, each multiplied by a secret random 64-bit number, of which the upper half is kept.
It is strongly universal (Lemire and Kaser, "Strongly universal string hashing is fast",
2012): any two different keys, even chosen by an adversary, agree in one such hash with
probability 2⁻³², and in four independent ones with 2⁻¹²⁸.  Ten million keys make 2⁴⁵
pairs.  The numbers are drawn for each pass, so that no one can choose keys that collide,
and hashes are never stored.

Keys longer than a block are hashed in blocks, and then the hashes of the blocks, on as
many levels as necessary; each level adds its own 2⁻¹²⁸.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

# Arrays of numpy; checking their element types costs more than it finds.
UInt64Array = Any
Int64Array = Any
BoolArray = Any
_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])

_BLOCK_BYTES = 64
_BLOCK_WORDS = _BLOCK_BYTES // 8
_LEVELS = 16
"""Enough for keys of 4^16 blocks."""
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# For the last word of a key, by the number of its bytes.
_MASKS = np.array([0, *((1 << 8 * n) - 1 for n in range(1, 9))], np.uint64)


class KeyHasher:
    """Hashes keys with its own secret numbers.

    Args:
        seed: The numbers, for tests that need the same hashes again.
    """

    def __init__(self, seed: bytes | None = None) -> None:
        # Per level four hashes: a constant, one number for the length, two for each word.
        shape = (_LEVELS, 4, 2 + 2 * _BLOCK_WORDS)
        random = os.urandom(8 * int(np.prod(shape))) if seed is None else seed
        self._numbers: UInt64Array = np.resize(np.frombuffer(random, np.uint64), shape)

    def keys(self, keys: Any) -> tuple[UInt64Array, UInt64Array]:
        """Return the two halves of the hash of each key of a binary `pyarrow.Array`.

        The hash of a null is undefined.
        """
        if not len(keys):
            return np.empty(0, np.uint64), np.empty(0, np.uint64)
        offsets = np.frombuffer(keys.buffers()[1], np.int32, len(keys) + 1, 4 * keys.offset)
        first, last = int(offsets[0]), int(offsets[-1])
        # Eight more bytes, so that the last word of the last key can be read as a whole.
        padded = np.zeros(last - first + 8, np.uint8)
        if last > first:
            padded[:-8] = np.frombuffer(keys.buffers()[2], np.uint8, last - first, first)
        lengths = np.diff(offsets).astype(np.int64)
        return self._hash_level(0, padded, offsets[:-1].astype(np.int64) - first, lengths)

    def _hash_level(
        self, level: int, data: Any, starts: Int64Array, lengths: Int64Array
    ) -> tuple[UInt64Array, UInt64Array]:
        longest = int(lengths.max())
        if longest <= _BLOCK_BYTES:
            return self._hash_blocks(level, data, starts, lengths, longest)
        high, low = np.empty((2, len(lengths)), np.uint64)
        long = lengths > _BLOCK_BYTES
        short = ~long
        high[short], low[short] = self._hash_blocks(
            level, data, starts[short], lengths[short], _BLOCK_BYTES
        )
        high[long], low[long] = self._hash_long(level, data, starts[long], lengths[long])
        return high, low

    def _hash_long(
        self, level: int, data: Any, starts: Int64Array, lengths: Int64Array
    ) -> tuple[UInt64Array, UInt64Array]:
        """Hash keys of several blocks by the hashes of their blocks."""
        counts = -(-lengths // _BLOCK_BYTES)
        ends = np.cumsum(counts)
        total = int(ends[-1])
        blocks = np.arange(total) - np.repeat(ends - counts, counts)
        block_starts = np.repeat(starts, counts) + blocks * _BLOCK_BYTES
        rest = np.repeat(lengths, counts) - blocks * _BLOCK_BYTES
        hashes = np.zeros(total + 1, _HASH)
        hashes["high"][:-1], hashes["low"][:-1] = self._hash_blocks(
            level, data, block_starts, np.minimum(rest, _BLOCK_BYTES), _BLOCK_BYTES
        )
        # The hash of the last block covers its length, so no two keys have the same blocks.
        inner = hashes.view(np.uint8).reshape(-1)
        return self._hash_level(
            level + 1, inner, (ends - counts) * _HASH.itemsize, counts * _HASH.itemsize
        )

    def _hash_blocks(
        self, level: int, data: Any, starts: Int64Array, lengths: Int64Array, longest: int
    ) -> tuple[UInt64Array, UInt64Array]:
        """Hash keys of at most one block."""
        numbers = self._numbers[level]
        size = lengths.astype(np.uint64)
        sums = [numbers[i, 0] + numbers[i, 1] * size for i in range(4)]
        product = np.empty_like(size)
        # A word begins at every byte: with this view one gather reads words that overlap.
        overlapping = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))
        equal = len(lengths) > 1 and longest and bool((lengths == longest).all())
        for index in range(-(-longest // 8)):
            left = lengths - 8 * index
            if equal and starts[1] - starts[0] == longest == (starts[-1] - starts[0]) // (
                len(starts) - 1
            ):
                first = int(starts[0]) + 8 * index
                words = np.ndarray((len(starts),), "<u8", data, first, (longest,)).copy()
                if left[0] < 8:
                    words &= _MASKS[left[0]]
            else:
                words = overlapping[np.minimum(starts + 8 * index, len(overlapping) - 1)]
                words &= _MASKS[np.clip(left, 0, 8)]
            upper = words >> _HALF if longest > 8 * index + 4 else None
            words &= _LOW
            for i in range(4):
                np.multiply(words, numbers[i, 2 + 2 * index], out=product)
                sums[i] += product
                if upper is not None:
                    np.multiply(upper, numbers[i, 3 + 2 * index], out=product)
                    sums[i] += product
        high = (sums[0] & ~_LOW) | (sums[1] >> _HALF)
        low = (sums[2] & ~_LOW) | (sums[3] >> _HALF)
        return high, low
