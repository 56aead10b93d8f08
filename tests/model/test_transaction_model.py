"""Transactions of several members that are killed, stopped and replaced at any step.

Members read the partitions that they own, and send what they read to two topics, in one
transaction with their positions.  A transaction may be killed between any two of its steps, and
while it is stopped there, others take over.  After each step the outputs are exactly what lies
before the committed positions, each once.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.forks import in_memory
from support.groups import RANGE, SESSION_MS, Uptime, crash, join, make_group, make_topics
from support.roots import abandon, encoded, open_root, values
from support.staged_files import stage

from embedlog.consumer import group_member
from embedlog.consumer.group_member import GroupMember
from embedlog.errors import CommitFailedError, UnknownMemberIdError
from embedlog.files import Files
from embedlog.group import Group
from embedlog.groups import offsets as group_offsets
from embedlog.keyspace import PENDING_OFFSETS
from embedlog.publish import staging, transaction
from embedlog.publish.transaction import GroupOffsets
from embedlog.record import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

INPUTS = [TopicPartition("in", number) for number in range(3)]
OUTPUTS = ("out", "audit")
STEPS = ("prepared", "noted", "committed")
which = st.integers(0, 7)


class KilledError(BaseException):
    """The process of a member was killed."""


class Machine(Files):
    """A machine whose boot the model sets."""

    boot = 0

    def boot_id(self) -> str:
        return f"boot {Machine.boot}"


class Player:
    """A process with one member, and where it reads each partition that it acquired."""

    def __init__(self, path: str, uptime: Uptime) -> None:
        self.root = open_root(path, files=Machine)
        self.group = make_group(self.root, "g", uptime)
        self.member: GroupMember = join(self.group, ["in"])
        self.positions: dict[TopicPartition, int] = {}

    @property
    def metadata(self) -> ConsumerGroupMetadata:
        return ConsumerGroupMetadata("g", self.member.generation, self.member.id)

    def follow(self) -> None:
        """Carry out the assignment, and begin to read at the committed positions."""
        member = self.member
        try:
            step = member.check_assignment(RANGE).step
            member.release(step.revoked)
            acquired = member.acquire(from_end=False)
        except UnknownMemberIdError:
            self.member, self.positions = join(self.group, ["in"]), {}
            return
        self.positions = {tp: at for tp, at in self.positions.items() if tp in member.owned}
        for tp, start in acquired.items():
            self.positions[tp] = 0 if start.committed is None else start.committed.offset

    def transform(self, count: int, at: Callable[[str], None]) -> None:
        """Read some records of each partition, send them, and commit; ``at`` sees each step."""
        read = {}
        for tp, position in self.positions.items():
            contents = values(self.root.partition(*tp))[position : position + count]
            read[tp] = contents
        sent = [value for contents in read.values() for value in contents]
        after = {tp: OffsetAndMetadata(self.positions[tp] + len(read[tp])) for tp in read}
        staged = [stage(self.root, **{f"{topic}_0": sent for topic in OUTPUTS})] if sent else []
        offsets = GroupOffsets(self.group, self.metadata, self.group.encode(after))
        try:
            with steps(at):
                transaction.publish(self.root, staged, offsets=offsets)
        except CommitFailedError:
            committed = self.group.committed(self.positions)
            for tp, row in committed.items():
                self.positions[tp] = 0 if row is None else row.position.offset
        else:
            self.positions = {tp: position.offset for tp, position in after.items()}
        finally:
            staging.remove(self.root.context.files, staged)


@contextmanager
def steps(at: Callable[[str], None]) -> Iterator[None]:
    """Report each step of a publication; if the report is a kill, nothing is cleaned up."""
    announce, carry_out, resolve = Group.announce, transaction._carry_out, transaction._resolve
    killed = []

    def reported(step: str) -> None:
        try:
            at(step)
        except KilledError:
            killed.append(step)
            raise

    def announced(*arguments: Any) -> None:
        reported("prepared")
        announce(*arguments)
        reported("noted")

    def carried_out(context: Any, *arguments: Any) -> Any:
        live, write = context.live, context.live.write

        def write_visible(step: Any, *rest: Any, **options: Any) -> Any:
            if getattr(step, "__qualname__", "").startswith("_carry_out."):
                reported("committed")
            return write(step, *rest, **options)

        with patch.object(live, "write", write_visible):
            return carry_out(context, *arguments)

    def resolved(*arguments: Any) -> None:
        if not killed:
            resolve(*arguments)

    with (
        patch.object(Group, "announce", announced),
        patch.object(transaction, "_carry_out", carried_out),
        patch.object(transaction, "_resolve", resolved),
    ):
        yield


class TransactionModel(RuleBasedStateMachine):
    """One group, its members, and what they have sent."""

    def __init__(self) -> None:
        super().__init__()
        # The same ids for the same steps, so that a red example stays red.
        numbers = itertools.count()
        self.ids = patch.object(group_member, "random_id", lambda: f"{next(numbers):08x}")
        self.ids.start()
        self.path = tempfile.mkdtemp(prefix="embedlog-model-", dir=in_memory())
        Machine.boot = 0
        self.uptime = Uptime()
        self.root: Root = self._open()
        make_topics(self.root, **{"in": len(INPUTS)}, **dict.fromkeys(OUTPUTS, 1))
        self.inputs: dict[TopicPartition, list[bytes]] = {tp: [] for tp in INPUTS}
        self.players: list[Player] = []

    def _open(self) -> Root:
        return open_root(f"{self.path}/root", files=Machine)

    def teardown(self) -> None:
        """Remove everything."""
        for player in self.players:
            abandon(player.root)
        abandon(self.root)
        self.ids.stop()
        shutil.rmtree(self.path, ignore_errors=True)

    def player(self, number: int) -> Player:
        return self.players[number % len(self.players)]

    @initialize()
    def begin_with_two(self) -> None:
        """Two members, with something to read."""
        self.begin()
        self.begin()
        for number in range(4):
            self.follow(number)
        for number in range(len(INPUTS)):
            self.append(number, 4)

    @rule(number=st.integers(0, 2), count=st.integers(1, 3))
    def append(self, number: int, count: int) -> None:
        """Records come."""
        tp = INPUTS[number]
        for _ in range(count):
            value = b"%d %d" % (number, len(self.inputs[tp]))
            self.inputs[tp].append(value)
            self.root.partition(*tp).append([encoded(value)], durability="fsync")

    @rule()
    @precondition(lambda self: len(self.players) < 3)
    def begin(self) -> None:
        """A member joins."""
        self.players.append(Player(f"{self.path}/root", self.uptime))

    @rule(number=which)
    @precondition(lambda self: self.players)
    def follow(self, number: int) -> None:
        """A member polls."""
        player = self.player(number)
        player.group.remove_dead_members()
        player.follow()

    @rule(number=which, count=st.integers(1, 3))
    @precondition(lambda self: self.players)
    def transform(self, number: int, count: int) -> None:
        """A transaction, of what a member believes to own."""
        self.player(number).transform(count, lambda step: None)

    @rule(number=which, count=st.integers(1, 3), step=st.sampled_from(STEPS))
    @precondition(lambda self: self.players)
    def kill(self, number: int, count: int, step: str) -> None:
        """A member is killed in a transaction."""
        player = self.player(number)

        def at(reached: str) -> None:
            if reached == step:
                raise KilledError

        try:
            player.transform(count, at)
        except KilledError:
            pass
        crash(player.member)
        self.players.remove(player)
        abandon(player.root)

    @rule(
        number=which,
        step=st.sampled_from(STEPS),
        looks=st.booleans(),
        taken=st.booleans(),
        boots=st.booleans(),
    )
    @precondition(lambda self: len(self.players) > 1)
    def stop(self, number: int, step: str, looks: bool, taken: bool, boots: bool) -> None:
        """A member is stopped in a transaction, perhaps for so long that another takes over."""
        player, heir = self.player(number), self.player(number + 1)

        def at(reached: str) -> None:
            if reached != step:
                return
            heir.group.checkpoint(always=True)
            if looks:
                heir.group.committed(INPUTS)
            if not taken:
                return
            self.uptime.advance(SESSION_MS + 1)
            heir.group.remove_dead_members(exclude=heir.member.id)
            for _ in range(2):
                heir.follow()

        player.transform(2, at)
        if boots:
            self.boot()

    @rule(number=which)
    @precondition(lambda self: self.players)
    def leave(self, number: int) -> None:
        """A member leaves."""
        player = self.player(number)
        player.member.leave()
        self.players.remove(player)
        abandon(player.root)

    @rule()
    def boot(self) -> None:
        """The machine boots: `live` is gone, and all processes."""
        for player in self.players:
            abandon(player.root)
        abandon(self.root)
        self.players = []
        Machine.boot += 1
        self.root = self._open()

    @invariant()
    def outputs_are_what_lies_before_the_positions(self) -> None:
        """In both topics, each once."""
        group = make_group(self.root, "g", self.uptime)
        committed = group.committed(INPUTS)
        expected = sorted(
            value
            for tp, row in committed.items()
            for value in self.inputs[tp][: 0 if row is None else row.position.offset]
        )
        for topic in OUTPUTS:
            assert sorted(values(self.root.partition(topic, 0))) == expected, topic


TestTransactionModel = TransactionModel.TestCase
TestTransactionModel.settings = settings(stateful_step_count=25)


def no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes a partition over does not look for a transaction under way."""
    monkeypatch.setattr(group_offsets, "check_settled", lambda txn, group, partitions: None)


