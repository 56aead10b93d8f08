"""Python objects to the values of a column, without loss, and back.

A *checker* takes one object that a program passed, and returns it in the form from which
`arrow_array` builds columns: text as UTF-8, times as integers of the column's unit.  It raises
a TypeError or ValueError for an object that the column cannot hold exactly.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

from embedlog.batch.arrays import bitmap
from embedlog.batch.encode import binary_array
from embedlog.lazy import pa

Checker = Callable[[Any], Any]

_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - for columns without a zone
_UTC_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()


def nullable(check: Checker) -> Checker:
    """Return a checker that lets None pass."""
    return lambda value: None if value is None else check(value)


@lru_cache(maxsize=1024)
def checker_of(data_type: Any) -> Checker:
    """Return the checker of a stored type; see `column_types.stored_type`."""
    types = pa.types
    if types.is_boolean(data_type):
        return _bool
    if types.is_integer(data_type):
        return _integer(data_type)
    if types.is_floating(data_type):
        return _float(data_type)
    if types.is_string(data_type):
        return _text
    if types.is_binary(data_type):
        return _binary
    if types.is_fixed_size_binary(data_type):
        return _fixed_size_binary(data_type)
    if types.is_decimal(data_type):
        return _decimal(data_type)
    if types.is_date32(data_type):
        return _date
    if types.is_timestamp(data_type):
        return _timestamp(data_type)
    if types.is_time(data_type):
        return _time(data_type)
    if types.is_duration(data_type):
        return _duration(data_type)
    if types.is_struct(data_type):
        return _struct(data_type)
    if types.is_map(data_type):
        return _map(data_type)
    return _list(data_type)


def _wrong(value: Any, expected: object) -> TypeError:
    return TypeError(f"{expected} is expected, got {type(value).__name__}")


def _item(value: Any) -> Any:
    """Return the Python object of a numpy scalar, and the value of a member of an enum."""
    if isinstance(value, enum.Enum):
        return value.value
    return value.item() if hasattr(value, "dtype") and hasattr(value, "item") else value


def _bool(value: Any) -> Any:
    if type(value) is not bool:
        value = _item(value)
        if type(value) is not bool:
            raise _wrong(value, "bool")
    return value


def _integer(data_type: Any) -> Checker:
    bits = data_type.bit_width
    unsigned = pa.types.is_unsigned_integer(data_type)
    low, high = (0, (1 << bits) - 1) if unsigned else (-(1 << bits - 1), (1 << bits - 1) - 1)

    def check(value: Any) -> Any:
        if type(value) is not int:
            value = _item(value)
            if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
                raise _wrong(value, "int")
            number = int(value)
            if number != value:
                raise ValueError(f"{value} is not a whole number")
            value = number
        if not low <= value <= high:
            raise ValueError(f"{value} does not fit in {data_type}")
        return value

    return check


def _float(data_type: Any) -> Checker:
    # Not in the machine's own form, in which what is too large becomes infinite.
    pack = struct.Struct("<" + _FLOAT_CODES[data_type.bit_width])
    narrow = data_type.bit_width < 64

    def check(value: Any) -> Any:
        is_float = type(value) is float
        if not is_float:
            value = _item(value)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _wrong(value, "float")
            number = float(value)
            if not isinstance(value, float):
                is_exact = (pack.unpack(pack.pack(number))[0] if narrow else number) == value
                if not is_exact:
                    raise ValueError(f"{value} has more digits than {data_type}")
            value = number
        if narrow:
            try:
                pack.pack(value)
            except OverflowError:
                raise ValueError(f"{value} is too large for {data_type}") from None
        return value

    return check


def _text(value: Any) -> Any:
    if type(value) is not str:
        value = str(value) if isinstance(value, UUID) else _item(value)
        if not isinstance(value, str):
            raise _wrong(value, "str")
    return value.encode()


def _binary(value: Any) -> Any:
    if type(value) is not bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise _wrong(value, "bytes")
        value = bytes(value)
    return value


def _fixed_size_binary(data_type: Any) -> Checker:
    width = data_type.byte_width

    def check(value: Any) -> Any:
        value = value.bytes if isinstance(value, UUID) else _binary(value)
        if len(value) != width:
            raise ValueError(f"{len(value)} bytes do not fit in {data_type}")
        return value

    return check


def _decimal(data_type: Any) -> Checker:
    exponent, digits = -data_type.scale, data_type.precision

    def check(value: Any) -> Decimal:
        value = _item(value)
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            raise _wrong(value, "Decimal or int")
        number = Decimal(value)
        if not number.is_finite():
            raise ValueError(f"{number} is not a number")
        sign, parts, power = number.as_tuple()
        assert isinstance(power, int)
        shift = power - exponent
        whole = int("".join(map(str, parts)))
        if shift >= 0:
            whole *= 10 ** min(shift, 80)
        elif whole:
            # No number is divisible by a power of ten that has more digits.
            divisor = 10 ** min(-shift, len(parts))
            if whole % divisor:
                raise ValueError(f"{number} has more than {data_type.scale} decimals")
            whole //= divisor
        if whole >= 10**digits:
            raise ValueError(f"{number} has too many digits for {data_type}")
        return Decimal((sign, tuple(map(int, str(whole))), exponent))

    return check


def _date(value: Any) -> int:
    if isinstance(value, dt.datetime):
        if value.time() != dt.time(0) or value.tzinfo is not None:
            raise ValueError(f"{value} is more than a date")
        value = value.date()
    elif _is_numpy(value, "M") and value.astype("datetime64[D]") == value:
        return int(value.astype("datetime64[D]").astype(int))
    if not isinstance(value, dt.date):
        raise _wrong(value, "date")
    return value.toordinal() - _EPOCH_DAY


def _is_numpy(value: Any, kind: str) -> bool:
    """Whether a value is one of numpy's: ``M`` is a datetime64, ``m`` a timedelta64."""
    return hasattr(value, "dtype") and value.dtype.kind == kind


