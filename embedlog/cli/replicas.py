"""`embedlog replicas`, `reassign` and `elect-leaders`: a log in several directories."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from embedlog.cli import argument_types as types
from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import FAILED, OK, CommandParser, add_flag, add_option
from embedlog.cli.printing import note, say_result, table
from embedlog.display import plural
from embedlog.errors import InvalidConfigError, NotEnoughReplicasError, ReplicasDivergedError
from embedlog.files.paths import real_path
from embedlog.record import TopicPartition

if TYPE_CHECKING:
    from embedlog.api import Log
    from embedlog.api.replicas import ReassignmentResult

REPLICAS = """\
A log in several directories, each on a disk of its own, has copies of its partitions: `embedlog
topics create --replication-factor`.  Any directory leads to all.  A directory that breaks is
offline until it works again; then it catches up by itself.

examples:
  embedlog replicas add /disk2/log --rack controller-b
  embedlog replicas remove /disk1/log
"""

REASSIGN = """\
Without moves, the fewest that make the copies even over all directories.  A move names the
directories of a partition by their ids in `embedlog replicas list`, the preferred leader first;
more or fewer than before change how many copies it has.  With --replication-factor, all topics, or
those that are named, get so many copies.  Without --execute nothing is changed.

A file has the form of kafka-reassign-partitions:
  {"partitions": [{"topic": "flights", "partition": 0, "replicas": [1, 2]}]}

examples:
  embedlog reassign
  embedlog reassign --execute --throttle 50000000
  embedlog reassign flights:0=1,2 flights:1=2,1 --execute
  embedlog reassign --replication-factor 3 flights --execute
