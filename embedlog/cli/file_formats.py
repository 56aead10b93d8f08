"""The file formats of `embedlog export` and `embedlog import`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

from embedlog.config import TopicConfig
from embedlog.errors import InvalidConfigError
from embedlog.lazy import pa

JSONL: Final = "jsonl"
CSV: Final = "csv"
PARQUET: Final = "parquet"
STANDARD_STREAM: Final = "-"
"""The name of stdin or stdout as a file."""

_SUFFIXES = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), JSONL),
    ".csv": CSV,
    **dict.fromkeys((".parquet", ".pq"), PARQUET),
}

RAW = ("bytes", "bytes")
"""The names of serializers that leave keys and values as they are stored."""
NOT_TEXT = ("bytes", "pickle")
"""Serializers whose keys and values files have as they are stored."""

MAX_ROWS = 1 << 17
MAX_BYTES = 16 << 20
"""Records are read and written in tables of about these rows or bytes."""


def tables_of(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield tables of many rows: topics often consist of small batches."""
    table: list[Any] = []
    rows = size = 0
    for batch in batches:
        table.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= MAX_ROWS or size >= MAX_BYTES:
            yield pa.Table.from_batches(table)
            table, rows, size = [], 0, 0
    if table:
        yield pa.Table.from_batches(table)


def serializers_of(config: TopicConfig, *, raw: bool) -> tuple[str, str]:
    """Return the names of the serializers of the keys and values in a file."""
    return RAW if raw else (config.key_serializer, config.value_serializer)


def format_of(file: str, name: str | None) -> str:
    """Return the format of a file: the named one, or that of its suffix.

    Raises:
        InvalidConfigError: The suffix is unknown, or a stream cannot have this format.
    """
    if file == STANDARD_STREAM:
        if name == PARQUET:
            raise InvalidConfigError(
                "Parquet needs a file, it cannot be read from or written to a pipe",
                todo="Name a file, or use --format jsonl.",
            )
        return name or JSONL
    suffix = os.path.splitext(file)[1].lower()
    if name is None and suffix not in _SUFFIXES:
        raise InvalidConfigError(
            f"The suffix {suffix!r} is not that of a known format"
            if suffix
            else "The name of the file has no suffix",
            path=file,
            todo=f"Use --format, or one of {', '.join(_SUFFIXES)}.",
        )
    return name or _SUFFIXES[suffix]
