"""What a call takes of one partition in its turn."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from embedlog.consumer.assignment import PartitionCursor
from embedlog.record import Record

FEW = 700
"""Records that do not set off the garbage collector (CPython's first threshold)."""


def run(few: int | None, feed: PartitionCursor, stop: int | None) -> Iterator[Record] | None:
    """Take the records of one batch, or few of them, to be made when they are looked at.

    Args:
        few: About how many at most; None is all.
        feed: Of which partition.
        stop: Those below this offset.
    """
    found = feed.run()
    if found is None:
        return None
    if few is not None:
        nearby = found.position + few
        stop = nearby if stop is None else min(stop, nearby)
    return found.before(stop)


def records(feed: PartitionCursor, most: int) -> tuple[list[Record], int] | None:
    """Take some records of one batch, and tell how many."""
    found = feed.run()
    if found is None:
        return None
    taken = list(islice(found.records, most))
    return taken, len(taken)


def rows(names: tuple[str, ...], feed: PartitionCursor, most: int) -> tuple[list[Any], int] | None:
    """Take some rows of one batch as columns, and tell how many."""
    found = feed.arrow(names, most, None)
    return None if found is None else ([found], found.num_rows)


def filled(feed: PartitionCursor, stop: int | None) -> PartitionCursor | None:
    """Take the partition itself, if anything of it was read."""
    return feed if feed.buffered else None


@contextmanager
def collector_held() -> Iterator[None]:
    """Hold the garbage collector back while thousands of records are made.

    None of them can be garbage yet, and it would go through them again and
    again: half of the time of a long list.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
