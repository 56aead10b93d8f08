"""What retention must keep: records held by leases, or not yet consumed by groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from embedlog import kv
from embedlog.groups.offsets import CHECKPOINTS, COMMITTED, in_partition
from embedlog.partition import PartitionLog, leases

NO_LIMIT = (1 << 63) - 1


class RetentionConstraint(NamedTuple):
    """Records from ``offset`` on must be kept."""

    offset: int
    why: str


def find_constraints(
    log: PartitionLog, txn: kv.Txn, checkpointed: Mapping[bytes, int]
) -> Iterator[RetentionConstraint]:
    """Yield the constraints of a partition, in a transaction of `live`.

    Args:
        log: The partition.
        txn: The transaction.
        checkpointed: The result of `checkpointed_positions`.
    """
    for name, offset, ms_left in leases.held_in(txn, log.key, log.context.files.uptime_ms()):
        yield RetentionConstraint(
            offset, f"lease {name!r} holds them for another {ms_left // 1000} s"
        )
    required = log.config.retention_min_consumed
    if not required:
        return
    positions = dict(checkpointed) | {
        group: 0 if row is None else row.position.offset
        for group, row in in_partition(COMMITTED, txn, log.key).items()
    }
    groups = positions if required == "all" else [name.encode() for name in required.split(",")]
    for group in groups:
        if group in positions:
            yield RetentionConstraint(
                positions[group], f"group {group.decode()!r} has not consumed them"
            )
        else:
            yield RetentionConstraint(
                0, f"group {group.decode()!r} has consumed nothing of this partition"
            )


def checkpointed_positions(log: PartitionLog) -> dict[bytes, int]:
    """Return the committed offsets by group as of the last checkpoint.

    They count for groups that were not used since the boot.
    """
    if not log.config.retention_min_consumed:
        return {}
    rows = log.context.state.read(lambda txn: in_partition(CHECKPOINTS, txn, log.key))
    # What the group of a damaged row consumed is unknown, so assume nothing.
    return {group: 0 if row is None else row.position.offset for group, row in rows.items()}
