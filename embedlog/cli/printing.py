"""The output of the commands: lines and JSON."""

from __future__ import annotations

import base64
import sys
from typing import Any


def say(*lines: str) -> None:
    """Print lines to stdout."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def note(*lines: str) -> None:
    """Print lines to stderr, which are not part of the result."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))


def say_json(result: Any) -> None:
    """Print one JSON document on one line."""
    import json  # Imported here: commands without JSON start faster.

    say(json.dumps(result, ensure_ascii=False))


def readable(data: bytes | None) -> Any:
    """Return bytes for JSON: text if they are UTF-8, else ``{"base64": …}``."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
