"""Statistics of typed topics, and what reads skip by them."""

from __future__ import annotations

import math
import operator as op
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embedlog
from embedlog import keyspace
from embedlog.errors import CorruptBatchError
from embedlog.partition import segment_statistics
from embedlog.schemas import statistics
from embedlog.schemas.pruning import Pruner

START = datetime(2013, 1, 1, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        ("i", pa.int32()),
        ("u", pa.uint64()),
        ("f", pa.float64()),
        ("b", pa.bool_()),
        ("s", pa.string()),
        ("raw", pa.binary()),
        ("d", pa.decimal128(9, 2)),
        ("day", pa.date32()),
        ("t", pa.timestamp("us", tz="UTC")),
    ]
)
WORDS = ["", "a", "ab", "b" * 40, "b" * 32, "c\x7f" * 20, "é" * 20, "é" * 17, "\U0001f600" * 9]
ROWS = st.fixed_dictionaries(
    {
        "i": st.none() | st.integers(-3, 3),
        "u": st.none() | st.sampled_from([0, 1, 1 << 63, (1 << 64) - 1]),
        "f": st.none() | st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 2.5, math.inf, math.nan]),
        "b": st.none() | st.booleans(),
        "s": st.none() | st.sampled_from(WORDS),
        "raw": st.none() | st.sampled_from([b"", b"\xff" * 40, b"a" * 33, b"\x00"]),
        "d": st.none() | st.sampled_from([Decimal("-1.25"), Decimal("0.00"), Decimal("9.99")]),
        "day": st.none() | st.sampled_from([date(1969, 12, 31), date(2013, 1, 1)]),
        "t": st.none() | st.builds(lambda days: START + timedelta(days=days), st.integers(0, 3)),
    }
)
VALUES = {
    "i": st.integers(-4, 4),
    "u": st.sampled_from([0, 1, 1 << 62]),
    "f": st.sampled_from([-2.0, -1.5, -0.0, 0.0, 2.5, 3.0, math.nan]),
    "s": st.sampled_from([*WORDS, "b" * 33, "d"]),
    "raw": st.sampled_from([b"", b"a", b"\xff" * 41]),
    "d": st.sampled_from([Decimal("-1.25"), Decimal("1.00")]),
    "day": st.sampled_from([date(1970, 1, 1), date(2013, 1, 1)]),
    "t": st.builds(lambda days: START + timedelta(days=days), st.integers(-1, 4)),
}


@st.composite
def comparisons(draw):
    """One column compared with a value of its type."""
    name = draw(st.sampled_from(sorted(VALUES)))
    column = pc.field(name)
    kind = SCHEMA.field(name).type
    value = pa.scalar(draw(VALUES[name]), kind)
    return draw(
        st.sampled_from(
            [
                column == value,
                column != value,
                column < value,
                column <= value,
                column > value,
                column >= value,
                column.is_null(),
                column.is_valid(),
                column.isin(pa.array([value.as_py()], kind)),
                column.isin(pa.array([value.as_py(), None], kind)),
                pc.coalesce(column, value) == value,
            ]
        )
    )


