"""Bugs planted in replication: the model, or the kills, find each of them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support import forks, replica_kills
from support.forks import tell
from support.mutants import Change
from support.replicas_model import ReplicasModel, run_some
from support.tiers import runs

REPLICATION = "embedlog.replication"
Check = Callable[[], object]


def by_the_model() -> None:
    run_some(400)


@contextmanager
def a_partition(replicas: int, min_isr: int = 1) -> Iterator[ReplicasModel]:
    """Yield a model of three directories with one topic, and check everything at the end."""
    model = ReplicasModel()
    try:
        model.begin(3, [(1, replicas, min_isr, False)])
        model.append_to_all(0, 0, 0)
        model.check()
        yield model
        model.check()
    except BaseException:
        model.abandon()
        raise
    model.teardown()


def in_sync(model: ReplicasModel) -> tuple[int, ...]:
    assignment = model.assignment(model.part(0))
    assert assignment is not None
    return assignment.isr


def by_a_copy_that_returns() -> None:
    """A leader is lost with records that only it has, and returns while others are appended."""
    for appends_at in range(6):
        with a_partition(2) as model:
            model.open_another()
            model.diverge(0, 0, 2, 0, True, False)
            for directory in sorted(model.away):
                model.bring_back(directory - 1, False)
            model.keep_house(0, False, appends_at)


def by_a_failover_while_copies_are_made() -> None:
    """The leader is lost with records that only it and the new copy have."""
    for at in range(1, 9):
        with a_partition(3) as model:
            model.open_another()
            *_, behind = in_sync(model)
            model.unmount(behind - 1, False)
            model.keep_house(0, False)
            model.append_to_leader(0, 0, 700)
            model.bring_back(behind - 1, False)
            model.keep_house(0, False, at, "lose the leader")


def by_a_copy_that_breaks_in_an_append() -> None:
    """Then too few have the records for them to be acknowledged."""
    for after in range(8):
        with a_partition(2, min_isr=2) as model:
            _, follower = in_sync(model)
            model.break_disk(follower - 1, errno.EIO, after, 1 << 30, False, False)
            model.append_to_all(0, 0, 0)


def by_a_preferred_leader() -> None:
    """It is elected again, while the leader has records that no follower has yet."""
    with a_partition(2) as model:
        preferred, _ = in_sync(model)
        model.unmount(preferred - 1, False)
        model.keep_house(0, False)
        model.bring_back(preferred - 1, False)
        model.keep_house(0, False)
        model.append_to_leader(0, 0, 0)
        model.elect_preferred(0)


def by_a_copy_out_of_sync() -> None:
    """A follower is online, but not in sync, when the leader's disk breaks."""
    for after in range(0, 30, 2):
        with a_partition(2) as model:
            leader, follower = in_sync(model)
            model.unmount(follower - 1, False)
            model.keep_house(0, False)
            model.append_to_all(0, 0, 0)
            model.bring_back(follower - 1, False)
            model.keep_house(0, True)
            model.break_disk(leader - 1, errno.EIO, after, 1 << 30, True, False)
            model.keep_house(0, False)


def by_an_election_outside_the_isr() -> None:
    """Three copies of different lengths; the longest is lost, or offline with all its records."""
    for is_readable in (False, True):
        with a_partition(3) as model:
            model.lose_the_last_in_sync(0, 0, 0, is_readable)


def by_kills() -> None:
    for work in ("append", "roll", "go offline", "come back"):
        for at in range(1, 90, 2):
            replica_kills.check(replica_kills.Kill(work, at, False))


class Mutant:
    """A planted bug, and the check that finds it."""

    def __init__(self, name: str, check: Check, where: str, edits: dict[str, str]) -> None:
        self.name, self.check, self.change = name, check, Change(where, edits)


