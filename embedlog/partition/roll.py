"""Sealing the active segment and beginning the next; under the partition's lock."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from embedlog import batch as batches
from embedlog import catalog, index, kv
from embedlog.batch import EncodedBatch
from embedlog.catalog import SegmentInfo
from embedlog.config import TopicConfig
from embedlog.errors import DurabilityError
from embedlog.partition import flush, producer_expiration, tail
from embedlog.partition.bounded_clock import bounded_ms
from embedlog.partition.tail import Tail
from embedlog.segment import END_MARK, SegmentFile, create

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


def longest_ms(config: TopicConfig, info: SegmentInfo) -> int:
    """Return how far the timestamps of a segment may lie apart before it is rolled (A12)."""
    longest = config.segment_ms
    if "compact" in config.cleanup_policy:
        longest = min(longest, config.max_compaction_lag_ms)
    if config.segment_jitter_ms:
        # Fixed for a segment, spread over segments (A16); never all of the time there is (D6).
        longest -= info.id * 2654435761 % (min(config.segment_jitter_ms, longest - 1) + 1)
    return longest


def is_due(log: PartitionLog, file: SegmentFile, now: Tail, one: EncodedBatch) -> bool:
    """Whether a batch goes into a new segment: by size, time, span, or for a column (A11)."""
    # What a cut left of a compacted segment has a column too many.
    if file.has_offsets or (one.flags & batches.HEADERS and not log.last.headers):
        return True
    span = now.log_end_offset - now.base_offset
    if not span:
        return False
    if span + one.count > log.config.segment_max_offset_span:
        return True
    end, most = now.log_end_position + one.size, log.config.segment_bytes
    if end > most and end - file.start > most:
        return True
    latest = log.context.clock() if log.stamps else one.max_timestamp
    return latest - now.first_timestamp > log.roll_ms


def roll(log: PartitionLog, now: Tail, headers: bool, synced: bool, *, gap: bool = False) -> Tail:
    """Seal the active segment and open the next one after it (A14, A15).

    Args:
        headers: Whether the next one has a column for headers.
        synced: Flush what is sealed first, and move the recovery point past it.
        gap: Whether the last offsets of what is sealed have no records.
    """
    old, file = log.last, log.active_file()
    if not now.empty:
        file.write([END_MARK], now.log_end_position)
    if synced:
        flush.sync_files(log, now, file)
    # Name it first, create it second: a missing empty tail can be made again,
    # but a file that the manifest does not name is garbage.
    new = _name(log, now, old._replace(dense=old.dense and not gap), headers, synced)
    log.refresh()
    after = start_segment(log, now, new, synced)
    if now.empty:
        log.context.files.unlink(log.path_of(old), missing_ok=True)
        log.context.state.write(lambda txn: catalog.drop_passing(txn, log.key, old))
    return after


def _name(
    log: PartitionLog, now: Tail, old: SegmentInfo, headers: bool, synced: bool
) -> SegmentInfo:
    """Seal the old segment in the manifest and name the new one, in one transaction."""
    found = log.context.live.read(lambda txn: index.entries(txn, log.key, old.id))
    producers = flush.producers(log) if synced else {}
    sealed = old._replace(
        next_offset=now.log_end_offset,
        size=now.log_end_position + len(END_MARK),
        end_position=now.log_end_position,
        max_timestamp=now.timestamp,
        appended_ms=now.appended_ms,
    )
    created_ms = tail.creation_time(now, log.context.clock())

    def step(txn: kv.Txn) -> SegmentInfo:
        number = catalog.next_number(txn, b"segment")
        new = SegmentInfo(now.log_end_offset, number, created_ms, headers=headers, dense=True)
        if now.empty:
            catalog.drop_segment(txn, log.key, old)
            catalog.put_passing(txn, log.key, old)
        else:
            catalog.put_segment(txn, log.key, sealed)
            catalog.put_index_blob(txn, log.key, sealed, index.pack(found))
        catalog.put_segment(txn, log.key, new)
        if synced:
            flush.put_recovery_point(txn, log.key, now, producers)
        return new

    return log.context.state.write(step)


def start_segment(log: PartitionLog, now: Tail, new: SegmentInfo, synced: bool = False) -> Tail:
    """Create the file the manifest names and move the tail into it."""
    file = create_segment(log, new, synced)
    after = Tail(
        new.id,
        new.base_offset,
        now.log_end_offset,
        file.start,
        now.log_end_offset,
        file.start,
        now.log_end_offset if synced else now.durable_offset,
        now.start_offset,
        now.leader_epoch,
        created_ms=new.created_ms,
        appended_ms=tail.first_append_time(new.created_ms, now.appended_ms),
        flushed_ms=now.flushed_ms,
    )

    oldest = producer_expiration.oldest_ms(log, bounded_ms(log.context))

    def step(txn: kv.Txn) -> bool:
        row = txn.get(log.tail_key)
        # A flush works without the partition's lock: its failure must not be forgotten.
        failed = row is not None and tail.unpack(row).failed
        txn.put(log.tail_key, after._replace(failed=failed).pack())
        index.remove(txn, log.key, now.segment_id)
        producer_expiration.expire(txn, log.key, oldest)
        return failed

    if log.context.live.write(step):
        raise flush.failed(log)
    return after


def create_segment(log: PartitionLog, info: SegmentInfo, synced: bool) -> SegmentFile:
    """Make the empty file of a segment that the manifest names."""
    files = log.context.files
    files.make_directory(log.directory)
    files.make_directory(f"{log.directory}/{log.partition}")
    try:
        file = create(files, log.path_of(info), schema_of(log, info))
    except DurabilityError as error:
        raise flush.fail(log, error) from error
    log.active = info.id, file
    if synced:
        flush.sync(log, file)
        flush.sync_entries(log, info.id)
    return file


@cache
def _columns(headers: bool) -> tuple[Any, ...]:
    return tuple(batches.schema(headers=headers, offsets=offsets) for offsets in (False, True))


def columns_of(info: SegmentInfo) -> tuple[Any, ...]:
    """Return the schemas, without metadata, that the file of a segment may have."""
    return _columns(info.headers)


def schema_of(log: PartitionLog, info: SegmentInfo, offsets: bool = False) -> Any:
    """Return the Arrow schema that a segment file of this partition begins with.

    Args:
        offsets: Whether it is compacted, so that its last column tells the offsets.
    """
    metadata = {
        b"embedlog.version": b"1",
        b"embedlog.topic": log.topic.encode(),
        b"embedlog.partition": str(log.partition).encode(),
        b"embedlog.base_offset": str(info.base_offset).encode(),
    }
    return batches.schema(headers=info.headers, offsets=offsets, metadata=metadata)
