"""`Topic` and `TopicView`: the records of a topic as rows, slices and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, overload

import pyarrow as pa

from embedlog.api.display import html_table, moment, need, plural, short
from embedlog.api.latest import get, latest
from embedlog.api.offset_range import OffsetRange
from embedlog.batch import schema as batch_schema
from embedlog.batch import tables
from embedlog.batch.arrays import empty
from embedlog.partition import PartitionLog
from embedlog.record import K, Record, V
from embedlog.root.root import Root

if TYPE_CHECKING:
    import pandas
    import polars

_READ_BYTES = 4 << 20
_SHOWN = 5


class TopicView(Generic[K, V]):
    """Some records of a topic, read on demand; rows are ordered by partition and offset.

    ``len`` counts records, ``[100:200]`` and ``[-10:]`` select rows as in a list, and ``[7]``
    is one record.  Every read stops at the log end as of the call.  A view holds offsets, not
    records: compaction may remove some of them later.
    """

    def __init__(self, root: Root, name: str, ranges: Sequence[OffsetRange]) -> None:
        self._root, self.name = root, name
        self._ranges = list(ranges)

    def ranges(self) -> list[OffsetRange]:
        """Return the offsets that the view covers now."""
        return self._ranges

    def __len__(self) -> int:
        return sum(map(self._count, self.ranges()))

    def _count(self, part: OffsetRange) -> int:
        return self._log(part.partition).record_counts.count(part.start, part.stop)

    @overload
    def __getitem__(self, rows: int) -> Record[K, V]: ...
    @overload
    def __getitem__(self, rows: slice) -> TopicView[K, V]: ...
    def __getitem__(self, rows: int | slice) -> Record[K, V] | TopicView[K, V]:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step != 1:
                raise ValueError(
                    f"The step of a slice must be 1, got {step}; use to_arrow() for other steps"
                )
            return TopicView(self._root, self.name, self._cut(start, stop))
        if not hasattr(rows, "__index__"):
            raise TypeError(
                f"A row must be an int or a slice, got {type(rows).__name__}; use get(key) for the "
                "latest value of a key, and partition(number) for a partition"
            )
        count = len(self)
        index = rows + count if rows < 0 else rows
        if not 0 <= index < count:
            raise IndexError(f"Row {rows} is out of range: the view has {count} rows")
        for record in TopicView(self._root, self.name, self._cut(index, index + 1)):
            return record
        raise IndexError(f"Row {rows} of {count} was deleted or compacted meanwhile")

    def _cut(self, start: int, stop: int) -> list[OffsetRange]:
        """Return the offsets of the rows ``[start, stop)``."""
        ranges, before = [], 0
        for part in self.ranges():
            if before >= stop or start >= stop:
                break
            count = self._count(part)
            if before + count > start:
                offset_after = self._log(part.partition).record_counts.after
                first = offset_after(part.start, part.stop, max(start - before, 0))
                end = offset_after(part.start, part.stop, stop - before)
                ranges.append(OffsetRange(part.partition, first, end))
            before += count
        return ranges

    def __iter__(self) -> Iterator[Record[K, V]]:
        """Yield every record as a `Record`."""
        for part, batches in self._reads():
            for batch, first, last in batches:
                times, keys, values, headers = batch.lists()
                rows = zip(
                    repeat(self.name),
                    repeat(part.partition),
                    batch.offsets().to_pylist(),
                    times,
                    repeat(int(batch.is_log_append_time)),
                    keys,
                    values,
                    repeat([]) if headers is None else headers,
                    repeat(batch.leader_epoch),
                    strict=False,
                )
                yield from list(map(Record._make, rows))[first:last]

    # Tables

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield Arrow batches without copies, with all or some columns of `schema`.

        Needs the memory of a few batches, whatever the size of the topic.
        """
        for table in self._tables(self.schema(columns)):
            yield from table.to_batches()

    def _tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        for part, batches in self._reads():
            # Compressed batches may be a hundred times larger when decoded: one at a time.
            compressed = any(batch.is_compressed for batch, _, _ in batches)
            for chunk in ([batch] for batch in batches) if compressed else (batches,):
                yield tables.table(chunk, part.partition, schema)

    def schema(self, columns: Sequence[str] | None = None) -> pa.Schema:
        """Return the schema: offset, partition, timestamp, key, value, and headers if any."""
        stored = batch_schema(headers=self._has_headers())
        fields = [pa.field("offset", pa.int64()), pa.field("partition", pa.int32()), *stored]
        by_name = {field.name: field for field in fields}
        names = list(by_name if columns is None else columns)
        for name in names:
            if name not in by_name:
                raise KeyError(f"There is no column {name!r}, only {', '.join(by_name)}")
        return pa.schema([by_name[name].with_nullable(True) for name in names])

    def to_arrow(self, columns: Sequence[str] | None = None, *, latest: bool = False) -> pa.Table:
        """Return a table that refers to the mapped segments: only compressed data is copied.

        Args:
            columns: Names of columns of `schema`; by default all.
            latest: Return only the last record of each key, without tombstones; the result
                is the same whether or not compaction has run.
        """
        schema = self.schema(columns)
        parts = self._latest(schema) if latest else self._tables(schema)
        return pa.concat_tables([empty(schema), *parts])

    def _latest(self, schema: pa.Schema) -> Iterator[pa.Table]:
        return latest(self._root, self.name, self.ranges, schema)

    def to_pandas(
        self, columns: Sequence[str] | None = None, *, latest: bool = False
    ) -> pandas.DataFrame:
        """Return a pandas DataFrame; see `to_arrow`."""
        need("pandas")
        return self.to_arrow(columns, latest=latest).to_pandas()

    def to_polars(
        self, columns: Sequence[str] | None = None, *, latest: bool = False
    ) -> polars.DataFrame:
        """Return a Polars DataFrame; see `to_arrow`."""
        frame: polars.DataFrame = need("polars").from_arrow(self.to_arrow(columns, latest=latest))
        return frame

    # The latest value of each key

    def get(self, key: bytes, default: bytes | None = None) -> bytes | None:
        """Return the latest value of a key, whether or not compaction has run.

        Returns ``default`` if there is none, or if it was deleted.  Reads the keys from the
        newest segment backwards, first in the partition that the key hashes to, and in the
        others only if it is not there.
        """
        if isinstance(key, str):
            raise TypeError("key must be bytes, got str; call key.encode()")
        value = get(self._root, self.name, self.ranges, key)
        return default if value is None else value

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield each key with its latest value, without keys that were deleted."""
        for table in self._latest(self.schema(["key", "value"])):
            for batch in table.to_batches():
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow PyCapsule stream, by which DuckDB, Polars, pandas and others read the view."""
        reader = pa.RecordBatchReader.from_batches(self.schema(), self.batches())
        return reader.__arrow_c_stream__(requested_schema)

    # Display

    def __dir__(self) -> list[str]:
        """Return the names that are for programs: what completion offers."""
        return ["name", *(item for item in dir(type(self)) if item[0] != "_")]

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def _title(self) -> str:
        parts = ", ".join(f"{part.partition}[{part.start}:{part.stop}]" for part in self.ranges())
        return f"View of {self.name}: {len(self):,} records, {parts or 'nothing'}"

    def _repr_html_(self) -> str:
        """For notebooks: the title and the records; of many only the first and the last ones."""
        heads = ("partition", "offset", "timestamp", "key", "value")
        if len(self) <= 2 * _SHOWN:
            return html_table(self._title(), heads, map(_cells, self))
        first, last = map(_cells, self[:_SHOWN]), map(_cells, self[-_SHOWN:])
        return html_table(self._title(), heads, (*first, ("…",) * len(heads), *last))

    # Reading

    def _has_headers(self) -> bool:
        for number in {part.partition for part in self.ranges()}:
            log = self._log(number)
            log.refresh()
            # The last segment first: it is in memory, the others may have to be read.
            if log.active_segment.headers or any(info.headers for info in log.segments.values()):
                return True
        return False

    def _log(self, partition: int) -> PartitionLog:
        return self._root.partition(self.name, partition)

    def _reads(self) -> Iterator[tuple[OffsetRange, list[tables.BatchRows]]]:
        """Yield the batches of each read, with the rows of them that the view covers."""
        for part in self.ranges():
            if part.start >= part.stop:
                continue
            reader = self._log(part.partition).reader(part.start)
            while reader.offset < part.stop:
                # A batch may begin below this offset if compaction has merged it meanwhile.
                start = reader.offset
                batches = reader.read(_READ_BYTES)
                if not batches:
                    break
                rows = tables.rows_in_range(batches, start, part.stop)
                if rows:
                    yield part, rows


