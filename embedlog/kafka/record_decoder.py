"""Decodes batches to kafka-python's records, without Python code for each record."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

from embedlog.batch import Batch
from embedlog.consumer.deserialize import NO_HEADERS, RecordDecoder, RecordRun
from embedlog.kafka.sized_rows import SizedRowLists
from embedlog.kafka.structs import ConsumerRecord
from embedlog.record import TopicPartition


class _FromTuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()
    # Set in the class itself, so that Python calls tuple's C constructor directly.
    __new__ = tuple.__new__


class LogConsumerRecord(_FromTuple, ConsumerRecord):  # type: ignore[misc]
    """A `ConsumerRecord` made from a tuple, in a quarter of the time."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(ConsumerRecord._make(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return ConsumerRecord, tuple(self)


def _header_size(headers: list[tuple[str, bytes | None]]) -> int:
    return sum(len(name.encode()) + len(data or b"") for name, data in headers) if headers else -1


class ConsumerRecordRun(RecordRun):
    """The records of one batch, as kafka-python's tuples."""

    __slots__ = ()

    @staticmethod
    def make_records(
        columns: Any, values: Iterator[Any], partition: TopicPartition, batch: Batch
    ) -> Iterator[Any]:
        """Return an iterator that makes a record of each row when it is taken."""
        headers = columns.headers
        return map(
            LogConsumerRecord,
            zip(
                repeat(partition.topic),
                repeat(partition.partition),
                repeat(batch.leader_epoch),
                columns.offsets,
                columns.times,
                repeat(int(batch.is_log_append_time)),
                columns.keys,
                values,
                repeat(NO_HEADERS) if headers is None else headers,
                repeat(None),
                columns.key_sizes,
                columns.value_sizes,
                repeat(-1) if headers is None else map(_header_size, headers),
            ),
        )


class ConsumerRecordDecoder(RecordDecoder):
    """Returns kafka-python's tuples in place of embedlog's."""

    rows_type = SizedRowLists
    run_type = ConsumerRecordRun
