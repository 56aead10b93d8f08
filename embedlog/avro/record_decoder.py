"""Records in Avro's binary encoding as columns, by Avro's rules for schemas of readers.

All records of a call have the same schema, so they are decoded field by field, for all records at
once: an array has the position that each record was read up to.  No Python code runs per record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from embedlog.avro.arrow_types import arrow_type, is_nullable, value_type
from embedlog.avro.default_encoder import encode_json_value
from embedlog.avro.schema import NO_DEFAULT, AvroField, AvroType
from embedlog.batch.arrays import bitmap
from embedlog.errors import InvalidSchemaError
from embedlog.lazy import np, pa

_PADDING = 32
"""Bytes after the last record: the widest value at a position need not end before it."""
_MOST_VARINT_BYTES = 10
_PROMOTIONS = {
    "int": ("int", "long", "float", "double"),
    "long": ("long", "float", "double"),
    "float": ("float", "double"),
    "string": ("string", "bytes"),
    "bytes": ("bytes", "string"),
}
"""By the type of a writer, the types as which a reader may read its values."""

Rows = Any
"""The numbers of records, in ascending order, as a numpy array of int64."""


class RowError(Exception):
    """A record cannot be decoded.

    Args:
        row: Its number.
        column: The path of the field.
        reason: Why, as the end of a sentence.
    """

    def __init__(self, row: int, column: str, reason: str) -> None:
        super().__init__(row, column, reason)
        self.row, self.column, self.reason = row, column, reason


class Cursor:
    """The encoded records, and how far each of them was read.

    Args:
        records: A `pyarrow.BinaryArray` without nulls.
        skip: How many bytes precede the encoding in each record.
    """

    def __init__(self, records: Any, skip: int = 0) -> None:
        count = len(records)
        offsets = np.zeros(1, np.int32)
        if count:
            offsets = np.frombuffer(records.buffers()[1], np.int32, count + 1, 4 * records.offset)
        offsets = offsets.astype(np.int64)
        content = np.frombuffer(records.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
        self.data = np.concatenate([content, np.zeros(_PADDING, np.uint8)])
        self._buffer = pa.py_buffer(self.data)
        self.position = offsets[:-1] - offsets[0] + skip
        self.end = offsets[1:] - offsets[0]
        self.rows = np.arange(count)

    def check(self, rows: Rows, wrong: Any, column: str, reason: str) -> None:
        """Raise a `RowError` for the first row that is wrong."""
        if wrong.any():
            raise RowError(int(rows[wrong.argmax()]), column, reason)

    def advance(self, rows: Rows, position: Any, column: str) -> None:
        """Set how far some rows are read."""
        self.check(rows, position > self.end[rows], column, "the record ends too early")
        self.position[rows] = position

    def varints(self, rows: Rows, column: str) -> Any:
        """Read an int or long of each row, as a numpy array of int64."""
        position = self.position[rows]
        self.check(rows, position >= self.end[rows], column, "the record ends too early")
        byte = self.data[position]
        value = (byte & 0x7F).astype(np.uint64)
        position += 1
        (active,) = np.nonzero(byte & 0x80)
        shift = 7
        while len(active):
            at = position[active]
            ended = at >= self.end[rows[active]]
            if shift >= 7 * _MOST_VARINT_BYTES or ended.any():
                self.check(rows[active], ended, column, "the record ends too early")
                self.check(rows[active], active >= 0, column, "a number is too long")
            byte = self.data[at]
            value[active] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
            position[active] = at + 1
            active = active[(byte & 0x80) > 0]
            shift += 7
        self.position[rows] = position
        return (value >> np.uint64(1)).view(np.int64) ^ -(value & np.uint64(1)).view(np.int64)

    def fixed(self, rows: Rows, width: int, column: str) -> Any:
        """Read ``width`` bytes of each row, as a matrix of uint8."""
        position = self.position[rows]
        self.advance(rows, position + width, column)
        return self.data[position[:, None] + np.arange(width)]

    def slices(self, rows: Rows, column: str) -> Any:
        """Read bytes or text of each row, as a `pyarrow.BinaryArray`."""
        lengths = self.varints(rows, column)
        start = self.position[rows]
        # Compared before they are added, which could overflow.
        too_long = (lengths < 0) | (lengths > self.end[rows] - start)
        self.check(rows, too_long, column, "the record ends too early")
        stop = start + lengths
        self.position[rows] = stop
        # Every second item is what lies between two values.
        ends = np.empty(2 * len(rows) + 1, np.int32)
        ends[0:-1:2], ends[1::2], ends[-1] = start, stop, len(self.data)
        items = pa.Array.from_buffers(
            pa.binary(), 2 * len(rows), [None, pa.py_buffer(ends), self._buffer], 0
        )
        return items.take(pa.array(np.arange(0, 2 * len(rows), 2)))


Decode = Callable[[Cursor, Rows], Any]
"""Reads a value of each row, and returns them as a `pyarrow.Array`."""


class AvroDecoder:
    """Decodes records of one schema to the columns of another one.

    Args:
        writer: The schema that the records were written with.
        reader: The schema of the columns; by default that of the writer.

    Raises:
        InvalidSchemaError: Avro's rules do not resolve the writer's schema to the reader's, or
            the reader's has a type that no column can have.
    """

    def __init__(self, writer: AvroType, reader: AvroType | None = None) -> None:
        reader = reader or writer
        for schema in (writer, reader):
            if schema.kind != "record":
                raise InvalidSchemaError(
                    f"The values are of the type {schema.kind}, and not records",
                    todo="A typed topic needs records, whose fields become its columns.",
                )
        self._steps, self._columns = _fields(writer, reader, "")
        self._names = [field.column for field in reader.fields]

    def decode(self, records: Any, skip: int = 0) -> pa.RecordBatch:
        """Return records as a `pyarrow.RecordBatch` with a column per field of the reader.

        Args:
            records: A `pyarrow.BinaryArray` without nulls.
            skip: How many bytes precede the encoding in each record.

        Raises:
            RowError: A record does not have the schema.
        """
        cursor = Cursor(records, skip)
        rows = cursor.rows
        arrays = _read_fields(self._steps, self._columns, cursor, rows)
        is_left = cursor.position != cursor.end
        cursor.check(rows, is_left, "", "bytes follow the end of the record")
        return pa.RecordBatch.from_arrays(arrays, names=self._names)


# Records


def _fields(
    writer: AvroType, reader: AvroType, where: str
) -> tuple[list[tuple[Decode, int | None]], list[Any]]:
    """Return what reads each field of a writer, and where it belongs in the reader's fields.

    The second result has an array of one row for each field that the writer does not have.
    """
    steps: list[tuple[Decode, int | None]] = []
    columns: list[Any] = [None] * len(reader.fields)
    missing = set(range(len(reader.fields)))
    by_name = {field.name: index for index, field in enumerate(reader.fields)}
    aliases = {alias: index for index, field in enumerate(reader.fields) for alias in field.aliases}
    for field in writer.fields:
        index = by_name.get(field.name, aliases.get(field.name))
        if index is None or index not in missing:
            steps.append((_skipped(field.type, _path(where, field.column)), None))
            continue
        missing.discard(index)
        column = reader.fields[index]
        steps.append((_value(field.type, column.type, _path(where, column.column)), index))
    for index in missing:
        columns[index] = _default(reader.fields[index], _path(where, reader.fields[index].column))
    return steps, columns


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _read_fields(
    steps: Sequence[tuple[Decode, int | None]], columns: list[Any], cursor: Cursor, rows: Rows
) -> list[Any]:
    arrays = list(columns)
    for decode, index in steps:
        array = decode(cursor, rows)
        if index is not None:
            arrays[index] = array
    zeros = pa.array(np.zeros(len(rows), np.int64))
    return [
        array if default is None else default.take(zeros)
        for array, default in zip(arrays, columns, strict=True)
    ]


def _default(field: AvroField, where: str) -> Any:
    """Return the default of a field as an array of one row."""
    if field.default is NO_DEFAULT:
        raise InvalidSchemaError(
            f"In {where}: the schema of some records does not have the field, and it has no "
            "default",
            column=where,
            todo="Register a version of the schema that gives it a default.",
        )
    try:
        data = encode_json_value(field.type, field.default)
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidSchemaError(
            f"In {where}: the default {field.default!r} is not of the field's type: {error}",
            column=where,
            todo="Register a version of the schema that corrects it.",
        ) from error
    cursor = Cursor(pa.array([data], pa.binary()))
    return _value(field.type, field.type, where)(cursor, cursor.rows)


# Values


def _value(writer: AvroType, reader: AvroType, where: str) -> Decode:
    """Return what reads values of a writer's type as the column of a reader's type."""
    target, nullable = value_type(reader, where), is_nullable(reader)
    data_type = arrow_type(reader, where)
    if writer.kind != "union":
        return _branch(writer, target, data_type, nullable, where)
    branches: list[Decode] = []
    for branch in writer.branches:
        try:
            branches.append(_branch(branch, target, data_type, nullable, where))
        except InvalidSchemaError as error:
            # Only an error if a record has a value of this type.
            branches.append(_failing(where, error.what.removeprefix(f"In {where}: ")))
    return _union(branches, data_type, where)


def _branch(
    writer: AvroType, target: AvroType, data_type: Any, nullable: bool, where: str
) -> Decode:
    if writer.kind != "null":
        return _resolved(writer, target, data_type, where)
    if nullable:
        return lambda cursor, rows: pa.nulls(len(rows), data_type)
    return _failing(where, "it is null, and the field must not be null")


def _failing(where: str, reason: str) -> Decode:
    def decode(cursor: Cursor, rows: Rows) -> Any:
        raise RowError(int(rows[0]), where, reason)

    return decode


def _union(branches: Sequence[Decode], data_type: Any, where: str) -> Decode:
    def decode(cursor: Cursor, rows: Rows) -> Any:
        index = cursor.varints(rows, where)
        cursor.check(
            rows, (index < 0) | (index >= len(branches)), where, "there is no such type of a union"
        )
        parts, order = [], []
        for number, branch in enumerate(branches):
            (chosen,) = np.nonzero(index == number)
            if len(chosen):
                parts.append(branch(cursor, rows[chosen]))
                order.append(chosen)
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return pa.nulls(0, data_type)
        inverse = np.empty(len(rows), np.int64)
        inverse[np.concatenate(order)] = np.arange(len(rows))
        return pa.concat_arrays(parts).take(pa.array(inverse))

    return decode


def _resolved(writer: AvroType, reader: AvroType, data_type: Any, where: str) -> Decode:
    """Return what reads values of one type, which are not null."""
    _check_meaning(writer, reader, where)
    if writer.kind == reader.kind == "record":
        steps, columns = _fields(writer, reader, where)

        def decode_struct(cursor: Cursor, rows: Rows) -> Any:
            arrays = _read_fields(steps, columns, cursor, rows)
            return pa.StructArray.from_arrays(arrays, fields=list(data_type))

        return decode_struct
    if writer.kind == reader.kind == "array" and not pa.types.is_map(data_type):
        return _array(writer, reader, data_type, where)
    if writer.kind == reader.kind == "array":
        return _map_of_pairs(writer, reader, data_type, where)
    if writer.kind == reader.kind == "map":
        items = _value(writer.inner, reader.inner, f"{where}{{}}")

        def decode_map(cursor: Cursor, rows: Rows) -> Any:
            read_key = _leaf(AvroType("string"), AvroType("string"), pa.string(), where)
            offsets, (keys, values) = _blocks([read_key, items], cursor, rows, where)
            if keys is None:
                keys = pa.nulls(0, pa.string())
                values = pa.nulls(0, data_type.item_type)
            return pa.MapArray.from_arrays(offsets, keys, values, type=data_type)

        return decode_map
    if writer.kind == reader.kind == "fixed" and writer.size != reader.size:
        raise _mismatch(writer, reader, where)
    allowed = _PROMOTIONS.get(writer.kind, (writer.kind,))
    if reader.kind not in allowed:
        raise _mismatch(writer, reader, where)
    return _leaf(writer, reader, data_type, where)


def _check_meaning(writer: AvroType, reader: AvroType, where: str) -> None:
    """Refuse a logical type that is read as another one: the numbers would mean something else."""
    if None in (_meaning(writer), _meaning(reader)) or _meaning(writer) == _meaning(reader):
        return
    raise InvalidSchemaError(
        f"In {where}: values that were written as {_description(writer)} cannot be read as "
        f"{_description(reader)}",
        column=where,
        todo="Avro does not convert one to the other: keep the logical type in all versions of "
        "the schema.",
    )


def _meaning(schema: AvroType) -> tuple[str, int] | None:
    if schema.logical is not None:
        return schema.logical, schema.scale
    is_number = schema.kind == "long" or (schema.kind == "bytes" and schema.arrow is not None)
    if is_number and schema.arrow is not None and not schema.arrow.startswith(("int", "uint")):
        return schema.arrow, 0
    return None


def _description(schema: AvroType) -> str:
    if schema.logical == "decimal":
        return f"decimal({schema.precision}, {schema.scale})"
    return schema.logical or schema.arrow or schema.name or schema.kind


def _mismatch(writer: AvroType, reader: AvroType, where: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"In {where}: values that were written as {_description(writer)} cannot be read as "
        f"{_description(reader)}",
        column=where,
        todo="Register a version of the schema that can read all records, as the compatibility "
        "level BACKWARD demands.",
    )


# Lists and maps


def _array(writer: AvroType, reader: AvroType, data_type: Any, where: str) -> Decode:
    item = _value(writer.inner, reader.inner, f"{where}[]")
    size = data_type.list_size if pa.types.is_fixed_size_list(data_type) else None

    def decode(cursor: Cursor, rows: Rows) -> Any:
        offsets, (items,) = _blocks([item], cursor, rows, where)
        if items is None:
            items = pa.nulls(0, data_type.value_type)
        if size is None:
            return pa.ListArray.from_arrays(offsets, items, type=data_type)
        lengths = np.diff(offsets.to_numpy())
        cursor.check(rows, lengths != size, where, f"a list does not have {size} items")
        return pa.FixedSizeListArray.from_arrays(items, type=data_type)

    return decode


def _map_of_pairs(writer: AvroType, reader: AvroType, data_type: Any, where: str) -> Decode:
    pair = pa.struct([("key", data_type.key_type), ("value", data_type.item_type)])
    item = _resolved(writer.inner, reader.inner, pair, f"{where}{{}}")

    def decode(cursor: Cursor, rows: Rows) -> Any:
        offsets, (pairs,) = _blocks([item], cursor, rows, where)
        if pairs is None:
            pairs = pa.nulls(0, pair)
        return pa.MapArray.from_arrays(offsets, pairs.field(0), pairs.field(1), type=data_type)

    return decode


def _blocks(
    parts: Sequence[Decode], cursor: Cursor, rows: Rows, where: str
) -> tuple[Any, list[Any]]:
    """Read the blocks of an array or a map.

    Returns:
        Where the items of each row begin, and the items by part; None without items.
    """
    owners: list[Any] = []
    chunks: list[list[Any]] = [[] for _ in parts]
    active = np.arange(len(rows))
    while len(active):
        counts = cursor.varints(rows[active], where)
        (sized,) = np.nonzero(counts < 0)
        if len(sized):
            # A negative count is followed by the bytes of the block.
            cursor.varints(rows[active[sized]], where)
            counts[sized] = -counts[sized]
        # A damaged count would otherwise keep this loop busy for ever.
        left = cursor.end[rows[active]] - cursor.position[rows[active]]
        cursor.check(
            rows[active], (counts < 0) | (counts > left), where, "the record ends too early"
        )
        for number in range(int(counts.max(initial=0))):
            members = active[counts > number]
            owners.append(members)
            for decode, chunk in zip(parts, chunks, strict=True):
                chunk.append(decode(cursor, rows[members]))
        active = active[counts > 0]
    lengths = np.zeros(len(rows) + 1, np.int32)
    if not owners:
        return pa.array(lengths), [None] * len(parts)
    owner = np.concatenate(owners)
    np.cumsum(np.bincount(owner, minlength=len(rows)), out=lengths[1:])
    order = pa.array(np.argsort(owner, kind="stable"))
    return pa.array(lengths), [pa.concat_arrays(chunk).take(order) for chunk in chunks]


# Values without others inside


def _leaf(writer: AvroType, reader: AvroType, data_type: Any, where: str) -> Decode:
    """Return what reads values in the writer's form, and gives them the type of a column."""
    read = _plain(writer, where)
    enum = _enum_symbols(writer, reader, where) if writer.kind == "enum" else None

    def decode(cursor: Cursor, rows: Rows) -> Any:
        values = read(cursor, rows)
        if enum is not None:
            return enum(cursor, rows, values)
        try:
            return _typed(values, reader, data_type)
        except (pa.ArrowException, ValueError) as error:
            row, reason = _first_failure(values, reader, data_type)
            raise RowError(int(rows[row]), where, reason) from error

    return decode


