"""``buffer_memory``: how much of it unwritten records hold, and who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from embedlog.batch import MAX_BATCH_BYTES, request_size
from embedlog.errors import BufferExhaustedError, ClosedError, RecordTooLargeError
from embedlog.producer.row_batches import PIECE_BYTES

if TYPE_CHECKING:
    from embedlog.producer import Producer
    from embedlog.producer.topic_queue import OpenBatch, TopicQueue

GRANT = 64 << 10
"""Memory is given to a gathering in shares of this size, so that few sends have to ask."""
PATIENCE = 0.05
"""Seconds a `send` that fills a batch waits for the partition before it leaves it to others."""
MOST_RECORD = MAX_BATCH_BYTES - (1 << 20)
REQUEST_BYTES = 81
"""The most that Kafka's producer counts for a record above what `buffer_memory` does."""


class BufferPool:
    """Counts bytes under ``lock``, which also guards what is gathered."""

    def __init__(self, producer: Producer) -> None:
        config = producer.config
        self.lock = threading.Lock()
        self.buffered = 0
        self._producer = producer
        self._progress = threading.Condition(self.lock)
        self.waiters = 0
        self._memory = config.buffer_memory
        self._block = config.max_block_ms / 1000
        self._largest = config.max_request_size
        self._surely_fits = min(self._largest - REQUEST_BYTES, MOST_RECORD)
        # Never more than a record that surely fits: then one that is too large always asks.
        self.share = max(min(GRANT, self._surely_fits), 0)

    def more(
        self,
        queue: TopicQueue,
        size: int,
        value: bytes | None,
        key: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
    ) -> tuple[OpenBatch, int]:
        """Under the lock: return where a record fits, and what is left there after it.

        Drains a gathering that is full, and waits for memory (G8); the lock is
        let go meanwhile.

        Raises:
            RecordTooLargeError: It never fits (G7).
            BufferExhaustedError: ``max_block_ms`` passed.
            ClosedError: The producer was closed.
        """
        if size > self._surely_fits:
            self._check_size(queue.topic, size, request_size(value, key, headers))
        gathering, share = queue.open, queue.share
        fits = size <= share <= self._memory - self.buffered
        if fits and not gathering.granted and not queue.closed:
            # The first of a gathering that has room, as every record somebody waits for is.
            self._grant(gathering, share)
            return gathering, share - size
        limit, drained = None, self._producer.synced
        while not queue.closed:
            gathering = queue.open
            if gathering.left >= size:
                return gathering, gathering.left - size
            if gathering.size >= queue.full_at and not drained:
                drained = True
                self._drain([queue])
            elif gathering.values and gathering.size + size > PIECE_BYTES:
                queue.renew()
            elif self._granted(queue, gathering, size):
                return gathering, gathering.left - size
            else:
                now = monotonic()
                limit = now + self._block if limit is None else limit
                self._wait_for_memory(queue.topic, limit - now)
        raise ClosedError("the producer was closed", topic=queue.topic)

    def _granted(self, queue: TopicQueue, gathering: OpenBatch, size: int) -> bool:
        """Give a gathering room for at least one record, if there is any."""
        until_full = queue.full_at - gathering.size
        share = min(self.share, until_full if until_full > 0 else GRANT)
        free = self._memory - self.buffered
        granted = min(max(size, share) - gathering.left, free)
        if gathering.left + granted < size:
            return False
        self._grant(gathering, granted)
        return True

    def _grant(self, gathering: OpenBatch, granted: int) -> None:
        self.buffered += granted
        gathering.granted += granted
        gathering.left += granted
        if not gathering.values:
            gathering.opened = now = monotonic()
            gathering.deadline = now + self._producer.patience
            # Later records need not: the thread sleeps only while nothing is gathered.
            if self._producer.sender.idle:
                self._producer.sender.wake()

    def _wait_for_memory(self, topic: str, left: float) -> None:
        if left <= 0:
            raise BufferExhaustedError(
                f"{self.buffered} of {self._memory} bytes of buffer_memory are unwritten "
                f"after max_block_ms {int(self._block * 1000)}",
                topic=topic,
                todo="flush, raise buffer_memory, or find out what holds the partition",
            )
        before = self.buffered
        self._drain(self._producer.queues(), min(left, PATIENCE))
        if self.buffered >= before:
            self._producer.sender.wake()
            self._wait(min(left, PATIENCE))

    def _drain(self, queues: list[TopicQueue], patience: float = PATIENCE) -> None:
        self.lock.release()
        try:
            for queue in queues:
                queue.drain_if_free(patience)
        finally:
            self.lock.acquire()

    def _check_size(self, topic: str, size: int, requested: int) -> None:
        if requested > self._largest:
            raise RecordTooLargeError(
                f"a record of {requested} bytes, as Kafka's producer counts them, is over "
                f"max_request_size {self._largest}",
                todo="raise max_request_size, and max.message.bytes of the topic",
                topic=topic,
            )
        if size > MOST_RECORD:
            raise RecordTooLargeError(
                f"a record of {size} bytes is larger than {MOST_RECORD}",
                todo="Send smaller records",
                topic=topic,
            )

    # Counting

    def hold(self, size: int) -> None:
        """Count bytes that are unwritten."""
        with self.lock:
            self.buffered += size

    def release(self, size: int) -> None:
        """Count bytes that are not any more."""
        with self.lock:
            self.buffered -= size

    def wake_locked(self) -> None:
        """Under the lock: something was settled; wake whoever waits."""
        self._progress.notify_all()

    # Waiting

    def pause(self, seconds: float) -> None:
        """Wait until something was settled, but not longer than this."""
        if seconds > 0:
            with self.lock:
                self._wait(min(seconds, 0.1))

    def _wait(self, seconds: float) -> None:
        self.waiters += 1
        try:
            self._progress.wait(seconds)
        finally:
            self.waiters -= 1
