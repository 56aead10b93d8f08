"""Publishing staged batches in any number of partitions: all of them or none, and only once.

In order, under the locks of all partitions, taken in the order of their keys, or, if these
are too many, under that of the whole log:

1. Read the application's versions: a publication at or below them was published before.
   (Also before the locks, since a repetition may have no staged files any more.)
2. Plan where each batch is written: past the end of the active segment, and into new
   segments where that is full.
3. One transaction on `state` writes the journal entries, *prepared*: where each
   partition ends, which files will be created, and which offsets a group commits.
4. Write past the ends, where no reader looks, and into the new files.
5. With ``durability="fsync"``, or with offsets, flush them, their names, and what was written
   before and not flushed.  With offsets, one transaction on `live` then checks that the member
   owns their partitions, and notes that they are about to be committed.
6. One transaction on `state` commits: the journal entries are *committed*, the manifest
   has the new segments, the app versions are written, the recovery points move, and the
   checkpoints of the offsets are written.
7. One transaction on `live` moves all ends, and writes the offsets; readers are woken: it is
   *visible*.

Whoever takes one of the partitions of the group over finds the note, and first does 7, or, before
6, deletes the journal entry of the offset, without which 6 fails.

Killed before 6, nothing happened, and the next process to use one of the partitions
removes what was written; killed after it, that process does 7.  After a power cut the
journal decides: a log ends where a publication began, unless it is committed.  (With
``durability="os"`` what is written may be lost after 6, as after any append.  The app
versions note where their publication ended, so they are void then, and a repetition
publishes it again.)

Staged bytes are copied, not adopted by renaming their files: so segments have the size
that the topic is configured for, a small publication costs no segment, and staged files
need not be flushed, since they are not needed after a crash.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import chain, pairwise
from typing import NamedTuple

from embedlog import catalog, index, keyspace, kv
from embedlog.batch import EncodedBatch
from embedlog.catalog import SegmentInfo
from embedlog.errors import (
    ConflictError,
    DiskFullError,
    DurabilityError,
    EmbedlogError,
    RestartedApplicationError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.group import Group
from embedlog.groups import offsets as group_offsets
from embedlog.partition import PartitionLog, journal, roll, segment_statistics, validation
from embedlog.partition import tail as tails
from embedlog.partition.append import PendingAppend, note_appended
from embedlog.partition.append_condition import AppendCondition, publish_found
from embedlog.partition.flush import put_recovery_point, sync_entries, sync_files
from embedlog.partition.journal import JournalEntry
from embedlog.partition.producer_state import ProducerState
from embedlog.partition.state import Context, Partitions
from embedlog.partition.tail import Tail
from embedlog.publish import app_versions, staging
from embedlog.publish.app_versions import AppVersion
from embedlog.publish.staging import StagedFile, StagedPartition
from embedlog.record import Appended, ConsumerGroupMetadata
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.segment import END_MARK, SegmentFile, create

_logger = logging.getLogger("embedlog.publish")
_DESCRIPTORS = 4
"""Escalate unless the process may have so many for each partition: its lock and its active
segment take two, and the rest of the program needs some."""


class Publication(NamedTuple):
    """The publishing application and its version number."""

    application: str
    version: int
    source: str = ""
    """What counts the versions, such as a query's id, over all topics.  Another source that
    publishes under the same name to the same topic has started over.  Without a source the
    versions count for each topic separately, as for each table in Delta."""
    run: str = ""
    """The process or attempt; for messages."""
    checkpoint: str = ""
    """The path of its checkpoint: another name by which a source that starts over is
    recognised."""
    topics: tuple[int, ...] = ()
    """The ids of topics that count as written to although nothing was staged for them."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which it has an app version in each topic."""
        names = () if self.application == self.source else (self.application,)
        return (*names, f"at {self.checkpoint}") if self.checkpoint else names


