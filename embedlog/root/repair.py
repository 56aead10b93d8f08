"""Repairing a damaged partition: its good records stay, the damaged ones are dropped.

Good records keep their offsets; the damaged file is moved to ``quarantine/``.
Like compaction, a repair writes a new file under a new id and swaps the manifest
in one transaction: killed before that, nothing happened; after it, all of it.
"""

from __future__ import annotations

import errno
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from embedlog import batch as batches
from embedlog import catalog, keyspace, kv
from embedlog.batch import Batch
from embedlog.batch.wire import layout_of
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.display import plural
from embedlog.errors import CorruptionError, EmbedlogError, StorageError
from embedlog.lazy import pa
from embedlog.partition import checkpoint, recovery, roll
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.tail import peek_tail
from embedlog.publish import staging
from embedlog.root import startup, topic_deletion, verify
from embedlog.root.root import Root
from embedlog.root.verify import Progress
from embedlog.segment import END_MARK, create

QUARANTINE = "quarantine"
_MESSAGE_START = b"\xff\xff\xff\xff"


class SalvagedSegment(NamedTuple):
    """The good batches of a segment file, and messages about the rest."""

    schema: pa.Schema
    good: list[Batch]
    messages: list[str]


def repair_root(
    root: Root,
    dry_run: bool,
    progress: Progress | None = None,
    *,
    without: Collection[tuple[str, int]] = (),
) -> list[str]:
    """Repair every partition in which `verify_root` finds something, and remove stray files.

    Returns messages about what was done, or with ``dry_run`` what would be done.  Leaves out the
    partitions of ``without``, which are repaired in another way.
    """
    if not dry_run:
        root.context.check_writable()
        # As a whole: a transaction of which one partition cannot be flushed is undone in all.
        checkpoint.take(root.context)
    findings = verify.verify_root(root, progress)
    messages = []
    damaged = {(finding.topic, finding.partition) for finding in findings if finding.topic}
    for name, number in sorted(damaged - set(without)):
        messages += _repair_partition(root.partition(name, number), dry_run)
    for topic in root.context.state.read(catalog.deleted_topics):
        messages.append(f"{topic.directory}: removed, the topic was deleted")
        if not dry_run:
            topic_deletion.finish(root.context, topic)
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


def _repair_partition(log: PartitionLog, dry_run: bool) -> list[str]:
    messages = _drop_unflushed(log, dry_run)
    with log.locked():
        log.refresh()
        for segment in list(log.segments.values()):
            if _is_damaged(log, segment):
                salvage = _salvage(log, segment)
                messages += salvage.messages
                if not dry_run:
                    _replace(log, segment, salvage)
            elif verify.index_is_wrong(log, segment):
                messages.append(f"{log.path_of(segment)}: its index is rebuilt")
                if not dry_run:
                    verify.rebuild_segment(log, segment, segment.end_position)
        if not dry_run:
            # The old tail may be wrong: recovery scans for it.
            recovery.discard_tail(log)
            recovery.rebuild(log)
        return messages


def _drop_unflushed(log: PartitionLog, dry_run: bool) -> list[str]:
    """After a failed flush: drop the page cache, so that recovery scans what the disk has."""
    with suppress(CorruptionError), log.owned() as tail:
        if not tail.failed:
            return []
        offset = tail.durable_offset
        message = f"{log.topic}-{log.partition}: offsets from {offset} on were not flushed"
        if not dry_run:
            for segment in log.segments.values():
                if segment.next_offset is None or segment.next_offset > offset:
                    # The roll that named it may have died before it created it.
                    with startup.ignore_missing():
                        log.open_segment(segment, write=True).drop_cache()
            recovery.discard_tail(log)
            after = recovery.rebuild(log)
            roll.roll(log, after)
            message += f"; {plural(tail.log_end_offset - after.log_end_offset, 'record')} lost"
        return [message]
    return []


def _is_damaged(log: PartitionLog, segment: SegmentInfo) -> bool:
    """Return whether something is wrong with the bytes of one segment."""
    try:
        file = log.open_segment(segment, mend=False)
        stop = segment.end_position or file.size()
        if segment.sealed and file.bytes(stop, segment.size - stop + 1) != END_MARK:
            return True
        expected = segment.base_offset
        for batch in file.scan(file.start, min(stop, file.size())):
            batch.verify()
            if verify.gaps(segment, batch, expected):
                return True
            expected = batch.next_offset
        return not segment.sealed and expected < max(segment.base_offset, _flushed(log))
    except EmbedlogError as error:
        _raise_if_temporary(error)
        return True


def _flushed(log: PartitionLog) -> int:
    """Return the offset below which everything was flushed."""
    info = log.context.state.read(lambda txn: catalog.PARTITIONS.get(txn, log.key))
    return 0 if info is None else info.recovery_offset


