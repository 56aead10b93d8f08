"""Chooses partitions: Kafka's murmur2 for keys; sticky or round-robin without a key.

A key gets the same partition as with Kafka's Java client, bit for bit, whether one key
or a whole Arrow column is hashed.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, count, pairwise
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from embedlog.lazy import np

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    UInt8Array: TypeAlias = npt.NDArray[np.uint8]
    UInt32Array: TypeAlias = npt.NDArray[np.uint32]
    Int32Array: TypeAlias = npt.NDArray[np.int32]
    IntArray: TypeAlias = npt.NDArray[Any]

_SEED, _MIX, _SHIFT, _MASK = 0x9747B28C, 0x5BD1E995, 24, 0xFFFFFFFF

_CHUNK_KEYS = 8192
"""Keys to hash at a time, so that the passes over them stay in the processor's cache."""

_CHUNK_BYTES = 1 << 22
"""The most bytes of a chunk, which are copied (a longer key is copied alone)."""

_MIN_VECTOR_KEYS = 16
"""Fewer keys than this are hashed faster one by one than with numpy."""


_WORDS = [struct.Struct(f"<{count}I").unpack_from for count in range(17)]
"""Unpack 0 to 16 words."""


def murmur2(key: bytes) -> int:
    """Return Kafka's hash of a key as a signed 32-bit number.

    >>> murmur2(b"foobar")
    -790332482
    """
    # Literals and few masks: this runs for every `send` with a key.
    length = len(key)
    h = 0x9747B28C ^ length
    words = _WORDS[length >> 2](key) if length < 68 else struct.unpack_from(f"<{length >> 2}I", key)
    for k in words:
        k = k * 0x5BD1E995 & 0xFFFFFFFF
        h = (h * 0x5BD1E995 ^ (k ^ k >> 24) * 0x5BD1E995) & 0xFFFFFFFF
    if length & 3:
        tail = int.from_bytes(key[length & -4 :], "little")
        h = (h ^ tail) * 0x5BD1E995 & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0x5BD1E995 & 0xFFFFFFFF
    h ^= h >> 15
    return h - 0x100000000 if h & 0x80000000 else h


def partition_for_key(key: bytes, partitions: int) -> int:
    """Return the partition of a key, also of an empty one.

    >>> partition_for_key(b"key-1", 12)
    0
    """
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def murmur2_many(offsets: IntArray, data: UInt8Array) -> Int32Array:
    """Return `murmur2` of many keys that are stored end to end, as in an Arrow binary column.

    Hashes all keys of a chunk together, word by word; fastest for keys of equal length.

    Args:
        offsets: Where each key begins in ``data``, and where the last one ends; never decreases.
        data: The bytes of the keys.
    """
    count = max(len(offsets) - 1, 0)
    hashes = np.empty(count, np.uint32)
    start = 0
    while start < count:
        # A chunk has at least one key.
        stop = min(start + _CHUNK_KEYS, count)
        limit = int(offsets[start]) + _CHUNK_BYTES
        if offsets[stop] > limit:
            stop = start + int(np.searchsorted(offsets[start : stop + 1], limit, "right")) - 1
            stop = max(stop, start + 1)
        first, last = int(offsets[start]), int(offsets[stop])
        # Four more bytes, so that the tail of the last key can be read as a whole word.
        chunk = np.zeros(last - first + 4, np.uint8)
        chunk[:-4] = data[first:last]
        lengths = np.diff(offsets[start : stop + 1])
        if lengths.min() == lengths.max():
            hashes[start:stop] = _hash_equal_lengths(chunk, len(lengths), int(lengths[0]))
        else:
            starts = (offsets[start:stop] - first).astype(np.int64)
            hashes[start:stop] = _hash_any_lengths(chunk, starts, lengths)
        start = stop
    return hashes.view(np.int32)


