"""A range of offsets: what a view of a topic consists of."""

from __future__ import annotations

from typing import NamedTuple


class OffsetRange(NamedTuple):
    """Offsets ``[start, stop)`` of one partition."""

    partition: int
    start: int
    stop: int
