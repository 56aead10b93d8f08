"""128-bit hashes of keys, all keys of a chunk at once.

Two different keys must never be taken for one, for the older one's last value
would be lost.  Kafka trusts MD5 with that; here it is a *multilinear* hash: the
sum of the key's 32-bit words, each times a secret random 64-bit number, of
which the upper half is kept.  It is strongly universal (Lemire and Kaser,
"Strongly universal string hashing is fast", 2012): any two different keys,
whoever chose them, agree in one such hash with a chance of 2⁻³², and in four
independent ones with 2⁻¹²⁸.  Ten million keys make 2⁴⁵ pairs.  The numbers are
drawn anew for each pass, so that nobody can choose keys that collide, and
hashes are never stored.

Keys longer than a block are hashed in blocks first, and the blocks' hashes
after them, as often as it takes: each level adds its own 2⁻¹²⁸.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

Words = Any  # arrays of numpy, which says less about them than it knows
HASH = np.dtype([("high", "<u8"), ("low", "<u8")])

_BLOCK_BYTES = 64
_BLOCK_WORDS = _BLOCK_BYTES // 8
_LEVELS = 16
"""Enough for keys of 4^16 blocks."""
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# Of a last word only the key's own bytes count.
_MASKS = np.array([0, *((1 << 8 * n) - 1 for n in range(1, 9))], np.uint64)


class KeyHasher:
    """Hashes keys with secret numbers of its own.

    Args:
        seed: The numbers, for tests that want the same hashes again.
    """

    def __init__(self, seed: bytes | None = None) -> None:
        # Per level four hashes: a constant, one number for the length, two for each word.
        shape = (_LEVELS, 4, 2 + 2 * _BLOCK_WORDS)
        drawn = os.urandom(8 * int(np.prod(shape))) if seed is None else seed
        self._numbers: Words = np.resize(np.frombuffer(drawn, np.uint64), shape)

    def keys(self, keys: Any) -> tuple[Words, Words]:
        """Return the two halves of each hash of a binary `pyarrow.Array`; of a null anything."""
        if not len(keys):
            return np.empty(0, np.uint64), np.empty(0, np.uint64)
        offsets = np.frombuffer(keys.buffers()[1], np.int32, len(keys) + 1, 4 * keys.offset)
        first, last = int(offsets[0]), int(offsets[-1])
        # Eight more bytes, so that the last word of the last key can be read whole.
        padded = np.zeros(last - first + 8, np.uint8)
        if last > first:
            padded[:-8] = np.frombuffer(keys.buffers()[2], np.uint8, last - first, first)
        lengths = np.diff(offsets).astype(np.int64)
        return self._level(0, padded, offsets[:-1].astype(np.int64) - first, lengths)

    def _level(self, level: int, data: Words, starts: Words, lengths: Words) -> tuple[Words, Words]:
        if len(lengths) == 0:
            return np.empty(0, np.uint64), np.empty(0, np.uint64)
        longest = int(lengths.max())
        if longest <= _BLOCK_BYTES:
            return self._blocks(level, data, starts, lengths, longest)
        high, low = np.empty(len(lengths), np.uint64), np.empty(len(lengths), np.uint64)
        long = lengths > _BLOCK_BYTES
        short = ~long
        high[short], low[short] = self._blocks(
            level, data, starts[short], lengths[short], _BLOCK_BYTES
        )
        high[long], low[long] = self._long(level, data, starts[long], lengths[long])
        return high, low

    def _long(self, level: int, data: Words, starts: Words, lengths: Words) -> tuple[Words, Words]:
        """Hash keys by the hashes of their blocks, and their length."""
        counts = -(-lengths // _BLOCK_BYTES)
        ends = np.cumsum(counts)
        total = int(ends[-1])
        places = np.arange(total) - np.repeat(ends - counts, counts)
        block_starts = np.repeat(starts, counts) + places * _BLOCK_BYTES
        rest = np.repeat(lengths, counts) - places * _BLOCK_BYTES
        hashed = np.zeros(total + 1, HASH)
        hashed["high"][:-1], hashed["low"][:-1] = self._blocks(
            level, data, block_starts, np.minimum(rest, _BLOCK_BYTES), _BLOCK_BYTES
        )
        # The last block's hash knows its length, so no two keys have the same blocks.
        inner = hashed.view(np.uint8).reshape(-1)
        return self._level(level + 1, inner, (ends - counts) * HASH.itemsize, counts * 16)

    def _blocks(
        self, level: int, data: Words, starts: Words, lengths: Words, longest: int
    ) -> tuple[Words, Words]:
        """Hash keys of at most a block."""
        numbers = self._numbers[level]
        size = lengths.astype(np.uint64)
        sums = [numbers[i, 0] + numbers[i, 1] * size for i in range(4)]
        spare = np.empty_like(size)
        # At every byte a word begins; this view lets one gather read words that overlap.
        anywhere = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))
        even = len(lengths) > 1 and longest and bool((lengths == longest).all())
        for word in range(-(-longest // 8)):
            left = lengths - 8 * word
            if even and starts[1] - starts[0] == longest == (starts[-1] - starts[0]) // (
                len(starts) - 1
            ):
                first = int(starts[0]) + 8 * word
                found = np.ndarray((len(starts),), "<u8", data, first, (longest,)).copy()
                if left[0] < 8:
                    found &= _MASKS[left[0]]
            else:
                found = anywhere[np.minimum(starts + 8 * word, len(anywhere) - 1)]
                found &= _MASKS[np.clip(left, 0, 8)]
            upper = found >> _HALF if longest > 8 * word + 4 else None
            found &= _LOW
            for i in range(4):
                np.multiply(found, numbers[i, 2 + 2 * word], out=spare)
                sums[i] += spare
                if upper is not None:
                    np.multiply(upper, numbers[i, 3 + 2 * word], out=spare)
                    sums[i] += spare
        high = (sums[0] & ~_LOW) | (sums[1] >> _HALF)
        low = (sums[2] & ~_LOW) | (sums[3] >> _HALF)
        return high, low
