"""Reads the options of ``format("embedlog")`` by name and type, for the source and the sink.

Spark passes the names in lower case, whatever the user wrote; so the names in messages are
spelled as in the documentation, and only an unknown name is spelled as it came.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from embedlog import times
from embedlog.errors import InvalidConfigError
from embedlog.root.location import directory_of

READER_OPTIONS = (
    *("path", "topic", "subscribe", "subscribePattern", "assign", "values"),
    *("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"),
    *("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    *("startingOffsetsByTimestampStrategy", "includeHeaders", "includeTombstones"),
    "failOnDataLoss",
    *("minPartitions", "maxRecordsPerPartition", "maxBytesPerPartition"),
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger"),
    *("commitToGroup", "visibility", "readLeaseMs"),
)
WRITER_OPTIONS = (
    *("path", "topic", "durability", "compression", "lockTimeout"),
    *("txnAppId", "txnVersion", "allowRestart", "mustExist"),
    # Kafka's sink accepts it, too: the column is written whenever there is one.
    "includeHeaders",
    # Spark passes its own options of a streaming query on to the sink.
    *("checkpointLocation", "queryName"),
)
BROKER_OPTIONS = (
    *("groupIdPrefix", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
    *("kafkaConsumer.pollTimeoutMs", "useDeprecatedOffsetFetching"),
)
"""Options about brokers, which a reader accepts without effect, as all of ``kafka.*`` are."""
_SPELLINGS = {name.lower(): name for name in (*READER_OPTIONS, *WRITER_OPTIONS, *BROKER_OPTIONS)}

_MAX_TIME_MS = (1 << 63) - 1
A_TIME = "a time such as 2026-01-31T12:00:00Z, or milliseconds since 1970"
"""Describes for messages what `time_in_ms` reads."""

T = TypeVar("T")
N = TypeVar("N", int, float)

_UNITS = {"us": 0.001, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000}
_UNITS |= {"h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)\s*([a-z]*)")


class OptionReader:
    """Options whose names may be in any case; a value of the wrong type is an error.

    Each method returns None, or its default, for an option that is not set.

    Raises:
        InvalidConfigError: From each method, for a value that it cannot read.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._names = sorted(map(str, options))
        self._values = {str(name).lower(): str(value) for name, value in options.items()}

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def check_names(
        self,
        reader_or_writer: str,
        known: Sequence[str],
        ineffective: Sequence[str] = (),
        hints: Mapping[str, str] | None = None,
    ) -> tuple[str, ...]:
        """Return the options about brokers, which have no effect.

        Args:
            reader_or_writer: For messages: "reader" or "writer".
            known: The names of all options.
            ineffective: Options besides ``kafka.*`` that are accepted without effect.
            hints: What to do about some unknown names, in place of the nearest known name.

        Raises:
            InvalidConfigError: An option is unknown; the message names the nearest known one.
        """
        by_lower = {name.lower(): name for name in known}
        ignored = []
        for given in self._names:
            lower = given.lower()
            name = _SPELLINGS.get(lower, given)
            if lower.startswith("kafka.") or lower in map(str.lower, ineffective):
                ignored.append(name)
            elif lower not in by_lower:
                todo = f"The options are {', '.join(known)}."
                if lower in _SPELLINGS:
                    other = "writer" if reader_or_writer == "reader" else "reader"
                    todo = f"That is an option of a {other}."
                elif nearest := difflib.get_close_matches(lower, by_lower, n=1, cutoff=0.5):
                    todo = f"Did you mean {by_lower[nearest[0]]!r}?"
                todo = (hints or {}).get(lower, todo)
                raise InvalidConfigError(f"A {reader_or_writer} has no option {name!r}", todo=todo)
        return tuple(ignored)

    def root(self) -> str:
        """Return the absolute path of the log root."""
        path = self._values.get("path", "").strip()
        if not path:
            raise InvalidConfigError(
                "The option 'path' is missing",
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

    def flag(self, name: str, default: bool = False) -> bool:
        """Return ``true`` or ``false``."""
        return self.choice(name, str(default).lower(), "true", "false") == "true"

    def choice(self, name: str, default: str, *words: str) -> str:
        """Return one of some words, in any case."""
        value = (self.text(name) or default).lower()
        if value not in (default, *words):
            self._fail(name, f"one of {', '.join(dict.fromkeys(filter(None, (default, *words))))}")
        return value

    def count(self, name: str) -> int | None:
        """Return a whole number of at least 1."""
        return self._number(name, "a whole number above 0", int, 1)

    def number(self, name: str) -> float | None:
        """Return a number of at least 0."""
        return self._number(name, "a number of at least 0", float)

    def version(self, name: str) -> int | None:
        """Return a number of at least 0 without a fraction; it may be written as 1.0."""
        return self._number(name, "a number of at least 0 without a fraction", _whole_number)

    def timestamp_ms(self, name: str) -> int | None:
        """Return the milliseconds since 1970 of a time; see `time_in_ms`."""
        return self.parsed(name, A_TIME, time_in_ms)

    def _number(
        self, name: str, wanted: str, convert: Callable[[str], N], minimum: int = 0
    ) -> N | None:
        def parse(text: str) -> N:
            number = convert(text)
            if number < minimum:
                raise ValueError
            return number

        return self.parsed(name, wanted, parse)

    def duration_ms(self, name: str, default: int) -> int:
        """Return the milliseconds of a duration such as ``90s``, as Spark reads them."""
        value = self.parsed(name, "a duration such as 500ms, 10s, 15m or 1h", _duration_ms)
        return default if value is None else value

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


def absolute_path(path: str) -> str:
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


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _duration_ms(text: str) -> int:
    match = _DURATION.fullmatch(text.lower())
    if match is None:
        raise ValueError
    return int(int(match[1]) * _UNITS[match[2] or "ms"])
