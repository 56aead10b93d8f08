"""Avro's schemas and encoding as columns of Arrow; fastavro and Avro's rules are the judge."""

from __future__ import annotations

import datetime as dt
import io
import json
from decimal import Decimal

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_columns import NAMES, arrow, canonical, or_none, types, values

from embedlog.convert.avro_columns import AvroDecoder, encode, to_columns
from embedlog.convert.avro_types import avro_schema, columns_of
from embedlog.convert.avro_types import parse as parse_text
from embedlog.convert.stored_rows import RowError
from embedlog.errors import InvalidSchemaError

columns = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(types(), st.booleans()), min_size=1, max_size=3
)


def schema_of(described):
    return pa.schema([pa.field(name, kind, null) for name, (kind, null) in described.items()])


@st.composite
def batches(draw):
    """Rows of any columns, as a slice of a larger batch."""
    schema, rows = schema_of(draw(columns)), draw(st.integers(1, 5))
    arrays = []
    for field in schema:
        items = values(field.type)
        items = or_none(items) if field.nullable else items
        chosen = draw(st.lists(items, min_size=rows, max_size=rows))
        arrays.append(arrow(chosen, field.type))
    start, stop = sorted((draw(st.integers(0, rows)), draw(st.integers(0, rows))))
    return pa.RecordBatch.from_arrays(arrays, schema=schema).slice(start, stop - start)


def record(*fields, **more):
    return {"type": "record", "name": "r", "fields": list(fields), **more}


def field(name, kind, **more):
    return {"name": name, "type": kind, **more}


def one(kind):
    """The schema of a record with one field."""
    return record(field("x", kind))


def written(schema, *rows):
    """Records as fastavro writes them."""
    parsed, result = fastavro.parse_schema(json.loads(json.dumps(schema))), []
    for row in rows:
        file = io.BytesIO()
        fastavro.schemaless_writer(file, parsed, row)
        result.append(file.getvalue())
    return pa.array(result, pa.binary())


def parse(schema):
    """A schema, also one that is not yet JSON."""
    is_json = isinstance(schema, str) and schema.startswith("{")
    return parse_text(schema if is_json else json.dumps(schema))


def decoded(data, writer, reader=None):
    """Records as columns; an error has the row of its record."""
    decoder, records = AvroDecoder(writer, reader), []
    for row, item in enumerate(data):
        try:
            records.append(decoder.decode(item))
        except RowError as error:
            raise RowError(row, error.column, error.reason) from error
    return to_columns(records, reader or writer)


def read(data, writer, reader=None):
    batch = decoded(data.to_pylist(), parse(writer), None if reader is None else parse(reader))
    batch.validate(full=True)
    return batch.to_pylist()


# Types


@given(columns)
def test_the_columns_of_a_schema_come_back_from_avro(described):
    """Names, types and whether they may be null; fastavro takes the schema."""
    schema = schema_of(described)
    text = avro_schema(schema, "flights-2.value")
    fastavro.parse_schema(json.loads(text))
    assert columns_of(parse(text)) == schema


