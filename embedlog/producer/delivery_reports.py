"""What became of batches: counted, told to whoever waits, and called back."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from embedlog.producer import sender
from embedlog.producer.future import Callback, Delivery, ProducerBatch, run_callback

if TYPE_CHECKING:
    from embedlog.producer import Producer
    from embedlog.producer.topic_queue import OpenBatch

COUNTS = ("records", "batches", "bytes", "errors", "retries", "duplicates")


class DeliveryReports:
    """Collects outcomes while a queue is drained; tells them when no lock is held."""

    def __init__(self, producer: Producer) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        self._producer = producer
        self._settled: deque[tuple[Delivery, int]] = deque()
        """With the bytes of memory that are free again."""
        self._called: deque[Delivery] = deque()
        self._calling = threading.Lock()
        self._caller: int | None = None

    def count(self, **more: int) -> None:
        """Add to the counts; queues are drained at the same time, by several threads."""
        with self._producer.lock:
            for name, number in more.items():
                self.counts[name] += number

    def retried(self) -> None:
        """Count it, and have the sender try again."""
        self.count(retries=1)
        self._producer.sender.wake()

    def written_alone(self, gathering: OpenBatch, size: int, duplicate: bool) -> None:
        """Count a record that needed no parcel, and tell of it unless it is to be called back."""
        counts, room = self.counts, self._producer.room
        with room.lock:
            counts["batches"] += 1
            counts["records"] += 1
            counts["bytes"] += size
            if duplicate:
                counts["duplicates"] += 1
            room.buffered -= gathering.granted
            if room.waiters:
                room.wake_locked()
            if gathering.callbacks:
                self._settled.append((gathering, 0))

    def settled(self, parcel: ProducerBatch) -> None:
        """Count a batch that was written or failed; the rest is done after the drain."""
        receipt, records = parcel.receipt, parcel.count
        if receipt is not None:
            duplicates = int(receipt.duplicate)
            self.count(batches=1, records=records, duplicates=duplicates, bytes=parcel.size)
        elif parcel.error is not None:
            self._count_errors(parcel.delivery.queue.topic, parcel.count, parcel.error)
        self._settled.append((parcel.delivery, parcel.size))

    def refused(self, gathering: OpenBatch, count: int, error: BaseException) -> None:
        """Count records of which no batch could be made."""
        self._count_errors(gathering.queue.topic, count, error)
        self._producer.room.release(gathering.granted)
        self._settled.append((gathering, 0))

    def _count_errors(self, topic: str, count: int, error: BaseException) -> None:
        self.count(errors=count)
        if self._producer.config.acks == 0:
            sender.LOGGER.error("%d records to %s were lost: %s", count, topic, error)

    def tell(self) -> None:
        """Tell whoever waits what was settled, and call back.  Under no lock."""
        settled = self._settled
        if settled:
            room, called = self._producer.room, self._called
            with room.lock:
                size, last = 0, None
                while settled:
                    delivery, its = settled.popleft()
                    size += its
                    if delivery.callbacks and delivery is not last:
                        called.append(delivery)
                        last = delivery
                room.buffered -= size
                if room.waiters:
                    room.wake_locked()
        if self._called:
            self.call_back()

    def call_back(self, wait: bool = False) -> None:
        """Run the callbacks that are due, in order; one thread at a time (G9)."""
        me = threading.get_ident()
        if self._caller == me:
            return
        while self._called or wait:
            if not self._calling.acquire(blocking=wait):
                return
            self._caller = me
            try:
                while self._called:
                    self._call_back_for(self._called.popleft())
            finally:
                self._caller = None
                self._calling.release()
            wait = False

    def _call_back_for(self, delivery: Delivery) -> None:
        with self._producer.lock:
            due: list[Callback] = []
            left: list[Callback] = []
            for callback in delivery.callbacks:
                future = callback[0]
                done = delivery.outcome(future._row) is not None
                (due if done else left).append(callback)
            delivery.callbacks = left
        for callback in due:
            run_callback(callback)
