"""Lazy frames of Polars over topics: they equal the same operations on all records."""

from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal
from functools import reduce
from operator import and_, or_

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from support.children import run_python
from support.tiers import sample

import embedlog
from embedlog.api.scan import ScanSource
from embedlog.api.topic import TopicView
from embedlog.api.typed_topic import TypedTopicView
from embedlog.errors import (
    ClosedError,
    CorruptBatchError,
    InvalidQueryError,
    InvalidSchemaError,
    UnsupportedFormatError,
)
from embedlog.schemas.pushdown import MAX_BYTES

COLUMNS = pa.schema(
    [
        pa.field("carrier", pa.string()),
        pa.field("number", pa.int32()),
        pa.field("large", pa.uint64()),
        pa.field("delay", pa.float64()),
        pa.field("short", pa.float32()),
        pa.field("late", pa.bool_()),
        pa.field("day", pa.date32()),
        pa.field("time", pa.timestamp("us", tz="UTC")),
        pa.field("local", pa.timestamp("ms")),
        pa.field("fare", pa.decimal128(10, 2)),
        pa.field("raw", pa.binary()),
        pa.field("took", pa.duration("us")),
        pa.field("clock", pa.time64("us")),
        pa.field("tags", pa.list_(pa.struct([("a", pa.int64())]))),
    ]
)
VALUES = {
    "carrier": ["", "AA", "B6", "UA", "\N{LATIN SMALL LETTER U WITH DIAERESIS}", None],
    "number": [-(1 << 31), -1, 0, 1, 7, (1 << 31) - 1, None],
    "large": [0, 1, 1 << 63, (1 << 64) - 1, None],
    "delay": [float("-inf"), -1.5, -0.0, 0.0, 1.5, float("inf"), float("nan"), None],
    "short": [-1.5, 0.0, 0.10000000149011612, float("nan"), None],
    "late": [True, False, None],
    "day": [dt.date(1969, 12, 31), dt.date(2013, 1, 1), dt.date(2013, 1, 2), None],
    "time": [dt.datetime(2013, 1, 1, hour, tzinfo=dt.UTC) for hour in range(3)] + [None],
    "local": [dt.datetime(2013, 1, 1, hour) for hour in range(3)] + [None],  # noqa: DTZ001
    "fare": [Decimal("-1.50"), Decimal("0.00"), Decimal("99.99"), None],
    "raw": [b"", b"\x00", b"ab", b"\xff", None],
    "took": [dt.timedelta(0), dt.timedelta(minutes=1), dt.timedelta(days=-1), None],
    "clock": [dt.time(0), dt.time(12, 30), None],
}
ROWS = 400


