"""Publishing staged batches in any number of partitions: all of them or none, and only once.

In order, under the locks of all partitions, taken in the order of their keys:

1. Read the application's versions: a publication at or below them was published before.
2. Work out where everything goes: past the end of the active segment, and into
   new segments where that is full.
3. One transaction on `state` writes the journal entries, *prepared*: where each
   partition ends, and which files will be created.
4. Write past the ends, where no reader looks, and into the new files.
5. With ``durability="fsync"``, flush them, their names, and what was there
   before and not flushed.
6. One transaction on `state` commits: the journal entries are *committed*, the manifest
   has the new segments, the app versions are written, the recovery points move.
7. One transaction on `live` moves all ends, and readers are woken: it is *visible*.

Killed before 6, nothing happened, and the next process to use one of the partitions
removes what was written; killed after it, that process does 7.  After a power cut the same
holds by the journal alone: a log ends where the journal says that a publication began,
unless it is committed.  (With ``durability="os"`` what is written may be lost after 6, as
after any append.  The app versions note where their publication ended, so they are void
then, and a repetition publishes it again.)

Staged bytes are copied, not adopted by renaming their files: so segments are as
large as the topic wants them, a small publication costs no segment, and staged files
need not be flushed, since they are not needed after a crash.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from embedlog import batch as batches
from embedlog import catalog, index, keyspace, kv
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
from embedlog.partition import journal, recovery, roll, validation
from embedlog.partition import tail as tails
from embedlog.partition.append import PendingAppend, note_appended
from embedlog.partition.journal import JournalEntry
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.state import (
    Context,
    Partitions,
    PartitionState,
    put_recovery_point,
    sync_entries,
    sync_files,
)
from embedlog.partition.tail import Tail
from embedlog.publish import app_versions, staging
from embedlog.publish.app_versions import AppVersion
from embedlog.publish.staging import StagedFile
from embedlog.segment import END_MARK, SegmentFile, create

_logger = logging.getLogger("embedlog")


class Publication(NamedTuple):
    """The publishing application and its version number."""

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
        """The names under which it has an app version in each topic."""
        names = [] if self.application == self.source else [self.application]
        return (*names, f"at {self.place}") if self.place else tuple(names)


class PublishResult(NamedTuple):
    """What `publish` did."""

    records: int
    repeated: AppVersion | None = None
    """The version published before, if this is a repetition; then nothing was done."""


@dataclass(slots=True)
class SegmentPlan:
    """What will be written to one segment: the active one, or a new one after it."""

    info: SegmentInfo
    pending: PendingAppend
    file: SegmentFile | None = None


@dataclass(slots=True)
class PartitionPlan:
    """What will be written to one partition; under its lock."""

    log: PartitionState
    before: Tail
    segments: list[SegmentPlan] = field(default_factory=list)

    @property
    def after(self) -> Tail:
        """The tail that makes it visible."""
        return self.segments[-1].pending.tail


def publish(
    root: Partitions,
    staged: Sequence[StagedFile],
    publication: Publication | None = None,
    *,
    durability: str | None = None,
    timeout: float | None = None,
    restart: bool = False,
) -> PublishResult:
    """Make staged batches part of the log: in all their partitions at once, or in none.

    Those of a partition are in the order of ``staged``.  The caller may remove the
    staged files when this returns or raises.

    Args:
        root: The log that they were staged for.
        staged: The files, in the order in which they are to be read.
        publication: The application and its version; without it a repetition publishes again.
        durability: ``"os"`` or ``"fsync"``; that of the log by default.
        timeout: Seconds to wait for each partition; ``lock_timeout`` by default.
        restart: Let an application start over in topics that it has published to: what
            it published there before may then be published again.

    Raises:
        RestartedApplicationError: The application started over in a topic that it has
            published to, and ``restart`` is not set.
        UnknownTopicOrPartitionError: A topic was deleted, or deleted and created again.
        RecordTooLargeError, InvalidRecordError: A topic does not allow a staged batch.
        LockTimeoutError: Another process holds a partition; ``pid`` says which.
        DiskFullError, StorageError: Nothing was published.
        DurabilityError: A flush failed, now or before; nothing was published.
        CorruptBatchError: A staged file is not as it was written.
    """
    context = root.context
    context.check_appendable()
    encoded = _by_partition(root, staged)
    if not encoded and publication is None:
        return PublishResult(0)
    with _locked(list(encoded), timeout):
        target = None if publication is None else _target(publication, list(encoded), restart)
        result = _earlier_result(context, target)
        if result is not None:
            return result
        synced = (durability or context.durability) == "fsync"
        records = sum(file.records for file in staged)
        try:
            plans = [_plan(log, batches, synced) for log, batches in encoded.items()]
            result = _carry_out(context, plans, target, records, synced)
        except DiskFullError:
            context.reserve.mark_full()
            raise
    for log, appended in encoded.items():
        note_appended(log, appended)
    context.wake.advance()
    return result or PublishResult(records)


def _by_partition(
    root: Partitions, staged: Sequence[StagedFile]
) -> dict[PartitionState, list[EncodedBatch]]:
    """Return the batches of each partition, in the order of the partitions' keys."""
    by_key: dict[tuple[int, int], tuple[PartitionState, list[EncodedBatch]]] = {}
    for file in staged:
        for (topic, topic_id, partition), batch in staging.read(root.context.files, file):
            key = topic_id, partition
            if key not in by_key:
                by_key[key] = _partition(root, topic, topic_id, partition), []
            by_key[key][1].append(batch)
    return dict(by_key[key] for key in sorted(by_key))


