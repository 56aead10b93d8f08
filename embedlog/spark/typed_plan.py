"""What a plan says about typed topics: their columns in the query, and those of their segments.

The reader in the JVM finds a column of a segment by its field id.  It takes the columns of a
segment from the plan and not from the file, whose schema has no checksum.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from embedlog.api import Log
from embedlog.catalog import INTERNAL, Catalog, TopicInfo
from embedlog.errors import InvalidConfigError, NotALogError
from embedlog.spark import typed_columns
from embedlog.spark.log_cache import LogCache
from embedlog.spark.plan import LogInputPartition
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
        _check_for_bytes(options)
        return None
    try:
        return _typed_topics(log, options)
    finally:
        logs.release(log)


def _typed_topics(log: Log, options: SourceOptions) -> TypedTopics | None:
    infos = _selected(log.root.topics(), options)
    if not any(info.schema_version for info in infos):
        _check_for_bytes(options)
        return None
    for info in infos:
        if not info.schema_version:
            raise InvalidConfigError(
                "The values of this topic are bytes, those of others that the query reads columns",
                topic=info.name,
                todo="Read topics of bytes and topics with columns in queries of their own.",
            )
    catalog: Catalog = log.root.context.catalog
    schemas = {info.name: catalog.schema(info) for info in infos}
    found = {name: TypedTopics(options, {name: schema}) for name, schema in schemas.items()}
    first = infos[0].name
    for name, topic in found.items():
        if topic.columns() != found[first].columns():
            raise InvalidConfigError(
                f"Its columns are not those of topic {first}",
                topic=name,
                todo="Read each of them in a query of its own, and unite them with "
                "unionByName(…, allowMissingColumns=True).",
            )
    return TypedTopics(options, schemas)


def _check_for_bytes(options: SourceOptions) -> None:
    for name in ("values", "includeTombstones"):
        if name in options.specified:
            raise InvalidConfigError(
                f"The option {name!r} is for topics with columns, and there is none here",
                todo="Leave it out, or check the names of the topics.",
            )


def _selected(topics: Mapping[str, TopicInfo], options: SourceOptions) -> list[TopicInfo]:
    """Return the topics that exist of those that a query reads."""
    names, pattern, assigned = options.subscription
    if pattern is not None:
        names = tuple(name for name in topics if not name.startswith(INTERNAL))
        names = tuple(name for name in names if re.fullmatch(pattern, name))
    return [topics[name] for name in sorted(names or assigned or ()) if name in topics]


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
