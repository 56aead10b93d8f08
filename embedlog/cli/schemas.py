"""`embedlog schemas`: list, show, register, check and delete schemas; compatibility levels."""

from __future__ import annotations

import argparse
import json
import re
import sys

from embedlog.cli.file_formats import STANDARD_STREAM
from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import FAILED, OK, CommandParser, add_option
from embedlog.cli.printing import say, say_json, say_result, say_rows
from embedlog.display import plural

SUBJECTS = """\
A subject has versions.  That of the values of a topic is TOPIC-value, that of its keys TOPIC-key.

examples:
  embedlog topics create orders --key str --value avro
  embedlog schemas register orders-value order.avsc
"""

_WITH_VERSION = re.compile(r"(.+):(\d+)")


def _schema_file(command: CommandParser) -> None:
    command.add_argument("subject", metavar="SUBJECT")
    command.add_argument("file", metavar="FILE", help="the schema as JSON; - is stdin")


def list_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = SUBJECTS


def list_(args: argparse.Namespace) -> int:
    """Print each subject with its latest version."""
    with to_read(args) as log:
        heads, rows = log.schema_registry.rows()
    say_rows(args, [head.upper() for head in heads], heads, rows)
    return OK


def show_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("subject", metavar="SUBJECT[:VERSION]")


def show(args: argparse.Namespace) -> int:
    """Print a schema, by default the latest version of the subject."""
    match = _WITH_VERSION.fullmatch(args.subject)
    with to_read(args) as log:
        if match is None:
            entry = log.schema_registry.latest(args.subject)
        else:
            entry = log.schema_registry.version(match[1], int(match[2]))
        numbers = log.schema_registry.versions(entry.subject)
    schema = json.loads(entry.schema)
    document = {"subject": entry.subject, "version": entry.version, "id": entry.id}
    say_result(
        args,
        {**document, "versions": numbers, "schema": schema},
        [json.dumps(schema, indent=2, ensure_ascii=False)],
    )
    return OK


def register_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = SUBJECTS
    _schema_file(command)


def register(args: argparse.Namespace) -> int:
    """Register the schema in a file, and print its version and id."""
    schema = _text_of(args.file)
    with to_write(args, create=True) as log:
        log.schema_registry.register(args.subject, schema)
        entry = log.schema_registry.lookup(args.subject, schema)
    document = {"subject": entry.subject, "version": entry.version, "id": entry.id}
    text = f"The schema is version {entry.version} of {entry.subject}, with the id {entry.id}"
    say_result(args, document, [text])
    return OK


def check_options(command: CommandParser) -> None:
    """Add the options."""
    _schema_file(command)


def check(args: argparse.Namespace) -> int:
    """Print why the schema in a file is not compatible with a subject; then the exit code is 1."""
    schema = _text_of(args.file)
    with to_read(args) as log:
        reasons = log.schema_registry.check(args.subject, schema)
        level = log.schema_registry.compatibility(args.subject)
    document = {"compatible": not reasons, "compatibility": level, "reasons": reasons}
    say_result(
        args, document, reasons or [f"The schema is compatible with {args.subject} ({level})"]
    )
    return FAILED if reasons else OK


def compatibility_options(command: CommandParser) -> None:
    """Add the options."""
    about = "by default all subjects without a level of their own"
    command.add_argument("subject", metavar="SUBJECT", nargs="?", help=about)
    about = "NONE; BACKWARD, FORWARD or FULL; or one of these with _TRANSITIVE"
    add_option(command, "--set", "LEVEL", about, type=str.upper)


def compatibility(args: argparse.Namespace) -> int:
    """Print the compatibility level of a subject, or of all without one; or set it."""
    if args.set is None:
        with to_read(args) as log:
            level = log.schema_registry.compatibility(args.subject)
    else:
        with to_write(args, create=True) as log:
            log.schema_registry.set_compatibility(args.set, args.subject)
            level = log.schema_registry.compatibility(args.subject)
    say_result(args, {"subject": args.subject, "compatibility": level}, [level])
    return OK


def delete_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("subject", metavar="SUBJECT")
    add_option(command, "--version", "N", "delete only this version", type=int)


def delete(args: argparse.Namespace) -> int:
    """Delete a subject, or one version of it."""
    with to_write(args) as log:
        versions = log.schema_registry.delete(args.subject, args.version)
    if args.json:
        say_json({"subject": args.subject, "deleted": versions})
    else:
        say(f"Deleted {plural(len(versions), 'version')} of {args.subject}")
    return OK


def _text_of(path: str) -> str:
    """Return the text of a file, or of stdin."""
    if path == STANDARD_STREAM:
        return sys.stdin.buffer.read().decode()
    with open(path, encoding="utf-8") as file:
        return file.read()
