"""Copies of a partition are compared by checksums; the first offset that differs is named."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import START, ManualClock
from support.manual_compaction import keep
from support.roots import encoded, fill, make_log, open_root, rows

import embedlog
from embedlog.compaction.rebatch import rebatch
from embedlog.config import LONG_MAX
from embedlog.errors import ClosedError
from embedlog.partition.log_start import move_log_start
from embedlog.replication.compare import compare_replicas

LARGE = bytes(range(256)) * 200
"""More than what is read of a batch for its head."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A root for all tests, whose damage is not asserted."""
    root = open_root(tmp_path_factory.mktemp("copies"), clock=ManualClock(START))
    yield root
    root.close()


@pytest.fixture
def new_copy(root):
    """Return a function that makes an empty copy: a partition of a topic of its own."""

    def make(**settings):
        return make_log(root, settings, f"t{len(root.topics())}")

    return make


@pytest.fixture
def copies(new_copy):
    """Three empty copies of a partition."""
    return {name: new_copy() for name in "abc"}


def fill_all(copies, count=10, **options):
    """Append the same batches to all copies."""
    for log in copies.values():
        fill(log, count, **options)


def found(copies, **options):
    """Return what differs, without the topic and the partition."""
    return [tuple(each[2:]) for each in compare_replicas(copies, **options)]


def flip_bit(log, batch, position):
    """Flip a bit of a batch, at a byte relative to its beginning."""
    path = Path(log.context.files.root, log.path_of(log.segment_at(batch.base_offset)))
    with path.open("r+b") as file:
        file.seek(batch.position + position)
        byte = file.read(1)[0]
        file.seek(batch.position + position)
        file.write(bytes([byte ^ 1]))


def batch_at(log, offset):
    """Return the batch that holds an offset."""
    return log.reader(offset).read(1)[0]


@pytest.mark.parametrize("check_bodies", [True, False])
def test_equal_copies_with_other_segments_have_no_difference(copies, check_bodies):
    """Segments end where each copy rolled."""
    for first in range(0, 40, 10):
        fill_all(copies, 10, first=first)
        copies["b"].roll()
    copies["c"].roll()
    fill_all(copies, 3, first=40)

    copies["b"].refresh()
    assert len(copies["b"].segments) == 5
    assert compare_replicas(copies, check_bodies=check_bodies) == []


def test_fewer_than_two_copies_cannot_differ(copies):
    """Nor can empty ones."""
    assert compare_replicas({}) == []
    assert compare_replicas({"a": copies["a"]}) == []
    assert compare_replicas(copies) == []


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (encoded(b"w", at=START), "its value differs"),
        (encoded(None, at=START), "its value differs"),
        (encoded(b"v", at=START + 1), "its timestamp differs"),
        (encoded(b"v", at=START, keys=[b"k"]), "its key differs"),
        (encoded(b"v", at=START, headers=[[("h", b"1")]]), "its headers differs"),
        (encoded(b"v", at=START, producer=(7, 0, 0)), "its producer id is 7, not None"),
    ],
)
@pytest.mark.parametrize("check_bodies", [True, False])
def test_another_record_is_found(copies, batch, what, check_bodies):
    """Whatever differs in it, also if only heads are read."""
    fill_all(copies)
    for name, log in copies.items():
        log.append([batch if name == "b" else encoded(b"v", at=START)])
    fill_all(copies, 3, first=11)

    assert found(copies, check_bodies=check_bodies) == [(10, "b", "a", what)]


@pytest.mark.parametrize(
    ("producer", "what"),
    [
        ((7, 1, 5), "its producer epoch is 1, not 0"),
        ((7, 0, 6), "its base sequence is 6, not 5"),
        ((8, 0, 5), "its producer id is 8, not 7"),
    ],
)
def test_another_producer_is_found(copies, producer, what):
    """The sequence state of a producer must be the same on all copies."""
    for name, log in copies.items():
        log.append([encoded(b"v", producer=producer if name == "b" else (7, 0, 5))])

    assert found(copies) == [(0, "b", "a", what)]


def test_another_leader_epoch_is_found(copies):
    """The same records, but of another leader."""
    fill_all(copies, 5)
    fill(copies["c"], 1, first=7)
    copies["c"].truncate_to(5)
    fill_all(copies, 3, first=5)

    assert found(copies) == [(5, "c", "a", "its leader epoch is 1, not 0")]


