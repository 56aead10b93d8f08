"""`embedlog activity`, `audit`, `metrics` and `du`: what happened to a log, and what it holds."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from embedlog.cli import argument_types as types
from embedlog.cli.open_log import rounds, to_follow, to_read
from embedlog.cli.parser import (
    FAILED,
    OK,
    CommandParser,
    add_flag,
    add_list,
    add_option,
    add_table_format,
)
from embedlog.cli.printing import note, say, say_json, say_result, table
from embedlog.display import moment, plural, text_table
from embedlog.errors import InvalidConfigError
from embedlog.progress import format_bytes

if TYPE_CHECKING:
    from embedlog.api import Log
    from embedlog.catalog import TopicInfo
    from embedlog.record import Record

EVENTS = """\
kinds: created altered deleted (topics), rolled recovered retained compacted (partitions),
rebalanced expired (groups), mirrored skipped failover (mirrors), offline online removed
(directories), elected isr reassigned (copies), owner failed (maintenance).  The events are the
records of the topic __activity; the process that does the maintenance writes them, within a few
seconds, and a mirror its own.
"""


def activity_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = EVENTS
    add_flag(command, "-f --follow", "wait for new events")
    about = "only the last N events; by default 10 with -f, otherwise all"
    add_option(command, "-n --last", "N", about, type=types.count)
    add_list(command, "--topic", "TOPIC", "only events of this topic")
    add_list(command, "--kind", "KIND", "only events of this kind")
    add_option(command, "--max -m", "N", "end after N events", type=types.count)


def activity(args: argparse.Namespace) -> int:
    """Print events, the oldest first."""
    from embedlog.catalog import ACTIVITY
    from embedlog.maintenance.activity import KINDS

    unknown = [kind for kind in args.kind if kind not in KINDS]
    if unknown:
        raise InvalidConfigError(
            f"There is no event kind {unknown[0]!r}", todo=f"The kinds are {', '.join(KINDS)}."
        )
    with to_follow(args) if args.follow else to_read(args) as log:
        if ACTIVITY not in log:
            note("There is no activity yet: no process has done the maintenance of this log")
        for event in islice(_events(log, args), args.max):
            _print_event(*event, args.json)
            if args.follow:
                sys.stdout.flush()
    return OK


def _events(log: Log, args: argparse.Namespace) -> Iterator[tuple[Record, dict[str, Any]]]:
    """Yield the selected events: the last ones until now, then new ones."""
    batches = _batches(log, follow=args.follow)
    until_now = _select(next(batches), args)
    last = args.last if args.last is not None or not args.follow else 10
    yield from until_now if last is None else deque(until_now, maxlen=last)
    for records in batches:
        yield from _select(records, args)


def _batches(log: Log, *, follow: bool) -> Iterator[Iterable[Record]]:
    """Yield the records until now, and with ``follow`` new ones without an end."""
    from embedlog.api.topic import TopicView
    from embedlog.catalog import ACTIVITY

    start = 0
    for _ in rounds(log, follow=follow):
        if ACTIVITY in log:
            part = log.topic(ACTIVITY).ranges()[0]
            first = part._replace(start=max(start, part.start))
            yield TopicView(log.root, ACTIVITY, [first], raw=True)
            start = part.stop
        else:
            yield ()


def _select(
    records: Iterable[Record], args: argparse.Namespace
) -> Iterator[tuple[Record, dict[str, Any]]]:
    import json

    for record in records:
        facts = json.loads(record.value or b"{}")
        of_topic = not args.topic or facts.get("topic") in args.topic
        if of_topic and (not args.kind or facts.get("kind") in args.kind):
            yield record, facts


def _print_event(record: Record, facts: dict[str, Any], as_json: bool) -> None:
    key = (record.key or b"").decode(errors="replace")
    if as_json:
        say_json({"timestamp": record.timestamp, "key": key, **facts})
        return
    kind = str(facts.get("kind"))
    time = moment(record.timestamp).replace(" ", "T")
    say(f"{time}  {kind:<10}  {key}  {_words_of(kind, facts)}".rstrip())


def _words_of(kind: str, facts: dict[str, Any]) -> str:
    """Return an event in words; of an event of a later version, its facts."""
    try:
        return _DESCRIPTIONS[kind](facts)
    except (KeyError, TypeError, ValueError):
        return ", ".join(f"{name} {value}" for name, value in facts.items() if name != "kind")


def _settings(config: dict[str, Any]) -> str:
    return "".join(f", {name}={value}" for name, value in config.items())


def _altered(facts: dict[str, Any]) -> str:
    changes = {"partitions": facts["partitions"]} if "partitions" in facts else {}
    changes |= facts["config"]
    default = "the default"
    return ", ".join(
        f"{name} from {default if old is None else old} to {default if new is None else new}"
        for name, (old, new) in changes.items()
    )


def _leader(directory: int | None) -> str:
    return "no leader" if directory is None else f"directory {directory}"


def _ids(directories: list[int]) -> str:
    return ",".join(map(str, directories)) or "none"


_DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "created": lambda facts: (
        f"id {facts['id']}, {plural(facts['partitions'], 'partition')}{_settings(facts['config'])}"
    ),
    "altered": _altered,
    "deleted": lambda facts: f"id {facts['id']}",
    "rolled": lambda facts: (
        f"{plural(facts['segments'], 'new segment')}, the active one begins at {facts['offset']}"
    ),
    "recovered": lambda facts: (
        facts.get("reason")
        or f"truncated to {facts['offset']}, where leader epoch {facts['leader_epoch']} begins"
    ),
    "retained": lambda facts: (
        f"{plural(facts['segments'], 'segment')} with {format_bytes(facts['bytes'])} deleted, "
        f"the log begins at {facts['start_offset']}"
    ),
    "compacted": lambda facts: (
        f"{facts['records_read'] - facts['records_kept']} of "
        f"{plural(facts['records_read'], 'record')} removed, "
        f"{format_bytes(facts['bytes_before'])} became {format_bytes(facts['bytes_after'])}, "
        f"dirty from {facts['first_dirty']} on"
    ),
    "rebalanced": lambda facts: (
        f"generation {facts['generation']}, {plural(facts['members'], 'member')}, "
        f"{plural(facts['partitions'], 'partition')}"
    ),
    "expired": lambda facts: f"{plural(facts['offsets'], 'committed offset')} deleted",
    "owner": lambda facts: f"process {facts['pid']}",
    "failed": lambda facts: str(facts["error"]),
    "offline": lambda facts: f"directory {facts['directory']}: {facts['reason']}",
    "online": lambda facts: f"directory {facts['directory']}",
    "removed": lambda facts: f"directory {facts['directory']}",
    "elected": lambda facts: (
        f"{_leader(facts['before'])} was replaced by {_leader(facts['leader'])}, leader epoch "
        f"{facts['leader_epoch']}{', not in sync' if facts['unclean'] else ''}"
    ),
    "isr": lambda facts: f"from {_ids(facts['before'])} to {_ids(facts['isr'])}",
    "reassigned": lambda facts: f"from {_ids(facts['before'])} to {_ids(facts['replicas'])}",
    "mirrored": lambda facts: (
        f"{facts['state']}, {plural(facts['records'], 'record')} copied, "
        f"{facts['records_per_second']:,}/s, lag {facts['lag']:,}"
    ),
    "skipped": lambda facts: (
        f"{plural(facts['offsets'], 'offset')} of {facts['source_topic']}-{facts['partition']}, "
        f"from {facts['first_offset']} on, deleted at the source before they were copied"
    ),
    "failover": lambda facts: (
        f"{', '.join(facts['topics'])} may be written to"
        if "topics" in facts
        else f"by {facts['strategy']}: repeats {facts['repeats']} to {facts['may_repeat']} "
        f"offsets, skips up to {facts['may_skip']}"
    ),
}


# Audit


AUDIT = """\
Producers and groups count only if the topic has audit=true.  Exits with 1 if tiers differ.  TIME is
a date, with a time or without, in UTC unless it has a zone; or how long ago: 90m, 2d, PT1H30M.

