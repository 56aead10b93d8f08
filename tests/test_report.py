"""`embedlog report` and `Log.report`: a page about a log, whatever its names and its state."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support.replicas import Directories
from support.roots import encoded, segment_files

import embedlog
from embedlog.audit.reporter import reporter_of
from embedlog.errors import ClosedError, StorageError
from embedlog.maintenance import activity
from embedlog.record import OffsetAndMetadata, TopicPartition

HOSTILE = '<script>alert(1)</script>"&'
P0 = TopicPartition("flights", 0)


@pytest.fixture
def log(log_path, clock):
    """A log of two partitions, of which one has segments; its clock stands still."""
    with embedlog.open(log_path, maintenance=False, clock=clock) as log:
        fill(log)
        yield log


def fill(log):
    """Write a hundred records into several segments, hold some, and commit for a group."""
    log.create_topic("flights", partitions=2, config={"segment.bytes": 2_000})
    for number in range(10):
        with log.producer() as producer:
            producer.send_batch("flights", [b"%d" % number * 50] * 10, partition=0)
    with log.consumer(group_id=HOSTILE, enable_auto_commit=False) as consumer:
        consumer.commit({P0: OffsetAndMetadata(30, HOSTILE)})
    log.housekeeping.hold(HOSTILE, {P0: 40})


class Page(HTMLParser):
    """A page as a browser reads it: its elements, and the text outside of them."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def ranges(self, kind):
        """Return the ranges of offsets that a bar has of a kind, by what a browser would draw."""
        rects = [each for tag, each in self.elements if tag == "rect" and each["class"] == kind]
        return [
            (round(float(each["x"][:-1]), 1), round(float(each["width"][:-1]), 1)) for each in rects
        ]


