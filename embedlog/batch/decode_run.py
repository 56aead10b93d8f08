"""Decodes runs of small batches; the fast twin of `BatchSource.batches` and `Batch.columns`.

Skips the objects and Arrow's decoder that each batch takes: numpy checks one field of all heads
at a time, and gathers each column.  Every CRC is checked as always.  Anything unusual is left to
the general form, which reports what is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from embedlog.batch.arrays import numbers
from embedlog.batch.decode import Batch, BatchSource, offset_range
from embedlog.batch.wire import (
    CONTINUATION,
    END_MAGIC,
    ENTRY,
    LOG_APPEND_TIME,
    MAGIC,
    MIN_BLOCK,
    PREFIX,
    SEAL,
    TRAILER,
    VERSION,
    bytes_layout,
    timestamp_type,
)
from embedlog.checksum import extend
from embedlog.errors import CorruptBatchError, UnsupportedFormatError
from embedlog.lazy import np, pa

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[Any]

MIN_BATCHES = 40
"""With fewer, numpy takes longer than a `Batch` for each."""
SMALL_BYTES = 8 << 10
"""Larger batches gain nothing: their bytes are copied once more."""
SKIPPED_BYTES = 64 << 10
"""Where no run begins, look again after this many bytes, since each look takes a microsecond."""
MAX_RUN_BYTES = 1 << 20
"""The bytes of a run are used several times, so they should stay in the CPU's cache."""

_TIME, _COLUMNS, _BUFFERS = 0, 3, 8
_COLUMN_OF_BUFFER = (0, 0, 1, 1, 1, 2, 2, 2)
_VALIDITIES, _TIMES, _OFFSETS = (0, 2, 5), 1, (3, 6)
"""Which of the buffers these are: in all columns, in that of timestamps, in keys and values."""


class RunLayout:
    """Where an uncompressed batch of timestamp, key and value has its fields."""

    def __init__(self) -> None:
        layout = bytes_layout()
        message = layout.message
        self.block = message.nodes + 16 * _COLUMNS
        self.size = self.block + MIN_BLOCK + ENTRY.size * _COLUMNS
        self.prefix = PREFIX.pack(CONTINUATION, self.size - PREFIX.size)
        block = _block_type()
        between = self.block + block.fields["size"][1] - PREFIX.size
        self.unpack_size = struct.Struct(f"<{PREFIX.size}s{between}xq").unpack_from
        """Returns the prefix and the size of the batch."""
        self.skeleton = [np.frombuffer(part, "<u8") for part in layout.plain_skeleton]
        self.trailer = _number(TRAILER.pack(self.size - self.block, END_MAGIC))
        fields = {
            "skeleton": (8, "4<u8"),
            "body_length": (message.body_length, "<u8"),
            "skeleton_end": (48, "3<u8"),
            "length": (message.length, "<u8"),
            "buffer_count": (message.buffers - 4, "<u4"),
            "buffers": (message.buffers, (_range_type(), _BUFFERS)),
            "node_count": (message.nodes - 4, "<u4"),
            "nodes": (message.nodes, (_node_type(), _COLUMNS)),
            "block": (self.block, block),
        }
        offsets, formats = zip(*fields.values(), strict=True)
        self.type = np.dtype(
            {"names": [*fields], "formats": formats, "offsets": offsets, "itemsize": self.size}
        )

    def heads(self, data: bytes, starts: Array) -> Array:
        """Return the heads of the batches at ``starts``, field by field."""
        words = np.frombuffer(data, "<u8")
        heads = words.take((starts >> 3)[:, None] + np.arange(self.size >> 3))
        return heads.view(self.type)[:, 0]

    def are_usual(self, data: bytes, starts: Array, heads: Array) -> Array:
        """Return a mask of the batches that `Batch` would accept, if their lengths are usual."""
        counts = heads["block"]["count"].astype("u8")
        body_bytes = (heads["block"]["size"] - self.size).astype("u8")
        conditions = [
            *self._message_conditions(heads, counts, body_bytes),
            *self._block_conditions(heads["block"]),
            *_buffer_conditions(heads, counts, body_bytes),
        ]
        usual: Array = np.logical_and.reduce(conditions)
        if usual.any():
            usual &= self._are_intact(data, starts.tolist(), heads["block"])
        return usual

    def _message_conditions(self, heads: Array, counts: Array, body_bytes: Array) -> list[Array]:
        nodes = heads["nodes"]
        return [
            (heads["skeleton"] == self.skeleton[0]).all(axis=1),
            (heads["skeleton_end"] == self.skeleton[1]).all(axis=1),
            heads["buffer_count"] == _BUFFERS,
            heads["node_count"] == _COLUMNS,
            heads["body_length"] == body_bytes,
            heads["length"] == counts,
            (nodes["length"] == counts[:, None]).all(axis=1),
            nodes["nulls"][:, _TIME] == 0,
        ]

    def _block_conditions(self, block: Array) -> list[Array]:
        return [
            block["magic"] == _number(MAGIC),
            block["version"] == VERSION,
            block["flags"] | LOG_APPEND_TIME == LOG_APPEND_TIME,
            block["count"] > 0,
            block["columns"] == _COLUMNS,
            block["length"] == self.size - self.block,
            block["base_offset"] >= 0,
            block["next_offset"] - block["base_offset"] == block["count"],
            block["trailer"] == self.trailer,
        ]

    def _are_intact(self, data: bytes, starts: list[int], block: Array) -> Array:
        blocks, bodies = ([start + at for start in starts] for at in (self.block, self.size))
        sealed = [start + SEAL.size for start in blocks]
        block_crcs, head_crcs = _crcs(data, sealed, bodies), _crcs(data, starts, blocks)
        intact: Array = (block_crcs == block["crc"]) & (head_crcs == block["metadata_crc"])
        return intact


