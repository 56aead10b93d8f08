"""The columns of topics in Spark: names, types, schemas, and casts that lose nothing.

A type of Spark is JSON here, as in ``StructType.json()``.  The planner imports this, so it does
not import pyspark; docs/spark.md has the table of the types.

Spark has no unsigned integers, half floats, and lists or bytes of a fixed size: they are read as
the smallest type that has all of their values.  Spark keeps times in microseconds: finer ones are
read if they are whole microseconds, and else as numbers if a user's schema asks for ``bigint``.  A
time of day is an interval since midnight, because Spark's own type for it is switched off by
default, and then most operations refuse it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from embedlog.errors import InvalidConfigError, InvalidSchemaError
from embedlog.lazy import pa, pc
from embedlog.schemas.reading import TOMBSTONE
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema

Json = Any
"""A type of Spark: a string, or a dict for an array, a map or a struct."""

VALUE = "value"
"""The column that has those of the topic as a struct, with the option ``values=struct``."""
_HEADERS = {
    "type": "array",
    "elementType": {
        "type": "struct",
        "fields": [
            {"name": "key", "type": "string", "nullable": True, "metadata": {}},
            {"name": "value", "type": "binary", "nullable": True, "metadata": {}},
        ],
    },
    "containsNull": True,
}
RECORD_COLUMNS: dict[str, Json] = {
    "topic": "string",
    "partition": "integer",
    "offset": "long",
    "timestamp": "timestamp",
    "timestampType": "integer",
    TOMBSTONE: "boolean",
    "headers": _HEADERS,
}
"""The columns of every record, besides those of the topic."""

MAX_DIGITS = 38
"""A decimal of Spark has at most so many digits."""
_OF_DAY = {"us": 86_400_000_000, "ns": 86_400_000_000_000}
_INTERVAL = "interval day to second"
_INTEGERS = {8: "byte", 16: "short", 32: "integer", 64: "long"}
_UNSIGNED = {8: "short", 16: "integer", 32: "long", 64: "decimal(20,0)"}
_FLOATS = {16: "float", 32: "float", 64: "double"}
_SHORT_NAMES = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "string collate UTF8_BINARY": "string",  # SHOW CREATE TABLE says it so.
}
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_DAY_TIME = re.compile(r"interval (day|hour|minute|second)( to (hour|minute|second))?")
_TIME = re.compile(r"time\(\d\)")
_NO_NOT_NULL = "Leave out NOT NULL."
_TEXT = re.compile(r"(string collate .*|(var)?char\(\d+\))", re.IGNORECASE)


# From Arrow to Spark


def spark_type(data_type: Any, column: str) -> Json:
    """Return the type in Spark of a column that is stored with an Arrow type.

    Args:
        data_type: A stored type; see `embedlog.schemas.column_types`.
        column: The name of the column, for the error.

    Raises:
        InvalidSchemaError: Spark has no type that holds all of its values.
    """
    types = pa.types
    simple = _simple_type(data_type)
    if simple is not None:
        return simple
    if types.is_decimal(data_type):
        # Spark has no negative scale, and no scale above the precision.
        scale = max(data_type.scale, 0)
        digits = max(data_type.precision - min(data_type.scale, 0), scale)
        if digits > MAX_DIGITS:
            raise InvalidSchemaError(
                f"Column {column} is {data_type}, and decimals in Spark have at most "
                f"{MAX_DIGITS} digits",
                column=column,
                todo="Leave it out: name the other columns in .schema(…).",
            )
        return f"decimal({digits},{scale})"
    if types.is_struct(data_type):
        fields = [
            field_json(field.name, spark_type(field.type, f"{column}.{field.name}"))
            for field in data_type
        ]
        return {"type": "struct", "fields": fields}
    if types.is_map(data_type):
        return {
            "type": "map",
            "keyType": spark_type(data_type.key_type, column),
            "valueType": spark_type(data_type.item_type, column),
            "valueContainsNull": True,
        }
    if types.is_list(data_type) or types.is_fixed_size_list(data_type):
        element = spark_type(data_type.value_type, column)
        return {"type": "array", "elementType": element, "containsNull": True}
    raise InvalidSchemaError(f"Spark has no type for {data_type}", column=column)


def _simple_type(data_type: Any) -> str | None:
    types = pa.types
    if types.is_boolean(data_type):
        return "boolean"
    if types.is_integer(data_type):
        names = _UNSIGNED if types.is_unsigned_integer(data_type) else _INTEGERS
        return names[data_type.bit_width]
    if types.is_floating(data_type):
        return _FLOATS[data_type.bit_width]
    if types.is_string(data_type):
        return "string"
    if types.is_binary(data_type) or types.is_fixed_size_binary(data_type):
        return "binary"
    if types.is_date32(data_type):
        return "date"
    if types.is_timestamp(data_type):
        return "timestamp_ntz" if data_type.tz is None else "timestamp"
    if types.is_time(data_type) or types.is_duration(data_type):
        return _INTERVAL
    return None


def field_json(name: str, spark_type: Json, nullable: bool = True) -> Json:
    """Return a field of a struct of Spark."""
    return {"name": name, "type": spark_type, "nullable": nullable, "metadata": {}}


def spark_schema(
    schema: TopicSchema | None,
    *,
    as_struct: bool = False,
    headers: bool = False,
    tombstones: bool = False,
) -> Json:
    """Return the columns of a reader of a topic, as the JSON of a ``StructType``.

    All may be null, since those of a tombstone are.

    Args:
        schema: The version of the topic's schema; None for a topic of bytes.
        as_struct: Whether the topic's columns are one, named ``value`` (``values=struct``).
        headers: Whether the headers are read (``includeHeaders``).
        tombstones: Whether tombstones are read (``includeTombstones``).

    Raises:
        InvalidSchemaError: Spark has no type for a column.
    """
    typed = schema is not None
    names = record_columns(headers=headers, tombstones=typed and tombstones)
    fields = [field_json(name, RECORD_COLUMNS[name]) for name in names if name != "headers"]
    after = [field_json("headers", _HEADERS)] if headers else []
    if schema is None:
        own = [field_json(name, "binary") for name in ("key", VALUE)]
        return {"type": "struct", "fields": [*own, *fields, *after]}
    own = [field_json(field.name, spark_type(field.type, field.name)) for field in schema.columns]
    if as_struct:
        own = [field_json(VALUE, {"type": "struct", "fields": own})]
    return {"type": "struct", "fields": [*fields, *own, *after]}


def is_struct_of_columns(field: Json) -> bool:
    """Whether a field of a struct of Spark is the column with those of a topic."""
    is_struct = isinstance(field["type"], dict) and field["type"]["type"] == "struct"
    return is_struct and field["name"] == VALUE


def record_columns(*, headers: bool, tombstones: bool) -> list[str]:
    """Return the columns of a record that a query has, besides those of the topic."""
    absent = {*([] if headers else ["headers"]), *([] if tombstones else [TOMBSTONE])}
    return [name for name in RECORD_COLUMNS if name not in absent]


def type_name(spark_type: Json) -> str:
    """Return Spark's name of a type, as in ``simpleString()``.

    >>> type_name({"type": "array", "elementType": "integer", "containsNull": True})
    'array<int>'
    """
    if isinstance(spark_type, str):
        return _SHORT_NAMES.get(spark_type, spark_type)
    if spark_type["type"] == "array":
        return f"array<{type_name(spark_type['elementType'])}>"
    if spark_type["type"] == "map":
        key, value = type_name(spark_type["keyType"]), type_name(spark_type["valueType"])
        return f"map<{key},{value}>"
    if spark_type["type"] == "struct":
        fields = (f"{field['name']}:{type_name(field['type'])}" for field in spark_type["fields"])
        return f"struct<{','.join(fields)}>"
    return str(spark_type["type"])


RECORD_TYPES = {name: type_name(kind) for name, kind in RECORD_COLUMNS.items()}
"""Spark's names of the types of `RECORD_COLUMNS`."""


