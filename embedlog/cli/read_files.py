"""Reads files as tables of Arrow: rows for a typed topic, and the columns of one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import IO, Any, NamedTuple

from embedlog.batch.tables import combined
from embedlog.batch.wire import headers_type
from embedlog.cli.file_formats import CSV, PARQUET, file_size, input_lines
from embedlog.errors import InvalidRecordError, InvalidSchemaError
from embedlog.lazy import pa
from embedlog.schemas.infer import columns_of
from embedlog.schemas.json_columns import from_json, json_type, read_json
from embedlog.schemas.topic_schema import TopicSchema

INFERRED_BYTES = 64 << 20
"""How much of a file of text the types of its columns are inferred from."""
MAX_ROWS = 1 << 17
MAX_BYTES = 16 << 20
"""Records are read and written in tables of about these rows or bytes."""
_BLOCK_BYTES = 4 << 20
_BATCH_ROWS = 1 << 10
"""How many rows of Parquet are decoded together; a small file may hold large rows often."""
_LONG_ROW = "straddling object"
"""In pyarrow's error about a row of CSV that is longer than a block."""
_WRONG = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
"""What a value of another form than that of its column's type leads to."""
_NO_TIME = re.compile(r"CSV conversion error to (timestamp|date32)")
_CSV_NULLS = ["", "NA", "N/A", "NaN", "nan", "NULL", "null", "None"]
"""What stands for no value in CSV of a typed topic, unless it is in quotes."""

Select = Callable[[list[str]], list[str]]
"""Takes the names of the columns of a file, and returns those to read."""


class FileRows(NamedTuple):
    """Some consecutive rows of a file."""

    table: Any
    """With the columns of the file."""
    before: int
    """How many rows, or lines, of the file precede these."""
    done: int
    """The bytes of the file up to the end of the rows, for the progress."""


def lines_as_rows(file: IO[bytes], parse: Callable[[list[bytes], int], Any]) -> Iterator[FileRows]:
    """Yield the lines of a file as rows; ``parse`` makes a table of lines and their predecessors'
    number, or returns None if they are empty.
    """
    before = done = 0
    for lines in input_lines(file):
        done += sum(map(len, lines)) + len(lines)
        table = parse(lines, before)
        if table is not None:
            yield FileRows(table, before, done)
        before += len(lines)


def tables_of(batches: Iterable[Any]) -> Iterator[Any]:
    """Return tables of many rows: topics often consist of small batches."""
    return combined(batches, MAX_ROWS, MAX_BYTES)


# Parquet


def open_parquet(file: IO[bytes]) -> Any:
    """Return a file as a `pyarrow.parquet.ParquetFile`, in which INT96 is microseconds.

    That is what Spark and Hive write as INT96; in nanoseconds, pyarrow's default, the years
    before 1678 and after 2262 would silently become others.
    """
    from pyarrow import parquet

    return parquet.ParquetFile(file, coerce_int96_timestamp_unit="us")


