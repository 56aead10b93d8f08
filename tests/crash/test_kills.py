"""Processes that are killed, at every operation and within every write."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
from support import forks, program_faults
from support.forks import tell
from support.log_programs import BIRTH, LIFE, random_program
from support.patience import patient
from support.program_faults import Scenario, Templates
from support.tiers import choose, sample

from embedlog import kv
from embedlog.files import Files

# What a life finds matters until it has opened the root, and recovered each partition.
SCENARIOS = [
    Scenario(tuple(BIRTH)),
    Scenario(tuple(LIFE), "killed"),
    Scenario(tuple(LIFE), "closed", first=60),
    Scenario(tuple(LIFE), "rebooted", first=160),
]


def random_scenarios(count: int) -> list[Scenario]:
    """Other programs, on each kind of root in turn."""
    kinds = ("killed", "closed", "rebooted")
    return [Scenario(tuple(random_program(seed)), kinds[seed % 3]) for seed in range(count)]


def kills(templates: Templates, scenarios: list[Scenario]) -> int:
    """Kill at every operation of every scenario; returns how many processes died."""
    cases = program_faults.kill_cases(
        scenarios, [templates.count(scenario) for scenario in scenarios]
    )
    cases = sample(cases, 6)
    died = sum(
        forks.spread(cases, program_faults.check_kill, templates=templates, scenarios=scenarios)
    )
    tell(f"{died} kills at {len(cases)} places")
    return died


def deaths(templates: Templates, count: int, torn: bool) -> int:
    cases = program_faults.kill_series(count, torn, choose(test=12, all=50), most=6)
    died = sum(forks.spread(cases, program_faults.check_kill_series, templates=templates))
    tell(f"{died} deaths beside others that have the root open")
    return died


def test_a_kill_at_any_operation_loses_nothing_that_was_acknowledged(
    templates: Templates,
) -> None:
    """P1: acked records are at their offsets, once, without a hole; the next open just works."""
    assert kills(templates, SCENARIOS) >= choose(test=4, all=1_100)


def test_a_kill_is_no_error_for_those_who_have_the_root_open(templates: Templates) -> None:
    """P1: others append and read on; the dead leave nothing that they must clean up."""
    # With those of the test before these are 2,000.
    assert deaths(templates, 1_000, torn=False) >= choose(test=4, all=900)


def test_a_kill_within_a_write_never_shows_its_bytes(templates: Templates) -> None:
    """P2: a reader beside it sees whole batches only, and the next append goes on."""
    assert deaths(templates, 1_100, torn=True) >= choose(test=4, all=1_000)


def test_a_commit_is_seen_although_its_process_died_before_it_said_so(
    templates: Templates,
) -> None:
    """P1: LMDB shows such a commit only at the next write; a file may have been cut before it."""
    dice, root, lives = random.Random(1), templates.fresh("killed"), choose(test=8, all=300)
    store = kv.LmdbStore(Files(root), "live", durable=False, timeout=patient(5))
    try:
        for life in range(lives):
            child = forks.Child(lambda life=life: commit_until_killed(root, life))
            time.sleep(0.005 + dice.random() * 0.003)
            assert child.kill().killed
            store.catch_up()
            before = store.get(b"k")
            store.write(lambda txn: txn.put(b"other", b""))
            assert store.get(b"k") == before, "it came back to life"
    finally:
        store.close()
    tell(f"{lives} kills within commits")


def commit_until_killed(root: Path, life: int) -> None:
    store = kv.LmdbStore(Files(root), "live", durable=False, timeout=patient(5))
    for number in itertools.count():
        row = b"%d/%d" % (life, number)
        store.write(lambda txn, row=row: txn.put(b"k", row))


@pytest.mark.tier("nightly")
def test_a_kill_at_any_operation_of_many_programs(templates: Templates) -> None:
    """P1 in full: as above, with random programs."""
    total, seed = 0, 0
    scenarios = random_scenarios(1_000)
    while total < 100_000:
        total += kills(templates, scenarios[seed : seed + 10])
        seed += 10


@pytest.mark.tier("nightly")
def test_many_kills_within_writes(templates: Templates) -> None:
    """P2 in full."""
    assert deaths(templates, 24_000, torn=True) >= 20_000
