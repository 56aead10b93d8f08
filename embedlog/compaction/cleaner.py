"""The log cleaner: keeps the last record of each key of one partition, in passes (D7-D21).

A pass reads the keys of the dirty part into the offset map, until the map is full or the
part ends.  Then it goes from the log start offset to the end of the map, segment by
segment, and drops every record that a later one of the same key replaces.  It goes from
low offsets to high ones, and swaps each group of segments in before it begins the next:
so a tombstone is only removed once everything that it deletes is gone from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from embedlog.batch import CONTROL, Batch
from embedlog.catalog import SegmentInfo
from embedlog.compaction.cleanable import CleanableRange, inspect
from embedlog.compaction.key_hash import BoolArray, Int64Array
from embedlog.compaction.offset_map import OffsetMap
from embedlog.compaction.rewriter import UNSTAMPED, ProducerBatchRange, Rewriter, kind_of
from embedlog.compaction.scanner import ScannedBatches, SegmentScanner, data_rows, nulls, where_last
from embedlog.compaction.throttle import Throttle
from embedlog.config import LONG_MAX, MaintenanceConfig
from embedlog.errors import DiskFullError, EmbedlogError, FencedError, StorageError
from embedlog.partition import PartitionLog, flush, pending_deletes, replace
from embedlog.partition.replace import Fence, Replacement, no_fence

Progress = Callable[[int, int], None]

_MAX_INPUT_SEGMENTS = 8
"""Swap a group in once this many times ``segment.bytes`` were read: each swap frees disk space."""
_MOSTLY_KEPT = 0.9
_COUNTS = ("records_read", "records_kept", "keyless", "tombstones")


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
    """Records removed because they had no key (D9)."""
    tombstones: int = 0
    """Tombstones removed because their delete horizon had passed (D17)."""
    segments_before: int = 0
    segments_after: int = 0
    why: str = ""
    """In words: what was done, or why nothing was done."""
    error: EmbedlogError | None = field(default=None, repr=False)
    """The error that ended it; other partitions were cleaned nevertheless (D4)."""


class CleanPass:
    """One pass over a partition: `read_keys`, then `rewrite`."""

    def __init__(
        self,
        cleanable: CleanableRange,
        now_ms: int,
        settings: MaintenanceConfig,
        scanner: SegmentScanner,
        fence: Fence,
        throttle: Throttle,
        result: CleanResult,
        trust_free_space: bool,
    ) -> None:
        self._cleanable, self._log, self._now_ms = cleanable, cleanable.log, now_ms
        self._scanner, self._fence, self._throttle = scanner, fence, throttle
        self._result = result
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
        self.trust_free_space = trust_free_space
        """Whether to plan by the free space that the file system reports: False once the disk
        was full although it should not have been."""
        self._group: SegmentGroup | None = None
        self._room = 0
        """The largest segment that the current group may become."""
        self._checkpointed = False
        self._last_batch_of_producer = {
            producer_id: state.batches[-1].base_offset
            for producer_id, state in self._log.remembered_producers().items()
            if state.batches
        }

    # First: the last offset of each key

    def read_keys(self) -> None:
        """Fill the map; the pass ends at the first key that does not fit."""
        first_dirty = self._cleanable.first_dirty
        for segment in self._cleanable.segments:
            if segment.next_offset is None or segment.next_offset <= first_dirty:
                continue
            for chunk in self._scanner.chunks(segment, first_dirty):
                if not self._add_keys(chunk, first_dirty):
                    return

    def _add_keys(self, chunk: ScannedBatches, first_dirty: int) -> bool:
        rows = chunk.valid
        records = data_rows(chunk)
        if records is not None:
            rows = records if rows is None else rows & records
        if len(chunk.offsets) and chunk.offsets[0] < first_dirty:
            dirty = chunk.offsets >= first_dirty
            rows = dirty if rows is None else rows & dirty
        (high, low), offsets = chunk.hashes, chunk.offsets
        if rows is not None:
            high, low, offsets = high[rows], low[rows], offsets[rows]
        fitting = self._map.add(high, low, offsets)
        if fitting < len(offsets):
            self.end = int(offsets[fitting])
            return False
        return True

    # Then: drop what was replaced

    def rewrite(self) -> None:
        """Rewrite the log up to the end of the pass, group by group."""
        sources = [
            segment for segment in self._cleanable.segments if segment.base_offset < self.end
        ]
        limit = self._log.config.segment_bytes
        try:
            for index, segment in enumerate(sources):
                kept_bytes = self._estimate_kept_bytes(segment)
                if self._group is not None and not self._group.fits(
                    segment, kept_bytes, self._room
                ):
                    self._close_group()
                if self._group is None:
                    room = self._log.context.reserve.room(
                        _max_rewritten_size(kept_bytes), trusting=self.trust_free_space
                    )
                    self._room = min(limit, room)
                following = sources[index + 1] if index + 1 < len(sources) else None
                alone = following is None or segment.size + following.size > limit
                alone = alone and self._group is None
                if self._has_no_room(segment, kept_bytes) or self._is_clean(segment, alone, limit):
                    self._close_group()
                else:
                    self._try(partial(self._add_to_group, segment))
            self._finish(sources)
        finally:
            if self._group is not None:
                self._group.new.abandon()

    def _add_to_group(self, segment: SegmentInfo) -> None:
        if self._group is None:
            self._group = SegmentGroup(self._log, segment, self._result)
        self._rewrite_segment(self._group, segment)

    def _finish(self, sources: list[SegmentInfo]) -> None:
        if self._group is not None and not self.left_out:
            self._close_group(self.end)
        self._close_group()
        if not self.left_out and not self._checkpointed:
            last, epoch = sources[-1:], self._cleanable.leader_epoch
            replace.note_cleaned(self._log, self.end, last, fence=self._fence, epoch=epoch)

    def _has_no_room(self, segment: SegmentInfo, kept_bytes: int) -> bool:
        """Whether the disk is too full to rewrite a segment, or to do so for a small gain."""
        max_size = _max_rewritten_size(kept_bytes)
        if self._group is None and max_size > self._room < self._log.config.segment_bytes:
            self.left_out.append(segment)
            return True
        # After a segment was left out, all this is done again: not worth it for a small gain.
        return bool(self.left_out) and kept_bytes > _MOSTLY_KEPT * segment.size

    def _try(self, step: Callable[[], object]) -> bool:
        """Run a step of a group; if the disk is full, leave the segments of the group out."""
        try:
            step()
            return True
        except DiskFullError:
            group, self._group = self._group, None
            if group is None:
                raise
            group.new.abandon()
            group.restore_counts(self._result)
            self.left_out += group.sources
            self.trust_free_space = False
            self._log.context.reserve.mark_full()
            return False

    def _estimate_kept_bytes(self, segment: SegmentInfo) -> int:
        """About how much of a segment is kept: its size, unless the map has notes on it."""
        assert segment.next_offset is not None
        replaced = self._map.replaced(segment.base_offset, segment.next_offset)
        return segment.size if replaced is None else int(segment.size * (1 - replaced.mean()))

    def _close_group(self, cleaned: int | None = None) -> None:
        """Swap the group in, if there is one."""
        if self._group is not None and self._try(lambda: self._swap(cleaned)):
            self._group, self._checkpointed = None, cleaned is not None

    def _swap(self, cleaned: int | None) -> None:
        group, result = self._group, self._result
        assert group is not None
        end = group.sources[-1].next_offset
        assert end is not None
        group.rewriter.finish(end)
        self._throttle.spend(group.new.size, self._fence)
        group.new.swap(
            group.sources,
            fence=self._fence,
            cleaned=cleaned,
            epoch=self._cleanable.leader_epoch,
        )
        result.segments_before += len(group.sources)
        result.segments_after += 1
        result.bytes_before += sum(segment.size for segment in group.sources)
        result.bytes_after += group.new.info.size

    def _is_clean(self, segment: SegmentInfo, alone: bool, limit: int) -> bool:
        """Whether a segment stays as it is: nothing to drop, and too large to merge."""
        clean = (segment.next_offset or 0) <= min(self._cleanable.first_dirty, self.end)
        if not clean or not (alone or segment.size > limit // 2):
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
        if not batch.null_count("value") or batch.flags & CONTROL:
            return False
        return batch.delete_horizon is None or self._has_passed(batch.delete_horizon)

    def _has_passed(self, delete_horizon: int) -> bool:
        return delete_horizon <= self._now_ms and not self.left_out

    def _kept_rows(self, chunk: ScannedBatches) -> BoolArray:
        """Return which rows have no later one of their key, tombstones included (D8, D9)."""
        kept = where_last(chunk, self._map)
        if chunk.valid is not None:
            kept &= chunk.valid
        if len(chunk.offsets) and chunk.offsets[-1] >= self.end:
            kept |= chunk.offsets >= self.end
        records = data_rows(chunk)
        return kept if records is None else kept | ~records

    def _rewrite_segment(self, group: SegmentGroup, segment: SegmentInfo) -> None:
        group.sources.append(segment)
        for chunk in self._scanner.chunks(segment, whole=True):
            kept = self._kept_rows(chunk)
            group.rewriter.note_epoch(chunk.batches[0].leader_epoch)
            self._result.records_read += len(kept)
            if chunk.valid is not None:
                self._result.keyless += int(np.count_nonzero(~chunk.valid & ~kept))
            self._rewrite_chunk(group, chunk, kept)

    def _rewrite_chunk(self, group: SegmentGroup, chunk: ScannedBatches, kept: BoolArray) -> None:
        """Write the rows that are kept; batches of one kind and one horizon together."""
        ends = chunk.ends
        counts = np.diff(np.append(0, np.cumsum(kept))[ends], prepend=0)
        together: list[tuple[int, BoolArray]] = []
        state: tuple[Any, ...] | None = None
        for index in self._batches_to_write(chunk, counts):
            batch = chunk.batches[index]
            rows = kept[chunk.start(index) : ends[index]]
            for part, horizon in self._split_by_horizon(chunk, index, rows):
                exact = self._exact_range(batch)
                batch_state = kind_of(batch), horizon, batch.has_headers
                if exact is not None or batch_state != state:
                    self._write(group, chunk, together, state)
                    together, state = [], batch_state
                if exact is None:
                    together.append((index, part))
                else:
                    table = chunk.table([(index, part)])
                    group.rewriter.add_exact(table, batch_state[0], horizon, exact)
                    self._result.records_kept += table.num_rows
                    state = None
        self._write(group, chunk, together, state)

    def _batches_to_write(self, chunk: ScannedBatches, counts: Int64Array) -> list[int]:
        """Return the batches that keep rows, or are the last ones of a producer."""
        indices = set(np.flatnonzero(counts).tolist())
        if self._last_batch_of_producer:
            batches = enumerate(chunk.batches)
            indices.update(index for index, batch in batches if self._is_last_of_producer(batch))
        return sorted(indices)

    def _is_last_of_producer(self, batch: Batch) -> bool:
        producer_id = batch.producer_id
        return (
            producer_id is not None
            and self._last_batch_of_producer.get(producer_id) == batch.base_offset
        )

    def _exact_range(self, batch: Batch) -> ProducerBatchRange | None:
        if not self._is_last_of_producer(batch):
            return None
        assert batch.producer_id is not None
        assert batch.producer_epoch is not None
        assert batch.base_sequence is not None
        return ProducerBatchRange(
            batch.base_offset,
            batch.next_offset,
            batch.producer_id,
            batch.producer_epoch,
            batch.base_sequence,
        )

    def _split_by_horizon(
        self, chunk: ScannedBatches, index: int, rows: BoolArray
    ) -> list[tuple[BoolArray, int | None]]:
        """Return the rows of a batch, with the delete horizon of the tombstones in them (D17)."""
        batch = chunk.batches[index]
        if not batch.null_count("value") or batch.flags & CONTROL:
            return [(rows, None)]
        tombstones = nulls(batch.columns(("value",)).column(0))
        cleaned = chunk.offsets[chunk.start(index) : chunk.ends[index]] < self.end
        horizon = batch.delete_horizon
        if horizon is not None and self._has_passed(horizon):
            # What they deleted was removed before them, in this pass or in an earlier one.
            removed = rows & tombstones & cleaned
            self._result.tombstones += int(np.count_nonzero(removed))
            rows = rows & ~removed
        if horizon is None:
            horizon = min(self._now_ms + self._log.config.delete_retention_ms, LONG_MAX)
        if cleaned.all() or self._is_last_of_producer(batch):
            return [(rows, horizon if (rows & tombstones & cleaned).any() else None)]
        # Nothing was cleaned past the end of the pass: the time of those tombstones begins later.
        below, above = rows & cleaned, rows & ~cleaned
        below_horizon = horizon if (below & tombstones).any() else None
        later = UNSTAMPED if batch.delete_horizon is None else batch.delete_horizon
        above_horizon = later if (above & tombstones).any() else None
        return [(below, below_horizon), (above, above_horizon)]

    def _write(
        self,
        group: SegmentGroup,
        chunk: ScannedBatches,
        together: list[tuple[int, BoolArray]],
        state: tuple[Any, ...] | None,
    ) -> None:
        if together and state is not None:
            table = chunk.table(together)
            self._result.records_kept += table.num_rows
            group.rewriter.add(table, state[0], state[1])


class SegmentGroup:
    """Segments that become one (D12)."""

    def __init__(self, log: PartitionLog, first: SegmentInfo, result: CleanResult) -> None:
        self._counts_before = [getattr(result, name) for name in _COUNTS]
        self.sources: list[SegmentInfo] = []
        self.new = Replacement(log, first.base_offset, headers=first.headers)
        self._max_span = log.config.segment_max_offset_span
        max_bytes = log.config.max_message_bytes
        self.rewriter = Rewriter(self.new, first.base_offset, first.headers, max_bytes)

    def restore_counts(self, result: CleanResult) -> None:
        """Set the counts of the result back to what they were before the group."""
        for name, value in zip(_COUNTS, self._counts_before, strict=True):
            setattr(result, name, value)

    def fits(self, segment: SegmentInfo, kept_bytes: int, limit: int) -> bool:
        """Whether another segment, of which ``kept_bytes`` are kept, fits in."""
        span = (segment.next_offset or 0) - self.new.info.base_offset
        read = sum(source.size for source in self.sources)
        return (
            self.rewriter.size + kept_bytes <= limit
            and span <= self._max_span
            and read < _MAX_INPUT_SEGMENTS * limit
            and self.new.info.headers >= segment.headers
        )


def clean(
    log: PartitionLog,
    now_ms: int,
    *,
    settings: MaintenanceConfig | None = None,
    fence: Fence = no_fence,
    progress: Progress | None = None,
    throttle: Throttle | None = None,
) -> CleanResult:
    """Compact a partition as far as possible now, whether or not it is due.

    Makes as many passes as the size of the offset map requires.  Readers and writers go on
    meanwhile; each group of segments is swapped in as soon as it is done.

    Args:
        log: A partition of a compacted topic.
        now_ms: The time, for lags and tombstones.
        settings: Memory and bytes per second.
        fence: Called before each chunk of bytes, and under the partition's lock right
            before each commit; its exception ends the compaction.
        progress: Called with the bytes that were read, and about how many there are.
        throttle: To share a limit of bytes per second among several cleaners.

    Raises:
        FencedError: Raised by the fence, or because another process changed the partition
            or compacts it.
        CorruptionError: A batch is damaged; what was swapped in before stays.
        DiskFullError, StorageError: The same.
    """
    settings = settings or MaintenanceConfig()
    throttle = throttle or Throttle(settings.log_cleaner_io_max_bytes_per_second)
    result = CleanResult(log.topic, log.partition)
    guard = _guard(log, fence)
    trust_free_space = True
    with replace.rewrite_lock(log) as free:
        if not free:
            raise FencedError(
                "Another process is compacting the partition",
                topic=log.topic,
                partition=log.partition,
                todo="Nothing was changed; try again later.",
            )
        while True:
            guard()
            cleanable = inspect(log, now_ms)
            result.first_dirty = cleanable.first_dirty
            if not cleanable.segments or (result.passes and not cleanable.cleanable_bytes):
                break
            # After the inspection: what it found sealed must be on the disk.
            flush.flush_up_to(log, cleanable.first_uncleanable)
            reads = CleanProgress(guard, throttle, progress, cleanable)
            scanner = SegmentScanner(log, settings.log_cleaner_io_buffer_size, reads.spend)
            one_pass = CleanPass(
                cleanable, now_ms, settings, scanner, guard, throttle, result, trust_free_space
            )
            try:
                one_pass.read_keys()
                one_pass.rewrite()
            except StorageError as error:
                if not error.missing or not _segments_changed(cleanable):
                    raise
                continue
            result.passes += 1
            if one_pass.left_out:
                if trust_free_space and not one_pass.trust_free_space:
                    # The disk was fuller than reported.  Retry with groups that surely fit.
                    trust_free_space = False
                    pending_deletes.sweep_soon(log)
                    continue
                result.why = _explain_left_out(one_pass.left_out, log)
                return result
    result.why = _summarize(result)
    return result


class CleanProgress:
    """Checks, throttles and reports each chunk that is read."""

    def __init__(
        self,
        guard: Fence,
        throttle: Throttle,
        progress: Progress | None,
        cleanable: CleanableRange,
    ) -> None:
        self._guard, self._throttle, self._progress = guard, throttle, progress
        # The cleanable part is read twice.
        self._done, self._total = 0, cleanable.clean_bytes + 2 * cleanable.cleanable_bytes

    def spend(self, size: int) -> None:
        """Note bytes that were read; raises what the guard raises."""
        self._guard()
        self._throttle.spend(size, self._guard)
        self._done += size
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


def _segments_changed(cleanable: CleanableRange) -> bool:
    """Whether retention has deleted segments since the inspection, so that it must be repeated."""
    cleanable.log.refresh()
    segments = cleanable.log.segments
    return any(segments.get(segment.base_offset) != segment for segment in cleanable.segments)


def _guard(log: PartitionLog, fence: Fence) -> Fence:
    def guard() -> None:
        fence()
        log.refresh()
        # D27: turning compaction off, or closing the log, ends a compaction that is under way.
        if not log.config.compacts:
            raise FencedError(
                "The topic is no longer compacted", topic=log.topic, partition=log.partition
            )

    return guard


def _max_rewritten_size(size: int) -> int:
    """Return the most bytes that a segment may take when rewritten: offsets are added."""
    return size + size // 8


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
