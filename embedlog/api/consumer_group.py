"""`ConsumerGroup`: describes a consumer group, and changes one without members."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar, overload

from embedlog.consumer.arguments import to_topic_partition
from embedlog.display import NONE, cut, moment, need, plural, public_names, text_table
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    GroupIdNotFoundError,
    LogDeletedError,
    OffsetOutOfRangeError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from embedlog.group import Group, GroupSnapshot, group_ids
from embedlog.groups.membership import CONSUMER, SHARE
from embedlog.groups.offsets import CommittedOffset, check_group_id
from embedlog.groups.share_state import ACQUIRED, ARCHIVING, AVAILABLE
from embedlog.listeners import GROUP, Client
from embedlog.partition.reader import record_at
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

if TYPE_CHECKING:
    import pandas

    from embedlog.api.reset_offsets import OffsetChange, OffsetResetResult, PartitionToReset, To
    from embedlog.config import ShareGroupConfig

T = TypeVar("T")

DEAD = "Dead"
"""Kafka's state of a group that does not exist."""

Partitions = Iterable[TopicPartition]


class MemberDescription(NamedTuple):
    """A member of a group, with kafka-python's names."""

    member_id: str
    group_instance_id: str | None
    """The instance id of a static member."""
    client_id: str
    pid: int | None
    """None of a client of a server."""
    topics: tuple[str, ...]
    """The topics that it subscribes to; with a pattern, those that match."""
    partitions: tuple[TopicPartition, ...]
    """The partitions that it owns now."""
    session_timeout_ms: int
    joined_ms: int
    """Milliseconds since 1970."""
    client_host: str | None = None
    """The address of a client of a server; None of a process on this host."""


class PartitionDescription(NamedTuple):
    """The progress of a group in a partition; None is unknown."""

    topic: str
    partition: int
    current_offset: int | None
    """The committed offset, which is the next one to read; None without a commit."""
    log_start_offset: int
    log_end_offset: int
    lag: int | None
    """The number of offsets from the committed one to the end."""
    lag_ms: int | None
    """The age of the first record not consumed; 0 at the end, None if it cannot be read."""
    metadata: str | None
    committed_ms: int | None
    """The time of the commit, in milliseconds since 1970."""
    member_id: str | None
    """The member that owns the partition."""
    in_flight: int | None = None
    """In a share group: how many records are delivered, or must be again, and are not done."""


class GroupDescription(NamedTuple):
    """A group at one moment; see `ConsumerGroup.describe`."""

    group: str
    state: str
    generation: int
    assignor: str | None
    members: tuple[MemberDescription, ...]
    partitions: tuple[PartitionDescription, ...]
    kind: str = CONSUMER
    """``"consumer"`` or ``"share"``."""

    @property
    def lag(self) -> int:
        """The number of offsets not consumed yet in all partitions with a commit."""
        return sum(partition.lag or 0 for partition in self.partitions)

    @property
    def title(self) -> str:
        """The group in one line."""
        members = plural(len(self.members), "member")
        by = f" by {self.assignor}" if self.assignor else ""
        lag = f"lag {self.lag:,} in {plural(len(self.partitions), 'partition')}"
        # Their lag is unknown, not 0.
        if without := sum(partition.lag is None for partition in self.partitions):
            lag += f" ({without} without a commit)"
        if self.kind == SHARE:
            in_flight = sum(partition.in_flight or 0 for partition in self.partitions)
            return (
                f"{self.group}: share group, {self.state}, {members}, {lag}, {in_flight} in flight"
            )
        return f"{self.group}: {self.state}, generation {self.generation}{by}, {members}, {lag}"

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain dicts and lists, for JSON."""
        members = [member._asdict() for member in self.members]
        for member in members:
            member["topics"] = list(member["topics"])
            member["partitions"] = [partition._asdict() for partition in member["partitions"]]
        return {
            "group": self.group,
            "kind": self.kind,
            "state": self.state,
            "generation": self.generation,
            "assignor": self.assignor,
            "lag": self.lag,
            "members": members,
            "partitions": [partition._asdict() for partition in self.partitions],
        }

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with one row per partition."""
        frame = need("pandas").DataFrame(self.partitions, columns=PartitionDescription._fields)
        return frame.convert_dtypes()

    def __repr__(self) -> str:
        return "\n".join((self.title, *text_table(_HEADS, self._rows())))

    def _repr_html_(self) -> str:
        """For notebooks: the title and the partitions."""
        from embedlog.display import html_table

        rows = ((*row[:-1], cut(str(row[-1] or NONE), _ID_WIDTH)) for row in self._rows())
        # With blanks, long names are broken into lines.
        return html_table(self.title, [name.replace("_", " ") for name in _HEADS], rows)

    def _rows(self) -> Iterator[tuple[object, ...]]:
        for partition in self.partitions:
            committed_ms = partition.committed_ms
            committed = None if committed_ms is None else moment(committed_ms)
            yield (*partition[:8], committed, partition.member_id)


