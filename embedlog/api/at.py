"""`LogAt`: the topics of a log as they were, in a snapshot or before a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from embedlog.catalog import INTERNAL
from embedlog.errors import UnknownTopicOrPartitionError
from embedlog.partition.tail import ends_of
from embedlog.record import K, TopicPartition, V
from embedlog.snapshots.manifest import SnapshotTopic
from embedlog.snapshots.snapshot import Snapshot
from embedlog.times import When, milliseconds

if TYPE_CHECKING:
    import polars

    from embedlog.api.log import Log
    from embedlog.api.topic import TopicView
    from embedlog.config.options import ConsumerOptions
    from embedlog.consumer.consumer import Consumer


class TopicsAt:
    """Topics by name, which do not move."""

    _topics: dict[str, Any]

    def topics(self, *, internal: bool = False) -> list[str]:
        """Return the names of the topics, as `Log.topics` does."""
        return [name for name in self._topics if internal or not name.startswith(INTERNAL)]

    def topic(self, name: str, *, raw: bool = False) -> TopicView:
        """Return the records of a topic; see `Log.topic`."""
        raise NotImplementedError

    def _existing(self) -> Iterable[str]:
        return self._topics

    def __getitem__(self, name: str) -> TopicView:
        """The same as `topic`."""
        return self.topic(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.topics())

    def __contains__(self, name: object) -> bool:
        return name in self._topics

    @overload
    def sql(self, query: str, *, eager: Literal[True] = ...) -> polars.DataFrame: ...
    @overload
    def sql(self, query: str, *, eager: Literal[False]) -> polars.LazyFrame: ...
    def sql(self, query: str, *, eager: bool = True) -> polars.DataFrame | polars.LazyFrame:
        """Return the result of a query, whose tables are the topics; see `Log.sql`."""
        from embedlog.api.sql import collect, sql

        frame = sql({name: self.topic(name) for name in self._existing()}, query)
        return collect(frame) if eager else frame


class LogAt(TopicsAt):
    """The topics of a log as of a snapshot, or before a time; returned by `Log.at`.

    Args:
        log: The open log.
        when: The snapshot, or the time.
    """

    def __init__(self, log: Log, when: Snapshot | When) -> None:
        self._log, self._when = log, when
        self._time_ms: int | None = None
        if isinstance(when, Snapshot):
            self._topics = dict(when.topics)
            return
        try:
            self._time_ms = milliseconds(when, log.root.clock())
        except ValueError as error:
            raise ValueError(f"{error}; a snapshot is log.snapshots[{when!r}]") from None
        infos = log.root.topics()
        tails = log.root.tails(list(infos.values()))
        durable = log.root.visibility == "durable"
        self._topics = {
            name: SnapshotTopic(
                info.id,
                info.schema_version,
                tuple(
                    ends_of(tails[TopicPartition(name, number)], durable=durable)
                    for number in range(info.partitions)
                ),
            )
            for name, info in infos.items()
        }

    def topic(self, name: str, *, raw: bool = False) -> TopicView:
        """Return the records of a topic; see `Log.topic`.

        Those of a typed topic are seen through the version of the schema of that instant.

        Raises:
            UnknownTopicOrPartitionError: There was no such topic then, or it was deleted since.
        """
        topic = self._topics.get(name)
        if topic is None:
            raise UnknownTopicOrPartitionError("There was no such topic then", topic=name)
        view = self._log.topic(name, raw=raw)
        info = self._log.root.topic(name)
        if info.id != topic.id:
            raise UnknownTopicOrPartitionError(
                "The topic was deleted and created again since", topic=name
            )
        fixed = view.in_ranges((number, *part) for number, part in enumerate(topic.ranges))
        if self._time_ms is not None:
            # Noted, so that it does not move either.
            ranges = fixed.before(self._time_ms).ranges()
            self._topics[name] = topic._replace(ranges=tuple(part[1:] for part in ranges))
            fixed = view.in_ranges(ranges)
        schema = self._log.root.context.catalog.schema(info, topic.schema_version)
        if schema is not None:
            from embedlog.api.typed_topic import TypedTopicView

            assert isinstance(fixed, TypedTopicView)
            fixed._fixed = info.id, schema
        return fixed

    def _existing(self) -> Iterator[str]:
        infos = self._log.root.topics()
        for name, topic in self._topics.items():
            if name in infos and infos[name].id == topic.id:
                yield name

    def consumer(self, *topics: str, **config: Unpack[ConsumerOptions[K, V]]) -> Consumer[K, V]:
        """Return a consumer of all records of topics, which ends where they end.

        Its loops end there, and a poll returns nothing then.  It has all partitions of the topics;
        with a ``group_id`` it begins at the offsets that the group committed, and commits for it,
        which needs a group without members.

        Args:
            topics: The topics; by default all.
            config: See `Log.consumer`.
        """
        ranges = {
            TopicPartition(name, part.partition): (part.start, part.stop)
            for name in topics or self.topics()
            for part in self.topic(name).ranges()
        }
        consumer = self._log.consumer(**config)
        consumer.stop_at({partition: stop for partition, (_, stop) in ranges.items()})
        consumer.assign(ranges)
        for partition, (start, _) in ranges.items():
            if consumer.config.group_id is None or consumer.committed(partition) is None:
                consumer.seek(partition, start)
        return consumer

    def __repr__(self) -> str:
        return f"<Log {self._log.path} at {self._when!r}>"
