"""Kafka's messages: functions that decode and encode each version, made from Kafka's schemas.

``kafka-messages.jsonl`` beside this file has the schemas of a release of Kafka, which
``make kafka-messages`` writes.  The functions of a version are made when it is first used.  A
request is decoded to named tuples, a response is encoded from dicts; in both, the names are those
of the schemas in lower case with underscores, and a field that a version does not have, or that a
dict leaves out, has the default of the schema.

No length or count is believed: each is compared with the bytes that are there before anything is
allocated, so what a request takes in memory is bounded by its size.
"""

from __future__ import annotations

import json
import pkgutil
import re
import struct
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import chain, groupby
from typing import Any, NamedTuple
from uuid import UUID

Fields = Mapping[str, Any]
"""A message to encode, or a part of one; what is left out has its default."""
Decode = Callable[[memoryview, int], tuple[Any, int]]
"""Returns a value that begins at a position, and the position after it."""
Encode = Callable[[Callable[[bytes], object], Any], object]
"""Passes the parts of an encoded value to a function."""

_FIXED = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float64": "d",
}
_HEADER = struct.Struct(">hhih")
_INT = struct.Struct(">i")
_ZERO_ID = UUID(int=0)


class MalformedMessageError(ValueError):
    """The bytes are not a message of this version."""


# Schemas


@cache
def _messages() -> dict[str, Any]:
    text = pkgutil.get_data("embedlog.server", "kafka-messages.jsonl") or b""
    return {each["name"]: each for each in map(json.loads, text.splitlines()[1:])}


@cache
def api_names() -> dict[int, str]:
    """Return the names of the APIs, such as ``"ListOffsets"``, by their keys."""
    return {
        each["apiKey"]: name.removesuffix("Request")
        for name, each in _messages().items()
        if each["type"] == "request"
    }


@cache
def versions(name: str) -> tuple[int, int]:
    """Return the first and the last stable version of an API."""
    schema = _messages()[f"{name}Request"]
    first, last = _range(schema["validVersions"])
    return first, last - bool(schema.get("latestVersionUnstable"))


