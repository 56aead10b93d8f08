"""One topic's records between `send` and the log: gathered, and handed on as batches."""

from __future__ import annotations

import logging
import threading
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any

from embedlog.batch import BatchLimits
from embedlog.catalog import TopicInfo
from embedlog.errors import (
    IllegalStateError,
    InvalidRecordError,
    RecordTooLargeError,
    TimeoutError,  # noqa: A004 - it is one
    UnknownTopicOrPartitionError,
)
from embedlog.partition import producer_state
from embedlog.partition.producer_state import REMEMBERED
from embedlog.partitioner import RoundRobinPartitioner
from embedlog.producer import send_fast
from embedlog.producer.future import Callback, Delivery, ProducerBatch
from embedlog.producer.partition_rows import Batches, RowPartitioner
from embedlog.producer.partition_writer import PartitionWriter, closed_early
from embedlog.producer.row_batches import PIECE_BYTES, Rows
from embedlog.record import Appended

if TYPE_CHECKING:
    from embedlog.producer import Producer

COLUMN_BYTES = 1 << 20
"""How large batches of columns are, unless somebody asked: more rows share a batch's cost."""
WRITE_BYTES = 2 << 20
"""The most that one append writes of a table.  Larger writes took longer a byte where it was
measured (Linux 6.18, ext4): 5 MiB at once from a tenth longer to three times as long."""
HEAD_BYTES = 1024
"""More than a batch takes besides its records."""
ONE_BYTES = 512
"""More than a batch of one record takes besides its key and value."""
KAFKA_BYTES = 96
"""The same as Kafka counts (`batch.limits`)."""


class OpenBatch(Delivery):
    """Records that `send` collects, column by column, until they are drained."""

    __slots__ = ("chosen", "granted", "headers", "keys", "left", "opened", "values")

    def __init__(self, queue: TopicQueue) -> None:
        # Not by super().__init__, whose fields these are: there is one of it for every record
        # somebody waits for.
        self.queue, self.deadline = queue, 0.0
        self.parcels, self.starts, self.timestamps, self.callbacks = [], [], [], []
        self.order = self.places = self.error = self.alone = None
        self.sealed = False
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] = []
        self.headers: dict[int, Any] = {}
        self.chosen: dict[int, int] = {}
        self.granted = self.left = 0
        """Bytes of memory it was given, and how many of them are free: see `Room`."""
        self.opened = 0.0

    @property
    def size(self) -> int:
        """About how many bytes were gathered."""
        return self.granted - self.left

    def add_row(
        self,
        value: bytes | None,
        key: bytes | None,
        timestamp: int,
        headers: Any,
        partition: int | None,
    ) -> int:
        """Add a record and return its row; `send` does the same itself for what most have."""
        row = len(self.values)
        if headers:
            self.headers[row] = headers
        if partition is not None:
            self.chosen[row] = partition
        self.keys.append(key)
        self.timestamps.append(timestamp)
        # Last: `trim` takes a record that has no value yet for one that was interrupted.
        self.values.append(value)
        return row

    def trim(self) -> None:
        """Forget the record of a `send` that was interrupted: some columns have it, some not."""
        count = min(len(self.values), len(self.keys), len(self.timestamps))
        for column in (self.values, self.keys, self.timestamps):
            del column[count:]
        for sparse in (self.headers, self.chosen):
            sparse.pop(count, None)

    def rows(self) -> Rows:
        """Return what was gathered."""
        headers = None
        if self.headers:
            headers = [self.headers.get(row) for row in range(len(self.values))]
        keys = None if self.keys.count(None) == len(self.keys) else self.keys
        return Rows(self.values, keys, self.timestamps, headers)

    def seal(self) -> None:
        """Forget the records: they are in batches now, and no more come."""
        self.values = self.keys = []
        self.headers = self.chosen = {}
        self.sealed = True


