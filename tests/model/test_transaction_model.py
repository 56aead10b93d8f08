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
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
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
from embedlog.partition import checkpoint
from embedlog.publish import live_commit, staging, transaction
from embedlog.publish.transaction import GroupOffsets
from embedlog.record import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

INPUTS = [TopicPartition("in", number) for number in range(3)]
OUTPUTS = ("out", "audit")
STEPS = ("prepared", "noted", "committed", "written", "decided", "saved")
"""Those of a publication, and those of a transaction that is committed in `live`."""
WAYS = ("published", "os", "fsync")
"""Published, or committed in `live` with one of the durabilities."""
which = st.integers(0, 7)
ways = st.sampled_from(WAYS)


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

    def transform(self, count: int, way: str, at: Callable[[str], None]) -> None:
        """Read some records of each partition, send them, and commit; ``at`` sees each step."""
        read = {}
        for tp, position in self.positions.items():
            contents = values(self.root.partition(*tp))[position : position + count]
            read[tp] = contents
        sent = [value for contents in read.values() for value in contents]
        after = {tp: OffsetAndMetadata(self.positions[tp] + len(read[tp])) for tp in read}
        offsets = GroupOffsets(self.group, self.metadata, self.group.encode(after))
        try:
            with steps(at):
                (self._publish if way == "published" else self._commit)(sent, offsets, way)
        except CommitFailedError:
            committed = self.group.committed(self.positions)
            for tp, row in committed.items():
                self.positions[tp] = 0 if row is None else row.position.offset
        else:
            self.positions = {tp: position.offset for tp, position in after.items()}

    def _publish(self, sent: list[bytes], offsets: GroupOffsets, way: str) -> None:
        staged = [stage(self.root, **{f"{topic}_0": sent for topic in OUTPUTS})] if sent else []
        try:
            transaction.publish(self.root, staged, offsets=offsets)
        finally:
            staging.remove(self.root.context.files, staged)

    def _commit(self, sent: list[bytes], offsets: GroupOffsets, way: str) -> None:
        self.root.context.durability = way
        batches = [
            ((topic, self.root.topic(topic).id, 0), encoded(*sent)) for topic in OUTPUTS if sent
        ]
        nothing: Any = {"conditions": (), "report": lambda published: None}
        live_commit.commit(self.root, batches, "", (0, 0), offsets=offsets, **nothing)


@contextmanager
def steps(at: Callable[[str], None]) -> Iterator[None]:
    """Report each step of a publication; if the report is a kill, nothing is cleaned up."""
    announce, carry_out, resolve = Group.announce, transaction._carry_out, transaction._resolve
    commit_with, take, cut = Group.commit_with, checkpoint._take, live_commit._cut
    killed, seen = [], list[str]()

    def reported(step: str) -> None:
        if seen:
            return  # It is one of those who come in between.
        seen.append(step)
        try:
            at(step)
        except KilledError:
            killed.append(step)
            raise
        seen.clear()

    def announced(*arguments: Any) -> dict[bytes, bytes]:
        reported("prepared")
        rows = announce(*arguments)
        reported("noted")
        return rows

    def reporting(function: Callable[..., Any], step: str) -> Callable[..., Any]:
        """Report a step before the function's own transaction of `live`."""

        def wrapped(context: Any, *arguments: Any) -> Any:
            live, write = context.live, context.live.write

            def write_reported(change: Any, *rest: Any, **options: Any) -> Any:
                if getattr(change, "__qualname__", "").startswith(f"{function.__name__}."):
                    reported(step)
                return write(change, *rest, **options)

            with patch.object(live, "write", write_reported):
                return function(context, *arguments)

        return wrapped

    def resolved(*arguments: Any) -> None:
        if not killed:
            resolve(*arguments)

    def committed_with(*arguments: Any, **options: Any) -> Any:
        reported("written")
        number = commit_with(*arguments, **options)
        reported("decided")
        return number

    def cut_off(*arguments: Any) -> None:
        if not killed:
            cut(*arguments)

    with (
        patch.object(Group, "commit_with", committed_with),
        patch.object(checkpoint, "_take", reporting(take, "saved")),
        patch.object(live_commit, "_cut", cut_off),
        patch.object(Group, "announce", announced),
        patch.object(transaction, "_carry_out", reporting(carry_out, "committed")),
        patch.object(transaction, "_resolve", resolved),
    ):
        yield


