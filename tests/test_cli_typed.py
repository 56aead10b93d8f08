"""The command line on typed topics: created from files, filled, printed, exported and queried."""

from __future__ import annotations

import datetime as dt
import io
import json
import math
import re
import subprocess
import sys
from decimal import Decimal

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet
from support.random_columns import arrow, or_none, timestamp_types, types, values

import embedlog
from embedlog.cli import file_formats, main, read_files
from embedlog.cli.read_files import read_rows
from embedlog.cli.write_files import rows_writer
from embedlog.schemas.conform import conform
from embedlog.schemas.topic_schema import first_version

FORMATS = ("jsonl", "csv", "parquet")
each_format = pytest.mark.parametrize("name", FORMATS)

FLIGHTS = pa.table(
    {
        "carrier": ["UA", "AA", "B6", 'a "b",\n\N{SNOWMAN}'],
        "tailnum": ["N1", "N2", None, "NA"],
        "dep_delay": [2.5, None, 61.0, -1.0],
        "distance": pa.array([100, 200, 300, None], pa.int32()),
        "time_hour": pa.array(
            [dt.datetime(2013, 1, day, 5, tzinfo=dt.UTC) for day in range(1, 5)],
            pa.timestamp("us", "UTC"),
        ),
    }
)
KINDS = [
    ("b", pa.bool_(), [True, None, False]),
    ("i8", pa.int8(), [-128, None, 127]),
    ("u64", pa.uint64(), [0, None, (1 << 64) - 1]),
    ("f16", pa.float16(), [0.5, None, -2.0]),
    ("f32", pa.float32(), [0.25, None, 1e30]),
    ("f64", pa.float64(), [0.1, None, -1e300]),
    ("s", pa.string(), ["", None, 'x,"\n\t\N{SNOWMAN}']),
    ("raw", pa.binary(), [b"", None, b"\x00\xff"]),
    ("fixed", pa.binary(2), [b"ab", None, b"\x00\xff"]),
    ("day", pa.date32(), [dt.date(1, 1, 1), None, dt.date(9999, 12, 31)]),
    ("t32", pa.time32("ms"), [dt.time(0), None, dt.time(23, 59, 59, 999000)]),
    ("t64", pa.time64("us"), [dt.time(0), None, dt.time(23, 59, 59, 999999)]),
    ("ts", pa.timestamp("ms"), [dt.datetime(1970, 1, 1), None, dt.datetime(2013, 1, 1)]),  # noqa: DTZ001
    ("tz", pa.timestamp("us", "UTC"), [dt.datetime(2013, 1, 1, 1, 2, 3, 4, dt.UTC), None, None]),
    ("took", pa.duration("us"), [dt.timedelta(microseconds=-1), None, dt.timedelta(days=9)]),
    ("fare", pa.decimal128(12, 2), [Decimal("0.01"), None, Decimal("-9999999999.99")]),
    ("list", pa.list_(pa.date32()), [[], None, [dt.date(2013, 1, 1), None]]),
    ("pair", pa.list_(pa.int8(), 2), [[1, 2], None, [None, 3]]),
    (
        "nested",
        pa.struct([("raw", pa.binary()), ("at", pa.timestamp("us", "UTC")), ("n", pa.int64())]),
        [{"raw": b"\xff", "at": dt.datetime(2013, 1, 1, tzinfo=dt.UTC), "n": 1}, None, {}],
    ),
    ("map", pa.map_(pa.string(), pa.decimal128(5, 1)), [[("k", Decimal("1.5"))], None, []]),
]
EVERYTHING = pa.table(
    [pa.array(values, kind) for _, kind, values in KINDS], names=[name for name, _, _ in KINDS]
)
"""A column of each type that files have to hold."""


@pytest.fixture
def run(command_line):
    """Run a command; the tests print what went wrong."""

    def command(*arguments, code=0, stdin=b""):
        result = command_line(*arguments, stdin=stdin)
        assert result[0] == code, result
        return result[1:]

    return command


def write(path, table):
    """Write a table in the format of the file's suffix."""
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        table.to_pandas().to_json(path, orient="records", lines=True, date_format="iso")
    return path


