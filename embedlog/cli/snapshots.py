"""`embedlog snapshots`: take, list and delete."""

from __future__ import annotations

import argparse

from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import OK, CommandParser, add_option
from embedlog.cli.printing import note, say_result


def take_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("name", metavar="NAME")
    command.add_argument("topics", metavar="TOPIC", nargs="*", help="by default all topics")
    about = "how long to keep it, such as 12h, or never to expire; by default 7d"
    add_option(command, "--expires", "DURATION", about, default="7d")


def take(args: argparse.Namespace) -> int:
    """Take a snapshot."""
    with to_write(args) as log:
        expires = None if args.expires == "never" else args.expires
        snapshot = log.snapshot(args.name, args.topics or None, expires=expires)
        path = log.root.context.files.path(f"snapshots/{args.name}.json")
    note(f"{snapshot!r}, described in {path}")
    return OK


def list_(args: argparse.Namespace) -> int:
    """Print all snapshots."""
    with to_read(args) as log:
        documents = [
            {
                **snapshot._asdict(),
                "topics": {name: topic._asdict() for name, topic in snapshot.topics.items()},
            }
            for snapshot in log.snapshots.values()
        ]
        lines = repr(log.snapshots).splitlines()
    say_result(args, documents, lines)
    return OK


def delete_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("names", metavar="NAME", nargs="+")


def delete(args: argparse.Namespace) -> int:
    """Delete snapshots."""
    with to_write(args) as log:
        for name in args.names:
            log.snapshots.delete(name)
    return OK
