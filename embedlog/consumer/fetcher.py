"""Collects what a call returns from the assigned partitions, one after the other (E9, E10)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import islice
from time import monotonic
from typing import Any, TypeVar

from embedlog.config import ConsumerConfig
from embedlog.consumer.assignment import Assignment
from embedlog.consumer.cursor import PartitionCursor
from embedlog.errors import EmbedlogError
from embedlog.record import Record, TopicPartition

T = TypeVar("T")
Ends = dict[TopicPartition, int]

_GC_THRESHOLD = 700
"""Fewer new records do not start the garbage collector (CPython's first threshold)."""


class Fetcher:
    """Fetches from an assignment.

    Args:
        config: Limits of a fetch.
        assignment: The partitions.
        fetchable: Returns the cursors that may have records, the one served longest ago first.
        on_error: Called with a cursor that failed; raises, unless the partition is just removed.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        assignment: Assignment,
        fetchable: Callable[[], list[PartitionCursor]],
        on_error: Callable[[PartitionCursor, EmbedlogError], None],
    ) -> None:
        self._config, self._assignment = config, assignment
        self._fetchable, self._on_error = fetchable, on_error
        self._wait_began = monotonic()
        """When fetch_max_wait_ms began (with fetch_min_bytes)."""

    def fetch_one(
        self, take: Callable[[PartitionCursor, int | None], T | None], ends: Ends | None
    ) -> T | None:
        """Return what ``take`` returns for the first partition that has something below its end."""
        max_bytes = self._config.max_partition_fetch_bytes
        for cursor in self._fetchable():
            try:
                stop = None if ends is None else ends.get(cursor.partition, 0)
                if stop is not None and cursor.position() >= stop:
                    continue
                cursor.fetch_if_empty(max_bytes)
                taken = take(cursor, stop)
            except EmbedlogError as error:
                self._on_error(cursor, error)
                continue
            if taken is not None:
                self._assignment.move_to_end(cursor)
                return taken
        return None

    def fetch_all(
        self,
        take: Callable[[PartitionCursor, int], tuple[list[Any], int] | None],
        max_records: int,
    ) -> dict[TopicPartition, list[Any]]:
        """Return what ``take`` returns for each partition, up to ``max_records`` in all (E9)."""
        taken: dict[TopicPartition, list[Any]] = {}
        budget = self._config.fetch_max_bytes
        partition_budget = self._config.max_partition_fetch_bytes
        cursors = self._fetchable()
        if self._config.fetch_min_bytes > 1 and not self._has_min_bytes(cursors):
            return taken
        for cursor in cursors:
            try:
                budget -= cursor.fetch_if_empty(min(budget, partition_budget))
                while max_records > 0 and (items := take(cursor, max_records)) is not None:
                    taken.setdefault(cursor.partition, []).extend(items[0])
                    max_records -= items[1]
            except EmbedlogError as error:
                if taken:
                    # Good records first; the next call meets the error again (E10).
                    self._assignment.move_to_front(cursor)
                    break
                self._on_error(cursor, error)
                continue
            if cursor.partition in taken:
                self._assignment.move_to_end(cursor)
            if max_records <= 0 or budget <= 0:
                break
        return taken

    def fetch_records(self, max_records: int) -> dict[TopicPartition, list[Record]]:
        """Return up to ``max_records`` records."""
        # None of thousands of new records can be garbage yet, and the collector would traverse
        # them again and again: half of the time of a long list.
        pause = max_records > _GC_THRESHOLD and gc.isenabled()
        if pause:
            gc.disable()
        try:
            return self.fetch_all(take_records, max_records)
        finally:
            if pause:
                gc.enable()

    def _has_min_bytes(self, cursors: list[PartitionCursor]) -> bool:
        """Return whether fetch_min_bytes are fetched, or fetch_max_wait_ms have passed."""
        size, max_bytes = 0, self._config.max_partition_fetch_bytes
        for cursor in cursors:
            try:
                cursor.fetch(max_bytes)
            except EmbedlogError:
                return True  # it occurs again once the records before it were returned
            size += cursor.buffered_bytes
        waited_ms = (monotonic() - self._wait_began) * 1000
        enough = size >= self._config.fetch_min_bytes or waited_ms >= self._config.fetch_max_wait_ms
        if enough:
            self._wait_began = monotonic()
        return enough


# What is taken of one partition


def take_record_iterator(
    max_offsets: int | None, cursor: PartitionCursor, stop: int | None
) -> Iterator[Record] | None:
    """Take the records of one batch as an iterator, which makes each record when it is needed.

    Args:
        max_offsets: At most the records of so many offsets; None is no limit.
        cursor: The partition.
        stop: Only records below this offset.
    """
    run = cursor.next_run()
    if run is None:
        return None
    if max_offsets is not None:
        limit = run.position + max_offsets
        stop = limit if stop is None else min(stop, limit)
    return run.records_before(stop)


def take_records(cursor: PartitionCursor, max_records: int) -> tuple[list[Record], int] | None:
    """Take some records of one batch, and their number."""
    run = cursor.next_run()
    if run is None:
        return None
    records = list(islice(run.records, max_records))
    return records, len(records)


def take_rows(
    names: tuple[str, ...], cursor: PartitionCursor, max_rows: int
) -> tuple[list[Any], int] | None:
    """Take some rows of one batch as columns, and their number."""
    rows = cursor.next_rows(names, max_rows, None)
    return None if rows is None else ([rows], rows.num_rows)


def take_cursor(cursor: PartitionCursor, stop: int | None) -> PartitionCursor | None:
    """Take the cursor itself, if records of it were fetched."""
    return cursor if cursor.buffered_bytes else None
