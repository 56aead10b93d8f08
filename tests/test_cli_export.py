"""`embedlog export` and `embedlog import`: what comes back, and what is refused or interrupted."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import subprocess
import sys
import textwrap
from functools import partial
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from support.roots import encoded
from support.tiers import choose, sample

import embedlog
from embedlog.cli import file_formats, input_records, main, read_files
from embedlog.errors import EmbedlogError

FORMATS = ("jsonl", "csv", "parquet")
each_format = pytest.mark.parametrize("name", FORMATS)

RECORDS = [
    # partition, key, value, headers, timestamp
    (0, None, b"no key", [], 0),
    (0, b"", b"", [], 1),
    (0, b"k", None, [], 2),
    (0, b"k", b'a "quoted",\r\nfield; \xc3\xbc\t\x00', [("a", b"1"), ("b", None), ("a", b"")], 3),
    (1, b"null", b"null", [], 1_700_000_000_123),
    (1, b"1", b"NaN", [("", b"x")], 4),
]
BINARY = (1, b"\xff\x00", b"\xfe", [("h", b"\xff")], 5)


def fill(path, records, topic="t", partitions=2, **options):
    """Create a topic with these records, one batch each."""
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic(topic, partitions, **options)
        for partition, key, value, headers, timestamp in records:
            batch = encoded(value, keys=[key], headers=[headers], at=[timestamp])
            log.partition(topic, partition).append([batch])


def records_of(path, topic="t"):
    """Return the stored records of a topic, as in `RECORDS`."""
    with embedlog.open(path, mode="r") as log:
        return [
            (record.partition, record.key, record.value, record.headers, record.timestamp)
            for record in log.topic(topic, raw=True)
        ]


def values_of(path, topic="t"):
    return [record[2] for record in records_of(path, topic)]


@pytest.fixture
def run(command_line):
    """Run a command; the tests print what went wrong."""

    def command(*arguments, code=0, stdin=b""):
        result = command_line(*arguments, stdin=stdin)
        assert result[0] == code, result
        return result[1:]

    return command


# What comes back


@each_format
def test_every_field_of_a_record_comes_back(run, log_path, tmp_path, name):
    """Keys, tombstones, empty values, headers, timestamps and partitions; CSV has only text."""
    records = RECORDS if name == "csv" else [*RECORDS, BINARY]
    fill(log_path, records)
    file = tmp_path / f"records.{name}"

    out, err = run("export", "t", file)
    back, _ = run("import", "u", file)

    assert records_of(log_path, "u") == records
    assert out.startswith(f"Exported {len(records)} records of t to {file} (")
    assert "  partition 0: offsets [0, 4), 4 records\n" in out
    assert back.startswith(f"Imported {len(records)} records into u (a new topic)\n")
    assert "  partition 0: offsets [0, 4), 4 records\n" in back
    assert err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", file.name]


def test_records_go_through_a_pipe(run, log_path):
    """stdout has the records and nothing else; without a suffix they are JSON lines."""
    fill(log_path, [*RECORDS, BINARY])

    lines, err = run("export", "t", "-")
    run("import", "u", "-", stdin=lines.encode())
    as_csv, _ = run("export", "t:0", "-", "--format", "csv")
    run("import", "v", "-", "--format", "csv", stdin=as_csv.encode())

    assert err == ""
    assert lines == run("consume", "t", "--json")[0]
    assert records_of(log_path, "u") == [*RECORDS, BINARY]
    assert records_of(log_path, "v") == [record for record in RECORDS if record[0] == 0]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["\ud800", "\r\n", "NaN", ""]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory):
    """A directory for many examples."""
    return tmp_path_factory.mktemp("examples")


@given(values=st.lists(st.tuples(st.text(), JSON), min_size=40, max_size=80))
@settings(max_examples=choose(test=3, all=50))
@pytest.mark.tier("test")
def test_any_json_value_comes_back(shared_path, values):
    """From a topic with serializers, in each format; None is a tombstone."""
    root = shared_path / f"log{len(os.listdir(shared_path))}"
    command = partial(_quiet, "--root", root)
    with embedlog.open(root, maintenance=False) as log:
        log.create_topic("t", key="str", value="json")
        with log.producer() as producer:
            producer.send_batch("t", [value for _, value in values], [key for key, _ in values])
        expected = [(record.key, record.value) for record in log.topic("t")]
        for name in FORMATS:
            log.create_topic(name, key="str", value="json")
            command("export", "t", root / f"x.{name}")
            command("import", name, root / f"x.{name}")
            back = [(record.key, record.value) for record in log.topic(name)]
            assert list(map(repr, back)) == list(map(repr, expected))


def _quiet(*arguments):
    assert main([*map(str, arguments), "--json"]) == 0


ITEMS = {
    "str": ["", "ü,\n", "null", None],
    "int": [0, -(1 << 63), (1 << 63) - 1, None],
    "float": [0.1, -1e300, 5.0, None],
    "uuid": [UUID(int=5), UUID(int=(1 << 128) - 1), None, UUID(int=0)],
    "json": [{"a": [1, None, 1.5]}, "text", False, None],
    "bytes": [b"", b"text", b"null", None],
}


@each_format
@pytest.mark.parametrize("serializer", sample([*ITEMS], 3))
def test_the_items_of_every_serializer_come_back(run, log_path, tmp_path, name, serializer):
    """To a topic with the same serializers; and to any topic with --raw for both, if it is text."""
    file, items = tmp_path / f"items.{name}", ITEMS[serializer]
    with embedlog.open(log_path, maintenance=False) as log:
        log.create_topic("t", key=serializer, value=serializer)
        log.create_topic("u", key=serializer, value=serializer)
        with log.producer() as producer:
            producer.send_batch("t", items, items)

    run("export", "t", file)
    run("import", "u", file)

    with embedlog.open(log_path, mode="r") as log:
        assert [record.value for record in log.topic("u")] == items
        assert [record.key for record in log.topic("u")] == items
    if name != "csv":
        run("export", "t", file, "--raw", "--force")
        run("import", "plain", file)
        run("import", "u", file, "--raw")
        assert records_of(log_path, "plain") == records_of(log_path, "t")
        assert records_of(log_path, "u")[len(items) :] == records_of(log_path, "t")


def test_files_have_the_values_that_other_programs_expect(run, log_path, tmp_path):
    """JSON values in JSON lines, text in CSV, numbers and text in Parquet."""
    with embedlog.open(log_path) as log:
        log.create_topic("t", key="int", value="json")
        with log.producer() as producer:
            producer.send("t", {"a": "ü"}, key=7, timestamp_ms=0)

    lines, _ = run("export", "t", "-")
    text, _ = run("export", "t", "-", "--format", "csv")
    run("export", "t", tmp_path / "t.parquet")

    assert (json.loads(lines)["key"], json.loads(lines)["value"]) == (7, {"a": "ü"})
    assert text.splitlines()[1] == '0,0,0,7,"{""a"":""ü""}"'
    table = parquet.read_table(tmp_path / "t.parquet")
    assert [str(table.schema.field(name).type) for name in ("key", "value")] == ["int64", "string"]
    assert table.to_pylist()[0]["value"] == '{"a":"ü"}'


def test_json_is_kept_as_it_is_written(run, log_path):
    """Unless it takes several lines; what looks like NaN is text here."""
    texts = [b'{"a": 1.50, "a": 2}', b"[\n1]", b'"NaN"', b'"\\ud800"']
    fill(log_path, [(0, None, text, [], 0) for text in texts], value="json")

    lines = run("export", "t", "-")[0]
    run("topics", "create", "u", "--value", "json")
    run("import", "u", "-", stdin=lines.encode())

    assert '"value": {"a": 1.50, "a": 2}' in lines
    assert values_of(log_path, "u") == [b'{"a":2}', b"[1]", *texts[2:]]


def test_pickled_values_are_never_read(run, log_path, tmp_path):
    """Reading them can run any code; files have them as they are stored."""
    with embedlog.open(log_path) as log:
        for topic in ("t", "jsonl", "parquet"):
            log.create_topic(topic, value="pickle")
        with log.producer(allow_pickle=True) as producer:
            producer.send("t", {1, 2}, timestamp_ms=5)
    for name in ("jsonl", "parquet"):
        run("export", "t", tmp_path / f"t.{name}")
        run("import", name, tmp_path / f"t.{name}")
        assert records_of(log_path, name) == records_of(log_path)


def test_tables_of_other_programs_are_imported(run, log_path, tmp_path):
    """Columns of any type that the serializers of the topic take, and of text of any kind."""
    with embedlog.open(log_path) as log:
        log.create_topic("t", key="str", value="json")
    key = pa.array(["a", "b"]).dictionary_encode()
    value = pa.array([{"x": 1}, {"x": 2}])
    parquet.write_table(pa.table({"key": key, "value": value}), tmp_path / "t.parquet")
    texts = pa.array(["[1]", None], pa.large_string())
    parquet.write_table(pa.table({"value": texts}), tmp_path / "u.pq")

    run("import", "t", tmp_path / "t.parquet")
    run("import", "t", tmp_path / "u.pq")
    run("import", "plain", "-", "--format", "csv", stdin=b"offset,value\n7,x\n8,\n")

    with embedlog.open(log_path, mode="r") as log:
        assert [(record.key, record.value) for record in log.topic("t")] == [
            *(("a", {"x": 1}), ("b", {"x": 2})),
            *((None, [1]), (None, None)),
        ]
    assert values_of(log_path, "plain") == [b"x", None]


def test_records_without_a_timestamp_get_the_current_time(run, log_path, tmp_path):
    """In each format, also if only some lack it."""
    table = pa.table({"value": ["a", "b"], "timestamp": pa.array([5, None], pa.timestamp("ms"))})
    parquet.write_table(table, tmp_path / "t.parquet")

    run("import", "t", tmp_path / "t.parquet")
    run("import", "t", "-", stdin=b'{"value": "a", "timestamp": 5}\n\n{"value": "b"}\n')
    for rows in (b"value,timestamp\na,5\nb,\n", b'value,timestamp,headers\na,5,\nb,,"[]"\n'):
        run("import", "t", "-", "--format", "csv", stdin=rows)

    records = records_of(log_path)
    assert [record[2] for record in records] == [b"a", b"b"] * 4
    assert [record[4] == 5 for record in records] == [True, False] * 4
    assert all(record[4] > 1_700_000_000_000 for record in records[1::2])


def test_a_large_record_is_limited_by_its_topic_alone(run, log_path):
    """Not by settings of a producer, which the command line does not have."""
    line = json.dumps({"value": "x" * (2 << 20)}).encode()
    run("topics", "create", "t", "-c", "max.message.bytes=10000000")

    run("import", "t", "-", stdin=line)
    run("produce", "t", stdin=b"y" * (2 << 20))

    assert list(map(len, values_of(log_path))) == [2 << 20] * 2


def test_a_row_of_csv_may_be_longer_than_a_block(run, log_path, tmp_path, monkeypatch):
    """The file is then read again in larger blocks, from the row on."""
    monkeypatch.setattr(input_records, "_CSV_BLOCK_BYTES", 100)
    values = [b"short %d" % number for number in range(50)]
    values += [b"long\n" * 500, b"", None, b"longer, " * 3000, *values]
    fill(log_path, [(0, None, value, [("h", value)], 5) for value in values])

    run("export", "t", tmp_path / "x.csv")
    run("import", "u", tmp_path / "x.csv")
    piped = (tmp_path / "x.csv").read_bytes()
    _, err = run("import", "v", "-", "--format", "csv", stdin=piped, code=1)

    assert records_of(log_path, "u") == records_of(log_path)
    assert "A row of CSV from a pipe is longer than 100 bytes. Read it from a file." in err


# What is selected


RANGES = [
    ((), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]),
    (("--from", "1"), [(0, 1), (0, 2), (0, 3), (1, 1)]),
    (("--until", "1"), [(0, 0), (1, 0)]),
    (("--from", "1", "--until", "3"), [(0, 1), (0, 2), (1, 1)]),
    (("--from", "3", "--until", "1"), []),
    (("--from", "99"), []),
    (("--from", "1970-01-01T00:00:00.002Z"), [(0, 2), (0, 3), (1, 0), (1, 1)]),
    (("--until", "1970-01-01T00:00:00.002"), [(0, 0), (0, 1)]),
    (("--from", "2100-01-01"), []),
    (("--from", "1d"), []),
    (("--until", "1d"), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]),
]


def test_a_range_of_offsets_or_times_is_exported(run, log_path):
    """Half open, in each partition; as far as the log has it."""
    fill(log_path, RECORDS)

    for options, offsets in RANGES:
        lines = map(json.loads, run("export", "t", "-", *options)[0].splitlines())
        assert [(line["partition"], line["offset"]) for line in lines] == offsets, options


@each_format
def test_an_export_of_no_records_is_a_valid_file(run, log_path, tmp_path, name):
    """It is imported as no records."""
    fill(log_path, RECORDS)

    out, _ = run("export", "t", tmp_path / f"x.{name}", "--from", "99")
    back, _ = run("import", "u", tmp_path / f"x.{name}")

    assert out.startswith("Exported 0 records of t")
    assert back == "Imported 0 records into u (a new topic)\n"


def test_results_are_printed_as_json(run, log_path, tmp_path):
    """Offsets are half open."""
    fill(log_path, RECORDS)
    file = str(tmp_path / "x.csv")

    exported = json.loads(run("--json", "export", "t:1", file)[0])
    imported = json.loads(run("import", "u", file, "--json", "--sync")[0])

    common = {"file": file, "format": "csv", "records": 2}
    assert exported == {
        "topic": "t",
        **common,
        "bytes": os.path.getsize(file),
        "partitions": [{"partition": 1, "start": 0, "stop": 2, "records": 2}],
    }
    assert imported == {
        "topic": "u",
        **common,
        "partitions": [{"partition": 1, "first_offset": 0, "next_offset": 2, "records": 2}],
    }


def test_partitions_come_from_the_file_or_from_the_keys(run, log_path):
    """A new topic gets as many as the file needs; another one has to have them."""
    lines = [{"key": "k", "value": str(number), "partition": number % 3} for number in range(6)]
    lines.append({"key": "k", "value": "6"})
    data = "\n".join(map(json.dumps, lines)).encode()
    run("topics", "create", "small", "-p", "2")

    run("import", "t", "-", stdin=data)
    _, err = run("import", "small", "-", stdin=data, code=3)
    run("import", "small", "-", "--repartition", stdin=data)

    keyed = next(record[0] for record in records_of(log_path) if record[2] == b"6")
    assert {int(record[2]): record[0] for record in records_of(log_path)} == {
        **{number: number % 3 for number in range(6)},
        6: keyed,
    }
    assert "`embedlog topics alter small -p 3`, or use --repartition" in err
    assert "Nothing was imported\n" in err
    assert len({record[0] for record in records_of(log_path, "small")}) == 1
    assert values_of(log_path, "small") == [b"%d" % number for number in range(7)]


# What is refused


def test_a_file_is_replaced_only_with_force(run, log_path, tmp_path):
    """And only by a complete one."""
    fill(log_path, RECORDS)
    file = tmp_path / "x.jsonl"
    file.write_text("precious")

    _, err = run("export", "t", file, code=2)
    assert "Use --force" in err
    assert file.read_text() == "precious"

    run("export", "t", file, "--force")
    assert len(file.read_text().splitlines()) == len(RECORDS)


@pytest.mark.parametrize(
    ("serializer", "stored", "name", "reason"),
    [
        ("bytes", b"\xff", "csv", "is not UTF-8, which CSV cannot hold"),
        ("json", b"{", "csv", "JSONDecodeError"),
        ("json", b"{", "jsonl", "JSONDecodeError"),
        ("json", b"{", "parquet", "JSONDecodeError"),
        ("json", b"NaN", "jsonl", "JSON lines cannot hold the value"),
        ("json", b"[\n-Infinity]", "jsonl", "JSON lines cannot hold the value"),
        ("json", b" null", "jsonl", "null is what a record without it has"),
        ("float", struct.pack(">d", math.inf), "jsonl", "JSON lines cannot hold the value"),
        ("str", b"\xff", "jsonl", "UnicodeDecodeError"),
        ("int", b"12", "parquet", "cannot be deserialized"),
        ("uuid", b"12", "csv", "cannot be deserialized"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    run, log_path, tmp_path, serializer, stored, name, reason
):
    """With its offset, and what to do; the file that exists stays as it is, and no part of it."""
    texts = {"json": b"1", "bytes": b"1", "str": b"1", "uuid": b"%032d" % 1}
    good = texts.get(serializer, bytes(8))
    fill(log_path, [(0, None, data, [], 0) for data in (good, stored)], value=serializer)
    file = tmp_path / f"x.{name}"
    file.write_text("precious")

    out, err = run("export", "t", file, "--force", code=1)

    assert out == ""
    assert reason in err
    assert "[t-0, offset 1]" in err
    assert ("--raw" if serializer != "bytes" else "Parquet") in err
    assert file.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", file.name]
    if name != "csv":
        run("export", "t", file, "--force", "--raw")
        run("import", "raw", file)
        assert records_of(log_path, "raw") == records_of(log_path)


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (("/dev/full", "--format", "jsonl"), 4),
        (("/dev/full", "--format", "csv"), 4),
        (("/dev/full", "--format", "parquet"), 4),
        (("missing/x.csv",), 3),
        (("x.txt",), 2),
        (("x",), 2),
        (("-", "--format", "parquet"), 2),
        ((".", "--format", "csv"), 4),
    ],
)
def test_a_target_that_cannot_be_written_is_one_message(
    run, log_path, tmp_path, monkeypatch, target, code
):
    """And leaves no file."""
    fill(log_path, RECORDS)
    monkeypatch.chdir(tmp_path)

    out, err = run("export", "t", *target, code=code)

    assert out == ""
    assert err.startswith("embedlog: ")
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("export", "nothing", "x.csv"), 3),
        (("export", "t:7", "x.csv"), 3),
        (("import", "t", "missing.csv"), 3),
        (("import", "t", ".", "--format", "csv"), 4),
        (("import", "t", "-", "--format", "parquet"), 2),
        (("export", "t", "x.csv", "--from", "soon"), 2),
        (("import", "t", "x.csv", "--skip", "-1"), 2),
        (("import", "../t", "-"), 2),
    ],
)
def test_wrong_arguments_have_their_exit_codes(
    run, log_path, tmp_path, monkeypatch, arguments, code
):
    """And create neither files nor topics."""
    fill(log_path, RECORDS)
    monkeypatch.chdir(tmp_path)

    out, err = run(*arguments, code=code)

    assert out == ""
    assert "embedlog" in err
    assert run("topics", "list")[0] == "t\n"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


PARQUET_FILE = pa.BufferOutputStream()
parquet.write_table(pa.table({"value": ["x"] * 1000}), PARQUET_FILE)
PARQUET_BYTES = PARQUET_FILE.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("x.jsonl", b"nonsense\n", "Line 1"),
        ("x.jsonl", b'{"value": 1}\n[]\n', "Line 2: must be a JSON object"),
        (
            "x.jsonl",
            b'{"value": "a", "timestamp": 99999999999999999999}',
            "Line 1: timestamp does not fit",
        ),
        ("x.jsonl", b'{"value": "a", "partition": -1}', "partition must not be negative"),
        ("x.csv", b"", "Empty CSV"),
        ("x.csv", b"a,b\n1,2\n", "The file has a column 'a'"),
        ("x.csv", b"key\n1\n", "The file has no column value"),
        ("x.csv", b"value\na,b\n", "not CSV with these columns"),
        ("x.csv", b"value,timestamp\na,soon\n", "not CSV with these columns"),
        ("x.csv", b"value,headers\na,soon\n", "The column headers is not JSON"),
        ("x.csv", b"value,headers\na,[[1]]\n", "The column headers is not JSON"),
        ("x.parquet", b"", "not Parquet, or damaged"),
        ("x.parquet", b"PAR1" * 5, "not Parquet, or damaged"),
        ("x.parquet", PARQUET_BYTES[:100], "not Parquet, or damaged"),
    ],
)
def test_a_bad_file_is_one_message(run, log_path, tmp_path, name, data, reason):
    """It says that nothing was imported, and leaves no new topic behind."""
    file = tmp_path / name
    file.write_bytes(data)

    out, err = run("import", "t", file, code=1)

    assert out == ""
    assert reason in err
    assert err.startswith("Nothing was imported\nembedlog: ")
    assert run("topics", "list") == ("", "")
    run("topics", "create", "t")
    run("import", "t", file, code=1)
    assert values_of(log_path) == []


FIELD_ITEMS = [
    *(
        '"a"',
        '""',
        "null",
        '"\\u0000\\ud83d\\ude00"',
        '"\\ud800"',
        '"\xff"',
        '"\xc3\xa9"',
        "1",
        "-0",
    ),
    *("1.0", "1e3", "true", "NaN", "99999999999999999999", "[]", "[null]", '[["h", "x"]]', "{}"),
    *('{"base64": "AA=="}', '{"h": "x"}', "'a'", "01", '"5"', "-1", '"a\tb"', '{"value": {}}'),
]
FIELD_NAMES = ["key", "value", "val\\u0075e", "timestamp", "partition", "headers", "offset", "x"]
OBJECTS = st.lists(
    st.tuples(st.sampled_from(FIELD_NAMES), st.sampled_from(FIELD_ITEMS)), max_size=4
).map(lambda fields: "{" + ", ".join(f'"{name}": {item}' for name, item in fields) + "}")
ALMOST_GOOD = [
    '{"value": "a"}{"value": "b"}',
    '{"value": "a", "headers": [null]}',
    '{"value": "\xff"}',
    '{"value": "a", "value": "b"}',
]
"""Objects that two parsers might read differently."""
GOOD = st.sampled_from(['{"value": "a", "key": "b"}', '{"value": "c", "timestamp": 7}'])
LINE = GOOD | OBJECTS | st.sampled_from(["", " ", "[]", "x", *ALMOST_GOOD])
LINE |= st.tuples(OBJECTS, st.sampled_from(["\r", " ", ",", "{}", '{"headers": {}'])).map("".join)


@pytest.fixture(scope="module")
def text_topics(tmp_path_factory):
    """A log with a topic for each serializer of text, named after it."""
    with embedlog.open(tmp_path_factory.mktemp("log"), maintenance=False) as log:
        for name in ("bytes", "str"):
            log.create_topic(name, key=name, value=name)
        yield log


@pytest.mark.parametrize("name", ["bytes", "str"])
@given(lines=st.lists(LINE, max_size=4))
@settings(max_examples=choose(test=80, all=3000), deadline=None)
def test_lines_are_read_as_one_by_one(text_topics, name, lines):
    """What pyarrow reads of many lines, and what it leaves to Python, with the same errors."""
    data = "\n".join(lines).encode("latin-1")
    serializers = input_records.InputSerializers(text_topics, name)

    def records():
        try:
            return [
                (row["key"], row["value"], *map(row.get, ("timestamp", "partition")), headers)
                for rows in input_records.file_records(io.BytesIO(data), "jsonl", serializers)
                for row in rows.table.to_pylist()
                for headers in [row.get("headers") or []]
            ]
        except EmbedlogError as error:
            return str(error)

    together = records()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_records, "_read_by_arrow", lambda lines: None)
        assert together == records()


@pytest.mark.parametrize(
    ("serializer", "name", "data", "reason"),
    [
        ("int", "jsonl", b'{"value": 1}\n{"value": "1"}\n', "Line 2 does not fit"),
        ("int", "csv", b"value\n1\none\n", "Row 2 has a value that is not of the type 'int'"),
        ("int", "csv", b"value\n99999999999999999999\n", "does not fit in 64 bits"),
        ("json", "csv", b"value\n{\n", "Row 1 has a value that is not of the type 'json'"),
        ("uuid", "csv", b"value\n5\n", "Row 1 has a value that is not of the type 'uuid'"),
        ("str", "csv", b"value\n\xff\n", "Row 1 has a value that is not of the type 'str'"),
    ],
)
def test_values_that_do_not_fit_the_topic_are_refused(
    run, log_path, tmp_path, serializer, name, data, reason
):
    """With the number of the row, and nothing of the chunk is appended."""
    file = tmp_path / f"x.{name}"
    file.write_bytes(data)
    run("topics", "create", "t", "--value", serializer)

    _, err = run("import", "t", file, code=1)

    assert reason in err
    assert "If the file was exported with --raw, use --raw." in err
    assert values_of(log_path) == []


# What is interrupted


def files_with_a_bad_end(name):
    """Return a good file of 900 records, and one that is bad in the last third."""
    good = [b"%d" % number for number in range(900)]
    bad = [*good[:700], b"bad", *good[701:]]
    if name == "jsonl":
        lines = [[b'{"value": "%b"}' % value for value in values] for values in (good, bad)]
        return b"\n".join(lines[0]), b"\n".join(lines[1]).replace(b'{"value": "bad"}', b"{bad")
    rows = [b"\n".join([b"value,timestamp", *(b"%b,1" % v for v in v_s)]) for v_s in (good, bad)]
    return rows[0], rows[1].replace(b"bad,1", b"bad,bad")


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_an_import_that_failed_continues_with_skip(run, log_path, tmp_path, monkeypatch, name):
    """The message has the number; in the end every record is there once, and in order."""
    monkeypatch.setattr(file_formats, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(input_records, "_CSV_BLOCK_BYTES", 1000)
    good, bad = files_with_a_bad_end(name)
    file = tmp_path / f"x.{name}"
    file.write_bytes(bad)

    _, err = run("import", "t", file, code=1)

    done = len(values_of(log_path))
    assert 0 < done <= 700
    assert err.startswith(
        f"Imported {done} records before the import ended; "
        f"to continue, repeat the command with --skip {done}\n"
    )

    _, err = run("import", "t", file, "--skip", done, code=1)
    assert err.startswith("Nothing was imported\n")

    file.write_bytes(good)
    run("import", "t", file, "--skip", done)
    assert values_of(log_path) == [b"%d" % number for number in range(900)]


def test_a_damaged_row_group_ends_an_import(run, log_path, tmp_path):
    """What was read before it is imported, and counted."""
    file = tmp_path / "x.parquet"
    table = pa.table({"value": [f"{number:08}" for number in range(3000)]})
    parquet.write_table(table, file, row_group_size=1000, compression="none", use_dictionary=False)
    data = bytearray(file.read_bytes())
    group = parquet.ParquetFile(file).metadata.row_group(2).column(0)
    good = bytes(data)
    data[group.data_page_offset : group.data_page_offset + 30] = b"\xff" * 30
    file.write_bytes(data)
    run("topics", "create", "t")

    _, err = run("import", "t", file, code=1)

    done = len(values_of(log_path))
    assert "not Parquet, or damaged" in err
    assert done in (0, 1000, 2000)
    file.write_bytes(good)
    run("import", "t", file, "--skip", done)
    assert values_of(log_path) == [b"%08d" % number for number in range(3000)]


def test_an_import_says_if_it_does_not_know_how_far_it_came(run, log_path):
    """One partition has its records, the next one refuses: how many of the chunk are unknown."""
    run("topics", "create", "t", "-p", "2", "-c", "max.message.bytes=5000")
    lines = [{"value": "x", "partition": 0}, {"value": os.urandom(5000).hex(), "partition": 1}]
    data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()

    _, err = run("import", "t", "-", stdin=data, code=1)

    assert err.startswith(
        "Imported 0 records before the import ended, and perhaps some of the next 2; "
        "to continue, repeat the command with --skip 0\n"
    )
    assert "max.message.bytes" in err


def test_records_after_the_end_are_not_skipped(run, log_path):
    """--skip may be larger than the file."""
    assert run("import", "t", "-", "--skip", "9", stdin=b'{"value": 1}')[0] == (
        "Imported 0 records into t (a new topic)\n"
    )


# Memory

CHILD = """
    import resource, sys
    from embedlog.cli import main
    for words in sys.argv[1:]:
        assert main(words.split()) == 0
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def peak_kilobytes(*commands):
    """Run commands in a process of their own, and return the memory that it needed."""
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), *commands],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(process.stderr.splitlines()[-1])


