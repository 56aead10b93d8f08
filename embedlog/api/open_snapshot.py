"""`open_snapshot`: the topics of a snapshot by its file, without the databases and locks of a log.

A view of a topic asks a root for the topic and its schemas, which the manifest has, and reads
batches, which `splits` finds in the files.  What needs the log itself raises an error.
"""

from __future__ import annotations

import os
import time
from base64 import b64decode
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from embedlog.api.at import TopicsAt
from embedlog.api.offset_range import OffsetRange
from embedlog.api.topic import TopicView
from embedlog.api.typed_topic import TypedTopicView, no_bytes
from embedlog.catalog import TopicInfo
from embedlog.config import TopicConfig
from embedlog.errors import UnknownTopicOrPartitionError, UnsupportedFormatError
from embedlog.files.remote import plain_files
from embedlog.root.location import directory_of
from embedlog.root.root import Root
from embedlog.schemas.row_filter import RowFilter
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.snapshots import manifest
from embedlog.splits.read_slice import LogRoots, batch_rows
from embedlog.splits.slices import PartitionSlice, TopicVersions

if TYPE_CHECKING:
    from embedlog.batch import tables


class OpenSnapshot(TopicsAt):
    """The topics of a snapshot, read from its files alone; returned by `open_snapshot`.

    Views of its topics have frames, scans, SQL, datasets, splits and iteration.  Look-ups by key,
    time or row need the log.
    """

    def __init__(self, root: str, document: manifest.Json) -> None:
        self.root = root
        """The directory, or the URL, of the log or of the backup."""
        self._topics = document["topics"]
        self.name: str = document["name"]
        self.created_ms: int = document["created_ms"]
        """Milliseconds since 1970."""

    def topic(self, name: str, *, raw: bool = False) -> TopicView:
        """Return the records of a topic; see `Log.topic`.

        Raises:
            UnknownTopicOrPartitionError: The snapshot does not have it.
        """
        if name not in self._topics:
            raise UnknownTopicOrPartitionError("The snapshot does not have the topic", topic=name)
        fields = self._topics[name]
        if not fields["schema_version"]:
            return SnapshotFileView(self.root, name, fields, raw=raw)
        if raw:
            raise no_bytes(name)
        return TypedSnapshotFileView(self.root, name, fields)

    def __repr__(self) -> str:
        return f"<Snapshot {self.name} in {self.root}: topics {', '.join(self.topics())}>"


def open_snapshot(path: str | os.PathLike[str]) -> OpenSnapshot:
    """Open a snapshot by its file, ``snapshots/NAME.json`` of a log or of a backup.

    It is read with plain reads, without the log's databases and locks, so any host may do so that
    sees the files.  A snapshot of a log keeps them until it expires.

    Args:
        path: The path of the file, or its URL for fsspec, such as
            ``https://host/log/snapshots/report.json``.

    Raises:
        StorageError: It cannot be read; URLs need the extra ``embedlog[fsspec]``.
        CorruptionError, UnsupportedFormatError: It is no such file, or a newer one.
    """
    where = os.fspath(path)
    if "://" not in where or where.startswith("file://"):
        where = directory_of(path)
    directory, _, name = where.rpartition("/")
    root, _, folder = directory.rpartition("/")
    files = plain_files(root)
    try:
        return OpenSnapshot(root, manifest.read(files, f"{folder}/{name}"))
    finally:
        files.close_all()


class _TopicFiles:
    """What a view asks of the root of a log, by the manifest."""

    allow_pickle = False

    def __init__(self, name: str, fields: manifest.Json) -> None:
        partitions, config = len(fields["partitions"]), TopicConfig.parse(fields["config"])
        facts = fields["id"], partitions, fields["created_ms"], config, fields["schema_version"]
        self._info = TopicInfo(name, *facts)
        self.schemas = {
            int(version): TopicSchema.unpack(int(version), b64decode(packed))
            for version, packed in fields["schemas"].items()
        }
        self.context = self.catalog = self

    def topic(self, name: str) -> TopicInfo:
        return self._info

    def partitions(self, name: str) -> int:
        return self._info.partitions

    def schema(self, info: TopicInfo) -> TopicSchema | None:
        return self.schemas.get(info.schema_version)

    def version(self) -> int:
        return 0

    def clock(self) -> int:
        return time.time_ns() // 1_000_000

    def partition(self, name: str, number: int) -> NoReturn:
        raise UnsupportedFormatError(
            "A snapshot that is read from its file has neither look-ups nor slices",
            topic=name,
            todo="Read it as a frame, or use log.at(snapshot) where the log is.",
        )


