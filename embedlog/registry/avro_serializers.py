"""Serializers of Avro with Confluent's wire format: a zero, the id of the schema, the value.

`bind` connects them to the registry of a log, once for each topic of a producer, consumer or
view.  A schema is parsed once, and read from the registry again only if that may have changed.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Any, NamedTuple

from embedlog.display import need
from embedlog.registry.avro_schema import AvroSchema, Schema, parse_avro, parse_stored
from embedlog.registry.avro_values import checker_of, json_text, parser_of
from embedlog.registry.schema_registry import SchemaRegistry
from embedlog.root.root import Root
from embedlog.serializers import Action, Adapter, Field

MAGIC = 0
PREFIX = struct.Struct(">BI")
"""A zero and the id of the schema, before each value."""

_Encode = Callable[[Any], bytes]
_Decode = Callable[[bytes], Any]
_DAMAGE = (
    *(AttributeError, EOFError, LookupError, OverflowError, TypeError, ValueError, struct.error),
)
"""What fastavro raises for bytes that a schema cannot have written."""


class AvroSerializer:
    """Serializes keys or values with a schema, which it registers when it is first used.

    For the settings ``key_serializer`` and ``value_serializer`` of a producer.

    Args:
        schema: The schema; without one, the latest version of the subject is used, as by the
            serializer ``"avro"``.
        subject: The subject; by default ``TOPIC-key`` or ``TOPIC-value``.
        register: Whether to register the schema; if not, the subject must have it.

    Raises:
        InvalidSchemaError: It is not a schema of Avro.
        EmbedlogError: fastavro or avro is not installed.
    """

    def __init__(
        self, schema: Schema | None = None, *, subject: str | None = None, register: bool = True
    ) -> None:
        self._schema = None if schema is None else parse_avro(schema)
        self._subject, self._register = subject, register

    @property
    def needs_registry(self) -> Action:
        """It is for the settings of a producer."""
        return "serialize"

    def _adapter(self, root: Root, subject: str) -> Adapter:
        subject = self._subject or subject
        return _AvroEncoder(root, subject, self._schema, self._register, _encoder).adapter()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class AvroDeserializer:
    """Deserializes keys or values with the schemas that they were written with.

    For the settings ``key_deserializer`` and ``value_deserializer`` of a consumer.

    Args:
        reader_schema: What values are resolved to by Avro's rules: its fields, defaults,
            aliases and wider types.  By default they are returned as they were written.

    Raises:
        InvalidSchemaError: It is not a schema of Avro.
        EmbedlogError: fastavro or avro is not installed.
    """

    def __init__(self, reader_schema: Schema | None = None) -> None:
        self._schema = None if reader_schema is None else parse_avro(reader_schema)

    @property
    def needs_registry(self) -> Action:
        """It is for the settings of a consumer."""
        return "deserialize"

    def _adapter(self, root: Root, subject: str) -> Adapter:
        return _WireDecoder(root, self._schema, _decoder).adapter()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class JsonToAvro(AvroSerializer):
    """Serializes values of JSON with the latest version of the subject; for the command line."""

    def _adapter(self, root: Root, subject: str) -> Adapter:
        return _AvroEncoder(root, subject, None, False, _encoder_of_json).adapter()


class AvroToJson(AvroDeserializer):
    """Deserializes values to JSON text; for the command line, SQL and files."""

    def _adapter(self, root: Root, subject: str) -> Adapter:
        return _WireDecoder(root, None, _decoder_to_json).adapter()


def bind(root: Root, setting: object, action: Action, field: Field, topic: str) -> Adapter:
    """Connect a serializer of Avro to the registry of a log; see `embedlog.registry.binder`."""
    need("fastavro")
    serializer: Any = setting
    if setting == "avro":
        serializer = AvroSerializer() if action == "serialize" else AvroDeserializer()
    adapter: Adapter = serializer._adapter(root, f"{topic}-{field}")
    return adapter


# Encoding


class _Writer(NamedTuple):
    """What encodes values with a version of a subject."""

    version: int
    """The version of the catalog that the subject was read from."""
    schema_id: int
    encode: _Encode


class _AvroEncoder:
    """Encodes the keys or values of a topic."""

    def __init__(
        self,
        root: Root,
        subject: str,
        schema: AvroSchema | None,
        register: bool,
        make_encoder: Callable[[int, AvroSchema], _Encode],
    ) -> None:
        self._registry, self._subject = SchemaRegistry(root), subject
        self._catalog_version = root.version
        self._schema, self._register = schema, register
        self._make_encoder = make_encoder
        # Replaced as a whole, so that threads need no lock.
        self._writer: _Writer | None = None

    def adapter(self) -> Adapter:
        return Adapter(self._one, self._many, name="avro")

    def _one(self, topic: str, headers: Any, item: Any) -> bytes:
        return self._current()(item)

    def _many(self, topic: str, headers: Iterable[Any], items: Iterable[Any]) -> Iterator[bytes]:
        return map(self._current(), items)

    def _current(self) -> _Encode:
        writer = self._writer
        if writer is not None and self._schema is not None:
            return writer.encode
        version = self._catalog_version()
        if writer is None or writer.version != version:
            writer = self._writer = self._read(version)
        return writer.encode

    def _read(self, version: int) -> _Writer:
        schema, registry, writer = self._schema, self._registry, self._writer
        if schema is not None and self._register:
            schema_id = registry.register(self._subject, schema.text)
        elif schema is not None:
            schema_id = registry.lookup(self._subject, schema.text).id
        else:
            latest = registry.latest(self._subject)
            schema_id = latest.id
            if writer is not None and writer.schema_id == schema_id:
                return writer._replace(version=version)
            schema = parse_stored(latest.schema)
        return _Writer(version, schema_id, self._make_encoder(schema_id, schema))


def _encoder(schema_id: int, schema: AvroSchema) -> _Encode:
    """Return an encoder of values that writes their prefix."""
    prefix, parsed, check = PREFIX.pack(MAGIC, schema_id), schema.parsed, checker_of(schema.parsed)
    if _is_bytes(parsed):
        return lambda item: prefix + _bytes(item)
    write = need("fastavro").schemaless_writer

    def encode(item: Any) -> bytes:
        if type(item) is not dict and dataclasses.is_dataclass(item):
            item = _plain(item)
        if check is not None:
            check(item)
        buffer = BytesIO()
        buffer.write(prefix)
        write(buffer, parsed, item, strict_allow_default=True)
        return buffer.getvalue()

    return encode


def _encoder_of_json(schema_id: int, schema: AvroSchema) -> _Encode:
    """Return an encoder of JSON values."""
    encode, parse = _encoder(schema_id, schema), parser_of(schema.parsed)
    return lambda value: encode(parse(value))


def _is_bytes(parsed: Any) -> bool:
    """Whether the schema is ``bytes`` alone: Confluent's serializers write no length for it."""
    if isinstance(parsed, dict):
        return parsed["type"] == "bytes" and "logicalType" not in parsed
    return bool(parsed == "bytes")


