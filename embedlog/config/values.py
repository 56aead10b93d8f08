"""Kinds of values: how settings are declared, and what values they take.

Each check takes the user's value and returns what the field holds, or raises a `ValueError`
that says what the value must be.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from embedlog.serializers import Action, Field, adapt

LONG_MAX = (1 << 63) - 1
"""Kafka's "never" and "no limit"."""

INT_MAX = (1 << 31) - 1

_FALSE_TRUE = {"false": False, "true": True}


def setting_text(value: object) -> str | None:
    """Return the value of a setting as Kafka's brokers write it; None if it has none."""
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


class Setting(NamedTuple):
    """A setting, as it is declared."""

    default: Any
    check: Callable[[Any], object]
    only_default: bool = False
    """Whether other values are refused."""


def checked(default: object, check: Callable[[Any], object]) -> Any:
    """Declare a setting with its check."""
    return Setting(default, check)


def number(default: int | float, minimum: float, maximum: float = LONG_MAX) -> Any:
    """Declare a number between two bounds, both included, of the type of the default."""

    def check(value: object) -> int | float:
        # kafka-python writes infinity where Java writes its largest number.
        unlimited = value == inf and maximum >= INT_MAX
        parsed = maximum if unlimited else _parse_number(type(default), value)
        if not minimum <= parsed <= maximum:
            unbounded = maximum in (LONG_MAX, inf)
            raise ValueError(
                f"at least {minimum}" if unbounded else f"between {minimum} and {maximum}"
            )
        return type(default)(parsed)

    return checked(default, check)


def _parse_number(kind: type, value: object) -> int | float:
    wanted = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or (kind is int and isinstance(value, float) and value % 1):
        raise ValueError(wanted)
    try:
        return kind(value)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(wanted) from None


def switch(default: bool | None) -> Any:
    """Declare a boolean; if the default is None, other settings decide."""

    def check(value: object) -> bool | None:
        if value is None and default is None:
            return None
        parsed = _FALSE_TRUE.get(str(value).lower())
        if parsed is None:
            raise ValueError("true or false")
        return parsed

    return checked(default, check)


def choice(default: str, *others: str) -> Any:
    """Declare a choice of words; the first is the default."""
    words = (default, *others)

    def check(value: object) -> str:
        if str(value) not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return str(value)

    return checked(default, check)


def accepted(default: object, accepts: Callable[[Any], object], what: str) -> Any:
    """Declare a setting that is stored as it is passed, if ``accepts`` returns a true value."""

    def check(value: object) -> object:
        if not accepts(value):
            raise ValueError(what)
        return value

    return checked(default, check)


def only(default: bool | int, why: str) -> Any:
    """Declare a setting of which embedlog has only the default; others are refused."""
    words = str(default).lower()

    def check(value: object) -> bool | int:
        if str(value).strip().lower() != words:
            raise ValueError(f"{words}, since {why}")
        return default

    return Setting(default, check, only_default=True)


def serializer(action: Action, field: Field) -> Any:
    """Declare a serializer or deserializer in any of its forms; or None, the default."""

    def check(value: object) -> object:
        # Whether pickle is allowed depends on another setting.
        adapt(value, action, field, allow_pickle=True)
        return value

    return checked(None, check)


def optional_text() -> Any:
    """Declare a str that is not empty, or None, the default."""
    what = "a str of at least one character"
    return accepted(None, lambda value: value is None or (isinstance(value, str) and value), what)


def label() -> Any:
    """Declare a str; by default it is empty."""
    return accepted("", lambda value: isinstance(value, str), "a str")


def compression(value: object) -> str:
    """Accept the name of a codec; None and "uncompressed" are "none".

    Arrow has no gzip and no snappy for batches: gzip is stored as zstd, snappy as lz4.
    """
    codecs = {"None": "none", "none": "none", "uncompressed": "none", "lz4": "lz4", "zstd": "zstd"}
    codecs |= {"gzip": "zstd", "snappy": "lz4"}
    if str(value) not in codecs:
        raise ValueError("one of none, gzip, snappy, lz4, zstd (gzip means zstd, snappy lz4)")
    return codecs[str(value)]


def optional_ms(value: object) -> int | None:
    """Accept milliseconds; None, infinity and -1 (Kafka 0.8) mean without a limit."""
    if value is None or value in (inf, -1, "-1"):
        return None
    parsed = _parse_number(int, value)
    if parsed < 0:
        raise ValueError("None or at least 0")
    return int(parsed)
