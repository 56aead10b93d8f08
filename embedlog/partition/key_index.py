"""The key index: which records of a partition have a key, without reading the keys of the others.

One file per sealed segment, beside it, with the suffix ``.keys``: a sorted number of 64 bits per
record with a key, the hash of the key above the number of the record in its segment.  A look-up
bisects a map of it, and compares the keys of the few records that it finds.  What has no file,
such as the active segment, has the same numbers in memory, in sorted runs that are extended at the
next look-up: appends do nothing for it.

The index is derived, as the index of offsets is.  Housekeeping builds the files; a look-up that
finds none, or a damaged one, reads the keys once.  A file names its segment by id, base offset and
size.  An id is never used again, and a segment gets a file only once it is below the recovery
point, where the bytes of an id never change.  So a file that is there is right, or refused.
"""

from __future__ import annotations

import re
import struct
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog import catalog
from embedlog.batch import CONTROL, Batch
from embedlog.catalog import SegmentInfo
from embedlog.checksum import crc32c
from embedlog.errors import EmbedlogError, StorageError
from embedlog.forks import cached_property
from embedlog.lazy import np, pa
from embedlog.partition.tail import Tail
from embedlog.partitioner import murmur2, murmur2_of_keys
from embedlog.segment import SegmentFile, key_index_path

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_FILE_NAME = re.compile(r"(\d{20}-\d+)\.keys(\.\d+\.tmp)?")
"""The file of a segment, and what a process that was killed while it wrote one left behind."""

_MAGIC = b"EMBKEYS1"
_HEAD = struct.Struct("<8s6Q")
"""Magic; id, base offset and size of the segment; batches, entries; and the CRC of all others."""
_NUMBER = 0xFFFFFFFF
_READ_BYTES = 4 << 20
_FIRST_BYTES = 256 << 10
_MAP_BYTES = 1 << 20
"""Map larger files of the index: a map keeps a descriptor."""
_MAPPED_SEGMENTS = 64
"""How many segments of a partition stay mapped, likewise."""
_CACHED_BYTES, _LEAST_BYTES = 64 << 20, 4 << 10
"""How much of the batches of a partition stays decoded, and what one counts at least."""
_ATTEMPTS = 20
"""How often a look-up starts again because compaction or retention removes a file meanwhile."""