def table(rows, first=0):
    """Return rows in which every value meets every other one, sooner or later."""
    columns = {
        name: [values[(first + row * step) % len(values)] for row in range(rows)]
        for step, (name, values) in enumerate(VALUES.items(), 1)
    }
    tags = [[{"a": row}] if row % 3 else None for row in range(rows)]
    return pa.table({**columns, "tags": tags}, schema=COLUMNS)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A topic of two versions of its schema, in small batches, with a tombstone."""
    with embedlog.open(tmp_path_factory.mktemp("scan") / "log") as log:
        log.create_topic("t", 3, {"segment.bytes": 40_000}, schema=COLUMNS, key="carrier")
        with log.producer() as producer, log.producer(compression_type="lz4") as packed:
            for start in range(0, ROWS // 2, 50):
                writer = producer if start % 100 else packed
                writer.append_table("t", table(50, start), partition=start // 50 % 3).result()
            producer.send("t", None, key="AA").result()
            wider = COLUMNS.set(1, pa.field("number", pa.int64()))
            log.alter_topic(
                "t", schema=wider.append(pa.field("gate", pa.string())), defaults={"gate": "A1"}
            )
            for start in range(0, ROWS // 2, 50):
                producer.append_table("t", table(50, start), partition=start // 50 % 3).result()
        yield log
        assert log.housekeeping.verify() == []


@pytest.fixture(scope="module")
def rows(log):
    """All records of the topic."""
    return log.topic("t").to_polars()


@st.composite
def comparisons(draw):
    """Return a filter of one column."""
    name = draw(st.sampled_from(list(VALUES)))
    column = pl.col(name)
    value = st.sampled_from([value for value in VALUES[name] if value is not None])
    kind = draw(st.sampled_from("compare between in null starts flag missing nan".split()))
    if kind == "compare":
        operator = draw(st.sampled_from("eq ne lt le gt ge eq_missing ne_missing".split()))
        constant = pl.lit(draw(value))
        if draw(st.booleans()):
            return getattr(column, operator)(constant)
        return getattr(constant, operator)(column)
    if kind == "between":
        closed = draw(st.sampled_from(["both", "left", "right", "none"]))
        return column.is_between(draw(value), draw(value), closed=closed)
    if kind == "in":
        values = draw(st.lists(st.sampled_from(VALUES[name]), min_size=1, max_size=3))
        assume(name != "fare")  # Polars 2.1 refuses lists of decimals here.
        return column.is_in(values, nulls_equal=draw(st.booleans()))
    if kind == "missing":
        return column.eq_missing(None)
    if kind == "starts":
        return pl.col("carrier").str.starts_with(draw(st.sampled_from(["", "A", "UA", "zz"])))
    if kind == "flag":
        return pl.col("late")
    if kind == "nan":
        return draw(st.sampled_from([pl.col("delay").is_nan(), pl.col("delay") > float("nan")]))
    return draw(st.sampled_from([column.is_null(), column.is_not_null()]))


EXTRAS = [
    pl.col("number") + 1 > 5,
    pl.col("delay").abs() < 1,
    pl.col("carrier").str.len_bytes() == 2,
    pl.col("tags").list.len() > 0,
    pl.col("offset") % 7 == 0,
    pl.col("partition") == 1,
    pl.col("gate") == "A1",
    pl.col("gate").is_null(),
    pl.col("number") > 2.5,
    pl.col("number").cast(pl.Int64) > (1 << 33),
    pl.col("short") > 0.1,
    pl.col("time") > dt.datetime(2013, 1, 1, 3, tzinfo=dt.timezone(dt.timedelta(hours=2))),
    pl.col("day") >= dt.datetime(2013, 1, 1, 12),  # noqa: DTZ001
    pl.col("delay") > pl.col("delay").mean(),
    pl.lit(True),
    pl.lit(False),
]


def combined(parts):
    """Combine filters in any way."""
    return st.one_of(
        parts.map(lambda part: ~part),
        st.lists(parts, min_size=2, max_size=3).map(lambda all_: reduce(and_, all_)),
        st.lists(parts, min_size=2, max_size=3).map(lambda all_: reduce(or_, all_)),
    )


filters = st.recursive(st.one_of(comparisons(), st.sampled_from(EXTRAS)), combined, max_leaves=5)


@st.composite
def queries(draw):
    """Return some operations on a frame, lazy or not."""
    names = [*VALUES, "tags", "gate", "offset", "partition", "timestamp"]
    steps = []
    for kind in draw(st.lists(st.sampled_from("filter select slice".split()), max_size=4)):
        if kind == "filter":
            condition = draw(filters)
            steps.append(lambda frame, part=condition: frame.filter(part))
        elif kind == "slice":
            start, length = draw(st.integers(-450, 450)), draw(st.integers(0, 450))
            steps.append(lambda frame, at=start, count=length: frame.slice(at, count))
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    steps.append(lambda frame: frame.select(chosen))
    return lambda frame: reduce(lambda before, step: step(before), steps, frame)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(queries(), st.sampled_from(["in-memory", "streaming"]))
def test_a_query_of_a_scan_equals_that_of_all_records(log, rows, query, engine):
    """Whatever reaches the log, and whatever does not."""
    try:
        expected = query(rows)
    except pl.exceptions.PolarsError:
        assume(False)

    assert_frame_equal(query(log.topic("t").scan()).collect(engine=engine), expected)


COMPARED = {
    "whole": (pa.uint8(), [0, 255]),
    "half": (pa.float32(), [-0.0, 0.1, float("nan"), float("-inf")]),
    "real": (pa.float64(), [0.0, -0.0, 0.1, float("nan"), float("inf")]),
    "text": (pa.string(), ["", "a", "A", "\N{LATIN CAPITAL LETTER A WITH DIAERESIS}", "a\0"]),
    "raw": (pa.binary(), [b"", b"\xff", b"a"]),
    "seconds": (pa.timestamp("s"), [dt.datetime(1969, 12, 31, 23), dt.datetime(2024, 3, 10)]),  # noqa: DTZ001
    "zone": (
        pa.timestamp("us", "Europe/Berlin"),
        [dt.datetime(2024, 10, 27, hour, 30, 0, 1, tzinfo=dt.UTC) for hour in (0, 1)],
    ),
    "nanos": (pa.timestamp("ns", "UTC"), [dt.datetime(1700, 1, 1, tzinfo=dt.UTC)]),
    "span": (pa.duration("ns"), [dt.timedelta(0), dt.timedelta(microseconds=-1)]),
    "clock": (pa.time32("s"), [dt.time(0), dt.time(23, 59, 59)]),
    "day": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "wide": (pa.decimal128(38, 10), [Decimal(0), Decimal("-1.5"), Decimal("9" * 28 + ".1")]),
}
"""Types that two engines may compare in two ways, and values at which they may differ."""


def each_comparison(name, values):
    """Yield each comparison of a column with its values, and each list of one."""
    column = pl.col(name)
    for value in values:
        literal = pl.lit(value)
        for operator in "eq ne lt le gt ge eq_missing ne_missing".split():
            yield getattr(column, operator)(literal)
            yield ~getattr(literal, operator)(column)
        if name != "wide":  # Polars 2.1 refuses lists of decimals here.
            for items in ([value], [value, None]):
                yield from (column.is_in(items), ~column.is_in(items, nulls_equal=True))
        yield column.is_between(value, value)


def test_each_comparison_has_the_same_rows_for_polars_and_the_log(tmp_path):
    """Zeros of both signs, NaN, case, units, time zones, wide decimals, nulls in lists."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        schema = pa.schema([(name, kind) for name, (kind, _) in COMPARED.items()])
        topic = log.create_topic("t", schema=schema)
        with log.producer() as producer:
            for row in range(5):
                values = {
                    name: [[*values, None][row % (len(values) + 1)]]
                    for name, (_, values) in COMPARED.items()
                }
                producer.append_table("t", pa.table(values, schema=schema)).result()
        frame, scan = topic.to_polars(), topic.scan()

        for name, (_, values) in COMPARED.items():
            for part in sample([*each_comparison(name, values)], 6):
                try:
                    expected = frame.filter(part)
                except pl.exceptions.PolarsError:
                    continue
                assert repr(scan.filter(part).collect().rows()) == repr(expected.rows()), part


