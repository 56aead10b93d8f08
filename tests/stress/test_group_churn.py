"""Groups whose members join, leave, are killed and stopped; and many groups side by side."""

from __future__ import annotations

import pytest
from support.faulty_files import scratch_directory
from support.forks import tell, until
from support.group_churn import Churn, Worker, check_churn
from support.group_consumers import GroupThreads, PipedChild, partitions
from support.patience import until_enough
from support.roots import fill
from support.tiers import choose

import embedlog
from embedlog.consumer.group_member import GroupMember

pytestmark = pytest.mark.stress


def churn(case: Churn) -> dict[str, int]:
    with scratch_directory() as directory:
        done = check_churn(case, directory)
    tell(f"seed {case.seed}, {case.strategy}: {dict(sorted(done.items()))}")
    assert done["twice after a clean end"] == 0
    if max(case.stops) * 1000 < case.session_ms:
        assert (done["ended lost"], done["refused"]) == (0, 0)
    return done


def patient(**how) -> Churn:
    """With a session that is longer than any stop: only killed members are removed."""
    return Churn(session_ms=8000, stops=(0.02, 0.2, 0.5), strategy="range", **how)


SECONDS = choose(test=1.5, all=5.0)


@pytest.mark.parametrize(
    "case", [Churn(seconds=SECONDS), patient(seconds=SECONDS)], ids=["short", "long"]
)
def test_under_churn_every_record_is_read_and_commits_are_fenced(case):
    """M22, P14: at least once, in order, none twice of members that left cleanly; and no
    member commits for others.  With short and with long sessions."""
    until_enough(lambda seed: churn(case._replace(seed=seed)), {"ownerships": 20, "records": 300})


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(
    "case", [Churn(seed=2), patient(seed=3), Churn(seed=4), Churn(seed=5, strategy="range")]
)
def test_churn_for_a_minute(case):
    """As above."""
    done = churn(case)
    assert done["ownerships"] >= 300


def no_fence(monkeypatch):
    monkeypatch.setattr(GroupMember, "_check_not_removed", lambda self, txn: None)
    monkeypatch.setattr(GroupMember, "_check_owned", lambda self, *claim: None)


def no_commit_when_revoked(monkeypatch):
    monkeypatch.setattr(Worker, "commit", lambda self, revoked: True)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("plant", [no_fence, no_commit_when_revoked])
def test_the_check_finds_what_is_wrong(monkeypatch, plant):
    """The check finds planted bugs."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        churn(Churn(seconds=10, strategy="range"))


def test_eight_groups_of_eight_members_do_not_disturb_each_other():
    """M17: in threads and processes; each group reads everything, once."""
    with scratch_directory() as directory:
        path = directory / "root"
        tps = sorted(partitions("t", 8))

        def work(pipe):
            with embedlog.open(path) as log:
                crowd = GroupThreads(log, groups=8, members=3)
                pipe.send("here")
                pipe.recv()
                return crowd.end()

        with embedlog.open(path) as log:
            log.create_topic("t", 8)
            fill(log.partition("t", 0), 20, size=5)
        with PipedChild(work) as first, PipedChild(work) as second, embedlog.open(path) as log:
            crowd = GroupThreads(log, groups=8, members=2)
            first.hear(), second.hear()
            for number in range(200):
                fill(log.partition("t", number % 8), 1, size=5)
            ends = [log.partition(*tp).end_offset() for tp in tps]
            watchers = [log.consumer(group_id=f"g{number}") for number in range(8)]
            for watcher in watchers:
                until(lambda watcher=watcher: [watcher.committed(tp) for tp in tps] == ends, 30)
            first.say("stop"), second.say("stop")
            shares = [crowd.end(), first.end(), second.end()]
        everything = {(n, at) for n, end in enumerate(ends) for at in range(end)}
        for number in range(8):
            read = [position for share in shares for position in share[number]]
            assert len(read) == len(everything) and set(read) == everything
