"""Forgetting the producers that a partition has not heard of for long (G19).

Every process that makes a producer has an id of its own, so what is remembered
of them would grow for ever.  The housekeeping forgets them with `expire_producers`;
they are also forgotten where the partition looks at all of them anyway: when it
rolls, is flushed or recovered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from embedlog import kv
from embedlog.partition import producer_state

if TYPE_CHECKING:
    from embedlog.partition.partition_log import PartitionLog


def oldest_ms(log: PartitionLog, now_ms: int) -> int:
    """When a producer must have appended, or taken its name over, to be remembered."""
    return now_ms - log.config.producer_id_expiration_ms + 1


def expire_producers(
    log: PartitionLog,
    now_ms: int,
    *,
    fence: Callable[[kv.Txn], None] | None = None,
    timeout: float | None = None,
) -> int:
    """Forget the producers that were idle for ``producer.id.expiration.ms``; return how many.

    What one of them sends next is taken as a new producer's first batch is, with
    any sequence number (G17).

    Args:
        log: The partition.
        now_ms: The time, in milliseconds since 1970.
        fence: Called in the transaction that deletes; raises if the caller may not.
        timeout: Seconds to wait for the partition; as long as for any lock by default.

    Raises:
        LockTimeoutError: Another process holds the partition.
        FencedError: The fence's.
    """
    log.context.check_writable()
    log.refresh()
    live, oldest = log.context.live, oldest_ms(log, now_ms)
    # Without the lock: mostly there are none, and a commit has everybody look at the tail again.
    if not live.read(lambda txn: _idle(txn, log.key, oldest)):
        return 0

    def step(txn: kv.Txn) -> int:
        if fence is not None:
            fence(txn)
        return expire(txn, log.key, oldest)

    # An append that is under way knows its producers already, and writes their rows again.
    log.acquire(timeout)
    try:
        log.tail_locked()
        return live.write(step)
    finally:
        log.release()


def expire(txn: kv.Txn, partition_key: bytes, oldest: int) -> int:
    """The step of `expire_producers`, as a part of somebody's transaction."""
    found = _idle(txn, partition_key, oldest)
    for key in found:
        txn.delete(key)
    return len(found)


def _idle(txn: kv.Txn, partition_key: bytes, oldest: int) -> list[bytes]:
    rows = kv.rows(txn, producer_state.PRODUCERS.prefix(partition_key))
    return [key for key, row in rows if producer_state.last_ms(row) < oldest]
