"""The short way of one plain record, for ``send(...).result()`` in a loop.

The general way gathers, splits and cuts; for a record that is alone there is
nothing to split, and those steps would cost as much as the append itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedlog.batch import encode_one
from embedlog.partitioner import partition_for_key

if TYPE_CHECKING:
    from embedlog.producer.lane import Lane
    from embedlog.producer.queue import TopicQueue


def ship(queue: TopicQueue, patience: float | None) -> bool:
    """Write the one plain record that is all a queue has; False if there is more to it.

    Under the queue's drain lock.  Whatever is unusual is left as it was, to the
    general way, which also finds the errors.
    """
    # `send` adds a record in several steps, and its thread may be stopped between any two.
    with queue.producer.lock:
        lane = _take(queue)
    if lane is None:
        return False
    gathering = queue.leaving[0]
    encoded = encode_one(gathering.values[0], gathering.keys[0], gathering.timestamps[0])
    try:
        lane.ship_alone(gathering, encoded, patience)
    finally:
        queue.leaving.clear()
    return True


def _take(queue: TopicQueue) -> Lane | None:
    """Under the producer's lock: take the record out of the queue; return its lane, or None."""
    gathering = queue.open
    if len(gathering.values) != 1 or queue.full or queue.leaving:
        return None
    if gathering.headers or gathering.chosen or not queue.plain:
        return None
    if queue.producer.abandoned or queue.version != queue.newest():
        return None
    key, value = gathering.keys[0], gathering.values[0]
    partition = 0 if queue.info.partitions == 1 else _partition(queue, key)
    lane = queue.lanes.get(partition)
    if lane is None or not lane.calm() or (key is None and queue.compacts):
        return None
    if len(value or b"") + len(key or b"") > queue.surely_fits:
        return None
    queue.leaving.append(gathering)
    queue.open = type(gathering)(queue)
    return lane


def _partition(queue: TopicQueue, key: bytes | None) -> int:
    """Return where the record goes; -1 if that is not easily said."""
    if key is None or queue.producer.config.partitioner_ignore_keys:
        return -1
    return partition_for_key(key, queue.info.partitions)
