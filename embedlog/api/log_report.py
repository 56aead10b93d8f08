"""`Log.report`: what a log holds and how it does, as one page of HTML.

The page needs nothing but itself: its styles and pictures are in it, it has no scripts, and its
policy lets a browser load nothing.  All text that comes from the log is escaped.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from embedlog.audit.audit_topic import RETURN
from embedlog.catalog import ACTIVITY, AUDIT
from embedlog.compaction import cleanable
from embedlog.display import html_table, moment, plural
from embedlog.errors import EmbedlogError, GroupIdNotFoundError, UnknownTopicOrPartitionError
from embedlog.listeners import GROUP
from embedlog.progress import format_bytes
from embedlog.retention.retain import inspect
from embedlog.root.repair import QUARANTINE
from embedlog.version import __version__

if TYPE_CHECKING:
    from embedlog.api.consumer_group import GroupDescription
    from embedlog.api.log import Log, PartitionSummary, TopicDescription
    from embedlog.root.verify import Finding

Points = list[tuple[int, int]]
"""Times in ms since 1970, and the lag from each until the next one."""

_MOST_SHOWN = 50
"""Partitions of a topic that are drawn, and failures of jobs that are listed."""
_MOST_PARTS = 200
"""Points of a lag over time; of a partition with more segments, several are drawn as one."""
_LAST_EVENTS, _LAST_COUNTS = 5_000, 50_000
"""How many records of ``__activity`` and rows of ``__audit`` are read."""

_HEAD = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root {color-scheme: light dark; --line: #8885; --soft: color-mix(in srgb, CanvasText 70%, Canvas)}
body {max-width: 68rem; margin: auto; padding: 1rem; overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, sans-serif}
h2 {margin: 2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line)}
h3, .embedlog b:not(:empty) {display: block; margin: 1.5rem 0 .3rem; font-size: 1.1rem}
p {margin: .3rem 0}
p, figcaption, th {color: var(--soft); font-weight: normal}
figure, table {margin: 0 0 .9rem; font-size: .85rem; font-variant-numeric: tabular-nums}
figure p {display: flex; justify-content: space-between; margin: 0}
svg {display: block; width: 100%; height: 25px;
  background: linear-gradient(var(--line) 16px, transparent 0)}
.lag {height: 5rem; background: none; border-bottom: 1px solid var(--line)}
.sealed {--hue: #3987e5} .active {--hue: #199e70} .compacted {--hue: #9085e9} .held {--hue: #d95926}
rect {fill: var(--hue); stroke: Canvas; height: 16px}
rect.compacted {y: 16px; height: 5px} rect.held {y: 20px; height: 5px}
path {fill: none; stroke: #3987e5; stroke-width: 2; vector-effect: non-scaling-stroke}
line {stroke: #d95926; vector-effect: non-scaling-stroke}
i {display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; background: var(--hue)}
table {border-collapse: collapse; overflow-wrap: normal}
td, th {padding: .15rem 1.2rem .15rem 0; border-bottom: 1px solid var(--line)}
.embedlog td:last-child {white-space: normal; overflow-wrap: anywhere; min-width: 8rem}
</style>
"""


def report_html(log: Log, findings: Sequence[Finding] | None = None) -> str:
    """Return the report of a log as a page of HTML; see `Log.report`."""
    log.root.context.state.check_linked()
    report, parts = _Report(log), list[str]()
    for section in report.bars, report.groups, report.directories, report.mirrors, report.failures:
        with report.noting(section.__name__):
            parts.extend(section())
    title = escape(f"Log {log.path}")
    return (
        f"{_HEAD}<title>{title}</title></head><body><h1>{title}</h1>"
        f"<p>mode {log.root.mode}, durability {log.durability}; made at {moment(report.now_ms)} "
        f"by embedlog {__version__}</p>{report.known_damage(findings)}"
        f"{''.join(parts)}</body></html>\n"
    )


