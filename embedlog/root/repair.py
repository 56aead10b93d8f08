"""Repairing a damaged partition: its good records are kept, the damaged ones are dropped.

Good records keep their offsets; the damaged file is kept in ``quarantine/``.
Like compaction, a repair writes a new file under a new id and swaps the manifest
in one transaction: killed before that, nothing happened; after it, all of it.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

import pyarrow as pa

from embedlog import batch as batches
from embedlog import catalog, index, keyspace, kv
from embedlog.batch import Batch
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.errors import CorruptionError, EmbedlogError, StorageError
from embedlog.partition import recovery, roll
from embedlog.partition import tail as tails
from embedlog.partition.partition_log import PartitionLog
from embedlog.publish import staging
from embedlog.root import startup, topic_deletion, verify
from embedlog.root.root import Root
from embedlog.root.verify import Finding, Progress
from embedlog.segment import END_MARK, SegmentFile, create

QUARANTINE = "quarantine"
_MESSAGE_START = b"\xff\xff\xff\xff"
_NO_LIMIT = 1 << 63


@dataclass(slots=True)
class SalvagedSegment:
    """The good batches of a segment file, and messages about the rest."""

    segment: SegmentInfo
    schema: pa.Schema
    good: list[Batch] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def repair_root(root: Root, dry_run: bool, progress: Progress | None = None) -> list[str]:
    """Repair every partition in which `verify_root` finds something, and remove stray files.

    Returns messages about what was done, or with ``dry_run`` what would be done.
    """
    if not dry_run:
        root.context.check_writable()
    findings = verify.verify_root(root, progress)
    messages = []
    for topic, number in sorted({(one.topic, one.partition) for one in findings if one.topic}):
        messages += _repair_partition(root.partition(topic, number), dry_run)
    messages += _finish_deletions(root, dry_run)
    # Searched again: a finding without a topic may also be a damaged catalogue.
    files = root.context.files
    for path in verify.stray_files(root.context):
        messages.append(f"{path}: removed, the manifest does not name it")
        if not dry_run:
            startup.remove_stray(files, path)
    for path in staging.job_directories(files):
        if staging.is_orphaned(path, root.clock()):
            messages.append(f"{path}: removed, it will not be published")
            if not dry_run:
                staging.remove_job(files, path)
    return messages


def _finish_deletions(root: Root, dry_run: bool) -> list[str]:
    """Remove what is left of deleted topics; see `topic_deletion`."""
    messages = []
    for topic in topic_deletion.unfinished(root.context.state):
        messages.append(f"{topic.directory}: removed, the topic was deleted")
        if not dry_run:
            topic_deletion.finish(root.context, topic)
    return messages


def _repair_partition(log: PartitionLog, dry_run: bool) -> list[str]:
    log.acquire()
    try:
        messages = _drop_unflushed(log, dry_run)
        log.refresh()
        for segment in list(log.segments.values()):
            if any(_problems(log, segment)):
                salvage = _salvage(log, segment)
                messages += salvage.messages
                if not dry_run:
                    _replace(log, salvage)
            elif verify.index_is_wrong(log, segment):
                messages.append(f"{log.path_of(segment)}: its index is rebuilt")
                if not dry_run:
                    verify.rebuild_segment(log, segment, segment.end_position)
        if not dry_run:
            # The old tail may be wrong: it is found again by a scan.
            recovery.discard_tail(log)
            recovery.rebuild(log)
        return messages
    finally:
        log.release()


def _drop_unflushed(log: PartitionLog, dry_run: bool) -> list[str]:
    """After a failed flush: drop the page cache, so that what the disk has is scanned (P9)."""
    try:
        tail = recovery.tail_locked(log)
    except CorruptionError:
        return []
    if not tail.failed:
        return []
    message = f"{log.topic}-{log.partition}: offsets from {tail.durable_offset} on were not flushed"
    if not dry_run:
        for segment in log.segments.values():
            if segment.next_offset is None or segment.next_offset > tail.durable_offset:
                _drop_cache(log, segment)
        recovery.discard_tail(log)
        after = recovery.rebuild(log)
        roll.roll(log, after)
        message += f"; {tail.log_end_offset - after.log_end_offset} records were lost"
    return [message]


def _drop_cache(log: PartitionLog, segment: SegmentInfo) -> None:
    try:
        log.open_segment(segment, write=True).drop_cache()
    except StorageError as error:
        # The roll that named it may have died before it created it.
        if not error.missing:
            raise


def _problems(log: PartitionLog, segment: SegmentInfo) -> list[Finding | str]:
    """Return what is wrong with the bytes of one segment."""
    stop = segment.end_position
    try:
        file = log.open_segment(segment)
        stop = stop or file.size()
        problems: list[Finding | str] = []
        if segment.sealed and file.bytes(stop, segment.size - stop + 1) != END_MARK:
            problems.append("it does not end as it was sealed")
        expected = segment.base_offset
        for batch in file.scan(file.start, min(stop, file.size())):
            batch.verify()
            problems += verify.gaps(segment, batch, expected)
            expected = batch.next_offset
        return problems
    except EmbedlogError as error:
        _raise_if_temporary(error)
        return [str(error)]


def _raise_if_temporary(error: EmbedlogError) -> None:
    """Raise an error that a retry may not meet, such as too many open files: it is no damage."""
    if isinstance(error, StorageError) and not error.missing and error.errno != errno.EIO:
        raise error


def _salvage(log: PartitionLog, segment: SegmentInfo) -> SalvagedSegment:
    path = log.path_of(segment)
    schemas = [roll.schema_of(log, segment, offsets) for offsets in (False, True)]
    try:
        data = pa.py_buffer(log.context.files.read_file(path))
    except StorageError as error:
        _raise_if_temporary(error)
        salvage = SalvagedSegment(segment, schemas[0])
        salvage.messages.append(f"{path}: dropped as a whole, it cannot be read: {error}")
        return salvage
    # Its schema says whether it was compacted, and may be what is damaged.
    return max(
        (_salvage_as(log, segment, schema, data) for schema in schemas),
        key=lambda salvage: len(salvage.good),
    )


def _salvage_as(
    log: PartitionLog, segment: SegmentInfo, schema: pa.Schema, data: pa.Buffer
) -> SalvagedSegment:
    path, salvage = log.path_of(segment), SalvagedSegment(segment, schema)
    position, expected = _start(data), segment.base_offset
    end = _end_offset(log, segment)
    # An end mark elsewhere is damage: good batches may follow it.
    while position < data.size and data[position:] != END_MARK:
        batch = _batch_at(data, position, path, schema)
        if batch is not None and expected <= batch.base_offset and batch.next_offset <= end:
            if batch.base_offset > expected:
                dropped = f"offsets {expected} to {batch.base_offset - 1} dropped"
                salvage.messages.append(f"{path}: {dropped}")
            salvage.good.append(batch)
            position, expected = position + batch.size, batch.next_offset
        else:
            position = data.to_pybytes().find(_MESSAGE_START, position + 1)
            if position < 0:
                break
    if end == _NO_LIMIT:
        end = _flushed_offset(log)
    if expected < end:
        salvage.messages.append(f"{path}: offsets {expected} to {end - 1} dropped")
    if not salvage.messages:
        salvage.messages.append(f"{path}: rewritten, no record is dropped")
    return salvage


def _flushed_offset(log: PartitionLog) -> int:
    info = log.context.state.read(lambda txn: catalog.PARTITIONS.get(txn, log.key))
    return 0 if info is None else info.recovery_offset


def _end_offset(log: PartitionLog, segment: SegmentInfo) -> int:
    """Return where the records of a segment end: above the end of the log none was published."""
    if segment.next_offset is not None:
        return segment.next_offset
    row = log.context.live.get(log.tail_key)
    return _NO_LIMIT if row is None else tails.unpack(row).log_end_offset


def _start(data: pa.Buffer) -> int:
    head = bytes(data[:8])
    length = 8 + int.from_bytes(head[4:8], "little")
    return length if head[:4] == _MESSAGE_START and length < data.size else 0


def _batch_at(data: pa.Buffer, position: int, path: str, schema: pa.Schema) -> Batch | None:
    try:
        batch = batches.parse(
            data, position, data.size, path=path, position=position, schema=schema
        )
        batch.verify()
        return batch
    except EmbedlogError:
        return None


def _replace(log: PartitionLog, salvage: SalvagedSegment) -> None:
    """Write the good batches to a new file and swap it for the old one."""
    old, files = salvage.segment, log.context.files

    def step(txn: kv.Txn) -> SegmentInfo:
        new = old._replace(id=catalog.next_number(txn, "segment"), dense=False)
        keyspace.UNCOMMITTED_FILES.put(txn, log.key, *new.key, value=None)
        return new

    new = log.context.state.write(step)
    file = create(files, log.path_of(new), salvage.schema)
    position = _write_good(log, old, file, salvage.good)
    newest = max((batch.max_timestamp for batch in salvage.good), default=None)
    if old.sealed:
        file.write([END_MARK], position)
        size = position + len(END_MARK)
        new = new._replace(size=size, end_position=position, max_timestamp=newest)
    file.sync()
    files.sync_directory(f"{log.directory}/{log.partition}")
    end = salvage.good[-1].next_offset if salvage.good else old.base_offset
    _swap(log, old, new, old.next_offset if old.next_offset is not None else end)
    if files.exists(log.path_of(old)):
        files.make_directory(QUARANTINE)
        files.rename(log.path_of(old), f"{QUARANTINE}/{log.topic}-{log.partition}-{old.file_name}")
    log.refresh()
    if new.sealed:
        blob = index.pack(verify.index_of(log, new, new.end_position))
        log.context.state.write(
            lambda txn: keyspace.SEGMENT_INDEXES.put(txn, log.key, *new.key, value=blob)
        )


def _write_good(log: PartitionLog, old: SegmentInfo, file: SegmentFile, good: list[Batch]) -> int:
    position = file.start
    if good:
        source = log.context.files.read_file(log.path_of(old))
        for batch in good:
            data = source[batch.position : batch.position + batch.size]
            position += file.write([data], position)
    return position


def _swap(log: PartitionLog, old: SegmentInfo, new: SegmentInfo, flushed: int) -> None:
    def step(txn: kv.Txn) -> None:
        catalog.drop_segment(txn, log.key, old)
        catalog.put_segment(txn, log.key, new)
        keyspace.UNCOMMITTED_FILES.delete(txn, log.key, *new.key)
        info = catalog.PARTITIONS.get(txn, log.key) or PartitionInfo()
        recovery_offset = max(info.recovery_offset, flushed) if old.sealed else flushed
        catalog.PARTITIONS.put(txn, log.key, value=info._replace(recovery_offset=recovery_offset))

    log.context.state.write(step)
