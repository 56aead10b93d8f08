"""What the planner tells the reader in the JVM about a query of typed topics."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from embedlog.errors import InvalidConfigError, NotALogError
from embedlog.spark import kafka_columns
from embedlog.spark.log_cache import LogCache
from embedlog.spark.query_schemas import QuerySchemas, check_for_bytes, selected_typed
from embedlog.spark.source_options import SourceOptions
from embedlog.spark.typed_columns import columns_to_json

Json = dict[str, Any]


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
    topics = {name: columns_to_json(version) for name, version in schemas.schemas.items()}
    return {
        "schema": json.dumps(schemas.columns()) if schema is None else schema,
        "typed": {"tombstones": options.include_tombstones, "topics": topics},
    }
