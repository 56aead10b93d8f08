"""The file formats of `embedlog export`, `import` and `produce`, by their names and suffixes."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Final

from embedlog.cli.parser import CommandParser
from embedlog.errors import InvalidConfigError

FILES = """\
The suffixes are .jsonl, .ndjson and .json, .csv, .parquet and .pq.  Key, value, headers,
timestamp and partition come back as they were from JSON lines and Parquet; offsets do not: the
records get those of the topic.  CSV holds UTF-8 only; its timestamps are milliseconds, a missing
key or value is an empty field without quotes, and headers are JSON.

If the topic has serializers, keys and values are JSON values in JSON lines, text in CSV, and in
Parquet numbers or text (also of JSON, Avro and UUIDs).  So the topic of an import needs the same
serializers, and a schema for those of Avro; with --raw for both commands, none matter, and every
byte comes back.  Pickled keys and values are always as they are stored.
"""

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

_CHUNK_BYTES = 4 << 20
NOT_TEXT = ("bytes", "pickle")
"""Serializers whose keys and values files have as they are stored."""


def add_file_format(command: CommandParser, **options: Any) -> None:
    """Add the option for the format of a file."""
    about = "the format; by default that of the suffix of FILE, and JSON lines for -"
    command.add_argument("--format", choices=(JSONL, CSV, PARQUET), help=about, **options)


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


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """Yield a file, or stdin."""
    if path == STANDARD_STREAM:
        yield sys.stdin.buffer
    else:
        with open(path, "rb") as file:
            yield file


def file_size(file: IO[Any]) -> int:
    """Return the bytes of an open file; 0 if it is a pipe or the like."""
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError):
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def input_lines(source: Any) -> Iterator[list[bytes]]:
    """Yield lines without their ends, as many as arrive at the same time.

    Args:
        source: A binary file with `read1`.
    """
    rest = b""
    # read1 returns what is available, so that a line is sent as soon as it is typed.
    while data := source.read1(_CHUNK_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


def keyed(
    lines: list[bytes], separator: bytes | None
) -> tuple[list[bytes], list[bytes | None] | None]:
    """Return values and keys of lines; one without the separator is a value only, as for kcat."""
    if not separator:
        return lines, None
    pairs = [line.partition(separator) for line in lines]
    values = [value if mark else key for key, mark, value in pairs]
    return values, [key if mark else None for key, mark, _ in pairs]
