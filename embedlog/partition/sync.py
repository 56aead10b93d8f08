"""Flushing the files of one partition, and noting in `state` how far that has come."""

from __future__ import annotations

from embedlog import catalog, kv
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.errors import StorageError
from embedlog.partition import producer_state
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.state import PartitionState
from embedlog.partition.tail import Tail
from embedlog.segment import SegmentFile


def sync_files(log: PartitionState, tail: Tail, file: SegmentFile) -> None:
    """Flush the older segments that were not flushed yet, the active one, and their names.

    Raises:
        DurabilityError: A flush failed; the partition is read-only from now on (P9).
    """
    sync_data(log, tail, file)
    if log.entry_synced_segment_id != tail.segment_id:
        sync_entries(log, tail.segment_id)


def sync_data(log: PartitionState, tail: Tail, file: SegmentFile) -> None:
    """Flush the segments, as `sync_files` does, but not their names."""
    if tail.durable_offset < tail.base_offset:
        for info in list(log.segments.values()):
            if info.sealed and tail.durable_offset < info.next_offset <= tail.base_offset:
                _sync_sealed(log, info)
    log.sync(file)


def _sync_sealed(log: PartitionState, info: SegmentInfo) -> None:
    try:
        file = log.open_segment(info, write=True)
    except StorageError as error:
        log.refresh()
        current = log.segments.get(info.base_offset)
        if not error.missing or (current is not None and current.id == info.id):
            raise
        return  # Compacted meanwhile, which flushes first.
    log.sync(file)


def sync_entries(log: PartitionState, segment_id: int) -> None:
    """Flush the names of new files: without it a power cut loses the whole file.

    Raises:
        DurabilityError: A flush failed; the partition is read-only from now on (P9).
        StorageError: A directory could not be opened, so nothing was tried and nothing is lost.
    """
    for directory in directories_of(log):
        log.sync_directory(directory)
    log.entry_synced_segment_id = segment_id


def directories_of(log: PartitionState) -> tuple[str, str, str]:
    """Return the directories that hold the name of a partition's new file, or of one another."""
    return f"{log.directory}/{log.partition}", log.directory, "topics"


def put_recovery_point(
    txn: kv.Txn, key: bytes, flushed: Tail, producers: dict[int, ProducerState]
) -> None:
    """Note in `state` that everything below the end of a tail is on the disk.

    The recovery point only moves forward (A23).
    """
    info, offset = catalog.PARTITIONS.get(txn, key) or PartitionInfo(), flushed.log_end_offset
    if offset > info.recovery_offset:
        changed = info._replace(
            recovery_offset=offset, appended_ms=flushed.appended_ms, appended_offset=offset
        )
        catalog.PARTITIONS.put(txn, key, value=changed)
        producer_state.SNAPSHOTS.put(txn, key, value=producers)