MUTANTS = [
    Mutant(
        "published before the followers have it",
        by_the_model,
        f"{REPLICATION}.files:ReplicatedFiles.write",
        {'if not getattr(self._local, "leader_only", False):': "if False:"},
    ),
    Mutant(
        "elected from outside the ISR",
        by_a_copy_out_of_sync,
        f"{REPLICATION}.isr:PartitionAssignment.elect",
        {"if each in in_sync and": "if each in alive and"},
    ),
    Mutant(
        "the first copy is elected, not the longest",
        by_an_election_outside_the_isr,
        f"{REPLICATION}.unclean_election:_longest",
        {"max(each, key=counts.__getitem__) for each in (able, counts)": "min(able) for _ in '12'"},
    ),
    Mutant(
        "a copy that is offline is not counted",
        by_an_election_outside_the_isr,
        f"{REPLICATION}.unclean_election:_longest",
        {"if counts[longest] > counts[leader]:": "if False:"},
    ),
    Mutant(
        "a copy that is not in sync is elected by itself",
        by_an_election_outside_the_isr,
        f"{REPLICATION}.isr:PartitionAssignment.elect",
        {"for each in self.isr if each in alive": "for each in self.replicas if each in alive"},
    ),
    Mutant(
        "a copy that returns is cut to the length of the leader's",
        by_the_model,
        f"{REPLICATION}.catch_up:ReplicaCopy._equal_bytes",
        {"    while position < stop:": "    while (position := stop) < stop:"},
    ),
    Mutant(
        "all segments of a directory that returns are trusted",
        by_a_copy_that_returns,
        f"{REPLICATION}.catch_up:_trusted_offset",
        {"return min(": "return 1 << 62 or min("},
    ),
    Mutant(
        "a process with an old image writes on",
        by_the_model,
        f"{REPLICATION}.controller:Controller.moved",
        {"return True": "return False"},
    ),
    Mutant(
        "a directory that failed stays in the ISR",
        by_the_model,
        f"{REPLICATION}.isr:PartitionAssignment.elect",
        {"return self._elected(each, in_sync)": "return self._elected(each, self.isr)"},
    ),
    Mutant(
        "a copy joins the ISR without the last records",
        by_a_copy_that_returns,
        f"{REPLICATION}.catch_up:ReplicaCopy.join",
        {"self._pass(tail)": "..."},
    ),
    Mutant(
        "what a killed process committed in some databases is not repeated",
        by_kills,
        f"{REPLICATION}.store:ReplicatedStore._make_even",
        {"partial(self._repeat, row)": "lambda txn: txn.put(self._version_key, row)"},
    ),
    Mutant(
        "the version of a write is not written",
        by_kills,
        f"{REPLICATION}.store:ReplicatedStore._commit",
        {"self._put_version(recording, rows[0])": "..."},
    ),
    Mutant(
        "the version of a write does not say what changed",
        by_kills,
        f"{REPLICATION}.store:ReplicatedStore._put_version",
        {"pack_changes(txn.changes)": 'b""'},
    ),
    Mutant(
        "a minority decides",
        by_the_model,
        f"{REPLICATION}.metadata:check_quorum",
        {"if len(online) < required:": "if False:"},
    ),
    Mutant(
        "the file of a follower that lags gets a hole",
        by_the_model,
        f"{REPLICATION}.files:ReplicatedFiles._catch_up",
        {"elif size < position:": "elif False:"},
    ),
    Mutant(
        "a new leader is believed to have everything",
        by_the_model,
        f"{REPLICATION}.partition:ReplicatedPartition._take_over",
        {"if end is None:": "if True:"},
    ),
    Mutant(
        "in-sync copies are not counted again before they are published",
        by_a_copy_that_breaks_in_an_append,
        f"{REPLICATION}.partition:ReplicatedPartition._publish_if_kept",
        {"self._check_min_isr(assignment)": "..."},
    ),
    Mutant(
        "preferred leaders are elected before they have everything",
        by_a_preferred_leader,
        f"{REPLICATION}.reassign:_complete",
        {"log.complete_followers()": "..."},
    ),
    Mutant(
        "what a lost leader had is copied after another one was elected",
        by_a_failover_while_copies_are_made,
        f"{REPLICATION}.partition:ReplicatedPartition.locked_under",
        {"(assignment.leader, tail.leader_epoch) != leader or": "False or"},
    ),
    Mutant(
        "a copy is blamed for a leader that breaks",
        by_a_copy_out_of_sync,
        f"{REPLICATION}.controller:Controller.find_broken",
        {'if f"{path}/"': 'if not f"{path}/"'},
    ),
]


FEW = {
    "published before the followers have it",
    "the version of a write is not written",
}
"""Those that the small tiers plant."""
PLANTED = [mutant for mutant in MUTANTS if mutant.name in FEW or runs("all")]


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    """A check that never failed proves nothing."""

    def work() -> str | None:
        mutant.change()
        try:
            mutant.check()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it was found
            return f"{type(error).__name__}: {str(error)[:120]}"
        return None

    bug_found = forks.call(work, patience=400)
    tell(f"{mutant.name}: {bug_found}")
    assert bug_found is not None, "no check found it"
