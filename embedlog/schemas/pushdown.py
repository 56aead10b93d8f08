"""Filters of Polars as filters of pyarrow, which the log can use to skip records.

A translated filter may keep more rows than Polars' own, but never fewer: what has no exact
counterpart in pyarrow is left out, and the caller applies Polars' filter to what is left.  The
rules that differ are those for NaN, which Polars takes for the largest number and equal to itself.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog.display import need
from embedlog.lazy import pa, pc

if TYPE_CHECKING:
    import polars

Node = Any
"""A part of an expression in Polars' JSON."""
MAX_BYTES = 1 << 18
"""A longer filter, such as one with a list of many values, is not translated: it would take longer
than it saves."""
_NEGATED = {
    "Eq": "NotEq",
    "NotEq": "Eq",
    "Lt": "GtEq",
    "GtEq": "Lt",
    "Gt": "LtEq",
    "LtEq": "Gt",
    "EqValidity": "NotEqValidity",
    "NotEqValidity": "EqValidity",
}
_FLIPPED = {"Lt": "Gt", "Gt": "Lt", "LtEq": "GtEq", "GtEq": "LtEq"}


class PushedFilter(NamedTuple):
    """A filter as the log can use it."""

    rows: Any
    """A `pyarrow.compute.Expression` that is true in every row that Polars keeps."""
    batches: Any
    """The same without the rule for NaN, by which no batch could be skipped: statistics have no
    bounds for a column with a NaN, so that it is never skipped by them."""


def pushed_filter(predicate: polars.Expr, columns: Mapping[str, Any]) -> PushedFilter | None:
    """Return the part of a Polars filter that the log can use.

    Args:
        predicate: The filter, with literals of the types of the columns, as Polars passes it to
            an IO source.
        columns: The Arrow type of each column that may be in the result.

    Returns:
        None if no part of the filter has a counterpart.
    """
    exceptions = need("polars.exceptions")
    try:
        with warnings.catch_warnings():
            # The format is deprecated for storage, since another version may not read it.
            warnings.simplefilter("ignore")
            if len(predicate.meta.serialize()) > MAX_BYTES:
                return None
            node = json.loads(predicate.meta.serialize(format="json"))
            rows, batches = (_Translator(columns, nan).may_be(node, True) for nan in (True, False))
            return None if rows is None else PushedFilter(rows, batches)
    except (exceptions.PolarsError, pa.ArrowException, ValueError, TypeError, RecursionError):
        # Such as a filter with a Python function.
        return None


