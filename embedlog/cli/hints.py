"""What errors tell a programmer to call, as what a user of the command line has to type.

The packages below know the Python API only; this is the one place that translates.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Mapping


def settings_options(changes: Mapping[str, object]) -> list[str]:
    """Return the options of `embedlog topics alter` for settings; None resets one."""
    words: list[str] = []
    for name, value in changes.items():
        words += ["--reset", name] if value is None else ["-c", shlex.quote(f"{name}={value}")]
    return words


def _alter_topic(match: re.Match[str]) -> str:
    topic, changes = ast.literal_eval(f"({match[1]})")
    return f"`embedlog topics alter {shlex.quote(topic)} {' '.join(settings_options(changes))}`"


def _create_topic(match: re.Match[str]) -> str:
    return f"`embedlog topics create {shlex.quote(ast.literal_eval(match[1]))}`"


def _create_partitions(match: re.Match[str]) -> str:
    topic, count = ast.literal_eval(f"({match[1]})")
    return f"`embedlog topics alter {shlex.quote(topic)} -p {count}`"


_TRANSLATIONS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"alter_topic\(([^{]*\{[^}]*\})\)", _alter_topic),
    (r"create_partitions\(([^)]*)\)", _create_partitions),
    (r"create_topic\(('[^']*')\)", _create_topic),
    (r"\bcall alter_topic\([^)]*, schema=…\)", "use alter_topic in Python"),
    (r"\badd it with alter_topic\b", "add it with alter_topic in Python"),
    (r"\bcreate_topic\(…, schema=…\)", "`embedlog topics create TOPIC --schema-from FILE`"),
    (r"\b[Cc]all (?=`embedlog )", "run "),
    (r"\bcompact\(force=True\)", "`embedlog compact --force`"),
    (r"\bwith create_partitions\b", "with `embedlog topics alter TOPIC -p N`"),
    (r"\bRun verify, then repair, on the log", "Run `embedlog verify`, then `embedlog repair`"),
    (r"\bshare\(group\)", "`embedlog share GROUP`"),
    (r", or pass unsafe_filesystem=True| Pass unsafe_filesystem=True[^.]*\.", ""),
    (r"\badd_replica\(path\)", "`embedlog replicas add PATH`"),
    (r"\bremove_replica\(path, force=True\)", "`embedlog replicas remove PATH --force`"),
    (r"\bLeave out raw\b", "Leave out --raw"),
    (r"\ballow files with files=True", "allow files with --files"),
    (r"is an argument of embedlog\.open", "is --root"),
    (r"\bpass exist_ok=True", "add --if-not-exists"),
    (
        "Write with a producer, and change topics with alter_topic, delete_topic and ",
        "Use `embedlog produce TOPIC`, `embedlog topics alter TOPIC` or ",
    ),
    (r"\bRead the topic with to_arrow\(columns=…\)", "Use `embedlog export TOPIC FILE`"),
    (r"\bPass at=, such as '10m'", "Add --at TIME, such as --at 10m"),
    (r"\bPass merge=True too\b", "Add --merge"),
    (r"\bMirror as a(nother)? site\b", r"Pass a\1 name with --as"),
    (r"; or merge\b", "; or --merge"),
    (
        r"\bTruncate the copy with log\.partition\(…\)\.truncate_to\((\d+)\)",
        r"Truncate the copy at offset \1 with a Python program",
    ),
    (r"\bsame schema with alter_topic\b", "same schema with a Python program"),
    (r"\b([Rr]epeat the) call\b", r"\1 command"),
    (
        "needs a strategy other than 'offsets', and the names of its topics",
        "needs --topic, and a --strategy other than offsets",
    ),
    (
        "Seek past the record, correct the deserializer, or read the record as bytes",
        "Use --raw to export the stored bytes",
    ),
    (
        "Set allow_pickle=True if you trust everyone who writes to the topic",
        "Write to it with a Python program",
    ),
    (r"\. (run|the) ", lambda match: f". {match[1].capitalize()} "),
]


def for_command_line(text: str) -> str:
    """Return a message with commands instead of Python calls.

    >>> for_command_line('Call alter_topic("fleet", {"cleanup.policy": "compact"}).')
    'Run `embedlog topics alter fleet -c cleanup.policy=compact`.'
    """
    for pattern, replacement in _TRANSLATIONS:
        text = re.sub(pattern, replacement, text)
    return text[:1].upper() + text[1:] if text.startswith("run ") else text
