"""The maintenance jobs: plain functions of a `JobContext`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from embedlog import keyspace, kv
from embedlog.catalog import TopicInfo
from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.errors import EmbedlogError, FencedError
from embedlog.failures import Failures
from embedlog.files.throttle import Throttle
from embedlog.group import Group, group_ids
from embedlog.lazy import logging
from embedlog.maintenance import activity
from embedlog.partition import PartitionLog, flush, key_index, replace, tail
from embedlog.partition.producer_state import expire_producers
from embedlog.partition.state import has_flush_interval
from embedlog.retention import RetentionResult, retain
from embedlog.root.root import Root

if TYPE_CHECKING:
    from embedlog.compaction import CleanResult
    from embedlog.compaction.rebatch import RebatchResult

CHECKPOINT_SECONDS = 5.0
ACTIVITY_SECONDS = 2.0
FLUSH_SECONDS = 1.0
KEYS_SECONDS = 15.0
REPLICATION_SECONDS = 0.1
RETRY_SECONDS = 600.0
"""How long a partition that cannot be compacted is skipped at most."""


_log = logging.getLogger("embedlog.maintenance")


class MaintenanceOwner(NamedTuple):
    """The process that does the maintenance of a log."""

    epoch: int
    """Grows with each change of the owner."""
    deadline_ms: int
    """In milliseconds since boot; after it another process may take over."""
    pid: int


OWNER = keyspace.MAINTENANCE_OWNER.typed(MaintenanceOwner)


def owner_in(txn: kv.Txn | kv.Store) -> MaintenanceOwner:
    """Return the owner in a transaction of `live`; without one, epoch 0 with a deadline of 0."""
    return OWNER.get(txn) or MaintenanceOwner(0, 0, 0)


@dataclass(slots=True)
class JobContext:
    """What a job gets: the log, the time, and whether to continue."""

    root: Root
    epoch: int
    """The epoch of this owner."""
    clock: Callable[[], int]
    """Returns milliseconds since 1970; called once per round."""
    should_stop: Callable[[], bool]
    """Whether the job must end; a fork may happen during this call."""
    timeout: float | None = None
    """Seconds to wait for the lock of a partition; by default as for any lock."""
    failures: Failures = field(default_factory=lambda: Failures(_log))
    """For parts of the job whose errors do not stop the others."""

    def report(self, events: Sequence[activity.Event]) -> None:
        """Append events to the activity topic of the log; failures are only logged."""
        activity.report(self.root, events, os.getpid(), self.failures)

    def fence(self, txn: kv.Txn) -> None:
        """Check in a transaction of `live` that this process still is the owner.

        Raises:
            FencedError: Another process took over.
        """
        if owner_in(txn).epoch != self.epoch:
            raise FencedError(
                "Another process took over the maintenance of the log",
                path=self.root.path,
                todo="No action needed: the other process runs the jobs.",
            )

    def check(self) -> None:
        """Check that this process is still the owner, and should continue.

        Raises:
            FencedError: It is not.
        """
        if self.should_stop():
            raise FencedError("Maintenance ends in this process", path=self.root.path)
        self.root.context.live.read(self.fence)


class MaintenanceJob(NamedTuple):
    """A job that one process does at regular intervals."""

    name: str
    every_seconds: float
    run: Callable[[JobContext], object]
    """Must call `JobContext.should_stop` often, and `JobContext.fence` before it deletes."""
    threads: int = 1
    """How many threads may run it at the same time."""
    longest_pause: float | None = None
    """How many seconds to wait at most after a failure; by default a minute, or `every_seconds`
    if that is longer."""


def jobs_of(config: MaintenanceConfig, *, replicated: bool = False) -> tuple[MaintenanceJob, ...]:
    """Return the jobs with the intervals of a config.

    Args:
        config: The settings.
        replicated: Whether the log has several directories.
    """
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
    if replicated:
        from embedlog.replication.jobs import ReplicationJob

        replication = ReplicationJob(config)
        jobs.append(
            MaintenanceJob(
                "replication",
                REPLICATION_SECONDS,
                lambda job: replication.run(job.root, job.should_stop),
                longest_pause=1.0,  # Directories may come back at any time.
            )
        )
    if config.log_cleaner_enable:
        backoff, threads = config.log_cleaner_backoff_ms / 1000, config.log_cleaner_threads
        jobs.append(MaintenanceJob("compaction", backoff, CompactionJob(config), threads))
        jobs.append(MaintenanceJob("rebatch", backoff, _rebatch))
    jobs.append(MaintenanceJob("keys", KEYS_SECONDS, _index_keys))
    # The last one, so that `maintain` also reports what the other jobs changed.
    jobs.append(MaintenanceJob("activity", ACTIVITY_SECONDS, _activity))
    return tuple(jobs)


def _retention(job: JobContext) -> list[RetentionResult]:
    return retain(
        *(job.root, job.clock(), job.failures),
        fence=job.fence,
        stopped=job.should_stop,
        timeout=job.timeout,
    )


def _flush(job: JobContext) -> list[PartitionLog]:
    """Flush partitions for which flush.ms has passed without another append."""
    late = []
    with job.failures.collecting() as part:
        for log in _used_partitions(job, has_flush_interval):
            with part(f"Flush of {log.topic}-{log.partition}"):
                if flush.is_overdue(log):
                    late.append(log)
        with part("Flush of the partitions that are overdue"):
            flush.flush(late)
    return late


def _checkpoint(job: JobContext) -> int:
    return job.root.context.checkpoint()


def _expire_offsets(job: JobContext, retention_ms: int) -> int:
    """Delete committed offsets of groups that were not used for ``retention_ms``."""
    context, now_ms, events = job.root.context, job.clock(), []
    with job.failures.collecting() as part:
        for name in group_ids(context.live, context.state):
            if job.should_stop():
                break
            with part(f"Expiry of the offsets of group {name}"):
                group = Group(context, name, tail.ends)
                if count := group.expire_offsets(now_ms, retention_ms):
                    facts = {"group": name, "offsets": count}
                    events.append(activity.Event("expired", name, facts))
        job.report(events)
    return sum(event.facts["offsets"] for event in events)


def _expire_producers(job: JobContext) -> int:
    """Forget the producers that were idle for `producer.id.expiration.ms`."""
    now_ms, expired = job.clock(), 0
    with job.failures.collecting() as part:
        for log in _used_partitions(job, lambda config: True):
            if job.should_stop():
                break
            with part(f"Expiry of the producers of {log.topic}-{log.partition}"):
                expired += expire_producers(log, now_ms, fence=job.fence, timeout=job.timeout)
    return expired


def _rebatch(job: JobContext) -> list[RebatchResult]:
    """Gather the small batches of sealed segments, and compute statistics that are missing."""
    typed = {info.name for info in job.root.topics().values() if info.schema_version}
    topics = [
        info
        for info in job.root.topics().values()
        if info.name in typed or info.config.rebatch_min_rows > 0
    ]
    logs = list(_used_partitions_of(job, topics))
    if not logs:
        return []
    # Imported here: it loads pyarrow, which programs without such topics may not need.
    from embedlog.compaction.rebatch import add_statistics, rebatch_round

    results = []
    with job.failures.collecting() as part:
        for log in logs:
            with part(f"Gathering the batches of {log.topic}-{log.partition}"):
                results += rebatch_round([log], job.check)
                add_statistics(log, job.check)
    return results


def _index_keys(job: JobContext) -> int:
    """Write the key indexes of sealed segments that have none; return how many."""
    built = 0
    with job.failures.collecting() as part:
        for log in _used_partitions(job, key_index.is_enabled):
            if job.should_stop():
                break
            with part(f"Key indexes of {log.topic}-{log.partition}"):
                log.refresh()
                if key_index.is_enabled(log.config) and log.key_index.missing():
                    flush.flush_up_to(log, log.active_segment.base_offset)
                    with replace.rewrite_lock(log) as free:
                        built += log.key_index.build_missing(job.check) if free else 0
    return built


def _activity(job: JobContext) -> list[activity.Event]:
    """Return the changes that other processes made since the last round."""
    return activity.detect_changes(job.root, job.fence, job.failures)


class CompactionJob:
    """Compacts what is due; its threads share a throttle, and skip what failed.

    Each thread selects partitions by itself, and skips one that another thread is
    compacting.
    """

    def __init__(self, config: MaintenanceConfig) -> None:
        self._config = config
        self._throttle: Throttle | None = None
        self._retry_at: dict[PartitionLog, float] = {}
        """By partition that failed: when to try again."""

    def __call__(self, job: JobContext) -> list[CleanResult]:
        """Do one round; errors of a partition are in its `CleanResult`."""
        logs = list(_used_partitions(job, lambda config: config.compacts))
        if not logs:
            return []
        # Imported here: it loads numpy, which programs without compacted topics may not need.
        from embedlog.compaction import CleanOptions, clean_round

        self._throttle = self._throttle or Throttle(
            self._config.log_cleaner_io_max_bytes_per_second
        )
        options = CleanOptions(settings=self._config, fence=job.check, throttle=self._throttle)
        due = [log for log in logs if monotonic() >= self._retry_at.get(log, 0)]
        failed: dict[PartitionLog, EmbedlogError] = {}
        results = clean_round(due, job.clock(), failed, options)
        for log in due:
            self._note(job, log, failed.get(log))
        if results:
            # Compaction may have released the reserve, and freed the space for it since.
            job.root.context.reserve.keep()
        return results

    def _note(self, job: JobContext, log: PartitionLog, error: EmbedlogError | None) -> None:
        """Note whether a partition failed in this round; it is skipped for a while then."""
        failures, work = job.failures, f"Compaction of {log.topic}-{log.partition}"
        if error is None:
            failures.end(work)
            return
        if failures.note(work, error):
            job.report(activity.failures_of(log.topic, log.partition, "compaction", error))
        first = self._config.log_cleaner_backoff_ms / 1000
        self._retry_at[log] = monotonic() + failures.pause_seconds(work, first, RETRY_SECONDS)


def _used_partitions(
    job: JobContext, wanted: Callable[[TopicConfig], bool]
) -> Iterator[PartitionLog]:
    """Yield the partitions used since the boot whose topics have such a config."""
    topics = [info for info in job.root.topics().values() if wanted(info.config)]
    return _used_partitions_of(job, topics)


def _used_partitions_of(job: JobContext, topics: Iterable[TopicInfo]) -> Iterator[PartitionLog]:
    for log in job.root.partition_logs(topics):
        # Using a partition for the first time since the boot would create its files.
        if log.context.live.get(log.tail_key) is not None:
            yield log


JOBS = jobs_of(MaintenanceConfig())