def _plain(writer: AvroType, where: str) -> Decode:
    """Return what reads values as Avro stores them."""
    kind = writer.kind
    if kind in ("int", "long"):
        return lambda cursor, rows: _integers(cursor, rows, kind, where)
    if kind == "enum":
        return lambda cursor, rows: cursor.varints(rows, where)
    if kind in ("bytes", "string"):
        return lambda cursor, rows: cursor.slices(rows, where)
    if kind == "fixed":
        return lambda cursor, rows: _fixed_values(cursor, rows, writer.size, where)
    if kind == "boolean":
        return lambda cursor, rows: _booleans(cursor, rows, where)
    data_type = pa.float32() if kind == "float" else pa.float64()
    width = data_type.bit_width // 8

    def floats(cursor: Cursor, rows: Rows) -> Any:
        data = np.ascontiguousarray(cursor.fixed(rows, width, where))
        return pa.Array.from_buffers(data_type, len(rows), [None, pa.py_buffer(data)])

    return floats


def _integers(cursor: Cursor, rows: Rows, kind: str, where: str) -> Any:
    numbers = cursor.varints(rows, where)
    if kind == "int":
        narrow = numbers.astype(np.int32)
        cursor.check(rows, narrow != numbers, where, "a number does not fit in 32 bits")
        numbers = narrow
    return pa.array(numbers)


