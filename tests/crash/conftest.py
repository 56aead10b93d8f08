"""What the crash tests share: a directory in memory, and the roots that programs begin from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas  # noqa: F401 - otherwise pyarrow imports it, in each child: half a second
import pytest
from support.faulty_files import scratch_directory
from support.program_faults import Templates


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A directory in memory; the tests of a file share it."""
    with scratch_directory() as path:
        yield path


@pytest.fixture(scope="module")
def templates(directory: Path) -> Templates:
    """Roots that were killed, closed and rebooted, to copy."""
    return Templates(directory)
