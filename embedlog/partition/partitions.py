"""The open log, as the packages below it see it."""

from __future__ import annotations

from typing import Protocol

from embedlog.partition.context import Context
from embedlog.partition.state import PartitionState


class Partitions(Protocol):
    """Gives the partitions of an open log; `embedlog.root.root.Root` does."""

    @property
    def context(self) -> Context:
        """What the partitions share; another one in a forked child."""

    def partition(self, topic: str, number: int) -> PartitionState:
        """Return one partition.

        Raises:
            UnknownTopicOrPartitionError: There is no such partition.
        """
