"""Looking at what a query read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def values_of(rows: Iterable[Any]) -> list[int]:
    """The values of rows as numbers, sorted: tasks come in any order."""
    return sorted(int(row["value"]) for row in rows)
