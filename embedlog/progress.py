"""How far a long work is: a bar in terminals and notebooks, nothing in a pipe."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

_REDRAW_SECONDS = 0.1
_WIDTH = 30


def mega(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Bar:
    """How far a long work is, redrawn ten times a second where somebody may be watching.

    Called with how many bytes are done and how many there are; a total of 0 is unknown.
    """

    def __init__(self, what: str) -> None:
        self._what, self._notebook = what, _notebook()
        self._shown = self._notebook is not None or sys.stderr.isatty()
        self._drawn = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Redraw it, if it is time."""
        now = time.monotonic()
        if self._shown and now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            share = min(done / total, 1.0) if total else 0.0
            full = "█" * int(share * _WIDTH)
            told = f"{full:<{_WIDTH}} {share:4.0%} of {mega(total)}" if total else mega(done)
            self._draw(f"{self._what} {told}")

    def _draw(self, line: str) -> None:
        if self._notebook is None:
            sys.stderr.write(f"\r{line}\x1b[K")
            sys.stderr.flush()
        else:
            self._notebook.update({"text/plain": line}, raw=True)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._draw("")


def _notebook() -> Any:
    """Return where a notebook shows one line that changes; None outside of notebooks."""
    shell = sys.modules.get("IPython")
    kernel = shell and shell.get_ipython()
    if kernel is None or not hasattr(kernel, "kernel"):
        return None
    display = importlib.import_module("IPython.display").display
    return display({"text/plain": ""}, raw=True, display_id=True)
