"""Operations on one producer of a partition: read it, fence its older epochs, forget it.

A named producer that restarts continues where its sequence numbers ended, so that a
batch it sends again can be told from a new one.  To read that end safely it must first
fence older producers of that name; `fence_producer` does both in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from embedlog import kv
from embedlog.errors import InvalidProducerEpochError
from embedlog.partition import producer_state
from embedlog.partition.producer_state import PRODUCERS, ProducerState

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


def read_producer(log: PartitionLog, producer_id: int) -> ProducerState | None:
    """Return the partition's state of a producer."""
    log.tail()  # recovers the partition after a reboot
    return PRODUCERS.get(log.context.live, log.key, producer_id)


def fence_producer(
    log: PartitionLog, producer_id: int, epoch: int, timeout: float | None = None
) -> ProducerState:
    """Fence all older epochs of a producer, and return what it has sent so far.

    Waits ``timeout`` seconds for the partition, or the ``lock_timeout`` of the log.

    Raises:
        InvalidProducerEpochError: A producer with a newer epoch was fenced already.
        LockTimeoutError, StorageError: Nothing was changed.
    """
    live = log.context.live
    with log.owned(timeout):
        producer = PRODUCERS.get(live, log.key, producer_id)
        if producer is not None and producer.epoch > epoch:
            raise InvalidProducerEpochError(
                f"Epoch {epoch} was fenced by epoch {producer.epoch}",
                **log.where,
                todo="A newer producer has this name; close this one.",
            )
        if producer is None or producer.epoch < epoch:
            batches = () if producer is None else producer.batches
            fenced = producer_state.remembered(epoch, log.context.clock(), batches)
            live.write(lambda txn: PRODUCERS.put(txn, log.key, producer_id, value=fenced))
            return fenced
        return producer


def expire_producers(
    log: PartitionLog,
    now_ms: int,
    *,
    fence: Callable[[kv.Txn], None] | None = None,
    timeout: float | None = None,
) -> int:
    """Forget the producers that were idle for ``producer.id.expiration.ms``; return how many.

    The next batch of one of them is accepted with any sequence number, like the first
    batch of a new producer.

    Args:
        log: The partition.
        now_ms: The time, in milliseconds since 1970.
        fence: Called in the transaction that deletes; raises if the caller lost its right to.
        timeout: Seconds to wait for the partition; ``lock_timeout`` by default.

    Raises:
        LockTimeoutError: Another process holds the partition.
        FencedError: Raised by the fence.
    """
    log.context.check_writable()
    log.refresh()
    live, oldest = log.context.live, now_ms - log.config.producer_id_expiration_ms + 1
    # Without the lock: usually there are none, and a commit makes every
    # process read the tail again.
    if not live.read(lambda txn: producer_state.idle_keys(txn, log.key, oldest)):
        return 0

    def step(txn: kv.Txn) -> int:
        if fence is not None:
            fence(txn)
        return producer_state.expire(txn, log.key, oldest)

    # With the lock: an append in progress has read its producers already, and writes
    # their rows again.
    with log.owned(timeout):
        return live.write(step)
