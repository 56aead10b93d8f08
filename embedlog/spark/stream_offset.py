"""The offsets of a streaming query, as the JSON that Spark keeps in its checkpoint.

The shape is Kafka's, ``{"topic": {"0": 23}}`` with the next offset to read.
Beside it stand the id of each topic and the leader epoch of each partition:
they tell a topic that was deleted and created again, or a log that was
truncated, from the one that was read.  No topic name begins with "@", so these
keys cannot be topics.

Spark asks for the initial offset several times until the first batch is
planned, and once more if that batch must be repeated; records that arrive in
between would be skipped.  So the end of the first batch says where it started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from embedlog.record import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

_TOPIC_IDS, _LEADER_EPOCHS, _IS_INITIAL, _BATCH_START = "@topics", "@epochs", "@initial", "@base"


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The next offset to read of each partition."""

    offsets: Mapping[TopicPartition, int]
    topic_ids: Mapping[str, int] = field(default_factory=dict)
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The leader epoch of the log when the offset was taken, unless that was 0."""
    is_initial: bool = False
    """Whether the query starts here, so that no batch has ended here."""
    batch_start: StreamOffset | None = None
    """In the end of the first batch: where that batch started."""

    def leader_epoch(self, topic_partition: TopicPartition) -> int | None:
        """Return the leader epoch of an offset; None if the checkpoint does not have it."""
        if topic_partition.topic not in self.topic_ids:
            return None
        return self.leader_epochs.get(topic_partition, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON for Spark: equal offsets give equal texts."""
        value: dict[str, Any] = _nested(self.offsets)
        if self.topic_ids:
            value[_TOPIC_IDS] = dict(sorted(self.topic_ids.items()))
        if self.leader_epochs:
            value[_LEADER_EPOCHS] = _nested(self.leader_epochs)
        if self.is_initial:
            value[_IS_INITIAL] = True
        if self.batch_start is not None:
            start = replace(self.batch_start, batch_start=None, is_initial=False)
            value[_BATCH_START] = start.to_json()
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StreamOffset:
        """Inverse of `to_json`; also reads the offsets in a checkpoint of Kafka's source."""
        start = value.get(_BATCH_START)
        return cls(
            _flat({name: item for name, item in value.items() if not name.startswith("@")}),
            dict(value.get(_TOPIC_IDS, {})),
            _flat(value.get(_LEADER_EPOCHS, {})),
            bool(value.get(_IS_INITIAL, False)),
            None if start is None else cls.from_json(start),
        )


def _nested(numbers: Mapping[TopicPartition, int]) -> dict[str, Any]:
    """Return numbers by topic and partition, in order."""
    nested: dict[str, dict[str, int]] = {}
    for (topic, partition), number in sorted(numbers.items()):
        nested.setdefault(topic, {})[str(partition)] = number
    return nested


def _flat(nested: Mapping[str, Mapping[str, int]]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, int(partition)): int(number)
        for topic, by_partition in nested.items()
        for partition, number in by_partition.items()
    }


def offsets_behind_latest(
    progress: Mapping[str, Any] | StreamingQueryProgress | None, source: int = 0
) -> dict[str, float]:
    """Return the lag of a query behind the log, as Kafka's source has it in its metrics.

    Args:
        progress: `StreamingQuery.lastProgress`, or the progress passed to a listener.
        source: The index of the source, if the query has several.

    Returns:
        ``minOffsetsBehindLatest``, ``maxOffsetsBehindLatest`` and ``avgOffsetsBehindLatest``
        over the partitions; empty if the query has no progress yet.
    """
    if progress is None:
        return {}
    sources = progress["sources"] if isinstance(progress, Mapping) else progress.sources
    latest, end = (_offset(sources[source], name) for name in ("latestOffset", "endOffset"))
    if latest is None or end is None:
        return {}
    lags = [max(offset - end.offsets.get(key, 0), 0) for key, offset in latest.offsets.items()]
    if not lags:
        return {}
    return {
        "minOffsetsBehindLatest": min(lags),
        "maxOffsetsBehindLatest": max(lags),
        "avgOffsetsBehindLatest": sum(lags) / len(lags),
    }


def _offset(source: Any, name: str) -> StreamOffset | None:
    value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    if isinstance(value, str) and value != "null":
        value = json.loads(value)
    return StreamOffset.from_json(value) if isinstance(value, Mapping) else None
