"""`confluent_kafka.serialization`: that module's names, or equal ones if it is not installed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from embedlog.kafka.confluent.common_types import KafkaException
from embedlog.kafka.installed import installed, use_installed


class MessageField(StrEnum):
    """The part of a record that is converted."""

    NONE = "none"
    KEY = "key"
    VALUE = "value"


class SerializationContext:
    """Where a key or value goes to, or comes from."""

    def __init__(self, topic: str | None, field: MessageField, headers: Any = None) -> None:
        self.topic, self.field, self.headers = topic, field, headers


class SerializationError(KafkaException):
    """A value could not be converted."""


class Serializer:
    """The base of serializers: called with an object and a context, it returns bytes."""

    def __call__(self, obj: Any, ctx: SerializationContext | None = None) -> bytes | None:
        """Return the bytes of an object; None stays None."""
        raise NotImplementedError


class Deserializer:
    """The base of deserializers: called with bytes and a context, it returns an object."""

    def __call__(self, value: bytes | None, ctx: SerializationContext | None = None) -> Any:
        """Return the object of bytes; None stays None."""
        raise NotImplementedError


def _converted(convert: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return convert(*arguments)
    except (struct.error, UnicodeError, AttributeError) as error:
        raise SerializationError(str(error)) from error


class StringSerializer(Serializer):
    """Encodes a str, or what `str` makes of an object."""

    def __init__(self, codec: str = "utf_8") -> None:
        self.codec = codec

    def __call__(self, obj: Any, ctx: SerializationContext | None = None) -> bytes | None:
        """Return the encoded text."""
        if obj is None:
            return None
        encoded: bytes = _converted(str(obj).encode, self.codec)
        return encoded


class StringDeserializer(Deserializer):
    """Decodes a str."""

    def __init__(self, codec: str = "utf_8") -> None:
        self.codec = codec

    def __call__(self, value: bytes | None, ctx: SerializationContext | None = None) -> str | None:
        """Return the text."""
        return None if value is None else _converted(value.decode, self.codec)


def _number(letter: str, name: str) -> tuple[type[Serializer], type[Deserializer]]:
    """Return the classes that convert a number to its big-endian bytes, and back."""
    layout = struct.Struct(letter)

    class NumberSerializer(Serializer):
        def __call__(self, obj: Any, ctx: SerializationContext | None = None) -> bytes | None:
            return None if obj is None else _converted(layout.pack, obj)

    class NumberDeserializer(Deserializer):
        def __call__(self, value: bytes | None, ctx: SerializationContext | None = None) -> Any:
            return None if value is None else _converted(layout.unpack, value)[0]

    for kind, role in ((NumberSerializer, "Serializer"), (NumberDeserializer, "Deserializer")):
        kind.__name__ = kind.__qualname__ = name + role
    return NumberSerializer, NumberDeserializer


IntegerSerializer, IntegerDeserializer = _number(">i", "Integer")
DoubleSerializer, DoubleDeserializer = _number(">d", "Double")

__all__ = [
    "Deserializer",
    "DoubleDeserializer",
    "DoubleSerializer",
    "IntegerDeserializer",
    "IntegerSerializer",
    "MessageField",
    "SerializationContext",
    "SerializationError",
    "Serializer",
    "StringDeserializer",
    "StringSerializer",
]
use_installed(globals(), "confluent_kafka.serialization", __all__)
# Newer versions have more names, which confluent_kafka.schema_registry imports.
for _name, _value in getattr(installed("confluent_kafka.serialization"), "__dict__", {}).items():
    if not _name.startswith("_"):
        globals().setdefault(_name, _value)
