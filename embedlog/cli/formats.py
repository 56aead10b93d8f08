"""Printed records: their formats, which are kcat's or JSON, and what is decoded for them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from json.encoder import encode_basestring as _quoted
from typing import TYPE_CHECKING, Any

from embedlog.config import TopicConfig
from embedlog.errors import InvalidConfigError
from embedlog.lazy import pa
from embedlog.record import Record
from embedlog.serializers import Adapter, Bind, adapt, encode_json

if TYPE_CHECKING:
    from embedlog.api.topic import TopicView
    from embedlog.api.typed_topic import TypedTopicView
    from embedlog.schemas.topic_schema import TopicSchema

Writer = Callable[[Sequence[Record]], bytes]
"""Returns the bytes to print for some records."""

CHUNK_RECORDS = 1000
"""How many records are formatted at a time."""
_OWN = ("partition", "offset", "timestamp")
_TOKENS = re.compile(r"%(.?)|\\x([0-9A-Fa-f]{2})|\\(.?)|([^%\\]+)", re.DOTALL)
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_FIELDS: dict[str, Callable[[Record], bytes]] = {
    "t": lambda record: record.topic.encode(),
    "p": lambda record: b"%d" % record.partition,
    "o": lambda record: b"%d" % record.offset,
    "T": lambda record: b"%d" % record.timestamp,
    "k": lambda record: record.key or b"",
    "s": lambda record: record.value or b"",
    "K": lambda record: b"%d" % _length(record.key),
    "S": lambda record: b"%d" % _length(record.value),
    "h": lambda record: b",".join(
        name.encode() + b"=" + (value or b"") for name, value in record.headers
    ),
}


def _length(data: bytes | None) -> int:
    return -1 if data is None else len(data)


def writer(text: str, as_json: bool) -> Writer:
    """Return the function that formats records.

    Raises:
        InvalidConfigError: The format has an unknown letter.
    """
    if as_json:
        return lambda records: b"".join([_json_line(record) for record in records])
    if text == "%s\\n":
        return lambda records: b"".join([(record.value or b"") + b"\n" for record in records])
    parts = list(_parts(text))
    return lambda records: b"".join([part(record) for record in records for part in parts])


def decoder(
    topic: str, config: TopicConfig, bind: Bind, as_json: bool
) -> Callable[[Sequence[Record]], Sequence[Record]]:
    """Return the function that decodes records of a topic, before they are formatted.

    Keys and values become bytes, or with ``as_json`` a str of JSON, if they can be decoded.

    Args:
        topic: The topic.
        config: Its settings.
        bind: What connects the serializer of Avro to the registry of the log.
        as_json: Whether records are formatted as JSON.
    """
    names = config.key_serializer, config.value_serializer
    if set(names) <= {"bytes", "pickle"}:
        return lambda records: records
    from embedlog.registry.avro_serializers import AvroToJson

    avro = bind(AvroToJson(), "deserialize", "value", topic) if "avro" in names else None
    key, value = (_item_decoder(name, avro, as_json) for name in names)
    return lambda records: [
        record._replace(key=key(record.key), value=value(record.value)) for record in records
    ]


def _item_decoder(
    name: str, avro: Adapter | None, as_json: bool
) -> Callable[[bytes | None], bytes | str | None]:
    if name in ("bytes", "pickle") or (name in ("str", "json") and not as_json):
        return lambda data: data
    json_of_avro = avro if name == "avro" else None
    convert = (json_of_avro or adapt(name, "deserialize", "value")).convert

    def decode(data: bytes | None) -> bytes | str | None:
        try:
            item = convert("", [], data)
            if item is None and data is None:
                return None
            text = item if json_of_avro else encode_json(item).decode() if as_json else str(item)
            return text if as_json else text.encode()
        except (LookupError, ValueError, struct.error):
            return _base64(data or b"") if as_json else data

    return decode


def _parts(text: str) -> Iterable[Callable[[Record], bytes]]:
    for field, code, escape, plain in _TOKENS.findall(text):
        if field in _FIELDS:
            yield _FIELDS[field]
        elif field == "%":
            yield _constant(b"%")
        elif code:
            yield _constant(bytes([int(code, 16)]))
        elif escape in _ESCAPES:
            yield _constant(_ESCAPES[escape])
        elif plain:
            yield _constant(plain.encode("utf-8", "surrogateescape"))
        else:
            unknown = f"\\{escape}" if escape else f"%{field}"
            raise InvalidConfigError(
                f"The format has {unknown!r}, which has no meaning",
                todo="See embedlog consume --help.",
            )


def _constant(data: bytes) -> Callable[[Record], bytes]:
    return lambda _: data


def _json_line(record: Record) -> bytes:
    # By hand: creating an encoder for each record takes four times as long.
    text = (
        f'{{"topic": {_quoted(record.topic)}, "partition": {record.partition}, '
        f'"offset": {record.offset}, "timestamp": {record.timestamp}, '
        f'"timestamp_type": {record.timestamp_type}, "key": {_json(record.key)}, '
        f'"value": {_json(record.value)}, "headers": {json_headers(record.headers)}}}\n'
    )
    return text.encode()


def _json(data: bytes | str | None) -> str:
    """Return text if the bytes are UTF-8, else ``{"base64": …}``; a str is JSON already."""
    if data is None:
        return "null"
    if isinstance(data, str):
        return data
    try:
        return _quoted(data.decode())
    except UnicodeDecodeError:
        return _base64(data)


def _base64(data: bytes) -> str:
    import base64

    return json.dumps({"base64": base64.b64encode(data).decode()})


def json_headers(headers: Iterable[tuple[str, bytes | None]]) -> str:
    """Return headers as JSON pairs."""
    pairs = [f"[{_quoted(name)}, {_json(value)}]" for name, value in headers]
    return f"[{', '.join(pairs)}]"


# Typed topics


class TypedRecords:
    """Reads records whose values are the JSON of some columns, as `writer` takes them.

    Args:
        topic: The topic.
        columns: The columns of the values; None for those of the topic.
        where: A condition in SQL on the records; None for all.
        as_json: Whether `writer` writes JSON.
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
        from embedlog.api.typed_topic import TypedTopicView

        # The schema may change while a command follows a topic.
        assert isinstance(view, TypedTopicView)
        schema = view._schema()
        names = list(self._columns or schema.columns.names)
        try:
            view.schema(names)
        except KeyError as error:
            raise InvalidConfigError(error.args[0], topic=self._topic) from None
        if self._columns is None and self._where is None:
            yield from self._all(view, schema)
            return
        read = list(dict.fromkeys((*_OWN, *schema.key, *names)))
        for batch in view.batches(read, where=self._where):
            yield from self._records(batch, schema, names)

    def _all(self, view: TypedTopicView, schema: TopicSchema) -> Iterator[Record]:
        """Yield records with their headers, and tombstones."""
        from embedlog.schemas.json_columns import json_objects, to_json

        records = iter(view)
        while chunk := list(islice(records, CHUNK_RECORDS)):
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
        from embedlog.schemas.json_columns import json_objects, to_json

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
        """Return JSON: `writer` takes text for JSON, and bytes for what to print."""
        return text if text is None or self._as_json else text.encode()


def _table(rows: list[dict[str, Any]], schema: TopicSchema, names: Sequence[str]) -> pa.Table:
    from embedlog.schemas.values import arrow_array, checker_of, nullable

    arrays = []
    for name in names:
        kind = schema.columns.field(name).type
        check = nullable(checker_of(kind))
        arrays.append(arrow_array([check(row[name]) for row in rows], kind))
    return pa.table(arrays, names=list(names))
