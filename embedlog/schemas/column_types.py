"""The Arrow types that a column of a typed topic may have, and what they may be widened to."""

from __future__ import annotations

from typing import Any

from embedlog.errors import InvalidSchemaError
from embedlog.lazy import pa

_UNITS = ("s", "ms", "us", "ns")
_DECIMAL_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
"""Digits of the largest integer, by its bits."""
_EXACT_BITS = {16: 8, 32: 16, 64: 32}
"""By the bits of a float, those of the largest integer type whose numbers it has exactly."""


def stored_type(data_type: Any, column: str, *, nulls: bool = False) -> Any:
    """Return the type in which a column is stored: one layout for each logical type.

    Dictionaries and runs are decoded, views and large variants become the plain type: a batch
    is smaller than 2 GiB.  What is inside of a column may always be null.

    Args:
        data_type: A `pyarrow.DataType`.
        column: The name of the column, for errors.
        nulls: Whether Arrow's null type is returned as it is.  Tables have it where all values
            are null, or all lists are empty; a topic does not.

    Raises:
        InvalidSchemaError: No column may have this type.
    """
    types = pa.types
    if isinstance(data_type, pa.BaseExtensionType):
        return stored_type(data_type.storage_type, column, nulls=nulls)
    if types.is_dictionary(data_type) or types.is_run_end_encoded(data_type):
        return stored_type(data_type.value_type, column, nulls=nulls)
    if types.is_large_string(data_type) or types.is_string_view(data_type):
        return pa.string()
    if types.is_large_binary(data_type) or types.is_binary_view(data_type):
        return pa.binary()
    if types.is_date64(data_type):
        return pa.date32()
    if types.is_decimal32(data_type) or types.is_decimal64(data_type):
        return pa.decimal128(data_type.precision, data_type.scale)
    if types.is_struct(data_type):
        names = [field.name for field in data_type]
        if not names or len(set(names)) < len(names):
            what = "two fields of a name" if names else "no field"
            raise InvalidSchemaError(
                f"Column {column} has a struct with {what}",
                column=column,
                todo="Give each struct at least one field, and each field a name of its own.",
            )
        fields = [
            (field.name, stored_type(field.type, f"{column}.{field.name}", nulls=nulls))
            for field in data_type
        ]
        return pa.struct(fields)
    if types.is_map(data_type):
        key, item = data_type.key_type, data_type.item_type
        return pa.map_(stored_type(key, column), stored_type(item, column, nulls=nulls))
    if types.is_fixed_size_list(data_type):
        inner = stored_type(data_type.value_type, column, nulls=nulls)
        return pa.list_(inner, data_type.list_size)
    if _is_list(data_type):
        return pa.list_(stored_type(data_type.value_type, column, nulls=nulls))
    if nulls and types.is_null(data_type):
        return data_type
    allowed = (
        *(types.is_boolean, types.is_integer, types.is_floating, types.is_decimal),
        *(types.is_string, types.is_binary, types.is_fixed_size_binary),
        *(types.is_date32, types.is_time, types.is_timestamp, types.is_duration),
    )
    if any(is_type(data_type) for is_type in allowed):
        return data_type
    todo = "Cast it to a type that other tables have too, such as text or a number."
    if types.is_null(data_type):
        todo = "All of its values are null: pass a schema with its type."
    raise InvalidSchemaError(
        f"Column {column} has the type {data_type}, which cannot be stored",
        column=column,
        todo=todo,
    )


def _is_list(data_type: Any) -> bool:
    types = pa.types
    return bool(
        types.is_list(data_type)
        or types.is_large_list(data_type)
        or types.is_list_view(data_type)
        or types.is_large_list_view(data_type)
    )


def is_widening(before: Any, after: Any) -> bool:
    """Return whether every value of a stored type has the same value in another one.

    Integers and floats become larger ones; integers also decimals, and floats that have all of
    them; decimals get more digits; dates become timestamps.  In structs, lists and maps the
    fields follow the same rules, and a struct may get and lose fields.
    """
    types = pa.types
    if before == after:
        return True
    if types.is_integer(before):
        return _is_wider_integer(before, after)
    if types.is_floating(before):
        return bool(types.is_floating(after) and after.bit_width > before.bit_width)
    if types.is_decimal(before) and types.is_decimal(after):
        return _is_wider_decimal(before.precision, before.scale, after)
    if types.is_date32(before):
        return bool(types.is_timestamp(after) and after.unit != "ns")
    if types.is_struct(before) and types.is_struct(after):
        return _is_wider_struct(before, after)
    if types.is_map(before) and types.is_map(after):
        same_keys = before.key_type == after.key_type
        return bool(same_keys and is_widening(before.item_type, after.item_type))
    if types.is_fixed_size_list(before) and types.is_fixed_size_list(after):
        same_size = before.list_size == after.list_size
        return bool(same_size and is_widening(before.value_type, after.value_type))
    if types.is_list(before) and types.is_list(after):
        return is_widening(before.value_type, after.value_type)
    return False


def _is_wider_integer(before: Any, after: Any) -> bool:
    types, bits = pa.types, before.bit_width
    if types.is_integer(after):
        if types.is_unsigned_integer(before) == types.is_unsigned_integer(after):
            return bool(after.bit_width > bits)
        return bool(types.is_signed_integer(after) and after.bit_width > bits)
    if types.is_floating(after):
        return bool(bits <= _EXACT_BITS[after.bit_width])
    digits = _DECIMAL_DIGITS[bits] + (bits == 64 and types.is_unsigned_integer(before))
    return bool(types.is_decimal(after) and _is_wider_decimal(digits, 0, after))


def _is_wider_decimal(precision: int, scale: int, after: Any) -> bool:
    return bool(after.scale >= scale and after.precision - after.scale >= precision - scale)


def _is_wider_struct(before: Any, after: Any) -> bool:
    fields = {field.name: field.type for field in before}
    kept = [field for field in after if field.name in fields]
    return bool(kept) and all(is_widening(fields[field.name], field.type) for field in kept)