def _buffer_conditions(heads: Array, counts: Array, body_bytes: Array) -> list[Array]:
    """Each buffer must be within its column, which has a CRC, and long enough."""
    begins, ends = _column_bounds(heads)
    positions, lengths = heads["buffers"]["position"], heads["buffers"]["length"]
    limits, rows = ends[:, _COLUMN_OF_BUFFER], counts[:, None]
    has_no_nulls = heads["nodes"]["nulls"] == 0
    return [
        (ends <= body_bytes[:, None]).all(axis=1),
        (positions & 7 == 0).all(axis=1),
        (positions >= begins[:, _COLUMN_OF_BUFFER]).all(axis=1),
        # Not added: numbers of 64 bits would overflow.
        ((positions <= limits) & (lengths <= limits - positions)).all(axis=1),
        ((lengths[:, _VALIDITIES] >= rows + 7 >> 3) | has_no_nulls).all(axis=1),
        lengths[:, _TIMES] >= 8 * counts,
        (lengths[:, _OFFSETS] >= 4 * rows + 4).all(axis=1),
    ]


def _column_bounds(heads: Array) -> tuple[Array, Array]:
    """Return where the columns begin and end in their bodies."""
    ends = heads["block"]["table"]["end"]
    begins = np.zeros_like(ends)
    begins[:, 1:] = ends[:, :-1]
    return begins, ends


