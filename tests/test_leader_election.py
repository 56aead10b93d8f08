"""Elections: Kafka's cases, and what holds for every partition.

The figures are those of Kafka 4.0's `PartitionChangeBuilderTest` and
`PartitionLeaderElectionAlgorithms`, and of `checkAndTriggerAutoLeaderRebalance`.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlog.replication.isr import PartitionAssignment
from embedlog.replication.jobs import imbalanced_leaders


def partition(replicas, isr, leader):
    return PartitionAssignment(tuple(replicas), tuple(isr), leader)


@pytest.mark.parametrize(
    ("replicas", "isr", "leader", "alive", "elected"),
    [
        # PartitionChangeBuilderTest.testElectLeader; 3 is offline, 1 leads.
        ([2, 1, 3], [2, 1, 3], 1, {1, 2}, (1, (2, 1))),
        ([2, 1, 3], [1, 3], 1, {1, 2}, (1, (1,))),
        ([2, 1, 3], [3], 1, {1, 2}, (None, (3,))),
        # testIsrChangeAndLeaderChange: the leader is no longer in sync.
        ([2, 1, 3], [2, 3], 1, {1, 2, 3}, (2, (2, 3))),
        # The whole ISR is offline.
        ([1, 2, 3], [2, 3], None, {1}, (None, (2, 3))),
        # testChangeInLeadershipDoesNotChangeRecoveryState: the only in-sync replica returns.
        ([1, 2, 3], [1], None, set(), (None, (1,))),
        ([1, 2, 3], [1], None, {1, 2, 3}, (1, (1,))),
        # In the order of the assignment, not of the ISR.
        ([3, 1, 2], [2, 1], None, {1, 2, 3}, (1, (2, 1))),
        # testStoppedLeaderIsDemotedAfterReassignmentCompletes...: 0 is no replica any more.
        ([2, 3], [0, 2, 3], 0, {0, 3}, (3, (0, 3))),
    ],
)
def test_the_first_replica_that_is_in_sync_and_alive_leads(replicas, isr, leader, alive, elected):
    """And the present leader is kept while it is."""
    state = partition(replicas, isr, leader).elect(alive)
    assert (state.leader, state.isr) == elected


@given(
    st.permutations(range(5)),
    st.sets(st.integers(0, 4)),
    st.sets(st.integers(0, 4)),
    st.none() | st.integers(0, 4),
)
def test_a_leader_is_alive_and_in_sync(replicas, isr, alive, leader):
    """For all states of a partition; no leader is better than a wrong one."""
    elected = partition(replicas, sorted(isr), leader).elect(alive)

    assert elected.leader in isr & alive if isr & alive else elected.leader is None
    assert set(elected.isr) == (isr & alive or isr)


@pytest.mark.parametrize(
    ("state", "elected"),
    [
        (partition([2, 1, 3], [2, 1, 3], 1), 2),
        (partition([2, 1, 3], [2, 1, 3], None), 2),
        (partition([2, 1, 3], [2, 1, 3], 2), None),
        (partition([2, 1, 3], [1, 3], 3), None),  # BAZ in testElectLeader: 2 is not in sync.
        (partition([4, 1], [1, 4], 1), None),  # 4 is offline.
    ],
)
def test_a_preferred_leader_is_elected_if_it_is_in_sync_and_alive(state, elected):
    """PartitionChangeBuilderTest.testElectLeader, with a preferred election."""
    after = state.elect_preferred({1, 2, 3})
    assert after is state if elected is None else after.leader == elected


def test_leaders_are_elected_again_where_too_many_are_elsewhere():
    """More than 10 % of the partitions that prefer directory 1, but exactly 10 % of 2's."""
    partitions = {
        **{f"a{n}": partition([1, 2], [1, 2], 1 if n > 2 else 2) for n in range(10)},
        **{f"b{n}": partition([2, 1], [1, 2], 2 if n > 0 else 1) for n in range(10)},
        "c": partition([3, 1], [1], 1),
    }

    expected = {"a0", "a1", "a2"}
    assert imbalanced_leaders(partitions, {1, 2, 3}, 10) == expected
    assert imbalanced_leaders(partitions, {1, 2, 3}, 30) == set()
    assert imbalanced_leaders(partitions, {1, 2, 3}, 0) == expected | {"b0"}
    assert imbalanced_leaders(partitions, {2, 3}, 10) == set()