def _exact(nanoseconds: int, unit: str, value: Any) -> int:
    number, rest = divmod(nanoseconds, 1_000_000_000 // _PER_SECOND[unit])
    if rest:
        raise ValueError(f"{value} has more decimals than the unit {unit} holds")
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{value} is out of range for the unit {unit}")
    return number


def _nanoseconds(delta: dt.timedelta) -> int:
    seconds = delta.days * 86400 + delta.seconds
    return (seconds * 1_000_000 + delta.microseconds) * 1000 + getattr(delta, "nanoseconds", 0)


def _timestamp(data_type: Any) -> Checker:
    unit, zone = data_type.unit, data_type.tz

    def check(value: Any) -> int:
        if _is_numpy(value, "M"):
            # What `python_values` returns for a column with a zone is in UTC.
            if zone is not None and _in_calendar(value):
                raise ValueError(f"{value} has no time zone, and the column has {zone}")
            return int(pa.scalar(value).cast(data_type).value)
        if not isinstance(value, dt.datetime):
            raise _wrong(value, "datetime")
        if value != value:
            raise ValueError("it is NaT; pass None")
        if (value.tzinfo is None) != (zone is None):
            has = "no time zone" if value.tzinfo is None else "a time zone"
            raise ValueError(f"{value} has {has}, and the column has {zone or 'none'}")
        epoch = _EPOCH if zone is None else _UTC_EPOCH
        nanoseconds = _nanoseconds(dt.datetime.__sub__(_plain_datetime(value), epoch))
        return _exact(nanoseconds + getattr(value, "nanosecond", 0), unit, value)

    return check


def _in_calendar(value: Any) -> bool:
    """Whether Python has a datetime for one of numpy."""
    return 1 <= 1970 + int(value.astype("datetime64[Y]").astype(int)) <= dt.MAXYEAR


def _plain_datetime(value: dt.datetime) -> dt.datetime:
    """Return a `pandas.Timestamp` as a datetime, without its nanoseconds."""
    if type(value) is dt.datetime:
        return value
    return dt.datetime.combine(
        dt.date(value.year, value.month, value.day),
        dt.time(value.hour, value.minute, value.second, value.microsecond, fold=value.fold),
        value.tzinfo,
    )


def to_ms(time: int, data_type: Any) -> int:
    """Return a checked timestamp as that of a record, rounded down to ms."""
    per_second = _PER_SECOND[data_type.unit]
    return time * 1000 // per_second


def from_ms(timestamp_ms: int, data_type: Any) -> int:
    """Return the timestamp of a record as a value of a column, rounded down to its unit."""
    return timestamp_ms * _PER_SECOND[data_type.unit] // 1000


def _time(data_type: Any) -> Checker:
    def check(value: Any) -> int:
        if not isinstance(value, dt.time):
            raise _wrong(value, "time")
        if value.tzinfo is not None:
            raise ValueError(f"{value} has a time zone")
        seconds = (value.hour * 60 + value.minute) * 60 + value.second
        return _exact((seconds * 1_000_000 + value.microsecond) * 1000, data_type.unit, value)

    return check


def _duration(data_type: Any) -> Checker:
    def check(value: Any) -> int:
        if _is_numpy(value, "m"):
            return int(pa.scalar(value).cast(data_type).value)
        if not isinstance(value, dt.timedelta):
            raise _wrong(value, "timedelta")
        return _exact(_nanoseconds(value), data_type.unit, value)

    return check


def _struct(data_type: Any) -> Checker:
    checks = {field.name: nullable(checker_of(field.type)) for field in data_type}

    def check(value: Any) -> tuple[Any, ...]:
        return check_fields(value, checks, ".")

    return check


def check_fields(value: Any, checks: Mapping[str, Checker], where: str = "") -> tuple[Any, ...]:
    """Return the checked values of a dict or an instance of a dataclass, in the order of checks.

    Raises:
        TypeError, ValueError: The text names the field; a field that is missing counts as None.
    """
    if not isinstance(value, Mapping):
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            raise _wrong(value, "a dict or a dataclass")
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not value.keys() <= checks.keys():
        unknown = next(name for name in value if name not in checks)
        missing = ValueError(f"there is no such {'field' if where else 'column'}")
        raise FieldError(f"{where}{unknown}", missing)
    get, name = value.get, ""
    checked = []
    try:
        for name, check in checks.items():
            checked.append(check(get(name)))
    except (TypeError, ValueError, OverflowError) as error:
        raise FieldError(f"{where}{name}", error) from error
    return tuple(checked)


class FieldError(ValueError):
    """A value of a field is not valid.

    Args:
        field: The name of the field.
        cause: What is wrong with it.
    """

    def __init__(self, field: str, cause: Exception) -> None:
        inner = isinstance(cause, FieldError)
        self.field: str = f"{field}{cause.field}" if inner else field  # type: ignore[attr-defined]
        self.reason: str = cause.reason if inner else str(cause)  # type: ignore[attr-defined]
        super().__init__(f"{self.field}: {self.reason}")


def _map(data_type: Any) -> Checker:
    check_key = checker_of(data_type.key_type)
    check_value = nullable(checker_of(data_type.item_type))

    def check(value: Any) -> list[tuple[Any, Any]]:
        pairs = value.items() if isinstance(value, Mapping) else value
        return [(check_key(key), check_value(item)) for key, item in pairs]

    return check


def _list(data_type: Any) -> Checker:
    check_item = nullable(checker_of(data_type.value_type))
    size = data_type.list_size if pa.types.is_fixed_size_list(data_type) else None

    def check(value: Any) -> list[Any]:
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, list | tuple):
            raise _wrong(value, "a list")
        if size is not None and len(value) != size:
            raise ValueError(f"a list of {size} is expected, got {len(value)}")
        return [check_item(item) for item in value]

    return check