class TopicQueue:
    """What one producer has to say to one topic.

    ``open`` is guarded by the producer's lock; everything else by ``draining``,
    under which batches are made and appended, so that they stay in order.
    """

    def __init__(self, producer: Producer, topic: str) -> None:
        self.producer, self.topic = producer, topic
        self.draining = threading.Lock()
        self.full: deque[OpenBatch] = deque()
        self.open: OpenBatch = OpenBatch(self)
        self.leaving: deque[OpenBatch] = deque()
        """Taken by a drain, and not in the lanes yet; filled under the producer's lock."""
        self.closed = False
        self.lanes: dict[int, PartitionWriter] = {}
        self.splitter = RowPartitioner(self)
        self.sticks = producer.config.partitioner_ignore_keys
        """Whether records with keys are spread like those without."""
        self.turns = RoundRobinPartitioner()
        self._retry_at = 0.0
        self._looking = threading.Lock()
        self.version = -1
        self.newest = producer.root.context.catalog.version
        self.info: TopicInfo
        self.full_at = self.limit = self.wide = self.share = self.surely_fits = 0
        self.limits: BatchLimits
        self.compression, self.plain = "none", True
        self.look()

    def look(self) -> TopicInfo:
        """Read the topic's settings and partitions anew; cheap while nothing changed (G5)."""
        # One thread at a time: a slow one may not put older settings over newer ones.
        with self._looking:
            version = self.producer.root.version()
            info: TopicInfo = self.producer.root.ensure_topic(self.topic)
            if info is not getattr(self, "info", None):
                self._take_settings(info)
            # Last, for `single` goes by it.  It is what was known before `ensure_topic`
            # looked: it may be older, never newer.
            self.version = version
            return info

    def _take_settings(self, info: TopicInfo) -> None:
        before: TopicInfo | None = getattr(self, "info", None)
        if before is not None and before.partitions != info.partitions:
            logging.getLogger(__name__).warning(
                "%s has %d partitions instead of %d: keys go elsewhere from now on",
                *(self.topic, info.partitions, before.partitions),
            )
        self.info, config = info, info.config
        self.compacts = config.compacts
        own = config.compression_type == "producer"
        self.compression = (self.producer.config if own else config).compression_type
        self.plain = self.compression == "none"
        self.limits = limits = BatchLimits(config.max_message_bytes, config.segment_bytes)
        self.surely_fits = min(limits.message - KAFKA_BYTES, limits.segment - ONE_BYTES)
        # A topic may refuse batches as large as the producer would make them.
        # What says which keys and values are null is not counted: two bits of 16 bytes and more.
        fits = min(
            limits.message - limits.message // 64 - KAFKA_BYTES,
            limits.segment - limits.segment // 64 - HEAD_BYTES,
        )
        self.limit = max(min(self.producer.config.batch_size, fits), 1)
        batch = max(self.producer.batch_size or COLUMN_BYTES, 1)
        self.wide = max(min(batch, fits), 1)
        self.full_at = min(self.limit * info.partitions, PIECE_BYTES)
        self.share = min(self.producer.room.share, self.full_at)

    # Draining

    def pending(self) -> bool:
        """Whether anything is on its way; a guess unless under ``draining``."""
        if self.full or self.leaving or self.open.values:
            return True
        return any(lane.waiting for lane in list(self.lanes.values()))

    def due_at(self) -> float | None:
        """When there is something to drain, on the monotonic clock; None: nothing."""
        times = [lane.retry_at for lane in list(self.lanes.values()) if lane.waiting]
        gathering = self.open
        if gathering.values:
            times.append(gathering.opened + self.producer.linger)
        if self.full or self.leaving:
            times.append(self._retry_at)
        return min(times, default=None)

    def drain(self, deadline: float | None = None) -> bool:
        """Write what was gathered, in this thread; False if another one kept at it too long."""
        left = None
        if deadline is None:
            self.draining.acquire()
        else:
            left = max(deadline - monotonic(), 0.0)
            if not self.draining.acquire(timeout=left):
                return False
        try:
            if not send_fast.ship(self, left):
                self._drain_rest(left)
        finally:
            self.draining.release()
        self.producer.reports.tell()
        return True

    def drain_if_free(self, patience: float | None) -> None:
        """Drain, unless another thread is at it, or writes have to wait."""
        if not self.draining.acquire(blocking=False):
            return
        try:
            self.drain_locked(patience)
        finally:
            self.draining.release()
        self.producer.reports.tell()

    def drain_locked(self, patience: float | None) -> None:
        """Pack what was gathered into batches, and append them."""
        if not send_fast.ship(self, patience):
            self._drain_rest(patience)

    def _drain_rest(self, patience: float | None) -> None:
        if self.leaving:
            self._put_back()
        if monotonic() >= self._retry_at:
            self._take()
            # In order: what cannot be made batches now holds up what comes after it.
            while self.leaving and self._pack(self.leaving[0]):
                self.leaving.popleft()
            if self.leaving:
                self._put_back()
        for lane in list(self.lanes.values()):
            if lane.waiting:
                lane.ship(patience)
        if self.producer.abandoned:
            self.abandon_locked()

    def renew(self) -> None:
        """Under the producer's lock: begin a new gathering; the last one is to be drained."""
        self.full.append(self.open)
        self.open = OpenBatch(self)

    def _take(self) -> None:
        with self.producer.lock:
            self.leaving.extend(self.full)
            self.full.clear()
            if self.open.values:
                self.leaving.append(self.open)
                self.open = OpenBatch(self)

    def _put_back(self) -> None:
        """Bring back what a drain took and could not pack, or was interrupted at."""
        with self.producer.lock:
            while self.leaving:
                gathering = self.leaving[-1]
                if gathering.sealed:
                    self._put_in_lanes(gathering)
                else:
                    gathering.parcels, gathering.starts = [], []
                    self.full.appendleft(gathering)
                self.leaving.pop()

    def _pack(self, gathering: OpenBatch) -> bool:
        """Make batches of what was gathered; what cannot be made one fails.

        Returns False if it is to be tried again later.
        """
        try:
            info = self.look()
            rows = gathering.rows()
            self.check_keys(rows.keys, len(rows.values))
            gathering.order, batches = self.splitter.split(rows, gathering.size, gathering.chosen)
            found = list(batches)
            for partition in {partition for partition, _ in found}:
                self.lane(info, partition)
        except Exception as error:  # noqa: BLE001 - kept, and raised by the futures
            return self._not_packed(gathering, error)
        written = sum(gathering.add(*one).size for one in found)
        self.producer.room.release(gathering.granted - written)
        gathering.seal()
        self._put_in_lanes(gathering)
        return True

    def _put_in_lanes(self, gathering: OpenBatch) -> None:
        """Hand its batches on, but for those that were before an interruption."""
        for parcel in gathering.parcels:
            waiting = self.lanes[parcel.partition].waiting
            if not parcel.settled() and parcel not in waiting:
                waiting.append(parcel)

    def _not_packed(self, gathering: OpenBatch, error: Exception) -> bool:
        if getattr(error, "retriable", False) and monotonic() < gathering.deadline:
            self._retry_at = monotonic() + self.producer.config.retry_backoff_ms / 1000
            self.producer.sender.wake()
            return False
        count = len(gathering.values)
        gathering.error = error
        gathering.seal()
        self.producer.reports.refused(gathering, count, error)
        return True

    def lane(self, info: TopicInfo, partition: int) -> PartitionWriter:
        """Return the way to one partition."""
        log = self.producer.root.partition(self.topic, partition)
        lane = self.lanes.get(partition)
        if lane is None or lane.log is not log:
            if lane is not None:
                lane.ship()
                lane.give_up(_deleted(self.topic, partition))
            lane = self.lanes[partition] = PartitionWriter(self.producer, log)
        return lane

    def check_keys(self, keys: Any, count: int) -> None:
        """Refuse records without a key where only the last of each key is kept (A6).

        Raises:
            InvalidRecordError: ``indices`` are the records at fault.
        """
        if not self.info.config.compacts or (keys is not None and None not in keys):
            return
        indices = [row for row in range(count) if keys is None or keys[row] is None]
        raise no_key(self.topic, indices)

    # Whole batches

    def deliver(self, batches: Batches, counted: tuple[int, int, int] | None) -> Delivery:
        """Append batches now, in this thread, after what was gathered before them.

        Args:
            batches: With the partition of each.
            counted: The partition, the number of the first record, and how many
                there are, if the application numbers them.
        """
        delivery = Delivery(self, monotonic() + self.producer.patience)
        try:
            with self.draining:
                self.drain_locked(None)
                if counted is None:
                    self._hand_on(delivery, batches)
                else:
                    self._hand_on_counted(delivery, batches, *counted)
        finally:
            delivery.sealed = True
            self.producer.reports.tell()
        return delivery

    def _hand_on(self, delivery: Delivery, batches: Batches) -> None:
        lane = None
        for partition, encoded in batches:
            if lane is None or lane.log.partition != partition:
                lane = self.lane(self.info, partition)
            if _full(lane, encoded.size):
                self._ship_all(lane)
                if _hopeless(delivery):
                    return
            self._put(lane, delivery.add(partition, encoded))
        for lane in self.lanes.values():
            if lane.waiting:
                lane.ship()

    def _hand_on_counted(
        self, delivery: Delivery, batches: Batches, partition: int, first: int, count: int
    ) -> None:
        lane = self.lane(self.info, partition)
        self._ship_all(lane)
        old = self._written_before(lane, first, count)
        for _, encoded in batches:
            if _full(lane, encoded.size):
                self._ship_all(lane)
                if _hopeless(delivery):
                    return
            parcel = delivery.add(partition, encoded)
            parcel.sequence, parcel.explicit = first, True
            if first + parcel.count <= old:
                parcel.encoded, parcel.receipt = None, Appended(-1, -1, None, True)
            else:
                self._put(lane, parcel)
            first = producer_state.after(first, parcel.count)
        lane.ship()

    def _put(self, lane: PartitionWriter, parcel: ProducerBatch) -> None:
        self.producer.room.hold(parcel.size)
        lane.waiting.append(parcel)

    def _written_before(self, lane: PartitionWriter, first: int, count: int) -> int:
        """Return the number below which the log has everything, though no longer batch by batch.

        Only for a call that reaches the batches it does remember (G16): then
        this is the call whose answer was lost, not one that began too low.
        """
        found = lane.begin()
        if found is None or not found.batches:
            return first
        oldest = found.batches[0].first_sequence
        return oldest if first < oldest < first + count else first

    def _ship_all(self, lane: PartitionWriter) -> None:
        """Append what waits before more is encoded: memory stays small."""
        lane.ship()
        while lane.waiting:
            if self.producer.abandoned:
                lane.give_up(closed_early(self.topic))
                return
            self.producer.room.pause(lane.retry_at - monotonic())
            lane.ship()

    # Waiting and giving up

    def progress(self, deadline: float | None) -> None:
        """Wait until it may be worth trying again."""
        due = self.due_at()
        now = monotonic()
        until = now + 0.05 if due is None else due
        if deadline is not None:
            until = min(until, deadline)
        self.producer.room.pause(until - now)

    def settle_all(self, deadline: float | None) -> None:
        """Return once all that was sent before is written or failed (G10).

        Raises:
            TimeoutError: The deadline passed before.
        """
        with self.producer.lock:
            mine: list[Any] = [*self.leaving, *self.full]
            if self.open.values:
                mine.append(self.open)
        drained = self.drain(deadline)
        mine += [parcel for lane in list(self.lanes.values()) for parcel in tuple(lane.waiting)]
        while not (drained and all(each.settled() for each in mine)):
            if deadline is not None and monotonic() >= deadline:
                raise TimeoutError(
                    "not everything was written in time",
                    topic=self.topic,
                    todo="it is still on its way; flush again",
                )
            self.progress(deadline)
            drained = self.drain(deadline)

    def register(self, callback: Callback) -> bool:
        """Keep a callback for later; False if its record is done."""
        future = callback[0]
        with self.producer.lock:
            if future._delivery.outcome(future._row) is not None:
                return False
            future._delivery.callbacks.append(callback)
            return True

    def count(self) -> int:
        """Return how many records are on their way."""
        gatherings = [*self.leaving, *self.full, self.open]
        lanes = list(self.lanes.values())
        return sum(len(one.values) for one in gatherings) + sum(
            parcel.count for lane in lanes for parcel in tuple(lane.waiting)
        )

    def disown(self) -> None:
        """In a forked child: fail what the parent will write."""
        error = IllegalStateError(
            "the record was sent before the fork", topic=self.topic, todo="the parent writes it"
        )
        for gathering in (*self.leaving, *self.full, self.open):
            gathering.error = error
        for lane in self.lanes.values():
            for parcel in lane.waiting:
                parcel.error = error

    def abandon(self) -> None:
        """Fail everything that is not written; what another thread is writing, after that."""
        self._close()
        if self.draining.acquire(timeout=0.1):
            try:
                self.abandon_locked()
            finally:
                self.draining.release()

    def abandon_locked(self) -> None:
        """Fail what waits in the lanes."""
        self._put_back()
        self._close()
        for lane in self.lanes.values():
            lane.give_up(closed_early(self.topic))

    def _close(self) -> None:
        """Fail what was gathered, and take no more."""
        with self.producer.lock:
            left = [*self.full, self.open]
            self.full.clear()
            self.open, self.closed = OpenBatch(self), True
        error = closed_early(self.topic)
        for gathering in left:
            if gathering.values:
                count = len(gathering.values)
                gathering.error = error
                gathering.seal()
                self.producer.reports.refused(gathering, count, error)


