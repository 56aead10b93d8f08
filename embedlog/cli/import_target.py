"""Appends tables to the partitions that they name, for `embedlog import` and `produce`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from embedlog.api import Log
from embedlog.cli.file_formats import NOT_TEXT
from embedlog.config import INT_MAX
from embedlog.display import plural
from embedlog.errors import InvalidRecordError, UnknownTopicOrPartitionError
from embedlog.lazy import pa, pc
from embedlog.producer import Producer


def to_partition(table: Any, partition: int | None) -> Any:
    """Return a table of which all rows go to a partition; None leaves that to their keys."""
    names = [name for name in table.column_names if name != "partition"]
    table = table.select(names)
    if partition is None:
        return table
    return table.append_column("partition", pa.repeat(partition, table.num_rows))


def by_partition(table: Any, default: int | None = None) -> Iterator[tuple[int | None, Any]]:
    """Yield the rows of each partition in their order, without the column ``partition``.

    Args:
        table: The rows.
        default: The partition of rows without one; None if their keys choose it.
    """
    if "partition" not in table.column_names:
        yield default, table
        return
    column, table = table["partition"].cast(pa.int64()), table.drop_columns("partition")
    counts = pc.value_counts(column)
    if len(counts) > 1:
        order = pc.sort_indices(column)  # It is stable, and nulls come last.
        counts, table = pc.value_counts(column.take(order)), table.take(order)
    start = 0
    for entry in counts.to_pylist():
        number = default if entry["values"] is None else entry["values"]
        yield number, table.slice(start, entry["counts"])
        start += entry["counts"]


class ImportTarget:
    """Appends tables to a topic, and counts what was appended.

    Args:
        log: The log.
        topic: The topic.
        names: The names of the serializers of keys and values, of which tables have the bytes.
        raw: Whether the file has keys and values as they are stored.
        is_new: Whether the import has created it; it then gets as many partitions as it needs.
        options: Settings of the producer.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        names: tuple[str, str] | None = None,
        *,
        raw: bool = False,
        is_new: bool = False,
        **options: Any,
    ) -> None:
        from embedlog.api.typed_topic import no_bytes

        self._log, self.topic, self.is_new = log, topic, is_new
        self.schema = log.root.context.catalog.schema(log.root.topic(topic))
        """The columns of a typed topic; None if values are bytes."""
        if self.schema is not None and raw:
            raise no_bytes(topic)
        # Columns of other types than bytes and text are left to the serializers of the topic.
        for field, name in zip(("key", "value"), names or (), strict=False):
            if name in NOT_TEXT:
                options[f"{field}_serializer"] = "bytes"
        self._options = {"max_request_size": INT_MAX, **options}
        self._producer: Producer[Any, Any] = log.producer(**self._options)
        self.records = 0
        """How many records of the file were appended, from the first one on."""
        self.uncertain = 0
        """How many records after these may have been appended: the last call has failed."""
        self.appended: dict[int, tuple[int, int, int]] = {}
        """By partition: the first offset, the offset after the last record, and the records."""

    def append(self, table: Any) -> None:
        """Append the rows of a table to their partitions.

        Raises:
            UnknownTopicOrPartitionError: The topic has not so many partitions.
            InvalidRecordError: A partition is negative.
            EmbedlogError: As `Producer.append_table`.
        """
        parts = list(by_partition(table))
        numbers = [number for number, _ in parts if number is not None]
        if numbers and min(numbers) < 0:
            raise InvalidRecordError("partition must not be negative", topic=self.topic)
        if numbers:
            self._ensure(max(numbers))
        self.uncertain = table.num_rows
        for partition, rows in parts:
            future = self._producer.append_table(
                self.topic,
                rows,
                value="value" if self.schema is None else None,
                partition=partition,
            )
            for written in future.result():
                # Unknown only for what was written before, by a producer with a name.
                assert written.base_offset is not None
                start, stop = written.base_offset, written.base_offset + written.count
                first, _, records = self.appended.get(written.partition, (start, 0, 0))
                self.appended[written.partition] = first, stop, records + written.count
        self.records, self.uncertain = self.records + table.num_rows, 0

    def _ensure(self, highest: int) -> None:
        """Add partitions to a new topic, up to the highest one of a table."""
        count = self._log.root.partitions(self.topic)
        if highest < count:
            return
        if not self.is_new:
            raise UnknownTopicOrPartitionError(
                f"The file has records of partition {highest}, "
                f"the topic has {plural(count, 'partition')}",
                topic=self.topic,
                todo=f"Run `embedlog topics alter {self.topic} -p {highest + 1}`, or use "
                "--repartition.",
            )
        self._log.create_partitions(self.topic, highest + 1)
        # A producer warns of new partitions, because keys then go to other ones.
        self._producer.close()
        self._producer = self._log.producer(**self._options)

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()
