"""Reads what was planned: the batches of slices of partitions, by plain reads of their files.

A process that reads may be killed at any time, may run on another host that mounts the log's disk,
and may be used again for something else; so it opens no database, takes no lock and starts no
thread.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any, cast

import pyarrow as pa

from embedlog.batch import Batch, BatchRun, Reread
from embedlog.batch.tables import BatchRows, PieceRows, rows_in_range
from embedlog.batch.wire import BufferLayout, bytes_layout, layout_of
from embedlog.errors import (
    CorruptBatchError,
    CorruptionError,
    DataLossError,
    NotALogError,
    StorageError,
)
from embedlog.files import Files
from embedlog.files.paths import FORMAT_FILE, MANIFESTS
from embedlog.files.remote import RemoteFiles
from embedlog.hints import VERIFY
from embedlog.schemas.segment_schema import segment_schema
from embedlog.segment import SegmentFile
from embedlog.splits.slices import FileChunk, PartitionSlice, TopicVersions

TARGET_ROWS = 32_768
"""Rows to yield at once: with fewer, Spark spends more on each; with more, little is gained."""
MAX_ROWS = 65_536
"""A group of small batches has at most so many rows."""
TARGET_BYTES = 8 << 20
"""Yield fewer rows if they take this many bytes."""

_logger = logging.getLogger("embedlog.splits")


class LogRoots:
    """The log roots that a task reads from, opened when they are needed.

    Args:
        root: The only one of a log in one directory.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._opened: dict[str, Files] = {}

    def of(self, part: PartitionSlice) -> tuple[str, ...]:
        """Return the log roots that have the files of a slice, in the order to try them."""
        return part.directories or (self._root,)

    def open(self, root: str, part: PartitionSlice) -> Files:
        """Return the files of a log root.

        Raises:
            NotALogError: It is not on this host.
            StorageError: It cannot be read.
        """
        if root not in self._opened:
            # A map of a file on a disk that breaks ends the process.
            maps_segments = not part.directories
            self._opened[root] = open_files(root, writable=False, maps_segments=maps_segments)
        return self._opened[root]

    def deleted(self, root: str, path: str, error: Exception) -> bool:
        """Whether a file could not be read because it was deleted from a log that is there.

        A remote file system has other errors for a file that the log's host deletes, mostly
        ESTALE.
        """
        files = self._opened.get(root)
        if files is None or not isinstance(error, StorageError):
            return False
        try:
            is_gone = error.missing or error.errno == errno.ESTALE or not files.exists(path)
            return is_gone and files.exists(FORMAT_FILE)
        except StorageError:
            return False

    def close(self) -> None:
        """Close all files."""
        for files in self._opened.values():
            files.close_all()


def open_files(root: str, *, writable: bool, maps_segments: bool = True) -> Files:
    """Open the files of a log in an executor, which does not open its databases.

    Raises:
        NotALogError: The log is not on this host.
        StorageError: This user may not open it.
    """
    if "://" in root:
        return RemoteFiles(root)
    try:
        files = Files(root, writable=writable, unsafe_filesystem=True, maps_segments=maps_segments)
        # A backup has no format file, and is no log.
        if files.exists(FORMAT_FILE) or (not writable and files.exists(MANIFESTS)):
            return files
    except StorageError as error:
        if not error.missing:
            raise
    # Nothing, or a place where nothing is mounted.
    raise NotALogError(
        "The log is not on this host",
        path=root,
        todo="Executors use its files: mount the log's disk under the same path on all hosts.",
    )


def row_tables(
    groups: Iterable[list[PieceRows]], decode: Callable[[list[PieceRows]], Any]
) -> Iterator[Any]:
    """Yield groups as tables with many rows: small batches are combined."""
    tables: list[Any] = []
    rows = size = 0
    for group in groups:
        tables.append(decode(group))
        rows += tables[-1].num_rows
        if group[0][0].is_compressed:
            size += tables[-1].nbytes
        else:
            # For many small batches Arrow is slow to compute ``nbytes``.
            size += sum(batch.size for batch, _, _ in group)
        if rows >= TARGET_ROWS or size >= TARGET_BYTES:
            yield pa.concat_tables(tables)
            tables, rows, size = [], 0, 0
    if tables:
        yield pa.concat_tables(tables)


