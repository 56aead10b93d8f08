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
from typing import IO, Any, Protocol

from embedlog.api import TopicView
from embedlog.api.frames import decoded_items
from embedlog.api.offset_range import OffsetRange
from embedlog.api.typed_topic import TypedTopicView, no_bytes
from embedlog.cli import argument_types as types
from embedlog.cli import formats
from embedlog.cli.file_formats import (
    CSV,
    FILES,
    NOT_TEXT,
    PARQUET,
    STANDARD_STREAM,
    add_file_format,
    format_of,
    serializers_of,
    tables_of,
)
from embedlog.cli.open_log import to_read
from embedlog.cli.parser import OK, CommandParser, add_flag, add_option
from embedlog.cli.printing import note, say, say_json
from embedlog.cli.selection import add_rows, offset_range, partitions, view_of
from embedlog.cli.typed_files import CsvRows, JsonRows, with_plain_timestamp
from embedlog.display import plural
from embedlog.errors import InvalidConfigError, InvalidRecordError, raised_in_body
from embedlog.lazy import pa, pc
from embedlog.progress import ProgressBar, format_bytes
from embedlog.record import Record
from embedlog.registry import binder
from embedlog.serializers import Bind, encode_json, json_text

EXPORT = f"""\
{FILES}
Of a typed topic, the columns of the file are those of the topic, or of --columns, with their
types in Parquet; in CSV and JSON lines, times are text and binary values base64, and in JSON NaN
is null.  Tombstones are left out.  --where is a condition in SQL, and needs Polars.

TIME is a date, with a time or without, in UTC unless it has a zone; or how long ago: 90m, 2d.

examples:
  embedlog export flights flights.parquet --from 2026-01-31 --until 90m
  embedlog export flights --to united.parquet --where "carrier = 'UA'" --columns dest,dep_delay
  embedlog export flights:0,1 - | jq .value
"""


def export_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = EXPORT
    command.add_argument("topic", metavar="TOPIC[:N,N]", type=types.topic)
    command.add_argument("file", metavar="FILE", nargs="?", help="- is stdout")
    add_option(command, "--to", "FILE", "another way to name FILE", dest="to")
    add_file_format(command)
    add_flag(command, "--raw", "write keys and values as they are stored, without serializers")
    add_option(
        command, "--from", "N|TIME", "from this offset or time on", dest="first", type=types.point
    )
    about = "up to this offset or time, without the record at it"
    add_option(command, "--until", "N|TIME", about, dest="stop", type=types.point)
    add_rows(command)
    add_flag(command, "--force", "replace FILE if it exists")


def export(args: argparse.Namespace) -> int:
    """Write the records that the log has now, and print how many."""
    name, numbers = args.topic
    args.file = _file_of(args)
    file_format = format_of(args.file, args.format)
    with to_read(args) as log, ProgressBar(f"export {name}", _count) as bar:
        logs = partitions(log, name, numbers)
        ranges = [offset_range(part, args.first, args.stop) for part in logs]
        view = view_of(log, name, ranges)
        total, counts = len(view), dict.fromkeys((part.partition for part in ranges), 0)
        records: ExportedRows | StoredRecords
        if isinstance(view, TypedTopicView):
            records = ExportedRows(view, args)
        else:
            serializers = serializers_of(log.root.topic(name).config, raw=args.raw)
            records = StoredRecords(view, args, serializers, binder(log.root))
        with _destination(args.file, force=args.force) as file:
            writer = records.writer(file_format, file)
            try:
                for table in records.tables():
                    for entry in pc.value_counts(table["partition"]).to_pylist():
                        counts[entry["values"]] += entry["counts"]
                    writer.write(table)
                    bar(sum(counts.values()), total)
            finally:
                # Also after an error: a writer of Parquet would do it later, in a closed file.
                writer.close()
    _report(args, file_format, ranges, counts)
    return OK


def _file_of(args: argparse.Namespace) -> str:
    files = [file for file in (args.file, args.to) if file is not None]
    if len(files) != 1:
        what = "FILE and --to were both given" if files else "No file was given"
        raise InvalidConfigError(what, todo="Name one file, or - for stdout.")
    return str(files[0])


