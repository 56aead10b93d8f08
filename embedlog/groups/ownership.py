"""Which member of a group owns which partition: one row per partition in `live`.

The row outlives its owner, and so does the epoch: every owner has a higher one than
those before it, and a commit names the epoch that its records were polled under.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from embedlog import keyspace, kv
from embedlog.keyspace import PARTITION_KEY
from embedlog.record import TopicPartition

NO_OWNER = ""
NO_START = -1


class PartitionOwner(NamedTuple):
    """The owner of a partition, and its ownership epoch."""

    epoch: int = 0
    """Grows whenever the partition gets an owner."""
    start: int = NO_START
    """Where a group that reads from the end began here, while it has committed nothing."""
    generation: int = -1
    """That of the group when it got the owner: if it is later than one that a member has seen, the
    member has lost the partition since."""
    member: str = NO_OWNER
    topic: str = ""


OWNERS = keyspace.OWNERS.typed(PartitionOwner)
_NUMBERS = OWNERS.value_layout.head
"""Epoch, start and generation."""


def topic_id(row_key: bytes) -> int:
    """Return the topic id of a row, by its key."""
    number: int = PARTITION_KEY.unpack(row_key[-PARTITION_KEY.size :])[0]
    return number


def topic_partition(row_key: bytes, owner: PartitionOwner) -> TopicPartition:
    """Return the partition of a row."""
    return TopicPartition(owner.topic, PARTITION_KEY.unpack(row_key[-PARTITION_KEY.size :])[1])


def get(txn: kv.Txn, row_key: bytes) -> PartitionOwner:
    """Return a row; a partition without a row has no owner."""
    row = txn.get(row_key)
    return PartitionOwner() if row is None else OWNERS.unpack(row)


def put(txn: kv.Txn, row_key: bytes, owner: PartitionOwner) -> None:
    """Write a row."""
    txn.put(row_key, OWNERS.pack(owner))


def of_group(txn: kv.Txn, group: bytes) -> Iterator[tuple[bytes, PartitionOwner]]:
    """Yield the rows of a group, by key."""
    for row_key, row in kv.rows(txn, OWNERS.prefix(group)):
        yield row_key, OWNERS.unpack(row)


def member_field(member: str) -> bytes:
    """Return a member's id as rows contain it, for `is_owned`."""
    return member.encode() + b"\0"


def is_owned(txn: kv.Txn, row_key: bytes, member: bytes, epoch: int) -> bool:
    """Return whether a member owns a partition by an epoch; takes a third of the time of `get`.

    Every commit calls this for each of its partitions, with the `member_field`.
    """
    row = txn.get(row_key)
    return (
        row is not None
        and row.startswith(member, _NUMBERS.size)
        and _NUMBERS.unpack_from(row)[0] == epoch
    )


def owned_or_assigned(
    txn: kv.Txn, group: bytes, member: str, assigned: Collection[bytes]
) -> Iterator[tuple[bytes, PartitionOwner]]:
    """Yield the rows of partitions that a member owns, and of those assigned to it, by key.

    The other rows are not decoded: in a large group that is nearly all of them.
    """
    field = member_field(member)
    for row_key, row in kv.rows(txn, OWNERS.prefix(group)):
        if row.startswith(field, _NUMBERS.size) or row_key[-PARTITION_KEY.size :] in assigned:
            yield row_key, OWNERS.unpack(row)


def free(
    txn: kv.Txn, group: bytes, members: Collection[str], *, forget_start: bool = False
) -> None:
    """Take all partitions from members.

    The next owner of a partition begins where they did, if they committed nothing; with
    ``forget_start``, in an empty group, it begins at the end at that time.
    """
    for row_key, owner in list(of_group(txn, group)):
        start = NO_START if forget_start else owner.start
        member = NO_OWNER if owner.member in members else owner.member
        if (start, member) != (owner.start, owner.member):
            put(txn, row_key, owner._replace(start=start, member=member))


def hand_over(txn: kv.Txn, group: bytes, before: str, after: str) -> None:
    """Give the partitions of one member to another, under new epochs."""
    for row_key, owner in list(of_group(txn, group)):
        if owner.member == before:
            put(txn, row_key, owner._replace(member=after, epoch=owner.epoch + 1))


def forget(
    txn: kv.Txn, group: bytes, subscribed: Collection[int], existing: Collection[int]
) -> None:
    """Delete the rows of deleted topics, and the starts in topics without a subscriber.

    Args:
        txn: A transaction of `live`.
        group: Its name.
        subscribed: The ids of the topics that members subscribe to.
        existing: The ids of all topics.
    """
    for row_key, owner in list(of_group(txn, group)):
        if owner.member != NO_OWNER or topic_id(row_key) in subscribed:
            continue
        if topic_id(row_key) not in existing:
            txn.delete(row_key)
        elif owner.start != NO_START:
            # The epoch stays: it must not start over under a member that was stopped.
            put(txn, row_key, owner._replace(start=NO_START))
