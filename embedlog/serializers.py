"""Serializers and deserializers: the built-in ones, and those of programs and of Kafka's clients.

A setting such as ``value_serializer`` is the name of a built-in one (`NAMES`), or one of

- a callable, ``serializer(data)``,
- an object of kafka-python 2, ``serialize(topic, data)``, or 3, ``serialize(topic, headers,
  data)``, or
- a callable of confluent-kafka, ``serializer(data, context)`` with a `SerializationContext`;

and likewise with ``deserialize``.  `adapt` finds out once which form it is; the `Adapter` that
it returns is called in the same way for all of them.  None is never passed to them, so that a
record without a value stays a tombstone.
"""

from __future__ import annotations

import json
import struct
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from functools import lru_cache
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeVar

from embedlog.errors import InvalidConfigError
from embedlog.hints import Hint

if TYPE_CHECKING:
    from uuid import UUID

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

Headers = list[tuple[str, bytes | None]]
SerializerName = Literal["bytes", "str", "int", "float", "uuid", "json", "pickle", "avro"]
Action = Literal["serialize", "deserialize"]
Field = Literal["key", "value"]


class MessageField(str, Enum):  # noqa: UP042 - as in confluent-kafka; a StrEnum has another repr
    """Which part of a record a serializer of confluent-kafka's form is called for."""

    NONE = "none"
    KEY = "key"
    VALUE = "value"

    def __str__(self) -> str:
        return self.value


class SerializationContext:
    """What a serializer of confluent-kafka's form learns about the record, besides the data.

    If confluent-kafka is imported, its own class of this name is passed instead.
    """

    def __init__(self, topic: str, field: MessageField, headers: Headers | None = None) -> None:
        self.topic, self.field, self.headers = topic, field, headers


# For type annotations


class TopicSerializer(Protocol[T_contra]):
    """A serializer object of kafka-python 2."""

    def serialize(self, topic: str, data: T_contra, /) -> bytes | None:
        """Return the bytes of a key or value."""


class HeadersSerializer(Protocol[T_contra]):
    """A serializer object of kafka-python 3."""

    def serialize(self, topic: str, headers: Any, data: T_contra, /) -> bytes | None:
        """Return the bytes of a key or value."""


class TopicDeserializer(Protocol[T_co]):
    """A deserializer object of kafka-python 2."""

    def deserialize(self, topic: str, data: bytes, /) -> T_co:
        """Return the key or value of these bytes."""


class HeadersDeserializer(Protocol[T_co]):
    """A deserializer object of kafka-python 3."""

    def deserialize(self, topic: str, headers: Any, data: bytes, /) -> T_co:
        """Return the key or value of these bytes."""


class RegistrySerializer(Protocol):
    """A serializer or deserializer that needs the schema registry of the log."""

    @property
    def needs_registry(self) -> Action:
        """What it does."""


Serializer = (
    Callable[[T], bytes | None]
    | Callable[[T, Any], bytes | None]
    | TopicSerializer[T]
    | HeadersSerializer[T]
    | RegistrySerializer
)
"""What a serializer of values of type ``T`` may be, apart from a `SerializerName`."""

Deserializer = (
    Callable[[bytes], T]
    | Callable[[bytes, Any], T]
    | TopicDeserializer[T]
    | HeadersDeserializer[T]
    | RegistrySerializer
)
"""What a deserializer to values of type ``T`` may be, apart from a `SerializerName`."""


def shortened(item: object) -> str:
    """Return a key for the text of an error."""
    text = repr(item)
    return text if len(text) <= 80 else f"{text[:79]}…"


# The built-in ones


class _Builtin(NamedTuple):
    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]


def _wrong_type(item: object, expected: str) -> TypeError:
    return TypeError(f"{expected} is expected, not {type(item).__name__}")


def _bytes(item: Any) -> bytes:
    if not isinstance(item, bytes | bytearray | memoryview):
        raise _wrong_type(item, "bytes")
    return bytes(item)


def _encode_text(item: Any) -> bytes:
    if not isinstance(item, str):
        raise _wrong_type(item, "str")
    return item.encode()


_LONG, _INTEGER = struct.Struct(">q"), struct.Struct(">i")
_DOUBLE, _FLOAT = struct.Struct(">d"), struct.Struct(">f")


def _encode_int(item: Any) -> bytes:
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise _wrong_type(item, "int")
    number = item.__index__()
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{number} does not fit in 64 bits")
    return _LONG.pack(number)


