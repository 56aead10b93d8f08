"""Taking over a producer's numbering in one partition, and asking how far it is.

A named producer that comes back goes on where its numbers ended, so that a
batch it sends again can be told from a new one.  To read that end safely it
must first fence whoever still has the name (G17): both are one step here.
"""

from __future__ import annotations

from embedlog.errors import InvalidProducerEpochError
from embedlog.partition import producer_state
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.producer_state import ProducerState


def known(log: PartitionLog, producer_id: int) -> ProducerState | None:
    """Return what the partition remembers of a producer."""
    log.tail()  # which recovers the partition, if nobody did since the reboot
    row = log.context.live.get(producer_state.key(log.key, producer_id))
    return None if row is None else producer_state.unpack(row)


def fence_producer(
    log: PartitionLog, producer_id: int, epoch: int, timeout: float | None = None
) -> ProducerState:
    """Fence every older epoch of a producer here, and return what it sent so far.

    Waits ``timeout`` seconds for the partition, or as long as for any lock.

    Raises:
        InvalidProducerEpochError: A newer producer of that name was faster.
        LockTimeoutError, StorageError: Nothing was changed.
    """
    log.acquire(timeout)
    try:
        found = known_locked(log, producer_id)
        if found is not None and found.epoch > epoch:
            raise InvalidProducerEpochError(
                f"epoch {epoch} was fenced by epoch {found.epoch}",
                topic=log.topic,
                partition=log.partition,
                todo="a newer producer has this name; close this one",
            )
        if found is None or found.epoch < epoch:
            batches = () if found is None else found.batches
            found = producer_state.remembered(epoch, log.context.clock(), batches)
            key, row = producer_state.key(log.key, producer_id), found.row
            log.context.live.write(lambda txn: txn.put(key, row))
        return found
    finally:
        log.release()


def known_locked(log: PartitionLog, producer_id: int) -> ProducerState | None:
    """Return what the partition remembers of a producer, under its lock."""
    log.tail_locked()
    row = log.context.live.get(producer_state.key(log.key, producer_id))
    return None if row is None else producer_state.unpack(row)
