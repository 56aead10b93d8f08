"""kafka-python's serializers: its own if it is installed, otherwise of the same names."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from embedlog.kafka.installed import pick


class _Serializer(ABC):
    """Converts keys or values to bytes."""

    @abstractmethod
    def serialize(self, topic: str, headers: Any, data: Any) -> Any:
        """Return bytes, or None for None."""

    def close(self) -> None:  # noqa: B027 - most serializers have nothing to close
        """Called when the client is closed."""


class _Deserializer(ABC):
    """Converts bytes to keys or values."""

    @abstractmethod
    def deserialize(self, topic: str, headers: Any, data: Any) -> Any:
        """Return the key or value."""

    def close(self) -> None:  # noqa: B027 - most serializers have nothing to close
        """Called when the client is closed."""


class _DefaultSerializer(_Serializer, _Deserializer):
    """Text in an encoding; bytes are serialized as they are."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.encoding = encoding

    def serialize(self, topic: str, headers: Any, data: Any) -> Any:
        """Return text as bytes."""
        if data is None or isinstance(data, bytes | bytearray | memoryview):
            return data
        return data.encode(self.encoding)

    def deserialize(self, topic: str, headers: Any, data: Any) -> Any:
        """Return bytes as text."""
        return None if data is None else data.decode(self.encoding)


class _JsonSerializer(_DefaultSerializer):
    """JSON."""

    def serialize(self, topic: str, headers: Any, data: Any) -> Any:
        """Return data as JSON."""
        return None if data is None else json.dumps(data).encode(self.encoding)

    def deserialize(self, topic: str, headers: Any, data: Any) -> Any:
        """Return what the JSON says."""
        return None if data is None else json.loads(data.decode(self.encoding))


Serializer: Any = pick("kafka.serializer", "Serializer", _Serializer)
Deserializer: Any = pick("kafka.serializer", "Deserializer", _Deserializer)
DefaultSerializer: Any = pick("kafka.serializer", "DefaultSerializer", _DefaultSerializer)
JsonSerializer: Any = pick("kafka.serializer", "JsonSerializer", _JsonSerializer)
