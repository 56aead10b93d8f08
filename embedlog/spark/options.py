"""The options of ``format("embedlog")``: those of Spark's Kafka connector, and a few of embedlog's.

A field of `SourceOptions` or `SinkOptions` is the only declaration of its option.  What can be
checked without opening the log is checked here, so a wrong option is an error of `load`, not of
the first action.

Spark passes the names in lower case, whatever the user wrote; so the names in messages are
spelled as in the documentation, and only an unknown name is spelled as it came.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, NamedTuple, NoReturn, Self, TypeVar

from embedlog import times
from embedlog.errors import InvalidConfigError
from embedlog.root.location import directory_of

BROKER_OPTIONS = (
    *("groupIdPrefix", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
    *("kafkaConsumer.pollTimeoutMs", "useDeprecatedOffsetFetching"),
)
"""Options about brokers, which a reader accepts without effect, as all of ``kafka.*`` are."""
QUERY_OPTIONS = ("checkpointLocation", "queryName")
"""Options of a writer that belong to one streaming query, not to a table."""
TOPIC_OPTIONS = ("topic", "subscribe", "subscribePattern", "assign")
"""Options that say which topics a reader or a table is about."""
EARLIEST, LATEST = -2, -1
"""Kafka's numbers for the two ends of a partition; they are understood, never stored."""
_WORDS = {"earliest": EARLIEST, "latest": LATEST}
_MAX_TIME_MS = (1 << 63) - 1
_A_TIME = "a time such as 2026-01-31T12:00:00Z, or milliseconds since 1970"
"""Describes for messages what `time_in_ms` reads."""
_UNITS = {"us": 0.001, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000}
_UNITS |= {"h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)\s*([a-z]*)")

T = TypeVar("T")
Side = Literal["reader", "writer", "table"]

_logger = logging.getLogger("embedlog.spark")


class OptionReader:
    """Options whose names may be in any case; a value of the wrong type is an error.

    Each method returns None for an option that is not set.

    Raises:
        InvalidConfigError: From each method, for a value that it cannot read.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self.names = sorted(map(str, options))
        self._values = {str(name).lower(): str(value) for name, value in options.items()}

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def root(self, name: str = "path") -> str:
        """Return the absolute path of the log root."""
        path = (self.raw(name) or "").strip()
        if not path:
            raise InvalidConfigError(
                f"The option {name!r} is missing",
                todo="Set it to the log root in place of kafka.bootstrap.servers: "
                ".option('path', '/data/log').",
            )
        return directory_of(path)

    def raw(self, name: str) -> str | None:
        """Return a text unchanged, even if it is empty."""
        return self._values.get(name.lower())

    def text(self, name: str) -> str | None:
        """Return a text that must not be empty."""
        value = self.raw(name)
        if value is not None and not value.strip():
            raise InvalidConfigError(
                f"The option {name!r} is empty", todo="Give it a value or leave it out."
            )
        return None if value is None else value.strip()

    def choice(self, name: str, *words: str) -> str | None:
        """Return one of some words, in any case."""
        value = self.text(name)
        if value is not None and value.lower() not in words:
            self._fail(name, f"one of {', '.join(words)}")
        return value and value.lower()

    def flag(self, name: str) -> bool | None:
        """Return ``true`` or ``false``."""
        word = self.choice(name, "true", "false")
        return None if word is None else word == "true"

    def count(self, name: str) -> int | None:
        """Return a whole number of at least 1."""
        return self.parsed(name, "a whole number above 0", lambda text: _at_least(1, int(text)))

    def number(self, name: str) -> float | None:
        """Return a number of at least 0."""
        return self.parsed(name, "a number of at least 0", lambda text: _at_least(0, float(text)))

    def version(self, name: str) -> int | None:
        """Return a number of at least 0 without a fraction; it may be written as 1.0."""
        wanted = "a number of at least 0 without a fraction"
        return self.json(name, wanted, lambda number: _whole_number(number, 0))

    def duration_ms(self, name: str) -> int | None:
        """Return the milliseconds of a duration such as ``90s``, as Spark reads them."""

        def parse(text: str) -> int:
            match = _DURATION.fullmatch(text.lower())
            if match is None:
                raise ValueError
            return int(int(match[1]) * _UNITS[match[2] or "ms"])

        return self.parsed(name, "a duration such as 500ms, 10s, 15m or 1h", parse)

    def json(self, name: str, wanted: str, convert: Callable[[Any], T]) -> T | None:
        """Return the result of ``convert`` for a JSON text."""
        return self.parsed(name, wanted, lambda text: convert(json.loads(text)))

    def parsed(self, name: str, wanted: str, parse: Callable[[str], T]) -> T | None:
        """Return the result of ``parse`` for a text; ``wanted`` describes valid texts."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return parse(text)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, re.error):
            return self._fail(name, wanted)

    def _fail(self, name: str, wanted: str) -> NoReturn:
        raise InvalidConfigError(f"The option {name!r} must be {wanted}, got {self.raw(name)!r}")


