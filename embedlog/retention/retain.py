"""One round of retention over a log: look, decide, trim; and deletes that are asked for."""

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
from embedlog.retention import constraints, policy
from embedlog.retention.constraints import ANY, RetentionConstraint
from embedlog.retention.policy import RetainedSegment
from embedlog.root import topic_deletion
from embedlog.root.root import Root

Fence = Callable[[kv.Txn], None]
"""Raises, in a transaction of `live`, if this process may not do housekeeping any more."""

_log = logging.getLogger("embedlog")


class RetentionResult(NamedTuple):
    """What a round deleted of one partition."""

    topic: str
    partition: int
    start_offset: int
    segments: int
    bytes: int


class PartitionView(NamedTuple):
    """A partition as of one look."""

    log: PartitionLog
    now: Tail
    parts: list[RetainedSegment]
    saved: dict[bytes, int]
    keepers: list[RetentionConstraint]

    @property
    def hard(self) -> int:
        """Up to where nobody keeps anything: it holds more than ``retention.bytes.hard``."""
        count = policy.over(self.parts, self.log.config.retention_bytes_hard)
        return policy.offset_after(self.parts, count)

    @property
    def floor(self) -> int:
        """From where on nothing is deleted."""
        return max(min((each.offset for each in self.keepers), default=ANY), self.hard)

    def free(self, due: int) -> int:
        """Return how many of the first so many segments nobody keeps."""
        return sum(part.next_offset <= self.floor for part in self.parts[:due])


def retain(
    root: Root,
    now_ms: int,
    *,
    fence: Fence | None = None,
    stopped: Callable[[], bool] = bool,
    timeout: float | None = None,
) -> list[RetentionResult]:
    """Delete what the settings ask for, in every partition, and sweep the files that are due.

    Looks at the settings as they are now (C10).  A partition that fails does
    not stop the others; the first error is raised at the end.

    Args:
        root: The open log.
        now_ms: The time, in milliseconds since 1970.
        fence: Asked in every transaction that deletes.
        stopped: Asked between partitions: whether to leave the rest to another round.
        timeout: Seconds to wait for a partition; as long as for any lock by default.

    Raises:
        FencedError: Another process does the housekeeping now.
        EmbedlogError: Some partition could not be looked at, or trimmed.
    """
    root.context.check_writable()
    failures: list[EmbedlogError] = []
    done = []
    for one, goal in _goals(root, now_ms, failures, stopped):
        if stopped():
            break
        try:
            done += _trim_somehow(one, goal, fence, timeout)
        except (ClosedError, FencedError):
            raise
        except UnknownTopicOrPartitionError:
            continue  # deleted meanwhile
        except EmbedlogError as error:
            _note(one.log, error, failures)
    if fence is not None:
        root.context.live.read(fence)
    # First what makes room, for the rest needs some.
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
    return done


def _goals(
    root: Root, now_ms: int, failures: list[EmbedlogError], stopped: Callable[[], bool]
) -> list[tuple[PartitionView, int]]:
    """Return the partitions that have something to delete, and where they are to begin."""
    budget = root.context.catalog.retention_bytes()
    found: dict[PartitionLog, PartitionView] = {}
    counts: dict[PartitionLog, int] = {}
    for info in root.topics().values():
        its: dict[PartitionLog, PartitionView] = {}
        for number in range(info.partitions):
            if stopped():
                break
            one = _try_look(root, info.name, number, now_ms, budget is not None, failures)
            if one is not None:
                its[one.log] = one
        found |= its
        counts |= _counts(its, info.config.retention_topic_bytes, now_ms)
    if budget is not None:
        counts = _within(found, counts, budget)
    return [
        (one, goal)
        for log, one in found.items()
        if (goal := policy.offset_after(one.parts, counts[log])) or _leftover(one)
    ]


def _counts(
    its: Mapping[PartitionLog, PartitionView], most: int, now_ms: int
) -> dict[PartitionLog, int]:
    counts = {log: one.free(policy.due(one.parts, log.config, now_ms)) for log, one in its.items()}
    return _within(its, counts, most)


def _within(
    its: Mapping[PartitionLog, PartitionView], counts: Mapping[PartitionLog, int], most: int
) -> dict[PartitionLog, int]:
    """Raise the counts to what a budget asks for; only what may be deleted can make room."""
    # A compacted topic counts, but only compaction makes it smaller (C6).
    floors = {log: one.floor if log.config.deletes else 0 for log, one in its.items()}
    return policy.within({log: one.parts for log, one in its.items()}, counts, floors, most)