def _partition(root: Partitions, topic: str, topic_id: int, partition: int) -> PartitionState:
    log = root.partition(topic, partition)
    if log.topic_id != topic_id:
        raise UnknownTopicOrPartitionError(
            "The topic was deleted and created again since this was staged",
            topic=topic,
            partition=partition,
            todo="Nothing was published.",
        )
    return log


@contextmanager
def _locked(logs: list[PartitionState], timeout: float | None) -> Iterator[None]:
    """Hold the locks of all partitions; every process takes them in the same order."""
    with ExitStack() as stack:
        for log in logs:
            log.acquire(timeout)
            stack.callback(log.release)
        yield


# Whether it was published before


class PublicationTarget(NamedTuple):
    """A publication, and the topics that it writes to."""

    publication: Publication
    topics: dict[int, str]
    """Their names by id."""
    restart: bool


def _target(
    publication: Publication, logs: list[PartitionState], restart: bool
) -> PublicationTarget:
    topics = dict.fromkeys(publication.topics, "") | {log.topic_id: log.topic for log in logs}
    return PublicationTarget(publication, topics, restart)


def _earlier_result(context: Context, target: PublicationTarget | None) -> PublishResult | None:
    """Return the result for a repetition, which must be visible; None for a new publication."""
    if target is None:
        return None
    # A commit whose process died may become visible only with the next commit.
    context.state.catch_up()
    before = context.state.read(lambda txn: _published_before(txn, target))
    if before is None:
        return None
    # Its process may have died before it made the publication visible.
    context.live.catch_up()
    journal.finish_committed(context, [key for key, _, _ in before.ends])
    return PublishResult(0, before)


def _published_before(txn: kv.Txn, target: PublicationTarget) -> AppVersion | None:
    """Return the version of this publication or of a later one; None if it is new.

    Raises:
        RestartedApplicationError: It is new, but another source has published
            under its name to one of its topics.
    """
    publication = target.publication
    known = [
        (name, topic, version)
        for topic_id, topic in target.topics.items()
        for name in publication.names
        if (version := app_versions.get(txn, name, topic_id)) is not None
    ]
    comparable = [version for _, _, version in known if version.source == publication.source]
    if publication.source and (last := app_versions.get(txn, publication.source)) is not None:
        comparable.append(last)
    reached = [version for version in comparable if version.version >= publication.version]
    if reached:
        latest = max(reached, key=lambda version: version.version)
        # What follows a lost publication was published, so only the last one can be repeated.
        if latest.version > publication.version or not any(
            app_versions.is_lost(txn, version) for version in reached
        ):
            return latest
    for name, topic, version in known:
        if version.source != publication.source and not target.restart:
            raise _restarted(publication, name, topic, version)
    return None


def _restarted(
    publication: Publication, name: str, topic: str, before: AppVersion
) -> RestartedApplicationError:
    what = "application " + name if name == publication.application else "the checkpoint " + name
    return RestartedApplicationError(
        f"The versions of {what} have started over: {before.version} was published to this topic "
        f"by {before.source or 'batch writes'} (run {before.run or 'unknown'}), and now "
        f"{publication.version} comes from {publication.source or 'batch writes'} (run "
        f"{publication.run or 'unknown'}), as when the checkpoint of a query is deleted",
        topic=topic or None,
        application=publication.application,
        version=publication.version,
        published=before.version,
        todo="Put the checkpoint back, or publish to another topic. To publish to this one, which "
        'may then have the same records twice, set .option("allowRestart", "true") on the writer '
        "in Spark, or pass restart=True to publish().",
    )


# Where it goes


