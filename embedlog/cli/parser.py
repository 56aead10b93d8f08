"""The commands and options of the command line, and its exit codes."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final, NoReturn

from embedlog.cli.argument_types import (
    column_names,
    count,
    duration,
    moment,
    point,
    rate,
    seconds,
    time,
    topic,
)
from embedlog.version import __version__

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
  3    no such log, topic, partition, group, schema, offset or file
  4    disk error, lock timeout, damaged data, or no permission to write
  130  interrupted (Ctrl-C)
  141  the reader of the output has ended (| head)

In JSON, bytes are text if they are UTF-8, and {"base64": "..."} otherwise; keys and values of
topics with serializers are JSON values.
"""

CREATE = """\
With --schema-from it is a typed topic: its values are rows with the columns of FILE, of which
nothing else is used; then --key names the key column, or several, as in origin,dest.  Parquet has
the types of its columns; those of CSV and JSON lines are inferred from the first 64 MB.

examples:
  embedlog topics create flights -p 4 --schema-from flights.csv --key tailnum --timestamp time_hour
  embedlog topics create fleet --key str --value json -c cleanup.policy=compact
"""

LINES = """\
Without --from, each line of stdin is a record.  With --json each line is an object with value,
key, headers ({name: value} or [[name, value], ...]), partition and timestamp (ms); all of them are
optional.

The rows of a Parquet, CSV or JSON lines file become records of a typed topic, each column by its
name; -z compresses them.  Of a topic of bytes, the lines of a file of JSON lines are the values.

examples:
  embedlog produce flights --from flights.parquet -z zstd
  echo '{"key": "UA", "value": "United"}' | embedlog produce airlines --json
"""

FORMATS = """\
FORMAT is kcat's:  %t topic  %p partition  %o offset  %k key  %s value  %T timestamp (ms)
                   %h headers (a=b,c=d)  %K %S lengths of key and value, -1 for none  %%
with the escapes   \\n \\t \\r \\0 \\\\ \\xHH
"""

ROWS = """
Of a typed topic, %s is a JSON object of the columns, or of those of --columns; these may be offset,
partition and timestamp, too.  --where is a condition in SQL, and needs Polars.

examples:
  embedlog consume flights --columns carrier,dep_delay --where "distance between 100 and 200"
  embedlog consume airlines -f '%k: %s\\n'
"""

SQL = """\
Every topic is a table, and Polars runs the query: pip install "embedlog[polars]".  A typed topic
has its own columns, a topic of bytes key and value; each has offset, partition and timestamp.
Write a name such as "my-topic" in double quotes.

examples:
  embedlog sql "select carrier, avg(dep_delay) from flights group by carrier"
  embedlog sql "select * from flights where carrier = 'UA'" --format csv > united.csv
"""

SUBJECTS = """\
A subject has versions.  That of the values of a topic is TOPIC-value, that of its keys TOPIC-key.

examples:
  embedlog topics create orders --key str --value avro
  embedlog schemas register orders-value order.avsc
"""

CONVERT = """\
Columns of a typed topic come from values of Avro, by the latest schema of TOPIC-value, or of JSON;
and go back to them.  Each record is copied once: a conversion that was interrupted goes on when
the command is repeated, and one that is complete copies what has been appended since.  Keys,
timestamps, headers, tombstones, partitions and the settings of the topic stay the same.

examples:
  embedlog convert orders orders-columns --key order_id
  embedlog convert orders-columns orders-avro
  embedlog convert clicks clicks-columns --key user --timestamp at --rename timestamp=at
"""

RESETS = """\
A target outside of the log means its nearer end.  A time without a zone is UTC.
"""

TIMES = """\
TIME is a date, with a time or without, in UTC unless it has a zone; or how long ago: 90m, 2d,
PT1H30M.

examples:
  embedlog offsets flights --at 2026-01-31T12:00:00Z
  embedlog delete-records flights --at 30d --yes
  embedlog delete-records flights:0 --before 1000 --yes
"""