def _at_least(minimum: int, number: T) -> T:
    if number < minimum:  # type: ignore[operator]
        raise ValueError
    return number


def _whole_number(value: Any, minimum: int) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError
    return _at_least(minimum, int(value))


def _absolute_path(path: str) -> str:
    """Return one spelling of a path on this host, which may begin with ``file://`` or ``~``."""
    return os.path.abspath(os.path.expanduser(path.removeprefix("file://")))


def time_in_ms(value: str | int) -> int:
    """Return a time in milliseconds since 1970: a number of them, a date, or how long ago.

    A text without a zone is in UTC.

    Raises:
        ValueError: The value is no time, or not one of a record's.

    >>> time_in_ms("1700000000000"), time_in_ms("1970-01-02")
    (1700000000000, 86400000)
    """
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    ms = times.milliseconds(value, time.time_ns() // 1_000_000)
    if not 0 <= ms <= _MAX_TIME_MS:
        raise ValueError
    return ms


# What declares an option


def _option(
    names: str, read: Callable[..., Any], default: Any = None, *, query: str | None = None
) -> Any:
    """Declare a field of `SourceOptions` or `SinkOptions`.

    Args:
        names: The option, or the options that make up the field together.
        read: Called with an `OptionReader` and the names; None from it means the default.
        default: The value if the option is not set.
        query: The only kind of query that has the option: "batch" or "stream".
    """
    metadata = {"names": names.split(), "read": read, "query": query}
    return field(default=default, metadata=metadata)


def _one_of(*words: str) -> Callable[[OptionReader, str], str | None]:
    return lambda reader, name: reader.choice(name, *words)


def _values(options: type[Any], reader: OptionReader) -> dict[str, Any]:
    """Return the values of the fields whose options are set."""
    values = {
        each.name: each.metadata["read"](reader, *each.metadata["names"])
        for each in fields(options)
        if each.metadata
    }
    return {name: value for name, value in values.items() if value is not None}


def _names_of(options: type[Any], query: str | None = None) -> tuple[str, ...]:
    """Return the options that a class declares; with ``query`` those of that kind only."""
    return tuple(
        name
        for each in fields(options)
        if each.metadata and query in (None, each.metadata["query"])
        for name in each.metadata["names"]
    )


def _check_names(reader: OptionReader, side: Side) -> tuple[str, ...]:
    """Return the options about brokers, which have no effect.

    Raises:
        InvalidConfigError: An option is unknown; the message names the nearest known one.
    """
    known = _KNOWN[side]
    by_lower = {name.lower(): name for name in known}
    ineffective = {} if side == "writer" else {name.lower() for name in BROKER_OPTIONS}
    ignored = []
    for given in reader.names:
        lower = given.lower()
        name = _SPELLINGS.get(lower, given)
        if lower.startswith("kafka.") or lower in ineffective:
            ignored.append(name)
        elif lower not in by_lower:
            todo = f"The options are {', '.join(known)}."
            if side == "table" and name in QUERY_OPTIONS:
                todo = "Set it on each streaming query that writes."
            elif lower in _SPELLINGS:
                todo = f"That is an option of a {'writer' if side == 'reader' else 'reader'}."
            elif nearest := difflib.get_close_matches(lower, by_lower, n=1, cutoff=0.5):
                todo = f"Did you mean {by_lower[nearest[0]]!r}?"
            raise InvalidConfigError(f"A {side} has no option {name!r}", todo=todo)
    return tuple(ignored)


def warn_of_ignored(ignored: Sequence[str]) -> None:
    """Log which options about brokers were set."""
    if ignored:
        _logger.warning(
            "These options are about brokers and have no effect: %s", ", ".join(ignored)
        )


# The source


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


def _subscription(reader: OptionReader, *names: str) -> TopicSelection:
    specified = sorted(name for name in names if reader.text(name) is not None)
    if len(specified) != 1:
        problem = f"{' and '.join(specified)} are set" if specified else "none is set"
        raise InvalidConfigError(
            f"Exactly one of the options {', '.join(sorted(names))} must be set, but {problem}",
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


def _bound(
    reader: OptionReader, by_offset: str, time_for_all: str, by_time: str
) -> OffsetBound | None:
    """Return the bound of one side: a time for all before times for each before offsets."""
    time_ms = reader.parsed(time_for_all, _A_TIME, time_in_ms)
    wanted = f'JSON such as {{"flights": {{"0": "2026-01-31"}}}} with {_A_TIME}'
    times = reader.json(by_time, wanted, lambda json: _by_topic(json, _time))
    offsets = None
    word = (reader.text(by_offset) or "").lower()
    if word in _WORDS:
        offsets = OffsetBound("offset", _WORDS[word])
    elif word:
        wanted = 'earliest, latest, or JSON such as {"flights": {"0": 23, "1": -2}}'
        by_topic = reader.json(by_offset, wanted, lambda json: _by_topic(json, _offset))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of a reader, checked; made by `parse`."""

    path: str = _option("path", OptionReader.root, MISSING)
    """The log root, on this host and on those of the executors."""
    subscription: TopicSelection = _option(" ".join(TOPIC_OPTIONS), _subscription, MISSING)
    values: str = _option("values", _one_of("columns", "struct"), "columns")
    """Whether the columns of typed topics are "columns" of the query, or one "struct"."""
    starting_offsets: OffsetBound | None = _option(
        "startingOffsets startingTimestamp startingOffsetsByTimestamp", _bound
    )
    """None is Kafka's default: the earliest for a batch, the latest for a stream."""
    ending_offsets: OffsetBound | None = _option(
        "endingOffsets endingTimestamp endingOffsetsByTimestamp", _bound, query="batch"
    )
    snapshot: str | None = _option("snapshot", OptionReader.text, query="batch")
    """Read the records of a snapshot, by its name, and no others."""
    no_timestamp: str = _option(
        "startingOffsetsByTimestampStrategy", _one_of("error", "latest"), "error"
    )
    """What to do for a partition without a record at or after the starting time: raise an
    "error", or start at its end ("latest")."""
    include_headers: bool = _option("includeHeaders", OptionReader.flag, False)
    include_tombstones: bool = _option("includeTombstones", OptionReader.flag, False)
    """Whether a query of typed topics has the tombstones, and the column that marks them."""
    fail_on_data_loss: bool = _option("failOnDataLoss", OptionReader.flag, True)
    min_partitions: int | None = _option("minPartitions", OptionReader.count)
    max_records_per_partition: int | None = _option("maxRecordsPerPartition", OptionReader.count)
    max_bytes_per_partition: int = _option("maxBytesPerPartition", OptionReader.count, 128 << 20)
    max_offsets_per_trigger: int | None = _option(
        "maxOffsetsPerTrigger", OptionReader.count, query="stream"
    )
    min_offsets_per_trigger: int | None = _option(
        "minOffsetsPerTrigger", OptionReader.count, query="stream"
    )
    max_trigger_delay_ms: int = _option(
        "maxTriggerDelay", OptionReader.duration_ms, 15 * 60_000, query="stream"
    )
    max_bytes_per_trigger: int | None = _option(
        "maxBytesPerTrigger", OptionReader.count, query="stream"
    )
    """Approximate: a micro-batch ends where the index has an entry."""
    commit_to_group: str | None = _option("commitToGroup", OptionReader.text, query="stream")
    visibility: str | None = _option("visibility", _one_of("durable", "append"))
    """Read what is "durable" or all that is published ("append"); None is the query's default."""
    read_lease_ms: int = _option("readLeaseMs", OptionReader.count, 3_600_000)
    """How long retention and compaction wait for a query that does not renew its lease."""
    ignored: tuple[str, ...] = ()
    """Options that were set and have no effect, for a warning."""
    specified: tuple[str, ...] = ()
    """Known options that were set, by their canonical names."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Check a reader's options, whose names may be in any case.

        Raises:
            InvalidConfigError: An option is unknown, is one that Kafka's source refuses, or
                has an invalid value.
        """
        reader = OptionReader(options)
        for name in (
            *("auto.offset.reset", "enable.auto.commit", "interceptor.classes"),
            *("key.deserializer", "value.deserializer"),
        ):
            if f"kafka.{name}" in reader:
                raise InvalidConfigError(f"Kafka option 'kafka.{name}' is not supported")
        ignored = _check_names(reader, "reader")
        specified = tuple(name for name in _KNOWN["reader"] if name in reader)
        parsed = cls(**_values(cls, reader), ignored=ignored, specified=specified)
        minimum, maximum = parsed.min_offsets_per_trigger, parsed.max_offsets_per_trigger
        if minimum is not None and maximum is not None and minimum > maximum:
            raise InvalidConfigError(
                f"minOffsetsPerTrigger {minimum} is more than maxOffsetsPerTrigger {maximum}"
            )
        return parsed

    @property
    def limit(self) -> tuple[str, int] | None:
        """The kind and the number of the limit of each micro-batch to show to Spark.

        Spark passes it back unless it is to be ignored.  It cannot combine two limits, so the
        source applies the options instead.
        """
        limits = {
            "rows": self.max_offsets_per_trigger,
            "bytes": self.max_bytes_per_trigger,
            "min_rows": self.min_offsets_per_trigger,
        }
        return next(((kind, limit) for kind, limit in limits.items() if limit is not None), None)

    def check_batch(self) -> None:
        """Warn of the options that have no effect in a batch query.

        Raises:
            InvalidConfigError: The query would start at the latest or end at the earliest offset.
        """
        starting, ending = self.starting_offsets, self.ending_offsets
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
        for name in _names_of(SourceOptions, "stream"):
            if name in self.specified:
                _logger.warning("The option %r is for streams and has no effect here", name)

    def check_stream(self) -> None:
        """Refuse the options that a streaming query cannot have.

        Raises:
            InvalidConfigError: The options say where the query ends.
        """
        for name in _names_of(SourceOptions, "batch"):
            if name in self.specified:
                raise InvalidConfigError(
                    f"The option {name!r} is for batch queries; a streaming query has no end",
                    todo="Use a trigger, such as availableNow=True.",
                )


# The sink


def _application(reader: OptionReader, name: str) -> str | None:
    if reader.raw(name) == "":
        raise InvalidConfigError(
            f"The option {name!r} must not be empty", todo="Leave it out or name the application."
        )
    return reader.raw(name)


def _location(reader: OptionReader, name: str) -> str:
    location = reader.raw(name) or ""
    if location and "://" not in location.removeprefix("file://"):
        # One spelling, so that the location is recognised when it is used again.
        return _absolute_path(location)
    return location


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The options of a writer, checked; made by `parse`."""

    path: str = _option("path", OptionReader.root, MISSING)
    """The log root, on this host and on those of the executors."""
    topic: str | None = _option("topic", OptionReader.raw)
    """The topic of all rows, whatever their column says."""
    durability: str = _option("durability", _one_of("fsync", "os"), "fsync")
    """What a publication survives.  Spark's checkpoint records that the micro-batch is done,
    so by default the publication survives a power cut, as the checkpoint may."""
    compression: str | None = _option("compression", _one_of("none", "lz4", "zstd"))
    """Of the batches; None is the topic's."""
    lock_timeout: float = _option("lockTimeout", OptionReader.number, 10.0)
    """Seconds to wait for a partition that another process has locked."""
    txn_app_id: str | None = _option("txnAppId", _application)
    """The application under whose name versions are counted, in each topic separately."""
    txn_version: int | None = _option("txnVersion", OptionReader.version)
    """The version of a batch write, which is skipped unless it is above the last one."""
    allow_restart: bool = _option("allowRestart", OptionReader.flag, False)
    """Publish although the query started over and has published to the topic before, which
    may then hold records twice."""
    must_exist: bool = _option("mustExist", OptionReader.flag, False)
    """Create no log where there is none, such as where a disk is not mounted."""
    checkpoint_location: str = _option("checkpointLocation", _location, "")
    """The path of the checkpoint, if it was set on the writer: a query that starts over
    there is recognised by it."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Check a writer's options, whose names may be in any case.

        Raises:
            InvalidConfigError: An option is unknown, is one that Kafka's sink refuses, or has
                an invalid value.
        """
        reader = OptionReader(options)
        for part in ("key", "value"):
            if f"kafka.{part}.serializer" in reader:
                raise InvalidConfigError(
                    f"Kafka option '{part}.serializer' is not supported as {part}s are serialized "
                    "with ByteArraySerializer"
                )
        warn_of_ignored(_check_names(reader, "writer"))
        parsed = cls(**_values(cls, reader))
        # A stream needs no version: it counts its batches.  `check_batch` requires one.
        if parsed.txn_version is not None and parsed.txn_app_id is None:
            raise InvalidConfigError(
                "txnVersion is set without txnAppId", todo="Set txnAppId to the application's name."
            )
        return parsed

    def check_batch(self, overwrite: bool) -> None:
        """Refuse what a batch write cannot do.

        Raises:
            InvalidConfigError: The mode is ``overwrite``, or ``txnAppId`` has no version.
        """
        if overwrite:
            raise InvalidConfigError(
                "A log is appended to and never overwritten",
                todo='Use .mode("append"); to replace the records, delete the topic first.',
            )
        if self.txn_app_id is not None and self.txn_version is None:
            raise InvalidConfigError(
                "txnAppId is set without txnVersion",
                todo="Number the writes: in foreachBatch the batch id is the version.",
            )


_KNOWN: dict[Side, tuple[str, ...]] = {
    "reader": _names_of(SourceOptions),
    # Kafka's sink accepts includeHeaders, too: the column is written whenever there is one.
    # Spark passes its own options of a streaming query on to the sink.
    "writer": (*_names_of(SinkOptions), "includeHeaders", "queryName"),
}
_SPELLINGS = {
    name.lower(): name for name in (*_KNOWN["reader"], *_KNOWN["writer"], *BROKER_OPTIONS)
}
_KNOWN["table"] = tuple(
    name
    for name in dict.fromkeys((*_KNOWN["reader"], *_KNOWN["writer"]))
    if name not in QUERY_OPTIONS
)


# Tables, which are read and written


def check_table(options: Mapping[str, str]) -> SourceOptions:
    """Check all options of a table, and return those of its reader.

    Raises:
        InvalidConfigError: An option is unknown or has an invalid value.
    """
    parsed = SourceOptions.parse(reader_options(options))
    # The topic for writing need not be known: many tables are only read.
    SinkOptions.parse(_select(options, _KNOWN["writer"]))
    return parsed


def check_catalog(options: Mapping[str, str]) -> str:
    """Check the options that all tables of a catalog have, and return the path of the log.

    Raises:
        InvalidConfigError: An option is unknown, belongs to one table or has an invalid value.
    """
    reader = OptionReader(options)
    for name in TOPIC_OPTIONS:
        if name in reader:
            raise InvalidConfigError(
                f"A catalog has no option {name!r}", todo="Its tables are the topics of the log."
            )
    return check_table({**options, "subscribe": "any"}).path


def reader_options(
    options: Mapping[str, str], of_query: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the options with which a query reads a table, which are not those of a writer.

    Args:
        options: The options of the table.
        of_query: Options of the query, which take precedence; the reader checks them.

    Raises:
        InvalidConfigError: An option of the table is unknown.
    """
    _check_names(OptionReader(options), "table")
    merged = _merge(_select(options, (*_KNOWN["reader"], *BROKER_OPTIONS)), of_query or {})
    if any(name in OptionReader(merged) for name in TOPIC_OPTIONS if name != "topic"):
        # Then the topic is that of writes.
        merged = {name: value for name, value in merged.items() if name.lower() != "topic"}
    return merged


def writer_options(
    options: Mapping[str, str], of_query: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the options with which a query writes to a table; ``topic`` is one of them.

    Args:
        options: The options of the table.
        of_query: Options of the query, which take precedence; the writer checks them.

    Raises:
        InvalidConfigError: An option of the table is wrong, or it has no topic to write to,
            because it reads several or a pattern.
    """
    selection = SourceOptions.parse(reader_options(options)).subscription
    merged = _merge(_select(options, _KNOWN["writer"]), of_query or {})
    if "topic" not in OptionReader(merged):
        topics = selection.topics or tuple(selection.assigned or ())
        if len(topics) != 1:
            which = f"the topics {', '.join(topics)}" if topics else "the topics of a pattern"
            raise InvalidConfigError(
                f"The table reads {which}, and has no topic to write to",
                todo="Set the option 'topic' of the table, or of the write.",
            )
        merged["topic"] = topics[0]
    return merged


def _merge(options: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return both; of names that differ in case only, the others'."""
    replaced = {name.lower() for name in others}
    kept = {name: value for name, value in options.items() if name.lower() not in replaced}
    return {**kept, **others}


def _select(options: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Return the options of these names, and those about brokers: both sides check them."""
    known = {name.lower() for name in names}
    return {
        name: value
        for name, value in options.items()
        if name.lower() in known or name.lower().startswith("kafka.")
    }