class GroupOffsets(NamedTuple):
    """The offsets that a group commits with a publication."""

    group: Group
    member: ConsumerGroupMetadata
    """Who commits them, as of when it read the records."""
    rows: dict[bytes, bytes]
    """As `Group.encode` returns them."""


class PublishedBatches(NamedTuple):
    """What a publication wrote to one partition."""

    log: PartitionLog
    batches: list[tuple[Appended, EncodedBatch]]
    """In order, with their offsets."""


class SegmentFullError(Exception):
    """What is to be committed in `live` does not fit into the active segment."""


class PublishResult(NamedTuple):
    """What `publish` did."""

    records: int
    repeated: AppVersion | None = None
    """The version published before, if this is a repetition; then nothing was done."""


class SegmentPlan(NamedTuple):
    """What will be written to one segment: the active one, or a new one after it."""

    info: SegmentInfo
    pending: PendingAppend


class PartitionPlan(NamedTuple):
    """What will be written to one partition; under its lock."""

    log: PartitionLog
    before: Tail
    segments: list[SegmentPlan]

    @property
    def after(self) -> Tail:
        """The tail that makes it visible."""
        return self.segments[-1].pending.tail

    def published(self, encoded: list[EncodedBatch]) -> PublishedBatches:
        """Describe the batches that were written to the partition."""
        receipts = [receipt for segment in self.segments for receipt in segment.pending.receipts]
        return PublishedBatches(self.log, list(zip(receipts, encoded, strict=True)))

    @property
    def end(self) -> tuple[bytes, int, int]:
        """Where the publication ends, as in `AppVersion.ends`."""
        return self.log.key, self.after.leader_epoch, self.after.log_end_offset


def publish(
    root: Partitions,
    staged: Sequence[StagedFile],
    publication: Publication | None = None,
    *,
    batches: Sequence[tuple[StagedPartition, EncodedBatch]] = (),
    conditions: Sequence[tuple[PartitionLog, AppendCondition]] = (),
    offsets: GroupOffsets | None = None,
    durability: str | None = None,
    timeout: float | None = None,
    restart: bool = False,
    report: Callable[[Sequence[PublishedBatches]], object] | None = None,
) -> PublishResult:
    """Make staged batches part of the log: in all their partitions at once, or in none.

    The caller may remove the staged files when this returns or raises.

    Args:
        root: The log that they were staged for.
        staged: The files; in each partition, the batches are in their order.
        publication: The application and its version; without it a repetition publishes again.
        batches: More batches, which follow those of the files and are in memory.
        conditions: What must be so, in partitions of these batches, before any is written.
        offsets: What a group commits with them; then all of it is flushed.
        durability: ``"os"`` or ``"fsync"``; that of the log by default.
        timeout: Seconds to wait for each partition; ``lock_timeout`` by default.
        restart: Let an application start over in topics that it has published to: what
            it published there before may then be published again.
        report: Called with what was written, once it is visible.

    Raises:
        RestartedApplicationError: The application started over in a topic that it has
            published to, and ``restart`` is not set.
        UnknownTopicOrPartitionError: A topic was deleted, or deleted and created again.
        CommitFailedError: The member does not own a partition of the offsets any more.
        ConflictError: A condition does not hold; nothing was published.
        RecordTooLargeError, InvalidRecordError: A topic does not allow a staged batch.
        LockTimeoutError: Another process holds a partition; ``pid`` says which.
        NotEnoughReplicasError: Too few copies of a partition are in sync.
        DiskFullError, StorageError: Nothing was published.
        DurabilityError: A flush failed, now or before; nothing was published.
        CorruptBatchError: A staged file is not as it was written.
    """
    context = root.context
    context.check_appendable()
    records = sum(file.records for file in staged) + sum(batch.count for _, batch in batches)
    target = None
    if publication is not None:
        partitions = chain(*(file.partitions for file in staged), (where for where, _ in batches))
        topics = dict.fromkeys(publication.topics, "") | {
            topic_id: topic for topic, topic_id, _ in partitions
        }
        target = PublicationTarget(publication, topics, restart, records)
        if offsets is not None:
            # As with the ends, below: an attempt may have committed them.
            context.settle_offsets(offsets.group.key, offsets.rows, abort=False)
        # Also before the files are opened: they are gone if a caller repeats this call because
        # it did not see the result.
        before = _visible_version(context, target)
        if before is not None:
            return PublishResult(0, before)
    encoded = by_partition(root, staged, batches)
    if not encoded and publication is None and offsets is None:
        return PublishResult(0)
    for log, condition in conditions:
        condition.look_up(log)
    with publishing_conflicts(conditions), locked(context, encoded, timeout) as escalated:
        before = _visible_version(context, target) if target else None
        if before is not None:
            return PublishResult(0, before)
        synced = offsets is not None or (durability or context.durability) == "fsync"
        try:
            plans = []
            for log, of_log in encoded.items():
                with _descriptors(log, escalated):
                    plans.append(plan_partition(log, of_log, conditions, synced))
            before = _carry_out(context, plans, target, offsets, synced, escalated)
        except DiskFullError:
            context.reserve.mark_full()
            raise
    for log, appended in encoded.items():
        note_appended(log, appended)
    context.wake.advance()
    if before is not None:
        return PublishResult(0, before)
    if report is not None:
        report([plan.published(encoded[plan.log]) for plan in plans])
    return PublishResult(records)


