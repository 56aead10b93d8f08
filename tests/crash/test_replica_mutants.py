"""Bugs planted in replication: the model, or the kills, find each of them."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support import damaged_copies, forks, replica_kills
from support.forks import tell
from support.mutants import Change
from support.replicas import Directories, bring_back, send, values
from support.replicas_model import ReplicasModel, run_some

from embedlog import Log
from embedlog.record import TopicPartition
from embedlog.replication import catch_up, reassign

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
    """A leader is lost, and returns while others are appended."""
    for appends_at in range(6):
        with a_partition(2) as model:
            model.open_another()
            model.diverge(0, 0, 2, 0, True, False)
            for directory in sorted(model.away):
                model.bring_back(directory - 1, False)
            model.keep_house(0, False, appends_at)


def by_a_copy_that_breaks_in_an_append() -> None:
    """Then too few have the records for them to be acknowledged."""
    for after in range(8):
        with a_partition(2, min_isr=2) as model:
            _, follower = in_sync(model)
            model.break_disk(follower - 1, errno.EIO, after, 1 << 30, False, False)
            model.append_to_all(0, 0, 0)


@contextmanager
def a_log(count: int) -> Iterator[tuple[Directories, Log]]:
    """A log over so many directories, with a topic that has a record in each."""
    with TemporaryDirectory(prefix="embedlog-mutants-", dir=forks.in_memory()) as base:
        directories = Directories(Path(base), count)
        with directories.open() as log:
            log.create_topic("t", replication_factor=count)
            reassign.run(log.root, {TopicPartition("t", 0): range(1, count + 1)})
            send(log, "t", [b"shared"])
            yield directories, log


def append_to_leader(log: Log) -> None:
    """Append what only directory 1 has: the others leave the ISR first."""
    key = log.root.topic("t").key(0)
    log.root.controller.change_assignment(key, lambda now: now.shrink(now.in_sync_followers))
    send(log, "t", [b"of 1"] * 5)


def elect_unclean(directories: Directories, log: Log) -> None:
    """Have directory 2 lead, which lacks what 1 has, and go on with something else."""
    directories.lose(log, 1)
    assert reassign.elect_unclean(log.root, [TopicPartition("t", 0)])
    assert values(log, "t") == [b"shared"]
    send(log, "t", [b"of 2"] * 5)


def check_returned(directories: Directories, log: Log) -> None:
    """Bring directory 1 back, and compare all copies."""
    directories.put_back(1)
    bring_back(log)
    assert values(log, "t") == [b"shared", *[b"of 2"] * 5]
    directories.assert_equal_copies("t")


def by_an_unclean_election() -> None:
    """What the new leader lacks is cut, and the one before has nothing else when it returns."""
    with a_log(2) as (directories, log):
        append_to_leader(log)
        log.flush()
        elect_unclean(directories, log)
        log.root.partition("t", 0).roll()
        check_returned(directories, log)


def by_an_unclean_election_while_a_copy_is_made() -> None:
    """A copy of the first leader must not go on as one of the second."""
    with a_log(3) as (directories, log):
        append_to_leader(log)
        elected = []

        def elect(_: int) -> None:
            if not elected:
                elected.append(2)
                elect_unclean(directories, log)

        copy_of = log.root.controller.directories[3]
        catch_up.copy_partition(log.root.partition("t", 0), copy_of, progress=elect)
        assert elected
        check_returned(directories, log)


def by_two_that_went_on_alone() -> None:
    """Each of two directories has a record that the other lacks: neither is cut."""
    with a_log(2) as (directories, log):
        directories.lose(log, 1)
        for number in range(9):  # more than the other has
            log.alter_topic("t", {"retention.ms": 10**9 + number})
        send(log, "t", [b"of 2"] * 9)
        directories.take(2)
        directories.put_back(1)
        with directories.alone(1) as other:
            send(other, "t", [b"of 1"])
        directories.put_back(2)
        assert bring_back(log) == []
        assert values(log, "t") == [b"shared", *[b"of 2"] * 9]


def by_a_copy_that_was_cut_short() -> None:
    """The next batch goes where it is at the leader."""
    with a_log(2) as (directories, log):
        (file,) = directories.path(2).glob("topics/t-*/0/*.arrows")
        os.truncate(file, file.stat().st_size - 100)
        send(log, "t", [b"x"])
        directories.assert_equal_copies("t")


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


def by_a_directory_that_one_program_cannot_open() -> None:
    """The other program has brought it back; a third one is lost."""
    for directory in range(3):
        with a_partition(2) as model:
            model.open_another()
            model.come_back_for_one(0, directory, 0)


def by_kills() -> None:
    for work in ("append", "roll", "go offline", "come back"):
        for at in range(1, 90, 2):
            replica_kills.check(replica_kills.Kill(work, at, False))


def by_a_return() -> None:
    replica_kills.check(replica_kills.Kill("come back", None, True))


def by_an_epoch_that_is_lost() -> None:
    """Wherever a process is killed that begins one, the first directory is lost then, and back."""
    for at in range(1, 40):
        with a_partition(3) as model:
            model.kill_and_lose(0, "elect_preferred", at)
            model.append_to_all(0, 0, 0)
            for directory in sorted(model.away):
                model.bring_back(directory - 1, False)
            model.keep_house(0, False)


def by_damage(*case: str) -> Callable[[], None]:
    """Damage the leader's copy, in a directory of memory."""

    def play() -> None:
        with tempfile.TemporaryDirectory(dir=forks.in_memory()) as base:
            damaged_copies.check(Path(base), case, "leader", 2)

    return play


