"""Options and columns of the sink: those of Spark's Kafka sink, and a few of embedlog's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from embedlog.errors import InvalidConfigError
from embedlog.spark.option_reader import WRITER_OPTIONS, OptionReader, absolute_path

_logger = logging.getLogger("embedlog.spark")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The options of a writer, checked; made by `parse`."""

    path: str
    """The log root, on this host and on those of the executors."""
    topic: str | None = None
    """The topic of all rows, whatever their column says."""
    durability: str = "fsync"
    """What a publication survives.  Spark's checkpoint records that the micro-batch is done,
    so by default the publication survives a power cut, as the checkpoint may."""
    compression: str | None = None
    """Of the batches; None is the topic's."""
    lock_timeout: float = 10.0
    """Seconds to wait for a partition that another process has locked."""
    txn_app_id: str | None = None
    """The application under whose name versions are counted, in each topic separately."""
    txn_version: int | None = None
    """The version of a batch write, which is skipped unless it is above the last one."""
    allow_restart: bool = False
    """Publish although the query started over and has published to the topic before, which
    may then hold records twice."""
    must_exist: bool = False
    """Create no log where there is none, such as where a disk is not mounted."""
    checkpoint_location: str = ""
    """The path of the checkpoint, if it was set on the writer: a query that starts over
    there is recognised by it."""


def parse(options: Mapping[str, str]) -> SinkOptions:
    """Check a writer's options, whose names may be in any case.

    Raises:
        InvalidConfigError: An option is unknown, is one that Kafka's sink refuses, or has
            an invalid value.
    """
    reader = OptionReader(options)
    for part in ("key", "value"):
        if f"kafka.{part}.serializer" in reader:
            raise InvalidConfigError(
                f"Kafka option '{part}.serializer' is not supported as {part}s are serialized "
                "with ByteArraySerializer"
            )
    if ignored := reader.check_names("writer", WRITER_OPTIONS):
        _logger.warning(
            "These options are about brokers and have no effect: %s", ", ".join(ignored)
        )
    if reader.raw("txnAppId") == "":
        raise InvalidConfigError(
            "The option 'txnAppId' must not be empty", todo="Leave it out or name the application."
        )
    lock_timeout = reader.number("lockTimeout")
    location = reader.raw("checkpointLocation") or ""
    if location and "://" not in location.removeprefix("file://"):
        # One spelling, so that the location is recognised when it is used again.
        location = absolute_path(location)
    parsed = SinkOptions(
        path=reader.root(),
        topic=reader.raw("topic"),
        durability=reader.choice("durability", "fsync", "os"),
        compression=reader.choice("compression", "", "none", "lz4", "zstd") or None,
        lock_timeout=10.0 if lock_timeout is None else lock_timeout,
        txn_app_id=reader.raw("txnAppId"),
        txn_version=reader.version("txnVersion"),
        allow_restart=reader.flag("allowRestart"),
        must_exist=reader.flag("mustExist"),
        checkpoint_location=location,
    )
    # A stream needs no version: it counts its batches.  `check_batch` requires one.
    if parsed.txn_version is not None and parsed.txn_app_id is None:
        raise InvalidConfigError(
            "txnVersion is set without txnAppId", todo="Set txnAppId to the application's name."
        )
    return parsed


def check_batch(options: SinkOptions, overwrite: bool) -> None:
    """Refuse what a batch write cannot do.

    Raises:
        InvalidConfigError: The mode is ``overwrite``, or ``txnAppId`` has no version.
    """
    if overwrite:
        raise InvalidConfigError(
            "A log is appended to and never overwritten",
            todo='Use .mode("append"); to replace the records, delete the topic first.',
        )
    if options.txn_app_id is not None and options.txn_version is None:
        raise InvalidConfigError(
            "txnAppId is set without txnVersion",
            todo="Number the writes: in foreachBatch the batch id is the version.",
        )


_TEXT = ("string", "binary")
COLUMNS = {
    "topic": ("string",),
    "key": _TEXT,
    "value": _TEXT,
    "headers": ("array<struct<key:string,value:binary>>",),
    "partition": ("int",),
    "timestamp": ("timestamp",),
}
"""The columns that a writer uses and their types in Spark; other columns are left out."""


def check_column_types(types: Mapping[str, str], topic: str | None) -> None:
    """Refuse columns that a log cannot take, with the messages of Kafka's sink.

    Args:
        types: Spark's name of the type of each column.
        topic: The topic of all rows, if the options name it.

    Raises:
        InvalidConfigError: A column is missing or has another type.
    """
    if topic is None and "topic" not in types:
        raise InvalidConfigError(
            "topic option required when no 'topic' attribute is present. "
            "Use the topic option for setting a topic"
        )
    if "value" not in types:
        raise InvalidConfigError(
            "Required attribute 'value' not found",
            todo=f"The DataFrame has the columns {', '.join(types)}.",
        )
    for name, accepted in COLUMNS.items():
        actual = types.get(name)
        if actual is not None and actual not in accepted and actual != "void":
            raise InvalidConfigError(
                f"{name} must be a(n) {' or '.join(accepted)}",
                todo=f"It is {actual}: cast it or leave it out.",
            )
