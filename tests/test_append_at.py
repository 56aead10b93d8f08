"""Copies of batches at their offsets: gaps in the active segment, replicas, columns of offsets."""

from functools import partial

import pyarrow as pa
import pytest
from support.clock import START
from support.faulty_files import REBOOTED, REBOOTED_AGAIN
from support.manual_compaction import keep
from support.roots import (
    abandon,
    bases,
    encoded,
    fill,
    healthy,
    make_log,
    offsets,
    open_root,
    rows,
    segment_files,
    values,
)
from support.typed_bytes import KEY, as_typed, first_schema

from embedlog import batch, catalog
from embedlog.config import TopicConfig
from embedlog.errors import (
    FencedLeaderEpochError,
    InvalidRecordError,
    RecordTooLargeError,
)
from embedlog.partition import append, leader_epochs
from embedlog.record import Appended
from embedlog.root.repair import repair_root
from embedlog.root.verify import verify_root
from embedlog.schemas.topic_schema import first_version


@pytest.fixture
def root(tmp_path):
    """A root that is healthy when the test is done."""
    root = open_root(tmp_path / "root")
    yield root
    assert healthy(root)
    root.close()


def stored(log):
    """Return what the log has of each batch: its head, and all of its columns."""
    reader, result = log.reader(log.start_offset()), []
    while batches := reader.read():
        for part in batches:
            part.verify()
            head = (
                *(part.base_offset, part.next_offset, part.count, part.flags, part.leader_epoch),
                *(part.producer_id, part.producer_epoch, part.base_sequence, part.delete_horizon),
                *(part.min_timestamp, part.max_timestamp, part.statistics),
            )
            result.append((head, part.columns(part.layout.names).to_pydict()))
    return result


def copy(source, target, max_bytes=1 << 20, **options):
    """Copy what the source has past the end of the target."""
    reader = source.reader(max(target.end_offset(), source.start_offset()))
    while placed := reader.read_encoded(max_bytes):
        target.append_at(placed, **options)
    return target


def compacted(root, keys=30, updates=10):
    """Compact a topic: three hundred records, of which one of each key stays."""
    log = make_log(root, {"segment.bytes": 4000}, "source")
    for number in range(updates):
        values = [b"%d" % number] * keys
        log.append([encoded(*values, keys=[b"k%d" % row for row in range(keys)], at=START)])
    log.roll()
    keep(log, [number for number in range(keys * updates) if number % 7 in (1, 4)], parts=5)
    log.append([encoded(b"new", b"newer", keys=[b"k1", b"k2"])])
    return log


# Gaps


def test_the_active_segment_takes_batches_with_gaps(root):
    """No segment is begun for a gap, and each reader skips it (A8, A17)."""
    log = make_log(root)
    log.append_at([(10 * number, encoded(b"%d" % number)) for number in range(100)])

    assert bases(log) == [0]
    assert offsets(log) == list(range(0, 1000, 10))
    assert offsets(log, 985) == [990]
    assert log.offset_for_timestamp(START).offset == 0
    assert log.record_counts.count(0, log.end_offset()) == 100
    assert log.append([encoded(b"next")]) == [Appended(991, 992)]
    log.roll()
    assert not next(iter(log.segments.values())).dense
    assert offsets(log, 5)[:2] == [10, 20]


def test_a_gap_in_the_active_segment_outlives_a_reboot(tmp_path):
    """Recovery can tell it from lost records, also in batches that were never flushed (A25)."""
    root = open_root(tmp_path)
    log = make_log(root)
    fill(log, 2)
    log.append_at([(100, encoded(b"x")), (10**9, encoded(b"y")), (10**9 + 1, encoded(b"z"))])
    abandon(root)
    root = open_root(tmp_path, files=REBOOTED)
    log = root.partition("t", 0)

    assert offsets(log) == [0, 1, 100, 10**9, 10**9 + 1]
    assert bases(log) == [0]
    assert healthy(root)
    root.close()


