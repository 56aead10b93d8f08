"""Checks of a consumer's arguments, and of the thread that calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from embedlog.catalog import check_topic_name
from embedlog.errors import (
    ClosedError,
    IllegalStateError,
    InvalidPartitionError,
    InvalidTopicError,
)
from embedlog.forks import new_lock
from embedlog.record import OffsetAndMetadata, TopicPartition


class SingleThreadGuard:
    """A reentrant lock that refuses a second thread, and all once it is closed."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self.closed = False
        """Set when it is closed; from then on only the closing thread may enter."""
        self._closing_thread: int | None = None

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            if self.closed:
                raise ClosedError("The consumer was closed")
            raise IllegalStateError(
                "Another thread is using the consumer",
                todo="Use it in one thread; others may call wakeup(), assignment(), paused(), "
                "metrics() and close() only.",
            )
        if self.closed and self._closing_thread != threading.get_ident():
            self._lock.release()
            raise ClosedError("The consumer was closed")

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def try_enter(self) -> bool:
        """Enter unless another thread is inside; the caller calls `__exit__` if this is true.

        Raises:
            ClosedError: The consumer was closed.
        """
        try:
            self.__enter__()
        except IllegalStateError:
            return False
        return True

    def refuse(self) -> None:
        """Refuse every thread but one that closes the consumer."""
        self.closed = True

    def acquire_to_close(self, timeout: float) -> bool:
        """Wait until no other thread is inside; return False after ``timeout`` seconds.

        Call it after `refuse`, and `release_closed` at the end.
        """
        if not self._lock.acquire(timeout=timeout):
            return False
        self._closing_thread = threading.get_ident()
        return True

    def release_closed(self) -> None:
        """Refuse every thread from now on, also the one that closed the consumer."""
        self._closing_thread = None
        self._lock.release()


def to_topic_partition(value: object) -> TopicPartition:
    """Return a `TopicPartition`; accepts a pair of topic and number too.

    Raises:
        InvalidPartitionError: The value is neither.
    """
    if isinstance(value, TopicPartition):
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return TopicPartition(*value)
    raise InvalidPartitionError(
        f"partition must be a TopicPartition, got {value!r}",
        todo='Pass TopicPartition(topic, number), such as TopicPartition("flights", 0).',
    )


def check_column_names(columns: Sequence[str] | None) -> None:
    """Raise for one name, of which each letter would be a column, and for one that comes twice."""
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names, got {columns!r}")
    if columns is not None and len(set(columns)) < len(columns):
        raise ValueError(f"A column is named twice: {', '.join(columns)}")


def check_max_records(max_records: int | None) -> int | None:
    """Return the argument.

    Raises:
        ValueError: It is less than 1.
    """
    if max_records is not None and max_records < 1:
        raise ValueError(f"max_records must be at least 1, got {max_records}")
    return max_records


def explicitly_enabled(config: Mapping[str, object], setting: str) -> bool:
    """Return whether the program itself set a setting to True, in either spelling."""
    value = config.get(setting, config.get(setting.replace("_", ".")))
    return str(value).lower() == "true"


def check_topics(topics: Iterable[object]) -> None:
    """Check that these are names of topics.

    Raises:
        InvalidTopicError: One is blank or not a str, or no topic can have it.
        TypeError: They are a str instead of a list.
    """
    if isinstance(topics, str):
        raise TypeError(f"topics must be a list of names, got the str {topics!r}")
    for topic in topics:
        if not isinstance(topic, str):
            raise InvalidTopicError(
                f"topic must be a str, got {topic!r}",
                todo='Pass each topic and setting by itself: consumer("t", "u", group_id="g").',
            )
        if not topic.strip():
            raise InvalidTopicError(f"topic must not be blank, got {topic!r}", todo="Name a topic.")
        check_topic_name(topic)


def parse_offsets(
    offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None,
) -> dict[TopicPartition, OffsetAndMetadata] | None:
    """Return the offsets passed to a commit; plain ints and kafka-python's tuples are accepted.

    Raises:
        TypeError: They are not a dict of partitions to offsets.
    """
    if offsets is None:
        return None
    if not isinstance(offsets, Mapping):
        raise TypeError(
            f"offsets must be a dict of TopicPartition to OffsetAndMetadata, got {offsets!r}"
        )
    parsed = {}
    for key, value in offsets.items():
        if isinstance(value, int) and not isinstance(value, bool):
            position = OffsetAndMetadata(value)
        elif isinstance(value, tuple) and 1 <= len(value) <= 3:
            offset, metadata, epoch = OffsetAndMetadata(*value)
            # kafka-python's -1 is None here.
            epoch = None if epoch is None or epoch < 0 else epoch
            position = OffsetAndMetadata(offset, metadata or "", epoch)
        else:
            raise TypeError(f"offset must be an OffsetAndMetadata or an int, got {value!r}")
        parsed[to_topic_partition(key)] = position
    return parsed
