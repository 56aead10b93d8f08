"""The commands, how they are parsed, and their exit codes.

What a command does and its options are in its module, which is imported when the command is used.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from types import ModuleType
from typing import Any, Final, NoReturn

from embedlog.cli import argument_types as types
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

COMMANDS = {
    "topics": "create, list, describe, alter or delete topics",
    "topics create": "create a topic",
    "topics list": "print the names of all topics",
    "topics describe": "print settings and partitions",
    "topics alter": "change settings, or add partitions",
    "topics delete": "delete topics and their records; a dry run without --yes",
    "produce": "append one record per line of stdin, or per row of a file",
    "consume": "print records, up to the current end",
    "tail": "print the last records of each partition",
    "sql": "print the result of a query in SQL over the topics",
    "serve": "let Kafka clients in any language use the log as a Kafka broker",
    "groups": "list, describe, reset, alter or delete consumer groups and share groups",
    "groups list": "print the names of all groups",
    "groups describe": "print members and partitions",
    "groups lag": "print the lag of groups",
    "groups reset": "reset the committed offsets of a group; a dry run without --execute",
    "groups alter": "change settings of a share group",
    "groups delete": "delete groups and their committed offsets",
    "groups delete-offsets": "delete the committed offsets of topics or partitions",
    "dead-letters": "list, show or replay records that groups could not handle",
    "dead-letters list": "print where dead letters came from, and why they are there",
    "dead-letters show": "print dead letters with their values and the stacks of their errors",
    "dead-letters replay": "send dead letters back to their topics; a dry run without --execute",
    "schemas": "list, show, register, check or delete Avro schemas",
    "schemas list": "print all subjects",
    "schemas show": "print a schema, by default the latest version",
    "schemas register": "register a schema as the next version of a subject",
    "schemas check": "print why a schema cannot be registered; exit code 1 if so",
    "schemas compatibility": "print or set what a new version must be compatible with",
    "schemas delete": "delete a subject; records with its schemas stay readable",
    "replicas": "list, add or remove the directories of a log",
    "replicas list": (
        "print the directories, their leaders, copies and lags; exit code 1 if one is offline"
    ),
    "replicas add": "add a new or empty directory",
    "replicas remove": "remove directories, after their copies were made in the others",
    "reassign": "print how copies should move to other directories; with --execute, move them",
    "elect-leaders": (
        "elect the preferred leaders of partitions, or leaders that are not in sync; fails if "
        "a partition is left without a leader"
    ),
    "snapshots": "take, list or delete snapshots",
    "snapshots take": "note where topics end, and keep their records until the snapshot expires",
    "snapshots list": "print all snapshots",
    "snapshots delete": "delete snapshots, whose records are kept no longer",
    "backup": "write what is new since the last backup to a directory or a URL",
    "restore": "make a log from a backup, in a new directory",
    "clone": "make another log of this one, which shares its sealed segments",
    "offsets": "print the first and the next offset of partitions, or the offsets at a time",
    "delete-records": "delete the records before an offset or a time; a dry run without --yes",
    "du": "print how many bytes topics and other files take, the largest first",
    "export": "write the records of a topic to a file: JSON lines, CSV or Parquet",
    "import": "append the records in a file: JSON lines, CSV or Parquet",
    "convert": "copy the records of an Avro or JSON topic to a typed topic, or back",
    "mirror": "copy topics to another log, or to or from Kafka, or print the status of mirrors",
    "failover": (
        "let programs write to copies, and groups continue in them; a dry run without --execute"
    ),
    "activity": "print what happened to the log: topics, segments, groups, maintenance",
    "audit": "compare what producers, the log and groups counted, by window of time",
    "metrics": "print offsets, sizes, lags and background jobs, to monitor a log",
    "report": "write a page about the log for browsers, or serve it on this host",
    "dump": "print the batches of a segment file, even if it is damaged",
    "compact": "compact topics now: keep the last record of each key",
    "maintain": "run all maintenance jobs once, such as retention and compaction",
    "explain": "explain what is deleted or compacted when, and what keeps the rest",
    "verify": "read everything and check all checksums; of several copies, only that of the leader",
    "repair": "repair copies, and drop records that are damaged in all; a dry run without --yes",
    "doctor": "check versions, speeds, space and locks",
    "share": "let Spark executors of other users in a group read and stage records",
    "completion": "print a script that completes commands, options, topics and groups in a shell",
}
"""What each command does.  It is a function, with its last word as the name, in a module, and
FUNCTION_options adds its options; a command that is the first word of others has none."""
_MODULES = {
    name: module
    for module, names in {
        "import_file": ("import", "produce"),
        "consume": ("tail",),
        "snapshots": ("backup", "restore", "clone"),
        "replicas": ("reassign", "elect-leaders"),
        "offsets": ("delete-records",),
        "mirror": ("failover",),
        "monitoring": ("activity", "audit", "metrics", "du"),
        "maintenance": (*("compact", "maintain", "explain", "verify", "repair", "share"),),
    }.items()
    for name in names
}
"""The modules that are not named after the first word of their commands."""

_Parser = Any  # argparse has no public type for groups of commands or of options


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors say what may have been meant.

    It is set up when it is first used: argparse looks for translations of three words in files
    for each parser, and there is one for each command.
    """

    verbs: Any = None
    """The action with the commands that this command consists of, by name in ``choices``."""

    words = ""
    """The words of a command that does something, until its options are there."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.pop("_settings", None)
        if settings is None:
            raise AttributeError(name)
        super().__init__(**settings)
        return getattr(self, name)

    def load(self) -> None:
        """Add the options of the command, whose module is imported for it."""
        words, self.words = self.words, ""
        if words:
            about, json = "the directory of the log", "print JSON"
            if words == "produce":
                json = "read and print JSON"
            add_option(self, "--root -r", "DIR", about, default=argparse.SUPPRESS)
            add_flag(self, "--json", json, default=argparse.SUPPRESS)
            add_flag(self, "--must-exist", _MUST_EXIST, default=argparse.SUPPRESS)
            module, name = _function(words)
            run = getattr(module, name, None) or getattr(module, f"{name}_")
            self.set_defaults(parser=self, run=run)
            add = getattr(module, f"{name}_options", None)
            if add is not None:
                add(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments."""
        self.load()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Return the help of the command."""
        self.load()
        return super().format_help()

    def options(self) -> list[argparse.Action]:
        """Return the options."""
        self.load()
        return [action for action in self._actions if action.option_strings]

    def option_names(self) -> list[str]:
        """Return the names of the options, such as ``--root`` and ``-r``."""
        return [name for action in self.options() for name in action.option_strings]

    def positionals(self) -> list[argparse.Action]:
        """Return the arguments that are no options."""
        self.load()
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


def _function(words: str) -> tuple[ModuleType, str]:
    """Return the module and the name of the function of a command."""
    first, _, last = words.rpartition(" ")
    room = _MODULES.get(words, first or last).replace("-", "_")
    module = import_module(f"embedlog.cli.{room}")
    return module, last.replace("-", "_")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; exits with a message if it is wrong."""
    top = parser()
    # argparse would take the value of an unknown option for the command.
    for word in takewhile(lambda word: word.startswith("--"), argv):
        if word.partition("=")[0] not in top.option_names():
            top.refuse([word])
    args: argparse.Namespace
    args, unknown = top.parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    return args