"""


def _throttle(command: CommandParser) -> None:
    about = "copy at most so many bytes per second"
    add_option(command, "--throttle", "BYTES", about, type=types.rate)


def list_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = REPLICAS


def list_(args: argparse.Namespace) -> int:
    """Print the directories; fails if one is offline."""
    with to_read(args) as log:
        directories = log.replicas
        heads, rows = directories.rows()
        say_result(args, directories.to_dict(), table([head.upper() for head in heads], rows))
        if not args.json:
            note(directories.title)
        return OK if all(each.online for each in directories) else FAILED


def add_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = REPLICAS
    command.add_argument("path", metavar="PATH")
    add_option(
        command, "--rack", "LABEL", "what fails together with it; copies are in different racks"
    )


def add(args: argparse.Namespace) -> int:
    """Add a directory."""
    path = real_path(args.path)
    with to_write(args) as log:
        number = log.replicas.add(path, args.rack)
    say_result(args, {"id": number, "path": path, "rack": args.rack}, ())
    note(
        f"Added {path} as directory {number}; `embedlog reassign` plans what to move there, and "
        "with --replication-factor N what to copy"
    )
    return OK


def remove_options(command: CommandParser) -> None:
    """Add the options."""
    about = "the path of a directory, as `embedlog replicas list` has it"
    command.add_argument("paths", metavar="DIRECTORY", nargs="+", help=about)
    about = "also if it has the only copy of records, or too few others are left to decide"
    add_flag(command, "--force", about)
    _throttle(command)


def remove(args: argparse.Namespace) -> int:
    """Remove directories, after their copies were made in the others."""
    with _to_remove(args) as log:
        log.replicas.remove(*args.paths, force=args.force, throttle=args.throttle)
        say_result(args, log.replicas.to_dict(), ())
        note(f"Removed {', '.join(args.paths)}; {log.replicas.title}")
    return OK


def _to_remove(args: argparse.Namespace) -> Log:
    """Open the log to write; with --force also one whose directories cannot decide together."""
    try:
        return to_write(args)
    except (NotEnoughReplicasError, ReplicasDivergedError):
        if not args.force:
            raise
        return to_read(args)


def reassign_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = REASSIGN
    command.add_argument("moves", metavar="TOPIC:N=ID,ID", nargs="*")
    add_option(
        *(command, "--replication-factor", "N", "how many copies to have, of the named topics"),
        type=int,
    )
    add_option(command, "--from", "FILE", "a file with moves; - is stdin", dest="source")
    add_flag(command, "--execute", "move the copies")
    add_flag(command, "--cancel", "keep the old copies of partitions that are being moved")
    _throttle(command)


def reassign(args: argparse.Namespace) -> int:
    """Print the moves of copies; with --execute make them."""
    factors = _replication_factors(args)
    moves = _moves(args) if factors is None else None
    if args.cancel:
        chosen = _chosen(args.moves)
        with to_write(args) as log:
            count = log.replicas.cancel_reassignment(chosen)
        say_result(args, {"cancelled": count}, ())
        note(f"Cancelled the moves of {plural(count, 'partition')}")
        return OK if chosen is None or count == len(chosen) else FAILED
    if not args.execute:
        with to_read(args) as log:
            result = log.replicas.reassign(moves, replication_factor=factors, dry_run=True)
        _say_moves(args, result)
        if result and not args.json:
            note("Repeat the command with --execute")
        return OK
    with to_write(args) as log:
        result = log.replicas.reassign(moves, replication_factor=factors, throttle=args.throttle)
    _say_moves(args, result)
    return FAILED if result.pending or result.superseded else OK


def _say_moves(args: argparse.Namespace, result: ReassignmentResult) -> None:
    heads, rows = result.rows()
    say_result(
        args, result.to_dict(), table([head.upper() for head in heads], rows) if rows else ()
    )
    if not args.json:
        note(result.title)


def _replication_factors(args: argparse.Namespace) -> int | dict[str, int] | None:
    """Return how many copies to have, of all topics or of those that are named."""
    factor: int | None = args.replication_factor
    if factor is None:
        return None
    if args.cancel or args.source is not None or any("=" in word for word in args.moves):
        raise InvalidConfigError("Name moves or a replication factor, not both")
    return dict.fromkeys(args.moves, factor) or factor


def _moves(args: argparse.Namespace) -> dict[TopicPartition, tuple[int, ...]] | None:
    """Return the moves of the command line, or of a file; None without any."""
    moves = {}
    for word in () if args.cancel else args.moves:
        where, separator, replicas = word.partition("=")
        name, _, number = where.rpartition(":")
        if not (separator and name and number.isdecimal()):
            raise InvalidConfigError(f"A move must be TOPIC:N=ID,ID, got {word!r}")
        moves[TopicPartition(name, int(number))] = _ids(replicas.split(","), word)
    if args.source is not None:
        moves |= _moves_in_file(args.source)
    return moves or None


def _ids(words: list[Any], where: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, words))
    except (ValueError, TypeError):
        raise InvalidConfigError(f"Replicas must be ids of directories, got {where!r}") from None


def _moves_in_file(path: str) -> dict[TopicPartition, tuple[int, ...]]:
    """Return the moves in a file of kafka-reassign-partitions."""
    if path == "-":
        text = sys.stdin.read()
    else:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    try:
        parts = json.loads(text)["partitions"]
        return {
            TopicPartition(str(part["topic"]), int(part["partition"])): _ids(
                part["replicas"], str(part)
            )
            for part in parts
        }
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfigError(
            f"{os.path.basename(path)} has no moves as kafka-reassign-partitions reads them: "
            f"{type(error).__name__}: {error}",
            todo='Write {"partitions": [{"topic": "t", "partition": 0, "replicas": [1, 2]}]}.',
        ) from None


def _chosen(words: list[str]) -> list[TopicPartition] | None:
    """Return the partitions named as TOPIC:N, each once; None without any."""
    chosen = dict[TopicPartition, None]()
    for word in words:
        name, _, number = word.partition("=")[0].rpartition(":")
        if not (name and number.isdecimal()):
            raise InvalidConfigError(f"A partition must be TOPIC:N, got {word!r}")
        chosen[TopicPartition(name, int(number))] = None
    return list(chosen) or None


def elect_leaders_options(command: CommandParser) -> None:
    """Add the options."""
    about = "by default all topics"
    command.add_argument("topics", metavar="TOPIC[:N,N]", nargs="*", type=types.topic, help=about)
    command.add_argument(
        "--election-type",
        choices=("preferred", "unclean"),
        default="preferred",
        help="unclean: for partitions without a leader, the longest copy that is online, unless "
        "one that is offline can be read and has more records; what only the others have is lost",
    )


def elect_leaders(args: argparse.Namespace) -> int:
    """Elect leaders, and print the partitions that got another one."""
    with to_write(args) as log:
        partitions = list(_partitions(log, args.topics)) if args.topics else None
        elected = log.replicas.elect_leaders(partitions, election=args.election_type)
        leaders = {each: log.partition(*each).placement.leader for each in elected}
        leaderless = [each for each in log.replicas.leaderless if each in (partitions or [each])]
    document = [{**each._asdict(), "leader": leader} for each, leader in leaders.items()]
    lines = [
        f"{topic}-{number}: directory {leader} leads" for (topic, number), leader in leaders.items()
    ]
    say_result(args, document, lines)
    if leaderless:
        names = ", ".join(f"{topic}-{number}" for topic, number in leaderless)
        note(f"Still without a leader: {names}")
    elif not (args.json or elected):
        note("No election was needed, or possible")
    return FAILED if leaderless else OK


def _partitions(log: Log, topics: list[tuple[str, list[int]]]) -> Iterator[TopicPartition]:
    for name, numbers in topics:
        for number in numbers or range(log.topic(name).partitions):
            yield TopicPartition(name, number)