def rows_of(path, topic="flights", columns=None):
    """Return the rows of a topic, without the columns that every topic has."""
    with embedlog.open(path, mode="r") as log:
        table = log.topic(topic).to_arrow()
    return table.drop_columns(["offset", "partition", "timestamp"])


@pytest.fixture
def flights(log_path):
    """A log with the flights in two partitions."""
    with embedlog.open(log_path, maintenance=False) as log:
        log.create_topic("flights", 2, schema=FLIGHTS, key="tailnum", timestamp="time_hour")
        log.producer().append_table("flights", FLIGHTS).result()
    return log_path


def by_carrier(table):
    return table.sort_by("carrier")


# Creating


YEARS = pa.array(
    [dt.datetime(year, 1, 2, 3, 4, 5, 6) for year in (1, 1000, 1677, 2024, 2263, 9999)],  # noqa: DTZ001
    pa.timestamp("us"),
)


def write_int96(path, table):
    """Write a table of Parquet as Spark 3 and Hive do."""
    parquet.write_table(table, path, use_deprecated_int96_timestamps=True, store_schema=False)
    return path


@pytest.mark.parametrize("inferred", [True, False])
def test_times_of_int96_stay_what_they_are(log_path, tmp_path, run, inferred):
    """Whatever the year: pyarrow reads nanoseconds, in which most years wrap around."""
    ends = pa.array(range(len(YEARS) + 1), pa.int32())
    columns = {"at": YEARS, "in": pa.StructArray.from_arrays([YEARS], ["x"])}
    columns["of"] = pa.ListArray.from_arrays(ends, YEARS)
    table = pa.table({**columns, "by": pa.MapArray.from_arrays(ends, ends[1:], YEARS)})
    file = write_int96(tmp_path / "f.parquet", table)

    if inferred:
        run("topics", "create", "t", "--schema-from", file)
    else:
        with embedlog.open(log_path) as log:
            log.create_topic("t", schema=table.schema)
    run("produce", "t", "--from", file)

    assert rows_of(log_path, "t").to_pylist() == table.to_pylist()


def test_nanoseconds_of_int96_are_not_cut(log_path, tmp_path, run):
    """A column of nanoseconds has them, and years that it cannot hold are refused."""
    table = pa.table({"at": pa.array([1, -1, 1 << 60], pa.timestamp("ns"))})
    with embedlog.open(log_path) as log:
        log.create_topic("t", schema=table.schema)

    run("produce", "t", "--from", write_int96(tmp_path / "f.parquet", table))
    years = pa.table({"at": YEARS})
    run("produce", "t", "--from", write_int96(tmp_path / "g.parquet", years), code=1)

    assert rows_of(log_path, "t").equals(table)


@each_format
def test_a_topic_gets_the_columns_of_a_file(run, log_path, tmp_path, name):
    """The types of Parquet, and those that pyarrow infers for text; the rows are not added."""
    file = write(tmp_path / f"f.{name}", FLIGHTS)
    arguments = ("--key", "tailnum", "-p", 3)
    if name != "jsonl":  # There pyarrow infers times without a zone.
        arguments += ("--timestamp", "time_hour")
    out, _ = run("topics", "create", "flights", "--schema-from", file, *arguments)

    types = dict(line.split()[:2] for line in out.splitlines()[1:])
    assert out.startswith("  schema version 1, 5 columns\n")
    assert types["carrier"] == "string"
    assert types["dep_delay"] == "double"
    assert types["distance"] == {"parquet": "int32", "csv": "int64", "jsonl": "double"}[name]
    assert " key\n" in out
    with embedlog.open(log_path) as log:
        assert (log.topic("flights").partitions, len(log.topic("flights"))) == (3, 0)


def test_types_are_inferred_from_all_of_a_csv_file(run, log_path, tmp_path):
    """Not from its first block."""
    file = tmp_path / "f.csv"
    file.write_text("n,s\n" + "1,2\n" * 400_000 + "0.5,x\n")
    out, _ = run("topics", "create", "t", "--schema-from", file)

    assert "    n  double\n    s  string\n" in out