FILES = """\
The suffixes are .jsonl, .ndjson and .json, .csv, .parquet and .pq.  Key, value, headers,
timestamp and partition come back as they were from JSON lines and Parquet; offsets do not: the
records get those of the topic.  CSV holds UTF-8 only; its timestamps are milliseconds, a missing
key or value is an empty field without quotes, and headers are JSON.

If the topic has serializers, keys and values are JSON values in JSON lines, text in CSV, and in
Parquet numbers or text (also of JSON, Avro and UUIDs).  So the topic of an import needs the same
serializers, and a schema for those of Avro; with --raw for both commands, none matter, and every
byte comes back.  Pickled keys and values are always as they are stored.
"""

EXPORT = f"""\
{FILES}
Of a typed topic, the columns of the file are those of the topic, or of --columns, with their
types in Parquet; in CSV and JSON lines, times are text and binary values base64, and in JSON NaN
is null.  Tombstones are left out.  --where is a condition in SQL, and needs Polars.

TIME is a date, with a time or without, in UTC unless it has a zone; or how long ago: 90m, 2d.

examples:
  embedlog export flights flights.parquet --from 2026-01-31 --until 90m
  embedlog export flights --to united.parquet --where "carrier = 'UA'" --columns dest,dep_delay
  embedlog export flights:0,1 - | jq .value
"""

IMPORT = f"""\
{FILES}
examples:
  embedlog import flights flights.parquet
  embedlog import flights flights.csv --skip 1000
"""

COMPLETION = """\
For bash, put this into ~/.bashrc:  eval "$(embedlog completion bash)"
"""

ACTIVITY = """\
kinds: created altered deleted (topics), rolled recovered retained compacted (partitions),
rebalanced expired (groups), mirrored skipped failover (mirrors), offline online removed
(directories), elected isr reassigned (copies), owner failed (maintenance).  The events are the
records of the topic __activity; the process that does the maintenance writes them, within a few
seconds, and a mirror its own.
"""

MIRROR = """\
SOURCE and TARGET are directories of logs, or kafka://HOST:PORT.  Copies in a log have the offsets
of their source, and no other program may write to them, until `embedlog failover`.  A mirror that
was interrupted goes on where it was when the command is repeated.

`embedlog mirror status` prints what the mirrors to a log have copied, and how far they are behind.

examples:
  embedlog mirror /data/log /backup/log --follow --groups '.*'
  embedlog mirror /site-a/log /hub/log --topics 'orders.*' --as a
  embedlog mirror /site-a/log /site-b/log --merge --follow
  embedlog mirror status --root /backup/log
"""

FAILOVER = """\
From then on programs may write to the copies, and their mirrors may not.  The strategy says where
groups go on: at the offsets that the mirror copied (offsets), at the first record at or after a
time (time, with --at), at the first record or at the log end (earliest, latest).  With --offset, a
group goes on at that offset of the partition, and at the copied offsets in all others.

Without GROUP, programs may write to the copies, and no group is moved.  A group that does not exist
in this log needs --topic, and a strategy other than offsets.

  repeats     offsets that the group certainly gets again
  may-repeat  those that it gets again at most, if it had read all that was copied
  may-skip    offsets of the copy that it may never get
  not-copied  offsets that the source had and the copy has not, as last known

examples:
  embedlog failover billing --root /backup/log
  embedlog failover billing --strategy time --at 10m --root /backup/log --execute
  embedlog failover --topic orders --root /backup/log --execute
"""

AUDIT = """\
Producers and groups count only if the topic has audit=true.  Exits with 1 if tiers differ.  TIME is
a date, with a time or without, in UTC unless it has a zone; or how long ago: 90m, 2d, PT1H30M.

examples:
  embedlog topics alter flights -c audit=true
  embedlog audit flights --window 1h --since 2d
  embedlog audit flights --differences
"""

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

_Parser = Any  # argparse has no public type for groups of commands or of options


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors say what may have been meant."""

    verbs: Any = None
    """The action with the commands that this command consists of, by name in ``choices``."""

    def options(self) -> list[argparse.Action]:
        """Return the options."""
        return [action for action in self._actions if action.option_strings]

    def option_names(self) -> list[str]:
        """Return the names of the options, such as ``--root`` and ``-r``."""
        return [name for action in self.options() for name in action.option_strings]

    def positionals(self) -> list[argparse.Action]:
        """Return the arguments that are no options."""
        return [action for action in self._actions if not action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Print the usage and an error, and exit."""
        if self.verbs is not None:
            word = re.match(r"argument (COMMAND|VERB): invalid choice: '([^']*)'", message)
            if word is not None:
                hint = _did_you_mean(word[2], self.verbs.choices)
                message = f"there is no {word[1].lower()} {word[2]!r}{hint}"
            elif message.endswith(": VERB"):
                message = f"name a verb: {', '.join(self.verbs.choices)}"
        super().error(message)

    def refuse(self, words: list[str]) -> NoReturn:
        """Print the usage and an error about words that are no options or arguments."""
        hints = (
            _did_you_mean(word, self.option_names()) for word in words if word.startswith("--")
        )
        super().error(f"unrecognized arguments: {' '.join(words)}{next(hints, '')}")


