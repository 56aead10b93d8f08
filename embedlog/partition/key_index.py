"""The key index: which records of a partition have a key, without reading the keys of the others.

One file per sealed segment, beside it, with the suffix ``.keys``: a sorted number of 64 bits per
record with a key, the hash of the key above the number of the record in its segment.  A look-up
bisects a map of it, and compares the keys of the few records that it finds.  What has no file,
such as the active segment, has the same numbers in memory, in sorted runs that are extended at the
next look-up: appends do nothing for it.

The index is derived, as the index of offsets is.  A compaction writes it with the segment, and
housekeeping for other sealed segments; a look-up that finds no file, or a damaged one, reads the
keys once.  A file names its segment by id, base offset and size.  An id is never used again, and a
segment gets a file only once it is below the recovery point, where the bytes of an id never change.
So a file that is there is right, or refused.
"""

from __future__ import annotations

import re
import struct
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from embedlog import catalog
from embedlog.batch import CONTROL, Batch
from embedlog.batch.arrays import nulls
from embedlog.batch.decode import header_lists
from embedlog.catalog import SegmentInfo
from embedlog.checksum import crc32c
from embedlog.config import TopicConfig
from embedlog.errors import (
    CorruptionError,
    EmbedlogError,
    LogTruncatedError,
    NotLeaderOrFollowerError,
    StorageError,
)
from embedlog.files import Files
from embedlog.forks import cached_property, new_lock
from embedlog.keyspace import SEGMENTS
from embedlog.lazy import np, pa
from embedlog.partition import lookup
from embedlog.partition.tail import Tail
from embedlog.partitioner import murmur2, murmur2_of_keys
from embedlog.schemas.reading import TOMBSTONE, TypedReader
from embedlog.segment import SegmentFile, key_index_path

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog

_FILE_NAME = re.compile(r"\d{20}-\d+\.keys(\.\d+\.tmp)?")
"""The file of a segment, and what a process that was killed while it wrote one left behind."""

_MAGIC = b"EMBKEYS1"
_HEAD = struct.Struct("<8s6Q")
"""Magic; id, base offset and size of the segment; batches, runs; and the CRC of all others."""
_RUN = 4 << 20
"""Sort about so many records at once: to sort takes as much memory again."""
_NUMBER = 0xFFFFFFFF
_FEW_KEYS = 16
"""Keys that are hashed faster one by one than all at once."""
_READ_BYTES = 4 << 20
_FIRST_BYTES = 256 << 10
_CACHED_BYTES = 128 << 20
"""How much memory the batches that look-ups decoded take at most, of all partitions of a log."""
_ATTEMPTS = 20
"""How often a look-up starts again because the log is truncated or compacted meanwhile."""


