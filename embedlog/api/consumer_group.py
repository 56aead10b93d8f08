"""Looking at a consumer group from outside, and moving it while nobody is in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from embedlog.api.display import html_table, moment, need, text_table
from embedlog.api.reset_offsets import OffsetChange, OffsetResetResult, ResetTarget, To, clamp, rule
from embedlog.consumer.arguments import to_topic_partition
from embedlog.consumer.group_client import open_group
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    GroupIdNotFoundError,
    OffsetOutOfRangeError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.group import Group, GroupSnapshot, group_ids
from embedlog.groups.membership import MemberInfo
from embedlog.groups.offsets import CommittedOffset, check_group_id
from embedlog.partition.reader import record_at
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

DEAD = "Dead"
"""Kafka's state of a group that is not there (M1)."""

Ends = dict[TopicPartition, tuple[int, int]]
Partitions = Iterable[TopicPartition]


class MemberDescription(NamedTuple):
    """A member of a group, by kafka-python's names."""

    member_id: str
    group_instance_id: str | None
    """The name of a static member (M13)."""
    client_id: str
    pid: int
    topics: tuple[str, ...]
    """What it subscribes to; with a pattern, what that matched."""
    partitions: tuple[TopicPartition, ...]
    """What it owns now."""
    session_timeout_ms: int
    joined_ms: int
    """Milliseconds since 1970."""


class PartitionDescription(NamedTuple):
    """How far a group is in a partition; None is unknown, or not there."""

    topic: str
    partition: int
    current_offset: int | None
    """The next one to read, as committed; None if the group committed nothing here."""
    log_start_offset: int
    log_end_offset: int
    lag: int | None
    """Offsets from the committed one to the end."""
    lag_ms: int | None
    """Age of the first record that is not read; 0 at the end, None if it cannot be read."""
    metadata: str | None
    committed_ms: int | None
    """When it was committed, in milliseconds since 1970."""
    member_id: str | None
    """Who owns it."""


