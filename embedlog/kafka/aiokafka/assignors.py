"""Assignors of aiokafka that a program has written itself, for the groups of a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from embedlog.api import Log
from embedlog.assignor.members import Member
from embedlog.assignor.select import BUILT_IN
from embedlog.kafka.cluster import LogCluster
from embedlog.kafka.library import load
from embedlog.record import TopicPartition

_protocol: Any = load("aiokafka.coordinator.protocol")


class ProgramAssignor:
    """Runs an assignor of aiokafka's interface.

    A log keeps only which member has which partitions.  So the data that members and
    assignments have beside that is of the process that runs the assignor.
    """

    cooperative = False

    def __init__(self, assignor: Any, log: Log) -> None:
        self._assignor, self._cluster = assignor, LogCluster(log)
        self.name = str(assignor.name)
        self._results: Mapping[str, Any] = {}

    def assign(
        self, partitions: Mapping[str, int], members: Sequence[Member]
    ) -> dict[str, tuple[TopicPartition, ...]]:
        """Assign every partition of every subscribed topic."""
        metadata = {
            member.id: self._assignor.metadata(member.topics & partitions.keys())
            for member in members
        }
        self._results = self._assignor.assign(self._cluster, metadata)
        return {member.id: _partitions(self._results.get(member.id)) for member in members}

    def announce(self, member_id: str, assigned: set[Any]) -> None:
        """Tell the assignor what a member of this process was assigned, if it has computed that."""
        result = self._results.get(member_id)
        if result is not None and {*_partitions(result)} == assigned:
            self._assignor.on_assignment(result)


def _partitions(assignment: Any) -> tuple[TopicPartition, ...]:
    if assignment is None:
        return ()
    rows = assignment.assignment
    return tuple(sorted(TopicPartition(topic, n) for topic, numbers in rows for n in numbers))


def assignors_of(strategies: Any, log: Log) -> tuple[str | ProgramAssignor, ...]:
    """Return ``partition_assignment_strategy`` as a log has it: names, and a program's own."""
    names = {each: str(getattr(each, "name", each)) for each in strategies}
    return tuple(
        name if name in BUILT_IN or isinstance(each, str) else ProgramAssignor(each, log)
        for each, name in names.items()
    )