class SnapshotFileView(TopicView[Any, Any]):
    """The records of a topic of bytes in a snapshot."""

    def __init__(
        self, directory: str, name: str, fields: manifest.Json, *, raw: bool = False
    ) -> None:
        topic = _TopicFiles(name, fields)
        self._root, self.name, self.raw = cast("Root", topic), name, raw
        self._directory, self._fields, self._known = directory, fields, None
        self._parts = [
            manifest.slice_of(name, number, partition)
            for number, partition in enumerate(fields["partitions"])
        ]
        self._ranges = [
            OffsetRange(part.partition, part.from_offset, part.until_offset) for part in self._parts
        ]
        self._versions: TopicVersions | None = None
        if (schema := topic.schema(topic.topic(name))) is not None:
            self._versions = TopicVersions(schema, topic.schemas)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._directory, self.name, self._fields)

    def _view(self, ranges: Sequence[OffsetRange]) -> NoReturn:
        self._root.partition(self.name, 0)
        raise AssertionError("unreachable")

    def _serializers(self) -> tuple[str, str]:
        serializers = super()._serializers()
        if "avro" in serializers:
            raise UnsupportedFormatError(
                "Avro is decoded with the registry of the log, which a snapshot's file has not",
                topic=self.name,
                todo="Read the bytes with topic(name, raw=True), or use log.at(snapshot).",
            )
        return serializers

    def _count(self, part: OffsetRange) -> int:
        whole = self._parts[part.partition]
        if whole.rows is not None:
            return whole.rows
        roots = LogRoots(self._directory)
        try:
            groups = batch_rows(roots, whole, self._versions)
            return sum(last - first for rows in groups for _, first, last in rows)
        finally:
            roots.close()

    def _has_headers(self) -> bool:
        return any(chunk.headers for part in self._parts for chunk in part.chunks)

    def _pruned(self, condition: RowFilter | None) -> TopicView:
        return self

    def _pushed(self, columns: list[str], pushed: Any) -> Iterator[Any]:
        return self.batches(columns, where=None if pushed is None else pushed.rows)

    def _slices(self, n: int) -> tuple[list[PartitionSlice], TopicVersions | None, str]:
        """Return a slice for each segment."""
        pieces = []
        for part in self._parts:
            segments = self._fields["partitions"][part.partition]["segments"]
            for chunk, segment in zip(part.chunks, segments, strict=True):
                start = max(part.from_offset, segment["base_offset"])
                end = segment["next_offset"] or part.until_offset
                rows = end - start if segment["dense"] and not chunk.tombstones else None
                pieces.append(
                    PartitionSlice(
                        *(self.name, part.partition, start, end, part.leader_epoch, (chunk,)),
                        *(chunk.end_position, rows, part.directories),
                    )
                )
        return pieces, self._versions, self._directory

    def _reads(
        self, columns: object = None
    ) -> Iterator[tuple[OffsetRange, list[tables.BatchRows]]]:
        roots = LogRoots(self._directory)
        try:
            for part, offsets in zip(self._parts, self._ranges, strict=True):
                for rows in batch_rows(roots, part, self._versions):
                    yield offsets, rows
        finally:
            roots.close()

    def _title(self) -> str:
        return f"Topic {self.name} of a snapshot in {self._directory}"


class TypedSnapshotFileView(SnapshotFileView, TypedTopicView):  # type: ignore[misc]
    """The records of a typed topic in a snapshot."""
