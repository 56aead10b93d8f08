"""One round of retention over a log: inspect, decide, delete; and `delete_records`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from embedlog import keyspace, kv
from embedlog.errors import DiskFullError
from embedlog.failures import Failures
from embedlog.groups.offsets import CHECKPOINTS, COMMITTED, CommittedOffset, in_partition
from embedlog.lazy import logging
from embedlog.partition import PartitionLog, leases, log_start, unnamed_files
from embedlog.partition.state import Context
from embedlog.partition.tail import Tail
from embedlog.retention import policy
from embedlog.retention.policy import RetainedSegment
from embedlog.root import topic_deletion
from embedlog.root.root import Root
from embedlog.snapshots import snapshot

Fence = Callable[[kv.Txn], None]
"""Raises, in a transaction of `live`, if this process may not do maintenance any more."""

_NO_LIMIT = (1 << 63) - 1
_log = logging.getLogger("embedlog.retention")


class RetentionResult(NamedTuple):
    """What a round deleted of one partition."""

    topic: str
    partition: int
    start_offset: int
    segments: int
    bytes: int


class RetentionConstraint(NamedTuple):
    """Records from ``offset`` on must be kept."""

    offset: int
    why: str


class PartitionView(NamedTuple):
    """A partition as retention sees it at one moment."""

    log: PartitionLog
    tail: Tail
    segments: list[RetainedSegment]
    checkpointed: Mapping[bytes, int]
    """The committed offsets by group, as of the last checkpoint."""
    constraints: list[RetentionConstraint]

    @property
    def keep_from(self) -> int:
        """The offset at and above which nothing may be deleted."""
        lowest = min((constraint.offset for constraint in self.constraints), default=_NO_LIMIT)
        # Below this offset ``retention.bytes.hard`` overrides all constraints.
        hard_bytes = self.log.config.retention_bytes_hard
        count = policy.apply_budget({0: self.segments}, {0: 0}, {0: _NO_LIMIT}, hard_bytes)[0]
        return max(lowest, policy.start_after(self.segments, count))

    def count_deletable(self, now_ms: int) -> int:
        """Return how many of the segments that are due no constraint keeps."""
        due = policy.count_due(self.segments, self.log.config, now_ms)
        keep_from = self.keep_from
        return sum(segment.next_offset <= keep_from for segment in self.segments[:due])


def retain(
    root: Root,
    now_ms: int,
    failures: Failures | None = None,
    *,
    fence: Fence | None = None,
    stopped: Callable[[], bool] = bool,
    timeout: float | None = None,
) -> list[RetentionResult]:
    """Delete what the settings ask for in every partition, and unlink the files that are due.

    Uses the settings as they are now.  If a partition fails, the others are done
    nevertheless, and the first error is raised at the end.

    Args:
        root: The open log.
        now_ms: The time, in milliseconds since 1970.
        failures: Notes the partitions that fail.
        fence: Called in every transaction that deletes.
        stopped: Called between partitions; if it returns True, the next round does the others.
        timeout: Seconds to wait for the lock of a partition; by default as for any lock.

    Raises:
        FencedError: Another process does the maintenance now.
        EmbedlogError: Some partition could not be inspected, or its segments not deleted.
    """
    root.context.check_writable()
    results = []
    with (failures or Failures(_log)).collecting() as part:
        for view, goal in _goals(root, now_ms, part, stopped):
            if stopped():
                break
            with part(f"Deletion of segments of {view.log.topic}-{view.log.partition}"):
                results += _delete_even_if_full(view, goal, fence, timeout)
        if fence is not None:
            root.context.live.read(fence)
        # The step that frees space comes first, since the others need some.
        for work, step in _STEPS.items():
            with part(work):
                step(root.context)
        root.context.reserve.keep()
    return results


_STEPS: Mapping[str, Callable[[Context], object]] = {
    "Removal of files that are to be deleted": unnamed_files.sweep_due,
    "Deletion of topics": topic_deletion.finish_all,
    "Removal of leases that have ended": leases.forget_ended,
    "Deletion of snapshots that have expired": snapshot.expire,
}


def _goals(
    root: Root,
    now_ms: int,
    part: Callable[[str], AbstractContextManager[None]],
    stopped: Callable[[], bool],
) -> list[tuple[PartitionView, int]]:
    """Return the partitions that have something to delete, and their new log start offsets."""
    budget = root.context.catalog.retention_bytes()
    views: dict[PartitionLog, PartitionView] = {}
    counts: dict[PartitionLog, int] = {}
    for info in root.topics().values():
        of_topic: dict[PartitionLog, PartitionView] = {}
        for number in range(info.partitions):
            if stopped():
                break
            with part(f"Retention of {info.name}-{number}"):
                log = root.partition(info.name, number)
                # Inspecting a partition that was not used since the boot would create its files.
                if log.context.live.get(log.tail_key) is not None:
                    log.refresh()
                    if budget is not None or _may_be_due(log, now_ms):
                        of_topic[log] = inspect(log, now_ms)
        views |= of_topic
        deletable = {log: view.count_deletable(now_ms) for log, view in of_topic.items()}
        counts |= _apply_budget(of_topic, deletable, info.config.retention_topic_bytes)
    if budget is not None:
        counts = _apply_budget(views, counts, budget)
    goals = []
    for log, view in views.items():
        if _log.isEnabledFor(logging.DEBUG):
            _log_decision(view, counts[log], now_ms)
        goal = policy.start_after(view.segments, counts[log])
        # Segments may also lie below the log start offset, whatever moved it (C1, C6).
        if goal or (view.segments and view.segments[0].next_offset <= view.tail.start_offset):
            goals.append((view, goal))
    return goals


def _log_decision(view: PartitionView, count: int, now_ms: int) -> None:
    due = policy.count_due(view.segments, view.log.config, now_ms)
    kept_by = "; ".join(f"{kept.why} from offset {kept.offset} on" for kept in view.constraints)
    _log.debug(
        "%s-%d: %d of %d segments are due, %d are deleted; kept by: %s",
        *(view.log.topic, view.log.partition, due, len(view.segments), count, kept_by or "nothing"),
    )


def _apply_budget(
    views: Mapping[PartitionLog, PartitionView], counts: Mapping[PartitionLog, int], max_bytes: int
) -> dict[PartitionLog, int]:
    """Raise the counts to what a budget asks for; only what may be deleted frees space."""
    # A compacted topic counts, but only compaction makes it smaller (C6).
    keep_from = {log: view.keep_from if log.config.deletes else 0 for log, view in views.items()}
    segments = {log: view.segments for log, view in views.items()}
    return policy.apply_budget(segments, counts, keep_from, max_bytes)


def _may_be_due(log: PartitionLog, now_ms: int) -> bool:
    """Whether to read the whole manifest: if only time counts, the oldest segment decides."""
    config = log.config
    if max(config.retention_bytes, config.retention_topic_bytes) >= 0:
        return True
    tail = log.tail()
    oldest = log.segment_at(0)
    if oldest.next_offset is not None and oldest.next_offset <= tail.start_offset:
        return True
    if not config.deletes or config.retention_ms < 0:
        return False
    info = oldest if oldest.sealed else policy.up_to_tail(oldest, tail)
    segment = policy.retained_segment(info, now_ms, config.retention_clock)
    return segment.timestamp is None or now_ms - segment.timestamp > config.retention_ms


def inspect(log: PartitionLog, now_ms: int) -> PartitionView:
    """Return the state of a partition, and what must be kept of it."""
    # The tail first: a segment that is rolled after it counts as sealed.
    tail = log.tail()
    log.refresh()
    segments = policy.retained_segments(
        list(log.segments.values()), tail, now_ms, log.config.retention_clock
    )
    checkpointed = {}
    if log.config.retention_min_consumed:
        # The last checkpoint counts for groups that were not used since the boot.
        checkpointed = log.context.state.read(lambda txn: _positions(CHECKPOINTS, txn, log.key))
    view = PartitionView(log, tail, segments, checkpointed, [])
    return view._replace(constraints=log.context.live.read(lambda txn: _constraints(view, txn)))


def _constraints(view: PartitionView, txn: kv.Txn) -> list[RetentionConstraint]:
    """Return the limits that leases and groups set on retention, in a transaction of `live`."""
    log = view.log
    constraints = [
        RetentionConstraint(hold.offset, str(hold))
        for hold in leases.held_in(txn, log.key, log.context.files.uptime_ms())
    ]
    required = log.config.retention_min_consumed
    if not required:
        return constraints
    positions = {**view.checkpointed, **_positions(COMMITTED, txn, log.key)}
    for group in positions if required == "all" else map(str.encode, required.split(",")):
        progress = "has not consumed them"
        if group not in positions:
            progress = "has consumed nothing of this partition"
        why = f"group {group.decode()!r} {progress}"
        constraints.append(RetentionConstraint(positions.get(group, 0), why))
    return constraints


def _positions(
    table: keyspace.Table[CommittedOffset], txn: kv.Txn, partition: bytes
) -> dict[bytes, int]:
    """Return the committed offset of each group; 0, the safe one, if its row is damaged."""
    rows = in_partition(table, txn, partition)
    return {group: 0 if row is None else row.position.offset for group, row in rows.items()}


def _delete_even_if_full(
    view: PartitionView, goal: int, fence: Fence | None, timeout: float | None
) -> list[RetentionResult]:
    """Delete; if the disk is full, free space and try again, then with fewer segments."""
    context, segments = view.log.context, view.segments
    count = sum(segment.next_offset <= goal for segment in segments)
    try:
        return _delete(view, goal, fence, timeout)
    except DiskFullError:
        # First unlink the files whose deletion is pending, then the reserve.
        with suppress(DiskFullError):
            unnamed_files.sweep(context, early=True)
        context.reserve.give_up()
    while True:
        try:
            return _delete(view, goal, fence, timeout)
        except DiskFullError:
            count //= 2
            if not count:
                raise
            goal = policy.start_after(segments, count)


def _delete(
    view: PartitionView, goal: int, fence: Fence | None, timeout: float | None
) -> list[RetentionResult]:
    log = view.log

    def limit(txn: kv.Txn) -> int:
        # Checked again in the transaction: there may be a new lease, or a new owner.
        if fence is not None:
            fence(txn)
        return view._replace(constraints=_constraints(view, txn)).keep_from

    goal, epoch = min(goal, view.tail.high_watermark), view.tail.leader_epoch
    start, segments, size = log_start.move_log_start(
        log, goal, whole=True, epoch=epoch, limit=limit, timeout=timeout
    )
    if not segments:
        return []
    _log.info(
        "%s-%d: deleted %d segments below offset %d", log.topic, log.partition, segments, start
    )
    return [RetentionResult(log.topic, log.partition, start, segments, size)]


def delete_records(log: PartitionLog, offset: int) -> int:
    """Make all records below ``offset`` unreadable, and return the new log start offset.

    As in Kafka, -1 is the end of the log.  Takes effect immediately and durably, ignoring
    leases and consumer groups.  Segments that are entirely below the offset are deleted,
    including the active one.

    Raises:
        OffsetOutOfRangeError: The offset is past the end.
        Exception: As `log_start.move_log_start`.
    """
    log.refresh()
    goal = log.tail().high_watermark if offset == -1 else offset
    return log.context.reserve.used_by(lambda: log_start.move_log_start(log, goal)).start_offset
