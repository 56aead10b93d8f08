"""The manifest of a snapshot: a JSON file by which its records are read without the log.

It has the topics with their settings and schemas, and, for each partition, the offsets, the
leader epochs, and the segment files: which bytes of them belong to the snapshot, and what their
rows in `state` say.  Bytes are in base64.  docs/format.md describes the fields.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog import catalog, keyspace, kv
from embedlog.catalog import SegmentInfo, TopicInfo
from embedlog.checksum import crc32c
from embedlog.errors import (
    CorruptionError,
    UnknownTopicOrPartitionError,
    UnsupportedFormatError,
)
from embedlog.files import Files
from embedlog.files.paths import MANIFESTS
from embedlog.keyspace import FORMAT_VERSION
from embedlog.partition.tail import Tail
from embedlog.record import TopicPartition
from embedlog.root.root import Root
from embedlog.segment import path_of as segment_path
from embedlog.splits.slices import FileChunk, PartitionSlice

if TYPE_CHECKING:
    from embedlog.snapshots.snapshot import Snapshot

Json = dict[str, Any]
FORMAT = 1
"""Of the manifest."""


class SnapshotTopic(NamedTuple):
    """A topic in a snapshot."""

    id: int
    schema_version: int
    """The current version of its schema; 0 for a topic of bytes."""
    ranges: tuple[tuple[int, int], ...] = ()
    """The first offset of each partition, and the one after its last."""


def path_of(name: str) -> str:
    """Return the path of the manifest of a snapshot, relative to the root."""
    return f"{MANIFESTS}/{name}.json"


def write(files: Files, name: str, document: Json) -> None:
    """Write a manifest, durably and as a whole."""
    if not files.exists(MANIFESTS):
        files.make_directory(MANIFESTS)
        files.sync_directory("")
    sealed = {**document, "crc": _crc(document)}
    files.write_file(path_of(name), json.dumps(sealed, indent=1).encode())


def _crc(document: Json) -> int:
    return crc32c(json.dumps(document, indent=1).encode())


def remove(files: Files, name: str) -> None:
    """Remove a manifest, durably; it may be missing."""
    if files.exists(path_of(name)):
        files.unlink(path_of(name), missing_ok=True)
        files.sync_directory(MANIFESTS)


def describe(root: Root, snapshot: Snapshot, tails: Mapping[TopicPartition, Tail | None]) -> Json:
    """Return the manifest of a snapshot, whose records are held.

    Args:
        root: The open log.
        snapshot: The snapshot.
        tails: The tails of its partitions, as of its instant.

    Raises:
        UnknownTopicOrPartitionError: A topic was deleted meanwhile.
    """

    def step(txn: kv.Txn) -> Json:
        topics = {}
        for name, topic in snapshot.topics.items():
            info = catalog.find_topic(txn, name)
            if info is None or info.id != topic.id:
                raise UnknownTopicOrPartitionError("The topic was just deleted", topic=name)
            schemas = keyspace.SCHEMAS.scan(txn, info.id)
            topics[name] = {
                "id": info.id,
                "created_ms": info.created_ms,
                "config": info.config.overrides(),
                "schema_version": topic.schema_version,
                "schemas": {version: text_of(packed) for (_, version), packed in schemas},
                "partitions": [
                    _partition(root, txn, info, number, part, tails[TopicPartition(name, number)])
                    for number, part in enumerate(topic.ranges)
                ],
            }
        return topics

    return {
        "format": FORMAT,
        "root_format": FORMAT_VERSION,
        "log_id": root.id,
        "name": snapshot.name,
        "created_ms": snapshot.created_ms,
        "expires_ms": snapshot.expires_ms,
        "topics": root.context.state.read(step),
    }


def _partition(
    root: Root, txn: kv.Txn, info: TopicInfo, number: int, part: tuple[int, int], tail: Tail | None
) -> Json:
    """Return what the manifest says of a partition."""
    key, (start, end) = info.key(number), part
    segments: list[Json] = []
    for segment in catalog.segments_between(txn, key, start, end) if start < end else ():
        assert tail is not None
        if segment.id == tail.segment_id:
            # Whatever became of it since: it ends where the snapshot does.
            segment = segment._replace(
                next_offset=None, size=0, end_position=tail.high_watermark_position
            )
        statistics = keyspace.SEGMENT_STATISTICS.get(txn, key, *segment.key)
        path = segment_path(info.directory, number, segment.file_name)
        segments.append({"path": path, **segment._asdict(), "statistics": text_of(statistics)})
    paths = [segment["path"] for segment in segments[-1:]]
    return {
        "start_offset": start,
        "end_offset": end,
        "leader_epoch": 0 if tail is None else tail.leader_epoch,
        "created_ms": info.created_ms if tail is None else tail.created_ms,
        "appended_ms": 0 if tail is None else tail.appended_ms,
        "epochs": [epoch for epoch in catalog.epochs(txn, key) if epoch[1] <= end],
        "directories": list(root.context.files.directories_of(paths[0])) if paths else [],
        "segments": segments,
    }


def read(files: Files, path: str) -> Json:
    """Return a manifest.

    Raises:
        StorageError: It cannot be read.
        CorruptionError: It is none, or damaged.
        UnsupportedFormatError: A newer version of embedlog wrote it.
    """
    data = files.read_file(path)
    try:
        document: Json = json.loads(data)
        found = document["format"], document["root_format"]
    except (ValueError, TypeError, LookupError) as error:
        raise CorruptionError(
            "This is not the manifest of a snapshot",
            path=files.path(path),
            todo="Pass the path of a file NAME.json in a directory snapshots.",
        ) from error
    if found != (FORMAT, FORMAT_VERSION):
        raise UnsupportedFormatError(
            f"The manifest has the formats {found}, and this embedlog knows "
            f"{(FORMAT, FORMAT_VERSION)}",
            path=files.path(path),
            todo="Use the version of embedlog that wrote it.",
        )
    if document.pop("crc", None) != _crc(document):
        raise CorruptionError("The manifest is not as it was written", path=files.path(path))
    return document


def slice_of(topic: str, number: int, partition: Json) -> PartitionSlice:
    """Return where the records of a partition are."""
    chunks = tuple(
        FileChunk(
            *(each["path"], each["next_offset"] is not None, each["headers"], 0),
            *(each["end_position"], each["schema_version"], each["tombstones"]),
        )
        for each in partition["segments"]
    )
    start, end = partition["start_offset"], partition["end_offset"]
    dense = all(each["dense"] and not each["tombstones"] for each in partition["segments"])
    return PartitionSlice(
        *(topic, number, start, end, partition["leader_epoch"], chunks),
        *(sum(chunk.end_position for chunk in chunks), end - start if dense else None),
        tuple(partition["directories"]),
    )


def segment_of(fields: Json) -> SegmentInfo:
    """Return the row of a segment, as `describe` noted it."""
    return SegmentInfo(**{name: fields[name] for name in SegmentInfo._fields})


def text_of(data: bytes | None) -> str | None:
    """Return bytes as text."""
    return None if data is None else b64encode(data).decode()
