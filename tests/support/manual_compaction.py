"""Compacting by hand, record by record: what the tests of swapped segments begin from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa

from embedlog import batch
from embedlog.partition import PartitionLog, flush, replace


def keep(
    log: PartitionLog,
    wanted: Collection[int],
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
        old = [one for one in log.segments.values() if one.sealed][segments]
        first, stop = old[0].base_offset, old[-1].next_offset
        assert stop is not None
        table = _rows(log, first, stop)
        mask = pa.array([offset in wanted for offset in table["offset"].to_pylist()], pa.bool_())
        table = table.filter(mask).combine_chunks()
        swap = replace.Replacement(log, first, headers="headers" in table.schema.names)
        try:
            step = -(-table.num_rows // parts) or 1
            for place in range(0, max(table.num_rows, 1), step):
                some = table.slice(place, step).to_batches() or [_none(table.schema)]
                last = place + step >= table.num_rows
                end = stop if last else some[0]["offset"][-1].as_py() + 1
                swap.write(batch.encode(some[0], offsets=True), first, end, 0)
                first = end
            swap.swap(old, **options)
        finally:
            swap.abandon()


def _none(schema: Any) -> Any:
    return pa.RecordBatch.from_pylist([], schema=schema)


def _rows(log: PartitionLog, first: int, stop: int) -> Any:
    found = []
    reader = log.reader(first)
    while reader.offset < stop:
        for one in reader.read():
            if one.base_offset < stop:
                columns = one.columns()
                schema = batch.schema(headers=one.has_headers, offsets=True)
                arrays = [*columns.columns, one.offsets()]
                found.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return pa.Table.from_batches(found)
