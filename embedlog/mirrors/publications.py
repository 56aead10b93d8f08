"""Copies what a source knows of publications, so that a Spark query can continue at the copy.

A query that was killed repeats its last micro-batch, which the log recognises by its app versions.
Those of the source are rows of its `state`; they are copied here, for the copies and their ends.

Order: the records of a publication are copied first, and then its row, in one transaction that
checks that the topics are copies still.  So a row never speaks of records that the copy lacks.  If
the source is lost in between, the row is missing, and the query publishes that batch again.
"""

from __future__ import annotations

from embedlog import catalog, kv
from embedlog.catalog import TopicInfo
from embedlog.keyspace import PARTITION_KEY
from embedlog.publish import app_versions
from embedlog.publish.app_versions import ANY_TOPIC, APP_VERSIONS, AppVersion, ClockState
from embedlog.root.root import Root

_Rows = dict[tuple[str, int], AppVersion]
"""App versions by the application and the topic, as in their table."""


class PublicationCopier:
    """Copies the app versions of a log to another one that has copies of its topics.

    Args:
        source: The log that Spark publishes to.
        target: The log with the copies, at the same offsets.
    """

    def __init__(self, source: Root, target: Root) -> None:
        self._source, self._target = source, target
        self._copies: dict[int, TopicInfo] = {}
        """By the id of a topic of the source: its copy."""
        self._copied_version: int | None = None
        """The version of the source's `state` of which all is copied that can be."""

    def add(self, topic_id: int, copy: TopicInfo) -> None:
        """Copy app versions of a topic as well."""
        if self._copies.get(topic_id) != copy:
            self._copies[topic_id] = copy
            self._copied_version = None

    def copy(self) -> None:
        """Copy the rows of all publications whose records are in the copies by now."""
        version = self._source.context.state.version()
        if version == self._copied_version:
            return
        known: _Rows = self._source.context.state.read(self._rows_of_copies)
        complete = {key: row for key, row in known.items() if self._has_records(row)}
        state = self._target.context.state
        if complete and state.read(lambda txn: self._changed(txn, complete)):
            state.write(lambda txn: self._put(txn, complete))
        self._copied_version = version if len(complete) == len(known) else None

    def _rows_of_copies(self, txn: kv.Txn) -> _Rows:
        """Return the rows of the source, with the topics and partitions of the copies."""
        rows: _Rows = {}
        for (name, topic_id), row in APP_VERSIONS.scan_valid(txn):
            if topic_id not in (ANY_TOPIC, *self._copies) or app_versions.is_lost(txn, row):
                continue
            places = [(PARTITION_KEY.unpack(key), epoch, offset) for key, epoch, offset in row.ends]
            ends = tuple(
                (PARTITION_KEY.pack(self._copies[source_id].id, partition), epoch, offset)
                for (source_id, partition), epoch, offset in places
                if source_id in self._copies
            )
            if ends or not row.ends:
                copy_id = ANY_TOPIC if topic_id == ANY_TOPIC else self._copies[topic_id].id
                rows[name, copy_id] = row._replace(ends=ends)
        return rows

    def _has_records(self, row: AppVersion) -> bool:
        names = {copy.id: copy.name for copy in self._copies.values()}
        places = [(PARTITION_KEY.unpack(key), offset) for key, _, offset in row.ends]
        return all(
            self._target.partition(names[topic_id], partition).tail().log_end_offset >= offset
            for (topic_id, partition), offset in places
        )

    def _changed(self, txn: kv.Txn, rows: _Rows) -> _Rows:
        """Return the rows that the target does not have, with the leader epochs of the copies."""
        copies = {ANY_TOPIC}
        for copy in self._copies.values():
            now = catalog.find_topic(txn, copy.name)
            if now and (now.id, now.config.mirror_source) == (copy.id, copy.config.mirror_source):
                copies.add(copy.id)
        changed: _Rows = {}
        for key, row in rows.items():
            topics = {PARTITION_KEY.unpack(end[0])[0] for end in row.ends} | {key[1]}
            before = APP_VERSIONS.get(txn, *key)
            is_known = (
                before is not None
                and before.source == row.source
                and before.version >= row.version
                and not app_versions.is_lost(txn, before)
            )
            # After a failover the query counts on here.
            if topics <= copies and not is_known:
                ends = [(end[0], catalog.epochs(txn, end[0])[-1][0], end[2]) for end in row.ends]
                changed[key] = row._replace(ends=tuple(ends))
        return changed

    def _put(self, txn: kv.Txn, rows: _Rows) -> None:
        context = self._target.context
        clocks = ClockState(context.files.boot_id(), context.files.uptime_ms(), context.clock())
        elapsed_ms = app_versions.advance_clock(txn, clocks)
        for key, row in self._changed(txn, rows).items():
            APP_VERSIONS.put(txn, *key, value=row._replace(elapsed_ms=elapsed_ms))
        app_versions.expire(txn, elapsed_ms)
