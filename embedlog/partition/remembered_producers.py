"""Which producers a partition remembers, and for how long (G19).

Each process that makes a producer has an id of its own, so the rows would grow without
limit.  A producer that was idle for ``producer.id.expiration.ms`` is forgotten by
`expire_producers`, and whenever the partition reads all of them anyway: when it is
rolled, flushed or recovered.
"""

from __future__ import annotations

from embedlog import kv
from embedlog.partition import producer_state
from embedlog.partition.bounded_clock import bounded_ms
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.state import PartitionState


def oldest_ms(log: PartitionState, now_ms: int) -> int:
    """Return when a producer must have appended, or been fenced, to be remembered."""
    return now_ms - log.config.producer_id_expiration_ms + 1


def remembered_producers(log: PartitionState) -> dict[int, ProducerState]:
    """Return what the partition remembers of its producers, without those idle too long."""
    prefix = producer_state.PRODUCERS.prefix(log.key)
    oldest = oldest_ms(log, bounded_ms(log.context))

    def step(txn: kv.Txn) -> dict[int, ProducerState]:
        return {
            int.from_bytes(row_key[-8:], "big"): producer_state.unpack(row)
            for row_key, row in kv.rows(txn, prefix)
            if producer_state.last_ms(row) >= oldest
        }

    return log.context.live.read(step)


def expire(txn: kv.Txn, partition_key: bytes, oldest: int) -> int:
    """Delete the rows of idle producers, in a transaction of `live`; return how many."""
    keys = idle_producers(txn, partition_key, oldest)
    for key in keys:
        txn.delete(key)
    return len(keys)


def idle_producers(txn: kv.Txn, partition_key: bytes, oldest: int) -> list[bytes]:
    """Return the keys of producers that neither appended nor were fenced since a time."""
    rows = kv.rows(txn, producer_state.PRODUCERS.prefix(partition_key))
    return [key for key, row in rows if producer_state.last_ms(row) < oldest]
