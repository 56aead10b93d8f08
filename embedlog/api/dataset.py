"""`TopicDataset`: the records of a topic as a `pyarrow.dataset.Dataset`.

DuckDB, Polars and other engines ask a dataset for the columns and rows that a query needs: only
those columns are read, and segments and batches without such rows are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from embedlog.errors import UnsupportedFormatError
from embedlog.schemas.pushdown import PushedFilter
from embedlog.schemas.reading import names_in

if TYPE_CHECKING:
    from embedlog.api.topic import TopicView

Columns = Sequence[str] | Mapping[str, pc.Expression]
"""Names of columns, or expressions by the names of their results."""


class TopicDataset(ds.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """The records of a view at the time of each scan, in the columns of `TopicView.scan`.

    Args:
        view: The `TopicView`.
        condition: Only rows for which this expression of pyarrow is true.
    """

    def __init__(self, view: TopicView, condition: pc.Expression | None = None) -> None:
        # Not super().__init__, which cannot be called: the methods of the base class that would
        # need it are all overridden.
        self._view, self._condition = view, condition
        self._schema, self._read = view._scannable()

    def __reduce__(self) -> tuple[object, ...]:
        return TopicDataset, (self._view, self._condition)

    def __repr__(self) -> str:
        return f"<TopicDataset of {self._view!r}>"

    @property
    def schema(self) -> pa.Schema:
        """The columns, which stay those of when the dataset was made."""
        return self._schema

    @property
    def partition_expression(self) -> pc.Expression:
        """An expression that is true for all rows."""
        return ds.scalar(True)

    def scanner(
        self,
        columns: Columns | None = None,
        filter: pc.Expression | None = None,  # noqa: A002 - pyarrow's name
        **options: object,
    ) -> ds.Scanner:
        """Return a scanner, which reads the records once.

        Args:
            columns: Names of columns, or a dict of expressions by name; by default all columns.
            filter: Only rows for which this expression is true.
            options: As for any dataset.

        Raises:
            KeyError: There is no such column.
        """
        names, condition = self._schema.names, _both(self._condition, filter)
        expressions = [*columns.values()] if isinstance(columns, Mapping) else []
        used = names if columns is None else [] if expressions else list(columns)
        for expression in expressions if condition is None else [*expressions, condition]:
            used = [*used, *names_in(expression, names)]
        # Batches without a column would have no rows.
        read = pa.schema([self._schema.field(name) for name in dict.fromkeys(used or names[:1])])
        return ds.Scanner.from_batches(
            self._batches(read, condition),
            schema=read,
            columns=names if columns is None else columns,
            filter=condition,
            **options,
        )

    def _batches(self, schema: pa.Schema, condition: Any) -> Iterator[pa.RecordBatch]:
        pushed = None if condition is None else PushedFilter(condition, condition)
        for batch in self._read(schema.names, pushed):
            yield batch.cast(schema)

    def count_rows(self, filter: pc.Expression | None = None, **options: object) -> int:  # noqa: A002
        """Return how many rows there are for which a filter is true; reads its columns only."""
        return int(self.scanner([], filter, **options).count_rows())

    def filter(self, expression: pc.Expression) -> TopicDataset:
        """Return the rows for which an expression is true; nothing is read yet."""
        return TopicDataset(self._view, _both(self._condition, expression))

    def sort_by(self, sorting: str | list[tuple[str, str]], **options: object) -> ds.Dataset:
        """Return the rows in another order, in memory."""
        return _in_memory(self).sort_by(sorting, **options)

    def join(self, right_dataset: ds.Dataset, *args: object, **options: object) -> ds.Dataset:
        """Join the rows with those of another dataset, in memory."""
        return _in_memory(self).join(_in_memory(right_dataset), *args, **options)

    def join_asof(self, right_dataset: ds.Dataset, *args: object, **options: object) -> ds.Dataset:
        """Join each row with the nearest one of another dataset, in memory."""
        return _in_memory(self).join_asof(_in_memory(right_dataset), *args, **options)

    def get_fragments(self, filter: pc.Expression | None = None) -> Iterator[ds.Fragment]:  # noqa: A002
        """Raise an `UnsupportedFormatError`: a log has no fragments of Arrow's."""
        raise self._unsupported("get_fragments", "`files` of the topic lists its files.")

    def replace_schema(self, schema: pa.Schema) -> ds.Dataset:
        """Raise an `UnsupportedFormatError`: the columns are those of the topic."""
        raise self._unsupported("replace_schema", "Cast the result of to_table.")

    def _unsupported(self, method: str, todo: str) -> UnsupportedFormatError:
        what = f"The dataset of a topic has no {method}"
        return UnsupportedFormatError(what, topic=self._view.name, todo=todo)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the Arrow PyCapsule stream of all rows."""
        return self.scanner().to_reader().__arrow_c_stream__(requested_schema)


def _both(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _in_memory(dataset: Any) -> Any:
    return ds.dataset(dataset.to_table()) if isinstance(dataset, TopicDataset) else dataset
