"""The tables of `state` and `live`: declared once, read back, and emptied of deleted topics."""

import re
from typing import Any

import pytest
from support import format_tables, staged_files
from support.groups import make_group
from support.roots import encoded, fill, make_store

from embedlog import keyspace
from embedlog.config import TopicConfig
from embedlog.errors import CorruptionError
from embedlog.keyspace import (
    LIVE,
    PARTITION,
    PARTITION_KEY,
    STATE,
    TABLES,
    TEXT,
    Table,
)
from embedlog.partition.leases import hold
from embedlog.record import OffsetAndMetadata, TopicPartition

KEY = PARTITION_KEY.pack(7, 3)
VALUES = {
    "text": ["", "a", "ä" * 50],
    "bytes": [b"", b"\0\xff"],
    "JSON": [{}, {"a": [1, None, "ä"]}],
    "partition key": [KEY],
}

each_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


def samples(field):
    """Return values of a type, the smallest and the largest of numbers."""
    if field.name in VALUES:
        return VALUES[field.name]
    if field.code:
        bits = 8 * field.size
        signed = field.code.islower()
        return [-1 << bits - 1, (1 << bits - 1) - 1] if signed else [0, (1 << bits) - 1]
    names = field.name.partition("(")[2].count(":")
    return [[], [tuple(range(names)), tuple(range(1, names + 1))]]


def rows_of(layout, which):
    return tuple(samples(field)[which] for field in layout.fields.values())


# What is declared


def test_every_table_is_listed():
    """A table that is declared is in `TABLES`, and has a name and letter of its own."""
    declared = [value for value in vars(keyspace).values() if isinstance(value, Table)]

    assert sorted(map(id, declared)) == sorted(map(id, TABLES))
    assert len({table.name for table in TABLES}) == len(TABLES)
    assert len({table.letter for table in TABLES}) == len(TABLES)
    assert all(len(table.letter) == 1 for table in TABLES)


@each_table
def test_a_table_says_what_it_is(table):
    """Its constant has its name, the case of its letter gives the database and the checksum."""
    assert getattr(keyspace, table.name.upper().replace(" ", "_")) is table
    assert table.letter.islower() == (table.database == LIVE) == (not table.checksum)
    assert table.database in (STATE, LIVE)
    assert table.purpose
    assert "\n" not in table.purpose
    assert keyspace.table_of(table.letter + b"x", table.database) is table


@pytest.mark.parametrize("fields", ["offset u64", "offset: u64 position: u64", "offset: u64,"])
def test_a_table_with_a_mistyped_declaration_cannot_be_made(fields):
    """The error is raised at import, not when the first row is written."""
    with pytest.raises((ValueError, KeyError)):
        keyspace.Layout(fields)


@each_table
def test_only_the_last_field_of_a_value_has_no_end(table):
    """Text ends with a NUL; JSON, bytes and lists take the rest."""
    for layout in (table.key_layout, table.value_layout):
        *first, _ = layout.fields.values() or [None]
        assert all(field.code or field is TEXT for field in first)
    assert PARTITION not in table.value_layout.fields.values()


def test_the_page_has_the_tables_as_declared():
    """P12: docs/format.md is generated."""
    page = format_tables.PAGE.read_text(encoding="utf-8")

    assert format_tables.with_tables(page) == page, "run `make docs-tables`"
    assert len(re.findall("<!-- tables of ", page)) == 2


# Rows


@each_table
@pytest.mark.parametrize("which", [0, -1])
def test_a_key_parses_back(table, which):
    """Every field parses back at its limits, and a key begins with each of its prefixes."""
    fields = rows_of(table.key_layout, which)
    key = table.key(*fields)

    assert table.parse_key(key) == fields
    assert len(key) <= 511
    for count in range(len(fields)):
        assert key.startswith(table.prefix(*fields[:count]))


@each_table
@pytest.mark.parametrize("which", [0, -1])
def test_a_value_comes_back(table, which):
    """A single field is returned as it is, several fields as a named tuple."""
    fields = rows_of(table.value_layout, which)
    value = fields[0] if len(fields) == 1 else fields or None
    loaded = table.load(b"key", table.dump(b"key", value))

    assert loaded == value
    if len(fields) > 1:
        assert loaded._fields == tuple(table.value_layout.fields)


@pytest.mark.parametrize("database", [STATE, LIVE])
def test_rows_are_written_read_scanned_and_deleted(tmp_path, database):
    """Scans return rows in key order, and can be limited to the first fields of the key."""
    store = make_store(tmp_path, database, rows={})
    letters = "XY" if database == STATE else "xy"
    table = Table(letters[0], "group: text, n: u64", "v: u64", "")
    other = Table(letters[1], "", "", "")
    keys = [("g", 1), ("g", 256), ("g2", 0), ("gg", 5)]

    def put_rows(txn):
        for key in reversed(keys):
            table.put(txn, *key, value=key[1])
        other.put(txn, value=None)

    store.write(put_rows)

    assert store.read(lambda txn: list(table.scan(txn))) == [(key, key[1]) for key in keys]
    assert store.read(lambda txn: list(table.keys(txn, "g"))) == keys[:2]
    assert store.read(lambda txn: list(table.first_fields(txn))) == ["g", "g2", "gg"]
    assert (table.get(store, "g", 256), table.get(store, "g", 2)) == (256, None)
    assert table.exists(store, "g2", 0)
    assert store.write(lambda txn: (table.delete(txn, "gg", 5), table.delete(txn, "gg", 5))) == (
        True,
        False,
    )
    store.write(lambda txn: table.delete_all(txn, "g"))
    assert store.read(lambda txn: list(table.keys(txn))) == [("g2", 0)]
    assert other.exists(store)
    store.close()


