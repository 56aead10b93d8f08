"""The errors of embedlog as those of aiokafka."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from embedlog import errors as log_errors
from embedlog.kafka.aiokafka.library import errors
from embedlog.kafka.library import public_name

P = ParamSpec("P")
R = TypeVar("R")

_NAMES = {
    "BufferExhaustedError": "KafkaTimeoutError",
    "CorruptionError": "CorruptRecordException",
    "InvalidConfigError": "IllegalArgumentError",
    "InvalidProducerEpochError": "ProducerFenced",
    "NotALogError": "IllegalArgumentError",
    "OutOfOrderSequenceError": "OutOfOrderSequenceNumber",
    "RecordBatchTooLargeError": "RecordListTooLargeError",
    "RecordTooLargeError": "MessageSizeTooLargeError",
    "RestartedApplicationError": "ProducerFenced",
    "TimeoutError": "KafkaTimeoutError",
}
"""aiokafka's names where they differ."""


def __getattr__(name: str) -> Any:
    """Return an error of aiokafka."""
    return public_name(errors, name)


def translated(error: BaseException) -> BaseException:
    """Return an error of embedlog as aiokafka's clients raise it; others as they are."""
    if not isinstance(error, log_errors.EmbedlogError):
        return error
    if isinstance(error, log_errors.RecordDeserializationError) and error.__cause__ is not None:
        error.__cause__.add_note(str(error))
        return error.__cause__
    if isinstance(error, log_errors.SerializationError | log_errors.InvalidPartitionError):
        return TypeError(str(error))
    if isinstance(error, log_errors.OffsetOutOfRangeError):
        where = {_partition(error): error.facts.get("offset")}
        return errors.OffsetOutOfRangeError(where)  # type: ignore[no-any-return]
    names = [_NAMES.get(kind.__name__, kind.__name__) for kind in type(error).__mro__]
    nearest = next((name for name in names if hasattr(errors, name)), "KafkaError")
    kind = getattr(errors, nearest)
    return kind() if nearest == "ProducerFenced" else kind(str(error))  # type: ignore[no-any-return]


def _partition(error: Any) -> Any:
    from embedlog.kafka.aiokafka.library import structs

    return structs.TopicPartition(error.topic, error.partition)


@contextmanager
def kafka_errors() -> Iterator[None]:
    """Raise errors of embedlog in a block as aiokafka's."""
    try:
        yield
    except log_errors.EmbedlogError as error:
        raise translated(error) from log_errors.raised_in_body(error)


def raises_kafka_errors(
    call: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Decorate a coroutine function: it raises errors of embedlog as aiokafka's."""

    @functools.wraps(call)
    async def wrapper(*args: P.args, **named: P.kwargs) -> R:
        try:
            return await call(*args, **named)
        except log_errors.EmbedlogError as error:
            raise translated(error) from error

    return wrapper
