"""`embedlog replicas`, `reassign` and `elect-leaders`: a log in several directories."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import FAILED, OK
from embedlog.cli.printing import note, say_result
from embedlog.cli.tables import table
from embedlog.display import plural
from embedlog.errors import InvalidConfigError, NotEnoughReplicasError, ReplicasDivergedError
from embedlog.files.paths import real_path
from embedlog.record import TopicPartition

if TYPE_CHECKING:
    from embedlog.api import Log
    from embedlog.api.replicas import ReassignmentResult


def show(args: argparse.Namespace) -> int:
    """Print the directories; fails if one is offline."""
    with to_read(args) as log:
        directories = log.replicas()
    heads, rows = directories.rows()
    say_result(args, directories.to_dict(), table([head.upper() for head in heads], rows))
    if not args.json:
        note(directories.title)
    return OK if all(each.online for each in directories) else FAILED


def add(args: argparse.Namespace) -> int:
    """Add a directory."""
    path = real_path(args.path)
    with to_write(args) as log:
        number = log.add_replica(path, args.rack)
    say_result(args, {"id": number, "path": path, "rack": args.rack}, ())
    note(
        f"Added {path} as directory {number}; `embedlog reassign` plans what to move there, and "
        "with --replication-factor N what to copy"
    )
    return OK


def remove(args: argparse.Namespace) -> int:
    """Remove directories, after their copies were made in the others."""
    with _to_remove(args) as log:
        log.remove_replica(*args.paths, force=args.force, throttle=args.throttle)
        directories = log.replicas()
    say_result(args, directories.to_dict(), ())
    note(f"Removed {', '.join(args.paths)}; {directories.title}")
    return OK


def _to_remove(args: argparse.Namespace) -> Log:
    """Open the log to write; with --force also one whose directories cannot decide together."""
    try:
        return to_write(args)
    except (NotEnoughReplicasError, ReplicasDivergedError):
        if not args.force:
            raise
        return to_read(args)


def reassign(args: argparse.Namespace) -> int:
    """Print the moves of copies; with --execute make them."""
    factors = _replication_factors(args)
    moves = _moves(args) if factors is None else None
    if args.cancel:
        chosen = _chosen(args.moves)
        with to_write(args) as log:
            count = log.cancel_reassignment(chosen)
        say_result(args, {"cancelled": count}, ())
        note(f"Cancelled the moves of {plural(count, 'partition')}")
        return OK if chosen is None or count == len(chosen) else FAILED
    if not args.execute:
        with to_read(args) as log:
            result = log.reassign(moves, replication_factor=factors, dry_run=True)
        _say_moves(args, result)
        if result and not args.json:
            note("Dry run, nothing was changed; repeat the command with --execute")
        return OK
    with to_write(args) as log:
        result = log.reassign(moves, replication_factor=factors, throttle=args.throttle)
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


def elect_leaders(args: argparse.Namespace) -> int:
    """Elect leaders, and print the partitions that got another one."""
    with to_write(args) as log:
        partitions = list(_partitions(log, args.topics)) if args.topics else None
        elected = log.elect_leaders(partitions, election=args.election_type)
        leaders = {each: log.partition(*each).placement.leader for each in elected}
        leaderless = [each for each in log.replicas().leaderless if each in (partitions or [each])]
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
