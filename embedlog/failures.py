"""Work that fails and is tried again: one warning per state, and pauses that grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import monotonic

from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    FencedError,
    NotEnoughReplicasError,
    ReplicaNotAvailableError,
    UnknownTopicOrPartitionError,
)
from embedlog.lazy import logging

_FACTS = ("errno", "topic", "partition", "path")
"""What tells two errors of one type apart; their texts may have other numbers each time."""


class Failures:
    """What fails at the moment, by a text that names the work.

    Any thread may call it.

    Args:
        logger: Gets a warning when the work begins to fail, or fails in another way than the last
            time.  Repetitions are logged at DEBUG, and the end of a failure at INFO.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self.errors: dict[str, Exception] = {}
        """The error of the last attempt, of all work that failed then."""
        self._attempts: dict[str, int] = {}
        self._failed_at: dict[str, float] = {}

    def note(self, work: str, error: Exception) -> bool:
        """Note that an attempt failed; return whether it failed in another way than the last."""
        before, self.errors[work] = self.errors.get(work), error
        self._attempts[work], self._failed_at[work] = self._attempts.get(work, 0) + 1, monotonic()
        is_new = before is None or _state(before) != _state(error)
        level = logging.WARNING if is_new else logging.DEBUG
        trace = None if isinstance(error, EmbedlogError) else error
        self._logger.log(level, "%s: %s", work, error, exc_info=trace)
        return is_new

    def end(self, work: str) -> None:
        """Note that an attempt succeeded."""
        if self.errors.pop(work, None) is not None:
            attempts, _ = self._attempts.pop(work, 0), self._failed_at.pop(work)
            self._logger.info("%s: no error any more, after %d attempts", work, attempts)

    def pause_seconds(self, work: str, first: float, longest: float) -> float:
        """Return how long to wait before the next attempt: twice as long each time."""
        return float(min(first * 2 ** min(self._attempts.get(work, 1) - 1, 30), longest))

    def is_due(self, work: str, first: float, longest: float) -> bool:
        """Whether work did not fail the last time, or has paused for `pause_seconds` since."""
        failed_at = self._failed_at.get(work)
        pause = self.pause_seconds(work, first, longest)
        return failed_at is None or monotonic() - failed_at >= pause

    @contextmanager
    def collecting(
        self, *, raises: bool = True
    ) -> Iterator[Callable[[str], AbstractContextManager[None]]]:
        """Do all parts of some work, although some fail.

        Yields a factory of context managers, one for each part; it takes the text that names the
        part.  A topic that was deleted meanwhile, or a partition that is offline, is no error.

        Args:
            raises: Whether to raise the first error when all are done.

        Raises:
            ClosedError, FencedError, NotEnoughReplicasError: Raised by a part; the others are not
                done.
        """
        errors: list[EmbedlogError] = []
        yield partial(self._collected, errors)
        if errors and raises:
            raise errors[0]

    @contextmanager
    def _collected(self, errors: list[EmbedlogError], work: str) -> Iterator[None]:
        try:
            yield
        except (ClosedError, FencedError, NotEnoughReplicasError):
            raise
        except (UnknownTopicOrPartitionError, ReplicaNotAvailableError):
            self.end(work)
        except EmbedlogError as error:
            errors.append(error)
            self.note(work, error)
        else:
            self.end(work)


def _state(error: Exception) -> tuple[object, ...]:
    if isinstance(error, EmbedlogError):
        return type(error), *(getattr(error, name, None) for name in _FACTS)
    return type(error), str(error)
