"""What the commands print: lines, JSON, and a bar that only a terminal sees."""

from __future__ import annotations

import base64
import sys
import time
from typing import Any

_REDRAW_SECONDS = 0.1
_WIDTH = 30


def say(*lines: str) -> None:
    """Print lines to stdout."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def note(*lines: str) -> None:
    """Print lines to stderr: what is not the answer."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))


def say_json(answer: Any) -> None:
    """Print one JSON document on one line."""
    import json  # the commands that print none start without it

    say(json.dumps(answer, ensure_ascii=False))


def readable(data: bytes | None) -> Any:
    """Return bytes for JSON: text where they are UTF-8, else ``{"base64": …}``."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def mega(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Bar:
    """How far a long work is, redrawn on stderr ten times a second; nothing in a pipe.

    Called with how much is done and how much there is; a total of 0 is unknown.
    """

    def __init__(self, what: str) -> None:
        self._what, self._shown = what, sys.stderr.isatty()
        self._drawn = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Redraw it, if it is time."""
        now = time.monotonic()
        if self._shown and now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            share = min(done / total, 1.0) if total else 0.0
            full = "█" * int(share * _WIDTH)
            told = f"{full:<{_WIDTH}} {share:4.0%} of {mega(total)}" if total else mega(done)
            sys.stderr.write(f"\r{self._what} {told}\x1b[K")
            sys.stderr.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
