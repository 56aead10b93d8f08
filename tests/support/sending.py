"""Calls of a producer, for the check of their interleavings, and what must be true after."""

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
PLACE = "embedlog.producer"
NEVER = 3_600_000
"""Milliseconds of lingering: the producer's own thread has nothing to do."""


class Asked(NamedTuple):
    """A record as it was given to the producer; ``partition`` is None if it may be any."""

    value: bytes
    key: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    partition: int | None
    timestamp: int | None


class Scene:
    """A producer, the calls made to it, and what they returned."""

    def __init__(self, root: Root, **config: Any) -> None:
        self.producer = Producer(root, linger_ms=NEVER, **config)
        self.sent: list[tuple[Asked, Any]] = []
        self.batches: list[tuple[list[Asked], Any]] = []
        self.called: list[Any] = []
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
        where = partition
        if where is None and key is not None:
            where = partition_for_key(key, PARTITIONS)
        self.sent.append((Asked(value, key, headers, where, timestamp), future))
        future.add_both(self.called.append)
        return future

    # The calls

    def send_plain(self) -> None:
        self._send(b"key-1")

    def send_without_key(self) -> None:
        self._send()

    def send_and_wait(self) -> None:
        self._send(b"key-2").result()

    def send_with_everything(self) -> None:
        # Not where its key would go.
        other = (partition_for_key(b"key-3", PARTITIONS) + 1) % PARTITIONS
        self._send(b"key-3", (("h", b"1"), ("i", b"2")), other, 77).result()

    def send_batch(self) -> None:
        values = [self._value() for _ in range(3)]
        keys = [b"a", b"b", b"c"]
        asked = [
            Asked(value, key, (("b", key),), partition_for_key(key, PARTITIONS), 88)
            for value, key in zip(values, keys, strict=True)
        ]
        headers = [list(one.headers) for one in asked]
        future = self.producer.send_batch(TOPIC, values, keys, headers, 88)
        self.batches.append((asked, future))
        future.result()

    def append_table(self) -> None:
        values = [self._value() for _ in range(3)]
        asked = [Asked(value, None, (), 1, None) for value in values]
        table = pa.table({"value": pa.array(values, pa.binary())})
        future = self.producer.append_table(TOPIC, table, partition=1)
        self.batches.append((asked, future))
        future.result()

    def flush(self) -> None:
        before = list(self.sent)
        self.producer.flush()
        for asked, future in before:
            assert future.done(), f"{asked} was not written by a flush that came after it"

    def wait_for_all(self) -> None:
        for _, future in list(self.sent):
            future.result()

    def drain(self) -> None:
        """What the producer's own thread does when records have lingered."""
        for queue in list(self.producer._queues.values()):
            queue.due_at()
            queue.pending()
            queue.drain_if_free(None)

    def look(self) -> None:
        self.producer.metrics()
        for queue in list(self.producer._queues.values()):
            queue.unsent_records()
            queue.settings.refresh()
        self.producer.last_sequence(TOPIC, 0)

    def close(self) -> None:
        self.producer.close()

    # What must be true

    def judge(self, root: Root, before: list[int]) -> None:
        """Everything acknowledged is there as it was sent, once; nothing else is."""
        self.producer.flush()
        found = {
            (partition, row[0]): row
            for partition in range(PARTITIONS)
            for row in rows(root.partition(TOPIC, partition), before[partition])
            if row[0] >= before[partition]
        }
        for asked, future in self.sent:
            error = future.exception
            if error is not None:
                assert isinstance(error, ClosedError), error
                assert all(row[3] != asked.value for row in found.values())
                continue
            where = future.value
            assert where is not None, f"{asked} was neither written nor refused"
            row = found.pop((where.partition, where.offset))
            _compare(asked, where.partition, row)
            assert where.timestamp == row[1]
        for all_asked, future in self.batches:
            self._judge_batch(all_asked, future, found)
        assert not found, f"nobody sent {found}"
        metrics = self.producer.metrics()
        assert metrics["buffered"] == metrics["duplicates"] == 0
        failed = sum(future.failed() for _, future in self.sent)
        assert failed or metrics["records"] == len(self.sent) + 3 * len(self.batches)
        outcomes = [future.exception or future.value for _, future in self.sent]
        assert sorted(map(str, self.called)) == sorted(map(str, outcomes))

    def _judge_batch(self, all_asked: list[Asked], future: Any, found: dict[Any, Any]) -> None:
        if future.failed():
            assert isinstance(future.exception, ClosedError), future.exception
        by_value = {asked.value: asked for asked in all_asked}
        for part in future.written():
            for offset in range(part.base_offset, part.next_offset):
                row = found.pop((part.partition, offset))
                _compare(by_value.pop(row[3]), part.partition, row)
        assert future.failed() or not by_value, by_value


def _compare(asked: Asked, partition: int, row: Any) -> None:
    _, timestamp, key, value, headers = row
    got = Asked(value, key, tuple(headers), partition, timestamp)
    wanted = asked._replace(
        partition=partition if asked.partition is None else asked.partition,
        timestamp=timestamp if asked.timestamp is None else asked.timestamp,
    )
    assert got == wanted


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
    "look",
    "close",
)


def make_root(root: Root) -> None:
    root.create_topic(TOPIC, PARTITIONS, TopicConfig())


def check(root: Root, first: str, second: str, lines: Callable[[int], Any]) -> int:
    """Stop a call at the lines chosen of all it has, run another one there, and judge.

    Both for a producer that has nothing to write and for one that has a record.
    Returns at how many lines it was.
    """
    total = 0
    for waiting in (False, True):
        for line in lines(_run(root, first, second, NEVER, waiting)):
            _run(root, first, second, line, waiting)
            total += 1
    return total


def _run(root: Root, first: str, second: str, line: int, waiting: bool) -> int:
    before = [root.partition(TOPIC, number).end_offset() for number in range(PARTITIONS)]
    scene = Scene(root)
    try:
        if waiting:
            scene.send_plain()
        pair = Pair(getattr(scene, first), getattr(scene, second), PLACE, line)
        pair.run()
        try:
            for error in pair.errors:
                if error is not None and not isinstance(error, ClosedError):
                    raise error
            scene.judge(root, before)
        except BaseException as error:
            error.add_note(f"{second} while {first} stood at {pair.where}, {waiting=}")
            raise
    finally:
        scene.producer.close()
    return pair.seen