def _hash_equal_lengths(data: UInt8Array, count: int, length: int) -> UInt32Array:
    """Hash keys of equal length: word ``i`` of all keys is one strided column."""
    h = np.full(count, (_SEED ^ length) & _MASK, np.uint32)
    k, spare = np.empty_like(h), np.empty_like(h)
    words, tail = divmod(length, 4)
    for i in range(words):
        np.copyto(k, np.ndarray((count,), "<u4", data, 4 * i, (length,)))
        _mix(h, k, spare)
    if tail:
        np.copyto(k, np.ndarray((count,), "<u4", data, 4 * words, (length,)))
        k &= _tail_masks()[tail]
        h ^= k
        h *= np.uint32(_MIX)
    return _finish(h, spare)


def _hash_any_lengths(data: UInt8Array, starts: IntArray, lengths: IntArray) -> UInt32Array:
    """Hash keys of any lengths, sorted by length, so that the unfinished ones are a prefix."""
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    words = lengths >> 2
    h = lengths.astype(np.uint32) ^ np.uint32(_SEED)
    k, spare = np.empty_like(h), np.empty_like(h)
    # A word begins at every byte: this view lets one gather read overlapping words.
    word_at: UInt32Array = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))
    # A few long keys among many short ones would cost a pass for each of their words.
    rounds = int(words[_MIN_VECTOR_KEYS - 1]) if len(words) >= _MIN_VECTOR_KEYS else 0
    unfinished = int(np.count_nonzero(words > rounds))
    # How many keys have a word 0, a word 1, …
    finished = np.cumsum(np.bincount(np.minimum(words, rounds), minlength=rounds + 1)[:rounds])
    for i, active in enumerate((len(words) - finished).tolist()):
        k[:active] = word_at[starts[:active] + 4 * i]
        _mix(h[:active], k[:active], spare[:active])
    tails = lengths & 3
    mixed = (h ^ (word_at[starts + 4 * words] & _tail_masks()[tails])) * np.uint32(_MIX)
    np.copyto(h, mixed, where=tails > 0)
    h = _finish(h, spare)
    for i in range(unfinished):
        h[i] = murmur2(data[starts[i] : starts[i] + lengths[i]].tobytes()) & _MASK
    hashes = np.empty_like(h)
    hashes[order] = h
    return hashes


@cache
def _tail_masks() -> UInt32Array:
    """Return the part of the last word of a key that ends with 0, 1, 2 or 3 bytes."""
    return np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)


def _mix(h: UInt32Array, k: UInt32Array, spare: UInt32Array) -> None:
    """Mix one word ``k`` of each key into its hash ``h``, in place; overwrites the other two."""
    k *= np.uint32(_MIX)
    np.right_shift(k, np.uint32(_SHIFT), out=spare)
    k ^= spare
    k *= np.uint32(_MIX)
    h *= np.uint32(_MIX)
    h ^= k


def _finish(h: UInt32Array, spare: UInt32Array) -> UInt32Array:
    np.right_shift(h, np.uint32(13), out=spare)
    h ^= spare
    h *= np.uint32(_MIX)
    np.right_shift(h, np.uint32(15), out=spare)
    h ^= spare
    return h


def partitions_for_keys(keys: pa.Array, partitions: int) -> Int32Array:
    """Return the partition of each key of an Arrow column; -1 for a null key.

    Args:
        keys: A ``binary``, ``large_binary``, ``string`` or ``large_string`` array.
        partitions: The number of partitions, available or not.

    Raises:
        TypeError: The array has another type.
    """
    result = (murmur2_of_keys(keys) & np.int32(0x7FFFFFFF)) % np.int32(partitions)
    if keys.null_count:
        # Not is_null().to_numpy(), for which pyarrow imports pandas.
        valid = np.unpackbits(np.frombuffer(keys.buffers()[0], np.uint8), bitorder="little")
        result[valid[keys.offset : keys.offset + len(keys)] == 0] = -1
    return result


def murmur2_of_keys(keys: pa.Array) -> Int32Array:
    """Return `murmur2` of each key of an Arrow column; that of a null is undefined.

    Raises:
        TypeError: As `partitions_for_keys`.
    """
    width = _OFFSET_TYPES.get(str(keys.type))
    if width is None:
        raise TypeError(f"Keys must be binary or string, got {keys.type}")
    if len(keys) == 0:
        return np.empty(0, np.int32)
    _, offset_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(
        offset_buffer, width, len(keys) + 1, keys.offset * np.dtype(width).itemsize
    )
    data = np.frombuffer(b"" if data_buffer is None else data_buffer, np.uint8)
    return murmur2_many(offsets, data)