def test_only_what_avro_has_no_type_for_has_a_property():
    """Programs that do not know it read numbers and times as what they are."""
    schema = pa.schema(
        [
            ("a", pa.int64()),
            ("b", pa.uint64()),
            ("c", pa.timestamp("s", tz="UTC")),
            ("d", pa.timestamp("us")),
            ("é", pa.string()),
        ]
    )
    a, b, c, d, e = (field["type"][1] for field in json.loads(avro_schema(schema, "x"))["fields"])
    assert a == "long"
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 0}
    assert b == {**decimal, "arrow.type": "uint64"}
    assert c == {
        "type": "long",
        "logicalType": "timestamp-millis",
        "arrow.type": "timestamp[s, tz=UTC]",
    }
    assert d == {"type": "long", "logicalType": "local-timestamp-micros"}
    assert e == "string"
    assert json.loads(avro_schema(schema, "x"))["fields"][4]["arrow.name"] == "é"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("boolean", pa.bool_()),
        ("int", pa.int32()),
        ({"type": "long"}, pa.int64()),
        ("float", pa.float32()),
        ("double", pa.float64()),
        ("bytes", pa.binary()),
        ({"type": "fixed", "name": "f", "size": 12, "logicalType": "duration"}, pa.binary(12)),
        ({"type": "enum", "name": "e", "symbols": ["A"]}, pa.string()),
        ({"type": "string", "logicalType": "uuid"}, pa.string()),
        ({"type": "int", "logicalType": "date"}, pa.date32()),
        ({"type": "int", "logicalType": "time-millis"}, pa.time32("ms")),
        ({"type": "long", "logicalType": "time-micros"}, pa.time64("us")),
        ({"type": "long", "logicalType": "timestamp-millis"}, pa.timestamp("ms", tz="UTC")),
        ({"type": "long", "logicalType": "timestamp-nanos"}, pa.timestamp("ns", tz="UTC")),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, pa.timestamp("us")),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
            pa.decimal128(9, 2),
        ),
        (
            {
                "type": "fixed",
                "name": "f",
                "size": 20,
                "logicalType": "decimal",
                "precision": 40,
                "scale": 0,
            },
            pa.decimal256(40, 0),
        ),
        ({"type": "string", "logicalType": "date"}, pa.string()),
        ({"type": "bytes", "logicalType": "decimal"}, pa.binary()),
        ({"type": "long", "logicalType": "my-own"}, pa.int64()),
        ({"type": "string", "arrow.type": "int8"}, pa.string()),
        ({"type": "int", "arrow.type": "nonsense"}, pa.int32()),
        ({"type": "array", "items": "int"}, pa.list_(pa.int32())),
        ({"type": "map", "values": ["null", "long"]}, pa.map_(pa.string(), pa.int64())),
        (record(field("y", ["null", "int"]), name="s"), pa.struct([("y", pa.int32())])),
    ],
    ids=str,
)
def test_a_type_of_avro_has_one_of_arrow(kind, expected):
    """An annotation that does not belong to its type is ignored, as Avro demands."""
    assert columns_of(parse(one(["null", kind]))) == pa.schema([("x", expected)])
    assert columns_of(parse(one(kind))) == pa.schema([pa.field("x", expected, False)])


def test_a_type_may_be_used_again_by_its_name():
    """Also without its namespace, inside of it."""
    address = {"type": "record", "name": "Address", "fields": [field("city", "string")]}
    schema = record(
        field("home", address), field("work", ["null", "Address"]), namespace="org.example"
    )
    inner = pa.struct([("city", pa.string())])
    assert columns_of(parse(schema)) == pa.schema(
        [pa.field("home", inner, False), pa.field("work", inner)]
    )


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (one(["null", "int", "string"]), "In x: The field is a union of int, string, and a column"),
        (one("null"), "In x: The field is always null"),
        (one(["null"]), "In x: The field is a union of null only"),
        (one(record(name="empty")), "In x: The record has no fields"),
        (
            one({"type": "bytes", "logicalType": "decimal", "precision": 77, "scale": 0}),
            "In x: The decimal has 77 digits",
        ),
        (one({"type": "array", "items": ["int", "long"]}), r"In x\[\]: The field is a union"),
        (one(["null", "r"]), "In x: The type r contains itself"),
        ("long", "The values are of the type long, and not records"),
        ([], "The values are of the type union"),
    ],
    ids=str,
)
def test_what_cannot_be_columns_is_refused(schema, message):
    """With the path of the field, the reason and what would work."""
    with pytest.raises(InvalidSchemaError, match=message) as error:
        columns_of(parse(schema))
    assert error.value.todo


# Values


@given(batches())
def test_rows_come_back_from_avro(batch):
    """Every type, with nulls inside and out."""
    schema = parse(avro_schema(batch.schema, "x"))
    result = decoded(list(encode(batch, schema)), schema)
    result.validate(full=True)
    assert result.schema.types == batch.schema.types
    for before, after in zip(batch.columns, result.columns, strict=True):
        assert list(map(canonical, after.to_pylist())) == list(map(canonical, before.to_pylist()))


def without_logical_types(schema):
    if isinstance(schema, dict):
        return {k: without_logical_types(v) for k, v in schema.items() if k != "logicalType"}
    if isinstance(schema, list):
        return list(map(without_logical_types, schema))
    return schema