def test_a_damaged_row_is_an_error_and_can_be_left_out():
    """`state` has checksums, which cover the key; in `live` only a wrong length is detected."""
    state, live = keyspace.CLEANED_OFFSETS, keyspace.GROUP_VERSIONS
    row = state.dump(state.key(KEY), 5)

    assert state.load(state.key(KEY), row) == 5
    for key, damaged_row in (
        (state.key(KEY), row[:-1] + b"\xff"),
        (state.key(KEY), b""),
        (state.key(bytes(12)), row),
    ):
        with pytest.raises(CorruptionError, match="cleaned offsets in state is damaged"):
            state.load(key, damaged_row)
        assert state.load_if_valid(key, damaged_row) is None
    assert live.load(b"vg", bytes(8)) == 0
    assert live.load_if_valid(b"vg", b"short") is None
    with pytest.raises(CorruptionError, match="group versions in live is damaged"):
        live.load(b"vg", b"short")


# Deleted topics


def rows_of_topic(root, topic_id):
    """Return the tables that have rows of a topic."""
    tables = {}
    for table in TABLES:
        store = root.context.state if table.database == STATE else root.context.live
        for fields in store.read(lambda txn, table=table: list(table.keys(txn))):
            for name, value in zip(table.key_layout.fields, fields, strict=True):
                number = PARTITION_KEY.unpack(value)[0] if name == "partition" else value
                if name in ("partition", "topic_id") and number == topic_id:
                    tables[table.name] = table
    return tables


def test_a_deleted_topic_leaves_no_row(root):
    """Every table with rows of partitions is emptied, unless it is declared otherwise."""
    settings = {"segment.bytes": 2000, "index.interval.bytes": 1}
    for name in "tu":
        root.create_topic(name, 2, TopicConfig.parse(settings))
    topic = root.topic("t")
    root.context.state.write(
        lambda txn: keyspace.SCHEMAS.put(txn, topic.id, 1, value=b"of a typed topic")
    )
    log = root.partition("t", 0)
    fill(log, 12)
    log.append([encoded(b"x", producer=(7, 0, 0))])
    root.flush()
    log.truncate_to(9)
    staged_files.publish(root, [staged_files.stage(root, t_0=[b"a"], t_1=[b"b"])], 0)
    group = make_group(root)
    group.commit({TopicPartition(name, 0): OffsetAndMetadata(1) for name in "tu"})
    group.checkpoint(always=True)
    group.commit({TopicPartition(name, 0): OffsetAndMetadata(2) for name in "tu"})
    hold(root, "lease", {TopicPartition("t", 1): 0}, 60)
    root.context.state.write(
        lambda txn: keyspace.MIRRORED_TOPICS.put(txn, topic.id, value={"source": "of a copy"})
    )
    # Rows that only a crash, a run of maintenance, a mirror or a second directory leaves.
    rows_by_hand: list[tuple[Any, Any]] = [
        (keyspace.CLEANED_OFFSETS, 1),
        (keyspace.UNCOMMITTED_FILES, None),
        (keyspace.SEGMENT_STATISTICS, b"of a typed topic"),
        (keyspace.ASSIGNMENTS, {}),
        (keyspace.MIRROR_POSITIONS, (1, 2, 3, 4)),
        (keyspace.ROLLBACK_POINTS, (1, 2)),
    ]
    for table, value in rows_by_hand:
        key = rows_of(table.key_layout, 0)[1:]
        root.context.state.write(
            lambda txn, table=table, key=key, value=value: table.put(
                txn, topic.key(1), *key, value=value
            )
        )
    pending = (topic.key(0), 0, 99)
    root.context.live.write(
        lambda txn: keyspace.PENDING_DELETES.put(txn, *pending, value=(1 << 60, 0, "x"))
    )
    root.context.live.write(
        lambda txn: keyspace.PENDING_OFFSETS.put(txn, "g", topic.key(0), value=(3, b""))
    )
    root.context.live.write(lambda txn: keyspace.UNFLUSHED.put(txn, topic.key(0), value=(1, 2)))
    root.context.state.write(
        lambda txn: keyspace.OFFSET_JOURNAL.put(txn, "g", topic.key(0), value=(0, 3, 0, b""))
    )
    ours = {table.name for table in TABLES if table.dropped_with_topic}
    before, others = rows_of_topic(root, topic.id), rows_of_topic(root, root.topic("u").id)
    assert ours <= before.keys()

    root.delete_topic("t")

    assert not ours & rows_of_topic(root, topic.id).keys()
    assert rows_of_topic(root, root.topic("u").id) == others


def test_what_a_deleted_topic_leaves_is_dropped_by_others():
    """Another module deletes the rows of each of these tables."""
    remaining = {
        table.name
        for table in TABLES
        if {"partition", "topic_id"} & table.key_layout.fields.keys()
        and not table.dropped_with_topic
    }
    # In the order of the page: `topic_deletion`, `app_versions.expire`, `activity`, `ownership`.
    assert remaining == {
        "deleted topics",
        "app versions",
        "reported topics",
        "reported replicas",
        "owners",
    }
