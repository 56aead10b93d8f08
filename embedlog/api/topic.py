"""Looking at a topic: slices, counts and tables, as one would with a data frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog.api.display import html_table, moment, need, short
from embedlog.partition import PartitionLog
from embedlog.record import Record
from embedlog.root.root import Root

if TYPE_CHECKING:
    import pyarrow as pa

_READ_BYTES = 4 << 20
_SHOWN = 5


class OffsetRange(NamedTuple):
    """Offsets ``[start, stop)`` of one partition."""

    partition: int
    start: int
    stop: int


class TopicView:
    """Some records of a topic, not read yet; rows are in order of (partition, offset).

    ``len`` counts records, ``[100:200]`` and ``[-10:]`` select rows as in a
    list, ``[7]`` is one record.  Every read stops at the end as of the call.
    A view names offsets: compaction may remove records of it later.
    """

    def __init__(self, root: Root, name: str, ranges: Sequence[OffsetRange]) -> None:
        self._root, self.name = root, name
        self._fixed = list(ranges)

    def ranges(self) -> list[OffsetRange]:
        """Return what the view covers now."""
        return self._fixed

    def __len__(self) -> int:
        return sum(map(self._count, self.ranges()))

    def _count(self, part: OffsetRange) -> int:
        return self._log(part.partition).record_counts.count(part.start, part.stop)

    def __getitem__(self, rows: int | slice) -> Any:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step != 1:
                raise ValueError("a view is sliced without a step; use to_arrow() for that")
            return TopicView(self._root, self.name, self._cut(start, stop))
        if not hasattr(rows, "__index__"):
            raise TypeError(
                f"a row is a number or a slice, not {type(rows).__name__}: "
                "the latest value of a key is get(key), a partition is partition(number)"
            )
        count = len(self)
        place = rows + count if rows < 0 else rows
        if not 0 <= place < count:
            raise IndexError(f"row {rows} of {count}")
        for record in TopicView(self._root, self.name, self._cut(place, place + 1)):
            return record
        raise IndexError(f"row {rows} of {count} was deleted or compacted away meanwhile")

    def _cut(self, start: int, stop: int) -> list[OffsetRange]:
        """Return rows ``[start, stop)`` as offsets."""
        found, before = [], 0
        for part in self.ranges():
            if before >= stop or start >= stop:
                break
            count = self._count(part)
            if before + count > start:
                end_of = self._log(part.partition).record_counts.after
                first = end_of(part.start, part.stop, max(start - before, 0))
                last = end_of(part.start, part.stop, stop - before)
                found.append(OffsetRange(part.partition, first, last))
            before += count
        return found

    def __iter__(self) -> Iterator[Record]:
        """Yield every record as an object."""
        for batch, part, first, last in self._batches():
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
        """Yield Arrow batches without copies, with the columns of `schema`, or just some of them.

        Memory stays that of a few batches, whatever the size of the topic.
        """
        for table in self._tables(self.schema(columns)):
            yield from table.to_batches()

    def _tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        from embedlog.batch.tables import table

        for part, found in self._reads():
            # What is compressed may grow a hundredfold: then one batch at a time.
            packed = any(batch.is_compressed for batch, _, _ in found)
            for some in ([row] for row in found) if packed else (found,):
                yield table(some, part.partition, schema)

    def schema(self, columns: Sequence[str] | None = None) -> pa.Schema:
        """Return the columns: offset, partition, timestamp, key, value, and headers if any."""
        import pyarrow as pa

        from embedlog.batch import schema

        stored = schema(headers=self._has_headers())
        fields = [pa.field("offset", pa.int64()), pa.field("partition", pa.int32()), *stored]
        wanted = [field.name for field in fields] if columns is None else list(columns)
        known = {field.name: field for field in fields}
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise KeyError(f"no column {unknown[0]!r}; there are {', '.join(known)}")
        return pa.schema([known[name].with_nullable(True) for name in wanted])

    def to_arrow(self, columns: Sequence[str] | None = None, *, latest: bool = False) -> pa.Table:
        """Return a table over the segments' own memory: nothing is copied unless compressed.

        Args:
            columns: Some of those of `schema`.
            latest: Only the last record of each key, if that has a value: the
                same whether or not compaction has run.
        """
        import pyarrow as pa

        from embedlog.batch.arrays import empty

        schema = self.schema(columns)
        tables = self._latest(schema) if latest else self._tables(schema)
        return pa.concat_tables([empty(schema), *tables])

    def _latest(self, schema: pa.Schema) -> Iterator[pa.Table]:
        from embedlog.api.latest import latest

        return latest(self._root, self.name, self.ranges, schema)

    def to_pandas(self, columns: Sequence[str] | None = None, *, latest: bool = False) -> Any:
        """Return a pandas DataFrame; as `to_arrow`."""
        need("pandas")
        return self.to_arrow(columns, latest=latest).to_pandas()

    def to_polars(self, columns: Sequence[str] | None = None, *, latest: bool = False) -> Any:
        """Return a Polars DataFrame; as `to_arrow`."""
        return need("polars").from_arrow(self.to_arrow(columns, latest=latest))

    # As a table: of each key the latest value

    def get(self, key: bytes, default: bytes | None = None) -> bytes | None:
        """Return the latest value of a key, whether or not compaction has run.

        ``default`` if there is none, or a tombstone.  Keys are looked at from the
        newest segment backwards, in the partition that the key belongs to; in the
        others only if it is not there.
        """
        from embedlog.api.latest import get

        if isinstance(key, str):
            raise TypeError("a key is bytes, not str: key.encode()")
        found = get(self._root, self.name, self.ranges, key)
        return default if found is None else found

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield each key with its latest value, those that were deleted left out."""
        for table in self._latest(self.schema(["key", "value"])):
            for some in table.to_batches():
                yield from zip(*(column.to_pylist() for column in some.columns), strict=True)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow PyCapsule stream: DuckDB, Polars, pandas and others take the view as it is."""
        import pyarrow as pa

        reader = pa.RecordBatchReader.from_batches(self.schema(), self.batches())
        return reader.__arrow_c_stream__(requested_schema)

    # Pictures of it

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def _title(self) -> str:
        parts = ", ".join(f"{part.partition}[{part.start}:{part.stop}]" for part in self.ranges())
        return f"View of {self.name}: {len(self):,} records, {parts or 'nothing'}"

    def _repr_html_(self) -> str:
        """For notebooks: the title and the records, of many the first and the last ones."""
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
            # The last segment first: it is known, the others are to be read.
            if log.active_segment.headers or any(info.headers for info in log.segments.values()):
                return True
        return False

    def _log(self, partition: int) -> PartitionLog:
        return self._root.partition(self.name, partition)

    def _batches(self) -> Iterator[tuple[Any, OffsetRange, int, int]]:
        """Yield batches with the rows of them that the view covers."""
        for part, found in self._reads():
            for batch, first, last in found:
                yield batch, part, first, last

    def _reads(self) -> Iterator[tuple[OffsetRange, list[tuple[Any, int, int]]]]:
        """Yield what one read found: batches of one segment, and which rows of them are covered."""
        from embedlog.batch.tables import rows_in_range

        for part in self.ranges():
            if part.start >= part.stop:
                continue
            reader = self._log(part.partition).reader(part.start)
            while reader.offset < part.stop:
                # A batch may begin below it: compaction merged some while this goes on.
                left = part._replace(start=reader.offset)
                found = reader.read(_READ_BYTES)
                if not found:
                    break
                rows = rows_in_range(found, left.start, left.stop)
                if rows:
                    yield part, rows


class Topic(TopicView):
    """A whole topic, as it is at each call."""

    def __init__(self, root: Root, name: str) -> None:
        super().__init__(root, name, ())

    def ranges(self) -> list[OffsetRange]:
        """Return every partition with its offsets now."""
        return [self._range(number) for number in range(self._root.partitions(self.name))]

    def _range(self, number: int) -> OffsetRange:
        log = self._log(number)
        return OffsetRange(number, log.start_offset(), log.end_offset())

    @property
    def partitions(self) -> int:
        """How many partitions it has."""
        return self._root.partitions(self.name)

    def partition(self, number: int) -> TopicView:
        """Return one partition, as of now."""
        return TopicView(self._root, self.name, [self._range(number)])

    def head(self, count: int = _SHOWN) -> TopicView:
        """Return the first ``count`` records of each partition."""
        return self._ends(count, first=True)

    def tail(self, count: int = _SHOWN) -> TopicView:
        """Return the last ``count`` records of each partition."""
        return self._ends(count, first=False)

    def _ends(self, count: int, first: bool) -> TopicView:
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        parts = []
        for part in self.ranges():
            records = self._log(part.partition).record_counts
            if first:
                part = part._replace(stop=records.after(part.start, part.stop, count))
            else:
                part = part._replace(start=records.before(part.start, part.stop, count))
            parts.append(part)
        return TopicView(self._root, self.name, parts)

    @property
    def config(self) -> dict[str, object]:
        """Its settings, by Kafka's names."""
        return self._root.topic(self.name).config.to_dict()

    def describe_retention(self) -> list[str]:
        """Return in words what is deleted when, by which clock, and why something stays."""
        from embedlog.retention import describe

        return describe(self._root, self.name, self._root.clock())

    def explain_compaction(self) -> list[str]:
        """Return in words what compaction will do with each partition, or why it does nothing."""
        from embedlog.api.latest import explain

        return explain(self._root, self.name)

    def size_bytes(self) -> int:
        """Bytes of its segment files."""
        return sum(self._log(number).size_bytes() for number in range(self.partitions))

    def _title(self) -> str:
        count = self.partitions
        parts = f"{count} partition{'s' * (count != 1)}"
        records = len(self)
        size = f", {self.size_bytes() / 1e6:.1f} MB" if records else ""
        return f"Topic {self.name}: {parts}, {records:,} records{size}"


def _cells(record: Record) -> tuple[str, ...]:
    return (
        str(record.partition),
        str(record.offset),
        moment(record.timestamp),
        short(record.key),
        short(record.value),
    )
