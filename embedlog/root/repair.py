"""Making a damaged partition whole again without what is damaged.

Good records keep their offsets; the damaged file is kept in ``quarantine/``.
Like compaction, a repair writes a new file under a new id and swaps the
manifest in one transaction: killed before it, nothing happened; after it, all.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from embedlog import batch as batches
from embedlog import catalog, index, kv
from embedlog.batch import Batch
from embedlog.catalog import PartitionInfo, SegmentInfo
from embedlog.errors import CorruptionError, EmbedlogError, StorageError
from embedlog.partition import recovery, roll, tail
from embedlog.partition.partition_log import PartitionLog
from embedlog.publish import staging
from embedlog.root import startup, topic_deletion, verify
from embedlog.root.verify import Finding, Progress
from embedlog.segment import END_MARK, SegmentFile, create

if TYPE_CHECKING:
    from embedlog.root.root import Root

QUARANTINE = "quarantine"
_BEGINNING = b"\xff\xff\xff\xff"
_NEVER = 1 << 63


@dataclass(slots=True)
class SalvagedSegment:
    """What is good in a segment file, and what is not."""

    segment: SegmentInfo
    schema: pa.Schema
    good: list[Batch] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def repair_root(root: Root, dry_run: bool, progress: Progress | None = None) -> list[str]:
    """Mend every partition that `verify_root` complains about, and remove stray files."""
    if not dry_run:
        root.context.check_writable()
    found = verify.verify_root(root, progress)
    told = []
    for topic, number in sorted({(one.topic, one.partition) for one in found if one.topic}):
        log = root.partition(topic, number)
        told += _repair_partition(log, dry_run)
    told += _finish_deletions(root, dry_run)
    # Looked for again: a finding without a topic may also be a catalogue that is damaged.
    files = root.context.files
    for path in verify.unnamed(root.context):
        told.append(f"{path}: removed, the manifest does not name it")
        if not dry_run:
            startup.remove_stray(files, path)
    for path in staging.left(files):
        if staging.orphaned(path, root.clock()):
            told.append(f"{path}: removed, nobody will publish it")
            if not dry_run:
                staging.remove_job(files, path)
    return told


def _finish_deletions(root: Root, dry_run: bool) -> list[str]:
    """Remove what is left of deleted topics; see `deletion`."""
    told = []
    for topic in topic_deletion.unfinished(root.context.state):
        told.append(f"{topic.directory}: removed, the topic was deleted")
        if not dry_run:
            topic_deletion.finish(root.context, topic)
    return told


def _repair_partition(log: PartitionLog, dry_run: bool) -> list[str]:
    log.acquire()
    try:
        told = _cut_unflushed(log, dry_run)
        log.refresh()
        for segment in list(log.segments.values()):
            if any(_complaints(log, segment)):
                salvage = _salvage(log, segment)
                told += salvage.told
                if not dry_run:
                    _replace(log, salvage)
            elif verify.index_is_wrong(log, segment):
                told.append(f"{log.path_of(segment)}: its index is made anew")
                if not dry_run:
                    verify.rebuild_segment(log, segment, segment.end_position)
        if not dry_run:
            # Nobody trusts the old tail: it is found again by scanning.
            recovery.discard_tail(log)
            recovery.rebuild(log)
        return told
    finally:
        log.release()


def _cut_unflushed(log: PartitionLog, dry_run: bool) -> list[str]:
    """After a failed flush: drop the page cache, so that the disk's own bytes are scanned (P9)."""
    try:
        now = recovery.tail_locked(log)
    except CorruptionError:
        return []
    if not now.failed:
        return []
    told = f"{log.topic}-{log.partition}: offsets from {now.durable_offset} on were not flushed"
    if not dry_run:
        for segment in log.segments.values():
            if segment.next_offset is None or segment.next_offset > now.durable_offset:
                _drop_cache(log, segment)
        recovery.discard_tail(log)
        after = recovery.rebuild(log)
        roll.roll_locked(log, after)
        told += f"; {now.log_end_offset - after.log_end_offset} records were lost"
    return [told]


def _drop_cache(log: PartitionLog, segment: SegmentInfo) -> None:
    try:
        log.open_segment(segment, write=True).drop_cache()
    except StorageError as error:
        # The roll that named it may not have got to creating it.
        if not error.missing:
            raise


def _complaints(log: PartitionLog, segment: SegmentInfo) -> list[Finding | str]:
    """Return what is wrong with the bytes of one segment."""
    stop = segment.end_position
    try:
        file = log.open_segment(segment)
        stop = stop or file.size()
        found: list[Finding | str] = []
        if segment.sealed and file.bytes(stop, segment.size - stop + 1) != END_MARK:
            found.append("it does not end as it was sealed")
        expected = segment.base_offset
        for one in file.scan(file.start, min(stop, file.size())):
            one.verify()
            found += verify.gaps(segment, one, expected)
            expected = one.next_offset
        return found
    except EmbedlogError as error:
        _raise_if_passing(error)
        return [str(error)]


