"""What became of batches: counted, told to whoever waits, and called back."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from embedlog.producer import sender
from embedlog.producer.future import Callback, Delivery, Parcel, run_callback

if TYPE_CHECKING:
    from embedlog.producer import Producer
    from embedlog.producer.queue import Gathering

COUNTS = ("records", "batches", "bytes", "errors", "retries", "duplicates")


class Reports:
    """Collects outcomes while a queue is drained; tells them when no lock is held."""

    def __init__(self, producer: Producer) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        self._producer = producer
        self._settled: deque[tuple[Delivery, int]] = deque()
        """With the bytes of memory that are free again."""
        self._called: deque[Delivery] = deque()
        self._calling = threading.Lock()
        self._caller: int | None = None

    def retried(self) -> None:
        """Count it, and have the sender try again."""
        self.counts["retries"] += 1
        self._producer.sender.wake()

    def written_alone(self, gathering: Gathering, size: int, duplicate: bool) -> None:
        """Count a record that needed no parcel, and tell of it unless it is to be called back."""
        counts, room = self.counts, self._producer.room
        counts["batches"] += 1
        counts["records"] += 1
        counts["bytes"] += size
        counts["duplicates"] += duplicate
        with room.lock:
            room.buffered -= gathering.granted
            if room.waiters:
                room.wake_locked()
            if gathering.callbacks:
                self._settled.append((gathering, 0))

    def settled(self, parcel: Parcel) -> None:
        """Count a batch that was written or failed; the rest is done after the drain."""
        counts = self.counts
        if parcel.receipt is not None:
            counts["batches"] += 1
            counts["records"] += parcel.count
            counts["duplicates"] += parcel.receipt.duplicate
            counts["bytes"] += parcel.size
        elif parcel.error is not None:
            self._count_errors(parcel.delivery.queue.topic, parcel.count, parcel.error)
        self._settled.append((parcel.delivery, parcel.size))

    def refused(self, gathering: Gathering, count: int, error: BaseException) -> None:
        """Count records of which no batch could be made."""
        self._count_errors(gathering.queue.topic, count, error)
        self._producer.room.release(gathering.granted)
        self._settled.append((gathering, 0))

    def _count_errors(self, topic: str, count: int, error: BaseException) -> None:
        self.counts["errors"] += count
        if self._producer.config.acks == 0:
            sender.LOGGER.error("%d records to %s were lost: %s", count, topic, error)

    def tell(self) -> None:
        """Tell whoever waits what was settled, and call back.  Under no lock."""
        settled = self._settled
        if settled:
            room, called = self._producer.room, self._called
            with room.lock:
                size = 0
                while settled:
                    delivery, its = settled.popleft()
                    size += its
                    if delivery.callbacks and (not called or called[-1] is not delivery):
                        called.append(delivery)
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