def _decode_int(data: bytes) -> Any:
    return (_INTEGER if len(data) == _INTEGER.size else _LONG).unpack(data)[0]


def _encode_float(item: Any) -> bytes:
    if isinstance(item, bool) or not hasattr(item, "__float__"):
        raise _wrong_type(item, "float")
    return _DOUBLE.pack(item)


def _decode_float(data: bytes) -> Any:
    return (_FLOAT if len(data) == _FLOAT.size else _DOUBLE).unpack(data)[0]


def _encode_uuid(item: Any) -> bytes:
    import uuid

    if not isinstance(item, uuid.UUID):
        raise _wrong_type(item, "UUID")
    return str(item).encode()


def _decode_uuid(data: bytes) -> UUID:
    import uuid

    return uuid.UUID(bytes=data) if len(data) == 16 else uuid.UUID(data.decode())


def _pickled(item: Any) -> bytes:
    import pickle

    return pickle.dumps(item)


def _unpickled(data: bytes) -> Any:
    import pickle

    return pickle.loads(data)


def _json_default(item: Any) -> Any:
    import dataclasses
    import uuid

    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        # As dataclasses.asdict, without its deep copy: the encoder asks again for what is inside.
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    if isinstance(item, datetime | date | time):
        return item.isoformat()
    if isinstance(item, uuid.UUID):
        return str(item)
    raise TypeError(f"JSON has no {type(item).__name__}")


def _json_encoder(ensure_ascii: bool) -> Callable[[Any], str]:
    return json.JSONEncoder(
        ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":"), default=_json_default
    ).encode


json_text = _json_encoder(ensure_ascii=False)
"""Returns a value as JSON text: compact, and not escaped more than necessary."""
_ascii_json_text = _json_encoder(ensure_ascii=True)


def encode_json(item: Any) -> bytes:
    """Return a value as JSON, in UTF-8 and without blanks.

    Dataclasses become objects, and datetimes, dates, times and UUIDs text.

    >>> encode_json({"gate": "Gate 1", "delays": [1.5, None]})
    b'{"gate":"Gate 1","delays":[1.5,null]}'

    Raises:
        TypeError, ValueError: JSON cannot express it, such as bytes or NaN.
    """
    try:
        return json_text(item).encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, as in file names that are not UTF-8, has only an escaped form.
        return _ascii_json_text(item).encode()


_BUILTINS: Final[dict[str, _Builtin]] = {
    "bytes": _Builtin(_bytes, _bytes),
    "str": _Builtin(_encode_text, bytes.decode),
    "int": _Builtin(_encode_int, _decode_int),
    "float": _Builtin(_encode_float, _decode_float),
    "uuid": _Builtin(_encode_uuid, _decode_uuid),
    "json": _Builtin(encode_json, json.loads),
    "pickle": _Builtin(_pickled, _unpickled),
}
NAMES: Final = (*_BUILTINS, "avro")
"""The names of the built-in serializers.

``"avro"`` needs the schema registry of a log (`embedlog.registry`).

``"int"`` is Kafka's LongSerializer, and reads the four bytes of its IntegerSerializer too;
``"float"`` is its DoubleSerializer, and reads those of its FloatSerializer; ``"uuid"`` is the
text of a UUID, as its UUIDSerializer writes it.
"""


# Those of programs


class Adapter:
    """A serializer or deserializer that is called in one way, whatever its form.

    Args:
        one: Converts an item, called with the topic, the headers of the record and the item.
        many: Converts items lazily, called with the topic, the headers of each record, and the
            items; without Python code per item if the form allows it.
        name: The name of a built-in one, or None.
        uses_headers: Whether the headers are passed on; the function may add to the list.
        pass_none: Whether None is converted too, as Kafka's Python clients do.
    """

    __slots__ = ("_many", "_one", "_pass_none", "name", "uses_headers")

    def __init__(
        self,
        one: Callable[[str, Any, Any], Any],
        many: Callable[[str, Iterable[Any], Iterable[Any]], Iterator[Any]],
        *,
        name: str | None = None,
        uses_headers: bool = False,
        pass_none: bool = False,
    ) -> None:
        self._one, self._many, self._pass_none = one, many, pass_none
        self.name, self.uses_headers = name, uses_headers

    def convert(self, topic: str, headers: Any, item: Any) -> Any:
        """Convert the key or value of one record; None stays None."""
        if item is None and not self._pass_none:
            return None
        return self._one(topic, headers, item)

    def convert_all(
        self, topic: str, headers: Iterable[Any] | None, items: list[Any]
    ) -> Iterator[Any]:
        """Yield each converted key or value; ``headers`` are those of each record, if any.

        An exception is that of the item after those that were yielded.
        """
        headers_of_each = repeat([]) if headers is None else headers
        # Not `None not in items`: a comparison with an array of numpy is no truth value.
        if self._pass_none or not any(map(is_, items, repeat(None))):
            return self._many(topic, headers_of_each, items)
        pairs = zip(headers_of_each, items, strict=False)
        return (self.convert(topic, headers, item) for headers, item in pairs)


