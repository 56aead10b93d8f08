"""Reads the input partitions of a query as an executor does, without Spark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from embedlog.spark.kafka_columns import SPARK_TYPES
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
