"""The columns of the source, which are those of Spark's Kafka source.

The planner imports this; so that it starts quickly, it does not import pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterable

from embedlog.errors import InvalidConfigError

SPARK_TYPES = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}
"""Every column, with Spark's name of its type."""


def columns(include_headers: bool) -> tuple[str, ...]:
    """Return the columns of the source."""
    return tuple(name for name in SPARK_TYPES if include_headers or name != "headers")


def schema_ddl(include_headers: bool) -> str:
    """Return the schema of the source."""
    return ", ".join(f"{name} {SPARK_TYPES[name]}" for name in columns(include_headers))


def projected_columns(fields: Iterable[tuple[str, str]], include_headers: bool) -> tuple[str, ...]:
    """Return the columns of a user's schema, given as pairs of name and type.

    Raises:
        InvalidConfigError: There is no such column, or it has another type.
    """
    fields = tuple(fields)
    for name, spark_type in fields:
        if SPARK_TYPES.get(name) != spark_type:
            raise InvalidConfigError(
                f"The log has no column {name} of type {spark_type}",
                todo=f"Choose from: {schema_ddl(True)}; cast afterwards.",
            )
        if name == "headers" and not include_headers:
            raise InvalidConfigError(
                "The schema has the column headers", todo="Set includeHeaders to true."
            )
    return tuple(name for name, _ in fields)
