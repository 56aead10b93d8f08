"""A typed topic in plain Python: what readers must see after each write and change of schema."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from embedlog.partitioner import partition_for_key
from support.random_columns import (
    NAMES,
    KeyPart,
    arrow,
    as_variant,
    canonical,
    inferred,
    key_of,
    key_types,
    or_none,
    timestamp_types,
    types,
    values,
    variants,
    widened,
    wider,
)

_UTC_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}


@dataclass
class ModelColumn:
    """A column of the topic in its current version."""

    number: int
    """What stays when it is renamed."""
    name: str
    type: pa.DataType
    nullable: bool
    default: Any = None

    @property
    def field(self) -> pa.Field:
        """It as an Arrow field."""
        return pa.field(self.name, self.type, self.nullable)

    def values(self) -> st.SearchStrategy[Any]:
        """What a record may have in it."""
        strategy = values(self.type)
        return or_none(strategy) if self.nullable else strategy


@dataclass
class ModelRow:
    """A record."""

    values: dict[int, Any] | None
    """By the number of the column; None in a tombstone."""
    key: dict[int, Any]
    time: int
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)


@dataclass
class TypedModel:
    """The topic: its columns, and its records by partition and offset."""

    columns: list[ModelColumn]
    key: list[int]
    timestamp: int | None
    partitions: int
    rows: dict[tuple[int, int], ModelRow] = field(default_factory=dict)
    next_number: int = 100

    def column(self, number: int) -> ModelColumn:
        """Return a column by its number."""
        return next(column for column in self.columns if column.number == number)

    @property
    def schema(self) -> pa.Schema:
        """The columns as a user passes them."""
        return pa.schema([column.field for column in self.columns])

    @property
    def key_names(self) -> list[str]:
        """The names of the key columns."""
        return [self.column(number).name for number in self.key]

    @property
    def timestamp_name(self) -> str | None:
        """The name of the timestamp column."""
        return None if self.timestamp is None else self.column(self.timestamp).name

    # Records

    def complete(self, sent: dict[str, Any], time: int) -> ModelRow:
        """Return the record of a dict that was sent at a time."""
        row = {column.number: sent.get(column.name, column.default) for column in self.columns}
        if self.timestamp is not None:
            time = milliseconds(row[self.timestamp])
        return ModelRow(row, {number: row[number] for number in self.key}, time)

    def tombstone(self, key: list[Any], time: int) -> ModelRow:
        """Return a tombstone."""
        if self.timestamp is not None:
            per_second = _PER_SECOND[self.column(self.timestamp).type.unit]
            time = time * per_second // 1000 * 1000 // per_second
        return ModelRow(None, dict(zip(self.key, key, strict=True)), time)

    def key_bytes(self, row: ModelRow) -> bytes | None:
        """Return the key of a record, as Kafka's serializers write it."""
        if not self.key:
            return None
        return key_of([KeyPart(row.key[n], self.column(n).type) for n in self.key])

    def partition_of(self, row: ModelRow) -> int | None:
        """Return the partition of a record; None if any may have it."""
        key = self.key_bytes(row)
        return None if key is None else partition_for_key(key, self.partitions)

    def end(self, partition: int) -> int:
        """Return the offset of the next record of a partition."""
        return 1 + max((at[1] for at in self.rows if at[0] == partition), default=-1)

    def value(self, row: ModelRow) -> dict[str, Any] | None:
        """Return what `record.value` is."""
        if row.values is None:
            return None
        return {column.name: row.values[column.number] for column in self.columns}

    def key_value(self, row: ModelRow) -> Any:
        """Return what `record.key` is."""
        parts = [row.key[number] for number in self.key]
        return None if not parts else parts[0] if len(parts) == 1 else tuple(parts)

    def latest(self) -> dict[bytes, ModelRow]:
        """Return the last record of each key, tombstones too."""
        last = {}
        for at in sorted(self.rows):
            key = self.key_bytes(self.rows[at])
            if key is not None:
                last[key] = self.rows[at]
        return last

    def table(self) -> dict[str, list[Any]]:
        """Return the columns of `to_arrow`, by partition and offset, without tombstones."""
        kept = [(at, row) for at, row in sorted(self.rows.items()) if row.values is not None]
        result: dict[str, list[Any]] = {
            "offset": [at[1] for at, _ in kept],
            "partition": [at[0] for at, _ in kept],
            "timestamp": [_UTC_EPOCH + dt.timedelta(milliseconds=row.time) for _, row in kept],
        }
        for column in self.columns:
            result[column.name] = [row.values[column.number] for _, row in kept]
        return result

    # Changes of the schema

    def replace(self, columns: list[ModelColumn]) -> None:
        """Take other columns: all records are seen through them from now on."""
        before = {column.number: column for column in self.columns}
        for row in self.rows.values():
            if row.values is None:
                continue
            row.values = {
                column.number: widened(
                    row.values[column.number], before[column.number].type, column.type
                )
                if column.number in before
                else column.default
                for column in columns
            }
        self.columns = columns