@pytest.mark.parametrize("gap", [0, 4, 96, 98])
def test_after_lost_records_a_batch_is_cut_whatever_gap_it_says(tmp_path, gap):
    """It must follow the batch before it: the one that it followed is gone (A27)."""
    root = open_root(tmp_path)
    log = make_log(root)
    fill(log, 3)
    abandon(root)
    (path,) = segment_files(tmp_path)
    with path.open("ab") as file:
        file.write(b"".join(map(bytes, encoded(b"y").stamp(100, 0, gap=gap))))
    root = open_root(tmp_path, files=REBOOTED)
    log = root.partition("t", 0)

    assert offsets(log) == [0, 1, 2]
    assert log.append([encoded(b"next")]) == [Appended(3, 4)]
    assert healthy(root)
    root.close()


def test_a_gap_that_no_batch_can_name_begins_a_segment(tmp_path):
    """The segment before it is sealed at the end of the gap."""
    root = open_root(tmp_path)
    log = make_log(root)
    largest = batch.MAX_GAP
    log.append_at([(largest, encoded(b"a")), (2 * largest + 2, encoded(b"b"))])
    abandon(root)
    root = open_root(tmp_path, files=REBOOTED)
    log = root.partition("t", 0)

    assert bases(log) == [0, 2 * largest + 2]
    assert offsets(log) == [largest, 2 * largest + 2]
    assert healthy(root)
    root.close()


def test_verify_finds_a_batch_that_follows_another_one(tmp_path):
    """The gap that it says has records."""
    root = open_root(tmp_path)
    log = make_log(root)
    fill(log, 3)
    tail = log.tail()
    pending = append.PendingAppend(log, tail, publish=True)
    pending.add(encoded(b"x"), 50)
    pending.buffers = encoded(b"x").stamp(50, 0, gap=48)
    with log.locked():
        append._note_gaps(log)
        append.commit(log, log.active_file(), pending)

    (finding,) = verify_root(root)
    assert "follows offset 1, and offset 2 is there" in finding.what
    root.close()


def test_a_gap_is_noted_in_the_manifest_before_it_can_be_seen(root, monkeypatch):
    """A process that reads the tail first and then the manifest counts right."""
    log, states = make_log(root), []
    commit = type(log).commit_locked

    def committed(self, *arguments):
        states.append(root.context.state.read(lambda txn: catalog.gapped_segments(txn, log.key)))
        return commit(self, *arguments)

    monkeypatch.setattr(type(log), "commit_locked", committed)
    log.append_at([(0, encoded(b"a")), (1, encoded(b"b")), (9, encoded(b"c"))])

    assert [len(gapped) for gapped in states] == [0, 1]
    assert log.record_counts.count(0, 10) == 3


def test_a_log_with_gaps_can_be_cut_anywhere(tmp_path):
    """In a gap, after it, and at a batch; the next append continues there (A34)."""
    for offset in (5, 10, 11, 15, 25):
        root = open_root(tmp_path / str(offset))
        log = make_log(root)
        log.append_at([(10 * number, encoded(b"%d" % number)) for number in range(5)])
        assert log.truncate_to(offset)
        assert log.append([encoded(b"next")]) == [Appended(offset, offset + 1)]
        abandon(root)
        root = open_root(tmp_path / str(offset), files=REBOOTED)
        kept = [number for number in range(0, 50, 10) if number < offset]
        assert offsets(root.partition("t", 0)) == [*kept, offset]
        assert healthy(root)
        root.close()


def test_a_repair_keeps_batches_around_a_damaged_one(tmp_path):
    """Also where gaps are between them."""
    root = open_root(tmp_path)
    log = make_log(root)
    log.append_at([(10 * number, encoded(b"%d" % number)) for number in range(5)])
    log.flush()
    (path,) = segment_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b"EMBL", data.index(b"EMBL", data.index(b"EMBL") + 4) + 4) + 20] ^= 1
    path.write_bytes(data)
    assert verify_root(root)
    repair_root(root, dry_run=False)

    assert offsets(log) == [0, 10, 30, 40]
    assert healthy(root)
    root.close()


# Compacted logs


def test_the_rest_of_a_batch_has_the_sequence_numbers_of_its_records(root):
    """So that a repetition of the whole batch is refused, not written again (G16)."""
    source, target = make_log(root, topic="source"), make_log(root, topic="target")
    source.append([encoded(b"a", b"b", b"c", b"d", producer=(7, 0, 0x7FFFFFFE))])
    (placed,) = source.reader(3).read_encoded()
    target.append_at([placed], identical=True)

    assert (placed.offset, placed.batch.base_sequence, placed.batch.count) == (3, 1, 1)
    assert target.append([encoded(b"e", producer=(7, 0, 2))]) == [Appended(4, 5)]


