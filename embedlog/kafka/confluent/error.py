"""`confluent_kafka.error`: that module's names, or equal ones if it is not installed."""

from __future__ import annotations

from typing import Any

from embedlog.kafka.confluent.common_types import KafkaError, KafkaException
from embedlog.kafka.confluent.kafka_errors import kafka_error
from embedlog.kafka.confluent.serialization import SerializationError
from embedlog.kafka.installed import use_installed


class _ClientError(KafkaException):
    """An error with its cause, and the message that it is about."""

    def __init__(
        self, kafka_error: Any, exception: Exception | None = None, kafka_message: Any = None
    ) -> None:
        super().__init__(kafka_error)
        self.exception, self.kafka_message = exception, kafka_message

    @property
    def code(self) -> int:
        """The number of the error."""
        number: int = self.args[0].code()
        return number

    @property
    def name(self) -> str:
        """The name of the error."""
        return str(self.args[0].name())


class ConsumeError(_ClientError):
    """A record could not be consumed."""


class ProduceError(_ClientError):
    """A record could not be produced."""

    def __init__(self, kafka_error: Any, exception: Exception | None = None) -> None:
        super().__init__(kafka_error, exception)


class KeyDeserializationError(ConsumeError, SerializationError):
    """The deserializer of the key failed."""

    def __init__(self, exception: Exception | None = None, kafka_message: Any = None) -> None:
        super().__init__(
            kafka_error("_KEY_DESERIALIZATION", str(exception)), exception, kafka_message
        )


class ValueDeserializationError(ConsumeError, SerializationError):
    """The deserializer of the value failed."""

    def __init__(self, exception: Exception | None = None, kafka_message: Any = None) -> None:
        super().__init__(
            kafka_error("_VALUE_DESERIALIZATION", str(exception)), exception, kafka_message
        )


class KeySerializationError(ProduceError, SerializationError):
    """The serializer of the key failed."""

    def __init__(self, exception: Exception | None = None) -> None:
        super().__init__(kafka_error("_KEY_SERIALIZATION", str(exception)), exception)


class ValueSerializationError(ProduceError, SerializationError):
    """The serializer of the value failed."""

    def __init__(self, exception: Exception | None = None) -> None:
        super().__init__(kafka_error("_VALUE_SERIALIZATION", str(exception)), exception)


__all__ = [
    "ConsumeError",
    "KafkaError",
    "KafkaException",
    "KeyDeserializationError",
    "KeySerializationError",
    "ProduceError",
    "ValueDeserializationError",
    "ValueSerializationError",
]
use_installed(globals(), "confluent_kafka.error", __all__)