_MUST_EXIST = "create no log where there is none, such as where a disk is not mounted"


def _formatter(prog: str) -> argparse.RawDescriptionHelpFormatter:
    """Format help as wide as the terminal; argparse would import shutil to find that, and always.

    It makes one for each argument that is declared.
    """
    try:
        columns = int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size().columns
    except (ValueError, OSError):
        columns = 80
    return argparse.RawDescriptionHelpFormatter(prog, width=columns - 2)


def parser() -> CommandParser:
    """Return the parser of the whole command line."""
    top = CommandParser(
        prog="embedlog",
        description="Kafka's log in a directory: its topics, records and consumer groups.",
        epilog=EXITS,
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"embedlog {__version__}")
    root = os.environ.get("EMBEDLOG_ROOT")
    about = "the directory of the log; by default $EMBEDLOG_ROOT"
    add_option(top, "--root -r", "DIR", about, default=root)
    add_flag(top, "--json", "print JSON; produce reads JSON too")
    add_flag(top, "--must-exist", _MUST_EXIST)
    commands = top.verbs = top.add_subparsers(metavar="COMMAND", required=True, prog=top.prog)
    for words, about in COMMANDS.items():
        first, _, verb = words.partition(" ")
        command = _add(commands.choices[first].verbs if verb else commands, verb or first, about)
        if any(other.startswith(f"{words} ") for other in COMMANDS):
            command.verbs = command.add_subparsers(metavar="VERB", required=True, prog=command.prog)
        else:
            command.words = words
    return top


def _add(commands: _Parser, name: str, about: str) -> CommandParser:
    """Add a command."""
    command: CommandParser = commands.add_parser(
        name,
        help=about,
        description=_sentence(about),
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    return command


def _sentence(about: str) -> str:
    return f"{about[0].upper()}{about[1:]}."


def add_option(command: _Parser, names: str, metavar: str, about: str, **options: Any) -> None:
    """Add an option with a value."""
    command.add_argument(*names.split(), metavar=metavar, help=about, **options)


def add_list(command: _Parser, name: str, metavar: str, about: str, **options: Any) -> None:
    """Add an option that may be repeated."""
    add_option(command, name, metavar, about, action="append", default=[], **options)


def add_flag(command: _Parser, names: str, about: str, **options: Any) -> None:
    """Add an option without a value."""
    command.add_argument(*names.split(), action="store_true", help=about, **options)


def add_rows(command: _Parser) -> None:
    """Add the options for columns and rows of a typed topic."""
    about = "only these columns of a typed topic"
    add_option(command, "--columns", "NAME,NAME", about, type=types.column_names)
    add_option(command, "--where", "CONDITION", "only rows for which this SQL is true")


def add_table_format(command: _Parser, json: str) -> None:
    """Add the option for the format of a result; ``json`` says what JSON holds."""
    command.add_argument(
        "--format",
        choices=("table", "csv", "jsonl", "json"),
        default="table",
        help=f"by default a table; with --json {json}",
    )
