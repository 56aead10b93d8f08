"""`embedlog topics`: create, list, describe, alter and delete."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

from embedlog.cli.open_log import root_of, to_read, to_write
from embedlog.cli.parser import OK, CommandParser, add_flag, add_list, add_option
from embedlog.cli.printing import note, say_json, say_result
from embedlog.display import plural
from embedlog.errors import (
    InvalidConfigError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from embedlog.hints import settings_options
from embedlog.progress import format_bytes

if TYPE_CHECKING:
    from embedlog.api.log import (
        ColumnDescription,
        PartitionSummary,
        SchemaDescription,
        TopicDescription,
    )

CREATE = """\
With --schema-from it is a typed topic: its values are rows with the columns of FILE, of which
nothing else is used; then --key names the key column, or several, as in origin,dest.  Parquet has
the types of its columns; those of CSV and JSON lines are inferred from the first 64 MB.

examples:
  embedlog topics create flights -p 4 --schema-from flights.csv --key tailnum --timestamp time_hour
  embedlog topics create fleet --key str --value json -c cleanup.policy=compact
"""

_INTERNAL = "__"
"""The prefix of the names of internal topics, as in `catalog`, which takes longer to load than
everything else that listing needs."""


def _settings(command: CommandParser) -> None:
    about = "a topic setting with Kafka's name, such as retention.ms=60000; may be repeated"
    add_list(command, "--config -c", "NAME=VALUE", about)


def create_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = CREATE
    command.add_argument("topic", metavar="TOPIC")
    about = "the number of partitions, by default 1"
    add_option(command, "--partitions -p", "N", about, type=int)
    about = "how many copies each partition has, by default 3 or as many as there are directories"
    add_option(command, "--replication-factor", "N", about, type=int)
    about = "how keys are stored: bytes, str, int, float, uuid, json, avro or pickle"
    add_option(command, "--key", "NAME", f"{about}; with --schema-from the key column")
    add_option(command, "--value", "NAME", "how values are stored, likewise")
    about = "make a typed topic with the columns of this Parquet, CSV or JSON lines file"
    add_option(command, "--schema-from", "FILE", about)
    add_option(command, "--timestamp", "COLUMN", "with --schema-from, the column of timestamps")
    add_flag(command, "--if-not-exists", "succeed if the topic exists with these settings")
    _settings(command)


def create(args: argparse.Namespace) -> int:
    """Create a topic, and the log if there is none."""
    schema = None if args.schema_from is None else schema_of(args.schema_from)
    if schema is None and args.timestamp is not None:
        raise InvalidConfigError("--timestamp names a column, so it needs --schema-from")
    key = args.key
    if schema is not None and key is not None and key not in schema.names:
        key = [name.strip() for name in key.split(",")]
    with to_write(args, create=True) as log:
        try:
            log.create_topic(
                args.topic,
                args.partitions,
                parse_settings(args.config),
                key=key,
                value=args.value,
                schema=schema,
                timestamp=args.timestamp,
                replication_factor=args.replication_factor,
                exist_ok=args.if_not_exists,
            )
        except TopicAlreadyExistsError as error:
            if error.differences and "schema" not in error.differences:
                todo = _command_to_apply(args.topic, error.differences)
                raise TopicAlreadyExistsError(error.what, todo=todo, **error.facts) from None
            raise
        if args.json or schema is not None:
            description = log.describe_topic(args.topic)
            say_result(args, description, _describe_schema(description))
    return OK


def schema_of(path: str) -> Any:
    """Return the columns of a file."""
    from embedlog.cli.file_formats import format_of
    from embedlog.cli.read_files import INFERRED_BYTES, infer_schema

    file_format = format_of(path, None)
    with open(path, "rb") as file:
        columns, complete = infer_schema(file, file_format)
    if not complete:
        size = format_bytes(INFERRED_BYTES)
        note(f"The types of the columns are those of the first {size} of {path}")
    return columns


def _command_to_apply(topic: str, differences: Mapping[str, tuple[object, object]]) -> str:
    """Return the command that gives an existing topic these settings."""
    words, sentences = [], []
    for name, (before, after) in differences.items():
        if name != "partitions":
            words += settings_options({name: after})
        elif isinstance(before, int) and isinstance(after, int) and after < before:
            sentences.append("The number of partitions cannot be reduced.")
        else:
            words += ["-p", str(after)]
    if words:
        sentences.append(f"To apply: embedlog topics alter {shlex.quote(topic)} {' '.join(words)}")
    return " ".join(sentences)


def parse_settings(options: list[str]) -> dict[str, str]:
    """Return the settings of options such as ``retention.ms=60000``."""
    settings = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator:
            raise InvalidConfigError(f"--config must be NAME=VALUE, got {option!r}")
        settings[name.strip()] = value.strip()
    return settings


def list_options(command: CommandParser) -> None:
    """Add the options."""
    add_flag(command, "--internal", "include names that begin with __")


def list_(args: argparse.Namespace) -> int:
    """Print the names of all topics, without loading pyarrow."""
    names = [name for name in topic_names(args) if args.internal or not name.startswith(_INTERNAL)]
    say_result(args, names, names)
    return OK


def topic_names(args: argparse.Namespace) -> list[str]:
    """Return the names of all topics, also of internal ones."""
    root = root_of(args)
    if not _is_ordinary(root):
        with to_read(args) as log:  # Raises an error that says what is wrong.
            return log.topics(internal=True)
    from embedlog import keyspace, kv
    from embedlog.files import Files

    with ExitStack() as closing:
        files = Files(root, writable=False)
        closing.callback(files.close_all)
        state = kv.LmdbStore(files, "state", durable=True, timeout=10)
        closing.callback(state.close)
        return state.read(lambda txn: [name for (name,) in keyspace.TOPICS.keys(txn)])


def _is_ordinary(root: str) -> bool:
    """Whether this is a log in the current format."""
    from embedlog.files.paths import FORMAT_FILE
    from embedlog.keyspace import FORMAT_VERSION

    try:
        with open(os.path.join(root, FORMAT_FILE), encoding="utf-8", errors="replace") as file:
            lines = list(file)
        # Of several directories, this one may not be the one that counts.
        is_current = f"format = {FORMAT_VERSION}\n" in lines and "[replicas]\n" not in lines
        return is_current and os.path.isdir(os.path.join(root, "state"))
    except OSError:
        return False


def describe_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("topics", metavar="TOPIC", nargs="*", help="by default all topics")


def describe(args: argparse.Namespace) -> int:
    """Print the settings that differ from the defaults, and the partitions."""
    with to_read(args) as log:
        topics = [log.describe_topic(name) for name in args.topics or log.topics()]
        with_copies = log.root.replicated
    lines = (_describe(topic, with_copies=with_copies) for topic in topics)
    say_result(args, topics, chain.from_iterable(lines))
    return OK


def _describe(topic: TopicDescription, *, with_copies: bool) -> Iterator[str]:
    parts = topic["partitions"]
    records = sum(part["end_offset"] - part["start_offset"] for part in parts)
    size = format_bytes(sum(part["bytes"] for part in parts))
    unit = "offset" if "compact" in topic["config"]["cleanup.policy"] else "record"
    counts = f"{plural(len(parts), 'partition')}, {plural(records, unit)}"
    yield f"{topic['name']}  id {topic['id']}, {counts}, {size}"
    for name, value in topic["overrides"].items():
        yield f"  {name}={value}"
    yield from _describe_schema(topic)
    for part in parts:
        copies = _copies(part) if with_copies else ""
        yield (
            f"  partition {part['partition']}: offsets [{part['start_offset']}, "
            f"{part['end_offset']}), {format_bytes(part['bytes'])} in "
            f"{plural(part['segments'], 'segment')}, "
            f"leader epoch {part['leader_epoch']}{copies}"
        )


def _copies(part: PartitionSummary) -> str:
    leader = "none" if part["leader"] is None else part["leader"]
    replicas, isr = (",".join(map(str, part[name])) or "none" for name in ("replicas", "isr"))
    return f", leader {leader}, replicas {replicas}, isr {isr}"


def _describe_schema(topic: TopicDescription) -> Iterator[str]:
    schema = topic.get("schema")
    if schema is None:
        return
    yield f"  schema version {schema['version']}, {plural(len(schema['columns']), 'column')}"
    rows = [
        (column["name"], column["type"], ", ".join(_roles(column, schema)))
        for column in schema["columns"]
    ]
    widths = [max(len(row[index]) for row in rows) for index in range(2)]
    for name, kind, roles in rows:
        yield f"    {name:<{widths[0]}}  {kind:<{widths[1]}}  {roles}".rstrip()


def _roles(column: ColumnDescription, schema: SchemaDescription) -> Iterator[str]:
    name = column["name"]
    if name in schema["key"]:
        yield "key" if len(schema["key"]) == 1 else f"key {schema['key'].index(name) + 1}"
    if name == schema["timestamp"]:
        yield "timestamp"
    if not column["nullable"]:
        yield "not null"
    if "default" in column:
        yield f"default {column['default']}"


def alter_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("topic", metavar="TOPIC")
    add_option(command, "--partitions -p", "N", "the new number of partitions", type=int)
    add_list(command, "--reset", "NAME", "set a setting back to its default")
    _settings(command)


def alter(args: argparse.Namespace) -> int:
    """Change settings, then the number of partitions."""
    changes: dict[str, Any] = {**parse_settings(args.config), **dict.fromkeys(args.reset)}
    if not changes and args.partitions is None:
        raise InvalidConfigError(
            "Nothing to alter was given", todo="Use --config, --reset or --partitions."
        )
    with to_write(args) as log:
        if changes:
            log.alter_topic(args.topic, changes)
        if args.partitions is not None:
            log.create_partitions(args.topic, args.partitions)
        if args.json:
            say_json(log.describe_topic(args.topic))
    return OK


def delete_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("topics", metavar="TOPIC", nargs="+")
    add_flag(command, "--yes", "delete them")


def delete(args: argparse.Namespace) -> int:
    """Print which topics would be deleted; with --yes delete them, or none if one is missing."""
    from difflib import get_close_matches

    from embedlog.catalog import refuse_internal

    with to_write(args) if args.yes else to_read(args) as log:
        for name in args.topics:
            if name not in log:
                near = get_close_matches(name, log.topics(), 1)
                todo = "See `embedlog topics list --internal`."
                todo = f"Did you mean {near[0]!r}?" if near else todo
                raise UnknownTopicOrPartitionError("There is no such topic", topic=name, todo=todo)
            refuse_internal(name)
        for name in args.topics:
            if args.yes:
                log.delete_topic(name)
                note(f"Deleted {name}")
            else:
                records = plural(len(log.topic(name)), "record")
                note(f"Dry run, {name} with {records} would be deleted")
    if not args.yes:
        note("Repeat the command with --yes")
    if args.json:
        say_json({"dry_run": not args.yes, "topics": args.topics})
    return OK