def _leftover(one: PartitionView) -> bool:
    """Whether segments lie wholly below the start, whoever moved that (C1, C6)."""
    return bool(one.parts) and one.parts[0].next_offset <= one.now.start_offset


def _try_look(
    root: Root,
    topic: str,
    number: int,
    now_ms: int,
    whole: bool,
    failures: list[EmbedlogError],
) -> PartitionView | None:
    try:
        log = root.partition(topic, number)
        # Never used since the boot: to look would make its files.
        if log.context.live.get(log.tail_key) is None:
            return None
        log.refresh()
        return look(log, now_ms) if whole or _worth_a_look(log, now_ms) else None
    except ClosedError:
        raise
    except UnknownTopicOrPartitionError:
        return None
    except EmbedlogError as error:
        failures.append(error)
        _log.warning("retention of %s-%d: %s", topic, number, error)
        return None


def _worth_a_look(log: PartitionLog, now_ms: int) -> bool:
    """Whether to read the whole manifest: by time alone, the oldest segment tells; by one seek."""
    config = log.config
    if max(config.retention_bytes, config.retention_topic_bytes) >= 0:
        return True
    now = log.tail()
    first = log.segment_at(0)
    if first.next_offset is not None and first.next_offset <= now.start_offset:
        return True
    if not config.deletes or config.retention_ms < 0:
        return False
    latest = first.max_timestamp if first.sealed else now.timestamp
    appended_ms = first.appended_ms if first.sealed else now.appended_ms
    part = RetainedSegment(first.base_offset, first.base_offset, 0, None)
    part = policy.dated(part, latest, appended_ms, None, now_ms, config.retention_clock)
    return part.timestamp is None or now_ms - part.timestamp > config.retention_ms


def look(log: PartitionLog, now_ms: int) -> PartitionView:
    """Return a partition as it is now, and who keeps what in it."""
    # The tail first: a segment that is rolled after it is looked at as sealed.
    now = log.tail()
    log.refresh()
    found = policy.parts(list(log.segments.values()), now, now_ms, log.config.retention_clock)
    saved = constraints.saved_positions(log)
    keepers = log.context.live.read(lambda txn: list(constraints.keepers(log, txn, saved)))
    return PartitionView(log, now, found, saved, keepers)


def _trim_somehow(
    one: PartitionView, goal: int, fence: Fence | None, timeout: float | None
) -> list[RetentionResult]:
    """Trim; where the disk is too full for that, make room first, and be content with less."""
    context, parts = one.log.context, one.parts
    count = sum(part.next_offset <= goal for part in parts)
    try:
        return _trim(one, goal, fence, timeout)
    except DiskFullError:
        # What is doomed already, before the reserve: it would go anyway, later.
        with suppress(DiskFullError):
            pending_deletes.sweep(context, early=True)
        context.reserve.give_up()
    while True:
        try:
            return _trim(one, goal, fence, timeout)
        except DiskFullError:
            count //= 2
            if not count:
                raise
            goal = policy.offset_after(parts, count)


def _trim(
    one: PartitionView, goal: int, fence: Fence | None, timeout: float | None
) -> list[RetentionResult]:
    log, saved, hard = one.log, one.saved, one.hard

    def limit(txn: kv.Txn) -> int:
        # Again, where it counts: a lease may have come since the look, a process been overtaken.
        if fence is not None:
            fence(txn)
        kept = constraints.keepers(log, txn, saved)
        return max(min((each.offset for each in kept), default=ANY), hard)

    epoch = one.now.leader_epoch
    start, segments, size = log_start.trim(
        log,
        min(goal, one.now.high_watermark),
        whole=True,
        epoch=epoch,
        limit=limit,
        timeout=timeout,
    )
    if not segments:
        return []
    _log.info("%s-%d: deleted %d segments below %d", log.topic, log.partition, segments, start)
    return [RetentionResult(log.topic, log.partition, start, segments, size)]


def _note(log: PartitionLog, error: EmbedlogError, failures: list[EmbedlogError]) -> None:
    failures.append(error)
    _log.warning("retention of %s-%d: %s", log.topic, log.partition, error)


def delete_records(log: PartitionLog, offset: int) -> int:
    """Make everything below ``offset`` unreadable, and return where the log begins then.

    As Kafka's: -1 is the end; it is durable, at once, and nobody keeps anything
    from it.  Whole segments below go, the active one too if all of it does.

    Raises:
        OffsetOutOfRangeError: The offset is past the end (A30).
        Exception: As `trimming.trim`.
    """
    log.refresh()
    goal = log.tail().high_watermark if offset == -1 else offset
    return log.context.reserve.used_by(lambda: log_start.trim(log, goal)).start_offset
