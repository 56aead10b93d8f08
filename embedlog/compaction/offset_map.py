"""Which offset each key was last seen at, in a memory that is fixed beforehand (D7).

An open hash table in one array of 24 bytes a slot, Kafka's number: 128 bits of
hash and an offset.  Keys are looked up and entered thousands at a time: every
round of the loop moves all those that have not found their slot yet on to the
next one, so a round is a handful of passes over arrays and no step is per key.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Words = Any
SLOT_BYTES = 24
_WORDS = np.uint64(3)
_HALF = np.uint64(32)
_NOTED_SHARE = 8
"""One part in so many of the memory is for noting which offsets were replaced."""


class OffsetMap:
    """Maps hashes of keys to the last offset of each.

    Args:
        buffer_bytes: The memory it may take; at least that of one key.
        load_factor: How full it may become.
        first: The first offset there can be.
        stop: Where they end.
        most: How many keys there can be, if fewer; no more memory is taken than they need.
    """

    def __init__(
        self,
        buffer_bytes: int,
        load_factor: float,
        first: int,
        stop: int,
        most: int | None = None,
    ) -> None:
        self._first, self._span = first, max(stop - first, 1)
        most = self._span if most is None else most
        self._dead: Words = np.zeros(min(self._span, buffer_bytes // _NOTED_SHARE), bool)
        buffer_bytes -= len(self._dead)
        # Half full at most where there is memory: keys find their slots in half of the rounds.
        wanted = int(most / min(load_factor, 0.5))
        # There is a prime within a sixteenth, or 32.
        wanted += wanted // 16 + 32
        # Prime, so that any step comes past every slot.
        self._slots = _prime_up_to(min(buffer_bytes // SLOT_BYTES, wanted))
        self.capacity = max(int(self._slots * load_factor), 1)
        """How many keys fit."""
        self.count = 0
        self._table: Words = np.zeros(3 * self._slots, np.uint64)

    def add(self, high: Words, low: Words, offsets: Words) -> int:
        """Enter keys with their offsets, ascending; return how many of them, the first ones, fit.

        All of a chunk in which no new key is one too many, else those before that.
        """
        count = len(offsets)
        if self.count + count > self.capacity:
            count = self._fitting(high, low)
        if count:
            self._enter(high[:count], low[:count], offsets[:count] + 1)
        return count

    def all_ends(self) -> Words:
        """Return for each key that is known the offset after the last one it was seen at."""
        found = self._table[2::3]
        return found[found != 0].view(np.int64)

    def replaced(self, start: int, stop: int) -> Words | None:
        """Return which of the offsets ``[start, stop)`` have a later one of the same key.

        None where that was not noted for all of them: then `ends` tells, for the
        price of their hashes.
        """
        first, last = start - self._first, stop - self._first
        return self._dead[first:last] if first >= 0 and last <= len(self._dead) else None

    def _note(self, ends: Words) -> None:
        places = ends - (self._first + 1)
        if len(self._dead) < self._span:
            places = places[places < len(self._dead)]
        self._dead[places] = True

    def _fitting(self, high: Words, low: Words) -> int:
        new = np.flatnonzero(self.ends(high, low) == 0)
        order = np.lexsort((new, low[new], high[new]))
        new = new[order]
        first = np.ones(len(new), bool)
        first[1:] = (high[new][1:] != high[new][:-1]) | (low[new][1:] != low[new][:-1])
        firsts = np.sort(new[first])
        room = self.capacity - self.count
        return len(high) if len(firsts) <= room else int(firsts[room])

    def ends(self, high: Words, low: Words) -> Words:
        """Return for each key the offset after the last one it was seen at; 0 for unknown ones."""
        found = np.zeros(len(high), np.int64)
        slots, steps = self._first_slots(high, low)
        rows = None
        for _ in range(self._slots):
            same, ends = self._look(slots, high, low)
            if rows is None:
                np.multiply(ends, same, out=found)
            else:
                found[rows] = ends * same
            on = np.flatnonzero((ends != 0) > same)
            if not len(on):
                break
            rows = on if rows is None else rows[on]
            high, low, steps = high[on], low[on], steps[on]
            slots = self._next_slots(slots[on], steps)
        return found

    def _look(self, slots: Words, high: Words, low: Words) -> tuple[Words, Words]:
        """Return which slots have these keys, and what all of them have for an end, 0 if free."""
        table = self._table
        same = table.take(slots) == high
        same &= table.take(slots + 1) == low
        ends = table.take(slots + 2).view(np.int64)
        # A free slot has no key, though a key's hash may be 0.
        same &= ends != 0
        return same, ends

    def _enter(self, high: Words, low: Words, ends: Words) -> None:
        table = self._table
        known = table.view(np.int64)
        slots, steps = self._first_slots(high, low)
        while True:
            same, there = self._look(slots, high, low)
            # Ascending, so where a key comes several times its last offset is written last.
            older = there > ends
            newer = np.flatnonzero(same & ~older)
            mine = ends[newer]
            places = slots[newer] + 2
            self._note(there[newer])
            known[places] = mine
            self._note(mine[known[places] != mine])
            self._note(ends[same & older])
            left = np.flatnonzero(~same)
            if not len(left):
                return
            high, low, ends, there = high[left], low[left], ends[left], there[left]
            slots, steps = slots[left], steps[left]
            free = there == 0
            claims = np.flatnonzero(free)
            places = slots[claims]
            known[places + 2] = ends[claims]
            # Of those that want one slot the last one has it: no two have the same offset.
            won = known[places + 2] == ends[claims]
            mine, places = claims[won], places[won]
            table[places], table[places + 1] = high[mine], low[mine]
            self.count += len(mine)
            # Who lost looks at the slot again, where its own key may be by now.
            slots = np.where(free, slots, self._next_slots(slots, steps))
            on = np.ones(len(ends), bool)
            on[mine] = False
            high, low, ends = high[on], low[on], ends[on]
            slots, steps = slots[on], steps[on]

    def _first_slots(self, high: Words, low: Words) -> tuple[Words, Words]:
        """Return where to look first, and how far on then, in words of the table."""
        # A product's upper half spreads as evenly as a remainder, at a third of its price.
        slots = (high >> _HALF) * np.uint64(self._slots) >> _HALF
        steps = (low >> _HALF) * np.uint64(max(self._slots - 1, 1)) >> _HALF
        return (slots * _WORDS).view(np.int64), (steps * _WORDS + _WORDS).view(np.int64)

    def _next_slots(self, slots: Words, steps: Words) -> Words:
        moved = slots + steps
        moved[moved >= len(self._table)] -= len(self._table)
        return moved


def _prime_up_to(number: int) -> int:
    """Return the largest prime that is not above a number; 1 where there is none."""
    for one in range(number, 1, -1):
        if all(one % divisor for divisor in range(2, int(one**0.5) + 1)):
            return one
    return 1
