"""Who may not be overtaken: queries and snapshots with a lease, groups that must consume first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from embedlog import kv
from embedlog.groups.offsets import CHECKPOINTS, COMMITTED, in_partition
from embedlog.partition import PartitionLog, leases

ANY = (1 << 63) - 1
"""A limit that limits nothing."""


class RetentionConstraint(NamedTuple):
    """Somebody for whose sake records stay, and from which offset on."""

    offset: int
    why: str


def keepers(
    log: PartitionLog, txn: kv.Txn, saved: Mapping[bytes, int]
) -> Iterator[RetentionConstraint]:
    """Yield who may not be overtaken in a partition, in a transaction of `live`.

    Args:
        log: The partition.
        txn: The transaction.
        saved: What `saved_positions` returned.
    """
    for name, offset, left in leases.held_in(txn, log.key, log.context.files.uptime_ms()):
        yield RetentionConstraint(offset, f"lease {name!r} holds it for another {left // 1000} s")
    wanted = log.config.retention_min_consumed
    if not wanted:
        return
    positions = dict(saved) | {
        group: 0 if row is None else row.position.offset
        for group, row in in_partition(COMMITTED, txn, log.key).items()
    }
    groups = positions if wanted == "all" else [name.encode() for name in wanted.split(",")]
    for group in groups:
        if group in positions:
            yield RetentionConstraint(
                positions[group], f"group {group.decode()!r} has not consumed it"
            )
        else:
            yield RetentionConstraint(0, f"group {group.decode()!r} has consumed nothing here")


def saved_positions(log: PartitionLog) -> dict[bytes, int]:
    """Return what groups committed as of the last checkpoint: nobody used them since the boot."""
    if not log.config.retention_min_consumed:
        return {}
    rows = log.context.state.read(lambda txn: in_partition(CHECKPOINTS, txn, log.key))
    # Of a damaged row nobody knows what the group consumed: nothing, then.
    return {group: 0 if row is None else row.position.offset for group, row in rows.items()}