def escalates(context: Context, logs: Collection[PartitionLog]) -> bool:
    """Whether a publication to so many partitions needs the lock of the log."""
    return _DESCRIPTORS * len(logs) > context.files.most_descriptors()


@contextmanager
def locked(
    context: Context, logs: Collection[PartitionLog], timeout: float | None
) -> Iterator[bool]:
    """Hold the locks of partitions; yield whether they escalated to that of the log."""
    timeout, escalated = context.lock_timeout if timeout is None else timeout, False
    log_lock: AbstractContextManager[object] = nullcontext()  # Who takes one lock need not wait.
    if len(logs) > 1:
        escalated = escalates(context, logs)
        log_lock = (context.log_lock.exclusive if escalated else context.log_lock.shared)(timeout)
    with log_lock, ExitStack() as locks:
        # In the order of the keys, as in every process: otherwise two could wait for each other.
        for log in logs:
            log.acquire(timeout, escalated=escalated)
            locks.callback(log.release)
            if escalated:
                log.close_files_locked()
        yield escalated


@contextmanager
def publishing_conflicts(
    conditions: Iterable[tuple[PartitionLog, AppendCondition]],
) -> Iterator[None]:
    """After a conflict, make visible what the conditions found; without the partitions' locks."""
    try:
        yield
    except ConflictError:
        for log, _ in conditions:
            publish_found(log, log.tail())
        raise


@contextmanager
def _descriptors(log: PartitionLog, escalated: bool) -> Iterator[None]:
    """Give the descriptors of a partition back after the body, if its lock escalated."""
    try:
        yield
    finally:
        if escalated:
            log.close_files_locked()


def by_partition(
    root: Partitions,
    staged: Sequence[StagedFile],
    batches: Sequence[tuple[StagedPartition, EncodedBatch]],
) -> dict[PartitionLog, list[EncodedBatch]]:
    """Return the batches of each partition, in the order of the partitions' keys."""
    by_key: dict[tuple[int, int], tuple[PartitionLog, list[EncodedBatch]]] = {}

    def partition_of(staged_partition: StagedPartition) -> PartitionLog:
        topic, topic_id, partition = staged_partition
        log = root.partition(topic, partition)
        if log.topic_id != topic_id:
            raise UnknownTopicOrPartitionError(
                "The topic was deleted and created again since this was staged",
                topic=topic,
                partition=partition,
                todo="Nothing was published.",
            )
        return log

    def schema_of(staged_partition: StagedPartition, version: int) -> TopicSchema | None:
        catalog = partition_of(staged_partition).context.catalog
        return catalog.schema(catalog.topic(staged_partition[0]), version)

    read = (staging.read(root.context.files, file, schema_of) for file in staged)
    for staged_partition, batch in chain(*read, batches):
        key = staged_partition[1:]
        if key not in by_key:
            by_key[key] = partition_of(staged_partition), []
        by_key[key][1].append(batch)
    return dict(by_key[key] for key in sorted(by_key))