def test_types_of_a_large_file_are_those_of_its_beginning(run, tmp_path, monkeypatch, log_path):
    """And the command says so."""
    monkeypatch.setattr(read_files, "INFERRED_BYTES", 1000)
    file = tmp_path / "f.csv"
    file.write_text("n\n" + "1\n" * 1000 + "x\n")
    out, err = run("topics", "create", "t", "--schema-from", file)
    _, refused = run("produce", "t", "--from", file, code=1)

    assert "n  int64" in out
    assert err.startswith("The types of the columns are those of the first")
    assert "invalid value 'x'" in refused


def test_several_columns_may_be_the_key(run, tmp_path, log_path):
    """In their order."""
    file = write(tmp_path / "f.parquet", FLIGHTS)
    out, _ = run("topics", "create", "t", "--schema-from", file, "--key", "tailnum, carrier")

    assert "tailnum    string                 key 1\n" in out
    assert "carrier    string                 key 2\n" in out


@pytest.mark.parametrize(
    ("text", "arguments", "code", "error"),
    [
        ("a\n1\n", ("--key", "b"), 2, "There is no column 'b', only a"),
        ("a\n1\n", ("--timestamp", "a"), 2, "timestamp column a has the type int64"),
        ("a,offset\n1,2\n", (), 2, "embedlog uses the name 'offset' itself"),
        ("a,b\n1,\n", (), 2, "The column b of the file has no values. Leave it out"),
        ("a,b\n1\n", (), 1, "The file is not csv: .*Expected 2 columns, got 1"),
        ("a\n1\n", ("--value", "json"), 2, "value"),
    ],
)
def test_a_file_that_is_no_schema_is_refused(run, tmp_path, log_path, text, arguments, code, error):
    """Nothing is created."""
    file = tmp_path / "f.csv"
    file.write_text(text)
    _, err = run("topics", "create", "t", "--schema-from", file, *arguments, code=code)

    assert re.search(error, err)
    if log_path.exists():
        with embedlog.open(log_path) as log:
            assert log.topics() == []


def test_a_timestamp_column_needs_a_schema(run, log_path):
    """It names a column of the file."""
    _, err = run("topics", "create", "t", "--timestamp", "at", code=2)
    assert "needs --schema-from" in err


def test_describe_shows_the_schema(run, flights):
    """As lines, and in JSON."""
    with embedlog.open(flights) as log:
        log.alter_topic(
            "flights",
            schema=FLIGHTS.schema.append(pa.field("gate", pa.string(), False)),
            defaults={"gate": "A1"},
        )
    out, _ = run("topics", "describe", "flights")
    document = json.loads(run("topics", "describe", "flights", "--json")[0])

    assert "  schema version 2, 6 columns\n    carrier    string\n" in out
    assert "    tailnum    string                 key\n" in out
    assert "    time_hour  timestamp[us, tz=UTC]  timestamp, not null\n" in out
    assert "    gate       string                 not null, default A1\n" in out
    schema = document[0]["schema"]
    assert (schema["version"], schema["key"], schema["timestamp"]) == (2, ["tailnum"], "time_hour")
    assert schema["columns"][-1] == {
        "name": "gate",
        "type": "string",
        "nullable": False,
        "default": "A1",
    }


# Producing


@each_format
def test_the_rows_of_a_file_are_produced(run, log_path, tmp_path, name):
    """Each column by its name; keys choose the partitions."""
    with embedlog.open(log_path) as log:
        schema = FLIGHTS.schema
        if name == "jsonl":  # pandas writes times in ms
            schema = schema.set(4, pa.field("time_hour", pa.timestamp("ms", "UTC")))
        log.create_topic("flights", 2, schema=schema, key="tailnum", timestamp="time_hour")
    file = write(tmp_path / f"f.{name}", FLIGHTS)
    out, _ = run("produce", "flights", "--from", file, "-z", "zstd")

    assert out.startswith("Produced 4 records into flights\n  partition ")
    assert by_carrier(rows_of(log_path)).cast(FLIGHTS.schema) == by_carrier(FLIGHTS)


