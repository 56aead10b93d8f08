"""One partition: append, read, flush, truncate and look up times (A1–A37)."""

import errno

import pytest
from support.children import meanwhile
from support.clock import START
from support.faulty_files import FaultyFiles
from support.roots import (
    abandon,
    bases,
    batch_rows,
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

from embedlog import catalog
from embedlog.config import TopicConfig
from embedlog.errors import (
    DurabilityError,
    InvalidRecordError,
    LockTimeoutError,
    LogTruncatedError,
    OffsetsOutOfOrderError,
    RecordBatchTooLargeError,
    RecordTooLargeError,
    UnexpectedAppendOffsetError,
    UnknownTopicOrPartitionError,
)
from embedlog.record import Appended

pytestmark = pytest.mark.disk  # what it promises depends on the file system

# Appending


def test_appending_nothing_does_nothing(log):
    """It takes no offset, rolls nothing and raises nothing (A2)."""
    assert log.append([]) == []
    assert (log.end_offset(), bases(log)) == (0, [0])


def test_a_batch_over_max_message_bytes_is_refused(root):
    """The compressed size counts; nothing is written (A4)."""
    log = make_log(root, {"max.message.bytes": 2000})
    big = [b"x" * 100] * 50
    with pytest.raises(RecordTooLargeError, match=r"max\.message\.bytes 2000"):
        log.append([encoded(b"fits"), encoded(*big)])

    assert log.end_offset() == 0
    log.append([encoded(*big, compression="zstd")])
    assert log.end_offset() == 50


def test_a_batch_over_segment_bytes_is_refused(root):
    """It would not fit even into an empty segment (A4)."""
    log = make_log(root, {"segment.bytes": 2000})
    with pytest.raises(RecordBatchTooLargeError, match=r"segment\.bytes 2000"):
        log.append([encoded(*[b"x" * 100] * 50)])

    assert log.end_offset() == 0


def test_a_repeated_batch_at_an_explicit_offset_moves_no_other_batch(log):
    """Its receipt has the original offsets, and the offset in the call remains a gap (A8, G16)."""
    first, second = (encoded(b"%d" % number, producer=(7, 0, number)) for number in (0, 1))
    log.append_at([(5, first)])
    receipts = log.append_at([(6, encoded(b"a")), (7, first), (8, second), (9, encoded(b"b"))])

    assert receipts[1] == Appended(5, 6, None, True)
    assert [row[:4:3] for row in rows(log)] == [(5, b"0"), (6, b"a"), (8, b"1"), (9, b"b")]


def test_invalid_batches_are_refused_at_explicit_offsets_too(root):
    """The check comes before any write, so there is no gap either (A4, A6)."""
    log = make_log(root, {"cleanup.policy": "compact", "max.message.bytes": 1000})
    valid = encoded(b"a", keys=[b"k"])
    with pytest.raises(InvalidRecordError, match=r"Records \[1\] have no key"):
        log.append_at([(5, valid), (6, encoded(b"b"))])
    with pytest.raises(RecordTooLargeError):
        log.append_at([(5, valid), (6, encoded(b"b" * 1000, keys=[b"k"]))])

    assert log.end_offset() == 0
    assert log.append_at([(5, valid)]) == [Appended(5, 6)]


def test_an_offset_below_the_end_or_out_of_order_is_refused(log):
    """Nothing is written (A8)."""
    fill(log, 3)
    for offset in (0, 2):
        with pytest.raises(UnexpectedAppendOffsetError, match="log end is offset 3"):
            log.append_at([(offset, encoded(b"x"))])
    for second in (4, 0, -1, (1 << 63) - 1, 1 << 64):
        with pytest.raises(OffsetsOutOfOrderError):
            log.append_at([(3, encoded(b"x", b"y")), (second, encoded(b"z"))])

    assert log.end_offset() == 3


def test_readers_that_refresh_do_not_disturb_an_appender(root):
    """A slow reader never replaces the cached manifest of a roll by an older one (A10, A14)."""
    log = make_log(root, {"segment.bytes": 1500})

    def read_latest():
        log.start_offset()
        log.offset_for_timestamp(START + 10)
        rows(log, max(log.end_offset() - 3, 0))

    with meanwhile(read_latest, 3):
        fill(log, 150)

    assert offsets(log) == list(range(150))
    assert healthy(root)


# Reading


def test_a_reader_uses_the_tail_of_its_caller_only_to_go_on(log):
    """The tail may be older than the position of the reader, or than a truncation."""
    old_tail = log.tail()
    fill(log, 3)
    middle_tail = log.tail()
    fill(log, 3, first=3)
    reader = log.reader(0)

    assert [batch.base_offset for batch in reader.read(tail=middle_tail)] == [0, 1, 2]
    assert reader.read(tail=middle_tail) == []
    assert [batch.base_offset for batch in reader.read(tail=old_tail)] == [3, 4, 5]

    reader, tail_before_cut = log.reader(2), log.tail()
    log.truncate_to(3)
    assert [batch.base_offset for batch in reader.read(tail=tail_before_cut)] == [2]


def test_nothing_past_the_published_end_is_read(root, log):
    """Bytes past the end are not part of the log (A20)."""
    fill(log, 3)
    reader = log.reader(0)
    (path,) = segment_files(root.path)
    with path.open("ab") as file:
        file.write(encoded(b"not published").stamp(3, 0)[0])

    assert len(reader.read()) == 3
    assert reader.read() == []
    fill(log, 1, first=3)
    assert values(log) == [b"v0", b"v1", b"v2", b"v3"]


def test_a_reader_finishes_on_files_that_were_unlinked(root):
    """It reads its open file or raises; there is no garbage and no signal (A21)."""
    log = make_log(root, {"segment.bytes": 1500})
    fill(log, 10)
    reader = log.reader(0)
    batches = reader.read(1)
    root.delete_topic("t")

    assert [row[3] for batch in batches for row in batch_rows(batch)][:1] == [b"v0"]
    with pytest.raises(UnknownTopicOrPartitionError):
        reader.read()


def test_every_truncation_that_a_reader_missed_counts(log):
    """The reader continues where the first epoch after its own begins (A37)."""
    fill(log, 6)
    reader = log.reader(5)
    log.truncate_to(3)
    fill(log, 6, first=10)
    log.truncate_to(8)

    with pytest.raises(LogTruncatedError) as raised:
        reader.read()
    assert raised.value.next_offset == 3


def test_an_offset_that_was_saved_with_its_epoch_is_checked(root, log):
    """Past the end of its epoch the saved offset was truncated (R8)."""
    fill(log, 4)
    epoch = log.tail().leader_epoch
    log.truncate_to(2)
    fill(log, 4)

    assert log.reader(2, epoch).read()[0].base_offset == 2
    assert log.reader(3).read()[0].base_offset == 3
    for offset in (3, 4, 100):
        with pytest.raises(LogTruncatedError) as raised:
            log.reader(offset, epoch)
        assert raised.value.next_offset == 2


def test_a_recovery_that_lost_nothing_is_no_truncation(root, log):
    """The epoch grows, but begins at the end of the log (A37)."""
    fill(log, 4)
    reader = log.reader(0)
    reader.read()
    epoch = reader.leader_epoch
    log.context.live.write(lambda txn: txn.delete(log.tail_key))
    fill(log, 1, first=4)

    assert [batch.base_offset for batch in reader.read()] == [4]
    assert reader.leader_epoch > epoch


# Flushing


def partition_info(log):
    return log.context.state.read(lambda txn: catalog.PARTITIONS.get(txn, log.key))


def test_a_flush_moves_the_recovery_point_to_the_end(log):
    """Only a flush moves it forward, and only a truncation moves it back (A22, A23)."""
    fill(log, 3)
    assert (partition_info(log).recovery_offset, log.tail().durable_offset) == (0, 0)
    log.flush()
    assert (partition_info(log).recovery_offset, log.tail().durable_offset) == (3, 3)
    fill(log, 2, first=3)
    assert partition_info(log).recovery_offset == 3
    log.flush()
    assert partition_info(log).recovery_offset == 5
    log.truncate_to(4)
    assert partition_info(log).recovery_offset == 4


@pytest.fixture
def partitions_to_flush(tmp_path):
    """A root and its five partitions of two topics, each with one record that is not flushed."""
    root = open_root(tmp_path / "several", files=FaultyFiles, lock_timeout=0.2)
    root.create_topic("a", 2, TopicConfig())
    root.create_topic("b", 3, TopicConfig())
    logs = [root.partition("a", number) for number in range(2)] + [
        root.partition("b", number) for number in range(3)
    ]
    for log in logs:
        fill(log, 1)
    yield root, logs
    abandon(root)


def test_many_partitions_are_flushed_at_once(partitions_to_flush):
    """Each file and directory is synced once, with one commit of each database (A22)."""
    root, logs = partitions_to_flush
    files, context = root.context.files, root.context
    before, versions = files.counts.copy(), (context.state.version(), context.live.version())
    root.flush()

    operations = files.counts - before
    assert (operations["sync"], operations["sync_directory"]) == (5, 5 + 2 + 2)
    assert (context.state.version(), context.live.version()) == (versions[0] + 1, versions[1] + 1)
    assert [partition_info(log).recovery_offset for log in logs] == [1] * 5
    assert [log.tail().durable_offset for log in logs] == [1] * 5
    assert not any(log.dirty for log in logs)

    fill(logs[0], 1)
    before = files.counts.copy()
    root.flush()
    operations = files.counts - before
    assert (operations["sync"], operations["sync_directory"]) == (1, 0)


@pytest.mark.parametrize(
    ("kind", "index", "failed"), [("sync", 3, [3]), ("sync_directory", 1, [0, 1])]
)
def test_a_partition_that_cannot_be_flushed_holds_up_no_other(
    partitions_to_flush, kind, index, failed
):
    """Only it becomes read-only; the error is raised after the others are flushed (P8, P9)."""
    root, logs = partitions_to_flush
    root.context.files.fail_at(index, errno.EIO, only=(kind,))
    with pytest.raises(DurabilityError):
        root.flush()

    assert [index for index, log in enumerate(logs) if log.tail().failed] == failed
    assert [index for index, log in enumerate(logs) if log.dirty] == failed
    recovery_offsets = [partition_info(log).recovery_offset for log in logs]
    assert recovery_offsets == [0 if index in failed else 1 for index in range(5)]


def test_a_locked_partition_delays_no_other_flush(partitions_to_flush, tmp_path):
    """The other partitions are flushed and unlocked meanwhile (P16)."""
    root, logs = partitions_to_flush
    other = open_root(tmp_path / "several")
    holder = other.partition("b", 1)
    holder.acquire()
    with pytest.raises(LockTimeoutError):
        root.flush()

    assert [partition_info(log).recovery_offset for log in logs] == [1, 1, 1, 0, 1]
    assert [n for n, log in enumerate(logs) if log.dirty] == [3]
    holder.release()
    root.flush()
    assert partition_info(logs[3]).recovery_offset == 1
    abandon(other)


# Truncating


def test_a_truncation_at_or_past_the_end_does_nothing(log):
    """It returns False and begins no epoch (A34)."""
    fill(log, 3)
    epoch = log.tail().leader_epoch

    assert not log.truncate_to(3)
    assert not log.truncate_to(99)
    assert (log.end_offset(), log.tail().leader_epoch) == (3, epoch)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        log.truncate_to(-1)
