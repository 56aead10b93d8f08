"""In-sync replicas, elections and reassignments of one partition: Kafka's cases.

The figures are those of Kafka 4.0's `PartitionTest`, `PartitionChangeBuilderTest`,
`PartitionReassignmentReplicasTest` and `PartitionReassignmentRevertTest`.
"""

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from embedlog.errors import (
    IllegalStateError,
    InvalidReplicationAssignmentError,
    NotEnoughReplicasError,
)
from embedlog.replication.isr import NO_DIRECTORY, PartitionAssignment

FOO = PartitionAssignment((2, 1, 3), (2, 1, 3), 1, leader_epoch=100, partition_epoch=200)
BAR = PartitionAssignment(
    (1, 2, 3, 4), (1, 2, 3), 1, 100, 200, adding_replicas=(4,), removing_replicas=(1,)
)
"""As in PartitionChangeBuilderTest; directory 3 is offline there."""


def three(*isr, leader=0, **fields):
    """Return a partition with the replicas 0, 1 and 2."""
    return PartitionAssignment((0, 1, 2), isr, leader, **fields)


# Enough in-sync replicas


@pytest.mark.parametrize(
    ("state", "min_insync_replicas", "is_under"),
    [
        (three(0), 1, False),  # testAtMinIsr
        (PartitionAssignment((0, 1), (0, 1), 0), 2, False),  # testIsUnderMinIsr
        (PartitionAssignment((0, 1), (0,), 0), 2, True),
        (three(0, 1), 3, True),  # testHighWatermarkAdvanceShouldNotAdvanceWhenUnderMinISR
        (three(0, 1, 2), 3, False),
        (PartitionAssignment((0,), (0,), 0), 2, False),  # effectiveMinIsr: it has only one
        (three(0, 1, 2, leader=None), 1, True),
    ],
)
def test_too_few_in_sync_replicas_refuse_an_append(state, min_insync_replicas, is_under):
    """PartitionTest: nothing is appended."""
    assert state.is_under_min_isr(min_insync_replicas) == is_under
    if is_under:
        with pytest.raises(NotEnoughReplicasError, match=r"replicas is|no leader") as caught:
            state.check_min_isr(min_insync_replicas)
        assert caught.value.retriable
    else:
        state.check_min_isr(min_insync_replicas)


# Changes


def test_a_shrink_and_an_expansion_keep_the_leader_epoch():
    """PartitionChangeBuilderTest.testIsrChangeDoesntBumpLeaderEpoch, and ...OnIsrExpansion."""
    shrunk = FOO.shrink([3])
    assert shrunk == replace(FOO, isr=(2, 1), partition_epoch=201)
    assert shrunk.expand(3) == replace(FOO, partition_epoch=202)


def test_a_change_that_changes_nothing_is_none():
    """PartitionChangeBuilderTest.testNoChange."""
    assert FOO.shrink([]) is FOO
    assert FOO.shrink([7]) is FOO
    assert FOO.expand(1) is FOO
    assert FOO.shrink([1]) is FOO  # it leads
    offline = replace(FOO, leader=None, isr=(1,))
    assert offline.shrink([1]) is offline.expand(2) is offline
    assert FOO.expand(4) is FOO  # it has no replica
    assert FOO.elect({1, 2, 3}) is FOO
    assert FOO.begin_reassignment((2, 1, 3)) is FOO
    assert FOO.finish_reassignment({1, 2, 3}) is FOO
    assert FOO.cancel_reassignment({1, 2, 3}) is FOO
    assert BAR.elect({1, 2, 3}) is BAR
    assert BAR.finish_reassignment({1, 2, 4}) is BAR


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda: PartitionAssignment.create([1, 2], alive={3}), r"\[1, 2\] can be written"),
        (
            lambda: replace(BAR, isr=(4,), leader=4).cancel_reassignment({4}),
            "Only replicas that the reassignment added",
        ),
    ],
)
def test_a_change_that_would_lose_records_is_refused(change, error):
    """The last in-sync replica stays, and none is given up unasked."""
    with pytest.raises(IllegalStateError, match=error):
        change()


@pytest.mark.parametrize("replicas", [[], [1, 1], [1, 2, 1]])
def test_replicas_are_distinct(replicas):
    """A partition has at least one, and none twice."""
    with pytest.raises(InvalidReplicationAssignmentError, match="distinct replicas"):
        PartitionAssignment.create(replicas)
    with pytest.raises(InvalidReplicationAssignmentError, match="distinct replicas"):
        FOO.begin_reassignment(replicas)


