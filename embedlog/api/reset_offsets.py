"""The targets of an offset reset, as in kafka-consumer-groups, and its result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from functools import partial
from typing import Literal, NamedTuple

from embedlog.display import html_table, text_table
from embedlog.errors import NoOffsetForPartitionError
from embedlog.partition import PartitionLog
from embedlog.record import TopicPartition
from embedlog.times import When, milliseconds

To = Literal["earliest", "latest", "current"] | When


class OffsetChange(NamedTuple):
    """A committed offset that was, or would be, replaced."""

    before: int | None
    """None if the group had no committed offset."""
    after: int


class OffsetResetResult(dict[TopicPartition, OffsetChange]):
    """What `ConsumerGroup.reset_offsets` did, or would do: `OffsetChange` by partition."""

    def __init__(
        self, group: str, changes: Mapping[TopicPartition, OffsetChange], dry_run: bool
    ) -> None:
        super().__init__(changes)
        self.group, self.dry_run = group, dry_run

    @property
    def title(self) -> str:
        """The group, and whether the offsets were changed."""
        outcome = "dry run, nothing was changed" if self.dry_run else "done"
        return f"Reset of {self.group}: {outcome}"

    def __repr__(self) -> str:
        return "\n".join((self.title, *text_table(_HEADS, self._rows())))

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table(self.title, _HEADS, self._rows())

    def _rows(self) -> list[tuple[object, ...]]:
        return [(*partition, *change) for partition, change in self.items()]


_HEADS = ("topic", "partition", "before", "after")


class PartitionToReset(NamedTuple):
    """The offsets of a partition that a reset chooses from."""

    log: PartitionLog
    start: int
    end: int
    leader_epoch: int
    committed: int | None


ResetTarget = Callable[[PartitionToReset], int]
"""Returns the target offset in a partition; one outside of the log means its nearer end."""
_WORDS: dict[str, ResetTarget] = {
    "earliest": lambda offsets: offsets.start,
    "latest": lambda offsets: offsets.end,
    "current": lambda offsets: offsets.end if offsets.committed is None else offsets.committed,
}


def reset_target(to: To | None, shift: int | None, now_ms: int) -> ResetTarget:
    """Return the target for the arguments of `ConsumerGroup.reset_offsets`.

    Raises:
        ValueError: Neither or both were passed, or the value is not valid.
        TypeError: The type is not valid.
    """
    if (to is None) == (shift is None):
        raise ValueError("Pass either `to` or `shift`")
    if shift is not None:
        return partial(_shift, _integer(shift, "shift"))
    if isinstance(to, timedelta) and to < timedelta(0):
        raise ValueError(f"A timedelta must not be negative, got {to}")
    if isinstance(to, str) and to in _WORDS:
        return _WORDS[to]
    if isinstance(to, str | date | timedelta):
        try:
            return partial(_at_timestamp, milliseconds(to, now_ms))
        except ValueError as error:
            raise ValueError(f"to must be one of {', '.join(_WORDS)}, or a time. {error}") from None
    offset = _integer(to, "to")
    if offset < 0:
        raise ValueError(f"An offset must not be negative, got {offset}; use `shift` to move back")
    return lambda _: offset


def _integer(value: object, name: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    types = "'earliest', 'latest', 'current', an int, or a datetime, date, timedelta or text"
    raise TypeError(f"{name} must be {'an int' if name == 'shift' else types}, got {value!r}")


def _at_timestamp(timestamp: int, offsets: PartitionToReset) -> int:
    """Return the offset of the first record at or after a time, or the log end."""
    record = offsets.log.offset_for_timestamp(timestamp)
    return offsets.end if record is None else record.offset


def _shift(count: int, offsets: PartitionToReset) -> int:
    if offsets.committed is None:
        raise NoOffsetForPartitionError(
            "The group has no committed offset that could be shifted",
            topic=offsets.log.topic,
            partition=offsets.log.partition,
            todo="Name only partitions with a committed offset, or use `to`.",
        )
    return offsets.committed + count
