"""Compares the copies of a partition, and says at which offset they differ first.

Copies that were written batch by batch have the same batches, so comparing their heads is
enough: these have the checksums of all columns.  Where heads differ, perhaps only because
batches were compacted, merged or compressed at different times, the records are decoded and
compared.  Copies need not have the same segments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from embedlog.batch import EXPLICIT_OFFSETS, INHERITED, Batch
from embedlog.errors import (
    CorruptionError,
    EmbedlogError,
    OffsetOutOfRangeError,
    StorageError,
)
from embedlog.partition import PartitionLog
from embedlog.segment import CHUNK_BYTES

_ATTEMPTS = 5
"""How often a comparison begins again because a log was truncated or deleted meanwhile."""
_FIELDS = ("leader_epoch", "producer_id", "producer_epoch", "base_sequence")
"""What equal batches must have in common besides their records."""


class ReplicaDifference(NamedTuple):
    """The first offset at which a copy differs from another one, or is damaged."""

    topic: str
    partition: int
    offset: int
    copy: str
    reference: str | None
    """The copy that it was compared with; None if it is damaged, whatever the others have."""
    what: str

    def __str__(self) -> str:
        other = "" if self.reference is None else f" differs from {self.reference}"
        where = f"{self.topic}-{self.partition}: {self.copy}{other} at offset {self.offset}"
        return f"{where}: {self.what}"


def compare_replicas(
    copies: Mapping[str, PartitionLog], *, check_bodies: bool = True
) -> list[ReplicaDifference]:
    """Return the first difference of each copy from the first copy, in the order of offsets.

    Compares what all copies have: from the highest log start offset to the lowest high
    watermark.  So it is no difference that a copy lags, or has deleted more.  Nor are its
    segments, the compression, merged batches, and when a tombstone may be deleted.

    A damaged copy is reported as such; if it is the first one, the others are compared with
    the next.  Other processes may append, truncate, delete and compact meanwhile.

    Args:
        copies: The copies by name, such as their directories, the leader first.
        check_bodies: Whether to read all columns and compare them with their checksums.
            Otherwise only heads are read, and damaged columns are not noticed.

    Raises:
        ClosedError: A log was closed.
        OffsetOutOfRangeError: A log was truncated, or deleted records, again and again.
    """
    left = dict(copies)
    differences: list[ReplicaDifference] = []
    while len(left) > 1:
        reference = next(iter(left))
        compared = _compare_with_first(left, check_bodies)
        damaged: dict[str, ReplicaDifference] = {}
        for difference in sorted(compared, key=attrgetter("offset")):
            if difference.reference is None:
                damaged.setdefault(difference.copy, difference)
        if reference not in damaged:
            differences += compared
            break
        differences += damaged.values()
        left = {name: log for name, log in left.items() if name not in damaged}
    return sorted(differences, key=attrgetter("offset", "copy"))


def _compare_with_first(
    copies: Mapping[str, PartitionLog], check_bodies: bool
) -> list[ReplicaDifference]:
    reference, *others = copies
    for attempt in range(_ATTEMPTS):
        start = max(log.start_offset() for log in copies.values())
        stop = min(log.end_offset() for log in copies.values())

        def copy(name: str, start: int = start, stop: int = stop) -> _Copy:
            return _Copy(name, copies[name], start, stop, check_bodies)

        try:
            differences = [_compare_pair(copy(reference), copy(other)) for other in others]
        except OffsetOutOfRangeError:
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        # Each pair finds the same damage of the first one.
        return list(dict.fromkeys(filter(None, differences)))
    return []


class _DamagedCopyError(Exception):
    """A copy cannot be read at an offset."""

    def __init__(self, copy: _Copy, offset: int, error: Exception) -> None:
        # Without what to do, which is what is being done.
        text = error.problem if isinstance(error, EmbedlogError) else str(error)
        super().__init__(text)
        self.difference = copy.difference(offset, None, text)


class _Copy:
    """The batches of a copy that hold the offsets ``[start, stop)``, one after the other."""

    def __init__(
        self, name: str, log: PartitionLog, start: int, stop: int, check_bodies: bool
    ) -> None:
        self.name, self._log, self.start, self.stop = name, log, start, stop
        self._check_bodies = check_bodies
        self._batches = self._read()
        self._rows: _Records | None = None
        self.batch: Batch | None = None
        """The current one; None before the first one, and past the last one."""

    def next(self) -> None:
        """Go to the next batch."""
        self.batch, self._rows = next(self._batches, None), None

    @property
    def end(self) -> int:
        """Up to which offset it is known what the copy has."""
        return self.stop if self.batch is None else min(self.batch.next_offset, self.stop)

    def _read(self) -> Iterator[Batch]:
        offset = self.start
        try:
            reader = self._log.reader(offset) if offset < self.stop else None
            while reader and reader.offset < self.stop:
                columns = None if self._check_bodies else _no_columns
                batches = reader.read(CHUNK_BYTES, columns=columns)
                if not batches:
                    return
                for batch in batches:
                    offset = max(self.start, batch.base_offset)
                    if offset >= self.stop:
                        return
                    if self._check_bodies:
                        batch.check_crcs()
                    yield batch
                    offset = batch.next_offset
        except (CorruptionError, StorageError) as error:
            raise _DamagedCopyError(self, offset, error) from error

    def rows(self, start: int, stop: int) -> _Records:
        """Return the records of the current batch that have these offsets."""
        if self.batch is None:
            return _Records([], {})
        if self._rows is None:
            try:
                self._rows = _Records.decode(self._whole(self.batch))
            except (CorruptionError, StorageError) as error:
                raise _DamagedCopyError(self, max(start, self.batch.base_offset), error) from error
        return self._rows.between(start, stop)

    def _whole(self, batch: Batch) -> Batch:
        """Return the batch with its columns, which may not have been read."""
        if batch.is_complete:
            return batch
        for again in self._log.reader(max(batch.base_offset, self.start)).read(1):
            if again.head_fields == batch.head_fields:
                return again
        raise OffsetOutOfRangeError(
            "The batch was replaced while it was read",
            **self._log.where,
            offset=batch.base_offset,
            todo="Compare the copies again.",
        )

    def difference(self, offset: int, reference: str | None, what: str) -> ReplicaDifference:
        """Return the difference of this copy from another one."""
        log = self._log
        return ReplicaDifference(log.topic, log.partition, offset, self.name, reference, what)


def _no_columns(_: object) -> tuple[int, ...]:
    return ()


class _Records(NamedTuple):
    """Some records of a batch, by column: Arrow's, or lists for those of embedlog's own.

    A segment gets a column of headers, or of tombstones, when a record has some, so one copy
    may have the column without another one.  None stands for no headers, and no tombstone.
    """

    offsets: Sequence[int]
    columns: Mapping[str, Any]

    @classmethod
    def decode(cls, batch: Batch) -> _Records:
        """Decode all records of a batch."""
        columns = batch.columns()
        named = dict(zip(columns.schema.names, columns.columns, strict=True))
        own = {batch.layout.added("headers"), *(("_tombstone",) if batch.is_typed else ())}
        for name in own & named.keys():
            values = [value or None for value in named.pop(name).to_pylist()]
            if any(values):
                named[name] = values
        return cls(batch.offsets().to_pylist(), named)

    def between(self, start: int, stop: int) -> _Records:
        """Return the records with offsets in ``[start, stop)``."""
        first, last = bisect_left(self.offsets, start), bisect_left(self.offsets, stop)
        if (first, last) == (0, len(self.offsets)):
            return self
        columns = {name: column[first:last] for name, column in self.columns.items()}
        return _Records(self.offsets[first:last], columns)

    def values(self, name: str, count: int) -> list[str]:
        """Return the first values of a column, in a form in which NaN is equal to itself."""
        column = self.columns.get(name)
        if column is None:
            return ["None"] * count
        values = column[:count]
        return list(map(repr, values if isinstance(values, list) else values.to_pylist()))


def _compare_pair(reference: _Copy, copy: _Copy) -> ReplicaDifference | None:
    """Return the first difference of a copy from another one, or the first damage of either."""
    offset = copy.start
    try:
        reference.next()
        copy.next()
        while offset < copy.stop:
            first, second = reference.batch, copy.batch
            if first and second and _has_same_head(first, second):
                offset = first.next_offset
                reference.next()
                copy.next()
                continue
            end = min(reference.end, copy.end)
            difference = _difference(reference, copy, offset, end)
            if difference is not None:
                return copy.difference(difference[0], reference.name, difference[1])
            offset = end
            for each in (reference, copy):
                if each.batch is not None and each.batch.next_offset <= end:
                    each.next()
    except _DamagedCopyError as damaged:
        return damaged.difference
    return None


def _has_same_head(first: Batch, second: Batch) -> bool:
    names = first.layout.names
    return first.head_fields == second.head_fields and names == second.layout.names


def _difference(reference: _Copy, copy: _Copy, start: int, stop: int) -> tuple[int, str] | None:
    """Return the first offset in ``[start, stop)`` at which two batches differ, and how."""
    first, second = reference.batch, copy.batch
    ours, others = copy.rows(start, stop), reference.rows(start, stop)
    different = _different_records(ours, others)
    if first is None or second is None or not (ours.offsets and others.offsets):
        return different
    # Compaction drops the producer of batches that it merges, but mixes no epochs.
    is_same_batch = _extent(first) == _extent(second)
    for field in _FIELDS if is_same_batch else _FIELDS[:1]:
        value, expected = getattr(second, field), getattr(first, field)
        if value != expected:
            name = field.replace("_", " ")
            fields = (
                max(start, ours.offsets[0], others.offsets[0]),
                f"its {name} is {value}, not {expected}",
            )
            return min(fields, different or fields)
    if different is None and is_same_batch and (first.flags ^ second.flags) & INHERITED:
        return ours.offsets[0], "it is another kind of batch, by its flags"
    return different


def _extent(batch: Batch) -> tuple[int, int, int, int]:
    explicit = batch.flags & EXPLICIT_OFFSETS
    return batch.base_offset, batch.next_offset, batch.count, explicit


def _different_records(ours: _Records, others: _Records) -> tuple[int, str] | None:
    """Return the offset of the first record that two copies do not have alike, and how."""
    if ours.offsets != others.offsets:
        pairs = zip_longest(ours.offsets, others.offsets)
        at, (offset, expected) = next(
            (number, pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]
        )
        before = _different_columns(ours, others, at)
        if before is not None:
            return before
        if offset is None or (expected is not None and expected < offset):
            return expected, "the record is missing"
        return offset, "it has a record that the other has not"
    return _different_columns(ours, others, len(ours.offsets))


def _different_columns(ours: _Records, others: _Records, count: int) -> tuple[int, str] | None:
    """Return the first of the first records whose values differ, and the name of the column."""
    differences = []
    for name in dict.fromkeys([*others.columns, *ours.columns]):
        column, expected = ours.columns.get(name), others.columns.get(name)
        if column is not None and type(column) is type(expected) and _are_equal(column, expected):
            continue
        values = zip(ours.values(name, count), others.values(name, count), strict=True)
        at = next((number for number, (one, other) in enumerate(values) if one != other), None)
        if at is not None:
            differences.append((ours.offsets[at], f"its {name} differs"))
    return min(differences, default=None, key=itemgetter(0))


def _are_equal(column: Any, expected: Any) -> bool:
    return bool(column == expected if isinstance(column, list) else column.equals(expected))
