"""Dead letters: records that a group gave up, in a topic of their own, with the reason in headers.

The headers have the names of KIP-1191.  What it has no name for has those that Kafka Streams gives
it (KIP-1034), after the same prefix.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

from embedlog.config import GroupConfig, TopicConfig
from embedlog.errors import (
    InvalidConfigError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from embedlog.hints import alter_topic
from embedlog.record import Record
from embedlog.root.root import Root

PREFIX = "__dlq.errors."
"""Of all headers of a dead letter that its record did not have."""
ENABLED = "errors.deadletterqueue.group.enable"
"""The setting of topics for dead letters."""
_NAMES = {
    "topic": "topic",
    "partition": "partition",
    "offset": "offset",
    "group": "group",
    "delivery_count": "delivery.count",
    "message": "message",
    "exception": "exception",
    "stacktrace": "stacktrace",
    "first_failed_ms": "first.timestamp",
    "last_failed_ms": "last.timestamp",
}
"""The header of each field of `Failure`, after the prefix."""
_NUMBERS = ("partition", "offset", "delivery_count", "first_failed_ms", "last_failed_ms")
_MESSAGE_CHARACTERS, _STACK_CHARACTERS = 2_000, 8_000
"""The most of a message, and of a traceback, whose end is kept."""
_HEADER_BYTES = 64 << 10
"""How much larger the batches of a new topic of dead letters may be than those of their origin."""


class Failure(NamedTuple):
    """Why and where a group gave a record up; each field is a header of the dead letter."""

    topic: str
    """The topic of the record; likewise ``partition`` and ``offset``."""
    partition: int
    offset: int
    group: str
    delivery_count: int
    """How often it was handled."""
    message: str
    """The text of the last error."""
    exception: str = ""
    """The class of the last error, with its module."""
    stacktrace: str = ""
    first_failed_ms: int = -1
    """When the first of these attempts failed; in milliseconds since 1970."""
    last_failed_ms: int = -1

    @classmethod
    def of(
        cls,
        record: Record,
        group: str,
        error: BaseException,
        *,
        delivery_count: int,
        first_failed_ms: int,
        last_failed_ms: int,
    ) -> Self:
        """Describe the last failure of a record."""
        kind, trace = type(error), error.__traceback__
        try:
            message = str(error)
        except Exception:  # noqa: BLE001 - whatever the user's class raises
            message = ""
        while trace is not None and _is_ours(trace):  # what called the handler
            trace = trace.tb_next
        stack = traceback.format_exception(kind, error, trace or error.__traceback__)
        return cls(
            *(record.topic, record.partition, record.offset, group, delivery_count),
            message=message[:_MESSAGE_CHARACTERS],
            exception=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
            stacktrace="".join(stack)[-_STACK_CHARACTERS:],
            first_failed_ms=first_failed_ms,
            last_failed_ms=last_failed_ms,
        )

    def headers(self) -> list[tuple[str, bytes | None]]:
        """Return the headers, as UTF-8."""
        return [
            (PREFIX + name, str(value).encode(errors="replace"))
            for name, value in zip(_NAMES.values(), self, strict=True)
        ]

    @classmethod
    def parse(cls, headers: Sequence[tuple[str, bytes | None]]) -> Self | None:
        """Return what headers say, also those that Kafka wrote; None if they are of no dead letter.

        Of a dead letter of a dead letter that is the last failure.
        """
        found = {
            name.removeprefix(PREFIX): (value or b"").decode(errors="replace")
            for name, value in headers
            if name.startswith(PREFIX)
        }
        fields: dict[str, Any] = {
            field: found[name] for field, name in _NAMES.items() if name in found
        }
        try:
            fields |= {field: int(fields[field]) for field in _NUMBERS if field in fields}
            return cls(**{"group": "", "delivery_count": 1, "message": "", **fields})
        except (TypeError, ValueError):
            return None


def _is_ours(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__")).startswith("embedlog.workers")


def original_headers(
    headers: Sequence[tuple[str, bytes | None]],
) -> list[tuple[str, bytes | None]]:
    """Return the headers that the record of a dead letter had."""
    return [(name, value) for name, value in headers if not name.startswith(PREFIX)]


def letter(
    record: Record, failure: Failure, partitions: int, config: GroupConfig
) -> tuple[Any, ...]:
    """Return the arguments of `Producer.send` for a dead letter.

    The values of a typed topic are no bytes, so they are not copied: the letter says where its
    record is.

    Args:
        record: The record, with the stored bytes of its key and value.
        failure: Why it is one.
        partitions: Of the topic of dead letters; as in Kafka, one is in the partition with the
            number of its own.
        config: The settings of the group.
    """
    is_bytes = all(part is None or isinstance(part, bytes) for part in (record.key, record.value))
    copied = config.errors_deadletterqueue_copy_record_enable and is_bytes
    return (
        config.errors_deadletterqueue_topic_name,
        *((record.value, record.key) if copied else (None, None)),
        [*(record.headers if copied else ()), *failure.headers()],
        record.partition % partitions,
        record.timestamp,
    )


def ensure_topic(root: Root, config: GroupConfig, origins: Sequence[str]) -> int:
    """Check the topic of dead letters of a group, or create it; return its number of partitions.

    Args:
        root: The log.
        config: The settings of the group, with the name of the topic.
        origins: The topics that the group reads.

    Raises:
        InvalidConfigError: The topic cannot have dead letters of these topics.
        UnknownTopicOrPartitionError: It does not exist, and must not be created.
    """
    name = config.errors_deadletterqueue_topic_name
    assert name is not None
    sources = [root.topic(origin) for origin in origins]
    if name in origins:
        raise InvalidConfigError(
            "A group cannot read the topic of its own dead letters", topic=name
        )
    try:
        info = root.topic(name)
    except UnknownTopicOrPartitionError:
        if not config.errors_deadletterqueue_auto_create_topics_enable:
            raise
        limit = max(source.config.max_message_bytes for source in sources) + _HEADER_BYTES
        settings = {ENABLED: True, "max.message.bytes": min(limit, (1 << 31) - 1)}
        count = max(source.partitions for source in sources)
        with suppress(TopicAlreadyExistsError):
            root.create_topic(name, count, TopicConfig.parse(settings))
        info = root.topic(name)
    topic = info.config
    if not topic.errors_deadletterqueue_group_enable:
        raise InvalidConfigError(
            "The topic is not one for dead letters",
            topic=name,
            todo=alter_topic(name, {ENABLED: True}) + " if it is.",
        )
    if (
        topic.compacts
        or info.schema_version
        or {topic.key_serializer, topic.value_serializer} != {"bytes"}
    ):
        raise InvalidConfigError(
            "Dead letters are bytes, and all of a key are kept, so their topic must have no "
            "serializers, no schema and no compaction",
            topic=name,
            todo="Name another topic; one that does not exist is created.",
        )
    return info.partitions
