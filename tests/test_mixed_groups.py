"""One group of real programs: in Python on the directory, and clients of librdkafka on the wire."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import Any

import pytest
from support.forks import tell
from support.mixed_group import KINDS, SERVER, MixedGroup
from support.patience import patient
from support.tiers import choose

VICTIMS = (*KINDS, SERVER)


@pytest.fixture
def new_group(tmp_path):
    with ExitStack() as stack:

        def make(session_seconds: float, **options: Any) -> MixedGroup:
            group = MixedGroup(tmp_path, int(patient(session_seconds) * 1000), **options)
            stack.callback(group.close)
            return group

        yield make


def test_a_server_is_killed_and_nobody_notices(new_group):
    """No rebalance, no commit lost, and all records are read by a program and a client."""
    group = new_group(session_seconds=20)
    for kind in ("modern", "program"):
        group.start(kind)
    group.send(200)
    group.until_shared()
    number = group.generation()
    group.kill(SERVER)
    group.send(200)
    group.until_consumed()
    assert group.generation() == number
    group.check()


def kinds_with(victim: str) -> list[str]:
    """Return the kinds of members of a group, in which librdkafka lets one kind be classic."""
    left_out = "classic" if victim == "cooperative" else "cooperative"
    return [kind for kind in KINDS if kind != left_out]


@pytest.mark.tier("all")
@pytest.mark.parametrize("victim", VICTIMS)
def test_members_of_all_kinds_and_the_server_are_killed(new_group, victim):
    """The others go on from the last commit, and so does who comes after them."""
    group = new_group(session_seconds=1)
    for kind in kinds_with(victim):
        group.start(kind)
    group.send(400)
    group.until_shared()
    group.kill(victim)
    group.send(400)
    group.kill(SERVER)
    group.until_shared()
    if victim != SERVER:
        group.start(victim)
    group.send(400)
    group.until_shared()
    group.until_consumed()
    group.check()


def stop_for_long(group: MixedGroup, kinds: list[str], victim: str) -> None:
    """Stop one until others have its partitions and have read on; then it commits, too late."""
    for kind in kinds:
        group.start(kind)
    group.until_shared()
    group.send(400)
    (group.stop if victim == SERVER else group.stop_before_it_commits)(victim)
    group.send(400)
    group.until_shared()
    group.until_consumed()
    group.resume()
    group.send(400)
    group.until_shared()
    group.until_consumed()
    group.check()


@pytest.mark.tier("test")
def test_a_program_is_stopped_for_long(new_group):
    """A client has its partitions meanwhile, and what it committed stays (M8, M22)."""
    stop_for_long(new_group(session_seconds=0.5), ["modern", "program"], "program")


@pytest.mark.tier("all")
@pytest.mark.parametrize("victim", VICTIMS)
def test_members_of_all_kinds_and_the_server_are_stopped(new_group, victim):
    """With SIGSTOP, for longer than their sessions: their late commits are refused (M31)."""
    stop_for_long(new_group(session_seconds=1), kinds_with(victim), victim)


@pytest.mark.tier("all")
def test_late_commits_that_are_taken_are_found(new_group):
    """With a server that takes them."""
    group = new_group(session_seconds=1, bug=True)
    with pytest.raises(AssertionError, match=r"(commits|reads) .* after| became "):
        stop_for_long(group, ["modern", "program"], "modern")


@pytest.mark.tier("all")
def test_whoever_is_killed_or_stopped_in_any_order(new_group):
    """Some for so short a time that they keep what they have."""
    seed = choose(all=2, nightly=time.time_ns())
    dice = random.Random(seed)
    tell(f"seed {seed}")
    group, kinds = new_group(session_seconds=1), kinds_with("classic")
    for kind in kinds:
        group.start(kind)
    group.until_shared()
    for _ in range(choose(all=7, nightly=100)):
        group.send(100)
        victim = dice.choice([*kinds, SERVER])
        if dice.random() < 0.3:
            group.kill(victim)
            if victim != SERVER:
                group.start(victim)
        else:
            group.stop(victim)
            time.sleep(dice.choice([0.0, 0.3, 1.5 * group.session_seconds]))
            group.resume()
    group.until_shared()
    group.until_consumed()
    group.check()