_HEADS = (*PartitionDescription._fields[:8], "committed", "member_id")
_ID_WIDTH = 20
"""Notebooks show this much of the id of a member."""


class ConsumerGroup:
    """A consumer group of a log, as of each call; it need not exist yet.

    Describing it changes nothing and works with ``mode="r"``.  Members whose process died are
    not counted, even if no other member has removed them yet.  Changes are refused
    while the group has members, because the members would not notice them.

    >>> import embedlog, tempfile
    >>> with embedlog.open(tempfile.mkdtemp()) as log:
    ...     topic, group = log.create_topic("flights"), log.groups["delays"]
    ...     group.reset_offsets("latest", topics="flights", dry_run=False)
    ...     group
    Reset of delays: done
    topic    partition  before  after
    flights  0          -       0
    <ConsumerGroup delays: Empty, generation 0, 0 members, lag 0 in 1 partition>

    Raises:
        InvalidGroupIdError: The name is not valid.
    """

    def __init__(self, root: Root, name: str) -> None:
        check_group_id(name)
        self._root, self.name = root, name

    def _group(self) -> Group:
        """Return the group with the currently open databases: a forked child reopens them."""
        from embedlog.consumer.open_group import open_group

        return open_group(self._root, self.name)

    # Describe

    @property
    def state(self) -> str:
        """Empty, PreparingRebalance, CompletingRebalance or Stable; Dead if it does not exist."""
        try:
            return self._group().snapshot().state
        except GroupIdNotFoundError:
            return DEAD

    def members(self) -> list[MemberDescription]:
        """Return the members in the order in which they joined.

        Raises:
            GroupIdNotFoundError: There is no such group.
        """
        return _members(self._group().snapshot())

    def lag(self) -> dict[TopicPartition, int | None]:
        """Return how many offsets of each partition the group has not consumed, at one moment.

        Counted from the committed offset; None without a commit.

        Raises:
            GroupIdNotFoundError: There is no such group.
            LogDeletedError: The log was deleted while it was open.
        """
        self._root.context.state.check_linked()
        partitions = self._describe(ages=False).partitions
        return {TopicPartition(part.topic, part.partition): part.lag for part in partitions}

    def describe(self) -> GroupDescription:
        """Return the members, and the progress in each partition with a commit or an owner.

        Everything is as of one moment, except `lag_ms`, which reads a batch per partition.

        Raises:
            GroupIdNotFoundError: There is no such group.
            LogDeletedError: The log was deleted while it was open.
        """
        self._root.context.state.check_linked()
        return self._describe(ages=True)

    def _describe(self, *, ages: bool) -> GroupDescription:
        snapshot = self._group().snapshot()
        partitions = []
        for partition in sorted(snapshot.committed.keys() | snapshot.owners.keys()):
            # A partition is left out if its topic was deleted meanwhile.
            with suppress(UnknownTopicOrPartitionError):
                partitions.append(self._describe_partition(partition, snapshot, ages))
        return GroupDescription(
            group=self.name,
            state=snapshot.state,
            generation=snapshot.generation,
            assignor=snapshot.assignor,
            members=tuple(_members(snapshot)),
            partitions=tuple(partitions),
            kind=CONSUMER if snapshot.shares is None else SHARE,
        )

    def _describe_partition(
        self, partition: TopicPartition, snapshot: GroupSnapshot, ages: bool
    ) -> PartitionDescription:
        ends, committed = snapshot.ends.get(partition), snapshot.committed.get(partition)
        if ends is None:  # The partition was not used since the boot.
            offsets = _partition_offsets(self._root, partition, None)
            ends = offsets.start, offsets.end
        offset = lag = lag_ms = metadata = committed_ms = None
        if committed is not None:
            (offset, metadata, _), committed_ms = committed
            # The offset may be past the end (E21).
            lag = lag_ms = max(ends[1] - offset, 0)
            if lag:
                lag_ms = self._age(partition, max(offset, ends[0])) if ages else None
        owner, in_flight = snapshot.owners.get(partition), None
        share = (snapshot.shares or {}).get(partition)
        if share is not None:
            in_flight = share.count(AVAILABLE, ACQUIRED, ARCHIVING)
            lag = max(ends[1] - share.end, 0) + in_flight
        return PartitionDescription(
            *partition, offset, *ends, lag, lag_ms, metadata, committed_ms, owner, in_flight
        )

    def _age(self, partition: TopicPartition, offset: int) -> int | None:
        try:
            record = record_at(self._root.partition(*partition), offset)
        except (OffsetOutOfRangeError, CorruptionError, UnknownTopicOrPartitionError):
            return None
        # The clock of a producer may be ahead of this one.
        return None if record is None else max(self._root.clock() - record.timestamp, 0)

    # Change

    @property
    def config(self) -> ShareGroupConfig:
        """The settings of a share group; see `alter`."""
        return self._group().config()

    def alter(self, changes: Mapping[str, object]) -> ShareGroupConfig:
        """Change settings of a share group, durably; its consumers follow at once.

        >>> import embedlog, tempfile
        >>> with embedlog.open(tempfile.mkdtemp()) as log:
        ...     log.groups["workers"].alter({"share.delivery.count.limit": 3}).overrides()
        {'share.delivery.count.limit': 3}

        Args:
            changes: Settings of `embedlog.config.ShareGroupConfig`, in either spelling; None resets
                one to its default.

        Raises:
            InvalidConfigError: A setting is unknown or invalid; nothing was changed.
            ReadOnlyError: The log was opened with ``mode="r"``.
        """
        self._root.context.check_writable()
        return self._group().alter(changes)

    def reset_offsets(
        self,
        to: To | None = None,
        *,
        shift: int | None = None,
        topics: str | Iterable[str] | None = None,
        partitions: Partitions | None = None,
        dry_run: bool = True,
    ) -> OffsetResetResult:
        """Compute new committed offsets; with ``dry_run=False`` commit them, durably.

        Targets outside of the log mean its nearer end.  The metadata of the committed offsets
        is kept.

        Args:
            to: ``"earliest"``, ``"latest"``, ``"current"`` (the log end, without a commit), an
                offset, or a time: the first record at or after it, or the log end.  A time is
                a `datetime`, `date` or ISO 8601 text (UTC without a zone), or how long ago: a
                `timedelta` or a text such as ``"90m"``.
            shift: Instead of ``to``: how far to move from the committed offset, back if
                negative.
            topics: Reset all partitions of these topics, and no others.
            partitions: Reset these partitions, besides those of ``topics``, and no others.
            dry_run: Change nothing.

        Returns:
            The offsets before and after, by partition; without ``topics`` and ``partitions``
            for all partitions with a commit.

        Raises:
            NonEmptyGroupError: The group has members; also raised for a dry run.
            GroupIdNotFoundError: There is no such group, and no partitions are named.
            NoOffsetForPartitionError: A partition has no committed offset to shift.
            UnknownTopicOrPartitionError: A topic or partition does not exist.
            ValueError, TypeError: ``to`` or ``shift`` is not valid.
            ReadOnlyError: The log was opened with ``mode="r"``; a dry run works.
        """
        from embedlog.api.reset_offsets import OffsetChange, OffsetResetResult, reset_target

        target, group = reset_target(to, shift, self._root.clock()), self._group()
        if not dry_run:
            self._root.context.check_writable()
        all_committed = topics is None and partitions is None
        selected = self._select(topics, partitions)
        committed: dict[TopicPartition, CommittedOffset] = {}
        try:
            snapshot = group.snapshot()
            group.check_empty(snapshot.members, "reset its offsets")
            committed = snapshot.committed
        except GroupIdNotFoundError:
            if all_committed:
                raise
        changes, positions = {}, {}
        for partition in sorted(committed if all_committed else selected):
            offsets = _partition_offsets(self._root, partition, committed.get(partition))
            after = min(max(target(offsets), offsets.start), offsets.end)
            metadata = committed[partition].position.metadata if partition in committed else ""
            changes[partition] = OffsetChange(offsets.committed, after)
            positions[partition] = OffsetAndMetadata(after, metadata, offsets.leader_epoch)
        if not dry_run:
            group.reset(positions)
            self._tell_of_reset(changes)
        return OffsetResetResult(self.name, changes, dry_run)

    def _tell_of_reset(self, changes: Mapping[TopicPartition, OffsetChange]) -> None:
        """Tell listeners where the group begins, or what it leaves out."""
        client = Client(GROUP, self.name)
        for partition, (before, after) in changes.items():
            log = self._root.partition(*partition)
            log.refresh()
            for listener in self._root.listeners.of(log.config, client):
                if before is None:
                    listener.began(log, after)
                elif before < after:
                    listener.skipped(log, before, after)
        client.close()

    def _select(
        self, topics: str | Iterable[str] | None, partitions: Partitions | None
    ) -> set[TopicPartition]:
        selected = set(map(to_topic_partition, partitions or ()))
        for topic in (topics,) if isinstance(topics, str) else topics or ():
            count = self._root.partitions(topic)
            selected |= {TopicPartition(topic, number) for number in range(count)}
        return selected

    def delete_offsets(
        self, partitions: Partitions = (), *, topics: str | Iterable[str] | None = None
    ) -> None:
        """Delete, durably, the committed offsets of partitions, or of all partitions of topics.

        Raises:
            GroupIdNotFoundError: There is no such group.
            GroupSubscribedToTopicError: A member reads one of the topics.
            UnknownTopicOrPartitionError: A topic or partition does not exist.
            ReadOnlyError: The log was opened with ``mode="r"``.
        """
        self._root.context.check_writable()
        selected, group = self._select(topics, partitions), self._group()
        group.snapshot()
        group.delete_offsets(sorted(selected))

    def delete(self) -> None:
        """Delete the group and its committed offsets, durably.

        Raises:
            GroupIdNotFoundError: There is no such group.
            NonEmptyGroupError: The group has members.
            ReadOnlyError: The log was opened with ``mode="r"``.
        """
        self._root.context.check_writable()
        self._group().delete()

    def remove_members(self, *members: str) -> list[str]:
        """Remove members by member id or ``group_instance_id``; return the member ids.

        Meant for static members that will not come back: a member that is alive joins again
        at its next poll.

        Raises:
            GroupIdNotFoundError: There is no such group.
            UnknownMemberIdError: One of them is not a member; none was removed.
            ReadOnlyError: The log was opened with ``mode="r"``.
        """
        self._root.context.check_writable()
        group = self._group()
        infos, ids = group.snapshot().members, []
        for name in members:
            matching = [info.id for info in infos if name in (info.id, info.instance_id)]
            if not matching:
                what = "The group has no such member"
                raise UnknownMemberIdError(what, group=self.name, member=name)
            ids.append(matching[0])
        return group.remove_members(ids)

    # Display

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self, "name")

    def __repr__(self) -> str:
        return f"<ConsumerGroup {self._title()}>"

    def _title(self) -> str:
        try:
            return self._describe(ages=False).title
        except GroupIdNotFoundError:
            return f"{self.name}: {DEAD}, the group does not exist yet"
        except ClosedError:
            return f"{self.name} of a closed log"

    def _repr_html_(self) -> str:
        """For notebooks: the title and the partitions."""
        from embedlog.display import html_table

        try:
            return self.describe()._repr_html_()
        except (GroupIdNotFoundError, ClosedError, LogDeletedError):
            return html_table(self._title(), (), ())


