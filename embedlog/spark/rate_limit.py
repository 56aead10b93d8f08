"""How much of what is there goes into one micro-batch: arithmetic, as Kafka's source does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")


def share(limit: int, backlog: Mapping[K, int]) -> dict[K, int]:
    """Return how much of each backlog is read, about ``limit`` together.

    In proportion, rounded down; but what would get less than one gets one, so
    that a small partition is not starved by a large one.

    >>> share(10, {"large": 101, "small": 11, "tiny": 1})
    {'large': 8, 'small': 1, 'tiny': 1}
    """
    total = sum(backlog.values())
    if total <= limit:
        return dict(backlog)
    return {one: min(size, max(limit * size // total, 1)) for one, size in backlog.items() if size}


class TriggerDelay:
    """Whether a batch waits for more rows (minOffsetsPerTrigger), but not for ever.

    Args:
        least: So many rows are worth a batch.
        longest_ms: After this time any number of rows is.
    """

    def __init__(self, least: int, longest_ms: int) -> None:
        self._least, self._longest = least, longest_ms
        self._last_ms: int | None = None

    def waits(self, backlog: int, now_ms: int) -> bool:
        """Whether to wait; the first batch never does."""
        waited = self._last_ms is None or now_ms - self._last_ms >= self._longest
        if not waited and backlog < self._least:
            return True
        self._last_ms = now_ms
        return False