def _booleans(cursor: Cursor, rows: Rows, where: str) -> Any:
    data = cursor.fixed(rows, 1, where)[:, 0]
    cursor.check(rows, data > 1, where, "a boolean is neither 0 nor 1")
    return pa.Array.from_buffers(pa.bool_(), len(rows), [None, bitmap(data)])


def _fixed_values(cursor: Cursor, rows: Rows, width: int, where: str) -> Any:
    data = np.ascontiguousarray(cursor.fixed(rows, width, where))
    return pa.Array.from_buffers(pa.binary(width), len(rows), [None, pa.py_buffer(data)])


def _enum_symbols(
    writer: AvroType, reader: AvroType, where: str
) -> Callable[[Cursor, Rows, Any], Any]:
    """Return what gives the symbols of a reader for the numbers of a writer."""
    known = set(reader.symbols)
    symbols = [symbol if symbol in known else reader.default for symbol in writer.symbols]
    texts = pa.array(symbols, pa.string())
    unknown = np.array([symbol is None for symbol in symbols], bool)

    def decode(cursor: Cursor, rows: Rows, numbers: Any) -> Any:
        wrong = (numbers < 0) | (numbers >= len(symbols))
        cursor.check(rows, wrong, where, "there is no such symbol of the enum")
        cursor.check(rows, unknown[numbers], where, "the enum has no such symbol any more")
        return texts.take(pa.array(numbers))

    return decode


