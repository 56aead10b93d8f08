"""`embedlog dead-letters`: list, show and replay."""

from __future__ import annotations

import argparse
import json
from itertools import islice

from embedlog.api.dead_letters import DeadLetter, topics_of
from embedlog.cli import argument_types as types
from embedlog.cli.formats import writer
from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import OK, CommandParser, add_flag, add_list, add_option
from embedlog.cli.printing import note, say, say_json, say_rows
from embedlog.display import moment, plural

_HEADS = (
    *("TOPIC", "PARTITION", "OFFSET", "ORIGIN", "GROUP", "ATTEMPTS", "FAILED", "REPLAYED"),
    *("EXCEPTION", "MESSAGE"),
)
_FIELDS = (
    *("topic", "partition", "offset", "origin", "group", "attempts", "last_failed_ms", "replayed"),
    *("exception", "message"),
)


def list_options(command: CommandParser) -> None:
    """Add the options."""
    about = "by default all topics for dead letters"
    command.add_argument("topics", metavar="TOPIC", nargs="*", help=about)
    add_option(command, "--max -m", "N", "end after N of each topic", type=types.count)


def list_(args: argparse.Namespace) -> int:
    """Print where dead letters came from, and why they are there."""
    with to_read(args) as log:
        found = [
            letter
            for topic in args.topics or topics_of(log)
            for letter in islice(log.dead_letters(topic), args.max)
        ]
    rows = []
    for record, failure, replayed in found:
        origin = f"{failure.topic}:{failure.partition}:{failure.offset}"
        failed = failure.last_failed_ms if args.json else _time(failure.last_failed_ms)
        rows.append(
            (
                *(record.topic, record.partition, record.offset, origin, failure.group),
                *(failure.delivery_count, failed, replayed if args.json else _yes(replayed)),
                *(failure.exception, failure.message.partition("\n")[0]),
            )
        )
    say_rows(args, _HEADS, _FIELDS, rows)
    return OK


def show_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("topic", metavar="TOPIC")
    about = "the partition and the offset of one"
    command.add_argument("letters", metavar="P:N", nargs="+", type=types.place, help=about)


def show(args: argparse.Namespace) -> int:
    """Print some dead letters with their values and the stacks of their errors."""
    with to_read(args) as log:
        letters = log.dead_letters(args.topic)
        documents = [_document(letters.get(*place)) for place in args.letters]
    if args.json:
        say_json(documents)
        return OK
    for number, document in enumerate(documents):
        stack = document.pop("stacktrace")
        texts = [each if isinstance(each, str) else json.dumps(each) for each in document.values()]
        say(*([""] if number else []))
        say(*(f"{name + ':':<19} {text}" for name, text in zip(document, texts, strict=True)))
        say("", str(stack).rstrip())
    return OK


def _document(letter: DeadLetter) -> dict[str, object]:
    """Return a record as `embedlog consume --json` prints it, and why it is a dead letter."""
    (line,) = writer("", as_json=True)(
        [letter.record._replace(headers=letter.headers)]
    ).splitlines()
    record, failure = json.loads(line), letter.failure._asdict()
    origin = {f"original_{name}": failure.pop(name) for name in ("topic", "partition", "offset")}
    return {**record, **origin, **failure, "replayed": letter.replayed}


def replay_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("topic", metavar="TOPIC")
    about = "only this one, whether or not it was replayed; by default all that were not"
    add_list(command, "--only", "P:N", about, type=types.place)
    add_flag(command, "--execute", "send them")


def replay(args: argparse.Namespace) -> int:
    """Send dead letters where they came from; with --execute only."""
    with to_write(args) as log:
        letters = log.dead_letters(args.topic)
        chosen = [letters.get(*place) for place in args.only]
        if args.execute:
            count = letters.replay(*chosen)
        else:
            count = len(chosen) or sum(not letter.replayed for letter in letters)
    if args.json:
        say_json({"topic": args.topic, "dry_run": not args.execute, "replayed": count})
    note(f"{'Replayed' if args.execute else 'Would replay'} {plural(count, 'record')}")
    if not args.execute:
        note("Dry run, nothing was sent; repeat the command with --execute")
    return OK


def _time(time_ms: int) -> str | None:
    return None if time_ms < 0 else moment(time_ms).replace(" ", "T")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
