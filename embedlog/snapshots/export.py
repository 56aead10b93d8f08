"""The rows of `state` that a restored log needs, besides those of segments.

The rows are as of the instant of the snapshot.  They are read in one transaction of `state`, in
which the tails are read in one of `live`: no publication commits in between.  So at most the last
version of an application is ahead of the records, when its publication was not visible yet, and
the restored log takes that for lost, and publishes it again (`app_versions.is_lost`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from embedlog import keyspace, kv
from embedlog.catalog import TopicInfo
from embedlog.errors import IllegalStateError
from embedlog.groups.offsets import CHECKPOINTS, COMMITTED
from embedlog.keyspace import PENDING_OFFSETS, UNSAVED_OFFSETS, Table
from embedlog.partition import producer_state
from embedlog.partition.tail import Tail
from embedlog.record import TopicPartition
from embedlog.root.root import NotRecoveredError, Root

Tails = Mapping[TopicPartition, Tail | None]

_ATTEMPTS = 20
"""How often partitions are recovered before the instant of a backup."""
_LEFT_OUT = (
    # What the manifest has of each topic.
    *(keyspace.TOPICS, keyspace.SCHEMAS, keyspace.SEGMENTS, keyspace.SEGMENT_INDEXES),
    *(keyspace.SEGMENT_STATISTICS, keyspace.PARTITIONS, keyspace.LEADER_EPOCHS),
    # What is only about files and directories of this log, or not done yet.
    *(keyspace.UNCOMMITTED_FILES, keyspace.JOURNAL, keyspace.OFFSET_JOURNAL, keyspace.LOG_LOCKED),
    keyspace.ROLLBACK_POINTS,
    *(keyspace.DELETED_TOPICS, keyspace.DIRECTORIES, keyspace.ASSIGNMENTS, keyspace.SNAPSHOTS),
    *(keyspace.METADATA_EPOCHS, keyspace.METADATA_VERSION),
)
_LETTERS = {table.letter for table in _LEFT_OUT}


class StateExport:
    """The rows of `state` that a backup has, as of the instant of its snapshot."""

    def __init__(self, root: Root, topics: Sequence[TopicInfo]) -> None:
        self._root, self._topics = root, topics
        self._keys = {info.name: info.key for info in topics}
        self.rows: dict[bytes, bytes] = {}

    def run(self, capture: Callable[[], Tails]) -> Tails:
        """Read the rows, and the tails, in one transaction of `state`."""

        def step(txn: kv.Txn) -> Tails:
            self.rows = {key: row for key, row in kv.rows(txn, b"") if key[:1] not in _LETTERS}
            return capture()

        for _ in range(_ATTEMPTS):
            self._root.tails(self._topics)
            with suppress(NotRecoveredError):
                return self._root.context.state.write(step)
        raise IllegalStateError("Partitions are truncated again and again", path=self._root.path)

    def note(self, txn: kv.Txn, tails: Tails) -> None:
        """Read the committed offsets and the producers in a transaction of `live`."""
        # Those of a publication that is not visible yet are saved already.
        for key in (*UNSAVED_OFFSETS.keys(txn), *PENDING_OFFSETS.keys(txn)):
            self.rows.pop(CHECKPOINTS.key(*key), None)
        for key, committed in COMMITTED.scan(txn):
            self._put(CHECKPOINTS, key, committed)
        for (topic, number), tail in tails.items():
            if tail is not None:
                partition = self._keys[topic](number)
                producers = producer_state.active_since(txn, partition, 0)
                self._put(producer_state.SNAPSHOTS, (partition,), producers)

    def _put(self, table: Table[Any], key: tuple[Any, ...], value: Any) -> None:
        packed = table.key(*key)
        self.rows[packed] = table.dump(packed, value)