class SegmentKeys:
    """The records of one segment by the hashes of their keys.

    Records are numbered in the order of the file; transaction markers do not count.  A segment
    has fewer than 2**32, since it spans fewer offsets.
    """

    def __init__(self) -> None:
        self.end_position = 0
        """How far the segment was read; 0 is before the first batch."""
        self.is_from_file = False
        self._records = 0
        self._firsts: Any = array("Q")
        """Per batch: the number of its first record."""
        self._positions: Any = array("Q")
        self._unsorted: list[Any] = []
        self._unsorted_records = 0
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
            for batch in file.read(position, stop, _READ_BYTES):
                if not batch.flags & CONTROL:
                    self.add(batch.position, batch.keys())
                self.end_position = position = batch.position + batch.size
        self._sort()

    def add(self, position: int, keys: Any) -> None:
        """Add the next batch; look-ups do not find it before `extend` or `pack`.

        Args:
            position: Where the batch begins.
            keys: The key of each of its records, a `pyarrow.BinaryArray`.
        """
        if not len(keys):
            return
        self._firsts.append(self._records)
        self._positions.append(position)
        if len(keys) > _FEW_KEYS:
            hashes = murmur2_of_keys(keys)
        else:
            hashes = np.array([murmur2(key or b"") for key in keys.to_pylist()], np.int32)
        run = hashes.view(np.uint32).astype(np.uint64) << np.uint64(32)
        run |= np.arange(self._records, self._records + len(keys), dtype=np.uint64)
        if keys.null_count:
            run = run[~nulls(keys)]
        self._unsorted.append(run)
        self._records += len(keys)
        self._unsorted_records += len(run)
        if self._unsorted_records >= _RUN:
            self._sort()

    def _sort(self) -> None:
        """Sort what was added into a run."""
        run = np.concatenate([np.empty(0, np.uint64), *self._unsorted])
        self._unsorted, self._unsorted_records = [], 0
        run.sort()
        # So that there are few runs, and each record is merged into a larger one a few times.
        while self._runs and len(self._runs[-1]) <= min(2 * len(run), _RUN - len(run)):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")  # This merges runs.
        if len(run):
            self._runs.append(run.data)

    def newest_first(self, key_hash: int, end: int | None = None) -> Iterable[int]:
        """Return the numbers of the records whose keys have a hash, the last one first.

        With ``end`` only of those in batches before this position.
        """
        low = key_hash << 32
        high = low + (1 << 32) if end is None else low + self._number_at(end)
        if len(self._runs) == 1:
            run = self._runs[0]
            index = bisect_left(run, high)
            if not index or run[index - 1] < low:
                return ()
        return self._found(low, high)

    def _found(self, low: int, high: int) -> Iterator[int]:
        for run in reversed(self._runs):
            index = bisect_left(run, high) - 1
            while index >= 0 and (entry := run[index]) >= low:
                yield entry & _NUMBER
                index -= 1

    def _number_at(self, position: int) -> int:
        """Return the number of the first record of the first batch at or after a position."""
        index = bisect_left(self._positions, position)
        number: int = self._firsts[index] if index < len(self._firsts) else _NUMBER
        return number

    def batch_of(self, record: int) -> tuple[int, int]:
        """Return the position of the batch of a record, and its row there."""
        index = bisect_right(self._firsts, record) - 1
        return self._positions[index], record - self._firsts[index]

    def pack(self, info: SegmentInfo) -> list[Any]:
        """Return the bytes of the file of a segment, all of whose batches were added, in parts."""
        self._sort()
        lengths = array("Q", map(len, self._runs))
        numbers = self._firsts, self._positions, lengths, *self._runs
        parts = [pa.py_buffer(part) for part in numbers]
        facts = info.id, info.base_offset, info.size, len(self._firsts), len(lengths)
        return [_HEAD.pack(_MAGIC, *facts, _crc(facts, parts)), *parts]

    @classmethod
    def unpack(cls, data: Any, info: SegmentInfo) -> SegmentKeys | None:
        """Return the index of a segment from a file; None if it is damaged, or of another one."""
        if len(data) < _HEAD.size:
            return None
        view = memoryview(data)
        magic, *facts, crc = _HEAD.unpack_from(view)
        if (
            magic != _MAGIC
            or facts[:3] != [info.id, info.base_offset, info.size]
            or len(data) % 8
            or crc != _crc(facts, [pa.py_buffer(view[_HEAD.size :])])
        ):
            return None
        keys, numbers, (batches, runs) = cls(), view[_HEAD.size :].cast("Q"), facts[3:]
        keys.end_position, keys.is_from_file = info.end_position, True
        keys._firsts, keys._positions = numbers[:batches], numbers[batches : 2 * batches]
        end = 2 * batches + runs
        for length in numbers[2 * batches : end]:
            keys._runs.append(numbers[end : end + length])
            end += length
        return keys if end == len(numbers) else None


def _crc(facts: Sequence[int], parts: Sequence[Any]) -> int:
    value = crc32c(struct.pack("<5Q", *facts))
    for part in parts:
        value = crc32c(part, value)
    return value


# The records that a look-up finds


class DecodedBatch:
    """A batch of which rows are looked up; its columns are decoded once.

    Args:
        batch: The batch.
        reader: Decodes batches of a typed topic; None if values are bytes.
    """

    def __init__(self, batch: Batch, reader: TypedReader | None) -> None:
        self.batch, self.reader = batch, reader
        self.memory = 4 << 10
        """About how many bytes it takes in a cache."""

    @cached_property
    def columns(self) -> dict[str, Any]:
        """The columns of the value by name, and the stored keys, ``key``."""
        batch = self.batch
        if self.reader is not None:
            return self.reader.row_columns(batch)
        return dict(zip(("key", "value"), batch.columns(("key", "value")).columns, strict=True))

    @cached_property
    def offsets(self) -> Any:
        """The offset of each row."""
        return self.batch.offsets()

    @cached_property
    def timestamps(self) -> Any:
        """The timestamp of each row, in ms."""
        return self.batch.timestamps()

    @cached_property
    def headers(self) -> Any:
        """The headers of each row; None if there are none."""
        batch = self.batch
        name = batch.layout.added("headers")
        return batch.columns((name,)).column(0) if batch.has_headers else None


