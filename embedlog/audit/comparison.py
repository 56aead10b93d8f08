"""Compares what the tiers counted with the log, and names every difference.

Each report is about a range of offsets, and is compared with what the log has there: of the
batches of its producer, or of all.  What no report covers is distinguished:

- of a producer that was killed before it reported, or still runs: counted from its batches;
- of a group whose member was killed after a commit: counted from the commit;
- beyond what a group has committed: not read yet;
- where retention or compaction has deleted records since: deleted, and no loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog import keyspace
from embedlog.audit import audit_topic
from embedlog.audit.audit_topic import COUNT, END, RETURN, SKIP, START, Report
from embedlog.audit.log_counts import PartitionCounts, sums
from embedlog.batch import MINUTE_MS
from embedlog.display import html_table, moment, need, plural, text_table
from embedlog.errors import InvalidConfigError
from embedlog.group import Group
from embedlog.lazy import np, pa
from embedlog.listeners import COPY, GROUP, NO_MINUTE, PRODUCER
from embedlog.partition import PartitionLog
from embedlog.partition import tail as tails
from embedlog.record import TopicPartition
from embedlog.root.root import Root

if TYPE_CHECKING:
    import pandas
    import polars

LOG = "log"
NO_ID = "(no producer id)"
"""The name of the writers of batches that have no producer, and that nobody reported."""


class Counted(NamedTuple):
    """Who counted; host and process are None where several processes count together."""

    tier: str
    name: str = ""
    client: str = ""
    host: str | None = None
    process: int | None = None

    @property
    def title(self) -> str:
        """Who it is, in words."""
        name = self.name or self.client
        who = f"{self.tier} {name}".strip()
        return who if self.host is None else f"{who} (process {self.process} on {self.host})"


@dataclass(slots=True)
class WindowCounts:
    """What one tier has of one window."""

    records: int = 0
    """What the tier counted, and what was counted for it."""
    bytes: int = 0
    log_records: int = 0
    """What the log has of the same offsets: of a producer or a copy, what it wrote."""
    missing: int = 0
    """Of a producer or a copy, what the log has lost; of a reader, what it did not read."""
    doubled: int = 0
    """Of a producer, what the log has more than it wrote; of a reader, what it read again."""
    unreported: int = 0
    """Of ``records``, what was counted from batches or commits, since no report says it."""
    deleted: int = 0
    """Of ``records``, what retention or compaction has deleted since."""
    unread: int = 0
    """What the log has beyond what the tier has read."""
    deleted_unread: int = 0
    """Of ``missing``, what retention has deleted, so that the tier cannot read it any more."""


class AuditRow(NamedTuple):
    """One window of one tier."""

    window: int
    """Its start, in milliseconds since 1970."""
    who: Counted
    counts: WindowCounts


@dataclass(frozen=True, slots=True, repr=False)
class AuditResult:
    """The audit of a topic; see `Log.audit`."""

    topic: str
    window_ms: int
    rows: tuple[AuditRow, ...]
    """By window; in each, the log first."""
    audited: bool = True
    """Whether the topic has ``audit=true``, without which only the log is counted."""

    @property
    def hint(self) -> str | None:
        """Why there may be no producers and groups in the rows; None if they report."""
        if self.audited:
            return None
        return f"{self.topic} has no audit=true, so producers and groups do not report"

    @property
    def differences(self) -> list[str]:
        """Every difference as a sentence; none if all tiers agree with the log."""
        return [text for row in self.rows for text in _differences(row)]

    def to_arrow(self) -> pa.Table:
        """Return a `pyarrow.Table` with a row per window and tier."""
        types = {"window": pa.timestamp("ms", tz="UTC")}
        types |= dict.fromkeys(Counted._fields, pa.string())
        types |= dict.fromkeys(
            ["process", *(each.name for each in fields(WindowCounts))], pa.int64()
        )
        return pa.Table.from_pylist(self._dicts(), pa.schema(types))

    def _dicts(self) -> list[dict[str, object]]:
        return [
            {"window": row.window, **row.who._asdict(), **asdict(row.counts)} for row in self.rows
        ]

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the rows to any library that takes Arrow data."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with a row per window and tier."""
        need("pandas")
        frame: pandas.DataFrame = self.to_arrow().to_pandas()
        return frame

    def to_polars(self) -> polars.DataFrame:
        """Return a Polars DataFrame with a row per window and tier."""
        frame: polars.DataFrame = need("polars").from_arrow(self.to_arrow())
        return frame

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain dicts and lists, for JSON."""
        return {
            "topic": self.topic,
            "window_ms": self.window_ms,
            "rows": self._dicts(),
            "differences": self.differences,
            "audited": self.audited,
        }

    def table(self) -> tuple[Sequence[str], list[tuple[object, ...]]]:
        """Return the heads and the rows of a table for people."""
        return HEADS, [_cells(row) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        lines = text_table(*self.table()) if self.rows else [f"{self.topic}: no records"]
        return "\n".join([*lines, *self.differences, *([self.hint] if self.hint else [])])

    def _repr_html_(self) -> str:
        """For notebooks: the table and the differences."""
        found = "; ".join(self.differences) or "no differences"
        hint = f"; {self.hint}" if self.hint else ""
        return html_table(f"{self.topic}: {found}{hint}", *self.table())


HEADS = ("window", "tier", "name", "process", "records", "missing", "doubled", "notes")


def _cells(row: AuditRow) -> tuple[object, ...]:
    window, who, counts = row
    name = who.name or who.client
    process = None if who.host is None else f"{who.process} on {who.host}"
    notes = ", ".join(
        f"{number:,} {text}"
        for number, text in (
            (counts.unreported, "unreported"),
            (counts.deleted, "deleted since"),
            (counts.unread, "not read yet"),
        )
        if number
    )
    start = moment(window).removesuffix("+00:00").removesuffix(".000").removesuffix(":00")
    numbers = (f"{counts.records:,}", counts.missing or None, counts.doubled or None)
    return start, who.tier, name, process, *numbers, notes


def _differences(row: AuditRow) -> Iterator[str]:
    window, who, counts = row
    start = moment(window).removesuffix("+00:00").removesuffix(".000")
    missing, doubled = plural(counts.missing, "record"), plural(counts.doubled, "record")
    if counts.missing:
        if who.tier == LOG:
            yield f"{start}: the log has lost {missing} that were read before"
        elif who.tier == COPY:
            yield f"{start}: the log has lost {missing} that mirror {who.name} copied to it"
        elif who.tier == PRODUCER:
            yield f"{start}: the log has lost {missing} of {who.title}"
        else:
            yield f"{start}: {who.title} did not read {missing}{_deleted_unread(counts)}"
    if counts.doubled:
        if who.tier in (PRODUCER, COPY):
            yield f"{start}: the log has {doubled} more of {who.title} than it wrote"
        else:
            yield f"{start}: {who.title} read {doubled} more than once"


def _deleted_unread(counts: WindowCounts) -> str:
    if not counts.deleted_unread:
        return ""
    return f", of which retention has deleted {counts.deleted_unread:,}"


# Comparing


@dataclass(slots=True)
class _Selection:
    """What to compare."""

    window_ms: int
    since: int | None
    until: int | None
    """Numbers of windows: the first, and the one after the last; None for no limit."""
    rows: defaultdict[tuple[int, Counted], WindowCounts] = field(
        default_factory=lambda: defaultdict(WindowCounts)
    )

    def has(self, window: int) -> bool:
        """Return whether a window is selected."""
        after = self.since is None or window >= self.since
        return after and (self.until is None or window < self.until)

    def add(self, window: int, who: Counted, **counts: int) -> None:
        """Add to what a tier has of a window; the names are those of `WindowCounts`."""
        row = self.rows[window, who]
        for name, number in counts.items():
            setattr(row, name, getattr(row, name) + number)

    def told(self, report: Report) -> dict[int, list[int]]:
        """Return records and bytes of a report by window."""
        windows: dict[int, list[int]] = {}
        for minute, (records, size) in report.minutes.items():
            if minute == NO_MINUTE:
                continue
            window = minute * MINUTE_MS // self.window_ms
            if self.has(window):
                count = windows.setdefault(window, [0, 0])
                count[0] += records
                count[1] += size
        return windows

    def selected(self, windows: dict[int, int]) -> Iterator[tuple[int, int]]:
        """Yield the selected windows."""
        return ((window, count) for window, count in windows.items() if self.has(window))


def audit(
    root: Root,
    topic: str,
    window_ms: int,
    since_ms: int | None = None,
    until_ms: int | None = None,
    tiers: Iterable[str] | None = None,
) -> AuditResult:
    """Compare what the tiers counted of a topic, by window of record time.

    Args:
        root: The log.
        topic: The topic.
        window_ms: The width of a window; whole minutes.
        since_ms: Only windows that end after this time.
        until_ms: Only windows that begin before this time.
        tiers: Only these tiers; by default all.

    Raises:
        UnknownTopicOrPartitionError: There is no such topic.
        InvalidConfigError: The window is not a number of whole minutes, or there is no such tier.
        CorruptBatchError: A batch is damaged.
    """
    if window_ms < MINUTE_MS or window_ms % MINUTE_MS:
        raise InvalidConfigError(
            f"window must be a number of whole minutes, got {window_ms} ms",
            todo="Producers and groups count by minute.",
        )
    chosen = _checked_tiers(tiers)
    info = root.topic(topic)
    since = None if since_ms is None else since_ms // window_ms
    until = None if until_ms is None else -(-until_ms // window_ms)
    selection = _Selection(window_ms, since, until)
    reports = audit_topic.read(root, info.id)
    by_partition: dict[int, list[Report]] = defaultdict(list)
    for report in reports:
        by_partition[report.partition].append(report)
    clients = _Clients(reports)
    for number in range(info.partitions):
        log = root.partition(topic, number)
        _compare_partition(root, selection, log, by_partition[number], clients)
    order = (LOG, *audit_topic.TIERS)
    rows = [
        AuditRow(window * window_ms, who, counts)
        for (window, who), counts in selection.rows.items()
        if (chosen is None or who.tier in chosen) and counts != WindowCounts()
    ]
    rows.sort(key=lambda row: (row.window, order.index(row.who.tier), *map(str, row.who)))
    return AuditResult(topic, window_ms, tuple(rows), bool(info.config.audit))


def _checked_tiers(tiers: Iterable[str] | None) -> frozenset[str] | None:
    if tiers is None:
        return None
    names = [tiers] if isinstance(tiers, str) else list(tiers)
    known = (LOG, *audit_topic.TIERS)
    for name in names:
        if name not in known:
            raise InvalidConfigError(
                f"There is no tier {name!r}", todo=f"The tiers are {', '.join(known)}."
            )
    return frozenset(names)


class _Clients:
    """Which producer has an id and an epoch, and which of them were closed."""

    def __init__(self, reports: Iterable[Report]) -> None:
        self.by_identity: dict[tuple[int, int], Counted] = {}
        self.closed: set[tuple[int, int]] = set()
        self.any = False
        """Whether any producer has reported."""
        for report in reports:
            if report.client.tier == PRODUCER:
                self.any = True
                identity = report.producer_id, report.producer_epoch
                self.by_identity[identity] = Counted(*report.client)
                if report.kind == END:
                    self.closed.add(identity)

    def counted(self, identity: tuple[int, int]) -> Counted:
        """Return who has an identity."""
        unknown = Counted(PRODUCER, f"with id {identity[0]}")
        return self.by_identity.get(identity, unknown)


def _compare_partition(
    root: Root,
    selection: _Selection,
    log: PartitionLog,
    reports: list[Report],
    clients: _Clients,
) -> None:
    readers: dict[tuple[str, str], list[Report]] = defaultdict(list)
    for report in reports:
        if report.client.tier not in (PRODUCER, COPY):
            readers[report.client.tier, report.client.name].append(report)
    reached = {who: _reached(root, log, who, of_reader) for who, of_reader in readers.items()}
    cleaned = root.context.state.read(lambda txn: keyspace.CLEANED_OFFSETS.get(txn, log.key)) or 0
    cuts = {offset for report in reports for offset in (report.first_offset, report.next_offset)}
    counts = PartitionCounts(
        log,
        selection.window_ms,
        (selection.since, selection.until),
        {*cuts, *(offset for offset, _ in reached.values()), cleaned},
    )
    deleted_below = max(counts.start, cleaned)
    for window, records in selection.selected(counts.by_window()):
        selection.add(window, Counted(LOG), records=records, log_records=records)
    for window, size in selection.selected(counts.sizes()):
        selection.add(window, Counted(LOG), bytes=size)
    copies = [report for report in reports if report.client.tier == COPY]
    copied = _compare_copies(selection, counts, copies, deleted_below)
    written = [report for report in reports if report.client.tier == PRODUCER]
    deleted: dict[int, int] = {}
    if clients.any:
        deleted = _compare_producers(selection, counts, written, clients, deleted_below, copied)
    lost: dict[int, int] = {}
    for (tier, name), of_reader in readers.items():
        reader = ReaderComparison(
            selection, counts, Counted(tier, name), deleted_below, dict(deleted)
        )
        reader.compare(of_reader, *reached[tier, name])
        for window, records in reader.lost.items():
            lost[window] = max(lost.get(window, 0), records)
    if not clients.any:
        # With reports of producers, the loss is named with the producer.
        for window, records in lost.items():
            selection.add(window, Counted(LOG), missing=records)


def _reached(
    root: Root, log: PartitionLog, who: tuple[str, str], reports: list[Report]
) -> tuple[int, bool]:
    """Return up to which offset a reader has read, and whether it may continue there."""
    reached = max((r.next_offset for r in reports if r.kind in (COUNT, SKIP)), default=0)
    goes_on = True
    if who[0] == GROUP:
        group = Group(root.context, who[1], partial(tails.ends, durable=False))
        partition = TopicPartition(log.topic, log.partition)
        committed = group.committed([partition])[partition]
        goes_on = committed is not None  # Otherwise it was deleted, or has expired.
        if committed is not None:
            reached = max(reached, committed.position.offset)
    return reached, goes_on


# Mirrors that write


def _compare_copies(
    selection: _Selection, counts: PartitionCounts, reports: list[Report], deleted_below: int
) -> Any:
    """Compare what mirrors wrote to a partition with what the log has of the same offsets.

    Returns which cells they wrote.
    """
    copied = np.zeros(len(counts.first), bool)
    for report in reports:
        cells, who = counts.between(report.first_offset, report.next_offset), report.client.name
        copied[cells] = True
        told, actual = selection.told(report), counts.by_window(cells)
        # Of an offset there is at most one record.
        deleted = max(min(report.next_offset, deleted_below) - report.first_offset, 0)
        for window in sorted({*told, *actual}):
            (records, size), found = told.get(window, (0, 0)), actual.get(window, 0)
            lost, more = max(records - found, 0), max(found - records, 0)
            gone = min(lost, deleted)
            deleted -= gone
            wrote = {"records": records, "bytes": size, "log_records": found}
            compared = {"doubled": more, "deleted": gone, "missing": lost - gone}
            selection.add(window, Counted(COPY, who), **wrote, **compared)
    return copied


# Producers


class _Deficit(NamedTuple):
    """Records that a producer reported and the log does not have under its id."""

    rank: int
    """0 if it has no id, 1 if it has one, 2 if retention or compaction may have deleted them."""
    who: Counted
    records: int


def _compare_producers(
    selection: _Selection,
    counts: PartitionCounts,
    reports: list[Report],
    clients: _Clients,
    deleted_below: int,
    copied: Any,
) -> dict[int, int]:
    """Compare what producers reported of a partition with their batches.

    Returns the records by window that retention or compaction has deleted.
    """
    reported = np.zeros(len(counts.first), bool)
    ends: dict[tuple[int, int], int] = {}
    deficits: dict[int, list[_Deficit]] = defaultdict(list)
    for report in reports:
        if report.kind != COUNT:
            continue
        who, anonymous = Counted(*report.client), report.producer_id < 0
        cells = counts.between(report.first_offset, report.next_offset)
        actual: dict[int, int] = {}
        if not anonymous:
            identity = report.producer_id, report.producer_epoch
            ends[identity] = max(ends.get(identity, 0), report.next_offset)
            own = counts.producer_id[cells] == report.producer_id
            own &= counts.epoch[cells] == report.producer_epoch
            reported[cells] |= own
            actual = counts.by_window(cells, own)
        told = selection.told(report)
        rank = 2 if report.first_offset < deleted_below else 0 if anonymous else 1
        for window, (records, size) in told.items():
            found = actual.pop(window, 0)
            more = max(found - records, 0)
            wrote = {"records": records, "bytes": size, "log_records": found}
            selection.add(window, who, **wrote, doubled=more)
            if records > found:
                deficits[window].append(_Deficit(rank, who, records - found))
        for window, found in selection.selected(actual):
            selection.add(window, who, log_records=found, doubled=found)
    _count_unreported(selection, counts, reported, clients, ends)
    anonymous_records = counts.by_window(chosen=(counts.producer_id < 0) & ~copied)
    deleted: dict[int, int] = {}
    for window in {*deficits, *anonymous_records}:
        if selection.has(window):
            unnamed = anonymous_records.get(window, 0)
            left, deleted[window] = _settle_deficits(selection, window, deficits[window], unnamed)
            if left:
                unknown = Counted(PRODUCER, NO_ID)
                selection.add(window, unknown, records=left, unreported=left, log_records=left)
    return deleted


def _settle_deficits(
    selection: _Selection, window: int, deficits: list[_Deficit], anonymous_records: int
) -> tuple[int, int]:
    """Explain deficits by records that have no producer id.

    Batches without an id are those of writers without one, and those that housekeeping has
    gathered from the batches of several producers.  What they do not explain is missing, or
    deleted.

    Returns how many records without an id are left, and how many records were deleted.
    """
    deleted = 0
    for rank, who, records in sorted(deficits):
        explained = min(records, anonymous_records)
        anonymous_records -= explained
        left = records - explained
        gone = left if rank == 2 else 0
        selection.add(window, who, log_records=explained, deleted=gone, missing=left - gone)
        deleted += gone
    if deleted:
        selection.add(window, Counted(LOG), deleted=deleted)
    return anonymous_records, deleted


def _count_unreported(
    selection: _Selection,
    counts: PartitionCounts,
    reported: Any,
    clients: _Clients,
    ends: dict[tuple[int, int], int],
) -> None:
    """Count the batches of producers that did not report them, since they were killed or run.

    Behind the last report of a producer that was closed, they are doubled: it wrote no more.

    Args:
        selection: What to compare.
        counts: What the partition has.
        reported: Which cells producers reported.
        clients: Which producers there are.
        ends: Where the last report of each producer ends.
    """
    unreported = (counts.producer_id >= 0) & ~reported
    pairs = np.stack([counts.producer_id[unreported], counts.epoch[unreported]])
    for producer_id, epoch in np.unique(pairs, axis=1).T.tolist():
        identity = producer_id, epoch
        own = unreported & (counts.producer_id == producer_id) & (counts.epoch == epoch)
        who = clients.counted(identity)
        if identity in clients.closed and identity in ends:
            behind = own & (counts.first >= ends[identity])
            for window, records in selection.selected(counts.by_window(chosen=behind)):
                selection.add(window, who, log_records=records, doubled=records)
            own &= ~behind
        sizes = counts.sizes(own)
        for window, records in selection.selected(counts.by_window(chosen=own)):
            found = {"records": records, "log_records": records, "unreported": records}
            selection.add(window, who, **found, bytes=sizes[window])


# Groups and other readers


class ReaderComparison:
    """Compares what a group, a pipeline or a mirror read of a partition with the log."""

    def __init__(
        self,
        selection: _Selection,
        counts: PartitionCounts,
        who: Counted,
        deleted_below: int,
        deleted: dict[int, int],
    ) -> None:
        self._selection, self._counts, self._who = selection, counts, who
        self._deleted_below, self._deleted = deleted_below, deleted
        self._all_deleted = dict(deleted)
        """Records by window that producers reported, and that were deleted since; of `_deleted`
        those are left that this reader has not read."""
        self.lost: dict[int, int] = defaultdict(int)
        """Records by window that were read, and that the log does not have any more."""

    def _add(self, field_name: str, chosen: Any, weights: Any = None) -> None:
        """Add the records of chosen cells to a field of the rows."""
        counts = self._counts
        records = counts.records if weights is None else counts.records * weights
        windows = sums(counts.window[chosen], records[chosen])
        for window, number in self._selection.selected(windows):
            self._selection.add(window, self._who, **{field_name: number})

    def compare(self, reports: list[Report], reached: int, goes_on: bool) -> None:
        """Compare the reports of all members with the log, up to where they have read."""
        begins = [r.first_offset for r in reports if r.kind in (COUNT, START)]
        if not begins:
            return
        counts, start = self._counts, min(begins)
        read, returned = (np.zeros(len(counts.first), np.int64) for _ in range(2))
        for report in reports:
            cells = counts.between(report.first_offset, report.next_offset)
            if report.kind == COUNT:
                read[cells] += 1
                self._compare_report(report, cells)
            elif report.kind == RETURN:
                returned[cells] += 1
        covered = (counts.first >= start) & (counts.first < reached)
        skipped = self._skipped(reports, read)
        self._add("log_records", covered)
        self._add("missing", covered & (read == 0) & skipped)
        unreported = covered & (read == 0) & ~skipped
        self._add("unreported", unreported)
        self._add("records", unreported)
        sizes = counts.sizes(unreported)
        for window, size in self._selection.selected(sizes):
            self._selection.add(window, self._who, bytes=size)
        # As in `_skipped`, a member that began without a commit has left out what is before.
        unread = [(start, r.first_offset) for r in reports if r.kind == START]
        unread += [(r.first_offset, r.next_offset) for r in reports if r.kind == SKIP]
        unread += [(max(reached, start), counts.start)] if goes_on else []
        self._count_deleted_unread(reports, unread)
        # What was returned and not read again yet may still be read.
        again = np.maximum(read + returned - 1, 0)
        self._add("doubled", again > 0, again)
        self._add("unread", counts.first >= reached)

    def _count_deleted_unread(self, reports: list[Report], unread: list[tuple[int, int]]) -> None:
        """Count as missing what retention deleted before it was read.

        That is below the log start, in ranges of offsets that were left out or behind.  How many
        records of which window were deleted is known from the producers' reports, of which the
        latest that were not read are taken; without such reports each offset counts, in the first
        window that the log has.
        """
        counts, left = self._counts, 0
        reads = sorted((r.first_offset, r.next_offset) for r in reports if r.kind == COUNT)
        end = 0
        for first, stop in sorted(unread):
            end, first = max(end, stop), max(end, first)  # An offset is counted once.
            stop = min(stop, counts.start)
            for begin, finish in reads:
                if first < stop and begin < stop and finish > first:
                    left += max(begin - first, 0)
                    first = finish
            left += max(stop - first, 0)
        known = any(self._all_deleted.values())
        if not known and len(counts.window) and self._selection.since is None:
            self._all_deleted = {int(counts.window[0]): left}
        missing: dict[int, int] = defaultdict(int)
        for deleted in (self._deleted, self._all_deleted):
            for window, records in sorted(deleted.items(), reverse=True):
                more = max(min(records - missing[window], left), 0)
                missing[window] += more
                left -= more
        for window, records in missing.items():
            self._selection.add(window, self._who, missing=records, deleted_unread=records)

    def _skipped(self, reports: list[Report], read: Any) -> Any:
        """Return a mask of the cells that the reader is known to have skipped."""
        counts = self._counts
        skipped = np.zeros(len(read), bool)
        for report in reports:
            cells = counts.between(report.first_offset, report.next_offset)
            if report.kind == SKIP:
                skipped[cells] = True
            elif report.kind == START:
                # It began here without a commit: nothing before was committed meanwhile.
                before = cells.start
                while before > 0 and not read[before - 1]:
                    before -= 1
                    skipped[before] = True
        return skipped

    def _compare_report(self, report: Report, cells: slice) -> None:
        """Compare what was read in a range with what the log has there now."""
        selection, who = self._selection, self._who
        actual = self._counts.by_window(cells)
        told = selection.told(report)
        self._divide(report, told, actual)
        for window, (records, size) in told.items():
            found = actual.pop(window, 0)
            selection.add(window, who, records=records, bytes=size, missing=max(found - records, 0))
            if report.first_offset < self._deleted_below and records >= found:
                selection.add(window, who, deleted=records - found)
                if window in self._deleted:
                    self._deleted[window] = max(self._deleted[window] - (records - found), 0)
            elif records > found:
                self.lost[window] += records - found
        for window, found in selection.selected(actual):
            selection.add(window, who, missing=found)

    def _divide(self, report: Report, told: dict[int, list[int]], actual: dict[int, int]) -> None:
        """Add the records that were read without a minute to the windows that the log has.

        What the log does not have any more is in the windows of which records were deleted since;
        otherwise in the last window of the range, unless not all windows are selected.
        """
        records, size = report.minutes.get(NO_MINUTE, (0, 0))
        left, last = records, None
        for window, found in sorted(actual.items()):
            before = told.get(window, (0, 0))
            more = min(found - before[0], left)
            if more > 0:
                left -= more
                told[window] = [before[0] + more, before[1] + size * more // records]
                last = window
        if report.first_offset < self._deleted_below:
            for window, deleted in sorted(self._deleted.items()):
                more = min(deleted, left)
                if more:
                    left -= more
                    count = told.setdefault(window, [0, 0])
                    count[0] += more
                    count[1] += size * more // records
            return
        known = self._selection.since is None and self._selection.until is None
        if left and last is not None and known:
            told[last][0] += left
