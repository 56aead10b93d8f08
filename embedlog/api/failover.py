"""Makes copies the topics to write to, and says where consumer groups continue in them.

Order: the setting ``mirror.source`` of the topics is set back first, in a transaction for each;
from then on their mirror is refused and their ends do not move, except by new writers.  Then
the offsets of each group are committed.  Killed in between, the same call does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from embedlog.api.live_list import LiveList
from embedlog.consumer.arguments import to_topic_partition
from embedlog.consumer.open_group import open_group
from embedlog.display import html_table, plural, public_names, text_table
from embedlog.errors import (
    GroupIdNotFoundError,
    IllegalStateError,
    InvalidConfigError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups.offsets import CommittedOffset, check_group_id
from embedlog.hints import Hint
from embedlog.kv import Txn
from embedlog.maintenance.activity import Event, report
from embedlog.mirrors.mirrored_topic import MIRRORED_TOPICS
from embedlog.mirrors.status import HEADS, MirrorStatus, mirror_statuses
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root
from embedlog.times import When, time_argument

Strategy = Literal["offsets", "time", "earliest", "latest"] | Mapping[TopicPartition, int]
STRATEGIES = ("offsets", "time", "earliest", "latest")


class FailoverPartition(NamedTuple):
    """Where a group continues in a partition of a copy, and what that may mean."""

    group: str
    topic: str
    partition: int
    committed: int | None
    """What the mirror copied of the group's commits, or the group committed here; None without."""
    offset: int | None
    """Where the group continues; None if ``auto_offset_reset`` of its consumers decides."""
    repeats: int
    """How many offsets it certainly gets again: those between `offset` and `committed`."""
    may_repeat: int
    """How many it gets again at most, if it had read everything that was copied."""
    may_skip: int
    """How many offsets of the copy it may never get."""
    not_copied: int | None
    """How many offsets the source had that are not in the copy, as last known; None if unknown."""


_HEADS = (
    *("group", "topic", "partition", "committed", "offset"),
    *("repeats", "may_repeat", "may_skip", "not_copied"),
)


