"""Types of arguments of the command line: counts, times, durations, partitions."""

from __future__ import annotations

import argparse
import threading
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime, timedelta


def count(text: str) -> int:
    """Parse a number of records or events, or an offset."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return number


def port(text: str) -> int:
    """Parse a port of TCP; 0 is a free one."""
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"must be a number up to 65535, got {text!r}")
    return int(text)


def workers(text: str) -> int:
    """Parse a number of processes."""
    if not text.isdecimal() or not 0 < int(text) <= 100:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 100, got {text!r}")
    return int(text)


def listen(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, or the port alone.

    >>> listen("0.0.0.0:9092"), listen("[::1]:0"), listen("9092")
    (('0.0.0.0', 9092), ('::1', 0), ('127.0.0.1', 9092))
    """
    host, colon, number = text.rpartition(":")
    if not host and (colon or not number.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, or the port alone, got {text!r}")
    return host.strip("[]") or "127.0.0.1", port(number)


def seconds(text: str) -> float:
    """Parse a number of seconds to wait."""
    return _positive(text, "seconds", threading.TIMEOUT_MAX)


def rate(text: str) -> float:
    """Parse a number of bytes per second."""
    return _positive(text, "bytes", inf)


def _positive(text: str, unit: str, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= most:
        raise argparse.ArgumentTypeError(f"must be a positive number of {unit}, got {text!r}")
    return number


def topic(text: str) -> tuple[str, list[int]]:
    """Parse TOPIC or TOPIC:0,1; no partitions mean all."""
    name, colon, partitions = text.partition(":")
    numbers = partitions.split(",") if colon else []
    if not all(map(str.isdecimal, numbers)):
        raise argparse.ArgumentTypeError(f"must be TOPIC or TOPIC:0,1, got {text!r}")
    return name, list(map(int, numbers))


def place(text: str) -> tuple[int, int]:
    """Parse P:N, a partition and an offset."""
    partition, _, offset = text.partition(":")
    if not (partition.isdecimal() and offset.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be PARTITION:OFFSET, got {text!r}")
    return int(partition), int(offset)


def column_names(text: str) -> list[str]:
    """Parse names of columns; a name with a comma cannot be written."""
    columns = [name.strip() for name in text.split(",")]
    if not all(columns):
        raise argparse.ArgumentTypeError(f"must be NAME or NAME,NAME, got {text!r}")
    return columns


# Commands without these arguments do not load `datetime`.


def moment(text: str) -> datetime:
    """Parse a time, with or without a zone."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a date and time like 2024-01-31T12:00:00Z, got {text!r}"
        ) from None


_TIMES = "a date and time like 2024-01-31T12:00:00Z, or how long ago, like 90m or 2d"


def time(text: str) -> datetime:
    """Parse a time, or how long ago it was."""
    return _time(text, _TIMES)


def point(text: str) -> int | datetime:
    """Parse an offset, or a time."""
    return int(text) if text.isdecimal() else _time(text, f"an offset, {_TIMES}")


def _time(text: str, choices: str) -> datetime:
    from datetime import UTC, datetime

    from embedlog.times import parse_duration

    try:
        ago = parse_duration(text)
        return datetime.fromisoformat(text) if ago is None else datetime.now(UTC) - ago
    except OverflowError:
        raise argparse.ArgumentTypeError(f"is too long ago: {text}") from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {choices}, got {text!r}") from None


def duration(text: str) -> timedelta:
    """Parse a duration in ISO 8601 or in short form, without months and years."""
    from embedlog.times import parse_duration

    try:
        parsed = parse_duration(text)
    except OverflowError:
        raise argparse.ArgumentTypeError(f"is too long: {text}") from None
    if parsed is None:
        raise argparse.ArgumentTypeError(
            f"must be a duration like PT1H30M, 90m or 2d, got {text!r}"
        )
    return parsed
