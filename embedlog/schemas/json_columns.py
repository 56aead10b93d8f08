"""Columns of typed topics as JSON, for people and for files, and back.

Times, dates and decimals are text, binary values are base64, durations are numbers of the column's
unit, maps are lists of objects with key and value, and NaN and infinities are null.  All else is
what it is in JSON.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from embedlog.lazy import pa, pc
from embedlog.schemas.values import arrow_array, checker_of, python_values


def json_type(data_type: Any) -> Any:
    """Return the Arrow type in which pyarrow reads the JSON of a column."""
    types = pa.types
    if types.is_float16(data_type):
        return pa.float64()
    if types.is_duration(data_type):
        return pa.int64()
    if types.is_date(data_type) or types.is_time(data_type) or _is_binary(data_type):
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
    elif types.is_timestamp(data_type):
        text = column.cast(pa.string())
        items = pc.replace_substring_regex(text, r"(\d) ", r"\1T", max_replacements=1).to_pylist()
    elif types.is_date(data_type) or types.is_time(data_type) or types.is_decimal(data_type):
        items = column.cast(pa.string()).to_pylist()
    elif _is_binary(data_type) or types.is_nested(data_type):
        items = [_to_json(item, data_type) for item in python_values(column, list)]
    else:
        items = column.to_pylist()
    return items


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
    if types.is_date(data_type) or types.is_float16(data_type):
        return column.cast(data_type)
    if types.is_time(data_type):
        # Arrow reads no times from text, but timestamps.
        text = pc.binary_join_element_wise("1970-01-01 ", column, "")
        return text.cast(pa.timestamp(data_type.unit)).cast(data_type)
    if types.is_duration(data_type):
        return column.cast(pa.int64()).cast(data_type)
    return pa.array([_from_json(item, data_type) for item in column.to_pylist()], data_type)


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
        text = pa.array([item], pa.string())
        is_time = types.is_time(data_type)
        return (from_json(text, data_type) if is_time else text.cast(data_type))[0].as_py()
    if isinstance(item, int | float | str | Decimal | dt.datetime):
        if types.is_duration(data_type):
            return pa.array([item], pa.int64()).cast(data_type)[0].as_py()
        return item
    raise ValueError(f"{item!r} is not {data_type}")


# Rows


def read_json(lines: list[bytes], schema: Any) -> Any:
    """Return lines of JSON, an object each, as a `pyarrow.Table`.

    Args:
        lines: Empty ones are left out.
        schema: The columns in the types of `json_type`; others are inferred.  None infers all.

    Raises:
        pyarrow.ArrowException: They are not JSON of these types.
    """
    from pyarrow import json as arrow_json

    data = b"\n".join(lines)
    return arrow_json.read_json(
        pa.BufferReader(data),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=arrow_json.ParseOptions(explicit_schema=schema),
    )


def exact_type(data_type: Any) -> Any:
    """Return the type in which pyarrow reads numbers such as 5.0 for a column of `json_type`."""
    return pa.decimal128(38, 15) if pa.types.is_integer(data_type) else data_type


def json_objects(table: Any) -> Iterator[dict[str, Any]]:
    """Yield each row of a table as an object that `json.dumps` takes."""
    names = table.column_names
    columns = [to_json(column) for column in table.columns]
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))
