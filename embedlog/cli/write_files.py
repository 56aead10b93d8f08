"""Writes tables of Arrow to files: rows of typed topics, and records of topics of bytes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from typing import IO, Any

from embedlog.cli.file_formats import CSV, JSONL, NOT_TEXT, PARQUET
from embedlog.cli.formats import json_headers, writer
from embedlog.cli.read_files import is_csv_type
from embedlog.errors import InvalidRecordError, raised_in_body
from embedlog.lazy import pa
from embedlog.record import Record
from embedlog.schemas.json_columns import (
    has_text,
    in_utc,
    json_objects,
    json_type,
    time_texts,
    to_json,
)
from embedlog.serializers import encode_json, json_text

Write = Callable[[Any], object]
"""Writes the rows of a table."""
Convert = Callable[[Any], Any]
"""Returns another table of the same rows."""

_LOOSE = re.compile(r"[\r\n]|NaN|Infinity")
"""In JSON that takes several lines, or may not be strict."""


@contextmanager
def rows_writer(
    file: IO[bytes], file_format: str, schema: Any, convert: Convert = lambda table: table
) -> Iterator[Write]:
    """Write tables as the rows of a file; the end of the file is written in any case.

    `json_columns` says how CSV and JSON lines have values for which they have no text.

    Args:
        file: Where to write.
        file_format: The format.
        schema: The columns of the tables.
        convert: Returns the table to write for a table; by default the same.

    Raises:
        InvalidRecordError: Parquet cannot hold a column or a value.
    """
    schema = convert(schema.empty_table()).schema
    if file_format == PARQUET:
        from pyarrow import parquet

        with _refused_by_parquet():
            rows = parquet.ParquetWriter(file, schema, compression="zstd")
        try:

            def write_parquet(table: Any) -> None:
                table = convert(table)
                with _refused_by_parquet():
                    rows.write_table(table)

            yield write_parquet
        finally:
            # Also after an error: Arrow would do it later, in a closed file.
            rows.close()
    elif file_format == CSV:
        from pyarrow import csv

        texts = pa.schema([(field.name, _text_type(field.type)) for field in schema])
        with csv.CSVWriter(file, texts) as lines:
            yield lambda table: _write_csv(file, lines, texts, convert(table))
    else:

        def write_json(table: Any) -> None:
            rows = json_objects(convert(table))
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.write(text.encode())

        yield write_json


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


def _write_csv(file: IO[bytes], lines: Any, schema: Any, table: Any) -> None:
    columns = []
    for field in schema:
        column = in_utc(table[field.name])
        if column.type != field.type:
            items = (
                json.dumps(item, ensure_ascii=False) if isinstance(item, list | dict) else item
                for item in to_json(column)
            )
            column = pa.array(list(items), field.type)
        elif (pa.types.is_timestamp(field.type) or pa.types.is_date(field.type)) and not has_text(
            column
        ):
            column = time_texts(column)
        columns.append(column)
    rows = pa.table(columns, schema.names)
    if rows.schema != schema:
        from pyarrow import csv

        options = csv.WriteOptions(include_header=False)
        lines = csv.CSVWriter(file, rows.schema, write_options=options)
    lines.write_table(rows)


def _text_type(data_type: Any) -> Any:
    if pa.types.is_duration(data_type) or pa.types.is_float16(data_type):
        return json_type(data_type)
    if pa.types.is_timestamp(data_type) and data_type.tz is not None:
        return pa.timestamp(data_type.unit, "UTC")
    if pa.types.is_decimal(data_type) or is_csv_type(data_type):
        return data_type
    return pa.string()


def write_result(table: Any, file_format: str) -> None:
    """Write a result to stdout, as JSON lines or CSV."""
    out = sys.stdout.buffer
    with rows_writer(out, file_format, table.schema) as write:
        write(table)
    out.flush()


def with_plain_timestamp(table: Any) -> Any:
    """Return a table whose column ``timestamp``, if it has one, is in milliseconds."""
    index = table.schema.get_field_index("timestamp")
    if index < 0:
        return table
    return table.set_column(index, "timestamp", table.column(index).cast(pa.int64()))


# Records of topics of bytes


def records_writer(
    file: IO[bytes], file_format: str, schema: Any, topic: str, serializers: tuple[str, str]
) -> AbstractContextManager[Write]:
    """Write tables of records, with decoded keys and values, as `rows_writer`.

    JSON lines are those of `embedlog consume --json`; in CSV, null is an empty field, and text is
    quoted.

    Args:
        file, file_format, schema: As in `rows_writer`.
        topic: The topic, also for errors.
        serializers: The names of those of keys and values.

    Raises:
        InvalidRecordError: The format cannot hold a key or value, such as NaN in JSON.
    """
    if file_format == JSONL:
        lines = writer("", as_json=True)
        return nullcontext(
            lambda table: file.write(lines(_json_records(table, topic, serializers)))
        )
    if file_format == PARQUET:
        return rows_writer(file, file_format, schema)
    return rows_writer(file, file_format, schema, lambda table: _csv_records(table, topic))


def _csv_records(table: Any, topic: str) -> Any:
    """Return records with text for all that CSV has no type for."""
    table = with_plain_timestamp(table)
    for index, field in enumerate(table.schema):
        column = table.column(index)
        if field.name == "headers":
            texts = map(json_headers, _pairs(column))
            column = pa.array([None if text == "[]" else text for text in texts], pa.string())
        elif field.type == pa.binary():
            try:
                column = column.cast(pa.string())
            except pa.ArrowInvalid:
                raise _not_utf8(table, field.name, topic) from None
        table = table.set_column(index, field.name, column)
    return table


def _not_utf8(table: Any, name: str, topic: str) -> InvalidRecordError:
    for row, data in enumerate(table[name].to_pylist()):
        try:
            (data or b"").decode()
        except UnicodeDecodeError as error:
            what = f"The {name} is not UTF-8, which CSV cannot hold: {error}"
            return _refusal(table.slice(row), topic, what, "Export to JSON lines or Parquet.")
    raise AssertionError("Arrow and Python disagree about UTF-8")


def _json_records(table: Any, topic: str, serializers: tuple[str, str]) -> list[Record]:
    """Return records whose keys and values are bytes, or JSON as text."""
    names = table.column_names
    items = [
        _json_items(table, topic, field, serializer)
        for field, serializer in zip(("key", "value"), serializers, strict=True)
    ]
    rows = zip(
        table["partition"].to_pylist(),
        table["offset"].to_pylist(),
        table["timestamp"].cast(pa.int64()).to_pylist(),
        *items,
        _pairs(table["headers"]) if "headers" in names else repeat([]),
        strict=False,
    )
    return [
        Record(topic, partition, offset, time, 0, key, value, headers)
        for partition, offset, time, key, value, headers in rows
    ]


def _json_items(table: Any, topic: str, name: str, serializer: str) -> list[Any]:
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
            raise _refusal(table.slice(row), topic, what, todo) from None
    return items


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
