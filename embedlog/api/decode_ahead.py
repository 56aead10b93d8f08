"""Decodes the batches of a view in several threads, in order: decompression uses every CPU."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from embedlog.api.offset_range import OffsetRange
from embedlog.batch.tables import BatchRows

Decode = Callable[[Sequence[BatchRows], int], Any]
"""Returns the table of some batches of a partition."""

_LEAST_BYTES = 256 << 10
"""To start threads for less takes longer than decoding it."""
_GROUP_BYTES = 512 << 10
"""Compressed bytes that are decoded together: each group takes a thread some time to get."""


def decoded_tables(
    reads: Iterable[tuple[OffsetRange, Sequence[BatchRows]]], decode: Decode
) -> Iterator[Any]:
    """Yield the tables of batches, in order.

    Uncompressed batches are decoded together, since nothing is copied.  Compressed ones may be
    a hundred times larger when decoded: a few at a time in each thread.

    Args:
        reads: Batches that were read together, with the partition that they are of.
        decode: Must be safe to be called by several threads.
    """
    threads = len(os.sched_getaffinity(0))
    pool: ThreadPoolExecutor | None = None
    pending: deque[Future[Any]] = deque()
    try:
        for part, batches in reads:
            if not any(batch.is_compressed for batch, _, _ in batches):
                while pending:
                    yield pending.popleft().result()
                yield decode(batches, part.partition)
                continue
            if pool is None and threads > 1 and _size(batches) >= _LEAST_BYTES:
                pool = ThreadPoolExecutor(threads, "embedlog-decode")
            for group in _groups(batches):
                if pool is None:
                    yield decode(group, part.partition)
                    continue
                if len(pending) > threads:
                    yield pending.popleft().result()
                pending.append(pool.submit(decode, group, part.partition))
        while pending:
            yield pending.popleft().result()
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _groups(batches: Sequence[BatchRows]) -> Iterator[list[BatchRows]]:
    """Yield the batches in groups of a few hundred KB, or of a single larger one."""
    group: list[BatchRows] = []
    for rows in batches:
        if group and _size(group) + rows[0].size > _GROUP_BYTES:
            yield group
            group = []
        group.append(rows)
    yield group


def _size(batches: Sequence[BatchRows]) -> int:
    return sum(batch.size for batch, _, _ in batches)
