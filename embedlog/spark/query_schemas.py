"""Through which version of its schema each topic of a query is read.

A query keeps the columns with which it started: records of older and newer versions are seen
through that version, since columns are found by their field ids.  Topics of bytes have no schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from embedlog.api import Log
from embedlog.catalog import INTERNAL, TopicInfo
from embedlog.errors import EmbedlogError, InvalidConfigError, NotALogError
from embedlog.root.root import Root
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.spark import kafka_columns, typed_columns
from embedlog.spark.log_cache import LogCache
from embedlog.spark.source_options import SourceOptions, TopicSelection

Json = dict[str, Any]


class QueriedTopic(NamedTuple):
    """A topic of a query."""

    id: int
    schema: TopicSchema | None
    """The version through which it is read; None for a topic of bytes."""


class QuerySchemas:
    """The topics of a query with their schemas; it is pickled with the reader.

    Args:
        options: The options of the reader.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._topics: dict[str, QueriedTopic] = {}
        self._fields: Sequence[Json] | None = None

    @property
    def schemas(self) -> Mapping[str, TopicSchema]:
        """The schema of each typed topic by the topic's name."""
        return {
            name: topic.schema for name, topic in self._topics.items() if topic.schema is not None
        }

    def update(self, root: Root) -> None:
        """Take in the topics that the query reads now, with the schemas that new ones have now.

        Raises:
            InvalidConfigError: A topic does not have the columns of the others.
            InvalidSchemaError: Spark has no type for a column.
        """
        for name, info in selected_topics(root, self._options.subscription).items():
            known = self._topics.get(name)
            if known is None or known.id != info.id:
                topic = QueriedTopic(info.id, root.context.catalog.schema(info))
                others = {other: self._topics[other] for other in self._topics if other != name}
                self._check(name, topic, others)
                self._topics[name] = topic
        if not self.schemas:
            check_for_bytes(self._options)

    def _check(self, name: str, topic: QueriedTopic, others: Mapping[str, QueriedTopic]) -> None:
        for other, known in others.items():
            if (known.schema is None) is not (topic.schema is None):
                typed, plain = (name, other) if known.schema is None else (other, name)
                raise InvalidConfigError(
                    f"The values of topic {typed} are columns, and those of topic {plain} are "
                    "bytes, so one query cannot read both",
                    todo="Read them in two queries.",
                )
        if self._fields is not None:
            self._check_fields(topic, self._fields)
            return
        if topic.schema is None:
            return
        for other, known in others.items():
            assert known.schema is not None
            different = self._types(topic.schema) ^ self._types(known.schema)
            if different:
                columns = ", ".join(dict.fromkeys(column for column, _ in sorted(different)))
                raise InvalidConfigError(
                    f"The topics {other} and {name} have other columns: they differ in {columns}",
                    todo="Read them in two queries, or name columns that both have in .schema(…).",
                )

    def _types(self, schema: TopicSchema) -> set[tuple[str, str]]:
        fields = typed_columns.spark_schema(schema)["fields"]
        return {(field["name"], typed_columns.type_name(field["type"])) for field in fields}

    def _check_fields(self, topic: QueriedTopic, fields: Sequence[Json]) -> None:
        options = self._options
        if topic.schema is None:
            types = [(field["name"], typed_columns.type_name(field["type"])) for field in fields]
            kafka_columns.projected_columns(types, options.include_headers)
        else:
            typed_columns.check_projection(fields, topic.schema, **_layout(options))

    def select(self, fields: Sequence[Json]) -> None:
        """Note which columns the query has, and check that its topics have them.

        Args:
            fields: The fields of Spark's ``StructType``, as JSON.

        Raises:
            InvalidConfigError: A topic has no such column, or it has another type.
            InvalidSchemaError: Spark has no type for a column.
        """
        self._fields = fields
        for topic in self._topics.values():
            self._check_fields(topic, fields)

    def columns(self) -> Json | None:
        """Return the columns of typed topics, if no schema selects some, as ``StructType.json()``.

        Returns:
            None if the topics are not typed, or there are none.

        Raises:
            InvalidSchemaError: Spark has no type for a column.
        """
        for schema in self.schemas.values():
            return dict(typed_columns.spark_schema(schema, **_layout(self._options)))
        return None


