"""Records of typed topics as bytes for the wire: values are JSON objects, keys those of Kafka."""

from __future__ import annotations

from typing import Any

from embedlog.batch import Batch
from embedlog.batch.wire import headers_type, timestamp_type
from embedlog.config import TopicConfig
from embedlog.convert.keys import KeyDecoder, check_keys
from embedlog.convert.stored_rows import RowError, StoredRows
from embedlog.convert.stored_values import JsonValues, json_values
from embedlog.convert.targets import typed_columns
from embedlog.errors import InvalidRecordError
from embedlog.lazy import np, pa, pc
from embedlog.schemas.reading import HEADERS, TIMESTAMP, TOMBSTONE, TypedReader
from embedlog.schemas.statistics import text_columns_of
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.schemas.typed_batch import TypedBatch, encode_typed

_KEYS = KeyDecoder("bytes", str)


def to_wire(batch: Batch, schema: TopicSchema) -> Any:
    """Return a batch as a `pyarrow.RecordBatch` of timestamps, keys, values and headers.

    Raises:
        CorruptBatchError: The batch is damaged.
    """
    columns = TypedReader(schema).keyed_columns(batch)
    values = json_values(columns.select(schema.columns.names))
    deleted = columns.column(TOMBSTONE)
    if deleted.true_count:
        values = pc.if_else(deleted, pa.nulls(len(values), pa.binary()), values)
    arrays = [columns.column(TIMESTAMP), columns.column("key"), values, columns.column(HEADERS)]
    types = [timestamp_type(), pa.binary(), pa.binary(), headers_type()]
    names = ["timestamp", "key", "value", "headers"]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(zip(names, types, strict=True)))


def from_wire(
    columns: Any, topic: str, schema: TopicSchema, config: TopicConfig, compression: str
) -> TypedBatch:
    """Return records of the wire as a batch of a typed topic.

    A value is a JSON object of the topic's columns, or null with a key, which deletes the key.  A
    key that is there must be that of its columns.

    Args:
        columns: The records, as `WireBatch.columns` returns them.
        topic: The topic.
        schema: Its columns.
        config: Its settings.
        compression: Of the stored batch.

    Raises:
        InvalidRecordError: A record is not one of the topic; ``indices`` may have its number.
        SerializationError: A value does not fit the topic.
    """
    keys, values = columns.column("key"), columns.column("value")
    deleted = values.is_null()
    fields = [schema.columns.field(name) for name in schema.key]
    rows = np.arange(len(keys))
    mask = deleted.to_numpy(zero_copy_only=False)
    try:
        if not fields and keys.null_count < len(keys):
            raise RowError(int(np.argmin(keys.is_null())), "", "the topic has no key column")
        try:
            read = JsonValues(schema.columns).columns(values.drop_null())
            if fields:
                of_key = {name: read.column(name) for name in schema.key}
                check_keys(keys.filter(pc.invert(deleted)), of_key, fields, _KEYS)
        except RowError as error:
            raise error.among(rows[~mask]) from error
        try:
            deleted_keys = _KEYS.columns(keys.filter(deleted), fields)
        except RowError as error:
            raise error.among(rows[mask]) from error
    except RowError as error:
        where = f", column {error.column}" if error.column else ""
        raise InvalidRecordError(
            f"Record {error.row}{where}: {error.reason}",
            topic=topic,
            indices=[error.row],
            todo=f"Send JSON objects of {', '.join(schema.columns.names)}.",
        ) from error
    except KeyError as error:
        raise InvalidRecordError(f"The records have no key column {error}", topic=topic) from error
    headers = pa.nulls(len(keys), headers_type())
    if columns.num_columns == 4:
        headers = columns.column("headers")
    table = columns.select(["timestamp", "key"]).append_column("headers", headers)
    stored = StoredRows(0, table, mask, 0, compression)
    typed = typed_columns(stored, read, deleted_keys, schema, topic)
    return encode_typed(typed.columns, schema, compression, text_statistics=text_columns_of(config))
