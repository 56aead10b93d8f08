"""Typed topics against a model in plain Python: random schemas, records, changes and readers."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiers
from support.clock import ManualClock
from support.random_columns import arrow, canonical, values
from support.typed_model import changes, headers, keys, models, rows, table_of

import embedlog


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
        assert self.log.verify() == []

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
        with closing(self.log.consumer("t", auto_offset_reset="earliest")) as consumer:
            pieces = list(
                consumer.iter_batches(until="end", columns=["offset", *chosen], where=where)
            )
        found = [row for piece in pieces for row in zip(*lists(piece), strict=True)]
        names = ["offset", *chosen]
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


@settings(max_examples=tiers.choose(quick=8, test=15, all=150, nightly=1_500))
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