def _bytes(item: Any) -> bytes:
    if not isinstance(item, bytes | bytearray | memoryview):
        raise TypeError(f"bytes are expected, not {type(item).__name__}")
    return bytes(item)


def _plain(item: Any) -> Any:
    """Return a dataclass as a dict, also inside of lists, dicts and other dataclasses."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: _plain(getattr(item, field.name)) for field in dataclasses.fields(item)}
    if isinstance(item, list | tuple):
        return list(map(_plain, item))
    if isinstance(item, dict):
        return {name: _plain(value) for name, value in item.items()}
    return item


# Decoding


class _WireDecoder:
    """Decodes keys or values, each with the schema whose id it begins with."""

    def __init__(
        self,
        root: Root,
        reader: AvroSchema | None,
        make_decoder: Callable[[AvroSchema, AvroSchema | None], _Decode],
    ) -> None:
        self._registry, self._reader = SchemaRegistry(root), reader
        self._make_decoder = make_decoder
        self._decoders: dict[bytes, _Decode] = {}
        """By what the bytes begin with.  The schema of an id never changes."""

    def adapter(self) -> Adapter:
        return Adapter(self._one, self._many, name="avro")

    def _one(self, topic: str, headers: Any, item: bytes) -> Any:
        return self._decode(item)

    def _many(self, topic: str, headers: Iterable[Any], items: Iterable[bytes]) -> Iterator[Any]:
        return map(self._decode, items)

    def _decode(self, data: bytes) -> Any:
        decode = self._decoders.get(data[:5])
        return (decode or self._decoder(data[:5]))(data)

    def _decoder(self, prefix: bytes) -> _Decode:
        """Return the decoder of values with a prefix.

        Raises:
            ValueError: This is no prefix.
            UnknownSchemaError: The registry does not have the id.
        """
        if len(prefix) < PREFIX.size or prefix[0] != MAGIC:
            raise ValueError(
                "the bytes do not begin with a zero and the id of a schema, so Avro's serializer "
                "did not write them"
            )
        schema = parse_stored(self._registry.get(PREFIX.unpack(prefix)[1]))
        decode = self._decoders[bytes(prefix)] = self._make_decoder(schema, self._reader)
        return decode


def _decoder(schema: AvroSchema, reader: AvroSchema | None) -> _Decode:
    """Return a decoder of values that were written with a schema."""
    parsed, start = schema.parsed, PREFIX.size
    reader_parsed = None if reader is None else reader.parsed
    read, write = need("fastavro").schemaless_reader, need("fastavro").schemaless_writer
    if _is_bytes(parsed) and reader is None:
        return lambda data: bytes(data[start:])
    if _is_bytes(parsed):

        def resolve(data: bytes) -> Any:
            buffer = BytesIO()
            write(buffer, parsed, data[start:])  # with its length
            buffer.seek(0)
            return read(buffer, parsed, reader_parsed)

        return resolve

    def decode(data: bytes) -> Any:
        buffer = BytesIO(data)
        buffer.seek(start)
        try:
            value = read(buffer, parsed, reader_parsed)
        except _DAMAGE as error:
            raise ValueError(
                f"the bytes do not fit the schema ({type(error).__name__}: {error})"
            ) from error
        if buffer.tell() != len(data):
            raise ValueError(f"{len(data) - buffer.tell()} bytes follow the value")
        return value

    return decode


def _decoder_to_json(schema: AvroSchema, reader: AvroSchema | None) -> _Decode:
    """Return a decoder of values to JSON text."""
    decode = _decoder(schema, reader)
    return lambda data: json_text(decode(data))
