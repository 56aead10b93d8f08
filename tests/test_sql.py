"""SQL over the topics of a log."""

from __future__ import annotations

import socket
from collections import Counter

import polars as pl
import pyarrow as pa
import pytest

import embedlog
from embedlog.api.topic import TopicView
from embedlog.cli import main
from embedlog.errors import InvalidQueryError, InvalidSchemaError, UnknownTopicOrPartitionError
from embedlog.schemas.row_filter import row_filter

FLIGHTS = pa.table(
    {
        "carrier": ["UA", "AA", "UA", None],
        "dep_delay": [2.0, 4.0, None, 1.0],
        "day": pa.array([15706, 15707, 15708, 15709], pa.date32()),
    }
)


@pytest.fixture
def log(tmp_path):
    """A log with a typed topic and two of bytes, one of which SQL can only name in quotes."""
    with embedlog.open(tmp_path / "log") as log, log.producer() as producer:
        log.create_topic("flights", 2, schema=FLIGHTS, key="carrier")
        log.create_topic("airlines", key="str", value="str")
        log.create_topic("my-topic")
        producer.append_table("flights", FLIGHTS).result()
        producer.send("airlines", "United", key="UA")
        producer.send("airlines", "American", key="AA")
        producer.send("my-topic", b"v")
        producer.flush()
        yield log


def test_a_query_returns_a_frame(log):
    """Of Polars, with the rows and names that SQL says."""
    frame = log.sql(
        "select carrier, avg(dep_delay) as late from flights group by carrier order by carrier"
    )

    assert isinstance(frame, pl.DataFrame)
    assert frame.to_dicts() == [
        {"carrier": "AA", "late": 4.0},
        {"carrier": "UA", "late": 2.0},
        {"carrier": None, "late": 1.0},
    ]


def test_a_lazy_query_reads_when_it_is_collected(log):
    """So it has the records of that moment, and can go on in Polars."""
    frame = log.sql("select carrier from flights where dep_delay > 1.5", eager=False)
    log.producer().send("flights", {"carrier": "B6", "dep_delay": 9.0}).result()

    assert isinstance(frame, pl.LazyFrame)
    assert sorted(frame.filter(pl.col("carrier") != "AA").collect()["carrier"]) == ["B6", "UA"]


def test_topics_are_joined_whatever_their_values(log):
    """A topic of bytes has keys and values, as its serializers read them."""
    frame = log.sql(
        "select a.value, count(*) as n from flights f join airlines a on f.carrier = a.key "
        "group by a.value order by n"
    )

    assert frame.rows() == [("American", 1), ("United", 2)]
    assert log.sql('select value from "my-topic"').item() == b"v"


def test_only_the_topics_of_a_query_are_read(log, monkeypatch):
    """Of others, not even the columns."""
    asked = Counter()
    scannable = TopicView._scannable

    def noted(view):
        asked[view.name] += 1
        return scannable(view)

    monkeypatch.setattr(TopicView, "_scannable", noted)
    log.sql("select * from airlines")
    log.sql("select 1 as one")

    assert asked == {"airlines": 1}


def test_an_internal_topic_is_a_table_too(log):
    """Such as that of what happened to the log."""
    log.housekeeping.run()

    assert log.sql("select count(*) from __activity").item() == len(log.topic("__activity"))


@pytest.mark.parametrize(
    ("query", "error", "text"),
    [
        (
            "select * from flihgts",
            UnknownTopicOrPartitionError,
            r'no such topic \[flihgts\]. Did you mean flights\? The tables are .*, "my-topic".$',
        ),
        (
            "select * from flights join nope on true",
            UnknownTopicOrPartitionError,
            r"no such topic \[nope\]. The tables are",
        ),
        ("selec", InvalidQueryError, "The query is wrong: .*found: selec .*Correct it."),
        ("", InvalidQueryError, "one .* statement"),
        ("select 1; select 2", InvalidQueryError, "one .* statement"),
        (
            "select * from my-topic",
            InvalidQueryError,
            'Write the name "my-topic" in double quotes',
        ),
        (
            "select tail from flights",
            InvalidQueryError,
            'unable to find column "tail"; valid columns: .*"dep_delay".*Correct it.$',
        ),
        (
            "select cast(carrier as int) from flights",
            InvalidQueryError,
            "The query failed: conversion from `str` to `i32` failed",
        ),
        ("-- all of them\nDELETE from flights", InvalidQueryError, "DELETE would change it.*Write"),
        ("/* x */ drop table flights", InvalidQueryError, "DROP would change it"),
    ],
)
def test_a_wrong_query_is_refused_with_what_to_do(log, query, error, text):
    """In embedlog's words, without Polars' plan of the query."""
    with pytest.raises(error, match=text) as caught:
        log.sql(query)

    assert "\n" not in str(caught.value)


