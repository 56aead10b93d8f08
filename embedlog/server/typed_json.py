"""Records of typed topics as bytes for the wire: values are JSON objects, keys those of Kafka."""

from __future__ import annotations

from typing import Any

from embedlog.batch import Batch
from embedlog.batch import schema as batch_schema
from embedlog.batch.wire import headers_type
from embedlog.config import TopicConfig
from embedlog.convert.conversion import ConversionOptions, TypedConverter
from embedlog.convert.keys import KeyDecoder
from embedlog.convert.stored_rows import RowError, StoredRows
from embedlog.convert.stored_values import JsonValues, json_values
from embedlog.errors import InvalidRecordError
from embedlog.lazy import pa, pc
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
    return pa.RecordBatch.from_arrays(arrays, schema=batch_schema(headers=True))


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
    mask = columns.column("value").is_null().to_numpy(zero_copy_only=False)
    if columns.num_columns < 4:
        columns = columns.append_column("headers", pa.nulls(len(mask), headers_type()))
    converter = TypedConverter(JsonValues(schema.columns), _KEYS, schema, ConversionOptions())
    try:
        typed = converter.convert(StoredRows(0, columns, mask, 0, compression), topic)
    except RowError as error:
        where = f", column {error.column}" if error.column else ""
        raise InvalidRecordError(
            f"Record {error.row}{where}: {error.reason}",
            topic=topic,
            indices=[error.row],
            todo=f"Send JSON objects of {', '.join(schema.columns.names)}.",
        ) from error
    except pa.ArrowException as error:
        raise InvalidRecordError(f"A key column cannot be cast: {error}", topic=topic) from error
    return encode_typed(typed.columns, schema, compression, text_statistics=text_columns_of(config))
