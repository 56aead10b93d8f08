"""The file formats of `embedlog export` and `embedlog import`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Final

from embedlog.cli.parser import CommandParser
from embedlog.config import TopicConfig
from embedlog.errors import InvalidConfigError, InvalidRecordError
from embedlog.lazy import pa

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

RAW = ("bytes", "bytes")
"""The names of serializers that leave keys and values as they are stored."""
NOT_TEXT = ("bytes", "pickle")
"""Serializers whose keys and values files have as they are stored."""

_BLOCK_BYTES = 4 << 20
_BATCH_ROWS = 1 << 10
"""How many rows of Parquet are decoded at once; a small file may hold large rows often."""
_CHUNK_BYTES = 4 << 20
MAX_ROWS = 1 << 17
MAX_BYTES = 16 << 20
"""Records are read and written in tables of about these rows or bytes."""


def add_file_format(command: CommandParser, **options: Any) -> None:
    """Add the option for the format of a file."""
    about = "the format; by default that of the suffix of FILE, and JSON lines for -"
    command.add_argument("--format", choices=("jsonl", "csv", "parquet"), help=about, **options)


def file_size(file: IO[Any]) -> int:
    """Return the bytes of an open file; 0 if it is a pipe or the like."""
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError):
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def input_lines(source: Any) -> Iterator[list[bytes]]:
    """Yield lines without their ends, as many as arrive at once.

    Args:
        source: A binary file with `read1`.
    """
    rest = b""
    # read1 returns what is available, so that a line that is typed is sent at once.
    while data := source.read1(_CHUNK_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


def open_parquet(file: IO[bytes]) -> Any:
    """Return a file as a `pyarrow.parquet.ParquetFile`, in which INT96 is microseconds.

    That is what Spark and Hive write as INT96; in nanoseconds, pyarrow's default, the years
    before 1678 and after 2262 would silently become others.
    """
    from pyarrow import parquet

    return parquet.ParquetFile(file, coerce_int96_timestamp_unit="us")


def parquet_tables(file: IO[bytes], columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the rows of a Parquet file as tables; None means all columns.

    Raises:
        InvalidRecordError: It has times of INT96 that neither microseconds nor nanoseconds hold.
    """
    from pyarrow import parquet

    source = open_parquet(file)
    facts, stored = source.metadata, source.schema
    groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    bytes_per_row = sum(group.total_byte_size for group in groups) // (facts.num_rows or 1)
    rows = max(1, min(_BATCH_ROWS, _BLOCK_BYTES // (bytes_per_row or 1)))
    tables = tables_of(source.iter_batches(rows, columns=columns))
    if all(stored.column(number).physical_type != "INT96" for number in range(len(stored))):
        yield from tables
        return
    exact = tables_of(parquet.ParquetFile(file).iter_batches(rows, columns=columns))
    for table, in_nanoseconds in zip(tables, exact, strict=True):
        times = [field.name for field in table.schema if field not in in_nanoseconds.schema]
        target = in_nanoseconds.select(times)
        if table.select(times).cast(target.schema, safe=False).equals(target):
            yield table  # Both wrap around alike, so there are no smaller parts of a second.
            continue
        try:
            table.cast(in_nanoseconds.schema)
        except pa.ArrowInvalid as error:
            raise InvalidRecordError(
                f"The file has times in nanoseconds beside others that are out of their range: "
                f"{error}",
                todo="Write the file again with timestamps in microseconds.",
            ) from error
        yield in_nanoseconds


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