@pytest.mark.tier("all")
def test_memory_does_not_grow_with_the_file(log_path, tmp_path):
    """For 128 MB it is about the same as for 32 MB, which is more than a chunk."""
    with embedlog.open(log_path, maintenance=False) as log:
        log.create_topic("t", 2, {"compression.type": "zstd"})
        with log.producer() as producer:
            for number in range(128):
                producer.send_batch("t", [b"x" * 10_000] * 100, partition=number % 2)
    small, large = (
        peak_kilobytes(
            *(
                command
                for name in FORMATS
                for file in [f"{tmp_path}/{size}.{name}"]
                for command in (f"export t {file} {options}", f"import {name} {file}")
            )
        )
        for size, options in (("small", "--until 1600"), ("large", ""))
    )

    assert large - small < 64 << 10


def test_exports_are_made_of_chunks(run, log_path, tmp_path, monkeypatch):
    """A row group is a chunk, which may end within a batch of the topic, or hold several."""
    monkeypatch.setattr(read_files, "MAX_ROWS", 3)
    fill(log_path, RECORDS)

    run("export", "t", tmp_path / "x.parquet")

    groups = parquet.ParquetFile(tmp_path / "x.parquet").metadata
    assert [groups.row_group(number).num_rows for number in range(groups.num_row_groups)] == [3, 3]
