"""A group against a model, whatever its members do or suffer, in any order (M1–M22).

The model has the members, the ends of their sessions, the owners of partitions,
and the last commits.  The real group is in a root on the disk, with an uptime that
stands still.  After each step it is compared with the model: no partition has
two owners, epochs and generations only grow, and nothing but a commit by the
owner, or an administrator, moves a position.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.forks import in_memory
from support.groups import SESSION_MS, Uptime, join, make_group, make_topics, owner_rows, positions
from support.groups import crash as let_go
from support.roots import healthy, open_root

from embedlog.assignor import configured
from embedlog.consumer.group_member import GroupMember
from embedlog.errors import (
    CommitFailedError,
    FencedInstanceIdError,
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    InconsistentGroupProtocolError,
    NonEmptyGroupError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups import ownership
from embedlog.groups.ownership import NO_OWNER
from embedlog.record import OffsetAndMetadata, TopicPartition

ASSIGNORS = configured(["range", "sticky", "cooperative-sticky"])
LISTS = [
    ["range", "cooperative-sticky"],
    ["cooperative-sticky", "range"],
    ["sticky", "range"],
    ["range"],
]
TOPICS = ["a", "b", "c"]
MOST_MEMBERS = 5

which = st.integers(0, 7)
subscriptions = st.sets(st.sampled_from(TOPICS), min_size=1).map(sorted)
# Sometimes one that has nothing in common with most others (M5).
preferences = st.sampled_from([*LISTS, *LISTS, ["sticky"]])
instances = st.sampled_from([None, None, None, "x", "y"])


class AnswerLostError(Exception):
    """A step was committed, but interrupted before it returned."""


class AssignorWithHook:
    """An assignor that runs some work while it assigns."""

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name, self.cooperative, self._work = name, ASSIGNORS[name].cooperative, work

    def assign(self, *of: Any) -> Any:
        work, self._work = self._work, lambda: None
        work()
        return ASSIGNORS[self.name].assign(*of)


class ModelMember:
    """A process with one member, as the model has it."""

    def __init__(self, member: GroupMember, topics: list[str]) -> None:
        self.member, self.id, self.topics = member, member.id, topics
        self.claims: dict[bytes, tuple[TopicPartition, int]] = {}
        """The partitions that it believes to own, with their epochs, by row."""


class GroupModel(RuleBasedStateMachine):
    """One group and its members, and what is expected of them."""

    ids = ("embedlog.consumer.group_member.random_id",)
    """What chooses the ids of members."""

    def __init__(self) -> None:
        super().__init__()
        # Members are ordered by id (M26): the same ones, so that a red example stays red.
        chance = random.Random(1)
        self.patches = ExitStack()
        for where in self.ids:
            new = patch(where, lambda: str(uuid.UUID(int=chance.getrandbits(128), version=4)))
            self.patches.enter_context(new)
        self.path = tempfile.mkdtemp(prefix="embedlog-model-", dir=in_memory())
        self.root = open_root(f"{self.path}/root")
        self.uptime = Uptime()
        make_topics(self.root, a=3, b=2)
        self.group = make_group(self.root, "g", self.uptime)
        self.players: list[ModelMember] = []
        """Processes that run, members or not."""
        self.crashed: set[str] = set()
        self.session: dict[str, int] = {}
        """The members of the group, and when their sessions end."""
        self.instance: dict[str, str | None] = {}
        self.wishes: dict[str, tuple[list[str], list[str]]] = {}
        self.owner: dict[bytes, str] = {}
        self.epochs: dict[bytes, int] = {}
        self.generation = 0
        self.version = 0
        self.committed: dict[bytes, OffsetAndMetadata] = {}
        # A group of the same topics, and a name that begins the same, sees none of this (M17).
        self.other = make_group(self.root, "g2", self.uptime)
        self.other.commit({TopicPartition("a", 0): OffsetAndMetadata(7)})
        self.state_of_other = self._state_of_other()

    def _state_of_other(self) -> Any:
        return self.other.version(), positions(self.other), owner_rows(self.other)

    def player(self, number: int) -> ModelMember:
        return self.players[number % len(self.players)]

    # What the model knows

    def _removed(self, ids: set[str]) -> None:
        for id_ in ids:
            for table in (self.session, self.instance, self.wishes):
                table.pop(id_, None)
            self.crashed.discard(id_)
        self.owner = {row: id_ for row, id_ in self.owner.items() if id_ not in ids}

    def _dead(self) -> set[str]:
        over = {id_ for id_, until in self.session.items() if until <= self.uptime.now}
        return over | {id_ for id_ in self.crashed if self.instance[id_] is None}

    def _lives(self, player: ModelMember) -> None:
        self.session[player.id] = self.uptime.now + SESSION_MS

    def _key(self, tp: TopicPartition) -> bytes | None:
        info = self.root.topics().get(tp.topic)
        return info.key(tp.partition) if info and tp.partition < info.partitions else None

    def _row(self, tp: TopicPartition) -> bytes | None:
        key = self._key(tp)
        return None if key is None else ownership.OWNERS.key(self.group.key, key)

    def _owns(self, player: ModelMember, tp: TopicPartition) -> bool:
        row = self._row(tp)
        return (
            row is not None
            and player.id in self.session
            and self.owner.get(row) == player.id
            and player.claims.get(row) == (tp, self.epochs[row])
        )

    # Joining and going

    @initialize(many=st.integers(1, 3), topics=subscriptions, names=st.sampled_from(LISTS))
    def begin(self, many: int, topics: list[str], names: list[str]) -> None:
        """Begin with some members."""
        for number in range(many):
            self._join(sorted({*topics, "a"}), names, "x" if number == 2 else None)

    @rule()
    @precondition(lambda self: len(self.session) < MOST_MEMBERS)
    def join_simply(self) -> None:
        """A member with the most frequent subscription and assignors."""
        self._join(["a", "b"], LISTS[0], None)

    @rule(topics=subscriptions, names=preferences, instance=instances)
    @precondition(lambda self: len(self.session) < MOST_MEMBERS)
    def join(self, topics: list[str], names: list[str], instance: str | None) -> None:
        """A member with any subscription and assignors."""
        self._join(topics, names, instance)

    def _join(self, topics: list[str], names: list[str], instance: str | None) -> None:
        """It is a member at once, and replaces one of the same instance id (M5, M13)."""
        replaced_ids = {
            replaced for replaced, owner in self.instance.items() if owner == instance is not None
        }
        if not self._fits(names, set(self.wishes) - replaced_ids):
            self._members_in_the_way(True)
            if not self._fits(names, set(self.wishes) - replaced_ids):
                with pytest.raises(InconsistentGroupProtocolError):
                    join(self.group, topics, assignors=names, instance_id=instance)
                return
            replaced_ids &= self.session.keys()
        player = ModelMember(
            join(self.group, topics, assignors=names, instance_id=instance), list(topics)
        )
        self.players.append(player)
        self._admitted(player.id, topics, names, instance, replaced_ids)
        self._lives(player)

    def _admitted(
        self,
        id_: str,
        topics: list[str],
        names: list[str],
        instance: str | None,
        replaced: set[str],
    ) -> None:
        for row, owner in self.owner.items():
            if owner in replaced:
                self.owner[row] = id_
                self.epochs[row] += 1
        self._removed(replaced)
        self.instance[id_], self.wishes[id_] = instance, (topics, names)

    def _fits(self, names: list[str], others: set[str]) -> bool:
        return bool(set(names).intersection(*(self.wishes[id_][1] for id_ in others)))

    @rule(number=which, how=st.sampled_from(["leave", "crash", "remove"]), last=st.integers(0, 3))
    @precondition(lambda self: self.players)
    def go(self, number: int, how: str, last: int) -> None:
        """A member leaves or dies; the group is seldom left empty, where little can happen."""
        if len(self.players) < 3 and last:
            return
        player = self.player(number)
        {"leave": self._leave, "crash": self._crash, "remove": self._remove}[how](player)

    def _leave(self, player: ModelMember) -> None:
        """A dynamic member is removed at once, a static one only unlocks its file (M11, M13)."""
        player.member.leave()
        player.member.leave()
        self.players.remove(player)
        if self.instance.get(player.id) is None:
            self._removed({player.id})
        else:
            self.crashed.add(player.id)

    def _crash(self, player: ModelMember) -> None:
        """Its lock is free, and nothing else happens until another member checks (M10)."""
        let_go(player.member)
        self.players.remove(player)
        if player.id in self.session:
            self.crashed.add(player.id)

    def _remove(self, player: ModelMember) -> None:
        """An administrator removes it; its next call raises that (M11)."""
        removed = [player.id] if player.id in self.session else []
        assert self.group.remove_members([player.id, "nobody"]) == removed
        self._removed({player.id})

    @rule(number=which, topics=subscriptions)
    @precondition(lambda self: self.players)
    def resubscribe(self, number: int, topics: list[str]) -> None:
        """Replace its subscription (M4)."""
        player = self.player(number)
        if self._is_out(player, lambda: player.member.resubscribe(topics)):
            return
        self.wishes[player.id] = topics, self.wishes[player.id][1]

    def _is_out(self, player: ModelMember, work: Callable[[], Any]) -> bool:
        """Make a call of a member; return whether it was refused because it was removed."""
        if player.id in self.session:
            work()
            return False
        with pytest.raises((UnknownMemberIdError, FencedInstanceIdError)) as raised:
            work()
        fenced = player.member.info.instance_id in set(self.instance.values()) - {None}
        assert isinstance(raised.value, FencedInstanceIdError) == fenced
        self._lost(player)
        return True

    def _lost(self, player: ModelMember) -> None:
        if player in self.players:
            self.players.remove(player)
            player.member.leave()

    # Following

    @rule(number=which)
    @precondition(lambda self: self.players)
    def follow(self, number: int) -> None:
        """Check, release, acquire: what a poll does."""
        self._follow(self.player(number))

    def _follow(self, player: ModelMember, assignors: Any = ASSIGNORS) -> None:
        if self._is_out(player, lambda: self._check(player, assignors)):
            return
        self._release(player, self.step.revoked)
        self._acquire(player)

    def _check(self, player: ModelMember, assignors: Any = ASSIGNORS) -> None:
        assignment = player.member.check_assignment(assignors)
        self.step = assignment.step
        assert player.member.owned == {*self.step.kept, *self.step.revoked}
        # What it owned without knowing, it acquires, or has released.
        for row, owner in list(self.owner.items()):
            untold = owner == player.id and row not in player.claims
            if untold and owner_rows(self.group)[row].member == NO_OWNER:
                del self.owner[row]
        # What it lost without knowing is not kept.
        player.claims = {
            row: claim for row, claim in player.claims.items() if self.owner.get(row) == player.id
        }
        assert {tp for tp, _ in player.claims.values()} == player.member.owned

    @rule(first=which)
    @precondition(lambda self: self.players)
    def follow_all(self, first: int) -> None:
        """Each polls once, in any order."""
        for player in self.players[first:] + self.players[:first]:
            self._follow(player)

    @rule(number=which)
    @precondition(lambda self: self.players)
    def check_assignment(self, number: int) -> None:
        """Only check, which computes the target."""
        player = self.player(number)
        self._is_out(player, lambda: self._check(player))

    @rule(number=which, lost=st.booleans())
    @precondition(lambda self: self.players)
    def acquire(self, number: int, lost: bool) -> None:
        """It gets only partitions without an owner, with a higher epoch than before (M22)."""
        player = self.player(number)
        if lost:
            self._interrupted(player, lambda: player.member.acquire(from_end=False))
        else:
            self._is_out(player, lambda: self._acquire(player))

    def _acquire(self, player: ModelMember) -> None:
        acquired = player.member.acquire(from_end=False)
        rows = owner_rows(self.group)
        new_rows = {ownership.topic_partition(row, tp): row for row, tp in rows.items()
                 if tp.member == player.id and row not in player.claims}  # fmt: skip
        for tp, start in acquired.items():
            row = new_rows[tp]
            assert self.owner.get(row) in (None, player.id), "it has another owner"
            self._note_acquired(player, row)
            player.claims[row] = (tp, self.epochs[row])
            assert start.committed == self.committed.get(row[-12:])

    def _note_acquired(self, player: ModelMember, row: bytes) -> None:
        epoch = owner_rows(self.group)[row].epoch
        assert epoch > self.epochs.get(row, 0)
        self.owner[row], self.epochs[row] = player.id, epoch

    def _interrupted(self, player: ModelMember, work: Callable[[], Any]) -> None:
        """Run a step whose answer is lost: the rows change, and the member does not know."""
        wake = self.root.context.wake

        class Broken:
            def advance(self) -> None:
                raise AnswerLostError

        self.root.context.wake = Broken()  # type: ignore[assignment]
        try:
            work()
        except (AnswerLostError, UnknownMemberIdError, FencedInstanceIdError):
            pass
        finally:
            self.root.context.wake = wake
        for row, owner in owner_rows(self.group).items():
            if owner.member == player.id and owner.epoch != self.epochs.get(row):
                self._note_acquired(player, row)
            elif owner.member == NO_OWNER and self.owner.get(row) == player.id:
                del self.owner[row]

    @rule(number=which, share=st.integers(0, 7), lost=st.booleans())
    @precondition(lambda self: self.players)
    def release(self, number: int, share: int, lost: bool) -> None:
        """A member may release any partition: it is free at once."""
        player = self.player(number)
        some = [tp for index, tp in enumerate(sorted(player.member.owned)) if share >> index & 1]
        if lost and some:
            self._interrupted(player, lambda: player.member.release(some))
        else:
            self._release(player, some)

    def _release(self, player: ModelMember, partitions: Any) -> None:
        player.member.release(tp for tp in partitions)
        released = [row for row, (tp, _) in player.claims.items() if tp in partitions]
        for row in released:
            _, epoch = player.claims.pop(row)
            if (self.owner.get(row), self.epochs.get(row)) == (player.id, epoch):
                del self.owner[row]

    @rule(number=which, other=which, topics=subscriptions, what=st.sampled_from(["join", "leave"]))
    @precondition(lambda self: len(self.players) > 1 and len(self.session) < MOST_MEMBERS)
    def change_while_it_assigns(
        self, number: int, other: int, topics: list[str], what: str
    ) -> None:
        """The target is computed again if the group changed meanwhile."""
        player, second = self.player(number), self.player(other)
        if player.id not in self.session:
            return

        def work() -> None:
            if what == "join" or second is player:
                self._join(topics, LISTS[0], None)
            elif second in self.players:
                self._leave(second)

        self._follow(player, {name: AssignorWithHook(name, work) for name in ASSIGNORS})

    # Time

    @rule(number=which)
    @precondition(lambda self: self.players)
    def heartbeat(self, number: int) -> None:
        """Its session begins again (M7)."""
        player = self.player(number)
        if not self._is_out(player, player.member.heartbeat):
            self._lives(player)

    @rule(ms=st.sampled_from([1, 400, SESSION_MS - 1, SESSION_MS]), stopped=which)
    def wait(self, ms: int, stopped: int) -> None:
        """Time passes; one may be stopped meanwhile, the others send heartbeats."""
        self.uptime.advance(ms)
        self._beat(stopped)

    def _beat(self, stopped: int | None = None) -> None:
        """All send heartbeats, but for one."""
        for index, player in enumerate(self.players):
            if index != stopped and player.id in self.session:
                player.member.heartbeat()
                self._lives(player)

    @rule()
    def remove_dead_members(self) -> None:
        """Members that died or whose session is over are removed, no others (M8, M10)."""
        dead = self._dead()
        assert set(self.group.remove_dead_members()) == dead
        self._removed(dead)

    # Committing

    @rule(number=which, index=which, offset=st.integers(0, 99))
    @precondition(lambda self: any(player.claims for player in self.players))
    def commit(self, number: int, index: int, offset: int) -> None:
        """A partition that it owns, as far as it knows."""
        able = [player for player in self.players if player.claims]
        player = able[number % len(able)]
        some = sorted(player.member.owned)
        self._commit(player, some[index % len(some)], offset)

    @rule(number=which, topic=st.sampled_from(TOPICS), n=st.integers(0, 3))
    @precondition(lambda self: self.players)
    def commit_anything(self, number: int, topic: str, n: int) -> None:
        """A partition that it may never have owned."""
        self._commit(self.player(number), TopicPartition(topic, n), 77)

    def _commit(self, player: ModelMember, tp: TopicPartition, offset: int) -> None:
        """It is written if, and only if, the member owns the partition now (E23, M22)."""
        position = OffsetAndMetadata(offset, f"by {player.id}")
        if self._owns(player, tp):
            player.member.commit({tp: position})
            self.committed[self._key(tp)] = position  # type: ignore[index]
            self._lives(player)
            return
        with pytest.raises((CommitFailedError, UnknownTopicOrPartitionError)) as raised:
            player.member.commit({tp: position})
        exists = self._key(tp) is not None
        assert isinstance(raised.value, CommitFailedError) == exists

    @rule(
        what=st.sampled_from(["commit", "reset", "delete offsets", "delete"]),
        topic=st.sampled_from(TOPICS),
        offset=st.integers(0, 99),
    )
    def administer(self, what: str, topic: str, offset: int) -> None:
        """Administration of the group."""
        if what == "delete":
            self._delete()
        elif what == "delete offsets":
            self._delete_offsets(topic)
        else:
            self._commit_from_outside(topic, offset, what == "reset")

    def _commit_from_outside(self, topic: str, offset: int, reset: bool) -> None:
        """Only while the group has no members (M14)."""
        tp, position = TopicPartition(topic, 0), OffsetAndMetadata(offset)
        key = self._key(tp)
        if key is None:
            return
        self._members_in_the_way(bool(self.session))
        if self.session:
            with pytest.raises((NonEmptyGroupError, CommitFailedError)):
                (self.group.reset if reset else self.group.commit)({tp: position})
            return
        (self.group.reset if reset else self.group.commit)({tp: position})
        self.committed[key] = position

    def _members_in_the_way(self, refused: bool) -> None:
        """An operation that members prevent removes the dead ones first."""
        if refused:
            self._removed(self._dead())

    def _delete_offsets(self, topic: str) -> None:
        """Only of a topic without subscribers (M15)."""
        tp = TopicPartition(topic, 0)
        key = self._key(tp)
        if key is None:
            return
        self._members_in_the_way(any(topic in wish[0] for wish in self.wishes.values()))
        if any(topic in wish[0] for wish in self.wishes.values()):
            with pytest.raises(GroupSubscribedToTopicError):
                self.group.delete_offsets([tp])
            return
        self.group.delete_offsets([tp])
        self.committed.pop(key, None)

    def _delete(self) -> None:
        """Only while it has no members (M15); then it begins again."""
        self._members_in_the_way(bool(self.session))
        if self.session:
            with pytest.raises(NonEmptyGroupError):
                self.group.delete()
            return
        try:
            self.group.delete()
        except GroupIdNotFoundError:
            assert not self.committed
        self.committed, self.epochs, self.generation, self.version = {}, {}, 0, 0
        with pytest.raises(GroupIdNotFoundError):
            self.group.snapshot()

    # Topics

    @rule(topic=st.sampled_from(TOPICS), how=st.sampled_from(["more", "more", "gone", "again"]))
    def change_a_topic(self, topic: str, how: str) -> None:
        """It is created, grows, is deleted, or is created again as another topic (M16, A38)."""
        info = self.root.topics().get(topic)
        if info is not None and how != "more":
            self.root.delete_topic(topic)
            # The commits of all groups are deleted with it.
            version, positions, owners = self.state_of_other
            gone = set(map(info.key, range(info.partitions)))
            self.committed, positions = (
                {key: position for key, position in rows.items() if key not in gone}
                for rows in (self.committed, positions)
            )
            self.state_of_other = version, positions, owners
        if how == "again" or info is None:
            make_topics(self.root, **{topic: 2})
        elif how == "more" and info.partitions < 4:
            self.root.grow_topic(topic, info.partitions + 1)

    @rule()
    def notice(self) -> None:
        """A member checks whether the topics changed."""
        self.group.check_topics()

    # Promises

    @rule(patient=st.booleans())
    def complete_rebalance(self, patient: bool) -> None:
        """Once all members have followed, every subscribed partition has its owner (M22)."""
        for _ in range(2 * patient):
            self.uptime.advance(SESSION_MS // 2)
            self._beat()
        self.remove_dead_members()
        self.group.check_topics()
        for player in list(self.players):
            self._is_out(player, player.member.heartbeat) or self._lives(player)
        for _ in range(10):
            before = self.group.version()
            self._all_follow()
            if self.group.version() == before:
                break
        else:
            raise AssertionError("the assignment keeps changing")
        self._check_rest()

    def _all_follow(self) -> None:
        for player in list(self.players):
            self._follow(player)

    def _check_rest(self) -> None:
        group = self.group.read()
        topics = self.root.topics()
        if not self.session.keys() - self.crashed:
            return
        assert group.target_is_current
        target = {tp: member for member, partitions in group.target.items() for tp in partitions}
        for tp in target:
            row = self._row(tp)
            assert row is not None, "a partition that does not exist"
            owner = self.owner.get(row)
            # A static member that is away keeps its partitions, and those assigned to it.
            if not {target[tp], owner} & self.crashed:
                assert owner == target[tp], tp
        subscribed = {
            topic for topics, _ in self.wishes.values() for topic in topics
        } & topics.keys()
        assert set(target) == {
            TopicPartition(topic, n)
            for topic in subscribed
            for n in range(topics[topic].partitions)
        }
        assert all(tp.topic in self.wishes[member][0] for tp, member in target.items())
        if not self.crashed:
            assert self.group.snapshot().state == "Stable"

    @invariant()
    def one_owner(self) -> None:
        """The rows equal the model: each partition has one owner, or none (M22)."""
        rows = owner_rows(self.group)
        owned = {row: owner.member for row, owner in rows.items() if owner.member != NO_OWNER}
        assert owned == self.owner
        assert set(owned.values()) <= self.session.keys()
        for row, epoch in self.epochs.items():
            if row in rows:
                assert rows[row].epoch == epoch, "an epoch that no owner got"
            else:
                assert row not in map(self._row, self._partitions()), "an epoch was forgotten"

    def _partitions(self) -> list[TopicPartition]:
        return [
            TopicPartition(name, number)
            for name, info in self.root.topics().items()
            for number in range(info.partitions)
        ]

    @invariant()
    def members_and_generation(self) -> None:
        """Members are those that joined and did not leave; generations and versions grow (M2)."""
        group = self.group.read()
        assert group.members.keys() == self.session.keys()
        assert group.generation >= self.generation
        assert group.version == self.group.version() >= self.version
        self.generation, self.version = group.generation, group.version
        if group.target_is_current:
            assert group.target.keys() == group.members.keys()
            assigned = [tp for id_ in group.target.values() for tp in id_]
            assert len(assigned) == len(set(assigned))
            assert set(assigned) == {
                TopicPartition(topic, n)
                for topic in group.subscribed & group.topics.keys()
                for n in range(group.topics[topic][1])
            }
        if group.version:
            alive = [id_.id for id_ in self.group.snapshot().members]
            assert alive == [id_ for id_ in group.members if id_ not in self._dead()]

    @invariant()
    def what_was_committed(self) -> None:
        """Only accepted commits change committed offsets (E23, M17)."""
        assert positions(self.group) == self.committed
        assert self._state_of_other() == self.state_of_other

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # Else it failed before.
                self._finish()
        finally:
            self.patches.close()
            self.root.close()
            shutil.rmtree(self.path)

    def _finish(self) -> None:
        if self.session.keys() - self.crashed:
            self.complete_rebalance(True)
        for player in self.players:
            player.member.leave()
        self.uptime.advance(2 * SESSION_MS)
        self.group.remove_dead_members()
        assert not self.group.read().members
        left = [name for name in self.root.context.files.list("locks") if "member" in name]
        assert left == [], "locks of members that have left"
        assert healthy(self.root)


TestGroupModel = GroupModel.TestCase
TestGroupModel.settings = settings(stateful_step_count=30)
