"""`TopicSchema`: one version of the columns of a typed topic."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from embedlog.batch.arrays import repeated
from embedlog.batch.key_bytes import is_key_type
from embedlog.errors import InvalidSchemaError
from embedlog.forks import cached_property
from embedlog.lazy import pa
from embedlog.schemas.column_types import stored_type

FIELD_ID = b"PARQUET:field_id"
"""Where pyarrow keeps the id of a field, by Parquet's convention."""
_DEFAULT = b"embedlog.default"
_KEY, _TIMESTAMP, _NEXT_ID = b"embedlog.key", b"embedlog.timestamp", b"embedlog.next_field_id"
RESERVED = (
    *("topic", "partition", "offset", "timestamp", "key", "value", "headers"),
    *("_timestamp", "_key", "_headers", "_offset", "_tombstone", "timestamptype"),
)
"""Names of columns that embedlog uses itself, in results or in segments."""
MAX_COLUMNS = 2000
OTHER_LOG = -1
"""The id of the topic of a schema that comes from another log, whose ids mean nothing here."""


@dataclass(frozen=True, eq=False)
class TopicSchema:
    """The columns of a typed topic in one version, and which of them are key and timestamp.

    Each column keeps its field id when it is renamed; ids are never used again.
    """

    version: int
    """The number of the version; the first is 1."""
    columns: pa.Schema
    """The stored types and names, without metadata but the field ids and defaults."""
    key: tuple[str, ...]
    """The names of the key columns, in order; empty if records have no keys."""
    timestamp: str | None
    """The name of the column with the timestamps; None if embedlog stores them itself."""
    next_id: int
    """The id of the next column that is added."""
    topic_id: int | None = None
    """The id of the topic, which another topic of the same name does not have; None if unknown."""

    def changed(self, **fields: Any) -> TopicSchema:
        """Return the schema with other fields."""
        return replace(self, **fields)

    def __repr__(self) -> str:
        return f"<TopicSchema version {self.version}: {', '.join(self.columns.names)}>"

    @cached_property
    def ids(self) -> dict[int, str]:
        """The name of each column by its field id."""
        return {field_id(field): field.name for field in self.columns}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The default of each column that has one, as an array of one row."""
        encoded = {field.name: (field.metadata or {}).get(_DEFAULT) for field in self.columns}
        return {name: _decode_default(text) for name, text in encoded.items() if text is not None}

    @cached_property
    def plain(self) -> pa.Schema:
        """The columns without any metadata, as users see them."""
        return pa.schema([pa.field(f.name, f.type, f.nullable) for f in self.columns])

    def has_columns_of(self, other: TopicSchema) -> bool:
        """Return whether this schema has the same columns and ids as another topic's."""
        same: bool = self.columns.equals(other.columns, check_metadata=True)
        return same and (self.key, self.timestamp) == (other.key, other.timestamp)

    def is_of_other_topic(self, topic_id: int) -> bool:
        """Return whether the schema is known to belong to another topic than `topic_id`."""
        return self.topic_id is not None and self.topic_id != topic_id

    def encoded_default(self, name: str) -> str | None:
        """Return the default of a column as a stream of Arrow with one row, in Base64."""
        text = (self.columns.field(name).metadata or {}).get(_DEFAULT)
        return None if text is None else text.decode()

    def missing(self, name: str, count: int) -> Any:
        """Return a column for rows that do not have it: its default, or null."""
        default = self.defaults.get(name)
        if default is None:
            return pa.nulls(count, self.columns.field(name).type)
        return default.take(repeated(0, pa.int64(), count))

    def pack(self) -> bytes:
        """Return it as an Arrow schema message, for `state`."""
        metadata = {
            _KEY: json.dumps(self.key).encode(),
            _NEXT_ID: str(self.next_id).encode(),
            **({} if self.timestamp is None else {_TIMESTAMP: self.timestamp.encode()}),
        }
        packed: bytes = self.columns.with_metadata(metadata).serialize().to_pybytes()
        return packed

    @classmethod
    def unpack(cls, version: int, packed: bytes) -> TopicSchema:
        """Inverse of `pack`."""
        schema = pa.ipc.read_schema(pa.py_buffer(packed))
        timestamp = schema.metadata.get(_TIMESTAMP)
        return cls(
            version,
            schema.remove_metadata(),
            tuple(json.loads(schema.metadata[_KEY])),
            None if timestamp is None else timestamp.decode(),
            int(schema.metadata[_NEXT_ID]),
        )


