"""`SerializingProducer` and `DeserializingConsumer`: clients that convert keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from embedlog.kafka.confluent.consumer import Consumer
from embedlog.kafka.confluent.library import confluent_kafka, error, filled, serialization
from embedlog.kafka.confluent.message import Message
from embedlog.kafka.confluent.producer import Producer
from embedlog.kafka.typed import note_for_dicts

Converter = Callable[[Any, Any], Any]


def without(conf: dict[str, Any], *names: str) -> tuple[dict[str, Any], list[Converter | None]]:
    """Return the settings without converters, and the converters."""
    rest = {name: value for name, value in conf.items() if name not in names}
    return rest, [conf.get(name) for name in names]


class SerializingProducer(Producer):
    """A producer with ``key.serializer`` and ``value.serializer``."""

    _original = confluent_kafka.SerializingProducer

    def __init__(self, conf: dict[str, Any]) -> None:
        rest, converters = without(conf, "key.serializer", "value.serializer")
        self._key_serializer, self._value_serializer = converters
        super().__init__(rest)

    def produce(  # type: ignore[override]
        self,
        topic: str,
        key: Any = None,
        value: Any = None,
        partition: int = -1,
        on_delivery: Any = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """Serialize, and do as `Producer.produce`.

        Raises:
            KeySerializationError, ValueSerializationError: A serializer failed.
        """
        context = serialization.SerializationContext(topic, serialization.MessageField.KEY, headers)
        if self._key_serializer is not None:
            try:
                key = self._key_serializer(key, context)
            except Exception as failure:
                raise error.KeySerializationError(failure) from failure
        filled(context, field=serialization.MessageField.VALUE)
        if self._value_serializer is not None:
            try:
                value = self._value_serializer(value, context)
            except Exception as failure:
                raise error.ValueSerializationError(failure) from failure
        super().produce(topic, value, key, partition, None, on_delivery, timestamp, headers)


class DeserializingConsumer(Consumer):
    """A consumer with ``key.deserializer`` and ``value.deserializer``."""

    _original = confluent_kafka.DeserializingConsumer

    def __init__(self, conf: dict[str, Any]) -> None:
        rest, converters = without(conf, "key.deserializer", "value.deserializer")
        self._key_deserializer, self._value_deserializer = converters
        super().__init__(rest)

    def poll(self, timeout: float | None = -1.0) -> Message | None:
        """Return the next record with its key and value deserialized, or None.

        Raises:
            ConsumeError: `Consumer.poll` would return an event with an error.
            KeyDeserializationError, ValueDeserializationError: A deserializer failed.
        """
        message = super().poll(timeout)
        if message is None:
            return None
        if message.error() is not None:
            raise error.ConsumeError(message.error(), kafka_message=message)
        topic = message.topic()
        assert topic is not None
        context = serialization.SerializationContext(
            topic, serialization.MessageField.KEY, message.headers()
        )
        key, value = message.key(), message.value()
        if self._key_deserializer is not None:
            try:
                key = self._key_deserializer(key, context)
            except Exception as failure:
                raise error.KeyDeserializationError(failure, message) from failure
        filled(context, field=serialization.MessageField.VALUE)
        if self._value_deserializer is not None:
            try:
                value = self._value_deserializer(value, context)
            except Exception as failure:
                note_for_dicts(failure, value)
                raise error.ValueDeserializationError(failure, message) from failure
        message.set_key(key)
        message.set_value(value)
        return message

    def consume(self, *_: object, **__: object) -> NoReturn:
        """Raise NotImplementedError, as confluent_kafka's does; use `poll`."""
        raise NotImplementedError