Bind = Callable[[object, Action, Field, str], Adapter]
"""Returns the adapter of a serializer that needs the registry of a log: ``"avro"``, or a
`RegistrySerializer`; for a topic."""


class UnboundAdapter(Adapter):
    """A serializer that needs the registry of a log; `adapt_for_topic` binds it."""

    __slots__ = ("setting",)

    def __init__(self, setting: object) -> None:
        self.setting = setting

        def refuse(*_: object) -> Any:
            raise InvalidConfigError(
                "A serializer of Avro needs the schema registry of a log",
                todo="Use it with log.producer() and log.consumer().",
            )

        super().__init__(refuse, refuse, name="avro")


def adapt(
    setting: Any,
    action: Action,
    field: Field,
    *,
    allow_pickle: bool = False,
    pass_none: bool = False,
) -> Adapter:
    """Return the adapter of a serializer or deserializer, in any form.

    >>> adapt("json", "serialize", "value").convert("flights", [], {"gate": 5})
    b'{"gate":5}'
    >>> adapt(bytes.hex, "deserialize", "value").convert("flights", [], b"A")
    '41'

    Args:
        setting: A name, a callable, or an object; see the docstring of this module.
        action: What it is to do.
        field: What it is for.
        allow_pickle: Whether ``"pickle"`` is allowed: reading pickled data can run any code.
        pass_none: Whether it is called with None too, as by Kafka's Python clients.

    Raises:
        ValueError: It is none of these; the text says what it must be.
    """
    if isinstance(setting, Adapter):
        return setting
    if setting == "avro" or getattr(setting, "needs_registry", None) == action:
        return UnboundAdapter(setting)
    if isinstance(setting, str):
        return _builtin(setting, action, allow_pickle)
    is_class = action == "deserialize" and isinstance(setting, type)
    if is_class and hasattr(setting, "__dataclass_fields__"):
        # For typed topics, whose values are dicts.
        return _adapt_plain(maker_of(setting), pass_none=pass_none)
    method = getattr(setting, action, None)
    if callable(method) and not isinstance(setting, type):
        return _adapt_method(method, pass_none)
    if callable(setting) and method is None:
        return _adapt_callable(setting, field, pass_none)
    raise ValueError(_accepted(action))


# Dicts to dataclasses


def maker_of(owner: type) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that makes a dataclass of a dict, and those nested in it.

    Columns that the class does not have are left out.
    """
    fields = tuple(_makers(owner).items())

    def make(row: Mapping[str, Any]) -> Any:
        return owner(
            **{
                name: row[name] if maker is None else maker(row[name])
                for name, maker in fields
                if name in row
            }
        )

    return make


@lru_cache(maxsize=256)
def _makers(owner: type) -> Mapping[str, Callable[[Any], Any] | None]:
    import dataclasses

    hints = typing.get_type_hints(owner)
    return {field.name: _maker(hints[field.name]) for field in dataclasses.fields(owner)}


def _maker(hint: Any) -> Callable[[Any], Any] | None:
    """Return the converter of a field's values; None if they stay as they are."""
    import dataclasses

    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        others = [_maker(argument) for argument in arguments if argument is not types.NoneType]
        return _optional(others[0]) if len(others) == 1 else None
    if origin in (list, Sequence) and arguments:
        item = _maker(arguments[0])
        return None if item is None else _optional(lambda values: [item(value) for value in values])
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _optional(maker_of(hint))
    return None


