"""The state of one partition in a share group (KIP-932): which of its records are whose.

Values only: no clock, no lock, no database.  `share.share_group` reads the state of a partition,
takes some of the steps below, and writes it back, all in one transaction.

The state is a start offset (Kafka's SPSO), below which the group is done, and from there on a
*range* for each run of offsets with the same state, without gaps between them: a poll of 500
records that are accepted in order is one range.  It is stored as the committed offset of the group,
which is the start, and in the metadata of that the ranges.  So whatever keeps committed offsets
keeps the state of share groups: checkpoints, recovery, retention, transactions, backups.

Times are milliseconds since boot.  A range with offsets that no record has is as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

PREFIX = "\0share:"
"""Of the metadata of all offsets of share groups, and of no others."""

AVAILABLE, ACQUIRED, ACKNOWLEDGED, ARCHIVING, ARCHIVED = range(5)
"""Kafka's states; `ARCHIVING` is given up, and will be archived together with its dead letter."""
_DONE = (ACKNOWLEDGED, ARCHIVED)

ACCEPT, RELEASE, REJECT, RENEW, GAP, RETURN = range(1, 7)
"""What a member does with records that it has acquired.  The first four are Kafka's.  At the
offsets of a `GAP` there is no record.  What is returned was never given to the program."""

_FIELDS = 6


class RecordRange(NamedTuple):
    """Offsets ``[first, stop)`` in the same state."""

    first: int
    stop: int
    state: int
    delivery_count: int = 0
    """How often they were delivered."""
    until: int = 0
    """When the lock of acquired ones ends, or before when available ones must not be delivered;
    1 if those that are archived were rejected."""
    member: int = 0
    """Who has acquired them."""