def _plan(log: PartitionState, encoded: list[EncodedBatch], synced: bool) -> PartitionPlan:
    """Plan the segments of one partition; changes nothing but for a roll that is due."""
    tail = recovery.tail_locked(log)
    if tail.failed:
        raise log.flush_failed()
    validation.check(log, encoded)
    active = log.active_segment
    headers = active.headers or any(batch.has_headers for batch in encoded)
    if headers is not active.headers or roll.is_due(log, log.active_file(), tail, encoded[0]):
        # On its own, before anything else: the roll is complete, whatever happens to the rest.
        tail = roll.roll(log, tail, headers=headers, synced=synced)
    first = SegmentPlan(log.active_segment, PendingAppend(log, tail, publish=True))
    plan = PartitionPlan(log, tail, [first])
    file = log.active_file()
    for batch in encoded:
        if headers and not batch.has_headers:
            batch = batches.add_headers(batch)
        if roll.is_due(log, file, plan.after, batch):
            plan.segments.append(_plan_next_segment(log, plan.after, headers))
        plan.segments[-1].pending.add(batch)
    return plan


def _plan_next_segment(log: PartitionState, tail: Tail, headers: bool) -> SegmentPlan:
    context = log.context
    number = context.state.write(lambda txn: catalog.next_number(txn, "segment"))
    created_ms = tails.creation_time(tail, context.clock())
    info = SegmentInfo(tail.log_end_offset, number, created_ms, headers=headers, dense=True)
    start = roll.schema_of(log, info).serialize().size
    return SegmentPlan(info, PendingAppend(log, roll.tail_of_new(tail, info, start), publish=True))


# Carrying it out


class RepeatedPublication(Exception):  # noqa: N818 - it ends a transaction, and reaches no caller
    """Another run has published the same version meanwhile."""

    def __init__(self, before: AppVersion) -> None:
        super().__init__(before)
        self.before = before


def _carry_out(
    context: Context,
    plans: list[PartitionPlan],
    target: PublicationTarget | None,
    records: int,
    synced: bool,
) -> PublishResult | None:
    """Write the planned batches, commit, and make them visible; a result for a repetition."""
    clocks = app_versions.ClockState(
        context.files.boot_id(), context.files.uptime_ms(), context.clock()
    )
    try:
        number = context.state.write(lambda txn: _prepare(txn, plans))
        for plan in plans:
            _write(plan)
        if synced:
            for plan in plans:
                _flush(plan)
        entries = {plan.log.key: _committed(plan, plans, number, synced) for plan in plans}
        producers = {plan.log.key: plan.log.remembered_producers() for plan in plans if synced}

        def commit(txn: kv.Txn) -> None:
            if target is not None:
                # Another run of it may have published to other partitions meanwhile.
                before = _published_before(txn, target)
                if before is not None:
                    raise RepeatedPublication(before)
                elapsed_ms = app_versions.advance_clock(txn, clocks)
                version = _app_version(
                    target.publication, plans, records, clocks.time_ms, elapsed_ms
                )
                _put_app_versions(txn, target, version)
                if number % app_versions.CHECK_INTERVAL == 0:
                    app_versions.expire(txn, elapsed_ms)
            for plan in plans:
                _put_partition(txn, plan, entries[plan.log.key], producers.get(plan.log.key))

        context.state.write(commit)
        context.live.write(lambda txn: journal.make_visible(txn, entries.items()))
    except RepeatedPublication as repeated:
        _resolve(plans)
        return PublishResult(0, repeated.before)
    except BaseException:
        _resolve(plans)
        raise
    return None


def _app_version(
    publication: Publication,
    plans: list[PartitionPlan],
    records: int,
    time_ms: int,
    elapsed_ms: int,
) -> AppVersion:
    ends = [(plan.log.key, plan.after.leader_epoch, plan.after.log_end_offset) for plan in plans]
    return AppVersion(
        publication.version,
        publication.source,
        publication.run,
        records,
        time_ms,
        elapsed_ms,
        tuple(ends),
    )


def _put_app_versions(txn: kv.Txn, target: PublicationTarget, version: AppVersion) -> None:
    if version.source:
        app_versions.put(txn, version.source, app_versions.ANY_TOPIC, version)
    ends: dict[int, list[tuple[bytes, int, int]]] = {topic_id: [] for topic_id in target.topics}
    for end in version.ends:
        ends[keyspace.PARTITION_KEY.unpack(end[0])[0]].append(end)
    for topic_id in target.topics:
        of_topic = version._replace(ends=tuple(ends[topic_id]))
        for name in target.publication.names:
            app_versions.put(txn, name, topic_id, of_topic)


