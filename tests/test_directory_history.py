"""Directories are compared by the epochs that each has: equal, behind, or diverged."""

from __future__ import annotations

import logging
import os
import shutil

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.replicas import Directories, assignment, bring_back, notice, send, values

import embedlog
from embedlog.cli import main
from embedlog.errors import NotALogError, ReplicasDivergedError
from embedlog.failures import Failures
from embedlog.replication import root as replicated_root
from embedlog.replication.metadata import DirectoryHistory, Epoch


@pytest.fixture
def pair(tmp_path):
    """Two directories of a log with a topic, in which each has one record."""
    directories = Directories(tmp_path, 2)
    with directories.open() as log:
        log.create_topic("t", replicas=[(1, 2)])
        send(log, "t", [b"shared"])
    return directories


def go_on_alone(directories, directory, value):
    """Append to one directory while the other one is missing."""
    directories.take(3 - directory)
    with directories.alone(directory) as log:
        send(log, "t", [value])
    directories.put_back(3 - directory)


# Whole logs


def test_a_directory_that_went_on_alone_is_not_brought_back_by_a_program_that_did_too(pair, caplog):
    """Also if that has the log open all the time: it is left alone, with one line for that."""
    with pair.open() as log:
        pair.lose(log, 1)
        send(log, "t", [b"A"])
        pair.take(2)
        pair.put_back(1)
        with pair.alone(1) as other:
            send(other, "t", [b"B"])
        pair.put_back(2)
        failures = Failures(logging.getLogger("embedlog.replication"))
        for _ in range(3):
            assert replicated_root.try_bring_back(log.root, failures) == []
        assert values(log, "t") == [b"shared", b"A"]
        offline = log.replicas[0]
        assert not offline.online
        assert "each written to without the other" in offline.reason
    assert sum("each written to" in line for line in caplog.messages) == 1
    with pytest.raises(ReplicasDivergedError, match="each written to"):
        pair.open()
    pair.take(2)
    with pair.alone(1) as log:
        assert values(log, "t") == [b"shared", b"B"]


@pytest.mark.parametrize("first", [1, 2])
def test_an_old_copy_that_goes_on_alone_has_diverged_from_what_it_was_a_copy_of(pair, first):
    """What the other directory has, and the old copy lacks, is never cut."""
    second = 3 - first
    shutil.copytree(pair.path(first), pair.aside(first))
    with pair.open() as log:
        send(log, "t", [b"newer-%d" % number for number in range(20)])
    shutil.rmtree(pair.path(first))
    pair.put_back(first)
    go_on_alone(pair, first, b"older")

    with pytest.raises(ReplicasDivergedError):
        pair.open()
    pair.take(first)
    with pair.alone(second) as log:
        assert len(values(log, "t")) == 21


def test_an_old_copy_catches_up_if_it_was_not_used(pair):
    """It is a prefix of what the other directory has."""
    shutil.copytree(pair.path(1), pair.aside(1))
    with pair.open() as log:
        send(log, "t", [b"newer"])
    shutil.rmtree(pair.path(1))
    pair.put_back(1)

    with pair.open() as log:
        bring_back(log)
        assert values(log, "t") == [b"shared", b"newer"]
        assert assignment(log, "t").isr == (1, 2)
        pair.assert_equal_copies("t", 2)


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("door", ["python", "shell"])
def test_a_person_decides_which_of_two_diverged_directories_counts(pair, kept, door, capsys):
    """Reading shows either one; the other is removed, and can be added again, empty."""
    go_on_alone(pair, 1, b"of 1")
    go_on_alone(pair, 2, b"of 2")
    removed = 3 - kept
    with embedlog.open(pair.path(kept), mode="r") as log:
        assert values(log, "t") == [b"shared", b"of %d" % kept]
        if door == "python":
            log.replicas.remove(pair.path(removed), force=True)
    if door == "shell":
        command = ["--root", str(pair.path(kept)), "replicas", "remove", str(pair.path(removed))]
        assert main(command) != 0
        assert "--force" in capsys.readouterr().err
        assert main([*command, "--force"]) == 0
    pair.path(removed).rename(pair.aside(removed))

    with embedlog.open(pair.path(kept), maintenance=False) as log:
        log.replicas.add(pair.path(removed))
        log.replicas.reassign(replication_factor=2)
        assert values(log, "t") == [b"shared", b"of %d" % kept]
        pair.assert_equal_copies("t", 2)


