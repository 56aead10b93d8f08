"""The sparse index: entries, and the bisections by offset and by time."""

import pytest
from support.roots import make_store

from embedlog import index, keyspace, kv
from embedlog.index import IndexEntry

KEY = bytes(12)
ENTRIES = [IndexEntry(10, 1000, 50), IndexEntry(20, 2000, 50), IndexEntry(35, 3000, 90)]


@pytest.fixture
def live(tmp_path):
    live = make_store(tmp_path, rows={})
    yield live
    live.close()


def put_all(live, entries, segment_id=7, key=KEY):
    def step(txn):
        for entry in entries:
            index.put(txn, key, segment_id, entry)

    live.write(step)


def test_entries_of_the_active_segment_come_back_in_order(live):
    """Keys are fixed-width and big-endian, so the order of keys is that of offsets (B3)."""
    entries = [IndexEntry(offset, offset, 0) for offset in (1, 255, 256, 65_536, 1 << 40)]
    put_all(live, reversed(entries))

    assert live.read(lambda txn: index.entries(txn, KEY, 7)) == entries


def test_a_damaged_row_of_the_active_segment_counts_as_none(live):
    """B5, B7, P13: values in `live` have no checksum; without an entry a read is only slower."""
    put_all(live, ENTRIES)
    rows = live.read(lambda txn: list(kv.rows(txn, keyspace.INDEX_ENTRIES.prefix(KEY))))
    row_key = rows[1][0]
    live.write(lambda txn: txn.put(row_key, b"short"))
    live.write(lambda txn: txn.put(row_key[:-2], bytes(16)))

    assert live.read(lambda txn: index.entries(txn, KEY, 7)) == [ENTRIES[0], ENTRIES[2]]
    for lookup in (index.active_position_of_offset, index.active_position_from_offset):
        assert live.read(lambda txn, lookup=lookup: lookup(txn, KEY, 7, 20)) is None


def test_entries_survive_a_reopen(live, tmp_path):
    """The next handle that opens the database sees the existing entries (B6)."""
    put_all(live, ENTRIES)
    live.close()
    reopened = make_store(tmp_path)

    assert reopened.read(lambda txn: index.entries(txn, KEY, 7)) == ENTRIES
    reopened.close()