def _crcs(data: bytes, begins: Iterable[int], ends: Iterable[int]) -> Array:
    crcs = [extend(0, data[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    return np.array(crcs, "u4")


def _number(field: bytes) -> int:
    return int.from_bytes(field, "little")


def _range_type() -> Any:
    return np.dtype([("position", "<u8"), ("length", "<u8")])


def _node_type() -> Any:
    return np.dtype([("length", "<u8"), ("nulls", "<u8")])


def _block_type() -> Any:
    """Return the fields of `HEADER`, the table of columns and the trailer."""
    column = np.dtype([("end", "<u8"), ("crc", "<u4"), ("nulls", "<u4")])
    return np.dtype(
        [
            *(("magic", "<u4"), ("crc", "<u4"), ("metadata_crc", "<u4"), ("version", "<u2")),
            *(("flags", "<u2"), ("count", "<u4"), ("columns", "<u2"), ("gap", "<u2")),
            *(("length", "<u4"), ("size", "<i8"), ("base_offset", "<i8"), ("next_offset", "<i8")),
            *(("leader_epoch", "<u4"), ("producer_epoch", "<i2"), ("gap_high", "<u2")),
            *(("base_sequence", "<i4"), ("min_timestamp", "<i8"), ("max_timestamp", "<i8")),
            *(("producer_id", "<i8"), ("delete_horizon", "<i8"), ("table", (column, _COLUMNS))),
            ("trailer", "<u8"),
        ]
    )


class BatchRun:
    """Consecutive small batches without gaps, their heads and blocks checked.

    Like a `Batch`: the columns are checked and decoded on demand.  All have the same flags
    and leader epoch.
    """

    __slots__ = (
        *("_data", "_heads", "_shift", "_source", "_starts"),
        *("base_offset", "count", "flags", "leader_epoch", "next_offset", "size"),
    )

    has_offsets = is_compressed = False

    def __init__(
        self, source: BatchSource, data: bytes, shift: int, starts: Array, heads: Array
    ) -> None:
        """Take batches at ``starts`` of ``data``, which begins at ``shift`` of the buffer."""
        self._source, self._data, self._shift = source, data, shift
        self._starts, self._heads = starts, heads
        first, last = heads["block"][0], heads["block"][-1]
        self.base_offset, self.next_offset = int(first["base_offset"]), int(last["next_offset"])
        self.count = self.next_offset - self.base_offset
        self.size = int(starts[-1] - starts[0] + last["size"])
        self.flags, self.leader_epoch = int(first["flags"]), int(first["leader_epoch"])

    def __repr__(self) -> str:
        return f"<{len(self._starts)} batches [{self.base_offset}, {self.next_offset})>"

    @property
    def position(self) -> int:
        """The position of the first batch in its file."""
        return self.start + self._source.shift

    @property
    def start(self) -> int:
        """The position of the first batch in the buffer."""
        return self._shift + int(self._starts[0])

    @property
    def is_log_append_time(self) -> bool:
        """Whether the log, not the producers, set the timestamps."""
        return bool(self.flags & LOG_APPEND_TIME)

    @property
    def schema(self) -> Any:
        """The columns as stored, without the segment's metadata."""
        return self._source.layout.schema

    def offsets(self) -> Any:
        """Return the offset of each row as a `pyarrow.Int64Array`."""
        return offset_range(self.base_offset, self.next_offset)

    def trim(self, first: int, last: int) -> tuple[BatchRun, int, int]:
        """Return the batches that have the rows ``[first, last)``, and these rows of them."""
        ends = self._heads["block"]["next_offset"] - self.base_offset
        begin = int(np.searchsorted(ends, first, "right"))
        end = int(np.searchsorted(ends, last, "left")) + 1
        skipped = int(ends[begin - 1]) if begin else 0
        run = BatchRun(
            self._source,
            self._data,
            self._shift,
            self._starts[begin:end],
            self._heads[begin:end],
        )
        return run, first - skipped, last - skipped

    def columns(self, names: Sequence[str]) -> Any:
        """Return columns as a `pyarrow.RecordBatch`; checks and decodes only these.

        Raises:
            CorruptBatchError: A column of a batch is damaged.
            ValueError: There is no such column.
        """
        columns = self._columns_fast(names)
        if columns is not None:
            return columns
        parts = [batch.columns(names) for batch in self._batches()]
        return pa.Table.from_batches(parts).combine_chunks().to_batches()[0]

    def check_crcs(self) -> None:
        """Check the CRC of every column; decodes nothing.

        Raises:
            CorruptBatchError: One is wrong.
        """
        if not self._are_intact(self._source.layout.column_indexes):
            for batch in self._batches():
                batch.check_crcs()

    def _batches(self) -> Iterator[Batch]:
        stop = self.start + self.size
        for start in (self._starts + self._shift).tolist():
            yield Batch(self._source, start, stop)

    def _columns_fast(self, names: Sequence[str]) -> Any:
        """Return columns; None if anything is damaged or unusual."""
        selection = self._source.layout.select(tuple(names))
        if not self._are_intact(selection.indexes):
            return None
        rows = _Rows(self._data, self._bodies(), self._heads)
        arrays = [self._times(rows) if i == _TIME else rows.items(i) for i in selection.indexes]
        if any(array is None for array in arrays):
            return None
        return pa.RecordBatch.from_arrays(arrays, schema=selection.schema)

    def _are_intact(self, indexes: Sequence[int]) -> bool:
        table, bodies = self._heads["block"]["table"], self._bodies()
        begins, ends = (bodies[:, None] + at.astype("i8") for at in _column_bounds(self._heads))
        return all(
            (_crcs(self._data, begins[:, i].tolist(), ends[:, i].tolist()) == table["crc"][:, i])
            .all()
            for i in indexes
        )  # fmt: skip

    def _bodies(self) -> Array:
        return self._starts + self._heads.dtype.itemsize

    def _times(self, rows: _Rows) -> Any:
        if self.is_log_append_time:
            times = self._heads["block"]["max_timestamp"][rows.batch]
        else:
            times = rows.times()
        return numbers(times, timestamp_type())


class _Rows:
    """The rows of a run, gathered from its bodies."""

    def __init__(self, data: bytes, bodies: Array, heads: Array) -> None:
        self._data = data
        self._nulls = heads["nodes"]["nulls"]
        self._positions = bodies[:, None] + heads["buffers"]["position"].astype("i8")
        self._data_bytes = heads["buffers"]["length"]
        counts = heads["block"]["count"].astype("i8")
        ends = counts.cumsum()
        self._first = ends - counts
        self.batch = np.repeat(np.arange(len(counts)), counts)
        self._row = np.arange(ends[-1]) - self._first[self.batch]

    def times(self) -> Array:
        """Return the column of timestamps."""
        words = np.frombuffer(self._data, "<i8")
        times: Array = words.take(self._at(_TIMES, 3) + self._row)
        return times

    def items(self, column: int) -> Any:
        """Return a column of keys or values; None if its contents are unusual."""
        validity, offsets, data = (_VALIDITIES[column] + buffer for buffer in range(3))
        bounds = np.frombuffer(self._data, "<u4")
        at = self._at(offsets, 2) + self._row
        begins, ends = bounds.take(at), bounds.take(at + 1)
        if (begins > ends).any() or (ends > self._data_bytes[:, data][self.batch]).any():
            return None
        first = self._at(data)
        items = _gathered(self._data, first + begins, first + ends)
        nulls = self._nulls[:, column]
        return self._with_nulls(items, nulls, validity) if nulls.any() else items

    def _with_nulls(self, items: Any, nulls: Array, validity: int) -> Any:
        """Return a column with the nulls of the bitmaps; None if ``nulls`` are not their counts."""
        at = self._at(validity) + (self._row >> 3)
        # Clipped, since a batch without nulls may have no bitmap.
        bitmaps = np.frombuffer(self._data, "u1").take(at, mode="clip")
        is_null = (bitmaps >> (self._row & 7) & 1 == 0) & (nulls > 0)[self.batch]
        if (np.add.reduceat(is_null, self._first, dtype="u8") != nulls).any():
            return None
        bits = pa.py_buffer(np.packbits(~is_null, bitorder="little"))
        buffers = [bits, *items.buffers()[1:]]
        return pa.Array.from_buffers(items.type, len(items), buffers, int(nulls.sum()))

    def _at(self, buffer: int, shift: int = 0) -> Array:
        """Return where the buffer of each row's batch begins, in units of 2 ** ``shift``."""
        at: Array = (self._positions[:, buffer] >> shift)[self.batch]
        return at


def _gathered(data: bytes, begins: Array, ends: Array) -> Any:
    """Return ranges of bytes, which are in the order of the data, as a `pyarrow.BinaryArray`."""
    count = len(begins)
    # Items and the gaps between them; Arrow takes every other one.
    bounds = np.empty(2 * count, "i4")
    bounds[::2], bounds[1::2] = begins, ends
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    items = pa.Array.from_buffers(pa.binary(), 2 * count - 1, buffers, 0)
    return items.take(numbers(np.arange(0, 2 * count, 2), pa.int64()))


_run_layout = cache(RunLayout)


def batches_fast(
    source: BatchSource, start: int, stop: int, max_bytes: int
) -> list[Batch | BatchRun]:
    """As `BatchSource.batches`, with each run of small batches as one.

    Raises:
        CorruptBatchError: The first batch is damaged.
        UnsupportedFormatError: A newer version of embedlog wrote the first batch.
    """
    if source.layout is not bytes_layout():
        return [*source.batches(start, stop, max_bytes)]
    layout = _run_layout()
    stop = min(stop, len(source.view))
    enough = min(start + max(max_bytes, 1), stop)
    pieces: list[Batch | BatchRun] = []
    try:
        while start < enough:
            for until, run in _plan(source, layout, start, stop, enough):
                if start < until:
                    batches = source.batches(start, stop, until - start)
                    if not batches:
                        return pieces
                    pieces += batches
                    start = batches[-1].position + batches[-1].size - source.shift
                if run is None or start != until:
                    break
                pieces.append(run)
                start += run.size
    except (CorruptBatchError, UnsupportedFormatError):
        if not pieces:
            raise
    return pieces


def _plan(
    source: BatchSource, layout: RunLayout, start: int, stop: int, enough: int
) -> list[tuple[int, BatchRun | None]]:
    """Return runs from ``start`` on, and where each begins: what is before it is not in a run.

    The last one is None, with the position up to which there are no more.
    """
    starts, end = _small_batches(source, layout, start, stop, enough)
    if len(starts) >= MIN_BATCHES:
        data = source.view[start:end].tobytes()
        runs = _runs(source, layout, data, start, starts)
        if runs:
            return [*((run.start, run) for run in runs), (end, None)]
    return [(max(end, min(start + SKIPPED_BYTES, enough)), None)]


def _small_batches(
    source: BatchSource, layout: RunLayout, start: int, stop: int, enough: int
) -> tuple[list[int], int]:
    """Return where small batches begin, from ``start`` on, and where the last of them ends.

    Only their prefixes and sizes are looked at.
    """
    view, unpack_size, prefix = source.view, layout.unpack_size, layout.prefix
    smallest, last_start = layout.size, min(enough, start + MAX_RUN_BYTES, stop - layout.size + 1)
    starts: list[int] = []
    while start < last_start:
        begin, size = unpack_size(view, start)
        is_small = begin == prefix and smallest <= size <= SMALL_BYTES
        if not is_small or size & 7 or start + size > stop:
            break
        starts.append(start)
        start += size
    return starts, start


def _runs(
    source: BatchSource, layout: RunLayout, data: bytes, shift: int, starts: list[int]
) -> list[BatchRun]:
    """Return the runs of usual batches among those at ``starts``."""
    at = np.array(starts) - shift
    heads = layout.heads(data, at)
    usual, block = layout.are_usual(data, at, heads), heads["block"]
    continued = (
        usual[1:]
        & usual[:-1]
        & (block["flags"][1:] == block["flags"][:-1])
        & (block["leader_epoch"][1:] == block["leader_epoch"][:-1])
        & (block["base_offset"][1:] == block["next_offset"][:-1])
    )
    bounds = [0, *(np.flatnonzero(~continued) + 1).tolist(), len(starts)]
    return [
        BatchRun(source, data, shift, at[begin:end], heads[begin:end])
        for begin, end in pairwise(bounds)
        if end - begin >= MIN_BATCHES and usual[begin]
    ]