class ShareState:
    """One partition of a share group, as of one transaction.

    Args:
        start: The start offset.
        ranges: The ranges, or the text of them that `metadata` returned.
        delivery_limit: How often a record is delivered before it is given up.
        letters: Whether records that are given up become dead letters.
    """

    def __init__(
        self,
        start: int,
        ranges: str | list[RecordRange] = PREFIX,
        delivery_limit: int = 5,
        letters: bool = False,
    ) -> None:
        self.start, self._limit, self._letters = start, delivery_limit, letters
        self.ranges = _parsed(ranges) if isinstance(ranges, str) else ranges
        """Replaced by each change, and never changed in place."""

    @property
    def metadata(self) -> str:
        """The ranges, as they are stored."""
        return PREFIX + ",".join(map(str, chain.from_iterable(self.ranges)))

    @property
    def end(self) -> int:
        """The first offset that was never acquired (Kafka's SPEO plus 1)."""
        return self.ranges[-1].stop if self.ranges else self.start

    def count(self, *states: int) -> int:
        """Return how many offsets are in one of these states."""
        return sum(each.stop - each.first for each in self.ranges if each.state in states)

    # The log

    def trim(self, start: int) -> None:
        """Forget the offsets below the start of the log, whose records are gone."""
        if start > self.start:
            self.ranges = [*self._pieces(start, max(self.end, start))]
            self.start = start
            self._tidy()

    def clip(self, end: int) -> None:
        """Forget the offsets from an end on: other records will be there."""
        if end < self.end:
            self.ranges = [*self._pieces(self.start, end)]
            self.start = min(self.start, end)
            self._tidy()

    def _pieces(self, first: int, stop: int) -> Iterator[RecordRange]:
        """Yield what lies between two offsets."""
        for each in self.ranges:
            low, high = max(each.first, first), min(each.stop, stop)
            if low < high:
                yield each._replace(first=low, stop=high)

    def forget_boot(self) -> None:
        """Make available what was acquired before a reboot, which ended all members."""
        self.ranges = [
            RecordRange(*each[:2], AVAILABLE, each.delivery_count)
            if each.state in (AVAILABLE, ACQUIRED)
            else each
            for each in self.ranges
        ]
        self._tidy()

    # Steps

    def acquire(
        self, limit: int, end: int, most: int, member: int, now: int, until: int, *, alone: bool
    ) -> list[RecordRange]:
        """Acquire the first available records, and return their ranges.

        A record whose last delivery this is comes alone: if it kills its process, others do not
        lose their last one with it.

        Args:
            limit: At most so many offsets.
            end: The end of the log.
            most: How many offsets may be in flight.
            member: Who acquires them.
            now: The time.
            until: When the lock ends.
            alone: Whether nothing was acquired with them elsewhere.
        """
        taken: list[RecordRange] = []
        for each in self.ranges if limit > 0 else ():
            if each.state != AVAILABLE or each.until > now:
                continue
            is_last = each.delivery_count > 0 and each.delivery_count + 1 >= self._limit
            if is_last and not (alone and not taken):
                return self._take(taken)
            stop = each.first + 1 if is_last else min(each.stop, each.first + limit)
            taken.append(
                RecordRange(each.first, stop, ACQUIRED, each.delivery_count + 1, until, member)
            )
            limit -= stop - each.first
            if is_last or not limit:
                return self._take(taken)
        first = self.end
        new = min(limit, end - first, most - self.count(AVAILABLE, ACQUIRED, ARCHIVING))
        if new > 0:
            taken.append(RecordRange(first, first + new, ACQUIRED, 1, until, member))
            self.ranges = [*self.ranges, taken[-1]]
        return self._take(taken)

    def _take(self, taken: list[RecordRange]) -> list[RecordRange]:
        for each in taken:
            self._change(each.first, each.stop, partial(_replaced, each))
        if taken:
            self._tidy()
        return taken

    def is_last_delivery(self, taken: RecordRange) -> bool:
        """Whether a range that was acquired must be the only one of its poll."""
        return 1 < taken.delivery_count >= self._limit

    def acknowledge(
        self, first: int, stop: int, verdict: int, *, member: int, now: int, until: int = 0
    ) -> list[tuple[int, int]]:
        """Do something with records that a member has acquired.

        Args:
            first: The first offset.
            stop: The offset after the last one.
            verdict: What to do.
            member: Who has acquired them.
            now: The time.
            until: Before when what is released must not be delivered, or, of what is renewed, when
                its lock ends.

        Returns:
            The offsets whose lock the member does not hold any more; they stay as they are.
        """
        refused = [(first, min(stop, self.start))] if first < self.start else []

        def change(piece: RecordRange) -> RecordRange:
            is_held = piece.state == ACQUIRED and piece.member == member and piece.until > now
            if not is_held:
                refused.append(piece[:2])
                return piece
            if verdict == RENEW:
                return piece._replace(until=until)
            if verdict == RETURN:
                state = AVAILABLE
                return RecordRange(*piece[:2], state, piece.delivery_count - 1)
            if verdict == RELEASE:
                return self._freed(piece, until)
            if verdict == REJECT:
                return self._given_up(piece, rejected=True)
            return RecordRange(*piece[:2], ACKNOWLEDGED if verdict == ACCEPT else ARCHIVED)

        end = self.end
        self._change(first, min(stop, end), change)
        if stop > end:
            if verdict == GAP and first <= end:
                self.ranges = [*self.ranges, RecordRange(end, stop, ARCHIVED)]
            else:
                refused.append((max(first, end), stop))
        self._tidy()
        return [] if verdict == GAP else refused

    def expire(self, now: int, dead: Collection[int]) -> bool:
        """Free what dead members have acquired, and what locks that ended held.

        Returns:
            Whether anything changed.
        """
        before = self.ranges

        def freed(each: RecordRange) -> RecordRange:
            if each.state == ACQUIRED and (each.until <= now or each.member in dead):
                return self._freed(each, 0)
            if each.state == AVAILABLE and each.delivery_count >= self._limit:
                return self._freed(each, 0)  # The limit was lowered.
            if each.state == ARCHIVING and not self._letters:
                return RecordRange(*each[:2], ARCHIVED)
            return each

        self.ranges = [freed(each) for each in before]
        if self.ranges == before:
            return False
        self._tidy()
        return True

    def archive(self, first: int, stop: int) -> bool:
        """Archive what was given up; return False, and do nothing, if that is done already."""
        pieces = [*self._pieces(first, stop)]
        if sum(each.stop - each.first for each in pieces if each.state == ARCHIVING) < stop - first:
            return False
        self._change(first, stop, lambda piece: RecordRange(*piece[:2], ARCHIVED))
        self._tidy()
        return True

    def _freed(self, piece: RecordRange, not_before: int) -> RecordRange:
        if piece.delivery_count >= self._limit:
            return self._given_up(piece, rejected=False)
        return RecordRange(*piece[:2], AVAILABLE, piece.delivery_count, not_before)

    def _given_up(self, piece: RecordRange, *, rejected: bool) -> RecordRange:
        if self._letters:
            return RecordRange(*piece[:2], ARCHIVING, piece.delivery_count, int(rejected))
        return RecordRange(*piece[:2], ARCHIVED)

    def _change(self, first: int, stop: int, change: Callable[[RecordRange], RecordRange]) -> None:
        """Replace the pieces of ranges between two offsets."""
        ranges = []
        for each in self.ranges:
            low, high = max(each.first, first), min(each.stop, stop)
            if low >= high:
                ranges.append(each)
                continue
            if each.first < low:
                ranges.append(each._replace(stop=low))
            ranges.append(change(each._replace(first=low, stop=high)))
            if high < each.stop:
                ranges.append(each._replace(first=high))
        self.ranges = ranges

    def _tidy(self) -> None:
        """Move the start past what is done, and merge neighbours in the same state."""
        ranges: list[RecordRange] = []
        for each in self.ranges:
            if not ranges and each.state in _DONE:
                self.start = each.stop
            elif ranges and ranges[-1][2:] == each[2:]:
                ranges[-1] = ranges[-1]._replace(stop=each.stop)
            else:
                ranges.append(each)
        self.ranges = ranges


def _parsed(metadata: str) -> list[RecordRange]:
    numbers = [int(number) for number in metadata[len(PREFIX) :].split(",") if number]
    fields = zip(*(numbers[at::_FIELDS] for at in range(_FIELDS)), strict=True)
    return [RecordRange(*each) for each in fields]


def _replaced(by: RecordRange, piece: RecordRange) -> RecordRange:
    return by


def is_share(metadata: str) -> bool:
    """Whether an offset with this metadata is one of a share group."""
    return metadata.startswith(PREFIX)
