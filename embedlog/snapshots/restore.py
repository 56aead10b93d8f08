"""Logs that are made of a backup, or, as a clone, of a snapshot of another log.

In order: a mark in the new directory says what it becomes; the segment files are made, each as a
whole; the database `state` is made of the rows of the manifest; the format file makes the directory
a log; the indexes are built; and the mark is removed.  Before the format file nobody can open the
directory, and the same call continues after a kill: a file that is there is compared.

Each partition begins a leader epoch at its end, as after a recovery that may have lost records:
what the rows say of publications and readers past it no longer counts.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable
from contextlib import closing

from embedlog import catalog, keyspace, kv
from embedlog.catalog import PARTITIONS, PartitionInfo, SegmentInfo, TopicInfo, check_topic_name
from embedlog.config import TopicConfig
from embedlog.errors import IllegalStateError, NotALogError, UnknownSnapshotError
from embedlog.files import Files
from embedlog.files.paths import FORMAT_FILE
from embedlog.partition import leader_epochs
from embedlog.root.root import Root, write_format
from embedlog.segment import path_of as segment_path
from embedlog.snapshots import backup, manifest
from embedlog.snapshots.manifest import Json

MARK = "restoring"
"""Its name makes the directory one that holds other files, so no log is created there."""
_TIMEOUT = 10.0

Finish = Callable[[], None]
"""Opens the directory, once it is a log, and builds the indexes of its segments."""
MakeFile = Callable[[Files, str, Json], None]
"""Makes the file of a segment of a manifest in a new log, at a path."""


def find(source: Files, at_ms: int | None) -> Json:
    """Return the manifest of the last backup, or of the last one at or before a time.

    Raises:
        UnknownSnapshotError: There is none.
    """
    for name in reversed(backup.backups(source)):
        document = manifest.read(source, manifest.path_of(name))
        # A snapshot of a log may have such a name.
        if "files" in document and (at_ms is None or document["created_ms"] <= at_ms):
            return document
    raise UnknownSnapshotError(
        "There is no backup" if at_ms is None else "There is no backup of that time or earlier",
        path=source.path(""),
        todo="Name the target of a backup that was completed.",
    )


def restore(source: Files, document: Json, target: Callable[[], Files], finish: Finish) -> None:
    """Make a log of a backup; see `embedlog.restore`."""

    def copy(files: Files, new_path: str, segment: Json) -> None:
        size, checksum = document["files"][segment["path"]]
        backup.copy_file(source, files, segment["path"], new_path, size, expected=checksum)

    make_log(document, target, copy, finish)


def clone(root: Root, target: Callable[[], Files], finish: Finish) -> None:
    """Make a log of another one, whose sealed segments it shares; see `Log.clone`."""
    source = root.context.files

    def share(files: Files, new_path: str, segment: Json) -> None:
        size, sealed = backup.bytes_of(segment), segment["next_offset"] is not None
        if files.exists(new_path):  # A killed call may have linked or copied it.
            files.unlink(new_path)
        backup.make_directories(files, new_path)
        if root.replicated:  # Their copies may be mended in place.
            backup.copy_file(source, files, segment["path"], new_path, size)
        elif not sealed or not files.hard_link(source.path(segment["path"]), new_path):
            with source.opened(segment["path"]) as fd:
                shared = files.copy_on_write(fd, new_path, size)
            if not shared:
                backup.copy_file(source, files, segment["path"], new_path, size)

    with backup.held(root) as document:
        make_log(document, target, share, finish)


def make_log(
    document: Json, target: Callable[[], Files], make_file: MakeFile, finish: Finish
) -> None:
    """Make a log in a new directory, or continue to.

    Args:
        document: The manifest.
        target: Returns the files of the directory, which exists.
        make_file: Makes the files of segments.
        finish: Finish the directory once it is a log.

    Raises:
        NotALogError: The directory holds other files.
        IllegalStateError: There is a log.
    """
    files = target()
    try:
        _begin(files, document)
        if not files.exists(FORMAT_FILE):
            for directory in ("topics", "locks"):
                files.make_directory(directory)
            for name, topic in document["topics"].items():
                directory = f"topics/{check_topic_name(name)}-{topic['id']}"
                for number, partition in enumerate(topic["partitions"]):
                    for segment in partition["segments"]:
                        file_name = manifest.segment_of(segment).file_name
                        make_file(files, segment_path(directory, number, file_name), segment)
            files.sync_directory("")
            _make_state(files, document)
            write_format(files)
        finish()
        for name in files.list(""):
            if name.startswith(MARK):
                files.unlink(name)
    finally:
        files.close_all()


def _begin(files: Files, document: Json) -> None:
    """Mark the directory, unless it is marked."""
    text = json.dumps({name: document[name] for name in ("log_id", "name", "created_ms")}).encode()
    names = files.list("")
    if MARK in names:
        if files.exists(FORMAT_FILE) or files.read_file(MARK) == text:
            return
    elif FORMAT_FILE in names:
        raise IllegalStateError(
            "There is a log here already", path=files.root, todo="Name a new or empty directory."
        )
    elif [name for name in names if not name.startswith(MARK)]:
        raise NotALogError(
            "The directory holds other files",
            path=files.root,
            todo="Name a new or empty directory.",
        )
    files.write_file(MARK, text)


def _make_state(files: Files, document: Json) -> None:
    # One that is there is not complete, or not of this call.
    kv.discard(files, "state")
    kv.create(files, "state", durable=True, rows={})
    with closing(kv.LmdbStore(files, "state", durable=True, timeout=_TIMEOUT)) as store:
        store.write(lambda txn: _put_rows(txn, document))


def _put_rows(txn: kv.Txn, document: Json) -> None:
    for key, row in document["rows"]:
        txn.put(b64decode(key), b64decode(row))
    for name, fields in document["topics"].items():
        config = TopicConfig.parse(fields["config"])
        facts = fields["id"], len(fields["partitions"]), fields["created_ms"], config
        info = TopicInfo(name, *facts, fields["schema_version"])
        info.put(txn)
        for version, packed in fields["schemas"].items():
            keyspace.SCHEMAS.put(txn, info.id, int(version), value=b64decode(packed))
        for number, partition in enumerate(fields["partitions"]):
            _put_partition(txn, info, info.key(number), partition)


def _put_partition(txn: kv.Txn, info: TopicInfo, key: bytes, partition: Json) -> None:
    end, segment = partition["end_offset"], None
    for fields in partition["segments"]:
        segment = manifest.segment_of(fields)
        if segment.sealed:
            catalog.put_segment(txn, key, segment)
            if fields["statistics"] is not None:
                statistics = b64decode(fields["statistics"])
                keyspace.SEGMENT_STATISTICS.put(txn, key, *segment.key, value=statistics)
        else:
            catalog.put_segment(txn, key, segment._replace(end_position=0))
    if segment is None or segment.sealed:
        number, created_ms = catalog.next_number(txn, "segment"), partition["created_ms"]
        new = SegmentInfo(end, number, created_ms, dense=True, schema_version=info.schema_version)
        catalog.put_segment(txn, key, new)
    epoch = partition["leader_epoch"] + 1
    state = PartitionInfo(partition["start_offset"], end, epoch, partition["appended_ms"], end)
    PARTITIONS.put(txn, key, value=state)
    keyspace.LEADER_EPOCHS.put(txn, key, value=[(e, offset) for e, offset in partition["epochs"]])
    leader_epochs.put(txn, key, epoch, end)
