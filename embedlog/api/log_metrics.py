"""The metrics of a log: what can be read from its directory, by any process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from embedlog.api.consumer_group import ConsumerGroup
from embedlog.errors import (
    CorruptionError,
    GroupIdNotFoundError,
    ReplicaNotAvailableError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.group import group_ids
from embedlog.keyspace import JOB_RUNS, MIRRORS
from embedlog.maintenance.jobs import owner_in
from embedlog.metrics import (
    GROUP,
    GROUP_PARTITION,
    GROUP_TOPIC,
    LOG,
    MAINTENANCE,
    MAINTENANCE_JOB,
    TOPIC,
    Sample,
)
from embedlog.root.root import Root


def log_samples(root: Root) -> Iterator[Sample]:
    """Yield the metrics of topics, consumer groups and background jobs."""
    root.context.state.check_linked()
    for topic in root.topics():
        # One that was deleted meanwhile is left out.
        with suppress(UnknownTopicOrPartitionError):
            yield from _topic_samples(root, topic)
    for group in group_ids(root.context.live, root.context.state):
        with suppress(GroupIdNotFoundError):
            yield from _group_samples(root, group)
    yield from _maintenance_samples(root)
    if root.replicated:
        from embedlog.api.replicas import several
        from embedlog.replication.describe import replica_samples

        yield from replica_samples(several(root))
    if any_mirror(root):
        from embedlog.mirrors.status import mirror_samples

        yield from mirror_samples(root)


def any_mirror(root: Root) -> bool:
    """Return whether a mirror has reported to this log."""
    return root.context.live.read(lambda txn: MIRRORS.any(txn))


def _topic_samples(root: Root, topic: str) -> Iterator[Sample]:
    partitions = root.partitions(topic)
    yield Sample(TOPIC, "partitions", partitions, {"topic": topic})
    for number in range(partitions):
        try:
            values = _partition_values(root, topic, number)
        except (CorruptionError, StorageError, ReplicaNotAvailableError):
            values = {"Offline": 1}
        labels = {"topic": topic, "partition": str(number)}
        for name, value in values.items():
            yield Sample(LOG, name, value, labels)


def _partition_values(root: Root, topic: str, number: int) -> dict[str, int]:
    log = root.partition(topic, number)
    return {
        "Size": log.size_bytes(),
        "NumLogSegments": len(log.segments),
        "LogStartOffset": log.start_offset(),
        "LogEndOffset": log.end_offset(),
        "Offline": int(log.tail().failed),
    }


def _group_samples(root: Root, name: str) -> Iterator[Sample]:
    group = ConsumerGroup(root, name)._describe(ages=False)
    labels = {"consumergroup": name}
    yield Sample(GROUP, "members", len(group.members), labels)
    sums: dict[str, tuple[int, int]] = {}
    for part in group.partitions:
        if part.lag is None or part.current_offset is None:
            continue  # Nothing is committed.
        where = {**labels, "topic": part.topic, "partition": str(part.partition)}
        yield Sample(GROUP_PARTITION, "lag", part.lag, where)
        yield Sample(GROUP_PARTITION, "current_offset", part.current_offset, where)
        lag, offset = sums.get(part.topic, (0, 0))
        sums[part.topic] = lag + part.lag, offset + part.current_offset
    for topic, (lag, offset) in sums.items():
        yield Sample(GROUP_TOPIC, "lag_sum", lag, {**labels, "topic": topic})
        yield Sample(GROUP_TOPIC, "current_offset_sum", offset, {**labels, "topic": topic})


def _maintenance_samples(root: Root) -> Iterator[Sample]:
    context = root.context
    owner, now_ms = owner_in(context.live), context.files.uptime_ms()
    is_owned = owner.deadline_ms > now_ms
    yield Sample(MAINTENANCE, "owner-count", int(is_owned), {})
    yield Sample(MAINTENANCE, "owner-pid", owner.pid if is_owned else 0, {})
    yield Sample(MAINTENANCE, "owner-epoch", owner.epoch, {})
    runs = context.live.read(lambda txn: list(JOB_RUNS.scan_valid(txn)))
    for (job,), done_ms in runs:
        since_ms = max(now_ms - done_ms, 0)
        yield Sample(MAINTENANCE_JOB, "time-since-last-run-ms", since_ms, {"job": job})
