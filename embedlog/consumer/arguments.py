"""Who may call a consumer, and with what."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping

from embedlog.config import ConsumerConfig
from embedlog.errors import (
    ClosedError,
    IllegalStateError,
    InvalidConfigError,
    InvalidPartitionError,
    InvalidTopicError,
)
from embedlog.record import OffsetAndMetadata, TopicPartition


class SingleThreadGuard:
    """Lets one thread in at a time, as often as it likes, until the consumer is closed (E13)."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()
        self.closed = False
        """Nobody may begin anything any more, but for whoever closes."""
        self._closer: int | None = None

    def __enter__(self) -> None:
        if not self._take(0):
            if self.closed:
                raise ClosedError("the consumer was closed")
            raise IllegalStateError(
                "another thread is using the consumer",
                todo="use it in one thread; only wakeup() may be called from others",
            )
        if self.closed and self._closer != threading.get_ident():
            self._lock.release()
            raise ClosedError("the consumer was closed")

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _take(self, timeout: float) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        if self._pid != os.getpid():
            # A thread was in while its process forked: here there is no such thread.
            self._lock, self._pid = threading.RLock(), os.getpid()
        return self._lock.acquire(timeout=timeout)

    def seize(self, timeout: float) -> bool:
        """Be the last one in: wait until the others are out, and say if they are.

        To be called once `closed` is set; `let_go` ends it.
        """
        if not self._take(timeout):
            return False
        self._closer = threading.get_ident()
        return True

    def let_go(self) -> None:
        """Let nobody in any more, not even who closed."""
        self._closer = None
        self._lock.release()


def partition_of(one: object) -> TopicPartition:
    """Return what names a partition, a plain pair too."""
    if isinstance(one, TopicPartition):
        return one
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str):
        return TopicPartition(*one)
    raise InvalidPartitionError(f"partition must be a TopicPartition, got {one!r}")


def limit_of(max_records: int | None) -> int | None:
    """Return the most records a call may return; None is up to the settings."""
    if max_records is not None and max_records < 1:
        raise ValueError(f"max_records {max_records} is not at least 1")
    return max_records


def asked(config: Mapping[str, object], setting: str) -> bool:
    """Whether a setting that is on by default was asked for."""
    given = config.get(setting, config.get(setting.replace("_", ".")))
    return str(given).lower() == "true"


def check_topics(topics: Iterable[object]) -> None:
    """Raise unless these are names of topics.

    Raises:
        InvalidTopicError: One is blank, or not a str.
        TypeError: They are one str, not a list.
    """
    if isinstance(topics, str):
        raise TypeError(f"topics are a list, not the text {topics!r}")
    for topic in topics:
        if not isinstance(topic, str):
            raise InvalidTopicError(f"topic must be a str, got {topic!r}")
        if not topic.strip():
            raise InvalidTopicError(f"topic must not be blank, got {topic!r}", todo="Name a topic")


def check_alone(config: ConsumerConfig, given: Mapping[str, object]) -> None:
    """Refuse what only a group could do (E18)."""
    if config.group_id is None and asked(given, "enable_auto_commit"):
        raise InvalidConfigError(
            "enable_auto_commit needs a group to commit for",
            todo="name a group_id, or leave it out",
            settings=("enable_auto_commit", "group_id"),
        )


def positions_of(
    offsets: Mapping[TopicPartition, OffsetAndMetadata] | None,
) -> dict[TopicPartition, OffsetAndMetadata] | None:
    """Return what a commit was given; plain offsets will do.

    Raises:
        TypeError: It is not a dict of partitions to offsets.
    """
    if offsets is None:
        return None
    if not isinstance(offsets, Mapping):
        raise TypeError(
            f"offsets are a dict of TopicPartition to OffsetAndMetadata, not {offsets!r}"
        )
    return {partition_of(one): _position_of(position) for one, position in offsets.items()}


def _position_of(position: object) -> OffsetAndMetadata:
    if isinstance(position, int) and not isinstance(position, bool):
        return OffsetAndMetadata(position)
    if not isinstance(position, OffsetAndMetadata):
        raise TypeError(f"a position is an OffsetAndMetadata, not {position!r}")
    # kafka-python's -1 is our None.
    known = position.leader_epoch is not None and position.leader_epoch >= 0
    epoch = position.leader_epoch if known else None
    return OffsetAndMetadata(position.offset, position.metadata or "", epoch)