def check_projection(
    fields: Iterable[Json],
    schema: TopicSchema,
    *,
    as_struct: bool = False,
    headers: bool = False,
    tombstones: bool = False,
) -> None:
    """Raise unless a query of a typed topic can have the columns of a user's schema.

    Args:
        fields: The fields of a ``StructType``, as JSON.
        schema: The version of the topic's schema.
        as_struct, headers, tombstones: As in `spark_schema`.

    Raises:
        InvalidConfigError: The topic has no such column, or it has another type.
        InvalidSchemaError: Spark has no type for a column.
    """
    names = record_columns(headers=headers, tombstones=tombstones)
    for field in fields:
        name, wanted = field["name"], field["type"]
        if name in names:
            _check_type(name, wanted, RECORD_COLUMNS[name])
        elif as_struct and name == VALUE:
            if not isinstance(wanted, Mapping) or wanted["type"] != "struct":
                problem = f"The column {VALUE} is a struct, and not {type_name(wanted)}"
                raise InvalidConfigError(problem, todo="Name fields of it, or set values=columns.")
            for part in wanted["fields"]:
                _check_own_column(part["name"], part["type"], schema)
        elif as_struct or name in RECORD_COLUMNS:
            options = {"headers": "includeHeaders", TOMBSTONE: "includeTombstones"}
            todo = f"Set {options[name]} to true." if name in options else None
            if todo is None and name in schema.columns.names:
                todo = f"With values=struct it is a field of the column {VALUE}."
            known = ", ".join([*names, VALUE])
            raise InvalidConfigError(
                f"The query has no column {name}", todo=todo or f"Choose from {known}."
            )
        else:
            _check_own_column(name, wanted, schema)


