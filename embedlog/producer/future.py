"""What a caller holds while its records are being written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Self

from embedlog.callbacks import check_callback
from embedlog.producer.delivery import BatchRange, Callback, CompletedDelivery, run_callback
from embedlog.producer.unretrieved import FailedRecords

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from embedlog.record import RecordMetadata

    R_co = TypeVar("R_co", default=RecordMetadata, covariant=True)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)


class RecordFuture(Generic[R_co]):
    """The outcome of one record: kafka-python's future, with `concurrent.futures`' names."""

    __slots__ = ("_delivery", "_row")

    # No __init__: `send` sets the two fields itself, which takes half the time.
    _delivery: Any
    _row: int | None

    @classmethod
    def _completed(cls, outcome: Any, failed: FailedRecords | None = None) -> Self:
        """Return a future that is done already."""
        future = cls()
        future._delivery, future._row = CompletedDelivery(outcome, failed), None
        return future

    def result(self, timeout: float | None = None) -> R_co:
        """Return the `RecordMetadata`, or raise the error of the record.

        Writes what was collected in the calling thread, without waiting for ``linger_ms``.

        Raises:
            TimeoutError: The record was not written within ``timeout`` seconds; it still may be.
            EmbedlogError: The record failed for good.
        """
        outcome = self._delivery.outcome(self._row)
        if outcome is None:
            outcome = self._delivery.wait(self._row, timeout)
        if isinstance(outcome, BaseException):
            self._delivery.mark_retrieved(self._row)
            try:
                raise outcome
            finally:
                # The traceback keeps this frame, and the delivery has the error.
                del self, outcome
        return outcome  # type: ignore[no-any-return]

    get = result
    """Same as `result`; kafka-python's name."""

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
        return self._add((self, False, function, args, named))

    def add_errback(self, function: Callable[..., object], *args: object, **named: object) -> Self:
        """Call ``function(*args, exception, **named)`` once the record failed, or now."""
        return self._add((self, True, function, args, named))

    def add_both(self, function: Callable[..., object], *args: object, **named: object) -> Self:
        """Call ``function(*args, result or exception, **named)`` once the record is done."""
        self._add((self, False, function, args, named))
        return self._add((self, True, function, args, named))

    def _observe(self, function: Callable[..., object], *args: object) -> None:
        """Do as `add_both`, for a tool: the program has not learned of an error by that."""
        self._add((self, None, function, args, {}))

    def _add(self, callback: Callback) -> Self:
        check_callback(callback[2], "The callback of a future")
        delivery = self._delivery
        if isinstance(delivery, CompletedDelivery) or not delivery.queue.add_callback(callback):
            run_callback(callback)
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
