"""The maintenance jobs: plain functions of a `JobContext`."""

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
from embedlog.group import Group, group_ids
from embedlog.groups import offsets
from embedlog.maintenance import activity
from embedlog.maintenance.job_context import JobContext, MaintenanceJob
from embedlog.partition import PartitionLog, flush, tail
from embedlog.partition.producers import expire_producers
from embedlog.partition.state import has_flush_interval
from embedlog.retention import RetentionResult, retain

if TYPE_CHECKING:
    from embedlog.compaction import CleanResult, Throttle

CHECKPOINT_SECONDS = 5.0
ACTIVITY_SECONDS = 2.0
FLUSH_SECONDS = 1.0
RETRY_SECONDS = 600.0
"""How long a partition that could not be compacted is skipped."""


def jobs_of(config: MaintenanceConfig) -> tuple[MaintenanceJob, ...]:
    """Return the jobs with the intervals of a config."""
    jobs = [
        MaintenanceJob("retention", config.log_retention_check_interval_ms / 1000, _retention),
        MaintenanceJob("flush", FLUSH_SECONDS, _flush),
        MaintenanceJob("checkpoint", CHECKPOINT_SECONDS, _checkpoint),
        MaintenanceJob(
            "offsets",
            config.offsets_retention_check_interval_ms / 1000,
            lambda job: _expire_offsets(job, config.offsets_retention_minutes * 60_000),
        ),
        MaintenanceJob(
            "producers", config.producer_id_expiration_check_interval_ms / 1000, _expire_producers
        ),
    ]
    if config.log_cleaner_enable:
        backoff, threads = config.log_cleaner_backoff_ms / 1000, config.log_cleaner_threads
        jobs.append(MaintenanceJob("compaction", backoff, CompactionJob(config), threads))
    # The last one, so that `maintain` also reports what the other jobs changed.
    jobs.append(MaintenanceJob("activity", ACTIVITY_SECONDS, _activity))
    return tuple(jobs)


def _retention(job: JobContext) -> list[RetentionResult]:
    return retain(
        job.root, job.clock(), fence=job.fence, stopped=job.should_stop, timeout=job.timeout
    )


def _flush(job: JobContext) -> list[PartitionLog]:
    """Flush partitions for which flush.ms has passed without another append (A22)."""
    late = [log for log in _used_partitions(job, has_flush_interval) if flush.is_overdue(log)]
    if late:
        flush.flush(late)
    return late


def _checkpoint(job: JobContext) -> int:
    return offsets.checkpoint(job.root.context.live, job.root.context.state)


def _expire_offsets(job: JobContext, retention_ms: int) -> int:
    """Delete committed offsets of groups that were not used for ``retention_ms`` (M15)."""
    context, now_ms = job.root.context, job.clock()
    expired = {}
    for name in group_ids(context.live, context.state):
        if job.should_stop():
            break
        expired[name] = Group(context, name, tail.ends).expire_offsets(now_ms, retention_ms)
    job.report([activity.expired(name, count) for name, count in expired.items() if count])
    return sum(expired.values())


def _expire_producers(job: JobContext) -> int:
    """Forget the producers that were idle for `producer.id.expiration.ms` (G19)."""
    now_ms, expired = job.clock(), 0
    failures: list[EmbedlogError] = []
    for log in _used_partitions(job, lambda config: True):
        if job.should_stop():
            break
        try:
            expired += expire_producers(log, now_ms, fence=job.fence, timeout=job.timeout)
        except (ClosedError, FencedError):
            raise
        except UnknownTopicOrPartitionError:
            continue  # The topic was deleted meanwhile.
        except EmbedlogError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return expired


def _activity(job: JobContext) -> list[activity.Event]:
    """Return the changes that other processes made since the last round."""
    return activity.detect_changes(job.root, job.fence)


class CompactionJob:
    """Compacts what is due; its threads share a throttle and the list of failures (D3, D4).

    Each thread selects partitions by itself; if another thread is compacting one, the
    thread gets an error and continues with the next.
    """

    def __init__(self, config: MaintenanceConfig) -> None:
        self._config = config
        self._throttle: Throttle | None = None
        self._failed: dict[PartitionLog, EmbedlogError] = {}
        self._failed_since = monotonic()

    def __call__(self, job: JobContext) -> list[CleanResult]:
        """Do one round; errors of a partition are in its `CleanResult`."""
        logs = list(_used_partitions(job, lambda config: config.compacts))
        if not logs:
            return []
        # Imported here: it loads numpy, which programs without compacted topics may not need.
        from embedlog.compaction import Throttle, clean_round

        self._throttle = self._throttle or Throttle(
            self._config.log_cleaner_io_max_bytes_per_second
        )
        if monotonic() - self._failed_since > RETRY_SECONDS:
            self._failed.clear()
            self._failed_since = monotonic()

        def fence() -> None:
            if job.should_stop():
                raise FencedError("Maintenance ends in this process", path=job.root.path)
            job.root.context.live.read(job.fence)

        results = clean_round(
            logs,
            job.clock(),
            self._failed,
            settings=self._config,
            fence=fence,
            throttle=self._throttle,
        )
        # There may be space again in the next round.
        for log, error in list(self._failed.items()):
            if isinstance(error, DiskFullError):
                self._failed.pop(log, None)
        if results:
            # Compaction may have given up the reserve, and freed the space for it since.
            job.root.context.reserve.keep()
        return results


def _used_partitions(
    job: JobContext, wanted: Callable[[TopicConfig], bool]
) -> Iterator[PartitionLog]:
    """Yield the partitions used since the boot whose topics have such a config."""
    for info in job.root.topics().values():
        for number in range(info.partitions if wanted(info.config) else 0):
            try:
                log = job.root.partition(info.name, number)
            except UnknownTopicOrPartitionError:
                break  # The topic was deleted meanwhile.
            # Using one that was not used since the boot would create its files.
            if log.context.live.get(log.tail_key) is not None:
                yield log


JOBS = jobs_of(MaintenanceConfig())