class StoredRecords:
    """The records of a topic of bytes, with decoded keys and values.

    Args:
        view: The records.
        args: The options.
        serializers: The names of the serializers of keys and values in the file.
        bind: What connects the serializer of Avro to the registry of the log.

    Raises:
        InvalidConfigError, InvalidQueryError: An option is wrong, or for typed topics.
    """

    def __init__(
        self,
        view: TopicView[Any, Any],
        args: argparse.Namespace,
        serializers: tuple[str, str],
        bind: Bind,
    ) -> None:
        if args.columns is not None:
            raise InvalidConfigError(
                "--columns is for typed topics, and the values of this one are bytes",
                topic=view.name,
                todo="Leave it out: the file has keys, values, headers, timestamps and offsets.",
            )
        self._view, self._serializers, self._bind = view, serializers, bind
        empty = view.schema().empty_table()
        self._schema = decoded_items(empty, view.name, serializers, bind).schema
        self._filter = None
        if args.where is not None:
            from embedlog.schemas.row_filter import row_filter

            self._filter = row_filter(args.where, self._schema, view.name)

    def tables(self) -> Iterator[Any]:
        """Yield tables of many records."""
        for table in tables_of(self._view.batches()):
            decoded = decoded_items(table, self._view.name, self._serializers, self._bind)
            yield decoded if self._filter is None else self._filter.keep(decoded)

    def writer(self, file_format: str, file: IO[bytes]) -> Writer:
        """Return a writer of the records."""
        if file_format == PARQUET:
            return ParquetRecords(file, self._schema)
        if file_format == CSV:
            return CsvRecords(file, self._view.name, self._schema)
        return JsonRecords(file, self._view.name, self._serializers)


class ExportedRows:
    """The rows of a typed topic.

    Args:
        view: The records.
        args: The options.

    Raises:
        InvalidConfigError, InvalidQueryError: There is no such column, or an option is wrong.
    """

    def __init__(self, view: TypedTopicView, args: argparse.Namespace) -> None:
        if args.raw:
            raise no_bytes(view.name)
        self._view, self._where = view, args.where
        try:
            self._schema = view.schema(args.columns)
        except KeyError as error:
            raise InvalidConfigError(error.args[0], topic=view.name) from None
        view._condition(args.where)  # Raises if it is wrong.

    def tables(self) -> Iterator[Any]:
        """Yield tables of many rows, with the columns of the file and the partition."""
        names = list(dict.fromkeys([*self._schema.names, "partition"]))
        return tables_of(self._view.batches(names, where=self._where))

    def writer(self, file_format: str, file: IO[bytes]) -> Writer:
        """Return a writer of the records."""
        if file_format == PARQUET:
            return ChosenColumns(ParquetRecords(file, self._schema), self._schema.names)
        schema = with_plain_timestamp(self._schema.empty_table()).schema
        rows = CsvRows(file, schema) if file_format == CSV else JsonRows(file)
        return ChosenColumns(rows, schema.names, plain_timestamp=True)


class ChosenColumns:
    """Writes some columns of tables.

    Args:
        writer: What writes them.
        names: The columns.
        plain_timestamp: Whether timestamps of records are written as milliseconds.
    """

    def __init__(
        self, writer: Writer, names: Sequence[str], *, plain_timestamp: bool = False
    ) -> None:
        self._writer, self._names, self._plain = writer, list(names), plain_timestamp

    def write(self, table: Any) -> None:
        """Write the rows of a table."""
        table = table.select(self._names)
        self._writer.write(with_plain_timestamp(table) if self._plain else table)

    def close(self) -> None:
        """Write the end of the file."""
        self._writer.close()


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
        say(f"  partition {part.partition}: offsets [{part.start}, {part.stop}), {records}")


# Formats


class Writer(Protocol):
    """Writes tables to a file."""

    def write(self, table: Any) -> None:
        """Write the rows of a table."""

    def close(self) -> None:
        """Write the end of the file."""


class ParquetRecords:
    """Writes tables as row groups.

    Args:
        file: Where to write.
        schema: The columns.

    Raises:
        InvalidRecordError: Parquet cannot hold a column, or pyarrow cannot write it.
    """

    def __init__(self, file: IO[bytes], schema: Any) -> None:
        from pyarrow import parquet

        with _refused_by_parquet():
            self._writer = parquet.ParquetWriter(file, schema, compression="zstd")

    def write(self, table: Any) -> None:
        """Write the rows of a table.

        Raises:
            InvalidRecordError: Parquet cannot hold a value.
        """
        with _refused_by_parquet():
            self._writer.write_table(table)

    def close(self) -> None:
        """Write the end of the file."""
        self._writer.close()


@contextmanager
def _refused_by_parquet() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # Of the disk, not of Parquet.
        raise InvalidRecordError(
            f"The records cannot be written as Parquet: {error}",
            todo="Choose other columns with --columns, or export to JSON lines.",
        ) from raised_in_body(error)


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
        convert = _one_line if serializer in ("json", "avro") else json_text
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