def no_check_of_the_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may commit with a transaction."""
    monkeypatch.setattr(Group, "_check_committer", lambda *_: None)


def no_check_of_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that was dropped is committed all the same."""

    def wrong(txn: Any, group: bytes, rows: Any, number: int) -> None:
        for partition, row in rows.items():
            entry = group_offsets.OffsetEntry(True, number, (), row)
            group_offsets.JOURNAL.put(txn, group, partition, value=entry)

    monkeypatch.setattr(group_offsets, "commit", wrong)


def a_journal_without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finishes a publication moves the ends only."""
    monkeypatch.setattr(group_offsets, "journaled", lambda txn, group, number: {})


def old_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint saves what `live` has, also while a transaction has committed more."""
    monkeypatch.setattr(PENDING_OFFSETS, "scan", lambda txn: iter(()))


def a_stop_and_a_takeover(model: TransactionModel) -> None:
    """Of a member that has noted its positions."""
    model.stop(number=0, step="noted", looks=False, taken=True, boots=False)
    model.begin()
    model.transform(number=1, count=1)


def a_stop_and_a_commit_of_another_member(model: TransactionModel) -> None:
    """Of a member whose partitions others have by then."""
    model.stop(number=1, step="prepared", looks=False, taken=True, boots=False)
    model.stop(number=0, step="prepared", looks=False, taken=False, boots=False)


