"""What a consumer without a group reads: all partitions of the topics it was made for."""

from __future__ import annotations

from collections.abc import Iterable

from embedlog.consumer.assignment import Assignment
from embedlog.errors import UnknownTopicOrPartitionError
from embedlog.record import TopicPartition
from embedlog.root.root import Root


class StaticAssignment:
    """Keeps an assignment equal to the partitions of some topics (E19).

    Args:
        root: The log.
        assignment: What it keeps up to date.
        topics: Their names.
        reset: The consumer's ``auto_offset_reset``.
        create: Whether to make a topic that is not there.
    """

    def __init__(
        self, root: Root, assignment: Assignment, topics: Iterable[str], reset: str, create: bool
    ) -> None:
        self._root, self._assignment, self._reset = root, assignment, reset
        self.topics = dict.fromkeys(topics)
        self._create = create
        self._known = -1
        """The version of the catalogue that the assignment was made from."""
        self._follow(reset)

    def follow(self) -> None:
        """Follow what happens to the topics: created, grown, deleted, created again.

        What appears later is read from its beginning: all of it came after
        the program asked for the topic.
        """
        if self._root.context.catalog.version() != self._known:
            self._follow("none" if self._reset == "none" else "earliest")

    def _follow(self, first: str) -> None:
        version = self._root.context.catalog.version()
        wanted = [
            TopicPartition(topic, number)
            for topic in self.topics
            for number in range(self._count(topic))
        ]
        try:
            added = self._assignment.replace(wanted, self._reset)
        except UnknownTopicOrPartitionError:
            return  # deleted just now; the next look settles it
        for feed in added:
            feed.begin(first)
        self._known = version

    def _count(self, topic: str) -> int:
        try:
            ask = self._root.ensure_topic if self._create else self._root.topic
            return ask(topic).partitions
        except UnknownTopicOrPartitionError:
            return 0

    def gone(self) -> None:
        """A topic vanished while it was read: look again at what there is."""
        self._known = -1