def sorted_by_partition(partitions: IntArray) -> tuple[IntArray, list[tuple[int, int, int]]]:
    """Return the order of rows by their partitions, and ``(partition, start, stop)`` in that order.

    There must be a row; those of one partition keep their order.

    >>> order, ranges = sorted_by_partition(np.array([2, 0, 2]))
    >>> order.tolist(), ranges
    ([1, 0, 2], [(0, 0, 1), (2, 1, 3)])
    """
    order = partitions.argsort(kind="stable")
    in_order = partitions[order]
    bounds = pairwise(in_order.searchsorted(range(int(in_order[-1]) + 2)).tolist())
    return order, [(n, start, stop) for n, (start, stop) in enumerate(bounds) if start < stop]


_OFFSET_TYPES = {"binary": "i4", "string": "i4", "large_binary": "i8", "large_string": "i8"}


class StickyPartitioner:
    """Chooses a partition for records without a key, and keeps it for a while.

    Each partition has a turn before any has a second one, in a random order each time.
    Not thread-safe: the caller holds the queue's drain lock.

    >>> sticky = StickyPartitioner(batch_size=100, rng=Random(7))
    >>> first = sticky.choose(4)
    >>> sticky.added(99, batch_closed=True)
    >>> sticky.choose(4) == first
    True

    Args:
        batch_size: Keep a partition for at least this many bytes.
        longest: Leave it after this many seconds if anything was sent; needs choices with a time.
        adaptive: Prefer partitions with short queues, if the caller passes the queues.
        rng: The source of randomness.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        longest: float = inf,
        adaptive: bool = True,
        rng: Random | None = None,
    ):
        self._batch_size, self._longest, self._adaptive = batch_size, longest, adaptive
        self._rng = rng or Random()
        self._current: int | None = None
        self._last: int | None = None
        self._bytes, self._since, self._partitions = 0, 0.0, 0
        self._turns: list[int] = []
        """The partitions that had no turn yet."""

    def choose(
        self, partitions: int, *, queues: Sequence[int] | None = None, now: float = 0.0
    ) -> int:
        """Return the current partition, or the next one if it is time to change.

        Args:
            partitions: The number of partitions.
            queues: How many batches wait for each partition; longer queues are chosen less often.
            now: The time in seconds, by a monotonic clock.
        """
        current = self._current
        # Only if something was sent: a caller may choose twice before it sends.
        expired = self._bytes and now - self._since >= self._longest
        if current is None or current >= partitions or expired:
            current = self._current = self._last = self._next(partitions, queues)
            self._bytes, self._since = 0, now
        return current

    def added(self, size: int, *, batch_closed: bool) -> None:
        """Count bytes sent to the current partition, and leave it after ``batch_size`` bytes.

        It is left between batches, or after twice the batch size if no batch is closed.
        """
        self._bytes += size
        if self._bytes >= self._batch_size * (1 if batch_closed else 2):
            self._current = None

    def _next(self, partitions: int, queues: Sequence[int] | None) -> int:
        if queues is not None and self._adaptive:
            weights = list(accumulate(max(queues) + 1 - waiting for waiting in queues))
            return bisect_right(weights, self._rng.randrange(weights[-1]))
        if not self._turns or self._partitions != partitions:
            self._partitions, self._turns = partitions, list(range(partitions))
            self._rng.shuffle(self._turns)
            if self._turns[-1] == self._last:
                self._turns.reverse()
        return self._turns.pop()


class RoundRobinPartitioner:
    """Chooses the partitions of one topic in turn, record by record.

    The count advances once per record, not when a batch is opened: old versions of Kafka did
    both, and so filled only every second partition (KAFKA-9965).

    >>> turns = RoundRobinPartitioner()
    >>> [turns.choose(3) for _ in range(4)]
    [0, 1, 2, 0]
    """

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, partitions: int) -> int:
        """Return the next of the partitions."""
        return next(self._turns) % partitions
