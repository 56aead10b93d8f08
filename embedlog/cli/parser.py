"""The commands and options of the command line, and its exit codes."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from embedlog.version import __version__

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
  0    success, no findings
  1    failure, or findings
  2    wrong command, name or setting
  3    no such log, topic, partition, group, offset or file
  4    disk error, lock timeout, damaged data, or no permission to write
  130  interrupted (Ctrl-C)
  141  the reader of the output has ended (| head)

In JSON, bytes are text if they are UTF-8, and {"base64": "..."} otherwise.
"""

FORMATS = """\
FORMAT is kcat's:  %t topic  %p partition  %o offset  %k key  %s value  %T timestamp (ms)
                   %h headers (a=b,c=d)  %K %S lengths of key and value, -1 for none  %%
with the escapes   \\n \\t \\r \\0 \\\\ \\xHH
"""

RESETS = """\
A target outside of the log means its nearer end.  A time without a zone is UTC.
"""

ACTIVITY = """\
kinds: created altered deleted (topics), rolled recovered retained compacted (partitions),
rebalanced expired (groups), owner failed (maintenance).  The events are the records of the
topic __activity; the process that does the maintenance writes them, within a few seconds.
"""

_Commands = Any  # argparse has no public type for this


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="embedlog",
        description="Kafka's log in a directory: its topics, records and consumer groups.",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"embedlog {__version__}")
    top.add_argument(
        *("--root", "-r"),
        metavar="DIR",
        default=os.environ.get("EMBEDLOG_ROOT"),
        help="the directory of the log; by default $EMBEDLOG_ROOT",
    )
    top.add_argument("--json", action="store_true", help="print JSON; produce reads JSON too")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    _topics(commands)
    _produce(commands)
    _consume(commands)
    _tail(commands)
    _groups(commands)
    _activity(commands)
    _dump(commands)
    _maintenance(commands)
    _health(commands)
    return top