class _Translator:
    """Translates the nodes of one filter.

    Each method returns an expression that is true in every row in which the node has a wanted
    result, or None if it could be any row.

    Args:
        columns: The types of the columns.
        nan: Whether NaN is larger than any number.
    """

    def __init__(self, columns: Mapping[str, Any], nan: bool) -> None:
        self._columns, self._nan = columns, nan

    def may_be(self, node: Node, wanted: bool) -> Any:
        match node:
            case {"Column": str(name)}:
                return self._flag(name, wanted)
            case {"BinaryExpr": {"left": left, "op": "And" | "LogicalAnd", "right": right}}:
                parts = self.may_be(left, wanted), self.may_be(right, wanted)
                return _both(*parts) if wanted else _either(*parts)
            case {"BinaryExpr": {"left": left, "op": "Or" | "LogicalOr", "right": right}}:
                parts = self.may_be(left, wanted), self.may_be(right, wanted)
                return _either(*parts) if wanted else _both(*parts)
            case {"BinaryExpr": {"left": {"Column": str(name)}, "op": str(op), "right": constant}}:
                return self._comparison(name, op, constant, wanted)
            case {"BinaryExpr": {"left": constant, "op": str(op), "right": {"Column": str(name)}}}:
                return self._comparison(name, _FLIPPED.get(op, op), constant, wanted)
            case {"Function": {"input": inputs, "function": {"Boolean": function}}}:
                return self._function(function, inputs, wanted)
            case {"Function": {"input": inputs, "function": {"StringExpr": "StartsWith"}}}:
                return self._starts_with(inputs) if wanted else None
        return None

    def _flag(self, name: str, wanted: bool) -> Any:
        data_type = self._columns.get(name)
        if data_type is None or not pa.types.is_boolean(data_type):
            return None
        return pc.field(name) if wanted else ~pc.field(name)

    def _comparison(self, name: str, op: str, constant: Node, wanted: bool) -> Any:
        if op not in _NEGATED:
            return None
        op = op if wanted else _NEGATED[op]
        data_type = self._columns.get(name)
        values = None if data_type is None else _values(constant, data_type)
        if values is None or len(values) != 1 or values.null_count or _nans(values):
            return None
        field, value, types = pc.field(name), values[0], pa.types
        if types.is_boolean(data_type) and not op.startswith(("Eq", "NotEq")):
            return None
        match op:
            case "Eq" | "EqValidity":
                return field == value
            case "NotEq":
                return field != value
            case "NotEqValidity":
                return (field != value) | field.is_null()
            case "Lt":
                return field < value
            case "LtEq":
                return field <= value
        larger = field > value if op == "Gt" else field >= value
        return larger | field.is_nan() if self._nan and types.is_floating(data_type) else larger

    def _function(self, function: Node, inputs: list[Node], wanted: bool) -> Any:
        match function, inputs:
            case "Not", [node]:
                return self.may_be(node, not wanted)
            case (("IsNull" | "IsNotNull"), [{"Column": str(name)}]) if name in self._columns:
                is_null = (function == "IsNull") == wanted
                return pc.field(name).is_null() if is_null else pc.field(name).is_valid()
            case {"IsBetween": {"closed": closed}}, [{"Column": str(name)}, low, high]:
                above = "GtEq" if closed in ("Both", "Left") else "Gt"
                below = "LtEq" if closed in ("Both", "Right") else "Lt"
                parts = (
                    self._comparison(name, above, low, wanted),
                    self._comparison(name, below, high, wanted),
                )
                return _both(*parts) if wanted else _either(*parts)
            case {"IsIn": {"nulls_equal": bool(nulls)}}, [{"Column": str(name)}, constant]:
                return self._is_in(name, constant, nulls, wanted)
        return None

    def _is_in(self, name: str, constant: Node, nulls_equal: bool, wanted: bool) -> Any:
        data_type = self._columns.get(name)
        values = None if data_type is None else _values(constant, data_type)
        if values is None or _nans(values):
            return None
        field, items = pc.field(name), values.drop_null()
        if pa.types.is_floating(items.type) and pc.any(pc.equal(items, 0)).as_py():
            # Arrow looks values up by their bits; for Polars, 0.0 and -0.0 are equal.
            items = pa.concat_arrays([items, pa.array([0.0, -0.0], items.type)])
        is_in = field.isin(items)
        if not wanted:
            return ~is_in
        return is_in | field.is_null() if nulls_equal and values.null_count else is_in

    def _starts_with(self, inputs: list[Node]) -> Any:
        match inputs:
            case [{"Column": str(name)}, constant] if name in self._columns:
                values = _values(constant, self._columns[name])
                if values is None or len(values) != 1 or values.null_count:
                    return None
                if not pa.types.is_string(values.type):
                    return None
                field, prefix = pc.field(name), values[0]
                # The first part is for statistics.
                return (field >= prefix) & pc.starts_with(field, pattern=prefix.as_py())
        return None


def _both(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return right if left is None else left
    return left & right


def _either(left: Any, right: Any) -> Any:
    return None if left is None or right is None else left | right


def _values(node: Node, data_type: Any) -> Any:
    """Return a constant, or the items of a constant list, as an array of a column's type.

    Returns None if it is no constant, or not of values that such a column can hold.
    """
    if not _comparable(data_type) or not _is_constant(node):
        return None
    polars = need("polars")
    expression = polars.Expr.deserialize(json.dumps(node).encode(), format="json")
    values = polars.select(expression).to_series().to_arrow()
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = values[0].values if len(values) == 1 and values.null_count == 0 else None
    if values is None:
        return None
    types = pa.types
    if types.is_timestamp(data_type) and types.is_timestamp(values.type):
        # Arrow would take a time without a zone for one in UTC.
        return (
            None if (values.type.tz is None) != (data_type.tz is None) else values.cast(data_type)
        )
    same_kind = any(is_kind(data_type) and is_kind(values.type) for is_kind in _kinds())
    return values.cast(data_type) if same_kind or types.is_null(values.type) else None


def _is_constant(node: Node) -> bool:
    match node:
        case {"Literal": _}:
            return True
        case {"Cast": {"expr": inner}}:
            return _is_constant(inner)
    return False


def _kinds() -> tuple[Any, ...]:
    types = pa.types

    def is_text(data_type: Any) -> bool:
        return bool(
            types.is_string(data_type)
            or types.is_large_string(data_type)
            or types.is_string_view(data_type)
        )

    def is_binary(data_type: Any) -> bool:
        return bool(
            types.is_binary(data_type)
            or types.is_large_binary(data_type)
            or types.is_binary_view(data_type)
        )

    return (
        *(types.is_boolean, types.is_integer, types.is_floating, types.is_decimal),
        *(types.is_date, types.is_timestamp, types.is_time, types.is_duration),
        *(is_text, is_binary),
    )


def _comparable(data_type: Any) -> bool:
    if pa.types.is_float16(data_type):
        return False
    return any(is_kind(data_type) for is_kind in _kinds())


def _nans(values: Any) -> bool:
    return pa.types.is_floating(values.type) and bool(pc.any(pc.is_nan(values)).as_py())