def milliseconds(time: dt.datetime) -> int:
    """Return the timestamp of a record, rounded down."""
    nanoseconds: int = canonical(time)[1]
    return nanoseconds // 1_000_000


# Random ones


@st.composite
def models(draw: st.DrawFn) -> TypedModel:
    """Return an empty topic."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    columns = [
        ModelColumn(number, name, draw(types()), draw(st.booleans()))
        for number, name in enumerate(names)
    ]
    key = []
    for number in range(draw(st.integers(0, 2))):
        columns.append(
            ModelColumn(50 + number, f"key {number}", draw(key_types()), draw(st.booleans()))
        )
        key.append(50 + number)
    timestamp = None
    if draw(st.booleans()):
        columns.append(ModelColumn(60, "at", draw(timestamp_types()), draw(st.booleans())))
        timestamp = 60
    columns = list(draw(st.permutations(columns)))
    return TypedModel(columns, key, timestamp, draw(st.integers(1, 3)))


def rows(model: TypedModel) -> st.SearchStrategy[dict[str, Any]]:
    """Dicts to send: what may be null may also be missing."""
    required, optional = {}, {}
    for column in model.columns:
        strategy = column.values()
        if column.number == model.timestamp:
            required[column.name] = values(column.type)
        elif column.nullable or column.default is not None:
            optional[column.name] = strategy
        else:
            required[column.name] = strategy
    return st.fixed_dictionaries(required, optional=optional)


def headers() -> st.SearchStrategy[list[tuple[str, bytes | None]]]:
    """Headers of a record."""
    return st.lists(st.tuples(st.text(max_size=2), or_none(st.binary(max_size=2))), max_size=2)


def keys(model: TypedModel) -> st.SearchStrategy[list[Any]]:
    """Values of the key columns, of which not all are null."""
    return (
        st.tuples(*(model.column(number).values() for number in model.key))
        .map(list)
        .filter(lambda key: any(part is not None for part in key))
    )


@st.composite
def table_of(draw: st.DrawFn, model: TypedModel, sent: list[dict[str, Any]]) -> pa.Table:
    """Return records as a table of a library: other types, another order, columns left out."""
    arrays, names = [], []
    for column in draw(st.permutations(model.columns)):
        items = [row.get(column.name, column.default) for row in sent]
        present = any(column.name in row for row in sent)
        if not present and draw(st.booleans()):
            continue
        variant = draw(st.one_of(variants(column.type), st.just(inferred(items, column.type))))
        arrays.append(as_variant(items, column.type, variant))
        names.append(column.name)
    if not names:
        column = model.columns[0]
        items = [row.get(column.name, column.default) for row in sent]
        arrays, names = [arrow(items, column.type)], [column.name]
    return pa.table(arrays, names=names)


@st.composite
def changes(draw: st.DrawFn, model: TypedModel) -> tuple[list[ModelColumn], dict[str, str]]:
    """Return columns to which a topic may change, and which of them are renamed."""
    columns, rename = [], {}
    fixed = {*model.key, model.timestamp}
    free = [name for name in (*NAMES, "N1", "N2") if name not in model.schema.names]
    kept = [
        column
        for column in model.columns
        if column.number in fixed or draw(st.integers(0, 4)) or len(model.columns) == 1
    ] or model.columns[:1]
    names = [column.name if draw(st.integers(0, 3)) else free.pop() for column in kept]
    if draw(st.integers(0, 3)) == 0:
        names = draw(st.permutations(names))  # Two columns may swap their names.
    for column, name in zip(kept, names, strict=True):
        data_type = column.type
        if column.number not in fixed:
            data_type = draw(wider(column.type))
        if name != column.name:
            rename[column.name] = name
        nullable = column.nullable or draw(st.booleans())
        default = widened(column.default, column.type, data_type)
        columns.append(ModelColumn(column.number, name, data_type, nullable, default))
    for _ in range(draw(st.integers(0, 2))):
        data_type, default = draw(types()), None
        nullable = draw(st.booleans())
        if not nullable or draw(st.booleans()):
            default = draw(values(data_type))
        model.next_number += 1
        columns.append(ModelColumn(model.next_number, free.pop(), data_type, nullable, default))
    return list(draw(st.permutations(columns))), rename