def test_json_lines_are_produced_from_stdin(run, flights):
    """With --from -, and without columns that may be null."""
    line = b'{"carrier": "DL", "time_hour": "2013-01-09T00:00:00Z"}\n'
    document = json.loads(run("produce", "flights", "--from", "-", "--json", stdin=line * 2)[0])

    assert (document["records"], document["format"]) == (2, "jsonl")
    assert rows_of(flights)["carrier"].to_pylist().count("DL") == 2


def test_rows_go_to_one_partition(run, flights, tmp_path):
    """With -p, whatever their keys."""
    file = write(tmp_path / "f.parquet", FLIGHTS)
    out, _ = run("produce", "flights", "--from", file, "-p", 1)

    assert "partition 1: " in out
    assert "partition 0: " not in out


@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_a_wrong_value_is_named_with_its_line(run, flights, tmp_path, name):
    """The rows before may be in the topic, and the command says how many."""
    file = tmp_path / f"f.{name}"
    good = '{"carrier": "UA", "time_hour": "2013-01-09T00:00:00Z", "distance": 1}\n'
    text = good + good.replace(": 1}", ': "x"}')
    if name == "csv":
        text = "carrier,time_hour,distance\nUA,2013-01-09T00:00:00Z,1\nUA,2013-01-09T00:00:00Z,x\n"
    file.write_text(text)
    _, err = run("produce", "flights", "--from", file, code=1)

    assert "Nothing was produced" in err
    assert ("Line 2 " if name == "jsonl" else "invalid value 'x'") in err
    assert rows_of(flights).num_rows == 4


def test_what_the_topic_refuses_is_named(run, flights, tmp_path):
    """A column that it does not have, and a null where it must not be."""
    unknown = tmp_path / "u.csv"
    unknown.write_text("carrier,wing\nUA,1\n")
    missing = tmp_path / "m.csv"
    missing.write_text("carrier\nUA\n")

    assert (
        "The topic has no column 'wing', only carrier"
        in run("produce", "flights", "--from", unknown, code=1)[1]
    )
    assert "Row 0 has no time_hour" in run("produce", "flights", "--from", missing, code=1)[1]


def test_a_produce_that_failed_continues_with_skip(run, flights, tmp_path, monkeypatch):
    """Every row is there once."""
    monkeypatch.setattr(file_formats, "_CHUNK_BYTES", 1000)
    lines = [
        json.dumps({"carrier": str(row), "time_hour": "2013-01-09T00:00:00Z"}) for row in range(100)
    ]
    file = tmp_path / "f.jsonl"
    file.write_text("\n".join([*lines[:60], "{", *lines[60:]]))
    _, err = run("produce", "flights", "--from", file, code=1)
    done = int(err.split("--skip ")[1].split()[0])
    assert 0 < done <= 60
    assert f"Produced {done} records before the produce ended" in err

    file.write_text("\n".join(lines))
    run("produce", "flights", "--from", file, "--skip", done)
    carriers = rows_of(flights)["carrier"].to_pylist()
    assert sorted(int(carrier) for carrier in carriers if carrier.isdecimal()) == list(range(100))


def test_long_rows_of_csv_are_read(run, flights, tmp_path, monkeypatch):
    """A row may be longer than a block."""
    monkeypatch.setattr(read_files, "_BLOCK_BYTES", 1000)
    file = tmp_path / "f.csv"
    time = "2013-01-09T00:00:00Z"
    file.write_text(f"carrier,time_hour\nUA,{time}\n{'x' * 5000},{time}\nUA,{time}\n")
    out, _ = run("produce", "flights", "--from", file)

    assert out.startswith("Produced 3 records")


