"""`embedlog topics`: what there is, and what it is set to."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from typing import Any

from embedlog import keyspace, kv
from embedlog.cli.open_log import root_of, to_read, to_write
from embedlog.cli.parser import OK
from embedlog.cli.printing import note, say, say_json
from embedlog.errors import InvalidConfigError, TopicAlreadyExistsError
from embedlog.files import Files
from embedlog.keyspace import FORMAT_FILE, FORMAT_VERSION
from embedlog.progress import mega

_INTERNAL = "__"
"""As in `catalog`, which takes longer to load than everything else that listing needs."""


def create(args: argparse.Namespace) -> int:
    """Add a topic, and the log if need be."""
    with to_write(args, create=True) as log:
        try:
            log.create_topic(
                args.topic, args.partitions, _settings(args.config), exist_ok=args.if_not_exists
            )
        except TopicAlreadyExistsError as error:
            if error.differences:
                error.todo = _to_apply(args.topic, error.differences)
            raise
        if args.json:
            say_json(log.describe_topic(args.topic))
    return OK


def _to_apply(topic: str, differences: Mapping[str, tuple[object, object]]) -> str:
    """Return how to give an existing topic the settings that were asked for."""
    words, sentences = [], []
    for name, (before, asked) in differences.items():
        if name != "partitions":
            words += ["-c", shlex.quote(f"{name}={asked}")]
        elif isinstance(before, int) and isinstance(asked, int) and asked < before:
            sentences.append("A topic cannot lose partitions.")
        else:
            words += ["-p", str(asked)]
    if words:
        sentences.append(f"To apply: embedlog topics alter {shlex.quote(topic)} {' '.join(words)}")
    return " ".join(sentences)


def _settings(given: list[str]) -> dict[str, str]:
    found = {}
    for each in given:
        name, separator, value = each.partition("=")
        if not separator:
            raise InvalidConfigError(f"{each!r} is not NAME=VALUE")
        found[name.strip()] = value.strip()
    return found


def show_names(args: argparse.Namespace) -> int:
    """Print the names of all topics; needs no columns, so it loads no pyarrow."""
    names = [name for name in _names(args) if args.internal or not name.startswith(_INTERNAL)]
    if args.json:
        say_json(names)
    else:
        say(*names)
    return OK


def _names(args: argparse.Namespace) -> list[str]:
    root = root_of(args)
    if not _is_ordinary(root):
        with to_read(args) as log:  # which says what is wrong with it
            return log.topics(internal=True)
    files = Files(root, writable=False)
    try:
        state = kv.Store(files, "state", durable=True, timeout=10)
        try:
            return state.read(lambda txn: [name for (name,) in keyspace.TOPICS.keys(txn)])
        finally:
            state.close()
    finally:
        files.close_all()


def _is_ordinary(root: str) -> bool:
    """Whether this is a log in the format that the catalogue's room knows."""
    try:
        with open(os.path.join(root, FORMAT_FILE), encoding="utf-8", errors="replace") as file:
            known = f"format = {FORMAT_VERSION}\n" in file
        return known and os.path.isdir(os.path.join(root, "state"))
    except OSError:
        return False


def describe(args: argparse.Namespace) -> int:
    """Print settings that are not the defaults, and the partitions."""
    with to_read(args) as log:
        found = [log.describe_topic(name) for name in args.topics or log.topics()]
    if args.json:
        say_json(found)
    else:
        for topic in found:
            _say_topic(topic)
    return OK


def _say_topic(topic: dict[str, Any]) -> None:
    parts = topic["partitions"]
    records = sum(part["end_offset"] - part["start_offset"] for part in parts)
    size = mega(sum(part["bytes"] for part in parts))
    of = "offsets" if "compact" in topic["config"]["cleanup.policy"] else "records"
    say(f"{topic['name']}  id {topic['id']}, {len(parts)} partitions, {records} {of}, {size}")
    say(*(f"  {name}={value}" for name, value in topic["overrides"].items()))
    for part in parts:
        say(
            f"  partition {part['partition']}: offsets {part['start_offset']} to "
            f"{part['end_offset']}, {mega(part['bytes'])} in {part['segments']} segments, "
            f"leader epoch {part['leader_epoch']}"
        )


def alter(args: argparse.Namespace) -> int:
    """Change settings, then grow."""
    changes: dict[str, Any] = {**_settings(args.config), **dict.fromkeys(args.reset)}
    if not changes and args.partitions is None:
        raise InvalidConfigError("nothing to alter", todo="Use --config, --reset or --partitions")
    with to_write(args) as log:
        if changes:
            log.alter_topic(args.topic, changes)
        if args.partitions is not None:
            log.create_partitions(args.topic, args.partitions)
        if args.json:
            say_json(log.describe_topic(args.topic))
    return OK


def delete(args: argparse.Namespace) -> int:
    """Remove topics; none of them if one is not there."""
    with to_write(args) as log:
        for name in args.topics:
            log.topic(name)
        for name in args.topics:
            log.delete_topic(name)
            note(f"deleted {name}")
        if args.json:
            say_json({"deleted": args.topics})
    return OK
