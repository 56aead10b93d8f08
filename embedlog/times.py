"""Times as programs and users write them: datetimes, texts, milliseconds, and "so long ago"."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta

from embedlog.errors import InvalidConfigError

When = date | timedelta | str | int
"""A time: a datetime, date or ISO 8601 text (without a zone in UTC), milliseconds since 1970, or
how long ago: a timedelta or a text such as ``"90m"``, ``"2d"`` or ``"PT1H30M"``."""

_ISO = r"P(?:(\d+)W)?(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?"
_SHORT = r"(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?"
_UNITS = ("weeks", "days", "hours", "minutes", "seconds")
_EPOCH = datetime.fromtimestamp(0, UTC)
_MILLISECOND = timedelta(milliseconds=1)


def parse_duration(text: str) -> timedelta | None:
    """Parse a duration in ISO 8601 or in short form, without months and years.

    Returns None if the text is not a duration.

    Raises:
        OverflowError: The duration is too long.

    >>> parse_duration("1h30m") == parse_duration("PT90M") == timedelta(minutes=90)
    True
    """
    match = re.fullmatch(_ISO, text, re.IGNORECASE) or re.fullmatch(_SHORT, text, re.IGNORECASE)
    if match is None or not any(match.groups()):
        return None
    numbers = map(float, match.groups(default="0"))
    return timedelta(**dict(zip(_UNITS, numbers, strict=True)))


def milliseconds(when: When, now_ms: int) -> int:
    """Return a time in milliseconds since 1970.

    Args:
        when: The time.
        now_ms: The current time, from which "so long ago" counts back.

    Raises:
        ValueError, TypeError: The value is no time.

    >>> milliseconds("1970-01-01T00:00:02Z", 0), milliseconds("2s", 5000)
    (2000, 3000)
    """
    if isinstance(when, str):
        when = _parse(when)
    if isinstance(when, timedelta):
        return now_ms - when // _MILLISECOND
    if isinstance(when, datetime):
        return to_timestamp(when)
    if isinstance(when, date):
        return to_timestamp(datetime(when.year, when.month, when.day, tzinfo=UTC))
    if isinstance(when, bool) or not isinstance(when, int):
        raise TypeError(
            f"A time must be a datetime, date, timedelta, str or milliseconds, got {when!r}"
        )
    return when


def time_argument(name: str, when: When, now_ms: int) -> int:
    """Return a time that a program passes as the argument of a name, in milliseconds.

    Raises:
        InvalidConfigError: The value is no time.
    """
    try:
        return milliseconds(when, now_ms)
    except (ValueError, TypeError) as error:
        raise InvalidConfigError(f"{name} is not a time: {error}") from None


def to_timestamp(moment: datetime) -> int:
    """Return a time as a timestamp; without a zone it is UTC, as in Kafka's tools.

    Rounds up: no record before ``moment`` has this timestamp or a later one.
    """
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return -((_EPOCH - aware) // _MILLISECOND)


def _parse(text: str) -> datetime | timedelta:
    try:
        duration = parse_duration(text)
        return datetime.fromisoformat(text) if duration is None else duration
    except (ValueError, OverflowError):
        raise ValueError(
            f"A time must be like 2026-01-31T12:00:00Z, or 90m for 90 minutes ago, got {text!r}"
        ) from None
