"""Views by time and at random, and what notebooks show."""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, date, datetime, timedelta

import pyarrow as pa
import pytest
from support.clock import START, ManualClock
from support.roots import encoded

import embedlog
from embedlog.api.plot import records_per_window
from embedlog.partition.reader import PartitionReader
from embedlog.times import milliseconds

MINUTES = 10


@pytest.fixture
def log(tmp_path):
    """A log whose clock is ten minutes after its first record."""
    with embedlog.open(tmp_path / "log", clock=ManualClock(START + MINUTES * 60_000)) as log:
        yield log


@pytest.fixture
def topic(log):
    """One record per second, in turns to two partitions, in small segments."""
    log.create_topic("t", partitions=2, config={"segment.bytes": 20_000})
    for second in range(MINUTES * 60):
        log.partition("t", second % 2).append([encoded(b"%d" % second, at=START + second * 1000)])
    return log.topic("t")


def seconds(view):
    """Return the second of each record of a view, sorted."""
    return sorted(int(record.value) for record in view)


@pytest.mark.parametrize(
    "start",
    [
        "2m",
        "PT2M",
        timedelta(minutes=2),
        START + 480_000,
        datetime.fromtimestamp((START + 480_000) / 1000, UTC),
        # Part of a millisecond later: the record before is not after it.
        datetime.fromtimestamp((START + 479_000) / 1000, UTC) + timedelta(microseconds=1),
    ],
)
def test_since_takes_a_time_in_each_form(topic, start):
    """A duration is so long before the clock of the log."""
    assert seconds(topic.since(start)) == list(range(480, 600))
    assert len(topic.since(start)) == 120


def test_between_excludes_its_end(topic):
    """The record at the end is the first one of what comes after it."""
    assert seconds(topic.between("8m", "7m")) == list(range(120, 180))
    assert seconds(topic.between(START, START + 1000)) == [0]
    assert seconds(topic.partition(1).between("8m", "7m")) == list(range(121, 180, 2))


@pytest.mark.parametrize(("start", "end"), [(START + 1, START + 1), ("0s", "0s"), (0, START)])
def test_an_empty_time_has_no_records(topic, start, end):
    """Also if all of it is in the future or in the past."""
    assert seconds(topic.between(start, end)) == []
    assert topic.between(start, end).to_arrow().num_rows == 0


@pytest.mark.parametrize(("start", "end"), [("7m", "8m"), (START + 1, START)])
def test_the_end_of_a_time_must_not_be_before_its_start(topic, start, end):
    """With "so long ago" it is easily mistaken, and an empty view would not say so."""
    with pytest.raises(ValueError, match=r"must begin before it ends.*'2h' is before '1h'"):
        topic.between(start, end)
    with pytest.raises(ValueError, match="must begin before it ends"):
        topic.to_arrow(between=(start, end))


def test_a_view_by_time_is_a_part_of_its_view(topic):
    """Rows that the view leaves out do not come back."""
    assert seconds(topic.partition(0)[:10].since(START + 10_000)) == [10, 12, 14, 16, 18]
    assert seconds(topic.since("1m").since("2m")) == list(range(540, 600))


def test_frames_take_the_same_times(topic):
    """`since` and `between` of tables are those of views."""
    assert topic.to_arrow(["value"], since="1m").num_rows == 60
    assert len(topic.to_pandas(between=("8m", "7m"))) == 60
    assert len(topic.to_polars(since="1m")) == 60
    assert sum(batch.num_rows for batch in topic.batches(since="1m")) == 60


def test_a_name_is_not_a_list_of_columns(topic):
    """Its letters would be taken for columns."""
    with pytest.raises(TypeError, match="columns must be a list of names, got 'key'"):
        topic.to_pandas("key")


