"""What there is to do: plain functions of a `JobContext`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from typing import TYPE_CHECKING

from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.errors import (
    ClosedError,
    DiskFullError,
    EmbedlogError,
    FencedError,
    UnknownTopicOrPartitionError,
)
from embedlog.group import Group, names
from embedlog.groups import offsets
from embedlog.maintenance import activity
from embedlog.maintenance.job_context import JobContext, MaintenanceJob
from embedlog.partition import PartitionLog, flush, tail
from embedlog.partition.producer_expiration import expire_producers
from embedlog.retention import RetentionResult, retain

if TYPE_CHECKING:
    from embedlog.compaction import CleanResult, Throttle

CHECKPOINT_SECONDS = 5.0
ACTIVITY_SECONDS = 2.0
FLUSH_SECONDS = 1.0
FORGIVING_SECONDS = 600.0
"""A partition that could not be compacted is left alone for so long."""


def jobs_of(config: MaintenanceConfig) -> tuple[MaintenanceJob, ...]:
    """Return the jobs, as often as a config says."""
    found = [
        MaintenanceJob("retention", config.log_retention_check_interval_ms / 1000, _retention),
        MaintenanceJob("flush", FLUSH_SECONDS, _flush),
        MaintenanceJob("checkpoint", CHECKPOINT_SECONDS, _checkpoint),
        MaintenanceJob(
            "offsets",
            config.offsets_retention_check_interval_ms / 1000,
            lambda turn: _expire_offsets(turn, config.offsets_retention_minutes * 60_000),
        ),
        MaintenanceJob(
            "producers", config.producer_id_expiration_check_interval_ms / 1000, _expire_producers
        ),
    ]
    if config.log_cleaner_enable:
        pause, threads = config.log_cleaner_backoff_ms / 1000, config.log_cleaner_threads
        found.append(MaintenanceJob("compaction", pause, CompactionJob(config), threads))
    # The last one, so that a round by hand tells also what it changed.
    found.append(MaintenanceJob("activity", ACTIVITY_SECONDS, _activity))
    return tuple(found)


def _retention(turn: JobContext) -> list[RetentionResult]:
    return retain(
        turn.root,
        turn.clock(),
        fence=turn.fence,
        stopped=turn.stopping,
        timeout=turn.timeout,
    )


def _flush(turn: JobContext) -> list[PartitionLog]:
    """Flush what flush.ms asks for where nothing is appended any more, so nobody notices (A22)."""
    late = [log for log in _used(turn, flush.by_itself) if flush.is_late(log)]
    if late:
        flush.flush(late)
    return late


def _checkpoint(turn: JobContext) -> int:
    return offsets.checkpoint(turn.root.context.live, turn.root.context.state)


def _expire_offsets(turn: JobContext, retention_ms: int) -> int:
    """Forget what groups committed that were not used for so long (M15)."""
    context, now = turn.root.context, turn.clock()
    expired = {}
    for name in names(context.live, context.state):
        if turn.stopping():
            break
        expired[name] = Group(context, name, tail.ends).expire(now, retention_ms)
    turn.tell([activity.expired(name, count) for name, count in expired.items() if count])
    return sum(expired.values())


def _expire_producers(turn: JobContext) -> int:
    """Forget the producers that were idle for `producer.id.expiration.ms` (G19)."""
    now_ms, forgotten = turn.clock(), 0
    failures: list[EmbedlogError] = []
    for log in _used(turn, lambda config: True):
        if turn.stopping():
            break
        try:
            forgotten += expire_producers(log, now_ms, fence=turn.fence, timeout=turn.timeout)
        except (ClosedError, FencedError):
            raise
        except UnknownTopicOrPartitionError:
            continue  # deleted meanwhile
        except EmbedlogError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return forgotten


def _activity(turn: JobContext) -> list[activity.Event]:
    """Tell what others did since the last look."""
    return activity.look(turn.root, turn.fence)


class CompactionJob:
    """Compacts what is due; its threads share one budget of bytes, and what failed (D3, D4).

    Several threads look for themselves; of a partition that one of them has the
    others are told that it is not free, and go on with the next.
    """

    def __init__(self, config: MaintenanceConfig) -> None:
        self._config = config
        self._throttle: Throttle | None = None
        self._failed: dict[PartitionLog, EmbedlogError] = {}
        self._forgiven = monotonic()

    def __call__(self, turn: JobContext) -> list[CleanResult]:
        """Do one round; what went wrong with a partition is in its `CleanResult`."""
        logs = list(_used(turn, lambda config: config.compacts))
        if not logs:
            return []
        # Only now: it loads numpy, which a program without compacted topics may never need.
        from embedlog.compaction import Throttle, clean_round

        self._throttle = self._throttle or Throttle(
            self._config.log_cleaner_io_max_bytes_per_second
        )
        if monotonic() - self._forgiven > FORGIVING_SECONDS:
            self._failed.clear()
            self._forgiven = monotonic()

        def fence() -> None:
            if turn.stopping():
                raise FencedError("the housekeeping ends here", path=turn.root.path)
            turn.root.context.live.read(turn.fence)

        now = turn.clock()
        done = clean_round(
            logs, now, self._failed, settings=self._config, fence=fence, throttle=self._throttle
        )
        # There may be room again.
        for log, error in list(self._failed.items()):
            if isinstance(error, DiskFullError):
                self._failed.pop(log, None)
        if done:
            # Compaction may have given the reserve up, and made room for it since.
            turn.root.context.reserve.keep()
        return done


def _used(turn: JobContext, wanted: Callable[[TopicConfig], bool]) -> Iterator[PartitionLog]:
    """Yield the partitions used since the boot, of topics with such a config."""
    for info in turn.root.topics().values():
        for number in range(info.partitions if wanted(info.config) else 0):
            try:
                log = turn.root.partition(info.name, number)
            except UnknownTopicOrPartitionError:
                break  # deleted meanwhile
            # To look at one that was not would make its files.
            if log.context.live.get(log.tail_key) is not None:
                yield log


JOBS = jobs_of(MaintenanceConfig())
