"""The dead letters of a topic, and their way back to the topics that they came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog.consumer.open_group import open_group
from embedlog.dead_letter_queue import Failure, original_headers
from embedlog.display import plural, public_names
from embedlog.errors import OffsetOutOfRangeError
from embedlog.record import Record, TopicPartition

if TYPE_CHECKING:
    from embedlog.api.log import Log

_TRANSACTION_RECORDS = 500
"""How many dead letters are sent in one transaction."""


class DeadLetter(NamedTuple):
    """A record that a group gave up."""

    record: Record[bytes | None, bytes | None]
    """As it is in the topic of dead letters, with the headers that say why."""
    failure: Failure
    replayed: bool = False
    """Whether `DeadLetters.replay` has sent it, with all before it."""

    @property
    def headers(self) -> list[tuple[str, bytes | None]]:
        """The headers that the record had."""
        return original_headers(self.record.headers)


class DeadLetters:
    """The records that groups gave up and put into one topic; returned by `Log.dead_letters`.

    Iterating yields each as a `DeadLetter`, partition by partition.
    """

    def __init__(self, log: Log, topic: str) -> None:
        self._log, self._topic = log, log.topic(topic, raw=True)
        self.name = topic

    @property
    def group(self) -> str:
        """The consumer group whose offsets say which of them were replayed."""
        return f"{self.name}.replay"

    def __iter__(self) -> Iterator[DeadLetter]:
        return self._letters([tuple(part[:3]) for part in self._topic.ranges()])

    def _letters(self, ranges: Iterable[Any]) -> Iterator[DeadLetter]:
        partitions = [TopicPartition(self.name, each) for each in range(self._topic.partitions)]
        committed = open_group(self._log.root, self.group).committed(partitions)
        for record in self._topic.in_ranges(ranges):
            failure, done = Failure.parse(record.headers), committed[record.topic_partition]
            if failure is not None:
                is_replayed = done is not None and record.offset < done.position.offset
                yield DeadLetter(record, failure, is_replayed)

    def get(self, partition: int, offset: int) -> DeadLetter:
        """Return one of them.

        Raises:
            OffsetOutOfRangeError: There is none at this offset.
            UnknownTopicOrPartitionError: There is no such partition.
        """
        self._log.root.partition(self.name, partition)
        for found in self._letters([(partition, offset, offset + 1)]):
            return found
        raise OffsetOutOfRangeError(
            "There is no dead letter", topic=self.name, partition=partition, offset=offset
        )

    def replay(self, *letters: DeadLetter) -> int:
        """Send records to the topics and partitions that they came from; return how many.

        Each is sent as it was, without the headers of a dead letter.  What is sent, and how far
        it is, is committed in one transaction: a call that was killed is continued by the next.

        Args:
            letters: Which ones, although they may have been replayed; by default all that were
                not.

        Raises:
            UnknownTopicOrPartitionError: A topic does not exist any more.
            OffsetOutOfRangeError: A dead letter has no copy of its record, which is gone.
        """
        if letters:
            with self._log.transaction(**_STORED) as transaction:
                for each in letters:
                    transaction.send(*self._arguments(each))
            return len(letters)
        count, partitions = 0, range(self._topic.partitions)
        settings: Any = {**_DESERIALIZED, "max_poll_records": _TRANSACTION_RECORDS}
        with self._log.consumer(self.name, group_id=self.group, **settings) as consumer:
            ends = consumer.end_offsets([TopicPartition(self.name, each) for each in partitions])
            consumer.stop_at(ends)
            while polled := consumer.poll():
                with self._log.transaction(**_STORED) as transaction:
                    for record in (each for records in polled.values() for each in records):
                        failure = Failure.parse(record.headers)
                        if failure is not None:
                            transaction.send(*self._arguments(DeadLetter(record, failure)))
                            count += 1
                    transaction.commit_offsets(consumer)
        return count

    def _arguments(self, letter: DeadLetter) -> tuple[Any, ...]:
        """Return the arguments of `Producer.send` that send a record again."""
        record, failure = letter.record, letter.failure
        headers = letter.headers
        if record.key is None and record.value is None:
            # It has no copy, or is a tombstone without a key.
            where = failure.partition, failure.offset, failure.offset + 1
            is_typed = bool(self._log.root.topic(failure.topic).schema_version)
            topic = self._log.topic(failure.topic, raw=not is_typed)
            origin = next(iter(topic.in_ranges([where])), None)
            if origin is None:
                raise OffsetOutOfRangeError(
                    "The dead letter has no copy of its record, which is gone",
                    topic=failure.topic,
                    partition=failure.partition,
                    offset=failure.offset,
                    todo="Set errors.deadletterqueue.copy.record.enable in the group; records of "
                    "typed topics are never copied.",
                )
            record, headers = origin, origin.headers
            if is_typed and record.value is not None:
                record = record._replace(key=None)  # It is in the columns of the value.
        place = failure.partition, record.timestamp
        return failure.topic, record.value, record.key, headers, *place

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self, "name")

    def __repr__(self) -> str:
        return f"<DeadLetters of {self.name}: {plural(len(self._topic), 'record')}>"


_STORED: Any = {"key_serializer": "bytes", "value_serializer": "bytes"}
_DESERIALIZED: Any = {
    "key_deserializer": "bytes",
    "value_deserializer": "bytes",
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
}


def topics_of(log: Log) -> list[str]:
    """Return the topics for dead letters, by their setting."""
    topics = log.root.topics().values()
    return sorted(each.name for each in topics if each.config.errors_deadletterqueue_group_enable)
