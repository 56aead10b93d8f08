"""The topics of a log as the tables of a Spark catalog; `LogCatalog.java` calls it.

The options of a catalog are those that all its tables have in common: ``path`` and others of
readers and writers.  The properties of a table are the settings of the topic by Kafka's names,
``partitions``, and of a typed topic ``key`` and ``timestamp``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from embedlog.api import Log
from embedlog.catalog import check_topic_name
from embedlog.errors import InvalidConfigError, TopicAlreadyExistsError
from embedlog.schemas.evolution import changed_schema
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.spark import table_columns, table_options
from embedlog.spark.log_cache import LogCache

Json = Any

PARTITIONS = "partitions"
KEY, TIMESTAMP = "key", "timestamp"
"""The properties that are no settings of a topic: its partitions, and columns of a typed one."""
CREATED, EXISTS, LEFT_TO_WRITER = "created", "exists", "left to the writer"
"""What `create_topic` returns."""


def topics(logs: LogCache, options: Mapping[str, str]) -> list[str]:
    """Return the names of the topics, without internal ones.

    Raises:
        InvalidConfigError: An option of the catalog is wrong.
        NotALogError: There is no log.
    """
    with _open_log(logs, options) as log:
        return log.topics()


def properties(logs: LogCache, options: Mapping[str, str], topic: str) -> dict[str, str] | None:
    """Return the partitions, the key and timestamp columns, and settings that are not the default.

    Returns:
        The properties; None if there is no such topic.

    Raises:
        InvalidConfigError: An option of the catalog is wrong.
        NotALogError: There is no log.
    """
    with _open_log(logs, options) as log:
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


def create_topic(
    logs: LogCache,
    options: Mapping[str, str],
    topic: str,
    fields: Sequence[Json],
    properties: Mapping[str, str],
    for_query: bool = False,
) -> str:
    """Create a topic: a typed one, unless its columns are those of a topic of bytes.

    For ``CREATE TABLE … AS SELECT``, a topic of bytes is left to the writer if the rows name
    partitions and there are no properties, so that a copy of a topic has as many partitions.

    Args:
        logs: The open logs.
        options: The options of the catalog.
        topic: The name.
        fields: The columns of the statement: fields of Spark's schema, as JSON.
        properties: Settings of the topic; ``partitions``; and of a typed topic ``key``, which are
            the names of columns, separated by commas, and ``timestamp``.
        for_query: Whether the rows of a query are written to it next.

    Returns:
        `CREATED`, `EXISTS` or `LEFT_TO_WRITER`; except for the first, nothing was changed.

    Raises:
        InvalidConfigError: An option of the catalog, a column or a property is wrong.
        InvalidSchemaError: A topic cannot have these columns.
        InvalidTopicError: The name is not one of a topic.
        InvalidPartitionsError: There are too many partitions, or none.
        NotALogError: There is no log.
    """
    settings = dict(properties)
    by_rows = for_query and any(field["name"] == "partition" for field in fields)
    if table_columns.is_of_bytes(fields):
        _refuse_column_names(settings, "a topic of bytes has none of its own")
        typed: dict[str, Any] = {}
    else:
        if by_rows and PARTITIONS not in settings:
            raise InvalidConfigError(
                "The rows have a column partition, and a new typed topic has only one partition",
                todo=f"Set TBLPROPERTIES ('{PARTITIONS}' = '…'), or leave the column partition "
                "out of the query.",
            )
        schema = table_columns.topic_columns(fields)
        key = _key_columns(settings.pop(KEY, None), schema.names)
        typed = {"schema": schema, "key": key, "timestamp": settings.pop(TIMESTAMP, None)}
    partitions = _partitions(settings.pop(PARTITIONS, "1"))
    with _open_log(logs, options) as log:
        if by_rows and not typed and not properties:
            check_topic_name(topic)
            return EXISTS if topic in log else LEFT_TO_WRITER
        try:
            log.create_topic(topic, partitions, settings, **typed)
        except TopicAlreadyExistsError:
            return EXISTS
        return CREATED


def _key_columns(text: str | None, columns: Sequence[str]) -> list[str] | None:
    if text is None:
        return None
    return [text] if text in columns else [name.strip() for name in text.split(",")]


def _refuse_column_names(properties: Mapping[str, str | None], problem: str) -> None:
    for name in (KEY, TIMESTAMP):
        if name in properties:
            raise InvalidConfigError(
                f"The property {name!r} names a column, and {problem}",
                todo="Leave the property out.",
            )


def alter_topic(
    logs: LogCache, options: Mapping[str, str], topic: str, changes: Mapping[str, str | None]
) -> bool:
    """Change settings of a topic, and then its number of partitions, which can only grow.

    Args:
        logs: The open logs.
        options: The options of the catalog.
        topic: The name.
        changes: The new values of properties; None is the default.

    Returns:
        False if there is no such topic.

    Raises:
        InvalidConfigError: An option of the catalog or a property is wrong.
        InvalidPartitionsError: There would be fewer partitions.
        NotALogError: There is no log.
    """
    settings = dict(changes)
    _refuse_column_names(settings, "stays the same as long as there is the topic")
    with _open_log(logs, options) as log:
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
    logs: LogCache, options: Mapping[str, str], topic: str, changes: Sequence[Json]
) -> bool:
    """Change the columns of a typed topic: all changes, or nothing.

    Args:
        logs: The open logs.
        options: The options of the catalog.
        topic: The name.
        changes: See `table_columns.changed_columns`.

    Returns:
        False if there is no such topic.

    Raises:
        InvalidConfigError: An option of the catalog is wrong, or a column is not there.
        InvalidSchemaError: A topic cannot change so, or it is of bytes.
        NotALogError: There is no log.
    """

    def change(before: TopicSchema, earlier: Sequence[TopicSchema]) -> TopicSchema:
        columns, rename = table_columns.changed_columns(before.plain, changes)
        return changed_schema(before, columns, rename, None, earlier)

    with _open_log(logs, options) as log:
        if topic not in log:
            return False
        log.root.alter_schema(topic, change)
        return True


def delete_topic(logs: LogCache, options: Mapping[str, str], topic: str) -> bool:
    """Delete a topic.

    Returns:
        False if there is no such topic.

    Raises:
        InvalidConfigError: An option of the catalog is wrong.
        InvalidTopicError: The topic is internal.
        NotALogError: There is no log.
    """
    with _open_log(logs, options) as log:
        if topic not in log:
            return False
        log.delete_topic(topic)
        return True


@contextmanager
def _open_log(logs: LogCache, options: Mapping[str, str]) -> Iterator[Log]:
    log = logs.acquire(table_options.check_catalog(options))
    try:
        yield log
    finally:
        logs.release(log)


def _partitions(text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise InvalidConfigError(
            f"The property {PARTITIONS!r} must be a whole number, got {text!r}"
        ) from None
