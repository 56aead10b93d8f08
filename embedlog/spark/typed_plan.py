"""What a plan says about typed topics: their columns in the query, and those of their segments.

The reader in the JVM finds a column of a segment by its field id.  It takes the columns of a
segment from the plan and not from the file, whose schema has no checksum.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from embedlog.catalog import Catalog
from embedlog.errors import NotALogError
from embedlog.spark import typed_columns
from embedlog.spark.log_cache import LogCache
from embedlog.spark.plan import LogInputPartition
from embedlog.spark.query_schemas import QuerySchemas, check_for_bytes
from embedlog.spark.source_options import SourceOptions

Json = dict[str, Any]


class TypedTopics:
    """The typed topics that a query reads, which have the same columns.

    Args:
        options: The options of the reader.
        schemas: The current version of each topic's schema.
    """

    def __init__(self, options: SourceOptions, schemas: Mapping[str, Any]) -> None:
        self._options, self._schemas = options, schemas
        self._schema = next(iter(schemas.values()))

    @property
    def _flags(self) -> dict[str, bool]:
        return {
            "as_struct": self._options.values == "struct",
            "headers": self._options.include_headers,
            "tombstones": self._options.include_tombstones,
        }

    def columns(self) -> list[Json]:
        """Return all columns of the query, as the fields of a ``StructType`` in JSON.

        Raises:
            InvalidSchemaError: Spark has no type for a column.
        """
        fields: list[Json] = typed_columns.spark_schema(self._schema, **self._flags)["fields"]
        return fields

    def check(self, fields: Iterable[Json]) -> None:
        """Raise `InvalidConfigError` unless the query can have the columns of a user's schema."""
        typed_columns.check_projection(fields, self._schema, **self._flags)

    def to_json(self) -> Json:
        """Return where the columns come from, as an object for `json.dumps`.

        Returns:
            ``{"values": "columns", "tombstones": false, "topics": {topic: {column: [field id,
            default]}}}``.  A default is a stream of Arrow with one row in Base64, or None.
        """
        topics = {
            topic: {
                name: [number, schema.encoded_default(name)] for number, name in schema.ids.items()
            }
            for topic, schema in self._schemas.items()
        }
        flags = {"values": self._options.values, "tombstones": self._options.include_tombstones}
        return {**flags, "topics": topics}


def typed_topics(logs: LogCache, options: SourceOptions) -> TypedTopics | None:
    """Return the typed topics that a query reads; None for topics of bytes.

    A log or topics that do not exist are no error here: a query says so when it is planned.

    Raises:
        InvalidConfigError: Topics of both kinds are read, or their columns differ.
    """
    try:
        log = logs.acquire(options.path)
    except NotALogError:
        check_for_bytes(options)
        return None
    try:
        schemas = QuerySchemas(options)
        schemas.update(log.root)
        return TypedTopics(options, schemas.schemas) if schemas.schemas else None
    finally:
        logs.release(log)


def segment_schemas(logs: LogCache, path: str, tasks: Sequence[LogInputPartition]) -> Json:
    """Return the columns of the segments that tasks read of typed topics.

    Returns:
        ``{topic: {version: schema}}``; a schema has all columns that a segment may have, and is a
        message of Arrow in Base64.
    """
    versions: dict[str, set[int]] = {}
    for part in (part for task in tasks for part in task.slices):
        numbers = {chunk.schema_version for chunk in part.chunks} - {0}
        if numbers:
            versions.setdefault(part.topic, set()).update(numbers)
    if not versions:
        return {}
    log = logs.acquire(path)
    try:
        catalog: Catalog = log.root.context.catalog
        return {
            topic: {str(number): _segment_schema(catalog, topic, number) for number in numbers}
            for topic, numbers in versions.items()
        }
    finally:
        logs.release(log)


def _segment_schema(catalog: Catalog, topic: str, version: int) -> str:
    # Imports pyarrow: not for topics of bytes, whose queries are to be planned quickly.
    from embedlog.schemas.segment_schema import segment_schema

    schema = catalog.schema(catalog.topic(topic), version)
    assert schema is not None
    columns = segment_schema(schema, headers=True, tombstones=True, offsets=True)
    return base64.b64encode(columns.serialize()).decode()
