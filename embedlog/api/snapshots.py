"""`Log.snapshots`: the snapshots of a log."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from embedlog.api.housekeeping import Progress
from embedlog.catalog import INTERNAL
from embedlog.display import html_table, moment, plural, text_table
from embedlog.errors import InvalidConfigError
from embedlog.files import Files
from embedlog.files.remote import plain_files
from embedlog.files.throttle import Throttle
from embedlog.root.location import directory_of
from embedlog.root.root import Root
from embedlog.snapshots import snapshot as engine
from embedlog.snapshots.snapshot import Snapshot
from embedlog.times import parse_duration

if TYPE_CHECKING:
    from embedlog.snapshots.backup import BackupResult

_HEADS = ("snapshot", "created", "expires", "topics", "offsets")


class Snapshots(Mapping[str, Snapshot]):
    """The snapshots of a log by name, as of each use.

    >>> import tempfile, embedlog
    >>> with tempfile.TemporaryDirectory() as directory, embedlog.open(directory) as log:
    ...     topic = log.create_topic("flights")
    ...     snapshot = log.snapshot("report", expires="12h")
    ...     list(log.snapshots), len(log.at(snapshot)["flights"])
    (['report'], 0)
    """

    def __init__(self, root: Root) -> None:
        self._root = root

    def _by_name(self) -> dict[str, Snapshot]:
        return {each.name: each for each in engine.snapshots(self._root.context)}

    def __getitem__(self, name: str) -> Snapshot:
        """Return a snapshot.

        Raises:
            UnknownSnapshotError: There is none of this name.
        """
        return engine.find(self._root.context, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name())

    def __len__(self) -> int:
        return len(self._by_name())

    def delete(self, name: str) -> None:
        """Delete a snapshot: retention and compaction may remove its records again.

        Raises:
            UnknownSnapshotError: There is none of this name.
        """
        engine.delete(self._root.context, name)

    def _rows(self) -> list[tuple[object, ...]]:
        return [_cells(each) for each in self._by_name().values()]

    def __repr__(self) -> str:
        return "\n".join(text_table(_HEADS, self._rows()))

    def _repr_html_(self) -> str:
        """For notebooks: a table."""
        return html_table(plural(len(self), "snapshot"), _HEADS, self._rows())


def _cells(each: Snapshot) -> tuple[object, ...]:
    expires = None if each.expires_ms is None else moment(each.expires_ms)
    offsets = sum(end - start for start, end in each.offsets().values())
    return each.name, moment(each.created_ms), expires, ", ".join(each.topics), f"{offsets:,}"


def take(
    root: Root, name: str, topics: str | Iterable[str] | None, expires: timedelta | str | None
) -> Snapshot:
    """Take a snapshot; see `Log.snapshot`."""
    engine.check_name(name)
    if topics is None:
        infos = [info for each, info in root.topics().items() if not each.startswith(INTERNAL)]
    else:
        infos = [root.topic(each) for each in ([topics] if isinstance(topics, str) else topics)]
    return engine.take(root, name, infos, duration_ms(expires))[0]


def duration_ms(expires: timedelta | str | None) -> int | None:
    """Return a duration that a program passes in milliseconds; None is no end.

    Raises:
        InvalidConfigError: It is no duration, or not positive.
    """
    if expires is None:
        return None
    try:
        length = parse_duration(expires) if isinstance(expires, str) else expires
    except OverflowError:
        length = None
    if not isinstance(length, timedelta) or length <= timedelta(0):
        raise InvalidConfigError(
            f"expires must be a positive duration such as '7d', or None, got {expires!r}"
        )
    return length // timedelta(milliseconds=1)


# Backups


def back_up(
    root: Root,
    target: str | os.PathLike[str],
    verify: bool,
    max_bytes_per_second: float | None,
    progress: Progress | None,
) -> BackupResult:
    """Write a backup; see `Log.backup`."""
    from embedlog.snapshots import backup

    throttle = None if max_bytes_per_second is None else Throttle(max_bytes_per_second)
    files = files_of(target, writable=True)
    try:
        return backup.back_up(root, files, verify=verify, throttle=throttle, progress=progress)
    finally:
        files.close_all()


def clone(root: Root, path: str | os.PathLike[str]) -> None:
    """Make another log of a log; see `Log.clone`."""
    from embedlog.root.verify import rebuild_index
    from embedlog.snapshots import restore as engine

    directory = directory_of(path)

    def finish() -> None:
        with closing(Root(directory, **{**root.options(), "mode": "rw"})) as made:
            rebuild_index(made)

    engine.clone(root, partial(new_files, directory), finish)


def files_of(target: str | os.PathLike[str], *, writable: bool = False) -> Files:
    """Return the files of a directory, which is created to be written to, or at a URL."""
    where = os.fspath(target)
    if "://" in where and not where.startswith("file://"):
        return plain_files(where, writable=writable)
    directory = directory_of(target)
    if writable:
        Files.create_root(directory)
    return plain_files(directory, writable=writable)


def new_files(directory: str) -> Files:
    """Return the files of a new log."""
    Files.create_root(directory)
    return Files(directory)