def test_a_missing_batch_is_found(copies):
    """A gap in a copy is one, also at the beginning and at the end of a segment."""
    for name, log in copies.items():
        for number in range(8):
            if (name, number) not in {("b", 3), ("c", 6)}:
                log.append_at([(number, encoded(b"v%d" % number))])

    assert found(copies) == [
        (3, "b", "a", "the record is missing"),
        (6, "c", "a", "the record is missing"),
    ]
    copies = dict(reversed(copies.items()))
    assert found(copies) == [
        (3, "b", "c", "the record is missing"),
        (6, "a", "c", "it has a record that the other has not"),
    ]


def test_only_what_all_copies_have_is_compared(copies):
    """A copy that lags, or has deleted more, does not differ."""
    fill_all(copies, 20)
    fill(copies["a"], 5, first=20)
    move_log_start(copies["b"], 7)
    copies["c"].truncate_to(12)
    fill(copies["c"], 1, first=100)

    assert found(copies) == [
        (12, "c", "a", "its leader epoch is 1, not 0"),
    ]
    copies["c"].truncate_to(12)
    assert found(copies) == []
    move_log_start(copies["a"], 12)
    assert found(copies) == []


def test_batches_that_are_merged_or_compressed_differently_do_not_differ(copies):
    """Their records are compared."""
    for name, log in copies.items():
        codec = "zstd" if name == "c" else "none"
        for number in range(12):
            values = [b"%d" % number, LARGE, None]
            log.append([encoded(*values, at=START + number, compression=codec)])
        log.roll()
    keep(copies["b"], range(36), parts=5)
    assert copies["b"].reader(0).read(1)[0].count != 3
    assert found(copies) == []
    assert found(copies, check_bodies=False) == []

    rebatch(copies["a"], LONG_MAX)
    assert copies["a"].reader(0).read(1)[0].count == 36
    assert found(copies) == []

    keep(copies["b"], set(range(36)) - {20}, parts=3)
    assert found(copies) == [(20, "b", "a", "the record is missing")]


def test_a_column_of_headers_that_says_nothing_is_no_difference(copies):
    """A segment gets the column with its first headers, which a copy may have deleted."""
    copies["a"].append([encoded(b"1", headers=[[("h", b"1")]])])
    copies["b"].append([encoded(b"1", headers=[[("h", b"1")]])])
    for log in copies.values():
        log.append_at([(1, encoded(b"2", b"3"))])
    move_log_start(copies["c"], 1)

    assert batch_at(copies["a"], 1).has_headers
    assert not batch_at(copies["c"], 1).has_headers
    assert found(copies) == []


def test_an_empty_list_of_headers_is_no_headers(copies):
    """In a batch with other records that have some, and without them in one of its own."""
    copies.pop("c")
    copies["a"].append([encoded(b"1", b"2", headers=[[], [("h", b"1")]])])
    copies["b"].append([encoded(b"1")])
    copies["b"].append([encoded(b"2", headers=[[("h", b"1")]])])

    assert found(copies) == []


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("check_bodies", [True, False])
def test_a_flipped_bit_is_damage_of_its_copy(copies, check_bodies, sealed):
    """Of a head always, of columns if they are read; the others are compared without it."""
    for log in copies.values():
        for value in (b"first", LARGE, b"last"):
            log.append([encoded(value)])
        if sealed:
            log.roll()
    damaged = batch_at(copies["a"], 1)
    flip_bit(copies["a"], damaged, damaged.size - 40)

    differences = found(copies, check_bodies=check_bodies)
    assert [each[:3] for each in differences] == ([(1, "a", None)] if check_bodies else [])
    if check_bodies:
        assert "the CRC of column value is wrong" in differences[0][3]

    flip_bit(copies["b"], batch_at(copies["b"], 2), 12)
    differences = found(copies, check_bodies=check_bodies)
    expected = [(1, "a", None), (2, "b", None)] if check_bodies else [(2, "b", None)]
    assert [each[:3] for each in differences] == expected


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_damage_of_the_first_batch_is_found(copies, name):
    """In any copy; nothing can be read before it."""
    fill_all(copies, 2)
    flip_bit(copies[name], batch_at(copies[name], 0), 16)

    assert [each[:3] for each in found(copies)] == [(0, name, None)]


