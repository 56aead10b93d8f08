"""The short way of one plain record, for ``send(...).result()`` in a loop.

The general way gathers, splits and cuts; for a record that is alone there is
nothing to split, and those steps would cost as much as the append itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedlog.batch import encode_one
from embedlog.partitioner import partition_for_key

if TYPE_CHECKING:
    from embedlog.producer.partition_writer import PartitionWriter
    from embedlog.producer.topic_queue import TopicQueue


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
    key = gathering.keys[0]
    encoded = encode_one(gathering.values[0], key, gathering.timestamps[0])
    if (key is None or queue.sticks) and queue.info.partitions > 1:
        queue.splitter.stayed(encoded.size)
    try:
        lane.ship_alone(gathering, encoded, patience)
    finally:
        queue.leaving.clear()
    return True


def _take(queue: TopicQueue) -> PartitionWriter | None:
    """Under the producer's lock: take the record out of the queue; return its lane, or None."""
    gathering = queue.open
    if (
        len(gathering.values) != 1
        or queue.full
        or queue.leaving
        or gathering.headers
        or gathering.chosen
    ):
        return None
    if not queue.plain or queue.producer.abandoned or queue.version != queue.newest():
        return None
    key, partition, partitions = gathering.keys[0], 0, queue.info.partitions
    if partitions != 1:
        if key is None or queue.sticks:
            partition = queue.splitter.stay()
        else:
            partition = partition_for_key(key, partitions)
    lane = queue.lanes.get(partition)
    if lane is None or not lane.calm() or (key is None and queue.compacts):
        return None
    if gathering.granted - gathering.left > queue.surely_fits:
        return None
    queue.leaving.append(gathering)
    queue.open = type(gathering)(queue)
    return lane