class FoundRecord(NamedTuple):
    """A record that has a key."""

    partition: int
    decoded: DecodedBatch
    row: int

    @property
    def offset(self) -> int:
        """Its offset in the partition."""
        offset: int = self.decoded.offsets[self.row].as_py()
        return offset

    @property
    def timestamp(self) -> int:
        """In milliseconds since 1970."""
        timestamp: int = self.decoded.timestamps[self.row].value
        return timestamp

    @property
    def value(self) -> Any:
        """The stored value, or that of a typed topic as a dict; None in a tombstone."""
        columns, reader = self.decoded.columns, self.decoded.reader
        if reader is None:
            return columns["value"][self.row].as_py()
        return reader.value_in(columns, self.row)

    @property
    def is_tombstone(self) -> bool:
        """Whether it deletes its key."""
        columns, reader = self.decoded.columns, self.decoded.reader
        if reader is None:
            return not columns["value"][self.row].is_valid
        deletes: bool = columns[TOMBSTONE][self.row].as_py()
        return deletes

    @property
    def key(self) -> Any:
        """The stored key, or that of a typed topic as programs have it."""
        columns, reader = self.decoded.columns, self.decoded.reader
        if reader is None:
            return columns["key"][self.row].as_py()
        return reader.key_in(columns, self.row)

    @property
    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Its headers; None if those of its batch have none."""
        column = self.decoded.headers
        return None if column is None else header_lists(column.slice(self.row, 1))[0]


class _BatchCache:
    """The batches that look-ups used last, of all partitions of an open log."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._batches: OrderedDict[tuple[Any, ...], DecodedBatch] = OrderedDict()
        self._bytes = 0

    def get(self, place: tuple[Any, ...]) -> DecodedBatch | None:
        """Return a batch that is cached, or None."""
        with self._lock:
            decoded = self._batches.get(place)
            if decoded is not None:
                self._batches.move_to_end(place)
            return decoded

    def add(self, place: tuple[Any, ...], decoded: DecodedBatch) -> None:
        """Add a batch; those that were not used for the longest time make room."""
        with self._lock:
            self._remove(place)
            self._batches[place] = decoded
            self._bytes += decoded.memory
            while self._bytes > _CACHED_BYTES and len(self._batches) > 1:
                self._remove(next(iter(self._batches)))

    def drop(self, ids: set[int]) -> None:
        """Drop the batches of segments that are gone: their maps keep the files on the disk."""
        with self._lock:
            # A copy first: meanwhile the garbage collector may call this.
            for place in list(self._batches):
                if place[0] in ids:
                    self._remove(place)

    def _remove(self, place: tuple[Any, ...]) -> None:
        removed = self._batches.pop(place, None)
        if removed is not None:
            self._bytes -= removed.memory


_caches: WeakKeyDictionary[Files, _BatchCache] = WeakKeyDictionary()


# Looking up


class _ChangedError(Exception):
    """The log was truncated after its tail was read."""


