"""Lazy frames of Polars over a topic: columns, filters and slices reach the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from embedlog.display import need
from embedlog.errors import UnsupportedFormatError
from embedlog.lazy import pa
from embedlog.schemas.pushdown import PushedFilter, pushed_filter
from embedlog.schemas.row_filter import polars_schema

if TYPE_CHECKING:
    import polars

    from embedlog.api.topic import TopicView

_GROWTH = 4
"""Each frame has so many times the rows of the one before, until it has those of a batch."""
_BATCH_ROWS = 1 << 17
"""The rows of a frame if Polars does not say how many it wants."""
Reads = Callable[[list[str], PushedFilter | None], Iterator[Any]]
"""Takes names of columns and a filter, which it need not apply, and yields record batches."""


def scan(view: TopicView[Any, Any]) -> polars.LazyFrame:
    """Return a lazy frame of the records that a view has when the frame is collected.

    The columns are those of the schema as of now.
    """
    source = ScanSource(view)
    source.schema()
    return source.frame()


class ScanSource:
    """Reads a topic for Polars: once for each time that a lazy frame is collected.

    Args:
        view: The records.
    """

    def __init__(self, view: TopicView[Any, Any]) -> None:
        self._view = view
        self._schema: Any = None
        self._read: Reads = lambda _, __: iter(())
        self._polars_schema: Any = None
        self.error: Exception | None = None
        """Why the schema could not be read: Polars keeps only the text of such an error."""

    def schema(self) -> Any:
        """Return the columns as Polars has them; they stay the same from the first call on.

        Raises:
            InvalidSchemaError: Polars does not have the type of a column.
        """
        if self._polars_schema is None:
            try:
                self._schema, self._read = self._view._scannable()
                self._polars_schema = polars_schema(self._schema, self._view.name)
            except Exception as error:
                self.error = error
                raise
        return self._polars_schema

    def frame(self) -> polars.LazyFrame:
        """Return the lazy frame; reads nothing."""
        plugins = need("polars.io.plugins")
        try:
            register = plugins.register_io_source
        except AttributeError:
            raise UnsupportedFormatError(
                "This version of Polars has no IO sources",
                todo='Run pip install "embedlog[polars]".',
            ) from None
        frame: polars.LazyFrame = register(self.batches, schema=self.schema)
        return frame

    def batches(
        self,
        with_columns: list[str] | None,
        predicate: polars.Expr | None,
        n_rows: int | None,
        batch_size: int | None,
    ) -> Iterator[polars.DataFrame]:
        """Yield the rows for Polars.

        Args:
            with_columns: The columns; None for all.
            predicate: Only rows for which this is true.
            n_rows: Only so many of the first rows, before the predicate.
            batch_size: The most rows of a frame.
        """
        polars = need("polars")
        self.schema()
        names = self._schema.names if with_columns is None else with_columns
        where = None
        if predicate is not None and n_rows is None:
            types = {field.name: field.type for field in self._schema}
            where = pushed_filter(predicate, types)
        # A frame without columns would have no rows either.
        read = names or self._schema.names[:1]
        for table in in_frames(self._read(read, where), n_rows, batch_size):
            frame = polars.from_arrow(table)
            if predicate is not None:
                frame = frame.filter(predicate)
            # Names in select() may be patterns, such as "*".
            yield frame[names] if names else polars.DataFrame(height=frame.height)


def in_frames(
    batches: Iterator[Any], n_rows: int | None = None, batch_size: int | None = None
) -> Iterator[Any]:
    """Yield tables of at most a batch size of rows.

    The first ones are small, so that a query which needs few rows ends early.

    Args:
        batches: The rows.
        n_rows: How many of the first rows; None for all.
        batch_size: The most rows of a table.
    """
    limit = batch_size or _BATCH_ROWS
    target, rows, parts = 1, 0, list[Any]()
    for batch in _pieces(batches, n_rows, limit):
        if parts and rows + batch.num_rows > limit:
            yield pa.Table.from_batches(parts)
            rows, parts = 0, []
        parts.append(batch)
        rows += batch.num_rows
        if rows >= target:
            yield pa.Table.from_batches(parts)
            rows, parts, target = 0, [], min(target * _GROWTH, limit)
    if parts:
        yield pa.Table.from_batches(parts)


def _pieces(batches: Iterator[Any], n_rows: int | None, limit: int) -> Iterator[Any]:
    """Yield the first rows of batches, each time at most a limit."""
    left = n_rows
    for batch in batches:
        if left is not None:
            batch = batch.slice(0, left)
            left -= batch.num_rows
        for start in range(0, batch.num_rows, limit):
            yield batch.slice(start, limit)
        if left == 0:
            return
