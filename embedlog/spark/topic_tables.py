"""The topics of a log as the tables of a Spark catalog; `LogCatalog.java` calls it.

The options of a catalog are those that all its tables have in common: ``path`` and others of
readers and writers.  The properties of a table are the settings of the topic by Kafka's names,
``partitions``, and of a typed topic ``key`` and ``timestamp``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from embedlog.api import Log
from embedlog.catalog import check_topic_name
from embedlog.errors import InvalidConfigError, InvalidSchemaError, TopicAlreadyExistsError
from embedlog.lazy import pa
from embedlog.schemas.evolution import changed_schema, renamed
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.spark.columns import (
    RECORD_COLUMNS,
    RECORD_TYPES,
    SPARK_TYPES,
    WRITER_COLUMNS,
    is_struct_of_columns,
    spark_type,
    stored_type,
    type_name,
)
from embedlog.spark.log_cache import LogCache
from embedlog.spark.options import check_catalog

Json = Any

PARTITIONS = "partitions"
KEY, TIMESTAMP = "key", "timestamp"
"""The properties that are no settings of a topic: its partitions, and columns of a typed one."""
CREATED, EXISTS, LEFT_TO_WRITER = "created", "exists", "left to the writer"
"""What `create_topic` returns."""


class TopicTables:
    """The topics of a log as tables; arguments and results are JSON.

    The first argument of each method is the options of the catalog.

    Raises:
        InvalidConfigError: From each method, if an option of the catalog is wrong.
        NotALogError: From each method, if there is no log.
    """

    def __init__(self) -> None:
        self.logs = LogCache()
        """The open logs."""

    def tables(self, options: Mapping[str, str]) -> list[str]:
        """Return the names of the topics, without internal ones."""
        with self._log(options) as log:
            return log.topics()

    def table(self, options: Mapping[str, str], topic: str) -> dict[str, str] | None:
        """Return the partitions, the key and timestamp columns, and settings of a topic.

        Returns:
            The properties, without settings that are the default; None if there is no such topic.
        """
        with self._log(options) as log:
            info = log.root.topics().get(topic)
            if info is None:
                return None
            schema = log.root.context.catalog.schema(info)
            columns = {}
            if schema is not None:
                columns = {KEY: ",".join(schema.key), TIMESTAMP: schema.timestamp or ""}
            settings = {name: str(value) for name, value in info.config.overrides().items()}
            named = {name: text for name, text in columns.items() if text}
            return {PARTITIONS: str(info.partitions), **named, **settings}

    def create_table(
        self,
        options: Mapping[str, str],
        topic: str,
        schema: str,
        properties: Mapping[str, str],
        for_query: bool = False,
    ) -> str:
        """Create a topic: a typed one, unless its columns are those of a topic of bytes.

        For ``CREATE TABLE … AS SELECT``, a topic of bytes is left to the writer if the rows name
        partitions and there are no properties, so that a copy of a topic has as many partitions.

        Args:
            options: The options of the catalog.
            topic: The name.
            schema: The columns of the statement, as the JSON of a ``StructType``.
            properties: Settings of the topic; ``partitions``; and of a typed topic ``key``, which
                are the names of columns, separated by commas, and ``timestamp``.
            for_query: Whether the rows of a query are written to it next.

        Returns:
            `CREATED`, `EXISTS` or `LEFT_TO_WRITER`; except for the first, nothing was changed.

        Raises:
            InvalidConfigError: A column or a property is wrong.
            InvalidSchemaError: A topic cannot have these columns.
            InvalidTopicError: The name is not one of a topic.
            InvalidPartitionsError: There are too many partitions, or none.
        """
        settings, fields = dict(properties), json.loads(schema)["fields"]
        by_rows = for_query and any(field["name"] == "partition" for field in fields)
        typed: dict[str, Any] = {}
        if is_of_bytes(fields):
            _refuse_column_names(settings, "a topic of bytes has none of its own")
        else:
            if by_rows and PARTITIONS not in settings:
                raise InvalidConfigError(
                    "The rows have a column partition, and a new typed topic has only one "
                    "partition",
                    todo=f"Set TBLPROPERTIES ('{PARTITIONS}' = '…'), or leave the column partition "
                    "out of the query.",
                )
            own = topic_columns(fields)
            key: Any = settings.pop(KEY, None)
            if key is not None and key not in own.names:
                key = [name.strip() for name in key.split(",")]
            typed = {"schema": own, "key": key, "timestamp": settings.pop(TIMESTAMP, None)}
        partitions = _partitions(settings.pop(PARTITIONS, "1"))
        with self._log(options) as log:
            if by_rows and not typed and not properties:
                check_topic_name(topic)
                return EXISTS if topic in log else LEFT_TO_WRITER
            try:
                log.create_topic(topic, partitions, settings, **typed)
            except TopicAlreadyExistsError:
                return EXISTS
            return CREATED

    def alter_table(
        self, options: Mapping[str, str], topic: str, properties: Mapping[str, str | None]
    ) -> bool:
        """Change settings of a topic, and then its number of partitions, which can only grow.

        Args:
            options: The options of the catalog.
            topic: The name.
            properties: The new values of properties; None is the default.

        Returns:
            False if there is no such topic.

        Raises:
            InvalidConfigError: A property is wrong.
            InvalidPartitionsError: There would be fewer partitions.
        """
        settings = dict(properties)
        _refuse_column_names(settings, "stays the same as long as there is the topic")
        with self._log(options) as log:
            info = log.root.topics().get(topic)
            if info is None:
                return False
            total = info.partitions
            if PARTITIONS in settings:
                total = _partitions(settings.pop(PARTITIONS))
            if settings:
                log.alter_topic(topic, settings)
            if total != info.partitions:
                log.create_partitions(topic, total)
            return True

    def alter_columns(
        self, options: Mapping[str, str], topic: str, changes: Sequence[Json]
    ) -> bool:
        """Change the columns of a typed topic: all changes, or nothing.

        Args:
            options: The options of the catalog.
            topic: The name.
            changes: See `changed_columns`.

        Returns:
            False if there is no such topic.

        Raises:
            InvalidConfigError: A column is not there.
            InvalidSchemaError: A topic cannot change so, or it is of bytes.
        """

        def change(before: TopicSchema, earlier: Sequence[TopicSchema]) -> TopicSchema:
            columns, rename = changed_columns(before.plain, changes)
            return changed_schema(before, columns, rename, None, earlier)

        with self._log(options) as log:
            if topic not in log:
                return False
            log.root.alter_schema(topic, change)
            return True

    def drop_table(self, options: Mapping[str, str], topic: str) -> bool:
        """Delete a topic.

        Returns:
            False if there is no such topic.

        Raises:
            InvalidTopicError: The topic is internal.
        """
        with self._log(options) as log:
            if topic not in log:
                return False
            log.delete_topic(topic)
            return True

    def _log(self, options: Mapping[str, str]) -> AbstractContextManager[Log]:
        return self.logs.using(check_catalog(options))


def _refuse_column_names(properties: Mapping[str, str | None], problem: str) -> None:
    for name in (KEY, TIMESTAMP):
        if name in properties:
            raise InvalidConfigError(
                f"The property {name!r} names a column, and {problem}",
                todo="Leave the property out.",
            )


def _partitions(text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise InvalidConfigError(
            f"The property {PARTITIONS!r} must be a whole number, got {text!r}"
        ) from None


_COLLATIONS = "__COLLATIONS"
"""Where Spark has the collations in a column: in the metadata of its field, or of those inside."""


def is_of_bytes(fields: Sequence[Json]) -> bool:
    """Whether the columns of a new table are those of a topic of bytes.

    Args:
        fields: The fields of a ``StructType``, as JSON.  Of a topic of bytes they may be any that
            a reader gives or a writer takes, since ``CREATE TABLE … AS SELECT`` passes those of
            the query.

    Raises:
        InvalidConfigError: A column has the name of one of them, and another type.
    """
    if any(field["name"] not in SPARK_TYPES or is_struct_of_columns(field) for field in fields):
        return False
    for field in fields:
        name, spark_type = field["name"], type_name(field["type"])
        if spark_type != SPARK_TYPES[name] and spark_type not in WRITER_COLUMNS.get(name, ()):
            columns = ", ".join(f"{name} {spark_type}" for name, spark_type in SPARK_TYPES.items())
            raise InvalidConfigError(
                f"A topic has no column {name} of type {spark_type}",
                todo=f"Give the column another name: a topic of bytes has {columns}.",
            )
    return True


def topic_columns(fields: Iterable[Json]) -> Any:
    """Return the columns of a new typed topic as a `pyarrow.Schema`.

    The columns that come with every record are left out, and those of a struct ``value`` are
    columns, as in what a reader gives.

    Args:
        fields: The fields of a ``StructType``, as JSON.

    Raises:
        InvalidSchemaError: A topic has no such type.
    """
    return pa.schema([_arrow_field(field) for field in _own_fields(fields)])


def _own_fields(fields: Iterable[Json]) -> Iterator[Json]:
    for field in fields:
        if is_struct_of_columns(field):
            yield from field["type"]["fields"]
        elif type_name(field["type"]) != RECORD_TYPES.get(field["name"]):
            yield field


def _arrow_field(field: Json) -> Any:
    name = field["name"]
    if _COLLATIONS in json.dumps(field):
        raise InvalidSchemaError(
            f"Column {name} is text with a collation, which a topic does not have",
            column=name,
            todo="Leave out COLLATE, or cast the column to STRING.",
        )
    return pa.field(name, stored_type(field["type"], name), field["nullable"])


def changed_columns(columns: Any, changes: Iterable[Json]) -> tuple[Any, dict[str, str]]:
    """Return columns after changes, and the old and new names of those that are renamed.

    Args:
        columns: The columns of a topic: a `pyarrow.Schema`.
        changes: What `ColumnChanges.java` makes of ``ALTER TABLE``: objects with a "change" and the
            path of the "column".

    Raises:
        InvalidConfigError: There is no such column, or there is one already.
        InvalidSchemaError: A topic has no such type.
    """
    rename: dict[str, str] = {}
    for change in changes:
        columns = _changed(columns, change, rename)
    return columns, rename


def _changed(columns: Any, change: Json, rename: dict[str, str]) -> Any:
    """Return columns after one change; add a new name to ``rename``."""
    name, *inner = change["column"]
    if inner:
        raise InvalidConfigError(
            f"{'.'.join(change['column'])} is inside of a column, which ALTER TABLE cannot change",
            todo="Pass the column with its new type in Python: log.alter_topic(name, schema=…).",
        )
    if change["change"] == "add":
        _refuse_present(columns, name)
        place = _place(columns, change["position"], len(columns))
        return columns.insert(place, _arrow_field(_field(change)))
    if change["change"] == "drop" and change["if_exists"] and name not in columns.names:
        return columns
    index = _index(columns, name)
    field = columns.field(index)
    match change["change"]:
        case "drop":
            return columns.remove(index)
        case "rename":
            _refuse_present(columns, change["name"])
            rename[name] = change["name"]
            return renamed(columns, {name: change["name"]})
        case "type":
            wanted = _field(change)
            if type_name(spark_type(field.type, name)) == type_name(wanted["type"]):
                return columns
            return columns.set(index, field.with_type(_arrow_field(wanted).type))
        case "nullable":
            return columns.set(index, field.with_nullable(change["nullable"]))
    others = columns.remove(index)
    return others.insert(_place(others, change["position"], index), field)


def _index(columns: Any, name: str) -> int:
    index: int = columns.get_field_index(name)
    if index < 0:
        which = "comes with every record" if name in RECORD_COLUMNS else "is not one of the topic"
        raise InvalidConfigError(
            f"The column {name} {which}, so it cannot be changed",
            todo=f"The columns of the topic are {', '.join(columns.names)}.",
        )
    return index


def _refuse_present(columns: Any, name: str) -> None:
    if name in columns.names:
        raise InvalidConfigError(f"The topic has a column {name} already")


def _place(columns: Any, position: Sequence[str] | None, default: int) -> int:
    """Return the index of a position: None, ``[]`` for the first place, or the column before."""
    if position is None:
        return default
    return _index(columns, position[0]) + 1 if position else 0


def _field(change: Json) -> Json:
    (field,) = json.loads(change["schema"])["fields"]
    return field
