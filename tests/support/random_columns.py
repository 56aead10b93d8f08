"""Random columns for typed topics, their values, and what becomes of values when types change.

Everything here is plain Python and pyarrow: it says what embedlog must return, and asks it nothing.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pyarrow as pa
from hypothesis import strategies as st

NAMES = ("a", "B2", "Ä ö", "a.b", 'x"y', "_x", "日本", "select", "item", "-", "timestamps", "a b")
"""Names of columns that a careless parser, or SQL, would take for something else."""
_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - for columns without a zone
_ZONES = (None, "UTC", "Europe/Berlin", "+05:30")
_UNITS = ("s", "ms", "us", "ns")
_STEP = {"s": 1_000_000, "ms": 1000, "us": 1, "ns": 1}
"""Microseconds of each unit of time; Python has nothing below."""


# Types


@cache
def scalar_types() -> st.SearchStrategy[pa.DataType]:
    """Every stored type that has no other types inside."""
    plain = [pa.bool_(), pa.string(), pa.binary(), pa.date32()]
    plain += [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
    plain += [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
    plain += [pa.float16(), pa.float32(), pa.float64()]
    plain += [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]
    plain += [pa.duration(unit) for unit in _UNITS] + [pa.binary(1), pa.binary(16)]
    decimals = st.integers(1, 76).flatmap(
        lambda digits: st.integers(-2, digits).map(lambda scale: _decimal_type(digits, scale))
    )
    return st.one_of(st.sampled_from(plain), timestamp_types(), decimals)


def _decimal_type(digits: int, scale: int) -> pa.DataType:
    return (pa.decimal128 if digits <= 38 else pa.decimal256)(digits, scale)


def timestamp_types() -> st.SearchStrategy[pa.DataType]:
    """Timestamps of every unit, with zones and without."""
    return st.builds(
        lambda unit, zone: pa.timestamp(unit, tz=zone), st.sampled_from(_UNITS), _zones()
    )


def _zones() -> st.SearchStrategy[str | None]:
    return st.sampled_from(_ZONES)


@cache
def types() -> st.SearchStrategy[pa.DataType]:
    """Every stored type: those without others inside, and structs, lists and maps of them."""
    return st.recursive(
        scalar_types(),
        lambda inner: st.one_of(
            inner.map(pa.list_),
            st.builds(pa.list_, inner, st.integers(1, 3)),
            structs(inner),
            st.builds(pa.map_, key_types(), inner),
        ),
        max_leaves=4,
    )


def structs(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    """Structs of one to three fields."""
    return st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=3).map(
        lambda fields: pa.struct(list(fields.items()))
    )


@cache
def key_types() -> st.SearchStrategy[pa.DataType]:
    """Types of key columns."""
    plain = [pa.string(), pa.binary(), pa.binary(3), pa.bool_(), pa.date32(), pa.float64()]
    plain += [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint16(), pa.float32()]
    plain += [pa.timestamp("ms", tz="UTC"), pa.timestamp("us"), pa.time32("s"), pa.duration("ms")]
    return st.sampled_from(plain)


# Values, as programs send them and as records have them


@cache
def values(data_type: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a stored type, without None; inside of them there may be None."""
    types_ = pa.types
    if types_.is_boolean(data_type):
        return st.booleans()
    if types_.is_integer(data_type):
        bits, signed = data_type.bit_width, types_.is_signed_integer(data_type)
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return st.integers(low, high)
    if types_.is_floating(data_type):
        return st.floats(width=data_type.bit_width)
    if types_.is_string(data_type):
        return st.text(max_size=6)
    if types_.is_binary(data_type):
        return st.binary(max_size=6)
    if types_.is_fixed_size_binary(data_type):
        return st.binary(min_size=data_type.byte_width, max_size=data_type.byte_width)
    if types_.is_decimal(data_type):
        most = 10**data_type.precision - 1
        return st.integers(-most, most).map(
            lambda whole: Decimal((int(whole < 0), _digits(whole), -data_type.scale))
        )
    if types_.is_date32(data_type):
        return st.dates()
    if types_.is_timestamp(data_type):
        return _timestamps(data_type)
    if types_.is_time(data_type):
        step = _STEP[data_type.unit]
        return st.integers(0, 86_400_000_000 // step - 1).map(
            lambda count: (_EPOCH + dt.timedelta(microseconds=count * step)).time()
        )
    if types_.is_duration(data_type):
        step = _STEP[data_type.unit]
        return st.integers(-(10**9), 10**9).map(lambda n: dt.timedelta(microseconds=n * step))
    return _nested_values(data_type)


