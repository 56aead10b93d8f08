"""`embedlog.restore`: a log of a backup."""

from __future__ import annotations

import os
from functools import partial

from embedlog.api.housekeeping import now_ms
from embedlog.api.log import open as open_log
from embedlog.api.snapshots import files_of, new_files
from embedlog.root.location import directory_of
from embedlog.snapshots import restore as engine
from embedlog.times import When, time_argument


def restore(
    target: str | os.PathLike[str], path: str | os.PathLike[str], *, at: When | None = None
) -> str:
    """Make a log of a backup: with all topics, records, groups, producers and schemas.

    Its segments are checked against the checksums of the backup.  If it is killed, repeat it: it
    continues.  The log is another one, with an id of its own.

    Args:
        target: Where `Log.backup` wrote: a directory, or a URL for fsspec.
        path: A new or empty directory for the log.
        at: Restore the last backup that was made until this time, by default the last one.

    Returns:
        The name of the backup.

    Raises:
        UnknownSnapshotError: There is no such backup.
        NotALogError, IllegalStateError: The directory holds files, or a log.
        CorruptionError: A file of the backup is damaged.
        StorageError: A file could not be read or written.
    """
    directory = directory_of(path)
    at_ms = None if at is None else time_argument("at", at, now_ms())
    source = files_of(target)
    try:
        document = engine.find(source, at_ms)
        engine.restore(
            source, document, partial(new_files, directory), partial(_rebuild_index, directory)
        )
    finally:
        source.close_all()
    return str(document["name"])


def _rebuild_index(directory: str) -> None:
    with open_log(directory, maintenance=False, must_exist=True) as log:
        log.housekeeping.rebuild_index()