@cache
def snake_case(name: str) -> str:
    """Return the name of an API or a field in lower case.

    >>> snake_case("ErrorCode"), snake_case("ISRNodes")
    ('error_code', 'isr_nodes')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _range(text: str) -> tuple[int, int]:
    first, separator, last = text.removesuffix("+").partition("-")
    return int(first), int(last or first) if separator or text[-1] != "+" else 1 << 15


def _has(text: str | None, version: int) -> bool:
    """Whether a range such as ``"2+"``, ``"0-3"`` or ``"none"`` has a version."""
    if not text or text == "none":
        return False
    first, last = _range(text)
    return first <= version <= last


class _Field(NamedTuple):
    """A field in one version of a message."""

    name: str
    kind: str
    """The type, of an array that of its items."""
    is_array: bool
    nullable: bool
    compact: bool
    """Whether its length is a varint."""
    tag: int | None
    present: bool
    default: Any
    fields: tuple[_Field, ...]
    """Those of a struct."""

    @property
    def is_fixed(self) -> bool:
        """Whether all values have the same size, and `struct` has a code for them."""
        return self.kind in _FIXED and not self.is_array


def _field(schema: Fields, structs: Fields, version: int, flexible: bool) -> _Field:
    is_array = schema["type"].startswith("[]")
    kind = schema["type"].removeprefix("[]")
    compact = flexible and schema.get("flexibleVersions") != "none"
    inner = schema.get("fields") or structs.get(kind, ())
    fields = tuple(_field(each, structs, version, flexible) for each in inner)
    return _Field(
        snake_case(schema["name"]),
        *(kind, is_array, _has(schema.get("nullableVersions"), version), compact),
        schema["tag"] if _has(schema.get("taggedVersions"), version) else None,
        _has(schema["versions"], version),
        _default(schema.get("default"), kind, is_array, fields),
        fields,
    )


def _default(text: Any, kind: str, is_array: bool, fields: tuple[_Field, ...]) -> Any:
    if text == "null":
        return None
    if is_array:
        return []
    if kind == "bool":
        return text in (True, "true")
    if kind in _FIXED:
        return float(text or 0) if kind == "float64" else int(str(text or 0), 0)
    simple = {"string": text or "", "bytes": b"", "records": None, "uuid": _ZERO_ID}
    return simple[kind] if kind in simple else {each.name: each.default for each in fields}


def _is_flexible(name: str, version: int) -> bool:
    """Whether a version of a message has tagged fields, and short lengths."""
    return _has(_messages()[name].get("flexibleVersions"), version)


def _layout(name: str, version: int) -> tuple[tuple[_Field, ...], bool]:
    """Return the fields of a message, and whether the version is flexible."""
    schema, flexible = _messages()[name], _is_flexible(name, version)
    structs = schema.get("commonStructs", {})
    return tuple(_field(each, structs, version, flexible) for each in schema["fields"]), flexible


@cache
def has_field(name: str, version: int, field: str) -> bool:
    """Whether a version of a message has a field, by its name in lower case."""
    return any(each.present and each.name == field for each in _layout(name, version)[0])


def _runs(fields: Iterable[_Field]) -> Iterable[list[_Field]]:
    """Yield the fields that are in every message, those of fixed sizes together."""
    present = (each for each in fields if each.present and each.tag is None)
    for is_fixed, group in groupby(present, lambda each: each.is_fixed):
        run = list(group)
        yield from [run] if is_fixed else ([each] for each in run)


# Decoding


@cache
def decoder(name: str, version: int) -> Decode:
    """Return the function that decodes a version of a message, such as ``"FetchRequest"``.

    It raises what `malformed` converts.
    """
    fields, flexible = _layout(name, version)
    return _struct_decoder(name, fields, flexible)


def decode(name: str, version: int, data: bytes | memoryview) -> Any:
    """Decode a message.

    Raises:
        MalformedMessageError: The bytes are not that message.
    """
    view = memoryview(data)
    try:
        # librdkafka sends more bytes in some requests, which Kafka does not look at either.
        return decoder(name, version)(view, 0)[0]
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"not a {name} of version {version}: {error}") from error


def _length(view: memoryview, at: int, size: int, nullable: bool) -> int:
    """Return a length, or a count of items, of which each has a byte at least; -1 if it is null."""
    if size < 0:
        if size != -1 or not nullable:
            raise MalformedMessageError("a field is null that must not be")
    elif size > len(view) - at:
        raise MalformedMessageError(f"a length of {size} where {len(view) - at} bytes are left")
    return size


def read_uvarint(view: memoryview, at: int) -> tuple[int, int]:
    """Return an unsigned varint of up to 5 bytes, and the position after it.

    Raises:
        MalformedMessageError: It is longer.
        IndexError: It is cut.
    """
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 28:
            raise MalformedMessageError("a varint is longer than 5 bytes")


def _size_decoder(field: _Field, width: struct.Struct) -> Decode:
    """Return what decodes a length or a count, and checks it."""
    nullable = field.nullable

    def compact(view: memoryview, at: int) -> tuple[int, int]:
        size, at = read_uvarint(view, at)
        return _length(view, at, size - 1, nullable), at

    def plain(view: memoryview, at: int) -> tuple[int, int]:
        (size,) = width.unpack_from(view, at)
        return _length(view, at + width.size, size, nullable), at + width.size

    return compact if field.compact else plain


def _bytes_decoder(field: _Field) -> Decode:
    """Return what decodes text, bytes, or records, of which it returns a view."""
    kinds: dict[str, Callable[[memoryview], Any]] = {
        "string": partial(str, encoding="utf-8"),
        "bytes": bytes,
        "records": memoryview,
    }
    convert = kinds[field.kind]
    size_of = _size_decoder(field, struct.Struct(">h") if field.kind == "string" else _INT)

    def decode(view: memoryview, at: int) -> tuple[Any, int]:
        size, at = size_of(view, at)
        return (None, at) if size < 0 else (convert(view[at : at + size]), at + size)

    return decode


def _uuid(view: memoryview, at: int) -> tuple[UUID, int]:
    stop = at + _length(view, at, 16, False)
    return UUID(bytes=bytes(view[at:stop])), stop


def _value_decoder(field: _Field, flexible: bool) -> Decode:
    """Return what decodes a value, or an item of an array."""
    if field.kind in _FIXED:
        fixed = struct.Struct(">" + _FIXED[field.kind])
        return lambda view, at: (fixed.unpack_from(view, at)[0], at + fixed.size)
    if field.kind == "uuid":
        return _uuid
    if field.kind in ("string", "bytes", "records"):
        return _bytes_decoder(field)
    inner = _struct_decoder(field.kind, field.fields, flexible)
    if not field.nullable or field.is_array:
        return inner
    return lambda view, at: (None, at + 1) if view[at] > 127 else inner(view, at + 1)


def _array_decoder(field: _Field, flexible: bool) -> Decode:
    size_of = _size_decoder(field, _INT)
    item_of = _value_decoder(field._replace(nullable=False), flexible)

    def decode(view: memoryview, at: int) -> tuple[list[Any] | None, int]:
        count, at = size_of(view, at)
        if count < 0:
            return None, at
        items = []
        for _ in range(count):
            item, at = item_of(view, at)
            items.append(item)
        return items, at

    return decode


def _decoder_of(field: _Field, flexible: bool) -> Decode:
    return (_array_decoder if field.is_array else _value_decoder)(field, flexible)


def _struct_decoder(name: str, fields: tuple[_Field, ...], flexible: bool) -> Decode:
    runs = list(_runs(fields))
    tagged = [field for field in fields if field.present and field.tag is not None]
    rest = [field for field in fields if not field.present or field.tag is not None]
    make = partial(tuple.__new__, _tuple_type(name, [*chain.from_iterable(runs), *rest]))
    steps: list[tuple[struct.Struct | None, Any]] = []
    for run in runs:
        if run[0].is_fixed:
            steps.append((struct.Struct(">" + "".join(_FIXED[each.kind] for each in run)), None))
        else:
            steps.append((None, _decoder_of(run[0], flexible)))
    by_tag = {each.tag: (each.name, _decoder_of(each, flexible)) for each in tagged}
    defaults = {each.name: _decoded_default(each) for each in rest}
    plain_rest = list(defaults.values())

    def decode(view: memoryview, at: int) -> tuple[Any, int]:
        values: list[Any] = []
        for fixed, read in steps:
            if fixed is not None:
                values += fixed.unpack_from(view, at)
                at += fixed.size
            else:
                value, at = read(view, at)
                values.append(value)
        if flexible:
            found, at = _read_tags(view, at, by_tag)
            if found:
                return make([*values, *(defaults | found).values()]), at
        return make(values + plain_rest), at

    return decode


def _decoded_default(field: _Field) -> Any:
    if not isinstance(field.default, dict):
        return field.default
    return _tuple_type(field.kind, field.fields)(*map(_decoded_default, field.fields))


def _tuple_type(name: str, fields: Iterable[_Field]) -> Any:
    return namedtuple(name, [each.name for each in fields])


def _read_tags(
    view: memoryview, at: int, by_tag: Mapping[int | None, tuple[str, Decode]]
) -> tuple[dict[str, Any], int]:
    """Return the tagged fields of a struct by name; those that are not known are skipped."""
    count, at = read_uvarint(view, at)
    found: dict[str, Any] = {}
    for _ in range(_length(view, at, count, False)):
        tag, at = read_uvarint(view, at)
        size, at = read_uvarint(view, at)
        end = at + _length(view, at, size, False)
        if tag in by_tag:
            name, read = by_tag[tag]
            found[name], at = read(view[:end], at)
            if at != end:
                raise MalformedMessageError(f"the field {name} has another size than it says")
        at = end
    return found, at


# Encoding


@cache
def encoder(name: str, version: int) -> Encode:
    """Return the function that encodes a version of a message, such as ``"FetchResponse"``."""
    fields, flexible = _layout(name, version)
    return _struct_encoder(fields, flexible)


def encode(name: str, version: int, fields: Fields) -> bytes:
    """Return the bytes of a message."""
    parts: list[bytes] = []
    encoder(name, version)(parts.append, fields)
    return b"".join(parts)


def uvarint(value: int) -> bytes:
    """Return an unsigned varint."""
    if value < 128:
        return _BYTES[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_BYTES = [bytes([value]) for value in range(256)]


def _size_encoder(field: _Field, width: struct.Struct) -> Callable[[int], bytes]:
    return (lambda size: uvarint(size + 1)) if field.compact else width.pack


def _bytes_encoder(field: _Field) -> Encode:
    """Return what encodes text or bytes, or records, which may be a list of parts."""
    size_of = _size_encoder(field, struct.Struct(">h") if field.kind == "string" else _INT)
    null, is_text = size_of(-1), field.kind == "string"

    def encode(write: Callable[[Any], object], value: Any) -> None:
        if value is None:
            write(null)
            return
        parts = value if isinstance(value, list) else [value.encode() if is_text else value]
        write(size_of(sum(map(len, parts))))
        for part in parts:
            write(part)

    return encode


def _value_encoder(field: _Field, flexible: bool) -> Encode:
    if field.kind in _FIXED:
        pack = struct.Struct(">" + _FIXED[field.kind]).pack
        return lambda write, value: write(pack(value))
    if field.kind == "uuid":
        return lambda write, value: write(value.bytes)
    if field.kind in ("string", "bytes", "records"):
        return _bytes_encoder(field)
    inner = _struct_encoder(field.fields, flexible)
    if not field.nullable or field.is_array:
        return inner

    def encode(write: Callable[[bytes], object], value: Any) -> None:
        write(b"\xff" if value is None else b"\1")
        if value is not None:
            inner(write, value)

    return encode


def _array_encoder(field: _Field, flexible: bool) -> Encode:
    size_of, encode_item = _size_encoder(field, _INT), _value_encoder(field, flexible)
    null = size_of(-1)

    def encode(write: Callable[[bytes], object], items: Any) -> None:
        if items is None:
            write(null)
            return
        write(size_of(len(items)))
        for item in items:
            encode_item(write, item)

    return encode


def _encoder_of(field: _Field, flexible: bool) -> Encode:
    return (_array_encoder if field.is_array else _value_encoder)(field, flexible)


def _struct_encoder(fields: tuple[_Field, ...], flexible: bool) -> Encode:
    steps: list[tuple[Any, Any]] = []
    for run in _runs(fields):
        names = [(each.name, each.default) for each in run]
        if run[0].is_fixed:
            pack = struct.Struct(">" + "".join(_FIXED[each.kind] for each in run)).pack
            steps.append((names, pack))
        else:
            steps.append((None, (*names[0], _encoder_of(run[0], flexible))))
    tagged = [
        (each.tag, each.name, each.default, _encoder_of(each, flexible))
        for each in fields
        if each.present and each.tag is not None
    ]

    def encode(write: Callable[[bytes], object], value: Fields) -> None:
        get = value.get
        for names, rest in steps:
            if names is not None:
                write(rest(*[get(name, default) for name, default in names]))
            else:
                name, default, encode_field = rest
                encode_field(write, get(name, default))
        if flexible:
            _write_tags(write, value, tagged)

    return encode


def _write_tags(write: Callable[[bytes], object], value: Fields, tagged: list[Any]) -> None:
    parts: list[bytes] = []
    count = 0
    for tag, name, default, encode_field in tagged:
        item = value.get(name, default)
        if item != default:
            inner: list[bytes] = []
            encode_field(inner.append, item)
            parts += [uvarint(tag), uvarint(sum(map(len, inner))), *inner]
            count += 1
    write(uvarint(count))
    for part in parts:
        write(part)


# Requests and responses


class ApiRequest(NamedTuple):
    """A request, with its header."""

    api: str
    """The name of the API, such as ``"Fetch"``; empty if the key is unknown."""
    version: int
    correlation_id: int
    client_id: str
    body: Any
    """None if the server does not have this version."""


def decode_request(data: memoryview, offered: Mapping[str, tuple[int, int]]) -> ApiRequest:
    """Decode a request from its bytes, without the length before them.

    Args:
        data: The bytes.
        offered: The versions of the APIs that a server has.

    Raises:
        MalformedMessageError: They are not a request.
    """
    try:
        key, version, correlation_id, size = _HEADER.unpack_from(data)
        at = _HEADER.size + max(_length(data, _HEADER.size, size, True), 0)
        client_id = str(data[_HEADER.size : at], "utf-8")
        api = api_names().get(key, "")
        first, last = offered.get(api, (0, -1))
        if not first <= version <= last:
            return ApiRequest(api, version, correlation_id, client_id, None)
        if _is_flexible(f"{api}Request", version):
            _, at = _read_tags(data, at, {})
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"no header of a request: {error}") from error
    body = decode(f"{api}Request", version, data[at:])
    return ApiRequest(api, version, correlation_id, client_id, body)


def encode_request(api: str, version: int, fields: Fields) -> bytes:
    """Return a request, with the length before it."""
    (key,) = (number for number, name in api_names().items() if name == api)
    tags = b"\0" if _is_flexible(f"{api}Request", version) else b""
    body = _HEADER.pack(key, version, 0, -1) + tags + encode(f"{api}Request", version, fields)
    return _INT.pack(len(body)) + body


def decode_response(api: str, version: int, data: bytes) -> Any:
    """Return the answer to a request, from its bytes with the length before them.

    Raises:
        MalformedMessageError: They are not an answer.
    """
    name = f"{api}Response"
    return decode(name, version, data[2 * _INT.size + _is_flexible(name, version) :])


def encode_response(request: ApiRequest, version: int, fields: Fields) -> list[bytes]:
    """Return the parts of the answer to a request, with the length before them."""
    parts = [b"", _INT.pack(request.correlation_id)]
    name = f"{request.api}Response"
    # A client must understand this one before it knows which versions the server has.
    if request.api != "ApiVersions" and _is_flexible(name, version):
        parts.append(b"\0")
    encoder(name, version)(parts.append, fields)
    parts[0] = _INT.pack(sum(map(len, parts)))
    return parts