def _digits(whole: int) -> tuple[int, ...]:
    return tuple(map(int, str(abs(whole))))


def _timestamps(data_type: pa.DataType) -> st.SearchStrategy[dt.datetime]:
    step, zone = _STEP[data_type.unit], _zone(data_type.tz)
    # Between 1900 and 2100, which nanoseconds have too.
    span = range(-2_208_988_800_000_000 // step, 4_102_444_800_000_000 // step)
    times = st.integers(span.start, span.stop).map(
        lambda count: _EPOCH + dt.timedelta(microseconds=count * step)
    )
    if zone is None:
        return times
    return times.map(lambda time: time.replace(tzinfo=dt.UTC).astimezone(zone))


def _zone(name: str | None) -> dt.tzinfo | None:
    if name is None or name.startswith("+"):
        return None if name is None else dt.timezone(dt.timedelta(hours=5, minutes=30))
    return ZoneInfo(name)


def _nested_values(data_type: pa.DataType) -> st.SearchStrategy[Any]:
    types_ = pa.types
    if types_.is_struct(data_type):
        return st.fixed_dictionaries(
            {field.name: or_none(values(field.type)) for field in data_type}
        ).map(lambda row: {field.name: row[field.name] for field in data_type})
    if types_.is_map(data_type):
        # NaN is not equal to itself, so a dict may have it twice.
        keys = values(data_type.key_type).filter(lambda key: key == key)
        return st.dictionaries(keys, or_none(values(data_type.item_type)), max_size=3)
    size = data_type.list_size if types_.is_fixed_size_list(data_type) else None
    return st.lists(or_none(values(data_type.value_type)), min_size=size or 0, max_size=size or 3)


def or_none(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The same values, and None."""
    return st.one_of(st.none(), strategy)


def canonical(value: Any) -> Any:
    """Return a value in a form in which two are equal if they are the same: NaN, 1 and 1.0."""
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, float):
        return "float", "nan" if math.isnan(value) else struct.pack(">d", value)
    if isinstance(value, dt.datetime):
        naive = value.tzinfo is None
        since = (value if naive else value.astimezone(dt.UTC).replace(tzinfo=None)) - _EPOCH
        return "time" if naive else "instant", _nanoseconds(since)
    if isinstance(value, dt.timedelta):
        return "duration", _nanoseconds(value)
    if isinstance(value, Decimal):
        return "decimal", *value.as_integer_ratio()
    if isinstance(value, dict):
        return tuple((canonical(key), canonical(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(canonical, value))
    return value


def _nanoseconds(delta: dt.timedelta) -> int:
    microseconds = (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
    return microseconds * 1000 + getattr(delta, "nanoseconds", 0)


def arrow(items: list[Any], data_type: pa.DataType) -> pa.Array:
    """Return values as an Arrow array."""
    return pa.array([_for_arrow(item, data_type) for item in items], data_type)


def _for_arrow(value: Any, data_type: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_map(data_type):
        pairs = value.items()
        item_type = data_type.item_type
        return [
            (_for_arrow(key, data_type.key_type), _for_arrow(item, item_type))
            for key, item in pairs
        ]
    if pa.types.is_struct(data_type):
        return {field.name: _for_arrow(value[field.name], field.type) for field in data_type}
    if isinstance(value, list):
        return [_for_arrow(item, data_type.value_type) for item in value]
    return value


# Other types of the same values, as other libraries hand them over


@cache
def variants(data_type: pa.DataType) -> st.SearchStrategy[pa.DataType]:
    """Types of columns that hold every value of a stored type, and are stored as it."""
    return st.one_of(_layouts(data_type), _layouts(data_type).flatmap(_encodings))


def _encodings(values_type: pa.DataType) -> st.SearchStrategy[pa.DataType]:
    """Dictionaries, runs and extension types of another type."""
    indexes = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
    indexes += [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
    ends = [pa.int16(), pa.int32(), pa.int64()]
    return st.one_of(
        st.builds(pa.dictionary, st.sampled_from(indexes), st.just(values_type), st.booleans()),
        st.sampled_from(ends).map(lambda end: pa.run_end_encoded(end, values_type)),
        st.just(pa.opaque(values_type, "name", "vendor")),
    )


def _layouts(data_type: pa.DataType) -> st.SearchStrategy[pa.DataType]:
    types_ = pa.types
    others = [data_type]
    if types_.is_string(data_type):
        others += [pa.large_string(), pa.string_view(), pa.json_()]
    elif types_.is_binary(data_type):
        others += [pa.large_binary(), pa.binary_view()]
    elif types_.is_fixed_size_binary(data_type) and data_type.byte_width == 16:
        others.append(pa.uuid())
    elif types_.is_date32(data_type):
        others.append(pa.date64())
    elif types_.is_decimal128(data_type) and data_type.precision <= 18:
        others.append(pa.decimal64(data_type.precision, data_type.scale))
    elif types_.is_timestamp(data_type) and data_type.tz is not None:
        others.append(pa.timestamp(data_type.unit, tz="America/New_York"))
    elif types_.is_struct(data_type):
        inner = [variants(field.type).map(_named(field.name)) for field in data_type]
        return st.tuples(*inner).flatmap(st.permutations).map(pa.struct)
    elif types_.is_map(data_type):
        return variants(data_type.item_type).map(lambda item: pa.map_(data_type.key_type, item))
    elif types_.is_fixed_size_list(data_type):
        size = data_type.list_size
        return variants(data_type.value_type).map(lambda item: pa.list_(item, size))
    elif types_.is_list(data_type):
        kinds = (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)
        return st.builds(
            lambda kind, item: kind(item), st.sampled_from(kinds), variants(data_type.value_type)
        )
    return st.sampled_from(others)


def _named(name: str) -> Any:
    return lambda data_type: (name, data_type)


def inferred(items: list[Any], data_type: pa.DataType) -> pa.DataType:
    """Return the type that a library infers from values: null where there are none."""
    types_, present = pa.types, [item for item in items if item is not None]
    if not present:
        return pa.null()
    if types_.is_struct(data_type):
        return pa.struct(
            [(f.name, inferred([item[f.name] for item in present], f.type)) for f in data_type]
        )
    if types_.is_map(data_type):
        parts = [part for item in present for part in item.values()]
        return pa.map_(data_type.key_type, inferred(parts, data_type.item_type))
    if types_.is_list(data_type) or types_.is_fixed_size_list(data_type):
        parts = [part for item in present for part in item]
        size = data_type.list_size if types_.is_fixed_size_list(data_type) else -1
        return pa.list_(inferred(parts, data_type.value_type), size)
    return data_type


def as_variant(items: list[Any], data_type: pa.DataType, variant: pa.DataType) -> pa.Array:
    """Return values of a stored type as an Arrow array of one of its variants."""
    types_ = pa.types
    if variant == data_type:
        return arrow(items, data_type)
    if types_.is_null(variant):
        return pa.nulls(len(items))
    if isinstance(variant, pa.BaseExtensionType):
        storage = as_variant(items, data_type, variant.storage_type)
        return pa.ExtensionArray.from_storage(variant, storage)
    if types_.is_dictionary(variant):
        # Last row first; a null is a null index, or an index of a null.
        known = as_variant(items[::-1], data_type, variant.value_type)
        last = len(items) - 1
        at = [None if item is None and row % 2 else last - row for row, item in enumerate(items)]
        indices = pa.array(at, variant.index_type)
        return pa.DictionaryArray.from_arrays(indices, known, ordered=variant.ordered)
    if types_.is_run_end_encoded(variant):
        rows = range(len(items))
        last_rows = [row for row in rows if row + 1 == len(items) or items[row] != items[row + 1]]
        runs = as_variant([items[row] for row in last_rows], data_type, variant.value_type)
        ends = pa.array([row + 1 for row in last_rows], variant.run_end_type)
        return pa.RunEndEncodedArray.from_arrays(ends, runs)
    mask = pa.array([item is None for item in items], pa.bool_())
    if types_.is_struct(variant):
        inner = {field.name: field.type for field in data_type}
        arrays = [
            as_variant(
                [None if item is None else item[field.name] for item in items],
                inner[field.name],
                field.type,
            )
            for field in variant
        ]
        return pa.StructArray.from_arrays(arrays, fields=list(variant), mask=mask)
    if types_.is_map(variant) or hasattr(variant, "value_type"):
        return _list_variant(items, data_type, variant, mask)
    return arrow(items, data_type).cast(variant)


def _list_variant(
    items: list[Any], data_type: pa.DataType, variant: pa.DataType, mask: pa.Array
) -> pa.Array:
    types_ = pa.types
    if types_.is_fixed_size_list(variant):
        size = variant.list_size
        flat = [part for item in items for part in ([None] * size if item is None else item)]
        inner = as_variant(flat, data_type.value_type, variant.value_type)
        return pa.FixedSizeListArray.from_arrays(inner, size, mask=mask)
    offsets = [0]
    for item in items:
        offsets.append(offsets[-1] + len(item or ()))
    if types_.is_map(variant):
        keys = [key for item in items for key in item or ()]
        inner = [part for item in items for part in (item or {}).values()]
        # A null offset makes the item null.
        marked = [None if null else at for null, at in zip(mask.to_pylist(), offsets, strict=False)]
        return pa.MapArray.from_arrays(
            pa.array([*marked, offsets[-1]], pa.int32()),
            arrow(keys, data_type.key_type),
            as_variant(inner, data_type.item_type, variant.item_type),
            type=variant,
        )
    flat = [part for item in items for part in item or ()]
    inner = as_variant(flat, data_type.value_type, variant.value_type)
    is_large = types_.is_large_list(variant) or types_.is_large_list_view(variant)
    ends = pa.array(offsets, pa.int64() if is_large else pa.int32())
    if types_.is_list_view(variant) or types_.is_large_list_view(variant):
        owner = pa.LargeListViewArray if is_large else pa.ListViewArray
        sizes = pa.compute.subtract(ends.slice(1), ends.slice(0, len(items)))
        return owner.from_arrays(ends.slice(0, len(items)), sizes, inner, mask=mask)
    owner = pa.LargeListArray if is_large else pa.ListArray
    return owner.from_arrays(ends, inner, mask=mask)


# Wider types, and the same values in them


@cache
def wider(data_type: pa.DataType) -> st.SearchStrategy[pa.DataType]:
    """Types to which a stored type may be widened, and itself."""
    types_, bits = pa.types, 0
    others = [data_type]
    if types_.is_integer(data_type):
        bits = data_type.bit_width
        kinds = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
        if types_.is_unsigned_integer(data_type):
            others += [
                kind for kind in (pa.uint16(), pa.uint32(), pa.uint64()) if kind.bit_width > bits
            ]
        others += [kind for kind in kinds if kind.bit_width > bits]
        others += {8: [pa.float16(), pa.float32()], 16: [pa.float32()], 32: [pa.float64()]}.get(
            bits, []
        )
        others += [pa.decimal128(22, 2), pa.decimal256(60, 4)]
    elif types_.is_floating(data_type):
        others += [t for t in (pa.float32(), pa.float64()) if t.bit_width > data_type.bit_width]
    elif types_.is_decimal(data_type) and data_type.scale >= 0 and data_type.precision < 70:
        others.append(pa.decimal256(data_type.precision + 4, data_type.scale + 2))
    elif types_.is_date32(data_type):
        others += [pa.timestamp("s"), pa.timestamp("us", tz="UTC"), pa.timestamp("ms")]
    elif types_.is_struct(data_type):
        inner = [wider(field.type).map(_named(field.name)) for field in data_type]
        added = st.sampled_from([[], [("new", pa.int8())]])
        if "new" in [field.name for field in data_type]:
            added = st.just([])
        return st.tuples(st.tuples(*inner), added).map(lambda both: pa.struct([*both[0], *both[1]]))
    elif types_.is_map(data_type):
        return wider(data_type.item_type).map(lambda item: pa.map_(data_type.key_type, item))
    elif types_.is_fixed_size_list(data_type):
        size = data_type.list_size
        return wider(data_type.value_type).map(lambda item: pa.list_(item, size))
    elif types_.is_list(data_type):
        return wider(data_type.value_type).map(pa.list_)
    return st.sampled_from(others)


def widened(value: Any, before: pa.DataType, after: pa.DataType) -> Any:
    """Return a value of one stored type as one of a wider type."""
    types_ = pa.types
    if value is None or before == after:
        return value
    if types_.is_floating(after):
        return float(value)
    if types_.is_decimal(after):
        return Decimal(value)
    if types_.is_timestamp(after):
        return dt.datetime(value.year, value.month, value.day, tzinfo=dt.UTC if after.tz else None)
    if types_.is_struct(after):
        inner = {field.name: field.type for field in before}
        return {
            field.name: widened(value[field.name], inner[field.name], field.type)
            if field.name in inner
            else None
            for field in after
        }
    if types_.is_map(after):
        return {
            key: widened(item, before.item_type, after.item_type) for key, item in value.items()
        }
    if isinstance(value, list):
        return [widened(item, before.value_type, after.value_type) for item in value]
    return value


# Keys, as Kafka's serializers write them


class KeyPart(NamedTuple):
    """A value of a key column and its type."""

    value: Any
    type: pa.DataType

    def pack(self) -> bytes:
        """Return its bytes."""
        value, data_type, types_ = self.value, self.type, pa.types
        if types_.is_string(data_type):
            return value.encode("utf-8")
        if types_.is_binary(data_type) or types_.is_fixed_size_binary(data_type):
            return bytes(value)
        if types_.is_boolean(data_type):
            return b"\1" if value else b"\0"
        if types_.is_floating(data_type):
            return struct.pack(">f" if data_type.bit_width == 32 else ">d", value)
        if types_.is_date32(data_type):
            return struct.pack(">i", (value - dt.date(1970, 1, 1)).days)
        if types_.is_integer(data_type):
            code = {8: "b", 16: "h", 32: "i", 64: "q"}[data_type.bit_width]
            signed = types_.is_signed_integer(data_type)
            return struct.pack(f">{code if signed else code.upper()}", value)
        if types_.is_time32(data_type):
            return struct.pack(">i", (value.hour * 60 + value.minute) * 60 + value.second)
        nanoseconds = canonical(value)[1]
        return struct.pack(">q", nanoseconds // (1000 * _STEP[data_type.unit]))


def key_of(parts: list[KeyPart]) -> bytes | None:
    """Return the bytes of a key of one or several columns; None if the record has no key."""
    packed = [None if part.value is None else part.pack() for part in parts]
    if all(part is None for part in packed):
        return None
    if len(packed) == 1:
        return packed[0]
    return b"".join(
        struct.pack(">i", -1) if part is None else struct.pack(">i", len(part)) + part
        for part in packed
    )
