"""Roots whose file operations are counted, and fail or kill as ordered, from a given one on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embedlog.root.root import Root
from support import forks
from support.faulty_files import FaultyFiles
from support.roots import abandon, open_root

Order = Callable[[FaultyFiles], None]


def begin(
    path: Path,
    fill: Callable[[Root], None],
    parts: Sequence[tuple[str, int]],
    order: Order,
    files: type[FaultyFiles] = FaultyFiles,
) -> Root:
    """Fill a root, leave it as a killed process does, and open it with a fault."""
    shutil.rmtree(path, ignore_errors=True)
    root = open_root(path)
    fill(root)
    abandon(root)
    return join(path, parts, order, files)


def join(
    path: Path,
    parts: Sequence[tuple[str, int]],
    order: Order,
    files: type[FaultyFiles] = FaultyFiles,
) -> Root:
    """Open a root with a fault, which counts from when its partitions were looked at."""
    root = open_root(path, files=files)
    for part in parts:
        root.partition(*part).tail()
    cruel: Any = root.context.files
    cruel.counts.clear()
    order(cruel)
    return root


def count(work: Callable[[], Root]) -> dict[str, int]:
    """Return how many operations of each kind some work makes, in a child."""
    end = forks.run(lambda: dict(work().context.files.counts))  # type: ignore[attr-defined]
    assert end.finding() is None, end.finding()
    counted: dict[str, int] = end.value
    return counted