def test_a_topic_of_bytes_takes_lines_and_refuses_rows(run, log_path, tmp_path):
    """With what to do instead."""
    file = write(tmp_path / "f.csv", FLIGHTS)
    lines = tmp_path / "f.jsonl"
    lines.write_text('{"a": 1}\n{"a": 2}\n')
    run("topics", "create", "t")

    _, err = run("produce", "t", "--from", file, code=2)
    assert "values of the topic are bytes" in err
    assert f"embedlog import t {file}" in err
    assert f"--schema-from {file}" in err
    run("produce", "t", "--from", lines)
    assert run("consume", "t")[0] == '{"a": 1}\n{"a": 2}\n'


def test_a_topic_that_does_not_exist_is_not_created_by_a_file(run, log_path, tmp_path):
    """Its columns would be unknown."""
    run("topics", "create", "other")
    file = write(tmp_path / "f.csv", FLIGHTS)
    _, err = run("produce", "t", "--from", file, code=3)

    assert f"Create it with `embedlog topics create t --schema-from {file}`" in err
    assert run("topics", "list")[0] == "other\n"


def test_options_for_files_and_lines_are_told_apart(run, flights, tmp_path):
    """An option that has no meaning is refused."""
    file = write(tmp_path / "f.csv", FLIGHTS)

    assert "--skip is for --from" in run("produce", "flights", "--skip", 1, code=2)[1]
    assert (
        "--key-separator is for topics of bytes"
        in run("produce", "flights", "--from", file, "-K", ":", code=2)[1]
    )
    _, err = run("produce", "flights", code=2, stdin=b"x\n")
    assert "Use --from FILE, or --from - for JSON lines of stdin" in err


# Printing


def test_consume_prints_rows_as_json(run, flights):
    """Each value is an object; keys are as they are."""
    out, _ = run("consume", "flights", "-f", "%k %s\n")
    lines = dict(line.split(" ", 1) for line in out.splitlines())

    assert json.loads(lines["N1"]) == {
        "carrier": "UA",
        "tailnum": "N1",
        "dep_delay": 2.5,
        "distance": 100,
        "time_hour": "2013-01-01T05:00:00.000000Z",
    }
    record = json.loads(run("consume", "flights", "--json", "-m", 1)[0])
    assert record["value"]["tailnum"] == record["key"]


def test_consume_prints_some_columns_of_some_rows(run, flights):
    """Also offset, partition and timestamp, and with the key in a format."""
    where = "dep_delay > 2 and time_hour < '2013-01-03'"
    out, _ = run("consume", "flights", "--columns", "carrier,dep_delay,timestamp", "--where", where)
    assert [json.loads(line) for line in out.splitlines()] == [
        {"carrier": "UA", "dep_delay": 2.5, "timestamp": "2013-01-01T05:00:00.000Z"}
    ]
    out, _ = run("consume", "flights", "--columns", "distance", "-f", "%p %k %T %s\n", "-m", 4)
    assert 'N2 1357102800000 {"distance": 200}\n' in out
    document = json.loads(
        run("consume", "flights", "--where", "carrier = 'UA'", "--json", "-m", 1)[0]
    )
    assert document["key"] == "N1"
    assert document["value"]["distance"] == 100


def test_consume_prints_tombstones_headers_and_several_keys(run, log_path):
    """A tombstone is null."""
    schema = pa.schema([("a", pa.string()), ("n", pa.int64())])
    with embedlog.open(log_path) as log, log.producer() as producer:
        log.create_topic("t", schema=schema, key=["a", "n"])
        log.create_topic("unkeyed", schema=schema)
        producer.send("t", {"a": "x", "n": 1}, headers=[("h", b"1")])
        producer.send("t", None, key=("x", 1))
        producer.send("unkeyed", {"a": "x", "n": 1})

    assert run("consume", "t", "-f", "%k %h %s\n")[0] == (
        '["x", 1] h=1 {"a": "x", "n": 1}\n["x", 1]  \n'
    )
    lines = [json.loads(line) for line in run("consume", "t", "--json")[0].splitlines()]
    assert [(line["key"], line["value"]) for line in lines] == [
        (["x", 1], {"a": "x", "n": 1}),
        (["x", 1], None),
    ]
    assert run("consume", "t", "--columns", "n")[0] == '{"n": 1}\n'
    assert run("consume", "unkeyed", "-f", "%k|%K\n")[0] == "|-1\n"