def test_a_disk_that_fails_once_while_another_one_is_replaced_has_lost_nothing(tmp_path):
    """It lacks the write in which it failed, and those that replaced it."""
    directories = Directories(tmp_path)
    with directories.open() as log:
        log.create_topic("t", replicas=[(1, 3)])
        log.create_topic("other", replicas=[(1, 2, 3)])
        send(log, "t", [b"x"])
        directories.lose(log, 1)
        directories.replace(1)
        directories.take(3)
        log.alter_topic("other", {"retention.ms": 1})
        notice(log)
        directories.put_back(3)
        for _ in range(3):
            bring_back(log)
        assert [each.online for each in log.replicas] == [True] * 3
        assert values(log, "t") == [b"x"]


# Which directory is which


def test_a_copy_at_the_path_of_another_directory_is_left_alone(tmp_path, caplog):
    """The log opens with the others, by any of its paths."""
    directories = Directories(tmp_path)
    with directories.open() as log:
        log.create_topic("t")
        send(log, "t", [b"x"])
    directories.take(2)
    shutil.copytree(directories.path(1), directories.path(2))
    before = sorted(os.listdir(directories.path(2)))

    for paths in (directories.paths, *directories.paths):
        with embedlog.open(paths, maintenance=False) as log:
            assert values(log, "t") == [b"x"]
            assert [each.online for each in log.replicas] == [True, False, True]
            assert replicated_root.try_bring_back(log.root) == []
    assert "directory 1 is there; it is left alone" in caplog.text
    assert sorted(os.listdir(directories.path(2))) == before
    shutil.rmtree(directories.path(2))
    directories.put_back(2)
    with directories.open() as log:
        bring_back(log)
        directories.assert_equal_copies("t")


def test_two_directories_that_say_that_they_are_the_same_are_both_named(pair):
    """Neither is changed, and the log goes on without the copy."""
    copy = pair.path(1).with_name("copy")
    shutil.copytree(pair.path(1), copy)

    with pytest.raises(NotALogError, match="are both directory 1 of the log") as caught:
        embedlog.open([pair.path(1), copy], maintenance=False)
    assert {str(copy), str(pair.path(1))} <= set(str(caught.value).split())
    with pair.open() as log:
        assert values(log, "t") == [b"shared"]
        assert [each.online for each in log.replicas] == [True, True]


def test_an_old_copy_that_names_a_directory_that_was_removed_since_does_not_hide_the_new_one(
    tmp_path,
):
    """At the same path; each directory is opened once, by what it says itself."""
    directories = Directories(tmp_path, 3)
    with directories.open() as log:
        log.create_topic("t", replicas=[(1, 2)])
        send(log, "t", [b"x"])
    shutil.copytree(directories.path(1), directories.aside(1))
    with directories.open() as log:
        log.replicas.remove(directories.path(3))
        shutil.rmtree(directories.path(3))
        assert log.replicas.add(directories.path(3)) == 4
    shutil.rmtree(directories.path(1))
    directories.put_back(1)

    with directories.open() as log:
        assert [each.id for each in log.replicas if each.online] == [2, 4]
        bring_back(log)
        assert [each.id for each in log.replicas if each.online] == [1, 2, 4]
        assert values(log, "t") == [b"x"]


def test_directories_may_change_places(tmp_path):
    """As when two disks are mounted at each other's paths."""
    directories = Directories(tmp_path)
    with directories.open() as log:
        log.create_topic("t")
        send(log, "t", [b"x"])
    directories.take(1)
    directories.path(2).rename(directories.path(1))
    directories.aside(1).rename(directories.path(2))

    with directories.open() as log:
        send(log, "t", [b"y"])
        assert [each.path for each in log.replicas] == [
            str(directories.path(each)) for each in (2, 1, 3)
        ]
    directories.assert_equal_copies("t")


