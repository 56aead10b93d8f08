"""What a mirror has done, and how far it is behind: one row of `live`, which any process can read.

The mirror writes it about once a second, and at its end.  A reboot deletes it; `lag` and the
rest are there again once the mirror runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from embedlog import keyspace
from embedlog.display import moment
from embedlog.metrics import MIRROR, MIRROR_TOPIC, Sample
from embedlog.mirrors.root_target import is_held
from embedlog.root.root import Root

MOST_ERRORS = 10
"""How many of the last errors are kept."""
HEADS = ("mirror", "state", "pid", "records", "rate/s", "lag", "skipped", "errors", "reported")
"""The heads of a table of mirrors."""


@dataclass
class TopicStatus:
    """A topic of a mirror."""

    target: str
    """The name of the copy."""
    records: int = 0
    """How many this run has copied."""
    lags: list[int] = field(default_factory=list)
    """How many offsets of each partition are not copied yet, as the source was last seen."""
    skipped: int = 0
    """How many offsets retention at the source deleted before they were copied."""
    error: str | None = None
    """Why it is not copied at present."""

    @property
    def lag(self) -> int:
        """How many offsets are not copied yet."""
        return sum(self.lags)


@dataclass
class MirrorStatus:
    """A mirror, as of its last report."""

    mirror: str
    """Its name."""
    source: str
    target: str
    topics: str
    """The regular expression."""
    site: str | None = None
    groups: str | None = None
    merge: bool = False
    follow: bool = False
    pid: int = 0
    state: str = "running"
    """``running``, ``finished``, ``stopped`` or ``failed``; ``died`` if its process was killed."""
    started_ms: int = 0
    updated_ms: int = 0
    """When it last reported."""
    copied_ms: int = 0
    """When it last copied a record; 0 if it has not."""
    records: int = 0
    bytes: int = 0
    batches: int = 0
    dropped: int = 0
    """Records that were at the target before, and that a merging mirror left out."""
    skipped: int = 0
    """Offsets that retention at the source deleted before they were copied."""
    commits: int = 0
    """Offsets of groups that were committed at the target."""
    error_count: int = 0
    errors: list[str] = field(default_factory=list)
    """The last ones."""
    records_per_second: float = 0.0
    """In the last interval between two reports."""
    bytes_per_second: float = 0.0
    by_topic: dict[str, TopicStatus] = field(default_factory=dict)
    """By the name at the source."""

    @property
    def lag(self) -> int:
        """How many offsets of the source are not copied yet, as of the last report."""
        return sum(topic.lag for topic in self.by_topic.values())

    def add_error(self, error: str) -> None:
        """Count an error, and keep it."""
        self.error_count += 1
        self.errors = [*self.errors, error][-MOST_ERRORS:]

    def cells(self) -> tuple[object, ...]:
        """Return the row of a table with `HEADS`."""
        reported = moment(self.updated_ms).replace(" ", "T") if self.updated_ms else None
        return (
            *(self.mirror, self.state, self.pid, self.records, round(self.records_per_second)),
            *(self.lag, self.skipped, self.error_count, reported),
        )

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain dicts and lists, for JSON."""
        return {**asdict(self), "lag": self.lag}


def _load(fields: dict[str, Any]) -> MirrorStatus:
    topics = {name: TopicStatus(**topic) for name, topic in fields.pop("by_topic").items()}
    return MirrorStatus(**fields, by_topic=topics)


MIRRORS = keyspace.MIRRORS.typed(_load, lambda status: (asdict(status),))


def put_status(root: Root, status: MirrorStatus) -> None:
    """Write the row of a mirror."""
    root.context.live.write(lambda txn: MIRRORS.put(txn, status.mirror, value=status))


def mirror_statuses(root: Root) -> list[MirrorStatus]:
    """Return the mirrors of a log, by name, as of their last reports.

    A mirror whose process was killed has the state ``died``.
    """
    statuses = root.context.live.read(lambda txn: [row for _, row in MIRRORS.scan_valid(txn)])
    for status in statuses:
        if status.state == "running" and not is_held(root, status.mirror):
            status.state = "died"
    return statuses


def mirror_samples(root: Root) -> Iterator[Sample]:
    """Yield the metrics of the mirrors of a log."""
    now_ms = root.clock()
    for status in mirror_statuses(root):
        labels = {"mirror": status.mirror}
        since = (now_ms - status.copied_ms) / 1000 if status.copied_ms else -1
        for name, value in (
            ("running", int(status.state == "running")),
            ("record-total", status.records),
            ("byte-total", status.bytes),
            ("record-rate", status.records_per_second),
            ("byte-rate", status.bytes_per_second),
            ("record-lag", status.lag),
            ("record-skipped-total", status.skipped),
            ("record-dropped-total", status.dropped),
            ("error-total", status.error_count),
            ("last-copy-seconds-ago", since),
        ):
            yield Sample(MIRROR, name, value, labels)
        for topic, part in status.by_topic.items():
            where = {**labels, "topic": topic}
            yield Sample(MIRROR_TOPIC, "record-total", part.records, where)
            yield Sample(MIRROR_TOPIC, "record-lag", part.lag, where)
            yield Sample(MIRROR_TOPIC, "record-skipped-total", part.skipped, where)
