"""Work that begins under one leader, assignment or set of directories, and ends under another.

Each call is stopped at its lines while another handle makes a second one:
`support/replica_interleavings.py` has the calls, and what must be true afterwards.
"""

from __future__ import annotations

import random

import pytest
from support import forks
from support import replica_interleavings as interleavings
from support.mutants import Change
from support.replica_interleavings import FIRST, SECOND
from support.tiers import choose, sample

SECONDS = choose(test=2, all=len(SECOND))
"""With how many of the second calls each first one is tried."""
LINES = choose(test=1, all=4, nightly=None)
"""At how many lines of each pair the first call is stopped; None is all of them: 325,000 pairs,
which take some hours."""


def check(first: str, handles: int, most: int | None) -> None:
    rng = random.Random(f"{first} {handles}")
    seconds = list(SECOND) if len(SECOND) == SECONDS else rng.sample(list(SECOND), SECONDS)
    with interleavings.made():
        runs, faults = interleavings.find_faults(first, seconds, most, handles)
    assert runs > len(seconds)
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.parametrize("first", sample(list(FIRST), 4))
def test_a_call_may_be_stopped_anywhere_while_another_process_makes_one(first):
    """Nothing that was acknowledged is lost, the copies are equal, and nothing is left."""
    check(first, 2, LINES)


@pytest.mark.tier("all")
@pytest.mark.parametrize("first", FIRST)
def test_a_call_may_be_stopped_anywhere_while_another_thread_makes_one(first):
    """The same by two threads that share a handle, at some of the lines."""
    check(first, 1, choose(all=2, nightly=20))


# Planted bugs

REPLICATION = "embedlog.replication"
BUGS = {
    "a file that was deleted is written to": (
        ("append during a move", "move there and back"),
        Change(f"{REPLICATION}.files:_is_linked", {"return False": "return True"}),
    ),
    "a move goes to a directory that was removed": (
        ("remove a directory", "elect"),
        Change(
            f"{REPLICATION}.reassign:begin",
            {"image.check_directories(replicas[key])  #": "pass  #"},
        ),
    ),
}


@pytest.mark.tier("all")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    """At one of the lines of a pair of calls."""
    (first, second), *changes = BUGS[bug]

    def play() -> None:
        for change in changes:
            change()
        with interleavings.made():
            interleavings.check_pair(first, second)

    finding = forks.run(play, patience=120).finding()
    assert finding is not None
    assert "was stopped at" in finding, finding