def test_a_column_is_named_once(topic):
    """Not by an error of Arrow, which names no column."""
    names = ["key", "offset", "key"]
    for read in (topic.to_arrow, topic.to_pandas, topic.to_polars, topic.batches):
        with pytest.raises(ValueError, match="A column is named twice: key, offset, key"):
            list(read(names))


def test_a_start_and_a_pair_exclude_each_other(topic):
    """And what is no time is refused with an example of one."""
    with pytest.raises(ValueError, match="since or between, not both"):
        topic.to_arrow(since="1m", between=("2m", "1m"))
    with pytest.raises(TypeError, match="pair of times"):
        topic.to_arrow(between="2m")
    with pytest.raises(ValueError, match="like 2026-01-31T12:00:00Z, or 90m"):
        topic.since("yesterday")
    with pytest.raises(TypeError, match=r"A time must be a datetime.* got 1\.5"):
        topic.since(1.5)


def test_at_is_the_first_record_of_all_partitions(topic):
    """As in Kafka's lookup by time; None after the last record."""
    assert topic.at(START + 1).value == b"1"
    assert topic.at(START - 5).value == b"0"
    assert topic.partition(0).at(START + 1).value == b"2"
    assert topic.at("0s") is None


def test_records_before_the_log_start_are_not_in_a_view_by_time(log, topic):
    """Deleted records do not come back."""
    log.delete_records({embedlog.TopicPartition("t", 0): 100})
    assert seconds(topic.between("10m", "9m")) == list(range(1, 60, 2))


def test_a_sample_has_each_record_with_the_same_chance(topic):
    """In the order of the view, without repetition; a seed repeats it."""
    sample = topic.sample(50, seed=1)
    assert len(set(seconds(sample))) == 50
    assert seconds(topic.sample(50, seed=1)) == seconds(sample)
    assert seconds(topic.sample(1000)) == list(range(600))
    assert seconds(topic[0:0].sample(3)) == []
    chosen = Counter(
        second for seed in range(60) for second in seconds(topic[:20].sample(10, seed=seed))
    )
    # Each of 20 rows is expected 30 times of 60, with a standard deviation below 4.
    assert len(chosen) == 20
    assert min(chosen.values()) > 10


def test_a_typed_topic_is_plotted_too(tmp_path):
    """Its values are not read."""
    pytest.importorskip("matplotlib").use("Agg")
    with embedlog.open(tmp_path / "typed", maintenance=False) as log:
        typed = log.create_topic("t", schema=pa.schema([("a", pa.int64())]), key="a")
        log.producer().append_table("t", pa.table({"a": [1, 2, 3]})).result()

        (line,) = typed.plot("1d").lines
        assert line.get_ydata().tolist() == [3, 3]


