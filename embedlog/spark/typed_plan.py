"""What the planner tells the reader in the JVM about typed topics.

The reader finds a column of a segment by its field id.  It takes the columns of a segment from
the plan and not from the file, whose schema has no checksum.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from embedlog.errors import NotALogError
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.spark.log_cache import LogCache
from embedlog.spark.plan import LogInputPartition
from embedlog.spark.query_schemas import QuerySchemas, check_for_bytes, selected_typed
from embedlog.spark.source_options import SourceOptions

Json = dict[str, Any]


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


def columns_to_json(schema: TopicSchema) -> Json:
    """Return where the columns of a version of a schema come from.

    Returns:
        ``{name: [field id, default]}``; a default is a stream of Arrow with one row, in Base64, or
        None.
    """
    return {name: [number, schema.encoded_default(name)] for number, name in schema.ids.items()}


def schemas_to_json(tasks: Sequence[LogInputPartition]) -> Json:
    """Return the columns of the typed topics that tasks read.

    Returns:
        ``{topic: {"columns": columns_to_json(…), "segments": {version: schema}}}``; a schema has
        all columns that a segment of that version may have, as a message of Arrow in Base64.
    """
    return {
        topic: {
            "columns": columns_to_json(versions.read),
            "segments": {
                str(number): _segment_columns(schema) for number, schema in versions.stored.items()
            },
        }
        for task in tasks
        for topic, versions in task.schemas.items()
    }


def _segment_columns(schema: TopicSchema) -> str:
    columns = segment_schema(schema, headers=True, tombstones=True, offsets=True)
    return base64.b64encode(columns.serialize()).decode()
