"""SQL over topics, run by Polars."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from embedlog.api.scan import ScanSource
from embedlog.catalog import INTERNAL
from embedlog.display import need
from embedlog.errors import EmbedlogError, InvalidQueryError, UnknownTopicOrPartitionError
from embedlog.hints import Hint
from embedlog.schemas.row_filter import failures, first_line, table_names

if TYPE_CHECKING:
    import polars

    from embedlog.api.topic import TopicView

_SHOWN_TOPICS = 20
_WORD = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*(\w*)", re.DOTALL)
"""The first word of a query, after comments."""
_CHANGES = "alter create delete drop insert merge replace truncate update".split()
_NO_FUNCTION = "is not a supported table function"
"""In Polars' error about a table with arguments that is none of its functions."""
_SERIES = {"generate_series", "range"}
"""Table functions that make numbers; the others read files and URLs."""
_MISSING_TABLE = re.compile(r"(?:relation|table) '(.*)' (?:was not found|does not exist)")
_PLAIN = re.compile(r"[A-Za-z_]\w*")
"""A name that SQL takes without quotes."""


def sql(
    views: Mapping[str, TopicView[Any, Any]], query: str, *, files: bool = False
) -> polars.LazyFrame:
    """Return the result of a query as a lazy frame; only the topics that it names are read.

    Args:
        views: All topics, by name.
        query: One SELECT.
        files: Whether it may read files and URLs.

    Raises:
        InvalidQueryError: The query is wrong, or would change something or read a file.
        UnknownTopicOrPartitionError: It names a topic that does not exist.
    """
    if not isinstance(query, str):
        raise TypeError(f"query must be SQL as a str, got {type(query).__name__}")
    library = need("polars")
    word = _WORD.match(query)
    if word is not None and word[1].lower() in _CHANGES:
        raise InvalidQueryError(
            f"SQL only reads a log, and {word[1].upper()} would change it",
            todo=Hint(
                "Write with a producer, and change topics with alter_topic, delete_topic and "
                "delete_records.",
                "Use `embedlog produce TOPIC`, `embedlog topics alter TOPIC` or delete_records.",
            ),
        )
    sources = {name: ScanSource(view) for name, view in views.items()}
    try:
        functions = [] if files else [name for name in table_names(query) if _reads_files(name)]
        if functions:
            raise InvalidQueryError(
                f"The query reads a file or a URL with {functions[0]}",
                todo=Hint(
                    "Name topics only, or allow files with files=True.",
                    "Name topics only, or allow files with --files.",
                ),
            )
        context = library.SQLContext({name: source.frame() for name, source in sources.items()})
        frame: polars.LazyFrame = context.execute(query, eager=False)
        frame.collect_schema()
    except EmbedlogError:
        raise
    except failures() as error:
        _refuse(query, error, sources)
    return frame


def _reads_files(name: str) -> bool:
    """Whether a name is that of a table function that reads files.

    This calls the function in Polars without arguments, so the answer fits the installed version.
    """
    quoted = name.replace('"', '""')
    try:
        need("polars").SQLContext().execute(f'select * from "{quoted}"()').collect_schema()
    except failures() as error:
        return _NO_FUNCTION not in str(error) and name.lower() not in _SERIES
    return True


def collect(frame: polars.LazyFrame) -> polars.DataFrame:
    """Return the result of a query.

    Raises:
        InvalidQueryError: It failed on the data, as with a cast that is not possible.
    """
    try:
        result: polars.DataFrame = frame.collect()
    except EmbedlogError:
        raise
    except failures() as error:
        raise InvalidQueryError(
            f"The query failed: {first_line(error)}", todo="Correct the query."
        ) from error
    return result


def _refuse(query: str, error: BaseException, sources: dict[str, ScanSource]) -> NoReturn:
    """Raise the error for one of Polars.

    Raises:
        Exception: That of a topic whose columns could not be read.
        UnknownTopicOrPartitionError, InvalidQueryError: What is wrong with the query.
    """
    for source in sources.values():
        if source.error is not None:
            raise source.error from None
    what = first_line(error)
    missing = _MISSING_TABLE.search(what)
    if missing is not None:
        name = missing[1]
        similar = get_close_matches(name, sources, 1)
        hint = f"Did you mean {_quoted(similar[0])}? " if similar else ""
        raise UnknownTopicOrPartitionError(
            "There is no such topic", topic=name, todo=f"{hint}{_tables(sources)}"
        ) from error
    # An unquoted my-topic is a difference.
    names = [name for name in sources if not _PLAIN.fullmatch(name) and name in query]
    hint = f' Write the name "{names[0]}" in double quotes.' if names else ""
    raise InvalidQueryError(f"The query is wrong: {what}", todo=f"Correct it.{hint}") from error


def _tables(sources: dict[str, Any]) -> str:
    names = [name for name in sources if not name.startswith(INTERNAL)]
    if not names:
        return "The log has no topics."
    shown = ", ".join(map(_quoted, names[:_SHOWN_TOPICS]))
    more = f", and {len(names) - _SHOWN_TOPICS} more" if len(names) > _SHOWN_TOPICS else ""
    return f"The tables are the topics {shown}{more}."


def _quoted(name: str) -> str:
    """Return a name as SQL takes it."""
    return name if _PLAIN.fullmatch(name) else f'"{name}"'
