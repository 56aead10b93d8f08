"""Records that are written together, and what became of them.

A future is two words: its delivery, and its row there.  The delivery waits, fails and calls
back for all of its rows at once, so a future per record costs next to nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple, Protocol

from embedlog.batch import EncodedBatch
from embedlog.callbacks import check_ran
from embedlog.errors import TimeoutError  # noqa: A004 - it is one
from embedlog.lazy import logging
from embedlog.producer.row_batches import Rows
from embedlog.producer.unretrieved import FailedRecords
from embedlog.record import Appended, RecordMetadata

LOGGER = logging.getLogger("embedlog.producer")
Callback = tuple[Any, bool | None, Callable[..., object], tuple[object, ...], dict[str, object]]
"""The future, whether the callback is for errors (None: for every outcome, without taking an error
for looked at), the function and its arguments."""


class BatchRange(NamedTuple):
    """Where one batch of a `send_batch` was written: offsets ``[base_offset, next_offset)``."""

    topic: str
    partition: int
    base_offset: int | None
    """None if the log has the batch but no longer remembers its offsets."""
    count: int  # type: ignore[assignment]
    timestamp: int | None = None
    """The log append time, if the topic stamps records with it."""
    duplicate: bool = False
    """The batch was written before; nothing was appended now."""

    @property
    def next_offset(self) -> int | None:
        """The offset after the last record."""
        return None if self.base_offset is None else self.base_offset + self.count


class ProducerBatch:
    """One batch for one partition, and its outcome."""

    __slots__ = (
        *("count", "deadline", "delivery", "encoded", "error", "explicit"),
        *("partition", "receipt", "sequence", "size", "start"),
    )

    def __init__(
        self, delivery: Delivery, partition: int, encoded: EncodedBatch, start: int
    ) -> None:
        self.delivery, self.partition, self.start = delivery, partition, start
        """Without the delivery once the batch is done: it must be garbage with its futures."""
        self.encoded: EncodedBatch | None = encoded
        """None once the batch was written, or failed."""
        self.count, self.size = encoded.count, encoded.size
        self.deadline = delivery.deadline
        self.sequence: int | None = None
        self.explicit = False
        """The application chose the sequence numbers."""
        self.receipt: Appended | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Return whether the batch was written, or failed for good."""
        return self.receipt is not None or self.error is not None


class DeliveryQueue(Protocol):
    """What deliveries and the sender need of a topic queue."""

    topic: str

    def pending(self) -> bool:
        """Return whether the queue has unwritten records."""

    def due_at(self) -> float | None:
        """Return when to drain, on the monotonic clock; None if there is nothing to drain."""

    def drain(self, lock_timeout: float | None = None, *, wait: bool = True) -> bool:
        """Write what was collected, in this thread; False if another thread is draining."""

    def wait_for_progress(self, deadline: float | None) -> None:
        """Wait until another attempt may succeed."""

    def add_callback(self, callback: Callback) -> bool:
        """Keep a callback for later; False if its record is done."""


class Delivery:
    """Rows that are written together.

    Sealed once its rows are in batches.  Their order there is ``order`` (None: the order of
    the rows), and batch ``i`` begins with the row at position ``starts[i]``.
    """

    __slots__ = (
        *("batches", "callbacks", "deadline", "error", "failed", "metadata", "order"),
        *("positions", "queue", "sealed", "starts", "timestamps"),
    )

    def __init__(self, queue: DeliveryQueue, deadline: float) -> None:
        self.queue, self.deadline = queue, deadline
        self.batches: list[ProducerBatch] = []
        self.starts: list[int] = []
        self.order: Any = None
        self.positions: Any = None
        """The position of each row, the inverse of ``order``; computed when first needed."""
        self.timestamps: list[int] = []
        self.callbacks: list[Callback] = []
        self.error: BaseException | None = None
        self.failed: dict[int | None, FailedRecords] | None = None
        """The rows that failed, by the start of their batch; by None if they all failed before
        they were in batches.  Set before the error, and not in the batch, which the frames of a
        drain hold: it must be garbage with the futures."""
        self.metadata: RecordMetadata | None = None
        """Where the only row was written, if that took no `ProducerBatch`."""
        self.sealed = False

    def add_batch(self, partition: int, encoded: EncodedBatch) -> ProducerBatch:
        """Put the next rows, as many as the batch has, into a batch."""
        start = self.starts[-1] + self.batches[-1].count if self.starts else 0
        batch = ProducerBatch(self, partition, encoded, start)
        self.starts.append(start)
        self.batches.append(batch)
        return batch

    def outcome(self, row: int | None) -> Any:
        """Return the outcome of a row, or of all (None): a value, an exception, or None."""
        if self.metadata is not None:
            return self.metadata
        if row is None:
            if not self.done():
                return None
            errors = [self.error, *(batch.error for batch in self.batches)]
            first = next((error for error in errors if error is not None), None)
            return self.ranges() if first is None else first
        if self.error is not None:
            return self.error
        if not self.sealed:
            return None
        if not self.batches:
            # Another thread set `error` or `metadata` after the checks above.
            return self.error if self.metadata is None else self.metadata
        position = row if self.order is None else self._position(row)
        batch = self.batches[bisect_right(self.starts, position) - 1]
        receipt = batch.receipt
        if receipt is None:
            return batch.error
        timestamp = self.timestamps[row] if receipt.timestamp is None else receipt.timestamp
        offset = receipt.base_offset + position - batch.start
        return RecordMetadata(self.queue.topic, batch.partition, offset, timestamp)

    def _position(self, row: int) -> int:
        if self.positions is None:
            self.positions = self.order.argsort()
        return int(self.positions[row])

    def mark_retrieved(self, row: int | None) -> None:
        """Note that a caller learned of the failure of a row, or of all rows (None)."""
        failed, start = self.failed or {}, None
        if row is not None and self.batches:
            position = row if self.order is None else self._position(row)
            start = self.starts[bisect_right(self.starts, position) - 1]
        for records in list(failed.values()) if start is None else [failed.get(start)]:
            if records is not None:
                records.mark_retrieved(row)

    def ranges(self) -> list[BatchRange]:
        """Return where the batches that are written so far are."""
        return [
            BatchRange(
                self.queue.topic,
                batch.partition,
                None if receipt.base_offset < 0 else receipt.base_offset,
                batch.count,
                receipt.timestamp,
                receipt.duplicate,
            )
            for batch in self.batches
            if (receipt := batch.receipt) is not None
        ]

    def done(self) -> bool:
        """Return whether every row was written, or failed for good."""
        if self.error is not None or self.metadata is not None:
            return True
        return self.sealed and all(batch.done() for batch in self.batches)

    def wait(self, row: int | None, timeout: float | None) -> Any:
        """Write in this thread unless another one does, and return the outcome.

        Raises:
            TimeoutError: There is no outcome after ``timeout`` seconds.
        """
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            self.queue.drain(None if deadline is None else max(deadline - monotonic(), 0.0))
            outcome = self.outcome(row)
            if outcome is not None:
                return outcome
            if deadline is not None and monotonic() >= deadline:
                raise TimeoutError(
                    f"The record was not written within {timeout} s",
                    topic=self.queue.topic,
                    todo="It may still be written; wait again.",
                )
            self.queue.wait_for_progress(deadline)


