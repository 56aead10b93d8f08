"""Committing a transaction in `live`: a small one costs little more than its appends.

The batches are written past the ends of their partitions, as by any append, and then one
transaction of `live` moves all ends, writes the offsets of the group, and checks that the member
owns their partitions and that no newer producer has the ``transactional_id``.  A process may be
killed at any instant: it is committed, or nothing of it is there.

`partition.checkpoint` does the rest: after a power cut the log has all of what the transactions up
to an instant wrote, and nothing of later ones.  With ``durability="fsync"`` the commit waits for a
checkpoint, which makes it visible, and which all transactions that wait share.

What does not fit into the active segments is published as staged files are (`transaction.publish`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from embedlog import kv
from embedlog.batch import EncodedBatch
from embedlog.errors import DiskFullError, EmbedlogError
from embedlog.groups import offsets as group_offsets
from embedlog.partition import PartitionLog, checkpoint
from embedlog.partition.append import note_appended
from embedlog.partition.append_condition import AppendCondition
from embedlog.partition.checkpoint import TRANSACTIONS, LastTransaction, Version
from embedlog.partition.state import Context, Partitions
from embedlog.partition.tail import peek_tail
from embedlog.publish.app_versions import name_field
from embedlog.publish.staging import StagedPartition
from embedlog.publish.transaction import (
    GroupOffsets,
    PartitionPlan,
    PublishedBatches,
    SegmentFullError,
    by_partition,
    escalates,
    locked,
    plan_partition,
    publishing_conflicts,
)


class NewerProducerError(Exception):
    """A newer producer has the name."""


def fence(context: Context, name: str, version: Version, *, published: bool = False) -> bool:
    """Make sure that no transaction of an older version of a name is committed any more.

    Args:
        context: The log.
        name: The producer's.
        version: Its own.
        published: Whether the transaction of this version was committed by a publication.

    Returns:
        False if a newer producer has the name.
    """

    def step(txn: kv.Txn) -> bool:
        last = TRANSACTIONS.get(txn, name_field(name))
        if last is None or last.version < version:
            committed = txn.id() if published else 0
            TRANSACTIONS.put(txn, name_field(name), value=LastTransaction(*version, committed))
        return last is None or last.version <= version

    return context.live.write(step)


def commit(
    root: Partitions,
    batches: Sequence[tuple[StagedPartition, EncodedBatch]],
    name: str,
    version: Version,
    *,
    conditions: Sequence[tuple[PartitionLog, AppendCondition]],
    offsets: GroupOffsets | None,
    report: Callable[[Sequence[PublishedBatches]], object],
    again: bool = False,
) -> bool | None:
    """Commit a transaction, if it is small enough.

    Args:
        root: The log, in one directory.
        batches: What it writes.
        name: The producer's; empty for one without a name, which fences nobody.
        version: Its own; that of a repetition is the same.
        conditions: What must be so, in partitions of these batches, before any is written.
        offsets: What a group commits with it.
        report: Called with what was written, once it is visible.
        again: Whether an earlier call with this version may have succeeded.

    Returns:
        True once it is committed, now or before; False if a newer producer has the name; None if
        nothing was done, because it does not fit into the active segments.

    Raises:
        Exception: As `transaction.publish`.
    """
    context = root.context
    context.check_appendable()
    encoded, synced = by_partition(root, (), batches), context.durability == "fsync"
    if again and name:
        last = TRANSACTIONS.get(context.live, name_field(name))
        if last is not None and last.version == version:
            if synced:
                _flush(context, encoded, last.committed)
            return True
    if escalates(context, encoded):
        return None
    if offsets is not None:
        group_offsets.check_exist(context.state, offsets.group.key, offsets.rows)
    for log, condition in conditions:
        condition.look_up(log)
    try:
        with publishing_conflicts(conditions), locked(context, encoded, None):
            plans = [
                plan_partition(log, of_log, conditions, synced, in_live=True)
                for log, of_log in encoded.items()
            ]
            number = _write(context, plans, name, version, offsets, synced)
    except NewerProducerError:
        return False
    except SegmentFullError:
        return None
    except DiskFullError:
        context.reserve.mark_full()
        raise
    for log, appended in encoded.items():
        note_appended(log, appended)
    if synced and encoded:
        _flush(context, encoded, number)
    elif synced:
        context.checkpoint()
    else:
        context.wake.advance()
        checkpoint.take_if_due(context, number)
    report([plan.published(encoded[plan.log]) for plan in plans])
    return True


def _write(
    context: Context,
    plans: Sequence[PartitionPlan],
    name: str,
    version: Version,
    offsets: GroupOffsets | None,
    synced: bool,
) -> int:
    """Write and commit what was planned; return the version of `live` that has it.

    Raises:
        NewerProducerError: It is fenced.
    """
    new = {plan.log: plan.before for plan in plans if not plan.log.has_rollback_point}
    if new:
        checkpoint.begin(context, new)

    def step(txn: kv.Txn) -> int:
        if name:
            last = TRANSACTIONS.get(txn, name_field(name))
            if last is not None and last.version >= version:
                raise NewerProducerError
            TRANSACTIONS.put(txn, name_field(name), value=LastTransaction(*version, txn.id()))
        for plan in plans:
            checkpoint.note_written(txn, plan.log, plan.before)
            plan.segments[0].pending.publish(txn)
        return int(txn.id())

    number = None
    try:
        for plan in plans:
            (segment,) = plan.segments
            file = plan.log.file_at(plan.before)
            file.write(segment.pending.buffers, segment.pending.position)
        if offsets is None:
            number = context.live.write(step)
        else:
            group, visible = offsets.group, not (synced and plans)
            number = group.commit_with(offsets.member, offsets.rows, step, visible=visible)
    finally:
        for plan in plans:
            if number is not None:
                plan.log.note_published(plan.segments[0].pending.published)
            else:
                _cut(plan)
    return number


def _cut(plan: PartitionPlan) -> None:
    """Remove what was written, unless it was committed after all, just before an interrupt."""
    # If the disk refuses even this, the next writer does it.
    with suppress(EmbedlogError):
        tail = peek_tail(plan.log.context.live, plan.log.key)
        if tail is None or tail.log_end_offset == plan.before.log_end_offset:
            plan.log.file_at(plan.before)


def _flush(context: Context, logs: Iterable[PartitionLog], version: int) -> None:
    """Take a checkpoint, unless another one has flushed the transactions up to a version."""
    checkpoint.take(context, version=version)
    # If another process has found that a flush failed, the transaction was undone.
    for log in logs:
        if log.tail().failed:
            raise log.flush_failed()
