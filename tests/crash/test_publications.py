"""A publication that is killed, fails or loses power anywhere: all of it or nothing, and once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.faulty_files import FALLIBLE
from support.faulty_roots import Case
from support.publication_faults import FAULTS
from support.tiers import choose, sample

from embedlog.partition import journal
from embedlog.publish import app_versions, transaction

MODES = ("os", "fsync")


@pytest.fixture(scope="module")
def counted(directory: Path) -> dict[str, dict[str, int]]:
    return {mode: FAULTS.count(directory, mode) for mode in MODES}


def kills(counted: dict[str, dict[str, int]], company: bool, step: int) -> list[Case]:
    """Return kills at one in ``step`` operations, in both modes."""
    cases = []
    for shift, mode in enumerate(MODES):
        kinds = counted[mode]
        total = sum(kinds.values())
        numbers = range(shift, total, step)
        cases += [Case(n, "after", company, durability=mode) for n in numbers]
        writes = range(shift, kinds["write"], 2 * step)
        cases += [Case(n, "middle", company, ("write",), mode) for n in writes]
    return sample(cases, 8)


def faults(counted: dict[str, dict[str, int]], step: int) -> list[Case]:
    """Return failures of one in ``step`` operations, in both modes."""
    cases = []
    for shift, mode in enumerate(MODES):
        total = sum(counted[mode].get(kind, 0) for kind in FALLIBLE)
        cases += [
            Case(n, ("once", "forever")[n % 2], durability=mode) for n in range(shift, total, step)
        ]
    return sample(cases, 8)


def check_power_cuts(directory: Path, durability: str, limit: int) -> int:
    recording = FAULTS.record(directory, durability)
    return FAULTS.check_power_cuts(recording, limit, directory, durability)


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside another"])
def test_a_publication_that_is_killed_is_there_in_all_partitions_or_in_none(
    directory: Path, counted: dict[str, dict[str, int]], company: bool
) -> None:
    """P1, P2: a repetition publishes what is missing, and nothing else."""
    assert FAULTS.check_kills(directory, kills(counted, company, 8)) >= choose(test=5, all=35)


def test_a_publication_that_fails_is_there_in_all_partitions_or_in_none(
    directory: Path, counted: dict[str, dict[str, int]]
) -> None:
    """P8, P9, P10: any operation, once or from then on; with the same handle all is done after."""
    assert FAULTS.check_faults(directory, faults(counted, step=8)) >= choose(test=2, all=20)


@pytest.mark.parametrize("durability", MODES)
def test_after_a_power_cut_a_publication_is_there_in_all_partitions_or_in_none(
    directory: Path, durability: str
) -> None:
    """P4: at every cut.  P5: without flushes a prefix of each, and a repetition loses nothing."""
    limit = choose(test=15, all=100)
    assert check_power_cuts(directory, durability, limit) >= 0.8 * limit


@pytest.mark.tier("nightly")
def test_a_publication_may_be_killed_and_fail_at_every_operation(
    directory: Path, counted: dict[str, dict[str, int]]
) -> None:
    """As above, at all of them; each fault once and for ever."""
    for company in (False, True):
        assert FAULTS.check_kills(directory, kills(counted, company, step=1)) >= 300
    cases = faults(counted, step=1)
    other = {"once": "forever", "forever": "once"}
    cases += [case._replace(what=other[case.what]) for case in cases]
    assert FAULTS.check_faults(directory, cases) > 400


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("durability", MODES)
def test_power_cuts_of_publications_in_full(tmp_path: Path, durability: str) -> None:
    """As above."""
    assert check_power_cuts(tmp_path, durability, 10_000) >= 5_000


# Planted bugs: what the checks above are worth


def no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery takes whole batches for published ones."""
    monkeypatch.setattr(journal, "ceiling", lambda entered: None)


def nothing_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says it is durable, and is not."""
    monkeypatch.setattr(transaction, "_flush", lambda plan, files: None)


def ends_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication is finished in one of its partitions only."""
    finish = journal.finish_publication

    def wrong(context: Any, entered: Any) -> None:
        finish(context, entered._replace(partners=entered.partners[:1]))

    monkeypatch.setattr(journal, "finish_publication", wrong)


def marker_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The markers are not in the transaction that publishes, but in one before it."""
    carry_out = transaction._carry_out

    def wrong(context: Any, plans: Any, target: Any, *rest: Any) -> Any:
        if target is not None:
            put = transaction._put_app_versions
            context.state.write(lambda txn: put(txn, target, plans, 0, 0))
        return carry_out(context, plans, None, *rest)

    monkeypatch.setattr(transaction, "_carry_out", wrong)


def markers_by_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump of the clock by 30 days drops the markers of all that have not published since."""
    monkeypatch.setattr(app_versions, "advance_clock", lambda txn, clocks: max(clocks.time_ms, 0))


@pytest.mark.parametrize(
    "bug",
    [
        marker_apart,
        pytest.param(markers_by_the_wall_clock, marks=pytest.mark.tier("all")),
        pytest.param(ends_one_by_one, marks=pytest.mark.tier("nightly")),
    ],
)
def test_kills_find_what_was_planted(
    directory: Path,
    counted: dict[str, dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """A checker that never found anything proves nothing."""
    bug(monkeypatch)
    total = sum(counted["os"].values())
    with pytest.raises(AssertionError):
        FAULTS.check_kills(
            directory, sample([Case(n, "after", True) for n in range(50, total, 2)], 16)
        )


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "bug", [nothing_flushed, pytest.param(no_journal, marks=pytest.mark.tier("nightly"))]
)
def test_power_cuts_find_what_was_planted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """The same for what only the disk shows."""
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        check_power_cuts(tmp_path, "fsync", 200)
