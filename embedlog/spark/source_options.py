"""Options of the source: those of Spark's Kafka source, and a few of embedlog's own.

Everything that can be checked without opening the log is checked here, so a
wrong option is an error of `load`, not of the first action.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from embedlog.errors import InvalidConfigError
from embedlog.spark.option_reader import (
    A_TIME,
    BROKER_OPTIONS,
    READER_OPTIONS,
    OptionReader,
    time_in_ms,
)

EARLIEST, LATEST = -2, -1
"""Kafka's numbers for the two ends of a partition; they are understood, never stored."""
_WORDS = {"earliest": EARLIEST, "latest": LATEST}

UNSUPPORTED_BY_KAFKA = (
    *("kafka.auto.offset.reset", "kafka.enable.auto.commit", "kafka.interceptor.classes"),
    *("kafka.key.deserializer", "kafka.value.deserializer"),
)
STREAM_ONLY = (
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
    *("maxBytesPerTrigger", "commitToGroup"),
)
BATCH_ONLY = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")


class TopicSelection(NamedTuple):
    """The partitions to read; exactly one of the three is set."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: Mapping[str, tuple[int, ...]] | None = None


class OffsetBound(NamedTuple):
    """Where a query starts or ends: one number for all partitions, or one for each."""

    by: str = "offset"
    """Whether the numbers are offsets (with `EARLIEST` and `LATEST`) or a "time" in ms."""
    for_all: int | None = None
    by_topic: Mapping[str, int | Mapping[int, int]] = {}
    """A number for each topic, or one for each of its partitions."""

    def get(self, topic: str, partition: int) -> int | None:
        """Return the number for a partition; None if it is not named."""
        if self.for_all is not None:
            return self.for_all
        number = self.by_topic.get(topic)
        return number.get(partition) if isinstance(number, Mapping) else number

    def contains(self, number: int) -> bool:
        """Whether the bound of any partition is this number; no time is negative."""
        return self.for_all == number or any(
            number in (bound.values() if isinstance(bound, Mapping) else (bound,))
            for bound in self.by_topic.values()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of a reader, checked; made by `parse`."""

    path: str
    """The log root, on this host and on those of the executors."""
    subscription: TopicSelection
    starting_offsets: OffsetBound | None = None
    """None is Kafka's default: the earliest for a batch, the latest for a stream."""
    ending_offsets: OffsetBound | None = None
    latest_if_no_timestamp: bool = False
    """Start at the end of a partition without a record at or after the starting time; else fail."""
    include_headers: bool = False
    include_tombstones: bool = False
    """Whether a query of typed topics has the tombstones, and the column that marks them."""
    values: str = "columns"
    """Whether the columns of typed topics are "columns" of the query, or one "struct"."""
    fail_on_data_loss: bool = True
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    max_bytes_per_partition: int = 128 << 20
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    """Approximate: a micro-batch ends where the index has an entry."""
    max_trigger_delay_ms: int = 15 * 60_000
    commit_to_group: str | None = None
    visibility: str | None = None
    """Read what is "durable" or all that is published ("append"); None is the query's default."""
    read_lease_ms: int = 3_600_000
    """How long retention and compaction wait for a query that does not renew its lease."""
    ignored: tuple[str, ...] = ()
    """Options that were set and have no effect, for a warning."""
    specified: tuple[str, ...] = ()
    """Known options that were set, by their canonical names."""


def parse(options: Mapping[str, str]) -> SourceOptions:
    """Check a reader's options, whose names may be in any case.

    Raises:
        InvalidConfigError: An option is unknown, is one that Kafka's source refuses, or
            has an invalid value.
    """
    reader = OptionReader(options)
    for name in UNSUPPORTED_BY_KAFKA:
        if name in reader:
            raise InvalidConfigError(f"Kafka option '{name}' is not supported")
    ignored = reader.check_names("reader", READER_OPTIONS, BROKER_OPTIONS)
    strategy = reader.choice("startingOffsetsByTimestampStrategy", "error", "latest")
    parsed = SourceOptions(
        path=reader.root(),
        subscription=_subscription(reader),
        starting_offsets=_bound(reader, "starting"),
        ending_offsets=_bound(reader, "ending"),
        latest_if_no_timestamp=strategy == "latest",
        include_headers=reader.flag("includeHeaders"),
        include_tombstones=reader.flag("includeTombstones"),
        values=reader.choice("values", "columns", "struct"),
        fail_on_data_loss=reader.flag("failOnDataLoss", True),
        min_partitions=reader.count("minPartitions"),
        max_records_per_partition=reader.count("maxRecordsPerPartition"),
        max_bytes_per_partition=reader.count("maxBytesPerPartition") or 128 << 20,
        max_offsets_per_trigger=reader.count("maxOffsetsPerTrigger"),
        min_offsets_per_trigger=reader.count("minOffsetsPerTrigger"),
        max_bytes_per_trigger=reader.count("maxBytesPerTrigger"),
        max_trigger_delay_ms=reader.duration_ms("maxTriggerDelay", 15 * 60_000),
        commit_to_group=reader.text("commitToGroup"),
        visibility=reader.choice("visibility", "", "durable", "append") or None,
        read_lease_ms=reader.count("readLeaseMs") or 3_600_000,
        ignored=ignored,
        specified=tuple(name for name in READER_OPTIONS if name in reader),
    )
    minimum, maximum = parsed.min_offsets_per_trigger, parsed.max_offsets_per_trigger
    if minimum is not None and maximum is not None and minimum > maximum:
        raise InvalidConfigError(
            f"minOffsetsPerTrigger {minimum} is more than maxOffsetsPerTrigger {maximum}"
        )
    return parsed