@given(batches())
def test_the_bytes_are_those_of_fastavro(batch):
    """Except for maps, which fastavro's dicts cannot hold if a key is there twice."""
    text = avro_schema(batch.schema, "x")
    plain = fastavro.parse_schema(without_logical_types(json.loads(text)))
    for data in encode(batch, parse(text)):
        file = io.BytesIO(data)
        row = fastavro.schemaless_reader(file, plain)
        assert file.tell() == len(data)
        again = io.BytesIO()
        fastavro.schemaless_writer(again, plain, row)
        assert again.getvalue() == data


def test_logical_types_are_those_of_fastavro():
    """Both read the same times and numbers."""
    schema = pa.schema(
        [
            ("date", pa.date32()),
            ("time", pa.time64("us")),
            ("instant", pa.timestamp("s", tz="UTC")),
            ("local", pa.timestamp("us")),
            ("price", pa.decimal128(9, 2)),
            ("large", pa.uint64()),
        ]
    )
    moment = dt.datetime(2026, 1, 31, 12, 30, 15, tzinfo=dt.UTC)
    row = {
        "date": moment.date(),
        "time": moment.time(),
        "instant": moment,
        "local": moment.replace(tzinfo=None),
        "price": Decimal("-1234567.89"),
        "large": 2**64 - 1,
    }
    text = avro_schema(schema, "x")
    (data,) = encode(pa.RecordBatch.from_pylist([row], schema), parse(text))
    parsed = fastavro.parse_schema(json.loads(text))
    assert fastavro.schemaless_reader(io.BytesIO(data), parsed) == row


def test_a_time_in_seconds_that_avro_cannot_hold_is_refused():
    """Milliseconds have fewer years; the error names the column."""
    batch = pa.RecordBatch.from_arrays(
        [pa.array([1 << 62], pa.int64()).view(pa.timestamp("s"))], names=["when"]
    )
    with pytest.raises(pa.ArrowInvalid, match="when: "):
        list(encode(batch, parse(avro_schema(batch.schema, "x"))))


# The rules for schemas of readers

SYMBOLS = {"type": "enum", "name": "e", "symbols": ["A", "B", "C"]}
PAIR = {"type": "record", "name": "p", "fields": [field("a", "int"), field("b", "string")]}
EVOLUTIONS = {
    "an added field has its default": (
        one("int"),
        record(
            field("x", "int"),
            field("s", "string", default="new"),
            field("n", ["null", "long"], default=None),
            field("l", {"type": "array", "items": "int"}, default=[1, 2]),
            field("m", {"type": "map", "values": "int"}, default={"k": 1}),
            field("p", PAIR, default={"a": 1, "b": "q"}),
            field("e", SYMBOLS, default="B"),
            field("d", "double", default=1.5),
            field("t", "boolean", default=True),
        ),
        [{"x": 1}, {"x": -5}],
    ),
    "a field that was removed is left out": (
        record(
            field("a", ["null", "int", PAIR]),
            field("b", {"type": "array", "items": {"type": "map", "values": SYMBOLS}}),
            field("c", {"type": "fixed", "name": "f", "size": 3}),
            field("x", "int"),
            field("d", "boolean"),
        ),
        one("int"),
        [
            {"a": {"a": 1, "b": "b"}, "b": [{"k": "C"}], "c": b"abc", "x": 7, "d": True},
            {"a": None, "b": [], "c": b"abc", "x": 8, "d": True},
            {"a": 4, "b": [{}, {"k": "A", "l": "B"}], "c": b"abc", "x": 9, "d": True},
        ],
    ),
    "fields may come in another order": (
        record(field("a", "int"), field("b", "string")),
        record(field("b", "string"), field("a", "int")),
        [{"a": 1, "b": "q"}],
    ),
    "a field may have another name": (
        record(field("old", "int")),
        record(field("new", "long", aliases=["older", "old"])),
        [{"old": 5}],
    ),
    "int as long": (one("int"), one("long"), [{"x": -3}]),
    "int as double": (one("int"), one("double"), [{"x": -3}]),
    "long as float": (one("long"), one("float"), [{"x": 1 << 20}]),
    "float as double": (one("float"), one("double"), [{"x": 0.5}]),
    "string as bytes": (one("string"), one("bytes"), [{"x": "é"}]),
    "bytes as string": (one("bytes"), one("string"), [{"x": "é".encode()}]),
    "a value becomes nullable": (one("int"), one(["null", "long"]), [{"x": 1}]),
    "a union gets another order": (
        one(["null", "int"]),
        one(["long", "null"]),
        [{"x": 1}, {"x": None}, {"x": 2}],
    ),
    "values that are not null": (one(["null", "int"]), one("int"), [{"x": 1}, {"x": 2}]),
    "a union of which one type can be read": (
        one(["null", "int", "string"]),
        one(["null", "long"]),
        [{"x": None}, {"x": 3}],
    ),
    "a union of types that are all promoted": (
        one(["int", "long", "float"]),
        one("double"),
        [{"x": 3}, {"x": 1 << 40}, {"x": 0.5}],
    ),
    "a symbol that is not known any more": (
        one(SYMBOLS),
        one({**SYMBOLS, "symbols": ["C", "U"], "default": "U"}),
        [{"x": "A"}, {"x": "C"}],
    ),
    "inside of a list": (
        one({"type": "array", "items": PAIR}),
        one({"type": "array", "items": {**PAIR, "fields": [field("a", "long")]}}),
        [{"x": [{"a": 1, "b": "q"}, {"a": 2, "b": ""}]}, {"x": []}],
    ),
    "inside of a map": (
        one({"type": "map", "values": "int"}),
        one({"type": "map", "values": ["null", "double"]}),
        [{"x": {"a": 1}}],
    ),
}


