"""Reads an input partition in an executor: the files of the plan, as rows in Arrow.

An executor may be killed at any time, may run on another host that mounts the log's
disk, and may be used again for another query; so it opens no database, takes no lock
and starts no thread.  The batches of a log are mostly small; they are combined for Spark, which
compares the schema of the first batch strictly: names, order, types and nullability.
"""

from __future__ import annotations

import errno
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from embedlog import batch as batches
from embedlog.batch import Batch, BatchRun, Reread
from embedlog.batch.arrays import data, number, repeated
from embedlog.batch.tables import PieceRows, rows_in_range, table
from embedlog.errors import (
    CorruptBatchError,
    CorruptionError,
    DataLossError,
    InvalidRecordError,
    NotALogError,
    StorageError,
)
from embedlog.files import Files
from embedlog.files.paths import FORMAT_FILE
from embedlog.hints import VERIFY
from embedlog.schemas.reading import HEADERS, OFFSET, TIMESTAMP, TOMBSTONE, TypedReader
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema, field_id
from embedlog.segment import SegmentFile
from embedlog.spark.columns import (
    RECORD_COLUMNS,
    VALUE,
    arrow_type,
    is_nanoseconds,
    to_spark,
)
from embedlog.spark.plan import FileChunk, LogInputPartition, PartitionSlice, TopicVersions

TARGET_ROWS = 32_768
"""Rows to yield at once: with fewer, Spark spends more on each; with more, little is gained."""
MAX_ROWS = 65_536
"""A batch of the log with more rows is yielded in parts."""
TARGET_BYTES = 8 << 20
"""Yield fewer rows if they take this many bytes."""

_logger = logging.getLogger("embedlog.spark")


@cache
def freeze_gc() -> None:
    """Exclude all loaded modules from garbage collection, once per process.

    Spark runs a collection after each task, which took 18 of a task's 25 ms.
    """
    gc.collect()
    gc.freeze()


def read_input_partition(
    partition: LogInputPartition,
    names: tuple[str, ...],
    fail_on_data_loss: bool,
    fields: Sequence[dict[str, Any]] = (),
) -> Iterator[Any]:
    """Yield the rows of an input partition as record batches of the named columns.

    Args:
        partition: What to read.
        names: The columns.
        fail_on_data_loss: Whether a loss of records is an error.
        fields: For typed topics, the columns as fields of Spark's schema, in JSON.

    Raises:
        DataLossError: A file was deleted or truncated; with ``fail_on_data_loss=False`` only its
            records are skipped, with one warning for each range of lost offsets.
        CorruptBatchError: A batch is not as it was written.
        NotALogError: The log does not exist on this host.
    """
    freeze_gc()
    directories = _Directories(partition.root)
    try:
        for part in partition.slices:
            versions = partition.schemas.get(part.topic)
            if versions is None:
                reader = SliceReader(part, names)
            else:
                reader = TypedSliceReader(part, fields, versions)
            groups = _row_groups(directories, part, reader.stored_schemas, fail_on_data_loss)
            yield from _read_slice(groups, reader)
    finally:
        directories.close()


class _Directories:
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
    try:
        files = Files(root, writable=writable, unsafe_filesystem=True, maps_segments=maps_segments)
        if files.exists(FORMAT_FILE):
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


def _read_slice(groups: Iterable[list[PieceRows]], reader: SliceReader) -> Iterator[Any]:
    by_type = groupby(groups, lambda group: int(group[0][0].is_log_append_time))
    for timestamp_type, same_type in by_type:
        for rows in _combined(same_type, reader.table):
            for start in range(0, rows.num_rows, MAX_ROWS):
                yield from reader.batches(rows.slice(start, MAX_ROWS), timestamp_type)


def _combined(
    groups: Iterable[list[PieceRows]], decode: Callable[[list[PieceRows]], Any]
) -> Iterator[Any]:
    """Yield tables with enough rows for Spark."""
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


