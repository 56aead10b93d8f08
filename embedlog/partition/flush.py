"""Putting a partition on the disk: group commit, and what a failed flush means.

A failed fsync is final: the kernel reports it once and forgets, and a retry
reports success while the data is gone (R6).  So the partition
becomes read-only for every process until `repair`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from embedlog import catalog, kv
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.config import TopicConfig
from embedlog.errors import (
    DurabilityError,
    EmbedlogError,
    LockTimeoutError,
    OffsetOutOfRangeError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.partition import producer_expiration, producer_state, tail
from embedlog.partition.bounded_clock import bounded_ms
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.tail import Tail
from embedlog.segment import SegmentFile

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_NEVER = (1 << 63) - 1


def by_itself(config: TopicConfig) -> bool:
    """Whether flush.messages or flush.ms ever asks for a flush; by default neither does."""
    return min(config.flush_messages, config.flush_ms) < _NEVER


def due(log: PartitionLog, now: Tail) -> bool:
    """Whether flush.messages or flush.ms asks for a flush (A22)."""
    config = log.config
    if now.log_end_offset - now.durable_offset >= config.flush_messages:
        return True
    if config.flush_ms >= _NEVER:
        return False
    return log.context.clock() - now.flushed_ms >= config.flush_ms


def is_late(log: PartitionLog) -> bool:
    """Whether a flush has become `due` since the last append, and nobody looked (A22)."""
    now = log.tail()
    return now.durable_offset < now.log_end_offset and not now.failed and due(log, now)


def flush(logs: Iterable[PartitionLog]) -> None:
    """Put everything written so far on the disk and move the recovery points (A22).

    However many partitions: each file once, each directory once, one commit of
    `live` and one of `state`.  A partition that fails does not keep the others
    from being flushed; the first error is raised at the end.  That a topic was
    deleted meanwhile is no failure: nothing of it is left to flush.
    """
    logs = list(logs)
    failures: list[EmbedlogError] = []
    # Before the look: what is appended from now on makes them dirty again.
    for log in logs:
        log.dirty = False
    try:
        flushed = _sync_all(logs, failures)
        _publish_all(flushed, failures)
        # Whoever holds a partition, stopped perhaps, holds up that one alone.
        for log in _move_recovery_points(flushed, failures, timeout=0):
            _move_recovery_points({log: flushed[log]}, failures, timeout=None)
    except BaseException:
        for log in logs:
            log.dirty = True
        raise
    if failures:
        raise failures[0]


def _note_failure(log: PartitionLog, error: EmbedlogError, failures: list[EmbedlogError]) -> None:
    if _is_deleted(log):
        return
    log.dirty = True
    failures.append(error)


def _is_deleted(log: PartitionLog) -> bool:
    """Whether the topic was deleted, or made again, since the log was opened."""
    try:
        log.refresh()
    except UnknownTopicOrPartitionError:
        return True
    return False


def _sync_all(logs: list[PartitionLog], failures: list[EmbedlogError]) -> dict[PartitionLog, Tail]:
    """Flush the files of partitions, then their names; return how far that reached in each."""
    flushed: dict[PartitionLog, Tail] = {}
    for log in logs:
        try:
            flushed[log] = _sync_one(log)
        except EmbedlogError as error:
            _note_failure(log, error, failures)
    _sync_names(flushed, failures)
    return flushed


def _sync_one(log: PartitionLog) -> Tail:
    while True:
        now = log.tail()
        if now.failed:
            raise failed(log)
        try:
            sync_data(log, now, _file_of(log, now))
            return now
        except EmbedlogError as error:
            if not _overtaken(log, now, error):
                raise


def _sync_names(flushed: dict[PartitionLog, Tail], failures: list[EmbedlogError]) -> None:
    """Flush each directory that has new files, once; those it fails for are flushed no more."""
    new = [log for log, now in flushed.items() if log.entry_synced != now.segment_id]
    users: dict[str, list[PartitionLog]] = {}
    for log in new:
        for directory in _directories(log):
            users.setdefault(directory, []).append(log)
    for directory, its in users.items():
        try:
            its[0].context.files.sync_directory(directory)
        except StorageError as error:
            final = isinstance(error, DurabilityError)
            for log in its:
                if flushed.pop(log, None) is not None:
                    _note_failure(log, fail(log, error) if final else error, failures)
    for log in new:
        if log in flushed:
            log.entry_synced = flushed[log].segment_id


def _publish_all(flushed: dict[PartitionLog, Tail], failures: list[EmbedlogError]) -> None:
    """Move the ends in one transaction; those whose flush failed elsewhere are out of it."""
    if not flushed:
        return

    def step(txn: kv.Txn) -> list[PartitionLog]:
        return [log for log, now in flushed.items() if not _publish(log, txn, now)]

    context = next(iter(flushed)).context
    for log in context.live.write(step):
        del flushed[log]
        _note_failure(log, failed(log), failures)
    context.wake.advance()


def _move_recovery_points(
    flushed: dict[PartitionLog, Tail], failures: list[EmbedlogError], timeout: float | None
) -> list[PartitionLog]:
    """Note in one transaction what is on the disk; return those that somebody else holds.

    Under the partitions' locks, for a truncation must not come in between.  With
    a ``timeout`` of 0 none is waited for, so that no order among them matters.
    """
    held: list[PartitionLog] = []
    busy: list[PartitionLog] = []
    points = []
    try:
        for log, now in flushed.items():
            try:
                log.acquire(timeout)
                held.append(log)
                # A truncation in between raised the epoch: then the point stays.
                if log.tail_locked().leader_epoch == now.leader_epoch:
                    points.append((log.key, now, producers(log)))
            except EmbedlogError as error:
                if timeout == 0 and isinstance(error, LockTimeoutError) and log not in held:
                    busy.append(log)
                else:
                    _note_failure(log, error, failures)
        if points:
            held[0].context.state.write(lambda txn: _put_recovery_points(txn, points))
    finally:
        for log in held:
            log.release()
    return busy


def _put_recovery_points(
    txn: kv.Txn, points: list[tuple[bytes, Tail, dict[int, ProducerState]]]
) -> None:
    for point in points:
        put_recovery_point(txn, *point)


def flush_to(log: PartitionLog, mine: Tail) -> None:
    """Return once everything up to ``mine`` is on the disk, and published.

    The first of several waiting threads flushes for all of them: what they
    wrote before its flush began is covered by it (group commit).
    """
    with log.flush_lock:
        while (current := log.tail()).durable_offset < mine.log_end_offset:
            if current.failed:
                raise failed(log)
            try:
                sync_files(log, current, _file_of(log, current))
            except EmbedlogError as error:
                if _overtaken(log, current, error):
                    continue
                raise
            break
        else:
            return
        if not log.context.live.write(lambda txn: _publish(log, txn, current)):
            raise failed(log)


def _overtaken(log: PartitionLog, seen: Tail, error: EmbedlogError) -> bool:
    """Whether a flush found something gone because retention dropped it meanwhile."""
    gone = isinstance(error, OffsetOutOfRangeError) or getattr(error, "missing", False)
    return gone and log.tail().start_offset > seen.start_offset


def _file_of(log: PartitionLog, current: Tail) -> SegmentFile:
    log.refresh()
    file = log.open_active(current.segment_id)
    if file is not None:
        return file
    # Sealed meanwhile, by a process that does not flush; or cut.
    info = log.segments.get(current.base_offset)
    if info is None or info.id != current.segment_id:
        if log.tail().leader_epoch == current.leader_epoch:
            # Sealed and compacted meanwhile, which flushes before: nothing is left to do,
            # and the next one is as good as any.
            return log.active_file()
        raise OffsetOutOfRangeError(
            "the log was cut while it was flushed", topic=log.topic, partition=log.partition
        )
    return log.open_segment(info, write=True)


def sync_files(log: PartitionLog, now: Tail, file: SegmentFile) -> None:
    """Flush the older segments that nobody flushed, the active one, and their names.

    Raises:
        DurabilityError: A flush failed; the partition is read-only from now on (P9).
    """
    sync_data(log, now, file)
    if log.entry_synced != now.segment_id:
        sync_entries(log, now.segment_id)


def sync_data(log: PartitionLog, now: Tail, file: SegmentFile) -> None:
    """As `sync_files`, without the names."""
    if now.durable_offset < now.base_offset:
        for info in list(log.segments.values()):
            if info.sealed and now.durable_offset < info.next_offset <= now.base_offset:
                _sync_sealed(log, info)
    sync(log, file)


def _sync_sealed(log: PartitionLog, info: SegmentInfo) -> None:
    try:
        file = log.open_segment(info, write=True)
    except StorageError as error:
        log.refresh()
        now = log.segments.get(info.base_offset)
        if not error.missing or (now is not None and now.id == info.id):
            raise
        return  # Compacted meanwhile, which flushes before.
    sync(log, file)


def sync(log: PartitionLog, file: SegmentFile) -> None:
    """Flush one file.

    Raises:
        DurabilityError: It failed; the partition is read-only from now on (P9).
    """
    try:
        file.sync()
    except DurabilityError as error:
        raise fail(log, error) from error


def sync_entries(log: PartitionLog, segment_id: int) -> None:
    """Flush the names of new files: without it a power cut loses the whole file.

    Raises:
        DurabilityError: A flush failed, as in `sync`.
        StorageError: A directory could not be opened, so nothing was tried and nothing is lost.
    """
    try:
        for directory in _directories(log):
            log.context.files.sync_directory(directory)
    except DurabilityError as error:
        raise fail(log, error) from error
    log.entry_synced = segment_id


def _directories(log: PartitionLog) -> tuple[str, str, str]:
    """Those that hold the name of a partition's new file, or of one another."""
    return f"{log.directory}/{log.partition}", log.directory, "topics"


