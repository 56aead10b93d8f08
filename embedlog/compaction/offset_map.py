"""The last offset of each key, in an amount of memory that is fixed in advance.

An open hash table in one array with 24 bytes per slot, as in Kafka: 128 bits of hash and
an offset.  Keys are looked up and entered by the thousands: each round of the loop moves
all keys without a slot on to their next one.  So a round is a few passes over arrays, and
no step is per key.
"""

from __future__ import annotations

import numpy as np

from embedlog.compaction.key_hash import BoolArray, Int64Array, UInt64Array

SLOT_BYTES = 24
_WORDS = np.uint64(3)
_HALF = np.uint64(32)
_REPLACED_SHARE = 8
"""One part in this many of the memory is for the notes on which offsets were replaced."""


class OffsetMap:
    """Maps hashes of keys to the last offset of each.

    Args:
        buffer_bytes: The memory it may use; at least that of one key.
        load_factor: The fraction of the slots that may be used.
        first: The first offset that may be added.
        stop: The end of the offsets.
        max_keys: The most keys there can be, if fewer; memory for more is not allocated.
    """

    def __init__(
        self,
        buffer_bytes: int,
        load_factor: float,
        first: int,
        stop: int,
        max_keys: int | None = None,
    ) -> None:
        self._first, self._span = first, max(stop - first, 1)
        max_keys = self._span if max_keys is None else max_keys
        self._replaced: BoolArray = np.zeros(min(self._span, buffer_bytes // _REPLACED_SHARE), bool)
        buffer_bytes -= len(self._replaced)
        # Where memory allows it, at most half full: keys find their slots in half the rounds.
        wanted = int(max_keys / min(load_factor, 0.5))
        # The next prime is at most a sixteenth, or 32, away.
        wanted += wanted // 16 + 32
        # A prime, so that every step size visits every slot.
        self._slots = _prime_up_to(min(buffer_bytes // SLOT_BYTES, wanted))
        self.capacity = max(int(self._slots * load_factor), 1)
        """How many keys fit."""
        self.count = 0
        self._table: UInt64Array = np.zeros(3 * self._slots, np.uint64)

    def add(self, high: UInt64Array, low: UInt64Array, offsets: Int64Array) -> int:
        """Enter keys with their ascending offsets; return how many of them, from the first, fit.

        That is all of them, or those before the first new key that has no room.
        """
        count = len(offsets)
        if self.count + count > self.capacity:
            count = self._count_fitting(high, low)
        if count:
            self._enter(high[:count], low[:count], offsets[:count] + 1)
        return count

    def all_ends(self) -> Int64Array:
        """Return the last offset + 1 of each key in the map."""
        ends = self._table[2::3]
        return ends[ends != 0].view(np.int64)

    def replaced(self, start: int, stop: int) -> BoolArray | None:
        """Return a mask of the offsets ``[start, stop)`` whose key has a later one.

        None if that was not noted for all of them; `ends` always knows, but needs their hashes.
        """
        first, last = start - self._first, stop - self._first
        return self._replaced[first:last] if first >= 0 and last <= len(self._replaced) else None

    def _note_replaced(self, ends: Int64Array) -> None:
        indices = ends - (self._first + 1)
        if len(self._replaced) < self._span:
            indices = indices[indices < len(self._replaced)]
        self._replaced[indices] = True

    def _count_fitting(self, high: UInt64Array, low: UInt64Array) -> int:
        new = np.flatnonzero(self.ends(high, low) == 0)
        _, first = np.unique(np.stack((high[new], low[new])), axis=1, return_index=True)
        firsts = np.sort(new[first])
        room = self.capacity - self.count
        return len(high) if len(firsts) <= room else int(firsts[room])

    def ends(self, high: UInt64Array, low: UInt64Array) -> Int64Array:
        """Return the last offset + 1 of each of these keys; 0 for a key not in the map."""
        result = np.zeros(len(high), np.int64)
        slots, steps = self._first_slots(high, low)
        rows = None
        for _ in range(self._slots):
            same, ends = self._compare(slots, high, low)
            if rows is None:
                np.multiply(ends, same, out=result)
            else:
                result[rows] = ends * same
            on = np.flatnonzero((ends != 0) > same)
            if not len(on):
                break
            rows = on if rows is None else rows[on]
            high, low, steps = high[on], low[on], steps[on]
            slots = self._next_slots(slots[on], steps)
        return result

    def _compare(
        self, slots: Int64Array, high: UInt64Array, low: UInt64Array
    ) -> tuple[BoolArray, Int64Array]:
        """Return a mask of the slots that hold these keys, and the end in each: 0 if it is free."""
        table = self._table
        same = table.take(slots) == high
        same &= table.take(slots + 1) == low
        ends = table.take(slots + 2).view(np.int64)
        # A free slot holds no key, though the hash of a key may be 0.
        same &= ends != 0
        return same, ends

    def _enter(self, high: UInt64Array, low: UInt64Array, ends: Int64Array) -> None:
        table = self._table
        table_ends = table.view(np.int64)
        slots, steps = self._first_slots(high, low)
        while True:
            same, old_ends = self._compare(slots, high, low)
            # Ends ascend, so of a key that occurs several times the last one is written last.
            older = old_ends > ends
            newer = np.flatnonzero(same & ~older)
            new_ends = ends[newer]
            places = slots[newer] + 2
            self._note_replaced(old_ends[newer])
            table_ends[places] = new_ends
            self._note_replaced(new_ends[table_ends[places] != new_ends])
            self._note_replaced(ends[same & older])
            left = np.flatnonzero(~same)
            if not len(left):
                return
            high, low, ends, old_ends = high[left], low[left], ends[left], old_ends[left]
            slots, steps = slots[left], steps[left]
            free = old_ends == 0
            claims = np.flatnonzero(free)
            places = slots[claims]
            table_ends[places + 2] = ends[claims]
            # Of several keys for one slot the last one wins: no two have the same offset.
            won = table_ends[places + 2] == ends[claims]
            entered, places = claims[won], places[won]
            table[places], table[places + 1] = high[entered], low[entered]
            self.count += len(entered)
            # The others try the same slot again: it may hold their own key now.
            slots = np.where(free, slots, self._next_slots(slots, steps))
            on = np.ones(len(ends), bool)
            on[entered] = False
            high, low, ends = high[on], low[on], ends[on]
            slots, steps = slots[on], steps[on]

    def _first_slots(self, high: UInt64Array, low: UInt64Array) -> tuple[Int64Array, Int64Array]:
        """Return the first slot of each key and the step to the next one, in words of the table."""
        # The upper half of a product spreads as evenly as a remainder, at a third of the cost.
        slots = (high >> _HALF) * np.uint64(self._slots) >> _HALF
        steps = (low >> _HALF) * np.uint64(max(self._slots - 1, 1)) >> _HALF
        return (slots * _WORDS).view(np.int64), (steps * _WORDS + _WORDS).view(np.int64)

    def _next_slots(self, slots: Int64Array, steps: Int64Array) -> Int64Array:
        moved = slots + steps
        moved[moved >= len(self._table)] -= len(self._table)
        return moved


def _prime_up_to(number: int) -> int:
    """Return the largest prime that is at most ``number``, or 1."""
    for candidate in range(number, 1, -1):
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            return candidate
    return 1
