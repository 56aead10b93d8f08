"""A segment file is an Arrow stream: any Arrow library reads it, without embedlog."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pyarrow as pa
import pytest
from support.clock import START
from support.roots import encoded, segment_files

import embedlog

pytestmark = pytest.mark.tier("test")  # other libraries take long to import

HEADERS = [[("a", b"1"), ("b", None)], [], [("ä", b"")]]
VALUES = [b"plain", None, bytes(range(256))]
KEYS = [b"k", b"", None]


COMPRESSIONS = ("none", "lz4", "zstd")
CASES = {
    f"{compression}-{'headers' if headers else 'plain'}-{'sealed' if sealed else 'active'}": (
        compression,
        headers,
        sealed,
    )
    for compression in COMPRESSIONS
    for headers in (False, True)
    for sealed in (False, True)
}


def fill(path, compression, headers, sealed):
    """Write two batches to one segment, and seal it if `sealed`."""
    header_lists = HEADERS if headers else None
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("t")
        partition = log.partition("t", 0)
        for number in range(2):
            timestamp = START + number
            batch = encoded(
                *VALUES, keys=KEYS, at=timestamp, headers=header_lists, compression=compression
            )
            partition.append([batch])
        if sealed:
            partition.roll()
    files = [file for file in segment_files(path) if file.stat().st_size > 1000]
    assert len(files) == 1
    return files[0]


def expected(headers):
    """The columns as other programs see them: bytes as hex, headers as pairs."""
    columns = {
        "timestamp": [START] * 3 + [START + 1] * 3,
        "key": [None if key is None else key.hex() for key in KEYS * 2],
        "value": [None if value is None else value.hex() for value in VALUES * 2],
    }
    if headers:
        columns["headers"] = [
            [[name, None if value is None else value.hex()] for name, value in pairs]
            for pairs in HEADERS * 2
        ]
    return columns


SHOW = """
    import json, sys
    def hexed(items):
        return [None if item is None else bytes(item).hex() for item in items]
    def pairs(items):
        return [[[h["key"], None if h["value"] is None else bytes(h["value"]).hex()]
                 for h in row or []] for row in items]
    def shown(columns, times):
        shown = {"timestamp": times, "key": hexed(columns["key"]), "value": hexed(columns["value"])}
        if "headers" in columns:
            shown["headers"] = pairs(columns["headers"])
        return shown
"""
PYARROW = """
    import pyarrow as pa
    def read(path):
        with pa.ipc.open_stream(path) as stream:
            table = stream.read_all()
        table.validate(full=True)
        assert table.schema.metadata[b"embedlog.topic"] == b"t"
        return shown(table.to_pydict(), table["timestamp"].cast("int64").to_pylist())
"""
POLARS = """
    import polars as pl
    def read(path):
        frame = pl.read_ipc_stream(path)
        return shown(frame.to_dict(as_series=False), frame["timestamp"].dt.epoch("ms").to_list())
"""
DUCKDB = """
    import duckdb, pyarrow as pa
    def read(path):
        stream = pa.ipc.open_stream(path)
        table = duckdb.sql("select *, epoch_ms(timestamp) as ms from stream").to_arrow_table()
        return shown(table.to_pydict(), table["ms"].to_pylist())
"""
ANSWER = """
    files = [read(path) for path in sys.argv[1:]]
    assert "embedlog" not in sys.modules
    print(json.dumps(files))
"""
PROGRAMS = {"pyarrow": PYARROW, "polars": POLARS, "duckdb": DUCKDB}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A segment file of each kind."""
    directory = tmp_path_factory.mktemp("logs")
    return [str(fill(directory / name, *case)) for name, case in CASES.items()]


@pytest.fixture(scope="module", params=PROGRAMS)
def columns_by_case(request, files):
    """The columns that a program without embedlog reads from each kind of file."""
    code = textwrap.dedent(SHOW) + textwrap.dedent(PROGRAMS[request.param] + ANSWER)
    command = [sys.executable, "-P", "-c", code, *files]
    completed = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert completed.returncode == 0, completed.stderr
    return dict(zip(CASES, json.loads(completed.stdout), strict=True))


@pytest.mark.xdist_group("interop")  # the programs read the files once, and not in each worker
@pytest.mark.parametrize("case", CASES)
def test_a_segment_is_read_without_embedlog(columns_by_case, case):
    """The file itself is an Arrow stream with every record in it (docs/format.md).

    PyArrow and Polars read it with their own readers, DuckDB through PyArrow.
    """
    assert columns_by_case[case] == expected(headers=CASES[case][1])


