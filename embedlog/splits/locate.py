"""Finds the files and bytes of ranges of offsets, and splits them; no data is read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, compress, pairwise
from typing import NamedTuple

from embedlog.partition import PartitionLog
from embedlog.partition.lookup import Extent, extents, narrow, offset_near
from embedlog.record import TopicPartition
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.splits.slices import FileChunk, PartitionOffsets, PartitionSlice, TopicVersions


class LocatedRange(NamedTuple):
    """A range of offsets of one partition, and where they are."""

    log: PartitionLog
    from_offset: int
    until_offset: int
    leader_epoch: int
    extents: list[Extent]

    @property
    def size(self) -> int:
        """How many bytes to read."""
        return sum(extent.size for extent in self.extents)

    @property
    def rows(self) -> int | None:
        """How many rows it has; None if offsets may lack them."""
        known = sum(extent.stop - extent.first for extent in self.extents if _is_counted(extent))
        return known if known == self.until_offset - self.from_offset else None

    def between(self, from_offset: int, until_offset: int) -> LocatedRange:
        """Return a part of it."""
        if (from_offset, until_offset) == (self.from_offset, self.until_offset):
            return self
        parts = narrow(self.log, self.extents, from_offset, until_offset)
        return self._replace(from_offset=from_offset, until_offset=until_offset, extents=parts)

    def first_records(self, count: int) -> tuple[LocatedRange, int]:
        """Return the part that surely has the first ``count`` records, and how many it lacks.

        Offsets where records may be missing are not counted.
        """
        for extent in self.extents:
            if _is_counted(extent) and extent.stop - extent.first >= count:
                return self.between(self.from_offset, extent.first + count), 0
            count -= (extent.stop - extent.first) if _is_counted(extent) else 0
        return self, count

    def to_slice(self) -> PartitionSlice:
        """Return the slice that a task reads."""
        chunks = tuple(
            FileChunk(
                *(path, info.sealed, info.headers, position, end_position),
                *(info.schema_version, info.tombstones),
            )
            for info, path, _, _, position, end_position in self.extents
        )
        directories_of = self.log.context.files.directories_of
        return PartitionSlice(
            *(self.log.topic, self.log.partition, self.from_offset, self.until_offset),
            *(self.leader_epoch, chunks, self.size, self.rows),
            directories_of(chunks[0].path) if chunks else (),
        )


def _is_counted(extent: Extent) -> bool:
    """Whether each offset is a row: a query leaves out the tombstones of a typed topic."""
    return extent.dense and not extent.info.tombstones


def topic_versions(
    logs: Mapping[TopicPartition, PartitionLog],
    slices: Sequence[PartitionSlice],
    schemas: Mapping[str, TopicSchema],
) -> dict[str, TopicVersions]:
    """Return the schemas that tasks need to read slices of typed topics."""
    stored: dict[str, dict[int, TopicSchema]] = {name: {} for name in schemas}
    for part in slices:
        if part.topic not in schemas:
            continue
        of_topic = stored[part.topic]
        catalog = logs[TopicPartition(part.topic, part.partition)].context.catalog
        for version in {chunk.schema_version for chunk in part.chunks} - of_topic.keys():
            schema = catalog.schema(catalog.topic(part.topic), version)
            if schema is not None:
                of_topic[version] = schema
    return {name: TopicVersions(schemas[name], versions) for name, versions in stored.items()}


def locate(
    logs: Mapping[TopicPartition, PartitionLog],
    ranges: Iterable[PartitionOffsets],
    limit: int | None,
) -> Iterator[LocatedRange]:
    """Yield where the ranges are; with a limit, the first that surely have as many records."""
    for key, start, until in ranges:
        if limit == 0:
            return
        if start >= until:
            continue
        if limit is None:
            yield _located(logs[key], start, until)
            continue
        # Without gaps there are as many records as offsets, and the rest is not looked up.
        part = _located(logs[key], start, min(until, start + limit))
        if part.rows is None:
            part = _located(logs[key], start, until)
        part, limit = part.first_records(limit)
        yield part


def _located(log: PartitionLog, start: int, until: int) -> LocatedRange:
    # The epoch first: if the log is truncated after this, new batches have a later epoch.
    epoch = log.tail().leader_epoch
    return LocatedRange(log, start, until, epoch, extents(log, start, until))


def split_counts(sizes: Sequence[int], wanted: int) -> list[int]:
    """Return into how many parts to split each range, so that there are about ``wanted`` parts.

    As in Kafka's source, small ranges stay whole and the others share the remaining
    parts in proportion to their sizes.

    >>> split_counts([1000, 10, 10], 6)
    [4, 1, 1]
    >>> split_counts([10, 10, 10], 2)
    [1, 1, 1]
    """
    if wanted <= len(sizes):
        return [1] * len(sizes)
    total = sum(sizes)
    large = [_share(size, total, wanted) > 1 for size in sizes]
    large_total = sum(compress(sizes, large))
    remaining = max(wanted - len(sizes) + sum(large), 1)
    return [
        _share(size, large_total, remaining) if is_large else 1
        for size, is_large in zip(sizes, large, strict=True)
    ]


def _share(size: int, total: int, wanted: int) -> int:
    """Return the share of ``size`` in the wanted parts, rounded, at least 1."""
    return max((2 * size * wanted + total) // (2 * total), 1) if total else 1


def split(whole: LocatedRange, parts: int, max_records: int | None) -> Iterator[PartitionSlice]:
    """Split a range into slices of about the same size, none with more offsets than allowed."""
    bounds = [whole.from_offset, *_split_offsets(whole, parts), whole.until_offset]
    if max_records is not None:
        starts = [
            start + (until - start) * part // count
            for start, until in pairwise(bounds)
            for count in [-(-(until - start) // max_records)]
            for part in range(count)
        ]
        bounds = [*starts, whole.until_offset]
    for start, until in pairwise(bounds):
        yield whole.between(start, until).to_slice()


def _split_offsets(whole: LocatedRange, parts: int) -> list[int]:
    """Return the offsets at which to split a range into parts of about the same bytes."""
    parts = min(parts, whole.until_offset - whole.from_offset)
    ends = list(accumulate(extent.size for extent in whole.extents))
    if parts <= 1 or not ends or not ends[-1]:
        return []
    reach = ends[-1] // parts // 8
    offsets: set[int] = set()
    for part in range(1, parts):
        target = ends[-1] * part // parts
        number = bisect_right(ends, target)
        extent = whole.extents[number]
        position = extent.end_position - (ends[number] - target)
        offsets.add(offset_near(whole.log, extent, position, reach))
    return sorted(cut for cut in offsets if whole.from_offset < cut < whole.until_offset)