def row_groups(
    directories: LogRoots,
    part: PartitionSlice,
    versions: TopicVersions | None,
    fail_on_data_loss: bool = True,
) -> Iterator[list[PieceRows]]:
    """Yield rows of one segment and one timestampType, as many as become one table.

    What a file lacks is no reason to skip the files behind it.

    Args:
        directories: The log roots.
        part: What is read of a partition.
        versions: The schemas of a typed topic.
        fail_on_data_loss: Whether a loss of records is an error.

    Raises:
        DataLossError: A file was deleted or truncated; with ``fail_on_data_loss=False`` only its
            records are skipped, with one warning for each range of lost offsets.
        CorruptBatchError: A batch is not as it was written.
        NotALogError: The log does not exist on this host.
    """
    next_offset = part.from_offset
    loss: DataLossError | None = None
    for chunk in part.chunks:
        try:
            for decoded in _read_batches(directories, part, chunk, _layouts(chunk, versions)):
                if loss is not None:
                    _warn_of_loss(part, next_offset, decoded[0].base_offset, loss)
                    loss = None
                next_offset = max(next_offset, decoded[-1].next_offset)
                rows = rows_in_range(decoded, part.from_offset, part.until_offset)
                # Damage in a batch without any of these rows is no error.
                trimmed = (
                    row[0].trim(*row[1:]) if isinstance(row[0], BatchRun) else row for row in rows
                )
                for _, group in groupby(trimmed, key=lambda row: row[0].is_log_append_time):
                    yield from _limited_groups(list(group))
        except DataLossError as error:
            if fail_on_data_loss:
                raise
            loss = loss or error
    if loss is not None:
        _warn_of_loss(part, next_offset, part.until_offset, loss)


def batch_rows(
    directories: LogRoots, part: PartitionSlice, versions: TopicVersions | None
) -> Iterator[list[BatchRows]]:
    """Yield the batches of a slice, a few megabytes at a time, with the rows that it has of them.

    Args:
        directories: The log roots.
        part: What is read of a partition.
        versions: The schemas of a typed topic.

    Raises:
        Exception: As `row_groups`.
    """
    for chunk in part.chunks:
        layouts = _layouts(chunk, versions)
        for decoded in _read_batches(directories, part, chunk, layouts, joined=False):
            batches = cast("list[Batch]", decoded)
            if rows := rows_in_range(batches, part.from_offset, part.until_offset):
                yield rows


def _layouts(chunk: FileChunk, versions: TopicVersions | None) -> tuple[BufferLayout, ...]:
    """Return the layouts that a file may have."""
    either = (False, True)
    if versions is None:
        return tuple(bytes_layout(chunk.headers, each) for each in either)
    stored = versions.stored[chunk.schema_version]
    columns = partial(segment_schema, stored, headers=chunk.headers, tombstones=chunk.tombstones)
    return tuple(layout_of(columns(offsets=each)) for each in either)


def _warn_of_loss(part: PartitionSlice, start: int, end: int, loss: DataLossError) -> None:
    if start < end:
        _logger.warning(
            *("Skipped offsets [%d, %d) of %s-%d, which are lost: %s", start, end),
            *(part.topic, part.partition, loss.what),
        )


def _limited_groups(rows: list[PieceRows]) -> Iterator[list[PieceRows]]:
    """Yield groups of at most `MAX_ROWS` rows; compressed batches one by one.

    A compressed batch may grow a hundredfold.
    """
    if any(batch.is_compressed for batch, _, _ in rows):
        yield from ([row] for row in rows)
        return
    group: list[PieceRows] = []
    count = 0
    for row in rows:
        if group and count + row[2] - row[1] > MAX_ROWS:
            yield group
            group, count = [], 0
        group.append(row)
        count += row[2] - row[1]
    if group:
        yield group


