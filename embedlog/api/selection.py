"""`Selection`: columns and rows of a topic that were chosen, and not yet read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from embedlog.display import cut, html_table, public_names, short
from embedlog.errors import EmbedlogError
from embedlog.lazy import pa
from embedlog.schemas.reading import text_of
from embedlog.schemas.row_filter import check_where
from embedlog.schemas.rows import python_rows

if TYPE_CHECKING:
    import pandas
    import polars

    from embedlog.api.topic import Between, RowOptions
    from embedlog.schemas.row_filter import Where
    from embedlog.times import When

_SHOWN, _CELL_WIDTH = 5, 30


class Selection:
    """Columns and rows of a topic, from `TopicView.select`; each use reads the topic again.

    DuckDB queries it by its name as a variable, and whatever else takes an Arrow PyCapsule
    stream reads it, one batch at a time.

    Args:
        view: The `TopicView`.
        columns: Names of columns, as in its `to_arrow`, like the other arguments.
        where: Only rows for which this is true.
        latest: Only the last record of each key.
        since: Only records from this time on.
        between: Only records between two times.
    """

    def __init__(
        self,
        view: object,
        columns: Sequence[str] | None,
        *,
        where: Where | None = None,
        latest: bool = False,
        since: When | None = None,
        between: Between | None = None,
    ) -> None:
        if isinstance(columns, str):
            raise TypeError(f"columns must be a list of names, got {columns!r}")
        check_where(where)
        self._view = cast("Any", view)
        self._view._limited(since, between)  # Raises if a time is wrong.
        self._columns = None if columns is None else list(columns)
        self._rows: RowOptions = {
            "where": where,
            "latest": latest,
            "since": since,
            "between": between,
        }
        self.schema()
        if self._is_stored():
            self._view._condition(where)

    def _is_stored(self) -> bool:
        """Whether the columns are those that `TopicView.batches` yields."""
        return bool(self._view._serializers() == ("bytes", "bytes"))

    def schema(self) -> pa.Schema:
        """Return the columns.

        Raises:
            KeyError: A column does not exist (any more).
        """
        if self._is_stored():
            return self._view.schema(self._columns)
        # The fields of JSON follow from the values.
        return self.to_arrow().schema

    def to_arrow(self) -> pa.Table:
        """Return a table."""
        return self._view.to_arrow(self._columns, **self._rows)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame."""
        frame: pandas.DataFrame = self._view.to_pandas(self._columns, **self._rows)
        return frame

    def to_polars(self) -> polars.DataFrame:
        """Return a Polars DataFrame."""
        frame: polars.DataFrame = self._view.to_polars(self._columns, **self._rows)
        return frame

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as Arrow batches, with the memory of a few of them.

        The last record of each key, and the fields of JSON, need all records at once.
        """
        if self._rows["latest"] or not self._is_stored():
            return iter(self.to_arrow().to_batches())
        rows: dict[str, Any] = {**self._rows}
        del rows["latest"]
        batches: Iterator[pa.RecordBatch] = self._view.batches(self._columns, **rows)
        return batches

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow PyCapsule stream, by which DuckDB, Polars, pandas and others read it."""
        if self._rows["latest"] or not self._is_stored():
            return self.to_arrow().__arrow_c_stream__(requested_schema)
        reader = pa.RecordBatchReader.from_batches(self.schema(), self.batches())
        return reader.__arrow_c_stream__(requested_schema)

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)

    def _title(self) -> str:
        parts = [f"Selection of {self._view.name}: {', '.join(self._columns or ['all columns'])}"]
        rows = self._rows
        if rows["latest"]:
            parts.append("latest of each key")
        if rows["where"] is not None:
            parts.append(f"where {cut(text_of(rows['where']))}")
        if rows["since"] is not None:
            parts.append(f"since {rows['since']}")
        if rows["between"] is not None:
            parts.append("between {} and {}".format(*rows["between"]))
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def _repr_html_(self) -> str:
        """For notebooks: the title and the first rows."""
        try:
            names = self.schema().names
            rows = [
                row
                for batch in islice(self.batches(), 1)
                for row in python_rows(batch[:_SHOWN], names)
            ]
        except EmbedlogError as error:
            return html_table(f"{self._title()}: {error.what}", (), ())
        cells = [[cut(short(row[name]), _CELL_WIDTH) for name in names] for row in rows]
        return html_table(self._title(), names, cells)


__all__ = ["Selection"]
