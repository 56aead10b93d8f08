"""How far a streaming query is, as the JSON that Spark keeps in its checkpoint.

Kafka's shape, ``{"topic": {"0": 23}}`` with the next offset to read, and beside
it what tells a topic that was deleted and made again, or a log that was cut,
from the one that was read: the topic's number and the partition's leader epoch.
No topic begins with "@", so these keys cannot be topics.

The first offset of a query is asked for again and again until the first batch
is planned, and once more if that batch must be repeated; what arrived in
between would be skipped.  So the first batch's end says where it began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from embedlog.record import TopicPartition

TOPICS, EPOCHS, INITIAL, BASE = "@topics", "@epochs", "@initial", "@base"


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The next offset of each partition."""

    offsets: Mapping[TopicPartition, int]
    topics: Mapping[str, int] = field(default_factory=dict)
    """The number of each topic, by its name."""
    epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The leader epoch in which each offset was right, where that is not 0."""
    initial: bool = False
    """Whether no batch ended here: it is where the query begins."""
    base: StreamOffset | None = None
    """In the end of the first batch: where that began."""

    @property
    def begin(self) -> StreamOffset:
        """Where a batch begins whose start is initial, and whose end this is."""
        return self if self.base is None else self.base

    def epoch(self, one: TopicPartition) -> int | None:
        """The leader epoch of an offset; None if nobody noted it."""
        return self.epochs.get(one, 0) if one.topic in self.topics else None

    def at(self, offsets: Mapping[TopicPartition, int]) -> StreamOffset:
        """Return other offsets in the same logs."""
        return replace(self, offsets=offsets, initial=False, base=None)

    def to_json(self) -> dict[str, Any]:
        """Return it as Spark keeps it: equal positions are equal texts."""
        found: dict[str, Any] = _by_topic(self.offsets)
        if self.topics:
            found[TOPICS] = dict(sorted(self.topics.items()))
        if self.epochs:
            found[EPOCHS] = _by_topic(self.epochs)
        if self.initial:
            found[INITIAL] = True
        if self.base is not None:
            found[BASE] = replace(self.base, base=None, initial=False).to_json()
        return found


def from_json(found: Mapping[str, Any]) -> StreamOffset:
    """Return what `StreamOffset.to_json` made, or what is kept of Kafka's source."""
    base = found.get(BASE)
    return StreamOffset(
        _flat({name: each for name, each in found.items() if not name.startswith("@")}),
        dict(found.get(TOPICS, {})),
        _flat(found.get(EPOCHS, {})),
        bool(found.get(INITIAL, False)),
        None if base is None else from_json(base),
    )


def _by_topic(numbers: Mapping[TopicPartition, int]) -> dict[str, Any]:
    found: dict[str, dict[str, int]] = {}
    for one in sorted(numbers):
        found.setdefault(one.topic, {})[str(one.partition)] = numbers[one]
    return found


def _flat(found: Mapping[str, Mapping[str, int]]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, int(number)): int(value)
        for topic, each in found.items()
        for number, value in each.items()
    }


def offsets_behind_latest(progress: Any, source: int = 0) -> dict[str, float]:
    """Return how far a query is behind the log, as the Kafka source tells in its metrics.

    Args:
        progress: Of `StreamingQuery.lastProgress`, or what a listener is given.
        source: Which of the query's sources is meant, when it has several.

    Returns:
        ``minOffsetsBehindLatest``, ``maxOffsetsBehindLatest`` and ``avgOffsetsBehindLatest``
        over the partitions; empty if the query has no progress yet.
    """
    told = _source(progress, source)
    latest, end = (_json(told, name) for name in ("latestOffset", "endOffset"))
    if latest is None or end is None:
        return {}
    ends = from_json(end).offsets
    behind = [
        max(offset - ends.get(one, 0), 0) for one, offset in from_json(latest).offsets.items()
    ]
    if not behind:
        return {}
    return {
        "minOffsetsBehindLatest": min(behind),
        "maxOffsetsBehindLatest": max(behind),
        "avgOffsetsBehindLatest": sum(behind) / len(behind),
    }


def _source(progress: Any, source: int) -> Any:
    if progress is None:
        return None
    sources = progress["sources"] if isinstance(progress, Mapping) else progress.sources
    return sources[source]


def _json(told: Any, name: str) -> Mapping[str, Any] | None:
    found = told.get(name) if isinstance(told, Mapping) else getattr(told, name, None)
    return json.loads(found) if isinstance(found, str) and found != "null" else found
