"""`embedlog import`: appends the records in a file to a topic."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from embedlog.api import Log
from embedlog.api.frames import SERIALIZED
from embedlog.api.typed_topic import no_bytes
from embedlog.batch import from_lists
from embedlog.cli import argument_types as types
from embedlog.cli.file_formats import (
    CSV,
    FILES,
    NOT_TEXT,
    PARQUET,
    STANDARD_STREAM,
    add_file_format,
    file_size,
    format_of,
    input_lines,
    open_parquet,
    parquet_tables,
    serializers_of,
)
from embedlog.cli.open_log import existing_topic, to_write
from embedlog.cli.parser import OK, CommandParser, add_flag, add_option
from embedlog.cli.printing import note, say, say_json
from embedlog.cli.produce import (
    FIELDS,
    FROM_TEXT,
    IGNORED,
    InputRecord,
    parse_headers,
    parse_record,
)
from embedlog.cli.typed_files import read_rows
from embedlog.config import INT_MAX
from embedlog.display import plural
from embedlog.errors import InvalidRecordError, UnknownTopicOrPartitionError
from embedlog.lazy import np, pa
from embedlog.producer import Producer
from embedlog.progress import ProgressBar
from embedlog.registry import JsonToAvro, binder
from embedlog.serializers import Adapter, Field, adapt

IMPORT = f"""\
{FILES}
examples:
  embedlog import flights flights.parquet
  embedlog import flights flights.csv --skip 1000
"""

_CSV_BLOCK_BYTES = 1 << 20
"""pyarrow reads 32 blocks ahead, and refuses a row that is longer than a block."""
_LONG_ROW = "straddling object"
"""In pyarrow's error about such a row."""
_PAST = {"import": "imported", "produce": "produced"}
_TEXT = re.compile(r"^(large_)?(string|binary)")
"""The types of columns that hold text, or may do so."""
_NONE = -(1 << 63)
"""The partition of a record that has none: its key chooses one."""


class FileSerializers(NamedTuple):
    """How the keys and values in a file become bytes."""

    names: tuple[str, str]
    """The names of the serializers of keys and values."""
    adapters: tuple[Adapter, Adapter]
    """What serializes what the file has: JSON for Avro."""


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


def import_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = IMPORT
    command.add_argument("topic", metavar="TOPIC")
    command.add_argument("file", metavar="FILE", help="- is stdin")
    add_file_format(command)
    add_flag(command, "--raw", "store keys and values as they are, without serializers")
    add_option(command, "--skip", "N", "skip the first N records", type=types.count, default=0)
    about = "choose partitions by key, as for new records, not those in the file"
    add_flag(command, "--repartition", about)
    add_flag(command, "--sync", "flush to the disk before the command ends, to survive a power cut")


def import_(args: argparse.Namespace) -> int:
    """Append the records, and print how many, and where; also if the import fails."""
    file_format = format_of(args.file, args.format)
    with (
        opened(args.file) as file,
        to_write(args, create=True, durability="fsync" if args.sync else "os") as log,
        existing_topic(log, args.topic) as is_new,
    ):
        target = ImportTarget(
            log, args.topic, is_new=is_new, repartition=args.repartition, raw=args.raw
        )
        if target.schema is None:
            read = {PARQUET: _parquet, CSV: _csv}.get(file_format, _json_lines)
            chunks = read(file, target.serializers, log.root.clock)
        else:
            chunks = rows_of(target, file, file_format)
        append_all(target, chunks, "import", file_size(file), args.skip)
    report(target, args.file, file_format, "import", as_json=args.json)
    return OK


def rows_of(
    target: ImportTarget, file: IO[bytes], file_format: str, partition: int | None = None
) -> Iterator[Chunk]:
    """Yield the rows of a file for a typed topic.

    Args:
        target: The topic.
        file: The file.
        file_format: Its format.
        partition: That of all rows; by default the file may have a column of partitions.
    """
    assert target.schema is not None
    for table, done in read_rows(file, file_format, target.schema):
        chunk = _chunk(table, done)
        if partition is not None:
            chunk = chunk._replace(partitions=np.full(table.num_rows, partition))
        yield chunk