def by_damage_of_both() -> None:
    damaged_copies.check_killed(("one is cut short", 1))


class Mutant:
    """A planted bug, and the check that finds it."""

    def __init__(self, name: str, check: Check, where: str, edits: dict[str, str]) -> None:
        self.name, self.check, self.change = name, check, Change(where, edits)


MUTANTS = [
    Mutant(
        "published before the followers have it",
        by_the_model,
        f"{REPLICATION}.files:ReplicatedFiles.write",
        {"for directory, copy in reversed(followers):": "for directory, copy in ():"},
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
        f"{REPLICATION}.reassign:_longest",
        {"max(each, key=counts.__getitem__) for each in (able, counts)": "min(able) for _ in '12'"},
    ),
    Mutant(
        "a copy that is offline is not counted",
        by_an_election_outside_the_isr,
        f"{REPLICATION}.reassign:_longest",
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
        by_an_unclean_election,
        f"{REPLICATION}.catch_up:_equal_end",
        {"while same < min(stop, target.size):": "while (same := min(stop, target.size)) < 0:"},
    ),
    Mutant(
        "all segments of a directory that returns are trusted",
        by_an_unclean_election,
        f"{REPLICATION}.catch_up:ReplicaCopy._flushed_offset",
        {"return 0": "return 1 << 62"},
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
        "a directory that a process cannot open is left out of its writes",
        by_a_directory_that_one_program_cannot_open,
        f"{REPLICATION}.controller:Controller._adopt",
        {"self.unopened = failed": "self.unopened = {}"},
    ),
    Mutant(
        "what a killed process committed in some databases is not repeated",
        by_kills,
        f"{REPLICATION}.store:ReplicatedStore._make_even",
        {"kv.replace_rows, rows)": "kv.replace_rows, rows[-1:])"},
    ),
    Mutant(
        "a directory goes offline that lacks the last write only",
        by_kills,
        f"{REPLICATION}.store:ReplicatedStore._make_even",
        {"if number != numbers[newest] - 1:": "if True:"},
    ),
    Mutant(
        "a return is not confirmed",
        by_a_return,
        f"{REPLICATION}.store:ReplicatedStore._confirm",
        {"if info.online and info.reason": "if False"},
    ),
    Mutant(
        "the version of a write is not written",
        by_kills,
        f"{REPLICATION}.store:ReplicatedStore._commit",
        {"self._count_write(txn, row)": "..."},
    ),
    Mutant(
        "directories are compared by how much they have, and not by their epochs",
        by_two_that_went_on_alone,
        f"{REPLICATION}.metadata:DirectoryHistory.extra",
        {"mine, others, shared": "return max(self.end - other.end - 1, 0)  #"},
    ),
    Mutant(
        "only what the directory lacks that comes back is compared",
        by_two_that_went_on_alone,
        f"{REPLICATION}.controller:_has_lost",
        {"if extra_writes(directory, other):": "if False:"},
    ),
    Mutant(
        "an epoch has the number of one that only a lost directory has",
        by_an_epoch_that_is_lost,
        f"{REPLICATION}.controller:Controller.next_epoch",
        {"return max(epoch, self.epoch, ": "return max(epoch,) + 1  # "},
    ),
    Mutant(
        "a minority decides",
        by_the_model,
        f"{REPLICATION}.metadata:check_quorum",
        {"if len(online) < required:": "if False:"},
    ),
    Mutant(
        "the file of a copy that was cut short gets a hole",
        by_a_copy_that_was_cut_short,
        f"{REPLICATION}.files:_complete",
        {"while size < position:": "while False:"},
    ),
    Mutant(
        "a new leader is believed to have everything",
        by_an_unclean_election,
        f"{REPLICATION}.partition:ReplicatedPartition._take_over",
        {"if end is None:": "if True:"},
    ),
    Mutant(
        "in-sync copies are not counted again before they are published",
        by_a_copy_that_breaks_in_an_append,
        f"{REPLICATION}.partition:ReplicatedPartition._publish_if_kept",
        {"assignment.check_min_isr(": "(lambda *_, **__: None)("},
    ),
    Mutant(
        "what a lost leader had is copied after another one was elected",
        by_an_unclean_election_while_a_copy_is_made,
        f"{REPLICATION}.partition:ReplicatedPartition.locked_under",
        {"(assignment.leader, tail.leader_epoch) == leader and": "True and"},
    ),
    Mutant(
        "a copy is blamed for a leader that breaks",
        by_a_copy_out_of_sync,
        f"{REPLICATION}.controller:Controller.directory_of",
        {'if f"{getattr(error,': 'if not f"{getattr(error,'},
    ),
]


MUTANTS += [
    Mutant(
        "a repair trusts the leader",
        by_damage("a bit in a column", "sealed", "closed", "repair"),
        f"{REPLICATION}.mend:SegmentCopy.whole",
        {"batch.check_crcs()": "..."},
    ),
    Mutant(
        "a recovery looks at the leader only",
        by_damage("a bit in a head", "active", "rebooted", "read"),
        "embedlog.partition.recovery:rebuild",
        {"log.mend()": "..."},
    ),
    Mutant(
        "a copy that is cut short goes before the others were mended from it",
        by_damage_of_both,
        f"{REPLICATION}.mend:_mend",
        {"_compare(log, segments, tail, mend=True": "# ("},
    ),
    Mutant(
        "a reader stops at damage of the leader",
        by_damage("a bit in a column", "sealed", "running", "read"),
        "embedlog.batch.decode:Batch._reread",
        {"if reread is None": "if True"},
    ),
]


@pytest.mark.tier("all")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
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