class SegmentKeys:
    """The records of one segment by the hashes of their keys.

    Records are numbered in the order of the file; transaction markers do not count.
    """

    def __init__(self) -> None:
        self.end_position = 0
        """How far the segment was read; 0 is before the first batch."""
        self.records = 0
        self._firsts: Any = array("Q")
        """Per batch: the number of its first record."""
        self._positions: Any = array("Q")
        self._runs: list[Any] = []
        """Sorted numbers, each the hash of a key above the number of a record; a record of a later
        run comes after those of earlier ones."""

    def extend(self, file: SegmentFile, stop: int) -> None:
        """Read the keys of the batches that were not read yet, up to a position.

        Raises:
            CorruptionError: A batch is damaged; what is before it was added.
        """
        position = self.end_position or file.start
        while position < stop:
            batches = file.read(position, stop, _READ_BYTES)
            position = batches[-1].position + batches[-1].size
            records = [batch for batch in batches if batch.count and not batch.flags & CONTROL]
            if records:
                self._add(records)
            self.end_position = position

    def _add(self, batches: Sequence[Batch]) -> None:
        keys = pa.concat_arrays([batch.keys() for batch in batches])
        count = self.records
        for batch in batches:
            self._firsts.append(count)
            self._positions.append(batch.position)
            count += batch.count
        run = murmur2_of_keys(keys).view(np.uint32).astype(np.uint64) << np.uint64(32)
        run |= np.arange(self.records, count, dtype=np.uint64)
        if keys.null_count:
            run = run[keys.is_valid().to_numpy(zero_copy_only=False)]
        self.records = count
        run.sort()
        # So that there are few runs, and each record is merged into a larger one a few times.
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")  # This merges runs.
        if len(run):
            self._runs.append(run.data)

    def newest_first(self, key_hash: int) -> Iterator[int]:
        """Yield the numbers of the records whose keys have a hash, the last one first."""
        low, high = key_hash << 32, key_hash + 1 << 32
        for run in reversed(self._runs):
            index = bisect_left(run, high) - 1
            while index >= 0 and (entry := run[index]) >= low:
                yield entry & _NUMBER
                index -= 1

    def batch_of(self, record: int) -> tuple[int, int]:
        """Return the position of the batch of a record, and its row there."""
        index = bisect_right(self._firsts, record) - 1
        return self._positions[index], record - self._firsts[index]

    def pack(self, info: SegmentInfo) -> bytes:
        """Return the bytes of a file, for a segment that was read to its end; it is empty then."""
        # Two copies at most: a segment may have millions of records.
        runs, self._runs = self._runs, []
        run = np.concatenate([np.empty(0, np.uint64), *runs])
        del runs
        run.sort(kind="stable")
        parts = [pa.py_buffer(part) for part in (self._firsts, self._positions, run)]
        facts = info.id, info.base_offset, info.size, len(self._firsts), len(run)
        return b"".join([_HEAD.pack(_MAGIC, *facts, _crc(facts, parts)), *parts])

    @classmethod
    def unpack(cls, data: Any, info: SegmentInfo) -> SegmentKeys | None:
        """Return the index of a segment from a file; None if it is damaged, or of another one."""
        if len(data) < _HEAD.size:
            return None
        view = memoryview(data)
        magic, *facts, crc = _HEAD.unpack_from(view)
        batches, entries = facts[3:]
        if (
            magic != _MAGIC
            or facts[:3] != [info.id, info.base_offset, info.size]
            or len(data) != _HEAD.size + 16 * batches + 8 * entries
            or crc != _crc(facts, [pa.py_buffer(view[_HEAD.size :])])
        ):
            return None
        numbers = view[_HEAD.size :].cast("Q")
        keys = cls()
        keys.end_position = info.end_position
        keys._firsts, keys._positions = numbers[:batches], numbers[batches : 2 * batches]
        keys._runs = [numbers[2 * batches :]]
        return keys


def _crc(facts: Sequence[int], parts: Sequence[Any]) -> int:
    value = crc32c(struct.pack("<5Q", *facts))
    for part in parts:
        value = crc32c(part, value)
    return value


def load(log: PartitionLog, info: SegmentInfo) -> SegmentKeys | None:
    """Return the key index of a sealed segment from its file; None without a good one."""
    files = log.context.files
    try:
        with files.opened(key_index_path(log.path_of(info))) as fd:
            size = files.size(fd)
            is_mapped = files.maps_segments and size > _MAP_BYTES
            data = files.map(fd, size) if is_mapped else files.read(fd, size, 0)
    except StorageError:
        return None
    return SegmentKeys.unpack(data, info)


def read_keys(log: PartitionLog, info: SegmentInfo) -> SegmentKeys:
    """Return the key index of a sealed segment from its batches."""
    keys = SegmentKeys()
    keys.extend(log.open_segment(info), info.end_position)
    return keys


class FoundRecord(NamedTuple):
    """A record that has a key."""

    offset: int
    decoded: DecodedBatch
    row: int

    @property
    def timestamp(self) -> int:
        """In milliseconds since 1970."""
        timestamp: int = self.decoded.timestamps[self.row].value
        return timestamp