def test_tail_and_follow_print_new_rows(run, flights):
    """With the columns that were asked for."""
    assert run("tail", "flights", "-n", 1)[0].count("\n") in (1, 2)
    options = "--columns carrier --where distance=7 -m 1 --from-beginning".split()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "embedlog",
            "-r",
            flights,
            "consume",
            "flights",
            "--follow",
            *options,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with embedlog.open(flights) as log:
            row = {"carrier": "ZZ", "distance": 7, "time_hour": dt.datetime.now(dt.UTC)}
            log.producer().send("flights", row).result()
            assert process.stdout.readline() == '{"carrier": "ZZ"}\n'
            process.wait()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--columns", "wing"), "There is no column 'wing'.* offset,"),
        (("--columns", "a,,b"), "must be NAME or NAME,NAME"),
        (("--where", "wing > 1"), "refers to a column 'wing' .*The columns are offset,"),
        (("--where", "distance >"), "is wrong: .*an expression, found: EOF"),
        (("--where", "distance"), "must be of type `Boolean`.*It must be a condition such as"),
        (("--where", "avg(distance) > 1"), "is not about single rows"),
        (("--where", "distance > 1) or (1 = 1"), "is wrong: .*found: \\)"),
        (("--where", "cast(carrier as int) > 1"), "failed: conversion from `str`"),
    ],
    ids=str,
)
def test_a_wrong_choice_is_refused(run, flights, options, error):
    """With the columns that there are."""
    for command in (("consume", "flights"), ("export", "flights", "--to", "-")):
        assert re.search(error, run(*command, *options, code=2)[1])


def test_a_topic_of_bytes_has_no_columns(run, log_path):
    """The error says what to use."""
    run("produce", "t", stdin=b"x\n")

    _, err = run("consume", "t", "--columns", "a", code=2)
    assert "--columns is for typed topics" in err
    assert "--where is for typed topics" in run("consume", "t", "--where", "a", code=2)[1]
    assert (
        "--columns is for typed topics"
        in run("export", "t", "--to", "-", "--columns", "a", code=2)[1]
    )


# Export and import


@each_format
def test_an_export_is_imported_as_it_was(run, log_path, tmp_path, name):
    """Values of every type, partitions, timestamps and headers."""
    table = EVERYTHING
    if name == "parquet" and int(pa.__version__.split(".")[0]) < 25:
        table = table.drop_columns("pair")  # It writes no null among lists of a fixed size.
    # The timestamp is embedlog's own.
    with embedlog.open(log_path) as log, log.producer() as producer:
        for topic in ("t", "u"):
            log.create_topic(topic, 2, schema=table, key=["s", "i8"])
        producer.append_table("t", table, partition=1).result()
        producer.send("t", {"s": "h"}, headers=[("a", b"\xff"), ("b", None)], timestamp_ms=5)
    file = tmp_path / f"t.{name}"
    run("export", "t", "--to", file)
    run("import", "u", file)

    with embedlog.open(log_path) as log:
        before, after = (log.topic(topic).to_arrow() for topic in ("t", "u"))
    assert after.drop_columns("offset") == before.drop_columns("offset")
    assert (
        before["timestamp"].cast(pa.int64()).to_pylist()[-1] == 5 or "h" in before["s"].to_pylist()
    )


def test_what_parquet_cannot_hold_is_refused(run, log_path, tmp_path):
    """In a sentence, and without a file."""
    with embedlog.open(log_path) as log, log.producer() as producer:
        log.create_topic("t", schema=pa.schema([("x", pa.decimal128(5, -2))]))
        producer.send("t", {"x": Decimal("123e2")})
    _, err = run("export", "t", "--to", tmp_path / "t.parquet", code=1)

    assert "The records cannot be written as Parquet" in err
    assert list(tmp_path.glob("t.parquet*")) == []


