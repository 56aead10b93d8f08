"""Words of the command line that stand for something: times, durations, partitions."""

from __future__ import annotations

import argparse
import re
import threading
from datetime import datetime, timedelta

_ISO = re.compile(
    r"P(?:(\d+)W)?(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.IGNORECASE
)
_SHORT = re.compile(
    r"(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", re.IGNORECASE
)


def seconds(text: str) -> float:
    """Return how long to wait."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds to wait")
    return number


def topic(text: str) -> tuple[str, list[int]]:
    """Return a topic, and the partitions that are named: none stand for all."""
    name, colon, rest = text.partition(":")
    numbers = rest.split(",") if colon else []
    if not all(map(str.isdecimal, numbers)):
        raise argparse.ArgumentTypeError(f"{text!r} is not TOPIC or TOPIC:0,1")
    return name, list(map(int, numbers))


def moment(text: str) -> datetime:
    """Return a time, with or without a zone."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        todo = "like 2024-01-31T12:00:00Z"
        raise argparse.ArgumentTypeError(f"{text!r} is no date and time {todo}") from None


def duration(text: str) -> timedelta:
    """Return a duration, as ISO 8601 or in short; months and years have no length."""
    found = _ISO.fullmatch(text) or _SHORT.fullmatch(text)
    if found is None or not any(found.groups()):
        raise argparse.ArgumentTypeError(f"{text!r} is no duration like PT1H30M, 90m or 2d")
    units = ("weeks", "days", "hours", "minutes", "seconds")
    pairs = zip(units, found.groups(default="0"), strict=True)
    try:
        return timedelta(**{unit: float(number) for unit, number in pairs})
    except OverflowError:
        raise argparse.ArgumentTypeError(f"{text} is longer than there is time") from None