def _subscription(reader: OptionReader) -> TopicSelection:
    names = ("assign", "subscribe", "subscribePattern", "topic")
    specified = [name for name in names if reader.text(name) is not None]
    if len(specified) != 1:
        problem = f"{' and '.join(specified)} are set" if specified else "none is set"
        raise InvalidConfigError(
            f"Exactly one of the options {', '.join(names)} must be set, but {problem}",
            todo="For example: .option('subscribe', 'flights').",
        )
    wanted = "a regular expression"
    pattern = reader.parsed("subscribePattern", wanted, lambda text: re.compile(text).pattern)
    assigned = reader.json("assign", 'JSON such as {"flights": [0, 1]}', _assigned)
    topic = reader.text("topic")
    if topic is not None:
        return TopicSelection((topic,))
    topics = [name.strip() for name in (reader.text("subscribe") or "").split(",") if name.strip()]
    if specified == ["subscribe"] and not topics:
        raise InvalidConfigError("The option 'subscribe' names no topic")
    return TopicSelection(tuple(dict.fromkeys(topics)), pattern, assigned)


def _assigned(value: Any) -> dict[str, tuple[int, ...]]:
    assigned = {}
    for topic, partitions in value.items():
        if not partitions or not all(type(number) is int and number >= 0 for number in partitions):
            raise ValueError
        assigned[topic] = tuple(sorted(set(partitions)))
    if not assigned:
        raise ValueError
    return assigned


def _bound(reader: OptionReader, side: str) -> OffsetBound | None:
    """Return the bound of one side: a time for all before times for each before offsets."""
    time_ms = reader.timestamp_ms(f"{side}Timestamp")
    wanted = f'JSON such as {{"flights": {{"0": "2026-01-31"}}}} with {A_TIME}'
    times = reader.json(f"{side}OffsetsByTimestamp", wanted, lambda json: _by_topic(json, _time))
    offsets = None
    word = (reader.text(f"{side}Offsets") or "").lower()
    if word in _WORDS:
        offsets = OffsetBound("offset", _WORDS[word])
    elif word:
        wanted = 'earliest, latest, or JSON such as {"flights": {"0": 23, "1": -2}}'
        by_topic = reader.json(f"{side}Offsets", wanted, lambda json: _by_topic(json, _offset))
        offsets = OffsetBound("offset", None, by_topic or {})
    if time_ms is not None:
        return OffsetBound("time", time_ms)
    return offsets if times is None else OffsetBound("time", None, times)


def _by_topic(json: Any, number_of: Callable[[Any], int]) -> dict[str, int | dict[int, int]]:
    bounds: dict[str, int | dict[int, int]] = {}
    for topic, bound in json.items():
        if isinstance(bound, dict):
            bounds[topic] = {int(part): number_of(value) for part, value in bound.items()}
        else:
            # One number for the whole topic, as newer versions of Kafka's source allow.
            bounds[topic] = number_of(bound)
    if not bounds:
        raise ValueError
    return bounds


def _offset(value: Any) -> int:
    if isinstance(value, str):
        return _WORDS[value.lower()]
    return _whole_number(value, EARLIEST)


def _time(value: Any) -> int:
    return time_in_ms(value if isinstance(value, str) else _whole_number(value, 0))


def _whole_number(value: Any, minimum: int) -> int:
    if isinstance(value, bool) or int(value) != value or value < minimum:
        raise ValueError
    return int(value)


def check_batch(options: SourceOptions) -> list[str]:
    """Return the options that have no effect in a batch query.

    Raises:
        InvalidConfigError: The query would start at the latest or end at the earliest offset.
    """
    starting, ending = options.starting_offsets, options.ending_offsets
    if starting is not None and starting.contains(LATEST):
        raise InvalidConfigError(
            "A batch query cannot start at the latest offset",
            todo="Use a stream, or set startingOffsets to earliest or to offsets.",
        )
    if ending is not None and ending.contains(EARLIEST):
        raise InvalidConfigError(
            "A batch query cannot end at the earliest offset",
            todo="Set endingOffsets to latest or to offsets.",
        )
    return [name for name in STREAM_ONLY if name in options.specified]


def check_stream(options: SourceOptions) -> None:
    """Refuse the options that a streaming query cannot have.

    Raises:
        InvalidConfigError: The options say where the query ends.
    """
    for name in BATCH_ONLY:
        if name in options.specified:
            raise InvalidConfigError(
                f"The option {name!r} is for batch queries; a streaming query has no end",
                todo="Use a trigger, such as availableNow=True.",
            )