def test_a_new_partition_is_led_by_the_first_replica_that_is_alive():
    """All that are alive are in sync: they are all empty."""
    assert PartitionAssignment.create([3, 1, 2]) == PartitionAssignment((3, 1, 2), (3, 1, 2), 3)
    created = PartitionAssignment.create([3, 1, 2], alive={1, 2})
    assert created == PartitionAssignment((3, 1, 2), (1, 2), 1)
    assert created.in_sync_followers == (2,)


# Elections


def test_an_election_raises_both_epochs():
    """PartitionChangeBuilderTest.testIsrChangeAndLeaderChange, by the loss of directory 1."""
    elected = FOO.elect({2, 3})
    assert elected == replace(FOO, isr=(2, 3), leader=2, leader_epoch=101, partition_epoch=201)


def test_a_follower_that_is_lost_leaves_without_an_election():
    """The leader stays, and its epoch too."""
    assert FOO.elect({1, 2}) == replace(FOO, isr=(2, 1), partition_epoch=201)


def test_a_partition_without_a_leader_keeps_its_in_sync_replicas():
    """testChangeInLeadershipDoesNotChangeRecoveryState: they lead again when they return."""
    offline = FOO.elect(set())
    assert offline == replace(FOO, leader=None, leader_epoch=101, partition_epoch=201)
    assert offline.elect({7}) is offline

    online = offline.elect({3})
    assert online == replace(FOO, isr=(3,), leader=3, leader_epoch=102, partition_epoch=202)


def test_an_unclean_leader_is_alone_in_sync():
    """PartitionChangeBuilderTest.testUncleanLeaderElection."""
    state = replace(FOO, isr=(3,), leader=None)
    assert state.elect({1, 2}) is state

    elected = state.elect_unclean(2)
    changes = {"leader_epoch": 101, "partition_epoch": 201, "leader_recovering": True}
    assert elected == replace(FOO, isr=(2,), leader=2, **changes)


def test_a_partition_whose_in_sync_replicas_were_given_up_waits_for_an_unclean_election():
    """No other replica leads by itself; one that is new, in place of all, is as good as any."""
    state = replace(FOO, isr=(3,), leader=3)
    changes = {"replicas": (2, 1), "partition_epoch": 201, "leader_epoch": 101}

    left = state.without([3], {1, 2}, 1)
    lost = replace(FOO, isr=(NO_DIRECTORY,), leader=None, leader_recovering=True, **changes)
    assert left == lost
    assert left.elect({1, 2}) is left
    assert left.elect_unclean(2).isr == (2,)
    assert left.elect_unclean(2).leader_recovering
    again = state.without([1, 2, 3], {4}, 4)
    assert (again.replicas, again.isr, again.leader) == ((4,), (4,), 4)
    assert again.leader_recovering
    assert not FOO.without([1], {2, 3}, 2).leader_recovering


def test_the_preferred_leader_takes_over():
    """PartitionChangeBuilderTest.testElectLeader: 2 leads FOO again, but 2 of BAZ is behind."""
    preferred = FOO.elect_preferred({1, 2})
    assert preferred == replace(FOO, isr=(2, 1), leader=2, leader_epoch=101, partition_epoch=201)
    assert preferred.elect_preferred({1, 2}) is preferred

    baz = PartitionAssignment((2, 1, 3), (1, 3), 3, 100, 200)
    assert baz.elect_preferred({1, 2}) is baz
    assert FOO.elect_preferred({1, 3}) is FOO


# Reassignments


@pytest.mark.parametrize(
    ("current", "target", "replicas", "adding", "removing"),
    [
        ((3, 2, 1), (3, 6, 2, 1, 5), (3, 6, 2, 1, 5), (5, 6), ()),  # testAdditions
        ((3, 2, 1, 0), (3, 1), (3, 1, 0, 2), (), (0, 2)),  # testRemovals
        ((3, 2, 1, 0), (7, 3, 1, 9), (7, 3, 1, 9, 0, 2), (7, 9), (0, 2)),
        ((3, 2, 1, 0), (0, 1, 3, 2), (0, 1, 3, 2), (), ()),  # testRearrangement
    ],
)
def test_a_reassignment_has_the_old_and_the_new_replicas(
    current, target, replicas, adding, removing
):
    """PartitionReassignmentReplicasTest."""
    state = PartitionAssignment.create(current)
    begun = state.begin_reassignment(target)

    assert (begun.replicas, begun.adding_replicas) == (replicas, adding)
    assert begun.removing_replicas == removing
    assert (begun.target_replicas, begun.partition_epoch) == (target, 1)
    assert (begun.isr, begun.leader) == (current, current[0])
    assert begun.is_reassigning == bool(adding or removing)


