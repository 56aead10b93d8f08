"""Records that are written together, and the futures that callers hold meanwhile.

A future is two words: its delivery, and its row there.  The delivery waits, fails and calls
back for all of its rows at once, so a future per record costs next to nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self

from embedlog.batch import EncodedBatch
from embedlog.callbacks import check_callback, check_ran
from embedlog.errors import TimeoutError  # noqa: A004 - it is one
from embedlog.files.wake_thread import set_done, wake_soon
from embedlog.lazy import asyncio, logging
from embedlog.partition.append_condition import AppendCondition
from embedlog.producer.row_batches import Rows
from embedlog.producer.unretrieved import FailedRecords
from embedlog.record import Appended, RecordMetadata

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from embedlog.producer.batcher import TopicQueue

    R_co = TypeVar("R_co", default=RecordMetadata, covariant=True)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

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

    sequence: int | None = None
    explicit = False
    """The application chose the sequence numbers."""
    receipt: Appended | None = None
    error: BaseException | None = None

    def __init__(
        self, delivery: Delivery, partition: int, encoded: EncodedBatch, start: int
    ) -> None:
        self.delivery, self.encoded = delivery, encoded
        """Deleted once the batch is done."""
        self.partition, self.start = partition, start
        self.count, self.size = encoded.count, encoded.size
        self.held = encoded.size
        """Bytes of ``buffer_memory`` that it holds."""
        self.deadline = delivery.deadline

    def done(self) -> bool:
        """Return whether the batch was written, or failed for good."""
        return self.receipt is not None or self.error is not None


class Delivery:
    """Rows that are written together.

    `send` collects them column by column.  The delivery is sealed once its rows are in batches,
    or have failed.  Their order in the batches is ``order`` (None: the order of the rows), and
    batch ``i`` begins with the row at position ``starts[i]``.
    """

    queue: TopicQueue
    result: Any = None
    """The outcome of all rows if they had it before they were in batches: mostly an error."""
    sealed = False
    """Set after the batches or the result."""
    order: Sequence[int] | None = None
    _positions: list[int] | None = None
    """The position of each row, the inverse of ``order``; computed when first needed."""
    failed: dict[int | None, FailedRecords] | None = None
    """The rows that failed, by the start of their batch; by None if they all failed before they
    were in batches.  Set before the error, and not in the batch, which the frames of a drain
    hold: it must be garbage with the futures."""
    callbacks: list[Callback] | tuple[()] = ()
    reserved = free = 0
    """Bytes of ``buffer_memory`` that the rows hold, and how many of them are unused."""
    opened_at = deadline = 0.0
    batches: Any = ()
    """A list of `ProducerBatch`, once the rows are in batches."""
    condition: AppendCondition | None = None
    """What must be so for its one record to be written; then it is appended alone."""
    starts: Any = ()

    def __init__(self, queue: TopicQueue) -> None:
        self.queue = queue
        self.values: list[Any] = []
        """Bytes or None, or the rows of a typed topic."""
        self.keys: list[bytes | None] = []
        self.timestamps: list[int] = []
        self.headers: dict[int, Any] = {}
        """By row; most records have none."""
        self.partitions: dict[int, int] = {}
        """By row, for records whose caller named the partition."""

    @classmethod
    def completed(cls, result: Any, failed: FailedRecords | None = None) -> Self:
        """Return a delivery that is done from the start: a refused record, or ``acks=0``."""
        delivery = cls.__new__(cls)
        delivery.result, delivery.sealed = result, True
        delivery.failed = None if failed is None else {None: failed}
        return delivery

    def drop_partial_row(self) -> None:
        """Remove the record of an interrupted `send`, which only some of the columns have."""
        count = min(len(self.values), len(self.keys), len(self.timestamps))
        for column in (self.values, self.keys, self.timestamps):
            del column[count:]
        for by_row in (self.headers, self.partitions):
            by_row.pop(count, None)
        if not count:
            # The next record must set the time and wake the thread, as the first one does.
            self.free = 0

    def note(self, row: int, headers: Any, partition: int | None) -> None:
        """Note what only some records have."""
        if headers:
            self.headers[row] = headers
        if partition is not None:
            self.partitions[row] = partition

    def rows(self) -> Rows:
        """Return the records."""
        headers = None
        if self.headers:
            headers = [self.headers.get(row) for row in range(len(self.values))]
        keys = None if self.keys.count(None) == len(self.keys) else self.keys
        return Rows(self.values, keys, self.timestamps, headers)

    def add_batch(self, partition: int, encoded: EncodedBatch) -> ProducerBatch:
        """Put the next rows, as many as the batch has, into a batch."""
        start = self.starts[-1] + self.batches[-1].count if self.starts else 0
        batch = ProducerBatch(self, partition, encoded, start)
        if not start:
            self.batches, self.starts = [], []
        self.starts.append(start)
        self.batches.append(batch)
        return batch

    def put_in_batches(self, order: Any, encoded: Iterable[tuple[int, EncodedBatch]]) -> None:
        """Replace the rows by their batches, which hold the same bytes of ``buffer_memory``."""
        self.order, self.batches, self.starts = order, (), ()
        more = self.reserved
        for partition, batch in encoded:
            more -= self.add_batch(partition, batch).size
        self.batches[0].held += more
        self.sealed = True
        self.values = self.keys = []

    def seal(self, result: Any = None) -> None:
        """Drop the records: they are in batches now, or have a result."""
        # In this order: a reader of `sealed` finds the result.
        self.result = result
        self.sealed = True
        self.values = self.keys = []

    def outcome(self, row: int | None) -> Any:
        """Return the outcome of a row, or of all (None): a value, an exception, or None."""
        if not self.sealed:
            return None
        if self.result is not None:
            return self.result
        if row is None:
            if not self.done():
                return None
            errors = (batch.error for batch in self.batches if batch.error is not None)
            return next(errors, None) or self.ranges()
        position = row if self.order is None else self._position(row)
        batch = self.batches[bisect_right(self.starts, position) - 1]
        receipt = batch.receipt
        if receipt is None:
            return batch.error
        timestamp = self.timestamps[row] if receipt.timestamp is None else receipt.timestamp
        offset = receipt.base_offset
        if offset >= 0:  # In a transaction it is not known.
            offset += position - batch.start
        # A third of the time of the named tuple's own constructor, which is in Python.
        fields = self.queue.topic, batch.partition, offset, timestamp
        return tuple.__new__(RecordMetadata, fields)

    def _position(self, row: int) -> int:
        if self._positions is None:
            assert self.order is not None
            positions = [0] * len(self.order)
            for position, of_row in enumerate(self.order):
                positions[of_row] = position
            self._positions = positions
        return self._positions[row]

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
        if not self.sealed:
            return False
        return self.result is not None or all(batch.done() for batch in self.batches)

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

    def add_callback(self, callback: Callback) -> None:
        """Run a callback once its record is done, or now."""
        if not self.done():
            with self.queue.batcher.lock:
                if self.outcome(callback[0]._row) is None:
                    if not self.callbacks:
                        self.callbacks = []
                    self.callbacks.append(callback)
                    return
        run_callback(callback)

    def due_callbacks(self) -> list[Callback]:
        """Remove and return the callbacks whose records are done."""
        with self.queue.batcher.lock:
            due: list[Callback] = []
            pending: list[Callback] = []
            for callback in self.callbacks:
                done = self.outcome(callback[0]._row) is not None
                (due if done else pending).append(callback)
            self.callbacks = pending
        return due


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


def _tell(written: asyncio.Future[None], _: object) -> None:
    """Have the future of a task done, from whatever thread wrote its record."""
    loop = written.get_loop()
    if asyncio._get_running_loop() is loop:
        set_done([written])
    else:
        wake_soon(loop, [written])


class RecordFuture(Generic[R_co]):
    """The outcome of one record: kafka-python's future, with `concurrent.futures`' names.

    A task may ``await`` it.
    """

    __slots__ = ("_delivery", "_row")

    # No __init__: `send` sets the two fields itself, which takes half the time.
    _delivery: Any
    _row: int | None

    @classmethod
    def _completed(cls, outcome: Any, failed: FailedRecords | None = None) -> Self:
        """Return a future that is done already."""
        future = cls()
        future._delivery, future._row = Delivery.completed(outcome, failed), None
        return future

    def result(self, timeout: float | None = None) -> R_co:
        """Return the `RecordMetadata`, or raise the error of the record.

        Writes what was collected in the calling thread, without waiting for ``linger_ms``.

        Raises:
            TimeoutError: The record was not written within ``timeout`` seconds; it still may be.
            EmbedlogError: The record failed for good.
        """
        delivery = self._delivery
        outcome = delivery.outcome(self._row) if delivery.sealed else None
        if outcome is None:
            outcome = delivery.wait(self._row, timeout)
        if isinstance(outcome, BaseException):
            self._delivery.mark_retrieved(self._row)
            try:
                raise outcome
            finally:
                # The traceback keeps this frame, and the delivery has the error.
                del self, delivery, outcome
        return outcome  # type: ignore[no-any-return]

    get = result
    """Same as `result`; kafka-python's name."""

    def __await__(self) -> Generator[Any, None, R_co]:
        """Do as `result`, in a task: what tasks sent in one step of the loop is one batch.

        A task that is cancelled does not learn of the outcome; the record is written all the same.
        """
        if not self.done():
            loop = asyncio.get_running_loop()
            written = loop.create_future()
            self._observe(_tell, written)
            self._drain_soon(loop)
            yield from written
        return self.result()

    def _drain_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have what tasks sent written once they all wait."""
        queue = self._delivery.queue
        if not queue.is_awaited:
            queue.is_awaited = True
            loop.call_soon(queue.drain_for_task)

    def done(self) -> bool:
        """Return whether the record was written, or failed for good."""
        return self._delivery.outcome(self._row) is not None

    @property
    def is_done(self) -> bool:
        """Whether the record was written, or failed for good."""
        return self.done()

    def succeeded(self) -> bool:
        """Return whether the record was written."""
        outcome = self._delivery.outcome(self._row)
        if isinstance(outcome, BaseException):
            self._delivery.mark_retrieved(self._row)
            return False
        return outcome is not None

    def failed(self) -> bool:
        """Return whether the record failed for good."""
        return self.exception is not None

    @property
    def value(self) -> R_co | None:
        """The result, or None if there is none (yet)."""
        outcome = self._delivery.outcome(self._row)
        return None if isinstance(outcome, BaseException) else outcome

    @property
    def exception(self) -> BaseException | None:
        """The error, or None if there is none (yet)."""
        outcome = self._delivery.outcome(self._row)
        if not isinstance(outcome, BaseException):
            return None
        self._delivery.mark_retrieved(self._row)
        return outcome

    def retriable(self) -> bool:
        """Return whether the record failed with an error that sending it again may avoid."""
        return bool(getattr(self.exception, "retriable", False))

    def add_callback(self, function: Callable[..., object], *args: object, **named: object) -> Self:
        """Call ``function(*args, result, **named)`` once the record is written, or now.

        Runs on the thread that wrote the batch, without holding a lock, and may send.
        Exceptions that it raises are logged.
        """
        return self._add(False, function, args, named)

    def add_errback(self, function: Callable[..., object], *args: object, **named: object) -> Self:
        """Call ``function(*args, exception, **named)`` once the record failed, or now."""
        return self._add(True, function, args, named)

    def add_both(self, function: Callable[..., object], *args: object, **named: object) -> Self:
        """Call ``function(*args, result or exception, **named)`` once the record is done."""
        return self._add(False, function, args, named)._add(True, function, args, named)

    def _observe(self, function: Callable[..., object], *args: object) -> None:
        """Do as `add_both`, for a tool: the program has not learned of an error by that."""
        self._add(None, function, args, {})

    def _add(self, for_errors: bool | None, function: Any, args: Any, named: Any) -> Self:
        check_callback(function, "The callback of a future")
        self._delivery.add_callback((self, for_errors, function, args, named))
        return self

    def __repr__(self) -> str:
        outcome = self._delivery.outcome(self._row)
        return f"<{type(self).__name__} {'pending' if outcome is None else outcome!r}>"


class BatchFuture(RecordFuture[list[BatchRange]]):
    """The outcome of one `send_batch`: its result is a list of `BatchRange`.

    If a part failed, `result` raises its error, and `written` returns the rest.
    """

    __slots__ = ()

    def __init__(self) -> None:
        self._row = None

    def written(self) -> list[BatchRange]:
        """Return the batches that are written so far."""
        return list(self._delivery.ranges())