def _check_own_column(name: str, wanted: Json, schema: TopicSchema) -> None:
    if name not in schema.columns.names:
        raise InvalidConfigError(
            f"The topic has no column {name}",
            todo=f"Its columns are {', '.join(schema.columns.names)}.",
        )
    stored = schema.columns.field(name).type
    if wanted != "long" or not is_nanoseconds(stored):
        _check_type(name, wanted, spark_type(stored, name))


def is_nanoseconds(data_type: Any) -> bool:
    """Whether a column has nanoseconds, so that it may be read as ``bigint`` as well."""
    types = pa.types
    is_time = types.is_timestamp(data_type) or types.is_duration(data_type)
    return bool((is_time or types.is_time(data_type)) and data_type.unit == "ns")


def _check_type(name: str, wanted: Json, actual: Json) -> None:
    if wanted == actual:
        return
    if type_name(wanted) != type_name(actual):
        raise InvalidConfigError(
            f"Column {name} is {type_name(actual)}, and not {type_name(wanted)}",
            todo="Leave the type as it is, and cast the column afterwards.",
        )
    if list(_null_flags(wanted)) != list(_null_flags(actual)):
        raise InvalidConfigError(
            f"Elements inside column {name} must be nullable", todo=_NO_NOT_NULL
        )


def _null_flags(spark_type: Json) -> Iterator[bool]:
    """Yield, for each place inside of a type, whether it may be null."""
    if isinstance(spark_type, str):
        return
    for name, part in spark_type.items():
        if name in ("containsNull", "valueContainsNull", "nullable"):
            yield part
        elif name == "fields":
            for field in part:
                yield from _null_flags(field)
        elif name != "metadata":
            yield from _null_flags(part)


# For the reader in the JVM, which finds a column of a segment by its field id