@pytest.fixture
def reads(monkeypatch):
    """The columns and filters of all reads of topics, and the batches that were taken."""
    reads = []
    batches = TopicView.batches

    def noted(view, columns=None, *, where=None, **times):
        read = {"columns": columns, "where": None if where is None else str(where), "batches": 0}
        reads.append(read)
        for batch in batches(view, columns, where=where, **times):
            read["batches"] += 1
            yield batch

    monkeypatch.setattr(TopicView, "batches", noted)
    return reads


@pytest.mark.parametrize(
    ("part", "pushed"),
    [
        (pl.col("number") > 5, "(number > 5)"),
        (pl.lit(5) > pl.col("number"), "(number < 5)"),
        (~(pl.col("number") > 5), "(number <= 5)"),
        (pl.col("carrier") == "UA", '(carrier == "UA")'),
        (pl.col("late"), "late"),
        (~pl.col("late"), "invert(late)"),
        (pl.col("day") >= dt.date(2013, 1, 1), "(day >= 2013-01-01)"),
        (pl.col("fare") < Decimal("1.5"), "(fare < 1.50)"),
        (pl.col("number").is_null(), "is_null(number, {nan_is_null=false})"),
        (pl.col("number").is_between(1, 3), "((number >= 1) and (number <= 3))"),
        ((pl.col("number") > 5) | (pl.col("large") < 3), "((number > 5) or (large < 3))"),
        # Polars takes NaN for the largest number.
        (pl.col("delay") > 1.5, "((delay > 1.5) or is_nan(delay))"),
        (pl.col("delay") < 1.5, "(delay < 1.5)"),
        # What has no counterpart is left out where that only keeps more rows.
        ((pl.col("number") > 5) & (pl.col("number") % 2 == 0), "(number > 5)"),
        ((pl.col("number") > 5) | (pl.col("number") % 2 == 0), None),
        (pl.col("delay") > float("nan"), None),
        (pl.col("number") > pl.col("short"), None),
        (pl.col("number").is_in(range(MAX_BYTES // 4)), None),
    ],
    ids=str,
)
def test_a_filter_reaches_the_log(log, reads, part, pushed):
    """As an expression of pyarrow, as far as it has the same meaning there."""
    log.topic("t").scan().filter(part).select("offset").collect()

    (read,) = reads
    assert read["where"] == pushed


def test_batches_are_skipped_by_their_statistics(tmp_path, reads):
    """Also where a NaN would be larger than the number; a batch with one is read."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", schema=pa.schema([("delay", pa.float64()), ("at", pa.int64())]))
        with log.producer() as producer:
            for start in range(0, 1000, 100):
                delays = [float(start + row) for row in range(100)]
                if start == 300:
                    delays[5] = float("nan")
                producer.append_table("t", pa.table({"delay": delays, "at": range(100)})).result()
        log.partition("t", 0).roll()
        frame = log.topic("t").scan()

        late = frame.filter(pl.col("delay") >= 950.0)
        assert late.select(pl.len()).collect().item() == 51
        assert reads[-1]["batches"] <= 2
        assert frame.filter(pl.col("delay") < 50.0).select(pl.len()).collect().item() == 50
        assert reads[-1]["batches"] == 1


def test_lists_and_beginnings_of_text_reach_the_log(log, reads):
    """`is_in` and `starts_with`."""
    frame = log.topic("t").scan().select("offset", "number", "carrier")
    frame.filter(pl.col("number").is_in([1, 7])).collect()
    frame.filter(pl.col("carrier").str.starts_with("U")).collect()

    assert reads[0]["where"].startswith("is_in(number")
    assert reads[1]["where"].startswith('((carrier >= "U") and starts_with(carrier')


def test_a_filter_in_sql_reaches_the_log(log, reads):
    """Text is compared with a time as a time."""
    log.sql("select avg(delay) from t where time >= '2013-01-01T01:00:00' and carrier = 'UA'")

    (read,) = reads
    assert set(read["columns"]) == {"delay", "time", "carrier"}
    assert "time >= 2013-01-01 01:00:00" in read["where"]
    assert 'carrier == "UA"' in read["where"]


def test_only_the_columns_of_a_query_are_read(log, reads):
    """Those of the result, and those of the filter."""
    log.topic("t").scan().filter(pl.col("number") > 5).select("carrier").collect()

    (read,) = reads
    assert set(read["columns"]) == {"number", "carrier"}


@pytest.mark.parametrize("engine", ["in-memory", "streaming"])
def test_a_limit_ends_reading_early(log, reads, engine):
    """`head` takes one batch, and not the others."""
    frame = log.topic("t").scan().head(3).collect(engine=engine)

    assert frame.height == 3
    assert reads[0]["batches"] == 1


def test_frames_have_at_most_the_rows_that_polars_wants(log, rows):
    """The first ones are small, so that a search ends early."""
    source = ScanSource(log.topic("t"))

    heights = [frame.height for frame in source.batches(["carrier"], None, None, 60)]
    assert max(heights) <= 60
    assert sum(heights) == rows.height
    assert sum(frame.height for frame in source.batches(None, None, 10, 3)) == 10
    assert [frame.shape for frame in source.batches([], None, 5, 3)] == [(3, 0), (2, 0)]


def test_a_scan_counts_rows_without_all_columns(log, rows, reads):
    """`select(pl.len())` reads one column."""
    assert log.topic("t").scan().select(pl.len()).collect().item() == rows.height
    assert len(reads[0]["columns"]) == 1


def test_a_scan_of_a_view_has_its_rows(log, rows):
    """Slices, partitions and times, as with every other method."""
    topic = log.topic("t")

    assert_frame_equal(topic[5:9].scan().collect(), topic[5:9].to_polars())
    assert topic.partition(1).scan().select(pl.col("partition").unique()).collect().item() == 1
    assert topic.since("1h").scan().select(pl.len()).collect().item() == rows.height


@pytest.fixture
def small(tmp_path):
    """A log with a topic of one column and one row."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", schema=pa.schema([("number", pa.int32()), ("old", pa.string())]))
        log.producer().send("t", {"number": 1, "old": "x"}).result()
        yield log
        assert log.housekeeping.verify() == []


def test_a_scan_has_the_records_of_the_moment_at_which_it_is_collected(small):
    """The frame is a query, and not its result."""
    frame = small.topic("t").scan().select(pl.col("number").sum())
    assert frame.collect().item() == 1

    small.producer().send("t", {"number": 2}).result()
    assert frame.collect().item() == 3


def test_a_scan_keeps_its_columns_when_the_schema_changes(small):
    """Renamed, dropped and widened: the records of each version are seen through the scan's."""
    frame = small.topic("t").scan()
    renamed = pa.schema([("count", pa.int64()), ("new", pa.string())])
    small.alter_topic("t", schema=renamed, rename={"number": "count"})
    small.producer().send("t", {"count": 2, "new": "y"}).result()

    result = frame.select("number", "old").collect()
    assert result.rows() == [(1, "x"), (2, None)]
    assert small.topic("t").scan().select("count", "new").collect().rows() == [(1, None), (2, "y")]


def test_a_value_that_does_not_fit_the_columns_of_an_older_scan_is_refused(small):
    """Never cut, and the error says what to do."""
    frame = small.topic("t").scan()
    small.alter_topic("t", schema=pa.schema([("number", pa.int64()), ("old", pa.string())]))
    small.producer().send("t", {"number": 1 << 40}).result()

    with pytest.raises(
        InvalidSchemaError, match=r"schema of the topic has changed.*scan\(\) again"
    ):
        frame.collect()
    assert small.topic("t").scan().collect()["number"].to_list() == [1, 1 << 40]


def test_a_scan_of_a_topic_that_was_created_again_is_refused(small):
    """Its columns have the same ids, and may mean something else."""
    frame = small.topic("t").scan()
    small.delete_topic("t")
    small.create_topic("t", schema=pa.schema([("other", pa.int32())]))

    with pytest.raises(InvalidSchemaError, match=r"created again.*Call scan\(\) again"):
        frame.collect()


def test_a_topic_of_bytes_has_its_keys_and_values(tmp_path):
    """As bytes, or as the topic's serializers read them; JSON is text."""
    with embedlog.open(tmp_path / "log") as log, log.producer() as producer:
        log.create_topic("bytes")
        log.create_topic("json", key="int", value="json")
        producer.send("bytes", b"v", key=b"k", headers=[("h", b"x")])
        for number in range(3):
            producer.send("json", {"n": number} if number else None, key=number)
        producer.flush()

        plain = log.topic("bytes").scan()
        assert plain.filter(pl.col("key") == b"k").select("value").collect().item() == b"v"
        assert plain.collect()["headers"].to_list() == [[{"key": "h", "value": b"x"}]]
        decoded = log.topic("json").scan()
        assert decoded.collect()["key"].to_list() == [0, 1, 2]
        texts = decoded.filter(pl.col("value").is_not_null(), pl.col("key") > 1).select("value")
        assert texts.collect().item() == '{"n":2}'
        assert decoded.filter(pl.col("value").is_null()).select("offset").collect().item() == 0
        assert log.topic("json", raw=True).scan().collect_schema()["key"] == pl.Binary


def test_damage_in_a_column_stops_a_scan_of_it_alone(tmp_path):
    """The error is embedlog's own, and other columns are read."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", schema=pa.schema([("a", pa.string()), ("b", pa.string())]))
        log.producer().send("t", {"a": "fine", "b": "damaged"}).result()
    (segment,) = (tmp_path / "log").rglob("*.arrows")
    data = segment.read_bytes()
    segment.write_bytes(data.replace(b"damaged", b"DAMAGED"))

    with embedlog.open(tmp_path / "log", mode="r") as log:
        frame = log.topic("t").scan()
        assert frame.select("a").collect().item() == "fine"
        with pytest.raises(CorruptBatchError):
            frame.select("b").collect()
        with pytest.raises(CorruptBatchError):
            log.sql("select b from t")


WITHOUT_POLARS = """
import sys
sys.modules["polars"] = None
import embedlog, embedlog.errors
with embedlog.open(sys.argv[1]) as log:
    log.create_topic("t")
    for call in (log.topic("t").scan, log.topic("t").to_polars, lambda: log.sql("select 1")):
        try:
            call()
        except embedlog.errors.EmbedlogError as error:
            assert str(error) == 'polars is not installed. Run pip install "embedlog[polars]".'
        else:
            raise AssertionError
"""


@pytest.mark.tier("all")
def test_without_polars_the_error_says_what_to_install(tmp_path):
    """And nothing else of embedlog needs it."""
    run_python("-c", WITHOUT_POLARS, tmp_path / "log")


# Datasets


def test_a_dataset_has_the_rows_that_were_asked_for(log):
    """As a dataset of pyarrow in memory with the same rows."""
    topic = log.topic("t")
    ours, theirs = topic.dataset(), ds.dataset(topic.to_arrow())
    where = (pc.field("number") > 0) & pc.field("late")

    assert ours.schema == theirs.schema == topic.schema()
    assert_frame_equal(pl.DataFrame(ours), pl.from_arrow(theirs.to_table()))
    for columns in (
        ["carrier", "day"],
        [],
        {"none": pc.field("large").is_null(), "d": pc.field("day")},
    ):
        for condition in (None, where):
            expected = theirs.to_table(columns=columns, filter=condition)
            assert ours.to_table(columns=columns, filter=condition) == expected
    assert ours.count_rows(filter=where) == theirs.count_rows(filter=where) > 0
    late = ours.filter(pc.field("late"))
    assert late.count_rows(filter=pc.field("number") > 0) == theirs.count_rows(filter=where)
    assert ours.head(3, ["number"]) == theirs.head(3, ["number"])
    assert ours.take([1, 5], ["offset"]) == theirs.take([1, 5], ["offset"])
    times, expected = (each.sort_by("time").to_table()["time"] for each in (ours, theirs))
    assert times == expected
    assert pickle.loads(pickle.dumps(ours.filter(where))).count_rows() == ours.count_rows(
        filter=where
    )
    polars_rows = pl.scan_pyarrow_dataset(ours).filter(pl.col("number") > 0).collect()
    assert polars_rows.height == theirs.count_rows(filter=pc.field("number") > 0)


QUERIES = (
    *("carrier = 'UA'", "carrier like 'A%'", "carrier in ('', 'B6')", "carrier is null"),
    *("number > 0", "number between 0 and 7", "not number > 0", "number % 2 = 0 and number < 7"),
    *("large >= 9223372036854775808", "delay > 0", "delay <= 0", "delay = 'nan'", "delay != 1.5"),
    *("short < 0.5", "late", "not late", "day = '2013-01-01'", "time > '2013-01-01 01:00:00+00'"),
    *("local < '2013-01-01 01:00:00'", "fare >= 0", "raw = 'ab'::blob", "clock > '11:00'"),
    *("gate = 'A1'", '"offset" < 20 and partition = 1', "tags is null", "number = 1 or late"),
)


@pytest.mark.parametrize("where", sample(QUERIES, 8))
def test_duckdb_pushes_columns_and_filters_into_a_dataset(log, where):
    """With the rows that it finds in a table, whatever a filter makes of null and NaN."""
    duckdb = pytest.importorskip("duckdb")
    topic, rows = log.topic("t").dataset(), log.topic("t").to_arrow()
    query = f'select "offset", partition, carrier from {{}} where {where} order by all'

    expected = duckdb.sql(query.format("rows")).fetchall()
    assert duckdb.sql(query.format("topic")).fetchall() == expected
    assert topic is not rows


def test_a_dataset_skips_segments_without_matching_rows(log, monkeypatch):
    """By their statistics, as a lazy frame does."""
    reads = []
    read = TypedTopicView._pushed
    monkeypatch.setattr(
        TypedTopicView, "_pushed", lambda self, *args: reads.append(args) or read(self, *args)
    )
    assert log.topic("t").dataset().count_rows(filter=pc.field("number") > 1 << 40) == 0
    ((columns, pushed),) = reads
    assert columns == ["number"]
    assert 0 < len(log.topic("t")._with_matches(pushed.batches)) < len(log.topic("t"))


def test_a_dataset_has_the_records_of_each_scan(small):
    """Of a topic the newer ones too, of a view its own."""
    duckdb = pytest.importorskip("duckdb")
    small.create_topic("numbers", schema=pa.schema([("n", pa.int64())]))
    with small.producer() as producer:
        producer.send_batch("numbers", [{"n": number} for number in range(4)]).result()
        topic = small.topic("numbers")
        numbers, last = topic.dataset(), topic[-2:].dataset()  # noqa: F841 - DuckDB finds them
        assert topic.since("1h").dataset().count_rows() == 4
        names = ds.dataset(pa.table({"n": [3], "name": ["three"]}))
        assert last.join(names, "n", join_type="inner").count_rows() == 1
        producer.send("numbers", {"n": 4}).result()

    assert duckdb.sql("select sum(n) from numbers").fetchall() == [(10,)]
    assert duckdb.sql("select n from last").fetchall() == [(2,), (3,)]


def test_a_dataset_of_serialized_values_has_them_as_text(tmp_path):
    """A filter on them is applied to what was decoded."""
    duckdb = pytest.importorskip("duckdb")
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", value="json")
        with log.producer() as producer:
            producer.send_batch("t", [{"a": number} for number in range(3)]).result()
        topic = log.topic("t").dataset()  # noqa: F841 - DuckDB finds it

        query = 'select value, "offset" from topic where value like \'%1%\' and "offset" < 2'
        assert duckdb.sql(query).fetchall() == [('{"a":1}', 1)]


def test_what_a_dataset_cannot_do_is_an_error(log, tmp_path):
    """Also where the base class of pyarrow would end the process."""
    topic = log.topic("t").dataset()
    with pytest.raises(KeyError, match="carier"):
        topic.to_table(columns=["carier"])
    with pytest.raises(pa.ArrowInvalid, match="carier"):
        topic.to_table(filter=pc.field("carier") == "UA")
    for call in (topic.get_fragments, lambda: topic.replace_schema(topic.schema)):
        with pytest.raises(UnsupportedFormatError, match=r"The dataset of a topic has no .* \[t\]"):
            call()
    assert topic.partition_expression.equals(pc.scalar(True))
    assert repr(topic).startswith("<TopicDataset of <")
    with embedlog.open(tmp_path / "log") as other:
        other.create_topic("t")
        closed = other.topic("t").dataset()
    with pytest.raises(ClosedError):
        closed.to_table()


CONDITIONS = {
    "numbers": (pc.field("number") > 1, pl.col("number") > 1, "number > 1"),
    "text": (pc.field("carrier") == "UA", pl.col("carrier") == "UA", "carrier = 'UA'"),
    "default": (pc.field("gate") == "A1", pl.col("gate") == "A1", "gate = 'A1'"),
    "record": (pc.field("offset") < 3, pl.col("offset") < 3, '"offset" < 3'),
    "deleted": (pc.field("_tombstone"), pl.col("_tombstone"), "_tombstone"),
    "bytes": (pc.field("raw").isin([b"\xff"]), pl.col("raw") == b"\xff", "raw = x'ff'"),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_is_of_pyarrow_polars_or_sql(log, name):
    """At each door with the same rows."""
    topic, columns = log.topic("t"), ["offset", "partition", "number"]
    rows = topic.to_arrow([*columns, "carrier", "gate", "raw", "_tombstone"])
    kept = rows.filter(CONDITIONS[name][0])
    if name != "deleted":
        kept = kept.filter(~pc.field("_tombstone"))
    expected = sorted(map(repr, kept.select(columns).to_pylist()))

    def consumed(where):
        with log.consumer("t", auto_offset_reset="earliest") as consumer:
            yield from consumer.iter_batches(columns, "end", where)

    assert expected
    for where in CONDITIONS[name]:
        for door in (
            topic.to_arrow(columns, where=where).to_batches(),
            topic.batches(columns, where=where),
            consumed(where),
        ):
            found = [row for batch in door for row in batch.to_pylist()]
            assert sorted(map(repr, found)) == expected


@given(filters)
def test_a_condition_of_polars_selects_what_polars_selects(log, rows, condition):
    """Whatever of it the log can use to skip records."""
    try:
        expected = rows.filter(condition)
    except pl.exceptions.PolarsError:
        assume(False)

    try:
        found = log.topic("t").to_polars(where=condition)
    except InvalidQueryError as error:
        if "not about single rows" not in str(error):
            raise
        assume(False)
    assert_frame_equal(found, expected)


def test_names_of_columns_are_no_patterns(tmp_path):
    """Polars takes such names for several columns, if it may."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        for number, name in enumerate(["*", "^.*$", "^b.$"]):
            table = pa.table({"a": [1, 2], name: [2, 3], "b1": [3, 4]})
            topic = log.create_topic(f"t{number}", schema=table.schema)
            log.producer().append_table(topic.name, table).result()

            assert topic.scan().collect().select(pl.nth(3, 4, 5)).to_dict(as_series=False) == (
                table.to_pydict()
            )
            kept = topic.scan().filter(pl.nth(4) == 3).select(pl.nth(4, 5)).collect()
            assert kept.to_dicts() == [{name: 3, "b1": 4}]


def test_decimals_that_polars_does_not_have_are_refused(tmp_path):
    """Polars has the type of 256 bits in an empty frame, and panics at the first value."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        wide = pa.list_(pa.decimal256(30, 2))
        topic = log.create_topic("t", schema=pa.schema([("x", wide), ("y", pa.int64())]))
        log.producer().send("t", {"x": [Decimal("1.25")], "y": 1}).result()

        for read in (topic.to_polars, topic.scan, lambda: log.sql("select y from t")):
            with pytest.raises(InvalidSchemaError, match="column x"):
                read()
        assert topic.to_polars(["y"], where="y = 1").to_dicts() == [{"y": 1}]
        with pytest.raises(InvalidSchemaError, match="column x"):
            topic.to_arrow(where=pl.col("x").is_null())


def test_a_table_of_small_chunks_becomes_large_batches(tmp_path):
    """As the rows of a file of Parquet, or of many files, come."""
    with embedlog.open(tmp_path / "log") as log, log.producer() as producer:
        log.create_topic("t", schema=pa.schema([("n", pa.int64())]))
        chunks = pa.chunked_array([[number, number + 1] for number in range(0, 2000, 2)])
        producer.append_table("t", pa.table({"n": chunks})).result()

        (batch,) = log.topic("t").batches()
        assert batch.column("n").to_pylist() == list(range(2000))
