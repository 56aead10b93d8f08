"""A topic is a list of records that are read only when they are needed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap

import pyarrow as pa
import pytest
from support.clock import START
from support.roots import encoded, healthy_log
from support.tiers import sample

import embedlog
from embedlog import catalog
from embedlog.errors import EmbedlogError, UnknownTopicOrPartitionError

ROWS = 100


log = healthy_log


@pytest.fixture
def topic(log):
    """Two partitions of 100 and 3 records, in batches of ten and many small segments."""
    log.create_topic("t", partitions=2, config={"segment.bytes": 3000})
    for base in range(0, ROWS, 10):
        values = [b"v%d" % row for row in range(base, base + 10)]
        keys = [b"k%d" % row for row in range(base, base + 10)]
        log.partition("t", 0).append([encoded(*values, keys=keys, at=START + base)])
    log.partition("t", 1).append([encoded(b"x", None, b"<b>", at=START)])
    return log.topic("t")


def offsets(view):
    return [(record.partition, record.offset) for record in view]


def test_a_topic_has_as_many_rows_as_records(topic, log):
    """`len` counts the records of all partitions, also new ones."""
    assert len(topic) == 103
    assert len(topic.partition(1)) == 3

    log.partition("t", 1).append([encoded(b"new")])

    assert len(topic) == 104


def test_a_slice_is_a_slice_of_a_list(topic):
    """Every slice, also with negative bounds, has the same rows as that slice of all rows."""
    records = list(topic)
    bounds = [None, 0, 1, 9, 10, 55, 99, 100, 102, 103, 200, -1, -3, -4, -103, -200]

    for start in bounds:
        for stop in bounds:
            assert list(topic[start:stop]) == records[start:stop], (start, stop)
            assert len(topic[start:stop]) == len(records[start:stop])


def test_a_slice_of_a_slice_counts_from_it(topic):
    """A slice of a view needs no read."""
    assert offsets(topic[10:90][5:-70]) == [(0, 15), (0, 16), (0, 17), (0, 18), (0, 19)]
    assert offsets(topic[95:][3:]) == [(0, 98), (0, 99), (1, 0), (1, 1), (1, 2)]


def test_one_row_is_a_record(topic):
    """As with a list, from both ends; an index past the rows is an IndexError."""
    assert topic[42].value == b"v42"
    assert (topic[-1].value, topic[-1].partition, topic[-1].offset) == (b"<b>", 1, 2)
    assert topic[101].value is None
    assert topic[42].timestamp == START + 40
    for row in (103, -104):
        with pytest.raises(IndexError):
            topic[row]
    with pytest.raises(IndexError):
        topic[5:5][0]
    with pytest.raises(ValueError, match="step"):
        topic[::2]


def test_a_view_does_not_change(topic, log):
    """A view names offsets, so that new records do not move it; a topic grows."""
    last = topic[-2:]

    log.partition("t", 1).append([encoded(b"new")])

    assert offsets(last) == [(1, 1), (1, 2)]
    assert offsets(topic[-2:]) == [(1, 2), (1, 3)]


def test_head_and_tail_are_of_each_partition(topic):
    """Each partition has a head and a tail; if it has fewer records they are all of them."""
    assert offsets(topic.head(2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert offsets(topic.tail(2)) == [(0, 98), (0, 99), (1, 1), (1, 2)]
    assert len(topic.head(50)) == 53
    assert len(topic.tail(0)) == 0
    assert len(topic.head()) == 5 + 3


def test_looking_at_a_topic_makes_no_file_in_partitions_that_were_never_written_to(log, tmp_path):
    """Of a topic of 20,000 partitions that would take long."""
    log.create_topic("t", partitions=20)
    topic = log.topic("t")
    log.partition("t", 7).append([encoded(b"x", at=START)])

    assert len(topic) == len(topic[:5]) == 1
    assert "1 record" in repr(topic)
    assert [row.partition for row in topic] == [7]
    assert len(topic.files()) == 1
    (directory,) = (tmp_path / "log" / "topics").iterdir()
    assert [path.name for path in directory.iterdir()] == ["7"]


@pytest.mark.parametrize("lost", [(), ("live",), ("live", "7")], ids=" and ".join)
@pytest.mark.parametrize("options", [{}, {"visibility": "durable"}, {"mode": "r"}], ids=str)
def test_the_ends_of_all_partitions_are_those_of_each(tmp_path, lost, options):
    """Read together or one by one, whatever state they are in."""
    path = tmp_path / "log"
    with embedlog.open(path, maintenance=False) as log:
        log.create_topic("t", partitions=20, config={"segment.bytes": 1000})
        for number in (3, 7, 9, 11):
            for _ in range(20):
                log.partition("t", number).append([encoded(b"x", at=START)])
        log.partition("t", 3).flush()
        log.delete_records(
            {embedlog.TopicPartition("t", 7): 5, embedlog.TopicPartition("t", 9): -1}
        )
        log.partition("t", 12).tail()
    for name in lost:
        (found,) = path.glob(f"topics/*/{name}") if name.isdigit() else (path / name,)
        shutil.rmtree(found)

    def ends(read):
        try:
            with embedlog.open(path, maintenance=False, **options) as log:
                return read(log)
        except EmbedlogError as error:
            return type(error)

    def one_by_one(log):
        parts = [log.partition("t", number) for number in range(20)]
        return [(part.start_offset(), part.end_offset()) for part in parts]

    together = ends(lambda log: log.root.ends("t"))
    assert together == ends(one_by_one)
    assert lost == ("live", "7") or together[3] == (0, 20)


def test_an_empty_topic_is_an_empty_list(log):
    """Reading it is no error."""
    empty = log.create_topic("empty", partitions=3)

    assert len(empty) == 0
    assert list(empty) == list(empty.tail(5)) == []
    assert empty.to_arrow().num_rows == 0
    assert empty.to_arrow().schema.names == ["offset", "partition", "timestamp", "key", "value"]
    assert repr(empty) == "<Topic empty: 3 partitions, 0 records>"
    assert "<table>" in empty._repr_html_()


def test_a_table_has_the_records_in_columns(topic):
    """`to_arrow` has offset and partition before the stored columns."""
    table = topic.to_arrow()

    assert table.schema.field("timestamp").type == pa.timestamp("ms", tz="UTC")
    assert table["offset"].to_pylist() == [*range(100), 0, 1, 2]
    assert table["partition"].to_pylist() == [0] * 100 + [1] * 3
    assert table["value"].to_pylist()[98:] == [b"v98", b"v99", b"x", None, b"<b>"]
    assert table["key"].to_pylist()[99:101] == [b"k99", None]
    table.validate(full=True)


def test_a_table_has_the_selected_columns(topic):
    """They are in the requested order; an unknown name is an error."""
    assert topic[7:9].to_arrow(["value", "offset"]).to_pydict() == {
        "value": [b"v7", b"v8"],
        "offset": [7, 8],
    }
    assert topic.to_arrow(["offset"]).num_rows == 103
    with pytest.raises(KeyError, match="no column 'values'"):
        topic.to_arrow(["values"])


def test_headers_are_a_column_where_there_are_any(topic, log):
    """Rows of segments without headers have null in that column."""
    assert "headers" not in topic.schema().names

    log.partition("t", 1).append([encoded(b"h", headers=[[("a", b"1"), ("b", None)]])])

    assert topic.to_arrow(["headers"])["headers"].to_pylist() == [None] * 103 + [
        [{"key": "a", "value": b"1"}, {"key": "b", "value": None}]
    ]
    assert [record.headers for record in topic[-2:]] == [[], [("a", b"1"), ("b", None)]]


def test_headers_in_the_last_segment_are_seen_without_the_others(topic, log, monkeypatch):
    """The cost of a schema does not grow with the number of segments, where that can be avoided."""
    log.partition("t", 0).append([encoded(b"h", headers=[[("a", b"1")]])])
    log.root._partitions.clear()
    monkeypatch.setattr(catalog, "segments", None)

    assert "headers" in log.topic("t").partition(0).schema().names


def test_pandas_and_polars_get_their_own_frames(topic):
    """`to_pandas` and `to_polars` have the rows of `to_arrow`."""
    table = topic.to_arrow()

    frame, polars = topic.to_pandas(), topic.to_polars()

    assert frame["value"].tolist() == table["value"].to_pylist()
    assert str(frame["timestamp"].dtype) == "datetime64[ms, UTC]"
    assert polars["value"].to_list() == table["value"].to_pylist()
    assert polars["offset"].to_list() == table["offset"].to_pylist()
    assert topic[:2].to_pandas(["offset"])["offset"].tolist() == [0, 1]


def test_a_table_outlives_the_deletion_of_its_topic(topic, log):
    """A21: columns point into mapped files, which stay while they are mapped."""
    table = topic.to_arrow()
    before = table.to_pydict()

    log.delete_topic("t")

    assert table.to_pydict() == before


def test_the_repr_of_a_topic(topic):
    """It is one line; a view shows its offsets."""
    assert repr(topic).startswith("<Topic t: 2 partitions, 103 records, 9.0 kB>")
    assert repr(topic[98:101]) == "<View of t: 3 records, 0[98:100], 1[0:1]>"
    assert repr(topic[3:3]) == "<View of t: 0 records, nothing>"
    assert topic.partitions == 2
    assert topic.config["segment.bytes"] == 3000
    assert topic.size_bytes() > 3000


def shown_offsets(view):
    """Return the column of offsets that a notebook shows."""
    rows = view._repr_html_().split("<tr>")[2:]
    return [row.split("<td>")[2].removesuffix("</td>") for row in rows]


def test_a_notebook_shows_short_views_as_a_whole_and_both_ends_of_long_ones(topic):
    """A topic shows the head of its first partition and the tail of its last one."""
    assert shown_offsets(topic[40:50]) == [str(row) for row in range(40, 50)]
    assert shown_offsets(topic[40:51]) == [
        *("40", "41", "42", "43", "44"),
        "…",
        *("46", "47", "48", "49", "50"),
    ]
    assert shown_offsets(topic) == ["0", "1", "2", "3", "4", "…", "98", "99", "0", "1", "2"]
    assert shown_offsets(topic[3:3]) == []


def test_the_index_of_a_row_must_be_an_int(topic):
    """The message names the method that looks up a key."""
    with pytest.raises(TypeError, match=r"got str; use get\(key\)"):
        topic["k1"]
    with pytest.raises(TypeError, match=r"key must be bytes, got str; call key.encode\(\)"):
        topic.get("k1")
    with pytest.raises(TypeError, match=r"key must be bytes, got int$"):
        topic.get(2)  # which `bytes` would make two zero bytes of


def test_the_headers_of_one_record_are_not_those_of_another(topic):
    """Records without headers share one list, which cannot be changed, as those of consumers."""
    with pytest.raises(TypeError, match="copy it before changing it"):
        next(iter(topic)).headers.append(("a", b"1"))
    assert all(record.headers == [] for record in topic)


def test_a_notebook_shows_records_escaped(topic):
    """Values may be any bytes, and are never markup."""
    shown = topic._repr_html_()

    assert "<td>&lt;b&gt;</td>" in shown
    assert "<b></td>" not in shown
    assert "<td>v99</td>" in shown
    assert "2023-11-14 22:13:20.000+00:00" in shown


@pytest.mark.parametrize("moment", [-1, 1 << 62, -(1 << 62)])
def test_a_notebook_shows_any_timestamp(log, moment):
    """A producer may write any 64 bits as a timestamp; showing it must not fail."""
    view = log.create_topic("odd")
    log.partition("odd", 0).append([encoded(b"x", at=moment)])

    assert "<td>x</td>" in view._repr_html_()


@pytest.mark.parametrize("call", ["to_arrow", "to_pandas", "to_polars"])
def test_a_wrong_option_of_a_frame_is_an_error_that_names_it(topic, call):
    """As for any other argument."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'wher'"):
        getattr(topic, call)(wher="offset > 5")