def _typed(values: Any, reader: AvroType, data_type: Any) -> Any:
    """Return values that are stored as Avro does as those of a type of Arrow.

    Raises:
        pyarrow.ArrowException, ValueError: A value does not fit.
    """
    types = pa.types
    if values.type == data_type:
        return values
    if types.is_decimal(data_type) or types.is_uint64(data_type):
        return _decimals(values, reader, data_type)
    if types.is_time(data_type) or types.is_timestamp(data_type):
        if data_type.unit == "s":
            # Avro has milliseconds; what is no whole second is an error.
            in_ms = (
                pa.time32("ms") if types.is_time(data_type) else pa.timestamp("ms", data_type.tz)
            )
            return _viewed(values, in_ms).cast(data_type)
        return _viewed(values, data_type)
    if types.is_date32(data_type) or types.is_duration(data_type):
        return _viewed(values, data_type)
    if types.is_floating(data_type):
        return values.cast(data_type, safe=False)
    return values.cast(data_type)


def _viewed(values: Any, data_type: Any) -> Any:
    """Return integers as times; those of a writer of int are widened."""
    return values.cast(pa.int32() if data_type.bit_width == 32 else pa.int64()).view(data_type)


def _decimals(values: Any, reader: AvroType, data_type: Any) -> Any:
    """Return two's complement numbers, the most significant byte first, as decimals."""
    decimal = data_type
    if pa.types.is_uint64(data_type):
        decimal = pa.decimal128(20, 0)
    count, width = len(values), decimal.bit_width // 8
    if pa.types.is_fixed_size_binary(values.type):
        values = values.cast(pa.binary())
    if not count:
        return pa.nulls(0, data_type)
    ends = np.frombuffer(values.buffers()[1], np.int32, count + 1, 4 * values.offset)
    data = np.frombuffer(values.buffers()[2] or b"\0", np.uint8)
    lengths = np.diff(ends)
    if (lengths > width).any():
        raise ValueError("a number has too many bytes")
    last = ends[1:].astype(np.int64) - 1
    is_negative = (lengths > 0) & (data[np.minimum(ends[:-1], len(data) - 1)] >= 0x80)
    little = np.empty((count, width), np.uint8)
    sign = is_negative.astype(np.uint8) * np.uint8(0xFF)
    for index in range(width):
        little[:, index] = np.where(index < lengths, data[np.maximum(last - index, 0)], sign)
    result = pa.Array.from_buffers(decimal, count, [None, pa.py_buffer(little)])
    result.validate(full=True)
    return result.cast(data_type)


