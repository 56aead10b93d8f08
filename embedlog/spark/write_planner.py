"""Plans and publishes the writes of one Spark session; `query_planner` calls it.

The tasks are Java: they stage files as `data_writer` does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embedlog.spark import sink_options
from embedlog.spark.sink_options import SinkOptions

if TYPE_CHECKING:
    from embedlog.spark.data_writer import StagedRows

Json = dict[str, Any]

_MAX_OPTIONS = 64
"""Options of so many writers are kept, so that a stream checks its own, and warns, once."""


class WritePlanner:
    """Checks, plans and publishes writes; arguments and results are JSON.  Any thread may use it.

    A log that was written to stays open for the next write.  Everything that needs pyarrow is
    imported by the first write, since most planners only read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._options: dict[tuple[tuple[str, str], ...], SinkOptions] = {}

    def plan_write(
        self, options: Json, fields: Sequence[Sequence[str]], batch: bool, overwrite: bool
    ) -> Json:
        """Check a write, create its topic if that is possible now, and plan its tasks.

        Args:
            options: The options of the writer.
            fields: The columns of the rows, as pairs of name and type.
            batch: Whether it is a write of one DataFrame, not a micro-batch.
            overwrite: Whether the mode of a batch is ``overwrite``.

        Returns:
            The "root" of the log, the "directory" of the staged files in it, the "topic" of all
            rows or None, the "targets", which are the topics with their ids, numbers of
            partitions, limits and compressions, and whether a publication is "repeatable".
        """
        from embedlog.spark import batch_write

        parsed = self._parse(options)
        if batch:
            sink_options.check_batch(parsed, overwrite)
        types = {name: type_name for name, type_name in fields}  # noqa: C416 - of lists
        sink_options.check_column_types(types, parsed.topic)
        task = batch_write.plan_write(parsed, keep=True)
        return {
            "root": task.path,
            "directory": task.directory,
            "topic": task.topic,
            "targets": [
                [target.name, target.id, target.partitions, *target.limits, target.compression]
                for target in task.targets.values()
            ],
            "repeatable": parsed.txn_app_id is not None,
        }

    def publish_batch(self, options: Json, staged: Sequence[Json], topics: Sequence[int]) -> Json:
        """Publish what the tasks of a batch write staged: all of it, or nothing.

        Must not be called again if the result is unknown, unless the options have a ``txnAppId``.

        Args:
            options: The options of the writer.
            staged: What each task staged, in the order of the tasks.
            topics: The ids of topics that count as written to even without rows.

        Returns:
            How many "records" were published: none if this version was published before.
        """
        from embedlog.spark import batch_write

        parsed = self._parse(options)
        publication = batch_write.batch_publication(parsed, topics)
        result = batch_write.publish(parsed, _staged_rows(staged), publication, keep=True)
        return {"records": result.records}

    def publish_micro_batch(
        self,
        options: Json,
        staged: Sequence[Json],
        batch_id: int,
        query_id: str,
        run_id: str | None = None,
    ) -> Json:
        """Publish what the tasks of a micro-batch staged, unless it was published before.

        Args:
            options: The options of the writer.
            staged: What each task staged, in the order of the tasks.
            batch_id: The number of the micro-batch.
            query_id: The id of the query, which the checkpoint keeps.
            run_id: The id of this run of the query, for messages.

        Returns:
            How many "records" were published.
        """
        from embedlog.spark import batch_write

        parsed = self._parse(options)
        publication = batch_write.micro_batch_publication(parsed, query_id, run_id, batch_id)
        result = batch_write.publish(parsed, _staged_rows(staged), publication, keep=True)
        return {"records": result.records}

    def discard(self, options: Json, staged: Sequence[Json]) -> None:
        """Remove what the tasks of a write staged; what was published is a copy, and stays."""
        from embedlog.spark import batch_write

        batch_write.discard(self._parse(options), _staged_rows(staged))

    def _parse(self, options: Mapping[str, str]) -> SinkOptions:
        key = tuple(sorted(options.items()))
        with self._lock:
            parsed = self._options.get(key)
        if parsed is None:
            parsed = sink_options.parse(options)
            with self._lock:
                if len(self._options) >= _MAX_OPTIONS:
                    self._options.clear()
                self._options[key] = parsed
        return parsed


def _staged_rows(staged: Sequence[Json]) -> list[StagedRows]:
    """Return the rows that tasks staged, as `StagedRows.java` writes them."""
    from embedlog.publish.staging import StagedBatch, StagedFile
    from embedlog.spark.data_writer import StagedRows

    return [
        StagedRows(
            StagedFile(
                task["path"],
                tuple((topic, topic_id, number) for topic, topic_id, number in task["partitions"]),
                tuple(StagedBatch(*batch) for batch in task["batches"]),
                task["records"],
            ),
            task["placed_by_key"],
        )
        for task in staged
    ]