def _did_you_mean(word: str, names: Any) -> str:
    from difflib import get_close_matches  # Imported here: only errors need it.

    similar = get_close_matches(word.partition("=")[0], names, n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; exits with a message if it is wrong."""
    top = parser()
    # argparse would take the value of an unknown option for the command.
    for word in takewhile(lambda word: word.startswith("--"), argv):
        if word.partition("=")[0] not in top.option_names():
            top.refuse([word])
    args, unknown = top.parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    return args


_MUST_EXIST = "create no log where there is none, such as where a disk is not mounted"


def parser() -> CommandParser:
    """Return the parser of the whole command line."""
    top = CommandParser(
        prog="embedlog",
        description="Kafka's log in a directory: its topics, records and consumer groups.",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"embedlog {__version__}")
    root = os.environ.get("EMBEDLOG_ROOT")
    about = "the directory of the log; by default $EMBEDLOG_ROOT"
    _option(top, "--root -r", "DIR", about, default=root)
    _flag(top, "--json", "print JSON; produce reads JSON too")
    _flag(top, "--must-exist", _MUST_EXIST)
    commands = top.verbs = top.add_subparsers(metavar="COMMAND", required=True)
    _topics(commands)
    _produce(commands)
    _consume(commands)
    _tail(commands)
    _sql(commands)
    _groups(commands)
    _schemas(commands)
    _replicas(commands)
    _offsets(commands)
    _files(commands)
    _convert(commands)
    _mirror(commands)
    _activity(commands)
    _audit(commands)
    _metrics(commands)
    _dump(commands)
    _maintenance(commands)
    _health(commands)
    _completion(commands)
    return top


def _command(
    commands: _Parser,
    name: str,
    run: str,
    about: str,
    *,
    json: str = "print JSON",
    epilog: str | None = None,
) -> CommandParser:
    """Add a command, which also accepts the options of `embedlog` itself."""
    command: CommandParser = commands.add_parser(
        name,
        help=about,
        description=_sentence(about),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _option(command, "--root -r", "DIR", "the directory of the log", default=argparse.SUPPRESS)
    _flag(command, "--json", json, default=argparse.SUPPRESS)
    _flag(command, "--must-exist", _MUST_EXIST, default=argparse.SUPPRESS)
    command.set_defaults(run=run, parser=command)
    return command


def _verbs(commands: _Parser, name: str, about: str) -> _Parser:
    """Add a command that consists of other commands."""
    command = commands.add_parser(name, help=about, description=_sentence(about))
    command.verbs = command.add_subparsers(metavar="VERB", required=True)
    return command.verbs


def _sentence(about: str) -> str:
    return f"{about[0].upper()}{about[1:]}."


def _option(command: _Parser, names: str, metavar: str, about: str, **options: Any) -> None:
    """Add an option with a value."""
    command.add_argument(*names.split(), metavar=metavar, help=about, **options)


def _list(command: _Parser, name: str, metavar: str, about: str, **options: Any) -> None:
    """Add an option that may be repeated."""
    _option(command, name, metavar, about, action="append", default=[], **options)


def _flag(command: _Parser, names: str, about: str, **options: Any) -> None:
    """Add an option without a value."""
    command.add_argument(*names.split(), action="store_true", help=about, **options)


def _topics(commands: _Parser) -> None:
    verbs = _verbs(commands, "topics", "create, list, describe, alter or delete topics")
    create = _command(verbs, "create", "topics:create", "create a topic", epilog=CREATE)
    create.add_argument("topic", metavar="TOPIC")
    about = "the number of partitions, by default 1"
    _option(create, "--partitions -p", "N", about, type=int)
    about = "how many copies each partition has, by default 3 or as many as there are directories"
    _option(create, "--replication-factor", "N", about, type=int)
    about = "how keys are stored: bytes, str, int, float, uuid, json, avro or pickle"
    _option(create, "--key", "NAME", f"{about}; with --schema-from the key column")
    _option(create, "--value", "NAME", "how values are stored, likewise")
    about = "make a typed topic with the columns of this Parquet, CSV or JSON lines file"
    _option(create, "--schema-from", "FILE", about)
    _option(create, "--timestamp", "COLUMN", "with --schema-from, the column of timestamps")
    _flag(create, "--if-not-exists", "succeed if the topic exists with these settings")
    _settings(create)
    names = _command(verbs, "list", "topics:show_names", "print the names of all topics")
    _flag(names, "--internal", "include names that begin with __")
    describe = _command(verbs, "describe", "topics:describe", "print settings and partitions")
    describe.add_argument("topics", metavar="TOPIC", nargs="*", help="by default all topics")
    alter = _command(verbs, "alter", "topics:alter", "change settings, or add partitions")
    alter.add_argument("topic", metavar="TOPIC")
    _option(alter, "--partitions -p", "N", "the new number of partitions", type=int)
    _list(alter, "--reset", "NAME", "set a setting back to its default")
    _settings(alter)
    about = "delete topics and their records; a dry run without --yes"
    delete = _command(verbs, "delete", "topics:delete", about)
    delete.add_argument("topics", metavar="TOPIC", nargs="+")
    _flag(delete, "--yes", "delete them")


def _settings(command: _Parser) -> None:
    about = "a topic setting with Kafka's name, such as retention.ms=60000; may be repeated"
    _list(command, "--config -c", "NAME=VALUE", about)


def _produce(commands: _Parser) -> None:
    about = "append one record per line of stdin, or per row of a file"
    produce = _command(
        commands, "produce", "produce_file:produce", about, json="read and print JSON", epilog=LINES
    )
    produce.add_argument("topic", metavar="TOPIC")
    _option(produce, "--key-separator -K", "TEXT", "each line is key, TEXT, value")
    _option(produce, "--partition -p", "N", "append to this partition only", type=int)
    produce.add_argument(
        *("--compression", "-z"),
        choices=("none", "lz4", "zstd"),
        default="none",
        help="the codec of batches, by default none",
    )
    about = "append the rows of this Parquet, CSV or JSON lines file to a typed topic; - is stdin"
    _option(produce, "--from", "FILE", about, dest="source")
    _file_format(produce, dest="file_format")
    _option(produce, "--skip", "N", "skip the first N rows of FILE", type=count, default=0)
    _flag(produce, "--sync", "flush to the disk before the command ends, to survive a power cut")


def _consume(commands: _Parser) -> None:
    about = "print records, up to the current end"
    consume = _command(commands, "consume", "consume:consume", about, epilog=FORMATS + ROWS)
    consume.add_argument("topic", metavar="TOPIC")
    start = consume.add_mutually_exclusive_group()
    _flag(start, "--from-beginning", "begin with the first record; the default without --follow")
    about = "where to begin in each partition; -N is N records before the end"
    _option(start, "--offset -o", "N|earliest|latest|-N", about)
    _option(consume, "--max -m", "N", "end after N records", type=count)
    _flag(consume, "--follow", "wait for new records; by default begin at the end")
    _selection(consume, "-f --format")
    _rows(consume)


def _tail(commands: _Parser) -> None:
    about = "print the last records of each partition"
    tail = _command(commands, "tail", "consume:tail", about, epilog=FORMATS)
    tail.add_argument("topic", metavar="TOPIC")
    _option(tail, "-n", "N", "how many, by default 10", dest="last", type=count, default=10)
    _flag(tail, "-f --follow", "wait for new records")
    _selection(tail, "--format")


def _selection(command: _Parser, format_names: str) -> None:
    _option(command, "--partition -p", "N", "only this partition", type=int)
    about = "the format of a record; see below"
    _option(command, format_names, "FORMAT", about, default="%s\\n")


def _groups(commands: _Parser) -> None:
    verbs = _verbs(commands, "groups", "list, describe, watch, reset or delete consumer groups")
    names = _command(verbs, "list", "groups:show_names", "print the names of all groups")
    _flag(names, "--state", "also print state and number of members")
    describe = _command(verbs, "describe", "groups:describe", "print members and partitions")
    describe.add_argument("groups", metavar="GROUP", nargs="*", help="by default all groups")
    lag = _command(verbs, "lag", "groups:lag", "print the lag of groups")
    lag.add_argument("groups", metavar="GROUP", nargs="*", help="by default all groups")
    about = "repeat, by default every second"
    _option(lag, "--watch -w", "SECONDS", about, nargs="?", type=seconds, const=1.0)
    _reset(verbs)
    delete = _command(verbs, "delete", "groups:delete", "delete groups and their committed offsets")
    delete.add_argument("groups", metavar="GROUP", nargs="+")
    about = "delete only the committed offsets of this topic or partition"
    _list(delete, "--topic", "TOPIC[:N,N]", about, type=topic)
    about = "delete the committed offsets of topics or partitions"
    offsets = _command(verbs, "delete-offsets", "groups:delete_offsets", about)
    offsets.add_argument("group", metavar="GROUP")
    offsets.add_argument("topic", metavar="TOPIC[:N,N]", nargs="+", type=topic)


def _reset(verbs: _Parser) -> None:
    about = "reset the committed offsets of a group; a dry run without --execute"
    reset = _command(verbs, "reset", "groups:reset", about, epilog=RESETS)
    reset.add_argument("group", metavar="GROUP")
    to = reset.add_mutually_exclusive_group(required=True)
    for word, about in (
        ("earliest", "to the first record"),
        ("latest", "to the log end"),
        ("current", "to the committed offset; without a commit, to the log end"),
    ):
        to.add_argument(f"--to-{word}", action="store_const", dest="to", const=word, help=about)
    _option(to, "--to-offset", "N", "to this offset", type=count)
    _option(to, "--to-datetime", "ISO", "to the first record at or after this time", type=moment)
    about = "to the first record since this long ago, as PT1H30M, 90m or 2d"
    _option(to, "--by-duration", "DURATION", about, type=duration)
    _option(to, "--shift-by", "N", "N offsets from the committed one, back if negative", type=int)
    about = "only this topic or partition; by default all with a commit"
    _list(reset, "--topic", "TOPIC[:N,N]", about, type=topic)
    _flag(reset, "--execute", "commit the new offsets")


def _schemas(commands: _Parser) -> None:
    verbs = _verbs(commands, "schemas", "list, show, register, check or delete schemas of Avro")
    _command(verbs, "list", "schemas:show_subjects", "print all subjects", epilog=SUBJECTS)
    show = _command(verbs, "show", "schemas:show", "print a schema, by default the latest version")
    show.add_argument("subject", metavar="SUBJECT[:VERSION]")
    about = "register a schema as the next version of a subject"
    register = _command(verbs, "register", "schemas:register", about, epilog=SUBJECTS)
    about = "print why a schema cannot be registered; exit code 1 if so"
    check = _command(verbs, "check", "schemas:check", about)
    for command in (register, check):
        command.add_argument("subject", metavar="SUBJECT")
        command.add_argument("file", metavar="FILE", help="the schema as JSON; - is stdin")
    about = "print or set what a new version must be compatible with"
    level = _command(verbs, "compatibility", "schemas:compatibility", about)
    about = "by default all subjects without a level of their own"
    level.add_argument("subject", metavar="SUBJECT", nargs="?", help=about)
    about = "NONE; BACKWARD, FORWARD or FULL; or one of these with _TRANSITIVE"
    _option(level, "--set", "LEVEL", about, type=str.upper)
    about = "delete a subject; records with its schemas stay readable"
    delete = _command(verbs, "delete", "schemas:delete", about)
    delete.add_argument("subject", metavar="SUBJECT")
    _option(delete, "--version", "N", "delete only this version", type=int)


def _replicas(commands: _Parser) -> None:
    verbs = _verbs(commands, "replicas", "list, add or remove the directories of a log")
    about = "print the directories, their leaders, copies and lags; exit code 1 if one is offline"
    _command(verbs, "list", "replicas:show", about, epilog=REPLICAS)
    add = _command(verbs, "add", "replicas:add", "add a new or empty directory", epilog=REPLICAS)
    add.add_argument("path", metavar="PATH")
    _option(add, "--rack", "LABEL", "what fails together with it; copies are in different racks")
    about = "remove directories, after their copies were made in the others"
    remove = _command(verbs, "remove", "replicas:remove", about)
    about = "the path of a directory, as `embedlog replicas list` has it"
    remove.add_argument("paths", metavar="DIRECTORY", nargs="+", help=about)
    about = "also if it has the only copy of records, or too few others are left to decide"
    _flag(remove, "--force", about)
    _throttle(remove)
    about = "print how copies should move to other directories; with --execute, move them"
    reassign = _command(commands, "reassign", "replicas:reassign", about, epilog=REASSIGN)
    reassign.add_argument("moves", metavar="TOPIC:N=ID,ID", nargs="*")
    _option(
        *(reassign, "--replication-factor", "N", "how many copies to have, of the named topics"),
        type=int,
    )
    _option(reassign, "--from", "FILE", "a file with moves; - is stdin", dest="source")
    _flag(reassign, "--execute", "move the copies")
    _flag(reassign, "--cancel", "keep the old copies of partitions that are being moved")
    _throttle(reassign)
    about = "elect the preferred leaders of partitions, or leaders that are not in sync; fails if "
    about += "a partition is left without a leader"
    elect = _command(commands, "elect-leaders", "replicas:elect_leaders", about)
    about = "by default all topics"
    elect.add_argument("topics", metavar="TOPIC[:N,N]", nargs="*", type=topic, help=about)
    elect.add_argument(
        "--election-type",
        choices=("preferred", "unclean"),
        default="preferred",
        help="unclean: for partitions without a leader, the longest copy that is online, unless "
        "one that is offline can be read and has more records; what only the others have is lost",
    )


def _throttle(command: _Parser) -> None:
    about = "copy at most so many bytes per second"
    _option(command, "--throttle", "BYTES", about, type=rate)


def _offsets(commands: _Parser) -> None:
    about = "print the first and the next offset of partitions, or the offsets at a time"
    offsets = _command(commands, "offsets", "offsets:offsets", about, epilog=TIMES)
    about = "by default all topics"
    offsets.add_argument("topics", metavar="TOPIC[:N,N]", nargs="*", type=topic, help=about)
    _option(offsets, "--at", "TIME", "the first offset at or after this time", type=time)
    about = "delete the records before an offset or a time; a dry run without --yes"
    delete = _command(commands, "delete-records", "offsets:delete_records", about, epilog=TIMES)
    delete.add_argument("topic", metavar="TOPIC[:N,N]", type=topic)
    to = delete.add_mutually_exclusive_group(required=True)
    _option(to, "--before", "N", "delete the records below this offset", type=count)
    _option(to, "--at", "TIME", "delete up to the first record at or after this time", type=time)
    _flag(delete, "--yes", "delete the records")
    about = "print how many bytes topics and other files take, the largest first"
    usage = _command(commands, "du", "disk_usage:usage", about)
    usage.add_argument("topics", metavar="TOPIC", nargs="*", help="by default everything")
    _flag(usage, "--segments", "also print a line per segment file")


def _files(commands: _Parser) -> None:
    about = "write the records of a topic to a file: JSON lines, CSV or Parquet"
    export = _command(commands, "export", "export:export", about, epilog=EXPORT)
    export.add_argument("topic", metavar="TOPIC[:N,N]", type=topic)
    export.add_argument("file", metavar="FILE", nargs="?", help="- is stdout")
    _option(export, "--to", "FILE", "another way to name FILE", dest="to")
    _file_format(export)
    _flag(export, "--raw", "write keys and values as they are stored, without serializers")
    _option(export, "--from", "N|TIME", "from this offset or time on", dest="first", type=point)
    about = "up to this offset or time, without the record at it"
    _option(export, "--until", "N|TIME", about, dest="stop", type=point)
    _rows(export)
    _flag(export, "--force", "replace FILE if it exists")
    about = "append the records in a file: JSON lines, CSV or Parquet"
    load = _command(commands, "import", "import_file:import_file", about, epilog=IMPORT)
    load.add_argument("topic", metavar="TOPIC")
    load.add_argument("file", metavar="FILE", help="- is stdin")
    _file_format(load)
    _flag(load, "--raw", "store keys and values as they are, without serializers")
    _option(load, "--skip", "N", "skip the first N records", type=count, default=0)
    about = "choose partitions by key, as for new records, not those in the file"
    _flag(load, "--repartition", about)
    _flag(load, "--sync", "flush to the disk before the command ends, to survive a power cut")


def _convert(commands: _Parser) -> None:
    about = "copy the records of a topic of Avro or JSON to one of columns, or back"
    convert = _command(commands, "convert", "convert:convert", about, epilog=CONVERT)
    convert.add_argument("topic", metavar="TOPIC")
    convert.add_argument("target", metavar="NEW_TOPIC")
    about = "the form of the new topic; by default typed, or avro if TOPIC is typed"
    convert.add_argument("--to", choices=("typed", "avro", "json"), help=about)
    about = "the columns with the keys; ones that the values do not have are added"
    _option(convert, "--key", "COLUMN,COLUMN", about, type=column_names)
    about = "the column with the timestamps of the records, instead of those of TOPIC"
    _option(convert, "--timestamp", "COLUMN", about)
    about = "the number of partitions, by default that of TOPIC"
    _option(convert, "--partitions -p", "N", about, type=int)
    about = "the columns of JSON: those of this Parquet, CSV or JSON lines file; else inferred"
    _option(convert, "--schema-from", "FILE", about)
    _list(convert, "--rename", "OLD=NEW", "another name for a column; may be repeated")
    _flag(convert, "--skip-invalid", "leave out records that do not fit, instead of ending")


def _mirror(commands: _Parser) -> None:
    about = "copy topics to another log, or to or from Kafka, or print the status of mirrors"
    mirror = _command(commands, "mirror", "mirror:mirror", about, epilog=MIRROR)
    mirror.add_argument("source", metavar="SOURCE", help="a log, kafka://HOST:PORT, or: status")
    mirror.add_argument("target", metavar="TARGET", nargs="?", help="a log, or kafka://HOST:PORT")
    about = "a regular expression of the whole names of topics, by default all"
    _option(mirror, "--topics", "REGEX", about, default=".*")
    about = "the name of the source at the target: TOPIC becomes SITE.TOPIC"
    _option(mirror, "--as", "SITE", about, dest="site")
    _option(mirror, "--groups", "REGEX", "also copy the committed offsets of these groups")
    _flag(mirror, "--follow -f", "go on until the command is interrupted")
    _flag(mirror, "--merge", "append to topics that others write to, too")
    _flag(mirror, "--relay", "with --merge, also copy what came to the source from other sites")
    _option(mirror, "--name", "NAME", "the name of the mirror in its status")
    _flag(mirror, "--sync", "flush what is copied to the disk at once, to survive a power cut")
    about = "let programs write to copies, and groups go on in them; a dry run without --execute"
    failover = _command(commands, "failover", "mirror:failover", about, epilog=FAILOVER)
    about = "the groups to move; without any, programs may write to the copies, and no more"
    failover.add_argument("groups", metavar="GROUP", nargs="*", help=about)
    failover.add_argument(
        "--strategy",
        choices=("offsets", "time", "earliest", "latest"),
        help="where groups go on, by default offsets",
    )
    _option(failover, "--at", "TIME", "with the strategy time: the time", type=time)
    about = "where groups go on in a partition; may be repeated"
    _list(failover, "--offset", "TOPIC:P=N", about)
    _list(
        failover,
        "--topic",
        "TOPIC",
        "only this copy; by default those that the groups read, or all",
    )
    _flag(failover, "--execute", "do it")


def _file_format(command: _Parser, **options: Any) -> None:
    about = "the format; by default that of the suffix of FILE, and JSON lines for -"
    command.add_argument("--format", choices=("jsonl", "csv", "parquet"), help=about, **options)


def _rows(command: _Parser) -> None:
    about = "only these columns of a typed topic"
    _option(command, "--columns", "NAME,NAME", about, type=column_names)
    _option(command, "--where", "CONDITION", "only rows for which this SQL is true")


def _sql(commands: _Parser) -> None:
    about = "print the result of a query in SQL over the topics"
    sql = _command(commands, "sql", "sql:sql", about, epilog=SQL)
    sql.add_argument("query", metavar="QUERY")
    about = "let the query read files and URLs, with read_csv and the like"
    _flag(sql, "--files", about)
    sql.add_argument(
        "--format",
        choices=("table", "csv", "jsonl", "json"),
        default="table",
        help="by default a table; with --json a list of JSON objects",
    )


def _activity(commands: _Parser) -> None:
    about = "print what happened to the log: topics, segments, groups, maintenance"
    activity = _command(commands, "activity", "activity:show", about, epilog=ACTIVITY)
    _flag(activity, "-f --follow", "wait for new events")
    about = "only the last N events; by default 10 with -f, otherwise all"
    _option(activity, "-n --last", "N", about, type=count)
    _list(activity, "--topic", "TOPIC", "only events of this topic")
    _list(activity, "--kind", "KIND", "only events of this kind")
    _option(activity, "--max -m", "N", "end after N events", type=count)


def _audit(commands: _Parser) -> None:
    about = "compare what producers, the log and groups counted, by window of time"
    audit = _command(commands, "audit", "audit:audit", about, epilog=AUDIT)
    audit.add_argument("topic", metavar="TOPIC")
    about = "the width of a window, of whole minutes; by default 1h"
    _option(audit, "--window", "DURATION", about, type=duration, default="1h")
    _option(audit, "--since", "TIME", "only windows that end after this time", type=time)
    _option(audit, "--until", "TIME", "only windows that begin before this time", type=time)
    about = "only this tier: log, producer, copy, group, pipeline or mirror"
    _list(audit, "--tier", "TIER", about)
    _flag(audit, "--differences", "print only the differences, without the table")
    audit.add_argument(
        "--format",
        choices=("table", "csv", "jsonl", "json"),
        default="table",
        help="by default a table; with --json one JSON object with rows and differences",
    )


def _metrics(commands: _Parser) -> None:
    about = "print offsets, sizes, lags and background jobs, to monitor a log"
    metrics = _command(commands, "metrics", "metrics:show", about)
    metrics.add_argument(
        "--format",
        choices=("prometheus", "json", "table"),
        default="table",
        help="by default a table; prometheus is for node_exporter's textfile collector",
    )
    about = "a label for all metrics in Prometheus' format, such as the name of the log"
    _list(metrics, "--label", "NAME=VALUE", about)


def _dump(commands: _Parser) -> None:
    about = "print the batches of a segment file, even if it is damaged"
    dump = _command(commands, "dump", "dump:dump", about)
    dump.add_argument("file", metavar="SEGMENT_FILE")
    _flag(dump, "--columns", "also print a line per column")


def _maintenance(commands: _Parser) -> None:
    about = "compact topics now: keep the last record of each key"
    compact = _command(commands, "compact", "maintenance:compact", about)
    compact.add_argument("topics", metavar="TOPIC", nargs="+")
    _flag(compact, "--force", "compact what is not due too, and the active segment")
    about = "run all maintenance jobs once, such as retention and compaction"
    _command(commands, "maintain", "maintenance:maintain", about)
    about = "explain what is deleted or compacted when, and what keeps the rest"
    explain = _command(commands, "explain", "maintenance:explain", about)
    explain.add_argument("topics", metavar="TOPIC", nargs="*", help="by default all topics")


def _health(commands: _Parser) -> None:
    about = "read everything and check all checksums; of several copies, only that of the leader"
    verify = _command(commands, "verify", "maintenance:verify", about)
    _flag(verify, "--replicas", "read and compare all copies that are in sync instead")
    about = "drop damaged records; a dry run without --yes"
    repair = _command(commands, "repair", "maintenance:repair", about)
    _flag(repair, "--yes", "repair the log")
    _command(commands, "doctor", "doctor:doctor", "check versions, speeds, space and locks")
    about = "let Spark's executors of other users, who are in a group, read and stage records"
    share = _command(commands, "share", "maintenance:share", about)
    share.add_argument("group", metavar="GROUP", help="its name or number")
    share.add_argument("--mode", choices=("rw", "r", "none"), default="rw", help="default rw")


def _completion(commands: _Parser) -> None:
    about = "print a script that completes commands, options, topics and groups in a shell"
    completion = _command(commands, "completion", "completion:script", about, epilog=COMPLETION)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
