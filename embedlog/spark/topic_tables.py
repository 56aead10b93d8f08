"""The topics of a log as the tables of a Spark catalog; `LogCatalog.java` calls it.

The options of a catalog are those that all its tables have in common: ``path`` and others of
readers and writers.  The properties of a table are the settings of the topic by Kafka's names,
and ``partitions``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from embedlog.api import Log
from embedlog.catalog import check_topic_name
from embedlog.errors import InvalidConfigError, TopicAlreadyExistsError
from embedlog.spark import table_options
from embedlog.spark.kafka_columns import SPARK_TYPES
from embedlog.spark.log_cache import LogCache
from embedlog.spark.sink_options import COLUMNS as WRITER_COLUMNS

PARTITIONS = "partitions"
"""The property that is no setting of a topic."""


def topics(logs: LogCache, options: Mapping[str, str]) -> list[str]:
    """Return the names of the topics, without internal ones.

    Raises:
        InvalidConfigError: An option of the catalog is wrong.
        NotALogError: There is no log.
    """
    with _open_log(logs, options) as log:
        return log.topics()


def properties(logs: LogCache, options: Mapping[str, str], topic: str) -> dict[str, str] | None:
    """Return the number of partitions, and the settings that differ from their defaults.

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
        settings = {name: str(value) for name, value in info.config.overrides().items()}
        return {PARTITIONS: str(info.partitions), **settings}


def create_topic(
    logs: LogCache,
    options: Mapping[str, str],
    topic: str,
    fields: Iterable[tuple[str, str]],
    properties: Mapping[str, str],
    only_check: bool = False,
) -> bool:
    """Create a topic.

    Args:
        logs: The open logs.
        options: The options of the catalog.
        topic: The name.
        fields: The columns of the statement, as pairs of name and type: any that a topic has,
            or that a writer takes, since ``CREATE TABLE … AS SELECT`` passes those of the query.
        properties: Settings of the topic, and ``partitions``.
        only_check: Change nothing.

    Returns:
        False if the topic exists; nothing was changed then.

    Raises:
        InvalidConfigError: An option of the catalog, a column or a property is wrong.
        InvalidTopicError: The name is not one of a topic.
        InvalidPartitionsError: There are too many partitions, or none.
        NotALogError: There is no log.
    """
    for name, spark_type in fields:
        if spark_type != SPARK_TYPES.get(name) and spark_type not in WRITER_COLUMNS.get(name, ()):
            columns = ", ".join(f"{name} {spark_type}" for name, spark_type in SPARK_TYPES.items())
            raise InvalidConfigError(
                f"A topic has no column {name} of type {spark_type}",
                todo=f"Leave the columns out: a topic of bytes has {columns}. A topic with other "
                "columns is created in Python: log.create_topic(name, schema=…).",
            )
    settings = dict(properties)
    partitions = _partitions(settings.pop(PARTITIONS, "1"))
    with _open_log(logs, options) as log:
        if only_check:
            check_topic_name(topic)
            return topic not in log
        try:
            log.create_topic(topic, partitions, settings)
        except TopicAlreadyExistsError:
            return False
        return True


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
