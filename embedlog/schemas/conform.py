"""Tables of a user as the columns of a typed topic: only what can be cast without loss."""

from __future__ import annotations

from typing import Any

from embedlog.batch.arrays import number
from embedlog.batch.decode import offset_range
from embedlog.errors import SerializationError
from embedlog.hints import Hint
from embedlog.lazy import pa, pc
from embedlog.schemas.column_types import stored_type
from embedlog.schemas.infer import INDEX
from embedlog.schemas.topic_schema import TopicSchema

READ_COLUMNS = ("topic", "partition", "offset")
"""Columns of a table that was read from a log, which do not matter when it is written."""


def conform(table: pa.Table, schema: TopicSchema, topic: str) -> pa.Table:
    """Return the rows of a table with exactly the columns of a topic.

    Casts that lose nothing are made; a missing column gets its default, or nulls.

    Raises:
        SerializationError: A column is unknown, missing or has other values than the topic's
            can hold; the error has the `column` and, for a single value, its `row`.
    """
    names = schema.columns.names
    ignored = {*READ_COLUMNS, *(["timestamp"] if schema.timestamp is not None else [])}
    for name in table.column_names:
        if name not in names and name not in ignored and not INDEX.fullmatch(name):
            raise SerializationError(
                f"The topic has no column {name!r}, only {', '.join(names)}",
                topic=topic,
                column=name,
                todo=Hint(
                    "Leave it out, rename it, or add it with alter_topic.",
                    "Leave it out, rename it, or add it with alter_topic in Python.",
                ),
            )
        if table.column_names.count(name) > 1:
            raise SerializationError(
                f"The table has two columns {name!r}", topic=topic, column=name
            )
    columns = []
    for field in schema.columns:
        if field.name in table.column_names:
            column = _cast(table.column(field.name), field, topic)
        else:
            column = pa.chunked_array([schema.missing(field.name, table.num_rows)])
        _refuse_nulls(column, field, schema, topic)
        column = _valid(column, field, topic)
        if field.name == schema.timestamp:
            _check_times(column, topic, field.name)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema.plain)


def _check_times(column: Any, topic: str, name: str) -> None:
    """Raise for timestamps of records that cannot be given in milliseconds."""
    if column.type.unit != "s":
        return
    most = ((1 << 63) - 1) // 1000
    times = column.cast(pa.int64())
    row = pc.index(pc.or_(pc.greater(times, most), pc.less(times, -most)), True).as_py()
    if row >= 0:
        raise SerializationError(
            f"Row {row} has a timestamp that does not fit in 64 bits as milliseconds",
            topic=topic,
            column=name,
            row=row,
            todo="Correct the value.",
        )


def _refuse_nulls(column: Any, field: Any, schema: TopicSchema, topic: str) -> None:
    if not column.null_count or field.nullable:
        return
    row = pc.index(pc.is_null(column), True).as_py()
    raise SerializationError(
        f"Row {row} has no {field.name}, and the column must not be null",
        topic=topic,
        column=field.name,
        row=row,
        todo="Fill in the nulls, or leave these rows out.",
    )


def _valid(column: Any, field: Any, topic: str) -> Any:
    """Return a column without times of day and decimals that no reader decodes.

    Arrow leaves below a null what was in memory.  That becomes null.

    Raises:
        SerializationError: A value is not of its type.
    """
    if not _may_be_invalid(field.type):
        return column
    try:
        column.validate(full=True)
        return column
    except pa.ArrowInvalid as error:
        cleared = pa.chunked_array([_cleared(chunk) for chunk in column.chunks], column.type)
        try:
            cleared.validate(full=True)
            return cleared
        except pa.ArrowInvalid:
            raise SerializationError(
                f"Column {field.name} has an invalid value: {error}",
                topic=topic,
                column=field.name,
                todo="Correct the value.",
            ) from error


def _may_be_invalid(data_type: Any) -> bool:
    types = pa.types
    inner = (data_type.field(index).type for index in range(data_type.num_fields))
    return (
        types.is_time(data_type) or types.is_decimal(data_type) or any(map(_may_be_invalid, inner))
    )


def _cleared(array: Any) -> Any:
    """Return an array in which everything below a null is null, or gone."""
    types, kind = pa.types, array.type
    if not kind.num_fields:
        return array
    mask = array.is_null()
    if types.is_struct(kind):
        inner = [_cleared(each) for each in array.flatten()]
        return pa.StructArray.from_arrays(inner, fields=list(kind), mask=mask)
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        places = offset_range(0, len(array) * size)
        below = mask.take(pc.divide(places, size))
        items = array.values.slice(array.offset * size, len(places))
        items = items.take(pc.if_else(below, pa.scalar(None, pa.int64()), places))
        return pa.FixedSizeListArray.from_arrays(_cleared(items), type=kind, mask=mask)
    if types.is_map(kind):
        array = array.cast(pa.list_(kind.field(0)))
    items, lengths = _cleared(array.flatten()), pc.fill_null(pc.list_value_length(array), 0)
    ends = pc.cumulative_sum(lengths)
    offsets = pa.concat_arrays([pa.array([0], ends.type), ends])
    if types.is_map(kind):
        return pa.MapArray.from_arrays(offsets, items.field(0), items.field(1), kind, mask=mask)
    return type(array).from_arrays(offsets, items, type=kind, mask=mask)


