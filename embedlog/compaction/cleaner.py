"""Keeping the last record of each key: one partition, pass by pass (D7-D21).

A pass reads the keys of the dirty part into the map of last offsets, until that
is full or the part is over.  Then it goes through the log from its start to
where the map ends, segment by segment, and leaves out what a later record of
the same key replaces.  In this order, from low offsets to high ones, and each
run of segments swapped in before the next is begun: a tombstone is only ever
removed once all that it deletes is gone from the log.
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
from embedlog.compaction.offset_map import OffsetMap
from embedlog.compaction.rewriter import UNSTAMPED, ProducerBatchRange, Rewriter, kind_of
from embedlog.compaction.scanner import ScannedBatches, SegmentScanner, data_rows, nulls, where_last
from embedlog.compaction.throttle import Throttle
from embedlog.config import LONG_MAX, MaintenanceConfig
from embedlog.errors import DiskFullError, EmbedlogError, FencedError, StorageError
from embedlog.partition import PartitionLog, flush, pending_deletes, replace
from embedlog.partition.remembered_producers import remembered_producers
from embedlog.partition.replace import Fence, Replacement, no_fence

Words = Any
Progress = Callable[[int, int], None]

_INPUT_SEGMENTS = 8
"""Swap in what there is once so many segments' bytes were read: each swap frees disk space."""
_MUCH = 0.9
_COUNTS = ("records_read", "records_kept", "keyless", "tombstones")


@dataclass(slots=True)
class CleanResult:
    """What a compaction did to one partition."""

    topic: str
    partition: int
    first_dirty: int = 0
    """Where the dirty part begins now."""
    passes: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    records_read: int = 0
    """In the segments that were rewritten."""
    records_kept: int = 0
    keyless: int = 0
    """Removed because they had no key (D9)."""
    tombstones: int = 0
    """Removed because their time was over (D17)."""
    segments_before: int = 0
    segments_after: int = 0
    why: str = ""
    """In words: what was done, or why nothing was."""
    error: EmbedlogError | None = field(default=None, repr=False)
    """What went wrong; other partitions were cleaned nevertheless (D4)."""


