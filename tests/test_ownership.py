"""Ownership rows: epochs grow, and a partition without an owner keeps its row (M22)."""

import pytest

from embedlog.groups import ownership
from embedlog.groups.ownership import NO_OWNER, NO_START, OWNERS, PartitionOwner
from embedlog.keyspace import PARTITION_KEY
from embedlog.record import TopicPartition


@pytest.fixture
def live(root):
    return root.context.live


def key(topic, partition=0, group=b"g"):
    return OWNERS.key(group, PARTITION_KEY.pack(topic, partition))


def put(live, rows):
    def step(txn):
        for row_key, owner in rows.items():
            ownership.put(txn, row_key, owner)

    live.write(step)


def rows(live, group=b"g"):
    return live.read(lambda txn: dict(ownership.of_group(txn, group)))


ROWS = [
    PartitionOwner(),
    PartitionOwner(1, NO_START, "a", "t"),
    PartitionOwner((1 << 64) - 1, (1 << 63) - 1, "ä-" + "0" * 36, "t" * 200),
    PartitionOwner(3, 0, NO_OWNER, "t"),
]


@pytest.mark.parametrize("owner", ROWS, ids=str)
def test_a_row_comes_back_as_it_was(owner):
    """Epoch, start, member and topic come back."""
    assert OWNERS.unpack(OWNERS.pack(owner)) == owner


def test_a_key_contains_partition_and_topic():
    """The key has the id of the topic, the row its name."""
    assert ownership.topic_id(key(7, 3)) == 7
    assert ownership.topic_partition(key(7, 3), PartitionOwner(topic="t")) == TopicPartition("t", 3)


def test_a_group_has_only_its_own_rows():
    """Groups whose names begin alike have separate rows (M17)."""
    names = [b"g", b"g2", b"gg", b"g\x01", b"g ", b"f"]
    keys = {name: OWNERS.key(name, PARTITION_KEY.pack(1, 0)) for name in names}
    for name in names:
        prefix = OWNERS.prefix(name)
        assert [other for other in names if keys[other].startswith(prefix)] == [name]


def test_a_missing_row_means_no_owner(live):
    """The first owner gets epoch 1."""
    assert live.read(lambda txn: ownership.get(txn, key(1))) == PartitionOwner(
        0, NO_START, NO_OWNER, ""
    )


def test_freed_partitions_keep_epoch_and_start(live):
    """The next owner begins where the group began, with a higher epoch (E1, M22)."""
    put(live, {key(1): PartitionOwner(4, 9, "a", "t"), key(1, 1): PartitionOwner(2, 8, "b", "t")})
    live.write(lambda txn: ownership.free(txn, b"g", {"a"}))

    assert rows(live) == {
        key(1): PartitionOwner(4, 9, NO_OWNER, "t"),
        key(1, 1): PartitionOwner(2, 8, "b", "t"),
    }


def test_when_the_last_member_leaves_every_start_is_forgotten(live):
    """Partitions without an owner lose theirs, too: the next member has a new start (E1)."""
    put(
        live,
        {key(1): PartitionOwner(4, 9, "a", "t"), key(1, 1): PartitionOwner(2, 8, NO_OWNER, "t")},
    )
    live.write(lambda txn: ownership.free(txn, b"g", {"a"}, forget_start=True))

    assert rows(live) == {
        key(1): PartitionOwner(4, NO_START, NO_OWNER, "t"),
        key(1, 1): PartitionOwner(2, NO_START, NO_OWNER, "t"),
    }


def test_a_partition_that_is_handed_over_has_a_new_epoch(live):
    """A commit of the previous owner is refused by its epoch (M13)."""
    put(live, {key(1): PartitionOwner(4, 9, "a", "t"), key(1, 1): PartitionOwner(2, 8, "b", "t")})
    live.write(lambda txn: ownership.hand_over(txn, b"g", "a", "c"))

    assert rows(live) == {
        key(1): PartitionOwner(5, 9, "c", "t"),
        key(1, 1): PartitionOwner(2, 8, "b", "t"),
    }


FORGOTTEN = {
    # (member, topic id) → the row afterwards
    "owned, of a deleted topic": ("a", 3, PartitionOwner(4, 9, "a", "t")),
    "free, of a deleted topic": (NO_OWNER, 3, None),
    "free, of a topic without subscribers": (
        NO_OWNER,
        2,
        PartitionOwner(4, NO_START, NO_OWNER, "t"),
    ),
    "free, of a topic with subscribers": (NO_OWNER, 1, PartitionOwner(4, 9, NO_OWNER, "t")),
}


@pytest.mark.parametrize("case", FORGOTTEN)
def test_a_row_is_forgotten_with_its_topic_only(live, case):
    """While the topic exists, its epochs never start over (M22)."""
    member, topic, expected = FORGOTTEN[case]
    put(live, {key(topic): PartitionOwner(4, 9, member, "t")})
    live.write(lambda txn: ownership.forget(txn, b"g", {1}, {1, 2}))

    assert rows(live).get(key(topic)) == expected


def test_a_group_is_not_touched_by_steps_of_another(live):
    """`free`, `hand_over` and `forget` change the rows of one group (M17)."""
    other = {key(1, group=b"g2"): PartitionOwner(4, 9, "a", "t")}
    put(live, {key(1): PartitionOwner(4, 9, "a", "t"), **other})

    def step(txn):
        ownership.hand_over(txn, b"g", "a", "b")
        ownership.free(txn, b"g", {"a", "b"}, forget_start=True)
        ownership.forget(txn, b"g", set(), set())

    live.write(step)
    assert rows(live) == {}
    assert rows(live, b"g2") == other
