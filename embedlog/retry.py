"""What becomes of a record whose handler fails: the policy, without clocks, threads or the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from embedlog.errors import InvalidConfigError

Backoff = float | Sequence[float] | Callable[[int], float]


class Retry:
    """Handles a record again after its handler raised, and puts it aside in the end.

    Only records of the same key wait for it.  Without a ``dead_letter`` the last failure ends the
    run, as with ``on_error="stop"``.

    Args:
        attempts: How often a record is handled in all.  Those of a process that was killed, or of
            an owner that lost the partition, do not count.
        backoff: The seconds before the second attempt, which double with each further one; or the
            seconds before each of them, of which the last one repeats; or a function of the number
            of failed attempts.
        max_backoff: The longest pause, in seconds.
        dead_letter: The topic of records that failed so often; the setting
            ``errors.deadletterqueue.topic.name``.

    Raises:
        InvalidConfigError: An argument is wrong.

    >>> retry = Retry(attempts=4, backoff=0.5)
    >>> [retry.pause_seconds(failed) for failed in (1, 2, 3)]
    [0.5, 1.0, 2.0]
    """

    def __init__(
        self,
        attempts: int = 5,
        backoff: Backoff = 1.0,
        *,
        max_backoff: float = 60.0,
        dead_letter: str | None = None,
    ) -> None:
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise InvalidConfigError(f"attempts must be an int of at least 1, got {attempts!r}")
        if not callable(backoff):
            pauses = [backoff] if isinstance(backoff, int | float) else list(backoff)
            if not pauses or not all(_is_seconds(pause) for pause in pauses):
                raise InvalidConfigError(
                    f"backoff must be seconds, some of them, or a function, got {backoff!r}"
                )
        if not _is_seconds(max_backoff):
            raise InvalidConfigError(f"max_backoff must be seconds, got {max_backoff!r}")
        self.attempts, self.backoff, self.max_backoff = attempts, backoff, max_backoff
        self.dead_letter = dead_letter

    def pause_seconds(self, failed: int) -> float:
        """Return the seconds before the next attempt, after so many failed ones."""
        backoff = self.backoff
        if callable(backoff):
            pause = backoff(failed)
        elif isinstance(backoff, int | float):
            pause = backoff * 2.0 ** min(failed - 1, 60)
        else:
            pause = backoff[min(failed, len(backoff)) - 1]
        return float(min(max(pause, 0.0), self.max_backoff))

    def __repr__(self) -> str:
        return (
            f"Retry(attempts={self.attempts}, backoff={self.backoff!r}, "
            f"max_backoff={self.max_backoff!r}, dead_letter={self.dead_letter!r})"
        )


OnError = Literal["stop", "skip"] | Retry


def check_on_error(on_error: object) -> None:
    """Raise unless it says what becomes of a record whose handler fails.

    Raises:
        InvalidConfigError: It does not.
    """
    if on_error not in ("stop", "skip") and not isinstance(on_error, Retry):
        raise InvalidConfigError(
            f'on_error must be "stop", "skip" or embedlog.Retry(...), got {on_error!r}',
            setting="on_error",
        )


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