def _row_groups(
    directories: _Directories,
    part: PartitionSlice,
    schemas_of: Callable[[FileChunk], tuple[Any, ...]],
    fail_on_data_loss: bool,
) -> Iterator[list[PieceRows]]:
    """Yield rows of one segment and one timestampType, as many as become one table.

    What a file lacks is no reason to skip the files behind it.
    """
    next_offset = part.from_offset
    loss: DataLossError | None = None
    for chunk in part.chunks:
        try:
            for decoded in _read_batches(directories, part, chunk, schemas_of(chunk)):
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
    directories: _Directories, part: PartitionSlice, chunk: FileChunk, schemas: tuple[Any, ...]
) -> Iterator[list[Batch | BatchRun]]:
    """Yield the batches of a part of a file, a few megabytes at a time.

    If a directory fails, it continues in the next one that has the file.

    Args:
        directories: The log roots.
        part: What is read of the partition.
        chunk: The part of a file.
        schemas: Those that the file may have: no checksum covers its own.
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
            for pieces in _read_copy(files, part, chunk, schemas, is_last, reread):
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
    directories: _Directories,
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
    schemas: tuple[Any, ...],
    is_last: bool,
    reread: Reread,
) -> Iterator[list[Batch | BatchRun]]:
    """Yield the batches of a part of a file in one directory; see `_read_batches`."""
    file = SegmentFile(files, chunk.path, expected=lambda: schemas, reread=reread)
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
    read = file.mapped_fast if chunk.sealed else file.read_fast
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
        todo="Load it again, or set failOnDataLoss to false to continue without these records.",
    )


_SPARK_TYPES = {"key": "binary", "value": "binary", **RECORD_COLUMNS}
_SEGMENT_FIELDS = {field.name: field.with_nullable(True) for field in batches.schema(headers=True)}
_WITH_ROWS = (TIMESTAMP, HEADERS, TOMBSTONE)


class SliceReader:
    """Decodes the rows of a part of a partition of a topic of bytes.

    Args:
        part: Which part it is.
        names: The columns, in Spark's order.
    """

    def __init__(self, part: PartitionSlice, names: Sequence[str]) -> None:
        self._part = part
        self._schema = pa.schema([(name, arrow_type(_SPARK_TYPES[name])) for name in names])
        stored = [_SEGMENT_FIELDS[name] for name in names if name in _SEGMENT_FIELDS]
        self._stored = pa.schema([*stored, pa.field(OFFSET, pa.int64())])

    def stored_schemas(self, chunk: FileChunk) -> tuple[Any, ...]:
        """Return the schemas that a file may have."""
        return tuple(batches.schema(headers=chunk.headers, offsets=each) for each in (False, True))

    def table(self, rows: list[PieceRows]) -> Any:
        """Return the rows of batches of one segment as a `pyarrow.Table` of stored columns.

        Raises:
            CorruptBatchError: A column that is read is damaged.
        """
        return table(rows, self._part.partition, self._stored)

    def batches(self, stored: Any, timestamp_type: int) -> Iterator[Any]:
        """Yield rows as record batches for Spark, usually as one.

        Args:
            stored: What `table` returned.
            timestamp_type: 0 if the producer set the timestamps, 1 if the log did.

        Raises:
            InvalidRecordError: A value does not fit Spark's type.
        """
        constants: dict[str, str | int] = {
            "topic": self._part.topic,
            "partition": self._part.partition,
            "timestampType": timestamp_type,
        }
        for rows in stored.combine_chunks().to_batches():
            arrays = [
                _constant(constants[field.name], field.type, rows.num_rows)
                if field.name in constants
                else self._column(rows, field)
                for field in self._schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, rows: Any, field: Any) -> Any:
        part, column = self._part, rows.column(field.name)
        if field.name == "timestamp":
            try:
                return column.cast(field.type)
            except pa.ArrowInvalid as error:
                raise InvalidRecordError(
                    f"A record has a timestamp that Spark cannot hold: {error}",
                    topic=part.topic,
                    partition=part.partition,
                    todo="Leave the column out: .schema('key binary, value binary').",
                ) from error
        if field.name == "headers":
            # With Spark's names of the fields; null for a record without any, as in Kafka's source.
            is_empty = pc.equal(pc.list_value_length(column), number(0, pa.int32()))
            if pc.any(is_empty).as_py():
                column = pc.if_else(is_empty, pa.nulls(1, column.type)[0], column)
            return column.cast(field.type)
        return column


def _constant(value: str | int, arrow_type: Any, count: int) -> Any:
    """Return a column that has the same value in each row."""
    # Built for the next power of two and sliced, so that one cached array serves many batches.
    return _constants(value, arrow_type, 1 << max(count - 1, 0).bit_length()).slice(0, count)


@lru_cache(maxsize=16)
def _constants(value: str | int, arrow_type: Any, count: int) -> Any:
    if isinstance(value, int):
        return repeated(value, arrow_type, count)
    return pa.repeat(data(value.encode(), arrow_type), count)


class TypedSliceReader(SliceReader):
    """The same for a typed topic.

    Args:
        part: Which part it is.
        fields: The columns: fields of Spark's schema, as JSON.
        versions: The schemas of the topic.
    """

    def __init__(
        self, part: PartitionSlice, fields: Sequence[dict[str, Any]], versions: TopicVersions
    ) -> None:
        self._part, self._versions = part, versions
        self._schema = pa.schema(
            [(field["name"], arrow_type(field["type"]), field["nullable"]) for field in fields]
        )
        # Always the offset, so that there are as many rows.
        names = [OFFSET]
        for field in fields:
            if field["name"] == VALUE:
                names += [part["name"] for part in field["type"]["fields"]]
            elif field["name"] in _WITH_ROWS or field["name"] not in RECORD_COLUMNS:
                names.append(field["name"])
        self._reader = TypedReader(_widest(versions))
        self._read = self._reader.select(names)

    def stored_schemas(self, chunk: FileChunk) -> tuple[Any, ...]:
        """See `SliceReader.stored_schemas`."""
        stored = self._versions.stored[chunk.schema_version]
        return tuple(
            segment_schema(
                stored, headers=chunk.headers, tombstones=chunk.tombstones, offsets=offsets
            )
            for offsets in (False, True)
        )

    def table(self, rows: list[PieceRows]) -> Any:
        """See `SliceReader.table`."""
        whole = cast("list[tuple[Batch, int, int]]", rows)
        return self._reader.table(whole, self._part.partition, self._read)

    def _column(self, rows: Any, field: Any) -> Any:
        name = field.name
        if name == VALUE:
            parts = [self._own_column(rows, inner.name, inner.type) for inner in field.type]
            return pa.StructArray.from_arrays(parts, fields=list(field.type))
        if name in (OFFSET, *_WITH_ROWS):
            return super()._column(rows, field)
        column = self._own_column(rows, name, field.type)
        if column.null_count and not field.nullable:
            raise InvalidRecordError(
                f"A record has no {name}, and the query's schema says that all have one",
                topic=self._part.topic,
                partition=self._part.partition,
                todo="Leave NOT NULL out of .schema(…).",
            )
        return column

    def _own_column(self, rows: Any, name: str, target: Any) -> Any:
        column, read = rows.column(name), self._versions.read.columns.field(name).type
        if column.type != read:
            column = self._narrowed(column, read, name)
        try:
            return to_spark(column, target)
        except pa.ArrowInvalid as error:
            todo = "Leave the column out: name the others in .schema(…)."
            if is_nanoseconds(column.type):
                todo = f"Read its nanoseconds as a number: .schema('{name} bigint')."
            raise InvalidRecordError(
                f"Column {name} has a value that Spark cannot hold: {error}",
                topic=self._part.topic,
                partition=self._part.partition,
                todo=todo,
            ) from error

    def _narrowed(self, column: Any, read: Any, name: str) -> Any:
        """Return a column that was widened since the query began, as the type of the query."""
        try:
            narrowed = column.cast(read)
            if _is_same(narrowed.cast(column.type), column):
                return narrowed
            problem = "a value would be changed"
        except pa.ArrowInvalid as error:
            problem = str(error)
        raise InvalidRecordError(
            f"Column {name} was {read} when the query began and is {column.type} now: {problem}",
            topic=self._part.topic,
            partition=self._part.partition,
            todo="Load the topic again, or restart the query.",
        )


def _widest(versions: TopicVersions) -> TopicSchema:
    """Return the schema of the query, with the types that its columns have by now.

    Records that are newer than the query may have wider types, which older ones are cast to.
    """
    read = versions.read
    newest = max(versions.stored.values(), key=lambda schema: schema.version, default=read)
    if newest.version <= read.version:
        return read
    fields = {field_id(field): field for field in newest.columns}
    columns = [fields.get(field_id(field), field).with_name(field.name) for field in read.columns]
    return TopicSchema(newest.version, pa.schema(columns), read.key, read.timestamp, read.next_id)


def _is_same(one: Any, other: Any) -> bool:
    if not pa.types.is_floating(other.type):
        return bool(one.equals(other))
    # NaN is not equal to itself.
    return pc.all(pc.or_(pc.equal(one, other), pc.is_nan(other))).as_py() is not False
