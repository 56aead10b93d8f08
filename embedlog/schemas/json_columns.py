"""Columns of typed topics as JSON, for people and for files, and back.

Times, dates and decimals are text, binary values are base64, durations are numbers of the column's
unit, maps are lists of objects with key and value, and NaN and infinities are null.  All else is
what it is in JSON.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from embedlog.errors import InvalidRecordError
from embedlog.lazy import np, pa, pc
from embedlog.schemas.column_types import MAX_LEVELS
from embedlog.schemas.values import arrow_array, checker_of, nullable, python_values


def json_type(data_type: Any) -> Any:
    """Return the Arrow type in which pyarrow reads the JSON of a column."""
    types = pa.types
    if types.is_float16(data_type):
        return pa.float64()
    if types.is_duration(data_type):
        return pa.int64()
    if types.is_date(data_type) or types.is_time(data_type) or _is_binary(data_type):
        return pa.string()
    if types.is_decimal(data_type) and data_type.scale < 0:
        return pa.string()
    if types.is_struct(data_type):
        return pa.struct([(field.name, json_type(field.type)) for field in data_type])
    if types.is_map(data_type):
        key, value = json_type(data_type.key_type), json_type(data_type.item_type)
        return pa.list_(pa.struct([("key", key), ("value", value)]))
    if _is_list(data_type):
        return pa.list_(json_type(data_type.value_type))
    return data_type


def _is_binary(data_type: Any) -> bool:
    return bool(pa.types.is_binary(data_type) or pa.types.is_fixed_size_binary(data_type))


def _is_list(data_type: Any) -> bool:
    return bool(pa.types.is_list(data_type) or pa.types.is_fixed_size_list(data_type))


def to_json(column: Any) -> list[Any]:
    """Return a column as objects that `json.dumps` takes."""
    types, data_type = pa.types, column.type
    if types.is_floating(data_type):
        column = column.cast(pa.float64()) if types.is_float16(data_type) else column
        items: list[Any] = pc.if_else(pc.is_finite(column), column, None).to_pylist()
    elif types.is_duration(data_type):
        items = column.cast(pa.int64()).to_pylist()
    elif types.is_timestamp(data_type) or types.is_date(data_type):
        items = time_texts(column).to_pylist()
    elif types.is_time(data_type) or types.is_decimal(data_type):
        items = column.cast(pa.string()).to_pylist()
    elif _is_binary(data_type) or types.is_nested(data_type):
        items = [_to_json(item, data_type) for item in python_values(column, list)]
    else:
        items = column.to_pylist()
    return items


def time_texts(column: Any) -> Any:
    """Return timestamps or dates as text; those with a zone in UTC.

    The offsets of zones before 1900 have seconds, for which text has no place.

    Raises:
        InvalidRecordError: One is so far away that it has no text.
    """
    column = in_utc(column)
    if not has_text(column):
        unit: Any = "D" if pa.types.is_date(column.type) else column.type.unit
        zone = "" if unit == "D" or column.type.tz is None else "Z"
        numbers = column.cast(pa.int32() if unit == "D" else pa.int64()).to_pylist()
        if -1 << 63 in numbers:
            raise InvalidRecordError(
                "There is no text for the smallest time of 64 bits, which numpy takes for no time",
                todo="Choose other columns with --columns, or export to Parquet.",
            )
        return pa.array(
            [None if each is None else f"{np.datetime64(each, unit)}{zone}" for each in numbers],
            pa.string(),
        )
    text = column.cast(pa.string())
    return pc.replace_substring_regex(text, r"(\d) ", r"\1T", max_replacements=1)


def has_text(column: Any) -> bool:
    """Whether pyarrow has text for all times of a column: those of some 30,000 years each way."""
    is_date = pa.types.is_date(column.type)
    days = pc.min_max(column.cast(pa.int32() if is_date else pa.int64())).as_py()
    if days["min"] is None:
        return True
    most = 30_000 * 365
    if not is_date:
        most *= 86_400 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[column.type.unit]
    return bool(-most < days["min"] <= days["max"] < most)


def in_utc(column: Any) -> Any:
    """Return timestamps with a zone as the same ones in UTC; other columns as they are."""
    has_zone = pa.types.is_timestamp(column.type) and column.type.tz is not None
    return column.cast(pa.timestamp(column.type.unit, "UTC")) if has_zone else column


def _times(text: Any, data_type: Any) -> Any:
    """Inverse of `time_texts`; Arrow reads no years after 9999 and before 0."""
    try:
        return text.cast(data_type)
    except pa.ArrowInvalid as error:
        unit: Any = "D" if pa.types.is_date(data_type) else data_type.unit
        zone = "Z" if unit != "D" and data_type.tz is not None else ""
        numbers: list[int | None] = []
        for item in text.to_pylist():
            number = None
            if item is not None:
                parts = _TIME.fullmatch(item)
                if parts is None or parts["zone"] != zone:
                    raise ValueError(str(error)) from None
                time = np.datetime64(parts["time"], unit)
                if int(parts["year"]) != 1970 + int(time.astype("datetime64[Y]").astype(int)):
                    raise ValueError(f"{item} does not fit in {data_type}") from None
                number = int(time.astype(int))
            numbers.append(number)
        return pa.array(numbers, pa.int32() if unit == "D" else pa.int64()).cast(data_type)


_TIME = re.compile(
    r"(?P<time>(?P<year>[+-]?\d{3,})-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?)(?P<zone>Z?)"
)


def _to_json(item: Any, data_type: Any) -> Any:
    types = pa.types
    if item is None:
        return None
    if types.is_struct(data_type):
        return {field.name: _to_json(item[field.name], field.type) for field in data_type}
    if types.is_map(data_type):
        key, value = data_type.key_type, data_type.item_type
        return [{"key": _to_json(k, key), "value": _to_json(v, value)} for k, v in item]
    if _is_list(data_type):
        return [_to_json(part, data_type.value_type) for part in item]
    if _is_binary(data_type):
        return base64.b64encode(item).decode()
    if isinstance(item, bool | int | str):
        return item
    return to_json(arrow_array([checker_of(data_type)(item)], data_type))[0]


def from_json(column: Any, data_type: Any) -> Any:
    """Return a column that pyarrow read as `json_type`, in the column's own type.

    Raises:
        ValueError: It does not have such values.
    """
    if column.type == data_type:
        return column
    types = pa.types
    if types.is_float16(data_type):
        return column.cast(data_type)
    if types.is_date(data_type) or types.is_timestamp(data_type):
        return _times(column, data_type)
    if types.is_time(data_type):
        # Arrow reads no times from text, but timestamps.
        text = pc.binary_join_element_wise("1970-01-01 ", column, "")
        return text.cast(pa.timestamp(data_type.unit)).cast(data_type)
    if types.is_duration(data_type):
        return column.cast(pa.int64()).cast(data_type)
    check = nullable(checker_of(data_type))
    items = [check(_from_json(item, data_type)) for item in python_values(column, list)]
    return arrow_array(items, data_type)


def _from_json(item: Any, data_type: Any) -> Any:
    types = pa.types
    if item is None:
        return None
    if types.is_struct(data_type):
        return {field.name: _from_json(item.get(field.name), field.type) for field in data_type}
    if types.is_map(data_type):
        key, value = data_type.key_type, data_type.item_type
        return [(_from_json(each["key"], key), _from_json(each["value"], value)) for each in item]
    if _is_list(data_type):
        return [_from_json(part, data_type.value_type) for part in item]
    if _is_binary(data_type):
        try:
            return base64.b64decode(item, validate=True)
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"{item!r} is not base64: {error}") from None
    if isinstance(item, str) and not types.is_string(data_type):
        if types.is_decimal(data_type):
            return Decimal(item)
        return python_values(from_json(pa.array([item], pa.string()), data_type))[0]
    if isinstance(item, int | float | str | Decimal | dt.datetime):
        if types.is_duration(data_type):
            return python_values(pa.array([item], pa.int64()).cast(data_type))[0]
        return item
    raise ValueError(f"{item!r} is not {data_type}")


# Rows


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def brackets_below(text: bytes) -> bytes:
    """Return the brackets of JSON around what is more than `MAX_LEVELS` deep; empty if nothing is.

    pyarrow's reader recurses for each level, and overflows the stack of the process.
    """
    if text.count(b"[") + text.count(b"{") <= MAX_LEVELS:
        return b""
    left = _STRING.sub(b"", text).translate(None, _NO_BRACKETS)
    for _ in range(MAX_LEVELS):  # Each round removes the innermost brackets.
        left = left.replace(b"[]", b"").replace(b"{}", b"")
    return left


def read_json(lines: list[bytes], schema: Any) -> Any:
    """Return lines of JSON, an object each, as a `pyarrow.Table`.

    Args:
        lines: Empty ones are left out.
        schema: The columns in the types of `json_type`; others are inferred.  None infers all.
            If a value does not fit, integers are decimals, and timestamps text: `from_json` and
            a topic take what they can.

    Raises:
        pyarrow.ArrowException: They are not JSON of these types.
    """
    for line in lines:
        left = brackets_below(line)
        if left.count(b"[") + left.count(b"{") > MAX_LEVELS:  # Fewer may be a mistyped line.
            raise pa.ArrowInvalid(f"more than {MAX_LEVELS} values are inside of each other")
    data = b"\n".join(lines)
    try:
        return _parsed(data, schema)
    except pa.ArrowException:
        if schema is None:
            raise
    return _parsed(data, pa.schema([(field.name, _exact_type(field.type)) for field in schema]))


def _parsed(data: bytes, schema: Any) -> Any:
    from pyarrow import json as arrow_json

    return arrow_json.read_json(
        pa.BufferReader(data),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=arrow_json.ParseOptions(explicit_schema=schema),
    )


def _exact_type(data_type: Any) -> Any:
    """Return a type of `json_type` in which pyarrow reads what is rare: 5.0, and the year 10000."""
    return pa.decimal128(38, 15) if pa.types.is_integer(data_type) else _with_text(data_type)


def _with_text(data_type: Any) -> Any:
    types = pa.types
    if types.is_timestamp(data_type):
        return pa.string()
    if types.is_struct(data_type):
        return pa.struct([(field.name, _with_text(field.type)) for field in data_type])
    return pa.list_(_with_text(data_type.value_type)) if types.is_list(data_type) else data_type


def json_objects(table: Any) -> Iterator[dict[str, Any]]:
    """Yield each row of a table as an object that `json.dumps` takes."""
    names = table.column_names
    columns = [to_json(column) for column in table.columns]
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))
