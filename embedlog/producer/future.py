"""What a caller holds while its records are on their way.

A future is two words: the delivery its record left with, and its row there.
Everything that waits, fails or calls back is done by the delivery, once for
all of its rows, so that a future a record costs next to nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from embedlog.batch import EncodedBatch
from embedlog.errors import TimeoutError  # noqa: A004 - it is one
from embedlog.record import Appended, RecordMetadata

if TYPE_CHECKING:
    from embedlog.producer.topic_queue import TopicQueue

Callback = tuple[Any, bool, Callable[..., object], tuple[Any, ...], dict[str, Any]]
"""The future it is for, whether it is for errors, and what to call."""


class BatchRange(NamedTuple):
    """Where one batch of a `send_batch` was written: offsets ``[base_offset, next_offset)``."""

    topic: str
    partition: int
    base_offset: int | None
    """None if the log no longer remembers the offsets of a batch it has (G16)."""
    count: int  # type: ignore[assignment]
    timestamp: int | None = None
    """The log's own time, where the topic stamps records with it (A7)."""
    duplicate: bool = False
    """It was written before, and nothing was appended now (G16)."""

    @property
    def next_offset(self) -> int | None:
        """The offset after the last record."""
        return None if self.base_offset is None else self.base_offset + self.count


class ProducerBatch:
    """One batch on its way to one partition, and what became of it."""

    __slots__ = (
        *("count", "deadline", "delivery", "encoded", "error", "explicit", "partition"),
        *("receipt", "sequence", "size", "start"),
    )

    def __init__(
        self, delivery: Delivery, partition: int, encoded: EncodedBatch | None, start: int
    ) -> None:
        self.delivery, self.partition, self.start = delivery, partition, start
        self.encoded = encoded
        self.count = self.size = 0
        if encoded is not None:
            self.count, self.size = encoded.count, encoded.size
        self.deadline = delivery.deadline
        self.sequence: int | None = None
        self.explicit = False
        self.receipt: Appended | None = None
        self.error: BaseException | None = None

    def settled(self) -> bool:
        """Whether it was written, or failed for good."""
        return self.receipt is not None or self.error is not None

    def range(self) -> BatchRange:
        """Where it was written; only once it was."""
        receipt = self.receipt
        assert receipt is not None
        base = None if receipt.base_offset < 0 else receipt.base_offset
        return BatchRange(
            self.delivery.queue.topic,
            self.partition,
            base,
            self.count,
            receipt.timestamp,
            receipt.duplicate,
        )


class Delivery:
    """Rows that left together.

    Sealed once its rows are in parcels; their order is then ``order`` (None:
    as they came), and parcel ``i`` begins with the row at ``starts[i]`` of it.
    """

    __slots__ = (
        *("alone", "callbacks", "deadline", "error", "order", "parcels", "places"),
        *("queue", "sealed", "starts", "timestamps"),
    )

    def __init__(self, queue: TopicQueue, deadline: float) -> None:
        self.queue, self.deadline = queue, deadline
        self.parcels: list[ProducerBatch] = []
        self.starts: list[int] = []
        self.order: Any = None
        self.places: Any = None
        self.timestamps: list[int] = []
        self.callbacks: list[Callback] = []
        self.error: BaseException | None = None
        self.alone: RecordMetadata | None = None
        """What became of its only row, if that needed no parcel."""
        self.sealed = False

    def add(self, partition: int, encoded: EncodedBatch) -> ProducerBatch:
        """Make the next rows, as many as the batch has, a parcel."""
        start = self.starts[-1] + self.parcels[-1].count if self.starts else 0
        parcel = ProducerBatch(self, partition, encoded, start)
        self.starts.append(start)
        self.parcels.append(parcel)
        return parcel

    def outcome(self, row: int | None) -> Any:
        """Return what became of a row, or of all (None): a value, an exception, or None."""
        if self.alone is not None:
            return self.alone
        if row is None:
            return self._outcome_of_all()
        if self.error is not None:
            return self.error
        if not self.sealed:
            return None
        if not self.parcels:
            # One of them was set since it was looked at above.
            return self.error if self.alone is None else self.alone
        place = row
        if self.order is not None:
            if self.places is None:
                self.places = self.order.argsort()
            place = int(self.places[row])
        parcel = self.parcels[bisect_right(self.starts, place) - 1]
        receipt = parcel.receipt
        if receipt is None:
            return parcel.error
        timestamp = self.timestamps[row] if receipt.timestamp is None else receipt.timestamp
        offset = receipt.base_offset + place - parcel.start
        return RecordMetadata(self.queue.topic, parcel.partition, offset, timestamp)

    def _outcome_of_all(self) -> Any:
        if self.error is not None:
            return self.error
        if not self.sealed or not self.settled():
            return None
        failed = [parcel.error for parcel in self.parcels if parcel.error is not None]
        return failed[0] if failed else self.ranges()

    def ranges(self) -> list[BatchRange]:
        """Return where its batches were written, so far."""
        return [parcel.range() for parcel in self.parcels if parcel.receipt is not None]

    def settled(self) -> bool:
        """Whether every row was written, or failed for good."""
        if self.error is not None or self.alone is not None:
            return True
        return self.sealed and all(parcel.settled() for parcel in self.parcels)

    def wait(self, row: int | None, timeout: float | None) -> Any:
        """Bring it about, in this thread if no other one is at it, and return the outcome."""
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            self.queue.drain(deadline)
            outcome = self.outcome(row)
            if outcome is not None:
                return outcome
            if deadline is not None and monotonic() >= deadline:
                raise TimeoutError(
                    f"not written within {timeout} s",
                    topic=self.queue.topic,
                    todo="it is still on its way; wait again",
                )
            self.queue.progress(deadline)


