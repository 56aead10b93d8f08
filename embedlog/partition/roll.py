"""Sealing the active segment and beginning the next one; under the partition's lock."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from embedlog import catalog, index, keyspace, kv
from embedlog.batch import EXPLICIT_OFFSETS, HEADERS, TOMBSTONES, EncodedBatch
from embedlog.batch.messages import schema_message
from embedlog.batch.wire import SCHEMA_VERSION, BufferLayout
from embedlog.catalog import SegmentInfo
from embedlog.errors import DurabilityError
from embedlog.lazy import logging
from embedlog.partition import producer_state, unnamed_files
from embedlog.partition.flush import put_recovery_point, sync_entries, sync_files
from embedlog.partition.tail import Tail, creation_time, first_append_time, peek_tail
from embedlog.segment import END_MARK, SegmentFile, create

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_logger = logging.getLogger("embedlog.partition")


def is_due(
    log: PartitionLog,
    file: SegmentFile,
    tail: Tail,
    batch: EncodedBatch,
    newest: int | None = None,
) -> bool:
    """Whether a batch must go into a new segment: by size, time, span, or for a column.

    Args:
        log: The partition.
        file: The active segment.
        tail: The tail.
        batch: The batch.
        newest: Its largest timestamp; by default the one that the topic's settings give it.
    """
    active = log.active_segment
    # Copies of compacted segments have a column of offsets, and what a truncation left of one.
    if file.has_offsets is not bool(batch.flags & EXPLICIT_OFFSETS):
        return True
    if batch.schema_version != active.schema_version:
        return True
    if batch.flags & (HEADERS | TOMBSTONES) & ~active.column_flags:
        return True
    span = tail.log_end_offset - tail.base_offset
    if not span:
        return False
    if span + batch.count > log.config.segment_max_offset_span:
        return True
    end, limit = tail.log_end_position + batch.size, log.config.segment_bytes
    if end > limit and end - file.start > limit:
        return True
    if newest is None:
        newest = log.context.clock() if log.rules.uses_append_time else batch.max_timestamp
    return newest - tail.first_timestamp > log.rules.max_segment_ms


def columns_of(*encoded: EncodedBatch) -> SegmentInfo:
    """Return a segment, with nothing else, that has the columns of batches of one version."""
    return SegmentInfo(
        0,
        0,
        0,
        headers=any(batch.flags & HEADERS for batch in encoded),
        tombstones=any(batch.flags & TOMBSTONES for batch in encoded),
        schema_version=encoded[0].schema_version,
    )


def columns_of_layout(layout: BufferLayout) -> SegmentInfo:
    """Return a segment, with nothing else, that has the columns of a segment file."""
    return SegmentInfo(
        0,
        0,
        0,
        headers=bool(layout.flags & HEADERS),
        tombstones=bool(layout.flags & TOMBSTONES),
        schema_version=int(layout.original.metadata[SCHEMA_VERSION]) if layout.typed else 0,
    )


def with_columns(info: SegmentInfo, other: SegmentInfo) -> SegmentInfo:
    """Return a segment with the columns of another one."""
    return info._replace(
        headers=other.headers, tombstones=other.tombstones, schema_version=other.schema_version
    )


def roll(
    log: PartitionLog,
    tail: Tail,
    columns: SegmentInfo | None = None,
    *,
    synced: bool | None = None,
    gap: bool = False,
    offsets: bool = False,
) -> Tail:
    """Seal the active segment and open the next one after it.

    Args:
        log: The partition.
        tail: Its tail.
        columns: A segment that has the columns for the new one; by default those of the old one.
        synced: Flush what is sealed first, and move the recovery point past it; by default
            if the ``durability`` of the log is "fsync".
        gap: Whether the last offsets of the sealed segment have no records.
        offsets: Whether the batches of the new one have a column of offsets.
    """
    old, file = log.active_segment, log.active_file()
    synced = log.context.durability == "fsync" if synced is None else synced
    if not tail.empty:
        file.seal(tail.log_end_position)
    if synced:
        sync_files(log, tail, file)
    # Name it first, create it second: a missing empty tail can be created again,
    # but a file that the manifest does not name is garbage.
    new = _name_next(
        log, tail, old._replace(dense=old.dense and not gap), columns or old, synced, offsets
    )
    log.refresh()
    after = start_segment(log, tail, new, synced, offsets)
    _logger.debug(
        "%s-%d: rolled to segment %s, after one of %d bytes",
        *(log.topic, log.partition, new.file_name, tail.log_end_position),
    )
    if tail.empty:
        unnamed_files.discard(log, [old])
    return after


def _name_next(
    log: PartitionLog,
    tail: Tail,
    old: SegmentInfo,
    columns: SegmentInfo,
    synced: bool,
    offsets: bool,
) -> SegmentInfo:
    """Seal the old segment in the manifest and name the new one, in one transaction.

    The new one has the columns of another one.
    """
    from embedlog.partition import segment_statistics

    entries = log.context.live.read(lambda txn: index.entries(txn, log.key, old.id))
    producers = log.remembered_producers() if synced else {}
    sealed = old._replace(
        next_offset=tail.log_end_offset,
        size=tail.log_end_position + len(END_MARK),
        end_position=tail.log_end_position,
        max_timestamp=tail.timestamp,
        appended_ms=tail.appended_ms,
    )
    created_ms = creation_time(tail, log.context.clock())
    statistics = None
    if old.schema_version and not tail.empty:
        statistics = segment_statistics.compute(log, sealed, segment_statistics.MAX_BATCHES_AT_ROLL)

    def step(txn: kv.Txn) -> SegmentInfo:
        number = catalog.next_number(txn, "segment")
        new = with_columns(
            SegmentInfo(tail.log_end_offset, number, created_ms, dense=not offsets), columns
        )
        if tail.empty:
            unnamed_files.drop_names(txn, log.key, [old])
        else:
            catalog.put_segment(txn, log.key, sealed)
            keyspace.SEGMENT_INDEXES.put(txn, log.key, *sealed.key, value=index.pack(entries))
            segment_statistics.put(txn, log, sealed, statistics)
        catalog.put_segment(txn, log.key, new)
        if synced:
            put_recovery_point(txn, log.key, tail, producers)
        return new

    return log.context.state.write(step)


def start_segment(
    log: PartitionLog,
    tail: Tail,
    new: SegmentInfo,
    synced: bool = False,
    offsets: bool = False,
) -> Tail:
    """Create the file that the manifest names, and move the tail into it."""
    file = create_segment(log, new, synced, offsets)
    after = tail_of_new(tail, new, file.start)
    if synced:
        after = after._replace(durable_offset=tail.log_end_offset)
    oldest = log.oldest_producer_ms()

    def step(txn: kv.Txn) -> bool:
        current = peek_tail(txn, log.key)
        # A flush works without the partition's lock: do not overwrite its failure.
        failed = current is not None and current.failed
        txn.put(log.tail_key, after._replace(failed=failed).pack())
        index.remove(txn, log.key, tail.segment_id)
        producer_state.expire(txn, log.key, oldest)
        return failed

    if log.context.live.write(step):
        raise log.flush_failed()
    return after


def tail_of_new(before: Tail, new: SegmentInfo, position: int) -> Tail:
    """Return the tail after a roll: in a new, empty segment whose batches begin at a position."""
    end = before.log_end_offset
    return Tail(
        *(new.id, new.base_offset, end, position, end, position),
        *(before.durable_offset, before.start_offset, before.leader_epoch),
        created_ms=new.created_ms,
        appended_ms=first_append_time(new.created_ms, before.appended_ms),
        flushed_ms=before.flushed_ms,
    )


def create_segment(
    log: PartitionLog, info: SegmentInfo, synced: bool, offsets: bool = False
) -> SegmentFile:
    """Create the empty file of a segment that the manifest names.

    If it is to have a column of offsets and its process is killed first, the next one creates
    it without, and the next batch with such a column begins another one.
    """
    files = log.context.files
    files.make_directory(log.directory)
    files.make_directory(f"{log.directory}/{log.partition}")
    try:
        head, reread = head_of(log, info, offsets), partial(log.reread, info)
        file = create(files, log.path_of(info), head, reread)
    except DurabilityError as error:
        raise log.mark_flush_failed(error) from error
    log.opened_active(info, file)
    if synced:
        log.sync(file)
        sync_entries(log, info.id)
    return file


def head_of(log: PartitionLog, info: SegmentInfo, offsets: bool = False) -> bytes:
    """Return what a segment file of this partition begins with: the message of its Arrow schema.

    Args:
        log: The partition.
        info: The segment.
        offsets: Whether its last column has the offsets, as in a compacted one.
    """
    metadata = {
        b"embedlog.version": b"1",
        b"embedlog.topic": log.topic.encode(),
        b"embedlog.partition": str(log.partition).encode(),
        b"embedlog.base_offset": str(info.base_offset).encode(),
    }
    if not (info.schema_version or info.headers or offsets):
        return schema_message(metadata)
    schema = log.schema_of(info, offsets, metadata)
    return schema.serialize().to_pybytes()  # type: ignore[no-any-return]
