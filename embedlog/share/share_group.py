"""Share groups without a coordinator: every step is one transaction of a member.

A share group is a group as any other: its members are in its document, each holds the lock of its
file, and the state of its partitions is that of `groups.share_state`, in its committed offsets.  No
partition has an owner, and no member sends heartbeats: a record is its member's until the lock of
the record ends, or the kernel has released that of the member's file.

The dead letters of records that are given up are published in one transaction with the states of
these records: `commit_with` and `announce` are what a publication asks of a group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from embedlog import catalog, kv
from embedlog.catalog import TopicInfo
from embedlog.config import BY_DURATION, ShareGroupConfig
from embedlog.consumer import group_member
from embedlog.consumer.group_member import GroupMember
from embedlog.errors import CommitFailedError, UnknownMemberIdError
from embedlog.group import Group, subscribed_topics
from embedlog.groups import LOCKS, offsets, share_state
from embedlog.groups.membership import SHARE, Membership
from embedlog.groups.offsets import COMMITTED, PendingOffsetsError
from embedlog.groups.share_state import ACQUIRED, ARCHIVING, AVAILABLE, RecordRange, ShareState
from embedlog.partition import tail
from embedlog.partition.tail import TAILS, Tail, ends_of, peek_tail
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root
from embedlog.times import milliseconds

T = TypeVar("T")


class Acknowledgement(NamedTuple):
    """What a member does with offsets that it acquired."""

    first: int
    stop: int
    verdict: int
    delay_ms: int = 0
    """How long what is released must not be delivered again."""


Acknowledgements = Mapping[bytes, Sequence[Acknowledgement]]
"""By the key of the partition."""


class StepOutcome:
    """What a step did, and what it found."""

    def __init__(self) -> None:
        self.acquired: list[tuple[bytes, RecordRange]] = []
        self.epochs: dict[bytes, int] = {}
        """The leader epochs of their partitions."""
        self.refused: list[tuple[bytes, int, int]] = []
        """Offsets that were acknowledged too late."""
        self.renewed_until = 0
        """When the locks of what was renewed end."""
        self.archiving: list[tuple[bytes, RecordRange]] = []
        """What needs dead letters."""
        self.missing: set[bytes] = set()
        """Partitions without a state: of deleted topics, or in which the group has not begun."""
        self.holders: set[int] = set()
        """Other members that have acquired records."""
        self.due_ms: int | None = None
        """When records may become available, if nothing happens before."""
        self.rows: dict[bytes, bytes] = {}
        self.frees = False
        """Whether waiting members may get records."""


class _Row(NamedTuple):
    """A row of a committed offset, and what is in it."""

    row: bytes
    start: int
    ranges: list[RecordRange]
    epoch: int | None


class ShareGroup(Group):
    """One share group of one open log.

    Args:
        root: The log.
        name: The id of the group.
        uptime: Returns milliseconds since boot, by a clock that is never set.

    Raises:
        InvalidGroupIdError: The name is not valid.
    """

    kind = SHARE

    def __init__(self, root: Root, name: str, uptime: Callable[[], int] | None = None) -> None:
        super().__init__(root.context, name, tail.ends, uptime)
        self._root = root
        self._config, self._config_version = ShareGroupConfig(), -1
        self._rows: dict[bytes, _Row] = {}
        """The rows of partitions that were read or made last: most are as this member left them."""
        self._tails: dict[bytes, tuple[bytes, Tail]] = {}
        """Likewise, with their rows."""

    def config(self) -> ShareGroupConfig:
        """Return the settings of the group; from memory while nothing has changed."""
        version = self.context.catalog.version()
        if version != self._config_version:
            self._config, self._config_version = super().config(), version
        return self._config

    def _ends_of(self, tail: Tail) -> tuple[int, int]:
        return ends_of(tail, durable=self._root.visibility == "durable")

    # Members

    def join(self, topics: Collection[str], client_id: str = "") -> GroupMember:
        """Join the group.

        Raises:
            InconsistentGroupProtocolError: It is a consumer group.
        """
        return group_member.join(self, topics, [SHARE], session_ms=0, client_id=client_id)

    def begin(self, topics: Collection[TopicInfo]) -> None:
        """Set where the group begins in partitions in which it has not begun yet.

        Partitions that were created while the group had members begin at their start.
        """
        logs = {}
        for info in topics:
            for number in range(info.partitions):
                log = self._root.partition(info.name, number)
                # The transaction needs a row with its end.
                log.tail()
                logs[log.key] = log
        begun = self.context.live.read(lambda txn: offsets.of_group(txn, self.key))
        new = [key for key in logs if key not in begun]
        reset, starts = self.config().share_auto_offset_reset, dict[bytes, int]()
        if reset.startswith(BY_DURATION):
            since_ms = milliseconds(reset.removeprefix(BY_DURATION), self.context.clock())
            for key in new:
                found = logs[key].offset_for_timestamp(since_ms)
                starts[key] = logs[key].end_offset() if found is None else found.offset
        catalog = self.context.catalog.topics()
        newest = max((info.id for info in catalog.values()), default=0)
        own = {info.name: (info.id, info.partitions) for info in topics}

        def step(txn: kv.Txn, group: Membership) -> None:
            group.begin({**subscribed_topics(group, catalog), **own}, newest)
            rows = {}
            for key in new:
                at = peek_tail(txn, key)
                if at is None or COMMITTED.exists(txn, self.key, key):
                    continue
                first, end = self._ends_of(at)
                if not group.came_later(TopicPartition(logs[key].topic, logs[key].partition)):
                    first = starts.get(key, end if reset == "latest" else first)
                rows[key] = self._pack(key, ShareState(first), at)
            offsets.put(txn, self.key, rows)

        self.update(step)
        if new:
            # After a power cut it must not begin at a later end.
            self.checkpoint(always=True)

    def _pack(self, key: bytes, state: ShareState, at: Tail) -> bytes:
        position = OffsetAndMetadata(state.start, state.metadata, at.leader_epoch)
        row = offsets.pack(position, self.context.clock())
        self._rows[key] = _Row(row, state.start, state.ranges, at.leader_epoch)
        return row

    def find_dead(self, members: Collection[int]) -> set[int]:
        """Return which of these members do not hold the locks of their files any more."""
        return {member for member in members if self.is_free(f"{LOCKS}{member:032x}")}

    # Steps

    def take_step(
        self,
        member: GroupMember,
        partitions: Sequence[bytes],
        acknowledgements: Acknowledgements,
        limit: int,
        dead: Collection[int] = (),
        *,
        look_first: bool = False,
        whole: bool = False,
    ) -> StepOutcome:
        """Acknowledge records, free those whose locks have ended, and acquire further ones.

        Args:
            member: Who does.
            partitions: Where to acquire, in this order.
            acknowledgements: What it does with those that it has.
            limit: Acquire at most so many offsets.
            dead: Members that are known to be dead.
            look_first: Whether to read first if there is anything to do.
            whole: Whether to refuse all acknowledgements of a partition if one is refused.

        Raises:
            UnknownMemberIdError: It is no member any more, and so has no records.
        """
        live = self.context.live

        def run(txn: kv.Txn) -> StepOutcome:
            return self._run(txn, member, partitions, acknowledgements, limit, dead, whole)

        def write(txn: kv.Txn) -> StepOutcome:
            outcome = run(txn)
            if outcome.rows:
                offsets.put(txn, self.key, outcome.rows)
            return outcome

        if look_first and not (outcome := live.read(run)).rows:
            return outcome
        live.check_linked()
        outcome = self.settled(lambda: live.write(write))
        if outcome.frees:
            self.context.wake.advance()
        return outcome

    def _run(
        self,
        txn: kv.Txn,
        member: GroupMember,
        partitions: Sequence[bytes],
        acknowledgements: Acknowledgements,
        limit: int,
        dead: Collection[int],
        whole: bool,
    ) -> StepOutcome:
        if not member.is_in_group(txn):
            raise UnknownMemberIdError(
                "This member was removed from the group", group=self.name, member=member.id
            )
        config, now, number = self.config(), self.uptime(), member_number(member)
        until = now + config.share_record_lock_duration_ms
        outcome, most = StepOutcome(), config.share_partition_max_record_locks
        outcome.renewed_until = until
        wanted = set(partitions)
        for key in dict.fromkeys((*partitions, *acknowledgements)):
            if limit <= 0 and key not in acknowledgements:
                continue
            found = self._state(txn, key)
            if found is None:
                outcome.missing.add(key)
                outcome.refused += [(key, *each[:2]) for each in acknowledgements.get(key, ())]
                continue
            state, at, before = found
            start, end = self._ends_of(at)
            # Of the records below the start nothing is left to be said.
            said = [
                each._replace(first=max(each.first, start))
                for each in acknowledgements.get(key, ())
                if each.stop > start
            ]
            self._acknowledge(outcome, key, state, said, number, now, whole=whole)
            state.trim(start)
            outcome.frees |= state.expire(now, dead)
            if limit > 0 and key in wanted:
                taken = state.acquire(
                    limit, end, most, number, now, until, alone=not outcome.acquired
                )
                outcome.acquired += [(key, each) for each in taken]
                limit -= sum(each.stop - each.first for each in taken)
                if taken:
                    outcome.epochs[key] = at.leader_epoch
                    if state.is_last_delivery(taken[-1]):
                        limit = 0
            if (state.start, state.ranges) != before:
                outcome.rows[key] = self._pack(key, state, at)
            _note_waiting(outcome, key, state, number, now)
        return outcome

    def _acknowledge(
        self,
        outcome: StepOutcome,
        key: bytes,
        state: ShareState,
        said: Sequence[Acknowledgement],
        member: int,
        now: int,
        *,
        whole: bool,
    ) -> None:
        before, most = (state.start, state.ranges), self.config().share_partition_max_record_locks
        is_full = bool(said) and state.count(AVAILABLE, ACQUIRED, ARCHIVING) >= most
        refused: list[tuple[int, int]] = []
        for first, stop, verdict, delay_ms in said:
            outcome.frees |= is_full or verdict in (share_state.RELEASE, share_state.RETURN)
            until = now + delay_ms if delay_ms else 0
            if verdict == share_state.RENEW:
                until = outcome.renewed_until
            refused += state.acknowledge(first, stop, verdict, member=member, now=now, until=until)
        outcome.refused += [(key, *each) for each in refused]
        if whole and refused:
            state.start, state.ranges = before

    def _state(
        self, txn: kv.Txn, key: bytes
    ) -> tuple[ShareState, Tail, tuple[int, list[RecordRange]]] | None:
        """Return the state of a partition, its tail, and what is stored; None without a state."""
        name, tail_name = COMMITTED.key(self.key, key), TAILS.key(key)
        row, tail_row = txn.get(name), txn.get(tail_name)
        if row is None or tail_row is None:
            return None
        known = self._rows.get(key)
        if known is None or known.row != row:
            offset, metadata, epoch = COMMITTED.load(name, row).position
            known = self._rows[key] = _Row(row, offset, ShareState(offset, metadata).ranges, epoch)
        seen = self._tails.get(key)
        if seen is None or seen[0] != tail_row:
            seen = self._tails[key] = tail_row, TAILS.load(tail_name, tail_row)
        (_, start, ranges, epoch), at = known, seen[1]
        config = self.config()
        letters = config.errors_deadletterqueue_topic_name is not None
        state = ShareState(start, ranges, config.share_delivery_count_limit, letters)
        before = state.start, state.ranges
        if epoch is not None and epoch != at.leader_epoch:
            # The log was truncated where the next epoch begins: there are other records now.
            epochs = self.context.state.read(lambda txn: catalog.epochs(txn, key))
            later = (start for each, start in epochs if each > epoch)
            state.clip(min(later, default=at.log_end_offset))
        state.clip(at.log_end_offset)
        return state, at, before

    def has_changed(self, partitions: Collection[bytes]) -> bool:
        """Whether a state is not as it was found, or left, by the last step of this object."""
        live = self.context.live
        seen = ((COMMITTED.key(self.key, key), self._rows.get(key)) for key in partitions)
        return any(known is not None and live.get(name) != known.row for name, known in seen)

    # Publications

    def commit_with(
        self,
        member: Any,
        rows: Mapping[bytes, bytes],
        write: Callable[[kv.Txn], T],
        *,
        visible: bool,
    ) -> T:
        """Archive records in one transaction of `live` with their dead letters.

        Args:
            member: Who does; it need not be a member.
            rows: As `to_archive` returns them.
            write: Writes the letters; may run more than once.
            visible: Whether this becomes visible now, or with the next checkpoint.

        Raises:
            CommitFailedError: Another one has written the letters.
        """

        def step(txn: kv.Txn) -> T:
            offsets.write(txn, self.key, self._archived(txn, rows), visible=visible)
            return write(txn)

        return self.settled(lambda: self.context.live.write(step))

    def announce(self, member: Any, rows: dict[bytes, bytes], number: int) -> dict[bytes, bytes]:
        """As `Group.announce`, of a publication with dead letters; as `commit_with`."""

        def step(txn: kv.Txn) -> dict[bytes, bytes]:
            archived = self._archived(txn, rows)
            offsets.check_written(txn, self.key, rows)
            offsets.note(txn, self.key, rows, number)
            return archived

        return self.settled(lambda: self.context.live.write(step))

    def _archived(self, txn: kv.Txn, rows: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        archived = {}
        for key, ranges in rows.items():
            found = self._state(txn, key)
            if found is None or not all(found[0].archive(*each) for each in json.loads(ranges)):
                raise CommitFailedError(
                    "Another member has written the dead letters", group=self.name
                )
            archived[key] = self._pack(key, found[0], found[1])
        return archived

    def settled(self, write: Callable[[], T]) -> T:
        """Run a transaction; if it needs a state that a publication is about to change, wait."""
        while True:
            try:
                return write()
            except PendingOffsetsError as pending:
                for key in pending.partitions:
                    entry = offsets.JOURNAL.get(self.context.state, self.key, key)
                    for partner in entry.partners if entry is not None else ():
                        # Its process holds this lock until the publication is decided, or dies.
                        if (log := self._root.context.partition_of(partner)) is not None:
                            with log.locked():
                                pass
                self.context.settle_offsets(self.key, pending.partitions)


def to_archive(ranges: Sequence[tuple[bytes, RecordRange]]) -> dict[bytes, bytes]:
    """Return what `ShareGroup.commit_with` archives, by the key of the partition."""
    by_key: dict[bytes, list[tuple[int, int]]] = {}
    for key, each in ranges:
        by_key.setdefault(key, []).append(each[:2])
    return {key: json.dumps(each).encode() for key, each in by_key.items()}


def member_number(member: GroupMember) -> int:
    """Return the number of a member in states, which names its lock file."""
    return _number(member.info.lock)


@lru_cache
def _number(lock: str) -> int:
    return int(lock.removeprefix(LOCKS), 16)


def _note_waiting(
    outcome: StepOutcome, key: bytes, state: ShareState, member: int, now: int
) -> None:
    """Note what a member that waits must look at: locks that end, and other members."""
    for each in state.ranges:
        if each.state == ARCHIVING:
            outcome.archiving.append((key, each))
        elif each.until > now and each.state in (AVAILABLE, ACQUIRED):
            due = each.until if outcome.due_ms is None else min(outcome.due_ms, each.until)
            outcome.due_ms = due
        if each.state == ACQUIRED and each.member != member:
            outcome.holders.add(each.member)