def columns_to_json(schema: TopicSchema) -> dict[str, Any]:
    """Return where the columns of a version of a schema come from.

    Returns:
        ``{name: [field id, default]}``; a default is a stream of Arrow with one row, in Base64, or
        None.
    """
    return {name: [number, schema.encoded_default(name)] for number, name in schema.ids.items()}


def segment_columns(schema: TopicSchema) -> str:
    """Return all columns that a segment of a version may have, as an Arrow message in Base64.

    The reader takes them from the plan and not from the file, whose schema has no checksum.
    """
    columns = segment_schema(schema, headers=True, tombstones=True, offsets=True)
    return base64.b64encode(columns.serialize()).decode()


# Arrow's types as Spark passes them


def arrow_type(spark_type: Json) -> Any:
    """Return the Arrow type with which Spark passes a type to Python and back.

    Raises:
        KeyError: It is none that `spark_type` returns, and none that a topic can store.
    """
    if isinstance(spark_type, str):
        decimal = _DECIMAL.fullmatch(spark_type)
        if decimal is not None:
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        if _DAY_TIME.fullmatch(spark_type):
            return pa.duration("us")
        if _TIME.fullmatch(spark_type):
            return pa.time64("ns")
        if _TEXT.fullmatch(spark_type):
            return pa.string()
        return _arrow_types()[spark_type]
    if spark_type["type"] == "array":
        element = arrow_type(spark_type["elementType"])
        return pa.list_(pa.field("element", element))
    if spark_type["type"] == "map":
        return pa.map_(arrow_type(spark_type["keyType"]), arrow_type(spark_type["valueType"]))
    if spark_type["type"] == "struct":
        fields = [(field["name"], arrow_type(field["type"])) for field in spark_type["fields"]]
        return pa.struct(fields)
    raise KeyError(spark_type["type"])


