"""A record of a typed topic on its way to a batch.

By itself, since producers of bytes ask whether a value is one, and need nothing else of `schemas`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from embedlog.schemas.rows import RowEncoder


class TypedRow(NamedTuple):
    """A record that a program sent: its checked values, or a tombstone."""

    values: tuple[Any, ...] | None
    """One per column, as `values.arrow_array` takes them; None for a tombstone."""
    key: tuple[Any, ...]
    """The values of the key columns."""
    time: Any
    """The value of the timestamp column; None if the topic has none."""
    encoder: RowEncoder
    """What checked it."""
