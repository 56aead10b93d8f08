"""One batch with nothing to roll, widen or look up: nearly every append that somebody waits for.

`Draft` does it for any number of batches in any state, in twice the time; what
is not as expected here is left to it.  Under the partition's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedlog import index, kv
from embedlog.batch import HEADERS, EncodedBatch
from embedlog.index import IndexEntry
from embedlog.partition import producer_state, tail
from embedlog.partition.producer_state import LAST_SEQUENCE
from embedlog.partition.tail import CachedTail, Tail, pack
from embedlog.record import Appended
from embedlog.segment import SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


def append_fast(
    log: PartitionLog, file: SegmentFile, now: Tail, one: EncodedBatch
) -> Appended | None:
    """Write a batch and publish it; None, and nothing can be seen, if there is more to it.

    For a topic whose settings ask nothing of a batch but its size, which it has.
    """
    known, config = log.known, log.config
    if known is None or known.tail is not now:
        return None
    version, row, _, producers = known
    # Tuples are taken apart and put together as such here: the names of their fields and
    # their constructors, which are in Python, would take 3 of the 20 µs.
    segment, first, base, position, _, _, *kept, newest, oldest, made, stamp, gap, flushed, _ = now
    latest, following, end = one.max_timestamp, base + one.count, position + one.size
    if (
        base == first
        or end > config.segment_bytes
        or latest - oldest > log.roll_ms
        or one.flags & HEADERS
        or file.has_offsets
    ):
        return None
    now_ms = log.context.clock()
    if log.overdue_ms is not None and 0 <= latest < now_ms - log.overdue_ms:
        return None
    stamp = now_ms if now_ms >= stamp > 0 else tail.next_append_time(stamp, now_ms)
    producer_id, noted, producer_key = one.producer_id, None, b""
    if producer_id is not None:
        before, number = producers.get(producer_id), one.base_sequence
        if before is None or number is None:
            return None
        epoch, due, _ = before
        if epoch != one.producer_epoch or due != number:
            return None
        sent = number, number + one.count - 1 & LAST_SEQUENCE, base, following
        noted = producer_state.note(before, epoch, sent, now_ms)
        producer_key = producer_state.key(log.key, producer_id)
    entry = None
    if gap > config.index_interval_bytes:
        entry, gap = IndexEntry(base, position, newest), 0
    newest = latest if latest > newest else newest
    ends, gap = (following, end, following, end), gap + one.size
    fields = segment, first, *ends, *kept, newest, oldest, made, stamp, gap, flushed, False
    after = tuple.__new__(Tail, fields)
    packed = pack(*fields)

    def publish(txn: kv.Txn) -> int:
        number: int = txn.id()
        # As in `Draft.publish`; to adopt what a flush noted meanwhile is left to that.
        if number != version + 1 and txn.get(log.tail_key) != row:
            return -1
        txn.put(log.tail_key, packed)
        if entry is not None:
            index.put(txn, log.key, segment, entry)
        if noted is not None:
            txn.put(producer_key, noted.row)
        return number

    buffers = one.stamp(base, now.leader_epoch)
    committed = log.commit_locked(file, buffers, position, following, publish)
    if committed < 0:
        return None
    if noted is not None and producer_id is not None:
        # After the commit, for then nobody believes the one it was known with any more.
        producers[producer_id] = noted
    log.known = tuple.__new__(CachedTail, (committed, packed, after, producers))
    return tuple.__new__(Appended, (base, following, None, False))
