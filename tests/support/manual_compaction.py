"""Compacting by hand, record by record: what the tests of swapped segments begin from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa

from embedlog import batch
from embedlog.batch.wire import layout_of
from embedlog.partition import PartitionLog, flush, replace, roll


def keep(
    log: PartitionLog,
    kept_offsets: Collection[int],
    segments: slice = slice(None),
    *,
    parts: int = 1,
    **options: Any,
) -> None:
    """Replace some sealed segments by one that holds these offsets only, in so many batches."""
    log.refresh()
    flush.flush_up_to(log, log.active_segment.base_offset)
    with replace.rewrite_lock(log) as free:
        assert free
        old = [segment for segment in log.segments.values() if segment.sealed][segments]
        first, stop = old[0].base_offset, old[-1].next_offset
        assert stop is not None
        table = _rows(log, first, stop)
        mask = pa.array(
            [offset in kept_offsets for offset in table["offset"].to_pylist()], pa.bool_()
        )
        table = table.filter(mask).combine_chunks()
        # Of the first batch: no epoch is lower than one before it.
        epoch = log.reader(first).read()[0].leader_epoch
        swap = replace.Replacement(log, first, roll.columns_of_layout(layout_of(table.schema)))
        try:
            step = -(-table.num_rows // parts) or 1
            for start in range(0, max(table.num_rows, 1), step):
                some = table.slice(start, step).to_batches() or [_none(table.schema)]
                last = start + step >= table.num_rows
                end = stop if last else some[0]["offset"][-1].as_py() + 1
                swap.write(batch.encode(some[0]), first, end, epoch)
                first = end
            swap.swap(old, **options)
        finally:
            swap.abandon()


def _none(schema: Any) -> Any:
    return pa.RecordBatch.from_pylist([], schema=schema)


def _rows(log: PartitionLog, first: int, stop: int) -> Any:
    batches = []
    reader = log.reader(first)
    # What ends in a gap has nothing up to there.
    while reader.offset < stop and (read := reader.read()):
        for decoded in read:
            if decoded.base_offset < stop:
                columns = decoded.columns()
                schema = batch.schema(headers=decoded.has_headers, offsets=True)
                arrays = [*columns.columns, decoded.offsets()]
                batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return pa.Table.from_batches(batches)