class OpenBatch(Delivery):
    """Records that `send` collects, column by column, until a drain encodes them."""

    __slots__ = (
        *("explicit_partitions", "free", "headers", "keys", "opened_at", "reserved", "values"),
    )

    def __init__(self, queue: DeliveryQueue) -> None:
        # Not super().__init__: one is created for every record that a caller waits for.
        self.queue, self.deadline = queue, 0.0
        self.batches, self.starts, self.timestamps, self.callbacks = [], [], [], []
        self.order = self.positions = self.error = self.failed = self.metadata = None
        self.sealed = False
        self.values: list[Any] = []
        """Bytes or None, or the rows of a typed topic."""
        self.keys: list[bytes | None] = []
        self.headers: dict[int, Any] = {}
        """By row; most records have none."""
        self.explicit_partitions: dict[int, int] = {}
        """By row, for records whose caller named the partition."""
        self.reserved = self.free = 0
        """Bytes of the buffer pool that it holds, and how many of them are unused."""
        self.opened_at = 0.0

    def add_row(
        self,
        value: bytes | None,
        key: bytes | None,
        timestamp: int,
        headers: Any,
        partition: int | None,
    ) -> int:
        """Add a record and return its row; `send` does the same inline for most records."""
        row = len(self.values)
        if headers:
            self.headers[row] = headers
        if partition is not None:
            self.explicit_partitions[row] = partition
        self.keys.append(key)
        self.timestamps.append(timestamp)
        # Last: `drop_partial_row` takes a record without a value for an interrupted one.
        self.values.append(value)
        return row

    def drop_partial_row(self) -> None:
        """Remove the record of an interrupted `send`, which only some of the columns have."""
        count = min(len(self.values), len(self.keys), len(self.timestamps))
        for column in (self.values, self.keys, self.timestamps):
            del column[count:]
        for by_row in (self.headers, self.explicit_partitions):
            by_row.pop(count, None)

    def rows(self) -> Rows:
        """Return the records."""
        headers = None
        if self.headers:
            headers = [self.headers.get(row) for row in range(len(self.values))]
        keys = None if self.keys.count(None) == len(self.keys) else self.keys
        return Rows(self.values, keys, self.timestamps, headers)

    def seal(self) -> None:
        """Drop the records: they are in batches now, and no more are added."""
        self.values = self.keys = []
        self.headers = self.explicit_partitions = {}
        self.sealed = True


class CompletedDelivery:
    """A delivery that is done from the start: a refused record, or ``acks=0``."""

    __slots__ = ("_failed", "_outcome")

    def __init__(self, outcome: Any, failed: FailedRecords | None = None) -> None:
        self._outcome, self._failed = outcome, failed

    def outcome(self, row: int | None) -> Any:
        """Return the outcome."""
        return self._outcome

    def mark_retrieved(self, row: int | None) -> None:
        """Note that the caller learned of the failure."""
        if self._failed is not None:
            self._failed.mark_retrieved(row)

    def ranges(self) -> list[BatchRange]:
        """Return an empty list: no batch is known to be written."""
        return []


def run_callback(callback: Callback) -> None:
    """Run a callback if it is for this kind of outcome; log what it raises."""
    future, for_errors, function, args, kwargs = callback
    outcome = future._delivery.outcome(future._row)
    if for_errors is not None and isinstance(outcome, BaseException) is not for_errors:
        return
    if for_errors:
        future._delivery.mark_retrieved(future._row)
    # The program may keep this frame, with an exception; the delivery must be garbage all the same.
    del callback, future
    try:
        check_ran(function(*args, outcome, **kwargs), "The callback of a future")
    except Exception:  # the program's own code; it must not stop the sender
        LOGGER.exception("A delivery callback raised an exception")
