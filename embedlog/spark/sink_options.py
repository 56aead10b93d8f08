"""What a writer can be told, and what it takes: the options and columns of Spark's Kafka sink."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embedlog.errors import InvalidConfigError
from embedlog.spark.option_values import absolute, refuse, root

KNOWN = (
    *("path", "topic", "durability", "compression", "lockTimeout"),
    *("txnAppId", "txnVersion", "allowRestart"),
    # Spark passes its own options of streams on to the sink.
    *("checkpointLocation", "queryName"),
)
SERIALIZERS = {
    "kafka.key.serializer": "keys are serialized with ByteArraySerializer",
    "kafka.value.serializer": "values are serialized with ByteArraySerializer",
}
_logger = logging.getLogger("embedlog")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """What a writer does; made by `parse`."""

    path: str
    """The log's directory, on this host and on those of the executors."""

    topic: str | None = None
    """Where all rows go, whatever their column says."""

    durability: str = "fsync"
    """What a publication survives.  A checkpoint elsewhere remembers that it was made,
    so by default it survives a power cut, as far as that does."""

    compression: str | None = None
    """Of the batches; None is the topic's."""

    lock_timeout: float = 10.0
    application: str | None = None
    """``txnAppId``: the name under which publications are counted, in each topic by itself."""

    version: int | None = None
    """``txnVersion`` of a batch write: it is skipped if it is not above the last one."""

    restart: bool = False
    """``allowRestart``: publish although the query started over and has published to the
    topic before, which may then have the same records twice."""

    checkpoint: str = ""
    """The path of the checkpoint, if it was given to the writer: a query that starts over
    there is recognised by it."""


def parse(options: Mapping[str, str]) -> SinkOptions:
    """Check a writer's options, whose names may be in any case.

    Raises:
        InvalidConfigError: One is unknown (the nearest known one is named), is not
            supported by Kafka's sink either, or has a value that says nothing.
    """
    given = {str(name).lower(): str(value) for name, value in options.items()}
    _refuse_unknown(options, given)
    if given.get("txnappid") == "":
        raise InvalidConfigError("txnAppId must not be empty", todo="Leave it out or name the job")
    version = given.get("txnversion")
    made = SinkOptions(
        path=root(given),
        topic=given.get("topic"),
        durability=_word("durability", given.get("durability", "fsync"), ("os", "fsync")),
        compression=_compression(given.get("compression")),
        lock_timeout=_number("lockTimeout", given.get("locktimeout", "10")),
        application=given.get("txnappid"),
        version=None if version is None else int(_number("txnVersion", version)),
        restart=_word("allowRestart", given.get("allowrestart", "false"), ("true", "false"))
        == "true",
        checkpoint=_checkpoint(given.get("checkpointlocation", "")),
    )
    if (made.version is None) is not (made.application is None):
        return _half_named(made)
    return made


def _half_named(made: SinkOptions) -> SinkOptions:
    if made.application is None:
        raise InvalidConfigError(
            "txnVersion is given without txnAppId", todo="say whose version it is"
        )
    # A stream counts by itself; `check_batch` refuses it for a batch.
    return made


def check_batch(made: SinkOptions, overwrite: bool) -> None:
    """Refuse what a batch write cannot do.

    Raises:
        InvalidConfigError: The mode is ``overwrite``, or ``txnAppId`` has no version.
    """
    if overwrite:
        raise InvalidConfigError(
            "a log is appended to, and never overwritten",
            todo='use .mode("append"); delete the topic first if that is what is meant',
        )
    if made.application is not None and made.version is None:
        raise InvalidConfigError(
            "txnAppId is given without txnVersion",
            todo="number the writes: in foreachBatch the batch id is the number",
        )


def _refuse_unknown(options: Mapping[str, str], given: Mapping[str, str]) -> None:
    for name, why in SERIALIZERS.items():
        if name in given:
            raise InvalidConfigError(f"Kafka option '{name[6:]}' is not supported as {why}.")
    known = {name.lower(): name for name in KNOWN}
    ignored = sorted(str(name) for name in options if str(name).lower().startswith("kafka."))
    if ignored:
        _logger.warning("these options are about brokers, and have no effect: %s", ignored)
    for spelling in sorted(map(str, options)):
        name = spelling.lower()
        if name in known or name.startswith("kafka."):
            continue
        refuse("a writer", spelling, KNOWN)


def _checkpoint(location: str) -> str:
    """Return one spelling of a place, so that it is known again."""
    if not location or "://" in location.removeprefix("file://"):
        return location
    return absolute(location)


def _word(name: str, value: str, words: tuple[str, ...]) -> str:
    if value.lower() not in words:
        raise InvalidConfigError(f"{name} is {value!r}, not one of {', '.join(words)}")
    return value.lower()


def _compression(value: str | None) -> str | None:
    return None if value is None else _word("compression", value, ("none", "lz4", "zstd"))


def _number(name: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError as error:
        raise InvalidConfigError(f"{name} is {value!r}, not a number") from error
    if found < 0:
        raise InvalidConfigError(f"{name} is {value}, below 0")
    return found


# Columns

_TEXT = ("string", "binary")
_HEADERS = "array<struct<key:string,value:binary>>"
COLUMNS = {
    "topic": ("string",),
    "key": _TEXT,
    "value": _TEXT,
    "headers": (_HEADERS,),
    "partition": ("int",),
    "timestamp": ("timestamp", "timestamp_ntz"),
}
"""What a writer takes, of which types, in the words of Spark; other columns are left out."""


def check_columns(schema: Any, topic: str | None) -> None:
    """Refuse a DataFrame whose columns a log cannot take, in the words of Kafka's sink.

    Raises:
        InvalidConfigError: A column is missing or of another type.
    """
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    if topic is None and "topic" not in kinds:
        raise InvalidConfigError(
            "topic option required when no 'topic' attribute is present. "
            "Use the topic option for setting a topic"
        )
    if "value" not in kinds:
        raise InvalidConfigError(
            "Required attribute 'value' not found", todo=f"there are {', '.join(kinds)}"
        )
    for name, wanted in COLUMNS.items():
        kind = kinds.get(name)
        if kind is not None and kind not in wanted and kind != "void":
            raise InvalidConfigError(
                f"{name} must be a(n) {' or '.join(wanted)}", todo=f"it is {kind}"
            )