# Whether it was published before


class PublicationTarget(NamedTuple):
    """A publication, and the topics that it writes to."""

    publication: Publication
    topics: dict[int, str]
    """Their names by id."""
    restart: bool
    records: int


def _visible_version(context: Context, target: PublicationTarget) -> AppVersion | None:
    """Return `_published_before`, and make that version visible if it is not yet."""
    # A commit whose process died may become visible only with the next commit.
    context.state.catch_up()
    before = context.state.read(lambda txn: _published_before(txn, target))
    if before is not None:
        # Its process may have died before it made the publication visible.
        context.live.catch_up()
        journal.finish_committed(context, [key for key, _, _ in before.ends])
    return before


def _published_before(txn: kv.Txn, target: PublicationTarget) -> AppVersion | None:
    """Return the version of this publication or of a later one; None if it is new.

    Raises:
        RestartedApplicationError: It is new, but another source has published
            under its name to one of its topics.
    """
    publication = target.publication
    versions = [
        (name, topic, version)
        for topic_id, topic in target.topics.items()
        for name in publication.names
        if (version := app_versions.get(txn, name, topic_id)) is not None
    ]
    comparable = [version for _, _, version in versions if version.source == publication.source]
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
    for name, topic, version in versions:
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


# Where it is written


def plan_partition(
    log: PartitionLog,
    encoded: list[EncodedBatch],
    conditions: Iterable[tuple[PartitionLog, AppendCondition]],
    synced: bool,
    in_live: bool = False,
) -> PartitionPlan:
    """Plan the segments of one partition; changes nothing, except that it rolls if that is due.

    With ``in_live`` it may follow transactions that wait for a checkpoint, and becomes visible
    with the next one if it is ``synced``.

    Raises:
        SegmentFullError: With ``in_live``: the batches do not fit into one segment.
    """
    tail = log.finish_locked(checkpoint=not in_live)
    if in_live and not synced and tail.high_watermark < tail.log_end_offset:
        tail = log.finish_locked()  # Otherwise a part of others would become visible with it.
    if tail.failed:
        raise log.flush_failed()
    log.check_replicas()
    for where, condition in conditions:
        if where.key == log.key:
            condition.check(log, tail)
    validation.check(log, encoded)
    active, fitted = log.active_segment, validation.in_current_schema(log, encoded)
    columns = roll.columns_of(*fitted)
    columns = columns._replace(
        headers=active.headers or columns.headers,
        tombstones=active.tombstones or columns.tombstones,
    )
    if columns.column_flags != active.column_flags or roll.is_due(
        log, log.active_file(), tail, fitted[0]
    ):
        # Before anything else: the roll is complete, whether or not the rest succeeds.
        tail = roll.roll(log, log.finish_locked(), columns, synced=synced)
    pending = PendingAppend(log, tail, publish=not (in_live and synced))
    segments = [SegmentPlan(log.active_segment, pending)]
    plan, file = PartitionPlan(log, tail, segments), log.active_file()
    for batch in fitted:
        batch = validation.with_columns_of(log, columns, batch)
        if roll.is_due(log, file, plan.after, batch):
            if in_live:
                raise SegmentFullError
            segments.append(_plan_next_segment(log, plan.after, columns))
        segments[-1].pending.add(batch)
    return plan