def _command(
    commands: _Commands, name: str, run: str, about: str, json: str = "print JSON"
) -> argparse.ArgumentParser:
    """Add a command, which also accepts the options of `embedlog` itself."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=_sentence(about),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument(
        *("--root", "-r"), metavar="DIR", default=argparse.SUPPRESS, help="the directory of the log"
    )
    command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=json)
    command.set_defaults(run=run)
    return command


def _sentence(about: str) -> str:
    return f"{about[0].upper()}{about[1:]}."


def _topics(commands: _Commands) -> None:
    about = "create, list, describe, alter or delete topics"
    topics = commands.add_parser("topics", help=about, description=_sentence(about))
    verbs = topics.add_subparsers(metavar="VERB", required=True)
    create = _command(verbs, "create", "topics:create", "create a topic")
    create.add_argument("topic", metavar="TOPIC")
    create.add_argument(
        *("--partitions", "-p"),
        type=int,
        metavar="N",
        help="the number of partitions, by default 1",
    )
    create.add_argument(
        "--if-not-exists",
        action="store_true",
        help="succeed if the topic exists with these settings",
    )
    _settings(create)
    names = _command(verbs, "list", "topics:show_names", "print the names of all topics")
    names.add_argument("--internal", action="store_true", help="include names that begin with __")
    describe = _command(verbs, "describe", "topics:describe", "print settings and partitions")
    describe.add_argument("topics", metavar="TOPIC", nargs="*", help="by default all topics")
    alter = _command(verbs, "alter", "topics:alter", "change settings, or add partitions")
    alter.add_argument("topic", metavar="TOPIC")
    alter.add_argument(
        *("--partitions", "-p"), type=int, metavar="N", help="the new number of partitions"
    )
    alter.add_argument(
        "--reset",
        action="append",
        default=[],
        metavar="NAME",
        help="set a setting back to its default",
    )
    _settings(alter)
    delete = _command(verbs, "delete", "topics:delete", "delete topics and their records")
    delete.add_argument("topics", metavar="TOPIC", nargs="+")


def _settings(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        *("--config", "-c"),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a topic setting with Kafka's name, such as retention.ms=60000; may be repeated",
    )


def _produce(commands: _Commands) -> None:
    about = "append one record per line of stdin"
    produce = _command(commands, "produce", "produce:produce", about, "read and print JSON")
    produce.epilog = (
        "With --json each line is an object with value, key, headers ({name: value} or\n"
        "[[name, value], ...]), partition and timestamp (ms); all of them are optional.\n"
    )
    produce.add_argument("topic", metavar="TOPIC")
    produce.add_argument(
        *("--key-separator", "-K"), metavar="TEXT", help="each line is key, TEXT, value"
    )
    produce.add_argument(
        *("--partition", "-p"), type=int, metavar="N", help="append to this partition only"
    )
    produce.add_argument(
        *("--compression", "-z"),
        choices=("none", "lz4", "zstd"),
        default="none",
        help="the codec of batches, by default none",
    )
    produce.add_argument(
        "--sync",
        action="store_true",
        help="flush to the disk before the command ends, to survive a power cut",
    )


def _consume(commands: _Commands) -> None:
    about = "print records, up to the current end"
    consume = _command(commands, "consume", "consume:consume", about)
    consume.epilog = FORMATS
    consume.add_argument("topic", metavar="TOPIC")
    where = consume.add_mutually_exclusive_group()
    where.add_argument(
        "--from-beginning",
        action="store_true",
        help="begin with the first record; the default without --follow",
    )
    where.add_argument(
        *("--offset", "-o"),
        metavar="N|earliest|latest|-N",
        help="where to begin in each partition; -N is N records before the end",
    )
    consume.add_argument("--max", "-m", type=_count, metavar="N", help="end after N records")
    consume.add_argument(
        "--follow", action="store_true", help="wait for new records; by default begin at the end"
    )
    _shown(consume)


def _tail(commands: _Commands) -> None:
    about = "print the last records of each partition"
    tail = _command(commands, "tail", "consume:tail", about)
    tail.epilog = FORMATS
    tail.add_argument("topic", metavar="TOPIC")
    tail.add_argument(
        "-n", type=_count, default=10, metavar="N", dest="last", help="how many, by default 10"
    )
    tail.add_argument("-f", "--follow", action="store_true", help="wait for new records")
    _shown(tail, short=())


def _shown(command: argparse.ArgumentParser, short: tuple[str, ...] = ("-f",)) -> None:
    command.add_argument("--partition", "-p", type=int, metavar="N", help="only this partition")
    command.add_argument(
        *short,
        "--format",
        default="%s\\n",
        metavar="FORMAT",
        help="the format of a record; see below",
    )


def _groups(commands: _Commands) -> None:
    about = "list, describe, watch, reset or delete consumer groups"
    groups = commands.add_parser("groups", help=about, description=_sentence(about))
    verbs = groups.add_subparsers(metavar="VERB", required=True)
    names = _command(verbs, "list", "groups:show_names", "print the names of all groups")
    names.add_argument(
        "--state", action="store_true", help="also print state and number of members"
    )
    describe = _command(verbs, "describe", "groups:describe", "print members and partitions")
    describe.add_argument("groups", metavar="GROUP", nargs="*", help="by default all groups")
    lag = _command(verbs, "lag", "groups:lag", "print the lag of groups")
    lag.add_argument("groups", metavar="GROUP", nargs="*", help="by default all groups")
    lag.add_argument(
        *("--watch", "-w"),
        nargs="?",
        type=_seconds,
        const=1.0,
        metavar="SECONDS",
        help="repeat, by default every second",
    )
    about = "reset the committed offsets of a group; a dry run without --execute"
    _reset(_command(verbs, "reset", "groups:reset", about))
    delete = _command(verbs, "delete", "groups:delete", "delete groups and their committed offsets")
    delete.add_argument("groups", metavar="GROUP", nargs="+")
    _topic_options(delete, "delete only the committed offsets of this topic or partition")


def _reset(reset: argparse.ArgumentParser) -> None:
    reset.epilog = RESETS
    reset.add_argument("group", metavar="GROUP")
    to = reset.add_mutually_exclusive_group(required=True)
    for word, about in (
        ("earliest", "to the first record"),
        ("latest", "to the log end"),
        ("current", "to the committed offset; without a commit, to the log end"),
    ):
        to.add_argument(f"--to-{word}", action="store_const", dest="to", const=word, help=about)
    to.add_argument("--to-offset", type=_count, metavar="N", help="to this offset")
    to.add_argument(
        "--to-datetime",
        type=_datetime,
        metavar="ISO",
        help="to the first record at or after this time",
    )
    to.add_argument(
        "--by-duration",
        type=_duration,
        metavar="DURATION",
        help="to the first record since this long ago, as PT1H30M, 90m or 2d",
    )
    to.add_argument(
        "--shift-by",
        type=int,
        metavar="N",
        help="N offsets from the committed one, back if negative",
    )
    _topic_options(reset, "only this topic or partition; by default all with a commit")
    reset.add_argument("--execute", action="store_true", help="commit the new offsets")


def _topic_options(command: argparse.ArgumentParser, about: str) -> None:
    command.add_argument(
        "--topic", type=_topic, action="append", default=[], metavar="TOPIC[:N,N]", help=about
    )


def _activity(commands: _Commands) -> None:
    about = "print what happened to the log: topics, segments, groups, maintenance"
    activity = _command(commands, "activity", "activity:show", about)
    activity.epilog = ACTIVITY
    activity.add_argument("-f", "--follow", action="store_true", help="wait for new events")
    activity.add_argument(
        *("-n", "--last"),
        type=_count,
        metavar="N",
        help="only the last N events; by default 10 with -f, otherwise all",
    )
    activity.add_argument(
        "--topic",
        action="append",
        default=[],
        metavar="TOPIC",
        help="only events of this topic",
    )
    activity.add_argument(
        "--kind", action="append", default=[], metavar="KIND", help="only events of this kind"
    )
    activity.add_argument("--max", "-m", type=_count, metavar="N", help="end after N events")


def _dump(commands: _Commands) -> None:
    about = "print the batches of a segment file, even if it is damaged"
    dump = _command(commands, "dump", "dump:dump", about)
    dump.add_argument("file", metavar="SEGMENT_FILE")
    dump.add_argument("--columns", action="store_true", help="also print a line per column")


def _maintenance(commands: _Commands) -> None:
    about = "compact topics now: keep the last record of each key"
    compact = _command(commands, "compact", "maintenance:compact", about)
    compact.add_argument("topics", metavar="TOPIC", nargs="+")
    compact.add_argument(
        "--force", action="store_true", help="compact what is not due too, and the active segment"
    )
    about = "run all maintenance jobs once, such as retention and compaction"
    _command(commands, "maintain", "maintenance:maintain", about)
    about = "explain what is deleted or compacted when, and what keeps the rest"
    explain = _command(commands, "explain", "maintenance:explain", about)
    explain.add_argument("topics", metavar="TOPIC", nargs="*", help="by default all topics")


def _health(commands: _Commands) -> None:
    _command(commands, "verify", "health:verify", "read everything and check all checksums")
    about = "drop damaged records; a dry run without --yes"
    repair = _command(commands, "repair", "health:repair", about)
    repair.add_argument("--yes", action="store_true", help="repair the log")
    _command(commands, "doctor", "doctor:doctor", "check versions, speeds, space and locks")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return number


# Types that need modules which other commands should not have to load.


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
