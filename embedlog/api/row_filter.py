"""Filters of rows as text, such as ``dep_delay > 60``: an expression of Polars' SQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from embedlog.api.pushdown import pushed_filter
from embedlog.api.scan import in_frames, polars_schema
from embedlog.api.sql import failures, first_line, table_names
from embedlog.display import need
from embedlog.errors import EmbedlogError, InvalidQueryError
from embedlog.lazy import pa

if TYPE_CHECKING:
    import polars

_MASK = "_tombstone"
"""A name that no column of a table has."""
_TABLE = "rows"
"""The only table that a condition may refer to."""


class RowFilter:
    """A condition on single rows.

    Args:
        text: An expression of SQL, without the word ``where``.
        schema: The columns that it may refer to.
        topic: The topic, for errors.

    Raises:
        InvalidQueryError: It is not such an expression.
        EmbedlogError: Polars is not installed.
    """

    def __init__(self, text: str, schema: pa.Schema, topic: str) -> None:
        library = need("polars")
        self._text, self._topic = text, topic
        columns = polars_schema(schema, topic)
        try:
            if table_names(f"select * from {_TABLE} where {text}") != {_TABLE}:
                raise self._not_about_rows()
            names = library.sql_expr(text).meta.root_names()
            for name in names:
                if name not in schema.names:
                    raise InvalidQueryError(
                        f"The filter {text!r} refers to a column {name!r}",
                        topic=topic,
                        todo=f"The columns are {', '.join(schema.names)}.",
                    )
            predicate = _predicate(text, columns)
        except EmbedlogError:
            raise
        except failures() as error:
            raise InvalidQueryError(
                f"The filter {text!r} is wrong: {first_line(error)}",
                topic=topic,
                todo='It must be a condition such as "dep_delay > 60".',
            ) from error
        if predicate is None:
            raise self._not_about_rows()
        self._expression = predicate
        self.columns: list[str] = list(dict.fromkeys(predicate.meta.root_names()))
        """The columns that it refers to."""
        self._pushed = pushed_filter(predicate, {field.name: field.type for field in schema})

    def _not_about_rows(self) -> InvalidQueryError:
        return InvalidQueryError(
            f"The filter {self._text!r} is not about single rows",
            topic=self._topic,
            todo="Use a complete query in SQL.",
        )

    def keep(self, table: pa.Table) -> pa.Table:
        """Return the rows of a table for which the condition is true.

        Args:
            table: With the columns of the condition, among others.

        Raises:
            InvalidQueryError: The condition failed, as with a cast that is not possible.
        """
        library = need("polars")
        columns = table.select(self.columns or table.column_names[:1])
        try:
            frame = library.from_arrow(columns).with_columns(self._expression.alias(_MASK))
        except failures() as error:
            raise InvalidQueryError(
                f"The filter {self._text!r} failed: {first_line(error)}",
                topic=self._topic,
                todo="Correct the filter.",
            ) from error
        return table.filter(frame[_MASK].to_arrow())

    def batches(self, view: Any, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield columns of the rows of a typed `TopicView` for which the condition is true."""
        names = list(dict.fromkeys([*columns, *self.columns]))
        for table in in_frames(view._pushed(names, self._pushed)):
            yield from self.keep(table).select(columns).to_batches()


def _predicate(text: str, columns: Any) -> polars.Expr | None:
    """Return a condition as Polars passes it to the source of a query.

    Its literals then have the types of the columns.  Returns None if Polars does not pass it,
    because it has to see all rows.

    Args:
        text: The condition, which is one expression.
        columns: The columns of the rows, as a Polars schema.
    """
    predicates: list[polars.Expr | None] = []

    def source(_: Any, predicate: polars.Expr | None, *__: Any) -> Iterator[Any]:
        predicates.append(predicate)
        return iter(())

    rows = need("polars.io.plugins").register_io_source(source, schema=columns)
    query = f"select * from {_TABLE} where (\n{text}\n)"
    need("polars").SQLContext({_TABLE: rows}).execute(query, eager=True)
    return predicates[0] if len(predicates) == 1 else None


__all__ = ["RowFilter"]
