"""What can be typed, and what comes back."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from embedlog import __version__

if TYPE_CHECKING:
    from datetime import datetime, timedelta

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
STORAGE: Final = 4
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141

EXITS = """\
exit codes:
  0    done; nothing is wrong
  1    it failed, or there are findings
  2    the command, a name or a setting is wrong
  3    no such log, topic, partition, group or file
  4    the disk, a lock or damaged bytes stand in the way
  130  interrupted (Ctrl-C)
  141  the reader of the output went away (| head)

Bytes in JSON are text where they are UTF-8, and {"base64": "..."} where not.
"""

FORMATS = """\
-f knows kcat's  %t topic  %p partition  %o offset  %k key  %s value  %T timestamp (ms)
                 %h headers (a=b,c=d)  %K %S lengths of key and value, -1 for none  %%
and the escapes  \\n \\t \\r \\0 \\\\ \\xHH
"""

RESETS = """\
What lies outside of the log means its nearer end.  A time without a zone is UTC.
"""

ACTIVITY = """\
kinds: created altered deleted (topics), rolled recovered retained compacted (partitions),
rebalanced expired (groups), owner failed (the housekeeping).  They are the records of the
topic __activity, written by the process that does the housekeeping, a few seconds later.
"""

_Commands = Any  # argparse's own type for this has no public name


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="embedlog",
        description="Kafka's log as a directory.",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"embedlog {__version__}")
    top.add_argument(
        *("--root", "-r"),
        metavar="DIR",
        default=os.environ.get("EMBEDLOG_ROOT"),
        help="the directory of the log (or set EMBEDLOG_ROOT)",
    )
    top.add_argument("--json", action="store_true", help="write (or read) JSON")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    _topics(commands)
    _produce(commands)
    _consume(commands)
    _tail(commands)
    _groups(commands)
    _activity(commands)
    _dump(commands)
    _keeping(commands)
    _health(commands)
    return top


def _command(commands: _Commands, name: str, run: str, about: str) -> argparse.ArgumentParser:
    """Add a command that also takes what may stand before it."""
    made: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--root", "-r", metavar="DIR", default=argparse.SUPPRESS)
    made.add_argument("--json", action="store_true", default=argparse.SUPPRESS)
    made.set_defaults(run=run)
    return made


def _topics(commands: _Commands) -> None:
    about = "create, list, describe, alter or delete topics"
    topics = commands.add_parser("topics", help=about, description=about)
    verbs = topics.add_subparsers(metavar="VERB", required=True)
    create = _command(verbs, "create", "topics:create", "add a topic")
    create.add_argument("topic", metavar="TOPIC")
    create.add_argument("--partitions", "-p", type=int, metavar="N", help="how many; 1 by default")
    create.add_argument(
        *("--if-not-exists",),
        action="store_true",
        help="leave one that is there and has these settings",
    )
    _settings(create)
    names = _command(verbs, "list", "topics:show_names", "print the names of all topics")
    names.add_argument("--internal", action="store_true", help="with those that begin with __")
    describe = _command(verbs, "describe", "topics:describe", "print settings and partitions")
    describe.add_argument("topics", metavar="TOPIC", nargs="*", help="all, if none is named")
    alter = _command(verbs, "alter", "topics:alter", "change settings, or add partitions")
    alter.add_argument("topic", metavar="TOPIC")
    alter.add_argument("--partitions", "-p", type=int, metavar="N", help="how many there shall be")
    alter.add_argument(
        "--reset", action="append", default=[], metavar="NAME", help="back to its default"
    )
    _settings(alter)
    delete = _command(verbs, "delete", "topics:delete", "remove topics and their records")
    delete.add_argument("topics", metavar="TOPIC", nargs="+")


def _settings(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        *("--config", "-c"),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting by Kafka's name, such as retention.ms=60000",
    )


def _produce(commands: _Commands) -> None:
    about = "append the lines of stdin, one record a line"
    produce = _command(commands, "produce", "produce:produce", about)
    produce.epilog = (
        "With --json a line is an object with value, key, headers ({name: value} or\n"
        "[[name, value], ...]), partition and timestamp (ms); what is missing is none.\n"
    )
    produce.add_argument("topic", metavar="TOPIC")
    produce.add_argument(
        *("--key-separator", "-K"), metavar="TEXT", help="a line is key, TEXT, value"
    )
    produce.add_argument("--partition", "-p", type=int, metavar="N")
    produce.add_argument(*("--compression", "-z"), choices=("none", "lz4", "zstd"), default="none")
    produce.add_argument(
        "--sync", action="store_true", help="return once all would survive a power cut"
    )


def _consume(commands: _Commands) -> None:
    about = "print records, up to the end as of now"
    consume = _command(commands, "consume", "consume:consume", about)
    consume.epilog = FORMATS
    consume.add_argument("topic", metavar="TOPIC")
    where = consume.add_mutually_exclusive_group()
    where.add_argument("--from-beginning", action="store_true", help="the default, unless --follow")
    where.add_argument(
        *("--offset", "-o"),
        metavar="N|earliest|latest|-N",
        help="begin there, or N before the end, in each partition",
    )
    consume.add_argument("--max", "-m", type=_count, metavar="N", help="stop after N records")
    consume.add_argument("--follow", action="store_true", help="wait for more, from the end on")
    _shown(consume)


def _tail(commands: _Commands) -> None:
    about = "print the last records of each partition"
    tail = _command(commands, "tail", "consume:tail", about)
    tail.epilog = FORMATS
    tail.add_argument("topic", metavar="TOPIC")
    tail.add_argument("-n", type=_count, default=10, metavar="N", dest="last", help="how many")
    tail.add_argument("-f", "--follow", action="store_true", help="wait for more")
    _shown(tail, short=())


def _shown(command: argparse.ArgumentParser, short: tuple[str, ...] = ("-f",)) -> None:
    command.add_argument("--partition", "-p", type=int, metavar="N", help="only this one")
    command.add_argument(
        *short, "--format", default="%s\\n", metavar="FORMAT", help="how a record looks"
    )


def _groups(commands: _Commands) -> None:
    about = "list, describe, watch, move or delete consumer groups"
    groups = commands.add_parser("groups", help=about, description=about)
    verbs = groups.add_subparsers(metavar="VERB", required=True)
    names = _command(verbs, "list", "groups:show_names", "print the names of all groups")
    names.add_argument("--state", action="store_true", help="with state and number of members")
    describe = _command(verbs, "describe", "groups:describe", "print members and partitions")
    describe.add_argument("groups", metavar="GROUP", nargs="*", help="all, if none is named")
    lag = _command(verbs, "lag", "groups:lag", "print how far groups are behind")
    lag.add_argument("groups", metavar="GROUP", nargs="*", help="all, if none is named")
    lag.add_argument(
        *("--watch", "-w"),
        nargs="?",
        type=_seconds,
        const=1.0,
        metavar="SECONDS",
        help="again and again, every second unless told otherwise",
    )
    about = "say where a group goes on; tells what it would do, unless --execute"
    _reset(_command(verbs, "reset", "groups:reset", about))
    delete = _command(verbs, "delete", "groups:delete", "remove groups and what they committed")
    delete.add_argument("groups", metavar="GROUP", nargs="+")
    _of_topics(delete, "only what was committed for these")


def _reset(reset: argparse.ArgumentParser) -> None:
    reset.epilog = RESETS
    reset.add_argument("group", metavar="GROUP")
    to = reset.add_mutually_exclusive_group(required=True)
    for word, about in (
        ("earliest", "the first record there is"),
        ("latest", "the next that is written"),
        ("current", "where it is, if the log has that; the end, where it committed nothing"),
    ):
        to.add_argument(f"--to-{word}", action="store_const", dest="to", const=word, help=about)
    to.add_argument("--to-offset", type=_count, metavar="N")
    to.add_argument(
        "--to-datetime", type=_datetime, metavar="ISO", help="the first record at or after it"
    )
    to.add_argument(
        "--by-duration", type=_duration, metavar="DURATION", help="so long ago: PT1H30M, 90m, 2d"
    )
    to.add_argument("--shift-by", type=int, metavar="N", help="from where it is; back, if negative")
    _of_topics(reset, "only these; all it committed for, unless given")
    reset.add_argument("--execute", action="store_true", help="do it")


def _of_topics(command: argparse.ArgumentParser, about: str) -> None:
    command.add_argument(
        "--topic", type=_topic, action="append", default=[], metavar="TOPIC[:N,N]", help=about
    )


def _activity(commands: _Commands) -> None:
    about = "print what the housekeeping did, and saw others do"
    activity = _command(commands, "activity", "activity:show", about)
    activity.epilog = ACTIVITY
    activity.add_argument("-f", "--follow", action="store_true", help="wait for more")
    activity.add_argument(
        *("-n", "--last"), type=_count, metavar="N", help="begin N before the end; 10 with -f"
    )
    activity.add_argument("--topic", action="append", default=[], metavar="TOPIC")
    activity.add_argument("--kind", action="append", default=[], metavar="KIND")
    activity.add_argument("--max", "-m", type=_count, metavar="N", help="stop after N events")


def _dump(commands: _Commands) -> None:
    about = "print the batches of a segment file, also of a damaged one"
    dump = _command(commands, "dump", "dump:dump", about)
    dump.add_argument("file", metavar="SEGMENT_FILE")
    dump.add_argument("--columns", action="store_true", help="with a line for each column")


def _keeping(commands: _Commands) -> None:
    about = "keep the last record of each key, in topics with cleanup.policy=compact"
    compact = _command(commands, "compact", "housekeeping:compact", about)
    compact.add_argument("topics", metavar="TOPIC", nargs="+")
    compact.add_argument(
        "--force", action="store_true", help="also what is not due, and the active segment"
    )
    about = "do all housekeeping once: retention, compaction, what groups no longer use"
    _command(commands, "maintain", "housekeeping:maintain", about)
    about = "say in words what is deleted or compacted when, and what keeps it"
    explain = _command(commands, "explain", "housekeeping:explain", about)
    explain.add_argument("topics", metavar="TOPIC", nargs="*", help="all, if none is named")


def _health(commands: _Commands) -> None:
    _command(commands, "verify", "health:verify", "read everything and check every checksum")
    about = "leave out what is damaged; tells what it would do, unless --yes"
    repair = _command(commands, "repair", "health:repair", about)
    repair.add_argument("--yes", action="store_true", help="do it")
    _command(commands, "doctor", "doctor:doctor", "look at versions, speeds, space and locks")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


# What takes modules or patterns that the other commands would only load in vain.


def _seconds(text: str) -> float:
    from embedlog.cli.argument_types import seconds

    return seconds(text)


def _topic(text: str) -> tuple[str, list[int]]:
    from embedlog.cli.argument_types import topic

    return topic(text)


def _datetime(text: str) -> datetime:
    from embedlog.cli.argument_types import moment

    return moment(text)


def _duration(text: str) -> timedelta:
    from embedlog.cli.argument_types import duration

    return duration(text)