# Columns


def arrow_array(values: Sequence[Any], data_type: Any) -> Any:
    """Return checked values, or None, as a `pyarrow.Array` of a stored type."""
    types, count = pa.types, len(values)
    if types.is_string(data_type) or types.is_binary(data_type):
        return binary_array(values, count).view(data_type) if count else pa.nulls(0, data_type)
    code = _CODES.get(data_type.bit_width) if _is_plain_number(data_type) else None
    if code is None:
        return pa.array(values, data_type)
    if types.is_floating(data_type):
        code = _FLOAT_CODES[data_type.bit_width]
    elif types.is_unsigned_integer(data_type):
        code = code.upper()
    # By hand, so that pyarrow does not import pandas (`batch.arrays`).
    nulls, validity = values.count(None), None
    if nulls:
        validity = bitmap([value is not None for value in values])
        values = [0 if value is None else value for value in values]
    packed = pa.py_buffer(struct.pack(f"{count}{code}", *values))
    return pa.Array.from_buffers(data_type, count, [validity, packed], nulls)


_CODES = {8: "b", 16: "h", 32: "i", 64: "q"}
_FLOAT_CODES = {16: "e", 32: "f", 64: "d"}


@lru_cache(maxsize=1024)
def _is_plain_number(data_type: Any) -> bool:
    types = pa.types
    return bool(types.is_primitive(data_type) and not types.is_boolean(data_type))


