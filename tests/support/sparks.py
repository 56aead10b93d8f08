"""Looking at what a query read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from embedlog.spark.kafka_columns import SPARK_TYPES
from embedlog.spark.partition_reader import read_input_partition

ALL = tuple(SPARK_TYPES)


def values_of(rows: Iterable[Any]) -> list[int]:
    """The values of rows as numbers, sorted: tasks come in any order."""
    return sorted(int(row["value"]) for row in rows)


def read_all(tasks: list[Any], names: tuple[str, ...] = ALL, fail: bool = True) -> list[Any]:
    """Run tasks as executors do, and return their rows as dicts."""
    return [
        row
        for work in tasks
        for some in read_input_partition(work, names, fail)
        for row in some.to_pylist()
    ]
