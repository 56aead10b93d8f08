"""The short way of one plain record, for ``send(...).result()`` in a loop.

The general way gathers, splits and cuts; for a record that is alone there is
nothing to split, and those steps would cost as much as the append itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedlog.batch import encode_one
from embedlog.partitioner import partition_for_key

if TYPE_CHECKING:
    from embedlog.producer.queue import Gathering, TopicQueue


def ship(queue: TopicQueue, patience: float | None) -> bool:
    """Write the one plain record that is all a queue has; False if there is more to it.

    Under the queue's drain lock.  Whatever is unusual is left as it was, to the
    general way, which also finds the errors.
    """
    gathering = queue.open
    if len(gathering.values) != 1 or queue.full or gathering.headers or gathering.chosen:
        return False
    if not queue.plain or queue.producer.abandoned or queue.version != queue.newest():
        return False
    key = gathering.keys[0]
    partition = 0 if queue.info.partitions == 1 else _partition(queue, key)
    lane = queue.lanes.get(partition)
    if lane is None or not lane.calm() or (key is None and queue.compacts):
        return False
    encoded = encode_one(gathering.values[0], key, gathering.timestamps[0])
    if encoded.size > queue.most or not _take(queue, gathering):
        return False
    lane.ship_alone(gathering, encoded, patience)
    queue.leaving = None
    return True


def _partition(queue: TopicQueue, key: bytes | None) -> int:
    """Return where the record goes; -1 if that is not easily said."""
    if key is None or queue.producer.config.partitioner_ignore_keys:
        return -1
    return partition_for_key(key, queue.info.partitions)


def _take(queue: TopicQueue, gathering: Gathering) -> bool:
    """Begin a new gathering, unless somebody has sent another record meanwhile."""
    with queue.producer.lock:
        alone = queue.open is gathering and len(gathering.values) == 1
        if alone:
            queue.leaving, queue.open = gathering, type(gathering)(queue)
    return alone
