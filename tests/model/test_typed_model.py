"""Typed topics against a model in plain Python: random schemas, records, changes and readers."""

from __future__ import annotations

import datetime as dt
import shutil
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiers
from support.clock import ManualClock
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

import embedlog
from embedlog.partitioner import partition_for_key

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


class TypedTopicMachine:
    """A typed topic, and the model of it."""

    def __init__(self, data: st.DataObject, path: str) -> None:
        self.data, self.path, self.clock = data, path, ManualClock()
        self.model = model = data.draw(models(), label="model")
        self.log = self.open()
        config = {
            "segment.bytes": data.draw(st.sampled_from([3000, 20_000, 1 << 20])),
            "index.interval.bytes": 100,
            "statistics.columns": data.draw(st.sampled_from(["none", "", text_columns(model)])),
        }
        names = model.key_names
        key = None if not names else names[0] if len(names) == 1 else names
        self.topic = self.log.create_topic(
            "t",
            model.partitions,
            config,
            schema=model.schema,
            key=key,
            timestamp=model.timestamp_name,
        )

    def open(self) -> embedlog.Log:
        return embedlog.open(self.path, maintenance=False, clock=self.clock)

    def run(self, most: int) -> None:
        """Do some random steps."""
        steps = (self.send, self.send, self.append_table, self.alter, self.optimize, self.reopen)
        names = self.data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=most))
        for step in names:
            self.clock.advance(7)
            step()

    def send(self) -> None:
        """Send records one by one; the batches that they are in are the producer's business."""
        draw, model = self.data.draw, self.model
        compression = draw(st.sampled_from(["none", "lz4", "zstd"]))
        with self.log.producer(
            compression_type=compression, batch_size=draw(st.sampled_from([1, 200, 16384]))
        ) as producer:
            futures = []
            for _ in range(draw(st.integers(1, 4))):
                own, time = draw(st.one_of(st.none(), headers())), self.clock()
                if model.key and draw(st.integers(0, 3)) == 0:
                    key, row = draw(keys(model)), None
                    row = model.tombstone(key, time)
                    sent = producer.send(
                        "t", None, key=key[0] if len(key) == 1 else tuple(key), headers=own
                    )
                else:
                    value = draw(rows(model))
                    row = model.complete(value, time)
                    sent = producer.send("t", value, headers=own)
                row.headers = own or []
                futures.append((sent, row))
        for sent, row in futures:
            written = sent.result()
            home = model.partition_of(row)
            assert written.partition == home or home is None
            assert written.timestamp == row.time
            model.rows[written.partition, written.offset] = row

    def append_table(self) -> None:
        """Append a table of some library."""
        draw, model = self.data.draw, self.model
        sent = draw(st.lists(rows(model), min_size=1, max_size=4))
        if None in [model.partition_of(model.complete(row, 0)) for row in sent]:
            # Those without a key may be in any partition, those with one only in their own.
            sent = [row for row in sent if model.partition_of(model.complete(row, 0)) is None]
        table = draw(table_of(model, sent))
        written = [model.complete(row, self.clock()) for row in sent]
        homes = [model.partition_of(row) for row in written]
        partition = draw(st.integers(0, model.partitions - 1)) if None in homes else None
        compression = draw(st.sampled_from(["none", "lz4", "zstd"]))
        with self.log.producer(compression_type=compression) as producer:
            result = producer.append_table("t", table, partition=partition).result()
        assert sum(part.count for part in result) == len(sent)
        for row, home in zip(written, homes, strict=True):
            number = home if partition is None else partition
            model.rows[number, model.end(number)] = row

    def alter(self) -> None:
        """Change the schema."""
        columns, rename = self.data.draw(changes(self.model), label="change")
        schema = pa.schema([column.field for column in columns])
        known = {column.number for column in self.model.columns}
        defaults = {
            column.name: column.default
            for column in columns
            if column.number not in known and column.default is not None
        }
        self.log.alter_topic("t", schema=schema, rename=rename, defaults=defaults)
        self.model.replace(columns)

    def optimize(self) -> None:
        """Gather small batches into larger ones."""
        self.topic.optimize()

    def reopen(self) -> None:
        """Close the log and open it again."""
        self.log.close()
        self.log = self.open()
        self.topic = self.log.topic("t")

    # Checks

    def check(self) -> None:
        """Compare what all readers see with the model."""
        self.check_records()
        self.check_tables()
        if self.model.key:
            self.check_latest()
        assert self.log.housekeeping.verify() == []

    def check_records(self) -> None:
        model = self.model
        expected = [
            (*at, row.time, canonical(model.key_value(row)), canonical(model.value(row)),
             list(row.headers))
            for at, row in sorted(model.rows.items())
        ]  # fmt: skip
        with closing(self.log.consumer("t", auto_offset_reset="earliest")) as consumer:
            polled = list(consumer.iter_records(until="end"))
        for records in (list(self.topic), polled):
            found = [
                (record.partition, record.offset, record.timestamp, canonical(record.key),
                 canonical(record.value), list(record.headers))
                for record in sorted(records, key=lambda r: (r.partition, r.offset))
            ]  # fmt: skip
            assert found == expected

    def check_tables(self) -> None:
        draw, model = self.data.draw, self.model
        full = self.topic.to_arrow()
        expected = {name: canonical(items) for name, items in model.table().items()}
        own = [name for name in full.column_names if name != "headers"]
        assert {name: canonical(python(full[name])) for name in own} == expected
        assert [full.schema.field(column.name).type for column in model.columns] == [
            column.type for column in model.columns
        ]
        chosen = draw(st.lists(st.sampled_from(full.column_names), unique=True, min_size=1))
        assert_same(self.topic.to_arrow(chosen), full.select(chosen))
        where = draw(conditions(full.select(own)))
        filtered = full.filter(where)
        assert_same(self.topic.to_arrow(where=where), filtered)
        assert_same(self.topic.to_arrow(chosen, where=where), filtered.select(chosen))
        pieces = list(self.topic.iter_batches(chosen, where=where))
        if pieces:
            assert_same(pa.Table.from_batches(pieces), filtered.select(chosen))
        else:
            assert not filtered.num_rows
        names = list(dict.fromkeys(["offset", *chosen]))
        with closing(self.log.consumer("t", auto_offset_reset="earliest")) as consumer:
            pieces = list(consumer.iter_batches(until="end", columns=names, where=where))
        found = [row for piece in pieces for row in zip(*lists(piece), strict=True)]
        wanted = list(zip(*lists(filtered.select(names)), strict=True))
        assert sorted(map(repr, found)) == sorted(map(repr, wanted))
        self.check_tombstones()

    def check_tombstones(self) -> None:
        """E27: every door marks them if it is asked to; their rows have the key."""
        rows, names = self.model.rows, [*self.model.key_names, "_tombstone"]
        expected = {
            at: [
                *(canonical(row.key[number]) for number in self.model.key),
                ("bool", row.values is None),
            ]
            for at, row in rows.items()
        }
        asked = ["partition", "offset", *names]
        with closing(self.log.consumer("t", auto_offset_reset="earliest")) as consumer:
            batches = list(consumer.iter_batches(asked, until="end"))
        with closing(self.log.consumer("t", auto_offset_reset="earliest")) as consumer:
            marked = list(consumer.iter_batches(asked, "end", pc.field("_tombstone")))
        deleted = {at: row for at, row in expected.items() if rows[at].values is None}
        for pieces, wanted in (
            (batches, expected),
            (self.topic.batches(asked), expected),
            (self.topic.to_arrow(asked).to_batches(), expected),
            (self.topic.to_arrow(asked, where=pc.field("_tombstone")).to_batches(), deleted),
            (marked, deleted),
        ):
            found = [row for piece in pieces for row in zip(*lists(piece), strict=True)]
            assert {(row[0], row[1]): list(row[2:]) for row in found} == wanted

    def check_latest(self) -> None:
        model = self.model
        last = model.latest()
        for row in last.values():
            record = self.topic.get(model.key_value(row))
            if row.values is None:
                assert record is None
            else:
                assert canonical(record.value if hasattr(record, "value") else record) == canonical(
                    model.value(row)
                )
        alive = [row for row in last.values() if row.values is not None]
        expected = sorted(repr(canonical(model.value(row))) for row in alive)
        assert sorted(repr(canonical(value)) for _, value in self.topic.items()) == expected
        table = self.topic.to_arrow(model.schema.names, latest=True)
        found = [
            dict(zip(table.column_names, row, strict=True))
            for row in zip(*(python(column) for column in table.columns), strict=True)
        ]
        assert sorted(repr(canonical(value)) for value in found) == expected


