"""The records that a process has polled and not committed: what is next, and what is done.

Records of one key are handled one after another, in their order; those without a key in any order.
A record that waits, for its time or for its next attempt, delays only its key.  The position of a
partition is its lowest offset that is not finished: what is finished above it is committed later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from embedlog.record import OffsetAndMetadata, Record, TopicPartition

Outputs = Sequence[tuple[Any, ...]]
"""Arguments of `Producer.send`, for each record that is sent."""


class InFlightRecord:
    """One record, from its poll until its offset is committed.

    Args:
        partition: Its partition.
        stored: The record with keys and values as they are stored, for a dead letter.
        record: What the handler gets.
        error: Why it cannot be deserialized.
        due: When it may be begun, by the monotonic clock; 0 is at once.
    """

    __slots__ = (
        *("attempts", "due", "error", "first_failed_ms", "key", "outputs", "partition"),
        *("record", "runner", "started", "stored"),
    )

    def __init__(
        self,
        partition: InFlightPartition,
        stored: Record,
        record: Record,
        error: Exception | None = None,
        due: float = 0.0,
    ) -> None:
        self.partition, self.stored, self.record = partition, stored, record
        self.error, self.due = error, due
        key = stored.key
        self.key: Any = key if key is None or type(key) is bytes else repr(key)
        self.attempts, self.first_failed_ms = 0, -1
        self.outputs: Outputs | None = None
        """What is sent when its offset is committed; None until it is finished."""
        self.started = 0.0
        """When this attempt began; 0 while there is none."""
        self.runner: Any = None
        """The id of the thread, or the task, that handles it; None once that was reported."""


class InFlightPartition:
    """The records of one partition that are in flight."""

    __slots__ = ("key", "paused", "records", "revoked", "running", "unfinished", "waiting")

    def __init__(self, key: TopicPartition) -> None:
        self.key = key
        self.records: deque[InFlightRecord] = deque()
        """All of them, in the order of offsets; the first ones may be finished."""
        self.waiting: dict[Any, deque[InFlightRecord]] = {}
        """Of each key that is worked on, the records that follow."""
        self.unfinished = self.running = 0
        self.paused = self.revoked = False


class Committable(NamedTuple):
    """What can be committed of a partition."""

    records: int
    """How many are finished, from the first one on."""
    position: OffsetAndMetadata
    outputs: Outputs


class InFlight:
    """All records in flight of one process; any thread may call it.

    Args:
        wake: Called when the thread that polls should look: nothing is left to do, a paused
            partition is half done, or a record failed for good.
        low: A paused partition with no more unfinished records is half done.
    """

    def __init__(self, wake: Callable[[], object], low: int) -> None:
        self.lock = threading.RLock()
        self.notify: Callable[[int], object] = lambda ready: None
        """Called under the lock when so many more records can be handled; a runner sets it."""
        self._wake, self._low = wake, low
        self._stopped = threading.Condition(self.lock)
        """Notified when a record stops running."""
        self._partitions: dict[TopicPartition, InFlightPartition] = {}
        self._ready: deque[InFlightRecord] = deque()
        self._delayed: list[tuple[float, int, InFlightRecord]] = []
        """A heap, by when they are due."""
        self._numbers = count()
        self.running: set[InFlightRecord] = set()
        self.unfinished = 0
        self._woken = False
        """Whether the thread that polls was woken, and has not looked since."""
        self.closed = False
        """Whether nothing further is begun."""
        self.error: BaseException | None = None
        """What ends the run."""

    # The thread that polls

    def partition(self, key: TopicPartition) -> InFlightPartition:
        """Return the records of a partition."""
        found = self._partitions.get(key)
        if found is None:
            found = self._partitions[key] = InFlightPartition(key)
        return found

    def partitions(self) -> list[InFlightPartition]:
        """Return all partitions with records since they were assigned."""
        return list(self._partitions.values())

    def add(self, records: Iterable[InFlightRecord]) -> None:
        """Add polled records, in the order of their offsets."""
        with self.lock:
            ready = 0
            for record in records:
                partition, key = record.partition, record.key
                partition.records.append(record)
                partition.unfinished += 1
                self.unfinished += 1
                if key is not None:
                    if key in partition.waiting:
                        partition.waiting[key].append(record)
                        continue
                    partition.waiting[key] = deque()
                ready += self._schedule(record)
            if ready:
                self.notify(ready)

    def _schedule(self, record: InFlightRecord) -> bool:
        """Have a record handled when it is due; return whether a runner must look at it."""
        if record.due > 0.0:
            heappush(self._delayed, (record.due, next(self._numbers), record))
            # A runner that sleeps until a later record is due must look again.
            return self._delayed[0][2] is record
        self._ready.append(record)
        return True

    def is_due(self) -> bool:
        """Whether to commit now, and not only in a while; the next change wakes again."""
        with self.lock:
            self._woken = False
            partitions = self._partitions.values()
            if not self.unfinished:
                return any(partition.records for partition in partitions)
            return any(map(self._is_half_done, partitions))

    def _is_half_done(self, partition: InFlightPartition) -> bool:
        """Whether a commit lets a paused partition be read again, or soon will."""
        done = partition.paused and partition.unfinished <= self._low
        return done and bool(partition.records) and partition.records[0].outputs is not None

    def committable(self) -> dict[TopicPartition, Committable]:
        """Return what is finished from the first record in flight of each partition on."""
        found = {}
        with self.lock:
            for partition in self._partitions.values():
                done, last = 0, None
                outputs: list[tuple[Any, ...]] = []
                for record in partition.records:
                    if record.outputs is None:
                        break
                    done, last = done + 1, record.stored
                    outputs += record.outputs
                if last is not None:
                    position = OffsetAndMetadata(last.offset + 1, "", last.leader_epoch)
                    found[partition.key] = Committable(done, position, outputs)
        return found

    def committed(self, committable: dict[TopicPartition, Committable]) -> None:
        """Forget what was committed."""
        with self.lock:
            for key, done in committable.items():
                for _ in range(done.records if key in self._partitions else 0):
                    self._partitions[key].records.popleft()

    def revoke(self, keys: Collection[TopicPartition], timeout: float) -> None:
        """Begin no further record of some partitions, and wait until those that run are finished.

        Args:
            keys: The partitions.
            timeout: Seconds after which those that still run are given up.
        """
        with self.lock:
            revoked = [self._partitions[key] for key in keys if key in self._partitions]
            for partition in revoked:
                partition.revoked = True
            self._stopped.wait_for(
                lambda: not any(partition.running for partition in revoked), timeout
            )

    def drop(self, keys: Collection[TopicPartition]) -> None:
        """Forget partitions; what is still handled of them does not count."""
        with self.lock:
            for key in keys:
                partition = self._partitions.pop(key, None)
                if partition is not None:
                    partition.revoked = True
                    self.unfinished -= partition.unfinished
            self._delayed = [each for each in self._delayed if not each[2].partition.revoked]
            heapify(self._delayed)

    def close(self) -> None:
        """Begin no further record, and let the runner end."""
        with self.lock:
            self.closed = True
            self.notify(1 << 20)

    # The threads or tasks that handle records

    def take(self, now: float) -> InFlightRecord | None:
        """Return a record to handle now, by the monotonic clock, or None; under the lock."""
        while self._delayed and self._delayed[0][0] <= now:
            self._ready.append(heappop(self._delayed)[2])
        while self._ready and not self.closed:
            record = self._ready.popleft()
            if not record.partition.revoked:
                record.partition.running += 1
                record.started = now
                self.running.add(record)
                return record
        return None

    def next_due(self) -> float | None:
        """Return when the next record is due; None if none waits for its time."""
        return self._delayed[0][0] if self._delayed else None

    def are_all_running_since(self, count: int, time: float) -> bool:
        """Whether so many records run, and all of them since before a time."""
        with self.lock:
            running = self.running
            return len(running) >= count and all(each.started < time for each in running)

    def has_ready(self) -> bool:
        """Whether there is a record to handle now, after a `take`."""
        return bool(self._ready)

    def timeout(self, busy: float, delayed: float) -> float | None:
        """Return how many seconds to poll for at most; None if nothing is in flight.

        Args:
            busy: While records are handled.
            delayed: While all of them wait for their time.
        """
        with self.lock:
            if not any(partition.records for partition in self._partitions.values()):
                return None
            return busy if self.running or self._ready else delayed

    def finish(self, record: InFlightRecord, outputs: Outputs) -> None:
        """Note that a record is handled, or given up; its key goes on."""
        partition = record.partition
        with self.lock:
            self._stop(record)
            record.outputs, record.record, record.error = outputs, record.stored, None
            followers = partition.waiting.get(record.key)
            if followers:
                if self._schedule(followers.popleft()):
                    self.notify(1)
            elif followers is not None:
                del partition.waiting[record.key]
            if partition.revoked:
                return
            partition.unfinished -= 1
            self.unfinished -= 1
            if not self._woken and (not self.unfinished or self._is_half_done(partition)):
                self._woken = True
                self._wake()

    def postpone(self, record: InFlightRecord, due: float) -> None:
        """Have a record handled again, when it is due."""
        with self.lock:
            self._stop(record)
            record.due = due
            if self._schedule(record):
                self.notify(1)

    def fail(self, error: BaseException, record: InFlightRecord | None = None) -> None:
        """End the run with an error; nothing further is begun."""
        with self.lock:
            if record in self.running:
                self._stop(record)
            self.error = self.error or error
            self.close()
            self._wake()

    def _stop(self, record: InFlightRecord) -> None:
        record.partition.running -= 1
        record.started, record.runner = 0.0, None
        self.running.discard(record)
        if record.partition.revoked:
            self._stopped.notify_all()
