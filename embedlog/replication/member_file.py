"""Which directories belong to a log, as their `embedlog.toml` says.

Each directory knows its own id, the id of the log, and where the others are, so any of them
leads to all.  What counts is the metadata in `state`; the file is only where to look.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
import uuid
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from embedlog.errors import EmbedlogError, NotALogError, StorageError
from embedlog.files import Files
from embedlog.files.paths import FORMAT_FILE, is_inside, real_path

_logger = logging.getLogger("embedlog.replication")


class DirectoryMember(NamedTuple):
    """What one directory says about itself and the others."""

    cluster_id: str
    directory_id: int
    paths: dict[int, str]
    """The directories, also those that were added or moved since it was last online."""
    to_add: tuple[str, ...] = ()
    """Directories that are being added."""


_LISTED = re.compile(
    r"""(?m)^[ \t]*replicas[ \t]*=[ \t]*\[([^]"'#]|"(\\.|[^"\\])*"|'[^']*'|#.*$)*\][^\n]*\n?"""
)
"""The directories that a user has written into the file of a log in one directory."""


def read_listed(files: Files) -> list[str]:
    """Return the directories that a user has written into the file of a log, as ``replicas``.

    Relative paths are relative to the directory of the file.

    Raises:
        NotALogError: They are no texts.
    """
    listed = _replicas_of(files)
    if not isinstance(listed, list):
        return []
    if not all(isinstance(path, str) and path.strip() for path in listed):
        raise NotALogError(
            f"replicas in {FORMAT_FILE} must be a list of directories, got {listed!r}",
            path=files.path(FORMAT_FILE),
            todo='Write replicas = ["/disk1/log", "/disk2/log"].',
        )
    return real_paths(os.path.join(files.root, path) for path in listed) if listed else []


def read_member(files: Files) -> DirectoryMember | None:
    """Read the member file of a directory; None if it is no log, or a log of one directory.

    Raises:
        NotALogError: The file cannot be read.
    """
    section = _replicas_of(files)
    if section is None or isinstance(section, list):
        return None
    try:
        paths = {int(number): str(path) for number, path in section["paths"].items()}
        to_add = tuple(map(str, section.get("add", ())))
        return DirectoryMember(str(section["cluster"]), int(section["directory"]), paths, to_add)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(files, error) from error


def _replicas_of(files: Files) -> Any:
    """Return the replicas in the file of a directory; None without a file."""
    if not files.exists(FORMAT_FILE):
        return None
    try:
        return tomllib.loads(files.read_file(FORMAT_FILE).decode()).get("replicas")
    except ValueError as error:
        raise _unreadable(files, error) from error


def _unreadable(files: Files, error: Exception) -> NotALogError:
    return NotALogError(f"{FORMAT_FILE} is not readable: {error}", path=files.path(FORMAT_FILE))


def check_member(files: Files, cluster_id: str, directory_id: int) -> None:
    """Raise unless a directory says that it is one of a log.

    Raises:
        NotALogError: It is another one, or none, or its file cannot be read.
    """
    member = read_member(files)
    if member is None or member[:2] != (cluster_id, directory_id):
        raise NotALogError(f"This is not directory {directory_id} of the log", path=files.root)


def write_member(files: Files, member: DirectoryMember) -> None:
    """Note the directories in the file of one; keeps what else it says."""
    text = files.read_file(FORMAT_FILE).decode()
    head = _LISTED.sub("", text.partition("\n[replicas]")[0]).rstrip()
    lines = [
        head,
        "",
        "[replicas]",
        "# The directories of the log; `embedlog replicas` changes them.",
        f'cluster = "{member.cluster_id}"',
        f"directory = {member.directory_id}",
        *([f"add = [{', '.join(map(_quoted, member.to_add))}]"] if member.to_add else ()),
        "",
        "[replicas.paths]",
        *(f"{number} = {_quoted(path)}" for number, path in sorted(member.paths.items())),
        "",
    ]
    changed = "\n".join(lines)
    if changed != text:
        files.write_file(FORMAT_FILE, changed.encode())


def _quoted(text: str) -> str:
    """Return a basic string of TOML."""
    escaped = "".join(
        f"\\u{ord(char):04x}" if ord(char) < 32 or char in '"\\\x7f' else char for char in text
    )
    return f'"{escaped}"'


def new_cluster_id() -> str:
    """Return an id for a log over several directories."""
    return str(uuid.uuid4())


def find_members(
    paths: Iterable[str], open_files: Mapping[str, Files], cluster: str | None = None
) -> tuple[str | None, dict[int, str], list[str]]:
    """Return the id of the log and its directories, as the files of these directories have it.

    The third value is the paths that a process had begun to add.

    Args:
        paths: The directories; each is read.
        open_files: Their files, by path, of those that could be opened.  One that cannot be
            read after all is left out.
        cluster: The id of the log, if it is known: directories of others are left out.  Without
            it, the directories are those that the caller named.

    Raises:
        NotALogError: They belong to different logs, or two of them say that they are the same.
        StorageError, NotALogError: One cannot be read, and no other one belongs to a log.
    """
    members, is_known = dict[str, DirectoryMember](), cluster is not None
    unreadable: EmbedlogError | None = None
    for path in dict.fromkeys(paths):
        try:
            member = read_member(open_files[path]) if path in open_files else None
        except (StorageError, NotALogError) as error:
            _logger.warning("Directory %s cannot be read: %s", path, error)
            unreadable = error
            continue
        if member is None:
            continue
        if cluster not in (None, member.cluster_id):
            if is_known:
                continue  # another disk is mounted there
            raise NotALogError(
                "The directories belong to different logs",
                path=path,
                todo="Open each log by itself.",
            )
        cluster = member.cluster_id
        members[path] = member
    if cluster is None and unreadable is not None:
        # It may be the log: the others must not become a new one.
        raise unreadable
    found = _places(members)
    for member in members.values():
        for number, path in member.paths.items():
            if path not in found.values():  # or it knows a path from before it was given away
                found.setdefault(number, path)
    return cluster, found, [path for member in members.values() for path in member.to_add]


def _places(members: Mapping[str, DirectoryMember]) -> dict[int, str]:
    """Return where each directory is, by what the directories at some paths say.

    One at the path of another one is left out, as when a disk was copied to the wrong mount
    point, unless the other one has moved, too.

    Raises:
        NotALogError: Two directories say that they are the same.
    """
    recorded = {path: number for each in members.values() for number, path in each.paths.items()}
    claims: dict[int, list[str]] = {}
    for path, member in members.items():
        claims.setdefault(member.directory_id, []).append(path)
    found = {}
    for number, paths in claims.items():
        others = {path: recorded[path] for path in paths if recorded.get(path, number) != number}
        strangers = [path for path in others if len(paths) > 1 or others[path] not in claims]
        for path in strangers:
            _logger.warning(
                "%s is the path of directory %d, and directory %d is there; it is left alone",
                *(path, others[path], number),
            )
        places = [path for path in paths if path not in strangers]
        if len(places) > 1:
            raise NotALogError(
                f"{places[0]} and {places[1]} are both directory {number} of the log: one of them "
                "is a copy",
                path=places[1],
                todo="Neither was changed. Open the log without the copy, or move the copy away.",
            )
        if places:
            found[number] = places[0]
    return found


def real_paths(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return absolute paths, each once.

    Raises:
        EmbedlogError: There is none.
        NotALogError: One is inside another one.
    """
    real = list(dict.fromkeys(real_path(path) for path in paths))
    if not real:
        raise EmbedlogError("A log has at least one directory, got none")
    check_apart(real)
    return real


def check_apart(paths: Iterable[str]) -> None:
    """Raise if a directory is inside another one.

    Raises:
        NotALogError: That is so.
    """
    # In this order, what is inside a directory comes right behind it.
    for outer, inner in pairwise(sorted(paths, key=lambda path: path.split("/"))):
        if is_inside(inner, outer):
            raise NotALogError(
                f"The directory is inside {outer}",
                path=inner,
                todo="Name one beside it, best on a disk of its own.",
            )