def as_dicts(value):
    """Return what Arrow returned, with its maps as dicts."""
    if isinstance(value, dict):
        return {key: as_dicts(item) for key, item in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) for item in value):
            return {key: as_dicts(item) for key, item in value}
        return list(map(as_dicts, value))
    return value


@pytest.mark.parametrize("name", EVOLUTIONS)
def test_records_are_read_as_avro_resolves_them(name):
    """As fastavro does, which reads one record at a time."""
    writer, reader, rows = EVOLUTIONS[name]
    data = written(writer, *rows)
    expected = [
        fastavro.schemaless_reader(
            io.BytesIO(item),
            fastavro.parse_schema(json.loads(json.dumps(writer))),
            fastavro.parse_schema(json.loads(json.dumps(reader))),
        )
        for item in data.to_pylist()
    ]
    assert [as_dicts(row) for row in read(data, writer, reader)] == expected


def test_each_character_of_a_default_of_bytes_is_a_byte():
    """As Avro says; fastavro returns text."""
    reader = record(field("x", "int"), field("y", "bytes", default="\u00ff\0"))
    assert read(written(one("int"), {"x": 1}), one("int"), reader) == [{"x": 1, "y": b"\xff\0"}]


@pytest.mark.parametrize(
    ("writer", "reader", "message"),
    [
        (one("int"), record(field("y", "int")), "In y: the schema of some records does not have"),
        (one("string"), one("int"), "In x: values that were written as string cannot be read as"),
        (one("long"), one("int"), "In x: values that were written as long"),
        (
            one({"type": "long", "logicalType": "timestamp-millis"}),
            one({"type": "long", "logicalType": "timestamp-micros"}),
            "timestamp-millis cannot be read as timestamp-micros",
        ),
        (
            one({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}),
            one({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3}),
            r"decimal\(9, 2\) cannot be read as decimal\(9, 3\)",
        ),
        (
            one({"type": "long", "arrow.type": "duration[s]"}),
            one({"type": "long", "arrow.type": "duration[ms]"}),
            r"duration\[s\] cannot be read as duration\[ms\]",
        ),
        (
            one({"type": "fixed", "name": "f", "size": 3}),
            one({"type": "fixed", "name": "f", "size": 4}),
            "cannot be read as",
        ),
        *(
            (one("int"), record(field("y", kind, default=default)), "the default .* is not of")
            for kind, default in (
                ({"type": "array", "items": "int"}, ["a"]),
                ({"type": "map", "values": "long"}, {"k": True}),
                ({"type": "fixed", "name": "f", "size": 3}, "ab"),
                ("bytes", "\u1234"),
                (SYMBOLS, "D"),
                (PAIR, {"a": 1}),
            )
        ),
    ],
    ids=str,
)
def test_schemas_that_do_not_resolve_are_refused(writer, reader, message):
    """Also where Avro would take a number for another one."""
    with pytest.raises(InvalidSchemaError, match=message):
        AvroDecoder(parse(writer), parse(reader))


