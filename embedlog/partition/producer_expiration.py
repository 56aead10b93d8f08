"""Forgetting the producers that a partition has not heard of for long (G19)."""

from __future__ import annotations

from collections.abc import Callable

from embedlog import kv
from embedlog.partition.recovery import tail_locked
from embedlog.partition.remembered_producers import expire, idle_producers, oldest_ms
from embedlog.partition.state import PartitionState


def expire_producers(
    log: PartitionState,
    now_ms: int,
    *,
    fence: Callable[[kv.Txn], None] | None = None,
    timeout: float | None = None,
) -> int:
    """Forget the producers that were idle for ``producer.id.expiration.ms``; return how many.

    The next batch of one of them is accepted with any sequence number, like the first
    batch of a new producer (G17).

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
    live, oldest = log.context.live, oldest_ms(log, now_ms)
    # Without the lock: usually there are none, and a commit makes every
    # process read the tail again.
    if not live.read(lambda txn: idle_producers(txn, log.key, oldest)):
        return 0

    def step(txn: kv.Txn) -> int:
        if fence is not None:
            fence(txn)
        return expire(txn, log.key, oldest)

    # With the lock: an append in progress has read its producers already, and writes
    # their rows again.
    log.acquire(timeout)
    try:
        tail_locked(log)
        return live.write(step)
    finally:
        log.release()