class _Report:
    """The sections of the page of an open log, and what could not be read for them."""

    def __init__(self, log: Log) -> None:
        self.log, self.now_ms = log, log.root.clock()
        self.damage: list[tuple[object, object]] = []
        """Where something is wrong, and what."""
        self.topics: list[TopicDescription] = []
        for name in log.topics():
            with self.noting(name):
                self.topics.append(log.describe_topic(name))
        self.events: dict[str, list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)
        """By kind: the time, the key and the facts of each."""
        with self.noting(ACTIVITY):
            for record in log.topic(ACTIVITY, raw=True).tail(_LAST_EVENTS):
                key, facts = (record.key or b"").decode(), json.loads(record.value or b"{}")
                self.events[facts["kind"]].append((record.timestamp, key, facts))

    @contextmanager
    def noting(self, where: str) -> Iterator[None]:
        """Leave out what cannot be read, and note it as damage."""
        try:
            yield
        except (UnknownTopicOrPartitionError, GroupIdNotFoundError):
            pass  # There is none yet, or it was deleted meanwhile.
        except EmbedlogError as error:
            self.damage.append((where, error))

    # Topics

    def bars(self) -> Iterator[str]:
        """Yield the topics, and the segments of each partition."""
        keys = "".join(f'<i class="{k}"></i>{k}' for k in ("sealed", "active", "compacted", "held"))
        yield f"<h2>Topics</h2><p>By offset, from the log start to the end:{keys}</p>"
        for topic in self.topics:
            records = sum(part["end_offset"] - part["start_offset"] for part in topic["partitions"])
            unit = "offset" if "compact" in topic["config"]["cleanup.policy"] else "record"
            size = format_bytes(sum(part["bytes"] for part in topic["partitions"]))
            settings = (f"; {name}={value}" for name, value in topic["overrides"].items())
            facts = f"{plural(records, unit)}, {size}{''.join(settings)}"
            yield f"<h3>{escape(topic['name'])}</h3><p>{escape(facts)}</p>"
            used = [p for p in topic["partitions"] if p["end_offset"] > p["start_offset"]]
            for part in used[:_MOST_SHOWN]:
                with self.noting(f"{topic['name']}-{part['partition']}"):
                    yield self._bar(topic["name"], part)
            if more := len(topic["partitions"]) - len(used[:_MOST_SHOWN]):
                yield f"<p>{plural(more, 'partition')} without records, or not drawn</p>"

    def _bar(self, topic: str, part: PartitionSummary) -> str:
        """Draw the segments of a partition, and below them what is compacted and what is held."""
        log = self.log.root.partition(topic, part["partition"])
        view = inspect(log, self.now_ms)
        start, end = view.tail.start_offset, view.tail.log_end_offset
        if view.tail.failed:
            self.damage.append((f"{topic}-{log.partition}", "a flush failed; repair the log"))
        words = [f"partition {log.partition}", plural(len(view.segments), "segment")]
        words.append(format_bytes(part["bytes"]))
        if len(part["replicas"]) > 1:
            words += [f"leader {part['leader']}", f"in sync {', '.join(map(str, part['isr']))}"]
        every = -(-len(view.segments) // _MOST_PARTS) or 1
        ranges = []
        for first in range(0, len(view.segments), every):
            group = view.segments[first : first + every]
            kind = "active" if group[-1].active else "sealed"
            text = f"{plural(len(group), kind, kind)}, {format_bytes(sum(s.size for s in group))}"
            ranges.append((kind, group[0].base_offset, group[-1].next_offset, text))
        if log.config.compacts:
            clean = cleanable.inspect(log, self.now_ms).first_dirty
            words.append(f"compacted up to {clean:,}")
            ranges.append(("compacted", start, clean, "compacted"))
        words += [f"from {hold.offset:,} on: {hold.why}" for hold in view.constraints]
        ranges += [("held", hold.offset, end, hold.why) for hold in view.constraints]
        scale = 100 / max(end - start, 1)
        rects = [
            f'<rect class="{kind}" x="{(max(first, start) - start) * scale:.3f}%" '
            f'width="{max(stop - max(first, start), 0) * scale:.3f}%">'
            f"<title>{escape(f'offsets [{first}, {stop}): {text}')}</title></rect>"
            for kind, first, stop, text in ranges
        ]
        return _figure("; ".join(words), f"<svg>{''.join(rects)}</svg>", f"{start:,}", f"{end:,}")

    # Groups

    def groups(self) -> Iterator[str]:
        """Yield the groups: their partitions, and their lag over time."""
        groups: list[GroupDescription] = []
        for name, group in self.log.groups.items():
            with self.noting(f"group {name}"):
                groups.append(group.describe())
        lags: dict[str, Points] = {}
        with self.noting(AUDIT):
            lags = self._lags(groups)
        yield f"<h2>{plural(len(groups), 'consumer group')}</h2>"
        for each in groups:
            rebalances = [at for at, name, _ in self.events["rebalanced"] if name == each.group]
            chart = _chart(f"lag of {each.group}", lags.get(each.group, []), rebalances)
            yield each._repr_html_() + chart

    def _lags(self, groups: Sequence[GroupDescription]) -> dict[str, Points]:
        """Return the lags of groups over time, from what clients counted in audited topics.

        The reports of a group have the offset up to which it had committed; where the partition
        ended is told by all reports about it until then, also those of producers.
        """
        topics = {topic["id"]: topic["name"] for topic in self.topics}
        ends: dict[tuple[str, int], int] = defaultdict(int)
        read: dict[str, dict[tuple[str, int], int]] = defaultdict(dict)
        points: dict[str, Points] = defaultdict(list)
        rows = [(row.timestamp, row.value) for row in self.log.topic(AUDIT).tail(_LAST_COUNTS)]
        first_ms = rows[0][0] if rows else 0
        step_ms = max((self.now_ms - first_ms) // _MOST_PARTS, 1)
        for number, some in groupby(rows, lambda row: (row[0] - first_ms) // step_ms):
            for _, row in some:
                if row["topic_id"] in topics:
                    part = topics[row["topic_id"]], row["audited_partition"]
                    ends[part] = max(ends[part], row["next_offset"])
                    if row["tier"] == GROUP and row["kind"] != RETURN:
                        read[row["name"]][part] = row["next_offset"]
            for name, committed in read.items():
                lag = sum(ends[part] - offset for part, offset in committed.items())
                points[name].append((first_ms + (number + 1) * step_ms, lag))
        for each in groups:
            if each.group in read:
                known = (part.lag or 0 for part in each.partitions if part[:2] in read[each.group])
                points[each.group].append((self.now_ms, sum(known)))
        return points

    # Directories, mirrors and damage

    def directories(self) -> Iterator[str]:
        """Yield a table of the directories."""
        yield f"<h2>Directories</h2>{self.log.replicas._repr_html_()}"
        self.damage += [(each.path, each.reason) for each in self.log.replicas if not each.online]
        self.damage += [(t, f"partition {n}: no leader") for t, n in self.log.replicas.leaderless]

    def mirrors(self) -> Iterator[str]:
        """Yield a table of the mirrors, and the lag of each over time."""
        mirrors = list(self.log.mirrors)
        if mirrors:
            yield f"<h2>Mirrors</h2>{self.log.mirrors._repr_html_()}"
        for mirror in mirrors:
            self.damage += [(f"mirror {mirror.mirror}", error) for error in mirror.errors]
            events = self.events["mirrored"]
            points = [(at, facts["lag"]) for at, name, facts in events if name == mirror.mirror]
            points.append((mirror.updated_ms, mirror.lag))
            yield _chart(f"lag of mirror {mirror.mirror}", points, [])

    def failures(self) -> Iterator[str]:
        """Yield the last failures of background jobs, which may be over."""
        rows = [
            (moment(time_ms), key, facts.get("error"))
            for time_ms, key, facts in self.events["failed"][-_MOST_SHOWN:]
        ]
        if rows:
            yield f"<h2>Failures of jobs</h2>{html_table('', ('when', 'where', 'what'), rows)}"

    def known_damage(self, findings: Sequence[Finding] | None) -> str:
        """Return what is wrong: what the other sections met, and what was found before."""
        files, rows = self.log.root.context.files, self.damage
        with self.noting(QUARANTINE):
            if files.exists(QUARANTINE):
                names = files.list(QUARANTINE)
                rows += [(f"{QUARANTINE}/{name}", "a repair moved it there") for name in names]
        rows += [(each.topic or each.path, each) for each in findings or ()]
        checked = f"{'No' if findings is None else 'All'} checksums were verified"
        if not rows:
            return f"<p>No damage is known. {checked}.</p>"
        table = html_table(checked, ("where", "what"), rows)
        return f'<h2 style="color: #d03b3b">Damage</h2>{table}'


def _chart(about: str, points: Points, rebalances: Sequence[int]) -> str:
    """Draw a lag over time, with lines at rebalances; nothing without two points."""
    if len(points) < 2 or points[0][0] >= points[-1][0]:
        return ""
    (first, _), (last, lag) = points[0], points[-1]
    scale, highest = 1000 / (last - first), max(lag for _, lag in points)
    places = [((at - first) * scale, 98 - 96 * lag / (highest or 1)) for at, lag in points]
    path = "".join(f"H{x:.1f}V{y:.1f}" for x, y in places[1:])
    marks = [(each - first) * scale for each in rebalances if first <= each <= last]
    lines = "".join(f'<line x1="{x:.1f}" x2="{x:.1f}" y2="100"/>' for x in marks)
    words = f"{about}: {lag:,}, at most {highest:,}"
    if marks:
        words += f"; {plural(len(marks), 'rebalance')}"
    view = 'class="lag" viewBox="0 0 1000 100" preserveAspectRatio="none"'
    picture = f'<svg {view}>{lines}<path d="M0 {places[0][1]:.1f}{path}"/></svg>'
    return _figure(words, picture, moment(first), moment(last))


def _figure(words: str, picture: str, left: str, right: str) -> str:
    """Return a picture below a line of words, with the values at its left and right end."""
    ends = f"<p><span>{left}</span><span>{right}</span></p>"
    return f"<figure><figcaption>{escape(words)}</figcaption>{picture}{ends}</figure>"
