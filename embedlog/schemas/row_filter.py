"""Conditions on rows: an expression of pyarrow or Polars, or SQL as text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeAlias

from embedlog.display import need
from embedlog.errors import EmbedlogError, InvalidQueryError, InvalidSchemaError
from embedlog.hints import Hint
from embedlog.lazy import pa, pc
from embedlog.schemas.pushdown import PushedFilter, pushed_filter
from embedlog.schemas.reading import TOMBSTONE, names_in, text_of

if TYPE_CHECKING:
    import polars
    import pyarrow.compute

    Where: TypeAlias = pyarrow.compute.Expression | polars.Expr | str

_TABLE = "rows"
"""The only table that a condition may refer to."""
_MISSING = re.compile(r"FieldRef\.Name\((.*?)\)+ in ")


def row_filter(where: Where, schema: pa.Schema, topic: str) -> RowFilter:
    """Return a condition on single rows.

    Args:
        where: An expression of pyarrow or of Polars, or one of SQL without the word ``where``.
        schema: The columns that it may refer to.
        topic: The topic, for errors.

    Raises:
        TypeError: It is none of these.
        InvalidQueryError: It is wrong, or not about single rows.
        EmbedlogError: It is not one of pyarrow, and Polars is not installed.
    """
    check_where(where)
    if isinstance(where, pc.Expression):
        return RowFilter(where, schema, topic)
    return PolarsFilter(where, schema, topic)


def check_where(where: Where | None) -> None:
    """Raise a TypeError for what cannot be a condition."""
    polars = sys.modules.get("polars")
    kinds = (str, pc.Expression) if polars is None else (str, pc.Expression, polars.Expr)
    if where is not None and not isinstance(where, kinds):
        raise TypeError(
            "where must be an expression of pyarrow or Polars, or SQL as a str such as "
            f"'dep_delay > 60', got {type(where).__name__}"
        )


class RowFilter:
    """A condition that is an expression of pyarrow; the arguments are those of `row_filter`."""

    def __init__(self, where: Where, schema: pa.Schema, topic: str) -> None:
        self._where, self._schema, self._topic = where, schema, topic
        self._prepare()

    def _prepare(self) -> None:
        self.columns: list[str] = names_in(self._where, self._schema.names)
        """The columns that it refers to, or a few more."""
        self.pushed: PushedFilter | None = PushedFilter(self._where, self._where)
        """What the log can use of it."""
        self.keep(pa.schema([self._schema.field(name) for name in self.columns]).empty_table())

    def keep(self, table: pa.Table) -> pa.Table:
        """Return the rows of a table, or record batch, for which the condition is true.

        Args:
            table: With the columns of the condition, among others.

        Raises:
            InvalidQueryError: The condition failed, as with a cast that is not possible.
        """
        try:
            return table.filter(self._where)
        except (pa.ArrowException, ValueError, TypeError) as error:
            missing = _MISSING.search(str(error))
            if missing is not None:
                raise self._unknown(missing[1]) from error
            raise self._wrong(error) from error

    def _wrong(self, error: BaseException, verdict: str = "is wrong") -> InvalidQueryError:
        return InvalidQueryError(
            f"The filter {self._text()} {verdict}: {first_line(error)}",
            topic=self._topic,
            todo='It must be a condition such as "dep_delay > 60".',
        )

    def _unknown(self, name: str) -> InvalidQueryError:
        names = self._schema.names
        near = get_close_matches(name, names, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        return InvalidQueryError(
            f"The filter {self._text()} refers to a column {name!r}",
            topic=self._topic,
            todo=f"{hint}The columns are {', '.join(names)}.",
        )

    def _text(self) -> str:
        return repr(self._where) if isinstance(self._where, str) else text_of(self._where)


class PolarsFilter(RowFilter):
    """One that is an expression of Polars or SQL."""

    def _prepare(self) -> None:
        library, where, schema = need("polars"), self._where, self._schema
        usable = pa.schema([field for field in schema if not _has_wide_decimals(field.type)])
        columns = polars_schema(usable, self._topic)
        try:
            expression: Any = where
            if isinstance(where, str):
                if table_names(f"select * from {_TABLE} where {where}") != {_TABLE}:
                    raise self._not_about_rows()
                expression = library.sql_expr(where)
                if ".subplan(" in str(expression):  # Of a query inside of the condition.
                    raise self._not_about_rows()
            for name in expression.meta.root_names():
                if name not in schema.names:
                    raise self._unknown(name)
                check_decimals([schema.field(name)], self._topic)
            predicate = _predicate(where, columns)
        except EmbedlogError:
            raise
        except failures() as error:
            raise self._wrong(error) from error
        if predicate is None:
            raise self._not_about_rows()
        self._expression = predicate
        self.columns = list(dict.fromkeys(predicate.meta.root_names()))
        self.pushed = pushed_filter(predicate, {field.name: field.type for field in schema})

    def _not_about_rows(self) -> InvalidQueryError:
        return InvalidQueryError(
            f"The filter {self._text()} is not about single rows",
            topic=self._topic,
            todo="Use a complete query in SQL.",
        )

    def keep(self, table: pa.Table) -> pa.Table:
        """Return the rows for which the condition is true, as `RowFilter.keep`."""
        columns = table.select(self.columns or table.schema.names[:1])
        try:
            frame = need("polars").from_arrow(columns)
            mask = frame.with_columns(self._expression.alias(TOMBSTONE))[TOMBSTONE]
        except failures() as error:
            raise self._wrong(error, "failed") from error
        return table.filter(mask.to_arrow())


def _predicate(where: Any, columns: Any) -> polars.Expr | None:
    """Return a condition as Polars passes it to the source of a query.

    Its literals then have the types of the columns.  Returns None if Polars does not pass it,
    because it has to see all rows.

    Args:
        where: The condition: one expression of SQL, or of Polars.
        columns: The columns of the rows, as a Polars schema.
    """
    predicates: list[polars.Expr | None] = []

    def source(_: Any, predicate: polars.Expr | None, *__: Any) -> Iterator[Any]:
        predicates.append(predicate)
        return iter(())

    rows = need("polars.io.plugins").register_io_source(source, schema=columns)
    if isinstance(where, str):
        query = f"select * from {_TABLE} where (\n{where}\n)"
        need("polars").SQLContext({_TABLE: rows}).execute(query, eager=True)
    else:
        rows.filter(where).collect()
    return predicates[0] if len(predicates) == 1 else None


def polars_schema(schema: Any, topic: str) -> Any:
    """Return the columns of a `pyarrow.Schema` as Polars has them.

    Raises:
        InvalidSchemaError: Polars does not have the type of a column.
    """
    polars = need("polars")
    check_decimals(schema, topic)
    columns: dict[str, Any] = {}
    for field in schema:
        try:
            columns |= polars.from_arrow(pa.schema([field]).empty_table()).schema
        except (polars.exceptions.PolarsError, pa.ArrowException) as error:
            raise _not_in_polars(field, topic) from error
    return polars.Schema(columns)


def check_decimals(schema: Any, topic: str) -> None:
    """Raise an `InvalidSchemaError` for decimals of 256 bits, of which Polars only has the type."""
    for field in schema:
        if _has_wide_decimals(field.type):
            raise _not_in_polars(field, topic)


def _has_wide_decimals(data_type: Any) -> bool:
    inner = (data_type.field(index).type for index in range(data_type.num_fields))
    return pa.types.is_decimal256(data_type) or any(map(_has_wide_decimals, inner))


def _not_in_polars(field: Any, topic: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"Polars does not have the type {field.type} of the column {field.name}",
        topic=topic,
        column=field.name,
        todo=Hint("Read the topic with to_arrow(columns=…).", "Use `embedlog export TOPIC FILE`."),
    )


def table_names(query: str) -> set[str]:
    """Return the names of all tables and table functions in a query, as Polars parses it.

    Raises:
        PolarsError: The query cannot be parsed.
    """
    context = need("polars").SQLContext()
    names = context._ctxt.table_identifiers(query, include_schema=True, unique=True)
    return {part for name in names for part in (name, *name.split("."))}


def failures() -> tuple[type[BaseException], ...]:
    """Return the errors that a query in Polars can raise; those of files are Python's own."""
    return Exception, need("polars").exceptions.PanicException


def first_line(error: BaseException) -> str:
    """Return the message of a Polars error, without the query plan."""
    return (str(error).splitlines() or [type(error).__name__])[0].removesuffix(".")
