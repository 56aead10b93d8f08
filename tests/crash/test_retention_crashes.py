"""A round of retention, killed, failing or without power at every operation; and its readers."""

from __future__ import annotations

import errno
from typing import ClassVar

import pytest
from support.clock import START
from support.faulty_roots import COMPANY, Acknowledge, Case, FastUptimeFiles, RootFaults
from support.roots import encoded, healthy, no_stray_files, rows
from support.tiers import choose

from embedlog import catalog
from embedlog.config import TopicConfig
from embedlog.errors import EmbedlogError
from embedlog.partition import log_start, unnamed_files
from embedlog.record import TopicPartition
from embedlog.retention import delete_records, retain
from embedlog.root.root import Root

DAY = 86_400_000
NOW = START + 30 * DAY
SIZE = encoded(b"v0").size
GOALS = {"aged": (7, 8), "large": (4, 8), "asked": (5, 8), "whole": (8, 8)}
"""The first offset of each topic after the work, and its end."""
CONFIG: dict[str, dict[str, object]] = {
    # Its last segment holds a young record.
    "aged": {"retention.ms": DAY, "file.delete.delay.ms": 0},
    "large": {"retention.bytes": 2500, "file.delete.delay.ms": 1},
    "asked": {"file.delete.delay.ms": 0},
    "whole": {"retention.ms": DAY, "file.delete.delay.ms": 0},
}


class RetentionFaults(RootFaults):
    """One round of retention, and a deletion of records by request."""

    parts: ClassVar = [TopicPartition(name, 0) for name in GOALS]
    files = FastUptimeFiles

    def fill(self, root: Root) -> None:
        """Create the topics, with eight records in four segments each."""
        for name, more in CONFIG.items():
            usual: dict[str, object] = {"segment.bytes": 2 * SIZE, "retention.ms": -1}
            root.create_topic(name, 1, TopicConfig.parse(usual | more))
            log = root.partition(name, 0)
            for number in range(8):
                young = name == "aged" and number == 7
                at = NOW if young else START + number
                log.append([encoded(b"%02d" % number, at=at)])
        root.flush()

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Run the round, and then delete the records."""
        errors = []
        for step in (
            lambda: retain(root, NOW),
            lambda: delete_records(root.partition("asked", 0), 5),
        ):
            try:
                step()
            except EmbedlogError as error:
                errors.append(error)
        if errors:
            return errors[0]
        acknowledge("done")
        return None

    def check_between(self, root: Root, acked: set[str], *, full: bool = False) -> None:
        """Every topic has its old or its new start; no record between is missing or double.

        On a full disk a round may delete fewer segments than are due.
        """
        for name, (goal, end) in GOALS.items():
            log = root.partition(name, 0)
            start = log.start_offset()
            allowed = range(0, goal, 2) if full else (0,)
            assert start in (*allowed, goal), f"{name} begins at {start}, neither 0 nor {goal}"
            assert start == goal or "done" not in acked, f"{name} went back"
            assert log.end_offset() == end, f"{name} ends at {log.end_offset()}"
            records = [(row[0], row[3]) for row in rows(log)]
            assert records == [(n, b"%02d" % n) for n in range(start, end)], f"{name}: {records}"

    def check_failure(
        self, root: Root, error: EmbedlogError | None, number: int, failed: bool, acked: set[str]
    ) -> None:
        """The first error has the errno of the fault."""
        assert error is None or error.errno == number, error  # type: ignore[attr-defined]
        if not failed:
            self.check_between(root, set(), full=number != errno.EIO)

    def check_done(self, root: Root, durability: str) -> None:
        """Another round finishes the work, and leaves no file that the manifest does not name."""
        assert self.work(root, durability, lambda step: None) is None
        unnamed_files.sweep(root.context, early=True)
        for name, (goal, end) in GOALS.items():
            log = root.partition(name, 0)
            assert (log.start_offset(), log.end_offset()) == (goal, end)
        assert no_stray_files(root)
        assert unnamed_files.pending_paths(root.context.live) == set()
        assert healthy(root)

    def check_reopened_after_fault(self, root: Root) -> None:
        """Another round changes nothing."""
        self.check_done(root, "os")

    def check_appends(self, root: Root) -> None:
        """The next record of each topic gets the next offset."""
        for name in GOALS:
            assert root.partition(name, 0).append([encoded(b"08")])[0].base_offset == 8


FAULTS = RetentionFaults()


@COMPANY
def test_a_round_that_is_killed_leaves_the_old_log_or_the_new_one(directory, company):
    """R5, P1: at every operation; the next round finishes it, and no file is left over."""
    assert FAULTS.kill_everywhere(directory, 4, company) >= choose(test=2, all=70)


@pytest.mark.tier("all")
def test_a_round_that_fails_loses_nothing_and_is_made_up_for(directory):
    """P8, P10: any operation, once or from then on; with the same handle all is done after."""
    # A disk that is full once, or for part of the work, raises no error.
    assert FAULTS.fail_everywhere(directory, 6) >= choose(test=1, all=40)


@pytest.mark.tier("all")
def test_after_a_power_cut_the_log_is_the_old_one_or_the_new_one(directory):
    """R5, P4: at every cut; what was done before is durable, and unlinks that came back go."""
    limit = choose(test=20, all=600)
    assert FAULTS.cut_everywhere(directory, limit) >= limit / 3


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
    monkeypatch.setattr(unnamed_files, "schedule_delete", lambda *_: None)


def not_finished(monkeypatch):
    """A start that moved is taken for a finished move."""
    goal = log_start._goal

    def wrong(segments, tail, offset, whole, highest):
        start = goal(segments, tail, offset, whole, highest)
        if start == tail.start_offset:
            monkeypatch.setattr(log_start, "_before", lambda segments, start: [])
        return start

    monkeypatch.setattr(log_start, "_goal", wrong)


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "bug",
    [
        unlinked_first,
        not_doomed,
        not_finished,
    ],
)
def test_kills_find_what_was_planted(directory, monkeypatch, bug):
    """A checker that never found anything proves nothing."""
    total = sum(FAULTS.count(directory).values())
    bug(monkeypatch)
    cases = [Case(n, "before", n % 2 == 1) for n in range(total)]
    with pytest.raises(AssertionError):
        FAULTS.check_kills(directory, cases, enough=1)


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
