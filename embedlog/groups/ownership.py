"""Which member of a group owns which partition: one row per partition in `live`.

The row stays when nobody has the partition, and so does its epoch: every owner
has a higher one than those before it, and a commit names the one it was
polled under (M22).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

from embedlog import kv
from embedlog.catalog import PARTITION_KEY
from embedlog.record import TopicPartition

ROWS = b"O"
NOBODY = ""
NOWHERE = -1

_ROW = struct.Struct(">Qq")
_END = b"\0"


class PartitionOwner(NamedTuple):
    """Who owns a partition, by which epoch."""

    epoch: int = 0
    """Grows whenever the partition gets an owner."""
    start: int = NOWHERE
    """Where a group that reads from the end began here, as long as it committed nothing."""
    member: str = NOBODY
    topic: str = ""

    def pack(self) -> bytes:
        """Return the row as stored."""
        return _ROW.pack(self.epoch, self.start) + _END.join(
            (self.member.encode(), self.topic.encode())
        )


def unpack(row: bytes) -> PartitionOwner:
    """Return a stored row."""
    member, _, topic = bytes(row[_ROW.size :]).partition(_END)
    epoch, start = _ROW.unpack_from(row)
    return PartitionOwner(epoch, start, member.decode(), topic.decode())


def key(group: bytes, partition: bytes) -> bytes:
    """Return the key of a partition's row in a group."""
    return ROWS + group + _END + partition


def topic_id(row_key: bytes) -> int:
    """Return the id of the topic that a row is about."""
    number: int = PARTITION_KEY.unpack_from(row_key, len(row_key) - PARTITION_KEY.size)[0]
    return number


def where(row_key: bytes, owner: PartitionOwner) -> TopicPartition:
    """Return the partition that a row is about."""
    partition: int = PARTITION_KEY.unpack_from(row_key, len(row_key) - PARTITION_KEY.size)[1]
    return TopicPartition(owner.topic, partition)


def get(txn: kv.Txn, row_key: bytes) -> PartitionOwner:
    """Return a row; one that is not there has no owner."""
    row = txn.get(row_key)
    return PartitionOwner() if row is None else unpack(row)


def of_group(txn: kv.Txn, group: bytes) -> Iterator[tuple[bytes, PartitionOwner]]:
    """Yield the rows of a group."""
    for row_key, row in kv.rows(txn, ROWS + group + _END):
        yield bytes(row_key), unpack(row)


def is_owned(txn: kv.Txn, row_key: bytes, member: str, epoch: int) -> bool:
    """Whether a member owns a partition by an epoch; a third of the time of `get`.

    Every commit asks so for each of its partitions.
    """
    row = txn.get(row_key)
    return (
        row is not None
        and row.startswith(member.encode() + _END, _ROW.size)
        and _ROW.unpack_from(row)[0] == epoch
    )


def concerning(
    txn: kv.Txn, group: bytes, member: str, partitions: Collection[bytes]
) -> Iterator[tuple[bytes, PartitionOwner]]:
    """Yield the rows of what a member owns, and of some partitions, by key, whoever owns them.

    The others are not taken apart: in a large group that is nearly all of them.
    """
    mine = member.encode() + _END
    for row_key, row in kv.rows(txn, ROWS + group + _END):
        if row.startswith(mine, _ROW.size) or row_key[-PARTITION_KEY.size :] in partitions:
            yield row_key, unpack(row)


def of_members(
    txn: kv.Txn, group: bytes, members: Collection[str]
) -> list[tuple[bytes, PartitionOwner]]:
    """Return the rows of a group that some members own."""
    return [found for found in of_group(txn, group) if found[1].member in members]


def free(
    txn: kv.Txn, group: bytes, members: Collection[str], *, forget_start: bool = False
) -> None:
    """Let members own nothing any more.

    Who takes a partition next begins where they did, if they committed nothing;
    with ``forget_start``, in an empty group, it begins at the end of then (E1).
    """
    for row_key, owner in list(of_group(txn, group)):
        start = NOWHERE if forget_start else owner.start
        free = NOBODY if owner.member in members else owner.member
        if (start, free) != (owner.start, owner.member):
            txn.put(row_key, owner._replace(start=start, member=free).pack())


def hand_over(txn: kv.Txn, group: bytes, before: str, after: str) -> None:
    """Let a member own what another one did, under new epochs."""
    for row_key, owner in of_members(txn, group, {before}):
        txn.put(row_key, owner._replace(member=after, epoch=owner.epoch + 1).pack())


def forget(txn: kv.Txn, group: bytes, subscribed: Collection[int], there: Collection[int]) -> None:
    """Drop the rows of topics that are not there any more, and where readers began of others.

    Args:
        txn, group: Where.
        subscribed: The ids of the topics that somebody reads.
        there: The ids of all topics.
    """
    for row_key, owner in list(of_group(txn, group)):
        number = topic_id(row_key)
        if owner.member != NOBODY or number in subscribed:
            continue
        if number not in there:
            txn.delete(row_key)
        elif owner.start != NOWHERE:
            # The epoch stays: it must not begin anew under one who was stopped.
            txn.put(row_key, owner._replace(start=NOWHERE).pack())
