"""Which member of a group owns which partition: one row per partition in `live`.

The row outlives its owner, and so does the epoch: every owner has a higher one than
those before it, and a commit names the epoch that its records were polled under (M22).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from embedlog import keyspace, kv
from embedlog.keyspace import PARTITION_KEY
from embedlog.record import TopicPartition

NOBODY = ""
NOWHERE = -1


class PartitionOwner(NamedTuple):
    """The owner of a partition, and the epoch it owns it by."""

    epoch: int = 0
    """Grows whenever the partition gets an owner."""
    start: int = NOWHERE
    """Where a group that reads from the end began here, while it has committed nothing."""
    member: str = NOBODY
    topic: str = ""


OWNERS = keyspace.OWNERS.typed(PartitionOwner)
_NUMBERS = OWNERS.value_layout.head
"""Epoch and start."""
_END = b"\0"
"""Ends the member's id."""


def topic_id(row_key: bytes) -> int:
    """Return the topic id of a row, by its key."""
    number: int = PARTITION_KEY.unpack_from(row_key, len(row_key) - PARTITION_KEY.size)[0]
    return number


def where(row_key: bytes, owner: PartitionOwner) -> TopicPartition:
    """Return the partition of a row."""
    partition: int = PARTITION_KEY.unpack_from(row_key, len(row_key) - PARTITION_KEY.size)[1]
    return TopicPartition(owner.topic, partition)


def get(txn: kv.Txn, row_key: bytes) -> PartitionOwner:
    """Return a row; a partition without one has no owner."""
    row = txn.get(row_key)
    return PartitionOwner() if row is None else OWNERS.unpack(row)


def put(txn: kv.Txn, row_key: bytes, owner: PartitionOwner) -> None:
    """Write a row."""
    txn.put(row_key, OWNERS.pack(owner))


def of_group(txn: kv.Txn, group: bytes) -> Iterator[tuple[bytes, PartitionOwner]]:
    """Yield the rows of a group, by key."""
    for row_key, row in kv.rows(txn, OWNERS.prefix(group)):
        yield row_key, OWNERS.unpack(row)


def is_owned(txn: kv.Txn, row_key: bytes, member: str, epoch: int) -> bool:
    """Return whether a member owns a partition by an epoch; takes a third of the time of `get`.

    Every commit asks this for each of its partitions.
    """
    row = txn.get(row_key)
    return (
        row is not None
        and row.startswith(member.encode() + _END, _NUMBERS.size)
        and _NUMBERS.unpack_from(row)[0] == epoch
    )


def concerning(
    txn: kv.Txn, group: bytes, member: str, partitions: Collection[bytes]
) -> Iterator[tuple[bytes, PartitionOwner]]:
    """Yield the rows of what a member owns, and of some partitions, by key, whoever owns them.

    The others are not decoded: in a large group that is nearly all of them.
    """
    field = member.encode() + _END
    for row_key, row in kv.rows(txn, OWNERS.prefix(group)):
        if row.startswith(field, _NUMBERS.size) or row_key[-PARTITION_KEY.size :] in partitions:
            yield row_key, OWNERS.unpack(row)


def free(
    txn: kv.Txn, group: bytes, members: Collection[str], *, forget_start: bool = False
) -> None:
    """Take all partitions from members.

    The next owner of a partition begins where they did, if they committed nothing; with
    ``forget_start``, in an empty group, it begins at the end at that time (E1).
    """
    for row_key, owner in list(of_group(txn, group)):
        start = NOWHERE if forget_start else owner.start
        member = NOBODY if owner.member in members else owner.member
        if (start, member) != (owner.start, owner.member):
            put(txn, row_key, owner._replace(start=start, member=member))


def hand_over(txn: kv.Txn, group: bytes, before: str, after: str) -> None:
    """Give a member what another one owned, under new epochs."""
    for row_key, owner in list(of_group(txn, group)):
        if owner.member == before:
            put(txn, row_key, owner._replace(member=after, epoch=owner.epoch + 1))


def forget(txn: kv.Txn, group: bytes, subscribed: Collection[int], known: Collection[int]) -> None:
    """Delete the rows of deleted topics, and the starts in topics without a subscriber.

    Args:
        txn: A transaction of `live`.
        group: Its name.
        subscribed: The ids of the topics that members subscribe to.
        known: The ids of all topics.
    """
    for row_key, owner in list(of_group(txn, group)):
        number = topic_id(row_key)
        if owner.member != NOBODY or number in subscribed:
            continue
        if number not in known:
            txn.delete(row_key)
        elif owner.start != NOWHERE:
            # The epoch stays: it must not start over under a member that was stopped.
            put(txn, row_key, owner._replace(start=NOWHERE))
