"""Which directories belong to a log, as their `embedlog.toml` says.

Each directory knows its own id, the id of the log, and where the others are, so any of them
leads to all.  What counts is the metadata in `state`; the file is only where to look.
"""

from __future__ import annotations

import logging
import os
import tomllib
import uuid
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from embedlog.errors import EmbedlogError, NotALogError, StorageError
from embedlog.files import Files
from embedlog.keyspace import FORMAT_FILE

_logger = logging.getLogger("embedlog.replication")


class Member(NamedTuple):
    """What one directory says about itself and the others."""

    cluster_id: str
    directory_id: int
    paths: dict[int, str]
    """The directories, also those that were added or moved since it was last online."""


def read_member(files: Files) -> Member | None:
    """Return what a directory says; None if it is no log, or one in a single directory.

    Raises:
        NotALogError: The file cannot be read.
    """
    if not files.exists(FORMAT_FILE):
        return None
    try:
        section = tomllib.loads(files.read_file(FORMAT_FILE).decode()).get("replicas")
        if section is None:
            return None
        paths = {int(number): str(path) for number, path in section["paths"].items()}
        return Member(str(section["cluster"]), int(section["directory"]), paths)
    except (ValueError, KeyError, AttributeError) as error:
        raise NotALogError(
            f"{FORMAT_FILE} is not readable: {error}", path=files.path(FORMAT_FILE)
        ) from error


def write_member(files: Files, member: Member) -> None:
    """Note the directories in the file of one; keeps what else it says."""
    text = files.read_file(FORMAT_FILE).decode()
    head = text.partition("\n[replicas]")[0].rstrip()
    lines = [
        head,
        "",
        "[replicas]",
        "# The directories of the log; `embedlog replicas` changes them.",
        f'cluster = "{member.cluster_id}"',
        f"directory = {member.directory_id}",
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
    paths: Iterable[str], open_files: Mapping[str, Files]
) -> tuple[str | None, dict[int, str]]:
    """Return the id of the log and its directories, as the files of these directories have it.

    Args:
        paths: The directories that the caller named; each is read.
        open_files: Their files, by path, of those that could be opened.  One that cannot be
            read after all is left out.

    Raises:
        NotALogError: They belong to different logs.
        StorageError: One cannot be read, and no other one belongs to a log.
    """
    cluster, found = None, dict[int, str]()
    unreadable: StorageError | None = None
    for path in paths:
        try:
            member = read_member(open_files[path]) if path in open_files else None
        except StorageError as error:
            _logger.warning("Directory %s cannot be read: %s", path, error)
            unreadable = error
            continue
        if member is None:
            continue
        if cluster not in (None, member.cluster_id):
            raise NotALogError(
                "The directories belong to different logs",
                path=path,
                todo="Open each log by itself.",
            )
        cluster = member.cluster_id
        for number, other in member.paths.items():
            found.setdefault(number, other)
        found[member.directory_id] = path
    if cluster is None and unreadable is not None:
        # It may be the log: the others must not become a new one.
        raise unreadable
    return cluster, found


def real_paths(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return absolute paths, each once.

    Raises:
        EmbedlogError: There is none.
    """
    real = list(dict.fromkeys(os.path.realpath(os.fspath(path)) for path in paths))
    if not real:
        raise EmbedlogError("A log has at least one directory, got none")
    return real
