"""Typed topics for Kafka's clients: dicts in place of bytes, with or without a key beside them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from embedlog.batch.key_bytes import key_of_bytes
from embedlog.errors import (
    EmbedlogError,
    InvalidRecordError,
    SerializationError,
    UnknownTopicOrPartitionError,
)
from embedlog.root.root import Root
from embedlog.schemas.rows import RowEncoder
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.serializers import shortened

_TEXT = (bytes, bytearray, memoryview, str)


def schema_of(root: Root, topic: str) -> TopicSchema | None:
    """Return the schema of a typed topic; None if values are bytes, or there is no such topic."""
    try:
        info = root.topic(topic)
    except UnknownTopicOrPartitionError:
        return None
    return root.context.catalog.schema(info) if info.schema_version else None


def key_of_row(topic: str, schema: TopicSchema, value: Any, key: Any) -> Any:
    """Return the key to send with a row or a tombstone of a typed topic.

    Programs for Kafka pass the key beside the value; here it is in columns of the value, so None
    is returned if both are the same.  The key of a tombstone may be bytes, as a serializer made
    them of text or of a number.

    Raises:
        InvalidRecordError: The key is not that of the row.
        SerializationError: The value is not a row of the topic.
    """
    if value is None:
        return _decoded(key, schema)
    if isinstance(value, _TEXT) or not schema.key:
        return key
    encoder = _encoder(topic, schema)
    row_key = encoder.row(value, None, None, 0).key
    if isinstance(key, bytes):
        (row_bytes,) = encoder.key_bytes([row_key]).to_pylist()
        same = key == row_bytes
    else:
        same = encoder.key_of(key) == row_key
    if not same:
        raise InvalidRecordError(
            f"The key {shortened(key)} is not that of the columns {', '.join(schema.key)}",
            topic=topic,
            todo="Leave the key out, or pass the value of the column.",
        )
    return None


@lru_cache(maxsize=64)
def _encoder(topic: str, schema: TopicSchema) -> RowEncoder:
    return RowEncoder(topic, schema)


def _decoded(key: Any, schema: TopicSchema) -> Any:
    """Return the key of a tombstone from the bytes of Kafka's serializers."""
    if not isinstance(key, bytes) or len(schema.key) != 1:
        return key
    return key_of_bytes(key, schema.columns.field(schema.key[0]).type)


def explained(root: Root, error: EmbedlogError, topic: str, value: Any) -> EmbedlogError:
    """Return the error of a send; for bytes that were sent to a typed topic, with what to do."""
    if not isinstance(value, _TEXT) or not isinstance(
        error, SerializationError | InvalidRecordError
    ):
        return error
    schema = schema_of(root, topic)
    if schema is None:
        return error
    names = ", ".join(schema.columns.names)
    return SerializationError(
        f"The topic has columns, and a value must be a dict of them, got {type(value).__name__}",
        topic=topic,
        todo=f"Send a dict with {names}; set no value serializer, or one that returns a dict.",
    )


def note_for_dicts(error: BaseException, value: Any) -> None:
    """Add to the error of a deserializer what to do if it got the dict of a typed topic."""
    if isinstance(value, dict):
        error.add_note(
            "The values of a typed topic are dicts, and its keys those of columns: set no "
            "deserializers, or ones that take them."
        )


def size_of(item: Any) -> int:
    """Return the bytes of a serialized key or value; -1 if there is none, or it is no bytes."""
    return len(item) if isinstance(item, bytes | bytearray | memoryview) else -1
