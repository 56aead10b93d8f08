"""Values that are stored as Avro or JSON as columns, and columns as such values."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from struct import pack
from typing import Any, Protocol

from embedlog.avro.arrow_types import columns_of
from embedlog.avro.record_decoder import AvroDecoder, RowError
from embedlog.avro.record_encoder import encode
from embedlog.avro.schema import AvroType, parse
from embedlog.batch.arrays import data
from embedlog.errors import InvalidRecordError, InvalidSchemaError, UnknownSchemaError
from embedlog.lazy import np, pa, pc
from embedlog.schemas.json_columns import (
    from_json,
    json_objects,
    json_type,
    read_json,
)

_PREFIX_BYTES = 5
"""Before the encoding: a zero, and the id of the schema as a big-endian int32."""


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
        reader: The schema to which those of the values are resolved.
    """

    def __init__(self, schema_of: Callable[[int], str], reader: AvroType) -> None:
        self._schema_of, self._reader = schema_of, reader
        self._decoders: dict[int, AvroDecoder] = {}

    @cached_property
    def schema(self) -> Any:
        """The columns of the reader's schema."""
        return columns_of(self._reader)

    def columns(self, values: Any) -> Any:
        """Return values as a `pyarrow.RecordBatch`."""
        ids = wire_ids(values)
        distinct = np.unique(ids).tolist()
        if len(distinct) <= 1:
            return self._decoder(distinct[0] if distinct else None, 0).decode(values, _PREFIX_BYTES)
        parts, order = [], []
        for schema_id in distinct:
            (rows,) = np.nonzero(ids == schema_id)
            decoder = self._decoder(schema_id, int(rows[0]))
            try:
                parts.append(decoder.decode(values.take(pa.array(rows)), _PREFIX_BYTES))
            except RowError as error:
                raise RowError(int(rows[error.row]), error.column, error.reason) from None
            order.append(rows)
        inverse = np.argsort(np.concatenate(order))
        table = pa.Table.from_batches(parts).combine_chunks()
        return table.to_batches()[0].take(pa.array(inverse))

    def _decoder(self, schema_id: int | None, row: int) -> AvroDecoder:
        if schema_id is None:
            return AvroDecoder(self._reader)
        decoder = self._decoders.get(schema_id)
        if decoder is None:
            try:
                writer = parse(self._schema_of(schema_id))
                decoder = AvroDecoder(writer, self._reader)
            except (UnknownSchemaError, InvalidSchemaError) as error:
                column = getattr(error, "column", None)
                raise RowError(row, column or "", f"{error.what} (schema {schema_id})") from error
            self._decoders[schema_id] = decoder
        return decoder


def wire_ids(values: Any) -> Any:
    """Return the ids of the schemas of values, as a numpy array.

    Raises:
        RowError: A value is not in the wire format.
    """
    count = len(values)
    if not count:
        return np.zeros(0, np.int64)
    ends = np.frombuffer(values.buffers()[1], np.int32, count + 1, 4 * values.offset)
    content = np.frombuffer(values.buffers()[2] or b"\0", np.uint8)
    lengths = np.diff(ends)
    short = lengths < _PREFIX_BYTES
    start = np.where(short, 0, ends[:-1])
    prefix = content[np.minimum(start[:, None] + np.arange(_PREFIX_BYTES), len(content) - 1)]
    wrong = short | (prefix[:, 0] != 0)
    if wrong.any():
        raise RowError(
            int(wrong.argmax()), "", "it does not begin with 0 and the id of a schema in 4 bytes"
        )
    return np.ascontiguousarray(prefix[:, 1:]).view(">i4")[:, 0].astype(np.int64)


def avro_values(columns: Any, schema: AvroType, schema_id: int) -> Any:
    """Return rows in Confluent's wire format, as a `pyarrow.BinaryArray`."""
    prefix = data(pack(">bi", 0, schema_id), pa.binary())
    encoded = encode(columns, schema)
    return pc.binary_join_element_wise(prefix, encoded, data(b"", pa.binary()))


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
