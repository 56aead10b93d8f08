"""Where replicas are placed: Kafka's examples, and what holds for every set of directories.

The figures are those of Kafka 4.0's `AdminRackAwareTest`, `StripedReplicaPlacerTest`, the
documentation of `AdminUtils`, and KIP-36.
"""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlog.errors import InvalidPartitionsError, InvalidReplicationFactorError
from embedlog.replication.placement import alternate_racks, assign_replicas


def racks(text):
    """Read ``aabbc`` as the racks of directories 0 to 4."""
    return dict(enumerate(text))


def no_racks(count):
    """Return directories without racks."""
    return dict.fromkeys(range(count))


def loads(assignment, directories):
    """Count the preferred leaders, and the replicas, of each directory."""
    leaders = Counter(replicas[0] for replicas in assignment.values())
    replicas = Counter(each for replicas in assignment.values() for each in replicas)
    return [leaders[each] for each in directories], [replicas[each] for each in directories]


def racks_of(replicas, directories):
    """Return the racks that a partition is in."""
    return {directories[each] for each in replicas}


topologies = st.dictionaries(
    st.integers(0, 30), st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=9
)


@pytest.mark.parametrize(
    ("directories", "order"),
    [
        ({0: "1", 1: "3", 2: "3", 3: "2", 4: "2", 5: "1"}, [0, 3, 1, 5, 4, 2]),
        ({0: "1", 1: "3", 2: "3", 3: "2", 4: "2"}, [0, 3, 1, 4, 2]),
        (racks("111222333"), [0, 3, 6, 1, 4, 7, 2, 5, 8]),
    ],
)
def test_racks_alternate_in_the_order_of_directories(directories, order):
    """AdminRackAwareTest, and the documentation of `AdminUtils.getRackAlternatedBrokerList`."""
    assert alternate_racks(directories) == order


def test_seven_partitions_on_six_directories_in_three_racks_are_placed_as_in_kafka():
    """AdminRackAwareTest.testGetRackAlternatedBrokerListAndAssignReplicasToBrokers."""
    directories = {0: "1", 1: "3", 2: "3", 3: "2", 4: "2", 5: "1"}

    assert assign_replicas(7, 3, directories) == {
        0: (0, 3, 1),
        1: (3, 1, 5),
        2: (1, 5, 4),
        3: (5, 4, 2),
        4: (4, 2, 0),
        5: (2, 0, 3),
        6: (0, 4, 2),
    }


def test_ten_partitions_on_five_directories_without_racks_are_placed_as_in_kafka():
    """AdminRackAwareTest.testReplicaAssignment, and the table in AdminUtils."""
    assert assign_replicas(10, 3, no_racks(5)) == {
        0: (0, 1, 2),
        1: (1, 2, 3),
        2: (2, 3, 4),
        3: (3, 4, 0),
        4: (4, 0, 1),
        5: (0, 2, 3),
        6: (1, 3, 4),
        7: (2, 4, 0),
        8: (3, 0, 1),
        9: (4, 1, 2),
    }


