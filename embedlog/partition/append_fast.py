"""The fast twin of `append.append_locked`, for the plainest append and the most frequent one.

It skips rolling, adding the headers column, reading rows of producers, and adopting what a
flush noted meanwhile: if the batch needs one of these, it returns None and nothing has
changed.  It takes half the time.  Under the partition's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedlog import index, kv
from embedlog.batch import NOT_FAST, EncodedBatch
from embedlog.index import IndexEntry
from embedlog.partition import producer_state
from embedlog.partition.producer_state import LAST_SEQUENCE
from embedlog.partition.tail import CachedTail, Tail, next_append_time, pack
from embedlog.record import Appended
from embedlog.segment import SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


def append_fast(
    log: PartitionLog, file: SegmentFile, tail: Tail, batch: EncodedBatch, synced: bool
) -> Appended | None:
    """Write a batch of at most `AppendRules.fast_max_bytes`; None if only the general way can.

    With ``synced`` it is flushed, then published; `flush.is_alone` must say that this is enough.
    """
    cached, config, rules = log.cached_tail, log.config, log.rules
    if cached is None or cached.tail is not tail:
        return None
    version, row, _, producers = cached
    # Tuples are taken apart and put together as such here: the names of their fields and
    # their constructors, which are in Python, would take 3 of the 20 µs.
    segment, first, base, position, _, _, *same, newest, oldest, made, stamp, gap, flushed, _ = tail
    timestamp, next_offset, end = batch.max_timestamp, base + batch.count, position + batch.size
    if (
        base == first
        or end > config.segment_bytes
        or timestamp - oldest > rules.max_segment_ms
        or batch.flags & NOT_FAST != rules.fast_flags
        or file.has_offsets
    ):
        return None
    now_ms = log.context.clock()
    if (age_ms := rules.overdue_age_ms) is not None and 0 <= timestamp < now_ms - age_ms:
        return None
    stamp = now_ms if now_ms >= stamp > 0 else next_append_time(stamp, now_ms)
    producer_id, noted, producer_key = batch.producer_id, None, b""
    if producer_id is not None:
        producer, sequence = producers.get(producer_id), batch.base_sequence
        if producer is None or sequence is None:
            return None
        epoch, due, _ = producer
        if epoch != batch.producer_epoch or due != sequence:
            return None
        sent = sequence, sequence + batch.count - 1 & LAST_SEQUENCE, base, next_offset
        noted = producer_state.note(producer, epoch, sent, now_ms)
        producer_key = producer_state.key(log.key, producer_id)
    entry = None
    if gap > config.index_interval_bytes:
        entry, gap = IndexEntry(base, position, newest), 0
    if synced:
        same[0], flushed = next_offset, now_ms
    newest = timestamp if timestamp > newest else newest
    ends, gap = (next_offset, end, next_offset, end), gap + batch.size
    fields = segment, first, *ends, *same, newest, oldest, made, stamp, gap, flushed, False
    after, packed = tuple.__new__(Tail, fields), pack(*fields)

    def publish(txn: kv.Txn) -> int:
        number: int = txn.id()
        # As in `PendingAppend.publish`, which alone can adopt what a flush noted meanwhile.
        if number != version + 1 and txn.get(log.tail_key) != row:
            return -1
        txn.put(log.tail_key, packed)
        if entry is not None:
            index.put(txn, log.key, segment, entry)
        if noted is not None:
            txn.put(producer_key, noted.row)
        return number

    buffers = batch.stamp(base, tail.leader_epoch)
    number = log.commit_locked(file, buffers, position, next_offset, publish, synced)
    if number < 0:
        return None
    if noted is not None and producer_id is not None:
        # After the commit: until then the old row is the valid one.
        producers[producer_id] = noted
    log.note_published(tuple.__new__(CachedTail, (number, packed, after, producers)))
    return tuple.__new__(Appended, (base, next_offset, None, False))
