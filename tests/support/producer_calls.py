"""Runs calls of a producer in all interleavings of two threads, and checks the log afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa

from embedlog.config import TopicConfig
from embedlog.errors import ClosedError
from embedlog.partitioner import partition_for_key
from embedlog.producer import Producer
from embedlog.root.root import Root
from support.interleaving import Pair
from support.roots import rows

TOPIC, PARTITIONS = "t", 3
PACKAGE = "embedlog.producer"
NEVER = 3_600_000
"""linger_ms in milliseconds: the background thread of the producer has nothing to do."""


class SentRecord(NamedTuple):
    """A record as it was passed to the producer; ``partition`` is None if any is correct."""

    value: bytes
    key: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    partition: int | None
    timestamp: int | None


def totals(producer: Producer) -> dict[str, float]:
    """Return the metrics of a producer that are not of one topic."""
    return producer.metrics()["producer-metrics"]


def buffered_bytes(producer: Producer) -> float:
    """Return how many bytes the unwritten records of a producer hold."""
    counts = totals(producer)
    return counts["buffer-total-bytes"] - counts["buffer-available-bytes"]


class ProducerCalls:
    """A producer, the calls that were made, and what they returned."""

    def __init__(self, root: Root, **config: Any) -> None:
        self.producer = Producer(root, linger_ms=NEVER, **config)
        self.sent: list[tuple[SentRecord, Any]] = []
        self.batches: list[tuple[list[SentRecord], Any]] = []
        self.outcomes_seen: list[Any] = []
        self._number = 0
        for partition in range(PARTITIONS):
            self._send(partition=partition).result()

    def _value(self) -> bytes:
        self._number += 1
        return b"%d" % self._number

    def _send(
        self,
        key: bytes | None = None,
        headers: tuple[tuple[str, bytes], ...] = (),
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> Any:
        value = self._value()
        future = self.producer.send(TOPIC, value, key, list(headers), partition, timestamp)
        if partition is None and key is not None:
            partition = partition_for_key(key, PARTITIONS)
        self.sent.append((SentRecord(value, key, headers, partition, timestamp), future))
        future.add_both(self.outcomes_seen.append)
        return future

    # Calls

    def send_plain(self) -> None:
        self._send(b"key-1")

    def send_without_key(self) -> None:
        self._send()

    def send_and_wait(self) -> None:
        self._send(b"key-2").result()

    def send_with_everything(self) -> None:
        # Not the partition of its key.
        other = (partition_for_key(b"key-3", PARTITIONS) + 1) % PARTITIONS
        self._send(b"key-3", (("h", b"1"), ("i", b"2")), other, 77).result()

    def send_batch(self) -> None:
        values = [self._value() for _ in range(3)]
        keys = [b"a", b"b", b"c"]
        records = [
            SentRecord(value, key, (("b", key),), partition_for_key(key, PARTITIONS), 88)
            for value, key in zip(values, keys, strict=True)
        ]
        headers = [list(record.headers) for record in records]
        future = self.producer.send_batch(TOPIC, values, keys, headers, 88)
        self.batches.append((records, future))
        future.result()

    def append_table(self) -> None:
        values = [self._value() for _ in range(3)]
        records = [SentRecord(value, None, (), 1, None) for value in values]
        table = pa.table({"value": pa.array(values, pa.binary())})
        future = self.producer.append_table(TOPIC, table, partition=1)
        self.batches.append((records, future))
        future.result()

    def flush(self) -> None:
        before = list(self.sent)
        self.producer.flush()
        for record, future in before:
            assert future.done(), f"{record} was not written by a later flush"

    def wait_for_all(self) -> None:
        for _, future in list(self.sent):
            future.result()

    def drain(self) -> None:
        """Do what the background thread does when records have lingered."""
        for queue in list(self.producer._queues.values()):
            queue.due_at()
            queue.drain(wait=False)

    def inspect(self) -> None:
        self.producer.metrics()
        for queue in list(self.producer._queues.values()):
            queue.unsent_records()
            queue.settings.refresh()
        self.producer.last_sequence(TOPIC, 0)

    def close(self) -> None:
        self.producer.close()

    def give_up(self) -> None:
        self.producer.close(0)

    # Checks

    def check_log(self, root: Root, before: list[int]) -> None:
        """Check that the log has every acknowledged record once, as it was sent, and no other."""
        self.producer.flush()
        written_rows = {
            (partition, row[0]): row
            for partition in range(PARTITIONS)
            for row in rows(root.partition(TOPIC, partition), before[partition])
            if row[0] >= before[partition]
        }
        for record, future in self.sent:
            error = future.exception
            if error is not None:
                assert isinstance(error, ClosedError), error
                assert all(row[3] != record.value for row in written_rows.values())
                continue
            metadata = future.value
            assert metadata is not None, f"{record} was neither written nor failed"
            row = written_rows.pop((metadata.partition, metadata.offset))
            _assert_equal(record, metadata.partition, row)
            assert metadata.timestamp == row[1]
        for records, future in self.batches:
            self._check_batch(records, future, written_rows)
        assert not written_rows, f"no call sent {written_rows}"
        counts = totals(self.producer)
        assert buffered_bytes(self.producer) == counts["batch-duplicate-total"] == 0
        failed = sum(future.failed() for _, future in self.sent)
        assert failed or counts["record-send-total"] == len(self.sent) + 3 * len(self.batches)
        outcomes = [future.exception or future.value for _, future in self.sent]
        assert sorted(map(str, self.outcomes_seen)) == sorted(map(str, outcomes))

    def _check_batch(
        self, records: list[SentRecord], future: Any, written_rows: dict[Any, Any]
    ) -> None:
        if future.failed():
            assert isinstance(future.exception, ClosedError), future.exception
        by_value = {record.value: record for record in records}
        for part in future.written():
            for offset in range(part.base_offset, part.next_offset):
                row = written_rows.pop((part.partition, offset))
                _assert_equal(by_value.pop(row[3]), part.partition, row)
        assert future.failed() or not by_value, by_value


def _assert_equal(record: SentRecord, partition: int, row: Any) -> None:
    _, timestamp, key, value, headers = row
    got = SentRecord(value, key, tuple(headers), partition, timestamp)
    expected = record._replace(
        partition=partition if record.partition is None else record.partition,
        timestamp=timestamp if record.timestamp is None else record.timestamp,
    )
    assert got == expected


CALLS: tuple[str, ...] = (
    "send_plain",
    "send_without_key",
    "send_and_wait",
    "send_with_everything",
    "send_batch",
    "append_table",
    "flush",
    "wait_for_all",
    "drain",
    "inspect",
    "close",
    "give_up",
)


def make_root(root: Root) -> None:
    root.create_topic(TOPIC, PARTITIONS, TopicConfig())


def check(root: Root, first: str, second: str, lines: Callable[[int], Any]) -> int:
    """Stop ``first`` at some of its lines, make the call ``second`` there, and check the log.

    Runs with a producer that has nothing to write, and with one that has a record.  ``lines``
    returns the lines to stop at, from their number.  Returns at how many lines it stopped.
    """
    total = 0
    for waiting in (False, True):
        for line in lines(_run(root, first, second, NEVER, waiting)):
            _run(root, first, second, line, waiting)
            total += 1
    return total


def _run(root: Root, first: str, second: str, line: int, waiting: bool) -> int:
    before = [root.partition(TOPIC, number).end_offset() for number in range(PARTITIONS)]
    calls = ProducerCalls(root)
    try:
        if waiting:
            calls.send_plain()
        pair = Pair(getattr(calls, first), getattr(calls, second), PACKAGE, line)
        pair.run()
        try:
            for error in pair.errors:
                if error is not None and not isinstance(error, ClosedError):
                    raise error
            calls.check_log(root, before)
        except BaseException as error:
            error.add_note(f"{second} while {first} was stopped at {pair.stopped_at}, {waiting=}")
            raise
    finally:
        calls.producer.close()
    return pair.lines_seen
