"""A group of programs and clients of servers against a model, in any order (M1-M22, M28-M32).

To the steps of `test_group_model` come those of clients: of both protocols, on one of two servers,
which are replaced by new ones that know nothing.  Answers are lost; clients are silent, and come
back later than they may.  A client has its own view of what it reads: whatever happens, of all who
think that they read a partition one at most commits, and none commits once another one has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from support import forks
from support.forks import tell
from support.groups import SESSION_MS, owner_rows
from support.mutants import Change, hunt
from support.wire_client import DirectServer
from support.wire_members import Classic, Modern
from test_group_model import GroupModel, ModelMember, subscriptions, which

from embedlog.api import Log
from embedlog.groups import ownership
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.server.error_codes import ErrorCode

REBALANCE_MS, LOOK_MS = 600, 300
LEFT = -2
MOST_CLIENTS = 4
SERVER = "embedlog.server."
NAMES: dict[type, list[str]] = {
    Modern: ["cooperative-sticky", "sticky", "range", "roundrobin"],
    Classic: ["cooperative-sticky", "range"],
}
"""The assignors that a client has in common with others."""
FATAL = {
    ErrorCode.FENCED_INSTANCE_ID,
    ErrorCode.UNRELEASED_INSTANCE_ID,
    ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
}
"""A client ends when it is told this."""
requests = st.sampled_from(["heartbeat", "heartbeat", "join", "sync"])
kinds = st.sampled_from(["modern", "modern", "eager", "cooperative"])
mostly_not = st.sampled_from([False, False, False, True])
Rows = set[bytes]
Reads = dict[TopicPartition, bytes]


@dataclass
class Remote:
    """What the group knows of a member that is a client."""

    kind: type
    epoch: int = 0
    previous: int = 0
    due: int | None = None
    """When it must have done what it was told."""


class Client:
    """A process with a client, and what it believes."""

    def __init__(self, kind: str, made: Any, server: int) -> None:
        self.kind, self.made, self.server = kind, made, server
        self.reads: Reads = {}
        """The rows of the partitions that it reads."""
        self.stale: Rows = set()
        """Those for which somebody else has committed since it began to read."""
        self.assigned: Reads | None = None
        """What a classic one was told and has not begun to read yet."""
        self.must_join = self.must_sync = self.says_all = False

    @property
    def id(self) -> str:
        return str(self.made.id)

    @property
    def epoch(self) -> int:
        return int(self.made.epoch if isinstance(self.made, Modern) else self.made.generation)

    @property
    def joined(self) -> bool:
        return self.epoch > 0


class MixedGroupModel(GroupModel):
    """One group, its members of all kinds, and what is expected of them."""

    ids = (*GroupModel.ids, "support.wire_members.uuid4", f"{SERVER}classic_members.uuid4")

    # What programs do alone is left to the other model.
    check_assignment = notice = join_simply = commit = commit_anything = None
    heartbeat = follow = change_while_it_assigns = None

    def __init__(self) -> None:
        super().__init__()
        self.root.context.files.uptime_ms = self.uptime  # type: ignore[method-assign]
        for name, value in {
            "remote_members.monotonic": lambda: self.uptime() / 1000,
            "remote_members._LOOK_SECONDS": LOOK_MS / 1000,
            "heartbeat_answers.SESSION_MS": SESSION_MS,
        }.items():
            self.patches.enter_context(patch(SERVER + name, value))
        self.log = Log(self.root)
        self.servers = [DirectServer(self.log) for _ in range(2)]
        self.clients: list[Client] = []
        self.remote: dict[str, Remote] = {}

    def client(self, number: int) -> Client:
        return self.clients[number % len(self.clients)]

    # What the model knows

    def _removed(self, ids: set[str]) -> None:
        super()._removed(ids)
        for id_ in ids:
            self.remote.pop(id_, None)

    def _dead(self) -> set[str]:
        """No lock says whether a client lives."""
        now = self.uptime.now
        return super()._dead() - {id_ for id_ in self.remote if self.session[id_] > now}

    def _with_instance(self, instance: str | None) -> set[str]:
        return {id_ for id_, other in self.instance.items() if other == instance is not None}

    def _row_by_name(self, tp: TopicPartition) -> bytes | None:
        """The row that a server takes for a name, also of a partition that does not exist."""
        info = self.root.topics().get(tp.topic)
        return info and ownership.OWNERS.key(self.group.key, info.key(tp.partition))

    def _rows_by_name(self, partitions: Collection[TopicPartition]) -> Rows:
        return set(self._by_name(partitions).values())

    def _owned(self, id_: str) -> Rows:
        return {row for row, owner in self.owner.items() if owner == id_}

    def _share(self, id_: str) -> tuple[Rows, Rows, Rows]:
        """What a member keeps, must give up, and may have now."""
        group = self.group.read()
        target = {
            ownership.OWNERS.key(self.group.key, key)
            for tp in group.target.get(id_, ())
            for info in [self.root.topics().get(tp.topic)]
            if info is not None and info.id == group.topics[tp.topic][0]
            for key in [info.key(tp.partition)]
        }
        owned = self._owned(id_)
        return owned & target, owned - target, target - self.owner.keys()

    def _renew(self, id_: str, *, due: bool) -> None:
        """Its session begins again, but for what it must have done before (M29)."""
        remote, now = self.remote[id_], self.uptime.now
        if not due:
            remote.due = None
        elif remote.due is None:
            remote.due = now + REBALANCE_MS
        self.session[id_] = min(now + SESSION_MS, remote.due or now + SESSION_MS)

    # Requests

    def _ask(
        self, client: Client, request: Callable[[], Any], leaving: set[str] = frozenset()
    ) -> Any:
        """Make a request; return the answer, None if it was lost.

        Nobody is removed before its time is over (M8).
        """
        dead = self._dead()
        try:
            answer = request()
        except ConnectionError:
            answer = None
            self._connect(client, client.server)
        gone = self.session.keys() - self.group.read().members.keys() - leaving
        assert gone <= dead, "a member was removed before its time was over"
        self._removed(gone)
        return answer

    def _connect(self, client: Client, server: int) -> None:
        client.server, client.says_all = server, True
        client.made.client = self.servers[server].connect()

    def _unknown(self, client: Client) -> ErrorCode:
        fenced = self._with_instance(client.made.instance)
        return ErrorCode.FENCED_INSTANCE_ID if fenced else ErrorCode.UNKNOWN_MEMBER_ID

    def _failed(self, client: Client, code: int) -> None:
        """What a client does with a code: it gives up all, and joins again, or ends."""
        made = client.made
        made.has, client.assigned = set(), None
        client.must_join, client.must_sync = True, False
        self._note_reads(client)
        if code in FATAL:
            self._end(client)
        elif isinstance(made, Modern):
            made.epoch, made.assigned = 0, None
        else:
            made.generation = -1
            made.id = made.id if code == ErrorCode.ILLEGAL_GENERATION else ""

    def _end(self, client: Client) -> None:
        self.clients.remove(client)
        if client.id in self.session:
            self.crashed.add(client.id)

    def _note_reads(self, client: Client, told: Reads | None = None) -> None:
        """What it reads now; what it did not read before begins at the last commit."""
        known = client.reads | (told or {})
        client.reads = {tp: known[tp] for tp in client.made.has if tp in known}
        client.stale &= set(client.reads.values())

    def _by_name(self, partitions: Collection[TopicPartition]) -> Reads:
        rows = {tp: self._row_by_name(tp) for tp in partitions}
        return {tp: row for tp, row in rows.items() if row is not None}

    def _followed(self, id_: str, owned: Rows | None, *, confirms: bool = False) -> Rows:
        """A member follows as far as its client has confirmed; return what it may read (M29)."""
        kept, revoked, free = self._share(id_)
        waits = bool(revoked) and (owned is None or bool(revoked & owned))
        remote = self.remote[id_]
        if not waits:
            for row in revoked:
                del self.owner[row]
            for row in free:
                epoch = owner_rows(self.group)[row].epoch
                assert epoch > self.epochs.get(row, 0)
                self.owner[row], self.epochs[row] = id_, epoch
            kept |= free
            if confirms:
                remote.due = None
            generation = self.group.read().generation
            if remote.epoch != generation:
                remote.epoch, remote.previous = generation, remote.epoch
        self._renew(id_, due=waits or confirms)
        return kept

    # Joining

    @initialize(kinds=st.lists(kinds, min_size=1, max_size=3), topics=subscriptions)
    def begin_with_clients(self, kinds: list[str], topics: list[str]) -> None:
        """Begin with some clients, too."""
        for number, kind in enumerate(kinds):
            self.enter(kind, sorted({*topics, "a"}), None if number else "y", number % 2, "")

    @rule(
        kind=kinds,
        topics=subscriptions,
        instance=st.sampled_from([None, None, "x", "y"]),
        server=st.integers(0, 1),
        how=st.sampled_from(["", "", "", "lost", "half"]),
    )
    @precondition(lambda self: len(self.clients) < MOST_CLIENTS and len(self.session) < 7)
    def enter(
        self, kind: str, topics: list[str], instance: str | None, server: int, how: str
    ) -> None:
        """A new client joins."""
        asks, options = self.servers[server].connect(), {"rebalance_timeout_ms": REBALANCE_MS}
        made: Any
        if kind == "modern":
            made = Modern(asks, *topics, instance_id=instance, **options)
        else:
            options["session_timeout_ms"] = SESSION_MS
            made = Classic(
                asks, *topics, cooperative=kind == "cooperative", instance=instance, **options
            )
        self.clients.append(Client(kind, made, server))
        self._join_client(self.clients[-1], how)

    def _join_client(self, client: Client, how: str = "") -> None:
        """Join, or join again; the answer may be lost, or the server end when half is done."""
        made, kind = client.made, type(client.made)
        had = self._rows_by_name(made.has) if kind is Classic and made.cooperative else set()
        is_known, replaced = client.id in self.session, self._with_instance(made.instance)
        replaced -= {client.id}
        expected = self._refusal(client, had, replaced)
        replaced &= self.session.keys()
        with ExitStack() as stack:
            if how == "lost":
                made.client.loses = "ConsumerGroupHeartbeat" if kind is Modern else "JoinGroup"
            elif how == "half":
                members = self.servers[client.server].members
                stack.enter_context(patch.object(members, "_step", side_effect=ConnectionError))
            request = made.beat if kind is Modern else made.join
            answer = self._ask(client, request, set() if expected else replaced)
        self._note_reads(client)  # One that is eager has given up all.
        if is_known and client.id not in self.session:
            expected = self._unknown(client)  # It was late itself.
        rows: Rows = set()
        if not expected:
            rows = self._joined(client, had, replaced, is_half=how == "half")
        if answer is None:
            client.must_join, client.must_sync = True, False
            return
        assert (answer if kind is Modern else answer.error_code) == expected
        if expected:
            self._failed(client, expected)
            return
        client.must_join, client.must_sync = False, kind is Classic
        assert client.epoch == self.remote[client.id].epoch
        if kind is Modern:
            client.says_all = False
            self._told(client, rows)

    def _refusal(self, client: Client, had: Rows, replaced: set[str]) -> int:
        """Return the code for one that cannot join; dead members that may be the reason go."""
        kind, id_, now = type(client.made), client.id, self.uptime.now
        for other in replaced & self.remote.keys():
            remote = self.remote[other]
            if kind is remote.kind is Modern and remote.epoch != LEFT and self.session[other] > now:
                return ErrorCode.UNRELEASED_INSTANCE_ID

        def fits() -> bool:
            others = set(self.wishes) - replaced - {id_}
            return id_ in self.session or self._fits(NAMES[kind], others)

        if kind is Classic or not fits():
            self._removed(self._dead() - {id_})
        if kind is Classic and id_ and id_ not in self.session and (client.made.instance or had):
            return self._unknown(client)  # What it has may be another one's (M29).
        return 0 if fits() else ErrorCode.INCONSISTENT_GROUP_PROTOCOL

    def _joined(self, client: Client, had: Rows, replaced: set[str], *, is_half: bool) -> Rows:
        kind = type(client.made)
        # One with an instance id may not have got the answer with its id.
        new = self.group.read().members.keys() - self.session.keys()
        id_ = client.id or next(iter(new))
        wish = self._topics(client), NAMES[kind]
        if id_ in self.session:
            self.wishes[id_] = wish
        else:
            self._admitted(id_, *wish, client.made.instance, replaced)
            self.remote[id_] = Remote(kind)
            self._renew(id_, due=False)
        if not client.id:
            self.crashed.add(id_)
        return set() if is_half else self._followed(id_, had, confirms=kind is Classic)

    def _topics(self, client: Client) -> list[str]:
        made = client.made
        if isinstance(made, Modern):
            return list(made.joining["subscribed_topic_names"])
        return list(made.topics)

    def _told(self, client: Client, rows: Rows, *, slow: bool = False, had: Any = ()) -> None:
        """A client of KIP-848 knows what it may read, and may be slow to do so."""
        made = client.made
        assert made.assigned is not None, "it was not told what it may read"
        told = self._by_name(made.assigned)
        assert set(told.values()) == rows
        made.has = set(had if slow else told)
        self._note_reads(client, told)

    # Following

    @rule(steps=st.lists(st.tuples(which, requests, mostly_not, st.booleans()), min_size=1))
    @precondition(lambda self: self.clients)
    def ask(self, steps: list[tuple[int, str, bool, bool]]) -> None:
        """Clients make any requests that they can make now."""
        for number, what, lost, slow in steps:
            if self.clients:
                self._request(self.client(number), what, lost=lost, slow=slow)
                self.one_owner()  # type: ignore[operator]
                self.one_reader()

    def _request(
        self, client: Client, what: str, *, lost: bool = False, slow: bool = False
    ) -> None:
        if isinstance(client.made, Modern):
            self._heartbeat(client, tells=what != "heartbeat", lost=lost, slow=slow)
        else:
            self._classic(client, what, lost=lost, slow=slow)

    @rule(number=which)
    @precondition(lambda self: self.clients)
    def follow_as_a_client(self, number: int) -> None:
        """A client does what its library would do next."""
        self._follow_client(self.client(number))

    def _follow_client(self, client: Client) -> None:
        if isinstance(client.made, Modern):
            self._heartbeat(client, tells=True)
            return
        if client.joined and not client.must_join:
            self._classic(client, "heartbeat")
        if client in self.clients and (client.must_join or not client.joined):
            self._classic(client, "join")
        if client.must_sync:
            self._classic(client, "sync")

    def _heartbeat(
        self,
        client: Client,
        *,
        tells: bool,
        topics: list[str] | None = None,
        lost: bool = False,
        slow: bool = False,
    ) -> None:
        """One of KIP-848, which may tell what the client has, and subscribe to topics."""
        made = client.made
        if topics is not None:
            made.joining["subscribed_topic_names"] = topics
        if not client.joined:
            self._join_client(client, "lost" if lost else "")
            return
        tells |= client.says_all
        fields: dict[str, Any] = {}
        if client.says_all:
            fields["rebalance_timeout_ms"] = REBALANCE_MS
        if client.says_all or topics is not None:
            fields["subscribed_topic_names"] = self._topics(client)
        had, epoch = set(made.has), made.epoch
        owned = self._rows_by_name(had) if tells else None
        made.client.loses = "ConsumerGroupHeartbeat" if lost else ""
        code = self._ask(client, lambda: (made.confirm if tells else made.beat)(**fields))
        remote, expected, rows = self.remote.get(client.id), 0, set()
        if remote is None:
            expected = self._unknown(client)
        elif epoch != remote.epoch and not (
            epoch == remote.previous and owned is not None and owned <= self._owned(client.id)
        ):
            expected = ErrorCode.FENCED_MEMBER_EPOCH
        else:
            if "subscribed_topic_names" in fields:
                self.wishes[client.id] = self._topics(client), NAMES[Modern]
            rows = self._followed(client.id, owned)
        if code is None:
            return
        assert code == expected
        if code:
            self._failed(client, code)
            return
        client.says_all = False
        self._told(client, rows, slow=slow, had=had)

    def _classic(
        self, client: Client, what: str, *, lost: bool = False, slow: bool = False
    ) -> None:
        """Send a heartbeat, join or sync."""
        made = client.made
        if client.assigned is not None and not (slow and what == "heartbeat"):
            made.has, told, client.assigned = set(client.assigned), client.assigned, None
            self._note_reads(client, told)
        if what == "join" or not client.joined:
            self._join_client(client, "lost" if lost else "")
            return
        had, generation = set(made.has), made.generation
        if lost:
            made.client.loses = "Heartbeat" if what == "heartbeat" else "SyncGroup"
        code = self._ask(client, getattr(made, what))
        remote, expected, kept = self.remote.get(client.id), 0, set()
        if remote is None:
            expected = self._unknown(client)
        elif generation != remote.epoch:
            expected = ErrorCode.ILLEGAL_GENERATION
        else:
            kept, revoked, free = self._share(client.id)
            must_join = bool(remote.epoch != self.group.read().generation or revoked or free)
            self._renew(client.id, due=must_join)
            if must_join and not (what == "sync" and revoked):
                expected = ErrorCode.REBALANCE_IN_PROGRESS
        if code is None:
            return
        assert code == expected
        if code == ErrorCode.REBALANCE_IN_PROGRESS:
            client.must_join, client.must_sync = True, False
        elif code:
            self._failed(client, code)
        elif what == "sync":
            client.must_sync = False
            told = self._by_name(made.has)
            assert set(told.values()) == kept
            if slow:
                made.has, client.assigned = had, told
            self._note_reads(client, told)

    @rule(number=which, topics=subscriptions)
    @precondition(lambda self: self.clients)
    def resubscribe_a_client(self, number: int, topics: list[str]) -> None:
        """Replace its subscription (M4)."""
        client = self.client(number)
        if isinstance(client.made, Modern):
            self._heartbeat(client, tells=False, topics=topics)
        else:
            client.made.topics = tuple(topics)
            self._classic(client, "join")

    # Going, servers, time

    @rule(number=which, how=st.sampled_from(["leave", "die", "away"]))
    @precondition(lambda self: self.clients)
    def go_as_a_client(self, number: int, how: str) -> None:
        """A client leaves, or is killed; a static one may leave for a while."""
        client = self.client(number)
        made, is_modern = client.made, isinstance(client.made, Modern)
        if how != "die" and client.joined:
            is_away = how == "away" and is_modern and made.instance is not None
            epoch = LEFT if is_away else -1
            code = made.ask(member_epoch=epoch).error_code if is_modern else made.leave()
            assert code == (0 if client.id in self.session else self._unknown(client))
            if is_away and not code:
                self.remote[client.id].epoch = LEFT
                self._renew(client.id, due=False)
            else:
                self._removed({client.id})
        self._end(client)

    @rule(number=which, is_late=st.booleans())
    @precondition(lambda self: self.clients)
    def restart(self, number: int, is_late: bool) -> None:
        """A client is killed, and started again with its instance id, at once or too late (M13)."""
        able = [client for client in self.clients if client.made.instance] or self.clients
        client = able[number % len(able)]
        self._end(client)
        if is_late:
            self.uptime.advance(SESSION_MS)
        self.enter(client.kind, self._topics(client), client.made.instance, client.server, "")

    @rule(number=which, server=st.integers(0, 1))
    @precondition(lambda self: self.clients)
    def move(self, number: int, server: int) -> None:
        """A client connects to another server, or again."""
        self._connect(self.client(number), server)

    @rule(number=st.integers(0, 1))
    @precondition(lambda self: self.clients)
    def replace_a_server(self, number: int) -> None:
        """A new server knows nothing but the rows (M28)."""
        self.servers[number] = DirectServer(self.log)
        for client in self.clients:
            if client.server == number:
                self._connect(client, number)

    def _beat(self, stopped: int | None = None) -> None:
        super()._beat(stopped)
        for index, client in enumerate(list(self.clients), len(self.players)):
            if index == stopped or not client.joined:
                continue
            if isinstance(client.made, Modern):
                self._heartbeat(client, tells=False)
            else:
                self._classic(client, "heartbeat")

    @rule(number=which, what=st.sampled_from(["heartbeat", "join"]))
    @precondition(lambda self: any(client.reads for client in self.clients))
    def come_back_late(self, number: int, what: str) -> None:
        """A client was stopped for longer than its session, and goes on where it was (M8)."""
        able = [client for client in self.clients if client.reads]
        client = able[number % len(able)]
        for _ in range(2):
            self.uptime.advance(SESSION_MS // 2)
            self._beat(len(self.players) + self.clients.index(client))
        self.remove_dead_members()
        assert client.id not in self.session
        self._request(client, what)

    @rule(number=which)
    @precondition(lambda self: self.clients)
    def look(self, number: int) -> None:
        """Whoever asks after a while has dead members removed: there may be no programs (M8)."""
        client = self.client(number)
        self.uptime.advance(LOOK_MS)
        dead, was_member = self._dead(), client.id in self.session
        self._follow_client(client)
        if was_member:
            assert not dead & self.session.keys() - {client.id}

    # Committing

    def _may_commit(self, id_: str, row: bytes, epoch: int) -> bool:
        """What it owns since its epoch, and with its current one what nobody has owned (M31)."""
        remote, owner = self.remote.get(id_), self.owner.get(row)
        if remote is None or epoch > remote.epoch:
            return False
        if owner == id_ and owner_rows(self.group)[row].generation <= epoch:
            return True
        return row not in self.epochs and epoch == remote.epoch

    def _commit_of(self, client: Client, tp: TopicPartition, offset: int, epoch: int) -> bool:
        row, key, id_ = self._row(tp), self._key(tp), client.id
        allowed = row is not None and self._may_commit(id_, row, epoch)
        fields = {"topic": tp.topic, "generation_id_or_member_epoch": epoch}
        code = client.made.commit(offset, tp.partition, **fields)
        assert (code == 0) == allowed
        remote = self.remote.get(id_)
        if remote is not None and epoch <= remote.epoch:
            self._renew(id_, due=remote.due is not None)
        if allowed:
            assert row is not None and key is not None
            self.committed[key] = OffsetAndMetadata(offset)
            # Whoever has another one's partition still moves its commit back.
            assert client.reads.get(tp) != row or row not in client.stale
            self._committed(row, client)
        return allowed

    def _committed(self, row: bytes, by: object) -> None:
        for client in self.clients:
            if client is not by and row in client.reads.values():
                client.stale.add(row)

    def _commit(self, player: ModelMember, tp: TopicPartition, offset: int) -> None:
        super()._commit(player, tp, offset)
        row = self._row(tp)
        if row is not None and self._owns(player, tp):
            self._committed(row, player)

    @rule(number=which, ago=st.sampled_from([0, 0, 0, 1, 2, -1]))
    @precondition(lambda self: self.clients)
    def commit_as_a_client(self, number: int, ago: int) -> None:
        """Any partitions, with any epoch."""
        client = self.client(number)
        if client.id:
            for tp in [*self._partitions(), TopicPartition("c", 7)]:
                self._commit_of(client, tp, 100 + ago, max(client.epoch - ago, 0))

    @rule(number=which, ago=st.integers(1, 3))
    @precondition(lambda self: self.clients)
    def miss_answers(self, number: int, ago: int) -> None:
        """A client has the epoch, or the generation, of some time ago (M30)."""
        made = self.client(number).made
        if isinstance(made, Modern):
            made.epoch = max(made.epoch - ago, min(made.epoch, 1))
        else:
            made.generation = max(made.generation - ago, min(made.generation, 1))

    @rule(first=which)
    @precondition(lambda self: any(client.reads for client in self.clients))
    def all_commit(self, first: int) -> None:
        """Of all who believe that they read a partition, one at most commits (M22, M31)."""
        for tp in sorted({tp for client in self.clients for tp in client.reads}):
            readers = [each for each in self.clients if tp in each.reads]
            accepted = 0
            for offset, client in enumerate(readers[first:] + readers[:first], 200):
                accepted += self._commit_of(client, tp, offset, client.epoch)
            for player in self.players:
                if tp in player.member.owned:
                    accepted += self._owns(player, tp)
                    self._commit(player, tp, 300)
            assert accepted <= 1

    # Promises

    def _all_follow(self) -> None:
        super()._all_follow()
        # The second time they have given up what they were told to the first time.
        for client in 2 * self.clients:
            if client in self.clients:
                self._follow_client(client)

    def _check_rest(self) -> None:
        super()._check_rest()
        for client in self.clients:
            assert set(client.reads.values()) == self._owned(client.id)

    @invariant()
    def one_reader(self) -> None:
        """No two members believe that they read a partition, and each one owns what it reads."""
        rows = {self._row(tp) for tp in self._partitions()}
        for client in self.clients:
            if client.id in self.session:
                assert set(client.reads.values()) & rows <= self._owned(client.id)


TestMixedGroupModel = MixedGroupModel.TestCase
TestMixedGroupModel.settings = settings(stateful_step_count=40)

MEMBERS, HEARTBEATS = f"{SERVER}remote_members:", f"{SERVER}heartbeat_answers:"
RENEWED, FOLLOW, COMMIT = (
    MEMBERS + name for name in ("_renew", "RemoteMembers.follow", "RemoteMembers.commit")
)
BUGS = {
    "a heartbeat does not renew the session": Change(
        RENEWED,
        {"deadline_ms = now_ms + info": "deadline_ms = session.deadline_ms or now_ms + info"},
    ),
    "a session ends by another clock": Change(
        RENEWED, {"now_ms = group.uptime()": "now_ms = group.context.clock()"}
    ),
    "who does not give up in time stays": Change(
        RENEWED, {"min(deadline_ms, due_ms) if due_ms else deadline_ms": "deadline_ms"}
    ),
    "the time to give up begins again": Change(
        RENEWED, {"session.due_ms or now_ms + info": "now_ms + info"}
    ),
    "a revoked partition is given away before it was given up": Change(
        FOLLOW, {"owned is None or not share.revoked.keys().isdisjoint(owned)": "False"}
    ),
    "a revoked partition is given away with the next heartbeat": Change(
        FOLLOW, {"owned is None or not": "owned is not None and not"}
    ),
    "the generation of a member is not raised": Change(
        FOLLOW, {"epoch=document.generation, previous": "previous"}
    ),
    "a partition that another one has is taken": Change(
        MEMBERS + "_share", {"elif owner.member != NO_OWNER": "elif False"}
    ),
    "a commit with an older epoch is taken of what nobody has owned": Change(
        COMMIT, {" and epoch == session.epoch": ""}
    ),
    "a commit from before a partition was lost is taken": Change(
        COMMIT, {" and owner.generation <= epoch": ""}
    ),
    "a commit of another one's partition is taken": Change(COMMIT, {"owner.epoch == 0 and ": ""}),
    "a commit of what was lost, and nobody owns since, is taken": Change(
        COMMIT, {"owner.epoch == 0": "owner.member == NO_OWNER"}
    ),
    "a server remembers more than the rows say": Change(
        MEMBERS + "RemoteMembers.is_unchanged", {"seen.versions != versions or": ""}
    ),
    "a client is not told again after it connected again": Change(
        "embedlog.server.consumer_group_answers:ConsumerGroupAnswers._heartbeat",
        {"_says_all(request) or self._told.get(key)": "self._told.get(key, epoch and assigned)"},
    ),
    "any older epoch is taken": Change(
        HEARTBEATS + "check_epoch",
        {"received in (session.epoch, JOIN)": "received <= session.epoch"},
    ),
    "clients do not look for the dead": Change(
        MEMBERS + "RemoteMembers._is_look_due", {"return monotonic() >=": "return 0.0 >"}
    ),
    "a client that was removed joins again with what it had": Change(
        MEMBERS + "RemoteMembers.admit", {"if comes_back": "if False"}
    ),
    "an instance id is held by a dead client": Change(
        MEMBERS + "_check_released",
        {" and session.deadline_ms > group.uptime()": ""},
    ),
    "who leaves keeps its partitions": Change(
        "embedlog.group:Group._remove", {"ownership.free(txn, self.key, freed,": "dict("}
    ),
}


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", BUGS)
def test_the_model_finds_a_planted_bug(name: str) -> None:
    """A model that never failed proves nothing."""
    found = forks.call(lambda: hunt(MixedGroupModel, BUGS[name]), patience=300)
    tell(f"{name}: {found}")
    assert found is not None
