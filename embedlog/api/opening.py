"""Opening the directories of a log, also again in the same object."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from embedlog import audit
from embedlog.errors import InvalidConfigError
from embedlog.root.location import directory_of
from embedlog.root.root import HasReplicasError, Root

LogPath = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One directory of a log, or several."""


def open_root(
    path: LogPath,
    *,
    racks: Mapping[str | os.PathLike[str], str | None] | None = None,
    **options: Any,
) -> Root:
    """Open the root of a log in one directory, or in several."""
    if isinstance(path, list | tuple):
        paths = [directory_of(each) for each in path]
    else:
        try:
            return audit.subscribe(Root(directory_of(cast("str", path)), **options))
        except HasReplicasError:
            paths = [directory_of(cast("str", path))]
    # Imported here: most logs are in one directory.
    from embedlog.files.paths import real_path
    from embedlog.replication.member_file import real_paths
    from embedlog.replication.root import ReplicatedRoot

    labels = {real_path(directory_of(each)): rack for each, rack in (racks or {}).items()}
    return audit.subscribe(ReplicatedRoot(real_paths(paths), racks=labels, **options))


def reopen(root: Root, paths: Sequence[str], racks: Mapping[str, str | None] | None = None) -> None:
    """Open a closed log over several directories in the same object, which views of it hold.

    If that fails, a log that was in one directory is opened again as it was.
    """
    from embedlog.replication.root import ReplicatedRoot

    path, was_single = root.path, not root.replicated
    try:
        root.reopen(ReplicatedRoot, paths, racks=racks)
    except BaseException:
        if was_single:
            root.reopen(Root, path)
        raise
    finally:
        if not root.closed:
            audit.subscribe(root)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless an argument is one of some texts.

    Raises:
        InvalidConfigError: It is not.
    """
    if value not in choices:
        raise InvalidConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