@pytest.mark.parametrize(
    ("partitions", "factor", "directories", "start", "first"),
    [
        (6, 3, racks("122331"), 2, 0),  # testAssignmentWithRackAware
        (6, 3, racks("122331"), None, 0),  # ...WithRandomStartIndex
        (12, 2, racks("122331"), None, 0),  # testAssignmentWith2ReplicasRackAware
        (12, 2, dict(enumerate("122331", 6)), None, 12),  # testRackAwareExpansion
        (6, 2, racks("122331"), None, 0),  # ...With6Partitions
        (3, 2, {0: "1", 1: "2", 4: "3"}, None, 0),  # ...With6PartitionsAnd3Brokers
        (96, 3, racks("122331122313"), None, 0),  # testLargeNumberPartitionsAssignment
    ],
)
def test_racks_of_equal_size_get_equal_numbers_of_leaders_and_replicas(
    partitions, factor, directories, start, first
):
    """The cases of AdminRackAwareTest in which Kafka checks all of its three goals."""
    rng = random.Random(7) if start is None else None
    assignment = assign_replicas(
        partitions, factor, directories, first_partition=first, start=start or 0, rng=rng
    )

    leaders, replicas = loads(assignment, directories)
    assert list(assignment) == list(range(first, first + partitions))
    assert set(leaders) == {partitions // len(directories)}
    assert set(replicas) == {partitions * factor // len(directories)}
    assert all(len(racks_of(each, directories)) == factor for each in assignment.values())


@pytest.mark.parametrize(
    ("partitions", "factor", "directories", "in_racks"),
    [
        (13, 3, racks("122331"), 3),  # testAssignmentWithRackAwareWithUnevenReplicas
        (12, 3, racks("112331"), 3),  # testAssignmentWithRackAwareWithUnevenRacks
        (6, 5, racks("122332"), 3),  # testMoreReplicasThanRacks
        (6, 2, racks("122332"), 2),  # testLessReplicasThanRacks
        (6, 3, racks("111111"), 1),  # testSingleRack
        (6, 4, racks("abcaa"), 3),  # testSkipBrokerWithReplicaAlreadyAssigned
    ],
)
def test_a_partition_is_in_as_many_racks_as_possible(partitions, factor, directories, in_racks):
    """The cases of AdminRackAwareTest with racks of unequal size."""
    assignment = assign_replicas(partitions, factor, directories, rng=random.Random(3))

    leaders, _ = loads(assignment, directories)
    assert max(leaders) - min(leaders) <= 1
    assert all(len(set(each)) == factor for each in assignment.values())
    assert all(len(racks_of(each, directories)) == in_racks for each in assignment.values())


@pytest.mark.parametrize(
    ("partitions", "factor", "directories", "offline", "error"),
    [
        (10, 0, no_racks(5), (), "replication_factor must be at least 1, got 0"),
        (10, -1, no_racks(2), (), "replication_factor must be at least 1, got -1"),
        (10, 6, no_racks(5), (), "replication_factor 6 is larger than .* directories, 5"),
        (1, 3, {10: "1", 11: "1"}, (), "replication_factor 3 is larger than .* directories, 2"),
        (1, 1, {10: "1", 11: "1"}, {10, 11}, "All directories are offline"),
    ],
)
def test_a_replication_factor_that_is_impossible_is_refused(
    partitions, factor, directories, offline, error
):
    """AdminRackAwareTest.testReplicaAssignment; StripedReplicaPlacerTest.testNotEnoughBrokers,
    testNonPositiveReplicationFactor and testAllBrokersFenced."""
    with pytest.raises(InvalidReplicationFactorError, match=error):
        assign_replicas(partitions, factor, directories, offline=offline)


def test_a_topic_needs_a_partition():
    """AdminRackAwareTest.testAssignReplicasToBrokersWithInvalidParameters."""
    with pytest.raises(InvalidPartitionsError, match="must be at least 1, got 0"):
        assign_replicas(0, 1, no_racks(1))


def test_an_offline_directory_gets_no_replica_while_others_are_left():
    """StripedReplicaPlacerTest.testAvoidFencedReplicaIfPossibleOnSingleRack."""
    assignment = assign_replicas(8, 4, no_racks(5), offline={1})

    assert all(set(replicas) == {0, 2, 3, 4} for replicas in assignment.values())
    assert loads(assignment, range(5))[0] == [2, 0, 2, 2, 2]


def test_an_offline_directory_is_the_last_replica_if_there_is_no_other():
    """StripedReplicaPlacerTest.testPlacementOnFencedReplicaOnSingleRack."""
    assignment = assign_replicas(4, 3, {1: None, 2: None, 3: None}, offline={1})

    assert sorted(assignment.values()) == [(2, 3, 1), (2, 3, 1), (3, 2, 1), (3, 2, 1)]


def test_one_directory_that_is_online_leads_all_partitions():
    """StripedReplicaPlacerTest.testMultiPartitionTopicPlacementOnSingleUnfencedBroker."""
    assert assign_replicas(3, 1, no_racks(2), offline={1}) == {0: (0,), 1: (0,), 2: (0,)}


def test_a_rack_comes_before_a_directory_that_is_online():
    """StripedReplicaPlacerTest.testRackListWithInvalidRacks: racks 2 and 3 are offline."""
    directories = {10: "1", 11: "1", 20: "2", 21: "2", 30: "3", 31: "3", 40: "4", 41: "4"}
    assignment = assign_replicas(30, 4, directories, offline={20, 21, 30, 31, 40})

    for replicas in assignment.values():
        assert racks_of(replicas, directories) == {"1", "2", "3", "4"}
        assert 41 in replicas
        assert replicas[0] in {10, 11, 41}


def test_directories_without_a_rack_share_one():
    """As in StripedReplicaPlacer; AdminUtils refuses to place on a mixture."""
    assignment = assign_replicas(12, 2, {0: "a", 1: None, 2: None, 3: "a"})

    assert all(len({0, 3} & set(replicas)) == 1 for replicas in assignment.values())


def test_four_partitions_of_a_topic_begin_at_a_random_directory():
    """The start depends on the generator that is passed in, and on nothing else."""
    starts = [assign_replicas(4, 2, no_racks(3), rng=random.Random(n))[0][0] for n in range(30)]

    assert set(starts) == {0, 1, 2}
    assert starts == [
        assign_replicas(4, 2, no_racks(3), rng=random.Random(n))[0][0] for n in range(30)
    ]


@given(topologies, st.data())
def test_every_placement_is_even_distinct_and_in_different_racks(directories, data):
    """For all directories, racks, factors and starts, with some directories offline."""
    factor = data.draw(st.integers(1, len(directories)))
    rounds = data.draw(st.integers(1, 4))
    extra = data.draw(st.integers(0, len(directories) - 1))
    offline = data.draw(st.sets(st.sampled_from(sorted(directories))))
    online = sorted(directories.keys() - offline)
    if not online:
        return
    partitions = rounds * len(online) + extra
    rng = random.Random(data.draw(st.integers(0, 9)))
    assignment = assign_replicas(partitions, factor, directories, rng=rng, offline=offline)

    leaders, replicas = loads(assignment, online)
    assert max(leaders) - min(leaders) <= 1
    assert sum(leaders) == partitions
    in_racks = min(factor, len(set(directories.values())))
    for each in assignment.values():
        assert len(set(each)) == len(each) == factor
        assert len(racks_of(each, directories)) == in_racks
    if len(set(directories.values())) == 1 and not offline:
        assert max(replicas) - min(replicas) <= (factor if extra else 0)


@given(topologies, st.data())
def test_partitions_that_are_added_continue_the_round_robin(directories, data):
    """In two steps a topic gets the same replicas as in one: each has the topic's generator."""
    factor = data.draw(st.integers(1, len(directories)))
    first, more = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    seed = data.draw(st.integers(0, 9))
    current = assign_replicas(first, factor, directories, rng=random.Random(seed))

    both = current | assign_replicas(
        more, factor, directories, first_partition=first, rng=random.Random(seed)
    )
    leaders, _ = loads(both, directories)
    assert list(both) == list(range(first + more))
    assert max(leaders) - min(leaders) <= 1
    assert {len(replicas) for replicas in both.values()} == {factor}
    at_once = assign_replicas(first + more, factor, directories, rng=random.Random(seed))
    assert all(both[number] == at_once[number] for number in range(first + more))


def test_partitions_that_are_added_avoid_the_directory_of_partition_0_that_is_gone():
    """A topic grows while its first leader's directory is offline, or was removed."""
    without_0 = assign_replicas(3, 2, {1: None, 2: None}, first_partition=2)
    assert all(0 not in each for each in without_0.values())
    added = assign_replicas(3, 2, no_racks(3), first_partition=2, offline={0})
    assert all(0 not in replicas for replicas in added.values())
