"""`Topic` and `TopicView`: the records of a topic as rows, slices and tables."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypedDict, Unpack, overload

from embedlog.api.offset_range import OffsetRange, TopicFile, topic_files
from embedlog.batch import Batch
from embedlog.batch import schema as batch_schema
from embedlog.batch.arrays import empty
from embedlog.config import LONG_MAX, TopicConfig
from embedlog.consumer.arguments import check_column_names, to_topic_partition
from embedlog.consumer.deserialize import (
    NO_HEADERS,
    RAW,
    Deserializers,
    RecordRun,
    RowLists,
    topic_deserializers,
)
from embedlog.display import cut, html_table, moment, need, plural, public_names, short
from embedlog.errors import EmbedlogError, SerializationError, no_attribute
from embedlog.lazy import pa, pc
from embedlog.partition import PartitionLog
from embedlog.partition.reader import ColumnIndexes
from embedlog.progress import format_bytes
from embedlog.record import K, Record, TopicPartition, V
from embedlog.registry import binder
from embedlog.root.root import Root, check_root
from embedlog.serializers import adapt_for_topic, shortened
from embedlog.times import When, milliseconds

if TYPE_CHECKING:
    import pandas
    import polars
    from matplotlib.axes import Axes

    from embedlog.api.dataset import TopicDataset
    from embedlog.api.scan import Reads
    from embedlog.batch import tables
    from embedlog.compaction.rebatch import RebatchResult
    from embedlog.schemas.pushdown import PushedFilter
    from embedlog.schemas.row_filter import RowFilter, Where
    from embedlog.schemas.topic_schema import TopicSchema
    from embedlog.splits.slices import PartitionSlice, TopicVersions
    from embedlog.splits.split import Split

Between = tuple[When, When]
AsOf = When | Mapping[TopicPartition, int]
"""A time, or the offset in each partition, from which on records do not count."""
_READ_BYTES, _LEAST_READ_BYTES = 4 << 20, 64 << 10
_ROW_BYTES = 1 << 10
"""How many bytes to read for each row of a short range."""
_SHOWN, _SHOWN_RANGES, _KEY_WIDTH = 5, 4, 30
"""What a display shows: records from each end, ranges of offsets, and characters of a key."""
_FRAME_NAMES = frozenset("columns describe df dtypes groupby iloc info loc query shape".split())
"""What programs look for that take a view for a frame."""


class RowOptions(TypedDict, total=False):
    """Which records to read; see `TopicView.to_arrow`."""

    where: Where | None
    """Only rows for which this is true: an expression of pyarrow or Polars, or SQL."""
    latest: bool
    """Only the last record of each key, without tombstones."""
    since: When | None
    """Only records from this time on, such as ``"15m"`` (ago)."""
    between: Between | None
    """Only records between these two times."""


class FrameOptions(RowOptions, total=False):
    """Which records a frame has, and whether they are decoded."""

    raw: bool
    """Keys and values as bytes, whatever the serializers of the topic."""


class TopicView(Generic[K, V]):
    """Some records of a topic, read on demand; rows are ordered by partition and offset.

    ``len`` counts records, ``[100:200]`` and ``[-10:]`` select rows as in a list, and ``[7]``
    is one record.  Every read stops at the log end as of the call.  A view holds offsets, not
    records: compaction may remove some of them later.

    Keys and values are those of the topic's serializers, unless the view is ``raw``.
    """

    def __init__(
        self, root: Root | None, name: str, ranges: Sequence[OffsetRange], *, raw: bool = False
    ) -> None:
        self._root, self.name = check_root(root, "embedlog.open(path).topic(name)"), name
        self._ranges = list(ranges)
        self.raw = raw
        """Whether keys and values are bytes, whatever the serializers of the topic."""
        self._known: tuple[TopicConfig, Deserializers] | None = None
        """The settings by which the deserializers were last made, and these."""

    def _view(self, ranges: Sequence[OffsetRange]) -> TopicView[K, V]:
        return TopicView(self._root, self.name, ranges, raw=self.raw)

    def _serializers(self) -> tuple[str, str]:
        """Return the names of the serializers of keys and values."""
        config = self._root.topic(self.name).config
        return ("bytes", "bytes") if self.raw else (config.key_serializer, config.value_serializer)

    def _deserializers(self) -> Deserializers:
        if self.raw:
            return RAW
        root, config = self._root, self._root.topic(self.name).config
        if self._known is None or self._known[0] is not config:
            bind = binder(root)
            self._known = config, topic_deserializers(self.name, config, root.allow_pickle, bind)
        return self._known[1]

    def ranges(self) -> list[OffsetRange]:
        """Return the offsets that the view covers now."""
        return self._ranges

    def in_ranges(self, ranges: Iterable[tuple[int, int, int]]) -> TopicView[K, V]:
        """Return the records of some offsets of the topic, such as a program has noted.

        Args:
            ranges: A partition, the first offset, and the offset after the last one, each; `ranges`
                returns such tuples.
        """
        return self._view([OffsetRange(*part) for part in ranges])

    def __len__(self) -> int:
        return sum(map(self._count, self.ranges()))

    if not TYPE_CHECKING:
        # Type checkers must not take every name for an attribute.

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError; for a column it says how to get the column."""
            hint, column = "", name if name in Record._fields else name.removesuffix("s")
            if column in Record._fields:
                hint = (
                    f"call to_pandas()[{column!r}], or iterate over the records: "
                    f"[record.{column} for record in topic]"
                )
            elif name in _FRAME_NAMES:
                hint = "call to_pandas(), to_polars() or to_arrow() for a frame"
            raise no_attribute(self, name, hint)

    def __contains__(self, item: object) -> bool:
        """Refuse `in`, which would read all records.

        Raises:
            TypeError: Always; the text says what to call instead.
        """
        raise TypeError(
            f"`in` would read all records of {self.name}; call get(key), which returns None if "
            "there is no record of the key, or iterate"
        )

    def _count(self, part: OffsetRange) -> int:
        if part.start >= part.stop:
            return 0
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
            return self._view(self._cut(start, stop))
        if not hasattr(rows, "__index__"):
            raise TypeError(
                f"A row must be an int or a slice, got {type(rows).__name__}; use get(key) for the "
                "latest value of a key, and partition(number) for a partition"
            )
        count = len(self)
        index = rows + count if rows < 0 else rows
        if not 0 <= index < count:
            raise IndexError(f"Row {rows} is out of range: the view has {count} rows")
        for record in self._view(self._cut(index, index + 1)):
            return record
        raise IndexError(f"Row {rows} of {count} was deleted or compacted meanwhile")

    # Rows by time, and at random

    def since(self, start: When) -> TopicView[K, V]:
        """Return the records from a time on; see `between`.

        ``topic.since("15m")`` are those of the last 15 minutes.
        """
        return self._limited(start, None)

    def between(self, start: When, end: When) -> TopicView[K, V]:
        """Return the records from ``start`` up to ``end``, which is excluded.

        In each partition these are the records from the first one at or after ``start`` up to
        the first one at or after ``end``, as Kafka looks up offsets by time.

        Args:
            start: A `datetime`, `date` or ISO 8601 text (UTC without a zone), milliseconds since
                1970, or how long ago: a `timedelta` or a text such as ``"90m"`` or ``"2d"``.
            end: Likewise.
        """
        return self._limited(None, (start, end))

    def _limited(self, since: When | None, between: Between | None) -> TopicView[K, V]:
        """Return the records from a time on, or between two; without either, this view.

        Raises:
            ValueError, TypeError: Both arguments are passed, or one is no time.
        """
        if since is None and between is None:
            return self
        if since is not None and between is not None:
            raise ValueError("Pass since or between, not both")
        if between is not None and (not isinstance(between, tuple | list) or len(between) != 2):
            raise TypeError(f"between must be a pair of times, got {between!r}")
        start, end = between if between is not None else (since, None)
        now_ms = self._root.clock()
        start_ms, end_ms = (
            None if when is None else milliseconds(when, now_ms) for when in (start, end)
        )
        if start_ms is not None and end_ms is not None and start_ms > end_ms:
            raise ValueError(
                f"between must begin before it ends, got {start!r} and {end!r}; a time such as "
                "'2h' is so long ago, so '2h' is before '1h'"
            )
        return self._view([self._range_between(part, start_ms, end_ms) for part in self.ranges()])

    def _range_between(
        self, part: OffsetRange, start_ms: int | None, end_ms: int | None
    ) -> OffsetRange:
        log = self._log(part.partition)

        def offset(time_ms: int) -> int:
            record = log.offset_for_timestamp(time_ms)
            return part.stop if record is None else min(max(record.offset, part.start), part.stop)

        start = part.start if start_ms is None else offset(start_ms)
        stop = part.stop if end_ms is None else offset(end_ms)
        return OffsetRange(part.partition, start, max(start, stop))

    def at(self, time: When) -> Record[K, V] | None:
        """Return the first record at or after a time, of all partitions; None if there is none.

        Of the first such record of each partition it is the one with the lowest timestamp.

        Args:
            time: As in `between`.
        """
        starts = [part for part in self.since(time).ranges() if part.start < part.stop]
        views = (self._view([part])[:1] for part in starts)
        return min(chain(*views), key=attrgetter("timestamp"), default=None)

    def sample(self, count: int = _SHOWN, *, seed: int | None = None) -> TopicView[K, V]:
        """Return records that are chosen at random, each with the same chance, in their order.

        Args:
            count: How many; fewer if the view has fewer.
            seed: The same seed chooses the same rows of the same records.
        """
        from random import Random

        _check_count(count)
        parts = [(part, self._count(part)) for part in self.ranges()]
        rows = sum(count for _, count in parts)
        chosen = sorted(Random(seed).sample(range(rows), min(count, rows)))
        ranges, before = [], 0
        for part, part_rows in parts:
            offset_after = self._log(part.partition).record_counts.after
            end = before + part_rows
            for row in chosen[bisect_left(chosen, before) : bisect_left(chosen, end)]:
                start = offset_after(part.start, part.stop, row - before)
                stop = offset_after(part.start, part.stop, row - before + 1)
                ranges.append(OffsetRange(part.partition, start, stop))
            before = end
        return self._view(ranges)

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
        """Yield every record as a `Record`.

        Raises:
            RecordDeserializationError: A record is not what the topic's serializers write.
        """
        deserializers = self._deserializers()
        for part, batches in self._reads():
            partition = TopicPartition(self.name, part.partition)
            for batch, first, last in batches:
                rows = RowLists(batch, batch.base_offset, True, deserializers.typed)
                if first or last < batch.count:
                    rows.keep(slice(first, last))
                failure = None if deserializers is RAW else deserializers.apply(rows, partition)
                yield from RecordRun.make_records(rows, iter(rows.values), partition, batch)
                if failure is not None:
                    raise failure

    # Tables

    def batches(
        self,
        columns: Sequence[str] | None = None,
        *,
        where: Where | None = None,
        since: When | None = None,
        between: Between | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield Arrow batches without copies, with all or some columns of `schema`, as stored.

        Needs the memory of a few batches, whatever the size of the topic.  ``where``, ``since``
        and ``between`` are those of `to_arrow`.
        """
        check_column_names(columns)
        condition = self._condition(where)
        view = self._limited(since, between)._pruned(condition)
        schema = self.schema(columns)
        for table in view._tables(self._with_columns_of(schema, condition), condition):
            yield from table.select(schema.names).to_batches()

    def _condition(self, where: Where | None) -> RowFilter | None:
        """Return a condition on rows with the columns that `schema` can have."""
        if where is None:
            return None
        from embedlog.schemas.row_filter import row_filter

        return row_filter(where, self._all_columns(), self.name)

    def _all_columns(self) -> pa.Schema:
        return self.schema()

    def _pruned(self, condition: RowFilter | None) -> TopicView[K, V]:
        """Return a view without records for which a condition cannot be true, if it is cheap."""
        return self

    def _with_columns_of(self, schema: pa.Schema, condition: RowFilter | None) -> pa.Schema:
        """Return columns, and those that a condition refers to."""
        if condition is None:
            return schema
        return self.schema(list(dict.fromkeys([*schema.names, *condition.columns])))

    def _tables(self, schema: pa.Schema, condition: RowFilter | None = None) -> Iterator[pa.Table]:
        """Yield stored columns of the rows for which a condition is true."""
        from embedlog.batch import tables

        for part, batches in self._reads():
            for group in tables.in_groups(batches):
                table = tables.table(group, part.partition, schema)
                yield table if condition is None else condition.keep(table)

    def schema(self, columns: Sequence[str] | None = None) -> pa.Schema:
        """Return the stored columns: offset, partition, timestamp, key, value, headers if any."""
        stored = batch_schema(headers=self._has_headers())
        fields = [pa.field("offset", pa.int64()), pa.field("partition", pa.int32()), *stored]
        by_name = {field.name: field for field in fields}
        names = list(by_name if columns is None else columns)
        for name in names:
            if name not in by_name:
                raise KeyError(f"There is no column {name!r}, only {', '.join(by_name)}")
        return pa.schema([by_name[name].with_nullable(True) for name in names])

    def to_arrow(
        self,
        columns: Sequence[str] | None = None,
        *,
        where: Where | None = None,
        latest: bool = False,
        since: When | None = None,
        between: Between | None = None,
        raw: bool = False,
    ) -> pa.Table:
        """Return a table.

        If the topic has no serializers, or with ``raw``, it refers to the mapped segments: only
        compressed data is copied.  Otherwise keys and values are decoded, and values that are
        JSON objects become a column for each of their fields, in place of ``value``: a field of
        the name of another column, such as ``offset``, is named ``value.offset``, and a field
        whose values have no common type is JSON text.  If some values are not objects, their
        JSON text is in the column ``value``.

        Args:
            columns: Names of columns; by default all.
            where: Only rows for which this is true: an expression of pyarrow, such as
                ``pyarrow.compute.field("offset") > 5``, one of Polars, or SQL such as
                ``"offset > 5"``.
            latest: Return only the last record of each key, without tombstones; the result
                is the same whether or not compaction has run.
            since: Only records from this time on, such as ``"15m"`` (ago); see the method
                `between`.
            between: Only records between these two times.
            raw: Return keys and values as bytes, whatever the serializers of the topic.

        Raises:
            KeyError: There is no such column.
            RecordDeserializationError: A record is not what the topic's serializers write.
        """
        check_column_names(columns)
        view = self._limited(since, between)
        if where is not None:
            from embedlog.schemas.row_filter import row_filter

            table = self.to_arrow(latest=latest, since=since, between=between, raw=raw)
            table = row_filter(where, table.schema, self.name).keep(table)
            return table if columns is None else table.select(columns)
        serializers = ("bytes", "bytes") if raw else self._serializers()
        if serializers == ("bytes", "bytes"):
            return view._stored(columns, latest)
        from embedlog.api.frames import decoded, stored_columns

        names = stored_columns(columns)
        if names is not None and "headers" in names and not self._has_headers():
            names.remove("headers")
        table = view._stored(names, latest)
        return decoded(table, self.name, serializers, binder(self._root), columns)

    def _stored(self, columns: Sequence[str] | None, latest: bool) -> pa.Table:
        schema = self.schema(columns)
        parts = self._latest(schema) if latest else self._tables(schema)
        return pa.concat_tables([empty(schema), *parts])

    def _latest(self, schema: pa.Schema) -> Iterator[pa.Table]:
        from embedlog.api.latest import latest

        return latest(self._root, self.name, self.ranges, schema)

    def to_pandas(
        self, columns: Sequence[str] | None = None, **options: Unpack[FrameOptions]
    ) -> pandas.DataFrame:
        """Return a pandas DataFrame; see `to_arrow`."""
        need("pandas")
        return self.to_arrow(columns, **options).to_pandas()

    def to_polars(
        self, columns: Sequence[str] | None = None, **options: Unpack[FrameOptions]
    ) -> polars.DataFrame:
        """Return a Polars DataFrame; see `to_arrow`.

        Raises:
            InvalidSchemaError: Polars does not have the type of a column.
        """
        from embedlog.schemas.row_filter import check_decimals

        table = self.to_arrow(columns, **options)
        check_decimals(table.schema, self.name)
        frame: polars.DataFrame = need("polars").from_arrow(table)
        return frame

    def scan(self) -> polars.LazyFrame:
        """Return a lazy frame of Polars, which reads only what a query needs of the records.

        The columns that the query uses, its filters and its limit reach the log.  Each time the
        frame is collected, it has the records of that moment; its columns are those of now.

        A topic of bytes has the columns offset, partition, timestamp, key, value, and headers if
        there are any; keys and values are decoded by the topic's serializers, and those of JSON
        and Avro are JSON text.

        Raises:
            EmbedlogError: Polars is not installed.
            InvalidSchemaError: Polars does not have the type of a column.
        """
        from embedlog.api.scan import scan

        return scan(self)

    def _scannable(self) -> tuple[pa.Schema, Reads]:
        """Return the columns of a scan, and what reads them.

        Whatever becomes of the topic's columns, those of the scan stay as they are.
        """
        from embedlog.api.frames import decoded_items
        from embedlog.schemas.reading import names_in

        stored, serializers, bind = self.schema(), self._serializers(), binder(self._root)
        schema = decoded_items(stored.empty_table(), self.name, serializers, bind).schema
        # What a serializer changes is filtered by the caller.
        plain = {field.name for field in schema if stored.field(field.name).type == field.type}

        def read(columns: list[str], pushed: PushedFilter | None) -> Iterator[pa.RecordBatch]:
            # Offset and partition say where a record is that cannot be decoded.
            names = list(dict.fromkeys(("offset", "partition", *columns)))
            where = None if pushed is None else pushed.rows
            if where is not None and not plain.issuperset(names_in(where, schema.names)):
                where = None
            for batch in self.batches(names, where=where):
                table = pa.Table.from_batches([batch])
                decoded = decoded_items(table, self.name, serializers, bind).select(columns)
                yield from decoded.to_batches()

        return schema, read

    def dataset(self) -> TopicDataset:
        """Return a `pyarrow.dataset.Dataset`, which DuckDB and others query; nothing is read yet.

        The columns, and the filters, that a query needs reach the log, as those of `scan` do.
        DuckDB queries it by the name of its variable.
        """
        from embedlog.api.dataset import TopicDataset

        return TopicDataset(self)

    def splits(
        self,
        n: int,
        columns: Sequence[str] | None = None,
        *,
        where: Where | None = None,
        since: When | None = None,
        between: Between | None = None,
    ) -> list[Split]:
        """Return about ``n`` parts of the records, for other processes to read; see `Split`.

        Each part pickles, is of one partition, and has about the same number of bytes.  There are
        fewer if there are few records, and at least one for each partition that has any.  The
        columns are those of `scan`.

        Args:
            n: How many parts there should be.
            columns: Names of columns; by default all.
            where: Only rows for which this is true, as in `to_arrow`.
            since: Only records from this time on; see the method `between`.
            between: Only records between these two times.

        Raises:
            KeyError: There is no such column.
            InvalidQueryError: The condition is wrong.
            OffsetOutOfRangeError: Records of a view were deleted.
            UnsupportedFormatError: Keys or values are Avro, which needs the log's registry.
        """
        check_column_names(columns)
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        from embedlog.api.split_plan import plan_splits

        return plan_splits(self._limited(since, between), n, columns, where)

    def _slices(self, n: int) -> tuple[list[PartitionSlice], TopicVersions | None, str]:
        """Return about ``n`` parts of the records for `splits`."""
        from embedlog.api.split_plan import slices_of

        return slices_of(self, n)

    def _typed_schema(self) -> TopicSchema | None:
        """Return the schema through which a typed topic is seen."""
        return None

    def plot(
        self,
        window: timedelta | str | None = None,
        *,
        since: When | None = None,
        between: Between | None = None,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw how many records there are per window of time; needs matplotlib.

        Args:
            window: The length of a window, such as ``"1m"``; by default chosen to fit.
            since: Only records from this time on; see `between`.
            between: Only records between these two times.
            ax: Draw here, instead of in a new figure.

        Returns:
            The axes, to change or save the picture.
        """
        from embedlog.api.plot import plot_rate

        view = self._limited(since, between)
        schema = view.schema(["timestamp"])
        times = pa.Table.from_batches(view.batches(schema.names), schema)["timestamp"]
        return plot_rate(view._title(), times, window, ax)

    # The latest value of each key

    def get(self, key: K, default: V | None = None, *, as_of: AsOf | None = None) -> V | None:
        """Return the latest value of a key, whether or not compaction has run.

        The key and the value are of the types of the topic's serializers, or bytes.

        Returns ``default`` if there is none, or if it was deleted.  Looks in the partition that
        the key hashes to, and in the others only if it is not there; with ``key.index.enable`` by
        the index of keys, otherwise it reads the keys from the newest segment backwards.

        Args:
            key: The key.
            default: What to return without a value.
            as_of: As if nothing had been written from this time on; see `between`.  Or from an
                offset on, in each partition that a dict has, such as one of committed offsets.
                What compaction has removed is missing.
        """
        return self.get_many([key], default, as_of=as_of)[0]

    def get_many(
        self, keys: Iterable[K], default: V | None = None, *, as_of: AsOf | None = None
    ) -> list[V | None]:
        """Return the latest values of keys, in their order; the arguments are those of `get`."""
        from embedlog.api.latest import get_many

        view = self.before(as_of)
        stored_keys = [self._key_bytes(key) for key in keys]
        deserializers = self._deserializers()._replace(key=None)
        found = get_many(self._root, self.name, view.ranges, stored_keys, deserializers.typed)
        result = [default] * len(stored_keys)
        for index, record in enumerate(found):
            if record is not None and (stored := record.value) is not None:
                _, values, failure = deserializers.convert(self.name, None, [None], [stored])
                if failure is not None:
                    partition = TopicPartition(self.name, record.partition)
                    raise failure.error(stored_keys[index], stored, partition, record.offset)
                result[index] = values[0]
        return result

    def records_of(self, key: K, *, as_of: AsOf | None = None) -> list[Record[K, V]]:
        """Return all records of a key, the oldest first, also those that deleted it.

        With ``key.index.enable`` in a time that grows with their number alone; otherwise it reads
        the keys of all records.  Those in several partitions are in the order of their timestamps.

        Args:
            key: The key, as for `get`.
            as_of: As for `get`.
        """
        from embedlog.api.latest import records_of

        key_bytes, deserializers = self._key_bytes(key), self._deserializers()
        ranges, typed = self.before(as_of).ranges, deserializers.typed
        result = list[Record[K, V]]()
        for record in records_of(self._root, self.name, ranges, key_bytes, typed):
            batch, value = record.decoded.batch, record.value
            headers = record.headers or NO_HEADERS
            keys, values, failure = deserializers.convert(
                self.name, [headers], [record.key], [value]
            )
            if failure is not None:
                partition = TopicPartition(self.name, record.partition)
                raise failure.error(key_bytes, value, partition, record.offset)
            result.append(
                Record(
                    *(self.name, record.partition, record.offset, record.timestamp),
                    *(int(batch.is_log_append_time), keys[0], values[0], headers),
                    batch.leader_epoch,
                )
            )
        return result

    def before(self, as_of: AsOf | None) -> TopicView[K, V]:
        """Return the records up to a time or to offsets, which are excluded; all without them.

        Args:
            as_of: As for `get`.
        """
        if as_of is None:
            return self
        if isinstance(as_of, Mapping):
            ends = {to_topic_partition(each): end for each, end in as_of.items()}
            parts = []
            for part in self.ranges():
                end = ends.get(TopicPartition(self.name, part.partition), part.stop)
                parts.append(part._replace(stop=min(part.stop, end)))
            return self._view(parts)
        end_ms = milliseconds(as_of, self._root.clock())
        return self._view([self._range_between(part, None, end_ms) for part in self.ranges()])

    def _key_bytes(self, key: Any) -> bytes:
        serializer, _ = self._serializers()
        if serializer == "bytes":
            if not isinstance(key, bytes | bytearray | memoryview):
                hint = "; call key.encode()" if isinstance(key, str) else ""
                raise TypeError(f"key must be bytes, got {type(key).__name__}{hint}")
            return bytes(key)
        try:
            bind = binder(self._root)
            adapter = adapt_for_topic(self.name, None, serializer, "serialize", "key", True, bind)
            assert adapter is not None  # since it is not "bytes"
            data: bytes = adapter.convert(self.name, [], key)
        except Exception as error:
            raise SerializationError(
                f"The key {shortened(key)} cannot be serialized: {type(error).__name__}: {error}",
                todo=f"The keys of the topic are of the type {serializer!r}.",
                topic=self.name,
            ) from error
        return data

    def keys(self, *, prefix: str | bytes = b"", as_of: AsOf | None = None) -> Iterator[K]:
        """Yield each key that has a value; the arguments are those of `items`."""
        for key, _ in self._items(prefix, as_of, values=False):
            yield key

    def items(
        self, *, prefix: str | bytes = b"", as_of: AsOf | None = None
    ) -> Iterator[tuple[K, V]]:
        """Yield each key with its latest value, without keys that were deleted.

        Reads all keys, and the values of those that it yields.

        Args:
            prefix: Only keys whose stored bytes begin with this; text is UTF-8.
            as_of: As for `get`.
        """
        yield from self._items(prefix, as_of)

    def _items(
        self, prefix: str | bytes, as_of: AsOf | None, *, values: bool = True
    ) -> Iterator[tuple[Any, Any]]:
        """Yield what `items` does, or each key with None."""
        deserializers, columns = self._deserializers(), ["key", "partition", "offset"]
        if values:
            columns.append("value")
        else:
            deserializers = deserializers._replace(value=None)
        for table in self.before(as_of)._latest(self.schema(columns)):
            for batch in with_prefix(table, "key", prefix).to_batches():
                keys, numbers, offsets, *rest = (column.to_pylist() for column in batch.columns)
                stored = rest[0] if values else [None] * len(keys)
                items = deserializers.convert(self.name, None, keys, stored)
                yield from zip(*items[:2], strict=True)
                if (failure := items[2]) is not None:
                    row = failure.row
                    partition = TopicPartition(self.name, numbers[row])
                    raise failure.error(keys[row], stored[row], partition, offsets[row])

    def files(self) -> list[TopicFile]:
        """Return the segment files that hold the records now, by partition and offset.

        For programs that read the files without embedlog; each record is in one of them.  In the
        directory there are others besides: files that compaction has replaced stay for
        ``file.delete.delay.ms``, so a program that lists the directory reads records twice.  For as
        long, the files of this list can be opened after they were replaced; a lease
        (`Housekeeping.hold`) keeps them longer.
        """
        return list(topic_files(self._root, self.name, self.ranges()))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow PyCapsule stream, by which DuckDB, Polars, pandas and others read the view."""
        if self._serializers() != ("bytes", "bytes"):
            # The columns follow from all values.
            return self.to_arrow().__arrow_c_stream__(requested_schema)
        reader = pa.RecordBatchReader.from_batches(self.schema(), self.batches())
        return reader.__arrow_c_stream__(requested_schema)

    # Display

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self, "name", "raw")

    def __repr__(self) -> str:
        try:
            return f"<{self._title()}>"
        except EmbedlogError as error:
            # Debuggers and loggers show views of deleted topics and closed logs, too.
            return f"<{type(self).__name__} {self.name}: {error.what}>"

    def _title(self) -> str:
        ranges = [part for part in self.ranges() if part.start < part.stop]
        texts = [f"{part.partition}[{part.start}:{part.stop}]" for part in ranges[:_SHOWN_RANGES]]
        if len(ranges) > _SHOWN_RANGES:
            texts.append(f"and {len(ranges) - _SHOWN_RANGES:,} more")
        records = plural(len(self), "record")
        return f"View of {self.name}: {records}, {', '.join(texts) or 'nothing'}"

    def _repr_html_(self) -> str:
        """For notebooks: the title and the records; of many only the first and the last ones."""
        try:
            heads = self._heads()
            if len(self) <= 2 * _SHOWN:
                return html_table(self._title(), heads, self._cells())
            first, last = self[:_SHOWN]._cells(), self[-_SHOWN:]._cells()
            return html_table(self._title(), heads, (*first, ("…",) * len(heads), *last))
        except EmbedlogError:
            return html_table(repr(self)[1:-1], (), ())

    def _heads(self) -> tuple[str, ...]:
        """Return the heads of the columns of a display."""
        return ("partition", "offset", "timestamp", "key", "value")

    def _cells(self) -> Iterator[tuple[object, ...]]:
        """Yield the cells of each record; what cannot be decoded is shown as stored."""
        from embedlog.consumer.deserialize import convert

        deserializers = RAW
        # Pickle that is not allowed, or Avro without its libraries.
        with suppress(EmbedlogError):
            deserializers = self._deserializers()
        for record in TopicView(self._root, self.name, self.ranges(), raw=True):
            texts = []
            for deserializer, data in zip(
                deserializers[:2], (record.key, record.value), strict=True
            ):
                item, _ = convert(deserializer, self.name, None, [data])
                texts.append(short(*item or [data]))
            texts[0] = cut(texts[0], _KEY_WIDTH)
            yield record.partition, record.offset, moment(record.timestamp), *texts

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

    def _reads(
        self, columns: ColumnIndexes | None = None
    ) -> Iterator[tuple[OffsetRange, list[tables.BatchRows]]]:
        """Yield the batches of each read, with the rows of them that the view covers.

        Args:
            columns: Returns which columns of a schema are needed; None for all.
        """
        from embedlog.batch import tables

        read = OffsetRange(-1, 0, 0)
        batches: list[Batch] = []
        for part in self.ranges():
            start, reader = part.start, None
            while start < part.stop:
                # The rows of a sample are many short ranges: some are in the batches of the last.
                if read.partition != part.partition or not read.start <= start < read.stop:
                    if reader is None:
                        reader = self._log(part.partition).reader(start)
                    size = max((part.stop - start) * _ROW_BYTES, _LEAST_READ_BYTES)
                    batches = reader.read(min(size, _READ_BYTES), columns=columns)
                    if not batches:
                        break
                    read = OffsetRange(part.partition, start, reader.offset)
                # A batch may begin below this offset if compaction has merged it meanwhile.
                rows = tables.rows_in_range(batches, start, part.stop)
                start = read.stop
                if rows:
                    yield part, rows


def with_prefix(table: pa.Table, name: str, prefix: object) -> pa.Table:
    """Return the rows in which a column of text or bytes begins with a prefix.

    Raises:
        TypeError: The column has another type, or the prefix is neither str nor bytes.
    """
    if not isinstance(prefix, str | bytes):
        raise TypeError(f"prefix must be str or bytes, got {type(prefix).__name__}")
    if not prefix:
        return table
    column = table[name]
    if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
        raise TypeError(f"prefix is for keys of text or bytes, and {name} is {column.type}")
    start = prefix.encode() if isinstance(prefix, str) else prefix
    return table.filter(pc.starts_with(column.cast(pa.binary()), pattern=start))


def _check_count(count: int) -> None:
    # An int of numpy's, too.
    if not hasattr(count, "__index__"):
        raise TypeError(f"count must be an int, got {count!r}")
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")


class Topic(TopicView[K, V]):
    """All records of a topic, as of each call."""

    def __init__(self, root: Root | None = None, name: str = "", *, raw: bool = False) -> None:
        super().__init__(root, name, (), raw=raw)

    def ranges(self) -> list[OffsetRange]:
        """Return the offsets of every partition now."""
        ends = self._root.ends(self.name)
        return [OffsetRange(number, *part) for number, part in enumerate(ends)]

    @property
    def partitions(self) -> int:
        """The number of partitions."""
        return self._root.partitions(self.name)

    def partition(self, number: int) -> TopicView[K, V]:
        """Return a view of one partition, as of now."""
        log = self._log(number)
        return self._view([OffsetRange(number, log.start_offset(), log.end_offset())])

    def head(self, count: int = _SHOWN) -> TopicView[K, V]:
        """Return the first ``count`` records of each partition."""
        return self._count_ends(count, first=True)

    def tail(self, count: int = _SHOWN) -> TopicView[K, V]:
        """Return the last ``count`` records of each partition."""
        return self._count_ends(count, first=False)

    @contextmanager
    def new(self, group: str) -> Iterator[TopicView[K, V]]:
        """Give a block the records that a group has not read, and commit them if it ends well.

        The block becomes a member of the group, as a consumer does: it gets the partitions that
        the group assigns to it, from where the group committed, or from their beginning, up to
        the ends of now.  If the block raises, or its process dies, nothing is committed, and the
        next block gets the same records again.

        Args:
            group: The consumer group; it begins with its first commit.

        Raises:
            CommitFailedError: At the end of the block: the group gave a partition to another
                member, since the block took longer than ``max_poll_interval_ms`` of a consumer.
            InvalidConfigError, InvalidGroupIdError: The group id is not valid.
        """
        from embedlog.consumer.consumer import Consumer

        with Consumer(
            self._root,
            self.name,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer:
            # Joins the group; what it returns is read again, as columns.
            consumer.poll_batches(max_records=1, columns=["offset"])
            ends, ranges = self.ranges(), []
            for partition in sorted(consumer.assignment()):
                _, start, stop = ends[partition.partition]
                committed = consumer.committed(partition)
                if committed is not None:
                    start = min(max(start, committed), stop)
                ranges.append(OffsetRange(partition.partition, start, stop))
            yield self._view(ranges)
            offsets = {
                TopicPartition(self.name, part.partition): part.stop
                for part in ranges
                if part.start < part.stop
            }
            if offsets:
                consumer.commit(offsets)

    def _count_ends(self, count: int, first: bool) -> TopicView[K, V]:
        _check_count(count)
        ranges = []
        for part in self.ranges():
            records = self._log(part.partition).record_counts
            if first:
                part = part._replace(stop=records.after(part.start, part.stop, count))
            else:
                part = part._replace(start=records.before(part.start, part.stop, count))
            ranges.append(part)
        return self._view(ranges)

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

    def optimize(self) -> list[RebatchResult]:
        """Gather small batches into large ones now, those of the active segments too.

        Records, offsets and timestamps stay the same; reads of columns get faster, and the
        topic smaller.  Housekeeping does it by itself for sealed segments whose batches have
        fewer than ``rebatch.min.rows`` records.

        Returns:
            What was done in each partition in which something was.

        Raises:
            FencedError: Another process is rewriting a partition, or a lease holds it; what was
                done before stays.
        """
        from embedlog.compaction.rebatch import add_statistics, rebatch

        results = []
        for number in range(self.partitions):
            log = self._log(number)
            log.roll()
            result = rebatch(log, LONG_MAX)
            add_statistics(log)
            if result.segments:
                results.append(result)
        return results

    def size_bytes(self) -> int:
        """Return the size of the segment files in bytes, of partitions that had records."""
        parts = [part.partition for part in self.ranges() if part.stop]
        return sum(self._log(number).size_bytes() for number in parts)

    def _title(self) -> str:
        records = len(self)
        size = f", {format_bytes(self.size_bytes())}" if records else ""
        partitions = plural(self.partitions, "partition")
        return f"Topic {self.name}: {partitions}, {plural(records, 'record')}{size}"
