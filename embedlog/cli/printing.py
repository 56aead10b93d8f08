"""The output of the commands: lines and JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
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


def say_result(args: argparse.Namespace, document: Any, lines: Iterable[str]) -> None:
    """Print a result to stdout: as one JSON document with --json, otherwise as lines."""
    if args.json:
        say_json(document)
    else:
        say(*lines)