def test_headers_and_offsets_are_columns_of_one_segment(root):
    """Batches without headers get the column, and keep that of offsets."""
    source, target = compacted(root), make_log(root, topic="target")
    target.append([encoded(b"first", headers=[[("h", b"1")]])])
    placed = source.reader(1).read_encoded()
    (first, *rest) = [each for each in placed if each.batch.span]
    with_headers = batch.add_headers(first.batch)
    target.append_at([(first.offset, with_headers), *rest])

    assert with_headers.span == first.batch.span
    kept = [row for row in rows(source) if first.offset <= row[0] < 300]
    assert rows(target)[1:] == kept
    assert len(bases(target)) == 2


def test_only_append_at_takes_a_column_of_offsets(root):
    """Elsewhere the column would contradict the offsets that the log gives."""
    source, target = compacted(root), make_log(root, topic="target")
    placed = source.reader(0).read_encoded()
    with pytest.raises(InvalidRecordError, match="append_at"):
        target.append([placed[0].batch])

    assert target.end_offset() == 0


# Identical copies


def with_history(root):
    """Fill a log with everything that a batch can have, in several leader epochs."""
    log = make_log(root, {"message.timestamp.type": "LogAppendTime"}, "source")
    log.append([encoded(b"a", b"b", producer=(7, 2, 0)), encoded(b"c", compression="zstd")])
    log.append_at([(9, encoded(b"d", headers=[[("h", b"1")]], producer=(8, 0, 5)))])
    log.truncate_to(9)
    root.clock.advance(1000)
    log.append([encoded(b"e", b"f", producer=(7, 2, 2))])
    root.alter_topic("source", {"message.timestamp.type": None})
    log.append([encoded(b"g", at=5), encoded(b"h", b"i", at=[START, 3], producer=(7, 3, 0))])
    log.truncate_to(12)
    log.append([encoded(b"j", None, keys=[b"k", b"l"])])
    return log


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_an_identical_copy_has_epochs_times_and_producers_of_its_source(root, durability):
    """Whatever the settings of its topic are; and a producer goes on at the copy (A7, A37, G16)."""
    source = with_history(root)
    config = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": 10}
    target = make_log(root, config, "target")
    copy(source, target, identical=True, durability=durability)

    assert stored(target) == stored(source)
    starts: dict[int, int] = {}
    for head, _ in stored(source):
        starts.setdefault(head[4], head[0])
    epochs = root.context.state.read(partial(catalog.epochs, key=target.key))
    assert epochs == list(starts.items()) == [(0, 0), (1, 9), (2, 12)]
    assert target.tail().leader_epoch == 2
    root.alter_topic("target", {"max.message.bytes": None})
    repeated, following = (encoded(b"e", b"f", producer=(7, 2, at)) for at in (2, 4))
    assert target.append([repeated, following]) == [
        Appended(9, 11, None, True),
        Appended(14, 16, root.clock()),
    ]


def test_without_identical_a_copy_belongs_to_its_own_log(root):
    """Epochs, times and limits are those of its topic."""
    source = with_history(root)
    target = make_log(root, {"message.timestamp.type": "LogAppendTime"}, "target")
    root.clock.advance(777)
    copy(source, target)

    assert values(target) == values(source)
    assert offsets(target) == offsets(source)
    assert {head[4] for head, _ in stored(target)} == {0}
    assert {row[1] for row in rows(target)} == {root.clock()}
    root.alter_topic("target", {"max.message.bytes": 10})
    with pytest.raises(RecordTooLargeError):
        target.append_at([(100, encoded(b"x" * 100))])


@pytest.mark.parametrize("headers", [None, [[("h", b"1")]]])
def test_records_of_a_compacted_batch_have_the_time_at_which_they_are_appended(root, headers):
    """All readers say so: the column of timestamps, and what is in front of it (A7)."""
    source = compacted(root)
    target = make_log(root, {"message.timestamp.type": "LogAppendTime"}, "target")
    target.append_at([(0, encoded(b"x", headers=headers))])
    root.clock.advance(777)
    copy(source, target)

    for each in target.reader(1).read():
        times = each.columns(["timestamp"]).column(0).cast(pa.int64()).to_pylist()
        assert each.has_offsets
        assert each.is_log_append_time
        assert set(times) == {each.min_timestamp} == {each.max_timestamp} == {root.clock()}
    assert rows(target)[1:] == [
        (row[0], root.clock(), *row[2:]) for row in rows(source) if row[0] > 0
    ]


