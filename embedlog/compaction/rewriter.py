"""Writes the rows that are kept as a few large batches of a new segment."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from embedlog import batch as batches
from embedlog.batch import CONTROL, INHERITED, Batch, EncodedBatch
from embedlog.batch.arrays import empty
from embedlog.batch.wire import layout_of
from embedlog.partition.key_index import SegmentKeys
from embedlog.partition.replace import Replacement
from embedlog.schemas.segment_schema import absent
from embedlog.schemas.statistics import pack

TARGET_BYTES = 512 << 10
"""The uncompressed size to aim at for a batch: larger ones make a lookup read more."""
_MAX_ROWS = 1 << 16

UNSTAMPED = -1
"""The delete horizon, as stored, of tombstones that lie past the end of every pass so far."""


class BatchKind(NamedTuple):
    """The properties that all records of a batch share: only batches of one kind are merged."""

    leader_epoch: int
    flags: int
    codec: str

    @classmethod
    def of(cls, batch: Batch) -> BatchKind:
        """Return the kind of a batch."""
        return cls(batch.leader_epoch, batch.flags & INHERITED, batch.codec)


class PendingBatch(NamedTuple):
    """An encoded batch whose end depends on the batch after it."""

    encoded: EncodedBatch
    next_offset: int
    epoch: int
    exact: bool
    keys: Any
    """A `pyarrow.BinaryArray`; None if there are none, or they are not needed."""


class Rewriter:
    """Collects rows and writes them as batches that cover the new segment without a gap.

    Args:
        new: The segment.
        start: Its first offset.
        schema: The Arrow schema of its batches, with the offsets in the last column.
        max_bytes: The largest batch of the topic.
        text_statistics: The columns of text of a typed topic that get statistics.
        keys: Gets the keys of what is written, for the key index; None without one.
    """

    def __init__(
        self,
        new: Replacement,
        start: int,
        schema: pa.Schema,
        max_bytes: int,
        text_statistics: frozenset[str] | None = None,
        keys: SegmentKeys | None = None,
    ) -> None:
        self._new, self._offset, self.keys = new, start, keys
        self._schema, self._text_statistics = schema, text_statistics
        self._has_statistics = layout_of(schema).typed and text_statistics is not None
        self._target = min(TARGET_BYTES, max_bytes)
        self._rows: list[Any] = []
        self._bytes = 0
        self._kind: BatchKind | None = None
        self._horizon: int | None = None
        self._pending: PendingBatch | None = None
        self._epoch = 0

    @property
    def size(self) -> int:
        """About the size of the new segment, including the rows not written yet."""
        return self._new.size + self._bytes + (self._pending.encoded.size if self._pending else 0)

    def note_epoch(self, epoch: int) -> None:
        """Note the leader epoch of a batch that was read, even if none of its rows is kept.

        An empty batch gets the epoch around it: recovery takes a lower one for stale.
        """
        self._epoch = max(self._epoch, epoch)

    def add(self, rows: Any, kind: BatchKind, horizon: int | None) -> None:
        """Add rows, a `pyarrow.Table` with an offset column and perhaps headers.

        Args:
            rows: The rows.
            kind: The kind of the batches that they come from.
            horizon: The delete horizon of their tombstones, or `UNSTAMPED`; None without any.
        """
        mixed = None not in (horizon, self._horizon) and horizon != self._horizon
        if kind != self._kind or mixed:
            self._flush()
        self._kind, self._horizon = kind, self._horizon if horizon is None else horizon
        size = rows.nbytes
        # Split what is too large for one batch, assuming rows of about the same size.
        pieces = max(-(-size // self._target), -(-rows.num_rows // _MAX_ROWS))
        step = -(-rows.num_rows // pieces) if pieces else 0
        for start in range(0, rows.num_rows, step or 1):
            piece = rows.slice(start, step)
            if self._bytes and self._bytes + size // pieces > self._target:
                self._flush()
                self._kind, self._horizon = kind, horizon
            self._rows.append(piece)
            self._bytes += size // pieces

    def add_exact(self, rows: Any, kind: BatchKind, horizon: int | None, batch: Batch) -> None:
        """Add the rows, perhaps none, of a producer's last batch.

        It keeps its offsets and sequence numbers.
        """
        assert batch.producer_id is not None
        assert batch.producer_epoch is not None
        assert batch.base_sequence is not None
        self._flush()
        encoded, keys = self._encode(rows, kind, horizon)
        encoded.set_producer(batch.producer_id, batch.producer_epoch, batch.base_sequence)
        self._fill_up_to(batch.base_offset)
        self._pending = PendingBatch(encoded, batch.next_offset, kind.leader_epoch, True, keys)
        self.note_epoch(kind.leader_epoch)

    def finish(self, end: int) -> None:
        """Write the rest; the segment ends at ``end``, with or without a record before it."""
        self._flush()
        self._fill_up_to(end)

    def _flush(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        horizon, self._horizon = self._horizon, None
        if not rows:
            return
        assert self._kind is not None
        table = rows[0] if len(rows) == 1 else pa.concat_tables(rows, promote_options="default")
        last = table[self._schema.names[-1]][-1].as_py()
        encoded, keys = self._encode(table, self._kind, horizon)
        if self._pending is not None:
            self._write(self._pending)
        self._pending = PendingBatch(encoded, last + 1, self._kind.leader_epoch, False, keys)
        self.note_epoch(self._kind.leader_epoch)

    def _encode(self, table: Any, kind: BatchKind, horizon: int | None) -> tuple[EncodedBatch, Any]:
        """Return a batch and its keys, if they are needed."""
        missing = [name for name in self._schema.names if name not in table.schema.names]
        for name in missing:  # Such as headers, which only some of the merged segments have.
            table = table.append_column(name, absent(self._schema.field(name), table.num_rows))
        for index, field in enumerate(table.schema):
            # Of rows from several segments, only some of which have the column.
            if field.name == "_tombstone" and table.column(index).null_count:
                filled = pc.coalesce(table.column(index), absent(field, 1)[0])
                table = table.set_column(index, field, filled)
        if not table.schema.equals(self._schema):
            table = table.select(self._schema.names).cast(self._schema)
        chunks = table.combine_chunks().to_batches()
        arrays = chunks[0].columns if chunks else [pa.nulls(0, f.type) for f in self._schema]
        columns = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        packed = pack(columns, self._text_statistics) if self._has_statistics else b""
        encoded = batches.encode(columns, kind.codec, statistics=packed)
        encoded = encoded.changed(flags=encoded.flags | kind.flags, delete_horizon=horizon)
        layout = layout_of(self._schema)
        needs_keys = self.keys is not None and columns.num_rows and layout.key
        return encoded, layout.keys_of(columns) if needs_keys else None

    def _fill_up_to(self, offset: int) -> None:
        """Let the pending batch end at ``offset``, or put an empty batch in between."""
        pending = self._pending
        if pending is not None and pending.exact and pending.next_offset < offset:
            self._write(pending)
            pending = None
        if pending is None and self._offset < offset:
            kind = BatchKind(self._epoch, 0, "none")
            encoded, _ = self._encode(empty(self._schema), kind, None)
            pending = PendingBatch(encoded, offset, self._epoch, False, None)
        if pending is not None and pending.next_offset <= offset:
            self._write(pending._replace(next_offset=offset))

    def _write(self, pending: PendingBatch) -> None:
        self._pending = None
        # Markers of transactions have no keys that a program would ask for.
        if pending.keys is not None and not pending.encoded.flags & CONTROL:
            self.keys.add(self._new.size, pending.keys)  # type: ignore[union-attr]
        self._new.write(pending.encoded, self._offset, pending.next_offset, pending.epoch)
        self._offset = pending.next_offset
