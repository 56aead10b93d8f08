"""The sparse index: entries, and the bisections by offset and by time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlog import index, keyspace, kv
from embedlog.files import Files
from embedlog.index import IndexEntry

KEY = bytes(12)
ENTRIES = [IndexEntry(10, 1000, 50), IndexEntry(20, 2000, 50), IndexEntry(35, 3000, 90)]


@pytest.fixture
def live(tmp_path):
    files = Files(tmp_path)
    files.make_directory("locks")
    kv.create(files, "live", durable=False, rows={})
    live = kv.Store(files, "live", durable=False, timeout=5)
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
    key = live.read(
        lambda txn: [key for key, _ in kv.rows(txn, keyspace.INDEX_ENTRIES.prefix(KEY))]
    )[1]
    live.write(lambda txn: txn.put(key, b"short"))
    live.write(lambda txn: txn.put(key[:-2], bytes(16)))

    assert live.read(lambda txn: index.entries(txn, KEY, 7)) == [ENTRIES[0], ENTRIES[2]]
    for look in (index.active_position_of_offset, index.active_position_from_offset):
        assert live.read(lambda txn, look=look: look(txn, KEY, 7, 20)) is None


def test_segments_and_partitions_do_not_see_each_others_entries(live):
    """Rows are found by partition and segment."""
    put_all(live, ENTRIES[:1], 7)
    put_all(live, ENTRIES[1:2], 8)
    put_all(live, ENTRIES[2:], 7, b"\1" * 12)

    assert live.read(lambda txn: index.entries(txn, KEY, 7)) == ENTRIES[:1]
    assert live.read(lambda txn: index.entries(txn, KEY, 8)) == ENTRIES[1:2]
    assert live.read(lambda txn: index.entries(txn, KEY, 9)) == []
    live.write(lambda txn: index.remove(txn, KEY, 7))
    assert live.read(lambda txn: index.entries(txn, KEY, 7)) == []
    assert live.read(lambda txn: index.entries(txn, KEY, 8)) == ENTRIES[1:2]
    live.write(lambda txn: index.remove(txn, KEY))
    assert live.read(lambda txn: index.entries(txn, KEY, 8)) == []
    assert live.read(lambda txn: index.entries(txn, b"\1" * 12, 7)) == ENTRIES[2:]


def test_a_lookup_by_offset_is_the_last_entry_at_or_below_it(live):
    """None where no entry is at or below: then the segment's beginning (B2)."""
    put_all(live, ENTRIES)
    put_all(live, [IndexEntry(15, 9999, 0)], 6)
    put_all(live, [IndexEntry(15, 9999, 0)], 8)
    wanted = {0: None, 9: None, 10: 1000, 19: 1000, 20: 2000, 34: 2000, 35: 3000, 1 << 50: 3000}

    for offset, position in wanted.items():
        assert index.position_of_offset(ENTRIES, offset) == position
        found = live.read(lambda txn, o=offset: index.active_position_of_offset(txn, KEY, 7, o))
        assert found == position


def test_a_lookup_in_no_entries_is_the_beginning(live):
    """An index that is empty or lost makes a read slower, not wrong (B5)."""
    assert index.position_of_offset([], 5) is None
    assert index.position_of_time([], 5) is None
    assert live.read(lambda txn: index.active_position_of_offset(txn, KEY, 7, 5)) is None


def test_a_lookup_by_time_never_skips_a_record_that_is_new_enough():
    """The last entry before which everything is older; equal is not older (B8, B9)."""
    wanted = {0: None, 50: None, 51: 2000, 90: 2000, 91: 3000, 1000: 3000}

    assert {time: index.position_of_time(ENTRIES, time) for time in wanted} == wanted


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), max_size=30),
    st.integers(0, 22),
    st.integers(0, 160),
)
def test_lookups_agree_with_a_linear_search(batches, time, offset):
    """For any batches, indexed at random: as a scan from the beginning would find (B2, B9)."""
    entries, place, latest = [], 0, 0
    for number, (count, stamp) in enumerate(batches):
        if number and count % 2:
            entries.append(IndexEntry(place, place * 10, latest))
        place, latest = place + count, max(latest, stamp) if number else stamp

    below = [entry.position for entry in entries if entry.offset <= offset]
    older = [entry.position for entry in entries if entry.timestamp_before < time]
    assert index.position_of_offset(entries, offset) == (below[-1] if below else None)
    assert index.position_of_time(entries, time) == (older[-1] if older else None)


def test_the_blob_of_a_sealed_segment_comes_back():
    """Packed at the roll, unpacked at a read; timestamps may be negative."""
    entries = [*ENTRIES, IndexEntry(1 << 62, 1 << 61, -(1 << 63))]

    assert index.unpack(index.pack(entries)) == entries
    assert index.unpack(b"") == []


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_blob_of_odd_length_gives_the_entries_that_are_whole(cut):
    """Sanity, not a checksum: that one is around the whole row (B7)."""
    assert index.unpack(index.pack(ENTRIES)[:-cut]) == ENTRIES[:-1]


def test_entries_survive_a_reopen(live, tmp_path):
    """Existing entries are seen by whoever opens the database next (B6)."""
    put_all(live, ENTRIES)
    live.close()
    again = kv.Store(Files(tmp_path), "live", durable=False, timeout=5)

    assert again.read(lambda txn: index.entries(txn, KEY, 7)) == ENTRIES
    again.close()
