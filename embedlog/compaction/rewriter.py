"""From the rows that are left to the batches of a new segment: few large ones (D11, D12)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa

from embedlog import batch as batches
from embedlog.batch import CONTROL, LOG_APPEND_TIME, Batch, EncodedBatch
from embedlog.batch.arrays import empty
from embedlog.partition.replace import Replacement

TARGET_BYTES = 512 << 10
"""About what a merged batch takes, uncompressed: larger ones make a lookup read more."""
_MOST_ROWS = 1 << 16


UNSTAMPED = -1
"""The horizon of tombstones that no pass has cleaned over yet; as it is stored."""


class BatchKind(NamedTuple):
    """What all records of a batch have in common: only batches of one kind are merged."""

    leader_epoch: int
    flags: int
    codec: str


def kind_of(one: Batch) -> BatchKind:
    """Return the kind of a batch."""
    return BatchKind(one.leader_epoch, one.flags & (LOG_APPEND_TIME | CONTROL), one.codec)


class ProducerBatchRange(NamedTuple):
    """The batch that a producer is known by: it keeps its offsets and numbers (D11)."""

    base_offset: int
    next_offset: int
    producer_id: int
    producer_epoch: int
    base_sequence: int


class PendingBatch(NamedTuple):
    """An encoded batch whose end is known once its successor is."""

    encoded: EncodedBatch
    next_offset: int
    epoch: int
    exact: bool


class Rewriter:
    """Gathers rows, and writes them as batches that cover the new segment without a gap.

    Args:
        new: The segment.
        start: Its first offset.
        headers: Whether its batches have the headers column.
        most_bytes: The topic's largest batch.
    """

    def __init__(self, new: Replacement, start: int, headers: bool, most_bytes: int) -> None:
        self._new, self._at = new, start
        self._schema = batches.schema(headers=headers, offsets=True)
        self._target = min(TARGET_BYTES, most_bytes)
        self._rows: list[Any] = []
        self._bytes = 0
        self._kind: BatchKind | None = None
        self._horizon: int | None = None
        self._held: PendingBatch | None = None
        self._epoch = 0
        self.bytes = 0
        """What was handed to the new segment, as encoded."""

    @property
    def size(self) -> int:
        """About how large the new segment is, with what is still gathered."""
        return self._new.size + self._bytes + (self._held.encoded.size if self._held else 0)

    def come_to(self, epoch: int) -> None:
        """Note the leader epoch of a batch that is read, whether or not anything of it is left.

        An empty batch is of the epoch around it: recovery takes a lower one for stale (A37).
        """
        self._epoch = max(self._epoch, epoch)

    def add(self, rows: Any, kind: BatchKind, horizon: int | None) -> None:
        """Take rows, a `pyarrow.Table` with an offset column and perhaps headers.

        Args:
            kind: Of the batches they are from.
            horizon: When their tombstones may go, or `UNSTAMPED`; None if they have none.
        """
        mixed = None not in (horizon, self._horizon) and horizon != self._horizon
        if kind != self._kind or mixed:
            self._flush()
        self._kind, self._horizon = kind, self._horizon if horizon is None else horizon
        size = rows.nbytes
        # One large piece as several batches; rows are of about one size.
        pieces = max(-(-size // self._target), -(-rows.num_rows // _MOST_ROWS))
        step = -(-rows.num_rows // pieces) if pieces else 0
        for place in range(0, rows.num_rows, step or 1):
            piece = rows.slice(place, step)
            if self._bytes and self._bytes + size // pieces > self._target:
                self._flush()
                self._kind, self._horizon = kind, horizon
            self._rows.append(piece)
            self._bytes += size // pieces

    def add_exact(
        self, rows: Any, kind: BatchKind, horizon: int | None, who: ProducerBatchRange
    ) -> None:
        """Take the rows of a batch, perhaps none, that must stay what its producer sent."""
        self._flush()
        encoded = self._encode(rows, kind, horizon)
        encoded.set_producer(who.producer_id, who.producer_epoch, who.base_sequence)
        self._fill_up_to(who.base_offset)
        self._held = PendingBatch(encoded, who.next_offset, kind.leader_epoch, True)
        self.come_to(kind.leader_epoch)

    def finish(self, end: int) -> None:
        """Write what is left; the segment ends at an offset (D11: also where no record is left)."""
        self._flush()
        self._fill_up_to(end)

    def _flush(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        horizon, self._horizon = self._horizon, None
        if not rows:
            return
        assert self._kind is not None
        table = rows[0] if len(rows) == 1 else pa.concat_tables(rows, promote_options="default")
        last = table["offset"][-1].as_py()
        encoded = self._encode(table, self._kind, horizon)
        if self._held is not None:
            self._write(self._held.next_offset)
        self._held = PendingBatch(encoded, last + 1, self._kind.leader_epoch, False)
        self.come_to(self._kind.leader_epoch)

    def _encode(self, table: Any, kind: BatchKind, horizon: int | None) -> EncodedBatch:
        missing = [name for name in self._schema.names if name not in table.schema.names]
        for name in missing:  # headers, which only some of the merged segments have
            nulls = pa.nulls(table.num_rows, self._schema.field(name).type)
            table = table.append_column(name, nulls)
        if not table.schema.equals(self._schema):
            table = table.select(self._schema.names).cast(self._schema)
        found = table.combine_chunks().to_batches()
        columns = found[0] if found else pa.RecordBatch.from_pylist([], schema=self._schema)
        encoded = batches.encode(columns, kind.codec, offsets=True)
        encoded.flags |= kind.flags
        encoded.delete_horizon = horizon
        return encoded

    def _fill_up_to(self, offset: int) -> None:
        """Let the batch in hand end there, or put an empty one in between."""
        held = self._held
        if held is not None and held.exact and held.next_offset < offset:
            self._write(held.next_offset)
        if self._held is None and self._at < offset:
            nothing = self._encode(empty(self._schema), BatchKind(self._epoch, 0, "none"), None)
            self._held = PendingBatch(nothing, offset, self._epoch, False)
        if self._held is not None and offset > self._held.next_offset:
            self._held = self._held._replace(next_offset=offset)
        if self._held is not None and offset == self._held.next_offset:
            self._write(offset)

    def _write(self, end: int) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        self._new.write(held.encoded, self._at, end, held.epoch)
        self.bytes += held.encoded.size
        self._at = end
