"""Through which version of its schema each topic of a query is read.

A query keeps the columns with which it started: records of older and newer versions are seen
through that version, since columns are found by their field ids.  Topics of bytes have no schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import embedlog
from embedlog.api import Log
from embedlog.catalog import INTERNAL, TopicInfo
from embedlog.errors import EmbedlogError, InvalidConfigError, NotALogError
from embedlog.root.root import Root
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.snapshots import snapshot
from embedlog.spark import columns
from embedlog.spark.log_cache import LogCache
from embedlog.spark.options import SourceOptions

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
        self._layout = {
            "as_struct": options.values == "struct",
            "headers": options.include_headers,
            "tombstones": options.include_tombstones,
        }
        self._topics: dict[str, QueriedTopic] = {}
        self._fields: Sequence[Json] | None = None

    @property
    def schemas(self) -> Mapping[str, TopicSchema]:
        """The schema of each typed topic by the topic's name."""
        return {
            name: topic.schema for name, topic in self._topics.items() if topic.schema is not None
        }

    def update(self, root: Root | None) -> None:
        """Take in the topics that the query reads now, with the schemas that new ones have now.

        Args:
            root: The log; None if there is none.

        Raises:
            InvalidConfigError: A topic does not have the columns of the others, or an option is
                only for typed topics, and there is none.
            InvalidSchemaError: Spark has no type for a column.
        """
        selected = {} if root is None else selected_topics(root, self._options)
        for name, info in selected.items():
            known = self._topics.get(name)
            if root is not None and (known is None or known.id != info.id):
                topic = QueriedTopic(info.id, root.context.catalog.schema(info))
                others = {other: self._topics[other] for other in self._topics if other != name}
                self._check(name, topic, others)
                self._topics[name] = topic
        if not self.schemas:
            for option in ("values", "includeTombstones"):
                if option in self._options.specified:
                    raise InvalidConfigError(
                        f"The option {option!r} is for topics with columns, and there is none here",
                        todo="Leave it out, or check the names of the topics.",
                    )

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
            self._check_fields(topic.schema, self._fields)
            return
        for other, known in others.items():
            different = _types(topic.schema) ^ _types(known.schema)
            if different:
                names = ", ".join(dict.fromkeys(column for column, _ in sorted(different)))
                raise InvalidConfigError(
                    f"The topics {other} and {name} have other columns: they differ in {names}",
                    todo="Read them in two queries, or name columns that both have in .schema(…).",
                )

    def _check_fields(self, schema: TopicSchema | None, fields: Sequence[Json]) -> None:
        if schema is None:
            columns.check_bytes_projection(fields, self._options.include_headers)
        else:
            columns.check_projection(fields, schema, **self._layout)

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
            self._check_fields(topic.schema, fields)

    def columns(self) -> Json:
        """Return the columns of the query, if no schema selects some, as ``StructType.json()``.

        Those are of topics of bytes if there are no topics.

        Raises:
            InvalidSchemaError: Spark has no type for a column.
        """
        schema = next(iter(self.schemas.values()), None)
        return dict(columns.spark_schema(schema, **self._layout))

    def to_json(self) -> Json | None:
        """Return the facts besides columns that a JVM needs for typed topics; None for bytes.

        Returns:
            "tombstones", whether to read them, and "topics": ``{topic: columns_to_json(…)}``.
        """
        if not self.schemas:
            return None
        topics = {name: columns.columns_to_json(schema) for name, schema in self.schemas.items()}
        return {"tombstones": self._options.include_tombstones, "topics": topics}


def _types(schema: TopicSchema | None) -> set[tuple[str, str]]:
    fields = columns.spark_schema(schema)["fields"]
    return {(field["name"], columns.type_name(field["type"])) for field in fields}


def selected_topics(root: Root, options: SourceOptions) -> dict[str, TopicInfo]:
    """Return the existing topics that a reader's options select, by name.

    Those of a snapshot are as they were then.

    Raises:
        UnknownSnapshotError: There is no such snapshot.
    """
    names, pattern, assigned = options.subscription
    existing = root.topics()
    if options.snapshot is not None:
        known = snapshot.find(root.context, options.snapshot).topics
        existing = {
            name: info._replace(
                partitions=len(known[name].ranges), schema_version=known[name].schema_version
            )
            for name, info in existing.items()
            if name in known and known[name].id == info.id
        }
    if pattern is not None:
        # As in Kafka's consumer, a pattern does not match internal topics.
        public = (name for name in existing if not name.startswith(INTERNAL))
        names = tuple(name for name in public if re.fullmatch(pattern, name))
    return {name: existing[name] for name in sorted(assigned or names) if name in existing}


def check_topics(logs: LogCache, options: SourceOptions, names: Iterable[str]) -> None:
    """Refuse columns of typed topics if there is no such topic.

    Args:
        logs: The open logs.
        options: The options of the reader.
        names: The names of the columns that the user asks for.

    Raises:
        InvalidConfigError: A topic that the options name does not exist.
        NotALogError: There is no log.
    """
    if columns.SPARK_TYPES.keys() >= {*names}:
        return
    topics, _, assigned = options.subscription
    with logs.using(options.path) as log:
        missing = sorted({*(topics or assigned or ())} - {*log.topics(internal=True)})
    if missing:
        raise InvalidConfigError(
            f"There is no topic {missing[0]}, so the table cannot have its columns",
            todo="Create the topic first, with CREATE TABLE in a catalog of topics or with "
            "log.create_topic(name, schema=…) in Python.",
        )


def current_schemas(
    options: SourceOptions, logs: LogCache | None = None, fields: Sequence[Json] | None = None
) -> QuerySchemas:
    """Return the schemas of the topics of a query, as they are now.

    A log or topics that do not exist are no error here: a query says so when it is planned.

    Args:
        options: The options of the reader.
        logs: The open logs; None opens the log for this alone.
        fields: The columns that the user asks for, as fields of a ``StructType``; None for all.

    Raises:
        InvalidConfigError: Topics of both kinds are read, they have different columns, or the user
            asks for columns that they do not have.
        InvalidSchemaError: Spark has no type for a column.
    """
    schemas = QuerySchemas(options)
    if fields is not None:
        # First: the topics may differ in other columns than these.
        schemas.select(fields)
    with _log_at(options.path, logs) as log:
        schemas.update(None if log is None else log.root)
    if fields is not None and not schemas.schemas:
        # Also of topics that do not exist.
        columns.check_bytes_projection(fields, options.include_headers)
    return schemas


@contextmanager
def _log_at(path: str, logs: LogCache | None) -> Iterator[Log | None]:
    """Yield the log; None if there is none, or, opened for this alone, if it cannot be opened."""
    with ExitStack() as stack:
        log = None
        with suppress(EmbedlogError if logs is None else NotALogError):
            if logs is None:
                # Read-only is faster to open, and all that is needed.
                opened = embedlog.open(path, mode="r", maintenance=False)
                log = stack.enter_context(opened)
            else:
                log = stack.enter_context(logs.using(path))
        yield log