@pytest.mark.parametrize(
    ("writer", "reader", "value"),
    [
        (one(["null", "int"]), one("int"), None),
        (one(["null", "int", "string"]), one(["null", "long"]), "text"),
        (one(SYMBOLS), one({**SYMBOLS, "symbols": ["A"]}), "C"),
    ],
    ids=str,
)
def test_a_value_that_the_reader_does_not_have_is_an_error_of_its_row(writer, reader, value):
    """Other values of the same schema are read."""
    good = {"x": "A" if writer == one(SYMBOLS) else 1}
    assert read(written(writer, good), writer, reader) == [good]
    with pytest.raises(RowError, match="that the field does not have") as error:
        read(written(writer, good, {"x": value}), writer, reader)
    assert (error.value.row, error.value.column) == (1, "x")


# Damage

MIXED = record(
    field("a", "long"),
    field("b", ["null", "string"]),
    field("c", {"type": "array", "items": ["null", "int"]}),
    field("d", {"type": "map", "values": "double"}),
    field("e", SYMBOLS),
    field("f", {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 2}),
    field("g", "boolean"),
)
ROW = {
    "a": 1 << 60,
    "b": "text",
    "c": [1, None, 3],
    "d": {"k": 1.5},
    "e": "B",
    "f": Decimal("-12.34"),
    "g": True,
}


def test_a_record_that_ends_too_early_is_an_error_of_its_row():
    """At every byte; a byte too much is one, too."""
    whole = written(MIXED, ROW)[0].as_py()
    for end in [*range(len(whole)), len(whole) + 1]:
        data = pa.array([whole, (whole + b"\0")[:end], whole], pa.binary())
        with pytest.raises(RowError) as error:
            read(data, MIXED)
        assert error.value.row == 1
        assert error.value.reason


@given(st.data())
def test_damaged_bytes_give_valid_columns_or_an_error(data):
    """Never rows that Arrow would stumble over."""
    whole = written(MIXED, ROW)[0].as_py()
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(whole) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    records = pa.array([whole, bytes(damaged), whole], pa.binary())
    wrong = None
    try:
        rows = read(records, MIXED)
    except RowError as error:
        wrong = error.row
    assert wrong == 1 or (wrong is None and rows[0] == rows[2])


@pytest.mark.parametrize(
    ("schema", "data", "column", "reason"),
    [
        (one("int"), b"\xfe\xff\xff\xff\xff\x01", "x", "not int32"),
        (one("long"), b"\xff" * 11, "x", "."),
        (one(["null", "int"]), b"\x04\x02", "x", "no such type of a union"),
        (one(SYMBOLS), b"\x06", "x", "no such .* symbol of an enum"),
        (one("string"), b"\x02\xff", "x", "can't decode byte"),
        (one({"type": "int", "arrow.type": "int8"}), b"\x80\x02", "x", "not int8"),
        (
            one(
                {
                    "type": "long",
                    "logicalType": "timestamp-millis",
                    "arrow.type": "timestamp[s, tz=UTC]",
                }
            ),
            b"\x02",
            "x",
            "would lose data",
        ),
        (
            one({"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 0}),
            b"\x02\x64",
            "x",
            "not decimal",
        ),
        (one({"type": "array", "items": "long"}), b"\x10\x02\x00", "x", "too early"),
        (one(PAIR), b"\x02\x08ab", "x", "too early"),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_is_named(schema, data, column, reason):
    """The row, the path of the field, and why."""
    with pytest.raises(RowError, match=reason) as error:
        read(pa.array([data], pa.binary()), schema)
    assert (error.value.row, error.value.column) == (0, column)
