"""The formats of printed records: kcat's, or JSON."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from json.encoder import encode_basestring as _quoted

from embedlog.config import TopicConfig
from embedlog.errors import InvalidConfigError
from embedlog.record import Record
from embedlog.registry import AvroToJson
from embedlog.serializers import Adapter, Bind, adapt, encode_json

Writer = Callable[[Sequence[Record]], bytes]
"""Returns the bytes to print for some records."""

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
    return json.dumps({"base64": base64.b64encode(data).decode()})


def json_headers(headers: Iterable[tuple[str, bytes | None]]) -> str:
    """Return headers as JSON pairs."""
    pairs = [f"[{_quoted(name)}, {_json(value)}]" for name, value in headers]
    return f"[{', '.join(pairs)}]"