def parquet_rows(file: IO[bytes], select: Select | None = None) -> Iterator[FileRows]:
    """Yield the rows of a Parquet file.

    Raises:
        InvalidRecordError: It is damaged, or has times of INT96 that neither microseconds nor
            nanoseconds hold.
    """
    size, before = file_size(file), 0
    try:
        source = open_parquet(file)
        columns = select and select(source.schema_arrow.names)
        for table in _parquet_tables(file, source, columns):
            done = before + table.num_rows
            yield FileRows(table, before, size * done // source.metadata.num_rows)
            before = done
    except (pa.ArrowException, OSError) as error:
        raise InvalidRecordError(f"The file is not Parquet, or damaged: {error}") from error


def _parquet_tables(file: IO[bytes], source: Any, columns: list[str] | None) -> Iterator[Any]:
    from pyarrow import parquet

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


# CSV


def csv_rows(
    file: IO[bytes],
    types: dict[str, Any],
    nulls: list[str],
    todo: str,
    *,
    block_bytes: int = _BLOCK_BYTES,
    select: Select | None = None,
) -> Iterator[FileRows]:
    """Yield the rows of a CSV file, whose first line has the names of the columns.

    Args:
        file: The file.
        types: The types of columns; others are inferred.
        nulls: What stands for no value, unless it is in quotes.
        todo: What the error says to do if the file is not such a file.
        block_bytes: How many bytes are parsed together.  pyarrow reads 32 blocks ahead, and refuses
            a row that is longer than a block, so that the file is read again in larger ones.
        select: Which columns to read; all by default.

    Raises:
        InvalidRecordError: The file is not CSV, or a value does not have the type of its column.
    """
    from pyarrow import csv

    skip, size = 0, file_size(file)
    with ExitStack() as files:
        while True:
            rows = 0
            try:
                reader = csv.open_csv(
                    file,
                    csv.ReadOptions(block_size=block_bytes, use_threads=False),
                    csv.ParseOptions(newlines_in_values=True),
                    _csv_options(nulls, types),
                )
                names = select(reader.schema.names) if select else reader.schema.names
                for batch in reader:
                    table = pa.Table.from_batches([batch.select(names)]).slice(max(skip - rows, 0))
                    rows += batch.num_rows
                    if table.num_rows:
                        done = file.tell() if file.seekable() else 0
                        yield FileRows(table, rows - table.num_rows, done)
                return
            except pa.ArrowException as error:
                if _LONG_ROW in str(error) and block_bytes < size:
                    block_bytes *= 8
                elif (
                    _NO_TIME.search(str(error))
                    and any(map(_is_time, types.values()))
                    and file.seekable()
                ):
                    # Such as the year 10000, which `from_json` reads.
                    types = {
                        n: pa.string() if _is_time(kind) else kind for n, kind in types.items()
                    }
                elif _LONG_ROW in str(error) and not size:
                    raise InvalidRecordError(
                        f"A row of CSV from a pipe is longer than {block_bytes} bytes",
                        todo="Read it from a file.",
                    ) from None
                else:
                    raise InvalidRecordError(
                        f"The file is not CSV with these columns: {error}", todo=todo
                    ) from error
            skip = max(skip, rows)
            if size:  # Anew, since pyarrow may still read ahead in this one.
                file = files.enter_context(open(f"/proc/self/fd/{file.fileno()}", "rb"))
            file.seek(0)


def _csv_options(nulls: list[str], types: dict[str, Any] | None = None) -> Any:
    from pyarrow import csv

    return csv.ConvertOptions(
        column_types=types,
        null_values=nulls,
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )


# Rows of a typed topic


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
        yield from parquet_rows(file)
        return
    if file_format == CSV:
        stored = {name: kind if is_csv_type(kind) else pa.string() for name, kind in types.items()}
        parts = csv_rows(file, stored, _CSV_NULLS, "Correct the file, or the schema of the topic.")
    else:
        columns = pa.schema([(name, json_type(kind)) for name, kind in types.items()])
        parts = lines_as_rows(file, lambda lines, before: _parse(lines, columns, before))
    decode = _of_text if file_format == CSV else from_json
    for rows in parts:
        yield rows._replace(table=_decoded(rows.table, types, rows.before, decode))


def is_csv_type(data_type: Any) -> bool:
    """Whether the text of a value in CSV is that of pyarrow, and not JSON."""
    types = pa.types
    return not (
        types.is_nested(data_type)
        or types.is_binary(data_type)
        or types.is_fixed_size_binary(data_type)
        or types.is_duration(data_type)
        or types.is_float16(data_type)
        or types.is_decimal256(data_type)
        or (types.is_decimal(data_type) and data_type.scale < 0)
    )


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
    if not (binary or _is_time(data_type)):
        column = column.cast(json_type(data_type))
    return from_json(column, data_type)


def _parse(lines: list[bytes], schema: Any, before: int) -> Any:
    """Return the objects of lines as a table, with the columns that they have."""
    text = [line for line in lines if line.strip()]
    if not text:
        return None
    try:
        table = read_json(text, schema)
    except pa.ArrowException as error:
        where, reason = f"A line after {before}", error
        for number, line in enumerate(lines, before + 1):
            try:
                if line.strip():
                    read_json([line], schema)
            except pa.ArrowException as error_of_line:
                where, reason = f"Line {number}", error_of_line
                break
        raise InvalidRecordError(
            f"{where} is not an object of the topic's columns: {reason}"
        ) from None

    def is_absent(name: str) -> bool:
        """Whether no line has the column: pyarrow adds columns of nulls for those."""
        quoted = json.dumps(name).encode()
        plain = json.dumps(name, ensure_ascii=False).encode()
        return not any(quoted in line or plain in line for line in text)

    nulls = [name for name in schema.names if table[name].null_count == table.num_rows]
    return table.drop_columns(list(filter(is_absent, nulls)))


def _decoded(table: Any, types: dict[str, Any], before: int, decode: Any) -> Any:
    """Return a table whose columns have the types of the topic."""
    for index, name in enumerate(table.column_names):
        column = table.column(index)
        if name not in types or column.type == types[name]:
            continue
        if pa.types.is_decimal(column.type) and pa.types.is_integer(types[name]):
            continue  # The topic casts it, or names the row.
        try:
            table = table.set_column(index, name, decode(column, types[name]))
        except (*_WRONG, pa.ArrowException) as error:
            raise InvalidRecordError(
                f"Column {name} in the rows from {before + 1:,} on is not {types[name]}: {error}"
            ) from error
    return table


# The columns of a file


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
    from pyarrow import csv

    try:
        if file_format == PARQUET:
            columns = open_parquet(file).schema_arrow.remove_metadata()
            return InferredSchema(columns_of(columns), True)
        data = file.read(INFERRED_BYTES)
        complete = not file.read(1)
        if not complete:
            data = data[: data.rfind(b"\n") + 1]
        if file_format == CSV:
            table = csv.read_csv(
                pa.BufferReader(data),
                csv.ReadOptions(block_size=len(data) + 1),
                csv.ParseOptions(newlines_in_values=True),
                _csv_options(_CSV_NULLS),
            )
        else:
            table = read_json([data], None)
        columns = columns_of(table.schema)
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