class Topic(TopicView[K, V]):
    """All records of a topic, as of each call."""

    def __init__(self, root: Root, name: str) -> None:
        super().__init__(root, name, ())

    def ranges(self) -> list[OffsetRange]:
        """Return the offsets of every partition now."""
        return [self._range(number) for number in range(self._root.partitions(self.name))]

    def _range(self, number: int) -> OffsetRange:
        log = self._log(number)
        return OffsetRange(number, log.start_offset(), log.end_offset())

    @property
    def partitions(self) -> int:
        """The number of partitions."""
        return self._root.partitions(self.name)

    def partition(self, number: int) -> TopicView[K, V]:
        """Return a view of one partition, as of now."""
        return TopicView(self._root, self.name, [self._range(number)])

    def head(self, count: int = _SHOWN) -> TopicView[K, V]:
        """Return the first ``count`` records of each partition."""
        return self._count_ends(count, first=True)

    def tail(self, count: int = _SHOWN) -> TopicView[K, V]:
        """Return the last ``count`` records of each partition."""
        return self._count_ends(count, first=False)

    def _count_ends(self, count: int, first: bool) -> TopicView[K, V]:
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        ranges = []
        for part in self.ranges():
            records = self._log(part.partition).record_counts
            if first:
                part = part._replace(stop=records.after(part.start, part.stop, count))
            else:
                part = part._replace(start=records.before(part.start, part.stop, count))
            ranges.append(part)
        return TopicView(self._root, self.name, ranges)

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the topic, by Kafka's names."""
        return self._root.topic(self.name).config.to_dict()

    def describe_retention(self) -> list[str]:
        """Return in words what is deleted when, by which clock, and what keeps the rest."""
        from embedlog.retention import describe

        return describe(self._root, self.name, self._root.clock())

    def explain_compaction(self) -> list[str]:
        """Return in words whether compaction will clean each partition, and why or why not."""
        from embedlog.compaction import explain

        now_ms = self._root.clock()
        return [explain(self._log(number), now_ms) for number in range(self.partitions)]

    def size_bytes(self) -> int:
        """Return the size of the segment files in bytes."""
        return sum(self._log(number).size_bytes() for number in range(self.partitions))

    def _title(self) -> str:
        records = len(self)
        size = f", {self.size_bytes() / 1e6:.1f} MB" if records else ""
        partitions = plural(self.partitions, "partition")
        return f"Topic {self.name}: {partitions}, {records:,} records{size}"


def _cells(record: Record) -> tuple[object, ...]:
    key, value = short(record.key), short(record.value)
    return record.partition, record.offset, moment(record.timestamp), key, value
