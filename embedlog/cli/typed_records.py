"""Records of typed topics for `embedlog consume` and `embedlog tail`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from embedlog.api import TopicView
from embedlog.api.row_filter import RowFilter
from embedlog.api.typed_topic import TypedTopicView
from embedlog.errors import InvalidConfigError
from embedlog.lazy import pa
from embedlog.record import Record
from embedlog.schemas.json_columns import json_objects, to_json
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.schemas.values import arrow_array, checker_of, nullable

_CHUNK_RECORDS = 1000
_OWN = ("partition", "offset", "timestamp")


class TypedRecords:
    """Reads records whose values are the JSON of some columns, as `formats.writer` takes them.

    Args:
        topic: The topic.
        columns: The columns of the values; None for those of the topic.
        where: A condition in SQL on the records; None for all.
        as_json: Whether `formats.writer` writes JSON.
    """

    def __init__(
        self, topic: str, columns: Sequence[str] | None, where: str | None, *, as_json: bool
    ) -> None:
        self._topic, self._columns, self._where, self._as_json = topic, columns, where, as_json

    def read(self, view: TopicView) -> Iterator[Record]:
        """Yield the records of a view; with columns or a condition, without tombstones.

        Raises:
            InvalidConfigError: There is no such column.
            InvalidQueryError: The condition is wrong.
        """
        # The schema may change while a command follows a topic.
        assert isinstance(view, TypedTopicView)
        schema = view._schema()
        names = list(self._columns or schema.columns.names)
        result = view.schema()
        for name in names:
            if name not in result.names:
                raise InvalidConfigError(
                    f"There is no column {name!r}",
                    topic=self._topic,
                    todo=f"The columns are {', '.join(result.names)}.",
                )
        if self._columns is None and self._where is None:
            yield from self._all(view, schema)
            return
        read = list(dict.fromkeys((*_OWN, *schema.key, *names)))
        if self._where is None:
            batches = view.batches(read)
        else:
            batches = RowFilter(self._where, result, self._topic).batches(view, read)
        for batch in batches:
            yield from self._records(batch, schema, names)

    def _all(self, view: TypedTopicView, schema: TopicSchema) -> Iterator[Record]:
        """Yield records with their headers, and tombstones."""
        records = iter(view)
        while chunk := list(islice(records, _CHUNK_RECORDS)):
            rows = [record.value for record in chunk if record.value is not None]
            values = json_objects(_table(rows, schema, schema.columns.names))
            keys = [
                record.key if isinstance(record.key, tuple) else (record.key,) for record in chunk
            ]
            key_rows = [dict(zip(schema.key, key, strict=False)) for key in keys]
            key_columns = _table(key_rows, schema, schema.key)
            keys_as_json = zip(*map(to_json, key_columns.columns), strict=True)
            for record in chunk:
                key = self._key(list(next(keys_as_json, ())))
                value = None
                if record.value is not None:
                    value = json.dumps(next(values), ensure_ascii=False)
                yield record._replace(key=self._text(key), value=self._text(value))

    def _records(self, batch: Any, schema: TopicSchema, names: list[str]) -> Iterator[Record]:
        own = [batch.column(name).to_pylist() for name in _OWN[:2]]
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        keys = zip(*(to_json(batch.column(name)) for name in schema.key), strict=True)
        values = json_objects(pa.Table.from_batches([batch]).select(names))
        for partition, offset, time, value in zip(*own, times, values, strict=True):
            key = self._key(list(next(keys, ())))
            text = self._text(json.dumps(value, ensure_ascii=False))
            yield Record(self._topic, partition, offset, time, 0, self._text(key), text, [])

    def _key(self, items: list[Any]) -> str | None:
        """Return a key as JSON; one of text, unless JSON is written, as it is."""
        if not items or items == [None]:
            return None
        if len(items) == 1:
            (item,) = items
            return item if isinstance(item, str) and not self._as_json else json.dumps(item)
        return json.dumps(items, ensure_ascii=False)

    def _text(self, text: str | None) -> Any:
        """Return JSON: `formats.writer` takes text for JSON, and bytes for what to print."""
        return text if text is None or self._as_json else text.encode()


def _table(rows: list[dict[str, Any]], schema: TopicSchema, names: Sequence[str]) -> pa.Table:
    arrays = []
    for name in names:
        kind = schema.columns.field(name).type
        check = nullable(checker_of(kind))
        arrays.append(arrow_array([check(row[name]) for row in rows], kind))
    return pa.table(arrays, names=list(names))
