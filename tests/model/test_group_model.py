"""A group against what it may do: whatever its members do, or suffer, in whatever order (M1–M22).

The model knows who is in the group, until when, who took what, and what was
committed last.  The real one lives in a root on the disk, with an uptime that
stands still.  After each step it is held against the model: no partition has
two owners, epochs and generations only grow, and nothing but a commit by the
owner, or an administrator, moves a position.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import uuid
from collections.abc import Callable
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
from embedlog.groups.member import GroupMember
from embedlog.groups.ownership import NOBODY
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
# Now and then one that has nothing in common with most others (M5).
preferences = st.sampled_from([*LISTS, *LISTS, ["sticky"]])
instances = st.sampled_from([None, None, None, "x", "y"])


class AnswerLostError(Exception):
    """A step was done, but who did it was interrupted before it learned so."""


class Hooked:
    """An assignor in the middle of which something else happens."""

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name, self.cooperative, self._work = name, ASSIGNORS[name].cooperative, work

    def assign(self, *of: Any) -> Any:
        work, self._work = self._work, lambda: None
        work()
        return ASSIGNORS[self.name].assign(*of)


class Player:
    """A process with one member, as far as the model knows it."""

    def __init__(self, member: GroupMember, topics: list[str]) -> None:
        self.member, self.id, self.topics = member, member.id, topics
        self.mine: dict[bytes, tuple[TopicPartition, int]] = {}
        """What it believes it owns: by row, the partition and the epoch."""


class GroupModel(RuleBasedStateMachine):
    """One group, its members, and what is known of them."""

    def __init__(self) -> None:
        super().__init__()
        # Members are ordered by id (M26): the same ones, so that a red example stays red.
        chance = random.Random(1)
        self.ids = patch("uuid.uuid4", lambda: uuid.UUID(int=chance.getrandbits(128), version=4))
        self.ids.start()
        self.path = tempfile.mkdtemp(prefix="embedlog-model-", dir=in_memory())
        self.root = open_root(f"{self.path}/root")
        self.uptime = Uptime()
        make_topics(self.root, a=3, b=2)
        self.group = make_group(self.root, "g", self.uptime)
        self.players: list[Player] = []
        """Processes that run, whether they are members still or not."""
        self.crashed: set[str] = set()
        self.session: dict[str, int] = {}
        """Who is in the group, and when its session ends."""
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
        self.told = self._told_of_other()

    def _told_of_other(self) -> Any:
        return self.other.version(), positions(self.other), owner_rows(self.other)

    def player(self, number: int) -> Player:
        return self.players[number % len(self.players)]

    # What the model knows

    def _removed(self, ids: set[str]) -> None:
        for each in ids:
            for table in (self.session, self.instance, self.wishes):
                table.pop(each, None)
            self.crashed.discard(each)
        self.owner = {row: each for row, each in self.owner.items() if each not in ids}

    def _dead(self) -> set[str]:
        over = {each for each, until in self.session.items() if until <= self.uptime.now}
        return over | {each for each in self.crashed if self.instance[each] is None}

    def _lives(self, player: Player) -> None:
        self.session[player.id] = self.uptime.now + SESSION_MS

    def _key(self, one: TopicPartition) -> bytes | None:
        info = self.root.topics().get(one.topic)
        return info.key(one.partition) if info and one.partition < info.partitions else None

    def _row(self, one: TopicPartition) -> bytes | None:
        key = self._key(one)
        return None if key is None else ownership.OWNERS.key(self.group.key, key)

    def _owns(self, player: Player, one: TopicPartition) -> bool:
        row = self._row(one)
        return (
            row is not None
            and player.id in self.session
            and self.owner.get(row) == player.id
            and player.mine.get(row) == (one, self.epochs[row])
        )

    # Joining and going

    @initialize(many=st.integers(1, 3), topics=subscriptions, names=st.sampled_from(LISTS))
    def begin(self, many: int, topics: list[str], names: list[str]) -> None:
        """Some are there before anything else happens."""
        for number in range(many):
            self._join(sorted({*topics, "a"}), names, "x" if number == 2 else None)

    @rule()
    @precondition(lambda self: len(self.session) < MOST_MEMBERS)
    def join_simply(self) -> None:
        """One like most."""
        self._join(["a", "b"], LISTS[0], None)

    @rule(topics=subscriptions, names=preferences, instance=instances)
    @precondition(lambda self: len(self.session) < MOST_MEMBERS)
    def join(self, topics: list[str], names: list[str], instance: str | None) -> None:
        """One with wishes of its own."""
        self._join(topics, names, instance)

    def _join(self, topics: list[str], names: list[str], instance: str | None) -> None:
        """It is a member at once, in the place of one of the same instance id (M5, M13)."""
        before = {each for each, one in self.instance.items() if one == instance is not None}
        if not self._fits(names, set(self.wishes) - before):
            self._insisted(True)
            if not self._fits(names, set(self.wishes) - before):
                with pytest.raises(InconsistentGroupProtocolError):
                    join(self.group, topics, assignors=names, instance_id=instance)
                return
            before &= self.session.keys()
        player = Player(
            join(self.group, topics, assignors=names, instance_id=instance), list(topics)
        )
        self.players.append(player)
        for each in before:
            self.owner = {row: player.id if one == each else one for row, one in self.owner.items()}
            self.epochs.update(
                {row: self.epochs[row] + 1 for row, one in self.owner.items() if one == player.id}
            )
        self._removed(before)
        self.instance[player.id], self.wishes[player.id] = instance, (topics, names)
        self._lives(player)

    def _fits(self, names: list[str], others: set[str]) -> bool:
        return bool(set(names).intersection(*(self.wishes[each][1] for each in others)))

    @rule(
        number=which, how=st.sampled_from(["leave", "crash", "send away"]), last=st.integers(0, 3)
    )
    @precondition(lambda self: self.players)
    def go(self, number: int, how: str, last: int) -> None:
        """A member ends; the group is seldom left empty, for there is little to see then."""
        if len(self.players) < 3 and last:
            return
        player = self.player(number)
        {"leave": self._leave, "crash": self._crash, "send away": self._send_away}[how](player)

    def _leave(self, player: Player) -> None:
        """A dynamic member is gone at once, a static one only lets go (M11, M13)."""
        player.member.leave()
        player.member.leave()
        self.players.remove(player)
        if self.instance.get(player.id) is None:
            self._removed({player.id})
        else:
            self.crashed.add(player.id)

    def _crash(self, player: Player) -> None:
        """Its lock is free, and nothing else happens until somebody looks (M10)."""
        let_go(player.member)
        self.players.remove(player)
        if player.id in self.session:
            self.crashed.add(player.id)

    def _send_away(self, player: Player) -> None:
        """An administrator may; it learns so when it does something (M11)."""
        known = [player.id] if player.id in self.session else []
        assert self.group.remove_members([player.id, "nobody"]) == known
        self._removed({player.id})

    @rule(number=which, topics=subscriptions)
    @precondition(lambda self: self.players)
    def resubscribe(self, number: int, topics: list[str]) -> None:
        """From now on it wants others (M4)."""
        player = self.player(number)
        if self._is_out(player, lambda: player.member.resubscribe(topics)):
            return
        self.wishes[player.id] = topics, self.wishes[player.id][1]

    def _is_out(self, player: Player, work: Callable[[], Any]) -> bool:
        """Do what only a member may; whether it is refused to one that is none any more."""
        if player.id in self.session:
            work()
            return False
        with pytest.raises((UnknownMemberIdError, FencedInstanceIdError)) as raised:
            work()
        fenced = player.member.info.instance_id in set(self.instance.values()) - {None}
        assert isinstance(raised.value, FencedInstanceIdError) == fenced
        self._lost(player)
        return True

    def _lost(self, player: Player) -> None:
        if player in self.players:
            self.players.remove(player)
            player.member.leave()

    # Following

    @rule(number=which)
    @precondition(lambda self: self.players)
    def follow(self, number: int) -> None:
        """Look, release, take: what a poll does."""
        self._follow(self.player(number))

    def _follow(self, player: Player, assignors: Any = ASSIGNORS) -> None:
        if self._is_out(player, lambda: self._look(player, assignors)):
            return
        self._release(player, self.step.revoked)
        self._take(player)

    def _look(self, player: Player, assignors: Any = ASSIGNORS) -> None:
        share = player.member.look(assignors)
        self.step = share.step
        assert player.member.owned == {*self.step.kept, *self.step.revoked}
        # What it could not know that it owns it takes, or has let go of by now.
        for row, each in list(self.owner.items()):
            untold = each == player.id and row not in player.mine
            if untold and owner_rows(self.group)[row].member == NOBODY:
                del self.owner[row]
        # What it could not know that it lost is not kept.
        player.mine = {
            row: told for row, told in player.mine.items() if self.owner.get(row) == player.id
        }
        assert {one for one, _ in player.mine.values()} == player.member.owned

    @rule(first=which)
    @precondition(lambda self: self.players)
    def follow_all(self, first: int) -> None:
        """Each polls once, whoever is first."""
        for player in self.players[first:] + self.players[:first]:
            self._follow(player)

    @rule(number=which)
    @precondition(lambda self: self.players)
    def look(self, number: int) -> None:
        """Only look: it has the target made, and does nothing yet."""
        player = self.player(number)
        self._is_out(player, lambda: self._look(player))

    @rule(number=which, lost=st.booleans())
    @precondition(lambda self: self.players)
    def take(self, number: int, lost: bool) -> None:
        """It gets only what nobody has, by a higher epoch than all before (M22)."""
        player = self.player(number)
        if lost:
            self._interrupted(player, lambda: player.member.take(from_end=False))
        else:
            self._is_out(player, lambda: self._take(player))

    def _take(self, player: Player) -> None:
        taken = player.member.take(from_end=False)
        rows = owner_rows(self.group)
        found = {ownership.where(row, one): row for row, one in rows.items()
                 if one.member == player.id and row not in player.mine}  # fmt: skip
        for one, start in taken.items():
            row = found[one]
            assert self.owner.get(row) in (None, player.id), "it belongs to somebody else"
            self._took(player, row)
            player.mine[row] = (one, self.epochs[row])
            assert start.committed == self.committed.get(row[-12:])

    def _took(self, player: Player, row: bytes) -> None:
        epoch = owner_rows(self.group)[row].epoch
        assert epoch > self.epochs.get(row, 0)
        self.owner[row], self.epochs[row] = player.id, epoch

    def _interrupted(self, player: Player, work: Callable[[], Any]) -> None:
        """Do a step whose answer is lost: the rows are changed, and the member does not know."""
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
                self._took(player, row)
            elif owner.member == NOBODY and self.owner.get(row) == player.id:
                del self.owner[row]

    @rule(number=which, share=st.integers(0, 7), lost=st.booleans())
    @precondition(lambda self: self.players)
    def release(self, number: int, share: int, lost: bool) -> None:
        """Anybody may give up anything: it is free at once."""
        player = self.player(number)
        some = [one for place, one in enumerate(sorted(player.member.owned)) if share >> place & 1]
        if lost and some:
            self._interrupted(player, lambda: player.member.release(some))
        else:
            self._release(player, some)

    def _release(self, player: Player, some: Any) -> None:
        player.member.release(one for one in some)
        gone = [row for row, (one, _) in player.mine.items() if one in some]
        for row in gone:
            _, epoch = player.mine.pop(row)
            if (self.owner.get(row), self.epochs.get(row)) == (player.id, epoch):
                del self.owner[row]

    @rule(number=which, other=which, topics=subscriptions, what=st.sampled_from(["join", "leave"]))
    @precondition(lambda self: len(self.players) > 1 and len(self.session) < MOST_MEMBERS)
    def change_while_it_assigns(
        self, number: int, other: int, topics: list[str], what: str
    ) -> None:
        """A target for a group that is not there any more is made again."""
        player, second = self.player(number), self.player(other)
        if player.id not in self.session:
            return

        def work() -> None:
            if what == "join" or second is player:
                self._join(topics, LISTS[0], None)
            elif second in self.players:
                self._leave(second)

        self._follow(player, {name: Hooked(name, work) for name in ASSIGNORS})

    # Time

    @rule(number=which)
    @precondition(lambda self: self.players)
    def beat(self, number: int) -> None:
        """Its session begins anew (M7)."""
        player = self.player(number)
        if not self._is_out(player, player.member.beat):
            self._lives(player)

    @rule(ms=st.sampled_from([1, 400, SESSION_MS - 1, SESSION_MS]), stopped=which)
    def wait(self, ms: int, stopped: int) -> None:
        """Time goes by; one may be stopped meanwhile, the others beat."""
        self.uptime.advance(ms)
        for place, player in enumerate(self.players):
            if place != stopped and player.id in self.session:
                player.member.beat()
                self._lives(player)

    @rule()
    def sweep(self) -> None:
        """Those that died, or were silent for a session, are out; nobody else is (M8, M10)."""
        dead = self._dead()
        assert set(self.group.sweep()) == dead
        self._removed(dead)

    # Committing

    @rule(number=which, place=which, offset=st.integers(0, 99))
    @precondition(lambda self: any(player.mine for player in self.players))
    def commit(self, number: int, place: int, offset: int) -> None:
        """Of what it owns, as far as it knows."""
        able = [player for player in self.players if player.mine]
        player = able[number % len(able)]
        some = sorted(player.member.owned)
        self._commit(player, some[place % len(some)], offset)

    @rule(number=which, topic=st.sampled_from(TOPICS), n=st.integers(0, 3))
    @precondition(lambda self: self.players)
    def commit_anything(self, number: int, topic: str, n: int) -> None:
        """Of what it may never have owned."""
        self._commit(self.player(number), TopicPartition(topic, n), 77)

    def _commit(self, player: Player, one: TopicPartition, offset: int) -> None:
        """It lands if, and only if, the member owns the partition now (E23, M22)."""
        position = OffsetAndMetadata(offset, f"by {player.id}")
        if self._owns(player, one):
            player.member.commit({one: position})
            self.committed[self._key(one)] = position  # type: ignore[index]
            self._lives(player)
            return
        with pytest.raises((CommitFailedError, UnknownTopicOrPartitionError)) as raised:
            player.member.commit({one: position})
        exists = self._key(one) is not None
        assert isinstance(raised.value, CommitFailedError) == exists

    @rule(
        what=st.sampled_from(["commit", "reset", "delete offsets", "delete"]),
        topic=st.sampled_from(TOPICS),
        offset=st.integers(0, 99),
    )
    def administer(self, what: str, topic: str, offset: int) -> None:
        """What comes from outside of the group."""
        if what == "delete":
            self._delete()
        elif what == "delete offsets":
            self._delete_offsets(topic)
        else:
            self._commit_from_outside(topic, offset, what == "reset")

    def _commit_from_outside(self, topic: str, offset: int, reset: bool) -> None:
        """Only while nobody is in the group (M14)."""
        one, position = TopicPartition(topic, 0), OffsetAndMetadata(offset)
        key = self._key(one)
        if key is None:
            return
        self._insisted(bool(self.session))
        if self.session:
            with pytest.raises((NonEmptyGroupError, CommitFailedError)):
                (self.group.reset if reset else self.group.commit)({one: position})
            return
        (self.group.reset if reset else self.group.commit)({one: position})
        self.committed[key] = position

    def _insisted(self, refused: bool) -> None:
        """What is asked for from outside removes the dead, if members are in the way."""
        if refused:
            self._removed(self._dead())

    def _delete_offsets(self, topic: str) -> None:
        """Only of a topic that nobody reads (M15)."""
        one = TopicPartition(topic, 0)
        key = self._key(one)
        if key is None:
            return
        self._insisted(any(topic in wish[0] for wish in self.wishes.values()))
        if any(topic in wish[0] for wish in self.wishes.values()):
            with pytest.raises(GroupSubscribedToTopicError):
                self.group.delete_offsets([one])
            return
        self.group.delete_offsets([one])
        self.committed.pop(key, None)

    def _delete(self) -> None:
        """Only while nobody is in it (M15); then it begins anew."""
        self._insisted(bool(self.session))
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

    @rule(topic=st.sampled_from(TOPICS), how=st.sampled_from(["more", "more", "gone", "anew"]))
    def change_a_topic(self, topic: str, how: str) -> None:
        """It is created, or grows; it goes, and one of the same name is another one (M16, A38)."""
        known = self.root.topics().get(topic)
        if known is not None and how != "more":
            self.root.delete_topic(topic)
            # What any group committed goes with it.
            version, positions, owners = self.told
            gone = set(map(known.key, range(known.partitions)))
            self.committed, positions = (
                {key: position for key, position in rows.items() if key not in gone}
                for rows in (self.committed, positions)
            )
            self.told = version, positions, owners
        if how == "anew" or known is None:
            make_topics(self.root, **{topic: 2})
        elif how == "more" and known.partitions < 4:
            self.root.grow_topic(topic, known.partitions + 1)

    @rule()
    def notice(self) -> None:
        """Somebody looks whether the topics changed."""
        self.group.notice_topics()

    # Promises

    @rule(patient=st.booleans())
    def settle(self, patient: bool) -> None:
        """When everybody did what the group asks for, all is owned that anybody wants (M22)."""
        if patient:
            self.uptime.advance(SESSION_MS)
            for player in self.players:
                if player.id in self.session:
                    player.member.beat()
                    self._lives(player)
        self.sweep()
        self.group.notice_topics()
        for player in list(self.players):
            self._is_out(player, player.member.beat) or self._lives(player)
        for _ in range(10):
            before = self.group.version()
            for player in list(self.players):
                self._follow(player)
            if self.group.version() == before:
                break
        else:
            raise AssertionError("the group does not come to rest")
        self._check_rest()

    def _check_rest(self) -> None:
        now = self.group.read()
        topics = self.root.topics()
        if not self.session or not self.players:
            return
        assert now.settled
        target = {one: each for each, given in now.target.items() for one in given}
        for one in target:
            row = self._row(one)
            assert row is not None, "a partition that is not there"
            owner = self.owner.get(row)
            # A static member that is away keeps what it has, and what is meant for it, to itself.
            if not {target[one], owner} & self.crashed:
                assert owner == target[one], one
        wanted = {topic for topics, _ in self.wishes.values() for topic in topics} & topics.keys()
        assert set(target) == {
            TopicPartition(topic, n) for topic in wanted for n in range(topics[topic].partitions)
        }
        assert all(one.topic in self.wishes[each][0] for one, each in target.items())
        if not self.crashed:
            assert self.group.snapshot().state == "Stable"

    @invariant()
    def one_owner(self) -> None:
        """The rows say what the model does: each partition has one owner, or none (M22)."""
        rows = owner_rows(self.group)
        found = {row: one.member for row, one in rows.items() if one.member != NOBODY}
        assert found == self.owner
        assert set(found.values()) <= self.session.keys()
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
        """Who joined and did not go is in; generations and versions only grow (M2)."""
        now = self.group.read()
        assert now.members.keys() == self.session.keys()
        assert now.generation >= self.generation
        assert now.version == self.group.version() >= self.version
        self.generation, self.version = now.generation, now.version
        if now.settled:
            assert now.target.keys() == now.members.keys()
            given = [one for each in now.target.values() for one in each]
            assert len(given) == len(set(given))
            assert set(given) == {
                TopicPartition(topic, n)
                for topic in now.subscribed & now.topics.keys()
                for n in range(now.topics[topic][1])
            }
        if now.version:
            shown = [each.id for each in self.group.snapshot().members]
            assert shown == [each for each in now.members if each not in self._dead()]

    @invariant()
    def what_was_committed(self) -> None:
        """Nothing but a commit that was let through moves a position (E23, M17)."""
        assert positions(self.group) == self.committed
        assert self._told_of_other() == self.told

    def teardown(self) -> None:
        try:
            if self.players:
                self.settle(True)
            for player in self.players:
                player.member.leave()
            self.uptime.advance(2 * SESSION_MS)
            self.group.sweep()
            assert not self.group.read().members
            left = [name for name in self.root.context.files.list("locks") if "member" in name]
            assert left == [], "locks of members that are gone"
            assert healthy(self.root)
        finally:
            self.ids.stop()
            self.root.close()
            shutil.rmtree(self.path)


TestGroupModel = GroupModel.TestCase
TestGroupModel.settings = settings(stateful_step_count=30)