def a_checkpoint_beside_a_commit(model: TransactionModel) -> None:
    """Then the machine boots."""
    model.stop(number=0, step="prepared", looks=False, taken=False, boots=False)
    model.begin()
    model.transform(number=0, count=1)
    model.transform(number=1, count=1)
    model.stop(number=0, step="committed", looks=False, taken=False, boots=True)


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("bug", "case"),
    [
        (no_fence, a_stop_and_a_takeover),
        (no_check_of_the_member, a_stop_and_a_commit_of_another_member),
        (old_checkpoints, a_checkpoint_beside_a_commit),
    ],
)
def test_the_model_sees_what_a_planted_bug_does(
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
    case: Callable[[TransactionModel], None],
) -> None:
    """In a case that it found itself, which is without fault where nothing is planted."""

    def play() -> None:
        model = TransactionModel()
        try:
            model.begin_with_two()
            case(model)
            model.outputs_are_what_lies_before_the_positions()
        finally:
            model.teardown()

    play()
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        play()


@pytest.mark.tier("all")  # it takes hundreds of examples
@pytest.mark.parametrize(
    "bug",
    [
        *(no_fence, no_check_of_the_member, no_check_of_the_commit),
        *(a_journal_without_positions, old_checkpoints),
    ],
)
def test_the_model_finds_what_was_planted(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """A checker that never found anything proves nothing."""
    bug(monkeypatch)
    enough = settings(
        max_examples=1_000,
        stateful_step_count=25,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(TransactionModel, settings=enough)