def python_values(column: Any, maps: type = dict) -> list[Any]:
    """Return a `pyarrow.Array` as Python objects.

    A time, date or duration that Python's types do not have, such as the year 10000, is a
    `numpy.datetime64` (in UTC, if the column has a time zone) or a `numpy.timedelta64`.

    Args:
        column: The array.
        maps: What maps become: ``dict``, or ``list`` of pairs.
    """
    try:
        if pa.types.is_timestamp(column.type) and column.type.unit in _MICROSECONDS:
            return _datetimes(column)
        as_dicts = "lossy" if maps is dict and _has_map(column.type) else None
        items: list[Any] = column.to_pylist(maps_as_pydicts=as_dicts)
        return items
    except (OverflowError, ValueError):
        return [_python_value(scalar, maps) for scalar in column]


def _python_value(scalar: Any, maps: type) -> Any:
    """Return a `pyarrow.Scalar` as `python_values` does; slow, for the rare ones."""
    data_type, types = scalar.type, pa.types
    if not scalar.is_valid:
        return None
    if types.is_struct(data_type):
        return {field.name: _python_value(scalar[field.name], maps) for field in data_type}
    if types.is_map(data_type):
        parts = [python_values(scalar.values.field(number), maps) for number in range(2)]
        return maps(zip(*parts, strict=True))
    if types.is_nested(data_type):
        return python_values(scalar.values, maps)
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        if not types.is_temporal(data_type) or types.is_time(data_type):
            raise
        return pa.repeat(scalar, 1).to_numpy(zero_copy_only=False)[0]


_MICROSECONDS = {"s": 1_000_000, "ms": 1000, "us": 1}


def _datetimes(column: Any) -> list[Any]:
    """Return times as pyarrow does, in a tenth of the time unless they are of another zone.

    Raises:
        OverflowError: One is before the year 1 or after 9999.
    """
    if column.type.tz not in (None, "UTC"):
        items: list[Any] = column.to_pylist()
        return items
    epoch, unit = _epoch(column.type), _MICROSECONDS[column.type.unit]
    return [
        None if count is None else epoch + dt.timedelta(0, 0, count * unit)
        for count in column.view(pa.int64()).to_pylist()
    ]


@lru_cache(maxsize=16)
def _epoch(data_type: Any) -> dt.datetime:
    epoch: dt.datetime = pa.scalar(0, data_type).as_py()
    return epoch


@lru_cache(maxsize=1024)
def _has_map(data_type: Any) -> bool:
    if pa.types.is_map(data_type):
        return True
    return any(_has_map(data_type.field(i).type) for i in range(data_type.num_fields))