NOON = pa.array([datetime(2013, 1, 1, 12)], pa.timestamp("s"))  # noqa: DTZ001
UNORDERED = [
    pc.field("i").cast(pa.uint8(), safe=False) > 250,
    pc.field("u").cast(pa.int64(), safe=False) < 0,
    pc.field("f").cast(pa.float32()) == pa.scalar(2.5, pa.float32()),
    pc.field("t").cast(pa.time64("us")) == pa.scalar(0, pa.time64("us")),
    pc.field("f") > 2,
    pc.field("i") < 2.5,
    pc.field("day").isin(NOON),
    pc.field("day") == NOON[0],
    pc.field("t").isin(pa.array([date(2013, 1, 1)])),
]
UNORDERED += [
    operator(pc.field("f"), pc.scalar(math.nan))
    for operator in (op.eq, op.ne, op.lt, op.le, op.gt, op.ge)
]
"""Comparisons with NaN, and those of which one side is converted, perhaps to another order."""
EXPRESSIONS = st.recursive(
    comparisons() | st.just(pc.field("b")) | st.sampled_from(UNORDERED),
    lambda inner: (
        st.builds(lambda a, b: a & b, inner, inner)
        | st.builds(lambda a, b: a | b, inner, inner)
        | st.builds(lambda a: ~a, inner)
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    with embedlog.open(tmp_path_factory.mktemp("skipping"), maintenance=False) as log:
        yield log


def typed_topic(log, batches, **settings):
    """Return a topic with these batches of rows, two in each segment."""
    name = f"t{len(log.topics())}"
    topic = log.create_topic(name, schema=SCHEMA, config=settings)
    producer, partition = log.producer(), log.root.partition(name, 0)
    for number, rows in enumerate(batches):
        producer.append_table(name, pa.Table.from_pylist(rows, schema=SCHEMA)).result()
        if number % 2:
            partition.roll()
    return topic


def equal(left, right):
    """Whether two tables are equal, with NaN equal to itself."""
    return left.num_rows == right.num_rows and str(left.to_pylist()) == str(right.to_pylist())


BATCHES = st.lists(st.lists(ROWS, min_size=1, max_size=4), min_size=1, max_size=5)


@given(batches=BATCHES, where=EXPRESSIONS, columns=st.sampled_from(["", "s,raw", "none"]))
def test_where_selects_what_a_filter_of_all_rows_selects(log, batches, where, columns):
    """With and without statistics."""
    topic = typed_topic(log, batches, statistics_columns=columns)

    selected = topic.to_arrow(where=where)

    assert equal(selected, topic.to_arrow().filter(where))
    log.delete_topic(topic.name)


@given(batches=BATCHES, where=EXPRESSIONS)
def test_no_batch_or_segment_with_a_matching_row_is_skipped(batches, where):
    """Also for many batches, which are looked at in groups first."""
    from embedlog.schemas.topic_schema import first_version

    schema = first_version(SCHEMA, None, None)
    tables = [pa.Table.from_pylist(rows, schema=SCHEMA).combine_chunks() for rows in batches] * 9
    rows = [row_statistics(table.to_batches()[0], schema) for table in tables]

    kept = Pruner(where, schema).keep(rows, schema.columns)

    for table, keep in zip(tables, kept, strict=True):
        assert keep or not table.filter(where).num_rows


def test_no_row_is_skipped_for_nan_or_a_conversion():
    """Arrow simplifies such comparisons as if they kept the order of values."""
    from embedlog.schemas.topic_schema import first_version

    schema = first_version(SCHEMA, None, None)
    rows = [{"i": -1}, {"i": 2}, {"u": (1 << 64) - 1}, {"u": 0}, {"f": 0.1}, {"f": -0.0}]
    rows += [{"f": 2.5}, {"day": date(2013, 1, 1)}, {"day": date(1969, 12, 31)}, {"t": START}]
    tables = [pa.Table.from_pylist([row], schema=SCHEMA).combine_chunks() for row in rows]
    known = [row_statistics(table.to_batches()[0], schema) for table in tables]

    for where in [*UNORDERED, *(~where for where in UNORDERED)]:
        kept = [Pruner(where, schema).keep([one], schema.columns)[0] for one in known]
        matching = [bool(table.filter(where).num_rows) for table in tables]
        assert not [row for row, m, k in zip(rows, matching, kept, strict=True) if m > k], where


def row_statistics(columns, schema):
    packed = statistics.pack(
        pa.RecordBatch.from_arrays(columns.columns, schema=schema.columns), frozenset(["s", "raw"])
    )
    nulls = tuple(column.null_count for column in columns.columns)
    return statistics.RowStatistics(columns.num_rows, nulls, statistics.unpack(packed))


def test_segments_without_a_matching_row_are_not_opened(log, monkeypatch):
    """Their statistics are in `state`."""
    rows = [[{"i": number}, {"i": number}] for number in range(8)]
    topic = typed_topic(log, rows)
    opened = []
    partition = log.root.partition(topic.name, 0)
    open_segment = type(partition).open_segment
    monkeypatch.setattr(
        type(partition),
        "open_segment",
        lambda self, info, **options: opened.append(info) or open_segment(self, info, **options),
    )

    selected = topic.to_arrow(["i"], where=pc.field("i") == 5)

    assert selected.column("i").to_pylist() == [5, 5]
    assert {info.base_offset for info in opened} == {8}


def test_lost_or_damaged_statistics_of_a_segment_only_cost_time(log):
    topic = typed_topic(log, [[{"i": number}] for number in range(6)])
    partition = log.root.partition(topic.name, 0)
    sealed = [info for info in partition.segments.values() if info.sealed]

    def damage(txn):
        keyspace.SEGMENT_STATISTICS.delete(txn, partition.key, *sealed[0].key)
        key = keyspace.SEGMENT_STATISTICS.key(partition.key, *sealed[1].key)
        txn.put(key, txn.get(key)[:-1] + b"!")

    log.root.context.state.write(damage)

    assert topic.to_arrow(["i"], where=pc.field("i") < 4)["i"].to_pylist() == [0, 1, 2, 3]
    assert segment_statistics.statistics_of(partition, sealed[0]) is None


def test_a_segment_that_is_cut_and_sealed_again_has_statistics_of_its_new_rows(log):
    topic = typed_topic(log, [[{"i": 1}], [{"i": 2}]])
    partition = log.root.partition(topic.name, 0)
    partition.truncate_to(1)
    log.producer().send(topic.name, {"i": 9}).result()
    partition.roll()

    assert topic.to_arrow(["i"], where=pc.field("i") == 9)["i"].to_pylist() == [9]
    assert topic.to_arrow(["i"], where=pc.field("i") == 2).num_rows == 0


def test_batches_of_a_sealed_segment_are_skipped_by_their_blocks(log):
    rows = [[{"i": number}] * 3 for number in range(2)]
    topic = typed_topic(log, rows)

    view = topic._with_matches(pc.field("i") == 1)

    assert [(part.start, part.stop) for part in view.ranges()] == [(3, 6)]


def test_statistics_see_through_a_change_of_the_schema(log):
    """Renamed, widened, and added columns."""
    topic = typed_topic(log, [[{"i": 1}], [{"i": 2}]])
    columns = [("n", pa.int64()), ("f", pa.float64()), ("g", pa.int32()), ("h", pa.string())]
    log.alter_topic(topic.name, schema=pa.schema(columns), rename={"i": "n"}, defaults={"g": 7})

    assert topic.to_arrow(["n"], where=pc.field("n") == 2)["n"].to_pylist() == [2]
    assert topic.to_arrow(["n"], where=pc.field("n") == 3).num_rows == 0
    assert topic.to_arrow(["n"], where=pc.field("g") == 7).num_rows == 2
    assert topic._with_matches(pc.field("g") == 8).ranges() == topic[2:].ranges()
    assert topic._with_matches(pc.field("h") == "x").ranges() == topic[2:].ranges()


def test_batches_of_the_active_segment_are_skipped_by_their_heads(log):
    """Their bodies are not read, however large they are."""
    rows = [[{"i": number, "s": "x" * 3000}] * 5 for number in range(3)]
    topic = typed_topic(log, rows[:1])
    producer = log.producer()
    for batch in rows[1:]:
        producer.append_table(topic.name, pa.Table.from_pylist(batch, schema=SCHEMA)).result()

    view = topic._with_matches(pc.field("i") == 2)

    assert [(part.start, part.stop) for part in view.ranges()] == [(10, 15)]
    assert topic.to_arrow(["i"], where=pc.field("i") == 2)["i"].to_pylist() == [2] * 5


def test_a_damaged_head_in_the_active_segment_is_reported_by_the_read(log):
    """Not by what decides what to read."""
    topic = typed_topic(log, [[{"i": 1}]])
    partition = log.root.partition(topic.name, 0)
    log.producer().send(topic.name, {"i": 2}).result()
    last = partition.reader(1).read()[0]
    file = partition.active_file()
    path = log.root.context.files.path(file.path)
    with open(path, "r+b") as damaged:
        damaged.seek(last.position + 40)
        damaged.write(b"\xff")

    with pytest.raises(CorruptBatchError):
        topic.to_arrow(where=pc.field("i") == 5)
