"""Failures that no caller looks at: logged once, counted, and raised by ``raise_errors=True``.

A failure that a program could still look at is kept by its delivery, so it is garbage as soon
as the last future is; its finalizer then logs it, as asyncio does for exceptions that were
never retrieved.  What is alive when the process ends is logged then.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from embedlog.display import plural
from embedlog.errors import DeliveryFailedError, EmbedlogError
from embedlog.lazy import logging

LOGGER = logging.getLogger("embedlog.producer")
MAX_ERRORS = 10
"""How many errors are kept for `DeliveryFailedError`; the records of others are counted."""


class FailedRecords:
    """Records that failed together, until the last future of their delivery is dropped.

    Args:
        errors: Logs the records that no caller looked at.
        topic: Their topic; None if it is not known.
        partition: Their partition; None if they failed before they had one.
        count: How many records failed.
        error: Why.
    """

    __slots__ = ("__weakref__", "_errors", "_retrieved", "count", "error", "where")

    def __init__(
        self,
        errors: UnretrievedErrors,
        topic: str | None,
        partition: int | None,
        count: int,
        error: BaseException,
    ) -> None:
        self._errors = errors
        self.where, self.count, self.error = (topic, partition), count, error
        self._retrieved: set[int | None] = set()

    def mark_retrieved(self, row: int | None) -> None:
        """Note that a caller learned that a row failed, or that all did (None)."""
        self._retrieved.add(row)

    def unretrieved(self) -> int:
        """Return how many records failed without a caller that learned of it."""
        return 0 if None in self._retrieved else self.count - len(self._retrieved)

    def __del__(self) -> None:
        # At the end of the process `_log_at_exit` has logged it.
        if not sys.is_finalizing() and self.unretrieved() > 0:
            self._errors.dropped(self)


class UnretrievedErrors:
    """The failures of one producer that no caller looked at."""

    def __init__(self) -> None:
        self.logged, self._pid = 0, os.getpid()
        """How many of these records were logged."""
        # Re-entrant: the garbage collector may run a finalizer anywhere, also under this lock.
        self._lock = threading.RLock()
        self._alive: weakref.WeakSet[FailedRecords] = weakref.WeakSet()
        self._topics: Counter[str] = Counter()
        """How many records of each topic failed, for the next error to raise."""
        self._errors: list[BaseException] = []
        self._raising = 0
        """How many calls are about to raise what is dropped meanwhile."""
        self._unlogged: list[tuple[tuple[str | None, int | None], int, BaseException]] = []
        """What was dropped while calls were about to raise it."""
        _all.add(self)

    def add(
        self, topic: str | None, partition: int | None, count: int, error: BaseException
    ) -> FailedRecords:
        """Return a token for the delivery of failed records to keep, before it has the error."""
        if isinstance(error, EmbedlogError):
            _drop_tracebacks(error)
        failed = FailedRecords(self, topic, partition, count, error)
        with self._lock:
            self._alive.add(failed)
        return failed

    def dropped(self, failed: FailedRecords) -> None:
        """Log records that no caller can look at any more."""
        if self._pid != os.getpid():
            return  # A forked child leaves it to its parent, and must not wait for its lock.
        count = failed.unretrieved()
        failed.mark_retrieved(None)
        with self._lock:
            self._note(failed, count)
            if self._raising:
                self._unlogged.append((failed.where, count, failed.error))
                return
        self._log(failed.where, count, failed.error)

    def log_all(self) -> None:
        """Log every failure that no caller has looked at so far."""
        for failed in self._unseen() if self._pid == os.getpid() else ():
            self.dropped(failed)

    @contextmanager
    def raised(self, enabled: bool) -> Iterator[None]:
        """Raise after the block, if enabled, what failed and was not raised or looked at before.

        Nothing is logged meanwhile, unless the block itself raises.

        Raises:
            DeliveryFailedError: Records failed.
        """
        if not enabled:
            yield
            return
        with self._lock:
            self._raising += 1
        error = None
        try:
            yield
            error = self._take()
        finally:
            with self._lock:
                self._raising -= 1
                unlogged, self._unlogged = self._unlogged, []
            for where, count, reason in unlogged:
                self._log(where, count, reason)
        if error is not None:
            raise error

    def _take(self) -> DeliveryFailedError | None:
        """Return the error for all failures so far, which are as good as looked at then."""
        with self._lock:
            for failed in self._unseen():
                self._note(failed, failed.unretrieved())
                failed.mark_retrieved(None)
            topics, errors = self._topics, self._errors
            self._topics, self._errors, self._unlogged = Counter(), [], []
        if not topics:
            return None
        return _delivery_failed(topics, errors)

    def _unseen(self) -> list[FailedRecords]:
        with self._lock:
            return [failed for failed in self._alive if failed.unretrieved() > 0]

    def _note(self, failed: FailedRecords, count: int) -> None:
        self._topics[failed.where[0] or ""] += count
        if len(self._errors) < MAX_ERRORS and failed.error not in self._errors:
            self._errors.append(failed.error)

    def _log(self, where: tuple[str | None, int | None], count: int, error: BaseException) -> None:
        with self._lock:
            self.logged += count
        topic, partition = where
        LOGGER.warning(
            "%s for %s%s failed, and no caller looked at the future%s: %s",
            *(plural(count, "record"), topic, "" if partition is None else f"-{partition}"),
            *("" if count == 1 else "s", error),
            # Of an error that embedlog does not know, the traceback is needed, too.
            exc_info=None if isinstance(error, EmbedlogError) else error,
        )


def _delivery_failed(topics: Counter[str], errors: list[BaseException]) -> DeliveryFailedError:
    count, first = sum(topics.values()), errors[0]
    by_topic = ", ".join(f"{number} of {topic}" for topic, number in topics.most_common())
    reason = str(first).rstrip(".")
    failed = DeliveryFailedError(
        f"{plural(count, 'record')} failed ({by_topic}): {reason}",
        todo="The attribute errors has all reasons." if len(errors) > 1 else None,
        count=count,
        topics=dict(topics),
        errors=tuple(errors),
    )
    failed.__cause__ = first
    return failed


def _drop_tracebacks(error: BaseException | None) -> None:
    """Drop what keeps frames alive, and by their variables the delivery that has the error."""
    seen: set[int] = set()
    # A program may have made a circle of causes and contexts.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


_all: weakref.WeakSet[UnretrievedErrors] = weakref.WeakSet()


def _log_at_exit() -> None:
    for errors in list(_all):
        errors.log_all()


# Before that of `producer`, which imports this: functions run in the opposite order, and closing
# a producer may fail records.
atexit.register(_log_at_exit)