FILE_READERS = ["read_csv", "READ_JSON", '"read_ndjson"', "'read_ipc'", "x.read_parquet"]
"""Polars' functions that read files; it takes their names in any case and in any quotes."""
FILE_QUERIES = [
    "select * from {}",
    "with x as (select * from {}) select * from x",
    "with read_csv as (select 1 as one) select * from read_csv, {}",
    "with a as (with b as (from {}) select * from b) select * from a",
    "select * from flights /* f */ join {} on true",
    "select * from flights, lateral {}",
    "select * from lateral (select * from {}) s",
    "select * from table({})",
    "select 1 as one union all select * from {}",
    "select (select max(a) from {}) from flights",
    "select * from flights where carrier in (select a from {})",
    "select * from flights where exists (select 1 from (select * from {}) s)",
    "select * from flights order by (select a from {})",
    "select * from flights limit (select a from {})",
    "select * from generate_series(1, (select a from {}))",
    "values ((select a from {}))",
    "explain select * from {}",
    "describe {}",
    "copy (select * from {}) to '/dev/null'",
    "show tables from {}",
]


@pytest.fixture
def server():
    """A server to which nobody should connect, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server, f"http://127.0.0.1:{server.getsockname()[1]}/x"


@pytest.mark.parametrize("query", FILE_QUERIES)
def test_a_query_reads_topics_only(log, query, server):
    """Wherever it names a URL or a file: it is refused before Polars looks at that."""
    listening, url = server

    for function in FILE_READERS:
        with pytest.raises(InvalidQueryError):
            log.sql(query.format(f"{function} /**/ ('{url}')"), eager=False)
    with pytest.raises(BlockingIOError):
        listening.accept()


@pytest.mark.parametrize("query", [query for query in FILE_QUERIES if "where" in query])
def test_a_condition_reads_its_topic_only(log, query, server):
    """It is part of a query too."""
    listening, url = server

    condition = query.partition(" where ")[2].format(f"read_csv('{url}')")
    with pytest.raises(InvalidQueryError, match="is not about single rows"):
        row_filter(condition, FLIGHTS.schema, "flights")
    with pytest.raises(BlockingIOError):
        listening.accept()


def test_a_query_reads_files_when_it_may(log, tmp_path):
    """To join them with topics; a file that is not there is an error of embedlog too."""
    path = tmp_path / "names.csv"
    path.write_text("code,name\nUA,United\n", "utf-8")
    query = f"select name from flights join read_csv('{path}') n on carrier = n.code"

    with pytest.raises(InvalidQueryError, match=r"with read_csv. Name topics.* files=True\.$"):
        log.sql(query)
    assert log.sql(query, files=True)["name"].to_list() == ["United", "United"]
    assert main(["--root", str(tmp_path / "log"), "sql", "--files", query]) == 0
    path.unlink()
    with pytest.raises(InvalidQueryError, match="No such file"):
        log.sql(query, files=True)


def test_a_table_function_that_reads_no_file_is_not_refused(log):
    """It makes numbers."""
    pytest.importorskip("polars", minversion="2.1")
    assert log.sql("select * from generate_series(1, 3)").height == 3


def test_a_log_without_topics_says_so(tmp_path):
    """There is no list of tables to show."""
    with (
        embedlog.open(tmp_path / "log") as log,
        pytest.raises(UnknownTopicOrPartitionError, match=r"\[t\]. The log has no topics."),
    ):
        log.sql("select * from t")


def test_a_query_is_text(log):
    """And nothing else."""
    with pytest.raises(TypeError, match="query must be SQL as a str, got bytes"):
        log.sql(b"select 1")


def test_a_type_that_polars_does_not_have_is_named(log):
    """With its column, and with what reads it."""
    log.create_topic("odd", schema=pa.schema([("price", pa.decimal128(10, -2))]))

    with pytest.raises(InvalidSchemaError, match=r"decimal128\(10, -2\) of the column price"):
        log.topic("odd").scan()
    with pytest.raises(InvalidSchemaError, match=r"column price.*Read the topic with to_arrow"):
        log.sql("select * from odd")
    assert log.sql("select count(*) from flights").item() == 4


def test_a_read_only_log_answers_queries(log, tmp_path):
    """It changes nothing."""
    with embedlog.open(tmp_path / "log", mode="r") as reader:
        assert reader.sql("select count(*) from flights").item() == 4
