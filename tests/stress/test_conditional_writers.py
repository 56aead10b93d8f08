"""Writers that expect the same: exactly one is first, whatever else happens (A40 to A43)."""

from __future__ import annotations

from itertools import count, product

import pytest
from support import forks
from support.conditional_writers import (
    END_EXPECTED,
    KEY_EXPECTED,
    OTHERS,
    Writers,
    check_pair,
    check_writers,
)
from support.faulty_files import scratch_directory
from support.forks import tell
from support.mutants import Change
from support.patience import until_enough
from support.tiers import choose, sample

EXPECTED = {"end": END_EXPECTED, "key": KEY_EXPECTED}
DURABILITIES = ("os", "fsync")


def check_lines(other: str, expected: str, durability: str, step: int) -> int:
    """Stop a send at each `step`th of its lines; return at how many it was."""
    for stopped in count():
        with scratch_directory() as directory:
            line = stopped * step
            if not check_pair(directory / "log", other, EXPECTED[expected], durability, line):
                return stopped
    raise AssertionError


@pytest.mark.parametrize(
    ("other", "expected", "durability"), sample([*product(OTHERS, EXPECTED, DURABILITIES)], 3)
)
def test_a_conditional_send_may_be_stopped_anywhere(other, expected, durability):
    """A40, A41: while a rival writes, or the log is compacted, deleted, truncated or rolled."""
    step = choose(test=149, all=3)
    assert check_lines(other, expected, durability, step) > 400 // step


@pytest.mark.parametrize(
    ("expects", "durability", "compacts"),
    sample([*product(EXPECTED, DURABILITIES, [False, True])], 1),
)
def test_no_update_is_lost_or_made_twice(expects, durability, compacts):
    """A40, A41, P1: eight processes count on from what they have read, and are killed and
    stopped."""
    seconds = choose(test=0.6, all=8.0, nightly=60.0)

    def run(seed: int) -> dict[str, int]:
        with scratch_directory() as directory:
            case = Writers(expects, durability, compacts, seconds=seconds, seed=seed)
            return check_writers(case, directory)

    done = until_enough(run, {"kills": 3, "acked": 100, "refused": 20})
    tell(", ".join(f"{count} {kind}" for kind, count in done.items()))


# Planted bugs


def pairs(*others: str, durability: str = "os", expected: str = "key") -> None:
    """Check a send at all of its lines."""
    for other in others:
        assert check_lines(other, expected, durability, choose(test=11, all=1)) > 10


APPEND, CONDITION = "embedlog.partition.append:append", "embedlog.partition.append_condition"
LAST_RECORD = f"{CONDITION}:AppendCondition._last_record"
UNLOCKED = Change(
    APPEND,
    {
        "condition.check(log, tail)": "pass",
        "condition.look_up(log)": "condition.look_up(log); condition.check(log, log.tail())",
    },
)
BUGS = {
    "a conflict is checked before the lock, at the end": (
        UNLOCKED,
        lambda: pairs("a rival", expected="end"),
    ),
    "a conflict is checked before the lock, for a key": (UNLOCKED, lambda: pairs("a rival")),
    "what was appended since the key was looked up does not count": (
        Change(LAST_RECORD, {"log.key_index.find_last(self.key, start, tail) or found": "found"}),
        lambda: pairs("a rival"),
    ),
    "a key counts only up to the high watermark": (
        Change(
            "embedlog.partition.key_index:KeyIndex.find_last",
            {"stop = tail.log_end_offset": "stop = tail.high_watermark"},
        ),
        lambda: pairs("a rival", durability="fsync"),
    ),
    "the end is the high watermark": (
        Change(
            f"{CONDITION}:AppendCondition.check",
            {"end = tail.log_end_offset": "end = tail.high_watermark"},
        ),
        lambda: pairs("a rival", durability="fsync", expected="end"),
    ),
    "a truncation after the look-up is not noticed": (
        Change(LAST_RECORD, {"seen.leader_epoch == tail.leader_epoch": "seen"}),
        lambda: pairs("replace"),
    ),
}


@pytest.mark.tier("all")
@pytest.mark.parametrize("bug", list(BUGS))
def test_a_race_that_is_planted_is_found(bug):
    """The check finds it at one of the lines."""
    change, check = BUGS[bug]

    def play() -> None:
        change()
        check()

    finding = forks.run(play, patience=120).finding()
    assert finding is not None
    assert "while a send was stopped at" in finding, finding
