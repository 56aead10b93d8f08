"""What an executor does: map the files it was told of, and yield their rows as Arrow.

No database, no lock, no thread: an executor may be killed at any instant, may
run on another host, and may be used again for another query.  Batches of a
log are mostly small; they are gathered before they are handed on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa

from embedlog import batch as batches
from embedlog.batch import Batch
from embedlog.batch.tables import BatchRows, rows_in_range, table
from embedlog.errors import CorruptBatchError, DataLossError, NotALogError, StorageError
from embedlog.files import Files
from embedlog.segment import SegmentFile
from embedlog.spark import kafka_columns, python_worker

ROWS = 32_768
"""Hand on so many rows at once: with fewer Spark spends more on each, with more it gains little."""
MOST_ROWS = 65_536
"""A batch of the log with more rows is handed on in parts."""
BYTES = 8 << 20
"""Hand on sooner, if the rows are so large."""

_logger = logging.getLogger("embedlog")


@dataclass(frozen=True, slots=True)
class FileChunk:
    """A part of one segment file."""

    path: str
    """From the root."""
    sealed: bool
    headers: bool
    position: int
    end_position: int


@dataclass(frozen=True, slots=True)
class PartitionSlice:
    """Offsets ``[first, stop)`` of one partition, and where they are."""

    topic: str
    partition: int
    first: int
    stop: int
    leader_epoch: int
    """That of the log when it was planned: batches of a later one were not meant."""
    chunks: tuple[FileChunk, ...]
    size: int = 0
    """About how many bytes to read."""


@dataclass(frozen=True, slots=True)
class LogInputPartition:
    """What one task reads; a value of an `InputPartition`."""

    root: str
    pieces: tuple[PartitionSlice, ...]


def read(work: LogInputPartition, names: tuple[str, ...], fail_on_data_loss: bool) -> Iterator[Any]:
    """Yield the rows of a task as record batches of the columns named.

    Raises:
        DataLossError: A file is gone, or was cut; unless that is not to fail, then
            what is missing is left out.
        CorruptBatchError: A batch is not as written.
        NotALogError: The log is not there on this host.
    """
    python_worker.freeze()
    try:
        files = Files(work.root, writable=False)
    except (NotALogError, StorageError) as error:
        raise NotALogError(
            "the log is not on this host",
            path=work.root,
            todo="executors read its files: put it where all hosts find it by the same path",
        ) from error
    try:
        for piece in work.pieces:
            try:
                yield from _piece(files, piece, names)
            except DataLossError as error:
                if fail_on_data_loss:
                    raise
                _logger.warning("%s", error)
    finally:
        files.close_all()


def _piece(files: Files, piece: PartitionSlice, names: tuple[str, ...]) -> Iterator[Any]:
    schema = kafka_columns.stored(names)
    held = RowBuffer(piece, names)
    for found in _runs(files, piece):
        made = table(found, piece.partition, schema)
        yield from held.add(made, int(found[0][0].is_log_append_time), _size(found, made))
    yield from held.hand_on()


class RowBuffer:
    """Rows that are gathered until they are worth to be handed on."""

    def __init__(self, piece: PartitionSlice, names: tuple[str, ...]) -> None:
        self._piece, self._names = piece, names
        self._tables: list[Any] = []
        self._rows = self._bytes = self._kind = 0

    def add(self, table: Any, kind: int, size: int) -> Iterator[Any]:
        """Take rows of one timestampType; yield what is enough by then."""
        if kind != self._kind:
            yield from self.hand_on()
        self._kind = kind
        self._tables.append(table)
        self._rows += table.num_rows
        self._bytes += size
        if self._rows >= ROWS or self._bytes >= BYTES:
            yield from self.hand_on()

    def hand_on(self) -> Iterator[Any]:
        """Yield what there is."""
        tables, self._tables = self._tables, []
        self._rows = self._bytes = 0
        if not tables:
            return
        whole = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
        topic, partition = self._piece.topic, self._piece.partition
        for start in range(0, whole.num_rows, MOST_ROWS):
            some = whole.slice(start, MOST_ROWS)
            yield from kafka_columns.rows(some, self._names, topic, partition, self._kind)


def _size(found: Sequence[BatchRows], table: Any) -> int:
    """How many bytes rows take; of many small batches Arrow takes long to tell it."""
    if found[0][0].is_compressed:
        return int(table.nbytes)
    return sum(batch.size for batch, _, _ in found)


def _runs(files: Files, piece: PartitionSlice) -> Iterator[list[BatchRows]]:
    """Yield rows of batches of one segment that are alike: as much as is handed on at once."""
    for chunk in piece.chunks:
        for found in _batches(files, piece, chunk):
            rows = rows_in_range(found, piece.first, piece.stop)
            for _, some in groupby(rows, key=lambda row: row[0].is_log_append_time):
                yield from _few(list(some))


def _few(rows: list[BatchRows]) -> Iterator[list[BatchRows]]:
    """Yield what is compressed a batch at a time: it may grow a hundredfold."""
    if any(one.is_compressed for one, _, _ in rows):
        yield from ([row] for row in rows)
        return
    some: list[BatchRows] = []
    count = 0
    for row in rows:
        if some and count + row[2] - row[1] > MOST_ROWS:
            yield some
            some, count = [], 0
        some.append(row)
        count += row[2] - row[1]
    if some:
        yield some


def _batches(files: Files, piece: PartitionSlice, chunk: FileChunk) -> Iterator[list[Batch]]:
    """Yield the batches of a part of a file, a few megabytes at a time."""
    file = _open(files, piece, chunk)
    position, end = chunk.position or file.start, chunk.end_position
    while position < end:
        look = file.mapped if chunk.sealed else file.read
        try:
            found = look(position, end)
        except CorruptBatchError as error:
            if chunk.sealed or file.size() >= end:
                raise
            raise _lost(piece, f"{chunk.path} was cut") from error
        if not found:
            raise _lost(piece, f"{chunk.path} was cut")
        if found[-1].leader_epoch > piece.leader_epoch:
            raise _lost(piece, "the log was cut and written anew after the query was planned")
        yield found
        if found[-1].next_offset >= piece.stop:
            return
        position = found[-1].position + found[-1].size


def _open(files: Files, piece: PartitionSlice, chunk: FileChunk) -> SegmentFile:
    try:
        return SegmentFile(files, chunk.path, expected=_schemas(chunk.headers))
    except StorageError as error:
        if not error.missing:
            raise
        raise _lost(piece, f"{chunk.path} was deleted after the query was planned") from error


def _schemas(headers: bool) -> tuple[Any, ...]:
    return tuple(batches.schema(headers=headers, offsets=offsets) for offsets in (False, True))


def _lost(piece: PartitionSlice, what: str) -> DataLossError:
    return DataLossError(
        what,
        topic=piece.topic,
        partition=piece.partition,
        offset=piece.first,
        todo="load it again, or set failOnDataLoss to false to go on without these records",
    )