def _optional(make: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return None if make is None else lambda value: None if value is None else make(value)


def adapt_own(setting: Any, action: Action, field: Field) -> Adapter | None:
    """Return the adapter of a client's own setting, which was checked before; None without one."""
    return None if setting is None else adapt(setting, action, field, allow_pickle=True)


def adapt_for_topic(
    topic: str,
    own: Adapter | None,
    default: str,
    action: Action,
    field: Field,
    allow_pickle: bool,
    bind: Bind,
) -> Adapter | None:
    """Return the adapter of a client for a topic; None if it takes and returns bytes.

    Args:
        topic: The topic.
        own: The client's own serializer or deserializer, if it has one.
        default: The name of the topic's serializer, for clients without one.
        action, field: As in `adapt`.
        allow_pickle: Whether the client may use the topic's serializer if that is pickle.
        bind: What connects serializers that need a registry to the one of the log.

    Raises:
        InvalidConfigError: It may not.
    """
    adapter = own or adapt(default, action, field, allow_pickle=True)
    if isinstance(adapter, UnboundAdapter):
        return bind(adapter.setting, action, field, topic)
    if own is not None or default == "bytes":
        return None if own is None or own.name == "bytes" else own
    if default == "pickle" and not allow_pickle:
        raise InvalidConfigError(
            f"The {field}s of the topic are pickled, and reading them can run any code",
            todo=Hint(
                "Set allow_pickle=True if you trust everyone who writes to the topic.",
                "Write to it with a Python program.",
            ),
            topic=topic,
            setting="allow_pickle",
        )
    return adapter


def _accepted(action: Action) -> str:
    return (
        f"one of {', '.join(NAMES)}, or a callable(data), callable(data, context), or an object "
        f"with a method {action}(topic, data) or {action}(topic, headers, data)"
    )


def _builtin(name: str, action: Action, allow_pickle: bool) -> Adapter:
    if name not in _BUILTINS:
        raise ValueError(_accepted(action))
    if name == "pickle" and not allow_pickle:
        raise ValueError("another serializer unless allow_pickle is True")
    function: Callable[[Any], Any] = getattr(_BUILTINS[name], action)
    return _adapt_plain(function, name=name)


def _adapt_plain(function: Callable[[Any], Any], **options: Any) -> Adapter:
    return Adapter(
        lambda topic, headers, item: function(item),
        lambda topic, headers, items: map(function, items),
        **options,
    )


def _adapt_method(method: Callable[..., Any], pass_none: bool) -> Adapter:
    """Adapt the method of a serializer object, by the number of its arguments."""
    names, required = _positional(method, default=("topic", "data"))
    if names[1:2] == ["headers"] or required >= 3 or names[-1:] == ["*"]:
        return Adapter(
            method,
            lambda topic, headers, items: map(method, repeat(topic), headers, items),
            uses_headers=True,
            pass_none=pass_none,
        )
    if len(names) == 1:
        return _adapt_plain(method, pass_none=pass_none)
    return Adapter(
        lambda topic, headers, item: method(topic, item),
        lambda topic, headers, items: map(method, repeat(topic), items),
        pass_none=pass_none,
    )


def _adapt_callable(function: Callable[..., Any], field: Field, pass_none: bool) -> Adapter:
    """Adapt a callable: confluent-kafka's form if it needs two arguments, or names the second."""
    names, required = _positional(function, default=("data",))
    if required > 2:
        raise ValueError(f"callable with one or two arguments, not {required}")
    if required < 2 and names[1:2] not in (["ctx"], ["context"]) and not _is_confluents(function):
        return _adapt_plain(function, pass_none=pass_none)
    confluents = sys.modules.get("confluent_kafka.serialization")
    context_class = getattr(confluents, "SerializationContext", SerializationContext)
    fields = getattr(confluents, "MessageField", MessageField)
    message_field = fields.KEY if field == "key" else fields.VALUE

    def call(topic: str, headers: Any, item: Any) -> Any:
        return function(item, context_class(topic, message_field, headers))

    return Adapter(
        call,
        lambda topic, headers, items: map(call, repeat(topic), headers, items),
        uses_headers=True,
        pass_none=pass_none,
    )


def _is_confluents(function: object) -> bool:
    classes = type(function).__mro__
    return any(
        kind.__module__.startswith("confluent_kafka.") and kind.__name__.endswith("erializer")
        for kind in classes
    )


def _positional(function: Callable[..., Any], default: tuple[str, ...]) -> tuple[list[str], int]:
    """Return the names of the positional parameters, ``*`` for ``*args``, and how many it needs.

    Args:
        function: A callable.
        default: The parameters of a function that does not tell, such as those in C.
    """
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return list(default), len(default)
    by_position = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names = [parameter.name for parameter in by_position]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        names.append("*")
    return names, sum(parameter.default is parameter.empty for parameter in by_position)
