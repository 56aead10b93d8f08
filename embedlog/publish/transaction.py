"""Publishing staged batches in any number of partitions: all of them, or none, and once.

In order, under the locks of all partitions, taken in the order of their keys:

1. Look at the application's markers: what is at or below them was published.
2. Work out where everything goes: past the end of the active segment, and into
   new ones where that is full.
3. One transaction on `state` enters in the journal what is *begun*: where each
   partition ends, and which files will be made.
4. Write past the ends, where nobody looks, and into the new files.
5. With ``durability="fsync"``, flush them, their names, and what was there
   before and nobody flushed.
6. One transaction on `state` publishes: the journal says *done*, the manifest
   has the new segments, the markers are written, the recovery points move.
7. One transaction on `live` moves all ends; readers are woken.

Killed before 6, nothing happened, and whoever comes next removes what was
written; after it, whoever comes next does 7.  After a power cut the same holds
by the journal alone: a log ends where the journal says that a publication
began, unless it is done.  (With ``durability="os"`` what is written may be
lost after 6 as after any append; then the markers, which know where their
publication ended, count no longer, and a repetition publishes it again.)

Staged bytes are copied, not adopted by renaming their files: so segments are as
large as the topic wants them, a small publication costs no segment, and what is
staged need not be flushed, since nobody needs it after a crash.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog import batch as batches
from embedlog import catalog, index, kv
from embedlog.batch import EncodedBatch
from embedlog.catalog import SegmentInfo
from embedlog.errors import (
    DiskFullError,
    DurabilityError,
    EmbedlogError,
    RestartedApplicationError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.index import IndexEntry
from embedlog.partition import flush, journal, overdue_warning, roll, tail, validation
from embedlog.partition.append import PendingAppend
from embedlog.partition.journal import JournalEntry
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.tail import Tail
from embedlog.publish import app_versions, staging
from embedlog.publish.app_versions import AppVersion
from embedlog.publish.staging import StagedFile
from embedlog.segment import END_MARK, SegmentFile, create

if TYPE_CHECKING:
    from embedlog.root.root import Root

_logger = logging.getLogger("embedlog")


class Publication(NamedTuple):
    """The application that publishes, and the number of the publication by its own count."""

    application: str
    version: int
    source: str = ""
    """What counts the versions, such as a query's id.  It counts over all topics, and
    another source that publishes under the same name to the same topic has started over.
    Without a source each topic has a count of its own, as each table has in Delta."""
    run: str = ""
    """The process or attempt; for messages."""
    place: str = ""
    """Another name by which a source that starts over is recognised: a checkpoint's path."""
    topics: tuple[int, ...] = ()
    """The ids of topics that count as written to although nothing was staged for them."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its markers by topic."""
        names = [] if self.application == self.source else [self.application]
        return (*names, f"at {self.place}") if self.place else tuple(names)


class PublishResult(NamedTuple):
    """What a publication came to."""

    records: int
    repeated: AppVersion | None = None
    """The marker of the one before, if it was published already; then nothing was done."""


@dataclass(slots=True)
class SegmentPlan:
    """What goes into one segment: the active one, or one that is to follow it."""

    info: SegmentInfo
    draft: PendingAppend
    file: SegmentFile | None = None


@dataclass(slots=True)
class PartitionPlan:
    """What goes to one partition; under its lock."""

    log: PartitionLog
    before: Tail
    legs: list[SegmentPlan] = field(default_factory=list)

    @property
    def after(self) -> Tail:
        return self.legs[-1].draft.tail


def publish(
    root: Root,
    staged: Sequence[StagedFile],
    publication: Publication | None = None,
    *,
    durability: str | None = None,
    timeout: float | None = None,
    restart: bool = False,
) -> PublishResult:
    """Make staged batches part of the log: in all their partitions at once, or in none.

    Those of a partition are in the order of ``staged``.  The files are left to
    the caller, who may remove them when this returns, or raised.

    Args:
        root: Where they were staged.
        staged: What was staged, in the order in which it is to be read.
        publication: The application and its version; without it a repetition publishes again.
        durability: What it survives, as in `PartitionLog.append`; the root's by default.
        timeout: Seconds to wait for each partition, or as long as for any lock.
        restart: Let an application start over in topics that it has published to: what
            it published there before may then be published again.

    Raises:
        RestartedApplicationError: The application started over in a topic that it has
            published to, and ``restart`` is not set.
        UnknownTopicOrPartitionError: A topic is gone, or another one since.
        RecordTooLargeError, InvalidRecordError: A topic does not take what was staged.
        LockTimeoutError: Another process holds a partition; ``pid`` says which.
        DiskFullError, StorageError: Nothing was published.
        DurabilityError: A flush failed, now or before; nothing was published.
        CorruptBatchError: A staged file is not as it was written.
    """
    context = root.context
    context.check_appendable()
    given = _by_partition(root, staged)
    if not given and publication is None:
        return PublishResult(0)
    with _held(list(given), timeout):
        intent = None if publication is None else _intent(publication, list(given), restart)
        told = _told(root, intent)
        if told is not None:
            return told
        synced = (durability or context.durability) == "fsync"
        records = sum(each.records for each in staged)
        try:
            shares = [_planned(log, encoded, synced) for log, encoded in given.items()]
            told = _carry_out(root, shares, intent, records, synced)
        except DiskFullError:
            context.reserve.short = True
            raise
    for log, encoded in given.items():
        log.dirty = True
        overdue_warning.warn(log, encoded)
    context.wake.advance()
    return told or PublishResult(records)


