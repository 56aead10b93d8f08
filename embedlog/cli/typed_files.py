"""Files of rows: read for a typed topic, inferred as its schema, and written from it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from embedlog.batch.wire import headers_type
from embedlog.cli.file_formats import (
    CSV,
    PARQUET,
    file_size,
    input_lines,
    open_parquet,
    parquet_tables,
)
from embedlog.cli.parser import CommandParser
from embedlog.errors import InvalidRecordError, InvalidSchemaError
from embedlog.lazy import pa
from embedlog.schemas.infer import columns_of
from embedlog.schemas.json_columns import (
    from_json,
    has_text,
    in_utc,
    json_objects,
    json_type,
    read_json,
    time_texts,
    to_json,
)
from embedlog.schemas.topic_schema import TopicSchema

INFERRED_BYTES = 64 << 20
"""How much of a file of text the types of its columns are inferred from."""
_BLOCK_BYTES = 4 << 20
_LONG_ROW = "straddling object"
"""In pyarrow's error about a row that is longer than a block."""
_WRONG = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
"""What a value of another form than that of its column's type leads to."""
_NO_TIME = re.compile(r"CSV conversion error to (timestamp|date32)")
_CSV_NULLS = ["", "NA", "N/A", "NaN", "nan", "NULL", "null", "None"]
"""What stands for no value in CSV, unless it is in quotes."""


class FileRows(NamedTuple):
    """Some consecutive rows of a file."""

    table: Any
    """With the columns of the file."""
    done: int
    """The bytes of the file up to the end of the rows."""


def read_rows(file: IO[bytes], file_format: str, schema: TopicSchema) -> Iterator[FileRows]:
    """Yield the rows of a file; text is read as the types of a topic.

    Raises:
        InvalidRecordError: The file does not have this format, or a value not the type of its
            column.
    """
    types = {field.name: field.type for field in schema.columns}
    # A timestamp may be a number or text: pyarrow sees which.
    types["partition"] = pa.int32()
    types["headers"] = headers_type()
    if file_format == PARQUET:
        return _parquet(file)
    return _csv(file, types) if file_format == CSV else _json_lines(file, types)