def text_columns(model) -> str:
    """Return the columns of text that a setting can name."""
    names = [column.name for column in model.columns if pa.types.is_string(column.type)]
    return ",".join(name for name in names if name.strip() == name)


def python(column) -> list:
    """Return a column as Python objects, with maps as dicts."""
    return column.to_pylist(maps_as_pydicts="strict")


def lists(table) -> list:
    return [canonical(python(column)) for column in table.columns]


def assert_same(found: pa.Table, expected: pa.Table) -> None:
    """Assert that two tables have the same rows; a NaN is the same as another."""
    assert found.schema.equals(expected.schema)
    assert found.num_rows == expected.num_rows
    found.validate(full=True)
    assert lists(found) == lists(expected)


def conditions(table: pa.Table) -> st.SearchStrategy[pc.Expression]:
    """Expressions over one or two columns of a table."""
    return st.lists(
        st.sampled_from(table.column_names).flatmap(lambda name: _condition(table, name)),
        min_size=1,
        max_size=2,
    ).map(lambda both: both[0] if len(both) == 1 else both[0] & both[1])


def _condition(table: pa.Table, name: str) -> st.SearchStrategy[pc.Expression]:
    field, data_type = pc.field(name), table.schema.field(name).type
    options = [st.just(field.is_null()), st.just(field.is_valid())]
    if not pa.types.is_nested(data_type) and not pa.types.is_float16(data_type):
        literals = values(data_type)
        options.append(literals.map(lambda item: field == arrow([item], data_type)[0]))
        present = [item for item in table[name].to_pylist() if item is not None]
        if present and not pa.types.is_decimal(data_type):
            some = st.sampled_from(present).map(lambda item: pa.scalar(item, data_type))
            options.append(some.map(lambda item: field == item))
            if not pa.types.is_fixed_size_binary(data_type):
                options.append(some.map(lambda item: field > item))
    return st.one_of(options)


@settings(max_examples=tiers.choose(quick=5, all=150, nightly=1_500))
@given(st.data())
def test_readers_see_what_was_written_through_the_current_schema(data):
    """Whatever the schema, its changes, the writers and the readers."""
    path = tempfile.mkdtemp(prefix="embedlog-typed-")
    try:
        machine = TypedTopicMachine(data, path)
        try:
            machine.run(6)
            machine.check()
        finally:
            machine.log.close()
    finally:
        shutil.rmtree(path, ignore_errors=True)