def _by_partition(
    root: Root, staged: Sequence[StagedFile]
) -> dict[PartitionLog, list[EncodedBatch]]:
    """Return what goes to each partition, in the order of the partitions' keys."""
    found: dict[tuple[int, int], tuple[PartitionLog, list[EncodedBatch]]] = {}
    for each in staged:
        for (topic, topic_id, partition), one in staging.read(root.context.files, each):
            place = topic_id, partition
            if place not in found:
                found[place] = _log_of(root, topic, topic_id, partition), []
            found[place][1].append(one)
    return dict(found[place] for place in sorted(found))


def _log_of(root: Root, topic: str, topic_id: int, partition: int) -> PartitionLog:
    log = root.partition(topic, partition)
    if log.topic_id != topic_id:
        raise UnknownTopicOrPartitionError(
            "the topic was deleted and created again since this was staged",
            topic=topic,
            partition=partition,
            todo="nothing was published",
        )
    return log


@contextmanager
def _held(logs: list[PartitionLog], timeout: float | None) -> Iterator[None]:
    """Hold all partitions, whose order is the same for everybody."""
    with ExitStack() as held:
        for log in logs:
            log.acquire(timeout)
            held.callback(log.release)
        yield


# Whether it was published before


class PublicationPlan(NamedTuple):
    """What is about to be published: the publication, and which topics it writes to."""

    publication: Publication
    topics: dict[int, str]
    """Their names by id."""
    restart: bool


def _intent(publication: Publication, logs: list[PartitionLog], restart: bool) -> PublicationPlan:
    topics = dict.fromkeys(publication.topics, "") | {log.topic_id: log.topic for log in logs}
    return PublicationPlan(publication, topics, restart)


def _told(root: Root, intent: PublicationPlan | None) -> PublishResult | None:
    if intent is None:
        return None
    # A commit whose process died may be seen only when somebody commits next.
    context = root.context
    context.state.settle()
    marker = context.state.read(lambda txn: _published_before(txn, intent))
    if marker is None:
        return None
    # Its process may have died before anybody could see what it had published.
    context.live.settle()
    journal.finish_done(context, [key for key, _, _ in marker.ends])
    return PublishResult(0, marker)


def _published_before(txn: kv.Txn, intent: PublicationPlan) -> AppVersion | None:
    """Return the marker of this publication, or of a later one; None if it is to be made.

    Raises:
        RestartedApplicationError: It is to be made, but another source has published
            under its name to one of its topics.
    """
    publication = intent.publication
    known = [
        (name, topic, marker)
        for topic_id, topic in intent.topics.items()
        for name in publication.names
        if (marker := app_versions.get(txn, name, topic_id)) is not None
    ]
    comparable = [marker for _, _, marker in known if marker.source == publication.source]
    if publication.source and (last := app_versions.get(txn, publication.source)) is not None:
        comparable.append(last)
    reached = [marker for marker in comparable if marker.version >= publication.version]
    if reached:
        latest = max(reached, key=lambda marker: marker.version)
        # What follows a lost publication was published, so only the last one can be made again.
        if latest.version > publication.version or not any(
            app_versions.is_lost(txn, marker) for marker in reached
        ):
            return latest
    for name, topic, marker in known:
        if marker.source != publication.source and not intent.restart:
            raise _restarted(publication, name, topic, marker)
    return None


def _restarted(
    publication: Publication, name: str, topic: str, marker: AppVersion
) -> RestartedApplicationError:
    what = "application " + name if name == publication.application else "the checkpoint " + name
    return RestartedApplicationError(
        f"The versions of {what} have started over: {marker.version} was published to this topic "
        f"by {marker.source or 'batch writes'} (run {marker.run or 'unknown'}), and now "
        f"{publication.version} comes from {publication.source or 'batch writes'} (run "
        f"{publication.run or 'unknown'}), as when the checkpoint of a query is deleted",
        topic=topic or None,
        application=publication.application,
        version=publication.version,
        published=marker.version,
        todo="Put the checkpoint back, or publish to another topic. To publish to this one, which "
        'may then have the same records twice, set .option("allowRestart", "true") on the writer '
        "in Spark, or pass restart=True to publish()",
    )


