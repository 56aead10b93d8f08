"""Losses and doubles for the audit to find: planted in a log, where no API would make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from typing import Any

import pyarrow as pa

from embedlog import batch as batches
from embedlog.batch import EXPLICIT_OFFSETS, Batch, EncodedBatch
from embedlog.partition import PartitionLog
from embedlog.partition.replace import Replacement
from embedlog.schemas.typed_batch import typed

MINUTE_MS = 60_000


def lose(log: PartitionLog, offsets: Collection[int]) -> set[int]:
    """Remove records from a partition by their offsets, as if they had never been there.

    Seals the active segment first.  A segment keeps its first record.  Returns what is lost.
    """
    log.roll()
    log.flush()
    log.refresh()
    lost = set(offsets) - {info.base_offset for info in log.segments.values()}
    for info in list(log.segments.values()):
        if not info.sealed or not any(info.base_offset <= o < info.next_offset for o in lost):
            continue
        file = log.open_segment(info)
        stored = file.mapped(file.start, info.end_position, 1 << 60)
        new = Replacement(log, info.base_offset, info, offsets=True)
        left = [(batch, rest) for batch in stored if (rest := without(batch, lost)) is not None]
        # As after a compaction, a batch begins where the one before it ends.
        ends = [batch.next_offset for batch, _ in left[:-1]]
        bounds = [info.base_offset, *ends, info.next_offset]
        for (batch, rest), (begin, end) in zip(left, pairwise(bounds), strict=True):
            new.write(rest, begin, end, batch.leader_epoch)
        new.swap([info], epoch=log.tail().leader_epoch)
    log.refresh()
    return lost


def without(batch: Batch, lost: Collection[int]) -> EncodedBatch | None:
    """Return a batch with its offsets as a column, without some of them; None if none is left."""
    offsets, columns = batch.offsets(), batch.columns(batch.schema.names)
    names = [
        *columns.schema,
        pa.field("_offset" if batch.is_typed else "offset", pa.int64(), False),
    ]
    schema = pa.schema(names, metadata=batch.layout.original.metadata)
    whole = pa.RecordBatch.from_arrays([*columns.columns, offsets], schema=schema)
    keep = pa.array([offset not in lost for offset in offsets.to_pylist()], pa.bool_())
    if not any(keep.to_pylist()):
        return None
    encoded = batches.encode(whole.filter(keep))
    assert encoded.flags & EXPLICIT_OFFSETS
    if batch.producer_id is not None:
        encoded.set_producer(batch.producer_id, batch.producer_epoch, batch.base_sequence)
    return encoded


def double(log: PartitionLog, offset: int) -> tuple[int, Counter[int]]:
    """Append the batch with an offset again, as its producer would with the next numbers.

    Returns the number of its records, and the minutes of their timestamps.
    """
    reader = log.reader(offset)
    batch = reader.read(1)[0]
    times = batch.timestamps().view(pa.int64()).to_pylist()
    state = log.remembered_producers()[batch.producer_id]
    copy: Any = batches.to_encoded(batch)
    if log.schema is not None:
        copy = typed(copy, log.schema)
    copy.set_producer(batch.producer_id, batch.producer_epoch, state.batches[-1].last_sequence + 1)
    log.append([copy])
    return batch.count, Counter(time // MINUTE_MS for time in times)
