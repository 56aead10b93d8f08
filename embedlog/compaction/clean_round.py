"""One round of compaction: clean all partitions that are due, even if some of them fail."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from embedlog.compaction.cleanable import select_due
from embedlog.compaction.cleaner import DEFAULT_OPTIONS, CleanOptions, CleanResult, clean
from embedlog.errors import ClosedError, EmbedlogError, FencedError
from embedlog.partition import PartitionLog

_logger = logging.getLogger("embedlog.compaction")


def clean_round(
    logs: Iterable[PartitionLog],
    now_ms: int,
    failed: dict[PartitionLog, EmbedlogError],
    options: CleanOptions = DEFAULT_OPTIONS,
) -> list[CleanResult]:
    """Clean the partitions that are due, the most urgent first (D3, D4).

    Args:
        logs: All partitions; those of topics that are not compacted are skipped.
        now_ms: The time.
        failed: Partitions to skip, with the error of their last compaction.  Those that
            fail in this round are added; the caller removes them.
        options: How to clean.  After a `FencedError` the round goes on with the next
            partition, which calls the fence again.

    Raises:
        ClosedError: The log was closed meanwhile.
    """
    results = []
    logs = [log for log in logs if log not in failed]
    for log in logs:
        _roll_idle(log, now_ms, failed)
    for cleanable in select_due(logs, now_ms, failed):
        result = try_clean(cleanable.log, now_ms, options)
        if result.error is not None and not isinstance(result.error, FencedError):
            failed[cleanable.log] = result.error
        results.append(result)
    return results


def _roll_idle(log: PartitionLog, now_ms: int, failed: dict[PartitionLog, EmbedlogError]) -> None:
    """Roll an expired active segment that gets no appends, so that it can be compacted (D6)."""
    try:
        log.refresh()
        tail = log.tail()
        if (
            log.config.compacts
            and not tail.empty
            and now_ms - tail.created_ms > log.rules.max_segment_ms
        ):
            log.roll()
    except ClosedError:
        raise
    except EmbedlogError as error:
        failed[log] = error


def try_clean(
    log: PartitionLog,
    now_ms: int,
    options: CleanOptions = DEFAULT_OPTIONS,
    *,
    roll: bool = False,
) -> CleanResult:
    """Clean one partition as `clean` does, but return errors in the result.

    With ``roll``, roll the active segment first, so that its records are cleaned too.

    Raises:
        ClosedError: The log was closed meanwhile.
    """
    reserve = log.context.reserve
    try:
        if roll:
            reserve.used_by(log.roll)
        return reserve.used_by(lambda: clean(log, now_ms, options))
    except ClosedError:
        raise
    except EmbedlogError as error:
        if not isinstance(error, FencedError):
            _logger.warning("Cannot compact %s-%d: %s", log.topic, log.partition, error)
        return CleanResult(
            log.topic, log.partition, why=f"not compacted: {error.what}", error=error
        )
