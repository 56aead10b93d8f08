"""The topic ``__audit``: what producers, consumer groups and others counted, as rows of columns.

A *report* says what one client counted in one partition, in a range of offsets: a row per
minute of record time.  It is created at the first report, with settings of its own.

The rows of a report are in one append, so a report is there or not.  A report whose append
seemed to fail may be appended twice, and is read once, by its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final, NamedTuple

from embedlog.batch import MINUTE_MS
from embedlog.batch.arrays import numbers, repeated
from embedlog.batch.wire import timestamp_type
from embedlog.catalog import AUDIT
from embedlog.config import TopicConfig
from embedlog.errors import TopicAlreadyExistsError, UnknownTopicOrPartitionError
from embedlog.lazy import np, pa
from embedlog.listeners import COPY, GROUP, MIRROR, PIPELINE, PRODUCER
from embedlog.partition import PartitionLog
from embedlog.root.root import Root
from embedlog.schemas.reading import TypedReader
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import first_version
from embedlog.schemas.typed_batch import encode_typed

TIERS = (PRODUCER, COPY, GROUP, PIPELINE, MIRROR)
"""The tiers that report; the log itself is counted when it is asked for."""

START, END = "start", "end"
COUNT, SKIP, RETURN = "count", "skip", "return"
"""Kinds of reports: a client begins, and a producer was closed; records were written, or read
and committed; a reader moved over offsets without reading them; records were read and given back
uncommitted."""

SETTINGS: Final[Mapping[str, object]] = {
    "segment.bytes": 4 << 20,
    "retention.ms": 30 * 86_400_000,
    "retention.bytes": 256 << 20,
}
"""Settings of the new topic; they can be altered like those of any other."""

_LOCK_SECONDS = 1.0
_BATCH_ROWS = 20_000
"""Rows per batch, so that no batch is larger than ``max.message.bytes``."""


class ClientProcess(NamedTuple):
    """Who counted: a client, and the process that it was in."""

    tier: str
    name: str
    """The name of the producer, or the group."""
    client: str
    """The ``client_id``."""
    host: str
    process: int


class Report(NamedTuple):
    """What a client counted in a partition."""

    client: ClientProcess
    kind: str
    topic: str
    topic_id: int
    partition: int
    first_offset: int
    next_offset: int
    minutes: Mapping[int, Sequence[int]]
    """Records and bytes by the minute of their timestamps, since 1970."""
    producer_id: int = -1
    producer_epoch: int = -1
    number: int = 0
    """Tells reports apart; the reporter sets it."""


_TEXTS = ("tier", "kind", "name", "client", "host", "audited_topic")
_INTS = ("process", "topic_id", "audited_partition", "first_offset", "next_offset", "producer_id")
_NUMBERS = (*_INTS, "producer_epoch", "report", "records", "bytes")


@cache
def columns() -> Any:
    """Return the columns of the topic, as an Arrow schema."""
    fields = [pa.field(name, pa.string(), nullable=False) for name in _TEXTS]
    fields += [pa.field(name, pa.int64(), nullable=False) for name in _NUMBERS]
    return pa.schema([*fields, pa.field("minute", timestamp_type(), nullable=False)])


# Writing


def append(root: Root, reports: Sequence[Report]) -> None:
    """Append reports; creates the topic if necessary.

    Raises:
        EmbedlogError: They could not be appended; nothing was, unless it is a `DurabilityError`.
    """
    log = _audit_log(root)
    schema = log.schema
    assert schema is not None
    now_ms = root.clock()
    stored = segment_schema(schema)
    batches = []
    for rows in _chunks(reports, now_ms):
        texts, ints, minutes = rows
        count = len(minutes)
        arrays = [repeated(now_ms, timestamp_type(), count)]
        arrays += [_text_column(column) for column in texts]
        arrays += [numbers(np.array(column, np.int64), pa.int64()) for column in ints]
        arrays.append(numbers(np.array(minutes, np.int64) * MINUTE_MS, timestamp_type()))
        record_batch = pa.RecordBatch.from_arrays(arrays, schema=stored)
        batches.append(encode_typed(record_batch, schema, "lz4", (now_ms, now_ms)))
    log.append(batches, timeout=_LOCK_SECONDS)


def _audit_log(root: Root) -> PartitionLog:
    try:
        log = root.partition(AUDIT, 0)
    except UnknownTopicOrPartitionError:
        with suppress(TopicAlreadyExistsError):
            schema = first_version(columns(), None, None)
            root.create_topic(AUDIT, 1, TopicConfig.parse(SETTINGS), schema)
        log = root.partition(AUDIT, 0)
    log.refresh()
    return log


Rows = tuple[list[list[str]], list[list[int]], list[int]]
"""Columns of text, of numbers, and the minutes."""


def _chunks(reports: Iterable[Report], now_ms: int) -> Iterator[Rows]:
    """Yield the rows of reports, as columns."""
    texts: list[list[str]] = [[] for _ in _TEXTS]
    ints: list[list[int]] = [[] for _ in _NUMBERS]
    minutes: list[int] = []
    for report in reports:
        client = report.client
        # A report without a count has a row, too.
        counts = report.minutes or {now_ms // MINUTE_MS: (0, 0)}
        rows = len(counts)
        own = (client.tier, report.kind, client.name, client.client, client.host, report.topic)
        for text_column, text in zip(texts, own, strict=True):
            text_column += [text] * rows
        facts = (
            *(client.process, report.topic_id, report.partition, report.first_offset),
            *(report.next_offset, report.producer_id, report.producer_epoch, report.number),
        )
        for column, number in zip(ints, facts, strict=False):
            column += [number] * rows
        ints[-2] += [count[0] for count in counts.values()]
        ints[-1] += [count[1] for count in counts.values()]
        minutes += counts
        while len(minutes) >= _BATCH_ROWS:
            yield _first_rows(texts, ints, minutes)
    if minutes:
        yield texts, ints, minutes


def _first_rows(texts: list[list[str]], ints: list[list[int]], minutes: list[int]) -> Rows:
    first = [c[:_BATCH_ROWS] for c in texts], [c[:_BATCH_ROWS] for c in ints], minutes[:_BATCH_ROWS]
    columns: list[list[Any]] = [*texts, *ints, minutes]
    for column in columns:
        del column[:_BATCH_ROWS]
    return first


def _text_column(values: list[str]) -> Any:
    # `pyarrow.array` would import pandas, which takes longer than the whole report.
    encoded = [value.encode("utf-8", "replace") for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


# Reading


def read(root: Root, topic_id: int) -> list[Report]:
    """Return all reports about a topic, in the order in which they were appended.

    Raises:
        CorruptBatchError: A batch of the topic is damaged.
    """
    try:
        log = root.partition(AUDIT, 0)
    except UnknownTopicOrPartitionError:
        return []
    log.refresh()
    assert log.schema is not None
    reader, typed = log.reader(log.start_offset()), TypedReader(log.schema)
    reports: dict[int, Report] = {}
    while batches := reader.read():
        for batch in batches:
            if batch.count:
                _add_rows(reports, typed.columns(batch, columns().names), topic_id)
    return list(reports.values())


def _add_rows(reports: dict[int, Report], stored: dict[str, Any], topic_id: int) -> None:
    ids = np.frombuffer(stored["topic_id"].buffers()[1], np.int64)[stored["topic_id"].offset :]
    rows = (ids[: len(stored["topic_id"])] == topic_id).nonzero()[0]
    if not len(rows):
        return
    chosen = numbers(rows, pa.int64())
    texts = [stored[name].take(chosen).to_pylist() for name in _TEXTS]
    ints = [stored[name].take(chosen).to_pylist() for name in _NUMBERS]
    minutes = stored["minute"].take(chosen).view(pa.int64()).to_pylist()
    for tier, kind, name, client, host, topic, *facts in zip(*texts, *ints, minutes, strict=True):
        process, _, partition, first, stop, producer, epoch, number, records, size, minute = facts
        report = reports.get(number)
        if report is None:
            who = ClientProcess(tier, name, client, host, process)
            report = reports[number] = Report(
                *(who, kind, topic, topic_id, partition, first, stop, {}, producer, epoch, number)
            )
        if records:
            # Not added up: a report that was appended twice counts once.
            report.minutes[minute // MINUTE_MS] = (records, size)  # type: ignore[index]