def _plan_next_segment(log: PartitionLog, tail: Tail, columns: SegmentInfo) -> SegmentPlan:
    number = log.context.state.write(lambda txn: catalog.next_number(txn, "segment"))
    created_ms = tails.creation_time(tail, log.context.clock())
    info = SegmentInfo(tail.log_end_offset, number, created_ms, dense=True)
    info = roll.with_columns(info, columns)
    start = len(roll.head_of(log, info))
    return SegmentPlan(info, PendingAppend(log, roll.tail_of_new(tail, info, start), publish=True))


# Carrying it out


def _carry_out(
    context: Context,
    plans: list[PartitionPlan],
    target: PublicationTarget | None,
    offsets: GroupOffsets | None,
    synced: bool,
    escalated: bool,
) -> AppVersion | None:
    """Write the planned batches, commit, and make them visible.

    If another run has published this version meanwhile, undo it and return that version.
    """
    clocks = app_versions.ClockState(
        context.files.boot_id(), context.files.uptime_ms(), context.clock()
    )
    try:
        number, prepared = context.state.write(lambda txn: _prepare(txn, plans, offsets))
        for plan in plans:
            with _descriptors(plan.log, escalated):
                files = _write(plan)
                if synced:
                    _flush(plan, files)
        entries = {}
        for plan, entry in zip(plans, prepared, strict=True):
            after, indexed = plan.after, plan.segments[-1].pending.entries
            if synced:
                flushed_ms = context.clock()
                after = after._replace(durable_offset=after.log_end_offset, flushed_ms=flushed_ms)
            entries[plan.log.key] = entry._replace(
                state=journal.COMMITTED, files=(), after=after.pack(), entries=index.pack(indexed)
            )
        group, rows = b"", dict[bytes, bytes]()
        if offsets is not None:
            group = offsets.group.key
            rows = offsets.group.announce(offsets.member, offsets.rows, number)
            # Their checkpoints must not be ahead of what earlier transactions wrote.
            context.take_checkpoint(context)
        producers = {plan.log.key: plan.log.remembered_producers() for plan in plans if synced}

        def commit(txn: kv.Txn) -> AppVersion | None:
            if target is not None:
                # Another run of it may have published to other partitions meanwhile.
                before = _published_before(txn, target)
                if before is not None:
                    return before
                elapsed_ms = app_versions.advance_clock(txn, clocks)
                _put_app_versions(txn, target, plans, clocks.time_ms, elapsed_ms)
                if number % app_versions.CHECK_INTERVAL == 0:
                    app_versions.expire(txn, elapsed_ms)
            for plan in plans:
                _put_partition(txn, plan, entries[plan.log.key], producers.get(plan.log.key))
            if offsets is not None:
                group_offsets.commit(txn, group, rows, number)
            return None

        before = context.state.write(commit)
        if before is None:
            moved = entries.items(), number, group, rows
            context.live.write(lambda txn: journal.make_visible(txn, *moved))
            return None
    except BaseException:
        _resolve(context, plans, offsets, escalated)
        raise
    _resolve(context, plans, offsets, escalated)
    return before


def _put_app_versions(
    txn: kv.Txn,
    target: PublicationTarget,
    plans: list[PartitionPlan],
    time_ms: int,
    elapsed_ms: int,
) -> None:
    publication = target.publication
    version = AppVersion(
        publication.version,
        publication.source,
        publication.run,
        target.records,
        time_ms,
        elapsed_ms,
        tuple(plan.end for plan in plans),
    )
    if version.source:
        app_versions.put(txn, version.source, app_versions.ANY_TOPIC, version)
    ends: dict[int, list[tuple[bytes, int, int]]] = {topic_id: [] for topic_id in target.topics}
    for plan in plans:
        ends[plan.log.topic_id].append(plan.end)
    for topic_id, of_topic in ends.items():
        for name in publication.names:
            app_versions.put(txn, name, topic_id, version._replace(ends=tuple(of_topic)))