def test_a_deleted_topic_raises(topic, log):
    """A view cannot be read after its topic was deleted."""
    log.delete_topic("t")

    with pytest.raises(UnknownTopicOrPartitionError):
        len(topic)
    with pytest.raises(UnknownTopicOrPartitionError, match="no such topic"):
        log.topic("t")


def test_an_index_above_all_names_the_partitions(topic):
    """The error of `partition(9)` states the valid numbers."""
    with pytest.raises(UnknownTopicOrPartitionError, match="0 to 1"):
        topic.partition(9)


MEMORY = """
    import sys, resource, embedlog
    from embedlog import batch
    log = embedlog.open(sys.argv[1])
    log.create_topic("big", config={"segment.bytes": 16 << 20})
    part = log.partition("big", 0)
    encoded = batch.encode_lists([bytes(1000)] * 1000, None, 5, None, sys.argv[2])
    for _ in range(200):
        part.append([encoded])
    topic = log.topic("big")

    def anonymous_kib():
        fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
        return int(fields["RssAnon"].split()[0])

    next(topic.batches())
    peak = before = anonymous_kib()
    rows = 0
    for record_batch in topic.batches():
        rows += record_batch.num_rows
        peak = max(peak, anonymous_kib())
    log.close()
    assert rows == 200_000, rows
    print(peak - before)
"""


@pytest.mark.tier("test")
@pytest.mark.parametrize("compression", sample(["lz4", "none"], 1))
def test_scanning_a_big_topic_takes_the_memory_of_a_few_batches(tmp_path, compression):
    """`batches()` reads 200 MB in less than 25 MB: memory is O(batch)."""
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path / "log"), compression]

    added_kib = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert int(added_kib) < 25_000