class KeyIndex:
    """Looks up keys in one partition; for any thread."""

    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._cache = _caches.setdefault(log.context.files, _BatchCache())
        self._version = self._epoch = -1
        self._infos: list[SegmentInfo] = []
        """The newest segment first."""
        self._segments: dict[int, SegmentKeys] = {}
        """By the ids of segments."""
        self._files: dict[tuple[int, bool], SegmentFile] = {}
        """By the id of a segment, and whether it is sealed."""
        self._good: set[tuple[int | None, int]] = set()
        """The segments whose files this process has found to be good, and in which directory."""

    def __del__(self) -> None:
        """Free the disk space of files that were unlinked, if the topic was deleted."""
        self._cache.drop({info.id for info in self._infos})

    # The files

    def missing(self, segments: Sequence[SegmentInfo] | None = None) -> list[SegmentInfo]:
        """Return the sealed segments that may lack their file, as far as this process knows."""
        leader = self._log.placement.leader
        if segments is None:
            segments = self._log.segments.values()
        sealed = [info for info in segments if info.sealed]
        self._good &= {(leader, info.id) for info in sealed}
        return [info for info in sealed if (leader, info.id) not in self._good]

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
        files, directory = log.context.files, log.directories[0]
        # The files before the names: nothing adds one meanwhile.
        present = [f"{directory}/{name}" for name in files.list(directory)]
        partition, segments = log.context.state.read(
            lambda txn: (catalog.PARTITIONS.get(txn, log.key), catalog.segments(txn, log.key))
        )
        named = {key_index_path(log.path_of(info)) for info in segments}
        for path in present:
            if path not in named and _FILE_NAME.fullmatch(path.rpartition("/")[2]):
                files.unlink(path, missing_ok=True)
        flushed = 0 if partition is None else partition.recovery_offset
        for info in self.missing(segments):
            if info.next_offset is None or info.next_offset > flushed:
                continue
            if load(log, info) is None:
                fence()
                rebuild(log, info)
                built += 1
            self._good.add((log.placement.leader, info.id))
        return built

    # Looking up

    def find(
        self,
        key: bytes,
        start: int,
        stop: int,
        reader: TypedReader | None,
        limit: int | None = None,
    ) -> list[FoundRecord]:
        """Return the records of a key in ``[start, stop)``, the last one first.

        Raises:
            OffsetOutOfRangeError: Retention deleted a part of the range that would be searched.
            CorruptionError: A batch is damaged.
            LogTruncatedError: The log was truncated each time that the look-up began again.
        """
        log = self._log
        for attempt in range(_ATTEMPTS):
            # The tail first: a segment that is rolled meanwhile then counts as sealed.
            tail = log.tail()
            try:
                with self._lock:
                    self._follow(tail)
                    found = self._search_locked(tail, key, start, stop, reader, limit)
                if log.has_same_leader(tail):
                    return found
            except _ChangedError:
                continue
            except (StorageError, NotLeaderOrFollowerError, CorruptionError):
                # Compaction replaced the file, retention deleted it, or there is another leader.
                log.refresh()
                changed = log.snapshot_version != self._version or log.tail() != tail
                if attempt == _ATTEMPTS - 1 or not changed:
                    raise
        raise LogTruncatedError(
            "The log was truncated again and again during the look-up",
            **log.where,
            todo="Look the key up again.",
        )

    def find_last(self, key: bytes, start: int, tail: Tail) -> FoundRecord | None:
        """Return the last record of a key from ``start`` on, also one that no reader sees yet.

        Under the partition's lock, with the tail that it guards.

        Raises:
            CorruptionError, StorageError: A batch is damaged, or cannot be read.
        """
        stop = tail.log_end_offset
        if start >= stop:
            return None
        whole = tail._replace(high_watermark=stop, high_watermark_position=tail.log_end_position)
        with self._lock:
            self._follow(whole)
            found = self._search_locked(whole, key, start, stop, self.typed_reader(), 1)
        return found[0] if found else None

    def typed_reader(self) -> TypedReader | None:
        """Return what decodes the batches of a typed topic; None if values are bytes."""
        schema = self._log.schema
        return None if schema is None else TypedReader(schema)

    def _follow(self, tail: Tail) -> None:
        """Forget what is of a log before a truncation, or of segments that are gone."""
        log = self._log
        log.refresh()
        if self._epoch != tail.leader_epoch:
            self._cache.drop({info.id for info in self._infos})
            self._segments, self._files, self._epoch = {}, {}, tail.leader_epoch
        # The version first: the segments may be newer.
        version = log.snapshot_version
        if self._version == version:
            return
        before = {info.id for info in self._infos}
        self._infos = list(reversed(log.segments.values()))
        # A file that was open for appends is opened again, to be mapped.
        current = {(info.id, info.sealed) for info in self._infos}
        self._files = {key: file for key, file in self._files.items() if key in current}
        self._cache.drop(before - {info.id for info in self._infos})
        known, self._segments = self._segments, {}
        for info in self._infos:
            if (keys := known.get(info.id)) is not None:
                # What has a file by now needs no memory.
                loaded = load(log, info) if info.sealed and not keys.is_from_file else None
                self._segments[info.id] = loaded or keys
        self._version = version

    def _search_locked(
        self,
        tail: Tail,
        key: bytes,
        start: int,
        stop: int,
        reader: TypedReader | None,
        limit: int | None,
    ) -> list[FoundRecord]:
        log, key_hash, found = self._log, murmur2(key) & _NUMBER, list[FoundRecord]()
        for info in self._infos:
            first, end = info.base_offset, info.next_offset
            if first < start:
                first = start
            if first >= (stop if end is None or end > stop else end):
                continue
            keys = self._segments.get(info.id)
            if keys is None or not keys.is_from_file:
                if not tail.has_made(info):
                    if info.base_offset <= tail.base_offset:
                        raise _ChangedError
                    continue
                keys = self._keys(info, tail)
            if first < tail.start_offset:
                log.reader(first)  # It raises the error.
            position = None
            if stop < (tail.high_watermark if end is None else end):
                # A frequent key may have many records after the range.
                position = lookup.position_from_offset(log, info, stop)
            for number in keys.newest_first(key_hash, position):
                decoded, row = self._batch(info, keys, number, reader)
                if decoded.columns["key"][row].as_py() != key:
                    continue
                record = FoundRecord(log.partition, decoded, row)
                # Most batches are in the range as a whole.
                batch = decoded.batch
                if batch.base_offset < first or batch.next_offset > stop:
                    if record.offset < first:
                        break
                    if record.offset >= stop:
                        continue
                found.append(record)
                if len(found) == limit:
                    return found
        return found

    def _keys(self, info: SegmentInfo, tail: Tail) -> SegmentKeys:
        """Return the keys of a segment, up to its end or the high watermark."""
        keys = self._segments.get(info.id)
        if keys is None:
            loaded = load(self._log, info) if info.sealed else None
            keys = self._segments[info.id] = loaded or SegmentKeys()
        stop = info.end_position if info.sealed else tail.high_watermark_position
        if keys.end_position < stop:
            # A file that is mapped is closed.
            keys.extend(self._log.open_segment(info) if info.sealed else self._file(info), stop)
        return keys

    def _file(self, info: SegmentInfo) -> SegmentFile:
        place, maps = (info.id, info.sealed), self._log.context.files.maps_segments
        file = self._files.get(place)
        if file is None:
            if not maps:
                self._files.clear()
            file = self._files[place] = self._log.open_shared(info)
            if info.sealed:
                # Maps the file if it may: from now on a batch is read without a copy.
                file.mapped(file.start, info.end_position, _FIRST_BYTES)
            self._log.context.open_files.opened(self)
        return file

    def release_files(self) -> bool:
        """Close the files for now, unless a look-up is in progress."""
        if not self._lock.acquire(False):
            return False
        self._files.clear()
        self._lock.release()
        return True

    def _batch(
        self, info: SegmentInfo, keys: SegmentKeys, record: int, reader: TypedReader | None
    ) -> tuple[DecodedBatch, int]:
        position, row = keys.batch_of(record)
        place = info.id, position, None if reader is None else reader.schema
        decoded = self._cache.get(place)
        if decoded is None:
            file = self._file(info)
            read = file.mapped if info.sealed else file.read
            decoded = DecodedBatch(read(position, keys.end_position, 1)[0], reader)
            if decoded.batch.is_compressed:
                decoded.memory += sum(column.nbytes for column in decoded.columns.values())
            elif not (info.sealed and file.fd is None):
                decoded.memory += decoded.batch.size
            elif reader is not None:
                decoded.memory += decoded.columns["key"].nbytes
            self._cache.add(place, decoded)
        return decoded, row


