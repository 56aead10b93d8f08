"""Taking over a producer's sequence numbers in one partition.

A named producer that restarts continues where its sequence numbers ended, so that a
batch it sends again can be told from a new one.  To read that end safely it must first
fence older producers of that name (G17); `fence_producer` does both in one step.
"""

from __future__ import annotations

from embedlog.errors import InvalidProducerEpochError
from embedlog.partition import producer_state
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.recovery import current_tail, tail_locked
from embedlog.partition.state import PartitionState


def known(log: PartitionState, producer_id: int) -> ProducerState | None:
    """Return what the partition remembers of a producer."""
    current_tail(log)  # recovers the partition after a reboot
    return _read(log, producer_id)


def fence_producer(
    log: PartitionState, producer_id: int, epoch: int, timeout: float | None = None
) -> ProducerState:
    """Fence all older epochs of a producer, and return what it has sent so far.

    Waits ``timeout`` seconds for the partition, or the ``lock_timeout`` of the log.

    Raises:
        InvalidProducerEpochError: A producer with a newer epoch was fenced already.
        LockTimeoutError, StorageError: Nothing was changed.
    """
    log.acquire(timeout)
    try:
        tail_locked(log)
        producer = _read(log, producer_id)
        if producer is not None and producer.epoch > epoch:
            raise InvalidProducerEpochError(
                f"Epoch {epoch} was fenced by epoch {producer.epoch}",
                topic=log.topic,
                partition=log.partition,
                todo="A newer producer has this name; close this one.",
            )
        if producer is None or producer.epoch < epoch:
            batches = () if producer is None else producer.batches
            producer = producer_state.remembered(epoch, log.context.clock(), batches)
            key, row = producer_state.key(log.key, producer_id), producer.row
            log.context.live.write(lambda txn: txn.put(key, row))
        return producer
    finally:
        log.release()


def _read(log: PartitionState, producer_id: int) -> ProducerState | None:
    row = log.context.live.get(producer_state.key(log.key, producer_id))
    return None if row is None else producer_state.unpack(row)
