"""The assignment of a consumer without a group: all partitions of its topics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from embedlog.consumer.assignment import Assignment
from embedlog.errors import UnknownTopicOrPartitionError
from embedlog.lazy import logging
from embedlog.record import TopicPartition
from embedlog.root.root import Root

_log = logging.getLogger("embedlog.consumer")


class MissingTopics:
    """Warns of topics that a consumer waits for, and again only after a change."""

    def __init__(self) -> None:
        self._warned: frozenset[str] = frozenset()

    def report(self, names: Iterable[str], pattern: str | None = None) -> None:
        """Warn of names that do not exist, or of a pattern that matches none.

        Call it whenever the topics were looked up.
        """
        missing = frozenset(names)
        new, self._warned = missing - self._warned, missing
        if not new:
            return
        if pattern is None:
            _log.warning(
                "The consumer waits for topics that do not exist: %s", ", ".join(sorted(new))
            )
        else:
            _log.warning("The consumer waits for a topic that matches the pattern %r", pattern)


class StaticAssignment:
    """Keeps an assignment equal to the partitions of some topics.

    Args:
        root: The log.
        assignment: The assignment to keep up to date.
        topics: The names of the topics; if it is callable, it returns them, and is called whenever
            the topics of the log have changed.
        reset: The consumer's ``auto_offset_reset``.
        create: Whether to create topics that do not exist.
    """

    def __init__(
        self,
        root: Root,
        assignment: Assignment,
        topics: Iterable[str] | Callable[[], Iterable[str]],
        reset: str,
        create: bool,
    ) -> None:
        self._root, self._assignment, self._reset = root, assignment, reset
        self._matching_topics = topics if callable(topics) else None
        self.topics: Iterable[str] = () if callable(topics) else dict.fromkeys(topics)
        self._create = create
        self._missing = MissingTopics()
        self._catalog_version = -1
        """The version of the catalog that the assignment was made from."""
        self._assign_partitions(reset)

    def update(self) -> None:
        """Assign the current partitions, if topics were created, grown, deleted or re-created.

        Partitions added later are read from their beginning: everything in them was
        written after the program asked for the topic.
        """
        if self._root.context.catalog.version() != self._catalog_version:
            self._assign_partitions("none" if self._reset == "none" else "earliest")

    def _assign_partitions(self, start: str) -> None:
        version = self._root.context.catalog.version()
        get_topic = self._root.ensure_topic if self._create else self._root.topic
        if self._matching_topics is not None:
            self.topics = self._matching_topics()
        partitions: list[TopicPartition] = []
        missing = []
        for topic in self.topics:
            try:
                count = get_topic(topic).partitions
            except UnknownTopicOrPartitionError:
                missing.append(topic)
            else:
                partitions += [TopicPartition(topic, number) for number in range(count)]
        self._missing.report(missing)
        try:
            added = self._assignment.replace(partitions, self._reset)
        except UnknownTopicOrPartitionError:
            return  # a topic was deleted just now; the next update sees that
        for cursor in added:
            cursor.start_at(start)
        self._catalog_version = version

    def require_update(self) -> None:
        """Have the next `update` read the catalog again: a topic was deleted while it was read."""
        self._catalog_version = -1