def append_all(
    target: ImportTarget, chunks: Iterable[Chunk], action: str, size: int, skip: int
) -> None:
    """Append chunks, and show the progress; after an error, say how to continue.

    Args:
        target: Where to append.
        chunks: Of the file.
        action: The command, ``"import"`` or ``"produce"``.
        size: The bytes of the file.
        skip: How many of the first rows are not appended.
    """
    left = skip
    with ProgressBar(f"{action} {target.topic}") as bar:
        try:
            for chunk in chunks:
                rows = min(left, chunk.table.num_rows)
                left -= rows
                target.append(chunk.skip(rows) if rows else chunk)
                bar(chunk.done, size)
            target.close()
        except BaseException:
            _note_failure(target, action, skip)
            raise


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """Yield a file, or stdin."""
    if path == STANDARD_STREAM:
        yield sys.stdin.buffer
    else:
        with open(path, "rb") as file:
            yield file


def _note_failure(target: ImportTarget, action: str, skipped: int) -> None:
    done, past = target.records, _PAST[action]
    if not done and not target.uncertain:
        note(f"Nothing was {past}")
        return
    text = f"{past.capitalize()} {plural(done, 'record')} before the {action} ended"
    if target.uncertain:
        text += f", and perhaps some of the next {target.uncertain}"
    note(f"{text}; to continue, repeat the command with --skip {skipped + done}")


def report(
    target: ImportTarget, file: str, file_format: str, action: str, *, as_json: bool
) -> None:
    """Print how many records were appended, and where."""
    parts = sorted(target.appended.items())
    if as_json:
        fields = ("first_offset", "next_offset", "records")
        document = {"topic": target.topic, "file": file, "format": file_format}
        partitions = [
            {"partition": number, **dict(zip(fields, part, strict=True))} for number, part in parts
        ]
        say_json({**document, "records": target.records, "partitions": partitions})
        return
    new = " (a new topic)" if target.is_new else ""
    say(f"{_PAST[action].capitalize()} {plural(target.records, 'record')} into {target.topic}{new}")
    for number, (first, stop, records) in parts:
        say(f"  partition {number}: offsets [{first}, {stop}), {plural(records, 'record')}")


class ImportTarget:
    """Appends chunks to a topic, and counts what was appended.

    Args:
        log: The log.
        topic: The topic.
        is_new: Whether the import has created it; it then gets as many partitions as it needs.
        repartition: Whether keys choose the partitions, and not the file.
        raw: Whether the file has keys and values as they are stored.
        options: Settings of the producer.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        *,
        repartition: bool,
        raw: bool,
        is_new: bool = False,
        **options: Any,
    ) -> None:
        self._log, self.topic, self._repartition = log, topic, repartition
        self._options, self.is_new = options, is_new
        info = log.root.topic(topic)
        names = serializers_of(info.config, raw=raw)
        key, value = (
            _adapter(log, topic, name, field) for name, field in zip(names, SERIALIZED, strict=True)
        )
        self.serializers = FileSerializers(names, (key, value))
        """Those of the keys and values in the file."""
        self.schema = log.root.context.catalog.schema(info)
        """The columns of a typed topic; None if values are bytes."""
        if self.schema is not None and raw:
            raise no_bytes(topic)
        self._producer = self._new_producer()
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
                raise InvalidRecordError("partition must not be negative", topic=self.topic)
            self._check(int(partitions.max()))
        self.uncertain = rows
        for partition, table in _by_partition(chunk.table, partitions):
            future = self._producer.append_table(
                self.topic,
                table,
                value="value" if self.schema is None else None,
                partition=partition,
            )
            for written in future.result():
                # Unknown only for what was written before, by a producer with a name.
                assert written.base_offset is not None
                self._count(written.partition, written.base_offset, written.count)
        self.records, self.uncertain = self.records + rows, 0

    def _check(self, highest: int) -> None:
        count = self._log.root.partitions(self.topic)
        if highest < count:
            return
        if not self.is_new:
            raise UnknownTopicOrPartitionError(
                f"The file has records of partition {highest}, "
                f"the topic has {plural(count, 'partition')}",
                topic=self.topic,
                todo=f"Run `embedlog topics alter {self.topic} -p {highest + 1}`, or use "
                "--repartition.",
            )
        self._log.create_partitions(self.topic, highest + 1)
        # A producer warns of new partitions, because keys then go to other ones.
        self._producer.close()
        self._producer = self._new_producer()

    def _new_producer(self) -> Producer[Any, Any]:
        # Columns of other types than bytes and text are left to the serializers of the topic.
        settings: dict[str, Any] = {
            f"{field}_serializer": "bytes"
            for field, name in zip(SERIALIZED, self.serializers.names, strict=True)
            if name in NOT_TEXT
        }
        return self._log.producer(max_request_size=INT_MAX, **settings, **self._options)

    def _count(self, partition: int, base_offset: int, count: int) -> None:
        first, _, records = self.appended.get(partition, (base_offset, 0, 0))
        self.appended[partition] = first, base_offset + count, records + count

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()


def _adapter(log: Log, topic: str, name: str, field: Field) -> Adapter:
    """Return the serializer of a file's keys or values."""
    if name == "avro":
        return binder(log.root)(JsonToAvro(), "serialize", field, topic)
    return adapt("bytes" if name in NOT_TEXT else name, "serialize", field)


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


