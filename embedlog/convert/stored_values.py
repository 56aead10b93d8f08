"""Values that are stored as Avro or JSON as columns, and columns as such values."""

from __future__ import annotations

import json
from collections.abc import Callable
from struct import Struct
from typing import Any, Protocol

from embedlog.convert.avro_columns import AvroDecoder, encode, to_columns
from embedlog.convert.avro_types import columns_of, parse
from embedlog.convert.stored_rows import RowError
from embedlog.errors import InvalidRecordError, InvalidSchemaError, UnknownSchemaError
from embedlog.forks import cached_property
from embedlog.lazy import pa
from embedlog.schemas.json_columns import (
    from_json,
    json_objects,
    json_type,
    read_json,
)

PREFIX = Struct(">bi")
"""Before the encoding: a zero, and the id of the schema."""


class ValueDecoder(Protocol):
    """Decodes stored values."""

    @property
    def schema(self) -> Any:
        """The columns, as a `pyarrow.Schema`."""

    def columns(self, values: Any) -> Any:
        """Return values as a `pyarrow.RecordBatch`.

        Args:
            values: A `pyarrow.BinaryArray` without nulls.

        Raises:
            RowError, InvalidRecordError: A value does not have these columns.
        """


class AvroValues:
    """Decodes values in Confluent's wire format.

    Args:
        schema_of: Returns the schema with an id, as JSON.
        reader: The schema to which those of the values are resolved, as `parse` returns it.
    """

    def __init__(self, schema_of: Callable[[int], str], reader: Any) -> None:
        self._schema_of, self._reader = schema_of, reader
        self._decoders: dict[int, AvroDecoder] = {}

    @cached_property
    def schema(self) -> Any:
        """The columns of the reader's schema."""
        return columns_of(self._reader)

    def columns(self, values: Any) -> Any:
        """Return values as a `pyarrow.RecordBatch`."""
        records = []
        for row, value in enumerate(values.to_pylist()):
            try:
                records.append(self._decoder(wire_id(value)).decode(value, PREFIX.size))
            except RowError as error:
                raise RowError(row, error.column, error.reason) from error
        return to_columns(records, self._reader)

    def _decoder(self, schema_id: int) -> AvroDecoder:
        decoder = self._decoders.get(schema_id)
        if decoder is None:
            try:
                decoder = AvroDecoder(parse(self._schema_of(schema_id)), self._reader)
            except (UnknownSchemaError, InvalidSchemaError) as error:
                column = getattr(error, "column", None)
                raise RowError(0, column or "", f"{error.what} (schema {schema_id})") from error
            self._decoders[schema_id] = decoder
        return decoder


def wire_id(value: bytes) -> int:
    """Return the id of the schema of a value.

    Raises:
        RowError: The value is not in the wire format.
    """
    if len(value) < PREFIX.size or value[0] != 0:
        raise RowError(0, "", "it does not begin with 0 and the id of a schema in 4 bytes")
    return int(PREFIX.unpack_from(value)[1])


def avro_values(columns: Any, schema: Any, schema_id: int) -> Any:
    """Return rows in Confluent's wire format, as a `pyarrow.BinaryArray`."""
    return pa.array(encode(columns, schema, PREFIX.pack(0, schema_id)), pa.binary())


class JsonValues:
    """Decodes values that are JSON objects.

    Args:
        schema: The columns.
    """

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self._read = pa.schema([(field.name, json_type(field.type)) for field in schema])

    def columns(self, values: Any) -> Any:
        """Return values as a `pyarrow.RecordBatch`; a field that is missing is null."""
        lines = json_lines(values)
        if not lines:
            return pa.RecordBatch.from_arrays(
                [pa.nulls(0, field.type) for field in self.schema], names=self.schema.names
            )
        try:
            table = read_json(lines, self._read)
            if table.num_rows != len(lines):
                raise InvalidRecordError("The value is not one object of JSON")
            columns = [self._column(table, name) for name in table.column_names]
        except (pa.ArrowException, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidRecordError(f"The value does not have the columns: {error}") from error
        return pa.RecordBatch.from_arrays(columns, names=table.column_names)

    def _column(self, table: Any, name: str) -> Any:
        column = table.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks)
        index = self.schema.get_field_index(name)
        if index < 0:
            return column
        data_type = self.schema.field(index).type
        if pa.types.is_decimal(column.type) and pa.types.is_integer(data_type):
            return column  # The topic casts it, or refuses the row.
        return from_json(column, data_type)


def json_lines(values: Any) -> list[bytes]:
    """Return JSON objects without line ends, of which only those between their parts are legal.

    Raises:
        RowError: A value is no object.
    """
    lines = []
    for row, value in enumerate(values.to_pylist()):
        line = value.replace(b"\n", b" ").replace(b"\r", b" ")
        if not line.lstrip().startswith(b"{"):
            raise RowError(row, "", "it is not an object of JSON")
        lines.append(line)
    return lines


def json_values(columns: Any) -> Any:
    """Return rows as JSON objects, as a `pyarrow.BinaryArray`."""
    objects = json_objects(pa.Table.from_batches([columns]))
    texts = [json.dumps(item, ensure_ascii=False, separators=(",", ":")) for item in objects]
    return pa.array(texts, pa.string()).cast(pa.binary())
