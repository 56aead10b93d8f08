"""One look at many partitions: those that are due are cleaned, and what fails holds up nobody."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from embedlog.compaction.cleanable import choose
from embedlog.compaction.cleaner import CleanResult, Progress, clean
from embedlog.compaction.throttle import Throttle
from embedlog.config import MaintenanceConfig
from embedlog.errors import ClosedError, EmbedlogError, FencedError
from embedlog.partition import PartitionLog
from embedlog.partition.replace import Fence, no_fence

_logger = logging.getLogger("embedlog.compaction")


def clean_round(
    logs: Iterable[PartitionLog],
    now_ms: int,
    failed: dict[PartitionLog, EmbedlogError],
    *,
    settings: MaintenanceConfig | None = None,
    fence: Fence = no_fence,
    pace: Throttle | None = None,
) -> list[CleanResult]:
    """Clean the partitions that are due, the most urgent first (D3, D4).

    Args:
        logs: All there are; those whose topics are not compacted are left out.
        now_ms: The time.
        failed: Partitions that could not be cleaned, and why: left out from then
            on, until the caller forgets them.  Those that fail now are added.
        settings: As in `clean`.
        fence: As in `clean`; where it raises `FencedError` the round goes on with the
            next partition, which asks it again.
        pace: As in `clean`.

    Raises:
        ClosedError: The log was closed meanwhile.
    """
    done = []
    logs = [log for log in logs if log not in failed]
    for log in logs:
        _roll_idle(log, now_ms, failed)
    for section in choose(logs, now_ms, failed):
        one = attempt(section.log, now_ms, settings=settings, fence=fence, pace=pace)
        if one.error is not None and not isinstance(one.error, FencedError):
            failed[section.log] = one.error
        done.append(one)
    return done


def _roll_idle(log: PartitionLog, now_ms: int, failed: dict[PartitionLog, EmbedlogError]) -> None:
    """Roll what no append will roll: an active segment is never compacted (D6)."""
    try:
        log.refresh()
        now = log.tail()
        if (
            log.config.compacts
            and not now.empty
            and now_ms - now.created_ms > log.rules.max_segment_ms
        ):
            log.roll()
    except ClosedError:
        raise
    except EmbedlogError as error:
        failed[log] = error


def attempt(
    log: PartitionLog,
    now_ms: int,
    *,
    settings: MaintenanceConfig | None = None,
    fence: Fence = no_fence,
    progress: Progress | None = None,
    pace: Throttle | None = None,
    roll: bool = False,
) -> CleanResult:
    """Clean one partition as `clean` does, but return what went wrong instead of raising it.

    With ``roll`` the active segment is rolled first, so that what it holds can be cleaned.
    """
    try:
        if roll:
            log.context.reserve.used_by(log.roll)
        return log.context.reserve.used_by(
            lambda: clean(log, now_ms, settings=settings, fence=fence, progress=progress, pace=pace)
        )
    except ClosedError:
        raise
    except EmbedlogError as error:
        if not isinstance(error, FencedError):
            _logger.warning("%s-%d is not compacted: %s", log.topic, log.partition, error)
        return CleanResult(
            log.topic, log.partition, why=f"not compacted: {error.what}", error=error
        )