# Any order of writes, failures and returns


class Histories(RuleBasedStateMachine):
    """Three directories, each with the writes that it has; a majority decides.

    A write goes to all that are online.  It is acknowledged unless its program dies, or the
    directory fails, in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[int, list[tuple[int, int]]] = {each: [] for each in (1, 2, 3)}
        """The epoch and the id of each write."""
        self.epochs: dict[int, list[Epoch]] = {each: [] for each in (1, 2, 3)}
        self.since = dict.fromkeys((1, 2, 3), 0)
        self.acknowledged: set[int] = set()
        self.online = {1, 2, 3}
        self.ids = 0
        self._begin()

    def _write(self, directories: set[int], *, acknowledged: bool = True) -> int:
        self.ids += 1
        for each in directories:
            self.written[each].append((self.epoch.number, self.ids))
        if acknowledged:
            self.acknowledged.add(self.ids)
        return self.ids

    def _begin(self) -> None:
        before = [epoch.number for each in self.online for epoch in self.epochs[each]]
        number = max(before, default=0) + 1
        start = len(self.written[min(self.online)]) + 1
        self.epoch = Epoch(number, self.ids + 1, start)
        for each in self.online:
            self.epochs[each].append(self.epoch)
        self._write(self.online)

    def _history(self, directory: int) -> DirectoryHistory:
        return DirectoryHistory(tuple(self.epochs[directory]), len(self.written[directory]))

    @rule(count=st.integers(1, 3))
    def write(self, count: int) -> None:
        for _ in range(count):
            self._write(self.online)

    @rule(directory=st.integers(1, 3), reaches=st.booleans())
    def fail(self, directory: int, reaches: bool) -> None:
        """A directory fails in a write, which may be in it; the others go on."""
        if directory in self.online and len(self.online) > 1:
            if reaches:
                self._write({directory}, acknowledged=False)
            else:
                self._write(self.online - {directory})
            self.online.discard(directory)
            self._begin()
            self.since[directory] = self.epoch.number

    @rule(directory=st.integers(1, 3))
    def come_back(self, directory: int) -> None:
        """It gets everything that the others have."""
        if directory not in self.online:
            source = min(self.online)
            mine, theirs = self._history(directory), self._history(source)
            assert mine.extra(theirs) == 0
            assert mine.has_all(theirs, self.since[directory])
            self.written[directory] = list(self.written[source])
            self.epochs[directory] = list(self.epochs[source])
            self.online.add(directory)
            self._begin()

    @invariant()
    def one_that_is_offline_has_nothing_of_its_own(self) -> None:
        source = self._history(min(self.online))
        for each in {1, 2, 3} - self.online:
            assert self._history(each).extra(source) == 0
            ids = {number for _, number in self.written[each]} & self.acknowledged
            assert ids <= {number for _, number in self.written[min(self.online)]}

    @rule(directory=st.integers(1, 3), count=st.integers(0, 3))
    def go_on_alone(self, directory: int, count: int) -> None:
        """One that is offline, if it began an epoch of its own, would have diverged."""
        if directory not in self.online:
            mine = self._history(directory)
            begun = Epoch(mine.epochs[-1].number + 1, -1, mine.end + 1)
            alone = DirectoryHistory((*mine.epochs, begun), mine.end + 1 + count)
            assert alone.extra(self._history(min(self.online))) == count + 1
            assert self._history(min(self.online)).extra(alone) > 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_database_that_was_begun_again_says_nothing() -> None:
    """`live` is made anew after a reboot, or if it was damaged."""
    old = DirectoryHistory((Epoch(1, 11, 1), Epoch(2, 12, 40)), 90)

    assert old.extra(DirectoryHistory((Epoch(2, 12, 1),), 3)) == 0
    assert old.extra(DirectoryHistory((Epoch(5, 15, 1),), 3)) == 0
    assert old.extra(DirectoryHistory((), 0)) == 0
    assert DirectoryHistory((), 0).extra(old) == 0