def _parquet(file: IO[bytes], serializers: FileSerializers, clock: Any) -> Iterator[Chunk]:
    """Yield the rows of a Parquet file."""
    try:
        source = open_parquet(file)
        _check_columns(source.schema_arrow.names)
        names = [name for name in source.schema_arrow.names if name in FIELDS]
        size, done = file_size(file), 0
        for table in parquet_tables(file, names):
            columns = _stored(table, serializers, done)
            done += table.num_rows
            yield _chunk(columns, size * done // source.metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise InvalidRecordError(f"The file is not Parquet, or damaged: {error}") from error


def _csv(
    file: IO[bytes],
    serializers: FileSerializers,
    clock: Any,
    block_bytes: int | None = None,
    skip: int = 0,
) -> Iterator[Chunk]:
    """Yield the rows of a CSV file, whose first line has the names of the columns.

    Args:
        file: The file.
        serializers: Those of keys and values.
        clock: Returns the timestamp of rows without one.
        block_bytes: How many bytes are parsed at once.
        skip: How many rows to leave out.
    """
    from pyarrow import csv

    block_bytes = block_bytes or _CSV_BLOCK_BYTES
    types = {"partition": pa.int32(), "timestamp": pa.int64()}
    convert = csv.ConvertOptions(
        column_types={**types, **dict.fromkeys(("key", "value", "headers"), pa.binary())},
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    rows = 0
    try:
        reader = csv.open_csv(
            file,
            csv.ReadOptions(block_size=block_bytes, use_threads=False),
            csv.ParseOptions(newlines_in_values=True),
            convert,
        )
        _check_columns(reader.schema.names)
        names = [name for name in reader.schema.names if name in FIELDS]
        for batch in reader:
            table = pa.Table.from_batches([batch.select(names)]).slice(max(skip - rows, 0))
            rows += batch.num_rows
            if not table.num_rows:
                continue
            columns = _stored(table, serializers, rows - table.num_rows)
            done = file.tell() if file.seekable() else 0
            if "headers" in names:
                yield _with_headers(columns, done, clock())
            else:
                yield _chunk(columns, done)
    except pa.ArrowException as error:
        if _LONG_ROW in str(error) and block_bytes < file_size(file):
            with open(file.name, "rb") as again:
                yield from _csv(again, serializers, clock, block_bytes * 8, max(skip, rows))
            return
        if _LONG_ROW in str(error):
            raise InvalidRecordError(
                f"A row of CSV from a pipe is longer than {block_bytes} bytes",
                todo="Import it from a file.",
            ) from None
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


def _json_lines(file: IO[bytes], serializers: FileSerializers, clock: Any) -> Iterator[Chunk]:
    """Yield the records of JSON lines, as those of `embedlog produce --json`."""
    done = before = 0
    key, value = ("bytes" if name in NOT_TEXT else name for name in serializers.names)
    names = key, value
    is_text = {key, value} <= {"bytes", "str"}
    for lines in input_lines(file):
        columns = _columns_of(lines) if is_text else None
        if columns is not None:
            before += len(lines)
            done += sum(map(len, lines)) + len(lines)
            yield _chunk(columns, done)
            continue
        numbered = enumerate(lines, before + 1)
        records = [
            _serialized(parse_record(line, number, names), serializers.adapters, number)
            for number, line in numbered
            if line.strip()
        ]
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


def _columns_of(lines: list[bytes]) -> Any:
    """Return lines as columns, read by pyarrow; None if Python has to read them one by one.

    That is so for headers, and for keys and values other than text.  pyarrow refuses all that
    `parse_record` refuses, except several objects in a line and text that is not UTF-8.
    """
    from pyarrow import json as arrow_json

    data = b"\n".join(lines)
    if data.count(b"}\n{") != len(lines) - 1 or len(data) >= INT_MAX:
        return None
    text, number = pa.string(), pa.int64()
    types = {"key": text, "value": text, "timestamp": number, "partition": number}
    others = {"headers": pa.list_(pa.null()), "topic": text, "offset": number}
    columns = pa.schema({**types, **others, "timestamp_type": number})
    try:
        table = arrow_json.read_json(
            pa.BufferReader(data),
            arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            arrow_json.ParseOptions(explicit_schema=columns, unexpected_field_behavior="error"),
        )
        table.validate(full=True)
    except pa.ArrowException:
        return None
    if table.num_rows != len(lines) or len(table["headers"].combine_chunks().flatten()):
        return None
    return table.select(list(types)).cast(
        pa.schema({**types, "key": pa.binary(), "value": pa.binary()})
    )


def _serialized(record: InputRecord, adapters: Iterable[Adapter], number: int) -> InputRecord:
    """Return a record with the bytes of its key and value."""
    try:
        key, value = (
            adapter.convert("", [], item)
            for adapter, item in zip(adapters, (record.key, record.value), strict=True)
        )
    except (TypeError, ValueError) as error:
        raise InvalidRecordError(
            f"Line {number} does not fit the serializers of the topic: {error}",
            todo="If the file was exported with --raw, use --raw.",
        ) from None
    return record._replace(key=key, value=value)


def _stored(table: Any, serializers: FileSerializers, before: int) -> Any:
    """Return rows in which text of keys and values became the bytes that serializers write.

    Args:
        table: The rows.
        serializers: Those of keys and values.
        before: How many rows of the file precede these, for the error.
    """
    for field, name, adapter in zip(SERIALIZED, *serializers, strict=True):
        index = table.schema.get_field_index(field)
        if name in NOT_TEXT or index < 0 or not _TEXT.search(str(table.schema.types[index])):
            continue
        parse, items = FROM_TEXT[name], list[Any]()
        for row, item in enumerate(table.column(index).to_pylist(), before + 1):
            try:
                text = item.decode() if isinstance(item, bytes) else item
                parsed = None if text is None else parse(text)
                # JSON stays as it is written.
                items.append(item if name == "json" else adapter.convert("", [], parsed))
            except (TypeError, ValueError) as error:
                raise InvalidRecordError(
                    f"Row {row} has a {field} that is not of the type {name!r}: {error}",
                    todo="If the file was exported with --raw, use --raw.",
                ) from None
        table = table.set_column(index, field, pa.array(items, pa.binary()))
    return table


def _check_columns(names: list[str]) -> None:
    unknown = [name for name in names if name not in FIELDS | IGNORED]
    if unknown or "value" not in names:
        others = ", ".join(sorted(FIELDS - {"value"}))
        raise InvalidRecordError(
            f"The file has a column {unknown[0]!r}" if unknown else "The file has no column value",
            todo=f"The columns are value and, if needed, {others}.  For a file of other columns "
            "create the topic with `embedlog topics create TOPIC --schema-from FILE`.",
        )


def _chunk(table: Any, done: int) -> Chunk:
    names = [name for name in table.column_names if name != "partition"]
    return Chunk(table.select(names), _partitions(table), done)


def _partitions(table: Any) -> Any:
    if "partition" not in table.column_names:
        return None
    column = table["partition"]
    if column.null_count == len(column):
        return None
    return column.cast(pa.int64()).fill_null(_NONE).to_numpy()