@each_format
def test_some_columns_and_rows_are_exported(run, flights, tmp_path, name):
    """With their types in Parquet."""
    file = tmp_path / f"t.{name}"
    options = ("--where", "dep_delay > 2", "--columns", "carrier,distance")
    out, _ = run("export", "flights", "--to", file, *options)

    assert out.startswith("Exported 2 records of flights")
    if name == "parquet":
        table = parquet.read_table(file)
        assert table.schema.types == [pa.string(), pa.int32()]
        assert sorted(table["carrier"].to_pylist()) == ["B6", "UA"]
    elif name == "csv":
        assert sorted(file.read_text().splitlines()) == [
            '"B6",300',
            '"UA",100',
            '"carrier","distance"',
        ]
    else:
        lines = sorted(file.read_text().splitlines())
        assert lines == ['{"carrier": "B6", "distance": 300}', '{"carrier": "UA", "distance": 100}']


def test_records_of_bytes_are_exported_by_a_condition(run, log_path):
    """On the columns of the file."""
    run("topics", "create", "t", "--value", "str")
    run("produce", "t", stdin=b"a\nb\nc\n")
    out, _ = run("export", "t", "-", "--where", "value = 'b' or offset = 2")

    assert [json.loads(line)["value"] for line in out.splitlines()] == ["b", "c"]
    assert "column 'x'" in run("export", "t", "-", "--where", "x = 1", code=2)[1]


def test_an_export_needs_one_file(run, flights):
    """FILE or --to."""
    assert "No file was given" in run("export", "flights", code=2)[1]
    assert "both given" in run("export", "flights", "a.csv", "--to", "b.csv", code=2)[1]
    assert "Leave out --raw" in run("export", "flights", "-", "--raw", code=2)[1]


def test_an_import_keeps_partitions_or_chooses_them(run, flights, tmp_path, log_path):
    """As for topics of bytes."""
    run("export", "flights", tmp_path / "f.parquet")
    with embedlog.open(log_path) as log:
        for topic in ("same", "other"):
            log.create_topic(topic, 2, schema=FLIGHTS, timestamp="time_hour")
    run("import", "same", tmp_path / "f.parquet")
    run("import", "other", tmp_path / "f.parquet", "--repartition")

    with embedlog.open(log_path) as log:
        parts = {
            name: sorted(log.topic(name).to_arrow()["partition"].to_pylist())
            for name in ("flights", "same")
        }
        assert parts["same"] == parts["flights"]
        assert len(log.topic("other")) == 4
    assert "Leave out --raw" in run("import", "same", tmp_path / "f.parquet", "--raw", code=2)[1]


def test_a_file_of_other_columns_says_how_to_make_a_typed_topic(run, log_path, tmp_path):
    """An import creates topics of bytes only."""
    file = write(tmp_path / "f.csv", FLIGHTS)
    _, err = run("import", "t", file, code=1)

    assert "--schema-from FILE" in err