def _prepare(
    txn: kv.Txn, plans: list[PartitionPlan], offsets: GroupOffsets | None
) -> tuple[int, list[JournalEntry]]:
    """Write the prepared journal entries; return them, and the number of the publication."""
    number = catalog.next_number(txn, "publication")
    keys, entries = tuple(plan.log.key for plan in plans), []
    group = b"" if offsets is None else offsets.group.key
    if offsets is not None:
        live = offsets.group.context.live
        group_offsets.prepare(txn, live, group, offsets.rows, number, keys)
    for plan in plans:
        files = tuple((segment.info.base_offset, segment.info.id) for segment in plan.segments[1:])
        before = journal.end_of(plan.before)
        entry = JournalEntry(number, journal.PREPARED, before, keys, files, group=group)
        journal.JOURNAL.put(txn, plan.log.key, value=entry)
        entries.append(entry)
    return number, entries


def _write(plan: PartitionPlan) -> list[SegmentFile]:
    """Write past the end of the active segment, and into the new files after it."""
    log, files = plan.log, []
    for segment in plan.segments:
        if segment is plan.segments[0]:
            file = log.file_at(plan.before)
        else:
            head = roll.head_of(log, segment.info)
            file = create(log.context.files, log.path_of(segment.info), head)
            assert file.size() == segment.pending.position
        end = file.write(segment.pending.buffers, segment.pending.position)
        if segment is not plan.segments[-1]:
            file.seal(segment.pending.position + end)
        files.append(file)
    return files


def _flush(plan: PartitionPlan, files: list[SegmentFile]) -> None:
    """Put all of it on the disk, with what was written before it.

    Raises:
        DurabilityError: The active segment or a name could not be flushed: that is final.
        StorageError: A new file could not be flushed; nothing is lost, since it is not named.
    """
    sync_files(plan.log, plan.before, files[0])
    for file in files[1:]:
        try:
            file.sync()
        except DurabilityError as error:
            raise StorageError(error.what, **error.facts) from error
    if len(files) > 1:
        sync_entries(plan.log, plan.segments[-1].info.id)


def _put_partition(
    txn: kv.Txn,
    plan: PartitionPlan,
    entry: JournalEntry,
    producers: dict[int, ProducerState] | None,
) -> None:
    """Write the rows of a partition; ``producers`` if it was flushed."""
    log, key = plan.log, plan.log.key
    active = plan.segments[0]
    for segment, following in pairwise(plan.segments):
        tail, entries = segment.pending.tail, segment.pending.entries
        if segment is active:
            before = log.context.live.read(lambda txn: index.entries(txn, key, active.info.id))
            entries = before + entries
        sealed = segment.info._replace(
            next_offset=tail.log_end_offset,
            size=tail.log_end_position + len(END_MARK),
            end_position=tail.log_end_position,
            max_timestamp=tail.timestamp,
            appended_ms=tail.appended_ms,
        )
        catalog.put_segment(txn, key, sealed)
        keyspace.SEGMENT_INDEXES.put(txn, key, *sealed.key, value=index.pack(entries))
        segment_statistics.put(txn, log, sealed, None)  # Housekeeping computes them.
        catalog.put_segment(txn, key, following.info)
    if producers is not None:
        put_recovery_point(txn, key, plan.after, producers)
    journal.JOURNAL.put(txn, key, value=entry)


def _resolve(
    context: Context, plans: list[PartitionPlan], offsets: GroupOffsets | None, escalated: bool
) -> None:
    """After a failure: undo what was prepared, or make visible what was committed."""
    if offsets is not None:
        with suppress(EmbedlogError):
            context.settle_offsets(offsets.group.key, offsets.rows)
    for plan in plans:
        # If the disk refuses even this, the next writer reads the journal and does it.
        with suppress(EmbedlogError), _descriptors(plan.log, escalated):
            plan.log.resolve_publication()


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
