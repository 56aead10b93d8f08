"""Options of a table, which is read and written: those of a reader and of a writer together.

A reader gets its own options, and a writer its own; each would refuse those of the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from embedlog.errors import InvalidConfigError
from embedlog.spark import sink_options, source_options
from embedlog.spark.option_reader import (
    BROKER_OPTIONS,
    READER_OPTIONS,
    WRITER_OPTIONS,
    OptionReader,
)

QUERY_OPTIONS = ("checkpointLocation", "queryName")
"""Options of a writer that belong to one streaming query, not to a table."""
TOPIC_OPTIONS = ("subscribe", "subscribePattern", "assign", "topic")
"""Options that say which topics a table is about."""

_NAMES = tuple(
    name for name in dict.fromkeys((*READER_OPTIONS, *WRITER_OPTIONS)) if name not in QUERY_OPTIONS
)
_HINTS = dict.fromkeys(
    (name.lower() for name in QUERY_OPTIONS), "Set it on each streaming query that writes."
)


def check(options: Mapping[str, str]) -> source_options.SourceOptions:
    """Check all options of a table, and return those of its reader.

    Raises:
        InvalidConfigError: An option is unknown or has an invalid value.
    """
    parsed = source_options.parse(reader_options(options))
    # The topic for writing need not be known: many tables are only read.
    sink_options.parse(_select(options, WRITER_OPTIONS))
    return parsed


def check_catalog(options: Mapping[str, str]) -> str:
    """Check the options that all tables of a catalog have, and return the path of the log.

    Raises:
        InvalidConfigError: An option is unknown, belongs to one table or has an invalid value.
    """
    reader = OptionReader(options)
    for name in TOPIC_OPTIONS:
        if name in reader:
            raise InvalidConfigError(
                f"A catalog has no option {name!r}", todo="Its tables are the topics of the log."
            )
    return check({**options, "subscribe": "any"}).path


def reader_options(
    options: Mapping[str, str], of_query: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the options with which a query reads a table.

    Args:
        options: The options of the table.
        of_query: Options of the query, which take precedence; the reader checks them.

    Raises:
        InvalidConfigError: An option of the table is unknown.
    """
    OptionReader(options).check_names("table", _NAMES, BROKER_OPTIONS, _HINTS)
    merged = _merge(_select(options, (*READER_OPTIONS, *BROKER_OPTIONS)), of_query or {})
    if any(name in OptionReader(merged) for name in ("subscribe", "subscribePattern", "assign")):
        # Then the topic is that of writes.
        merged = {name: value for name, value in merged.items() if name.lower() != "topic"}
    return merged


def writer_options(
    options: Mapping[str, str], of_query: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the options with which a query writes to a table; ``topic`` is one of them.

    Args:
        options: The options of the table.
        of_query: Options of the query, which take precedence; the writer checks them.

    Raises:
        InvalidConfigError: An option of the table is wrong, or it has no topic to write to,
            because it reads several or a pattern.
    """
    selection = source_options.parse(reader_options(options)).subscription
    merged = _merge(_select(options, WRITER_OPTIONS), of_query or {})
    if "topic" not in OptionReader(merged):
        topics = selection.topics or tuple(selection.assigned or ())
        if len(topics) != 1:
            which = f"the topics {', '.join(topics)}" if topics else "the topics of a pattern"
            raise InvalidConfigError(
                f"The table reads {which}, and has no topic to write to",
                todo="Set the option 'topic' of the table, or of the write.",
            )
        merged["topic"] = topics[0]
    return merged


def _merge(options: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return both; of names that differ in case only, the others'."""
    replaced = {name.lower() for name in others}
    kept = {name: value for name, value in options.items() if name.lower() not in replaced}
    return {**kept, **others}


def _select(options: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Return the options of these names, and those about brokers: both sides check them."""
    known = {name.lower() for name in names}
    return {
        name: value
        for name, value in options.items()
        if name.lower() in known or name.lower().startswith("kafka.")
    }
