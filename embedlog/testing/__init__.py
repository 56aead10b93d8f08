"""Tools for tests of programs that use a log: a clock, disk faults, and fixtures for pytest.

The fixtures of `embedlog.testing.plugin` are there in every test suite with pytest, once
embedlog is installed.  Without pytest, call `open_log`:

>>> import tempfile
>>> from embedlog.testing import ManualClock, open_log
>>> clock = ManualClock()
>>> with tempfile.TemporaryDirectory() as directory, open_log(directory, clock=clock) as log:
...     _ = clock.set("2026-01-01T12:00:00Z")
...     log.producer().send("orders", b"1").result().timestamp == clock.now_ms
True
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from embedlog.testing.clock import ManualClock
from embedlog.testing.disk_faults import DiskFaults, FaultInjectingFiles

if TYPE_CHECKING:
    from embedlog.api import Log

__all__ = ["DiskFaults", "ManualClock", "open_log"]


def open_log(
    path: str | os.PathLike[str],
    *,
    clock: ManualClock | None = None,
    faults: DiskFaults | None = None,
) -> Log:
    """Open a log for tests, without background jobs: `Housekeeping.run` runs them when called.

    Args:
        path: The directory; it is created if necessary.
        clock: The clock of the log; by default a new one.
        faults: Makes the disk fail; by default it does not.
    """
    import embedlog

    files = partial(FaultInjectingFiles, faults or DiskFaults())
    return embedlog.open(path, clock=clock or ManualClock(), maintenance=False, files=files)