def _arrow_types() -> dict[str, Any]:
    return {
        "void": pa.null(),
        "boolean": pa.bool_(),
        "byte": pa.int8(),
        "short": pa.int16(),
        "integer": pa.int32(),
        "long": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "string": pa.string(),
        "binary": pa.binary(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "timestamp_ntz": pa.timestamp("us"),
    }


def stored_type(wanted: Json, column: str) -> Any:
    """Return the Arrow type with which a new topic stores a column of Spark.

    Args:
        wanted: The type in Spark.
        column: The name of the column, for the error.

    Raises:
        InvalidSchemaError: There is none that Spark would read as this type.
    """
    if not all(_null_flags(wanted)):
        raise InvalidSchemaError(
            f"Elements inside column {column} must be nullable", column=column, todo=_NO_NOT_NULL
        )
    name = type_name(wanted)
    try:
        stored = arrow_type(wanted)
        if type_name(spark_type(stored, column)) == name:
            return stored
    except (KeyError, InvalidSchemaError):
        pass
    raise InvalidSchemaError(
        f"Column {column} is {name}, which a topic cannot store",
        column=column,
        todo="Choose another type, or cast the column.",
    )


def to_spark(column: Any, target: Any) -> Any:
    """Return a column of a topic as Spark takes it.

    Args:
        column: A `pyarrow.Array` of a stored type.
        target: What `arrow_type` returns for the type in Spark.

    Raises:
        pyarrow.ArrowInvalid: A time is finer than microseconds, or out of their range.
    """
    if column.type.equals(target, check_metadata=True):
        return column
    if pa.types.is_int64(target) and not pa.types.is_integer(column.type):
        return column.view(target)
    between = _with_times(target, column.type)
    column = column.cast(between)
    return column if between is target else column.view(target)


def _with_times(target: Any, stored: Any) -> Any:
    """Return a type with times of day where the stored type has them, in microseconds.

    Arrow does not cast them to intervals, but they have the same bytes.
    """
    types = pa.types
    if types.is_time(stored):
        return pa.time64("us")
    if types.is_struct(target):
        fields = [
            field.with_type(_with_times(field.type, stored.field(field.name).type))
            for field in target
        ]
        changed = pa.struct(fields)
    elif types.is_map(target):
        key = _with_times(target.key_type, stored.key_type)
        changed = pa.map_(key, _with_times(target.item_type, stored.item_type))
    elif types.is_list(target):
        field = target.value_field
        changed = pa.list_(field.with_type(_with_times(field.type, stored.value_type)))
    else:
        return target
    return target if changed == target else changed


def from_spark(column: Any, stored: Any) -> Any:
    """Return a column of Spark in a form that `conform` casts to a stored type.

    Intervals become times of day, numbers times in nanoseconds, decimals floats, and the floats in
    lists, maps and structs half floats, where the topic has those; everything else stays as it is.

    Args:
        column: A `pyarrow.ChunkedArray` with a type of `arrow_type`.
        stored: The type that the topic's column has.

    Raises:
        pyarrow.ArrowInvalid: An interval is no time of day, a decimal no float, or a float no
            half float; or the value depends on the time zone of Spark's session.
    """
    if pa.types.is_decimal(column.type) and stored in (pa.float32(), pa.float64()):
        return _with_floats(column, stored)
    if pa.types.is_nested(stored):
        column = _with_half_floats(column, stored)
    _mapped(column.type, stored, _without_zone)
    target = _mapped(column.type, stored, _time_of_day)
    if pa.types.is_int64(column.type) and is_nanoseconds(stored):
        target = stored
    if target == column.type:
        return column
    for chunk in column.chunks:
        _check_times(chunk, target)
    return pa.chunked_array([chunk.view(target) for chunk in column.chunks], target)


def _with_floats(column: Any, stored: Any) -> Any:
    """Return a column with floats for decimals: in SQL of Spark, 1.5 is a decimal."""
    changed = column.cast(stored)
    if not changed.cast(column.type).equals(column):
        raise pa.ArrowInvalid("a decimal has too many digits for a float")
    return changed


def _time_of_day(actual: Any, stored: Any) -> Any:
    is_time = pa.types.is_duration(actual) and pa.types.is_time(stored)
    return pa.time64("us") if is_time else actual


def _without_zone(actual: Any, stored: Any) -> Any:
    """Refuse dates for instants and instants for dates, whose casts ask for a time zone."""
    types, pair = pa.types, (actual, stored)
    if any(map(types.is_date, pair)) and any(types.is_timestamp(t) and t.tz for t in pair):
        raise pa.ArrowInvalid("a date and an instant are the same only in one time zone")
    return actual


def _half_float(actual: Any, stored: Any) -> Any:
    is_half = pa.types.is_float32(actual) and pa.types.is_float16(stored)
    return stored if is_half else actual


def _bits(actual: Any, stored: Any) -> Any:
    """Return an integer for a float: NaN is not equal to itself."""
    integers = {pa.float32(): pa.int32(), pa.float64(): pa.int64()}
    return integers.get(actual, actual)


def _with_half_floats(column: Any, stored: Any) -> Any:
    """Return a column with half floats where the stored type has them."""
    target = _mapped(column.type, stored, _half_float)
    if target == column.type:
        return column
    changed, bits = column.cast(target), _mapped(column.type, column.type, _bits)
    for before, after in zip(column.chunks, changed.cast(column.type).chunks, strict=True):
        if not before.view(bits).equals(after.view(bits)):
            raise pa.ArrowInvalid("a float has too many digits for a half float")
    return changed


def _mapped(actual: Any, stored: Any, leaf: Callable[[Any, Any], Any]) -> Any:
    """Return a type with ``leaf(actual, stored)`` for each type inside that has none inside.

    The types may differ in anything: `conform` says what is wrong then.
    """
    types = pa.types
    if types.is_struct(actual) and types.is_struct(stored):
        return pa.struct(
            [
                field
                if stored.get_field_index(field.name) < 0
                else field.with_type(_mapped(field.type, stored.field(field.name).type, leaf))
                for field in actual
            ]
        )
    if types.is_map(actual) and types.is_map(stored):
        key = _mapped(actual.key_type, stored.key_type, leaf)
        return pa.map_(key, _mapped(actual.item_type, stored.item_type, leaf))
    is_list = types.is_list(stored) or types.is_fixed_size_list(stored)
    if types.is_list(actual) and is_list:
        field = actual.value_field
        return pa.list_(field.with_type(_mapped(field.type, stored.value_type, leaf)))
    return leaf(actual, stored)


def _check_times(column: Any, target: Any) -> None:
    """Raise for intervals, which are to become times of day, that are less than 0 or a day."""
    types = pa.types
    if column.type == target:
        return
    if types.is_time(target):
        extremes = pc.min_max(column.view(pa.int64())).as_py()
        for number in extremes.values():
            if number is not None and not 0 <= number < _OF_DAY[target.unit]:
                raise pa.ArrowInvalid(f"{number} {target.unit} are no time of day")
    elif types.is_struct(target):
        for part, field in zip(column.flatten(), target, strict=True):
            _check_times(part, field.type)
    elif types.is_map(target):
        present = column.filter(column.is_valid())
        _check_times(present.keys, target.key_type)
        _check_times(present.items, target.item_type)
    elif types.is_list(target):
        _check_times(column.flatten(), target.value_type)


SPARK_TYPES = {
    **dict.fromkeys(("key", VALUE), "binary"),
    **{name: kind for name, kind in RECORD_TYPES.items() if name != TOMBSTONE},
}
"""Every column of a query of topics of bytes, with Spark's name of its type."""
WRITER_COLUMNS = {
    "topic": ("string",),
    **dict.fromkeys(("key", VALUE), ("string", "binary")),
    "headers": (SPARK_TYPES["headers"],),
    "partition": ("int",),
    "timestamp": ("timestamp",),
}
"""The columns that a writer to topics of bytes uses and their types in Spark; other columns are
left out."""


def check_bytes_projection(fields: Iterable[Json], headers: bool) -> None:
    """Raise unless a query of topics of bytes can have the columns of a user's schema.

    Args:
        fields: The fields of a ``StructType``, as JSON.
        headers: Whether the headers are read (``includeHeaders``).

    Raises:
        InvalidConfigError: There is no such column, or it has another type.
    """
    for field in fields:
        name, kind = field["name"], type_name(field["type"])
        if SPARK_TYPES.get(name) != kind:
            known = ", ".join(f"{name} {kind}" for name, kind in SPARK_TYPES.items())
            raise InvalidConfigError(
                f"The log has no column {name} of type {kind}",
                todo=f"Choose from: {known}; cast afterwards.",
            )
        if name == "headers" and not headers:
            raise InvalidConfigError(
                "The schema has the column headers", todo="Set includeHeaders to true."
            )


def check_column_types(types: Mapping[str, str], topic: str | None) -> None:
    """Refuse columns that a log cannot take, with the messages of Kafka's sink.

    Args:
        types: Spark's name of the type of each column.
        topic: The topic of all rows, if the options name it.

    Raises:
        InvalidConfigError: A column is missing or has another type.
    """
    if topic is None and "topic" not in types:
        raise InvalidConfigError(
            "topic option required when no 'topic' attribute is present. "
            "Use the topic option for setting a topic"
        )
    if "value" not in types:
        raise InvalidConfigError(
            "Required attribute 'value' not found",
            todo=f"The DataFrame has the columns {', '.join(types)}.",
        )
    for name, accepted in WRITER_COLUMNS.items():
        actual = types.get(name)
        if actual is not None and actual not in accepted and actual != "void":
            raise InvalidConfigError(
                f"{name} must be a(n) {' or '.join(accepted)}",
                todo=f"It is {actual}: cast it or leave it out.",
            )
