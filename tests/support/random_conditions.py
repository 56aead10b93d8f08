"""Random conditions on the columns of a reader, as text for Spark and as functions of a row.

SQL has three truth values; a function returns None for the third.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
Truth = bool | None

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_COLUMNS = ("topic", "partition", "offset", "offset", "timestamp", "timestamp")
_LONGS = (-(1 << 63), (1 << 63) - 1, 0, -1, 1 << 31)
_TIMES = (0, -1, -1000, -62_135_596_800_000_000, 253_402_300_799_999_999)
"""In microseconds: about 1970, and the first and last that Spark can show."""


class Condition(NamedTuple):
    """A condition of a query."""

    sql: str
    holds: Callable[[Row], Truth]


def random_condition(dice: random.Random, rows: Sequence[Row], depth: int = 2) -> Condition:
    """Return a condition whose values are those of some of the rows, or near them."""
    kind = dice.randrange(10)
    if depth and kind < 3:
        return _both(*(random_condition(dice, rows, depth - 1) for _ in range(2)))
    if depth and kind < 5:
        return _either(*(random_condition(dice, rows, depth - 1) for _ in range(2)))
    if depth and kind == 5:
        return _negated(random_condition(dice, rows, depth - 1))
    column, row = dice.choice(_COLUMNS), dice.choice(rows)
    return dice.choice([_comparison, _comparison, _comparison, _listed, _special])(
        dice, column, rows if column != "topic" else [row]
    )


def _comparison(dice: random.Random, column: str, rows: Sequence[Row]) -> Condition:
    value = _near(dice, column, dice.choice(rows)[column])
    symbol, text = dice.choice(list(_OPERATORS)), _literal(dice, column, value)
    compare = _OPERATORS[symbol]
    if dice.random() < 0.1:
        return Condition(f"{column} {symbol} null", lambda row: None)
    if dice.random() < 0.3:
        return Condition(f"{text} {symbol} {column}", lambda row: compare(value, row[column]))
    return Condition(f"{column} {symbol} {text}", lambda row: compare(row[column], value))


def _listed(dice: random.Random, column: str, rows: Sequence[Row]) -> Condition:
    size = dice.choice([1, 2, 5, 20, 100, 101])
    values = [_near(dice, column, dice.choice(rows)[column]) for _ in range(size)]
    texts = [_literal(dice, column, value) for value in values]
    has_null = dice.random() < 0.2
    if has_null:
        texts.insert(dice.randrange(len(texts)), "null")

    def holds(row: Row) -> Truth:
        return True if row[column] in values else None if has_null else False

    return Condition(f"{column} in ({', '.join(texts)})", holds)


def _special(dice: random.Random, column: str, rows: Sequence[Row]) -> Condition:
    """Return a condition that needs a cast, or that says nothing or little about metadata."""
    number = dice.choice(rows)["offset"]
    odd = int(dice.random() < 0.5)
    bounds = sorted(dice.choice(rows)["timestamp"] for _ in range(2))
    day = dice.choice(rows)["timestamp"] // 86_400_000_000
    low, high = (_literal(dice, "timestamp", bound) for bound in bounds)
    return dice.choice(
        [
            Condition(f"cast(offset as string) = '{number}'", lambda row: row["offset"] == number),
            Condition(f"offset = '{number}'", lambda row: row["offset"] == number),
            Condition(f"offset > {number}.5", lambda row: row["offset"] > number),
            Condition(f"offset % 2 = {odd}", lambda row: row["offset"] % 2 == odd),
            Condition(f"cast(partition as bigint) = {odd}L", lambda row: row["partition"] == odd),
            Condition(f"partition <= {odd}.0D", lambda row: row["partition"] <= odd),
            Condition("topic like 'a%'", lambda row: row["topic"] == "a"),
            Condition("value is null", lambda row: row["value"] is None),
            Condition("key is not null and offset is not null", lambda row: row["key"] is not None),
            Condition("headers is null", lambda row: row["headers"] is None),
            Condition("timestamp is null", lambda row: False),
            Condition(f"offset <=> {number}", lambda row: row["offset"] == number),
            Condition("offset <=> null", lambda row: False),
            Condition(f"timestampType = {odd}", lambda row: row["timestampType"] == odd),
            Condition(
                "length(value) > 3",
                lambda row: None if row["value"] is None else len(row["value"]) > 3,
            ),
            Condition(
                f"timestamp between {low} and {high}",
                lambda row: bounds[0] <= row["timestamp"] <= bounds[1],
            ),
            Condition(
                f"cast(timestamp as date) = date_from_unix_date({day})",
                lambda row: row["timestamp"] // 86_400_000_000 == day,
            ),
        ]
    )


def _near(dice: random.Random, column: str, value: Any) -> Any:
    if column == "topic":
        return dice.choice([value, "a", "b", "", "c"])
    if column == "timestamp":
        step = dice.choice([0, 0, 0, -1, 1, -1000, 1000, 999, -5000, 5000, 60_000_000])
        return dice.choice(_TIMES) if dice.random() < 0.08 else value + step
    if column == "offset" and dice.random() < 0.08:
        return dice.choice(_LONGS)
    return value + dice.choice([0, 0, 0, -1, 1, 2, -10, 10])


def _literal(dice: random.Random, column: str, value: Any) -> str:
    if column == "topic":
        return f"'{value}'"
    if column == "timestamp":
        return f"timestamp_micros({_long(value)})"
    return _long(value) if column == "offset" or dice.random() < 0.5 else str(value)


def _long(value: int) -> str:
    # The least long has no literal: a sign is an operator.
    return f"{value}L" if value > -(1 << 63) else f"({value + 1}L - 1L)"


def _both(left: Condition, right: Condition) -> Condition:
    def holds(row: Row) -> Truth:
        truths = left.holds(row), right.holds(row)
        return False if False in truths else None if None in truths else True

    return Condition(f"({left.sql}) and ({right.sql})", holds)


def _either(left: Condition, right: Condition) -> Condition:
    def holds(row: Row) -> Truth:
        truths = left.holds(row), right.holds(row)
        return True if True in truths else None if None in truths else False

    return Condition(f"({left.sql}) or ({right.sql})", holds)


def _negated(part: Condition) -> Condition:
    def holds(row: Row) -> Truth:
        truth = part.holds(row)
        return None if truth is None else not truth

    return Condition(f"not ({part.sql})", holds)