def no_key(topic: str, indices: list[int]) -> InvalidRecordError:
    """Say which records cannot be compacted (A6)."""
    return InvalidRecordError(
        f"records {indices[:20]}{'…' if len(indices) > 20 else ''} have no key, "
        "and the topic keeps the last record of each key",
        todo="Give them keys",
        topic=topic,
        indices=indices,
    )


def _deleted(topic: str, partition: int) -> UnknownTopicOrPartitionError:
    return UnknownTopicOrPartitionError(
        "the topic was deleted before the record was written",
        topic=topic,
        partition=partition,
        todo="Send it again if the topic that has the name now is to have it",
    )


def _full(lane: PartitionWriter, size: int) -> bool:
    """Whether what waits is to be written before a batch of a size waits too."""
    waiting = lane.waiting
    if len(waiting) >= REMEMBERED:
        return True
    return bool(waiting) and sum(parcel.size for parcel in waiting) + size > WRITE_BYTES


def _hopeless(delivery: Delivery) -> bool:
    """Whether the rest need not be tried: a batch failed, and not for what is in it."""
    own = (RecordTooLargeError, InvalidRecordError)
    return any(
        each.error is not None and (each.explicit or not isinstance(each.error, own))
        for each in delivery.parcels[-REMEMBERED:]
    )
