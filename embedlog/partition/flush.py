"""Putting partitions on the disk: group commit, and moving the recovery points.

A failed fsync is final: the kernel reports it once, and a retry reports success while
the data is gone.  So the partition becomes read-only for every process until `repair`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING

from embedlog import catalog, kv
from embedlog.batch import EncodedBatch
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.config import LONG_MAX
from embedlog.errors import (
    DurabilityError,
    EmbedlogError,
    LockTimeoutError,
    OffsetOutOfRangeError,
    ReplicaNotAvailableError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.partition import producer_state
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.tail import TAILS, UNFLUSHED, Tail, peek_tail
from embedlog.segment import SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


def is_due(log: PartitionLog, tail: Tail) -> bool:
    """Whether flush.messages or flush.ms requires a flush."""
    config, interval_ms = log.config, log.config.flush_ms
    if tail.log_end_offset - tail.durable_offset >= config.flush_messages:
        return True
    return interval_ms < LONG_MAX and log.context.clock() - tail.flushed_ms >= interval_ms


def is_overdue(log: PartitionLog) -> bool:
    """Whether a flush has become due since the last append, which no append noticed."""
    tail = log.tail()
    return tail.durable_offset < tail.log_end_offset and not tail.failed and is_due(log, tail)


def is_alone(log: PartitionLog, tail: Tail, batch: EncodedBatch) -> bool:
    """Whether an append is best flushed under the partition's lock, and published once.

    Not if others append, or wait: then all share flushes, and hold the lock for as short as
    possible.  Nor if more than the active segment is to be flushed.
    """
    end = tail.log_end_offset
    return (
        log.context.files.preallocates
        and log.is_undisputed(end, end + batch.count)
        and log.named_segment_id == tail.segment_id
        and tail.durable_offset >= tail.base_offset
    )


# Many partitions at once


def flush(logs: Iterable[PartitionLog]) -> None:
    """Put everything written so far on the disk, and move the recovery points.

    For any number of partitions: each file once, each directory once, one commit of
    `live`, and one of `state` for as many partitions as may have files open.  A partition
    that fails does not keep the others from being flushed; the first error is raised at
    the end, that of a partition that is offline last.  If a topic was deleted meanwhile, that is
    no failure: nothing of it is left to flush.
    """
    logs = list(logs)
    failures: list[EmbedlogError] = []
    # Before the tails are read: what is appended from now on makes them dirty again.
    for log in logs:
        log.mark_dirty(False)
    flushed: dict[PartitionLog, Tail] = {}
    try:
        for log in logs:
            try:
                flushed[log] = sync_one(log, sync_data)
            except EmbedlogError as error:
                _note_failure(log, error, failures)
        _sync_names(flushed, failures)
        if flushed:
            _publish_all(flushed, failures)
        left = iter(list(flushed.items()))
        while some := dict(islice(left, _most_locked(logs))):
            # A process that holds a partition, and may be stopped, delays that partition only.
            for log in _move_recovery_points(some, failures, timeout=0):
                _move_recovery_points({log: some[log]}, failures, timeout=None)
    except BaseException:
        for log in logs:
            log.mark_dirty()
        raise
    if failures:
        raise min(failures, key=lambda error: isinstance(error, ReplicaNotAvailableError))


def _most_locked(logs: list[PartitionLog]) -> int:
    """Return how many locks to hold at once, each of which takes a descriptor."""
    return logs[0].context.open_files.limit if logs else 0


def _note_failure(log: PartitionLog, error: EmbedlogError, failures: list[EmbedlogError]) -> None:
    """Add an error, unless the topic was deleted, or re-created, since the log was opened."""
    try:
        log.refresh()
    except UnknownTopicOrPartitionError:
        return
    log.mark_dirty()
    failures.append(error)


def sync_one(log: PartitionLog, sync: Callable[[PartitionLog, Tail, SegmentFile], None]) -> Tail:
    """Flush one partition; return its tail as of before."""
    while True:
        tail = log.tail()
        if tail.failed:
            raise log.flush_failed()
        try:
            sync(log, tail, _file_of(log, tail))
            return tail
        except EmbedlogError as error:
            missing = isinstance(error, OffsetOutOfRangeError) or getattr(error, "missing", False)
            # Again if retention dropped a file during the flush.
            if not missing or log.tail().start_offset <= tail.start_offset:
                raise


def _sync_names(flushed: dict[PartitionLog, Tail], failures: list[EmbedlogError]) -> None:
    """Flush each directory that has new files, once; drop the partitions for which it fails."""
    new = [log for log, tail in flushed.items() if log.named_segment_id != tail.segment_id]
    users: dict[str, list[PartitionLog]] = {}
    for log in new:
        for directory in log.directories:
            users.setdefault(directory, []).append(log)
    for directory, logs in users.items():
        try:
            logs[0].context.files.sync_directory(directory)
        except StorageError as error:
            final = isinstance(error, DurabilityError)
            for log in logs:
                if flushed.pop(log, None) is not None:
                    failure = log.mark_flush_failed(error) if final else error
                    _note_failure(log, failure, failures)
    for log in new:
        if log in flushed:
            log.note_names_synced(flushed[log].segment_id)


def _publish_all(flushed: dict[PartitionLog, Tail], failures: list[EmbedlogError]) -> None:
    """Move the ends in one transaction; drop partitions whose flush failed in another process."""
    context = next(iter(flushed)).context
    failed = context.live.write(
        lambda txn: [log for log, tail in flushed.items() if not publish(log, txn, tail)]
    )
    for log in failed:
        del flushed[log]
        _note_failure(log, log.flush_failed(), failures)
    context.wake.advance()


def _move_recovery_points(
    flushed: dict[PartitionLog, Tail], failures: list[EmbedlogError], timeout: float | None
) -> list[PartitionLog]:
    """Note in one transaction what is on the disk; return the partitions that are locked.

    Under the partitions' locks, since a truncation must not come in between.  With
    a ``timeout`` of 0 it waits for none of them, so their order does not matter.
    """
    busy: list[PartitionLog] = []
    points: list[tuple[bytes, Tail, dict[int, ProducerState]]] = []

    def step(txn: kv.Txn) -> None:
        for key, tail, producers in points:
            put_recovery_point(txn, key, tail, producers)

    with ExitStack() as held:
        for log, tail in flushed.items():
            is_held = False
            try:
                current, is_held = held.enter_context(log.owned(timeout)), True
                # A truncation in between raised the epoch: then the point stays.
                if current.leader_epoch == tail.leader_epoch:
                    points.append((log.key, tail, log.remembered_producers()))
            except EmbedlogError as error:
                if timeout == 0 and isinstance(error, LockTimeoutError) and not is_held:
                    busy.append(log)
                else:
                    _note_failure(log, error, failures)
        if points:
            next(iter(flushed)).context.state.write(step)
    return busy


# One partition


def flush_to(log: PartitionLog, target: Tail) -> None:
    """Return once everything up to the end of ``target`` is on the disk, and published.

    The first of several waiting threads flushes for all of them: its flush covers
    what they wrote before it began (group commit).
    """
    with log.flush_lock:
        if log.tail().durable_offset >= target.log_end_offset:
            return
        flushed = sync_one(log, sync_files)
        if not log.context.live.write(lambda txn: publish(log, txn, flushed)):
            raise log.flush_failed()
    if log.tail().durable_offset < target.log_end_offset:
        log.context.take_checkpoint(log.context)  # It is of a transaction.
        if log.tail().failed:
            raise log.flush_failed()


def flush_up_to(log: PartitionLog, offset: int) -> None:
    """Move the recovery point to an offset at least, with the producers' sequence numbers.

    Does nothing if everything below the offset is on the disk already.

    Raises:
        DurabilityError: A flush failed, now or before.
    """
    info = log.context.state.read(lambda txn: catalog.PARTITIONS.get(txn, log.key))
    if info is None or info.recovery_offset < offset or log.tail().failed:
        flush([log])


def _file_of(log: PartitionLog, tail: Tail) -> SegmentFile:
    """Return the file of the segment that a tail is in."""
    log.refresh()
    file = log.open_active(tail.segment_id)
    if file is not None:
        return file
    # Sealed meanwhile by a process that does not flush, or truncated.
    info = log.segments.get(tail.base_offset)
    if info is None or info.id != tail.segment_id:
        if log.tail().leader_epoch == tail.leader_epoch:
            # Sealed and compacted meanwhile, which flushes first: nothing is left to do,
            # and any file serves.
            return log.active_file()
        raise OffsetOutOfRangeError("The log was truncated while it was flushed", **log.where)
    return log.open_segment(info, write=True)


def publish(log: PartitionLog, txn: kv.Txn, flushed: Tail) -> bool:
    """Move the ends; False if a flush of another process failed meanwhile.

    The system reports a failure to only one process, so success here proves nothing then.
    """
    tail = peek_tail(txn, log.key)
    if tail is None:
        return True
    if tail.leader_epoch != flushed.leader_epoch or tail.failed:
        return not tail.failed
    end = flushed.log_end_offset, flushed.log_end_position
    if (unflushed := UNFLUSHED.get(txn, log.key)) is not None:
        end = min(end, unflushed)
    durable = max(tail.durable_offset, end[0])
    tail = tail._replace(durable_offset=durable, flushed_ms=log.context.clock())
    if tail.segment_id == flushed.segment_id and tail.high_watermark < end[0]:
        tail = tail._replace(high_watermark=end[0], high_watermark_position=end[1])
    TAILS.put(txn, log.key, value=tail)
    return True


# Flushing the files of one partition, and noting in `state` how far that has come


def sync_files(log: PartitionLog, tail: Tail, file: SegmentFile) -> None:
    """Flush the older segments that were not flushed yet, the active one, and their names.

    Raises:
        DurabilityError: A flush failed; the partition is read-only from now on.
    """
    sync_data(log, tail, file)
    if log.named_segment_id != tail.segment_id:
        sync_entries(log, tail.segment_id)


def sync_data(log: PartitionLog, tail: Tail, file: SegmentFile) -> None:
    """Flush the segments, as `sync_files` does, but not their names."""
    if tail.durable_offset < tail.base_offset:
        for info in list(log.segments.values()):
            if info.sealed and tail.durable_offset < info.next_offset <= tail.base_offset:
                _sync_sealed(log, info)
    log.sync(file)


def _sync_sealed(log: PartitionLog, info: SegmentInfo) -> None:
    try:
        file = log.open_segment(info, write=True)
    except StorageError as error:
        log.refresh()
        current = log.segments.get(info.base_offset)
        if not error.missing or (current is not None and current.id == info.id):
            raise
        return  # Compacted meanwhile, which flushes first.
    log.sync(file)


def sync_entries(log: PartitionLog, segment_id: int) -> None:
    """Flush the names of new files: without it a power cut loses the whole file.

    Raises:
        DurabilityError: A flush failed; the partition is read-only from now on.
        StorageError: A directory could not be opened, so nothing was tried and nothing is lost.
    """
    for directory in log.directories:
        log.sync_directory(directory)
    log.note_names_synced(segment_id)


def put_recovery_point(
    txn: kv.Txn, key: bytes, flushed: Tail, producers: dict[int, ProducerState]
) -> None:
    """Note in `state` that everything below the end of a tail is on the disk.

    The recovery point only moves forward.
    """
    info, offset = catalog.PARTITIONS.get(txn, key) or PartitionInfo(), flushed.log_end_offset
    if offset > info.recovery_offset:
        changed = info._replace(
            recovery_offset=offset, appended_ms=flushed.appended_ms, appended_offset=offset
        )
        catalog.PARTITIONS.put(txn, key, value=changed)
        producer_state.SNAPSHOTS.put(txn, key, value=producers)