examples:
  embedlog topics alter flights -c audit=true
  embedlog audit flights --window 1h --since 2d
  embedlog audit flights --differences
"""


def audit_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = AUDIT
    command.add_argument("topic", metavar="TOPIC")
    about = "the width of a window, of whole minutes; by default 1h"
    add_option(command, "--window", "DURATION", about, type=types.duration, default="1h")
    add_option(command, "--since", "TIME", "only windows that end after this time", type=types.time)
    add_option(
        command, "--until", "TIME", "only windows that begin before this time", type=types.time
    )
    about = "only this tier: log, producer, copy, group, pipeline or mirror"
    add_list(command, "--tier", "TIER", about)
    add_flag(command, "--differences", "print only the differences, without the table")
    add_table_format(command, "one JSON object with rows and differences")


def audit(args: argparse.Namespace) -> int:
    """Print a row per window and tier, and a line per difference."""
    from embedlog.cli.write_files import write_result

    with to_read(args) as log:
        result = log.audit(
            args.topic,
            args.window,
            since=args.since,
            until=args.until,
            tiers=args.tier or None,
        )
    differences = result.differences
    if args.json or args.format == "json":
        say_json(result.to_dict())
    elif args.differences:
        say(*differences)
    elif args.format == "table":
        heads, rows = result.table()
        say(*table([head.upper() for head in heads], rows))
        say(*differences)
    else:
        write_result(result.to_arrow(), args.format)
    if result.hint:
        command = f"embedlog topics alter {shlex.quote(args.topic)} -c audit=true"
        note(f"{result.hint}; to have them do so: {command}")
    return FAILED if differences else OK


# Metrics


def metrics_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument(
        "--format",
        choices=("prometheus", "json", "table"),
        default="table",
        help="by default a table; prometheus is for node_exporter's textfile collector",
    )
    about = "a label for all metrics in Prometheus' format, such as the name of the log"
    add_list(command, "--label", "NAME=VALUE", about)


def metrics(args: argparse.Namespace) -> int:
    """Print the metrics of a log."""
    from embedlog.metrics import check_labels

    labels = {}
    for option in args.label:
        name, separator, value = option.partition("=")
        if not separator:
            raise InvalidConfigError(f"--label must be NAME=VALUE, got {option!r}")
        labels[name] = value
    check_labels(labels)
    with to_read(args) as log:
        if args.format == "prometheus":
            say(*log.prometheus(labels).splitlines())
            return OK
        metrics = log.metrics()
    if args.json or args.format == "json":
        say_json(metrics)
    else:
        rows = [
            (key, name, f"{value:,}")
            for key, values in metrics.items()
            for name, value in values.items()
        ]
        say(*text_table(("GROUP", "METRIC", "VALUE"), rows))
    return OK


# Disk usage


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
        topics = [_usage(roots, info) for info in infos.values()]
    topics.sort(key=_by_size, reverse=True)
    others = [] if args.topics else _other_usage(roots, {info.directory for info in infos.values()})
    total = sum(map(_by_size, (*topics, *others)))
    document = {"bytes": total, "topics": topics, "others": others}
    say_result(args, document, _usage_lines(document, args.segments))
    return OK


def _usage(roots: list[str], info: TopicInfo) -> dict[str, Any]:
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


def _other_usage(roots: list[str], directories: set[str]) -> list[dict[str, Any]]:
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


def _usage_lines(document: dict[str, Any], with_segments: bool) -> Iterator[str]:
    for topic in document["topics"]:
        partitions = topic["partitions"]
        segments = plural(sum(len(part["segments"]) for part in partitions), "segment")
        count = f"{plural(len(partitions), 'partition')}, {segments}"
        yield _line(topic["bytes"], f"topic {topic['topic']}: {count}")
        for part in partitions:
            segments = plural(len(part["segments"]), "segment")
            yield _line(part["bytes"], f"  partition {part['partition']}: {segments}")
            if with_segments:
                for segment in part["segments"]:
                    yield _line(segment["bytes"], f"    {segment['file']}")
    for other in document["others"]:
        what = _WHATS.get(other["name"])
        yield _line(other["bytes"], f"{other['name']}{f': {what}' if what else ''}")
    yield _line(document["bytes"], "total")


def _line(size: int, what: str) -> str:
    return f"{format_bytes(size):>8}  {what}"