@pytest.mark.parametrize(
    ("target", "isr", "finished"),
    [
        ((3, 4, 5), (0, 1, 2, 3, 4), None),  # testDoesNotCompleteReassignment
        ((3, 4, 5), (0, 1, 2, 3, 4, 5), (3, 4, 5)),  # testDoesCompleteReassignmentAllNewReplicas
        ((0, 1, 3), (0, 1, 2, 3), (0, 1, 3)),  # testDoesCompleteReassignmentSomeNewReplicas
        ((0, 1, 3), (3,), None),  # ...IfIsrDoesNotHaveAllTargetReplicas
    ],
)
def test_a_reassignment_finishes_when_all_new_replicas_are_in_sync(target, isr, finished):
    """PartitionReassignmentReplicasTest."""
    begun = PartitionAssignment.create((0, 1, 2)).begin_reassignment(target)
    begun = replace(begun, isr=isr, leader=isr[0])

    state = begun.finish_reassignment(range(9))
    if finished is None:
        assert state is begun
    else:
        expected = PartitionAssignment(finished, finished, finished[0], 1, 2)
        assert state == expected


def test_a_new_leader_is_elected_when_the_old_one_is_removed():
    """PartitionChangeBuilderTest.testIsrEnlargementCompletesReassignment."""
    state = BAR.expand(4).finish_reassignment({1, 2, 4})
    # Kafka leaves 3 in the ISR, although it is fenced, until its own change removes it.
    assert state == PartitionAssignment((2, 3, 4), (2, 4), 2, 101, 202)


def test_a_removed_replica_is_fenced_although_the_leader_stays():
    """PartitionChangeBuilderTest.testRemovingReplicaReassignment."""
    state = FOO.begin_reassignment((1, 2)).finish_reassignment({1, 2})
    assert state == PartitionAssignment((1, 2), (1, 2), 1, 101, 202)


def test_no_removed_replica_leads_although_no_other_can():
    """testStoppedLeaderIsDemotedAfterReassignmentCompletesEvenIfNoNewEligibleLeaders."""
    state = PartitionAssignment((2, 3, 0, 1), (2, 3, 0, 1), 0, 0, 0, (2, 3), (0, 1))
    assert state.finish_reassignment({0, 1}) == PartitionAssignment((2, 3), (2, 3), None, 1, 1)


@pytest.mark.parametrize(
    ("isr", "adding", "removing", "after"),
    [
        ((3, 2), (), (2, 1), (3, 2)),  # testSomeRemoving
        ((4, 5, 2), (4, 5), (), (2,)),  # testSomeAdding
        ((4, 5, 2), (4, 5), (2,), (2,)),  # testSomeRemovingAndAdding
    ],
)
def test_a_cancelled_reassignment_leaves_the_old_replicas(isr, adding, removing, after):
    """PartitionReassignmentRevertTest."""
    state = PartitionAssignment((*adding, 3, 2, 1), isr, isr[0], 100, 200, adding, removing)

    reverted = state.cancel_reassignment({1, 2, 3})
    assert (reverted.replicas, reverted.isr) == ((3, 2, 1), after)
    assert not reverted.is_reassigning
    assert reverted.leader in after
    assert (reverted.leader_epoch, reverted.partition_epoch) == (100 + bool(adding), 201)


def test_a_reassignment_can_be_reverted():
    """PartitionChangeBuilderTest.testRevertReassignment."""
    assert BAR.cancel_reassignment({1, 2, 3}) == PartitionAssignment(
        (1, 2, 3), (1, 2, 3), 1, 101, 201
    )


def test_a_reassignment_replaces_the_one_before():
    """What the first one was adding is removed, unless the second one wants it too."""
    begun = PartitionAssignment.create((0, 1)).begin_reassignment((2, 3))
    again = begun.begin_reassignment((3, 4))

    assert again.target_replicas == (3, 4)
    assert (again.adding_replicas, again.removing_replicas) == ((2, 3, 4), (0, 1, 2))
    assert (again.original_replicas, again.given_up_replicas) == ((0, 1), (2,))
    assert again.begin_reassignment((3, 4)) is again
    assert set(again.cancel_reassignment(range(5)).replicas) == {0, 1}
    finished = replace(again, isr=again.replicas).finish_reassignment(range(5))
    assert (finished.replicas, finished.is_reassigning) == ((3, 4), False)


def test_a_reassignment_is_not_cancelled_once_all_old_replicas_are_given_up():
    """Nothing would be left; and those that are not in sync lack something (testIsrSpecialCase)."""
    begun = PartitionAssignment.create((0, 1)).begin_reassignment((2, 3))
    left = replace(begun, isr=begun.replicas).without([0, 1], {2, 3}, 2)
    for state in (left, replace(begun, isr=(2, 3), leader=2)):
        with pytest.raises(IllegalStateError, match="Only replicas that the reassignment added"):
            state.cancel_reassignment({0, 1, 2, 3})