@pytest.fixture
def topic(tmp_path):
    """A topic of two partitions and two kinds of segments."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", partitions=2)
        log.partition("t", 0).append([encoded(*VALUES, keys=KEYS)])
        log.partition("t", 1).append([encoded(*VALUES, headers=HEADERS, compression="zstd")])
        yield log.topic("t")
        assert log.housekeeping.verify() == []


def rows_of(file):
    """Return (partition, offset, value) of the rows to read of a file, as pyarrow reads it."""
    with (
        pa.memory_map(file.path) as data,
        pa.ipc.open_stream(data.read_buffer(file.size)) as stream,
    ):
        table = stream.read_all()
    numbers = range(file.base_offset, file.base_offset + table.num_rows)
    offsets = table["offset"].to_pylist() if "offset" in table.column_names else numbers
    rows = zip(offsets, table["value"].to_pylist(), strict=True)
    return [
        (file.partition, offset, value)
        for offset, value in rows
        if file.start_offset <= offset < file.end_offset
    ]


def listed_rows(topic):
    """Return the rows of the files that a topic lists, and those that it has."""
    listed = [row for file in topic.files() for row in rows_of(file)]
    return listed, [(record.partition, record.offset, record.value) for record in topic]


def test_the_listed_files_have_each_record_once(tmp_path):
    """After compaction, rebatching and a deletion, and beside bytes that are not committed.

    The directory has the replaced files besides, until their delay is over.
    """
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        compact = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0}
        log.create_topic("compacted", config={**compact, "segment.bytes": 1500})
        log.create_topic("t", 2, {"segment.bytes": 1500})
        assert log.topic("t").files() == []
        housekeeping = {
            "compacted": lambda: log.housekeeping.compact("compacted", force=True),
            "t": lambda: log.topic("t").optimize(),
        }
        for name, run in housekeeping.items():
            for number in range(60):
                batch = encoded(b"v%d" % number, b"w", keys=[b"k%d" % (number % 4), b"x"])
                log.partition(name, 0).append([batch])
            before = log.topic(name).files()
            run()
            after = log.topic(name).files()
            paths = {path for path in segment_files(tmp_path / "log") if f"/{name}-" in str(path)}
            assert {file.path for file in before} - {file.path for file in after}
            assert {file.path for file in [*before, *after]} <= set(map(str, paths))
            listed, rows = listed_rows(log.topic(name))
            assert listed == rows
        topic = log.topic("t")
        log.partition("t", 0).append([encoded(*VALUES, keys=[b"a", b"b", b"c"])])
        log.delete_records({embedlog.TopicPartition("t", 0): topic[-2].offset})
        active = topic.files()[-1]
        with open(active.path, "ab") as file:
            file.write(b"\xff\xff\xff\xff half a batch")

        listed, rows = listed_rows(topic)

        assert listed == rows
        assert [value for _, _, value in listed] == VALUES[1:]
        assert topic[:1].files() == [active._replace(end_offset=rows[0][1] + 1)]


def test_the_listed_files_can_be_read_as_long_as_a_lease_holds_them(tmp_path):
    """Although retention is due, and unlinks without delay."""
    config = {"segment.bytes": 1500, "file.delete.delay.ms": 0, "retention.bytes": 1}
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", config=config)
        for number in range(60):
            log.partition("t", 0).append([encoded(b"v%d" % number, keys=[b"k"])])
        with log.housekeeping.hold("reader"):
            files = log.topic("t").files()
            rows = [row for file in files for row in rows_of(file)]
            log.housekeeping.run()
            assert [row for file in files for row in rows_of(file)] == rows
        log.housekeeping.run()

        with pytest.raises(FileNotFoundError):
            rows_of(files[0])


def test_duckdb_queries_a_topic_as_it_is(topic):
    """A topic is an Arrow stream: no conversion, no copy, and each query reads it again."""
    import duckdb

    query = (
        'select partition, count(*), max("offset"), count(value) from topic group by 1 order by 1'
    )

    assert duckdb.sql(query).fetchall() == [(0, 3, 2, 2), (1, 3, 2, 2)]
    last = topic[-1:]  # noqa: F841 - DuckDB finds it by its name
    assert duckdb.sql("select value from last").fetchall() == [(VALUES[2],)]
    assert len(duckdb.sql(query).fetchall()) == 2


def test_polars_takes_a_topic_as_it_is(topic):
    """`pl.DataFrame(topic)` reads the same stream."""
    import polars as pl

    frame = pl.DataFrame(topic)

    assert frame["value"].to_list() == VALUES * 2
    assert frame["offset"].to_list() == [0, 1, 2] * 2


def test_pandas_takes_a_topic_as_it_is(topic):
    """`pandas.DataFrame.from_arrow` reads it; pandas before version 3 needs a PyArrow table."""
    import pandas as pd
    import pyarrow as pa

    make = getattr(pd.DataFrame, "from_arrow", lambda view: pa.table(view).to_pandas())

    assert make(topic)["value"].tolist() == VALUES * 2


def test_arrow_takes_a_topic_as_it_is(topic):
    """`pa.table(topic)` reads everything, a `RecordBatchReader` one batch at a time."""
    import pyarrow as pa

    assert pa.table(topic).equals(topic.to_arrow())
    stream = pa.RecordBatchReader.from_stream(topic)
    assert [batch.num_rows for batch in stream] == [3, 3]