def _publish(log: PartitionLog, txn: kv.Txn, flushed: Tail) -> bool:
    """Move the ends; False if a flush of another process failed meanwhile.

    The system reports a failure to one of them only, so this one's success says nothing.
    """
    row = txn.get(log.tail_key)
    if row is None:
        return True
    now = tail.unpack(row)
    if now.leader_epoch != flushed.leader_epoch or now.failed:
        return not now.failed
    durable = max(now.durable_offset, flushed.log_end_offset)
    now = now._replace(durable_offset=durable, flushed_ms=log.context.clock())
    if now.segment_id == flushed.segment_id and now.high_watermark < flushed.log_end_offset:
        now = now._replace(
            high_watermark=flushed.log_end_offset, high_watermark_position=flushed.log_end_position
        )
    txn.put(log.tail_key, now.pack())
    return True


def fail(log: PartitionLog, error: StorageError) -> DurabilityError:
    """Make the partition read-only for every process, and return the error to raise."""

    def step(txn: kv.Txn) -> None:
        row = txn.get(log.tail_key)
        if row is not None:
            txn.put(log.tail_key, tail.unpack(row)._replace(failed=True).pack())

    log.context.live.write(step)
    return failed(log, error.errno)


def failed(log: PartitionLog, errno: int | None = None) -> DurabilityError:
    """Return the error of a partition that a failed flush made read-only."""
    return DurabilityError(
        "a flush failed; what was written since the last good one may be lost",
        topic=log.topic,
        partition=log.partition,
        errno=errno,
        todo="check the disk, then run `embedlog repair`",
    )


def producers(log: PartitionLog) -> dict[int, ProducerState]:
    """Return what the partition remembers of its producers, now, but for those idle too long."""
    prefix = producer_state.ROWS + log.key
    oldest = producer_expiration.oldest_ms(log, bounded_ms(log.context))

    def step(txn: kv.Txn) -> dict[int, ProducerState]:
        return {
            int.from_bytes(row_key[-8:], "big"): producer_state.unpack(row)
            for row_key, row in kv.rows(txn, prefix)
            if producer_state.last_ms(row) >= oldest
        }

    return log.context.live.read(step)


def put_recovery_point(
    txn: kv.Txn, key: bytes, flushed: Tail, known: dict[int, ProducerState]
) -> None:
    """Note that everything below the end of a tail is on the disk; it only grows (A23)."""
    info, offset = catalog.partition(txn, key) or PartitionInfo(), flushed.log_end_offset
    if offset > info.recovery_offset:
        changed = info._replace(
            recovery_offset=offset, appended_ms=flushed.appended_ms, appended_offset=offset
        )
        catalog.put_partition(txn, key, changed)
        catalog.put_producers_blob(txn, key, producer_state.pack_all(known))