def _partition_offsets(
    root: Root, partition: TopicPartition, committed: CommittedOffset | None
) -> PartitionToReset:
    from embedlog.api.reset_offsets import PartitionToReset

    log = root.partition(*partition)
    log.refresh()
    tail = log.tail()
    offset = None if committed is None else committed.position.offset
    return PartitionToReset(
        log, tail.start_offset, log.visible_end(tail), tail.leader_epoch, offset
    )


def _members(snapshot: GroupSnapshot) -> list[MemberDescription]:
    owners = snapshot.owners
    return [
        MemberDescription(
            member_id=member.id,
            group_instance_id=member.instance_id,
            client_id=member.client_id,
            pid=None if member.remote else member.pid,
            topics=member.topics,
            partitions=tuple(part for part, owner in owners.items() if owner == member.id),
            session_timeout_ms=member.session_ms,
            joined_ms=member.joined_ms,
            client_host=member.remote and member.remote.host,
        )
        for member in snapshot.members
    ]


class Groups(Mapping[str, ConsumerGroup]):
    """The consumer groups of a log by name, as of each use: those with members or commits, sorted.

    A group need not exist: ``log.groups["new"].reset_offsets(...)`` sets where a new one begins.

    >>> import tempfile, embedlog
    >>> with tempfile.TemporaryDirectory() as directory, embedlog.open(directory) as log:
    ...     "billing" in log.groups, log.groups["billing"].state
    (False, 'Dead')
    """

    def __init__(self, root: Root) -> None:
        self._root = root

    def __getitem__(self, name: str) -> ConsumerGroup:
        """Return a view of a group, to describe it and to reset its offsets.

        Raises:
            InvalidGroupIdError: The name is not valid.
        """
        return ConsumerGroup(self._root, name)

    def __contains__(self, name: object) -> bool:
        """Whether the group has members or commits."""
        return name in list(self)

    @overload
    def get(self, name: str, /) -> ConsumerGroup | None: ...
    @overload
    def get(self, name: str, /, default: ConsumerGroup | T) -> ConsumerGroup | T: ...
    def get(self, name: str, /, default: T | None = None) -> ConsumerGroup | T | None:
        """Return a group that has members or commits, or else ``default``."""
        return super().get(name, default) if name in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(group_ids(self._root.context.live, self._root.context.state))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _rows(self) -> list[tuple[object, ...]]:
        return [
            (
                *(group.name, group.state, len(group.members())),
                f"{sum(lag or 0 for lag in group.lag().values()):,}",
            )
            for group in self.values()
        ]

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)

    def __repr__(self) -> str:
        return "\n".join(text_table(_GROUP_HEADS, self._rows())) if self else "No consumer groups"

    def _repr_html_(self) -> str:
        """For notebooks."""
        from embedlog.display import html_table

        return html_table("Consumer groups", _GROUP_HEADS, self._rows())


_GROUP_HEADS = ("group", "state", "members", "lag")