def test_a_partition_whose_last_in_sync_copy_is_lost_is_lost_after_a_cancelled_reassignment():
    """Otherwise its ISR would be empty, and the error would ask for directories that are there."""
    lost = PartitionAssignment.create((1,)).begin_reassignment((2, 3)).elect(()).without_copy(1)
    cancelled = lost.cancel_reassignment({1, 2, 3})

    assert (lost.isr, cancelled.isr, cancelled.leader) == ((NO_DIRECTORY,), (NO_DIRECTORY,), None)
    assert cancelled.replicas == (1,)


class Partition(RuleBasedStateMachine):
    """One partition through any changes, with the records that each replica has.

    Acknowledged records are those that all in-sync replicas had.
    """

    def __init__(self):
        """Begin with three of five directories."""
        super().__init__()
        self.state = PartitionAssignment.create((1, 2, 3))
        self.alive = set(range(1, 6))
        self.ends = dict.fromkeys(range(1, 6), 0)
        self.high_watermark = 0

    def change(self, after):
        """Check the epochs of a change."""
        before, self.state = self.state, after
        assert after is before or after.partition_epoch > before.partition_epoch
        if after.leader != before.leader:
            assert after.leader_epoch > before.leader_epoch
        leader = after.leader
        if leader is not None and leader != before.leader:
            for replica in after.replicas:
                self.ends[replica] = min(self.ends[replica], self.ends[leader])

    @precondition(lambda self: self.state.leader in self.alive)
    @rule(count=st.integers(1, 5), written=st.sets(st.integers(1, 5)))
    def append(self, count, written):
        """Append at the leader, and copy to some followers."""
        state, ends = self.state, self.ends
        ends[state.leader] += count
        for follower in ({*state.replicas} - {state.leader}) & written & self.alive:
            ends[follower] = ends[state.leader]
        self.high_watermark = max(self.high_watermark, min(ends[each] for each in state.isr))

    @rule(lost=st.sets(st.integers(1, 5)))
    def lose_directories(self, lost):
        """Lose some, bring others back, and elect."""
        self.alive = set(range(1, 6)) - lost
        self.change(self.state.elect(self.alive))

    @rule(replica=st.integers(1, 5))
    def return_empty(self, replica):
        """Bring one back without what it had."""
        if replica not in self.alive:
            self.alive.add(replica)
            self.ends[replica] = 0
            self.change(self.state.without_copy(replica))
            self.change(self.state.elect(self.alive))

    @precondition(lambda self: self.state.isr == (NO_DIRECTORY,))
    @rule(leader=st.integers(1, 5))
    def elect_unclean(self, leader):
        """Go on with what a copy has that was not in sync, once no other one is left."""
        if leader in self.alive & {*self.state.replicas}:
            self.change(self.state.elect_unclean(leader))
            self.high_watermark = self.ends[leader]

    @precondition(lambda self: self.state.leader is not None)
    @rule(replica=st.integers(1, 5))
    def leave_or_join(self, replica):
        """Let a follower leave, or join if it has all of the leader's log."""
        state, ends = self.state, self.ends
        if replica in state.in_sync_followers:
            self.change(state.shrink([replica]))
        elif replica in state.replicas and ends[replica] == ends[state.leader]:
            self.change(state.expand(replica))

    @rule(to=st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True))
    def begin(self, to):
        """Begin a reassignment, perhaps instead of another one; new replicas begin empty."""
        for replica in set(to) - set(self.state.replicas):
            self.ends[replica] = 0
        self.change(self.state.begin_reassignment(to))

    @rule()
    def finish(self):
        """Finish it if possible."""
        self.change(self.state.finish_reassignment(self.alive))

    @precondition(lambda self: set(self.state.isr) - set(self.state.adding_replicas))
    @rule()
    def cancel(self):
        """Cancel it."""
        self.change(self.state.cancel_reassignment(self.alive))

    @rule()
    def prefer(self):
        """Elect the preferred leader."""
        self.change(self.state.elect_preferred(self.alive))

    @invariant()
    def acknowledged_records_are_on_all_in_sync_replicas(self):
        """And the state makes sense."""
        state = self.state
        assert state.isr
        assert set(state.isr) <= set(state.replicas) or state.isr == (NO_DIRECTORY,)
        assert len(set(state.replicas)) == len(state.replicas)
        assert state.leader is None or state.leader in state.isr
        assert {*state.adding_replicas, *state.target_replicas} <= set(state.replicas)
        assert all(
            self.ends[replica] >= self.high_watermark for replica in {*state.isr} - {NO_DIRECTORY}
        )


class TestPartition(Partition.TestCase):
    """No clean change loses an acknowledged record."""
