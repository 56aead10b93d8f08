"""Batches for the wire that will probably be asked for, such as the last ones from producers."""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from embedlog.partition import PartitionLog
from embedlog.server.record_batches import WireBatch

MAX_BYTES = 32 << 20
_BASE_OFFSET, _LEADER_EPOCH = struct.Struct(">q"), struct.Struct(">i")
_EPOCH_AT = 12
"""Neither field is covered by the CRC of a batch."""


class CachedBatches(NamedTuple):
    """Batches that are returned together."""

    next_offset: int
    leader_epoch: int
    codec: str
    parts: list[Any]
    """Their bytes."""
    size: int


class TailCache:
    """Batches by partition and first offset; the oldest are dropped.

    A consumer of them costs no conversion, and gets them as compressed as they came.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._batches: OrderedDict[tuple[bytes, int], CachedBatches] = OrderedDict()
        self._left, self._lock = max_bytes, threading.Lock()

    def put(self, log: PartitionLog, offset: int, epoch: int, batch: WireBatch) -> None:
        """Keep a batch that was appended at an offset."""
        raw = bytearray(batch.raw)
        _BASE_OFFSET.pack_into(raw, 0, offset)
        _LEADER_EPOCH.pack_into(raw, _EPOCH_AT, epoch)
        facts = offset + batch.record_count, epoch, batch.codec
        self.keep(log, offset, CachedBatches(*facts, [bytes(raw)], len(raw)))

    def keep(self, log: PartitionLog, offset: int, batches: CachedBatches) -> None:
        """Keep batches for consumers at an offset."""
        with self._lock:
            before = self._batches.pop((log.key, offset), None)
            self._batches[log.key, offset] = batches
            self._left -= batches.size - (0 if before is None else before.size)
            while self._left < 0:
                _, dropped = self._batches.popitem(last=False)
                self._left += dropped.size

    def get(
        self, log: PartitionLog, offset: int, end: int, epoch: int, max_bytes: int, *, zstd: bool
    ) -> list[Any]:
        """Return the parts of the batches from an offset on, up to a batch that is not there.

        Args:
            log: The partition.
            offset: Where the first one must begin.
            end: How far readers see.
            epoch: The leader epoch; after a truncation it is another one.
            max_bytes: About how many bytes to return; at least one batch is returned.
            zstd: Whether the consumer knows this codec.
        """
        found, size = list[Any](), 0
        with self._lock:
            while batch := self._batches.get((log.key, offset)):
                is_usable = batch.leader_epoch == epoch and batch.next_offset <= end
                too_new = batch.codec == "zstd" and not zstd
                if not is_usable or too_new or (found and size + batch.size > max_bytes):
                    break
                found += batch.parts
                size += batch.size
                offset = batch.next_offset
        return found
