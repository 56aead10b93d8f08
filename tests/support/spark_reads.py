"""Reads the input partitions of a query as an executor does, without Spark."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from embedlog.spark.columns import SPARK_TYPES
from embedlog.spark.partition_reader import LogInputPartition, read_input_partition

ALL = tuple(SPARK_TYPES)


def values_of(rows: Iterable[Any]) -> list[int]:
    """Return the values of rows as numbers, sorted: tasks come in any order."""
    return sorted(int(row["value"]) for row in rows)


def read_all(
    partitions: list[LogInputPartition],
    names: tuple[str, ...] = ALL,
    fail_on_data_loss: bool = True,
) -> list[Any]:
    """Read input partitions, and return their rows as dicts."""
    return [
        row
        for partition in partitions
        for batch in read_input_partition(partition, names, fail_on_data_loss)
        for row in batch.to_pylist()
    ]


def arrow_schema_of(struct: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects for one of its own."""
    named = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(struct, **named)


def spark_schema_of(schema: pa.Schema) -> StructType:
    """Return the schema of Spark for an Arrow schema that Spark passes."""
    return from_arrow_schema(schema, prefer_timestamp_ntz=True)
