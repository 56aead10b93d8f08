"""The file formats of `embedlog export` and `embedlog import`."""

from __future__ import annotations

import os
from typing import Final

from embedlog.config import TopicConfig
from embedlog.errors import InvalidConfigError

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
