"""`embedlog snapshots`: take, list and delete; `backup`, `restore` and `clone`."""

from __future__ import annotations

import argparse
import os

import embedlog
from embedlog.cli import argument_types as types
from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import OK, CommandParser, add_flag, add_option
from embedlog.cli.printing import note, say_result
from embedlog.display import plural
from embedlog.progress import ProgressBar, format_bytes

_NICE = 10


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


def backup_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("target", metavar="TARGET", help="a directory, or a URL for fsspec")
    add_flag(command, "--verify", "also read what is there, and copy again what is damaged")
    about = "bytes per second to copy at most"
    add_option(command, "--max-rate", "BYTES", about, type=types.rate)


def backup(args: argparse.Namespace) -> int:
    """Write a backup, with a low priority: other programs come first."""
    os.nice(_NICE)
    with to_write(args) as log, ProgressBar("backup") as bar:
        result = log.backup(
            args.target, verify=args.verify, max_bytes_per_second=args.max_rate, progress=bar
        )
    text = (
        f"{result.name}: {plural(result.files, 'file')}, {format_bytes(result.bytes)}; copied "
        f"{plural(result.copied_files, 'file')}, {format_bytes(result.copied_bytes)}"
    )
    say_result(args, result._asdict(), [text])
    return OK


def restore_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("target", metavar="TARGET", help="where the backups are")
    command.add_argument("path", metavar="ROOT", help="a new or empty directory for the log")
    about = "restore the last backup made until this time, such as 2026-01-31T12:00Z or 2d (ago)"
    add_option(command, "--at", "TIME", about)


def restore(args: argparse.Namespace) -> int:
    """Make a log of a backup."""
    name = embedlog.restore(args.target, args.path, at=args.at)
    say_result(args, {"restored": name}, [f"{name} is restored in {args.path}"])
    return OK


def clone_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("path", metavar="PATH", help="a new or empty directory for the log")


def clone(args: argparse.Namespace) -> int:
    """Make another log of a log."""
    with to_write(args) as log:
        log.clone(args.path)
    return OK