def _raise_if_temporary(error: EmbedlogError) -> None:
    """Raise an error that is no damage, since it may not occur again, as too many open files."""
    if isinstance(error, StorageError) and not error.missing and error.errno != errno.EIO:
        raise error


def _salvage(log: PartitionLog, segment: SegmentInfo) -> SalvagedSegment:
    path = log.path_of(segment)
    schemas = [log.schema_of(segment, offsets) for offsets in (False, True)]
    try:
        data = log.context.files.read_file(path)
    except StorageError as error:
        _raise_if_temporary(error)
        message = f"{path}: dropped as a whole, it cannot be read: {error}"
        return SalvagedSegment(schemas[0], [], [message])
    # Its schema says whether it was compacted, and may be what is damaged.
    return max(
        (_salvage_as(log, segment, schema, data) for schema in schemas),
        key=lambda salvage: len(salvage.good),
    )


def _salvage_as(
    log: PartitionLog, segment: SegmentInfo, schema: pa.Schema, data: bytes
) -> SalvagedSegment:
    path, salvage = log.path_of(segment), SalvagedSegment(schema, [], [])
    buffer, expected, end = pa.py_buffer(data), segment.base_offset, segment.next_offset
    position = 8 + int.from_bytes(data[4:8], "little")  # behind the schema
    if data[:4] != _MESSAGE_START or position >= len(data):
        position = 0
    if end is None:
        # Above the end of the log no record was published.
        tail = peek_tail(log.context.live, log.key)
        end = None if tail is None else tail.log_end_offset
    # An end mark elsewhere is damage: good batches may follow it.
    while position < len(data) and buffer[position:] != END_MARK:
        try:
            batch = batches.parse(
                buffer, position, len(data), path=path, position=position, schema=schema
            )
            batch.verify()
            is_good = expected <= batch.base_offset and (end is None or batch.next_offset <= end)
        except EmbedlogError:
            is_good = False
        if not is_good:
            position = data.find(_MESSAGE_START, position + 1)
            if position < 0:
                break
            continue
        if batch.base_offset > expected:
            dropped = f"offsets [{expected}, {batch.base_offset}) dropped"
            salvage.messages.append(f"{path}: {dropped}")
        salvage.good.append(batch)
        position, expected = position + batch.size, batch.next_offset
    end = _flushed(log) if end is None else end
    if expected < end:
        salvage.messages.append(f"{path}: offsets [{expected}, {end}) dropped")
    if not salvage.messages:
        salvage.messages.append(f"{path}: rewritten, no record is dropped")
    return salvage


def _replace(log: PartitionLog, old: SegmentInfo, salvage: SalvagedSegment) -> None:
    """Write the good batches to a new file and swap it for the old one."""
    files, state, good = log.context.files, log.context.state, salvage.good

    def prepare(txn: kv.Txn) -> SegmentInfo:
        new = old._replace(id=catalog.next_number(txn, "segment"), dense=False)
        keyspace.UNCOMMITTED_FILES.put(txn, log.key, *new.key, value=None)
        return new

    new = state.write(prepare)
    for directory in reversed(log.directories[:2]):
        files.make_directory(directory)
    head = roll.head_of(log, new, layout_of(salvage.schema).has_offsets)
    file = create(files, log.path_of(new), head)
    position = file.start
    source = files.read_file(log.path_of(old)) if good else b""
    for batch in good:
        data = source[batch.position : batch.position + batch.size]
        position += file.write([data], position)
    flushed = good[-1].next_offset if good else old.base_offset
    if old.next_offset is not None:
        file.write([END_MARK], position)
        size, flushed = position + len(END_MARK), old.next_offset
        newest = max((batch.max_timestamp for batch in good), default=None)
        new = new._replace(size=size, end_position=position, max_timestamp=newest)
    file.sync()
    files.sync_directory(f"{log.directory}/{log.partition}")

    def swap(txn: kv.Txn) -> None:
        catalog.drop_segment(txn, log.key, old)
        catalog.put_segment(txn, log.key, new)
        keyspace.UNCOMMITTED_FILES.delete(txn, log.key, *new.key)
        info = catalog.PARTITIONS.get(txn, log.key) or PartitionInfo()
        recovery_offset = max(info.recovery_offset, flushed) if old.sealed else flushed
        catalog.PARTITIONS.put(txn, log.key, value=info._replace(recovery_offset=recovery_offset))

    if not old.sealed:
        # Killed after the swap, a tail in the old segment would let readers see nothing.
        recovery.discard_tail(log)
    state.write(swap)
    if files.exists(log.path_of(old)):
        files.make_directory(QUARANTINE)
        files.rename(log.path_of(old), f"{QUARANTINE}/{log.topic}-{log.partition}-{old.file_name}")
    log.refresh()
    if new.sealed:
        verify.rebuild_segment(log, new, new.end_position)