def _cast(column: Any, field: Any, topic: str) -> Any:
    if column.type == field.type:
        return column
    try:
        source = stored_type(column.type, field.name, nulls=True)
    except ValueError as error:
        raise SerializationError(str(error), topic=topic, column=field.name) from error
    try:
        column = decoded(column)
    except pa.ArrowException as error:
        raise SerializationError(
            f"Column {field.name} is {column.type}, which Arrow cannot decode: {error}",
            topic=topic,
            column=field.name,
            todo=f"Cast it to {field.type} first.",
        ) from error
    try:
        if source != column.type:
            column = column.cast(source)
        if source != field.type:
            _check_cast(source, field.type, field.name, topic)
            column = cast_exactly(column, field.type)
        return column
    except (pa.ArrowException, ValueError) as error:
        if isinstance(error, SerializationError):
            raise
        copied = _copied(column)
        if column.type == source and not _fails(copied, field.type):
            return cast_exactly(copied, field.type)
        row = _first_failure(column, field.type)
        raise SerializationError(
            f"{'Column' if row is None else f'Row {row} of column'} {field.name} "
            f"cannot become {field.type} without loss: {error}",
            topic=topic,
            column=field.name,
            row=row,
            todo="Correct the value, or cast the column yourself.",
        ) from error


def decoded(column: Any) -> Any:
    """Return a column with dictionaries, runs, views and extension types replaced at any depth.

    Arrow's own casts of list views give invalid lists, and it has none for runs, or for
    dictionaries of views, as Polars has them.
    """
    if not _is_encoded(column.type):
        return column
    if _is_view(column.type):
        return _without_view(column)
    if not column.num_chunks:  # Arrow makes no empty array of some types.
        return pa.chunked_array([], stored_type(column.type, "of an empty table", nulls=True))
    return pa.chunked_array([decoded_array(chunk) for chunk in column.chunks])


def _is_encoded(data_type: Any) -> bool:
    types = pa.types
    return bool(
        isinstance(data_type, pa.BaseExtensionType)
        or types.is_dictionary(data_type)
        or types.is_run_end_encoded(data_type)
        or _is_view(data_type)
        or types.is_list_view(data_type)
        or types.is_large_list_view(data_type)
        or any(_is_encoded(data_type.field(index).type) for index in range(data_type.num_fields))
    )


def _is_view(data_type: Any) -> bool:
    return bool(pa.types.is_string_view(data_type) or pa.types.is_binary_view(data_type))


def _without_view(column: Any) -> Any:
    return column.cast(pa.string() if pa.types.is_string_view(column.type) else pa.binary())


def decoded_array(array: Any) -> Any:
    """Do as `decoded`, for a `pyarrow.Array`."""
    types, kind = pa.types, array.type
    if not _is_encoded(kind):
        return array
    if isinstance(array, pa.ExtensionArray):
        return decoded_array(array.storage)
    if types.is_dictionary(kind):
        return decoded_array(array.dictionary).take(array.indices)
    if types.is_run_end_encoded(kind):
        ends = array.run_ends
        runs = pa.RunEndEncodedArray.from_arrays(ends, offset_range(0, len(ends)))
        rows = pc.run_end_decode(runs.slice(array.offset, len(array)))
        return decoded_array(array.values).take(rows)
    if _is_view(kind):
        return _without_view(array)
    mask = array.is_null()
    if types.is_struct(kind):
        inner = [decoded_array(array.field(index)) for index in range(kind.num_fields)]
        return pa.StructArray.from_arrays(inner, [field.name for field in kind], mask=mask)
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        items = array.values.slice(array.offset * size, len(array) * size)
        return pa.FixedSizeListArray.from_arrays(decoded_array(items), size, mask=mask)
    # A copy: a slice of offsets cannot be combined with a mask, or with lengths.
    offsets = pc.add(array.offsets, number(0, array.offsets.type))
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        lengths = pc.fill_null(pc.list_value_length(array), 0)
        # Arrow copies the items of few encoded types, so they are decoded first.
        owner = pa.ListViewArray if types.is_list_view(kind) else pa.LargeListViewArray
        items = owner.from_arrays(offsets, lengths, decoded_array(array.values)).flatten()
        ends = pc.cumulative_sum(lengths.cast(pa.int64()))
        return _list_of(pa.concat_arrays([pa.array([0], pa.int64()), ends]), items, mask)
    if types.is_map(kind):
        # A null offset makes a null map.
        marks = pa.concat_arrays([mask, pa.array([False])])
        marked = pc.if_else(marks, pa.nulls(1, pa.int32())[0], offsets)
        return pa.MapArray.from_arrays(
            marked, decoded_array(array.keys), decoded_array(array.items)
        )
    return _list_of(offsets, decoded_array(array.values), mask)


