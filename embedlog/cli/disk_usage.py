"""`embedlog du`: how many bytes the files of a log take, the largest first."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from embedlog.catalog import TopicInfo
from embedlog.cli.open_log import to_read
from embedlog.cli.parser import OK, CommandParser, add_flag
from embedlog.cli.printing import say_result
from embedlog.display import plural
from embedlog.progress import format_bytes

_WHATS = {
    "state": "topics, segments and their indexes, committed offsets (LMDB)",
    "live": "ends of partitions, indexes of active segments, groups (LMDB)",
    "state.copy": "the last copy of state",
    "quarantine": "damaged files, which a repair has moved there",
    "staging": "files of jobs that have not published them yet",
    "reserve": "kept for maintenance on a full disk",
    "deleted topics": "deleted by the next maintenance",
}
"""What besides topics takes space."""
_by_size = itemgetter("bytes")


def du_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("topics", metavar="TOPIC", nargs="*", help="by default everything")
    add_flag(command, "--segments", "also print a line per segment file")


def du(args: argparse.Namespace) -> int:
    """Print the bytes of topics, partitions and other files; with --segments of each segment."""
    with to_read(args) as log:
        infos = {name: log.root.topic(name) for name in args.topics} or log.root.topics()
        roots = [log.path]
        if log.root.replicated:
            roots = [directory.path for directory in log.replicas if directory.online]
        topics = [_topic(roots, info) for info in infos.values()]
    topics.sort(key=_by_size, reverse=True)
    others = [] if args.topics else _others(roots, {info.directory for info in infos.values()})
    total = sum(map(_by_size, (*topics, *others)))
    document = {"bytes": total, "topics": topics, "others": others}
    say_result(args, document, _lines(document, args.segments))
    return OK


def _topic(roots: list[str], info: TopicInfo) -> dict[str, Any]:
    partitions = []
    for number in range(info.partitions):
        # A partition has no directory before its first use.
        files = [
            entry
            for root in roots
            for entry in _entries(os.path.join(root, info.directory, str(number)))
        ]
        segments = [{"file": name, "bytes": _bytes(path)} for name, path in files]
        size = sum(map(_by_size, segments))
        partitions.append({"partition": number, "bytes": size, "segments": segments})
    partitions.sort(key=_by_size, reverse=True)
    return {"topic": info.name, "bytes": sum(map(_by_size, partitions)), "partitions": partitions}


def _others(roots: list[str], directories: set[str]) -> list[dict[str, Any]]:
    sizes = dict.fromkeys(_WHATS, 0)
    for root in roots:
        for name, path in _entries(root):
            if name != "topics":
                name = name if name in _WHATS else "other files"
                sizes[name] = sizes.get(name, 0) + _bytes(path)
        for name, path in _entries(os.path.join(root, "topics")):
            if f"topics/{name}" not in directories:
                sizes["deleted topics"] += _bytes(path)
    others = [{"name": name, "bytes": size} for name, size in sizes.items() if size]
    return sorted(others, key=_by_size, reverse=True)


def _entries(directory: str) -> list[tuple[str, str]]:
    """Return the names and paths in a directory; maintenance may delete it meanwhile."""
    try:
        return sorted((entry.name, entry.path) for entry in os.scandir(directory))
    except FileNotFoundError:
        return []


def _bytes(path: str) -> int:
    """Return the bytes of a file, or of all files in a directory."""
    if os.path.isdir(path):
        return sum(_bytes(inner) for _, inner in _entries(path))
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0
    # The lock files of LMDB have holes.
    return min(status.st_size, status.st_blocks * 512) if path.endswith(".mdb") else status.st_size


def _lines(document: dict[str, Any], with_segments: bool) -> Iterator[str]:
    for topic in document["topics"]:
        partitions = topic["partitions"]
        segments = plural(sum(len(part["segments"]) for part in partitions), "segment")
        count = f"{plural(len(partitions), 'partition')}, {segments}"
        yield _line(topic["bytes"], f"topic {topic['topic']}: {count}")
        for part in partitions:
            segments = plural(len(part["segments"]), "segment")
            yield _line(part["bytes"], f"  partition {part['partition']}: {segments}")
            if with_segments:
                yield from _segment_lines(part["segments"])
    for other in document["others"]:
        what = _WHATS.get(other["name"])
        yield _line(other["bytes"], f"{other['name']}{f': {what}' if what else ''}")
    yield _line(document["bytes"], "total")


def _segment_lines(segments: Iterable[dict[str, Any]]) -> Iterator[str]:
    for segment in segments:
        yield _line(segment["bytes"], f"    {segment['file']}")


def _line(size: int, what: str) -> str:
    return f"{format_bytes(size):>8}  {what}"