def _parquet(file: IO[bytes]) -> Iterator[FileRows]:
    try:
        total, size, done = open_parquet(file).metadata.num_rows, file_size(file), 0
        for table in parquet_tables(file):
            done += table.num_rows
            yield FileRows(table, size * done // total)
    except (pa.ArrowException, OSError) as error:
        raise InvalidRecordError(f"The file is not Parquet, or damaged: {error}") from error


def _csv(
    file: IO[bytes],
    types: dict[str, Any],
    block_bytes: int = _BLOCK_BYTES,
    skip: int = 0,
    times_as_text: bool = False,
) -> Iterator[FileRows]:
    from pyarrow import csv

    convert = csv.ConvertOptions(
        column_types={
            name: kind
            if _is_csv_type(kind) and not (times_as_text and _is_time(kind))
            else pa.string()
            for name, kind in types.items()
        },
        null_values=_CSV_NULLS,
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    rows = 0
    try:
        reader = csv.open_csv(
            file,
            csv.ReadOptions(block_size=block_bytes, use_threads=False),
            csv.ParseOptions(newlines_in_values=True),
            convert,
        )
        for batch in reader:
            table = pa.Table.from_batches([batch]).slice(max(skip - rows, 0))
            rows += batch.num_rows
            if table.num_rows:
                decoded = _decoded(table, types, rows - table.num_rows, _of_text)
                yield FileRows(decoded, file.tell() if file.seekable() else 0)
    except pa.ArrowException as error:
        if _LONG_ROW in str(error) and block_bytes < file_size(file):
            file.seek(0)
            yield from _csv(file, types, block_bytes * 8, max(skip, rows), times_as_text)
            return
        if _NO_TIME.search(str(error)) and not times_as_text and file.seekable():
            file.seek(0)  # Such as the year 10000, which `from_json` reads.
            yield from _csv(file, types, block_bytes, max(skip, rows), True)
            return
        raise InvalidRecordError(
            f"The file is not CSV of the topic's columns: {error}",
            todo="Correct the file, or the schema of the topic.",
        ) from error


def _is_csv_type(data_type: Any) -> bool:
    """Whether the text of a value in CSV is that of pyarrow, and not JSON."""
    types = pa.types
    binary = types.is_binary(data_type) or types.is_fixed_size_binary(data_type)
    others = binary or types.is_duration(data_type) or types.is_float16(data_type)
    others = others or types.is_decimal256(data_type)
    others = others or (types.is_decimal(data_type) and data_type.scale < 0)
    return not (others or types.is_nested(data_type))


def _is_time(data_type: Any) -> bool:
    return bool(pa.types.is_timestamp(data_type) or pa.types.is_date(data_type))


def _of_text(column: Any, data_type: Any) -> Any:
    """Return the values of a column of CSV that are JSON."""
    if pa.types.is_nested(data_type):
        items = [None if text is None else json.loads(text) for text in column.to_pylist()]
        lines = [json.dumps({"item": item}).encode() for item in items]
        parsed = read_json(lines, pa.schema([("item", json_type(data_type))]))
        return from_json(parsed["item"], data_type)
    binary = pa.types.is_binary(data_type) or pa.types.is_fixed_size_binary(data_type)
    if binary or _is_time(data_type):
        return from_json(column, data_type)
    return from_json(column.cast(json_type(data_type)), data_type)


def _json_lines(file: IO[bytes], types: dict[str, Any]) -> Iterator[FileRows]:
    schema = pa.schema([(name, json_type(kind)) for name, kind in types.items()])
    before = done = 0
    for lines in input_lines(file):
        done += sum(map(len, lines)) + len(lines)
        text = [line for line in lines if line.strip()]
        if text:
            table = _parse(text, lines, schema, before)
            yield FileRows(_decoded(table, types, before, from_json), done)
        before += len(lines)


def _parse(text: list[bytes], lines: list[bytes], schema: Any, before: int) -> Any:
    """Return the objects of lines as a table, with the columns that they have."""
    try:
        table = read_json(text, schema)
    except pa.ArrowException as error:
        number, error = _first_failure(lines, schema) or (0, error)
        where = f"Line {before + number}" if number else f"A line after {before}"
        raise InvalidRecordError(
            f"{where} is not an object of the topic's columns: {error}"
        ) from None
    absent = [
        name
        for name in schema.names
        if table[name].null_count == table.num_rows and not _has(text, name)
    ]
    return table.drop_columns(absent)


def _has(lines: list[bytes], name: str) -> bool:
    """Whether a column may be in some of the lines: pyarrow adds columns of nulls for others."""
    quoted = json.dumps(name).encode()
    plain = json.dumps(name, ensure_ascii=False).encode()
    return any(quoted in line or plain in line for line in lines)


def _first_failure(lines: list[bytes], schema: Any) -> tuple[int, Exception] | None:
    """Return the number of the first line that cannot be read, and why."""
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                read_json([line], schema)
        except pa.ArrowException as error:
            return number, error
    return None


def _decoded(table: Any, types: dict[str, Any], before: int, decode: Any) -> Any:
    """Return a table whose columns have the types of the topic."""
    for index, name in enumerate(table.column_names):
        if name not in types or table.column(index).type == types[name]:
            continue
        if pa.types.is_decimal(table.column(index).type) and pa.types.is_integer(types[name]):
            continue  # The topic casts it, or names the row.
        try:
            column = decode(table.column(index), types[name])
        except (*_WRONG, pa.ArrowException) as error:
            raise InvalidRecordError(
                f"Column {name} in the rows from {before + 1:,} on is not {types[name]}: {error}"
            ) from error
        table = table.set_column(index, name, column)
    return table


# Schemas


class InferredSchema(NamedTuple):
    """The columns of a file."""

    columns: Any
    """As a `pyarrow.Schema`."""
    complete: bool
    """Whether they follow from all of the file."""


def infer_schema(file: IO[bytes], file_format: str) -> InferredSchema:
    """Return the columns of a file: the types of Parquet, and those that pyarrow infers for text.

    Raises:
        InvalidRecordError: The file does not have this format.
        InvalidSchemaError: The type of a column cannot be inferred.
    """
    try:
        if file_format == PARQUET:
            columns = open_parquet(file).schema_arrow.remove_metadata()
            return InferredSchema(columns_of(columns), True)
        data = file.read(INFERRED_BYTES)
        complete = not file.read(1)
        if not complete:
            data = data[: data.rfind(b"\n") + 1]
        columns = columns_of(_csv_schema(data) if file_format == CSV else _json_schema(data))
    except (pa.ArrowException, OSError) as error:
        raise InvalidRecordError(f"The file is not {file_format}: {error}") from error
    for field in columns:
        if pa.types.is_null(field.type):
            raise InvalidSchemaError(
                f"The column {field.name} of the file has no values",
                column=field.name,
                todo="Leave it out of the file, or pass a schema to create_topic in Python.",
            )
    return InferredSchema(columns, complete)


def _csv_schema(data: bytes) -> Any:
    from pyarrow import csv

    return csv.read_csv(
        pa.BufferReader(data),
        csv.ReadOptions(block_size=len(data) + 1),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(
            null_values=_CSV_NULLS, strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    ).schema


def _json_schema(data: bytes) -> Any:
    return read_json([data], None).schema


# Writing


class CsvRows:
    """Writes tables as CSV; `json_columns` says how values are written for which it has no text.

    Args:
        file: Where to write.
        schema: The columns.
    """

    def __init__(self, file: IO[bytes], schema: Any) -> None:
        from pyarrow import csv

        self._schema = pa.schema([(field.name, _text_type(field.type)) for field in schema])
        self._file, self._writer = file, csv.CSVWriter(file, self._schema)

    def write(self, table: Any) -> None:
        """Write the rows of a table."""
        columns = []
        for field in self._schema:
            column = in_utc(table[field.name])
            if column.type != field.type:
                column = pa.array(list(map(_json_text, to_json(column))), field.type)
            elif _is_time(field.type) and not has_text(column):
                column = time_texts(column)
            columns.append(column)
        rows, writer = pa.table(columns, self._schema.names), self._writer
        if rows.schema != self._schema:
            from pyarrow import csv

            options = csv.WriteOptions(include_header=False)
            writer = csv.CSVWriter(self._file, rows.schema, write_options=options)
        writer.write_table(rows)

    def close(self) -> None:
        """Write the end of the file."""
        self._writer.close()


def _text_type(data_type: Any) -> Any:
    if pa.types.is_duration(data_type) or pa.types.is_float16(data_type):
        return json_type(data_type)
    if pa.types.is_timestamp(data_type) and data_type.tz is not None:
        return pa.timestamp(data_type.unit, "UTC")
    if pa.types.is_decimal(data_type):
        return data_type
    return data_type if _is_csv_type(data_type) else pa.string()


def _json_text(item: Any) -> Any:
    return json.dumps(item, ensure_ascii=False) if isinstance(item, list | dict) else item


class JsonRows:
    """Writes tables as JSON lines: an object for each row.

    Args:
        file: Where to write.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, table: Any) -> None:
        """Write the rows of a table."""
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in json_objects(table))
        self._file.write("".join(lines).encode())

    def close(self) -> None:
        """Do nothing: the last line is complete."""


def add_table_format(command: CommandParser, json: str) -> None:
    """Add the option for the format of a result; ``json`` says what JSON holds."""
    command.add_argument(
        "--format",
        choices=("table", "csv", "jsonl", "json"),
        default="table",
        help=f"by default a table; with --json {json}",
    )


def write_result(table: Any, file_format: str) -> None:
    """Write a result to stdout, as JSON lines or CSV."""
    out = sys.stdout.buffer
    writer = JsonRows(out) if file_format == "jsonl" else CsvRows(out, table.schema)
    writer.write(table)
    writer.close()
    out.flush()


def with_plain_timestamp(table: Any) -> Any:
    """Return a table whose column ``timestamp``, if it has one, is in milliseconds."""
    index = table.schema.get_field_index("timestamp")
    if index < 0:
        return table
    return table.set_column(index, "timestamp", table.column(index).cast(pa.int64()))