def check_for_bytes(options: SourceOptions) -> None:
    """Raise `InvalidConfigError` for options that only queries of typed topics have."""
    for name in ("values", "includeTombstones"):
        if name in options.specified:
            raise InvalidConfigError(
                f"The option {name!r} is for topics with columns, and there is none here",
                todo="Leave it out, or check the names of the topics.",
            )


def _layout(options: SourceOptions) -> dict[str, bool]:
    return {
        "as_struct": options.values == "struct",
        "headers": options.include_headers,
        "tombstones": options.include_tombstones,
    }


def selected_topics(root: Root, selection: TopicSelection) -> dict[str, TopicInfo]:
    """Return the existing topics that a reader's options select, by name."""
    names, pattern, assigned = selection
    existing = root.topics()
    if pattern is not None:
        # As in Kafka's consumer, a pattern does not match internal topics.
        public = (name for name in existing if not name.startswith(INTERNAL))
        names = tuple(name for name in public if re.fullmatch(pattern, name))
    return {name: existing[name] for name in sorted(assigned or names) if name in existing}


def selected_typed(root: Root, selection: TopicSelection) -> bool:
    """Whether a topic that a reader's options select is typed."""
    return any(topic.schema_version for topic in selected_topics(root, selection).values())


def check_topics(logs: LogCache, options: SourceOptions, columns: Iterable[str]) -> None:
    """Refuse columns of typed topics if there is no such topic.

    Args:
        logs: The open logs.
        options: The options of the reader.
        columns: The names of the columns that the user asks for.

    Raises:
        InvalidConfigError: A topic that the options name does not exist.
        NotALogError: There is no log.
    """
    if kafka_columns.SPARK_TYPES.keys() >= {*columns}:
        return
    log = logs.acquire(options.path)
    try:
        names, _, assigned = options.subscription
        missing = sorted({*(names or assigned or ())} - {*log.topics(internal=True)})
    finally:
        logs.release(log)
    if missing:
        raise InvalidConfigError(
            f"There is no topic {missing[0]}, so the table cannot have its columns",
            todo="Create the topic first, with CREATE TABLE in a catalog of topics or with "
            "log.create_topic(name, schema=…) in Python.",
        )


def typed_reader(logs: LogCache, options: SourceOptions, schema: str | None) -> Json | None:
    """Return the columns of a query of typed topics; None if it reads topics of bytes.

    A log or topics that do not exist are no error here: a query says so when it is planned.

    Args:
        logs: The open logs.
        options: The options of the reader.
        schema: The columns that the user asks for, as the JSON of a ``StructType``; None for all.

    Returns:
        The columns as "schema", also as JSON, and as "typed" an object with
        "tombstones", whether to read them, and "topics": ``{topic: columns_to_json(…)}``.

    Raises:
        InvalidConfigError: Topics of both kinds are read, they have other columns, or the user
            asks for columns that they do not have.
        InvalidSchemaError: Spark has no type for a column.
    """
    try:
        log = logs.acquire(options.path)
    except NotALogError:
        check_for_bytes(options)
        return None
    try:
        schemas = QuerySchemas(options)
        if schema is not None and selected_typed(log.root, options.subscription):
            # First: the topics may differ in other columns than these.
            schemas.select(json.loads(schema)["fields"])
        schemas.update(log.root)
    finally:
        logs.release(log)
    if not schemas.schemas:
        return None
    topics = {
        name: typed_columns.columns_to_json(version) for name, version in schemas.schemas.items()
    }
    return {
        "schema": json.dumps(schemas.columns()) if schema is None else schema,
        "typed": {"tombstones": options.include_tombstones, "topics": topics},
    }


def current_schemas(options: SourceOptions) -> QuerySchemas:
    """Return the schemas of the topics of a query, as they are now.

    Where there is no log, there are none: the query itself reports that.

    Raises:
        InvalidConfigError: The topics have different columns.
        InvalidSchemaError: Spark has no type for a column.
    """
    schemas = QuerySchemas(options)
    log = _open_for_reading(options.path)
    if log is None:
        check_for_bytes(options)
        return schemas
    with log:
        schemas.update(log.root)
    return schemas


def _open_for_reading(path: str) -> Log | None:
    import embedlog

    try:
        # Read-only is faster to open, and all that is needed.
        return embedlog.open(path, mode="r", maintenance=False)
    except EmbedlogError:
        return None