class TransactionModel(RuleBasedStateMachine):
    """One group, its members, and what they have sent."""

    way = ""
    """How all transactions are committed, to find what is planted there; otherwise each way."""

    def __init__(self) -> None:
        super().__init__()
        # The same ids for the same steps, so that a red example stays red.
        numbers = itertools.count()
        self.ids = patch.object(group_member, "random_id", lambda: f"{next(numbers):08x}")
        self.ids.start()
        # Nobody waits for a checkpoint of a process that is stopped.
        self.turn = patch.object(checkpoint, "_TURN_SECONDS", 0.0)
        self.turn.start()
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
        self.turn.stop()
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

    @rule(number=which, count=st.integers(1, 3), way=ways)
    @precondition(lambda self: self.players)
    def transform(self, number: int, count: int, way: str) -> None:
        """A transaction, of what a member believes to own."""
        self.player(number).transform(count, self.way or way, lambda step: None)

    @rule(number=which, count=st.integers(1, 3), way=ways, step=st.sampled_from(STEPS))
    @precondition(lambda self: self.players)
    def kill(self, number: int, count: int, way: str, step: str) -> None:
        """A member is killed in a transaction."""
        player = self.player(number)

        def at(reached: str) -> None:
            if reached == step:
                raise KilledError

        try:
            player.transform(count, self.way or way, at)
        except KilledError:
            pass
        crash(player.member)
        self.players.remove(player)
        abandon(player.root)

    @rule(
        number=which,
        way=ways,
        step=st.sampled_from(STEPS),
        looks=st.booleans(),
        taken=st.booleans(),
        boots=st.booleans(),
    )
    @precondition(lambda self: len(self.players) > 1)
    def stop(self, number: int, way: str, step: str, looks: bool, taken: bool, boots: bool) -> None:
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

        player.transform(2, self.way or way, at)
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
    monkeypatch.setattr(group_offsets.PENDING, "scan", lambda txn: iter(()))


def no_rollback_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut the partitions have all that was written to them."""
    monkeypatch.setattr(checkpoint, "begin", lambda context, ends: None)


def a_checkpoint_of_records_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollback points move, and the positions stay where they were."""
    monkeypatch.setattr(group_offsets, "save", lambda *_: None)


def a_stop_and_a_takeover(model: TransactionModel) -> None:
    """Of a member that has noted its positions."""
    model.stop(way="", number=0, step="noted", looks=False, taken=True, boots=False)
    model.begin()
    model.transform(number=1, count=1, way="")


def a_stop_and_a_commit_of_another_member(model: TransactionModel) -> None:
    """Of a member whose partitions others have by then."""
    model.stop(way="", number=1, step="prepared", looks=False, taken=True, boots=False)
    model.stop(way="", number=0, step="prepared", looks=False, taken=False, boots=False)


def a_kill_after_the_decision(model: TransactionModel) -> None:
    """Others finish the publication."""
    model.kill(number=0, count=1, way="", step="committed")


def a_checkpoint_beside_a_commit(model: TransactionModel) -> None:
    """Then the machine boots."""
    model.stop(way="", number=0, step="prepared", looks=False, taken=False, boots=False)
    model.begin()
    model.transform(number=0, count=1, way="")
    model.transform(number=1, count=1, way="")
    model.stop(way="", number=0, step="committed", looks=False, taken=False, boots=True)


def a_boot(model: TransactionModel) -> None:
    """After a transaction that is not flushed."""
    model.transform(number=0, count=1, way="")
    model.boot()


def a_checkpoint_and_a_boot(model: TransactionModel) -> None:
    """After a transaction."""
    model.transform(number=0, count=1, way="")
    model.root.context.checkpoint()
    model.boot()


CASES = {
    no_fence: ("published", a_stop_and_a_takeover),
    no_check_of_the_member: ("published", a_stop_and_a_commit_of_another_member),
    no_check_of_the_commit: ("published", a_stop_and_a_takeover),
    a_journal_without_positions: ("published", a_kill_after_the_decision),
    old_checkpoints: ("published", a_checkpoint_beside_a_commit),
    no_rollback_points: ("os", a_boot),
    a_checkpoint_of_records_only: ("os", a_checkpoint_and_a_boot),
}
"""How each is committed, and where the model found what takes it minutes to hours to find again."""


@pytest.mark.tier("test")
@pytest.mark.parametrize("bug", CASES)
def test_the_model_sees_what_a_planted_bug_does(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """In a case that it found itself, which is without fault where nothing is planted."""
    way, case = CASES[bug]

    def play() -> None:
        model = TransactionModel()
        try:
            model.begin_with_two()
            case(model)
            model.outputs_are_what_lies_before_the_positions()
        finally:
            model.teardown()

    monkeypatch.setattr(TransactionModel, "way", way)
    play()
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        play()