# The files


def is_enabled(config: TopicConfig) -> bool:
    """Whether keys of a topic are looked up in an index."""
    enabled = config.key_index_enable
    return config.compacts if enabled is None else enabled


def load(log: PartitionLog, info: SegmentInfo) -> SegmentKeys | None:
    """Return the key index of a sealed segment from its file; None without a good one."""
    files = log.context.files
    try:
        with files.opened(key_index_path(log.path_of(info))) as fd:
            size = files.size(fd)
            data = files.map_data(fd, size) if files.maps_segments else files.read(fd, size, 0)
    except StorageError:
        return None
    return SegmentKeys.unpack(data, info)


def rebuild(log: PartitionLog, info: SegmentInfo) -> None:
    """Write the key index of a sealed segment.

    Raises:
        CorruptionError: A batch is damaged.
        StorageError: It cannot be written; look-ups work without it.
    """
    write(log, info, _read(log, info))
    # Retention does not wait: it may have removed the segment before the file was written.
    if not log.context.state.read(lambda txn: SEGMENTS.exists(txn, log.key, *info.key)):
        log.context.files.unlink(key_index_path(log.path_of(info)), missing_ok=True)


def write(log: PartitionLog, info: SegmentInfo, keys: SegmentKeys) -> None:
    """Write the key index of a sealed segment, whose keys were read."""
    log.context.files.write_file(key_index_path(log.path_of(info)), keys.pack(info))


def is_wrong(log: PartitionLog, info: SegmentInfo) -> bool:
    """Whether a sealed segment, whose file is whole, has a key index that is damaged or wrong."""
    files, path = log.context.files, key_index_path(log.path_of(info))
    if not info.sealed or not files.exists(path):
        return False
    try:
        return files.read_file(path) != b"".join(_read(log, info).pack(info))
    except EmbedlogError:
        return True


def _read(log: PartitionLog, info: SegmentInfo) -> SegmentKeys:
    """Return the key index of a sealed segment from its batches."""
    keys = SegmentKeys()
    keys.extend(log.open_segment(info), info.end_position)
    return keys