class CleanPass:
    """One pass over a partition."""

    def __init__(
        self,
        section: CleanableRange,
        now_ms: int,
        settings: MaintenanceConfig,
        scanner: SegmentScanner,
        fence: Fence,
        pace: Throttle,
        done: CleanResult,
        trusting: bool,
    ) -> None:
        self._section, self._log, self._now_ms = section, section.log, now_ms
        self._epoch = section.leader_epoch
        self._pace = pace
        self._settings, self._scanner, self._fence, self._done = settings, scanner, fence, done
        self._map = OffsetMap(
            settings.log_cleaner_dedupe_buffer_size,
            settings.log_cleaner_io_buffer_load_factor,
            section.first_dirty,
            section.first_uncleanable,
        )
        self.end = section.first_uncleanable
        """The pass looks at the records below; what comes after is kept as it is."""
        self.left_out: list[SegmentInfo] = []
        """Segments that the disk had no room to rewrite.  From then on no tombstone goes, for
        what it deletes may be in them; and the checkpoint stays, so they are tried again."""
        self.trusting = trusting
        """Whether to believe the free space that the file system reports: not once a run was
        planned by it, and the disk got full all the same."""
        self._run: SegmentGroup | None = None
        self._room = 0
        self._noted = False
        self._last_sent = {
            number: known.batches[-1].base_offset
            for number, known in remembered_producers(self._log).items()
            if known.batches
        }

    # First: the last offset of each key

    def read_keys(self) -> None:
        """Fill the map; it ends at the first key that does not fit."""
        first = self._section.first_dirty
        for info in self._section.segments:
            if info.next_offset is None or info.next_offset <= first:
                continue
            for chunk in self._scanner.chunks(info, first):
                if not self._take(chunk, first):
                    return

    def _take(self, chunk: ScannedBatches, first: int) -> bool:
        rows = chunk.valid
        records = data_rows(chunk)
        if records is not None:
            rows = records if rows is None else rows & records
        if len(chunk.offsets) and chunk.offsets[0] < first:
            dirty = chunk.offsets >= first
            rows = dirty if rows is None else rows & dirty
        (high, low), offsets = chunk.hashes, chunk.offsets
        if rows is not None:
            high, low, offsets = high[rows], low[rows], offsets[rows]
        fitting = self._map.add(high, low, offsets)
        if fitting < len(offsets):
            self.end = int(offsets[fitting])
            return False
        return True

    # Then: leave out what was replaced

    def rewrite(self) -> None:
        """Go through the log up to the end of the map, run by run."""
        sources = [info for info in self._section.segments if info.base_offset < self.end]
        limit = self._log.config.segment_bytes
        try:
            for place, info in enumerate(sources):
                left = self._bytes_left(info)
                if self._run is not None and not self._run.takes(info, left, self._room):
                    self._close()
                if self._run is None:
                    reserve = self._log.context.reserve
                    room = reserve.room(_with_more(left), trusting=self.trusting)
                    self._room = min(limit, room)
                following = sources[place + 1] if place + 1 < len(sources) else None
                alone = following is None or info.size + following.size > limit
                alone = alone and self._run is None
                if self._has_no_room(info, left) or self._is_clean(info, alone, limit):
                    self._close()
                else:
                    self._try(partial(self._add, info))
            self._finish(sources)
        finally:
            if self._run is not None:
                self._run.new.abandon()

    def _add(self, info: SegmentInfo) -> None:
        if self._run is None:
            self._run = SegmentGroup(self._log, info, self._done)
        self._rewrite_segment(self._run, info)

    def _finish(self, sources: list[SegmentInfo]) -> None:
        if self._run is not None and not self.left_out:
            self._close(self.end)
        self._close()
        if not self.left_out and not self._noted:
            last, epoch = sources[-1:], self._epoch
            replace.note_cleaned(self._log, self.end, last, fence=self._fence, epoch=epoch)

    def _has_no_room(self, info: SegmentInfo, left: int) -> bool:
        """Whether the disk is too full to rewrite a segment, or to do so for little."""
        if self._run is None and _with_more(left) > self._room < self._log.config.segment_bytes:
            self.left_out.append(info)
            return True
        # Where some were left out all this is done again: not where nothing is to be gained.
        return bool(self.left_out) and left > _MUCH * info.size

    def _try(self, step: Callable[[], object]) -> bool:
        """Go on with a run; if the disk gets full, its segments stay as they are."""
        try:
            step()
            return True
        except DiskFullError:
            run, self._run = self._run, None
            if run is None:
                raise
            run.new.abandon()
            run.take_back(self._done)
            self.left_out += run.sources
            self.trusting = False
            self._log.context.reserve.mark_full()
            return False

    def _bytes_left(self, info: SegmentInfo) -> int:
        """About how much of a segment is left: known where the notes cover it, else all of it."""
        assert info.next_offset is not None
        replaced = self._map.replaced(info.base_offset, info.next_offset)
        return info.size if replaced is None else int(info.size * (1 - replaced.mean()))

    def _close(self, cleaned: int | None = None) -> None:
        """Swap in what was gathered, if there is something."""
        if self._run is not None and self._try(lambda: self._swap(cleaned)):
            self._run, self._noted = None, cleaned is not None

    def _swap(self, cleaned: int | None) -> None:
        run, done = self._run, self._done
        assert run is not None
        end = run.sources[-1].next_offset
        assert end is not None
        run.rewriter.finish(end)
        self._pace.spend(run.new.size, self._fence)
        run.new.swap(run.sources, fence=self._fence, cleaned=cleaned, epoch=self._epoch)
        done.segments_before += len(run.sources)
        done.segments_after += 1
        done.bytes_before += sum(info.size for info in run.sources)
        done.bytes_after += run.new.info.size

    def _is_clean(self, info: SegmentInfo, alone: bool, limit: int) -> bool:
        """Whether a segment may stay as it is: nothing to leave out, and too large to merge."""
        clean = (info.next_offset or 0) <= min(self._section.first_dirty, self.end)
        if not clean or not (alone or info.size > limit // 2):
            return False
        if not self._log.open_segment(info).has_offsets:
            return False
        for chunk in self._scanner.chunks(info):
            kept = self._kept(chunk)
            if not kept.all() or any(self._tombstone_is_due(one) for one in chunk.batches):
                return False
        return True

    def _tombstone_is_due(self, one: Batch) -> bool:
        if not one.null_count("value") or one.flags & CONTROL:
            return False
        return one.delete_horizon is None or self._is_over(one.delete_horizon)

    def _is_over(self, horizon: int) -> bool:
        return horizon <= self._now_ms and not self.left_out

    def _kept(self, chunk: ScannedBatches) -> Words:
        """Return which rows stay, but for tombstones: no later one has their key (D8, D9)."""
        kept = where_last(chunk, self._map)
        if chunk.valid is not None:
            kept &= chunk.valid
        if len(chunk.offsets) and chunk.offsets[-1] >= self.end:
            kept |= chunk.offsets >= self.end
        records = data_rows(chunk)
        return kept if records is None else kept | ~records

    def _rewrite_segment(self, run: SegmentGroup, info: SegmentInfo) -> None:
        run.sources.append(info)
        for chunk in self._scanner.chunks(info, whole=True):
            kept = self._kept(chunk)
            run.rewriter.come_to(chunk.batches[0].leader_epoch)
            self._done.records_read += len(kept)
            if chunk.valid is not None:
                self._done.keyless += int(np.count_nonzero(~chunk.valid & ~kept))
            self._rewrite_chunk(run, chunk, kept)

    def _rewrite_chunk(self, run: SegmentGroup, chunk: ScannedBatches, kept: Words) -> None:
        """Hand on what is left, batches of one kind and with one horizon together."""
        ends = chunk.ends
        left = np.diff(np.append(0, np.cumsum(kept))[ends], prepend=0)
        together: list[tuple[int, Words]] = []
        state: tuple[Any, ...] | None = None
        for place in self._interesting(chunk, left):
            one = chunk.batches[place]
            rows = kept[chunk.start(place) : ends[place]]
            for part, horizon in self._parts(chunk, place, rows):
                exact = self._exact(one)
                now = kind_of(one), horizon, one.has_headers
                if exact is not None or now != state:
                    self._hand_on(run, chunk, together, state)
                    together, state = [], now
                if exact is None:
                    together.append((place, part))
                else:
                    table = chunk.table([(place, part)])
                    run.rewriter.add_exact(table, now[0], horizon, exact)
                    self._done.records_kept += table.num_rows
                    state = None
        self._hand_on(run, chunk, together, state)

    def _interesting(self, chunk: ScannedBatches, left: Words) -> Any:
        """Return the batches that have rows left, or that a producer is known by."""
        found = set(np.flatnonzero(left).tolist())
        if self._last_sent:
            batches = enumerate(chunk.batches)
            found.update(place for place, one in batches if self._is_last(one))
        return sorted(found)

    def _is_last(self, one: Batch) -> bool:
        number = one.producer_id
        return number is not None and self._last_sent.get(number) == one.base_offset

    def _exact(self, one: Batch) -> ProducerBatchRange | None:
        if not self._is_last(one):
            return None
        assert one.producer_id is not None
        assert one.producer_epoch is not None
        assert one.base_sequence is not None
        return ProducerBatchRange(
            one.base_offset,
            one.next_offset,
            one.producer_id,
            one.producer_epoch,
            one.base_sequence,
        )

    def _parts(
        self, chunk: ScannedBatches, place: int, rows: Words
    ) -> list[tuple[Words, int | None]]:
        """Return rows of a batch, each with the horizon of the tombstones among them (D17)."""
        one = chunk.batches[place]
        if not one.null_count("value") or one.flags & CONTROL:
            return [(rows, None)]
        tombstones = nulls(one.columns(("value",)).column(0))
        reached = chunk.offsets[chunk.start(place) : chunk.ends[place]] < self.end
        horizon = one.delete_horizon
        if horizon is not None and self._is_over(horizon):
            # All that they deleted went before them, in this pass or in an earlier one.
            gone = rows & tombstones & reached
            self._done.tombstones += int(np.count_nonzero(gone))
            rows = rows & ~gone
        if horizon is None:
            horizon = min(self._now_ms + self._log.config.delete_retention_ms, LONG_MAX)
        if reached.all() or self._is_last(one):
            return [(rows, horizon if (rows & tombstones & reached).any() else None)]
        # Past the end of the pass nothing was cleaned: the time of these begins later.
        below, above = rows & reached, rows & ~reached
        first = horizon if (below & tombstones).any() else None
        later = UNSTAMPED if one.delete_horizon is None else one.delete_horizon
        then = later if (above & tombstones).any() else None
        return [(below, first), (above, then)]

    def _hand_on(
        self,
        run: SegmentGroup,
        chunk: ScannedBatches,
        together: list[tuple[int, Words]],
        state: tuple[Any, ...] | None,
    ) -> None:
        if together and state is not None:
            table = chunk.table(together)
            self._done.records_kept += table.num_rows
            run.rewriter.add(table, state[0], state[1])


class SegmentGroup:
    """Segments that become one (D12)."""

    def __init__(self, log: PartitionLog, first: SegmentInfo, done: CleanResult) -> None:
        self._before = [getattr(done, name) for name in _COUNTS]
        self.sources: list[SegmentInfo] = []
        self.new = Replacement(log, first.base_offset, headers=first.headers)
        self._most_span = log.config.segment_max_offset_span
        most = log.config.max_message_bytes
        self.rewriter = Rewriter(self.new, first.base_offset, first.headers, most)

    def take_back(self, done: CleanResult) -> None:
        """Count nothing of it."""
        for name, value in zip(_COUNTS, self._before, strict=True):
            setattr(done, name, value)

    def takes(self, info: SegmentInfo, size: int, limit: int) -> bool:
        """Whether another segment, of which so much is left, fits in."""
        span = (info.next_offset or 0) - self.new.info.base_offset
        read = sum(one.size for one in self.sources)
        return (
            self.rewriter.size + size <= limit
            and span <= self._most_span
            and read < _INPUT_SEGMENTS * limit
            and self.new.info.headers >= info.headers
        )


def clean(
    log: PartitionLog,
    now_ms: int,
    *,
    settings: MaintenanceConfig | None = None,
    fence: Fence = no_fence,
    progress: Progress | None = None,
    pace: Throttle | None = None,
) -> CleanResult:
    """Compact a partition as far as it can be now, whether or not it is due.

    In as many passes as the map of offsets makes necessary.  Readers and
    writers go on meanwhile; each run of segments is swapped in as it is done.

    Args:
        log: Of a topic that is compacted.
        now_ms: The time, for lags and tombstones.
        settings: Memory and bytes a second.
        fence: Called before each chunk of bytes, and under the partition's lock
            right before each commit; what it raises ends the compaction.
        progress: Called with how many bytes were looked at, and about how many there are.
        pace: Shared by several cleaners that have one budget of bytes a second.

    Raises:
        FencedError: The fence's; or another process changed, or cleans, the partition.
        CorruptionError: A batch is damaged; what was swapped in before stays.
        DiskFullError, StorageError: The same.
    """
    settings = settings or MaintenanceConfig()
    pace = pace or Throttle(settings.log_cleaner_io_max_bytes_per_second)
    done = CleanResult(log.topic, log.partition)
    guard = _guard(log, fence)
    trusting = True
    with replace.rewrite_lock(log) as free:
        if not free:
            raise FencedError(
                "another process compacts the partition",
                topic=log.topic,
                partition=log.partition,
                todo="nothing was changed",
            )
        while True:
            guard()
            section = inspect(log, now_ms)
            done.first_dirty = section.first_dirty
            if not section.segments or (done.passes and not section.cleanable_bytes):
                break
            # After the look: what was sealed before it must be on the disk.
            flush.flush_up_to(log, section.first_uncleanable)
            counter = CleanProgress(guard, pace, progress, section)
            scanner = SegmentScanner(log, settings.log_cleaner_io_buffer_size, counter.spend)
            one = CleanPass(section, now_ms, settings, scanner, guard, pace, done, trusting)
            try:
                one.read_keys()
                one.rewrite()
            except StorageError as error:
                if not error.missing or not _overtaken(section):
                    raise
                continue
            done.passes += 1
            if one.left_out:
                if trusting and not one.trusting:
                    # The disk was fuller than reported.  Again, with runs that are sure to fit.
                    trusting = False
                    pending_deletes.sweep_soon(log)
                    continue
                done.why = _told_of_room(one.left_out, log)
                return done
    done.why = _told(done)
    return done


class CleanProgress:
    """What is to happen with each chunk that is read."""

    def __init__(
        self, guard: Fence, pace: Throttle, progress: Progress | None, section: CleanableRange
    ) -> None:
        self._guard, self._pace, self._progress = guard, pace, progress
        self._done, self._total = 0, section.clean_bytes + 2 * section.cleanable_bytes

    def spend(self, size: int) -> None:
        self._guard()
        self._pace.spend(size, self._guard)
        self._done += size
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


def _overtaken(section: CleanableRange) -> bool:
    """Whether retention dropped meanwhile what was to be read: then the next look sees less."""
    section.log.refresh()
    now = section.log.segments
    return any(now.get(info.base_offset) != info for info in section.segments)


def _guard(log: PartitionLog, fence: Fence) -> Fence:
    def guard() -> None:
        fence()
        log.refresh()
        # D27: whoever turned compaction off, or closed the log, wants it to end now.
        if not log.config.compacts:
            raise FencedError(
                "the topic is not compacted any more", topic=log.topic, partition=log.partition
            )

    return guard


def _with_more(size: int) -> int:
    """Return what a segment may take at most when it is rewritten: offsets are added."""
    return size + size // 8


def _told_of_room(left_out: Sequence[SegmentInfo], log: PartitionLog) -> str:
    bases = ", ".join(str(info.base_offset) for info in left_out[:5])
    more = ", …" if len(left_out) > 5 else ""
    return (
        f"the disk is too full: {len(left_out)} segments (at {bases}{more}) stay as they are, "
        f"the largest of {max(info.size for info in left_out):,} bytes, "
        f"with {log.context.files.free_bytes():,} bytes free; the next round tries again"
    )


def _told(done: CleanResult) -> str:
    if not done.segments_before:
        return "nothing to do: all that can be compacted is"
    return (
        f"{done.records_read - done.records_kept:,} of {done.records_read:,} records left out, "
        f"{done.bytes_before:,} bytes became {done.bytes_after:,}, "
        f"segments: {done.segments_before} before, {done.segments_after} after"
    )