@dataclass(frozen=True, slots=True, repr=False)
class GroupDescription:
    """A group as it was in one instant; see `ConsumerGroup.describe`."""

    group: str
    state: str
    generation: int
    assignor: str | None
    members: tuple[MemberDescription, ...]
    partitions: tuple[PartitionDescription, ...]

    @property
    def lag(self) -> int:
        """Offsets that are not read yet, of all partitions with a commit."""
        return sum(each.lag or 0 for each in self.partitions)

    @property
    def title(self) -> str:
        """The group in a line."""
        count = len(self.members)
        members = f"{count} member{'s' * (count != 1)}"
        by = f" by {self.assignor}" if self.assignor else ""
        parts = len(self.partitions)
        lag = f"lag {self.lag:,} in {parts} partition{'s' * (parts != 1)}"
        # These have no lag, which is not the same as none left to read.
        if fresh := sum(each.lag is None for each in self.partitions):
            lag += f" ({fresh} without a commit)"
        return f"{self.group}: {self.state}, generation {self.generation}{by}, {members}, {lag}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts and lists, for JSON."""
        members = []
        for each in self.members:
            owned = [one._asdict() for one in each.partitions]
            members.append({**each._asdict(), "topics": list(each.topics), "partitions": owned})
        return {
            "group": self.group,
            "state": self.state,
            "generation": self.generation,
            "assignor": self.assignor,
            "lag": self.lag,
            "members": members,
            "partitions": [each._asdict() for each in self.partitions],
        }

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each partition."""
        frame = need("pandas").DataFrame(self.partitions, columns=PartitionDescription._fields)
        return frame.convert_dtypes()

    def __repr__(self) -> str:
        return "\n".join((self.title, *text_table(_HEADS, self._rows())))

    def _repr_html_(self) -> str:
        """For notebooks: the title and the partitions."""
        return html_table(self.title, _HEADS, self._rows())

    def _rows(self) -> Iterator[tuple[object, ...]]:
        for each in self.partitions:
            when = None if each.committed_ms is None else moment(each.committed_ms)
            yield (*each._replace(committed_ms=None)[:8], when, each.member_id)


_HEADS = (*PartitionDescription._fields[:8], "committed", "member_id")


class ConsumerGroup:
    """A consumer group of a log, as it is at each call; it need not exist yet.

    Looking changes nothing and works in ``mode="r"``.  Members that died are
    not counted, also before another one removed them (M10).  What changes a
    group is refused while it has members, for they would not notice (M15).

    >>> import embedlog, tempfile
    >>> with embedlog.open(tempfile.mkdtemp()) as log:
    ...     topic, group = log.create_topic("flights"), log.group("delays")
    ...     group.reset_offsets("latest", topics="flights", dry_run=False)
    ...     group
    Reset of delays: done
    topic    partition  before  after
    flights  0          -       0
    <ConsumerGroup delays: Empty, generation 0, 0 members, lag 0 in 1 partition>

    Raises:
        InvalidGroupIdError: It cannot be a name.
    """

    def __init__(self, root: Root, name: str) -> None:
        check_group_id(name)
        self._root, self.name = root, name

    def _group(self) -> Group:
        """Return the group with what is open now: a forked child has opened it anew."""
        return open_group(self._root, self.name)

    # Looking

    @property
    def state(self) -> str:
        """Empty, PreparingRebalance, CompletingRebalance or Stable; Dead if it is not there."""
        try:
            return self._group().snapshot().state
        except GroupIdNotFoundError:
            return DEAD

    def members(self) -> list[MemberDescription]:
        """Return who is in the group, in the order they joined.

        Raises:
            GroupIdNotFoundError: There is no such group.
        """
        return list(_members(self._group().snapshot()))

    def lag(self) -> dict[TopicPartition, int | None]:
        """Return how many offsets each partition has that the group has not read, as of one read.

        Counted from the committed offset; None where nothing was committed.

        Raises:
            GroupIdNotFoundError: There is no such group.
        """
        seen = self._group().snapshot()
        return {
            one: _lag(seen.committed.get(one), end) for one, (_, end) in self._ends(seen).items()
        }

    def describe(self) -> GroupDescription:
        """Return members, and for each partition with a commit or an owner how far the group is.

        All of one instant, but for `lag_ms`: that reads a batch of each partition.

        Raises:
            GroupIdNotFoundError: There is no such group.
        """
        return self._describe(ages=True)

    def _describe(self, *, ages: bool) -> GroupDescription:
        seen = self._group().snapshot()
        return GroupDescription(
            group=self.name,
            state=seen.state,
            generation=seen.generation,
            assignor=seen.assignor,
            members=tuple(_members(seen)),
            partitions=tuple(
                self._partition(one, ends, seen, ages) for one, ends in self._ends(seen).items()
            ),
        )

    def _ends(self, seen: GroupSnapshot) -> Ends:
        """Return where each partition starts and ends: those that nobody used yet are opened."""
        found: Ends = {}
        for one in sorted(seen.committed.keys() | seen.owners.keys()):
            try:
                found[one] = seen.ends.get(one) or _ends(self._root, one)
            except UnknownTopicOrPartitionError:
                continue  # deleted just now
        return found

    def _partition(
        self, one: TopicPartition, ends: tuple[int, int], seen: GroupSnapshot, ages: bool
    ) -> PartitionDescription:
        committed, (start, end) = seen.committed.get(one), ends
        lag = age = _lag(committed, end)
        position = None if committed is None else committed.position
        if position is not None and lag:
            age = self._age(one, max(position.offset, start)) if ages else None
        return PartitionDescription(
            *one,
            current_offset=None if position is None else position.offset,
            log_start_offset=start,
            log_end_offset=end,
            lag=lag,
            lag_ms=age,
            metadata=None if position is None else position.metadata,
            committed_ms=None if committed is None else committed.committed_ms,
            member_id=seen.owners.get(one),
        )

    def _age(self, one: TopicPartition, offset: int) -> int | None:
        try:
            found = record_at(self._root.partition(*one), offset)
        except (OffsetOutOfRangeError, CorruptionError, UnknownTopicOrPartitionError):
            return None
        # A producer's clock may be ahead of ours.
        return None if found is None else max(self._root.clock() - found.timestamp, 0)

    # Moving

    def reset_offsets(
        self,
        to: To | None = None,
        *,
        shift: int | None = None,
        topics: str | Iterable[str] | None = None,
        partitions: Partitions | None = None,
        dry_run: bool = True,
    ) -> OffsetResetResult:
        """Say where the group goes on; with ``dry_run=False`` do it, durably.

        What lies outside of the log means its nearer end.  Notes that were
        committed with the offsets are kept.

        Args:
            to: ``"earliest"``, ``"latest"``, ``"current"`` (the end, where nothing was
                committed), an offset, a `datetime` (the first record at or after it, or
                the end; UTC without a zone), or a `timedelta` (so long ago).
            shift: Instead of ``to``: so many offsets from where it is, back if negative.
            topics: Move it in all partitions of these, and in no others.
            partitions: Move it in these as well, or in no others.
            dry_run: Only tell.

        Returns:
            Partition to `OffsetChange`, the offsets before and after; without ``topics`` and
            ``partitions`` for each partition it committed for.

        Raises:
            NonEmptyGroupError: It has members, also of a dry run.
            GroupIdNotFoundError: There is no such group, and no partitions are named.
            NoOffsetForPartitionError: Nothing was committed that could be shifted.
            UnknownTopicOrPartitionError: A topic or partition is not there.
            ValueError, TypeError: ``to`` or ``shift`` names no place.
            ReadOnlyError: The log was opened with ``mode="r"``; a dry run works.
        """
        wanted, group = rule(to, shift, self._root.clock()), self._group()
        if not dry_run:
            self._root.context.check_writable()
        chosen = None if topics is None and partitions is None else self._chosen(topics, partitions)
        committed = self._committed(group, may_be_new=chosen is not None)
        moves, positions = {}, {}
        for one in sorted(committed if chosen is None else chosen):
            before = committed.get(one)
            place = _place(self._root, one, before)
            after = clamp(wanted, place)
            note = "" if before is None else before.metadata
            moves[one] = OffsetChange(place.committed, after)
            positions[one] = OffsetAndMetadata(after, note, place.leader_epoch)
        if not dry_run:
            group.reset(positions)
        return OffsetResetResult(self.name, moves, dry_run)

    def _committed(
        self, group: Group, *, may_be_new: bool
    ) -> Mapping[TopicPartition, OffsetAndMetadata]:
        """Return what was committed by a group that nobody is in."""
        try:
            seen = group.snapshot()
        except GroupIdNotFoundError:
            if may_be_new:
                return {}
            raise
        group.check_empty(seen.members, "reset its offsets")
        return {one: each.position for one, each in seen.committed.items()}

    def _chosen(
        self, topics: str | Iterable[str] | None, partitions: Partitions | None
    ) -> set[TopicPartition]:
        found = set(map(to_topic_partition, partitions or ()))
        for topic in (topics,) if isinstance(topics, str) else topics or ():
            count = self._root.partitions(topic)
            found |= {TopicPartition(topic, number) for number in range(count)}
        return found

    def delete_offsets(
        self, partitions: Partitions = (), *, topics: str | Iterable[str] | None = None
    ) -> None:
        """Forget, durably, what was committed for partitions, or all partitions of topics.

        Raises:
            GroupIdNotFoundError: There is no such group.
            GroupSubscribedToTopicError: A member reads one of the topics (M15).
            UnknownTopicOrPartitionError: A topic or partition is not there.
            ReadOnlyError: The log was opened with ``mode="r"``.
        """
        self._root.context.check_writable()
        chosen, group = self._chosen(topics, partitions), self._group()
        group.snapshot()
        group.delete_offsets(sorted(chosen))

    def delete(self) -> None:
        """Forget the group and all that it committed, durably (M15).

        Raises:
            GroupIdNotFoundError: There is no such group.
            NonEmptyGroupError: It has members.
            ReadOnlyError: The log was opened with ``mode="r"``.
        """
        self._root.context.check_writable()
        self._group().delete()

    def remove_members(self, *members: str) -> list[str]:
        """Take members out, by id or ``group_instance_id``; return the ids.

        Meant for static members that will not come back: a living one joins again
        with its next poll.

        Raises:
            GroupIdNotFoundError: There is no such group.
            UnknownMemberIdError: One of them is not in it; then none is removed.
            ReadOnlyError: The log was opened with ``mode="r"``.
        """
        self._root.context.check_writable()
        group = self._group()
        ids = [_find(group, group.snapshot().members, each) for each in members]
        return group.remove_members(ids)

    # Pictures of it

    def __repr__(self) -> str:
        return f"<ConsumerGroup {self._title()}>"

    def _title(self) -> str:
        try:
            return self._describe(ages=False).title
        except GroupIdNotFoundError:
            return f"{self.name}: {DEAD}, there is no such group yet"
        except ClosedError:
            return f"{self.name} of a closed log"

    def _repr_html_(self) -> str:
        """For notebooks: the title and the partitions."""
        try:
            return self.describe()._repr_html_()
        except (GroupIdNotFoundError, ClosedError):
            return html_table(self._title(), (), ())


def group_names(root: Root) -> list[str]:
    """Return the names of all groups of a log, sorted."""
    return group_ids(root.context.live, root.context.state)


def _place(root: Root, one: TopicPartition, before: OffsetAndMetadata | None) -> ResetTarget:
    log = root.partition(*one)
    log.refresh()
    now = log.tail()
    committed = None if before is None else before.offset
    return ResetTarget(
        one, log, now.start_offset, log.visible_end(now), now.leader_epoch, committed
    )


def _ends(root: Root, one: TopicPartition) -> tuple[int, int]:
    place = _place(root, one, None)
    return place.start, place.end


def _lag(committed: CommittedOffset | None, end: int) -> int | None:
    """Return how many offsets there are from a position to the end; it may lie past it (E21)."""
    return None if committed is None else max(end - committed.position.offset, 0)


def _members(seen: GroupSnapshot) -> Iterator[MemberDescription]:
    owned: dict[str, list[TopicPartition]] = {}
    for one, member in seen.owners.items():
        owned.setdefault(member, []).append(one)
    for each in seen.members:
        yield MemberDescription(
            member_id=each.id,
            group_instance_id=each.instance_id,
            client_id=each.client_id,
            pid=each.pid,
            topics=each.topics,
            partitions=tuple(owned.get(each.id, ())),
            session_timeout_ms=each.session_ms,
            joined_ms=each.joined_ms,
        )


def _find(group: Group, members: Iterable[MemberInfo], name: str) -> str:
    for each in members:
        if name in (each.id, each.instance_id):
            return each.id
    raise UnknownMemberIdError("the group has no such member", group=group.name, member=name)