# Where it goes


def _planned(log: PartitionLog, encoded: list[EncodedBatch], synced: bool) -> PartitionPlan:
    """Work out what goes where in one partition; changes nothing but for a roll that is due."""
    now = log.tail_locked()
    if now.failed:
        raise flush.failed(log)
    validation.check(log, encoded)
    wide = log.last.headers or any(one.has_headers for one in encoded)
    if wide is not log.last.headers or roll.is_due(log, log.active_file(), now, encoded[0]):
        # By itself, before anything else: that is done, and whole, whatever becomes of the rest.
        now = roll.roll(log, now, wide, synced)
    share = PartitionPlan(log, now, [SegmentPlan(log.last, PendingAppend(log, now, publish=True))])
    file = log.active_file()
    for one in encoded:
        whole = batches.with_headers(one) if wide and not one.has_headers else one
        if roll.is_due(log, file, share.after, whole):
            share.legs.append(_next_leg(log, share.after, wide))
        share.legs[-1].draft.add(whole)
    return share


def _next_leg(log: PartitionLog, now: Tail, wide: bool) -> SegmentPlan:
    context = log.context
    number = context.state.write(lambda txn: catalog.next_number(txn, b"segment"))
    created_ms = tail.creation_time(now, context.clock())
    info = SegmentInfo(now.log_end_offset, number, created_ms, headers=wide, dense=True)
    start = roll.schema_of(log, info).serialize().size
    begun = Tail(
        info.id,
        info.base_offset,
        now.log_end_offset,
        start,
        now.log_end_offset,
        start,
        now.durable_offset,
        now.start_offset,
        now.leader_epoch,
        created_ms=info.created_ms,
        appended_ms=tail.first_append_time(info.created_ms, now.appended_ms),
        flushed_ms=now.flushed_ms,
    )
    return SegmentPlan(info, PendingAppend(log, begun, publish=True))


# Doing it


class RepeatedPublication(Exception):  # noqa: N818 - it ends a transaction, and is nobody's error
    def __init__(self, marker: AppVersion) -> None:
        super().__init__(marker)
        self.marker = marker


def _carry_out(
    root: Root,
    shares: list[PartitionPlan],
    intent: PublicationPlan | None,
    records: int,
    synced: bool,
) -> PublishResult | None:
    context = root.context
    clocks = app_versions.ClockState(
        context.files.boot_id(), context.files.uptime_ms(), root.clock()
    )
    try:
        number = context.state.write(lambda txn: _begin(txn, shares))
        for share in shares:
            _write(share)
        if synced:
            for share in shares:
                _flush(share)
        rows = {share.log.key: _entered(share, shares, number, synced) for share in shares}
        known = {share.log.key: flush.producers(share.log) for share in shares if synced}

        def done(txn: kv.Txn) -> None:
            if intent is not None:
                # Another run of it may have published by other partitions meanwhile.
                before = _published_before(txn, intent)
                if before is not None:
                    raise RepeatedPublication(before)
                elapsed_ms = app_versions.advance_clock(txn, clocks)
                marker = _marker(intent.publication, shares, records, clocks.time_ms, elapsed_ms)
                _put_markers(txn, intent, marker)
                if number % app_versions.CHECK_INTERVAL == 0:
                    app_versions.expire(txn, elapsed_ms)
            for share in shares:
                _put_share(txn, share, rows[share.log.key], known.get(share.log.key))

        context.state.write(done)
        context.live.write(lambda txn: journal.reveal(txn, rows.items()))
    except RepeatedPublication as repeated:
        _settle(shares)
        return PublishResult(0, repeated.marker)
    except BaseException:
        _settle(shares)
        raise
    return None


def _marker(
    publication: Publication,
    shares: list[PartitionPlan],
    records: int,
    time_ms: int,
    elapsed_ms: int,
) -> AppVersion:
    ends = [(each.log.key, each.after.leader_epoch, each.after.log_end_offset) for each in shares]
    return AppVersion(
        publication.version,
        publication.source,
        publication.run,
        records,
        time_ms,
        elapsed_ms,
        tuple(ends),
    )


