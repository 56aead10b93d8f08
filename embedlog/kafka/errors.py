"""The module ``kafka.errors``, and the errors of embedlog as one of kafka-python's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from embedlog import errors as log_errors
from embedlog.kafka.kafka_python import kafka
from embedlog.kafka.library import public_name
from embedlog.kafka.typed import note_for_dicts

P = ParamSpec("P")
R = TypeVar("R")


def __getattr__(name: str) -> Any:
    """Return an error of kafka-python."""
    return public_name(kafka.errors, name)


# Translation

_NAMES = {
    "BufferExhaustedError": "KafkaTimeoutError",
    "ClosedError": "IllegalStateError",
    "CorruptionError": "CorruptRecordError",
    "InvalidConfigError": "KafkaConfigurationError",
    "InvalidProducerEpochError": "ProducerFencedError",
    "NotALogError": "KafkaConfigurationError",
    "OutOfOrderSequenceError": "OutOfOrderSequenceNumberError",
    "ReadOnlyError": "PolicyViolationError",
    "ReplicaNotAvailableError": "LeaderNotAvailableError",
    "ReplicasDivergedError": "KafkaStorageError",
    "RecordBatchTooLargeError": "RecordListTooLargeError",
    "RecordTooLargeError": "MessageSizeTooLargeError",
    "RestartedApplicationError": "ProducerFencedError",
    "StorageError": "KafkaStorageError",
    "TimeoutError": "KafkaTimeoutError",
    "UnsupportedFormatError": "UnsupportedVersionError",
}
"""kafka-python's names where they differ."""


def translated(error: BaseException) -> BaseException:
    """Return an error of embedlog as kafka-python's clients raise it, with the same sentence.

    Others are returned as they are.  A program that raises the result sets its ``__cause__``
    to the error.
    """
    if not isinstance(error, log_errors.EmbedlogError):
        return error
    text = str(error)
    if isinstance(error, log_errors.RecordDeserializationError) and error.__cause__ is not None:
        # kafka-python lets the error of a deserializer through.
        error.__cause__.add_note(text)
        note_for_dicts(error.__cause__, error.value_bytes)
        return error.__cause__
    if isinstance(error, log_errors.SerializationError | log_errors.InvalidPartitionError):
        return TypeError(text)
    if isinstance(error, log_errors.LogTruncatedError):
        partition = kafka.TopicPartition(error.topic, error.partition)
        where = {partition: kafka.OffsetAndMetadata(error.next_offset, "", -1)}
        return kafka.errors.LogTruncationError(where, text)  # type: ignore[no-any-return]
    names = [_NAMES.get(kind.__name__, kind.__name__) for kind in type(error).__mro__]
    nearest = next((name for name in names if hasattr(kafka.errors, name)), "KafkaError")
    return getattr(kafka.errors, nearest)(text)  # type: ignore[no-any-return]


@contextmanager
def kafka_errors() -> Iterator[None]:
    """Raise errors of embedlog in a block as kafka-python's."""
    try:
        yield
    except log_errors.EmbedlogError as error:
        raise translated(error) from log_errors.raised_in_body(error)


def raises_kafka_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method: it raises errors of embedlog as kafka-python's."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **named: P.kwargs) -> R:
        try:
            return call(*args, **named)
        except log_errors.EmbedlogError as error:
            raise translated(error) from error

    return wrapper