def finite(value):
    """A value of a column as text has it: NaN and infinities are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def far_times(draw, data_type, count):
    """Times and dates of any year, alone or in structs and lists."""
    bits = data_type.bit_width
    most = (1 << bits - 1) - 1
    numbers = st.integers(-most, most)
    items = draw(st.lists(or_none(numbers), min_size=count, max_size=count))
    column = pa.array(items, pa.int32() if bits == 32 else pa.int64()).cast(data_type)
    if draw(st.booleans()):
        column = pa.StructArray.from_arrays([column], ["x"])
    if draw(st.booleans()):
        column = pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), column)
    return column


@st.composite
def any_column(draw):
    """A column of any type that a topic can have."""
    count = draw(st.integers(1, 4))
    if draw(st.booleans()):
        return far_times(draw, draw(st.one_of(st.just(pa.date32()), timestamp_types())), count)
    data_type = draw(types())
    assume("map<float" not in str(data_type) and "map<double" not in str(data_type))
    items = draw(st.lists(or_none(values(data_type)), min_size=count, max_size=count))
    return arrow([finite(item) for item in items], data_type)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(any_column(), st.sampled_from(["csv", "jsonl"]))
def test_columns_of_every_type_are_read_as_they_were_written(column, name):
    """Also decimals of any scale, and times of years that neither Python nor Arrow can read."""
    table = pa.table({"x": column, "row": list(range(len(column)))})
    file = io.BytesIO()
    with rows_writer(file, name, table.schema) as write:
        write(table)
    file.seek(0)

    schema = first_version(table.schema, None, None)
    (part,) = read_rows(file, name, schema)
    back = conform(part.table, schema, "t")["x"].combine_chunks()
    assert back.equals(column), (back, file.getvalue())


def test_whole_numbers_are_integers_in_json(run, flights):
    """Other programs write integers as floats if some are null; nothing may be lost."""
    line = '{"carrier": "DL", "time_hour": "2013-01-09T00:00:00Z", "distance": %s}\n'
    run("produce", "flights", "--from", "-", stdin=(line % "7.0" + line % "8").encode())
    _, err = run("produce", "flights", "--from", "-", stdin=(line % "7.5").encode(), code=1)

    assert {7, 8} < set(rows_of(flights)["distance"].to_pylist())
    assert "Row 0 of column distance" in err


@pytest.mark.parametrize("levels", [900, 100_000])
def test_lines_of_many_levels_are_refused(run, flights, tmp_path, levels):
    """pyarrow's reader would overflow the stack of the process."""
    file = tmp_path / "f.jsonl"
    file.write_bytes(b'{"carrier": "UA"}\n{"carrier": ' + b"[" * levels + b"]" * levels + b"}\n")
    text = "more than 32 values are inside of each other"
    assert (
        f"Line 2 is not an object of the topic's columns: {text}"
        in run("produce", "flights", "--from", file, code=1)[1]
    )
    assert text in run("topics", "create", "t", "--schema-from", file, code=1)[1]


# SQL


def test_sql_prints_a_table(run, flights):
    """Names, then rows; a missing value is a dash."""
    out, _ = run("sql", "select carrier, dep_delay d from flights where distance > 100 order by 1")

    assert out == "carrier  d\nAA       -\nB6       61.0\n"


def test_sql_prints_other_formats(run, flights):
    """A list, lines, or CSV; times are text."""
    query = "select carrier, time_hour, 2.5e0 x, null n from flights where carrier = 'UA'"
    row = {"carrier": "UA", "time_hour": "2013-01-01T05:00:00.000000Z", "x": 2.5, "n": None}

    assert json.loads(run("sql", query, "--json")[0]) == [row]
    assert json.loads(run("sql", query, "--format", "json")[0]) == [row]
    assert json.loads(run("sql", query, "--format", "jsonl")[0]) == row
    out, _ = run("sql", query, "--format", "csv")
    assert out == '"carrier","time_hour","x","n"\n"UA",2013-01-01 05:00:00.000000Z,2.5,\n'


def test_sql_prints_bytes_as_text_if_they_are(run, log_path):
    """Otherwise as base64."""
    with embedlog.open(log_path) as log, log.producer() as producer:
        producer.send("t", b"text\nof two lines")
        producer.send("u", b"\xff")

    assert run("sql", "select value from t")[0] == "value\ntext\\nof two lines\n"
    assert run("sql", "select value from u")[0] == "value\n/w==\n"


@pytest.mark.parametrize(
    ("query", "code", "error"),
    [
        ("select * from flihgts", 3, "no such topic [flihgts]. Did you mean flights?"),
        ("selec", 2, "The query is wrong"),
        ("drop table flights", 2, "DROP would change it"),
    ],
)
def test_sql_says_what_is_wrong(run, flights, query, code, error):
    """In one line, with the exit code of its kind."""
    _, err = run("sql", query, code=code)

    assert error in err
    assert err.count("\n") == 1


def test_a_wide_result_fits_the_terminal(run, flights, monkeypatch):
    """As other tables."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["sql", "select * from flights limit 1"]) == 0


def test_the_result_is_that_of_polars(run, flights):
    """The command adds nothing of its own."""
    query = "select carrier, sum(distance) s from flights group by carrier order by carrier"
    out, _ = run("sql", query, "--format", "jsonl")
    with embedlog.open(flights) as log:
        assert pl.read_ndjson(out.encode()).rows() == log.sql(query).rows()
