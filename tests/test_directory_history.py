"""Directories are compared by the epochs that each has: equal, behind, or diverged."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
from itertools import product
from types import SimpleNamespace

import lmdb
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support import forks
from support.replicas import Directories, assignment, bring_back, notice, send, values
from support.roots import abandon, encoded
from support.tiers import sample

import embedlog
from embedlog import kv
from embedlog.cli import main
from embedlog.errors import (
    NotALogError,
    NotEnoughReplicasError,
    ReplicasDivergedError,
    StorageError,
)
from embedlog.failures import Failures
from embedlog.replication import root as replicated_root
from embedlog.replication.metadata import METADATA_VERSION, DirectoryHistory, Epoch, put_epoch


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


# An epoch that begins in some of its directories only


@pytest.fixture
def three(tmp_path, monkeypatch):
    """Three directories of a log with a topic; 3 was lost before the last record."""
    monkeypatch.setattr(replicated_root, "REGAIN_SECONDS", 0)
    directories = Directories(tmp_path)
    log = directories.open()
    log.create_topic("t", replicas=[(1, 2, 3)])
    send(log, "t", [b"a"])
    directories.lose(log, 3)
    send(log, "t", [b"b"])
    yield directories, log
    kv.close_unused()


def take_the_place_of_2(directories, log, monkeypatch, *, fails):
    """Directory 2 fails, and 3 comes back; the program dies, perhaps since 3 refuses the commit."""
    directories.take(2)
    directories.put_back(3)
    commit_all, seen = kv._commit_all, []

    def commit(stores, fan_out):
        for at, store in enumerate(stores):
            if fails and store.path == str(directories.path(3) / "state"):
                seen.append(at)
                rest = fan_out.txns[at + 1 :]
                fan_out.txns = [*fan_out.txns[:at], _FullTxn(fan_out.txns[at]), *rest]
        return commit_all(stores, fan_out)

    with monkeypatch.context() as patch:
        patch.setattr(kv, "_commit_all", commit)
        if fails:
            with pytest.raises(NotEnoughReplicasError):
                notice(log)
            assert seen == [1]
        else:
            notice(log)


class _FullTxn:
    """A transaction whose commit finds the disk full."""

    def __init__(self, txn):
        self.id = txn.id

    def commit(self):
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")


def begin_another(txn):
    """Begin an epoch in one directory, as a commit does that fails in all others."""
    version = METADATA_VERSION.get(txn)
    put_epoch(txn, version.epoch + 1, version.controller_id)
    begun = METADATA_VERSION.get(txn)
    METADATA_VERSION.put(txn, value=begun._replace(version=begun.version + 1))


@pytest.mark.parametrize("more", [0, 9])
@pytest.mark.parametrize("is_open", [False, True])
def test_epochs_that_began_in_one_directory_only_have_not_diverged(
    three, monkeypatch, is_open, more
):
    """Nothing was done in them: the others go on, and the one that has them catches up."""
    directories, log = three
    take_the_place_of_2(directories, log, monkeypatch, fails=True)
    for _ in range(more):
        log.root.controller.directories[1].state.write(begin_another)
    abandon(log.root)
    directories.take(1)
    directories.put_back(2)
    with directories.open() as log:
        assert [each.online for each in log.replicas] == [False, True, True]
        send(log, "t", [b"c"])
        if is_open:
            directories.put_back(1)
            assert bring_back(log) == [1]
    if not is_open:
        directories.put_back(1)

    with directories.open() as log:
        bring_back(log)
        assert values(log, "t") == [b"a", b"b", b"c"]
        assert assignment(log, "t").isr == (1, 2, 3)
        directories.assert_equal_copies("t")


@pytest.mark.parametrize("work", ["append", "append, and a power cut", "create a topic"])
def test_an_epoch_in_which_something_was_done_has_diverged(three, monkeypatch, work):
    """The other directory that had it is an older copy now, and does not know of it."""
    directories, log = three
    backup = directories.aside(3).with_name("backup")
    shutil.copytree(directories.aside(3), backup)
    take_the_place_of_2(directories, log, monkeypatch, fails=False)
    if work == "create a topic":
        log.create_topic("u")
    else:
        # Its only trace in a power cut is what is flushed: no row of `state` is of an append.
        log.root.partition("t", 0).append([encoded(b"only here")], durability="fsync")
    abandon(log.root)
    kv.close_unused()
    if work == "append, and a power cut":
        for each in (1, 3):
            shutil.rmtree(directories.path(each) / "live")
    directories.take(1)
    shutil.rmtree(directories.path(3))
    backup.rename(directories.path(3))
    directories.put_back(2)
    with directories.open() as log:
        send(log, "t", [b"c"])
        directories.put_back(1)
        assert bring_back(log) == []

    with pytest.raises(ReplicasDivergedError):
        directories.open()
    directories.take(2)
    directories.take(3)
    with embedlog.open(directories.path(1), mode="r") as log:
        if work == "create a topic":
            assert log.topics() == ["t", "u"]
        else:
            assert values(log, "t")[-1] == b"only here"


@pytest.mark.parametrize("removed", [1, 2])
def test_a_directory_that_lacks_the_removal_of_another_one_is_behind(tmp_path, removed):
    """Also if that was the controller: no epoch that both have becomes another one."""
    directories, kept = Directories(tmp_path), 3 - removed
    with directories.open() as log:
        log.create_topic("t", replicas=[(kept, 3)])
        send(log, "t", [b"a"])
        shutil.copytree(directories.path(3), directories.path(3).with_name("before"))
        log.replicas.remove(directories.path(removed))
    kv.close_unused()
    directories.take(3)
    shutil.rmtree(directories.aside(3))
    with directories.alone(kept) as log:
        send(log, "t", [b"b"])
        directories.path(3).with_name("before").rename(directories.path(3))
        assert bring_back(log) == [3]
        assert values(log, "t") == [b"a", b"b"]


@pytest.mark.parametrize("end", ["killed", "failed"])
def test_an_epoch_that_one_directory_has_is_not_taken_for_the_next_one(
    tmp_path, monkeypatch, caplog, end
):
    """Another program may have seen it there; without that directory the others begin another."""
    directories = Directories(tmp_path)
    commit_all = kv._commit_all

    def commit_first(stores, fan_out):
        commit_all(stores[:1], SimpleNamespace(txns=fan_out.txns[:1]))
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        monkeypatch.undo()
        error = StorageError("It failed", errno=errno.EIO, path=f"{stores[0].path}")
        raise error

    def begin_epoch():
        with directories.open() as other:
            epoch = other.root.controller.epoch
            monkeypatch.setattr(kv, "_commit_all", commit_first)
            other.root.controller.change(lambda *_: True)
            assert other.root.controller.epoch > epoch

    with directories.open() as log:
        log.create_topic("t", replicas=[(1, 2, 3)])
        send(log, "t", [b"a"])
        if end == "killed":
            assert forks.was_killed(begin_epoch)
        else:
            forks.call(begin_epoch)
        controller = log.root.controller.current()
        controller.take_offline({1: StorageError("It is broken", path=directories.path(1))})
        assert controller.image.online == (2, 3)
        send(log, "t", [b"b"])
        with directories.open() as other:
            send(other, "t", [b"c"])
        assert 1 in {*bring_back(log), *controller.current().image.online}
        assert values(log, "t") == [b"a", b"b", b"c"]
        send(log, "t", [b"d"])
    with directories.open() as log:
        assert values(log, "t") == [b"a", b"b", b"c", b"d"]
        directories.assert_equal_copies("t")


# What the error says


@pytest.mark.parametrize("power_cut", [False, True])
def test_the_error_counts_the_records_that_the_other_directory_lacks(pair, power_cut, capsys):
    """In a program as on the command line, with the commands that decide."""
    for each, count in ((1, 3), (2, 5)):
        pair.take(3 - each)
        with pair.alone(each) as log:
            send(log, "t", [b"alone"] * count)
            if each == 2:
                log.create_topic("only-in-2")
                send(log, "only-in-2", [b"x", b"y"])
        pair.put_back(3 - each)
        if power_cut:
            kv.close_unused()
            shutil.rmtree(pair.path(each) / "live")

    with pytest.raises(ReplicasDivergedError) as caught:
        pair.open()
    text = str(caught.value)
    first, second = (pair.path(each) for each in (1, 2))
    if f"{first} and {second}" in text:
        expected = "3 and 7 records that the other lacks (only-in-2-0 0 and 2; t-0 3 and 5)"
    else:
        expected = "7 and 3 records that the other lacks (only-in-2-0 2 and 0; t-0 5 and 3)"
    assert expected in text
    assert "log.replicas.remove(" in text
    assert " from write " in caught.value.__notes__[0]
    capsys.readouterr()
    assert main(["--root", str(first), "topics", "create", "u"]) != 0
    printed = capsys.readouterr().err
    assert expected in printed
    assert " replicas remove --force " in printed
    assert main(["--root", str(first), "replicas", "list", "--json"]) == 1
    printed = capsys.readouterr().out
    assert " records that the other lacks (only-in-2-0 " in printed


# A copy that is one write behind


@pytest.mark.parametrize(
    ("change", "directory"),
    sample([*product(["appends", "roll", "flush", "flushed roll"], [1, 2])], 3),
)
def test_an_old_copy_that_lacks_one_write_of_state_is_completed_after_a_reboot(
    pair, directory, change, caplog
):
    """`live` is empty everywhere, so it passes for one whose program was killed in a commit."""
    log = pair.open(durability="fsync" if change == "flushed roll" else "os")
    send(log, "t", [b"more"])
    shutil.copytree(pair.path(directory), pair.aside(directory))
    part = log.root.partition("t", 0)
    for _ in range(9):
        part.append([encoded(b"last" * 100)])
    if change == "flush":
        part.flush()
    elif change != "appends":
        part.roll()
    expected = values(log, "t")
    abandon(log.root)
    kv.close_unused()
    shutil.rmtree(pair.path(directory))
    pair.put_back(directory)
    for each in (1, 2):
        shutil.rmtree(pair.path(each) / "live")

    with pair.open() as log:
        assert "lacks more than the last write" not in caplog.text
        assert values(log, "t") == expected
        send(log, "t", [b"next"])
        bring_back(log)
        assert values(log, "t") == [*expected, b"next"]
        assert assignment(log, "t").isr == (1, 2)
        assert log.housekeeping.verify(replicas=True) == []
        pair.assert_equal_copies("t", 2)


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
    directory fails, in it.  An epoch begins with a write, and has another one before anything is
    acknowledged in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[int, list[tuple[int, int]]] = {each: [] for each in (1, 2, 3)}
        """The epoch and the id of each write."""
        self.epochs: dict[int, list[Epoch]] = {each: [] for each in (1, 2, 3)}
        self.since = dict.fromkeys((1, 2, 3), 0)
        self.acknowledged: set[int] = set()
        self.online = {1, 2, 3}
        self.is_confirmed = False
        self.ids = 0
        self._begin(self.online)

    def _write(self, directories: set[int], *, acknowledged: bool = True) -> int:
        self.ids += 1
        for each in directories:
            self.written[each].append((self.epochs[each][-1].number, self.ids))
        if acknowledged:
            self.acknowledged.add(self.ids)
        return self.ids

    def _begin(self, directories: set[int]) -> None:
        """Begin an epoch in some of its directories; in the others its program dies before."""
        source = min(directories)
        number = max((epoch.number for epoch in self.epochs[source]), default=0) + 1
        epoch = Epoch(number, self.ids + 1, len(self.written[source]) + 1)
        for each in directories:
            self.epochs[each].append(epoch)
        self._write(directories, acknowledged=False)
        self.is_confirmed = False

    def _confirm(self) -> None:
        if not self.is_confirmed:
            self._write(self.online)
            self.is_confirmed = True

    def _history(self, directory: int) -> DirectoryHistory:
        return DirectoryHistory(tuple(self.epochs[directory]), len(self.written[directory]))

    @rule(count=st.integers(1, 3))
    def write(self, count: int) -> None:
        self._confirm()
        for _ in range(count):
            self._write(self.online)

    @rule(directory=st.integers(1, 3), reaches=st.booleans())
    def fail(self, directory: int, reaches: bool) -> None:
        """A directory fails in a write, which may be in it; the others go on."""
        if directory in self.online and len(self.online) > 1:
            if reaches:
                self._write({directory}, acknowledged=False)
            else:
                self._confirm()
                self._write(self.online - {directory})
            self.online.discard(directory)
            self._begin(self.online)
            self.since[directory] = self.epochs[min(self.online)][-1].number

    @rule(data=st.data(), times=st.integers(1, 3))
    def begin_in_one(self, data: st.DataObject, times: int) -> None:
        """Epochs begin in one directory, which is gone then; two others go on."""
        directory = data.draw(st.sampled_from(sorted(self.online)))
        left = self.online - {directory}
        if left:
            for _ in range(times):
                self._begin({directory})
            self.online = left
            self._begin(self.online)
            self.since[directory] = self.epochs[min(self.online)][-1].number

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
            self._begin(self.online)

    @invariant()
    def one_that_is_offline_has_nothing_of_its_own(self) -> None:
        source = self._history(min(self.online))
        for each in {1, 2, 3} - self.online:
            assert self._history(each).extra(source) == 0
            ids = {number for _, number in self.written[each]} & self.acknowledged
            assert ids <= {number for _, number in self.written[min(self.online)]}

    @rule(directory=st.integers(1, 3), count=st.integers(1, 3))
    def go_on_alone(self, directory: int, count: int) -> None:
        """One that is offline, if it did something in an epoch of its own, would have diverged."""
        if directory not in self.online:
            self._confirm()
            mine, others = self._history(directory), self._history(min(self.online))
            begun = Epoch(mine.epochs[-1].number + 1, -1, mine.end + 1)
            alone = DirectoryHistory((*mine.epochs, begun), mine.end + 1 + count)
            assert alone.parted(others)
            assert alone.extra(others) > count
            assert others.extra(alone) > 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_database_that_was_begun_again_says_nothing() -> None:
    """`live` is made anew after a reboot, or if it was damaged."""
    old = DirectoryHistory((Epoch(1, 11, 1), Epoch(2, 12, 40)), 90)

    assert old.extra(DirectoryHistory((Epoch(2, 12, 1),), 3)) == 0
    assert old.extra(DirectoryHistory((Epoch(5, 15, 1),), 3)) == 0
    assert old.extra(DirectoryHistory((), 0)) == 0
    assert DirectoryHistory((), 0).extra(old) == 0