def _list_of(offsets: Any, items: Any, mask: Any) -> Any:
    return pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), items, mask=mask)


def _check_cast(source: Any, target: Any, name: str, topic: str, *, inside: bool = False) -> None:
    """Raise for casts that Arrow makes, but that lose fields or change what a value is.

    ``inside`` is whether they are of what is inside of a column, where `cast_exactly` does not
    look for what Arrow changes without a word.
    """
    types = pa.types
    kind, target_kind = _kind(source), _kind(target)
    if kind == "null":
        return
    allowed = source == target or kind in _CASTS.get(target_kind, ())
    if inside and kind == target_kind == "float":
        allowed = source.bit_width <= target.bit_width
    if inside and (kind, target_kind) == ("timestamp", "date"):
        allowed = False
    if kind == target_kind == "timestamp":
        allowed = (source.tz is None) == (target.tz is None)
    if not allowed:
        raise SerializationError(
            f"Column {name} is {source}, and the topic's is {target}",
            topic=topic,
            column=name,
            todo="Cast the column first.",
        )
    if types.is_struct(target):
        fields = {field.name: field.type for field in target}
        for field in source:
            if field.name not in fields:
                raise SerializationError(
                    f"Column {name} of the topic has no field {field.name!r}",
                    topic=topic,
                    column=name,
                    todo=Hint(
                        "Leave it out, or add it with alter_topic.",
                        "Leave it out, or add it with alter_topic in Python.",
                    ),
                )
            inner = fields[field.name]
            _check_cast(field.type, inner, f"{name}.{field.name}", topic, inside=True)
    elif types.is_map(target):
        _check_cast(source.key_type, target.key_type, name, topic, inside=True)
        _check_cast(source.item_type, target.item_type, name, topic, inside=True)
    elif target_kind == "list":
        _check_cast(source.value_type, target.value_type, name, topic, inside=True)


def _kind(data_type: Any) -> str:
    types = pa.types
    kinds = {
        "integer": types.is_integer,
        "float": types.is_floating,
        "decimal": types.is_decimal,
        "text": types.is_string,
        "binary": lambda kind: types.is_binary(kind) or types.is_fixed_size_binary(kind),
        "date": types.is_date32,
        "timestamp": types.is_timestamp,
        "time": types.is_time,
        "duration": types.is_duration,
        "struct": types.is_struct,
        "map": types.is_map,
        "list": lambda kind: types.is_list(kind) or types.is_fixed_size_list(kind),
    }
    return next((name for name, is_kind in kinds.items() if is_kind(data_type)), str(data_type))


_CASTS = {
    "integer": ("integer", "float", "decimal"),
    "float": ("float", "integer"),
    "decimal": ("decimal", "integer"),
    "binary": ("binary",),
    "date": ("date", "timestamp"),
    "timestamp": ("timestamp", "date"),
    "time": ("time",),
    "duration": ("duration",),
    "struct": ("struct",),
    "map": ("map",),
    "list": ("list",),
}
"""By the kind of a topic's column, the kinds that are cast to it."""


def cast_exactly(column: Any, target: Any) -> Any:
    """Return a column as another type.

    Raises:
        pyarrow.ArrowException, ValueError: A value would be changed.
    """
    types = pa.types
    if types.is_integer(column.type) and types.is_decimal(target):
        # Arrow wants room for the largest integer, even if there is none.
        column = column.cast(pa.decimal256(20 + max(target.scale, 0), max(target.scale, 0)))
    changed = column.cast(target)
    # Arrow drops the time of day, and turns what is too large to infinity, without an error.
    to_day = types.is_date32(target) and types.is_timestamp(column.type)
    if to_day and not _all(pc.equal(changed.cast(column.type), column)):
        raise ValueError("a timestamp is not at midnight")
    floats = types.is_floating(target) and types.is_floating(column.type)
    if floats and not _all(pc.equal(pc.is_inf(changed), pc.is_inf(column))):
        raise ValueError("a number is too large")
    return changed


def _all(column: Any) -> bool:
    return pc.all(column).as_py() is not False


def _first_failure(column: Any, target: Any) -> int | None:
    """Return the first row that cannot be cast; None if no single one is to blame."""
    low, high = 0, len(column)
    if not _fails(column, target):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _fails(_copied(column.slice(low, middle - low)), target):
            high = middle
        else:
            low = middle
    return low


def _copied(column: Any) -> Any:
    """Return a column without rows of others: Arrow casts all items of the lists that it is of."""
    return column.take(offset_range(0, len(column)))


def _fails(column: Any, target: Any) -> bool:
    try:
        cast_exactly(column, target)
    except (pa.ArrowException, ValueError):
        return True
    return False