def _put_markers(txn: kv.Txn, intent: PublicationPlan, marker: AppVersion) -> None:
    if marker.source:
        app_versions.put(txn, marker.source, app_versions.ANY_TOPIC, marker)
    ends: dict[int, list[tuple[bytes, int, int]]] = {topic_id: [] for topic_id in intent.topics}
    for end in marker.ends:
        ends[catalog.PARTITION_KEY.unpack(end[0])[0]].append(end)
    for topic_id in intent.topics:
        of_topic = marker._replace(ends=tuple(ends[topic_id]))
        for name in intent.publication.names:
            app_versions.put(txn, name, topic_id, of_topic)


def _begin(txn: kv.Txn, shares: list[PartitionPlan]) -> int:
    number = catalog.next_number(txn, b"publication")
    keys = tuple(share.log.key for share in shares)
    for share in shares:
        files = tuple((leg.info.base_offset, leg.info.id) for leg in share.legs[1:])
        begun = JournalEntry(number, False, journal.end_of(share.before), keys, files)
        journal.put(txn, share.log.key, begun)
    return number


def _write(share: PartitionPlan) -> None:
    """Write past the end of the active segment, and into the files that follow it."""
    log, last = share.log, share.legs[-1]
    for leg in share.legs:
        if leg is share.legs[0]:
            leg.file = log.active_file()
        else:
            schema = roll.schema_of(log, leg.info)
            leg.file = create(log.context.files, log.path_of(leg.info), schema)
            assert leg.file.size() == leg.draft.position
        buffers: list[Any] = leg.draft.buffers
        leg.file.write(buffers if leg is last else [*buffers, END_MARK], leg.draft.position)


def _flush(share: PartitionPlan) -> None:
    """Put all of it on the disk, with what came before it.

    Raises:
        DurabilityError: The active segment, or a name, could not be: that is final (P9).
        StorageError: A new file could not be, which is nobody's loss.
    """
    log, first = share.log, share.legs[0]
    assert first.file is not None
    flush.sync_files(log, share.before, first.file)
    for leg in share.legs[1:]:
        assert leg.file is not None
        try:
            leg.file.sync()
        except DurabilityError as error:
            raise StorageError(error.what, **error.facts) from error
    if len(share.legs) > 1:
        flush.sync_entries(log, share.legs[-1].info.id)


def _entered(
    share: PartitionPlan, shares: list[PartitionPlan], number: int, synced: bool
) -> JournalEntry:
    after = share.after
    if synced:
        after = after._replace(
            durable_offset=after.log_end_offset, flushed_ms=share.log.context.clock()
        )
    return JournalEntry(
        number,
        True,
        journal.end_of(share.before),
        tuple(each.log.key for each in shares),
        after=after.pack(),
        entries=index.pack(share.legs[-1].draft.entries),
    )


def _put_share(
    txn: kv.Txn, share: PartitionPlan, entered: JournalEntry, known: dict[int, Any] | None
) -> None:
    log, key = share.log, share.log.key
    for leg, following in zip(share.legs, share.legs[1:], strict=False):
        sealed = _sealed(leg)
        catalog.put_segment(txn, key, sealed)
        catalog.put_index_blob(txn, key, sealed, index.pack(_entries(log, leg, share)))
        catalog.put_segment(txn, key, following.info)
    if known is not None:
        flush.put_recovery_point(txn, key, share.after, known)
    journal.put(txn, key, entered)


def _sealed(leg: SegmentPlan) -> SegmentInfo:
    now = leg.draft.tail
    return leg.info._replace(
        next_offset=now.log_end_offset,
        size=now.log_end_position + len(END_MARK),
        end_position=now.log_end_position,
        max_timestamp=now.timestamp,
        appended_ms=now.appended_ms,
    )


def _entries(log: PartitionLog, leg: SegmentPlan, share: PartitionPlan) -> list[IndexEntry]:
    if leg is not share.legs[0]:
        return leg.draft.entries
    before = log.context.live.read(lambda txn: index.entries(txn, log.key, leg.info.id))
    return before + leg.draft.entries


def _settle(shares: list[PartitionPlan]) -> None:
    """After a failure: undo what was begun, or finish what was done; else whoever comes next."""
    for share in shares:
        # A disk that refuses even this leaves the journal to the next writer.
        with suppress(EmbedlogError):
            share.log.settled = -1
            share.log.tail_locked()


def marker_of(root: Root, source: str) -> AppVersion | None:
    """Return the marker of the last publication by a source."""
    return root.context.state.read(lambda txn: app_versions.get(txn, source))


def log_repetition(publication: Publication, told: PublishResult) -> None:
    """Say in the log that a publication was skipped, and which runs it was published by."""
    before = told.repeated
    assert before is not None
    _logger.warning(
        "%s: %d was published already (up to %d, by run %s, %d records), so it is skipped (run %s)",
        publication.application,
        publication.version,
        before.version,
        before.run or "unknown",
        before.records,
        publication.run or "unknown",
    )