def _raise_if_passing(error: EmbedlogError) -> None:
    """Nothing is dropped because of too many open files, say: only what the disk cannot give."""
    if isinstance(error, StorageError) and not error.missing and error.errno != errno.EIO:
        raise error


def _salvage(log: PartitionLog, segment: SegmentInfo) -> SalvagedSegment:
    path = log.path_of(segment)
    schemas = [roll.schema_of(log, segment, offsets) for offsets in (False, True)]
    try:
        data = pa.py_buffer(log.context.files.read_file(path))
    except StorageError as error:
        _raise_if_passing(error)
        salvage = SalvagedSegment(segment, schemas[0])
        salvage.told.append(f"{path}: dropped whole, it cannot be read: {error}")
        return salvage
    # Whether it was compacted is told by its schema, which may be what is damaged.
    return max(
        (_salvage_as(log, segment, schema, data) for schema in schemas),
        key=lambda one: len(one.good),
    )


def _salvage_as(
    log: PartitionLog, segment: SegmentInfo, schema: pa.Schema, data: pa.Buffer
) -> SalvagedSegment:
    path, salvage = log.path_of(segment), SalvagedSegment(segment, schema)
    position, expected = _start(data), segment.base_offset
    end = _end_offset(log, segment)
    # An end mark elsewhere is damage: good batches may follow it.
    while position < data.size and data[position:] != END_MARK:
        one = _batch_at(data, position, path, schema)
        if one is not None and expected <= one.base_offset and one.next_offset <= end:
            if one.base_offset > expected:
                salvage.told.append(f"{path}: offsets {expected} to {one.base_offset - 1} dropped")
            salvage.good.append(one)
            position, expected = position + one.size, one.next_offset
        else:
            position = data.to_pybytes().find(_BEGINNING, position + 1)
            if position < 0:
                break
    if end == _NEVER:
        end = _flushed_offset(log)
    if expected < end:
        salvage.told.append(f"{path}: offsets {expected} to {end - 1} dropped")
    if not salvage.told:
        salvage.told.append(f"{path}: written anew, no record is dropped")
    return salvage


def _flushed_offset(log: PartitionLog) -> int:
    info = log.context.state.read(lambda txn: catalog.partition(txn, log.key))
    return 0 if info is None else info.recovery_offset


def _end_offset(log: PartitionLog, segment: SegmentInfo) -> int:
    """Where the records of a segment end: what lies past the published end is nobody's."""
    if segment.next_offset is not None:
        return segment.next_offset
    row = log.context.live.get(log.tail_key)
    return _NEVER if row is None else tail.unpack(row).log_end_offset


def _start(data: pa.Buffer) -> int:
    head = bytes(data[:8])
    length = 8 + int.from_bytes(head[4:8], "little")
    return length if head[:4] == _BEGINNING and length < data.size else 0


def _batch_at(data: pa.Buffer, position: int, path: str, schema: pa.Schema) -> Batch | None:
    try:
        one = batches.parse(data, position, data.size, path=path, position=position, schema=schema)
        one.verify()
        return one
    except EmbedlogError:
        return None


def _replace(log: PartitionLog, salvage: SalvagedSegment) -> None:
    """Write the good batches to a new file and swap it for the old one."""
    old, files = salvage.segment, log.context.files

    def step(txn: kv.Txn) -> SegmentInfo:
        new = old._replace(id=catalog.next_number(txn, b"segment"), dense=False)
        catalog.put_passing(txn, log.key, new)
        return new

    new = log.context.state.write(step)
    file = create(files, log.path_of(new), salvage.schema)
    position = _write_good(log, old, file, salvage.good)
    latest = max((one.max_timestamp for one in salvage.good), default=None)
    if old.sealed:
        file.write([END_MARK], position)
        size = position + len(END_MARK)
        new = new._replace(size=size, end_position=position, max_timestamp=latest)
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
        log.context.state.write(lambda txn: catalog.put_index_blob(txn, log.key, new, blob))


def _write_good(log: PartitionLog, old: SegmentInfo, file: SegmentFile, good: list[Batch]) -> int:
    position = file.start
    if good:
        source = log.context.files.read_file(log.path_of(old))
        for one in good:
            position += file.write([source[one.position : one.position + one.size]], position)
    return position


def _swap(log: PartitionLog, old: SegmentInfo, new: SegmentInfo, flushed: int) -> None:
    def step(txn: kv.Txn) -> None:
        catalog.drop_segment(txn, log.key, old)
        catalog.put_segment(txn, log.key, new)
        catalog.drop_passing(txn, log.key, new)
        info = catalog.partition(txn, log.key) or PartitionInfo()
        recovery_offset = max(info.recovery_offset, flushed) if old.sealed else flushed
        catalog.put_partition(txn, log.key, info._replace(recovery_offset=recovery_offset))

    log.context.state.write(step)
