"""A progress bar for long operations, on terminals and in notebooks."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

_REDRAW_SECONDS = 0.1
_WIDTH = 30


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, such as ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class ProgressBar:
    """Shows the progress of a long operation; redrawn at most ten times a second.

    Call it with the bytes that are done and the total; a total of 0 is unknown.  Writes nothing
    if stderr is neither a terminal nor shown in a notebook.

    Args:
        label: What is being done.
        format_amount: Returns an amount as text, if the amounts are not bytes.
    """

    def __init__(self, label: str, format_amount: Callable[[float], str] = format_bytes) -> None:
        self._label, self._format = label, format_amount
        # IPython shows the output of a process with a kernel in a notebook.
        ipython = sys.modules.get("IPython")
        self._notebook = hasattr(ipython and ipython.get_ipython(), "kernel")
        self._visible = self._notebook or sys.stderr.isatty()
        self._display: Any = None
        self._drawn = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Redraw the bar if it is time."""
        now = time.monotonic()
        if self._visible and now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            fraction = min(done / total, 1.0) if total else 0.0
            filled = "█" * int(fraction * _WIDTH)
            bar = f"{filled:<{_WIDTH}} {fraction:4.0%} of {self._format(total)}"
            self._draw(f"{self._label} {bar if total else self._format(done)}")

    def _draw(self, line: str) -> None:
        if not self._notebook:
            sys.stderr.write(f"\r{line}\x1b[K")
            sys.stderr.flush()
        elif self._display is None:
            display = importlib.import_module("IPython.display").display
            self._display = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._display.update({"text/plain": line}, raw=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        # A short operation leaves nothing in a notebook, not even an empty line.
        if self._visible and not (self._notebook and self._display is None):
            self._draw("")