@dataclass(frozen=True)
class FailoverResult:
    """What a failover did, or would do; see `Mirrors.failover`."""

    topics: tuple[str, ...]
    """The copies that programs may write to from now on."""
    partitions: tuple[FailoverPartition, ...]
    not_copied: dict[str, int | None]
    """By topic: how many offsets the source had that are not in the copy, as last known."""
    dry_run: bool
    released: tuple[str, ...] = ()
    """Those of `topics` that were copies until now: no earlier failover had released them."""

    @property
    def title(self) -> str:
        """What was done, in one line."""
        did_nothing = not self.released and not self.partitions
        outcome = "nothing to do" if did_nothing else "done"
        if self.dry_run:
            outcome = "dry run, nothing was changed"
        known = [count for count in self.not_copied.values() if count is not None]
        missing = f"{plural(sum(known), 'offset')} of the source not copied, as last known"
        if len(known) < len(self.not_copied):
            missing += f" (unknown of {plural(len(self.not_copied) - len(known), 'topic')})"
        return f"Failover: {outcome}; {self._release}; {missing}"

    @property
    def _release(self) -> str:
        topics, earlier = len(self.topics), len(self.topics) - len(self.released)
        if topics and earlier == topics:
            return f"programs may write to {plural(topics, 'topic')} since an earlier failover"
        rest = f", {earlier:,} of them since an earlier failover" if earlier else ""
        return f"{plural(topics, 'topic')} to write to{rest}"

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain dicts and lists, for JSON."""
        return {
            "topics": list(self.topics),
            "released": list(self.released),
            "dry_run": self.dry_run,
            "not_copied": self.not_copied,
            "partitions": [partition._asdict() for partition in self.partitions],
        }

    def __repr__(self) -> str:
        return "\n".join((self.title, *text_table(_HEADS, self.partitions)))

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table(self.title, _HEADS, self.partitions)


def _names(names: object) -> list[Any]:
    """Return the names in an argument that takes one or several; does not check them."""
    if names is None:
        return []
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        return [names]
    return list(names)


class Failover:
    """A failover of some topics and groups.

    Raises:
        InvalidConfigError: The strategy is unknown, or has no group to move; or the time is
            missing or not needed.
        InvalidGroupIdError: The name of a group is not valid.
        InvalidPartitionError: The offsets are not by partition.
        UnknownTopicOrPartitionError: A topic or partition does not exist, or is not a copy.
        IllegalStateError: The log has no copies.
    """

    def __init__(
        self,
        root: Root,
        groups: str | Iterable[str] | None,
        strategy: Strategy,
        at: When | None,
        topics: str | Iterable[str] | None,
    ) -> None:
        if isinstance(strategy, Mapping):
            strategy = {to_topic_partition(key): offset for key, offset in strategy.items()}
        elif strategy not in STRATEGIES:
            raise InvalidConfigError(
                f"strategy must be one of {', '.join(STRATEGIES)}, or offsets by partition, got "
                f"{strategy!r}"
            )
        if (at is not None) is not (strategy == "time"):
            raise InvalidConfigError(
                "The strategy 'time' needs a time, and the others do not",
                todo=Hint(
                    "Pass at=, such as '10m' for ten minutes ago.",
                    "Add --at TIME, such as --at 10m for ten minutes ago.",
                ),
            )
        self._groups = _names(groups)
        if not self._groups and strategy != "offsets":
            raise InvalidConfigError(
                "A strategy sets where groups continue, and no group is named",
                todo="Name the groups; without a group and a strategy, a failover only lets "
                "programs write to the copies.",
            )
        self._root, self._strategy = root, strategy
        self._timestamp = None if at is None else time_argument("at", at, root.clock())
        for group in self._groups:
            check_group_id(group)
        self._named = topics is not None
        self._topics = self._selected(None if topics is None else _names(topics))
        self._check_offsets()
        if self._groups and not self._named:
            self._topics = self._topics_of_groups()

    def _selected(self, names: Iterable[str] | None) -> list[str]:
        """Return the topics that are copies, or were until a failover."""
        state = self._root.context.state
        infos = self._root.topics()
        copies = [
            name for name, info in infos.items() if MIRRORED_TOPICS.get(state, info.id) is not None
        ]
        if names is None:
            if not copies:
                raise IllegalStateError(
                    "The log has no topics that are copies", path=self._root.path
                )
            return copies
        chosen = list(names)
        for name in chosen:
            if name not in copies:
                self._root.topic(name)  # Raises if there is no such topic.
                raise UnknownTopicOrPartitionError("The topic is not a copy", topic=name)
        return chosen

    def _topics_of_groups(self) -> list[str]:
        """Return the copies that the groups read: others may be of a source that is not lost.

        Raises:
            IllegalStateError: It is not known which copies a group reads.
        """
        read = set[str]()
        for name in self._groups:
            topics = self._topics_of_group(self._committed(name))
            if not topics:
                raise IllegalStateError(
                    "The group has committed nothing in a copy, so it is not known which it reads",
                    group=name,
                    todo=f"Name the topics, of {', '.join(self._topics)}.",
                )
            read |= topics
        return [topic for topic in self._topics if topic in read]

    def _topics_of_group(self, committed: Iterable[TopicPartition]) -> set[str]:
        """Return the topics of a group: those named, or those with a commit or an offset."""
        if self._named:
            return set(self._topics)
        offsets = self._strategy if isinstance(self._strategy, Mapping) else {}
        return {partition.topic for partition in (*committed, *offsets)}

    def _check_offsets(self) -> None:
        """Check that the strategy has offsets for partitions of the copies only."""
        if not isinstance(self._strategy, Mapping):
            return
        for (topic, number), offset in self._strategy.items():
            if topic not in self._topics:
                self._root.topic(topic)  # Raises if there is no such topic.
                raise UnknownTopicOrPartitionError(
                    "The topic is none of the copies to fail over",
                    topic=topic,
                    todo=f"These are {', '.join(self._topics)}.",
                )
            self._root.partition(topic, number)  # Raises if there is no such partition.
            if isinstance(offset, bool) or not isinstance(offset, int):
                raise InvalidConfigError(
                    f"An offset must be an int, got {offset!r}", topic=topic, partition=number
                )

    def run(self, *, dry_run: bool) -> FailoverResult:
        """Compute, and unless it is a dry run carry out, what the failover does.

        Raises:
            NonEmptyGroupError: A group has members, also of a dry run; nothing was changed.
            GroupIdNotFoundError: A group does not exist, likewise; with a strategy other than
                ``"offsets"`` only if no topics were named.
            OffsetOutOfRangeError: An offset of the strategy is not in the copy.
        """
        plans = self._plan()  # Before anything is changed: it raises if a group has members.
        copies = [name for name in self._topics if self._root.topic(name).config.mirror_source]
        if not dry_run:
            self._root.context.check_writable()
            for name in copies:
                self._note_ends(name)
                self._root.alter_topic(name, {"mirror.source": None})
            # Until now the mirror may have copied more.
            plans = self._plan()
            self._commit(plans)
        result = FailoverResult(
            tuple(self._topics), tuple(plans), self._missing(), dry_run, tuple(copies)
        )
        if not dry_run:
            self._report(result)
        return result

    def _note_ends(self, name: str) -> None:
        """Note where a copy ends: a position of the source beyond that is none in the copy."""
        topic_id, partitions = self._root.topic(name).id, self._root.partitions(name)
        ends = [self._root.partition(name, number).end_offset() for number in range(partitions)]

        def step(txn: Txn) -> None:
            copy = MIRRORED_TOPICS.get(txn, topic_id)
            assert copy is not None, "it is one of the copies"
            MIRRORED_TOPICS.put(txn, topic_id, value=replace(copy, ends=ends))

        self._root.context.state.write(step)

    def _plan(self) -> list[FailoverPartition]:
        plans: list[FailoverPartition] = []
        lags = self._lags()
        for name in self._groups:
            committed = self._committed(name)
            topics = self._topics_of_group(committed)
            for topic in self._topics:
                if topic in topics:
                    for number in range(self._root.partitions(topic)):
                        partition = TopicPartition(topic, number)
                        plan = self._plan_partition(name, partition, committed.get(partition))
                        plans.append(plan._replace(not_copied=lags.get(partition)))
        return plans

    def _committed(self, name: str) -> dict[TopicPartition, CommittedOffset]:
        group = open_group(self._root, name)
        try:
            snapshot = group.snapshot()
        except GroupIdNotFoundError as error:
            # A caller who names the topics wants to create the group, as when offsets are reset.
            if self._named and self._strategy != "offsets":
                return {}
            raise GroupIdNotFoundError(
                "The group does not exist in this log, and has no commits to continue at",
                group=name,
                todo=Hint(
                    "See log.groups. A group that the mirror has not copied needs a strategy "
                    "other than 'offsets', and the names of its topics.",
                    "See `embedlog groups list`. A group that the mirror has not copied needs "
                    "--topic, and a --strategy other than offsets.",
                ),
            ) from error
        group.check_empty(snapshot.members, "fail it over")
        topics = set(self._topics)
        return {part: commit for part, commit in snapshot.committed.items() if part.topic in topics}

    def _plan_partition(
        self, group: str, partition: TopicPartition, commit: CommittedOffset | None
    ) -> FailoverPartition:
        log = self._root.partition(*partition)
        start, end = log.start_offset(), log.end_offset()
        committed = None if commit is None else commit.position.offset
        offset = self._offset(partition, committed, start, end)
        if offset is None:
            # Its consumers begin at the start or at the end.
            return FailoverPartition(group, *partition, None, None, 0, end - start, end - start, 0)
        read = start if committed is None else committed
        return FailoverPartition(
            *(group, *partition, committed, offset),
            repeats=max(min(read, end) - offset, 0) if committed is not None else 0,
            may_repeat=end - offset,
            may_skip=max(offset - max(read, start), 0),
            not_copied=None,
        )

    def _offset(
        self, partition: TopicPartition, committed: int | None, start: int, end: int
    ) -> int | None:
        strategy = self._strategy
        if isinstance(strategy, Mapping):
            if partition not in strategy:
                return None if committed is None else min(max(committed, start), end)
            if not start <= strategy[partition] <= end:
                raise OffsetOutOfRangeError(
                    f"The copy holds offsets [{start}, {end})",
                    topic=partition.topic,
                    partition=partition.partition,
                    offset=strategy[partition],
                )
            return strategy[partition]
        if strategy == "offsets":
            return None if committed is None else min(max(committed, start), end)
        if strategy == "time":
            assert self._timestamp is not None
            record = self._root.partition(*partition).offset_for_timestamp(self._timestamp)
            return end if record is None else record.offset
        return start if strategy == "earliest" else end

    def _commit(self, plans: list[FailoverPartition]) -> None:
        for name in self._groups:
            offsets = {
                TopicPartition(plan.topic, plan.partition): OffsetAndMetadata(plan.offset)
                for plan in plans
                if plan.group == name and plan.offset is not None
            }
            if offsets:
                open_group(self._root, name).reset(offsets)

    # What was not copied

    def _lags(self) -> dict[TopicPartition, int]:
        """Return how far each partition of a copy was behind, as its mirror last reported."""
        lags = {}
        for status in mirror_statuses(self._root):
            for topic in status.by_topic.values():
                for number, lag in enumerate(topic.lags):
                    lags[TopicPartition(topic.target, number)] = lag
        return lags

    def _missing(self) -> dict[str, int | None]:
        counts: dict[str, int | None] = dict.fromkeys(self._topics)
        for (topic, _), lag in self._lags().items():
            if topic in counts:
                counts[topic] = (counts[topic] or 0) + lag
        return counts

    def _report(self, result: FailoverResult) -> None:
        facts = {"topics": list(result.topics), "not_copied": result.not_copied}
        events = [Event("failover", "topics", facts)]
        for group in self._groups:
            plans = [plan for plan in result.partitions if plan.group == group]
            strategy = "mapping" if isinstance(self._strategy, Mapping) else self._strategy
            events.append(
                Event(
                    "failover",
                    group,
                    {
                        "group": group,
                        "strategy": strategy,
                        "partitions": len(plans),
                        "repeats": sum(plan.repeats for plan in plans),
                        "may_repeat": sum(plan.may_repeat for plan in plans),
                        "may_skip": sum(plan.may_skip for plan in plans),
                    },
                )
            )
        report(self._root, events)


class Mirrors(LiveList[MirrorStatus]):
    """The mirrors that copy to a log, as of each use, as they last reported; see `embedlog.mirror`.

    A reboot forgets those that do not run.

    >>> import tempfile, embedlog
    >>> with tempfile.TemporaryDirectory() as directory, embedlog.open(directory) as log:
    ...     [(mirror.mirror, mirror.state, mirror.lag) for mirror in log.mirrors]
    []
    """

    def __init__(self, root: Root) -> None:
        self._root = root

    def _items(self) -> list[MirrorStatus]:
        return mirror_statuses(self._root)

    def __repr__(self) -> str:
        rows = [status.cells() for status in self]
        return "\n".join(text_table(HEADS, rows)) if rows else "No mirrors"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table("Mirrors", HEADS, [status.cells() for status in self])

    def failover(
        self,
        group: str | Iterable[str] | None = None,
        strategy: Strategy = "offsets",
        *,
        at: When | None = None,
        topics: str | Iterable[str] | None = None,
        dry_run: bool = True,
    ) -> FailoverResult:
        """Let programs write to topics that are copies, and say where consumer groups continue.

        From then on the mirror of these topics is refused.  The result says for each group and
        partition how many offsets are, or may be, read again or never.

        Args:
            group: A group, or several; None only makes the topics writable.  One that does not
                exist here needs ``topics``, and a strategy other than ``"offsets"``.
            strategy: ``"offsets"``: where the mirror copied the commits of the group from the
                source (``groups`` of `embedlog.mirror`); ``"time"``: at the first record at or
                after ``at``; ``"earliest"`` or ``"latest"``; or offsets by partition, in all others
                as ``"offsets"``.
            at: A time as in `ConsumerGroup.reset_offsets`, such as ``"10m"`` for ten minutes ago.
            topics: Only these copies; by default those in which the groups have committed offsets,
                or ``strategy`` has some, and without a group all of the log.
            dry_run: Change nothing.

        Raises:
            NonEmptyGroupError: A group has members here; also raised for a dry run.
            GroupIdNotFoundError: There is no such group; likewise.
            IllegalStateError: The log has no copies, or a group has no commits in one of them and
                no topics are named.
            UnknownTopicOrPartitionError: There is no such copy or partition.
            InvalidConfigError, OffsetOutOfRangeError: The strategy is not possible.
            InvalidGroupIdError, InvalidPartitionError: A name is not valid.
        """
        return Failover(self._root, group, strategy, at, topics).run(dry_run=dry_run)

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)
