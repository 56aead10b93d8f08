"""Records of topics of bytes, from JSON, text and the columns of files, as tables to append."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any, NamedTuple
from uuid import UUID

from embedlog.api import Log
from embedlog.batch.encode import binary_array, headers_array
from embedlog.cli.file_formats import CSV, JSONL, NOT_TEXT, keyed
from embedlog.cli.read_files import FileRows, csv_rows, lines_as_rows, parquet_rows
from embedlog.config import INT_MAX
from embedlog.errors import InvalidRecordError
from embedlog.lazy import pa
from embedlog.registry import binder
from embedlog.registry.avro_serializers import JsonToAvro
from embedlog.serializers import Field, adapt, shortened

_FIELDS = {"value", "key", "headers", "partition", "timestamp"}
_IGNORED = {"topic", "offset", "timestamp_type"}
"""Fields of `embedlog consume --json` that have no meaning here."""
_SERIALIZED: tuple[Field, Field] = ("key", "value")
_CSV_BLOCK_BYTES = 1 << 20
_TEXT = re.compile(r"^(large_)?(string|binary)")
"""The types of columns that hold text, or may do so."""


class InputRecord(NamedTuple):
    """One record to send."""

    value: Any
    key: Any
    headers: list[tuple[str, bytes | None]]
    partition: int | None
    timestamp: int | None


class InputSerializers:
    """How keys and values in a file, or in lines that were typed, become bytes.

    Args:
        log: The log.
        topic: The topic.
        raw: Whether they are as they are stored.
        of_file: Whether they are those of a file, in which JSON stays as it is written.
    """

    def __init__(self, log: Log, topic: str, *, raw: bool = False, of_file: bool = True) -> None:
        config = log.root.topic(topic).config
        self.names = ("bytes", "bytes") if raw else (config.key_serializer, config.value_serializer)
        self._of_file = of_file
        self._todo = "If the file was exported with --raw, use --raw." if of_file else None
        self._adapters = [
            binder(log.root)(JsonToAvro(), "serialize", field, topic)
            if name == "avro"
            else adapt("bytes" if name in NOT_TEXT else name, "serialize", field)
            for name, field in zip(self.names, _SERIALIZED, strict=True)
        ]

    def record(self, line: bytes, number: int) -> InputRecord:
        """Return the record of a JSON object, with the bytes of its key and value.

        Args:
            line: The object.
            number: The number of the line, for the error.

        Raises:
            InvalidRecordError: The line is not such an object, or does not fit the serializers.
        """
        key_type, value_type = self.names
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError("must be a JSON object")
            unknown = fields.keys() - _FIELDS - _IGNORED
            if unknown:
                names = ", ".join(sorted(_FIELDS))
                raise ValueError(f"unknown field {min(unknown)!r}, not in {names}")
            value, key = _item(value_type, fields.get("value")), _item(key_type, fields.get("key"))
            headers = _headers(fields.get("headers"))
            partition, timestamp = _integer(fields, "partition"), _integer(fields, "timestamp")
        except ValueError as error:
            raise InvalidRecordError(f"Line {number}: {error}") from None
        to_key, to_value = self._adapters
        try:
            stored = to_value.convert("", [], value), to_key.convert("", [], key)
        except (TypeError, ValueError) as error:
            raise InvalidRecordError(
                f"Line {number} does not fit the serializers of the topic: {error}",
                todo=self._todo,
            ) from None
        return InputRecord(*stored, headers, partition, timestamp)

    def columns(self, table: Any, before: int) -> Any:
        """Return rows in which text of keys and values became the bytes that serializers write.

        Args:
            table: The rows.
            before: How many rows or lines precede these, for the error.

        Raises:
            InvalidRecordError: A key or value does not fit its serializer.
        """
        for field, name, adapter in zip(_SERIALIZED, self.names, self._adapters, strict=True):
            index = table.schema.get_field_index(field)
            is_text = index >= 0 and _TEXT.search(str(table.schema.types[index]))
            if name in NOT_TEXT or not is_text:
                continue
            parse, items = _FROM_TEXT[name], list[Any]()
            for row, item in enumerate(table.column(index).to_pylist(), before + 1):
                try:
                    text = item.decode() if isinstance(item, bytes) else item
                    parsed = None if text is None else parse(text)
                    as_written = name == "json" and self._of_file
                    items.append(item if as_written else adapter.convert("", [], parsed))
                except (TypeError, ValueError) as error:
                    place = f"Row {row} has a {field} that" if self._of_file else f"Line {row}"
                    raise InvalidRecordError(
                        f"{place} is not of the type {name!r}: {error}", todo=self._todo
                    ) from None
            table = table.set_column(index, field, pa.array(items, pa.binary()))
        return table


def file_records(
    file: IO[bytes], file_format: str, serializers: InputSerializers
) -> Iterator[FileRows]:
    """Yield the records of a file as tables with the columns of `Producer.append_table`.

    A column of partitions may be there too; where it is null, the key chooses the partition.

    Raises:
        InvalidRecordError: The file has another format, or other columns; or a key or value does
            not fit its serializer.
    """
    if file_format == JSONL:
        yield from lines_as_rows(file, partial(json_records, serializers=serializers))
        return
    if file_format == CSV:
        types = {"partition": pa.int32(), "timestamp": pa.int64()}
        parts = csv_rows(
            file,
            {**types, **dict.fromkeys(("key", "value", "headers"), pa.binary())},
            [""],
            "See the reference of `embedlog import`.",
            block_bytes=_CSV_BLOCK_BYTES,
            select=_known_columns,
        )
    else:
        parts = parquet_rows(file, _known_columns)
    for rows in parts:
        table = serializers.columns(rows.table, rows.before)
        if file_format == CSV and "headers" in table.column_names:
            try:
                texts = table["headers"].to_pylist()
                headers = [_headers(json.loads(text or b"[]")) for text in texts]
            except ValueError as error:
                raise InvalidRecordError(f"The column headers is not JSON: {error}") from None
            index = table.column_names.index("headers")
            table = table.set_column(index, "headers", headers_array(headers))
        yield rows._replace(table=table)


def _known_columns(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in _FIELDS | _IGNORED]
    if unknown or "value" not in names:
        others = ", ".join(sorted(_FIELDS - {"value"}))
        raise InvalidRecordError(
            f"The file has a column {unknown[0]!r}" if unknown else "The file has no column value",
            todo=f"The columns are value and, if needed, {others}.  For a file of other columns "
            "create the topic with `embedlog topics create TOPIC --schema-from FILE`.",
        )
    return [name for name in names if name in _FIELDS]


def json_records(lines: list[bytes], before: int, serializers: InputSerializers) -> Any:
    """Return the records of JSON objects, one per line, as a table; None if all lines are empty.

    Args:
        lines: The objects.
        before: How many lines precede these, for the error.
        serializers: Those of keys and values.

    Raises:
        InvalidRecordError: As `InputSerializers.record`.
    """
    if set(serializers.names) <= {"bytes", "pickle", "str"}:
        table = _read_by_arrow(lines)
        if table is not None:
            return table
    numbered = enumerate(lines, before + 1)
    records = [serializers.record(line, number) for number, line in numbered if line.strip()]
    if not records:
        return None
    values, keys, headers, partitions, timestamps = map(list, zip(*records, strict=True))
    columns = {
        "key": binary_array(keys, len(keys)),
        "value": binary_array(values, len(values)),
    }
    for name, numbers in (("timestamp", timestamps), ("partition", partitions)):
        if any(number is not None for number in numbers):
            columns[name] = pa.array(numbers, pa.int64())
    if any(headers):
        columns["headers"] = headers_array(headers)
    return pa.table(columns)


def text_records(
    lines: list[bytes], before: int, serializers: InputSerializers, separator: bytes | None
) -> Any:
    """Return lines as a table: values, or with a separator keys and values.

    Raises:
        InvalidRecordError: As `InputSerializers.columns`.
    """
    values, keys = keyed(lines, separator)
    # Unlike `pa.array`, this does not import pandas.
    columns = {"value": binary_array(values, len(values))}
    if keys is not None:
        columns["key"] = binary_array(keys, len(keys))
    return serializers.columns(pa.table(columns), before)


def _read_by_arrow(lines: list[bytes]) -> Any:
    """Return lines as columns, read by pyarrow; None if Python has to read them one by one.

    That is so for headers, and for keys and values other than text.  pyarrow refuses all that
    `InputSerializers.record` refuses, except several objects in a line and text that is not UTF-8.
    """
    from pyarrow import json as arrow_json

    data = b"\n".join(lines)
    if data.count(b"}\n{") != len(lines) - 1 or len(data) >= INT_MAX:
        return None
    text, number = pa.string(), pa.int64()
    types = {"key": text, "value": text, "timestamp": number, "partition": number}
    others = {"headers": pa.list_(pa.null()), "topic": text, "offset": number}
    columns = pa.schema({**types, **others, "timestamp_type": number})
    try:
        table = arrow_json.read_json(
            pa.BufferReader(data),
            arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            arrow_json.ParseOptions(explicit_schema=columns, unexpected_field_behavior="error"),
        )
        table.validate(full=True)
    except pa.ArrowException:
        return None
    if table.num_rows != len(lines) or len(table["headers"].combine_chunks().flatten()):
        return None
    return table.select(list(types)).cast(
        pa.schema({**types, "key": pa.binary(), "value": pa.binary()})
    )


# From text and JSON


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{shortened(text)} is no whole number") from None


_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": _whole_number,
    "float": float,
    "uuid": UUID,
    "json": json.loads,
    "avro": json.loads,
}
"""By the name of a serializer: returns what it takes, of text."""


def _item(serializer: str, value: Any) -> Any:
    """Convert a JSON value to one for a serializer."""
    if serializer in NOT_TEXT:
        return _bytes(value)
    return UUID(value) if serializer == "uuid" and isinstance(value, str) else value


def _bytes(value: Any) -> bytes | None:
    """Return text as UTF-8, ``{"base64": …}`` decoded, and other JSON as its text."""
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and value.keys() == {"base64"}:
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"base64: {error}") from None
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _headers(value: Any) -> list[tuple[str, bytes | None]]:
    """Return the headers in a JSON document.

    Raises:
        ValueError: It has another form.
    """
    pairs = list(value.items()) if isinstance(value, dict) else value or []
    headers = []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        match pair:
            case [str(name), content]:
                headers.append((name, _bytes(content)))
            case _:
                raise ValueError(
                    f"headers must be {{name: value}} or [[name, value], ...], got {value!r}"
                )
    return headers


def _integer(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value is not None and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{name} does not fit in 64 bits: {value}")
    return value
