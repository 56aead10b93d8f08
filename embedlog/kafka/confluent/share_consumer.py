"""`ShareConsumer` with confluent_kafka's interface, on embedlog's share consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from embedlog.errors import ClosedError, EmbedlogError, IllegalStateError
from embedlog.kafka.confluent.client import LogClient
from embedlog.kafka.confluent.kafka_errors import KafkaException, error_of, exception, translated
from embedlog.kafka.confluent.library import confluent_kafka
from embedlog.kafka.confluent.message import Message, consumed
from embedlog.kafka.confluent.serializing import without
from embedlog.record import Record
from embedlog.record import TopicPartition as Partition
from embedlog.share.share_consumer import ShareConsumer as LogShareConsumer

IllegalStateException: Any = getattr(confluent_kafka, "IllegalStateException", RuntimeError)
TopicPartition: Any = confluent_kafka.TopicPartition
_REFUSED = {"auto.offset.reset", "enable.auto.commit", "group.instance.id", "isolation.level"}
Callback = Callable[[dict[Any, set[int]], Any], object]


@contextmanager
def _in_words_of_the_library() -> Iterator[None]:
    with translated():
        try:
            yield
        except (IllegalStateError, ClosedError) as error:
            raise IllegalStateException(str(error)) from None


class ShareConsumer(LogClient):
    """Takes records of a share group of a log; `embedlog.share` says how.

    With ``host:port`` the constructor returns confluent_kafka's own share consumer.
    """

    _original = getattr(confluent_kafka, "ShareConsumer", None)

    def __init__(self, *args: Any, **config: Any) -> None:
        if self._original is None:
            raise exception("UNSUPPORTED_VERSION", "This confluent_kafka has no ShareConsumer")
        super().__init__(*args, **config)
        settings = self._settings
        for name in _REFUSED & settings.values.keys():
            self._handle.close()
            raise ValueError(
                f"Failed to create share consumer: `{name}` is not applicable for share consumer"
            )
        mode = str(settings.get("share.acknowledgement.mode", "implicit"))
        self._is_explicit = mode == "explicit"
        names = {"client.id": "client_id", "max.poll.records": "max_poll_records"}
        options: Any = settings.renamed(names)
        with self._handle.closed_after_error(), translated(InvalidConfigError="_INVALID_ARG"):
            inner: LogShareConsumer[Any, Any] = LogShareConsumer(
                self._log.root,
                group=str(settings.get("group.id")),
                share_acknowledgement_mode="explicit" if self._is_explicit else "implicit",
                key_deserializer="bytes",
                value_deserializer="bytes",
                **options,
            )
            self._inner = self._log._adopt(inner, "consumer")

    def subscribe(self, topics: list[str]) -> None:
        """Replace the subscription.

        Raises:
            TypeError, ValueError: It is no list of different names.
        """
        if not isinstance(topics, list) or not all(isinstance(each, str) for each in topics):
            raise TypeError("expected list of topic unicode strings")
        if len(set(topics)) < len(topics) or not all(topics):
            raise ValueError("Failed to subscribe: Local: Invalid argument or configuration")
        with _in_words_of_the_library():
            self._inner.subscribe(topics)

    def unsubscribe(self) -> None:
        """Take no further records."""
        self.subscribe([])

    def subscription(self) -> list[str]:
        """Return the topics."""
        return sorted(self._inner.subscription())

    def poll(self, timeout: float = -1) -> Any:
        """Return the next records, as confluent_kafka's `Messages`; none after ``timeout`` seconds.

        Raises:
            IllegalStateException: There is no subscription, or, in explicit mode, a record that is
                not acknowledged.
        """
        with _in_words_of_the_library():
            records = self._inner.poll(None if timeout < 0 else timeout * 1000)
        return confluent_kafka.Messages(map(consumed, records))

    def acknowledge(self, message: Message, ack_type: int = 1) -> None:
        """Say what becomes of a record, in explicit mode: ACCEPT, RELEASE or REJECT."""
        if not isinstance(message, Message):
            raise TypeError("expected a Message")
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if topic is None or partition is None or offset is None:
            raise ValueError("the message has no place in a log")
        self.acknowledge_offset(topic, partition, offset, ack_type)

    def acknowledge_offset(
        self, topic: str, partition: int, offset: int, ack_type: int = 1
    ) -> None:
        """Do as `acknowledge`, by the place of a record."""
        if ack_type not in (1, 2, 3):
            raise ValueError(f"invalid ack_type {ack_type}")
        if not self._is_explicit:
            raise IllegalStateException("The acknowledgement mode is implicit")
        record: Record[Any, Any] = Record(topic, partition, offset, 0, 0, None, None, [])
        with _in_words_of_the_library():
            self._inner.acknowledge(record, int(ack_type))

    def commit_sync(self, timeout: float = 60) -> dict[Any, Any]:
        """Commit acknowledgements; return None or a `KafkaException` by partition."""
        with _in_words_of_the_library():
            results = self._inner.commit()
        return {TopicPartition(*each): _failure(error) for each, error in results.items()}

    def commit_async(self) -> None:
        """Commit acknowledgements; the callback gets the results."""
        self.commit_sync()

    def set_acknowledgement_commit_callback(self, callback: Callback | None) -> None:
        """Have a function called with offsets by partition, and None or a `KafkaException`."""
        if callback is not None and not callable(callback):
            raise TypeError("expected a callable")

        def call(offsets: dict[Partition, set[int]], error: EmbedlogError | None) -> None:
            assert callback is not None
            named = {TopicPartition(*each): found for each, found in offsets.items()}
            callback(named, _failure(error))

        self._inner.set_acknowledgement_commit_callback(None if callback is None else call)

    def close(self) -> None:
        """Commit acknowledgements, release other records, and leave the group."""
        with translated():
            self._inner.close()
            self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DeserializingShareConsumer(ShareConsumer):
    """A share consumer with ``key.deserializer`` and ``value.deserializer``."""

    _original = getattr(confluent_kafka, "DeserializingShareConsumer", None)

    def __init__(self, conf: dict[str, Any]) -> None:
        rest, converters = without(conf, "key.deserializer", "value.deserializer")
        self._key_deserializer, self._value_deserializer = converters
        super().__init__(rest)

    def poll(self, timeout: float = -1) -> Any:
        """Do as `ShareConsumer.poll`; a record that cannot be deserialized has an error."""
        messages, original = super().poll(timeout), self._original
        assert original is not None
        for message in messages:
            original._deserialize(self, message)
        return messages


def _failure(error: EmbedlogError | None) -> Any:
    return None if error is None else KafkaException(error_of(error))
