"""`embedlog export`: writes the records of a topic to a file."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import IO, Any

from embedlog.api import TopicView
from embedlog.api.frames import decoded_items
from embedlog.api.offset_range import OffsetRange
from embedlog.cli import formats
from embedlog.cli.file_formats import (
    CSV,
    NOT_TEXT,
    PARQUET,
    STANDARD_STREAM,
    format_of,
    serializers_of,
    tables_of,
)
from embedlog.cli.open_log import to_read
from embedlog.cli.parser import OK
from embedlog.cli.printing import note, say, say_json
from embedlog.cli.selection import offset_range, partitions
from embedlog.display import plural
from embedlog.errors import InvalidConfigError, InvalidRecordError
from embedlog.lazy import pa, pc
from embedlog.progress import ProgressBar, format_bytes
from embedlog.record import Record
from embedlog.serializers import encode_json, json_text


def export(args: argparse.Namespace) -> int:
    """Write the records that the log has now, and print how many."""
    name, numbers = args.topic
    file_format = format_of(args.file, args.format)
    with to_read(args) as log, ProgressBar(f"export {name}", _count) as bar:
        logs = partitions(log, name, numbers)
        ranges = [offset_range(part, args.first, args.stop) for part in logs]
        view = TopicView(log.root, name, ranges)
        total, counts = len(view), dict.fromkeys((part.partition for part in ranges), 0)
        serializers = serializers_of(log.root.topic(name).config, raw=args.raw)
        schema = decoded_items(view.schema().empty_table(), name, serializers).schema
        with _destination(args.file, force=args.force) as file:
            writer = _writer(file_format, file, name, schema, serializers)
            try:
                for table in tables_of(view.batches()):
                    writer.write(decoded_items(table, name, serializers))
                    for entry in pc.value_counts(table["partition"]).to_pylist():
                        counts[entry["values"]] += entry["counts"]
                    bar(sum(counts.values()), total)
            finally:
                # Also after an error: a writer of Parquet would do it later, in a closed file.
                writer.close()
    _report(args, file_format, ranges, counts)
    return OK


def _count(records: float) -> str:
    return plural(int(records), "record")


_LOOSE = re.compile(r"[\r\n]|NaN|Infinity")
"""In JSON that takes several lines, or may not be strict."""


@contextmanager
def _destination(path: str, *, force: bool) -> Iterator[IO[bytes]]:
    """Yield the file to write, which replaces ``path`` only once it is complete.

    Raises:
        InvalidConfigError: The file exists, and is not to be replaced.
    """
    if path == STANDARD_STREAM:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif os.path.exists(path) and not os.path.isfile(path):  # a pipe, or a device
        with open(path, "wb") as file:
            yield file
    else:
        if os.path.exists(path) and not force:
            raise InvalidConfigError(
                "The file exists", path=path, todo="Use --force to replace it."
            )
        part = f"{path}.part"
        try:
            with open(part, "wb") as file:
                yield file
            os.replace(part, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(part)
            raise


def _report(
    args: argparse.Namespace,
    file_format: str,
    ranges: Sequence[OffsetRange],
    counts: dict[int, int],
) -> None:
    """Print what was written: to stderr if the records went to stdout."""
    name, total = args.topic[0], sum(counts.values())
    parts = [{**part._asdict(), "records": counts[part.partition]} for part in ranges]
    document = {"topic": name, "file": args.file, "format": file_format, "records": total}
    if args.file == STANDARD_STREAM:
        if sys.stderr.isatty():
            note(f"Exported {plural(total, 'record')} of {name}")
        return
    document |= {"bytes": os.path.getsize(args.file), "partitions": parts}
    if args.json:
        say_json(document)
        return
    say(
        f"Exported {plural(total, 'record')} of {name} to {args.file} "
        f"({format_bytes(document['bytes'])})"
    )
    for part in ranges:
        records = plural(counts[part.partition], "record")
        say(f"  partition {part.partition}: offsets {part.start} to {part.stop}, {records}")


# Formats


class ParquetRecords:
    """Writes tables as row groups."""

    def __init__(self, file: IO[bytes], schema: Any) -> None:
        from pyarrow import parquet

        self._writer = parquet.ParquetWriter(file, schema, compression="zstd")

    def write(self, table: Any) -> None:
        """Write the rows of a table."""
        self._writer.write_table(table)

    def close(self) -> None:
        """Write the end of the file."""
        self._writer.close()


class CsvRecords:
    """Writes tables as CSV: null is an empty field, and text is quoted."""

    def __init__(self, file: IO[bytes], topic: str, schema: Any) -> None:
        from pyarrow import csv

        self._topic = topic
        types = {pa.timestamp("ms", "UTC"): pa.int64(), pa.binary(): pa.string()}
        fields = [
            pa.field(
                field.name,
                pa.string() if field.name == "headers" else types.get(field.type, field.type),
            )
            for field in schema
        ]
        self._schema = pa.schema(fields)
        self._writer = csv.CSVWriter(file, self._schema)

    def write(self, table: Any) -> None:
        """Write the rows of a table.

        Raises:
            InvalidRecordError: A key or value is not UTF-8.
        """
        columns = []
        for field in self._schema:
            column = table[field.name]
            if column.type == pa.binary():
                column = self._text(table, field.name)
            elif field.name == "headers":
                texts = map(formats.json_headers, _pairs(column))
                column = pa.chunked_array([[None if text == "[]" else text for text in texts]])
            columns.append(column.cast(field.type))
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))

    def _text(self, table: Any, name: str) -> Any:
        try:
            return table[name].cast(pa.string())
        except pa.ArrowInvalid:
            pass
        for row, data in enumerate(table[name].to_pylist()):
            try:
                (data or b"").decode()
            except UnicodeDecodeError as error:
                what = f"The {name} is not UTF-8, which CSV cannot hold: {error}"
                todo = "Export to JSON lines or Parquet."
                raise _refusal(table.slice(row), self._topic, what, todo) from None
        raise AssertionError("Arrow and Python disagree about UTF-8")

    def close(self) -> None:
        """Write the end of the file."""
        self._writer.close()


class JsonRecords:
    """Writes tables as the lines of `embedlog consume --json`."""

    def __init__(self, file: IO[bytes], topic: str, serializers: tuple[str, str]) -> None:
        self._file, self._topic, self._serializers = file, topic, serializers
        self._lines = formats.writer("", as_json=True)

    def write(self, table: Any) -> None:
        """Write the rows of a table.

        Raises:
            InvalidRecordError: JSON cannot hold a key or value, such as NaN.
        """
        key, value = self._serializers
        columns = {name: table[name] for name in table.column_names}
        times = columns["timestamp"].cast(pa.int64()).to_pylist()
        headers = _pairs(columns["headers"]) if "headers" in columns else repeat([])
        rows = zip(
            repeat(self._topic),
            columns["partition"].to_pylist(),
            columns["offset"].to_pylist(),
            times,
            repeat(0),
            self._items(table, "key", key),
            self._items(table, "value", value),
            headers,
            strict=False,
        )
        self._file.write(self._lines([Record(*row) for row in rows]))

    def _items(self, table: Any, name: str, serializer: str) -> list[bytes | str | None]:
        """Return keys or values as bytes, or as JSON."""
        items: list[Any] = table[name].to_pylist()
        if serializer in NOT_TEXT:
            return items
        convert = _one_line if serializer == "json" else json_text
        for row, item in enumerate(items):
            try:
                items[row] = None if item is None else convert(item)
            except ValueError as error:
                what = f"JSON lines cannot hold the {name}: {error}"
                todo = "Use --raw to export the stored bytes."
                raise _refusal(table.slice(row), self._topic, what, todo) from None
        return items

    def close(self) -> None:
        """Do nothing: the last line is complete."""


def _one_line(text: str) -> str:
    """Return stored JSON as strict JSON on one line, unchanged if it is that."""
    if text.strip() == "null":
        raise ValueError("null is what a record without it has")
    return encode_json(json.loads(text)).decode() if _LOOSE.search(text) else text


def _refusal(table: Any, topic: str, what: str, todo: str) -> InvalidRecordError:
    """Return the error that the first row of a table cannot be exported."""
    partition, offset = (table[name][0].as_py() for name in ("partition", "offset"))
    return InvalidRecordError(what, topic=topic, partition=partition, offset=offset, todo=todo)


def _pairs(headers: Any) -> Iterator[list[tuple[str, bytes | None]]]:
    """Yield the headers of each record as pairs."""
    for record in headers.to_pylist():
        yield [(pair["key"], pair["value"]) for pair in record or ()]


def _writer(
    file_format: str, file: IO[bytes], topic: str, schema: Any, serializers: tuple[str, str]
) -> ParquetRecords | CsvRecords | JsonRecords:
    if file_format == PARQUET:
        return ParquetRecords(file, schema)
    if file_format == CSV:
        return CsvRecords(file, topic, schema)
    return JsonRecords(file, topic, serializers)
