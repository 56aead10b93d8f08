"""Which batches or segments cannot have a row for which an expression is true."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from embedlog.lazy import pa, pc
from embedlog.schemas.reading import names_in
from embedlog.schemas.statistics import RowStatistics, bound_scalar, merged
from embedlog.schemas.topic_schema import FIELD_ID, TopicSchema, field_id

_GROUP = 16
"""How many batches are looked at together first."""
_MOSTLY = 0.75
"""If at least this part of the groups may match, the batches in them are not looked at."""
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALL = re.compile(r"(\w+)\(")
_NULL = re.compile(r"\bnull\b")
_WITHOUT_ORDER = re.compile(r"\bcast\(|\bnan\b")
"""Arrow simplifies a comparison of a cast, or with NaN, as if both kept the order of values: by
bounds of 1.0 and 2.0 it takes ``~(x < nan)`` for false."""
_IS_IN = re.compile(r"\bis_in\((.*?), {value_set=(.*?):\[")
"""What is looked up, and the type of the list."""
# Null for a null, whatever the rest is: they do not tell nulls from values.
_STRICT = {"invert", "is_in", "starts_with", "ends_with", "match_substring", "match_like"}


class ColumnPlace(NamedTuple):
    """Where a column of the schema is in the segments of one version."""

    name: str
    position: int | None
    """None if they do not have it."""
    type: Any
    """The stored type, or that of the default."""


class Pruner:
    """Decides by statistics what to skip for an expression.

    Args:
        where: A `pyarrow.compute.Expression` over the columns of a topic.
        schema: The version of the schema that it refers to.
    """

    def __init__(self, where: Any, schema: TopicSchema) -> None:
        self._where, self._schema = where, schema
        text = _TEXT.sub('""', str(where))
        kinds = {(field.name, str(field.type)) for field in schema.columns}
        # Arrow rounds the items of a list of another type, but not when it compares them to bounds.
        comparable = not _WITHOUT_ORDER.search(text) and kinds.issuperset(_IS_IN.findall(text))
        self.names = names_in(where, schema.columns.names) if comparable else []
        calls = set(_CALL.findall(text))
        self._tells_nulls = not calls <= _STRICT or bool(_NULL.search(text))
        self._arrow = pa.schema([schema.plain.field(name) for name in self.names])
        self._places: dict[int, list[ColumnPlace]] = {}

    def keep(self, rows: Sequence[RowStatistics], stored: Any) -> list[bool]:
        """Return for each batch or segment whether it may have a row for which it is true.

        Args:
            rows: Their statistics.
            stored: The Arrow schema of their segments.
        """
        if not self.names:
            return [True] * len(rows)
        if len(rows) <= _GROUP:
            return self._may_match(rows, stored)
        groups = [rows[start : start + _GROUP] for start in range(0, len(rows), _GROUP)]
        together = [merged(group) for group in groups]
        kept = self._may_match([one for one in together if one is not None], stored)
        may_match = iter(kept)
        matches = [one is not None and next(may_match) for one in together]
        descend = sum(matches) < _MOSTLY * len(groups)
        result: list[bool] = []
        for group, may in zip(groups, matches, strict=True):
            if may and descend:
                result += self._may_match(group, stored)
            else:
                result += [may] * len(group)
        return result

    def _may_match(self, rows: Sequence[RowStatistics], stored: Any) -> list[bool]:
        """Simplify the expression by what is known about the rows: Arrow's datasets do that."""
        from pyarrow import dataset, fs

        if not rows:
            return []
        places = self._places_in(stored)
        try:
            facts = [self._facts(statistics, places) for statistics in rows]
            fragments = dataset.FileSystemDataset.from_paths(
                [str(number) for number in range(len(rows))],
                schema=self._arrow,
                format=dataset.IpcFileFormat(),
                filesystem=fs.LocalFileSystem(),
                partitions=facts,
            ).get_fragments(filter=self._where)
            kept = {int(fragment.path) for fragment in fragments}
        except (pa.ArrowException, ValueError, OverflowError):
            # An expression over other columns, or one that Arrow cannot simplify.
            return [True] * len(rows)
        return [number in kept for number in range(len(rows))]

    def _places_in(self, stored: Any) -> list[ColumnPlace]:
        places = self._places.get(id(stored))
        if places is None:
            by_id = {
                field_id(field): index
                for index, field in enumerate(stored)
                if field.metadata and FIELD_ID in field.metadata
            }
            places = []
            for name in self.names:
                field = self._schema.columns.field(name)
                index = by_id.get(field_id(field))
                kind = field.type if index is None else stored.field(index).type
                places.append(ColumnPlace(name, index, kind))
            self._places[id(stored)] = places
        return places

    def _facts(self, statistics: RowStatistics, places: Sequence[ColumnPlace]) -> Any:
        """Return an expression that is true for all rows, as far as the filter can tell."""
        facts = pc.scalar(True)
        for place in places:
            fact = self._fact(statistics, place)
            if fact is not None:
                facts = facts & fact
        return facts

    def _fact(self, statistics: RowStatistics, place: ColumnPlace) -> Any:
        column = pc.field(place.name)
        if place.position is None:
            default = self._schema.defaults.get(place.name)
            return column.is_null() if default is None else column == default[0]
        nulls = statistics.nulls[place.position]
        if nulls == statistics.count:
            return column.is_null()
        if nulls and self._tells_nulls:
            return None
        bounds = statistics.ranges.get(place.position)
        if bounds is None:
            return None
        target = self._schema.columns.field(place.name).type
        low, high = (bound_scalar(bound, place.type) for bound in bounds)
        if place.type != target:
            low, high = low.cast(target), high.cast(target)
        return (column >= low) & (column <= high)
