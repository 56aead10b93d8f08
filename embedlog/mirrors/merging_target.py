"""A log root as the target of a mirror that merges: topics that others write to, too.

Records are appended, so their offsets are others than at the source, and a header of each says
over which sites it came (`hops`).  A row of `MIRROR_POSITIONS` says from time to time how far the
mirror was when the log had an offset, after everything below that was flushed.  Killed at any
instant, the next mirror reads from that offset on: the rest of its position is the last record
of the source in a batch that a mirror wrote (`MERGED`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from time import monotonic
from typing import Any, NamedTuple

from embedlog import keyspace
from embedlog.batch import (
    EXPLICIT_OFFSETS,
    LOG_APPEND_TIME,
    MERGED,
    BatchLimits,
    EncodedBatch,
    PlacedBatch,
)
from embedlog.batch.add_headers import to_batch
from embedlog.batch.wire import headers_type, schema, timestamp_type
from embedlog.config import TopicConfig
from embedlog.errors import MirrorConflictError, OffsetOutOfRangeError
from embedlog.hints import Hint
from embedlog.lazy import np, pa
from embedlog.mirrors.avro_ids import prepare_schemas
from embedlog.mirrors.ends import Fetch, MirrorPosition, MirrorSource, SourceTopic
from embedlog.mirrors.hops import Hop, Place, last_hop, with_hop
from embedlog.mirrors.mirrored_topic import source_name
from embedlog.mirrors.root_target import LogTarget, hold_topic_lock
from embedlog.partition import PartitionLog, flush
from embedlog.producer.row_batches import ColumnRows, batches_by_partition
from embedlog.root.root import Root
from embedlog.schemas.evolution import convert
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.statistics import text_columns_of
from embedlog.schemas.typed_batch import TypedBatch

_CHECKPOINT_SECONDS = 5.0
_NO_EPOCH = -1


class MergedPosition(NamedTuple):
    """How far a mirror was when the log had an offset."""

    offset: int
    leader_epoch: int
    target_offset: int
    target_epoch: int
    """The leader epoch of the log; a truncation below the offset since makes the row invalid."""


POSITIONS = keyspace.MIRROR_POSITIONS.typed(MergedPosition)


class DecodedRows(NamedTuple):
    """The rows of a batch of the source."""

    columns: Any
    offsets: Any
    """Those at the source."""
    codec: str
    schema: Any
    merged: bool
    """Whether a mirror wrote them."""


class MergingTarget(LogTarget):
    """A log root to append to.

    Args:
        root: As `LogTarget`.
        durability: As `LogTarget`.
        relay: Whether to copy records that came to the source from other sites.
    """

    def __init__(self, root: Root, durability: str | None = None, *, relay: bool = False) -> None:
        super().__init__(root, durability)
        self._relay = relay
        self._source_id = ""
        self._topics: dict[str, SourceTopic] = {}
        self._positions: dict[tuple[str, int], MirrorPosition] = {}
        self._stored_at: dict[tuple[str, int], float] = {}
        self._locks = ExitStack()

    # Topics

    def prepare(self, topic: SourceTopic, name: str, source: MirrorSource) -> bool:
        """Create the topic, or see that it can take the records; see `MirrorTarget.prepare`.

        The settings of a topic that exists stay as they are: both sites own it.

        Raises:
            MirrorConflictError: It is a copy, or has other columns.
            LockTimeoutError: Another mirror copies from the same source to it.
        """
        root = self.root
        self._source_id = source.site_id
        info = root.topics().get(name)
        if topic.path or (info is not None and info.config.mirror_source):
            raise MirrorConflictError(
                "A topic that is a copy cannot be merged with others",
                topic=name,
                todo="Merge the topics that they are copies of.",
            )
        if info is None:
            config, columns = TopicConfig.parse(topic.config), None
            if topic.schemas:
                columns = topic.schemas[-1]
            info = root.create_topic(name, topic.partitions, config, columns, typed_defaults=False)
        if info.partitions < topic.partitions:
            root.grow_topic(name, topic.partitions)
        own = root.context.catalog.schema(info)
        theirs = topic.schemas[-1] if topic.schemas else None
        if (own is None) is not (theirs is None) or (
            own is not None and theirs is not None and not own.has_columns_of(theirs)
        ):
            raise MirrorConflictError(
                "The topic has other columns than at the source",
                topic=name,
                todo=Hint(
                    "Give both topics the same schema with alter_topic.",
                    "Give both topics the same schema with a Python program.",
                ),
            )
        if name not in self._topics:
            lock = f"{source.site_id} into {info.id}"
            self._locks.enter_context(hold_topic_lock(root, lock, name, source.address))
        elif self._topics[name].id != topic.id:
            for partition in range(info.partitions):
                self._positions.pop((name, partition), None)
        self._schema_ids[name] = prepare_schemas(root, topic, name, own=True)
        self._topics[name] = topic
        return True

    # Records

    def position(self, name: str, partition: int) -> MirrorPosition | None:
        """Return the offset after the last record of the source that the log has."""
        log, source = self._visible_log(name, partition), self._source(name, partition)
        stored = POSITIONS.get(self.root.context.state, log.key, self._row_of(name))
        start, found = log.start_offset(), None
        try:
            first, epoch = (start, None) if stored is None else stored[2:]
            reader = log.reader(max(start, first), epoch)
        except OffsetOutOfRangeError:
            # The log was truncated since, so what it has of the source must be looked for.
            reader, stored = log.reader(start), None
        while batches := reader.read():
            last = last_hop(batches, source)
            if found is None or (last is not None and last.offset > found.offset):
                found = last
        if found is not None and (stored is None or found.offset >= stored.offset):
            position = MirrorPosition(found.offset + 1, found.leader_epoch)
        elif stored is not None:
            known = None if stored.leader_epoch == _NO_EPOCH else stored.leader_epoch
            position = MirrorPosition(stored.offset, known)
        else:
            return None
        self._positions[name, partition] = position
        return position

    def append(self, name: str, partition: int, fetch: Fetch) -> int:
        """Append the records that were at no site before, or not at this one."""
        log = self._log(name, partition)
        encoded = list(self._merged(log, name, partition, fetch))
        # Unknown until all of it is appended: an append of several batches may fail between two.
        self._positions.pop((name, partition), None)
        if encoded:
            receipts = log.append(encoded, durability=self._durability)
            for listener in self.root.listeners.of(log.config, self._client):
                for receipt, batch in zip(receipts, encoded, strict=True):
                    listener.written(log, receipt, batch, None)
        self._positions[name, partition] = MirrorPosition(fetch.next_offset, fetch.leader_epoch)
        now = monotonic()
        if now - self._stored_at.setdefault((name, partition), now) >= _CHECKPOINT_SECONDS:
            self._store(name, partition)
        return sum(batch.count for batch in encoded)

    def _merged(
        self, log: PartitionLog, name: str, partition: int, fetch: Fetch
    ) -> Iterator[EncodedBatch]:
        """Yield what is appended: with a header, and without what must not be sent.

        Small batches become large ones, since the offsets are others anyway.
        """
        decoded = (self._decoded(name, placed) for placed in fetch.batches)
        here = Place.of(self.root.id, str(log.topic_id), partition)
        for (codec, target, merged), run in groupby(
            decoded, key=lambda rows: (rows.codec, rows.schema, rows.merged)
        ):
            parts = list(run)
            rows = pa.Table.from_batches([part.columns for part in parts], target).combine_chunks()
            if not rows.num_rows:
                continue
            rows = with_hop(
                rows.to_batches()[0],
                "headers" if log.schema is None else "_headers",
                np.concatenate([part.offsets for part in parts]),
                Hop(*self._source(name, partition), fetch.leader_epoch, 0),
                here,
                merged=merged,
                relay=self._relay,
            )
            if rows.num_rows:
                rows = pa.RecordBatch.from_arrays(rows.columns, schema=target)
                yield from self._encoded(log, rows, codec)

    def _decoded(self, name: str, placed: PlacedBatch) -> DecodedRows:
        """Return the rows of a batch as they are stored here, with a column of headers."""
        batch, schemas = placed.batch, self._topics[name].schemas
        merged = bool(batch.flags & MERGED)
        stored = to_batch(batch)
        columns = stored.columns(stored.layout.names, verify=False)
        offsets = np.arange(placed.offset, placed.offset + batch.count)
        if batch.flags & EXPLICIT_OFFSETS:
            last = columns.num_columns - 1
            offsets = np.asarray(columns.column(last))
            columns = columns.select(columns.schema.names[:last])
        if isinstance(batch, TypedBatch):
            assert batch.schema is not None
            current = schemas[-1]
            target = segment_schema(current, headers=True, tombstones=batch.has_tombstones)
            columns = convert(columns, batch.schema, current, target)
            return DecodedRows(columns, offsets, stored.codec, target, merged)
        ids = self._schema_ids[name]
        arrays = (columns if ids is None else ids.of_columns(columns)).columns
        if not batch.has_headers:
            arrays.append(pa.nulls(batch.count, headers_type()))
        if batch.flags & LOG_APPEND_TIME:
            arrays[0] = pa.array(np.full(batch.count, batch.max_timestamp), timestamp_type())
        target = schema(headers=True)
        columns = pa.RecordBatch.from_arrays(arrays, schema=target)
        return DecodedRows(columns, offsets, stored.codec, target, merged)

    def _encoded(self, log: PartitionLog, rows: Any, codec: str) -> Iterator[EncodedBatch]:
        limits = BatchLimits(log.config.max_message_bytes, log.config.segment_bytes)
        if log.schema is not None:
            rows = ColumnRows(rows, pa.nulls(rows.num_rows, pa.binary()), log.schema)
        statistics = text_columns_of(log.config)
        for _, batch in batches_by_partition(rows, None, limits, codec, statistics):
            batch.set_merged()
            yield batch

    def skip_to(self, name: str, partition: int, offset: int) -> None:
        """Continue where the source begins now."""
        self._positions[name, partition] = MirrorPosition(offset)
        self._store(name, partition)

    def _store(self, name: str, partition: int) -> None:
        """Note the position, as of the end of the log."""
        log, position = self._log(name, partition), self._positions[name, partition]
        # Read before the flush: other programs append, too.
        tail = log.tail()
        flush.flush_up_to(log, tail.log_end_offset)
        epoch = _NO_EPOCH if position.leader_epoch is None else position.leader_epoch
        row = MergedPosition(position.offset, epoch, tail.log_end_offset, tail.leader_epoch)
        self.root.context.state.write(
            lambda txn: POSITIONS.put(txn, log.key, self._row_of(name), value=row)
        )
        self._stored_at[name, partition] = monotonic()

    def _row_of(self, name: str) -> str:
        """Return the name of the source in the rows: another one if its topic is made again."""
        return source_name(self._source_id, self._topics[name].id)

    def _source(self, name: str, partition: int) -> Place:
        return Place.of(self._source_id, self._topics[name].id, partition)

    # The end

    def flush(self) -> None:
        """Put what was written on the disk, and note all positions that are known."""
        for name, partition in self._stored_at.keys() & self._positions.keys():
            self._store(name, partition)

    def close(self) -> None:
        """Release the locks."""
        self._locks.close()
