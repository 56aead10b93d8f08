"""Gathers the small batches of sealed segments into large ones.

Each batch has a head, and a read of a column a cost for each batch, so a segment of single
records takes ten times the space and many times the time of one of large batches.  Offsets,
order, timestamps and headers stay; the last batch of each producer stays as it is, with its
sequence numbers.  A segment is replaced by one swap, as by a compaction (`partition.replace`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pyarrow as pa

from embedlog import batch as batches
from embedlog.batch import INHERITED, Batch, BatchLimits, EncodedBatch
from embedlog.catalog import SegmentInfo
from embedlog.config import LONG_MAX, TopicConfig
from embedlog.errors import CorruptionError, FencedError
from embedlog.partition import PartitionLog, flush, replace, segment_statistics
from embedlog.partition.replace import Fence, Replacement, no_fence
from embedlog.schemas.statistics import pack, text_columns_of

_logger = logging.getLogger("embedlog.compaction")

_TYPED_MIN_ROWS = 1000
"""The default of ``rebatch.min.rows`` for a typed topic."""
_MAX_ROWS = 1 << 16
_ALL = 1 << 62

_examined: WeakKeyDictionary[PartitionLog, set[int]] = WeakKeyDictionary()
"""The ids of the sealed segments of which housekeeping knows that their batches are large."""


_with_statistics: WeakKeyDictionary[PartitionLog, set[int]] = WeakKeyDictionary()
"""The ids of the sealed segments that have statistics, or can have none."""


class RebatchResult(NamedTuple):
    """What was gathered in one partition."""

    topic: str
    partition: int
    segments: int = 0
    """How many segments were replaced."""
    batches_before: int = 0
    batches_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def min_rows(config: TopicConfig, typed: bool) -> int:
    """Return ``rebatch.min.rows`` of a topic; 0 if its batches are never gathered."""
    rows = config.rebatch_min_rows
    return (_TYPED_MIN_ROWS if typed else 0) if rows < 0 else rows


def rebatch_round(logs: Iterable[PartitionLog], fence: Fence = no_fence) -> list[RebatchResult]:
    """Gather the small batches of partitions whose topics ask for it; return what was done.

    A segment that cannot be rewritten now, such as one that a lease holds, is left for the next
    round.

    Raises:
        FencedError: Raised by the fence.
        EmbedlogError: A partition cannot be rewritten; those after it were not done.
    """
    results = []
    for log in logs:
        rows = min_rows(log.config, log.schema is not None)
        if not rows or log.config.compacts:
            continue  # Compaction writes large batches itself.
        try:
            result = rebatch(log, rows, fence)
        except FencedError as error:
            fence()
            _logger.info("Cannot gather batches of %s-%d: %s", log.topic, log.partition, error)
            continue
        if result.segments:
            results.append(result)
    return results


def rebatch(log: PartitionLog, rows: int, fence: Fence = no_fence) -> RebatchResult:
    """Gather the batches of all sealed segments that have fewer rows each, on average.

    Args:
        log: The partition.
        rows: The average from which on a segment stays as it is.
        fence: Called before each segment is read, and right before it is swapped in.

    Raises:
        FencedError: Raised by the fence, or because another process rewrites the partition.
        StorageError: Nothing of the current segment was changed.
    """
    log.refresh()
    examined = _examined.setdefault(log, set())
    segments = [info for info in log.segments.values() if info.sealed]
    examined &= {info.id for info in segments}
    if rows < LONG_MAX:
        segments = [info for info in segments if info.id not in examined]
    result = RebatchResult(log.topic, log.partition)
    if not segments:
        return result
    with replace.rewrite_lock(log) as free:
        if not free:
            raise FencedError(
                "Another process is rewriting the partition",
                topic=log.topic,
                partition=log.partition,
                todo="Nothing was changed; try again later.",
            )
        for info in segments:
            fence()
            new = _rebatch_segment(log, info, rows, fence)
            if new is None:
                examined.add(info.id)
            else:
                result = result._replace(
                    segments=result.segments + 1,
                    batches_before=result.batches_before + new.batches_before,
                    batches_after=result.batches_after + new.batches_after,
                    bytes_before=result.bytes_before + new.bytes_before,
                    bytes_after=result.bytes_after + new.bytes_after,
                )
    return result


def add_statistics(log: PartitionLog, fence: Fence = no_fence) -> int:
    """Compute the statistics of sealed segments of a typed topic that have none.

    Returns the number of segments that got some.

    Raises:
        FencedError: Raised by the fence.
    """
    if log.schema is None or text_columns_of(log.config) is None:
        return 0
    log.refresh()
    added, known = 0, _with_statistics.setdefault(log, set())
    known &= {info.id for info in log.segments.values()}
    for info in list(log.segments.values()):
        if not info.sealed or not info.schema_version or info.id in known:
            continue
        known.add(info.id)
        if segment_statistics.statistics_of(log, info) is None:
            fence()
            added += segment_statistics.add(log, info)
    return added


def _rebatch_segment(
    log: PartitionLog, info: SegmentInfo, rows: int, fence: Fence
) -> RebatchResult | None:
    """Replace a segment by one with larger batches; None if it stays as it is."""
    assert info.next_offset is not None
    # Gaps are those of a compaction, which writes large batches, or of the source of a copy.
    if not info.dense:
        return None
    file = log.open_segment(info)
    try:
        stored = file.mapped(file.start, info.end_position, _ALL)
    except CorruptionError:
        return None  # `verify` reports it.
    count = sum(batch.count for batch in stored)
    if len(stored) < 2 or count >= rows * len(stored):
        return None
    if not stored or stored[-1].next_offset != info.next_offset or stored[0].has_offsets:
        return None
    limits = BatchLimits(log.config.max_message_bytes, log.config.segment_bytes)
    per_batch = _rows_per_batch(stored, limits)
    last_of_producers = {
        state.batches[-1].base_offset
        for state in log.remembered_producers().values()
        if state.batches
    }
    runs = list(_runs(stored, per_batch, last_of_producers))
    if len(runs) >= len(stored):
        return None
    flush.flush_up_to(log, info.next_offset)
    new = Replacement(log, info.base_offset, info, offsets=False)
    written = 0
    try:
        for run in runs:
            fence()
            base = run[0].base_offset
            for encoded in _gathered(log, info, run, limits):
                new.write(encoded, base, base + encoded.count, run[0].leader_epoch)
                base += encoded.count
                written += 1
        epoch = log.tail().leader_epoch
        new.swap([info], fence=fence, epoch=epoch)
    finally:
        new.abandon()
    sizes = info.size, new.info.size
    return RebatchResult(log.topic, log.partition, 1, len(stored), written, *sizes)


def _rows_per_batch(stored: list[Batch], limits: BatchLimits) -> int:
    """Return how many rows a batch may have that is within the limits of the topic, about."""
    heads = 512 * len(stored)
    size = max(sum(batch.size for batch in stored) - heads, 1)
    count = max(sum(batch.count for batch in stored), 1)
    room = min(limits.message, limits.segment) * 7 // 8
    return max(min(room * count // size, _MAX_ROWS), 1)


def _runs(stored: list[Batch], rows: int, keep: set[int]) -> Iterator[list[Batch]]:
    """Yield consecutive batches that may become one; a batch that must stay comes alone."""
    run: list[Batch] = []
    count = 0
    for batch in stored:
        alone = _stays(batch, keep)
        fits = run and not alone and count + batch.count <= rows and _kind(run[0]) == _kind(batch)
        if run and (not fits or _stays(run[0], keep)):
            yield run
            run, count = [], 0
        run.append(batch)
        count += batch.count
    if run:
        yield run


def _stays(batch: Batch, keep: set[int]) -> bool:
    return batch.producer_id is not None and batch.base_offset in keep


def _kind(batch: Batch) -> tuple[Any, ...]:
    """Return the properties that batches must share to be merged."""
    stamped = batch.max_timestamp if batch.is_log_append_time else None
    flags = batch.flags & INHERITED
    return batch.leader_epoch, flags, batch.codec, batch.delete_horizon, stamped


def _gathered(
    log: PartitionLog, info: SegmentInfo, run: list[Batch], limits: BatchLimits
) -> Iterator[EncodedBatch]:
    """Yield the records of batches as one batch, or as several within the limits."""
    first = run[0]
    schema = log.schema_of(info)
    parts = [batch.columns() for batch in run]
    table = pa.Table.from_batches(parts).combine_chunks()
    columns = pa.RecordBatch.from_arrays(
        [column.chunk(0) for column in table.columns], schema=schema
    )

    def encode(rows: Any) -> EncodedBatch:
        packed = pack(rows, text_columns_of(log.config)) if first.is_typed else b""
        encoded = batches.encode(rows, first.codec, statistics=packed)
        flags = encoded.flags | _kind(first)[1]
        encoded = encoded.changed(flags=flags, delete_horizon=first.delete_horizon)
        if first.is_log_append_time:
            time = first.max_timestamp
            encoded = encoded.changed(min_timestamp=time, max_timestamp=time)
        if len(run) == 1 and first.producer_id is not None and rows.num_rows == first.count:
            assert first.producer_epoch is not None
            assert first.base_sequence is not None
            encoded.set_producer(first.producer_id, first.producer_epoch, first.base_sequence)
        return encoded

    # A batch that comes alone stays as it is.
    return iter([encode(columns)]) if len(run) == 1 else limits.split(columns, encode)
