"""Where a group goes on, when somebody moves it: kafka-consumer-groups' ways to say it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from embedlog.api.display import html_table, text_table
from embedlog.errors import NoOffsetForPartitionError
from embedlog.partition import PartitionLog
from embedlog.record import TopicPartition

To = str | int | datetime | timedelta
WORDS = ("earliest", "latest", "current")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


class OffsetChange(NamedTuple):
    """A committed offset that was, or would be, replaced."""

    before: int | None
    """None where the group had committed nothing."""
    after: int


class OffsetResetResult(dict[TopicPartition, OffsetChange]):
    """What `ConsumerGroup.reset_offsets` did, or would do: `OffsetChange` by partition."""

    def __init__(
        self, group: str, moves: Mapping[TopicPartition, OffsetChange], dry_run: bool
    ) -> None:
        super().__init__(moves)
        self.group, self.dry_run = group, dry_run

    @property
    def title(self) -> str:
        """Whose offsets these are, and whether anything was done."""
        done = "dry run, nothing was changed" if self.dry_run else "done"
        return f"Reset of {self.group}: {done}"

    def __repr__(self) -> str:
        return "\n".join((self.title, *text_table(_HEADS, self._rows())))

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table(self.title, _HEADS, self._rows())

    def _rows(self) -> list[tuple[object, ...]]:
        return [(*one, *move) for one, move in self.items()]


_HEADS = ("topic", "partition", "before", "after")


@dataclass(frozen=True, slots=True)
class ResetTarget:
    """A partition that a group is to go on in."""

    one: TopicPartition
    log: PartitionLog
    start: int
    end: int
    leader_epoch: int
    committed: int | None


Rule = Callable[[ResetTarget], int]
"""Says where in a partition to go on; what is outside of the log means its nearer end."""


def rule(to: To | None, shift: int | None, now_ms: int) -> Rule:
    """Return what was asked for.

    Raises:
        ValueError: It names no place.
        TypeError: It cannot be one.
    """
    if (to is None) == (shift is None):
        raise ValueError("say where to go on with `to`, or how far from there with `shift`")
    if shift is not None:
        return _shifted(_number(shift, "shift"))
    if isinstance(to, datetime):
        return _at(milliseconds(to))
    if isinstance(to, timedelta):
        if to < timedelta(0):
            raise ValueError(f"a duration back from now is not negative, as {to} is")
        return _at(now_ms - to // _MS)
    if isinstance(to, str):
        return _word(to)
    offset = _number(to, "to")
    if offset < 0:
        raise ValueError(f"offset {offset} is negative; `shift` moves backwards")
    return lambda place: offset


def clamp(rule: Rule, place: ResetTarget) -> int:
    """Return where a rule leads, or the nearest offset to it that the log has."""
    return min(max(rule(place), place.start), place.end)


def milliseconds(moment: datetime) -> int:
    """Return a time as records have it; without a zone it is UTC, as in Kafka's tools.

    Rounded up: no record before ``moment`` is at or after what is returned.
    """
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return -((_EPOCH - aware) // _MS)


def _number(given: object, name: str) -> int:
    if isinstance(given, bool):
        raise TypeError(f"{name} is an int, not {given!r}")
    try:
        return operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        kinds = "earliest, latest, current, an int, a datetime or a timedelta"
        wanted = "an int" if name == "shift" else kinds
        raise TypeError(f"{name} is {wanted}, not {given!r}") from None


def _word(word: str) -> Rule:
    if word not in WORDS:
        raise ValueError(f"{word!r} is none of {', '.join(WORDS)}")
    if word == "current":
        return lambda place: place.end if place.committed is None else place.committed
    return lambda place: place.start if word == "earliest" else place.end


def _at(timestamp: int) -> Rule:
    """Go on with the first record at or after a time (B10), or where the next one will be."""

    def find(place: ResetTarget) -> int:
        found = place.log.offset_for_timestamp(timestamp)
        return place.end if found is None else found.offset

    return find


def _shifted(by: int) -> Rule:
    def move(place: ResetTarget) -> int:
        if place.committed is None:
            raise NoOffsetForPartitionError(
                "the group has committed nothing that could be shifted",
                topic=place.one.topic,
                partition=place.one.partition,
                todo="name only partitions that it committed for, or an offset",
            )
        return place.committed + by

    return move