def epoch(encoded_batch, number):
    encoded_batch.leader_epoch = number
    return encoded_batch


def test_a_batch_of_an_earlier_epoch_is_refused(root):
    """Recovery would take it for one that a truncation left; nothing is written (A37)."""
    log = make_log(root)
    log.append_at([(0, epoch(encoded(b"a"), 3)), (1, epoch(encoded(b"b"), 5))], identical=True)
    for placed in (
        [(2, epoch(encoded(b"x"), 4))],
        [(2, epoch(encoded(b"x"), 6)), (3, epoch(encoded(b"y"), 5))],
    ):
        with pytest.raises(FencedLeaderEpochError, match="after one of epoch"):
            log.append_at(placed, identical=True)

    assert values(log) == [b"a", b"b"]
    assert log.tail().leader_epoch == 5


def test_a_recovery_of_the_copy_does_not_end_copying(tmp_path):
    """It begins an epoch of its own, and batches of the source may still be of the one before."""
    root = open_root(tmp_path)
    log = make_log(root)
    log.append_at([(0, epoch(encoded(b"a"), 3))], identical=True)
    abandon(root)
    root = open_root(tmp_path, files=REBOOTED)
    log = root.partition("t", 0)
    assert log.tail().leader_epoch == 4
    log.append_at([(1, epoch(encoded(b"b"), 3)), (7, epoch(encoded(b"c"), 3))], identical=True)
    with pytest.raises(FencedLeaderEpochError):
        log.append_at([(8, epoch(encoded(b"d"), 2))], identical=True)
    log.append_at([(8, epoch(encoded(b"d"), 9))], identical=True)
    abandon(root)
    root = open_root(tmp_path, files=REBOOTED_AGAIN)
    log = root.partition("t", 0)

    assert values(log) == [b"a", b"b", b"c", b"d"]
    assert log.tail().leader_epoch == 10
    assert healthy(root)
    root.close()


def test_an_epoch_that_a_killed_process_began_is_finished(root, monkeypatch):
    """Between `state` and the tail: the next append is of that epoch."""
    log = make_log(root)
    fill(log, 2)
    monkeypatch.setattr(leader_epochs, "_raise", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        log.append_at([(2, epoch(encoded(b"x"), 4))], identical=True)
    monkeypatch.undo()
    assert log.tail().leader_epoch == 0
    log.start_offset()  # A read takes the new snapshot.
    fill(log, 1, first=2)

    assert stored(log)[-1][0][4] == log.tail().leader_epoch == 4


def test_a_record_that_waits_for_its_flush_is_published_when_an_epoch_begins(root, monkeypatch):
    """Its own flush would not publish it any more."""
    log, other = make_log(root), open_root(root.path)
    part = other.partition("t", 0)
    fill(log, 1)
    appended = []

    def flushed(*_):
        part.append_at([(3, epoch(encoded(b"x"), 4))], identical=True)
        appended.append(part.end_offset())

    with monkeypatch.context() as patch:
        patch.setattr("embedlog.partition.append.flush.flush_to", flushed)
        fill(log, 1, first=1, durability="fsync")

    assert appended == [4]
    assert values(log) == [b"v0", b"v1", b"x"]
    other.close()


# Typed topics


def typed_log(root, topic, versions=1):
    root.create_topic(topic, 1, TopicConfig.parse({}), first_schema())
    return root.partition(topic, 0)


def test_columns_of_another_log_are_refused(tmp_path, root):
    """Two topics with the same id and version may have other columns."""
    source = typed_log(root, "t")
    source.append([as_typed(encoded(b"a", keys=[b"k"]))])
    other = open_root(tmp_path / "other")
    schema = first_version(pa.schema([(KEY, pa.binary()), ("data", pa.string())]), KEY, None)
    other.create_topic("t", 1, TopicConfig.parse({}), schema)
    target = other.partition("t", 0)
    for identical in (False, True):
        with pytest.raises(InvalidRecordError, match="schema of another log"):
            target.append_at(source.reader(0).read_encoded(), identical=identical)

    assert target.end_offset() == 0
    other.close()
