"""Finding the end of a partition again from its segments (R7).

Needed where `live` has no row for a partition: on first use, after a reboot,
or when `live` was lost.  The scan begins at the recovery point.  Past it, the
first bad block ends the log; below it damage is an error and nothing is cut
(R7).  Everything here may be killed and done again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from embedlog import catalog, index, kv
from embedlog.batch import Batch
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.errors import (
    CorruptBatchError,
    CorruptionError,
    DurabilityError,
    EmbedlogError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups import offsets
from embedlog.index import IndexEntry
from embedlog.partition import (
    flush,
    journal,
    producer_expiration,
    producer_state,
    replace,
    roll,
    tail,
)
from embedlog.partition.bounded_clock import bounded_ms
from embedlog.partition.producer_state import ProducerState, SentBatch
from embedlog.partition.tail import Tail
from embedlog.segment import CHUNK_BYTES, END_MARK, SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_NO_TIME = -(1 << 63)
_NEVER = 1 << 63


@dataclass(slots=True)
class RecoveryScan:
    """What the segments of a partition hold, found by scanning; nothing is changed by it."""

    info: PartitionInfo
    active: SegmentInfo
    next_offset: int
    """Where the log ends."""
    position: int | None = None
    """Where the active file ends; None when it has to be made again."""
    start: int = 0
    whole: list[SegmentInfo] = field(default_factory=list)
    dropped: list[SegmentInfo] = field(default_factory=list)
    unmarked: list[SegmentInfo] = field(default_factory=list)
    """Sealed segments whose end mark a power cut took."""
    sized: list[tuple[SegmentInfo, bytes]] = field(default_factory=list)
    """Adopted segments, whose size only the scan found, and their index."""
    replay: bool = False
    """Whether to find the producers from the batches alone, from the first one on."""
    journaled: bool = False
    """Whether a publication wrote here: then somebody may have seen what is gone."""
    unpublished: bool = False
    """Whether a publication may have left batches past the end."""
    reason: str | None = None
    """Why the log ends here, if not because nothing follows."""
    max_timestamp: int = _NO_TIME
    first_timestamp: int = _NO_TIME
    unindexed: int = 0
    entries: list[IndexEntry] = field(default_factory=list)
    producers: dict[int, ProducerState] = field(default_factory=dict)
    epoch: int = 0

    def begin(self, segment: SegmentInfo) -> None:
        """Start on another segment."""
        self.active, self.position, self.start = segment, None, 0
        self.max_timestamp = self.first_timestamp = _NO_TIME
        self.unindexed, self.entries = 0, []

    def add(self, one: Batch, interval: int, now_ms: int) -> None:
        """Count a batch that is whole: index it as the append did (B1), note its producer."""
        if self.unindexed > interval:
            self.entries.append(IndexEntry(one.base_offset, one.position, self.max_timestamp))
            self.unindexed = 0
        if self.first_timestamp == _NO_TIME:
            self.first_timestamp = one.max_timestamp
        self.max_timestamp = max(self.max_timestamp, one.max_timestamp)
        self.unindexed += one.size
        self.next_offset, self.epoch = one.next_offset, one.leader_epoch
        self.position = one.position + one.size
        unknown = self.replay or one.base_offset >= self.info.recovery_offset
        if one.producer_id is not None and unknown:
            self._note(one, now_ms)

    def _note(self, one: Batch, now_ms: int) -> None:
        assert one.producer_id is not None
        assert one.producer_epoch is not None
        assert one.base_sequence is not None
        # Of a compacted batch some records are gone, but not their numbers (D11).
        last = producer_state.after(one.base_sequence, one.next_offset - one.base_offset - 1)
        sent = SentBatch(one.base_sequence, last, one.base_offset, one.next_offset)
        known = self.producers.get(one.producer_id)
        if known is None or sent not in known.batches:
            noted = producer_state.note(known, one.producer_epoch, sent, now_ms)
            self.producers[one.producer_id] = noted


def survey(log: PartitionLog, upto: int = _NEVER) -> RecoveryScan:
    """Scan a partition from its recovery point.

    Args:
        upto: End the log at the batch that would go past this offset.

    Raises:
        CorruptionError: Damage below the recovery point.
    """
    info, segments, blob, entered = log.context.state.read(
        lambda txn: (
            catalog.partition(txn, log.key),
            catalog.segments(txn, log.key),
            catalog.producers_blob(txn, log.key),
            journal.get(txn, log.key),
        )
    )
    if info is None or not segments:
        raise _gone(log)
    found = RecoveryScan(info, segments[0], segments[0].base_offset)
    oldest = producer_expiration.oldest_ms(log, bounded_ms(log.context))
    stored = producer_state.unpack_all(blob) if blob else {}
    known = {number: one for number, one in stored.items() if one.last_ms >= oldest}
    # What is kept of a producer may all lie past a cut, and what it sent before
    # is then told by its batches only (A34).
    found.replay = bool(stored) and upto != _NEVER
    found.producers = {} if found.replay else known
    found.journaled, published = entered is not None, journal.ceiling(entered)
    if published is not None:
        # What a publication wrote past it is whole, and was never a part of the log.
        found.unpublished, upto = True, min(upto, published)
    for place, segment in enumerate(segments):
        found.begin(segment)
        if not _continues(log, found, segment, upto) or place == len(segments) - 1:
            found.dropped = segments[place + 1 :]
            break
        found.whole.append(found.active)
    found.producers = {
        number: producer_state.below(one, found.next_offset)
        for number, one in _merged(known, found.producers).items()
    }
    return found


def distrust_tail(log: PartitionLog) -> None:
    """Have the end found again by the next look; when it was appended to stays known."""
    row = log.context.live.get(log.tail_key)
    if row is None:
        return

    def step(txn: kv.Txn) -> None:
        info = catalog.partition(txn, log.key) or PartitionInfo()
        catalog.put_partition(txn, log.key, _dated(info, tail.unpack(row)))

    log.context.state.write(step)
    log.context.live.write(lambda txn: txn.delete(log.tail_key))


def _dated(info: PartitionInfo, now: Tail) -> PartitionInfo:
    return info._replace(appended_ms=now.appended_ms, appended_offset=now.log_end_offset)


def _gone(log: PartitionLog) -> EmbedlogError:
    """Return the error for a partition without rows: its topic was deleted, or they are lost."""
    place: dict[str, Any] = {"topic": log.topic, "partition": log.partition}
    topic = log.context.catalog.topics().get(log.topic)
    if topic is None or topic.id != log.topic_id:
        return UnknownTopicOrPartitionError("the partition is gone", **place)
    return CorruptionError("state has lost the rows of the partition", **place)


def _merged(
    kept: dict[int, ProducerState], replayed: dict[int, ProducerState]
) -> dict[int, ProducerState]:
    """Add the producers whose batches are all gone; an epoch that fenced stays (G17)."""
    merged = {**kept, **replayed}
    for number in kept.keys() & replayed.keys():
        epoch = max(kept[number].epoch, replayed[number].epoch)
        merged[number] = replayed[number]._replace(epoch=epoch)
    return merged


def _continues(log: PartitionLog, found: RecoveryScan, segment: SegmentInfo, upto: int) -> bool:
    """Look at one segment; True if it is whole, so that the log may go on after it."""
    safe = segment.next_offset is not None and segment.next_offset <= found.info.recovery_offset
    # One that was adopted has no size yet: only the scan finds it.
    safe = safe and not found.replay and segment.size > 0
    if safe and segment.next_offset is not None and segment.next_offset <= upto:
        if not _marked(_check_there(log, segment), segment):
            found.unmarked.append(segment)
        found.next_offset = segment.next_offset
        return True
    found.next_offset = segment.base_offset
    try:
        file = log.open_segment(segment)
        found.start = file.start
    except (StorageError, CorruptionError) as error:
        if isinstance(error, StorageError) and not error.missing:
            raise  # Too many open files, say: that is no reason to cut a log.
        if segment.base_offset < found.info.recovery_offset:
            raise _damaged(log, segment, 0, f"cannot be read: {error}") from error
        found.reason = "the file is missing or empty"
        return False
    found.position = file.start
    whole = _scan(log, found, file, segment, upto)
    if not whole or segment.next_offset is None:
        return False
    if found.position != segment.end_position:
        found.active = _sized(found, segment)
        found.sized.append((found.active, index.pack(found.entries)))
    if not _marked(file, found.active):
        found.unmarked.append(found.active)
    return True


def _sized(found: RecoveryScan, segment: SegmentInfo) -> SegmentInfo:
    assert found.position is not None
    return segment._replace(
        size=found.position + len(END_MARK),
        end_position=found.position,
        max_timestamp=None if found.max_timestamp == _NO_TIME else found.max_timestamp,
    )


def _scan(
    log: PartitionLog, found: RecoveryScan, file: SegmentFile, segment: SegmentInfo, upto: int
) -> bool:
    """Count the batches of a file until one is bad; True if a sealed one is all there."""
    recovery, now_ms = found.info.recovery_offset, log.context.clock()
    stop = file.size()
    if segment.next_offset is not None:
        stop = min(stop, segment.end_position)
    try:
        for one in file.scan(file.start, stop):
            if one.next_offset > upto:
                found.reason = f"cut at offset {upto}"
                return False
            if _stale(found, one):
                raise CorruptBatchError(
                    "a stale batch", reason="stale", path=file.path, position=one.position
                )
            if one.next_offset > recovery:
                one.verify()
            found.add(one, log.config.index_interval_bytes, now_ms)
    except CorruptBatchError as error:
        if found.next_offset < recovery:
            raise _damaged(log, segment, error.position or 0, str(error)) from error
        found.reason = str(error)
    if found.next_offset < recovery and segment.next_offset is None:
        raise _damaged(log, segment, stop, "the file ends early")
    if segment.next_offset is None:
        return False
    if segment.next_offset > upto:
        # All its batches stay, but not the gap that an earlier cut left after them.
        return False
    if found.position == segment.end_position or found.next_offset == segment.next_offset:
        found.next_offset = segment.next_offset
        return True
    return False


def _stale(found: RecoveryScan, one: Batch) -> bool:
    """Whether a batch was left behind in the file by a cut, and is no part of the log.

    Offsets are dense where a scan verifies: only a truncation, which raises
    the epoch, or a repair below the recovery point leaves a gap.
    """
    if one.base_offset < found.next_offset or one.leader_epoch < found.epoch:
        return True
    gap = one.base_offset > found.next_offset and one.leader_epoch == found.epoch
    return gap and one.next_offset > found.info.recovery_offset


def _marked(file: SegmentFile, segment: SegmentInfo) -> bool:
    """Whether a sealed segment has its end mark: nobody waits for that to reach the disk."""
    if file.size() != segment.size:
        return False
    return file.bytes(segment.end_position, len(END_MARK)) == END_MARK


def _check_there(log: PartitionLog, segment: SegmentInfo) -> SegmentFile:
    try:
        file = log.open_segment(segment)
        size = file.size()
    except StorageError as error:
        if not error.missing:
            raise
        raise _damaged(log, segment, 0, f"cannot be opened: {error}") from error
    if size < segment.end_position:
        raise _damaged(log, segment, size, f"{segment.size} bytes were flushed")
    return file


def _damaged(
    log: PartitionLog, segment: SegmentInfo, position: int, reason: str
) -> CorruptionError:
    return CorruptionError(
        f"a segment is damaged below the recovery point: {reason}",
        topic=log.topic,
        partition=log.partition,
        offset=segment.base_offset,
        path=log.path_of(segment),
        position=position,
        todo="nothing was cut; run `embedlog repair`, which tells first what it would drop",
    )


def rebuild(log: PartitionLog, upto: int = _NEVER) -> Tail:
    """Find the end, cut what is past it, and write the tail row; under the partition's lock.

    The leader epoch grows, because records that somebody may have seen can be
    gone (A37).  Idempotent: a recovery that was killed is done again (A26).
    """
    now = _rebuild(log, upto)
    # Last: what a publication left is cut by now, and that is on the disk.
    journal.forget(log)
    return now


def _rebuild(log: PartitionLog, upto: int) -> Tail:
    found = survey(log, upto)
    new = found.position is None
    if upto == _NEVER:
        end = max(found.next_offset, found.info.start_offset)
        offsets.clamp(log.context.state, log.key, end)
    if found.next_offset < found.info.start_offset or _starts_over(found, upto):
        return _start_over(log, found, min(max(found.info.start_offset, 0), upto))
    if upto != _NEVER and not new:
        _keep_copy(log, found)
    # A partition that nobody wrote to yet has no file; anything else may have had readers.
    changed = bool(
        found.whole
        or found.dropped
        or found.active.sealed
        or found.journaled
        or log.context.files.exists(log.path_of(found.active))
    )
    active = found.active._replace(
        next_offset=None, size=0, end_position=0, max_timestamp=None, appended_ms=0
    )
    appended_ms = _append_time(log, found)
    epoch = found.info.leader_epoch
    if changed:
        epoch = _write_state(log, found, active, appended_ms)
    log.refresh()
    _mark_ends(log, found.unmarked)
    file = roll.create_segment(log, active, False) if new else log.open_segment(active, write=True)
    position = file.start if found.position is None else found.position
    if file.size() > position:
        file.truncate(position)
    if found.next_offset > found.info.recovery_offset or upto != _NEVER or found.unpublished:
        # What was found is kept from here on, and what was cut stays cut.
        _sync(log, found, file)
    _unlink(log, found.dropped)
    row = _tail_of(found, active, position, found.next_offset, epoch, appended_ms)
    return _write_tail(log, found, row)


def _append_time(log: PartitionLog, found: RecoveryScan) -> int:
    """Return when the last batch of the active segment was appended, or a later time.

    Exact if that was noted: when the segment was sealed, at the last flush, or by the
    last recovery.  What was appended after a flush counts as appended now, so that
    nothing is deleted earlier than `retention.ms` promises.
    """
    info, active = found.info, found.active
    if found.next_offset == active.base_offset:
        return tail.first_append_time(active.created_ms, info.appended_ms)
    if active.appended_ms:
        return active.appended_ms
    if info.appended_ms and found.next_offset <= info.appended_offset:
        return info.appended_ms
    return tail.next_append_time(info.appended_ms, log.context.clock())


def _keep_copy(log: PartitionLog, found: RecoveryScan) -> None:
    """Put what a truncation leaves of a segment into a new file, if it takes anything away.

    Others may read the old file or have it mapped, and a map of a file that is cut
    is a SIGBUS: they finish on the old one (P20).  Killed before the manifest names
    the copy, it is garbage; after that, the old one is.
    """
    old = found.active
    source = log.open_segment(old)
    stop = source.start if found.position is None else found.position
    if source.size() <= stop:
        return

    def step(txn: kv.Txn) -> SegmentInfo:
        copy = old._replace(id=catalog.next_number(txn, b"segment"))
        catalog.put_passing(txn, log.key, copy)
        return copy

    copy, files = log.context.state.write(step), log.context.files
    fd = files.open(log.path_of(copy), write=True, create=True)
    try:
        for place in range(0, stop, CHUNK_BYTES):
            files.write(fd, [source.bytes(place, min(CHUNK_BYTES, stop - place))], place)
        # Before it is named: what is below the recovery point must be on the disk.
        files.sync(fd)
    finally:
        files.close(fd)
    files.sync_directory(f"{log.directory}/{log.partition}")
    found.active = copy
    found.dropped.append(old)


def _starts_over(found: RecoveryScan, upto: int) -> bool:
    """Whether a truncation leaves no record at all (A35)."""
    return not found.whole and upto <= found.active.base_offset


def _start_over(log: PartitionLog, found: RecoveryScan, offset: int) -> Tail:
    """Drop every segment and begin an empty one at ``offset`` (A29, A35)."""
    old = [*found.whole, found.active, *found.dropped]
    epoch = found.info.leader_epoch + 1

    def step(txn: kv.Txn) -> SegmentInfo:
        _drop_names(txn, log, old)
        number = catalog.next_number(txn, b"segment")
        new = SegmentInfo(offset, number, log.context.clock(), dense=True)
        catalog.put_segment(txn, log.key, new)
        catalog.put_partition(txn, log.key, PartitionInfo(offset, offset, epoch))
        catalog.put_producers_blob(txn, log.key, b"")
        _put_epoch(txn, log.key, epoch, offset)
        return new

    new = log.context.state.write(step)
    log.refresh()
    file = roll.create_segment(log, new, log.context.durability == "fsync")
    _unlink(log, old)
    empty = RecoveryScan(PartitionInfo(offset, offset, epoch), new, offset)
    row = _tail_of(empty, new, file.start, offset, epoch, new.created_ms)
    return _write_tail(log, empty, row)


def _write_state(
    log: PartitionLog, found: RecoveryScan, active: SegmentInfo, appended_ms: int
) -> int:
    """Drop the names of what is past the end, before any file is touched."""
    # A state that was restored from its copy may know an older epoch than the batches.
    epoch, now_ms = max(found.info.leader_epoch, found.epoch) + 1, log.context.clock()
    # Those that a restored state did not know.
    undated = [segment for segment in found.whole if not segment.appended_ms]

    def step(txn: kv.Txn) -> None:
        for segment, blob in found.sized:
            catalog.put_segment(txn, log.key, segment)
            catalog.put_index_blob(txn, log.key, segment, blob)
        for segment in undated:
            catalog.put_segment(txn, log.key, segment._replace(appended_ms=now_ms))
        _drop_names(txn, log, found.dropped)
        catalog.drop_segment(txn, log.key, found.active)
        catalog.drop_passing(txn, log.key, found.active)
        catalog.put_segment(txn, log.key, active)
        recovery = min(found.info.recovery_offset, found.next_offset)
        changed = PartitionInfo(
            found.info.start_offset, recovery, epoch, appended_ms, found.next_offset
        )
        catalog.put_partition(txn, log.key, changed)
        # Else the next recovery would take batches that are gone for sent, and
        # answer their repetition with offsets that others have by then.
        catalog.put_producers_blob(txn, log.key, producer_state.pack_all(found.producers))
        _put_epoch(txn, log.key, epoch, found.next_offset)

    log.context.state.write(step)
    return epoch


def _put_epoch(txn: kv.Txn, key: bytes, epoch: int, offset: int) -> None:
    """Add an epoch; those that began at or past its start never had a record (A37)."""
    kept = [entry for entry in catalog.epochs(txn, key) if entry[1] < offset]
    catalog.put_epochs(txn, key, [*kept, (epoch, offset)])


def _mark_ends(log: PartitionLog, unmarked: list[SegmentInfo]) -> None:
    for segment in unmarked:
        file = log.open_segment(segment, write=True)
        file.truncate(segment.end_position)
        file.write([END_MARK], segment.end_position)


def _sync(log: PartitionLog, found: RecoveryScan, file: SegmentFile) -> None:
    files = [file] + [
        log.open_segment(segment, write=True)
        for segment in found.whole
        if segment.next_offset is not None and segment.next_offset > found.info.recovery_offset
    ]
    try:
        for each in files:
            flush.sync(log, each)
        flush.sync_entries(log, found.active.id)
    except DurabilityError:
        # There may be no row yet to note it in.  The next recovery is to find
        # what is on the disk, not what is cached and will never get there (P9).
        for each in files:
            each.drop_cache()
        raise


def _drop_names(txn: kv.Txn, log: PartitionLog, segments: list[SegmentInfo]) -> None:
    """Take segments off the manifest; until `_unlink` they are noted as on their way out."""
    for segment in segments:
        catalog.drop_segment(txn, log.key, segment)
        catalog.put_passing(txn, log.key, segment)


def _unlink(log: PartitionLog, segments: list[SegmentInfo]) -> None:
    """Remove the files that `_drop_names` took the names of."""
    if segments:
        for segment in segments:
            log.context.files.unlink(log.path_of(segment), missing_ok=True)
        replace.forget(log, segments)


def _write_tail(log: PartitionLog, found: RecoveryScan, row: Tail) -> Tail:
    def step(txn: kv.Txn) -> None:
        index.remove(txn, log.key)
        kv.remove(txn, producer_state.ROWS + log.key)
        for entry in found.entries:
            index.put(txn, log.key, row.segment_id, entry)
        for producer_id, producer in found.producers.items():
            txn.put(producer_state.key(log.key, producer_id), producer.row)
        txn.put(log.tail_key, row.pack())

    log.context.live.write(step)
    return row


def _tail_of(
    found: RecoveryScan, active: SegmentInfo, position: int, end: int, epoch: int, appended_ms: int
) -> Tail:
    return Tail(
        active.id,
        active.base_offset,
        end,
        position,
        end,
        position,
        end,
        found.info.start_offset,
        epoch,
        found.max_timestamp,
        found.first_timestamp,
        active.created_ms,
        appended_ms,
        found.unindexed,
    )


def preview(log: PartitionLog) -> Tail:
    """Return the tail that `rebuild` would write, for a handle that may not write."""
    found = survey(log)
    active = found.active._replace(next_offset=None)
    position = found.start if found.position is None else found.position
    epoch, appended_ms = found.info.leader_epoch, _append_time(log, found)
    return _tail_of(found, active, position, found.next_offset, epoch, appended_ms)


def cut(log: PartitionLog, now: Tail, offset: int) -> Tail:
    """Remove what is at or past ``offset``; under the partition's lock."""

    def step(txn: kv.Txn) -> None:
        info = catalog.partition(txn, log.key) or PartitionInfo()
        lower = min(info.recovery_offset, offset)
        # That of `live` is ahead where a trim died before it was durable; it never moves back.
        start = min(max(info.start_offset, now.start_offset), offset)
        changed = info._replace(recovery_offset=lower, start_offset=start)
        catalog.put_partition(txn, log.key, _dated(changed, now))
        catalog.clamp_cleaned_offset(txn, log.key, offset)

    log.context.state.write(step)
    # From here on nobody trusts the old tail; if this process dies, the next
    # one rebuilds, and finds the records still there or gone, but never half.
    log.context.live.write(lambda txn: txn.delete(log.tail_key))
    after = rebuild(log, offset)
    if after.log_end_offset == offset:
        return after
    # The log ends where it was asked to, past the last batch (A34).  A sealed segment
    # says so durably: else recovery could not tell the gap from lost records.
    after = after._replace(log_end_offset=offset, high_watermark=offset, durable_offset=offset)
    return roll.roll(log, after, log.last.headers, True, gap=True)
