"""One round of retention over a log: inspect, decide, delete; and `delete_records`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from embedlog import kv
from embedlog.errors import (
    ClosedError,
    DiskFullError,
    EmbedlogError,
    FencedError,
    UnknownTopicOrPartitionError,
)
from embedlog.partition import PartitionLog, leases, log_start, pending_deletes
from embedlog.partition.tail import Tail
from embedlog.retention import policy
from embedlog.retention.constraints import (
    NO_LIMIT,
    RetentionConstraint,
    checkpointed_positions,
    find_constraints,
)
from embedlog.retention.policy import RetainedSegment
from embedlog.root import topic_deletion
from embedlog.root.root import Root

Fence = Callable[[kv.Txn], None]
"""Raises, in a transaction of `live`, if this process may not do maintenance any more."""

_log = logging.getLogger("embedlog")


class RetentionResult(NamedTuple):
    """What a round deleted of one partition."""

    topic: str
    partition: int
    start_offset: int
    segments: int
    bytes: int


class PartitionView(NamedTuple):
    """A partition as retention sees it at one moment."""

    log: PartitionLog
    tail: Tail
    segments: list[RetainedSegment]
    checkpointed: dict[bytes, int]
    constraints: list[RetentionConstraint]

    @property
    def hard_limit(self) -> int:
        """The offset below which ``retention.bytes.hard`` overrides all constraints."""
        count = policy.count_above(self.segments, self.log.config.retention_bytes_hard)
        return policy.start_after(self.segments, count)

    @property
    def keep_from(self) -> int:
        """The offset from which on nothing may be deleted."""
        lowest = min((constraint.offset for constraint in self.constraints), default=NO_LIMIT)
        return max(lowest, self.hard_limit)

    def count_deletable(self, due: int) -> int:
        """Return how many of the first ``due`` segments no constraint keeps."""
        return sum(segment.next_offset <= self.keep_from for segment in self.segments[:due])


def retain(
    root: Root,
    now_ms: int,
    *,
    fence: Fence | None = None,
    stopped: Callable[[], bool] = bool,
    timeout: float | None = None,
) -> list[RetentionResult]:
    """Delete what the settings ask for in every partition, and unlink the files that are due.

    Uses the settings as they are now (C10).  A partition that fails does not stop the
    others; the first error is raised at the end.

    Args:
        root: The open log.
        now_ms: The time, in milliseconds since 1970.
        fence: Called in every transaction that deletes.
        stopped: Called between partitions: True leaves the others to the next round.
        timeout: Seconds to wait for the lock of a partition; by default as for any lock.

    Raises:
        FencedError: Another process does the maintenance now.
        EmbedlogError: Some partition could not be inspected, or its segments not deleted.
    """
    root.context.check_writable()
    failures: list[EmbedlogError] = []
    results = []
    for view, goal in _goals(root, now_ms, failures, stopped):
        if stopped():
            break
        try:
            results += _trim_even_if_full(view, goal, fence, timeout)
        except (ClosedError, FencedError):
            raise
        except UnknownTopicOrPartitionError:
            continue  # The topic was deleted meanwhile.
        except EmbedlogError as error:
            failures.append(error)
            _log.warning("Retention of %s-%d: %s", view.log.topic, view.log.partition, error)
    if fence is not None:
        root.context.live.read(fence)
    # First what frees space, since the rest needs some.
    for step in (pending_deletes.sweep_due, topic_deletion.finish_all, leases.forget_ended):
        try:
            step(root.context)
        except ClosedError:
            raise
        except EmbedlogError as error:
            failures.append(error)
    root.context.reserve.keep()
    if failures:
        raise failures[0]
    return results


def _goals(
    root: Root, now_ms: int, failures: list[EmbedlogError], stopped: Callable[[], bool]
) -> list[tuple[PartitionView, int]]:
    """Return the partitions that have something to delete, and their new log start offsets."""
    budget = root.context.catalog.retention_bytes()
    views: dict[PartitionLog, PartitionView] = {}
    counts: dict[PartitionLog, int] = {}
    for info in root.topics().values():
        topic_views: dict[PartitionLog, PartitionView] = {}
        for number in range(info.partitions):
            if stopped():
                break
            view = _try_inspect(root, info.name, number, now_ms, budget is not None, failures)
            if view is not None:
                topic_views[view.log] = view
        views |= topic_views
        topic_counts = {
            log: view.count_deletable(policy.count_due(view.segments, log.config, now_ms))
            for log, view in topic_views.items()
        }
        counts |= _apply_budget(topic_views, topic_counts, info.config.retention_topic_bytes)
    if budget is not None:
        counts = _apply_budget(views, counts, budget)
    return [
        (view, goal)
        for log, view in views.items()
        if (goal := policy.start_after(view.segments, counts[log])) or _has_leftovers(view)
    ]


def _apply_budget(
    views: Mapping[PartitionLog, PartitionView],
    counts: Mapping[PartitionLog, int],
    max_bytes: int,
) -> dict[PartitionLog, int]:
    """Raise the counts to what a budget asks for; only what may be deleted frees space."""
    # A compacted topic counts, but only compaction makes it smaller (C6).
    keep_from = {log: view.keep_from if log.config.deletes else 0 for log, view in views.items()}
    segments = {log: view.segments for log, view in views.items()}
    return policy.apply_budget(segments, counts, keep_from, max_bytes)


def _has_leftovers(view: PartitionView) -> bool:
    """Whether whole segments lie below the log start offset, whatever moved it (C1, C6)."""
    return bool(view.segments) and view.segments[0].next_offset <= view.tail.start_offset


def _try_inspect(
    root: Root,
    topic: str,
    number: int,
    now_ms: int,
    always: bool,
    failures: list[EmbedlogError],
) -> PartitionView | None:
    try:
        log = root.partition(topic, number)
        # Not used since the boot; inspecting it would create its files.
        if log.context.live.get(log.tail_key) is None:
            return None
        log.refresh()
        return inspect(log, now_ms) if always or _may_be_due(log, now_ms) else None
    except ClosedError:
        raise
    except UnknownTopicOrPartitionError:
        return None
    except EmbedlogError as error:
        failures.append(error)
        _log.warning("Retention of %s-%d: %s", topic, number, error)
        return None


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
    max_timestamp = oldest.max_timestamp if oldest.sealed else tail.timestamp
    appended_ms = oldest.appended_ms if oldest.sealed else tail.appended_ms
    segment = policy.with_timestamp(
        RetainedSegment(oldest.base_offset, oldest.base_offset, 0, None),
        max_timestamp,
        appended_ms,
        None,
        now_ms,
        config.retention_clock,
    )
    return segment.timestamp is None or now_ms - segment.timestamp > config.retention_ms


def inspect(log: PartitionLog, now_ms: int) -> PartitionView:
    """Return a partition as it is now, and what must be kept of it."""
    # The tail first: a segment that is rolled after it counts as sealed.
    tail = log.tail()
    log.refresh()
    segments = policy.retained_segments(
        list(log.segments.values()), tail, now_ms, log.config.retention_clock
    )
    checkpointed = checkpointed_positions(log)
    constraints = log.context.live.read(lambda txn: list(find_constraints(log, txn, checkpointed)))
    return PartitionView(log, tail, segments, checkpointed, constraints)


def _trim_even_if_full(
    view: PartitionView, goal: int, fence: Fence | None, timeout: float | None
) -> list[RetentionResult]:
    """Trim; if the disk is too full for that, free space first, then try with fewer segments."""
    context, segments = view.log.context, view.segments
    count = sum(segment.next_offset <= goal for segment in segments)
    try:
        return _trim(view, goal, fence, timeout)
    except DiskFullError:
        # First the files that wait for their deletion anyway, then the reserve.
        with suppress(DiskFullError):
            pending_deletes.sweep(context, early=True)
        context.reserve.give_up()
    while True:
        try:
            return _trim(view, goal, fence, timeout)
        except DiskFullError:
            count //= 2
            if not count:
                raise
            goal = policy.start_after(segments, count)


def _trim(
    view: PartitionView, goal: int, fence: Fence | None, timeout: float | None
) -> list[RetentionResult]:
    log, hard_limit = view.log, view.hard_limit

    def limit(txn: kv.Txn) -> int:
        # Checked again in the transaction: there may be a new lease, or a new owner.
        if fence is not None:
            fence(txn)
        constraints = find_constraints(log, txn, view.checkpointed)
        lowest = min((constraint.offset for constraint in constraints), default=NO_LIMIT)
        return max(lowest, hard_limit)

    goal, epoch = min(goal, view.tail.high_watermark), view.tail.leader_epoch
    start, segments, size = log_start.trim(
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
    leases and consumer groups.  Whole segments below the offset are deleted, the active one
    too if all of its records are.

    Raises:
        OffsetOutOfRangeError: The offset is past the end (A30).
        Exception: As `log_start.trim`.
    """
    log.refresh()
    goal = log.tail().high_watermark if offset == -1 else offset
    return log.context.reserve.used_by(lambda: log_start.trim(log, goal)).start_offset