def test_each_copy_is_named_with_its_first_difference(copies):
    """In the order of offsets, as text that says where and what."""
    for name, log in copies.items():
        for number in range(6):
            at = {("b", 4), ("b", 5), ("c", 2)} & {(name, number)}
            log.append([encoded(b"changed" if at else b"v%d" % number)])

    assert list(map(str, compare_replicas(copies))) == [
        f"{copies['c'].topic}-0: c differs from a at offset 2: its value differs",
        f"{copies['b'].topic}-0: b differs from a at offset 4: its value differs",
    ]


def test_damage_is_reported_as_text(copies):
    """With the file and the position."""
    fill_all(copies, 3)
    flip_bit(copies["b"], batch_at(copies["b"], 1), 8)

    (difference,) = compare_replicas(copies)
    assert "-0: b at offset 1: The batch is damaged" in str(difference)
    assert ".arrows, byte" in str(difference)


def test_a_log_that_is_truncated_meanwhile_is_compared_again(copies, monkeypatch):
    """By its new end."""
    fill_all(copies, 10)
    log, reader = copies["b"], copies["b"].reader

    def truncated(offset):
        monkeypatch.undo()
        log.truncate_to(4)
        return reader(10)

    monkeypatch.setattr(log, "reader", truncated)

    assert found(copies) == []


def test_a_closed_log_is_an_error(new_copy, tmp_path):
    """It is no difference."""
    closed = open_root(tmp_path)
    copies = {"a": new_copy(), "b": make_log(closed)}
    fill_all(copies, 2)
    closed.close()

    with pytest.raises(ClosedError):
        compare_replicas(copies)


NAN = float("nan")


def typed_log(path, records, merge):
    """Make a typed topic with one record per batch, perhaps merged."""
    schema = pa.schema([("k", pa.string()), ("x", pa.float64()), ("l", pa.list_(pa.float64()))])
    log = embedlog.open(path, clock=ManualClock(START), maintenance=False)
    log.create_topic("t", schema=schema, key="k")
    with log.producer() as producer:
        for key, value in records:
            row = None if value is None else {"k": key, "x": value, "l": [value]}
            producer.send("t", value=row, key=key if row is None else None)
            producer.flush()
    partition = log.root.partition("t", 0)
    if merge:
        partition.roll()
        rebatch(partition, LONG_MAX)
    return log, partition


@pytest.mark.parametrize(
    ("changed", "differences"),
    [
        ({}, []),
        ({1: ("b", 2.5)}, [(1, "b", "a", "its x differs")]),
        ({2: ("c", 1.0)}, [(2, "b", "a", "its x differs")]),
        ({3: ("a", 0.0)}, [(3, "b", "a", "its _tombstone differs")]),
    ],
)
def test_records_of_typed_topics_are_compared_by_column(tmp_path, changed, differences):
    """Also those with NaN, and tombstones, in merged batches."""
    records = {0: ("a", 1.5), 1: ("b", 2.0), 2: ("c", NAN), 3: ("a", None), 4: ("d", 4.0)}
    log, first = typed_log(tmp_path / "a", records.values(), merge=False)
    other, second = typed_log(tmp_path / "b", (records | changed).values(), merge=True)
    with closing(log), closing(other):
        assert second.reader(0).read(1)[0].count > 1
        result = found({"a": first, "b": second})
        assert [each[:3] for each in result] == [each[:3] for each in differences]


@given(st.data())
def test_the_first_difference_is_that_of_the_records(new_copy, data):
    """Random batches, merged and cleaned at random, with some records changed."""
    count = data.draw(st.integers(1, 30))
    changed = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    logs = [new_copy(), new_copy()]
    for log, others in zip(logs, [(), changed], strict=True):
        offset = 0
        while offset < count:
            size = data.draw(st.integers(1, count - offset))
            offsets = range(offset, offset + size)
            log.append([encoded(*(b"w" if n in others else b"v%d" % n for n in offsets))])
            offset += size
        if data.draw(st.booleans()):
            log.roll()
            gone = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
            keep(log, set(range(count)) - gone, parts=data.draw(st.integers(1, 4)))
    records = [{row[0]: row for row in rows(log)} for log in logs]
    different = [n for n in range(count) if records[0].get(n) != records[1].get(n)]

    result = compare_replicas(dict(zip("ab", logs, strict=True)))

    assert [each.offset for each in result] == different[:1]
