"""`embedlog import`: appends the records in a file to a topic."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from embedlog.api import Log
from embedlog.batch import from_lists
from embedlog.cli.file_formats import CSV, PARQUET, STANDARD_STREAM, format_of
from embedlog.cli.open_log import to_write
from embedlog.cli.parser import OK
from embedlog.cli.printing import note, say, say_json
from embedlog.cli.produce import input_lines, parse_headers, parse_record
from embedlog.display import plural
from embedlog.errors import InvalidRecordError, UnknownTopicOrPartitionError
from embedlog.lazy import np, pa
from embedlog.progress import ProgressBar

_BLOCK_BYTES = 4 << 20
_ROWS = 1 << 17
_RAW = ("bytes", "bytes")
"""Files have keys and values as they are stored, whatever the serializers of the topic."""
_NONE = -(1 << 63)
"""The partition of a record that has none: its key chooses one."""
_FIELDS = {"partition", "timestamp", "key", "value", "headers"}
_IGNORED = {"topic", "offset", "timestamp_type", "leader_epoch"}
"""Columns of an export that have no meaning here."""


class Chunk(NamedTuple):
    """Some consecutive records of a file."""

    table: Any
    """With the columns of `Producer.append_table`."""
    partitions: Any
    """A partition per row as a numpy array, with `_NONE`; None if no row has one."""
    done: int
    """The bytes or rows of the file up to the end of the chunk."""

    def skip(self, rows: int) -> Chunk:
        """Return the chunk without its first rows."""
        partitions = None if self.partitions is None else self.partitions[rows:]
        return self._replace(table=self.table.slice(rows), partitions=partitions)


def import_file(args: argparse.Namespace) -> int:
    """Append the records, and print how many, and where; also if the import fails."""
    file_format = format_of(args.file, args.format)
    with _source(args.file) as file, ProgressBar(f"import {args.topic}") as bar:
        size = _size(file)
        read = {PARQUET: _parquet, CSV: _csv}.get(file_format, _json_lines)
        with to_write(args, create=True, durability="fsync" if args.sync else "os") as log:
            target = ImportTarget(log, args.topic, repartition=args.repartition)
            skip = args.skip
            try:
                for chunk in read(file, log.root.clock):
                    rows = min(skip, chunk.table.num_rows)
                    skip -= rows
                    target.append(chunk.skip(rows) if rows else chunk)
                    bar(chunk.done, size)
                target.close()
            except BaseException:
                _note_failure(target, args.skip)
                raise
    _report(args, file_format, target)
    return OK


@contextmanager
def _source(path: str) -> Iterator[IO[bytes]]:
    if path == STANDARD_STREAM:
        yield sys.stdin.buffer
    else:
        with open(path, "rb") as file:
            yield file


def _size(file: IO[bytes]) -> int:
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError):
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _note_failure(target: ImportTarget, skipped: int) -> None:
    done = target.records
    if not done and not target.uncertain:
        note("Nothing was imported")
        return
    text = f"Imported {plural(done, 'record')} before the import ended"
    if target.uncertain:
        text += f", and perhaps some of the next {target.uncertain}"
    note(f"{text}; to continue, repeat the command with --skip {skipped + done}")


def _report(args: argparse.Namespace, file_format: str, target: ImportTarget) -> None:
    parts = sorted(target.appended.items())
    if args.json:
        fields = ("first_offset", "next_offset", "records")
        document = {"topic": args.topic, "file": args.file, "format": file_format}
        partitions = [
            {"partition": number, **dict(zip(fields, part, strict=True))} for number, part in parts
        ]
        say_json({**document, "records": target.records, "partitions": partitions})
        return
    new = " (a new topic)" if target.is_new else ""
    say(f"Imported {plural(target.records, 'record')} into {args.topic}{new}")
    for number, (first, stop, records) in parts:
        say(f"  partition {number}: offsets {first} to {stop}, {plural(records, 'record')}")


class ImportTarget:
    """Appends chunks to a topic, and counts what was appended."""

    def __init__(self, log: Log, topic: str, *, repartition: bool) -> None:
        self._log, self._topic, self._repartition = log, topic, repartition
        self.is_new = topic not in log
        """Whether the import has created the topic; it then gets as many partitions as it needs."""
        log.root.ensure_topic(topic)
        self._producer = log.producer()
        self.records = 0
        """How many records of the file were appended, from the first one on."""
        self.uncertain = 0
        """How many records after these may have been appended: the last call has failed."""
        self.appended: dict[int, tuple[int, int, int]] = {}
        """By partition: the first offset, the offset after the last record, and the records."""

    def append(self, chunk: Chunk) -> None:
        """Append the records of a chunk to their partitions.

        Raises:
            UnknownTopicOrPartitionError: The topic has not so many partitions.
            InvalidRecordError: A partition is negative.
            EmbedlogError: As `Producer.append_table`.
        """
        rows = chunk.table.num_rows
        partitions = None if self._repartition else chunk.partitions
        if partitions is not None and rows:
            if ((partitions < 0) & (partitions != _NONE)).any():
                raise InvalidRecordError("partition must not be negative", topic=self._topic)
            self._check(int(partitions.max()))
        self.uncertain = rows
        for partition, table in _by_partition(chunk.table, partitions):
            future = self._producer.append_table(self._topic, table, partition=partition)
            for written in future.result():
                # Unknown only for what was written before, by a producer with a name.
                assert written.base_offset is not None
                self._count(written.partition, written.base_offset, written.count)
        self.records, self.uncertain = self.records + rows, 0

    def _check(self, highest: int) -> None:
        count = self._log.root.partitions(self._topic)
        if highest < count:
            return
        if not self.is_new:
            raise UnknownTopicOrPartitionError(
                f"The file has records of partition {highest}, "
                f"the topic has {plural(count, 'partition')}",
                topic=self._topic,
                todo=f"Run `embedlog topics alter {self._topic} -p {highest + 1}`, or use "
                "--repartition.",
            )
        self._log.create_partitions(self._topic, highest + 1)
        # A producer warns of new partitions, because keys then go to other ones.
        self._producer.close()
        self._producer = self._log.producer()

    def _count(self, partition: int, base_offset: int, count: int) -> None:
        first, _, records = self.appended.get(partition, (base_offset, 0, 0))
        self.appended[partition] = first, base_offset + count, records + count

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()


def _by_partition(table: Any, partitions: Any) -> Iterator[tuple[int | None, Any]]:
    """Yield the rows of each partition, in order."""
    if not table.num_rows:
        return
    if partitions is None:
        yield None, table
        return
    order = partitions.argsort(kind="stable")
    sorted_partitions = partitions[order]
    starts = [0, *(np.flatnonzero(np.diff(sorted_partitions)) + 1).tolist()]
    if len(starts) > 1:
        indices = pa.Array.from_buffers(pa.int64(), len(order), [None, pa.py_buffer(order)])
        table = table.take(indices)
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        number = int(sorted_partitions[start])
        yield None if number == _NONE else number, table.slice(start, stop - start)


# Formats


def _parquet(file: IO[bytes], clock: Any) -> Iterator[Chunk]:
    """Yield the rows of a Parquet file."""
    from pyarrow import parquet

    try:
        source = parquet.ParquetFile(file)
        _check_columns(source.schema_arrow.names)
        names = [name for name in source.schema_arrow.names if name in _FIELDS]
        facts, size, done = source.metadata, _size(file), 0
        groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
        bytes_per_row = sum(group.total_byte_size for group in groups) // (facts.num_rows or 1)
        rows = max(1, min(_ROWS, 8 * _BLOCK_BYTES // (bytes_per_row or 1)))
        for batch in source.iter_batches(rows, columns=names):
            done += batch.num_rows
            yield _chunk(batch, size * done // facts.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise InvalidRecordError(f"The file is not Parquet, or damaged: {error}") from error


def _csv(file: IO[bytes], clock: Any) -> Iterator[Chunk]:
    """Yield the rows of a CSV file, whose first line has the names of the columns."""
    from pyarrow import csv

    types = {"partition": pa.int32(), "timestamp": pa.int64()}
    convert = csv.ConvertOptions(
        column_types={**types, **dict.fromkeys(("key", "value", "headers"), pa.binary())},
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    try:
        reader = csv.open_csv(
            file,
            csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
            csv.ParseOptions(newlines_in_values=True),
            convert,
        )
        _check_columns(reader.schema.names)
        names = [name for name in reader.schema.names if name in _FIELDS]
        for batch in reader:
            columns = batch.select(names)
            done = file.tell() if file.seekable() else 0
            if "headers" in names:
                yield _with_headers(columns, done, clock())
            else:
                yield _chunk(columns, done)
    except pa.ArrowException as error:
        raise InvalidRecordError(
            f"The file is not CSV with these columns: {error}",
            todo="See the reference of `embedlog import`.",
        ) from error


def _with_headers(columns: Any, done: int, now_ms: int) -> Chunk:
    """Return rows of CSV, where headers are JSON."""
    rows = columns.to_pydict()
    count = columns.num_rows
    try:
        headers = [parse_headers(json.loads(text or b"[]")) for text in rows["headers"]]
    except ValueError as error:
        raise InvalidRecordError(f"The column headers is not JSON: {error}") from None
    times = [now_ms if time is None else time for time in rows.get("timestamp", [None] * count)]
    table = from_lists(rows["value"], rows.get("key"), times, headers)
    return Chunk(table, _partitions(columns), done)


def _json_lines(file: IO[bytes], clock: Any) -> Iterator[Chunk]:
    """Yield the records of JSON lines, as those of `embedlog produce --json`."""
    done = before = 0
    for lines in input_lines(file):
        numbered = enumerate(lines, before + 1)
        records = [parse_record(line, number, _RAW) for number, line in numbered if line.strip()]
        before += len(lines)
        done += sum(map(len, lines)) + len(lines)
        if not records:
            continue
        values, keys, headers, partitions, timestamps = map(list, zip(*records, strict=True))
        now_ms = clock()
        times = [now_ms if time is None else time for time in timestamps]
        table = from_lists(values, keys, times, headers if any(headers) else None)
        numbers = None
        if any(number is not None for number in partitions):
            numbers = np.array([_NONE if number is None else number for number in partitions])
        yield Chunk(table, numbers, done)


def _check_columns(names: list[str]) -> None:
    unknown = [name for name in names if name not in _FIELDS | _IGNORED]
    if unknown or "value" not in names:
        others = ", ".join(sorted(_FIELDS - {"value"}))
        raise InvalidRecordError(
            f"The file has a column {unknown[0]!r}" if unknown else "The file has no column value",
            todo=f"The columns are value and, if needed, {others}.",
        )


def _chunk(batch: Any, done: int) -> Chunk:
    names = [name for name in batch.schema.names if name != "partition"]
    return Chunk(pa.Table.from_batches([batch.select(names)]), _partitions(batch), done)


def _partitions(batch: Any) -> Any:
    if "partition" not in batch.schema.names:
        return None
    column = batch.column(batch.schema.names.index("partition"))
    if column.null_count == len(column):
        return None
    return column.cast(pa.int64()).fill_null(_NONE).to_numpy(zero_copy_only=False)
