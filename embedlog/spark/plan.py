"""The plan of a query: what each task reads; for tasks in Java it is JSON.

So that a planner starts quickly, this imports neither pyarrow nor pyspark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embedlog.splits.slices import PartitionSlice, TopicVersions


@dataclass(frozen=True, slots=True)
class LogInputPartition:
    """What one task reads; the value of a Spark `InputPartition`."""

    root: str
    slices: tuple[PartitionSlice, ...]
    schemas: Mapping[str, TopicVersions] = field(default_factory=dict)
    """Those of the typed topics, by their names."""


def plan_to_json(root: str, tasks: Sequence[LogInputPartition]) -> dict[str, Any]:
    """Return the plan of a query as an object for `json.dumps`.

    Returns:
        ``{"root": path, "size": bytes, "rows": number or None, "schemas": {...}, "tasks":
        [[slice, ...], ...]}``, with slices as `PartitionSlice.to_json` returns them.  ``rows`` is
        None if that of a slice is.  Each schema is ``{"columns": columns_to_json(…), "segments":
        {version: segment_columns(…)}}``, with the functions of `embedlog.spark.columns`.
    """
    versions = {topic: known for task in tasks for topic, known in task.schemas.items()}
    slices = [part for task in tasks for part in task.slices]
    counts = [part.rows for part in slices]
    return {
        "root": root,
        "size": sum(part.size for part in slices),
        "rows": None if None in counts else sum(count for count in counts if count is not None),
        "schemas": {topic: _versions_to_json(known) for topic, known in versions.items()},
        "tasks": [[part.to_json() for part in task.slices] for task in tasks],
    }


def _versions_to_json(versions: TopicVersions) -> dict[str, Any]:
    # Not for topics of bytes: they need no pyarrow.
    from embedlog.spark.columns import columns_to_json, segment_columns

    segments = {str(number): segment_columns(schema) for number, schema in versions.stored.items()}
    return {"columns": columns_to_json(versions.read), "segments": segments}