class DecodedBatch:
    """A batch, and those of its columns that look-ups have used."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.keys = batch.keys()

    @cached_property
    def values(self) -> Any:
        """The values of a topic of bytes."""
        return self.batch.columns(("value",)).column(0)

    @cached_property
    def timestamps(self) -> Any:
        """The timestamps in ms."""
        return self.batch.timestamps()

    @cached_property
    def headers(self) -> list[list[tuple[str, bytes | None]]] | None:
        """The headers of each record; None if the batch has no such column."""
        return self.batch.header_lists()

    @cached_property
    def offsets(self) -> Any:
        """The offset of each row of a compacted batch."""
        return self.batch.offsets()

    def offset(self, row: int) -> int:
        """Return the offset of a row."""
        batch = self.batch
        if not batch.has_offsets:
            return batch.base_offset + row
        offset: int = self.offsets[row].as_py()
        return offset


class KeyIndex:
    """Looks up keys in one partition; for any thread."""

    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._version = -1
        self._infos: list[SegmentInfo] = []
        self._segments: dict[int, tuple[SegmentKeys, int]] = {}
        """By the ids of segments; with the leader epoch in which the keys were read into memory,
        or -1 if they are in a file."""
        self._files: dict[int, SegmentFile] = {}
        self._batches: OrderedDict[tuple[int, int], tuple[DecodedBatch, int]] = OrderedDict()
        """By segment and position, those that were used last at the end; with about how much
        memory they take."""
        self._cached_bytes = 0
        self._good: set[int] = set()
        """The ids of the segments whose files this process has found to be good."""

    def is_incomplete(self) -> bool:
        """Whether a sealed segment may lack its file, as far as this process knows."""
        segments = self._log.segments.values()
        return any(info.sealed and info.id not in self._good for info in segments)

    def build_missing(self, fence: Callable[[], None]) -> int:
        """Write the files of sealed segments that have no good one; return how many it wrote.

        Removes those of segments that are gone, and half-written ones.  Segments above the
        recovery point get theirs later.  The caller holds `replace.rewrite_lock`.

        Args:
            fence: Called before each segment is read.

        Raises:
            FencedError: Raised by the fence.
            CorruptionError, StorageError: As `rebuild`.
        """
        log, built = self._log, 0
        self._remove_strays()
        partition, segments = log.context.state.read(
            lambda txn: (catalog.PARTITIONS.get(txn, log.key), catalog.segments(txn, log.key))
        )
        flushed = partition.recovery_offset if partition is not None else 0
        for info in segments:
            if info.next_offset is None or info.next_offset > flushed or info.id in self._good:
                continue
            if load(log, info) is None:
                fence()
                rebuild(log, info)
                built += 1
            self._good.add(info.id)
        self._good &= {info.id for info in segments}
        return built

    def _remove_strays(self) -> None:
        log = self._log
        files, directory = log.context.files, f"{log.directory}/{log.partition}"
        # The files before the names: nothing adds one meanwhile.
        present = [f"{directory}/{name}" for name in files.list(directory)]
        segments = log.context.state.read(lambda txn: catalog.segments(txn, log.key))
        named = {key_index_path(log.path_of(info)) for info in segments}
        for path in present:
            if path not in named and _FILE_NAME.fullmatch(path.rpartition("/")[2]):
                files.unlink(path, missing_ok=True)

    def last(self, key: bytes, start: int, stop: int) -> FoundRecord | None:
        """Return the last record of a key in ``[start, stop)``.

        Raises:
            OffsetOutOfRangeError: Retention deleted a part of the range that would be searched.
            CorruptionError: A batch is damaged.
        """
        return next(iter(self._search(key, start, stop, 1)), None)

    def all(self, key: bytes, start: int, stop: int) -> list[FoundRecord]:
        """Return all records of a key in ``[start, stop)``, in order.

        Raises:
            OffsetOutOfRangeError, CorruptionError: As `last`.
        """
        return self._search(key, start, stop, None)[::-1]

    def _search(self, key: bytes, start: int, stop: int, limit: int | None) -> list[FoundRecord]:
        key_hash = murmur2(key) & _NUMBER
        for attempt in range(_ATTEMPTS):
            try:
                with self._lock:
                    return self._search_locked(key, key_hash, start, stop, limit)
            except StorageError as error:
                # Compaction replaced the file, or retention deleted it during the look-up.
                if not error.missing or attempt == _ATTEMPTS - 1:
                    raise
                self._log.refresh()
        return []

    def _search_locked(
        self, key: bytes, key_hash: int, start: int, stop: int, limit: int | None
    ) -> list[FoundRecord]:
        log, files, found = self._log, self._log.context.files, list[FoundRecord]()
        # The tail first: a segment that is rolled meanwhile then counts as sealed.
        tail = log.tail()
        log.refresh()
        if self._version != log.snapshot_version:
            self._infos = list(reversed(log.segments.values()))
            self._version = log.snapshot_version
            # A file that was open for appends is opened again, to be mapped.
            known, self._segments, self._files = self._segments, {}, {}
            for info in self._infos:
                path = key_index_path(log.path_of(info))
                # What has a file by now needs no memory.
                if info.id in known and (known[info.id][1] == -1 or not files.exists(path)):
                    self._segments[info.id] = known[info.id]
        for info in self._infos:
            first = max(info.base_offset, start)
            if first >= (stop if info.next_offset is None else min(stop, info.next_offset)):
                continue
            if not tail.has_made(info):
                continue
            if first < tail.start_offset:
                log.reader(first)  # It raises the error.
            keys = self._keys(info, tail)
            for record in keys.newest_first(key_hash):
                batch, row = self._batch(info, keys, record)
                if batch.keys[row].as_py() != key:
                    continue
                offset = batch.offset(row)
                if first <= offset < stop:
                    found.append(FoundRecord(offset, batch, row))
                    if len(found) == limit:
                        return found
                elif offset < first:
                    break
        return found

    def _keys(self, info: SegmentInfo, tail: Tail) -> SegmentKeys:
        """Return the keys of a segment, up to its end or the high watermark."""
        keys, epoch = self._segments.get(info.id, (None, -1))
        if keys is not None and epoch not in (-1, tail.leader_epoch):
            # The log may have been truncated, and have other records there.
            keys = None
            self._forget_batches()
        if keys is None:
            loaded = load(self._log, info) if info.sealed else None
            keys = loaded or SegmentKeys()
            self._segments[info.id] = keys, tail.leader_epoch if loaded is None else -1
        stop = info.end_position if info.sealed else tail.high_watermark_position
        if keys.end_position < stop:
            # A file that is mapped is closed.
            keys.extend(self._log.open_segment(info) if info.sealed else self._file(info), stop)
        return keys

    def _file(self, info: SegmentInfo) -> SegmentFile:
        file = self._files.get(info.id)
        if file is None:
            if len(self._files) >= _MAPPED_SEGMENTS:
                self._forget_batches()
            file = self._files[info.id] = self._log.open_shared(info)
            if info.sealed:
                # Maps the file: from now on a batch is read without a copy.
                file.mapped(file.start, info.end_position, _FIRST_BYTES)
            self._log.context.open_files.opened(self)
        return file

    def _forget_batches(self) -> None:
        self._files.clear()
        self._batches.clear()
        self._cached_bytes = 0

    def release_files(self) -> bool:
        """Close the files for now, unless a look-up is in progress."""
        if not self._lock.acquire(False):
            return False
        self._forget_batches()
        self._lock.release()
        return True

    def _batch(self, info: SegmentInfo, keys: SegmentKeys, record: int) -> tuple[DecodedBatch, int]:
        position, row = keys.batch_of(record)
        place = info.id, position
        if place in self._batches:
            self._batches.move_to_end(place)
            return self._batches[place][0], row
        file = self._file(info)
        read = file.mapped if info.sealed else file.read
        batch = read(position, keys.end_position, 1)[0]
        in_map = info.sealed and self._log.context.files.maps_segments
        size = _LEAST_BYTES + batch.size * (4 if batch.is_compressed else 0 if in_map else 1)
        self._batches[place] = DecodedBatch(batch), size
        self._cached_bytes += size
        while self._cached_bytes > _CACHED_BYTES and len(self._batches) > 1:
            self._cached_bytes -= self._batches.popitem(last=False)[1][1]
        return self._batches[place][0], row


# The files


def rebuild(log: PartitionLog, info: SegmentInfo) -> None:
    """Write the key index of a sealed segment.

    Raises:
        CorruptionError: A batch is damaged.
        StorageError: It cannot be written; look-ups work without it.
    """
    data = read_keys(log, info).pack(info)
    log.context.files.write_file(key_index_path(log.path_of(info)), data)


def is_wrong(log: PartitionLog, info: SegmentInfo) -> bool:
    """Whether a sealed segment, whose file is whole, has a key index that is damaged or wrong."""
    files, path = log.context.files, key_index_path(log.path_of(info))
    if not info.sealed or not files.exists(path):
        return False
    try:
        return files.read_file(path) != read_keys(log, info).pack(info)
    except EmbedlogError:
        return True