def test_a_plot_shows_the_rate_of_records(topic):
    """One step per window; the axes come back, to change them."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = topic.plot("1m", between=("8m", "3m"))
    (steps,) = axes.get_lines()
    # The first and the last window are cut by the time that was asked for; the last value of
    # the line is the end of the last window.
    heights = steps.get_ydata()[:-1]
    assert sum(heights) == 300
    assert set(heights[1:-1]) == {60}
    assert axes.get_ylabel() == "records per 1 min"
    assert topic.plot(ax=axes) is axes
    assert topic.since("0s").plot().get_lines()[0].get_ydata().tolist() == []


def test_a_plot_shows_its_last_window(topic):
    """The step of one record is as wide as a window, not a point."""
    pytest.importorskip("matplotlib").use("Agg")
    axes = topic[:1].plot("1m")
    (steps,) = axes.get_lines()
    begin, end = steps.get_xdata()
    assert (end - begin).item() == timedelta(minutes=1)
    assert axes.get_ylim()[1] >= 1


def test_windows_without_records_count_nothing():
    """Also before 1970; windows begin at multiples of their length."""
    times = pa.chunked_array([pa.array([-1, 0, 1, 2500], pa.timestamp("ms"))])
    assert records_per_window(times, "1s") == ([-1000, 0, 1000, 2000], [1, 2, 0, 1], 1000)
    assert records_per_window(times, None)[2] == 100
    assert records_per_window(times.slice(0, 0), "1s") == ([], [], 1000)


@pytest.mark.parametrize("window", ["0s", "1 minute", timedelta(0), timedelta(seconds=-1), 60])
def test_a_window_must_be_a_duration(topic, window):
    """The message shows what was passed."""
    with pytest.raises(ValueError, match="window must be a duration such as 1m"):
        topic.plot(window)


def test_too_many_windows_are_refused():
    """A record with a wrong year must not take all memory."""
    times = pa.chunked_array([pa.array([0, 1 << 61], pa.timestamp("ms"))])
    with pytest.raises(ValueError, match="more than 100,000 windows"):
        records_per_window(times, "1s")


def test_a_duration_too_long_is_no_time():
    """Not an OverflowError from inside."""
    with pytest.raises(ValueError, match="A time must be like"):
        milliseconds("99999999999d", 0)


def test_a_date_is_its_midnight(topic):
    """In UTC, as a datetime without a zone."""
    assert milliseconds(date(1970, 1, 2), 0) == 86_400_000
    assert seconds(topic.since(date(1970, 1, 2))) == list(range(600))


def test_a_sample_reads_a_batch_once(log, monkeypatch):
    """Its rows are many short ranges; a read of megabytes for each would fill the memory."""
    log.create_topic("big")
    with log.producer() as producer:
        producer.send_batch("big", [b"x" * 100] * 20_000)
    sizes = []
    read = PartitionReader.read

    def recorded(reader, size, **arguments):
        sizes.append(size)
        return read(reader, size, **arguments)

    monkeypatch.setattr(PartitionReader, "read", recorded)
    sample = log.topic("big").sample(500, seed=1)

    assert sample.to_arrow(["offset"])["offset"].to_pylist() == [row.offset for row in sample]
    assert len(sample) == 500
    assert len(sizes) < 2 * 100
    assert max(sizes) <= 64 << 10


@pytest.mark.parametrize("count", ["5", 0.1, -1, None])
def test_a_count_must_be_a_natural_number(topic, count):
    """The message names the argument; it is not one of the library for random numbers."""
    for rows in (topic.sample, topic.head, topic.tail):
        with pytest.raises((TypeError, ValueError), match="count must be"):
            rows(count)


# Notebooks


def test_the_title_of_a_view_of_many_ranges_is_short(log, topic):
    """Those of a sample are hundreds; a range without records says nothing."""
    assert repr(topic.sample(100, seed=1)).endswith("more>")
    assert len(repr(topic.sample(100, seed=1))) < 100
    assert repr(topic.since("0s")) == "<View of t: 0 records, nothing>"


def test_what_a_frame_has_leads_to_a_frame(topic):
    """Programs look for the methods of a frame in a view."""
    with pytest.raises(AttributeError, match="call to_pandas"):
        topic.describe()


def test_a_notebook_shows_the_partitions_of_a_consumer_in_order(log):
    """A consumer polls them in another order, which changes."""
    topic = log.create_topic("many", partitions=9)
    consumer = log.consumer("many", auto_offset_reset="earliest")
    consumer.poll(0)
    shown = re.findall(r"<td>many</td><td>(\d)</td>", consumer._repr_html_())
    assert shown == [str(number) for number in range(topic.partitions)]


def test_a_log_without_topics_says_so(log):
    """An empty table looks as if something was missing."""
    assert "no topics" in log._repr_html_()
    assert "<th>" not in log._repr_html_()


def test_a_consumer_without_partitions_says_so(log, topic):
    """An empty table looks as if something was missing."""
    with log.consumer("t", group_id="readers") as consumer:
        assert "no partitions assigned yet" in consumer._repr_html_()


def test_a_notebook_shows_a_log_with_topics_and_groups(log, topic):
    """Two tables: what is stored, and who reads it."""
    assert "Consumer groups" not in log._repr_html_()
    with log.consumer("t", group_id="readers", auto_offset_reset="earliest") as consumer:
        consumer.poll(1000, max_records=10)
        consumer.commit()
        shown = log._repr_html_()
    assert "<td>t</td><td>2</td><td>600</td>" in shown
    assert "<td>readers</td><td>Stable</td><td>1</td><td>590</td>" in shown
    log.close()
    assert "closed" in log._repr_html_()


def test_a_notebook_shows_a_consumer_with_its_partitions(log, topic):
    """Position, end and lag of each; a closed one says so."""
    consumer = log.consumer("t", auto_offset_reset="earliest")
    consumer.poll(1000, max_records=7)
    tp = embedlog.TopicPartition("t", 0)
    consumer.pause(tp)
    shown, position = consumer._repr_html_(), consumer.position(tp)
    assert f"<td>t</td><td>0</td><td>{position}</td><td>300</td><td>{300 - position}</td>" in shown
    assert "paused" in shown
    consumer.close()
    assert "closed" in consumer._repr_html_()


def test_a_view_that_cannot_be_read_is_shown(log, topic):
    """After its topic was deleted, or the log was closed, as for a debugger."""
    view = topic[:1]
    log.delete_topic("t")
    assert repr(topic) == "<Topic t: There is no such topic>"
    assert "<b>TopicView t: There is no such topic</b>" in view._repr_html_()
    log.close()
    assert repr(view) == "<TopicView t: The log was closed>"
    assert "<b>Topic t: The log was closed</b>" in topic._repr_html_()


def test_a_notebook_shows_a_producer_with_its_topics(log):
    """Records, bytes, errors and unsent records of each; a closed one says so."""
    producer = log.producer(linger_ms=60_000, client_id="<web>")
    assert "<td>" not in producer._repr_html_()
    producer.send_batch("orders", [b"v"] * 1200)
    producer.send("refunds", b"v")
    producer.send("refunds", bytes(2 << 20)).exception  # noqa: B018 - noted as looked at
    shown = producer._repr_html_()
    assert re.search(r"<td>orders</td><td>1,200</td><td>\S+ \w+</td><td>0</td><td>0</td>", shown)
    assert re.search(r"<td>refunds</td><td>0</td><td>0 \w+</td><td>1</td><td>1</td>", shown)
    assert f"<b>Producer &#x27;&lt;web&gt;&#x27; of {log.path}</b>" in shown
    producer.close()
    shown = producer._repr_html_()
    assert re.search(r"<td>refunds</td><td>1</td><td>\d+ \w+</td><td>1</td><td>0</td>", shown)
    assert f"of {log.path}, closed</b>" in shown


def test_long_values_are_cut_in_the_middle(log):
    """Both ends are what one looks for; a long value must not widen the page."""
    log.create_topic("long")
    log.partition("long", 0).append([encoded(b"begin" + b"x" * 1000 + b"end", at=START)])
    shown = log.topic("long")._repr_html_()
    assert "<td>beginxxx" in shown
    assert "xxxend</td>" in shown
    assert len(shown) < 1000


def test_member_ids_are_short_in_a_notebook(log, topic):
    """They end with a long random number."""
    with log.consumer("t", group_id="readers") as consumer:
        consumer.poll(10)
        (member,) = log.groups["readers"].members()
        shown = log.groups["readers"]._repr_html_()
    assert len(member.member_id) > 20
    assert member.member_id not in shown
    assert member.member_id[-8:] in shown


def test_one_record_is_not_one_records(log):
    """Titles count as people do."""
    topic = log.create_topic("one")
    log.partition("one", 0).append([encoded(b"x")])
    assert repr(topic).startswith("<Topic one: 1 partition, 1 record, ")
    assert repr(topic[:]) == "<View of one: 1 record, 0[0:1]>"
