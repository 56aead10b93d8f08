"""The log cleaner: keeps the last record of each key of one partition, in passes.

A pass reads the keys of the dirty part into the offset map, until the map is full or the
part ends.  Then it rewrites the log from its start offset to the end of the map, segment
by segment, and drops every record that a later one of the same key replaces.  It works
from low offsets to high ones, and swaps each group of segments in before it begins the
next: so a tombstone is only removed once everything that it deletes was removed.

`clean_round` cleans all partitions that are due, even if some of them fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any

import numpy as np

from embedlog.batch import CONTROL, Batch
from embedlog.catalog import SegmentInfo
from embedlog.compaction.cleanable import CleanableRange, inspect, select_due
from embedlog.compaction.key_hash import BoolArray
from embedlog.compaction.offset_map import OffsetMap
from embedlog.compaction.rewriter import UNSTAMPED, BatchKind, Rewriter
from embedlog.compaction.scanner import ScannedBatches, SegmentScanner, tombstone_rows
from embedlog.config import LONG_MAX, MaintenanceConfig
from embedlog.errors import ClosedError, DiskFullError, EmbedlogError, FencedError, StorageError
from embedlog.files.throttle import Throttle
from embedlog.partition import PartitionLog, flush, key_index, replace, unnamed_files
from embedlog.partition.replace import Fence, Replacement, no_fence
from embedlog.schemas.statistics import text_columns_of

_logger = logging.getLogger("embedlog.compaction")

Progress = Callable[[int, int], None]

_MAX_INPUT_SEGMENTS = 8
"""Swap a group in once this many times ``segment.bytes`` were read: each swap frees disk space."""
_MOSTLY_KEPT = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanOptions:
    """How to clean, and with whose permission."""

    settings: MaintenanceConfig = field(default_factory=MaintenanceConfig)
    """Memory and bytes per second."""
    fence: Fence = no_fence
    """Called before each chunk of bytes, and under the partition's lock right before each
    commit; its exception ends the compaction."""
    progress: Progress | None = None
    """Called with the bytes that were read, and about how many there are."""
    throttle: Throttle | None = None
    """The limit of bytes per second, if several cleaners share it."""


DEFAULT_OPTIONS = CleanOptions()


@dataclass(slots=True)
class CleanResult:
    """What a compaction did to one partition."""

    topic: str
    partition: int
    first_dirty: int = 0
    """The first dirty offset after the compaction."""
    passes: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    records_read: int = 0
    """Records in the segments that were rewritten."""
    records_kept: int = 0
    keyless: int = 0
    """Records removed because they had no key."""
    tombstones: int = 0
    """Tombstones removed because their delete horizon had passed."""
    segments_before: int = 0
    segments_after: int = 0
    why: str = ""
    """In words: what was done, or why nothing was done."""
    error: EmbedlogError | None = field(default=None, repr=False)
    """The error that ended it; other partitions were cleaned nevertheless."""


def clean_round(
    logs: Iterable[PartitionLog],
    now_ms: int,
    failed: dict[PartitionLog, EmbedlogError],
    options: CleanOptions = DEFAULT_OPTIONS,
) -> list[CleanResult]:
    """Clean the partitions that are due, the most urgent first.

    Args:
        logs: All partitions; those of topics that are not compacted are skipped.
        now_ms: The time.
        failed: Partitions to skip, with the error of their last compaction.  Those that
            fail in this round are added; the caller removes them.
        options: How to clean.  After a `FencedError` the round continues with the next
            partition, which calls the fence again.

    Raises:
        ClosedError: The log was closed meanwhile.
    """
    results = []
    logs = [log for log in logs if log not in failed]
    for log in logs:
        _roll_idle(log, now_ms, failed)
    for cleanable in select_due(logs, now_ms, failed):
        result = try_clean(cleanable.log, now_ms, options)
        if result.error is not None and not isinstance(result.error, FencedError):
            failed[cleanable.log] = result.error
        results.append(result)
    return results


def _roll_idle(log: PartitionLog, now_ms: int, failed: dict[PartitionLog, EmbedlogError]) -> None:
    """Roll an expired active segment that gets no appends, so that it can be compacted."""
    try:
        log.refresh()
        tail = log.tail()
        expired = now_ms - tail.created_ms > log.rules.max_segment_ms
        if log.config.compacts and not tail.empty and expired:
            log.roll()
    except ClosedError:
        raise
    except EmbedlogError as error:
        failed[log] = error


def try_clean(
    log: PartitionLog, now_ms: int, options: CleanOptions = DEFAULT_OPTIONS, *, roll: bool = False
) -> CleanResult:
    """Clean one partition as `clean` does, but return errors in the result.

    With ``roll``, roll the active segment first, so that its records are cleaned too.

    Raises:
        ClosedError: The log was closed meanwhile.
    """
    reserve = log.context.reserve
    try:
        if roll:
            reserve.used_by(log.roll)
        result = reserve.used_by(lambda: clean(log, now_ms, options))
        _logger.log(
            logging.INFO if result.passes else logging.DEBUG,
            *("%s-%d: %s", log.topic, log.partition, result.why),
        )
        return result
    except ClosedError:
        raise
    except EmbedlogError as error:
        why = f"not compacted: {error.what}"
        return CleanResult(log.topic, log.partition, why=why, error=error)


def clean(log: PartitionLog, now_ms: int, options: CleanOptions = DEFAULT_OPTIONS) -> CleanResult:
    """Compact a partition as far as possible now, whether or not it is due.

    Makes as many passes as the size of the offset map requires.  Readers and writers continue
    meanwhile; each group of segments is swapped in as soon as it is done.

    Args:
        log: A partition of a compacted topic.
        now_ms: The time, for lags and tombstones.
        options: How to clean.

    Raises:
        FencedError: Raised by the fence, or because another process changed the partition
            or compacts it.
        CorruptionError: A batch is damaged; what was swapped in before stays.
        DiskFullError, StorageError: The same.
    """
    cleaner = Cleaner(log, now_ms, options)
    with replace.rewrite_lock(log) as free:
        if not free:
            raise FencedError(
                "Another process is compacting the partition",
                topic=log.topic,
                partition=log.partition,
                todo="Nothing was changed; try again later.",
            )
        cleaner.run_passes()
    return cleaner.result


class Cleaner:
    """Cleans one partition; its caller holds `replace.rewrite_lock`."""

    def __init__(self, log: PartitionLog, now_ms: int, options: CleanOptions) -> None:
        self.log, self.now_ms, self.options = log, now_ms, options
        self.throttle = options.throttle or Throttle(
            options.settings.log_cleaner_io_max_bytes_per_second
        )
        self.result = CleanResult(log.topic, log.partition)
        self.trust_free_space = True
        """Whether to plan by the free space that the file system reports: False once the disk
        was full although it should not have been."""

    def run_passes(self) -> None:
        """Clean until nothing cleanable is left, or until the disk is too full."""
        result = self.result
        while True:
            self.guard()
            cleanable = inspect(self.log, self.now_ms)
            result.first_dirty = cleanable.first_dirty
            if not cleanable.segments or (result.passes and not cleanable.cleanable_bytes):
                result.why = _summarize(result)
                return
            # After the inspection: the segments that it returned must be on the disk.
            flush.flush_up_to(self.log, cleanable.first_uncleanable)
            clean_pass = CleanPass(self, cleanable)
            try:
                clean_pass.read_keys()
                clean_pass.rewrite()
            except StorageError as error:
                if not error.missing or not _segments_changed(cleanable):
                    raise
                continue
            result.passes += 1
            if clean_pass.left_out:
                if not self.trust_free_space or clean_pass.trust_free_space:
                    result.why = _explain_left_out(clean_pass.left_out, self.log)
                    return
                # The disk was fuller than reported.  Retry with groups that surely fit.
                self.trust_free_space = False
                unnamed_files.sweep_soon(self.log)

    def guard(self) -> None:
        """Raise `FencedError` if the fence does, or if the topic is no longer compacted."""
        self.options.fence()
        self.log.refresh()
        # D27: turning compaction off, or closing the log, ends a compaction that is under way.
        if not self.log.config.compacts:
            what = "The topic is no longer compacted"
            raise FencedError(what, topic=self.log.topic, partition=self.log.partition)


def _segments_changed(cleanable: CleanableRange) -> bool:
    """Whether retention has deleted segments since the inspection, so that it must be repeated."""
    cleanable.log.refresh()
    segments = cleanable.log.segments
    return any(segments.get(segment.base_offset) != segment for segment in cleanable.segments)


def _explain_left_out(left_out: Sequence[SegmentInfo], log: PartitionLog) -> str:
    bases = ", ".join(str(segment.base_offset) for segment in left_out[:5])
    more = ", …" if len(left_out) > 5 else ""
    return (
        f"the disk is too full: {len(left_out)} segments (at {bases}{more}) were not compacted, "
        f"the largest of {max(segment.size for segment in left_out):,} bytes, "
        f"with {log.context.files.free_bytes():,} bytes free; the next round tries again"
    )


def _summarize(result: CleanResult) -> str:
    if not result.segments_before:
        return "nothing to do: everything that can be compacted is compacted"
    return (
        f"{result.records_read - result.records_kept:,} of {result.records_read:,} records "
        f"removed, {result.bytes_before:,} bytes became {result.bytes_after:,}, "
        f"segments: {result.segments_before} before, {result.segments_after} after"
    )


class CleanPass:
    """One pass over a partition: `read_keys`, then `rewrite`."""

    def __init__(self, cleaner: Cleaner, cleanable: CleanableRange) -> None:
        self._cleaner, self._cleanable, self._log = cleaner, cleanable, cleaner.log
        settings = cleaner.options.settings
        chunk_bytes = settings.log_cleaner_io_buffer_size
        self._scanner = SegmentScanner(self._log, chunk_bytes, self._before_chunk)
        # The cleanable part is read twice.
        self._read_bytes = 0
        self._total_bytes = cleanable.clean_bytes + 2 * cleanable.cleanable_bytes
        self._map = OffsetMap(
            settings.log_cleaner_dedupe_buffer_size,
            settings.log_cleaner_io_buffer_load_factor,
            cleanable.first_dirty,
            cleanable.first_uncleanable,
        )
        self.end = cleanable.first_uncleanable
        """The pass cleans the records below this offset and keeps all others."""
        self.left_out: list[SegmentInfo] = []
        """Segments that the disk had no room to rewrite.  From the first one on, no tombstone
        is removed, since these may hold what it deletes; and the checkpoint does not move, so
        that they are tried again."""
        self.trust_free_space = cleaner.trust_free_space
        """As in the cleaner; False once the disk was full during this pass."""
        self._group: SegmentGroup | None = None
        self._room = 0
        """The largest segment that the current group may become."""
        self._checkpointed = False
        self._last_batch_of_producer = {
            producer_id: state.batches[-1].base_offset
            for producer_id, state in self._log.remembered_producers().items()
            if state.batches
        }

    def _before_chunk(self, size: int) -> None:
        """Check, throttle and report a chunk that was read."""
        self._cleaner.guard()
        self._cleaner.throttle.spend(size, self._cleaner.guard)
        self._read_bytes += size
        progress, total = self._cleaner.options.progress, self._total_bytes
        if progress is not None:
            progress(min(self._read_bytes, total), total)

    def read_keys(self) -> None:
        """Fill the map; the pass ends at the first key that does not fit."""
        first_dirty = self._cleanable.first_dirty
        for segment in self._cleanable.segments:
            if segment.next_offset is None or segment.next_offset <= first_dirty:
                continue
            for chunk in self._scanner.chunks(segment, first_dirty):
                if not self._add_keys(chunk, segment.next_offset):
                    return

    def _add_keys(self, chunk: ScannedBatches, stop: int) -> bool:
        # A function: in a loop the arrays of one chunk would take memory beside those of the next.
        high, low, offsets = chunk.keys(self._cleanable.first_dirty, stop)
        fitting = self._map.add(high, low, offsets)
        if fitting < len(offsets):
            self.end = int(offsets[fitting])
            return False
        return True

    def rewrite(self) -> None:
        """Rewrite the log up to the end of the pass, group by group."""
        sources = [
            segment for segment in self._cleanable.segments if segment.base_offset < self.end
        ]
        limit = self._log.config.segment_bytes
        try:
            for segment, following in zip_longest(sources, sources[1:]):
                kept_bytes = self._estimate_kept_bytes(segment)
                if self._group and not self._group.fits(segment, kept_bytes, self._room):
                    self._close_group()
                # Rewritten, a segment may grow by its offsets.
                max_size = kept_bytes + kept_bytes // 8
                if self._group is None:
                    reserve = self._log.context.reserve
                    self._room = min(limit, reserve.room(max_size, trusting=self.trust_free_space))
                mergeable = self._group is not None or (
                    following is not None and segment.size + following.size <= limit
                )
                no_room = self._group is None and max_size > self._room < limit
                if no_room:
                    self.left_out.append(segment)
                # After a segment was left out, all this is done again: not for a small gain.
                small_gain = self.left_out and kept_bytes > _MOSTLY_KEPT * segment.size
                if no_room or small_gain or self._is_clean(segment, mergeable):
                    self._close_group()
                else:
                    self._try(partial(self._rewrite_segment, segment))
            self._close_group(None if self.left_out else self.end)
            if not self.left_out and not self._checkpointed:
                last, epoch = sources[-1:], self._cleanable.leader_epoch
                fence = self._cleaner.guard
                replace.note_cleaned(self._log, self.end, last, fence=fence, epoch=epoch)
        finally:
            if self._group is not None:
                self._group.new.abandon()

    def _estimate_kept_bytes(self, segment: SegmentInfo) -> int:
        """About how much of a segment is kept: its size, unless the map has notes on it."""
        assert segment.next_offset is not None
        replaced = self._map.replaced(segment.base_offset, segment.next_offset)
        return segment.size if replaced is None else int(segment.size * (1 - replaced.mean()))

    def _is_clean(self, segment: SegmentInfo, mergeable: bool) -> bool:
        """Whether a segment stays as it is: nothing to drop, and too large to merge."""
        clean = (segment.next_offset or 0) <= min(self._cleanable.first_dirty, self.end)
        if not clean or (mergeable and segment.size <= self._log.config.segment_bytes // 2):
            return False
        if not self._log.open_segment(segment).has_offsets:
            return False
        for chunk in self._scanner.chunks(segment):
            kept = self._kept_rows(chunk)
            if not kept.all() or any(self._needs_tombstone_work(batch) for batch in chunk.batches):
                return False
        return True

    def _needs_tombstone_work(self, batch: Batch) -> bool:
        """Whether a batch has tombstones to remove, or without a delete horizon."""
        if not batch.may_have_tombstones or batch.flags & CONTROL:
            return False
        return batch.delete_horizon is None or self._has_passed(batch.delete_horizon)

    def _has_passed(self, delete_horizon: int) -> bool:
        return delete_horizon <= self._cleaner.now_ms and not self.left_out

    def _kept_rows(self, chunk: ScannedBatches) -> BoolArray:
        """Return a mask of the rows that are the last of their key, tombstones included."""
        kept = chunk.last_rows(self._map)
        if chunk.valid is not None:
            kept &= chunk.valid
        if len(chunk.offsets) and chunk.offsets[-1] >= self.end:
            kept |= chunk.offsets >= self.end
        records = chunk.data_rows()
        return kept if records is None else kept | ~records

    def _try(self, step: Callable[[], None]) -> None:
        """Run a step of a group; if the disk is full, leave the segments of the group out."""
        try:
            step()
        except DiskFullError:
            group, self._group = self._group, None
            if group is None:
                raise
            group.new.abandon()
            self.left_out += group.sources
            self.trust_free_space = False
            self._log.context.reserve.mark_full()

    def _close_group(self, cleaned: int | None = None) -> None:
        """Swap the group in, if there is one, and set the checkpoint to ``cleaned`` unless None."""
        if self._group is not None:
            self._try(partial(self._swap, self._group, cleaned))

    def _swap(self, group: SegmentGroup, cleaned: int | None) -> None:
        end = group.sources[-1].next_offset
        assert end is not None
        group.rewriter.finish(end)
        guard = self._cleaner.guard
        self._cleaner.throttle.spend(group.new.size, guard)
        epoch = self._cleanable.leader_epoch
        keys = group.rewriter.keys
        group.new.swap(group.sources, fence=guard, cleaned=cleaned, epoch=epoch, keys=keys)
        group.count(self._cleaner.result)
        self._group, self._checkpointed = None, cleaned is not None

    def _rewrite_segment(self, segment: SegmentInfo) -> None:
        if self._group is None:
            self._group = SegmentGroup(self._log, segment)
        group = self._group
        group.sources.append(segment)
        for chunk in self._scanner.chunks(segment, whole=True):
            kept = self._kept_rows(chunk)
            group.rewriter.note_epoch(chunk.batches[0].leader_epoch)
            group.records_read += len(kept)
            if chunk.valid is not None:
                group.keyless += int(np.count_nonzero(~chunk.valid & ~kept))
            self._rewrite_chunk(group, chunk, kept)

    def _rewrite_chunk(self, group: SegmentGroup, chunk: ScannedBatches, kept: BoolArray) -> None:
        """Write the rows that are kept; batches of one kind and one horizon together."""

        def parts() -> Iterator[tuple[tuple[Any, ...], tuple[int, BoolArray]]]:
            counts = np.diff(np.append(0, np.cumsum(kept))[chunk.ends], prepend=0).tolist()
            for index, (batch, count) in enumerate(zip(chunk.batches, counts, strict=True)):
                exact = batch if self._is_last_of_producer(batch) else None
                if exact is None and not count:
                    continue
                rows = kept[chunk.start(index) : chunk.ends[index]]
                for part, horizon in self._split_by_horizon(group, chunk, index, rows):
                    yield (exact, BatchKind.of(batch), horizon, batch.has_headers), (index, part)

        for (exact, kind, horizon, _), together in groupby(parts(), itemgetter(0)):
            table = chunk.table([part for _, part in together])
            group.records_kept += table.num_rows
            if exact is None:
                group.rewriter.add(table, kind, horizon)
            else:
                group.rewriter.add_exact(table, kind, horizon, exact)

    def _is_last_of_producer(self, batch: Batch) -> bool:
        producer_id = batch.producer_id
        return (
            producer_id is not None
            and self._last_batch_of_producer.get(producer_id) == batch.base_offset
        )

    def _split_by_horizon(
        self, group: SegmentGroup, chunk: ScannedBatches, index: int, rows: BoolArray
    ) -> list[tuple[BoolArray, int | None]]:
        """Return the rows of a batch, with the delete horizon of the tombstones in them."""
        batch = chunk.batches[index]
        if not batch.may_have_tombstones or batch.flags & CONTROL:
            return [(rows, None)]
        tombstones = tombstone_rows(batch)
        cleaned = chunk.offsets[chunk.start(index) : chunk.ends[index]] < self.end
        horizon = batch.delete_horizon
        if horizon is not None and self._has_passed(horizon):
            # What they deleted was removed before them, in this pass or in an earlier one.
            removed = rows & tombstones & cleaned
            group.tombstones += int(np.count_nonzero(removed))
            rows = rows & ~removed
        if horizon is None:
            horizon = min(self._cleaner.now_ms + self._log.config.delete_retention_ms, LONG_MAX)
        if cleaned.all() or self._is_last_of_producer(batch):
            return [(rows, horizon if (rows & tombstones & cleaned).any() else None)]
        # Nothing was cleaned past the end of the pass: the time of those tombstones begins later.
        below, above = rows & cleaned, rows & ~cleaned
        later = UNSTAMPED if batch.delete_horizon is None else batch.delete_horizon
        return [
            (below, horizon if (below & tombstones).any() else None),
            (above, later if (above & tombstones).any() else None),
        ]


class SegmentGroup:
    """Segments that become one."""

    def __init__(self, log: PartitionLog, first: SegmentInfo) -> None:
        self.sources: list[SegmentInfo] = []
        self.new = Replacement(log, first.base_offset, first)
        self._max_span = log.config.segment_max_offset_span
        max_bytes = log.config.max_message_bytes
        schema = log.schema_of(self.new.info, offsets=True)
        statistics = text_columns_of(log.config)
        keys = key_index.SegmentKeys() if key_index.is_enabled(log.config) else None
        self.rewriter = Rewriter(self.new, first.base_offset, schema, max_bytes, statistics, keys)
        self.records_read = self.records_kept = self.keyless = self.tombstones = 0

    def fits(self, segment: SegmentInfo, kept_bytes: int, limit: int) -> bool:
        """Whether another segment, of which ``kept_bytes`` are kept, fits in."""
        span = (segment.next_offset or 0) - self.new.info.base_offset
        read = sum(source.size for source in self.sources)
        return (
            self.rewriter.size + kept_bytes <= limit
            and span <= self._max_span
            and read < _MAX_INPUT_SEGMENTS * limit
            and not segment.column_flags & ~self.new.info.column_flags
            and segment.schema_version == self.new.info.schema_version
        )

    def count(self, result: CleanResult) -> None:
        """Add the group, which was swapped in, to a result."""
        result.segments_before += len(self.sources)
        result.segments_after += 1
        result.bytes_before += sum(segment.size for segment in self.sources)
        result.bytes_after += self.new.info.size
        result.records_read += self.records_read
        result.records_kept += self.records_kept
        result.keyless += self.keyless
        result.tombstones += self.tombstones
