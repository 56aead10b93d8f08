"""A round of retention, killed, failing or without power at every operation; and its readers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.faulty_files import FALLIBLE
from support.faulty_roots import Case
from support.retention_faults import FAULTS
from support.tiers import choose, sample

from embedlog import catalog
from embedlog.partition import log_start, pending_deletes


@pytest.fixture(scope="module")
def counted(directory: Path) -> dict[str, int]:
    return FAULTS.count(directory)


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside another"])
def test_a_round_that_is_killed_leaves_the_old_log_or_the_new_one(directory, counted, company):
    """R5, P1: at every operation; the next round finishes it, and no file is left over."""
    total = sum(counted.values())
    cases = [Case(n, "after", company) for n in range(total)]
    cases += [Case(n, "before", company, ("unlock",)) for n in range(counted["unlock"])]
    assert FAULTS.check_kills(directory, sample(cases, 8)) >= choose(test=5, all=80)


def test_a_round_that_fails_loses_nothing_and_is_made_up_for(directory, counted):
    """P8, P10: any operation, once or from then on; with the same handle all is done after."""
    total = sum(counted.get(kind, 0) for kind in FALLIBLE)
    cases = [Case(n, how) for n in range(total) for how in ("once", "forever")]
    # A disk that is full once, or for part of the work, raises no error.
    assert FAULTS.check_faults(directory, sample(cases, 8)) >= choose(test=2, all=40)


def test_after_a_power_cut_the_log_is_the_old_one_or_the_new_one(directory):
    """R5, P4: at every cut; what was done before is durable, and unlinks that came back go."""
    limit = choose(test=30, all=600)
    assert FAULTS.check_power_cuts(FAULTS.record(directory), limit, directory) >= limit / 3


# Planted bugs: what the checks above are worth


def unlinked_first(monkeypatch):
    """Files are deleted before their names."""
    move_locked = log_start._move_locked

    def wrong(log, tail, offset, whole, limit):
        log.refresh()
        for info in log_start._before(log.segments, min(offset, tail.high_watermark)):
            log.context.files.unlink(log.path_of(info), missing_ok=True)
        return move_locked(log, tail, offset, whole, limit)

    monkeypatch.setattr(log_start, "_move_locked", wrong)


def not_doomed(monkeypatch):
    """The files to delete are not noted."""
    monkeypatch.setattr(pending_deletes, "put", lambda *_: None)


def not_finished(monkeypatch):
    """A start that moved is taken for a finished move."""
    goal = log_start._goal

    def wrong(segments, tail, offset, whole, highest):
        start = goal(segments, tail, offset, whole, highest)
        if start == tail.start_offset:
            monkeypatch.setattr(log_start, "_before", lambda segments, start: [])
        return start

    monkeypatch.setattr(log_start, "_goal", wrong)


@pytest.mark.parametrize(
    "bug",
    [
        unlinked_first,
        pytest.param(not_doomed, marks=pytest.mark.tier("all")),
        pytest.param(not_finished, marks=pytest.mark.tier("all")),
    ],
)
def test_kills_find_what_was_planted(directory, counted, monkeypatch, bug):
    """A checker that never found anything proves nothing."""
    bug(monkeypatch)
    cases = [Case(n, "before", n % 2 == 1) for n in range(sum(counted.values()))]
    with pytest.raises(AssertionError):
        FAULTS.check_kills(directory, cases)


@pytest.mark.tier("all")
def test_power_cuts_find_a_start_that_is_not_durable(tmp_path, monkeypatch):
    """Names that are dropped without it leave a log that seems to begin with a hole."""

    def wrong(txn, key, start, segments):
        for segment in segments:
            catalog.drop_segment(txn, key, segment)

    monkeypatch.setattr(log_start, "_drop", wrong)
    recording = FAULTS.record(tmp_path)
    monkeypatch.undo()

    with pytest.raises(AssertionError):
        FAULTS.check_power_cuts(recording, 600, tmp_path)
