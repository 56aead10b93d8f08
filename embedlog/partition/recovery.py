"""Finding the tail of a partition again from its segments, and truncating the log.

Recovery is needed where `live` has no row for a partition: on first use, after a reboot,
or when `live` was lost.  The scan begins at the recovery point.  Past it the first
damaged batch ends the log; damage below it is an error, and nothing is truncated.  A
recovery that is killed can be repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedlog import catalog, index, keyspace, kv
from embedlog.batch import Batch
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.errors import (
    CorruptBatchError,
    CorruptionError,
    DurabilityError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups import offsets
from embedlog.hints import REPAIR
from embedlog.index import IndexEntry
from embedlog.lazy import logging
from embedlog.partition import (
    checkpoint,
    journal,
    leader_epochs,
    producer_state,
    roll,
    unnamed_files,
)
from embedlog.partition.flush import sync_entries
from embedlog.partition.producer_state import ProducerState, SentBatch
from embedlog.partition.tail import (
    NO_TIME,
    UNFLUSHED,
    Tail,
    first_append_time,
    next_append_time,
    peek_tail,
)
from embedlog.segment import CHUNK_BYTES, END_MARK, MOST_AHEAD, SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_logger = logging.getLogger("embedlog.partition")
_NO_LIMIT = 1 << 63


def discard_tail(log: PartitionLog) -> None:
    """Delete the tail row, so that the next use recovers the partition.

    Notes the time of the last append in `state`.
    """
    tail = peek_tail(log.context.live, log.key)
    if tail is None:
        return

    def step(txn: kv.Txn) -> None:
        info = catalog.PARTITIONS.get(txn, log.key) or PartitionInfo()
        info = info._replace(appended_ms=tail.appended_ms, appended_offset=tail.log_end_offset)
        catalog.PARTITIONS.put(txn, log.key, value=info)
        point = checkpoint.ROLLBACK_POINTS.get(txn, log.key)
        if point is not None and point.offset < tail.high_watermark:
            # There was no power cut: what readers saw stays, as far as the disk has it.
            point = point._replace(offset=tail.high_watermark)
            checkpoint.ROLLBACK_POINTS.put(txn, log.key, value=point)

    log.context.state.write(step)
    log.context.live.write(lambda txn: txn.delete(log.tail_key))


# The scan, which changes nothing


class RecoveryScan:
    """What the segments of a partition hold.

    Args:
        info: The partition.
        active: Its active segment.
        next_offset: Where the log ends.
    """

    def __init__(self, info: PartitionInfo, active: SegmentInfo, next_offset: int) -> None:
        self.info, self.active, self.next_offset = info, active, next_offset
        self.position: int | None = None
        """Where the active file ends; None if the file has to be created again."""
        self.whole: list[SegmentInfo] = []
        self.dropped: list[SegmentInfo] = []
        self.unmarked: list[SegmentInfo] = []
        """Sealed segments that lost their end mark in a power cut."""
        self.sized: list[tuple[SegmentInfo, bytes]] = []
        """Adopted segments, whose size only the scan found, and their index."""
        self.replay = False
        """Whether to rebuild the producers from the batches alone, from the first one on."""
        self.journaled = False
        """Whether a publication wrote here, so that readers may have seen what is truncated."""
        self.unpublished = False
        """Whether a publication may have left batches past the end."""
        self.damage: str | None = None
        """The damage at which the log ends; None if it ends because nothing follows."""
        self.max_timestamp = self.first_timestamp = NO_TIME
        self.unindexed = self.epoch = 0
        self.entries: list[IndexEntry] = []
        self.producers: dict[int, ProducerState] = {}

    def add(self, batch: Batch, interval: int, now_ms: int) -> None:
        """Count a good batch: index it as the append did, and note its producer."""
        if self.unindexed > interval:
            self.entries.append(IndexEntry(batch.base_offset, batch.position, self.max_timestamp))
            self.unindexed = 0
        if self.first_timestamp == NO_TIME:
            self.first_timestamp = batch.max_timestamp
        self.max_timestamp = max(self.max_timestamp, batch.max_timestamp)
        self.unindexed += batch.size
        self.next_offset, self.epoch = batch.next_offset, batch.leader_epoch
        self.position = batch.position + batch.size
        if batch.producer_id is None:
            return
        if not self.replay and batch.base_offset < self.info.recovery_offset:
            return  # The producers as of the recovery point include it.
        assert batch.producer_epoch is not None
        assert batch.base_sequence is not None
        # A compacted batch lacks some of its records, but keeps their sequence numbers (D11).
        count = batch.next_offset - batch.base_offset
        last = producer_state.after(batch.base_sequence, count - 1)
        sent = SentBatch(batch.base_sequence, last, batch.base_offset, batch.next_offset)
        producer = self.producers.get(batch.producer_id)
        if producer is None or sent not in producer.batches:
            noted = producer_state.note(producer, batch.producer_epoch, sent, now_ms)
            self.producers[batch.producer_id] = noted


def scan(log: PartitionLog, limit: int = _NO_LIMIT) -> RecoveryScan:
    """Scan a partition from its recovery point.

    Args:
        log: The partition.
        limit: End the log before the first batch that reaches past this offset.

    Raises:
        CorruptionError: Damage below the recovery point.
    """
    info, segments, snapshot, entry, point = log.context.state.read(
        lambda txn: (
            catalog.PARTITIONS.get(txn, log.key),
            catalog.segments(txn, log.key),
            producer_state.SNAPSHOTS.get(txn, log.key),
            journal.JOURNAL.get(txn, log.key),
            checkpoint.ROLLBACK_POINTS.get(txn, log.key),
        )
    )
    if info is None or not segments:
        topic = log.context.catalog.topics().get(log.topic)
        if topic is None or topic.id != log.topic_id:
            raise UnknownTopicOrPartitionError("The partition is gone", **log.where)
        raise CorruptionError("The database state has lost the rows of the partition", **log.where)
    result = RecoveryScan(info, segments[0], segments[0].base_offset)
    oldest, stored = log.oldest_producer_ms(), snapshot or {}
    remembered = {
        producer_id: producer
        for producer_id, producer in stored.items()
        if producer_state.last_ms(producer.row) >= oldest
    }
    # All stored batches of a producer may lie past a truncation; what it sent before
    # can then be found only in its batches (A34).
    result.replay = bool(stored) and limit != _NO_LIMIT
    result.producers = {} if result.replay else remembered
    if entry is not None:
        result.journaled, result.unpublished = True, entry.state == journal.PREPARED
    if entry is not None and result.unpublished:
        # What the publication wrote past its base is whole, and was never a part of the log.
        limit = min(limit, entry.before.next_offset)
    if point is not None:
        # Of the transactions after it, other partitions may have lost their parts.
        result.journaled = result.unpublished = True
        limit = min(limit, point.offset)
    for number, segment in enumerate(segments):
        result.active, result.position = segment, None
        result.max_timestamp = result.first_timestamp = NO_TIME
        result.unindexed, result.entries = 0, []
        if not _scan_segment(log, result, segment, limit) or number == len(segments) - 1:
            result.dropped = segments[number + 1 :]
            break
        result.whole.append(result.active)
    for producer_id, producer in remembered.items():
        # Its batches may all be gone; an epoch that fenced others stays (G17).
        replayed = result.producers.get(producer_id, producer)
        epoch = max(producer.epoch, replayed.epoch)
        result.producers[producer_id] = replayed._replace(epoch=epoch)
    result.producers = {
        producer_id: producer_state.below(producer, result.next_offset)
        for producer_id, producer in result.producers.items()
    }
    return result


def _scan_segment(
    log: PartitionLog, result: RecoveryScan, segment: SegmentInfo, limit: int
) -> bool:
    """Scan one segment; return whether it is whole, so that the log continues after it."""
    flushed = segment.next_offset is not None and segment.next_offset <= result.info.recovery_offset
    # An adopted segment has no size yet: only the scan finds it.
    flushed = flushed and not result.replay and segment.size > 0
    if flushed and segment.next_offset is not None and segment.next_offset <= limit:
        try:
            file = log.open_segment(segment)
            size = file.size()
        except StorageError as error:
            if not error.missing:
                raise
            raise _damaged(log, segment, 0, f"cannot be opened: {error}") from error
        if size < segment.end_position:
            raise _damaged(log, segment, size, f"{segment.size} bytes were flushed")
        if not _has_end_mark(file, segment):
            result.unmarked.append(segment)
        result.next_offset = segment.next_offset
        return True
    result.next_offset = segment.base_offset
    try:
        file = log.open_segment(segment, mend=False)
        result.position = file.start
    except (StorageError, CorruptionError) as error:
        if isinstance(error, StorageError) and not error.missing:
            raise  # Too many open files, for example, are no reason to truncate a log.
        if segment.base_offset < result.info.recovery_offset:
            raise _damaged(log, segment, 0, f"cannot be read: {error}") from error
        result.damage = f"{log.path_of(segment)} at byte 0 (the file is missing or empty)"
        return False
    whole = _scan_batches(log, result, file, segment, limit)
    if not whole or segment.next_offset is None:
        return False
    if result.position != segment.end_position:
        result.active = segment._replace(
            size=result.position + len(END_MARK),
            end_position=result.position,
            max_timestamp=None if result.max_timestamp == NO_TIME else result.max_timestamp,
        )
        result.sized.append((result.active, index.pack(result.entries)))
    if not _has_end_mark(file, result.active):
        result.unmarked.append(result.active)
    return True


def _scan_batches(
    log: PartitionLog, result: RecoveryScan, file: SegmentFile, segment: SegmentInfo, limit: int
) -> bool:
    """Count the batches of a file up to the first bad one; True if a sealed segment is whole."""
    recovery_point, now_ms = result.info.recovery_offset, log.context.clock()
    stop = min(file.size(), segment.end_position) if segment.sealed else file.size()
    try:
        for batch in file.scan(file.start, stop):
            if batch.next_offset > limit:
                return False
            if _is_stale(result, batch):
                raise CorruptBatchError(
                    "A stale batch", reason="stale", path=file.path, position=batch.position
                )
            if batch.next_offset > recovery_point:
                batch.verify()
            result.add(batch, log.config.index_interval_bytes, now_ms)
    except CorruptBatchError as error:
        if result.next_offset < recovery_point:
            raise _damaged(log, segment, error.position or 0, str(error)) from error
        if error.reason != "stale":
            where = f"{file.path} at byte {error.position or 0}"
            result.damage = f"{where} ({error.reason or error.what})"
    if segment.next_offset is None:
        if result.next_offset < recovery_point:
            raise _damaged(log, segment, stop, "the file ends early")
        return False
    if segment.next_offset > limit:
        # All its batches stay, but not the gap that an earlier truncation left after them.
        return False
    if result.position == segment.end_position or result.next_offset == segment.next_offset:
        result.next_offset = segment.next_offset
        return True
    return False


def _is_stale(result: RecoveryScan, batch: Batch) -> bool:
    """Whether a batch was left in the file by a truncation, and is no part of the log.

    A batch that was appended with a gap before it says where the batch before it ends.  Any
    other gap, where a scan verifies, is one of lost records: only a truncation, which
    raises the epoch, or a repair below the recovery point leaves one.
    """
    if batch.base_offset < result.next_offset or batch.leader_epoch < result.epoch:
        return True
    gap = batch.base_offset - result.next_offset
    if gap == batch.gap or batch.leader_epoch > result.epoch:
        return False
    return batch.next_offset > result.info.recovery_offset


def _has_end_mark(file: SegmentFile, segment: SegmentInfo) -> bool:
    """Whether a sealed segment has its end mark, which a roll does not flush."""
    if file.size() != segment.size:
        return False
    return file.bytes(segment.end_position, len(END_MARK)) == END_MARK


def _damaged(
    log: PartitionLog, segment: SegmentInfo, position: int, reason: str
) -> CorruptionError:
    return CorruptionError(
        f"A segment is damaged below the recovery point: {reason}",
        **log.where,
        offset=segment.base_offset,
        path=log.path_of(segment),
        position=position,
        todo="Nothing was truncated." + REPAIR,
    )


def preview(log: PartitionLog) -> Tail:
    """Return the tail that `rebuild` would write, for a handle that may not write."""
    try:
        result = scan(log)
    except CorruptionError:
        if not log.mend():
            raise
        return preview(log)
    active = result.active._replace(next_offset=None)
    epoch, appended_ms = result.info.leader_epoch, _append_time(log, result)
    return _tail_of(result, active, result.position or 0, epoch, appended_ms)


# Truncating what lies past the end, and writing the tail


def rebuild(log: PartitionLog, limit: int = _NO_LIMIT) -> Tail:
    """Find the end, truncate what is past it, and write the tail row; under the partition's lock.

    The leader epoch grows, because records that readers may have seen can be
    gone.  A recovery that was killed is repeated with the same result.
    """
    log.mend()
    result = scan(log, limit)
    _logger.debug(
        "%s-%d: recovery from offset %d: the log ends at offset %d; %d sealed segments are whole, "
        "%d segments are dropped; why it ends there: %s",
        *(log.topic, log.partition, result.info.recovery_offset, result.next_offset),
        *(len(result.whole), len(result.dropped), result.damage or "nothing follows"),
    )
    file_missing = result.position is None
    if limit == _NO_LIMIT:
        end = max(result.next_offset, result.info.start_offset)
        offsets.clamp(log.context.state, log.key, end)
    _warn_of_loss(log, result)
    no_record_left = not result.whole and limit <= result.active.base_offset
    if no_record_left or result.next_offset < result.info.start_offset:
        return _start_over(log, result, min(result.info.start_offset, limit))
    if limit != _NO_LIMIT and not file_missing:
        _copy_active(log, result)
    changed = result.whole or result.dropped or result.active.sealed or result.journaled
    active = result.active._replace(
        next_offset=None, size=0, end_position=0, max_timestamp=None, appended_ms=0
    )
    appended_ms = _append_time(log, result)
    epoch = result.info.leader_epoch
    # A partition that was never written to has no file; any other may have had readers.
    if changed or log.context.files.exists(log.path_of(result.active)):
        epoch = _write_state(log, result, active, appended_ms)
    log.refresh()
    for segment in result.unmarked:
        sealed = log.open_segment(segment, write=True)
        sealed.truncate(segment.end_position)
        sealed.write([END_MARK], segment.end_position)
    if file_missing:
        file = roll.create_segment(log, active, False)
    else:
        file = log.open_segment(active, write=True)
    position = file.start if result.position is None else result.position
    if file.size() > position:
        file.truncate(position)
    if result.next_offset > result.info.recovery_offset or limit != _NO_LIMIT or result.unpublished:
        # From here on the log keeps what the scan counted, and what was truncated stays so.
        _sync(log, result, file)
    unnamed_files.discard(log, result.dropped)
    return _write_tail(log, result, _tail_of(result, active, position, epoch, appended_ms))


def _warn_of_loss(log: PartitionLog, result: RecoveryScan) -> None:
    """Log what a recovery is about to truncate because of damage."""
    if result.damage is None:
        return
    position = result.position or 0
    cut = max(_size_of(log, result.active) - position, 0)
    if position and cut <= MOST_AHEAD:
        # A roll that did not get to seal the segment leaves an end mark; zeros are preallocated.
        left = log.open_segment(result.active).bytes(position, cut)
        cut = cut if left.removeprefix(END_MARK).strip(b"\0") else 0
    cut += sum(_size_of(log, segment) for segment in result.dropped)
    if not cut:
        return
    _logger.warning(
        "%s-%d: recovery found damage in %s. The log now ends at offset %d, and %d bytes after it "
        "are dropped. They were written after the last flush of the log, so a power cut or a crash "
        "of the system may have lost a part of them; if there was none, check the disk.",
        log.topic,
        log.partition,
        result.damage,
        result.next_offset,
        cut,
    )


def _size_of(log: PartitionLog, segment: SegmentInfo) -> int:
    exists = log.context.files.exists(log.path_of(segment))
    return log.open_segment(segment).size() if exists else 0


def _append_time(log: PartitionLog, result: RecoveryScan) -> int:
    """Return when the last batch of the active segment was appended, or a later time.

    Exact if it was noted: when the segment was sealed, at the last flush, or by the
    last recovery.  What was appended after a flush counts as appended now, so that
    nothing is deleted earlier than `retention.ms` promises.
    """
    info, active = result.info, result.active
    if result.next_offset == active.base_offset:
        return first_append_time(active.created_ms, info.appended_ms)
    if active.appended_ms:
        return active.appended_ms
    if info.appended_ms and result.next_offset <= info.appended_offset:
        return info.appended_ms
    return next_append_time(info.appended_ms, log.context.clock())


def _copy_active(log: PartitionLog, result: RecoveryScan) -> None:
    """Copy what a truncation leaves of a segment to a new file, if it removes anything.

    Other processes may read the old file or have it mapped, and a map of a file that
    shrinks is a SIGBUS: they finish on the old one.  Killed before the manifest
    names the copy, the copy is garbage; after that, the old file is.
    """
    old = result.active
    source = log.open_segment(old)
    assert result.position is not None
    stop = result.position
    if source.size() <= stop:
        return
    copy, files = unnamed_files.new_file(log, old), log.context.files
    fd = files.open(log.path_of(copy), write=True, create=True)
    try:
        for position in range(0, stop, CHUNK_BYTES):
            chunk = source.bytes(position, min(CHUNK_BYTES, stop - position))
            files.write(fd, [chunk], position)
        # Before it is named: what is below the recovery point must be on the disk.
        files.sync(fd)
    finally:
        files.close(fd)
    files.sync_directory(f"{log.directory}/{log.partition}")
    result.active = copy
    result.dropped.append(old)


def _start_over(log: PartitionLog, result: RecoveryScan, offset: int) -> Tail:
    """Drop every segment and begin an empty one at ``offset``."""
    old = [*result.whole, result.active, *result.dropped]
    epoch = result.info.leader_epoch + 1
    info = PartitionInfo(offset, offset, epoch)

    def step(txn: kv.Txn) -> SegmentInfo:
        unnamed_files.drop_names(txn, log.key, old)
        number = catalog.next_number(txn, "segment")
        new = SegmentInfo(offset, number, log.context.clock(), dense=True)
        catalog.put_segment(txn, log.key, new)
        catalog.PARTITIONS.put(txn, log.key, value=info)
        producer_state.SNAPSHOTS.put(txn, log.key, value={})
        leader_epochs.put(txn, log.key, epoch, offset)
        return new

    new = log.context.state.write(step)
    log.refresh()
    file = roll.create_segment(log, new, log.context.durability == "fsync")
    unnamed_files.discard(log, old)
    empty = RecoveryScan(info, new, offset)
    return _write_tail(log, empty, _tail_of(empty, new, file.start, epoch, new.created_ms))


def _write_state(
    log: PartitionLog, result: RecoveryScan, active: SegmentInfo, appended_ms: int
) -> int:
    """Drop the names of what is past the end, before any file is changed; return the epoch."""
    # A `state` that was restored from its copy may know an older epoch than the batches.
    epoch, now_ms = max(result.info.leader_epoch, result.epoch) + 1, log.context.clock()
    # Segments that a restored `state` did not know.
    undated = [segment for segment in result.whole if not segment.appended_ms]

    def step(txn: kv.Txn) -> None:
        for segment, blob in result.sized:
            catalog.put_segment(txn, log.key, segment)
            keyspace.SEGMENT_INDEXES.put(txn, log.key, *segment.key, value=blob)
        for segment in undated:
            catalog.put_segment(txn, log.key, segment._replace(appended_ms=now_ms))
        unnamed_files.drop_names(txn, log.key, result.dropped)
        catalog.drop_segment(txn, log.key, result.active)
        keyspace.UNCOMMITTED_FILES.delete(txn, log.key, *result.active.key)
        catalog.put_segment(txn, log.key, active)
        recovery_point = min(result.info.recovery_offset, result.next_offset)
        changed = PartitionInfo(
            result.info.start_offset, recovery_point, epoch, appended_ms, result.next_offset
        )
        catalog.PARTITIONS.put(txn, log.key, value=changed)
        # Otherwise the next recovery would take batches that were truncated for sent, and
        # answer their repetition with offsets that other batches have then.
        producer_state.SNAPSHOTS.put(txn, log.key, value=result.producers)
        leader_epochs.put(txn, log.key, epoch, result.next_offset)

    log.context.state.write(step)
    return epoch


def _sync(log: PartitionLog, result: RecoveryScan, active: SegmentFile) -> None:
    files = [active] + [
        log.open_segment(segment, write=True)
        for segment in result.whole
        if segment.next_offset is not None and segment.next_offset > result.info.recovery_offset
    ]
    try:
        for file in files:
            log.sync(file)
        sync_entries(log, result.active.id)
    except DurabilityError:
        # There may be no row yet to note the failure in.  The next recovery must find
        # what is on the disk, not what is cached and will never get there (P9).
        for file in files:
            file.drop_cache()
        raise


def _write_tail(log: PartitionLog, result: RecoveryScan, tail: Tail) -> Tail:
    """Write the tail row with the rows of the index and the producers; ends the recovery."""

    def step(txn: kv.Txn) -> None:
        index.remove(txn, log.key)
        kv.remove(txn, producer_state.PRODUCERS.prefix(log.key))
        for entry in result.entries:
            index.put(txn, log.key, tail.segment_id, entry)
        for producer_id, producer in result.producers.items():
            txn.put(producer_state.key(log.key, producer_id), producer.row)
        txn.put(log.tail_key, tail.pack())
        UNFLUSHED.delete(txn, log.key)

    log.context.live.write(step)
    # Last: what a publication left is truncated now, and that is on the disk.
    journal.forget(log)
    checkpoint.forget(log)
    return tail


def _tail_of(
    result: RecoveryScan, active: SegmentInfo, position: int, epoch: int, appended_ms: int
) -> Tail:
    end = result.next_offset
    return Tail(
        *(active.id, active.base_offset, end, position, end, position),
        durable_offset=end,
        start_offset=result.info.start_offset,
        leader_epoch=epoch,
        max_timestamp=result.max_timestamp,
        first_timestamp=result.first_timestamp,
        created_ms=active.created_ms,
        appended_ms=appended_ms,
        unindexed=result.unindexed,
    )


# Removing the records at and above an offset


def truncate_to(log: PartitionLog, offset: int) -> bool:
    """Remove every record at or above an offset; see `PartitionLog.truncate_to`."""
    if offset < 0:
        raise ValueError(f"offset must be at least 0, got {offset}")
    log.context.check_writable()
    try:
        with log.owned() as tail:
            if tail.failed:
                raise log.flush_failed()
            if offset < tail.log_end_offset:
                truncate_locked(log, tail, offset)
            return offset < tail.log_end_offset
    finally:
        log.context.wake.advance()


def truncate_locked(log: PartitionLog, tail: Tail, offset: int) -> None:
    """Remove every record at or above an offset, under the partition's lock."""

    def step(txn: kv.Txn) -> None:
        info = catalog.PARTITIONS.get(txn, log.key) or PartitionInfo()
        recovery_point = min(info.recovery_offset, offset)
        # The start in `live` is ahead if a move of it was not made durable; it never moves back.
        start = min(max(info.start_offset, tail.start_offset), offset)
        changed = PartitionInfo(
            start, recovery_point, info.leader_epoch, tail.appended_ms, tail.log_end_offset
        )
        catalog.PARTITIONS.put(txn, log.key, value=changed)
        catalog.clamp_cleaned_offset(txn, log.key, offset)

    log.context.state.write(step)
    # If this process dies from here on, the next one rebuilds the tail, and the log has
    # either all of the records or none of them.
    log.context.live.write(lambda txn: txn.delete(log.tail_key))
    after = rebuild(log, offset)
    if after.log_end_offset != offset:
        # The log must end at the offset, past the last batch (A34).  A sealed segment notes
        # that durably: otherwise recovery could not tell the gap from lost records.
        after = after._replace(log_end_offset=offset, high_watermark=offset, durable_offset=offset)
        roll.roll(log, after, synced=True, gap=True)
