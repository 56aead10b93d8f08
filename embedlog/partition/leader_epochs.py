"""Leader epochs: where each began, in `state`, and the one of new batches, in the tail.

A recovery and a truncation begin an epoch in the transaction that truncates the log.  A copy of
another log begins those of its batches: first `state` notes the epoch and its start, then the tail
gets it, and only then are batches of it written.  If the process is killed between the first two,
the next one to use the partition moves the tail (`finish`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from embedlog import catalog, keyspace, kv
from embedlog.catalog import PartitionInfo
from embedlog.partition.flush import sync_files
from embedlog.partition.tail import Tail, peek_tail

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


def with_epoch(epochs: Sequence[tuple[int, int]], epoch: int, offset: int) -> list[tuple[int, int]]:
    """Return epochs, as `catalog.epochs` does, with one that begins at an offset.

    Nothing changes if it is the last one already.  Epochs that do not end before it are
    dropped: those that start at the offset or past it have no records, and larger ones were
    of a history that was truncated.
    """
    if epochs and epochs[-1][0] == epoch and epochs[-1][1] <= offset:
        return list(epochs)
    kept = [entry for entry in epochs if entry[0] < epoch and entry[1] < offset]
    return [*kept, (epoch, offset)]


def epoch_at(epochs: Sequence[tuple[int, int]], offset: int) -> int | None:
    """Return the leader epoch of an offset; None below the first one that a log still has.

    >>> epoch_at([(0, 10), (2, 13)], 12)
    0
    """
    count = bisect_right(epochs, offset, key=itemgetter(1))
    return epochs[count - 1][0] if count else None


def put(txn: kv.Txn, key: bytes, epoch: int, offset: int) -> None:
    """Add an epoch that begins at an offset; see `with_epoch`."""
    epochs = with_epoch(catalog.epochs(txn, key), epoch, offset)
    keyspace.LEADER_EPOCHS.put(txn, key, value=epochs)


def begin(log: PartitionLog, tail: Tail, epoch: int, offset: int) -> Tail:
    """Begin a later epoch at an offset, at or above the log end; under the partition's lock."""

    def step(txn: kv.Txn) -> None:
        info = catalog.PARTITIONS.get(txn, log.key) or PartitionInfo()
        catalog.PARTITIONS.put(txn, log.key, value=info._replace(leader_epoch=epoch))
        put(txn, log.key, epoch, offset)

    log.context.state.write(step)
    return _raise(log, tail, epoch)


def finish(log: PartitionLog, tail: Tail) -> Tail:
    """Move the tail into the epoch that a killed process had begun; under the partition's lock."""
    info = catalog.PARTITIONS.get(log.context.state, log.key)
    if info is None or info.leader_epoch <= tail.leader_epoch:
        return tail
    return _raise(log, tail, info.leader_epoch)


def _raise(log: PartitionLog, tail: Tail, epoch: int) -> Tail:
    """Write the tail with another epoch.

    Raises:
        DurabilityError: A flush failed, now or before.
    """
    after = tail._replace(leader_epoch=epoch)
    if tail.high_watermark < tail.log_end_offset:
        # Another process flushes these batches at the moment.  It does not publish what belongs to
        # an earlier epoch, which may have been truncated, so this does.
        sync_files(log, tail, log.active_file())
        after = after._replace(
            high_watermark=tail.log_end_offset,
            high_watermark_position=tail.log_end_position,
            durable_offset=tail.log_end_offset,
        )

    def step(txn: kv.Txn) -> Tail:
        current = peek_tail(txn, log.key)
        raised = after if current is None else after.with_flush(current)
        txn.put(log.tail_key, raised.pack())
        return raised

    raised = log.context.live.write(step)
    if raised.failed:
        raise log.flush_failed()
    return raised
