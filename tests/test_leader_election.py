"""Elections: Kafka's cases, and what holds for every partition.

The figures are those of Kafka 4.0's `PartitionChangeBuilderTest` and
`PartitionLeaderElectionAlgorithms`, and of `checkAndTriggerAutoLeaderRebalance`.
"""

from collections import namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlog.replication.election import (
    Election,
    elect_leader,
    imbalanced_leaders,
    leader_imbalance,
    preferred_leaders,
)

Partition = namedtuple("Partition", "replicas isr leader")


@pytest.mark.parametrize(
    ("replicas", "isr", "leader", "alive", "unclean", "elected"),
    [
        # PartitionChangeBuilderTest.testElectLeader; 3 is offline, 1 leads.
        ([2, 1, 3], [2, 1, 3], 1, {1, 2}, False, Election(1, (2, 1))),
        ([2, 1, 3], [2, 1, 3], 1, {1, 2}, True, Election(1, (2, 1))),
        ([2, 1, 3], [1, 3], 1, {1, 2}, False, Election(1, (1,))),
        ([2, 1, 3], [3], 1, {1, 2}, False, None),
        ([2, 1, 3], [3], 1, {1, 2}, True, Election(2, (2,), unclean=True)),
        ([2, 1, 3, 4], [4], 1, {1, 2, 4}, True, Election(4, (4,))),
        # testIsrChangeAndLeaderChange: the leader is no longer in sync.
        ([2, 1, 3], [2, 3], 1, {1, 2, 3}, False, Election(2, (2, 3))),
        # testUncleanSetsLeaderRecoveringState: the whole ISR is offline.
        ([1, 2, 3], [2, 3], None, {1}, False, None),
        ([1, 2, 3], [2, 3], None, {1}, True, Election(1, (1,), unclean=True)),
        # testChangeInLeadershipDoesNotChangeRecoveryState: the only in-sync replica returns.
        ([1, 2, 3], [1], None, set(), True, None),
        ([1, 2, 3], [1], None, {1, 2, 3}, True, Election(1, (1,))),
        # In the order of the assignment, not of the ISR.
        ([3, 1, 2], [2, 1], None, {1, 2, 3}, False, Election(1, (2, 1))),
        # testStoppedLeaderIsDemotedAfterReassignmentCompletes...: 0 is no replica any more.
        ([2, 3], [0, 2, 3], 0, {0, 3}, False, Election(3, (0, 3))),
    ],
)
def test_the_first_replica_that_is_in_sync_and_alive_leads(
    replicas, isr, leader, alive, unclean, elected
):
    """And the present leader is kept while it is."""
    assert elect_leader(replicas, isr, alive, unclean=unclean, leader=leader) == elected


@given(
    st.permutations(range(5)),
    st.sets(st.integers(0, 4)),
    st.sets(st.integers(0, 4)),
    st.booleans(),
    st.none() | st.integers(0, 4),
)
def test_a_leader_is_alive_and_in_sync_unless_the_election_is_unclean(
    replicas, isr, alive, unclean, leader
):
    """For all states of a partition; no leader is better than a wrong one."""
    elected = elect_leader(replicas, sorted(isr), alive, unclean=unclean, leader=leader)

    if elected is None:
        assert not isr & alive
        assert not (unclean and alive)
    else:
        assert elected.leader in alive
        assert elected.unclean == (elected.leader not in isr)
        assert unclean or not elected.unclean
        assert set(elected.isr) == ({elected.leader} if elected.unclean else isr & alive)


@pytest.mark.parametrize(
    ("state", "elected"),
    [
        (Partition([2, 1, 3], [2, 1, 3], 1), {"p": 2}),
        (Partition([2, 1, 3], [2, 1, 3], None), {"p": 2}),
        (Partition([2, 1, 3], [2, 1, 3], 2), {}),
        (Partition([2, 1, 3], [1, 3], 3), {}),  # BAZ in testElectLeader: 2 is not in sync.
        (Partition([4, 1], [1, 4], 1), {}),  # 4 is offline.
    ],
)
def test_a_preferred_leader_is_elected_if_it_is_in_sync_and_alive(state, elected):
    """PartitionChangeBuilderTest.testElectLeader, with a preferred election."""
    assert preferred_leaders({"p": state}, {1, 2, 3}) == elected


def test_leaders_are_elected_again_where_too_many_are_elsewhere():
    """More than 10 % of the partitions that prefer directory 1, but exactly 10 % of 2's."""
    partitions = {
        **{f"a{n}": Partition([1, 2], [1, 2], 1 if n > 2 else 2) for n in range(10)},
        **{f"b{n}": Partition([2, 1], [1, 2], 2 if n > 0 else 1) for n in range(10)},
        "c": Partition([3, 1], [1], 1),
    }

    assert leader_imbalance(partitions) == {1: 0.3, 2: 0.1, 3: 1.0}
    expected = {"a0": 1, "a1": 1, "a2": 1}
    assert imbalanced_leaders(partitions, {1, 2, 3}) == expected
    assert imbalanced_leaders(partitions, {1, 2, 3}, percentage=30) == {}
    assert imbalanced_leaders(partitions, {1, 2, 3}, percentage=0) == expected | {"b0": 2}
    assert imbalanced_leaders(partitions, {2, 3}) == {}
