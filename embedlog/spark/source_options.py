"""What a reader can be told: the options of Spark's Kafka source, and a few of our own.

Everything that can be refused without a look at the log is refused here, so
that a wrong option is an error of `load`, not of the first action.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

from embedlog.errors import InvalidConfigError
from embedlog.spark.option_values import refuse, root

T = TypeVar("T")

EARLIEST, LATEST = -2, -1
"""Kafka's numbers for the ends of a partition; never kept, only understood."""
_WORDS = {"earliest": EARLIEST, "latest": LATEST}

KNOWN = (
    *("path", "subscribe", "subscribePattern", "assign"),
    *("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"),
    *("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    *("startingOffsetsByTimestampStrategy", "includeHeaders", "failOnDataLoss"),
    *("minPartitions", "maxRecordsPerPartition", "maxBytesPerPartition"),
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger"),
    *("commitToGroup", "visibility", "readLeaseMs"),
)
MEANINGLESS = (
    *("groupIdPrefix", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
    *("kafkaConsumer.pollTimeoutMs", "useDeprecatedOffsetFetching"),
)
"""About brokers: taken, and without effect."""
REFUSED_BY_KAFKA = (
    *("kafka.auto.offset.reset", "kafka.enable.auto.commit", "kafka.interceptor.classes"),
    *("kafka.key.deserializer", "kafka.value.deserializer"),
)
TRIGGERS = (
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
    *("maxBytesPerTrigger", "commitToGroup"),
)
"""What only a stream has."""

_UNITS = {"us": 0.001, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000}
_DURATION = re.compile(r"(\d+)\s*([a-z]*)")


class TopicSelection(NamedTuple):
    """Which partitions to read; exactly one of the three says so."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: Mapping[str, tuple[int, ...]] | None = None


class OffsetBound(NamedTuple):
    """Where to begin or to end: a number for all partitions, or for each topic or partition."""

    by: str = "offset"
    """Whether the numbers are offsets (with `EARLIEST` and `LATEST`), or times in ms."""
    everywhere: int | None = None
    each: Mapping[str, int | Mapping[int, int]] = {}

    def of(self, topic: str, partition: int) -> int | None:
        """Return the number for a partition; None if it is not named."""
        if self.everywhere is not None:
            return self.everywhere
        given = self.each.get(topic)
        return given.get(partition) if isinstance(given, Mapping) else given

    def has(self, number: int) -> bool:
        """Whether the number stands anywhere in it."""
        each = [one.values() if isinstance(one, Mapping) else (one,) for one in self.each.values()]
        return self.everywhere == number or any(number in some for some in each)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What a reader does; made by `parse`."""

    path: str
    """The log's directory, on this host and on those of the executors."""

    subscription: TopicSelection
    starting: OffsetBound | None = None
    """None is Kafka's default: the earliest for a batch, the latest for a stream."""

    ending: OffsetBound | None = None
    latest_if_none: bool = False
    """What to do where no record is as young as a starting time: begin at the end, or fail."""

    include_headers: bool = False
    fail_on_data_loss: bool = True
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    max_bytes_per_partition: int = 128 << 20
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_bytes: int | None = None
    """Of one micro-batch, about: it is cut where the index has an entry."""

    max_delay_ms: int = 15 * 60_000
    commit_to_group: str | None = None
    visibility: str | None = None
    """Read up to what is "durable", or what is published ("append"); None is the default."""

    lease_ms: int = 3_600_000
    """How long retention and compaction wait for a query that does not renew its lease."""

    ignored: tuple[str, ...] = ()
    """What was given and has no effect, for a warning."""

    given: tuple[str, ...] = ()
    """Known options that were given, by their right names."""


def parse(options: Mapping[str, str]) -> SourceOptions:
    """Check a reader's options, whose names may be in any case.

    Raises:
        InvalidConfigError: One is unknown (the nearest known one is named), is not
            supported by Kafka's source either, or has a value that says nothing.
    """
    given = {str(name).lower(): str(value) for name, value in options.items()}
    ignored = _without_broker(given, options)
    read = OptionReader(given)
    made = SourceOptions(
        path=root(given),
        subscription=_subscription(read),
        starting=_bound(read, "starting"),
        ending=_bound(read, "ending"),
        latest_if_none=read.word("startingOffsetsByTimestampStrategy", "error", "latest")
        == "latest",
        include_headers=read.flag("includeHeaders", False),
        fail_on_data_loss=read.flag("failOnDataLoss", True),
        min_partitions=read.count("minPartitions"),
        max_records_per_partition=read.count("maxRecordsPerPartition"),
        max_bytes_per_partition=read.count("maxBytesPerPartition") or 128 << 20,
        max_offsets=read.count("maxOffsetsPerTrigger"),
        min_offsets=read.count("minOffsetsPerTrigger"),
        max_bytes=read.count("maxBytesPerTrigger"),
        max_delay_ms=read.duration("maxTriggerDelay", 15 * 60_000),
        commit_to_group=read.text("commitToGroup"),
        visibility=read.word("visibility", "", "durable", "append") or None,
        lease_ms=read.count("readLeaseMs") or 3_600_000,
        ignored=ignored,
        given=tuple(name for name in KNOWN if name.lower() in given),
    )
    _check_limits(made)
    return made


def _without_broker(given: dict[str, str], options: Mapping[str, str]) -> tuple[str, ...]:
    """Refuse what is unknown; take out and return what is about brokers."""
    refused = {name.lower(): name for name in REFUSED_BY_KAFKA}
    meaningless = {name.lower() for name in MEANINGLESS}
    known = {name.lower() for name in KNOWN}
    ignored = []
    for spelling in sorted(map(str, options)):
        name = spelling.lower()
        if name in refused:
            raise InvalidConfigError(f"Kafka option '{refused[name]}' is not supported")
        if name.startswith("kafka.") or name in meaningless:
            ignored.append(spelling)
            del given[name]
        elif name not in known:
            hint = "that is an option of the writer; a reader has 'subscribe'"
            refuse("a reader", spelling, KNOWN, hint if name == "topic" else "")
    return tuple(ignored)


def _check_limits(made: SourceOptions) -> None:
    least, most = made.min_offsets, made.max_offsets
    if least is not None and most is not None and least > most:
        raise InvalidConfigError(
            f"minOffsetsPerTrigger {least} is more than maxOffsetsPerTrigger {most}"
        )


class OptionReader:
    """Reads values by their names; says whose value it is that says nothing."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def text(self, name: str) -> str | None:
        """Return a text that is not empty, if it is given."""
        found = self._given.get(name.lower())
        if found is not None and not found.strip():
            raise InvalidConfigError(f"the option {name!r} is empty")
        return None if found is None else found.strip()

    def flag(self, name: str, default: bool) -> bool:
        """Return a yes or no."""
        return self.word(name, str(default).lower(), "true", "false") == "true"

    def word(self, name: str, default: str, *words: str) -> str:
        """Return one of some words."""
        found = (self.text(name) or default).lower()
        if found not in (default, *words):
            self._wrong(name, f"one of {', '.join(dict.fromkeys((default, *words)))}".rstrip(", "))
        return found

    def count(self, name: str) -> int | None:
        """Return a number above zero, if it is given."""
        return self._parsed(name, "a whole number above 0", _count)

    def instant(self, name: str) -> int | None:
        """Return a number of milliseconds since 1970, if it is given."""
        return self._parsed(name, "milliseconds since 1970", _instant)

    def duration(self, name: str, default: int) -> int:
        """Return milliseconds of a text such as ``90s``, as Spark reads them."""
        found = self._parsed(name, "a duration such as 500ms, 10s, 15m or 1h", _duration)
        return default if found is None else found

    def json(self, name: str, wanted: str, check: Callable[[Any], T]) -> T | None:
        """Return what a JSON text says, if it is given."""
        return self._parsed(name, wanted, lambda text: check(json.loads(text)))

    def _parsed(self, name: str, wanted: str, parse: Callable[[str], T]) -> T | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            return parse(text)
        except (ValueError, TypeError, AttributeError, KeyError):
            return self._wrong(name, wanted)

    def _wrong(self, name: str, wanted: str) -> NoReturn:
        given = self._given[name.lower()]
        raise InvalidConfigError(f"the option {name!r} is {given!r}, which is not {wanted}")


def _count(text: str) -> int:
    if int(text) <= 0:
        raise ValueError
    return int(text)


def _instant(text: str) -> int:
    if int(text) < 0:
        raise ValueError
    return int(text)


def _duration(text: str) -> int:
    found = _DURATION.fullmatch(text.lower())
    if found is None:
        raise ValueError
    number, unit = int(found[1]), found[2] or "ms"
    return int(number * (86_400_000 if unit == "d" else _UNITS[unit]))


# Which partitions


def _subscription(read: OptionReader) -> TopicSelection:
    names = ("assign", "subscribe", "subscribePattern")
    given = [name for name in names if read.text(name) is not None]
    if len(given) != 1:
        told = " and ".join(given) + " are given" if given else "none is given"
        raise InvalidConfigError(
            f"one of the options {', '.join(names)} says what to read, and {told}",
            todo="for example .option('subscribe', 'flights')",
        )
    pattern = read._parsed("subscribePattern", "a regular expression", _pattern)
    assigned = read.json("assign", 'JSON such as {"flights": [0, 1]}', _assigned)
    topics = [name.strip() for name in (read.text("subscribe") or "").split(",") if name.strip()]
    if given == ["subscribe"] and not topics:
        raise InvalidConfigError("the option 'subscribe' names no topic")
    return TopicSelection(tuple(dict.fromkeys(topics)), pattern, assigned)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError from error
    return text


def _assigned(found: Any) -> dict[str, tuple[int, ...]]:
    made = {}
    for topic, numbers in found.items():
        if not numbers or not all(type(one) is int and one >= 0 for one in numbers):
            raise ValueError
        made[topic] = tuple(sorted(set(numbers)))
    if not made:
        raise ValueError
    return made


# From where to where


def _bound(read: OptionReader, side: str) -> OffsetBound | None:
    """Return the bound of one side: a time for all beats times for each, which beat offsets."""
    time = read.instant(f"{side}Timestamp")
    wanted = 'JSON such as {"flights": {"0": 1700000000000}}'
    times = read.json(f"{side}OffsetsByTimestamp", wanted, lambda found: _each(found, 0))
    offsets = _offsets(read, f"{side}Offsets")
    if time is not None:
        return OffsetBound("time", time)
    return offsets if times is None else OffsetBound("time", None, times)


def _offsets(read: OptionReader, name: str) -> OffsetBound | None:
    text = read.text(name)
    if text is None:
        return None
    if text.lower() in _WORDS:
        return OffsetBound("offset", _WORDS[text.lower()])
    wanted = 'earliest, latest, or JSON such as {"flights": {"0": 23, "1": -2}}'
    each = read.json(name, wanted, lambda found: _each(found, EARLIEST))
    return OffsetBound("offset", None, each or {})


def _each(found: Any, least: int) -> dict[str, int | dict[int, int]]:
    made: dict[str, int | dict[int, int]] = {}
    for topic, given in found.items():
        if isinstance(given, dict):
            made[topic] = {int(number): _number(value, least) for number, value in given.items()}
        else:
            # The whole topic, as newer versions of Kafka's source allow.
            made[topic] = _number(given, least)
    if not made:
        raise ValueError
    return made


def _number(value: Any, least: int) -> int:
    if isinstance(value, str) and least == EARLIEST:
        return _WORDS[value.lower()]
    if isinstance(value, bool) or int(value) != value or value < least:
        raise ValueError
    return int(value)


# What only one kind of query may be told


def check_batch(options: SourceOptions) -> list[str]:
    """Return what is ignored in a batch query.

    Raises:
        InvalidConfigError: It would begin at the end, or end at the beginning.
    """
    starting, ending = options.starting, options.ending
    if starting is not None and starting.by == "offset" and starting.has(LATEST):
        raise InvalidConfigError("a batch query cannot start at the latest offset")
    if ending is not None and ending.by == "offset" and ending.has(EARLIEST):
        raise InvalidConfigError("a batch query cannot end at the earliest offset")
    return [name for name in TRIGGERS if name in options.given]


def check_stream(options: SourceOptions) -> None:
    """Refuse what a streaming query cannot be told.

    Raises:
        InvalidConfigError: It has no end.
    """
    for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
        if name in options.given:
            raise InvalidConfigError(
                f"the option {name!r} is for batch queries; a streaming query has no end",
                todo="use a trigger, such as availableNow=True",
            )
