"""How far a long work is: a bar in terminals and notebooks, nothing in a pipe."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
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

    Args:
        what: What is being done.
        told: Says a number for people, if it is not one of bytes.
    """

    def __init__(self, what: str, told: Callable[[float], str] = mega) -> None:
        self._what, self._told, self._notebook = what, told, _in_notebook()
        self._shown = self._notebook or sys.stderr.isatty()
        self._line: Any = None
        self._drawn = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Redraw it, if it is time."""
        now = time.monotonic()
        if self._shown and now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            share = min(done / total, 1.0) if total else 0.0
            full = "█" * int(share * _WIDTH)
            bar = f"{full:<{_WIDTH}} {share:4.0%} of {self._told(total)}"
            self._draw(f"{self._what} {bar if total else self._told(done)}")

    def _draw(self, line: str) -> None:
        if not self._notebook:
            sys.stderr.write(f"\r{line}\x1b[K")
            sys.stderr.flush()
        elif self._line is None:
            display = importlib.import_module("IPython.display").display
            self._line = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._line.update({"text/plain": line}, raw=True)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        # In a notebook a short work leaves nothing behind, not even an empty line.
        if self._shown and not (self._notebook and self._line is None):
            self._draw("")


def _in_notebook() -> bool:
    """Return whether IPython shows what this process prints in a notebook."""
    shell = sys.modules.get("IPython")
    kernel = shell and shell.get_ipython()
    return kernel is not None and hasattr(kernel, "kernel")
