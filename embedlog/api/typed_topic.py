"""`TypedTopic` and `TypedTopicView`: the records of a topic whose values are columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embedlog.api.latest import latest
from embedlog.api.offset_range import OffsetRange
from embedlog.api.topic import Between, Topic, TopicView
from embedlog.batch import Batch
from embedlog.batch.arrays import empty
from embedlog.batch.tables import BatchRows
from embedlog.consumer.deserialize import Deserializers
from embedlog.display import cut, moment, short
from embedlog.errors import InvalidConfigError
from embedlog.lazy import pa, pc
from embedlog.partition.skipping import ranges_to_read
from embedlog.schemas.pruning import Pruner
from embedlog.schemas.reading import OFFSET, PARTITION, TIMESTAMP, TypedReader
from embedlog.schemas.rows import RowEncoder, python_rows
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.times import When

if TYPE_CHECKING:
    import pyarrow.compute

_CELL_WIDTH = 30
_SHOWN_COLUMNS = 12


class TypedTopicView(TopicView[Any, Any]):
    """Some records of a typed topic; a value is a dict of the topic's columns.

    Every record is seen through the current version of the schema, whatever version it was
    written with.
    """

    def _view(self, ranges: Sequence[OffsetRange]) -> TypedTopicView:
        return TypedTopicView(self._root, self.name, ranges)

    def _schema(self) -> TopicSchema:
        schema = self._root.context.catalog.schema(self._root.topic(self.name))
        if schema is None:
            raise InvalidConfigError(
                "The topic was deleted and created again, and its values are bytes now",
                topic=self.name,
                todo="Call log.topic(name) again.",
            )
        return schema

    def _typed_reader(self) -> TypedReader:
        return TypedReader(self._schema())

    def _deserializers(self) -> Deserializers:
        return Deserializers(None, None, self._typed_reader())

    def schema(self, columns: Sequence[str] | None = None) -> pa.Schema:
        """Return the columns of `to_arrow`: offset, partition, timestamp, and the topic's own."""
        return self._typed_reader().select(columns, headers=self._has_headers())

    iter_batches = TopicView.batches

    def _pruned(self, where: pyarrow.compute.Expression | None) -> TypedTopicView:
        if where is None:
            return self
        pruner = Pruner(where, self._schema())
        ranges = []
        for part in self.ranges():
            log = self._log(part.partition)
            log.refresh()
            for start, stop in ranges_to_read(log, part.start, part.stop, pruner):
                ranges.append(OffsetRange(part.partition, start, stop))
        return self._view(ranges)

    def _tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        reader = self._typed_reader()
        for part, batches in self._reads():
            # Compressed batches may be a hundred times larger when decoded: one at a time.
            compressed = any(batch.is_compressed for batch, _, _ in batches)
            for chunk in ([batch] for batch in batches) if compressed else (batches,):
                if rows := _without_tombstones(chunk):
                    yield reader.table(rows, part.partition, schema)

    def to_arrow(
        self,
        columns: Sequence[str] | None = None,
        *,
        where: pyarrow.compute.Expression | None = None,
        latest: bool = False,
        since: When | None = None,
        between: Between | None = None,
        raw: bool = False,
    ) -> pa.Table:
        """Return a table of the records; tombstones are left out.

        Args:
            columns: Names of columns; by default offset, partition, timestamp, and the topic's
                own.  Only the bytes of these columns are read and checked.
            where: Only rows for which this expression is true, such as
                ``pyarrow.compute.field("dep_delay") > 60``.
            latest: Only the last record of each key.
            since, between: As in `TopicView.to_arrow`.
            raw: Not for a typed topic.

        Raises:
            KeyError: There is no such column.
            InvalidConfigError: With ``raw``.
        """
        if isinstance(columns, str):
            raise TypeError(f"columns must be a list of names, got {columns!r}")
        if raw:
            raise no_bytes(self.name)
        view = self._limited(since, between)
        if not latest:
            view = view._pruned(where)
        schema = self.schema(columns)
        read = self._with_columns_of(schema, where)
        tables = view._latest(read) if latest else view._tables(read)
        if where is not None:
            tables = (table.filter(where) for table in tables)
        return pa.concat_tables([empty(read), *tables]).select(schema.names)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow PyCapsule stream, by which DuckDB, Polars, pandas and others read the view."""
        reader = pa.RecordBatchReader.from_batches(self.schema(), self.batches())
        return reader.__arrow_c_stream__(requested_schema)

    # The latest value of each key

    def _latest(self, schema: pa.Schema) -> Iterator[pa.Table]:
        read = self._typed_reader().keyed_columns
        return latest(self._root, self.name, self.ranges, schema, read)

    def _value_at(self, batch: Batch, row: int) -> dict[str, Any] | None:
        return self._typed_reader().value_at(batch, row)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield each key with its latest value, without keys that were deleted."""
        schema = self._schema()
        names, key = schema.columns.names, schema.key
        for table in self._latest(self.schema(names)):
            for batch in table.to_batches():
                for value in python_rows(batch, names):
                    yield value[key[0]] if len(key) == 1 else tuple(map(value.get, key)), value

    def _key_bytes(self, key: Any) -> bytes:
        encoder = RowEncoder(self.name, self._schema())
        (data,) = encoder.key_bytes([encoder.key_of(key)]).to_pylist()
        return bytes(data)

    def _cells(self) -> Iterator[tuple[object, ...]]:
        names = self._shown_columns()
        for record in self:
            value: Mapping[str, Any] | None = record.value
            cells = [cut(short(value.get(name)), _CELL_WIDTH) for name in names] if value else []
            yield record.partition, record.offset, moment(record.timestamp), *cells

    def _heads(self) -> tuple[str, ...]:
        return (PARTITION, OFFSET, TIMESTAMP, *self._shown_columns())

    def _shown_columns(self) -> list[str]:
        names: list[str] = self._schema().columns.names
        return names[:_SHOWN_COLUMNS]


def _without_tombstones(chunk: Sequence[BatchRows]) -> list[BatchRows]:
    """Return the rows of batches that are not tombstones, in runs."""
    rows: list[BatchRows] = []
    for batch, first, last in chunk:
        if not batch.may_have_tombstones:
            rows.append((batch, first, last))
            continue
        deleted = batch.columns(("_tombstone",)).column(0).slice(first, last - first)
        start = first
        for row in [first + row for row in pc.indices_nonzero(deleted).to_pylist()] + [last]:
            if start < row:
                rows.append((batch, start, row))
            start = row + 1
    return rows


def no_bytes(topic: str) -> InvalidConfigError:
    """Return the error of a program that asks for the bytes of a typed topic."""
    return InvalidConfigError(
        "The values of a typed topic are columns, and not bytes", topic=topic, todo="Leave out raw."
    )


class TypedTopic(TypedTopicView, Topic[Any, Any]):
    """All records of a typed topic, as of each call."""

    def schema_history(self) -> list[TopicSchema]:
        """Return all versions of the schema, in order; the last one is the current one."""
        return self._root.context.catalog.schema_versions(self._root.topic(self.name))


__all__ = ["TypedTopic", "TypedTopicView"]