def _prepare(txn: kv.Txn, plans: list[PartitionPlan]) -> int:
    """Write the prepared journal entries; return the number of the publication."""
    number = catalog.next_number(txn, "publication")
    keys = tuple(plan.log.key for plan in plans)
    for plan in plans:
        files = tuple((segment.info.base_offset, segment.info.id) for segment in plan.segments[1:])
        entry = JournalEntry(number, journal.PREPARED, journal.end_of(plan.before), keys, files)
        journal.JOURNAL.put(txn, plan.log.key, value=entry)
    return number


def _write(plan: PartitionPlan) -> None:
    """Write past the end of the active segment, and into the new files after it."""
    log, last = plan.log, plan.segments[-1]
    for segment in plan.segments:
        if segment is plan.segments[0]:
            segment.file = log.active_file()
        else:
            schema = roll.schema_of(log, segment.info)
            segment.file = create(log.context.files, log.path_of(segment.info), schema)
            assert segment.file.size() == segment.pending.position
        buffers: list[Any] = segment.pending.buffers
        if segment is not last:
            buffers = [*buffers, END_MARK]
        segment.file.write(buffers, segment.pending.position)


def _flush(plan: PartitionPlan) -> None:
    """Put all of it on the disk, with what was written before it.

    Raises:
        DurabilityError: The active segment or a name could not be flushed: that is final (P9).
        StorageError: A new file could not be flushed; nothing is lost, since it is not named.
    """
    log, first = plan.log, plan.segments[0]
    assert first.file is not None
    sync_files(log, plan.before, first.file)
    for segment in plan.segments[1:]:
        assert segment.file is not None
        try:
            segment.file.sync()
        except DurabilityError as error:
            raise StorageError(error.what, **error.facts) from error
    if len(plan.segments) > 1:
        sync_entries(log, plan.segments[-1].info.id)


def _committed(
    plan: PartitionPlan, plans: list[PartitionPlan], number: int, synced: bool
) -> JournalEntry:
    """Return the committed journal entry of a partition."""
    after = plan.after
    if synced:
        after = after._replace(
            durable_offset=after.log_end_offset, flushed_ms=plan.log.context.clock()
        )
    return JournalEntry(
        number,
        journal.COMMITTED,
        journal.end_of(plan.before),
        tuple(other.log.key for other in plans),
        after=after.pack(),
        entries=index.pack(plan.segments[-1].pending.entries),
    )


def _put_partition(
    txn: kv.Txn,
    plan: PartitionPlan,
    entry: JournalEntry,
    producers: dict[int, ProducerState] | None,
) -> None:
    """Write the rows of a partition; ``producers`` if it was flushed."""
    log, key = plan.log, plan.log.key
    for segment, following in zip(plan.segments, plan.segments[1:], strict=False):
        sealed = _sealed(segment)
        catalog.put_segment(txn, key, sealed)
        keyspace.SEGMENT_INDEXES.put(
            txn, key, *sealed.key, value=index.pack(_entries(log, segment, plan))
        )
        catalog.put_segment(txn, key, following.info)
    if producers is not None:
        put_recovery_point(txn, key, plan.after, producers)
    journal.JOURNAL.put(txn, key, value=entry)


def _sealed(segment: SegmentPlan) -> SegmentInfo:
    tail = segment.pending.tail
    return segment.info._replace(
        next_offset=tail.log_end_offset,
        size=tail.log_end_position + len(END_MARK),
        end_position=tail.log_end_position,
        max_timestamp=tail.timestamp,
        appended_ms=tail.appended_ms,
    )


def _entries(log: PartitionState, segment: SegmentPlan, plan: PartitionPlan) -> list[IndexEntry]:
    if segment is not plan.segments[0]:
        return segment.pending.entries
    before = log.context.live.read(lambda txn: index.entries(txn, log.key, segment.info.id))
    return before + segment.pending.entries


def _resolve(plans: list[PartitionPlan]) -> None:
    """After a failure: undo what was prepared, or make visible what was committed."""
    for plan in plans:
        # On a disk that refuses even this, the journal is left to the next writer.
        with suppress(EmbedlogError):
            recovery.resolve_publication(plan.log)


def last_app_version(root: Partitions, source: str) -> AppVersion | None:
    """Return the version of the last publication by a source."""
    return root.context.state.read(lambda txn: app_versions.get(txn, source))


def log_repetition(publication: Publication, result: PublishResult) -> None:
    """Log that a publication was skipped, and which run published it before."""
    before = result.repeated
    assert before is not None
    _logger.warning(
        "%s: version %d was published before (up to %d, by run %s, %d records) and is skipped "
        "(run %s)",
        publication.application,
        publication.version,
        before.version,
        before.run or "unknown",
        before.records,
        publication.run or "unknown",
    )