def _read_batches(
    directories: LogRoots,
    part: PartitionSlice,
    chunk: FileChunk,
    layouts: tuple[BufferLayout, ...],
    *,
    joined: bool = True,
) -> Iterator[list[Batch | BatchRun]]:
    """Yield the batches of a part of a file, a few megabytes at a time.

    If a directory fails, it continues in the next one that has the file.

    Args:
        directories: The log roots.
        part: What is read of the partition.
        chunk: The part of a file.
        layouts: Those that the file may have: no checksum covers its schema.
        joined: Whether runs of small batches are joined.
    """
    failure: CorruptionError | NotALogError | StorageError | None = None
    was_deleted = False
    roots = directories.of(part)
    left = list(roots)
    while left:
        root, begin = left.pop(0), chunk.position
        try:
            files, is_last = directories.open(root, part), not left
            others = [each for each in roots if each != root]
            reread = partial(_bytes_elsewhere, directories, part, chunk.path, others)
            for pieces in _read_copy(files, part, chunk, layouts, is_last, reread, joined):
                yield pieces
                chunk = chunk._replace(position=pieces[-1].position + pieces[-1].size)
            return
        except (CorruptionError, NotALogError, StorageError) as error:
            # That a file is missing says the least: retention may have deleted all copies.
            if failure is None or was_deleted:
                failure, was_deleted = error, directories.deleted(root, chunk.path, error)
            if chunk.position > begin and isinstance(error, CorruptionError):
                left = others  # those before this one may be whole here
            if left:
                _logger.warning("Reading %s in another directory: %s", chunk.path, error)
    assert failure is not None
    if was_deleted:
        raise _data_loss(
            part, f"The file {chunk.path} was deleted after the query was planned"
        ) from failure
    raise failure


def _bytes_elsewhere(
    directories: LogRoots,
    part: PartitionSlice,
    path: str,
    roots: Sequence[str],
    position: int,
    size: int,
) -> bytes | None:
    """Return the bytes of a batch, whose columns are damaged here, as another copy has them.

    Args:
        directories: The log roots.
        part: What is read of the partition.
        path: The file.
        roots: Where it may be.
        position: Where the batch begins.
        size: Its size; 0 if its head is damaged: then `_read_batches` reads on elsewhere.
    """
    for root in roots if size else ():
        with suppress(NotALogError, StorageError):
            files = directories.open(root, part)
            with files.opened(path) as fd:
                data = files.read(fd, size, position)
            if len(data) == size:
                return data
    return None


def _read_copy(
    files: Files,
    part: PartitionSlice,
    chunk: FileChunk,
    layouts: tuple[BufferLayout, ...],
    is_last: bool,
    reread: Reread,
    joined: bool,
) -> Iterator[list[Batch | BatchRun]]:
    """Yield the batches of a part of a file in one directory; see `_read_batches`."""
    file = SegmentFile(files, chunk.path, expected=lambda: layouts, reread=reread)
    if not is_last and file.size() < chunk.end_position:
        raise StorageError(
            f"The copy is being made again: it lacks bytes before {chunk.end_position}",
            path=files.path(chunk.path),
            operation="read",
        )
    position, end = chunk.position or file.start, chunk.end_position
    if position > end:
        # No checksum covers the length of the schema; else there would be no rows, and no error.
        raise CorruptionError(
            "Not a segment of this log: its schema is longer than the file",
            path=chunk.path,
            position=0,
            todo=VERIFY,
        )
    read: Callable[[int, int], Sequence[Batch | BatchRun]]
    read = file.mapped_fast if chunk.sealed else file.read_fast
    if not joined:
        read = file.mapped if chunk.sealed else file.read
    while position < end:
        try:
            decoded = read(position, end)
        except CorruptBatchError as error:
            if chunk.sealed or file.size() >= end:
                raise
            raise _data_loss(part, f"The file {chunk.path} was truncated") from error
        if not decoded:
            raise _data_loss(part, f"The file {chunk.path} was truncated")
        planned = [piece for piece in decoded if piece.leader_epoch <= part.leader_epoch]
        if planned:
            yield planned
        if len(planned) < len(decoded):
            raise _data_loss(
                part, "The log was truncated and written again after the query was planned"
            )
        if decoded[-1].next_offset >= part.until_offset:
            return
        position = decoded[-1].position + decoded[-1].size


def _data_loss(part: PartitionSlice, problem: str) -> DataLossError:
    return DataLossError(
        problem,
        topic=part.topic,
        partition=part.partition,
        offset=part.from_offset,
        todo="Load or plan it again; in Spark, failOnDataLoss=false skips these records.",
    )
