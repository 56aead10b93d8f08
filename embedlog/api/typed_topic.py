"""`TypedTopic` and `TypedTopicView`: the records of a topic whose values are columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from embedlog.api.latest import latest
from embedlog.api.offset_range import OffsetRange
from embedlog.api.topic import AsOf, Between, Topic, TopicView, with_prefix
from embedlog.batch.arrays import empty
from embedlog.batch.tables import in_groups
from embedlog.consumer.arguments import check_column_names
from embedlog.consumer.deserialize import Deserializers
from embedlog.display import cut, html_table, moment, short
from embedlog.errors import (
    EmbedlogError,
    InvalidConfigError,
    InvalidRecordError,
    InvalidSchemaError,
)
from embedlog.hints import Hint
from embedlog.lazy import pa
from embedlog.partition.segment_statistics import ranges_to_read
from embedlog.schemas.pruning import Pruner
from embedlog.schemas.reading import OFFSET, PARTITION, TIMESTAMP, TypedReader
from embedlog.schemas.rows import RowEncoder, python_rows
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.schemas.values import python_values
from embedlog.times import When

if TYPE_CHECKING:
    import pyarrow.compute

    from embedlog.api.scan import Reads
    from embedlog.schemas.pushdown import PushedFilter
    from embedlog.schemas.row_filter import RowFilter, Where

_encoder, _reader = lru_cache(maxsize=64)(RowEncoder), lru_cache(maxsize=64)(TypedReader)
_CELL_WIDTH = 30
_SHOWN_COLUMNS = 12
_LAST = 10
"""What a display shows: characters of a value, columns, and records of a topic."""


class TypedTopicView(TopicView[Any, Any]):
    """Some records of a typed topic; a value is a dict of the topic's columns.

    Every record is seen through the current version of the schema, whatever version it was
    written with.
    """

    _fixed: tuple[int, TopicSchema] | None = None
    """The id of the topic and the version of its schema, if that is not always the current one."""

    def _view(self, ranges: Sequence[OffsetRange]) -> TypedTopicView:
        view = TypedTopicView(self._root, self.name, ranges)
        view._fixed = self._fixed
        return view

    def _schema(self) -> TopicSchema:
        info = self._root.topic(self.name)
        if self._fixed is not None:
            topic_id, fixed = self._fixed
            if info.id != topic_id:
                raise InvalidSchemaError(
                    "The topic was deleted and created again",
                    topic=self.name,
                    todo="Call scan() again.",
                )
            return fixed
        schema = self._root.context.catalog.schema(info)
        if schema is None:
            raise InvalidConfigError(
                "The topic was deleted and created again, and its values are bytes now",
                topic=self.name,
                todo="Call log.topic(name) again.",
            )
        return schema

    def _typed_schema(self) -> TopicSchema | None:
        return self._schema()

    def _typed_reader(self) -> TypedReader:
        return _reader(self._schema())

    def _deserializers(self) -> Deserializers:
        return Deserializers(None, None, self._typed_reader())

    def schema(self, columns: Sequence[str] | None = None) -> pa.Schema:
        """Return the columns of `to_arrow`: offset, partition, timestamp, and the topic's own."""
        return self._typed_reader().select(columns, headers=self._has_headers())

    iter_batches = TopicView.batches

    def _all_columns(self) -> pa.Schema:
        return pa.schema(self._typed_reader().result.values())

    def _pruned(self, condition: RowFilter | None) -> TypedTopicView:
        if condition is None or condition.pushed is None:
            return self
        return self._with_matches(condition.pushed.batches)

    def _with_matches(self, where: pyarrow.compute.Expression) -> TypedTopicView:
        """Return a view without segments and batches in which no row matches."""
        pruner = Pruner(where, self._schema())
        ranges = []
        for part in self.ranges():
            log = self._log(part.partition)
            log.refresh()
            for start, stop in ranges_to_read(log, part.start, part.stop, pruner):
                ranges.append(OffsetRange(part.partition, start, stop))
        return self._view(ranges)

    def _tables(self, schema: pa.Schema, condition: RowFilter | None = None) -> Iterator[pa.Table]:
        reader = self._typed_reader()
        for part, batches in self._reads(partial(reader.indexes, schema.names)):
            for group in in_groups(batches):
                table = reader.table(group, part.partition, schema)
                yield table if condition is None else condition.keep(table)

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
        """Return a table of the records.

        Tombstones are left out, unless ``columns`` or ``where`` names the column ``_tombstone``:
        it is true in their rows, which have only key, timestamp and headers.

        Args:
            columns: Names of columns; by default offset, partition, timestamp, and the topic's
                own.  Only the bytes of these columns are read and checked.
            where: Only rows for which this is true: an expression of pyarrow, such as
                ``pyarrow.compute.field("dep_delay") > 60``, one of Polars, or SQL such as
                ``"dep_delay > 60"``.
            latest: Only the last record of each key.
            since: Only records from this time on, as in `TopicView.to_arrow`.
            between: Only records between two times.
            raw: Not for a typed topic.

        Raises:
            KeyError: There is no such column.
            InvalidConfigError: With ``raw``.
            InvalidQueryError: The condition is wrong.
        """
        check_column_names(columns)
        if raw:
            raise no_bytes(self.name)
        view, condition = self._limited(since, between), self._condition(where)
        if not latest:
            view = view._pruned(condition)
        schema = self.schema(columns)
        read = self._with_columns_of(schema, condition)
        if not latest:
            tables = view._tables(read, condition)
        elif condition is None:
            tables = view._latest(read)
        else:
            tables = map(condition.keep, view._latest(read))
        return pa.concat_tables([empty(read), *tables]).select(schema.names)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow PyCapsule stream, by which DuckDB, Polars, pandas and others read the view."""
        reader = pa.RecordBatchReader.from_batches(self.schema(), self.batches())
        return reader.__arrow_c_stream__(requested_schema)

    def _scannable(self) -> tuple[pa.Schema, Reads]:
        view = copy(self)
        view._fixed = self._root.topic(self.name).id, self._schema()
        schema = view.schema()

        def read(columns: list[str], pushed: PushedFilter | None) -> Iterator[pa.RecordBatch]:
            try:
                yield from view._pushed(columns, pushed)
            except pa.ArrowInvalid as error:
                if self._schema().version == view._schema().version:
                    raise
                raise InvalidSchemaError(
                    f"The schema of the topic has changed, and its values do not fit: {error}",
                    topic=self.name,
                    todo="Call scan() again.",
                ) from error

        return schema, read

    def _pushed(self, columns: list[str], pushed: PushedFilter | None) -> Iterator[pa.RecordBatch]:
        """Yield columns of the rows for which a filter may be true."""
        if pushed is None:
            return self.batches(columns)
        return self._with_matches(pushed.batches).batches(columns, where=pushed.rows)

    # The latest value of each key

    def _latest(self, schema: pa.Schema) -> Iterator[pa.Table]:
        read = self._typed_reader().keyed_columns
        return latest(self._root, self.name, self.ranges, schema, read)

    def _items(
        self, prefix: str | bytes, as_of: AsOf | None, *, values: bool = True
    ) -> Iterator[tuple[Any, Any]]:
        schema = self._schema()
        key = schema.key
        names = schema.columns.names if values else list(key)
        for table in self.before(as_of)._latest(self.schema(names)):
            kept = with_prefix(table, key[0], prefix) if prefix and key else table
            for batch in kept.to_batches():
                for value in python_rows(batch, names):
                    yield value[key[0]] if len(key) == 1 else tuple(map(value.get, key)), value

    def _key_bytes(self, key: Any) -> bytes:
        encoder = _encoder(self.name, self._schema())
        if key is None or not encoder.schema.key:
            raise InvalidRecordError(
                "No record of the topic has such a key",
                topic=self.name,
                todo="Pass a key." if encoder.schema.key else "The topic has no key column.",
            )
        (data,) = encoder.key_bytes([encoder.key_of(key)]).to_pylist()
        if data is None:
            raise InvalidRecordError("Records without a key cannot be looked up", topic=self.name)
        return bytes(data)

    def _cells(self) -> Iterator[tuple[object, ...]]:
        names = self._shown_columns()
        more = ("…",) if len(names) < len(self._schema().columns) else ()
        for record in self:
            value: Mapping[str, Any] | None = record.value
            if value is None:
                key = record.key if isinstance(record.key, tuple) else (record.key,)
                cells = [
                    dict(zip(self._schema().key, key, strict=False)).get(name) for name in names
                ]
            else:
                cells = [value.get(name) for name in names]
            texts = [None if cell is None else cut(short(cell), _CELL_WIDTH) for cell in cells]
            yield record.partition, record.offset, moment(record.timestamp), *texts, *more

    def _heads(self) -> tuple[str, ...]:
        names = self._shown_columns()
        more = ("…",) if len(names) < len(self._schema().columns) else ()
        return (PARTITION, OFFSET, TIMESTAMP, *names, *more)

    def _shown_columns(self) -> list[str]:
        names: list[str] = self._schema().columns.names
        return names[:_SHOWN_COLUMNS]


def no_bytes(topic: str) -> InvalidConfigError:
    """Return the error of a program that asks for the bytes of a typed topic."""
    return InvalidConfigError(
        "The values of a typed topic are columns, and not bytes",
        topic=topic,
        todo=Hint("Leave out raw.", "Leave out --raw."),
    )


class TypedTopic(TypedTopicView, Topic[Any, Any]):
    """All records of a typed topic, as of each call."""

    def _repr_html_(self) -> str:
        """For notebooks: the title, the schema, and the last records."""
        try:
            schema = self._schema()
            title = f"{self._title()}, version {schema.version} of the schema"
            rows = [
                (
                    field.name,
                    field.type,
                    "yes" if field.nullable else "no",
                    _role(schema, field.name),
                )
                for field in schema.columns
            ]
            columns = html_table(title, ("column", "type", "null", ""), rows)
            last = self.tail(max(_LAST // self.partitions, 1))[-_LAST:]
            if not len(last):
                return columns
            return columns + html_table("Last records", last._heads(), last._cells())
        except EmbedlogError:
            return html_table(repr(self)[1:-1], (), ())

    def schema_history(self) -> list[TopicSchema]:
        """Return all versions of the schema, in order; the last one is the current one."""
        return self._root.context.catalog.schema_versions(self._root.topic(self.name))


def _role(schema: TopicSchema, name: str) -> str:
    """Return the role of a column, and its default."""
    roles = []
    if name in schema.key:
        roles.append("key" if len(schema.key) == 1 else f"key {schema.key.index(name) + 1}")
    if name == schema.timestamp:
        roles.append("timestamp")
    if name in schema.defaults:
        roles.append(f"default {short(python_values(schema.defaults[name])[0])}")
    return ", ".join(roles)


__all__ = ["TypedTopic", "TypedTopicView"]