def damage(path):
    """Change a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_text_from_the_log_is_escaped(log):
    """Ids of groups, metadata, leases and errors can be any text; the page loads nothing."""
    error = StorageError(HOSTILE)
    activity.report(log.root, activity.failures_of("flights", 0, "retention", error))
    page = Page(log.report())

    assert page.text.count(HOSTILE) >= 4
    assert {tag for tag, _ in page.elements} <= {
        *("html", "head", "meta", "style", "title", "body", "h1", "h2", "h3", "p", "div", "b"),
        *("figure", "figcaption", "svg", "rect", "path", "line", "i", "span"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    names = {name for _, attributes in page.elements for name in attributes}
    assert not names & {"src", "href"}
    assert not [name for name in names if name.startswith("on")]
    assert "No damage is known" in page.text, "a failure may be over"


def test_bars_show_segments_compaction_and_holds(log):
    """From the log start to the end: ten offsets of a hundred are a tenth of the width."""
    log.delete_records({P0: 20})
    part = log.partition("flights", 0)
    part.refresh()
    stops = [segment.next_offset for segment in part.segments.values()][:-1]
    page = Page(log.report())

    assert len(stops) > 3
    starts = [20, *(stop for stop in stops if stop > 20)]
    drawn = [*page.ranges("sealed"), *page.ranges("active")]
    assert [left for left, _ in drawn] == [(offset - 20) * 1.25 for offset in starts]
    assert sum(width for _, width in drawn) == pytest.approx(100)
    assert page.ranges("held") == [(25.0, 75.0)]
    assert page.ranges("compacted") == []

    log.alter_topic("flights", {"cleanup.policy": "compact"})
    log.housekeeping.compact("flights")
    page = Page(log.report())
    ((left, width),) = page.ranges("compacted")
    assert left == 0
    assert f"compacted up to {20 + width * 0.8:.0f}" in page.text


def test_many_segments_are_drawn_together(log):
    """Otherwise the lines between segments would leave nothing of them to see."""
    log.create_topic("small", partitions=3, config={"segment.bytes": 600})
    small = log.partition("small", 0)
    for _ in range(230):
        small.append([encoded(b"x" * 50)])
    page = Page(log.report())

    drawn = len(page.ranges("sealed")) + len(page.ranges("active"))
    assert 100 < drawn <= 200 + 20
    assert "2 partitions without records" in page.text


def test_the_lag_of_a_group_over_time_is_what_was_counted(log, clock):
    """The producer appends seven records, the group reads three: its lag was at most seven."""
    log.create_topic("t", config={"audit": True})
    options = {"enable_auto_commit": False, "auto_offset_reset": "earliest"}
    with log.producer() as producer, log.consumer("t", group_id="g", **options) as consumer:
        for appended, read in ((1, 1), (7, 0), (0, 3), (1, None)):
            clock.advance(60_000)
            for _ in range(appended):
                producer.send("t", b"x")
            producer.flush()
            if read:
                consumer.poll(timeout_ms=0, max_records=read)
                consumer.commit()
            if read is None:
                consumer.close()
            reporter_of(log.root).report_all()
            log.housekeeping.run()
        page = log.report()

    (caption,) = re.findall("<figcaption>(lag of g.*?)</figcaption>", page)
    assert caption == "lag of g: 5, at most 7; 1 rebalance"
    (path,) = re.findall('<path d="(.*?)"', page)
    heights = [float(y) for y in re.findall(r"(?:V|^M0 )([\d.]+)", path)]
    lags = [round((98 - y) * 7 / 96) for y in heights]
    assert [lag for lag, before in zip(lags, [None, *lags], strict=False) if lag != before] == [
        *(0, 7, 4, 5)
    ]


def test_a_log_in_any_state_gives_a_page(log_path, tmp_path):
    """Empty, read-only, and in several directories of which one is offline; but not closed."""
    with embedlog.open(log_path) as log:
        assert "No damage is known" in log.report()
        fill(log)
    with pytest.raises(ClosedError):
        log.report()
    with embedlog.open(log_path, mode="r") as log:
        assert "flights" in log.report()
    directories = Directories(tmp_path)
    with directories.open() as log:
        fill(log)
        directories.lose(log, 1)
        page = Page(log.report())
    assert "2 of 3 directories online" in page.text
    assert "Damage" in page.text
    assert "is not mounted any more" in page.text
    assert "in sync 2, 3" in page.text


def test_damage_leaves_out_no_more_than_it_must(log, log_path, clock):
    """The page names what it could not read, and has the rest."""
    log.create_topic("t", config={"audit": True})
    with log.producer() as producer:
        producer.send("t", b"x")
    for file in segment_files(log_path):
        if "__audit" in str(file):
            damage(file)
    with embedlog.open(log_path, mode="r", clock=clock) as reader:
        page = Page(reader.report())

    assert "Damage" in page.text
    assert "__audit" in page.text
    assert "1 consumer group" in page.text
    assert page.ranges("active")


def test_mirrors_are_shown_with_their_lag_and_errors(log, tmp_path, clock):
    """The lags are those that the mirror reported as events, and now."""
    with embedlog.open(tmp_path / "b", maintenance=False, clock=clock) as copy:
        for _ in range(2):
            embedlog.mirror(log, copy, topics="flights", progress=False)
            clock.advance(60_000)
            with log.producer() as producer:
                producer.send("flights", b"x")
        page = Page(copy.report())
        (mirror,) = copy.mirrors

    assert "Mirrors" in page.text
    assert f"lag of mirror {mirror.mirror}: 0, at most" in page.text


def test_the_command_writes_a_page_and_verifies(command_line, log, log_path, tmp_path):
    """Exits with 1 once a segment is damaged; the page names the damage, and what repair moved."""
    log.close()
    out = tmp_path / "report.html"

    assert command_line("report", "--out", out, "--verify")[0] == 0
    assert "No damage is known. All checksums were verified." in out.read_text()
    damage(segment_files(log_path)[0])
    code, page, err = command_line("report", "-o", "-", "--verify")
    assert code == 1
    assert "Damage" in page
    assert err.startswith("-: ")
    command_line("repair", "--yes")
    assert command_line("report", "-o", out)[0] == 0
    assert "quarantine/" in out.read_text()


@pytest.mark.parametrize(
    "options", [(), ("--out", "x", "--serve"), ("--serve", "70000"), ("--serve", "-1")]
)
def test_wrong_options_are_refused(command_line, log, options):
    """Either a file or a server, and a port that exists."""
    assert command_line("report", *options)[0] == 2


def test_no_log_is_served_if_there_is_none(command_line, log_path):
    """Rather than a page that says so."""
    assert command_line("report", "--serve")[0] == 3


def test_the_page_is_served_on_loopback(log, log_path):
    """As of each request, to browsers of this host only, until Ctrl-C; also amid a deletion."""
    command = [sys.executable, "-m", "embedlog", "report", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            with urlopen(url) as answer:
                assert answer.headers["Refresh"] == "5"
                assert "flights" in answer.read().decode()
            log.create_topic("later")
            with urlopen(url) as answer:
                assert "later" in answer.read().decode()
            for request in (Request(url, headers={"Host": "example.org:80"}), f"{url}favicon.ico"):
                with pytest.raises(HTTPError, match="404") as failed:
                    urlopen(request)
                failed.value.close()
            log_path.rename(log_path.with_name("away"))
            with pytest.raises(HTTPError, match="503") as failed:
                urlopen(url)
            with failed.value as answer:
                assert answer.headers["Refresh"]
                assert "no such directory" in answer.read().decode()
            log_path.with_name("away").rename(log_path)
            with urlopen(url) as answer:
                assert "flights" in answer.read().decode()
            server.send_signal(signal.SIGINT)
            assert server.wait() == 130
        finally:
            server.kill()
