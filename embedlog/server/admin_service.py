"""What all admin clients do with a log, in this process and on the wire."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from embedlog.api import Log
from embedlog.api.consumer_group import GroupDescription
from embedlog.catalog import check_partition_count, check_topic_name, refuse_internal
from embedlog.config import TopicConfig
from embedlog.config.settings import Settings
from embedlog.consumer.open_group import open_group
from embedlog.errors import (
    EligibleLeadersNotAvailableError,
    EmbedlogError,
    GroupIdNotFoundError,
    InvalidGroupIdError,
    InvalidPartitionsError,
    NonEmptyGroupError,
    TopicAlreadyExistsError,
    UnknownMemberIdError,
)
from embedlog.groups.membership import CONSUMER
from embedlog.groups.offsets import CommittedOffset
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.replication.placement import assign_replicas
from embedlog.server.cluster import nodes, placement

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL = -1, -2, -3, -4
"""Kafka's numbers for offsets to look up; others that are negative mean nothing on a log."""


class AdminService:
    """Administers a log; all errors are those of embedlog."""

    def __init__(self, log: Log) -> None:
        self._log = log

    # Topics

    def create_topic(
        self,
        name: str,
        partitions: int,
        config: Mapping[str, Any],
        *,
        replication_factor: int = -1,
        replicas: Sequence[Sequence[int]] | None = None,
        validate_only: bool,
    ) -> int:
        """Create a topic, or only check the arguments; return the number of its partitions.

        Args:
            name: The name.
            partitions: -1 is the default, one.
            config: The settings.
            replication_factor: How many copies each partition has; -1 is the default.  A log in
                one directory ignores it, and ``replicas``.
            replicas: The directories of each partition, instead.
            validate_only: Create nothing.
        """
        log = self._log
        count = len(replicas or (0,)) if partitions == -1 else partitions
        if name in log.root.topics():
            raise TopicAlreadyExistsError("The topic already exists", topic=name)
        if not validate_only:
            copies: dict[str, Any] = {}
            if log.root.replicated and replicas:
                copies = {"replicas": replicas}
            elif log.root.replicated and replication_factor != -1:
                copies = {"replication_factor": replication_factor}
            log.create_topic(name, count, config, **copies)
            return count
        check_topic_name(name)
        refuse_internal(name)
        check_partition_count(count)
        TopicConfig.parse(config)
        if log.root.replicated and replication_factor != -1:
            assign_replicas(count, replication_factor, dict.fromkeys(nodes(log)))
        return count

    def create_partitions(self, topic: str, total: int, *, validate_only: bool) -> None:
        """Increase the number of partitions of a topic, or only check the arguments."""
        current = self._log.root.partitions(topic)
        check_partition_count(total)
        if total <= current:
            # Brokers refuse the present number too.
            raise InvalidPartitionsError(f"The topic has {current} partitions already", topic=topic)
        if not validate_only:
            self._log.create_partitions(topic, total)

    def alter_topic(self, topic: str, changes: Mapping[str, Any], *, validate_only: bool) -> None:
        """Change settings of a topic, or only check them; None resets one."""
        if validate_only:
            self._log.root.topic(topic).config.changed(changes)
        else:
            self._log.alter_topic(topic, changes)

    def partitions(self) -> list[TopicPartition]:
        """Return all partitions."""
        infos = self._log.root.topics()
        return [TopicPartition(name, n) for name in infos for n in range(infos[name].partitions)]

    def existing(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Return those of some partitions that are there."""
        infos = self._log.root.topics()
        return [
            part
            for part in partitions
            if part.topic in infos and 0 <= part.partition < infos[part.topic].partitions
        ]

    def elect_leaders(
        self, partitions: Iterable[TopicPartition], *, unclean: bool
    ) -> dict[TopicPartition, str]:
        """Elect leaders; return "" for each partition that got another one, or Kafka's error."""
        log, partitions, results = self._log, dict.fromkeys(partitions), {}
        election: Literal["unclean", "preferred"] = "unclean" if unclean else "preferred"
        for partition in partitions:
            log.root.partition(*partition)  # or raises, before any leader is elected
        for partition in partitions:
            # One by one: another one may be refused.
            elected = list[TopicPartition]()
            with suppress(EligibleLeadersNotAvailableError):
                elected = log.replicas.elect_leaders([partition], election=election)
            leader, replicas, _ = placement(log, *partition)
            if elected:
                results[partition] = ""
            elif leader == replicas[0] or (unclean and leader is not None):
                results[partition] = "ELECTION_NOT_NEEDED"
            elif unclean:
                results[partition] = "ELIGIBLE_LEADERS_NOT_AVAILABLE"
            else:
                results[partition] = "PREFERRED_LEADER_NOT_AVAILABLE"
        return results

    # Records

    def offset(self, topic: str, partition: int, spec: int) -> tuple[int, int, int | None]:
        """Return an offset with its timestamp and leader epoch, -1 where there is none.

        Args:
            topic: The topic.
            partition: The partition.
            spec: A time in ms, for the first record at or after it, or one of the numbers above.
        """
        records = self._log.root.partition(topic, partition)
        records.refresh()
        tail = records.tail()
        if spec == LATEST:
            return records.end_offset(), -1, tail.leader_epoch
        if spec in (EARLIEST, EARLIEST_LOCAL):
            return records.start_offset(), -1, tail.leader_epoch
        if newest := spec == MAX_TIMESTAMP:
            sealed = (info.max_timestamp or 0 for info in records.segments.values())
            spec = max(tail.max_timestamp, *sealed, 0)
        record = None if spec < 0 else records.offset_for_timestamp(spec)
        if newest and record is None:
            # That record was deleted: search for the largest time that is left.
            spec = bisect_left(
                *(range(spec), True), key=lambda time: records.offset_for_timestamp(time) is None
            )
            record = records.offset_for_timestamp(spec - 1) if spec > 0 else None
        return (-1, -1, None) if record is None else (*record,)

    # Groups

    def group(self, group_id: str) -> GroupDescription | None:
        """Describe a group; None if it does not exist, as one with a name that none can have."""
        try:
            return self._log.groups[group_id].describe()
        except (GroupIdNotFoundError, InvalidGroupIdError):
            return None

    def committed(
        self, group_id: str, partitions: Iterable[Any] | None
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the commits of a group, by default all of them; None for a partition without.

        A share group has none, as in Kafka: its offsets are the state of records.
        """
        chosen = [TopicPartition(*part) for part in partitions or ()]
        found: Mapping[TopicPartition, CommittedOffset | None] = {}
        with suppress(GroupIdNotFoundError, InvalidGroupIdError):
            group = open_group(self._log.root, group_id)
            if group.read().kind != CONSUMER:
                pass
            elif partitions is None:
                found = group.snapshot().committed
            else:
                found = group.committed(self.existing(chosen))
        rows = {part: found.get(part) for part in (found if partitions is None else chosen)}
        return {part: row and row.position for part, row in rows.items()}

    def commit_offsets(
        self,
        group_id: str,
        positions: Mapping[TopicPartition, OffsetAndMetadata],
        *,
        durable: bool = True,
    ) -> dict[TopicPartition, EmbedlogError | None]:
        """Commit for a group without members; return the error of each partition, or None.

        Args:
            group_id: The group.
            positions: What to commit.
            durable: Whether the commits survive a power cut in any case; else as those of
                consumers do.
        """
        group = open_group(self._log.root, group_id)
        outcomes: dict[TopicPartition, EmbedlogError | None] = dict.fromkeys(positions)
        for partition, position in positions.items():
            try:
                group.encode({partition: position})
            except EmbedlogError as error:
                outcomes[partition] = error
        valid = {part: positions[part] for part in positions if not outcomes[part]}
        try:
            (group.reset if durable else group.commit)(valid)
        except NonEmptyGroupError as error:
            # Brokers have this code for a commit that no member made.
            outcomes |= dict.fromkeys(valid, UnknownMemberIdError(str(error)))
        except EmbedlogError as error:
            outcomes |= dict.fromkeys(valid, error)
        return outcomes


def changed_setting(config: Settings, name: str, operation: str, value: Any) -> Any:
    """Return the new value of a setting after ``SET``, ``DELETE``, ``APPEND`` or ``SUBTRACT``.

    The last two are for settings that are lists.  None resets a setting.
    """
    if operation == "SET":
        return value
    if operation == "DELETE":
        return None
    words = [word for word in str(config.to_dict().get(name, "")).split(",") if word]
    named = str(value).split(",")
    if operation == "APPEND":
        return ",".join(dict.fromkeys([*words, *named]))
    return ",".join(word for word in words if word not in named)