def _first_failure(values: Any, reader: AvroType, data_type: Any) -> tuple[int, str]:
    """Return the first value that does not fit, and why."""
    low, high = 0, len(values)
    reason = ""
    while high - low > 1:
        middle = (low + high) // 2
        if _failure(values.slice(low, middle - low), reader, data_type):
            high = middle
        else:
            low = middle
    reason = _failure(values.slice(low, 1), reader, data_type)
    return low, f"it is not {data_type}: {reason}"


def _failure(values: Any, reader: AvroType, data_type: Any) -> str:
    try:
        _typed(values, reader, data_type)
    except (pa.ArrowException, ValueError) as error:
        return str(error) or type(error).__name__
    return ""


# What a reader does not have


def _skipped(writer: AvroType, where: str) -> Decode:
    """Return what reads past values of a writer."""
    if writer.kind == "null":
        return lambda cursor, rows: None
    if writer.kind == "record":
        steps = [_skipped(field.type, _path(where, field.column)) for field in writer.fields]

        def skip_fields(cursor: Cursor, rows: Rows) -> Any:
            for step in steps:
                step(cursor, rows)

        return skip_fields
    if writer.kind == "union":
        branches = [_skipped(branch, where) for branch in writer.branches]

        def skip_branch(cursor: Cursor, rows: Rows) -> Any:
            index = cursor.varints(rows, where)
            wrong = (index < 0) | (index >= len(branches))
            cursor.check(rows, wrong, where, "there is no such type of a union")
            for number, branch in enumerate(branches):
                chosen = rows[index == number]
                if len(chosen):
                    branch(cursor, chosen)

        return skip_branch
    if writer.kind in ("array", "map"):
        return _skipped_items(writer, where)
    return _plain(writer, where)


def _skipped_items(writer: AvroType, where: str) -> Decode:
    parts = [_skipped(writer.inner, where)]
    if writer.kind == "map":
        parts.insert(0, _skipped(AvroType("string"), where))

    def nothing(step: Decode) -> Decode:
        def decode(cursor: Cursor, rows: Rows) -> Any:
            step(cursor, rows)
            return pa.nulls(len(rows))

        return decode

    wrapped = [nothing(part) for part in parts]

    def skip_items(cursor: Cursor, rows: Rows) -> Any:
        _blocks(wrapped, cursor, rows, where)

    return skip_items