class CompletedDelivery:
    """A delivery whose outcome was known at once: a refusal, or ``acks=0``."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome

    def outcome(self, row: int | None) -> Any:
        """Return it."""
        return self._outcome

    def wait(self, row: int | None, timeout: float | None) -> Any:
        """Return it."""
        return self._outcome

    def ranges(self) -> list[BatchRange]:
        """Return nothing: nothing is known to be written."""
        return []


class RecordFuture:
    """What becomes of one record; `kafka-python`'s future, with `concurrent.futures`' names."""

    __slots__ = ("_delivery", "_row")

    # No __init__: `send` fills in the two words itself, in half the time.
    _delivery: Any
    _row: int | None

    def result(self, timeout: float | None = None) -> Any:
        """Return the `RecordMetadata`, or raise why there is none.

        Writes what is gathered in the calling thread, without waiting for
        ``linger_ms``.

        Raises:
            TimeoutError: Not written after ``timeout`` seconds; it may still be.
            EmbedlogError: The record failed for good.
        """
        outcome = self._delivery.outcome(self._row)
        if outcome is None:
            outcome = self._delivery.wait(self._row, timeout)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def get(self, timeout: float | None = None) -> Any:
        """Same as `result`; kafka-python's name."""
        return self.result(timeout)

    def done(self) -> bool:
        """Whether it was written, or failed for good."""
        return self._delivery.outcome(self._row) is not None

    is_done = property(done, doc="Whether it was written, or failed for good.")

    def succeeded(self) -> bool:
        """Whether it was written."""
        outcome = self._delivery.outcome(self._row)
        return outcome is not None and not isinstance(outcome, BaseException)

    def failed(self) -> bool:
        """Whether it failed for good."""
        return isinstance(self._delivery.outcome(self._row), BaseException)

    @property
    def value(self) -> Any:
        """The result, or None if there is none (yet)."""
        outcome = self._delivery.outcome(self._row)
        return None if isinstance(outcome, BaseException) else outcome

    @property
    def exception(self) -> BaseException | None:
        """Why it failed, or None if it did not (yet)."""
        outcome = self._delivery.outcome(self._row)
        return outcome if isinstance(outcome, BaseException) else None

    def retriable(self) -> bool:
        """Whether it failed in a way that sending it again may mend."""
        return bool(getattr(self.exception, "retriable", False))

    def add_callback(self, function: Callable[..., object], *args: Any, **named: Any) -> Any:
        """Call ``function(*args, result, **named)`` once it is written; now if it is (G9).

        Runs on whichever thread wrote the batch, under no lock; may send.  What
        it raises is logged.
        """
        return self._call((self, False, function, args, named))

    def add_errback(self, function: Callable[..., object], *args: Any, **named: Any) -> Any:
        """Call ``function(*args, exception, **named)`` once it failed; now if it did (G9)."""
        return self._call((self, True, function, args, named))

    def add_both(self, function: Callable[..., object], *args: Any, **named: Any) -> Any:
        """Call ``function(*args, result or exception, **named)`` once it is done."""
        self._call((self, False, function, args, named))
        return self._call((self, True, function, args, named))

    def _call(self, callback: Callback) -> Any:
        if isinstance(self._delivery, CompletedDelivery) or not self._delivery.queue.register(
            callback
        ):
            run_callback(callback)
        return self

    def __repr__(self) -> str:
        outcome = self._delivery.outcome(self._row)
        return f"<{type(self).__name__} {'on its way' if outcome is None else outcome!r}>"


class BatchFuture(RecordFuture):
    """What becomes of the records of one `send_batch`: its result is a list of `BatchRange`.

    If a part failed, `result` raises why, and `written` has the rest.
    """

    __slots__ = ()

    def __init__(self) -> None:
        self._row = None

    def written(self) -> list[BatchRange]:
        """Return the batches that are written so far."""
        ranges: list[BatchRange] = self._delivery.ranges()
        return ranges


F = TypeVar("F", bound=RecordFuture)


def settled(future: F, outcome: Any) -> F:
    """Return a future whose outcome is known at once."""
    future._delivery, future._row = CompletedDelivery(outcome), None
    return future


def run_callback(callback: Callback) -> None:
    """Call back, if it is for this outcome; log what it raises."""
    future, for_errors, function, args, named = callback
    outcome = future._delivery.outcome(future._row)
    if isinstance(outcome, BaseException) is not for_errors:
        return
    try:
        function(*args, outcome, **named)
    except Exception:  # the program's own code; it must not stop the sender
        import logging

        logging.getLogger("embedlog.producer").exception("a delivery callback raised")
