"""`Split`: a part of a topic that a process reads by itself, on this or another host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from embedlog.batch import tables
from embedlog.schemas.reading import TypedReader
from embedlog.schemas.row_filter import RowFilter
from embedlog.splits.read_slice import LogRoots, row_groups, row_tables
from embedlog.splits.slices import PartitionSlice, TopicVersions


@dataclass(frozen=True, slots=True, repr=False)
class Split:
    """Records of one partition, as `TopicView.splits` planned them.

    It pickles to a few kilobytes, and reads nothing until it is used.  Reading maps the segment
    files and opens no database, so it needs the log's disk under the same path, and nothing else.
    """

    topic: str
    schema: pa.Schema
    """The columns of its batches."""
    _root: str
    _slices: tuple[PartitionSlice, ...]
    _versions: TopicVersions | None
    """The schemas of a typed topic."""
    _stored: pa.Schema
    """What is read of the files."""
    _decode: Callable[[pa.Table], pa.Table] | None
    """Returns keys and values as the topic's serializers have them."""
    _condition: RowFilter | None

    def __repr__(self) -> str:
        offsets = f"[{self.start_offset}, {self.end_offset})"
        return f"<Split of {self.topic}-{self.partition}, offsets {offsets}>"

    @property
    def partition(self) -> int:
        """The number of the partition."""
        return self._slices[0].partition

    @property
    def start_offset(self) -> int:
        """The first offset to read."""
        return self._slices[0].from_offset

    @property
    def end_offset(self) -> int:
        """The offset after the last one to read."""
        return self._slices[-1].until_offset

    @property
    def size(self) -> int:
        """About how many bytes of the files have its records."""
        return sum(part.size for part in self._slices)

    @property
    def num_rows(self) -> int | None:
        """How many rows it has; None if a condition, or gaps between offsets, leave it open."""
        known = self._condition is None and all(part.rows is not None for part in self._slices)
        return sum(part.rows or 0 for part in self._slices) if known else None

    def starting_at(self, offset: int) -> Split:
        """Return what is left of it from an offset on, to continue where a program stopped."""
        # The last one stays, also if nothing of it is left: it says where the split ends.
        left = [part for part in self._slices if offset < part.until_offset] or [self._slices[-1]]
        if left[0].from_offset < offset:
            start, until = min(offset, left[0].until_offset), left[0].until_offset
            rows = None if left[0].rows is None else until - start
            left[0] = replace(left[0], from_offset=start, rows=rows)
        return replace(self, _slices=tuple(left))

    def to_batches(self, batch_size: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order of their offsets; needs the memory of a few batches.

        Args:
            batch_size: The most rows of a batch; by default about 32,768, or more if the log has
                them in one batch.

        Raises:
            DataLossError: Retention or compaction has deleted a file since the split was made, or
                a part of the log was truncated.
            CorruptBatchError: A batch is not as it was written.
            NotALogError: The log is not on this host.
            RecordDeserializationError: A record is not what the topic's serializers write.
        """
        roots = LogRoots(self._root)
        try:
            for part in self._slices:
                if part.from_offset < part.until_offset:
                    for table in row_tables(row_groups(roots, part, self._versions), self._table):
                        table = table.combine_chunks()
                        yield from table.to_batches(max_chunksize=batch_size)
        finally:
            roots.close()

    def _table(self, rows: Sequence[Any]) -> pa.Table:
        if self._versions is None:
            table = tables.table(rows, self.partition, self._stored)
        else:
            table = TypedReader(self._versions.read).table(rows, self.partition, self._stored)
        if self._decode is not None:
            table = self._decode(table)
        if self._condition is not None:
            table = self._condition.keep(table)
        return table.select(self.schema.names)

    def to_table(self) -> pa.Table:
        """Return the rows as a table; see `to_batches`."""
        return pa.Table.from_batches(self.to_batches(), self.schema)