def field_id(field: Any) -> int:
    """Return the id of a column."""
    return int(field.metadata[FIELD_ID])


def with_id(field: Any, number: int, default: Any = None) -> Any:
    """Return a column with its id and, as an array of one row, its default."""
    metadata = {FIELD_ID: str(number).encode()}
    if default is not None:
        metadata[_DEFAULT] = _encode_default(default)
    return pa.field(field.name, field.type, field.nullable, metadata)


def _encode_default(default: Any) -> bytes:
    columns = pa.RecordBatch.from_arrays([default], names=["default"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.schema) as writer:
        writer.write_batch(columns)
    # Text, since readers of other languages take metadata for text.
    return base64.b64encode(sink.getvalue())


def _decode_default(text: bytes) -> Any:
    with pa.ipc.open_stream(base64.b64decode(text)) as reader:
        return reader.read_next_batch().column(0)


def first_version(
    columns: pa.Schema, key: str | Sequence[str] | None, timestamp: str | None
) -> TopicSchema:
    """Return the first version of the schema of a topic.

    Args:
        columns: The columns that the user passed; see `infer.columns_of`.
        key: The names of the key columns.
        timestamp: The name of the column with the timestamps.

    Raises:
        InvalidSchemaError: A topic cannot have these columns.
    """
    fields = check_columns(columns, timestamp)
    numbered = [with_id(field, number) for number, field in enumerate(fields, 1)]
    names = () if key is None else (key,) if isinstance(key, str) else key
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InvalidSchemaError(
            f"key must be the name of a column or a list of names, got {key!r}"
        )
    schema = TopicSchema(1, pa.schema(numbered), tuple(names), timestamp, len(numbered) + 1)
    return check_schema(schema)


def check_columns(columns: pa.Schema, timestamp: str | None = None) -> list[Any]:
    """Return the fields of a user's schema in the types in which they are stored.

    The column with the timestamps has no nulls, whatever the schema says.

    Raises:
        InvalidSchemaError: A name or a type is not allowed, or there are too many columns.
    """
    names = columns.names
    if not 1 <= len(names) <= MAX_COLUMNS:
        raise InvalidSchemaError(f"A topic must have 1 to {MAX_COLUMNS} columns, got {len(names)}")
    for name in names:
        if not name or "\0" in name:
            raise InvalidSchemaError(f"{name!r} is not a valid name of a column", column=name)
        if name.lower() in RESERVED:
            raise InvalidSchemaError(
                f"embedlog uses the name {name!r} itself",
                column=name,
                todo="Rename the column; topic, partition, offset and timestamp come with "
                "every record.",
            )
        if names.count(name) > 1:
            raise InvalidSchemaError(f"Two columns have the name {name!r}", column=name)
    return [
        pa.field(
            field.name,
            stored_type(field.type, field.name),
            field.nullable and field.name != timestamp,
        )
        for field in columns
    ]


def check_schema(schema: TopicSchema) -> TopicSchema:
    """Return a schema if its key and timestamp columns may be that.

    Raises:
        InvalidSchemaError: There is no such column, or it has another type.
    """
    names, columns = schema.columns.names, schema.columns
    named = [*schema.key, *([] if schema.timestamp is None else [schema.timestamp])]
    for name in named:
        if name not in names:
            raise InvalidSchemaError(
                f"There is no column {name!r}, only {', '.join(names)}", column=name
            )
    if len(set(schema.key)) < len(schema.key):
        raise InvalidSchemaError(f"A key column is named twice: {', '.join(schema.key)}")
    for name in schema.key:
        if not is_key_type(columns.field(name).type):
            raise InvalidSchemaError(
                f"The key column {name} has the type {columns.field(name).type}",
                column=name,
                todo="A key must be text, binary, a number, a boolean, a date or a timestamp.",
            )
    time = schema.timestamp
    if time is not None and not pa.types.is_timestamp(columns.field(time).type):
        raise InvalidSchemaError(
            f"The timestamp column {time} has the type {columns.field(time).type}",
            column=time,
            todo="It must be an Arrow timestamp.",
        )
    return schema
