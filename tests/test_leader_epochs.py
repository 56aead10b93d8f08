"""Leader epochs: Kafka's cases, and truncation compared with whole histories.

The figures are those of Kafka 4.0's `LeaderEpochFileCacheTest` and `ReplicaFetcherThreadTest`.
The scenarios are those of KIP-101, and of KIP-279 with figures of our own.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlog.partition.leader_epochs import with_epoch
from embedlog.replication.epochs import end_offset_for, truncation_point


def cache(*entries):
    """Build a cache as a log does: one epoch after the other."""
    epochs = []
    for epoch, start in entries:
        epochs = with_epoch(epochs, epoch, start)
    return epochs


THREE = [(5, 11), (6, 12), (7, 13)]
GAPS = [(0, 10), (2, 13), (4, 17)]
MANY = [(0, 0), (1, 3), (2, 6)]


@pytest.mark.parametrize(
    ("epochs", "log_end", "asked", "answer"),
    [
        ([(2, 6)], 73, 2, (2, 73)),  # shouldReturnLogEndOffsetIfLatestEpochRequested
        ([], 0, 0, None),  # shouldReturnUndefinedOffsetIfUndefinedEpochRequested
        ([], 0, 7, None),  # shouldFetchEndOffsetOfEmptyCache
        (THREE, 0, 4, (4, 11)),  # shouldReturnFirstEpochIfRequestedEpochLessThanFirstEpoch
        (GAPS, 0, 1, (0, 13)),  # shouldReturnNextAvailableEpochIfThereIsNoExactEpoch...
        (GAPS, 0, 2, (2, 17)),
        (GAPS, 0, 3, (2, 17)),
        ([(2, 100)], 100, 3, None),  # shouldReturnInvalidOffsetIfEpochIsRequestedWhichIsNot...
        ([(2, 6)], 7, 2, (2, 7)),  # shouldSupportEpochsThatDoNotStartFromZero
        (MANY, 9, 2, (2, 9)),  # shouldIncreaseAndTrackEpochsAsFollowerReceivesManyMessages
        (MANY, 9, 1, (1, 6)),
        (MANY, 9, 0, (0, 3)),
    ],
)
def test_an_epoch_ends_where_the_next_one_starts(epochs, log_end, asked, answer):
    """LeaderEpochFileCacheTest: the largest epoch up to the one that is asked for, and its end."""
    assert end_offset_for(epochs, log_end, asked) == answer


@pytest.mark.parametrize(
    ("begun", "epochs"),
    [
        # shouldGetFirstOffsetOfSubsequentEpochWhenOffsetRequestedForPreviousEpoch
        ([(1, 11), (1, 12), (2, 13), (2, 14), (3, 15), (3, 16)], [(1, 11), (2, 13), (3, 15)]),
        # shouldTruncateIfMatchingEpochButEarlierStartingOffset
        ([(5, 11), (6, 12), (7, 13), (7, 12)], [(5, 11), (7, 12)]),
        ([(2, 6), (2, 7)], [(2, 6)]),  # shouldNotUpdateEpochAndStartOffsetIfItDidNotChange
        ([(1, 5), (2, 6), (1, 7)], [(1, 7)]),  # shouldEnforceMonotonicallyIncreasingEpochs
        ([(2, 6), (3, 5)], [(3, 5)]),  # shouldEnforceOffsetsIncreaseMonotonically
        ([(0, 0), (1, 0)], [(1, 0)]),  # shouldIncreaseAndTrackEpochsAsLeadersChangeManyTimes
        ([(0, 0), (1, 0), (2, 5)], [(1, 0), (2, 5)]),
    ],
)
def test_epochs_and_their_offsets_increase(begun, epochs):
    """LeaderEpochFileCacheTest: the newest entry stays, and those that contradict it go."""
    assert cache(*begun) == epochs


def test_an_epoch_without_records_ends_where_it_starts():
    """shouldIncreaseAndTrackEpochsAsLeadersChangeManyTimes: epoch 0 had no records."""
    epochs = cache((0, 0), (1, 0), (2, 5))

    assert [end_offset_for(epochs, 10, epoch) for epoch in range(3)] == [(0, 0), (1, 5), (2, 10)]


@pytest.mark.parametrize(
    ("follower", "follower_end", "leader", "leader_end", "point"),
    [
        # ReplicaFetcherThreadTest.shouldTruncateToOffsetSpecifiedInEpochOffsetResponse
        ([(5, 0)], 200, [(5, 0)], 156, 156),
        ([(5, 0)], 200, [(5, 0), (6, 172)], 300, 172),
        # shouldFetchLeaderEpochSecondTimeIfLeaderRepliesWithEpochNotKnownToFollower: it has 3
        # and 5, the leader 3, 4 and 6.
        ([(3, 0), (5, 120)], 200, [(3, 0), (4, 101), (6, 155)], 300, 101),
        ([(3, 0), (5, 120)], 200, [(3, 0), (4, 102), (6, 143)], 300, 102),
        # shouldTruncateIfLeaderRepliesWithDivergingEpochNotKnownToFollower: the answers are
        # 4 at 140, 3 at 130 and 2 at 120; the follower's epochs end at 149, 129 and 119.
        ([(1, 0), (2, 119), (4, 129)], 200, [(4, 129), (6, 140)], 200, 140),
        ([(1, 0), (2, 119), (4, 129)], 200, [(1, 0), (3, 120), (6, 130)], 200, 119),
        # The leader has only smaller epochs: it was restored from an old copy.
        ([(0, 0), (3, 5)], 8, [(0, 0)], 10, 5),
        # The follower's first epoch is past the leader's: nothing is shared.
        ([(5, 100)], 200, [(4, 0), (6, 156)], 300, 100),
        # The leader has deleted the epochs of the follower.
        ([(0, 0), (1, 10)], 50, [(5, 100)], 200, 50),
        ([(0, 0), (1, 10)], 150, [(5, 100)], 200, 100),
        # Nothing was appended yet, and no epoch begun.
        ([], 0, [], 0, 0),
        ([], 7, [], 5, 5),
        # A follower that only lags keeps all that it has.
        ([(0, 0), (1, 10)], 15, [(0, 0), (1, 10), (2, 20)], 30, 15),
    ],
)
def test_a_follower_truncates_to_where_the_histories_part(
    follower, follower_end, leader, leader_end, point
):
    """ReplicaFetcherThreadTest, with the epochs that its stubs answer with."""
    assert truncation_point(follower, follower_end, leader, leader_end) == point


@dataclass
class Replica:
    """A copy as a list of records, each of which knows the epoch in which it was appended."""

    records: list = field(default_factory=list)
    epochs: list = field(default_factory=list)

    def lead(self, epoch, count, name):
        """Begin an epoch, and append records that no other leader has."""
        self.epochs = with_epoch(self.epochs, epoch, len(self.records))
        self.records += [(epoch, f"{name}{n}") for n in range(count)]
        return self

    def follow(self, leader, count=1_000):
        """Truncate, then copy up to so many records."""
        self.truncate(self.point(leader))
        start = len(self.records)
        for epoch, name in leader.records[start : start + count]:
            self.epochs = with_epoch(self.epochs, epoch, len(self.records))
            self.records.append((epoch, name))
        return self

    def point(self, leader):
        """Return the truncation point against a leader."""
        return truncation_point(self.epochs, len(self.records), leader.epochs, len(leader.records))

    def truncate(self, offset):
        """Drop the records, and the epochs, from an offset on."""
        del self.records[offset:]
        self.epochs = [entry for entry in self.epochs if entry[1] < offset]


def shared(first, second):
    """Count the records that two copies have in common before the first difference."""
    pairs = zip(first.records, second.records, strict=False)
    return next(
        (n for n, (one, other) in enumerate(pairs) if one != other),
        min(len(first.records), len(second.records)),
    )


def test_a_follower_that_restarts_keeps_what_its_high_watermark_does_not_cover_yet():
    """KIP-101, scenario 1: A has m2 but a high watermark of 1, and becomes leader at once."""
    b = Replica().lead(0, 2, "m")
    a = Replica().follow(b)

    assert a.point(b) == 2
    assert a.lead(1, 0, "").records == b.records
    assert b.point(a) == 2


def test_copies_that_lost_different_records_become_equal_again():
    """KIP-101, scenario 2: after a power cut B has lost m2, leads, and appends m3 at offset 1."""
    a = Replica().lead(0, 2, "m")
    b = Replica().follow(a, count=1).lead(1, 1, "m3-")

    assert a.point(b) == 1
    assert a.follow(b).records == b.records == [(0, "m0"), (1, "m3-0")]


def test_records_of_a_leader_that_failed_at_once_are_removed():
    """KIP-279, fast failover: A never saw epoch 1, and leads again in epoch 2.

    Its epoch 0 ends where epoch 2 starts; with KIP-101 alone B would be told the start of
    epoch 2 as the end of epoch 1, and keep its own records below that.
    """
    a = Replica().lead(0, 10, "a")
    b = Replica().follow(a, count=5).lead(1, 3, "b")
    a.lead(2, 4, "c")

    assert b.point(a) == 5
    assert b.follow(a).records == a.records


def test_three_fast_failovers_take_two_rounds():
    """KIP-279: the leader answers with an epoch that the follower does not have either."""
    a = Replica().lead(0, 8, "a")
    b = Replica().follow(a, count=4).lead(1, 2, "b")
    c = Replica().follow(a, count=6).lead(2, 3, "c")
    b.lead(3, 3, "d")
    c.lead(4, 1, "e")

    # B asks for epoch 3, and hears of epoch 2; then it asks for epoch 1, and hears of epoch 0.
    assert b.epochs == [(0, 0), (1, 4), (3, 6)]
    assert c.epochs == [(0, 0), (2, 6), (4, 9)]
    assert b.point(c) == shared(b, c) == 4


@given(st.data())
def test_the_truncation_point_is_that_of_the_whole_histories(data):
    """Any number of leaders, also from outside the ISR, and followers that copy in part."""
    replicas = [Replica() for _ in range(3)]
    for epoch in range(data.draw(st.integers(1, 8))):
        leader = replicas[data.draw(st.integers(0, 2))]
        leader.lead(epoch, data.draw(st.integers(0, 4)), f"e{epoch}-")
        for follower in replicas:
            if follower is not leader and data.draw(st.booleans()):
                follower.follow(leader, data.draw(st.integers(0, 6)))

    for follower in replicas:
        assert follower.point(leader) == shared(follower, leader)
