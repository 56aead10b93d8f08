"""One partition: append, read, flush, truncate and look up times (A1–A37)."""

import errno
from functools import partial

import pytest
from support.children import in_child, in_threads, meanwhile
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
    CorruptBatchError,
    DurabilityError,
    InvalidRecordError,
    InvalidTimestampError,
    LockTimeoutError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    OffsetsOutOfOrderError,
    ReadOnlyError,
    RecordBatchTooLargeError,
    RecordTooLargeError,
    UnexpectedAppendOffsetError,
    UnknownTopicOrPartitionError,
)
from embedlog.partition import PartitionReader
from embedlog.record import Appended

pytestmark = pytest.mark.disk  # what it promises depends on the file system

# Appending


def test_offsets_begin_at_0_and_are_dense(log):
    """The first record of a partition has offset 0, the next one 1 (A1)."""
    receipts = log.append([encoded(b"a", b"b"), encoded(b"c")]) + log.append([encoded(b"d")])

    assert receipts == [Appended(0, 2), Appended(2, 3), Appended(3, 4)]
    assert (log.start_offset(), log.end_offset()) == (0, 4)
    assert values(log) == [b"a", b"b", b"c", b"d"]


def test_appending_nothing_does_nothing(log):
    """It takes no offset, rolls nothing and raises nothing (A2)."""
    assert log.append([]) == []
    assert (log.end_offset(), bases(log)) == (0, [0])


def test_null_and_empty_keys_and_values_are_four_different_things(log):
    """None is not b"" (A3)."""
    pairs = [(key, value) for key in (None, b"", b"k") for value in (None, b"", b"v")]
    log.append([encoded(*[value for _, value in pairs], keys=[key for key, _ in pairs])])

    assert [row[2:4] for row in rows(log)] == pairs


def test_headers_keep_their_order_their_repetitions_and_their_nulls(log):
    """A record's headers are a list of pairs, not a dict (A3)."""
    heads = [("b", b"1"), ("a", None), ("b", b""), ("", b"2")]
    log.append([encoded(b"x", b"y", b"z", headers=[heads, [], None])])

    assert [row[4] for row in rows(log)] == [heads, [], []]


def test_batches_without_headers_follow_in_a_segment_that_has_them(log):
    """A segment has one schema: batches after one with headers have the column too."""
    log.append([encoded(b"a")])
    log.append([encoded(b"b", headers=[[("h", b"1")]])])
    for compression in ("none", "lz4", "zstd"):
        log.append([encoded(b"c" * 100, keys=[b"k"], compression=compression)])
    log.append([encoded(b"d", headers=[[("h", b"2")]]), encoded(b"e", producer=(1, 0, 0))])

    records = rows(log)
    assert [row[3] for row in records] == [b"a", b"b", *[b"c" * 100] * 3, b"d", b"e"]
    assert [bool(row[4]) for row in records] == [False, True, False, False, False, True, False]
    assert bases(log) == [0, 1]
    assert log.append([encoded(b"e", producer=(1, 0, 0))]) == [Appended(6, 7, None, True)]


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_every_compression_reads_back_what_was_appended(log, compression):
    """The compression of a batch makes no difference to a reader."""
    expected = [b"value %d " % number * 20 for number in range(100)]
    log.append([encoded(*expected, compression=compression)])
    log.append([encoded(b"small", compression=compression)])

    assert values(log) == [*expected, b"small"]


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


def test_the_producers_timestamps_are_kept(log):
    """With CreateTime they may be out of order or from the last century (A7)."""
    times = [START, 0, START + 5, -5, START]
    log.append([encoded(*[b"x"] * 5, at=times)])

    assert [row[1] for row in rows(log)] == times


def test_log_append_time_overrides_the_producers(root, clock):
    """Every record of a batch has the log's time, which the receipt contains (A7)."""
    log = make_log(root, {"message.timestamp.type": "LogAppendTime"})
    receipts = log.append([encoded(b"a", b"b", at=[5, 7])])
    clock.advance(10)
    log.append([encoded(b"c", at=1)])

    assert receipts == [Appended(0, 2, START)]
    assert [row[1] for row in rows(log)] == [START, START, START + 10]
    assert log.offset_for_timestamp(START + 1)[:2] == (2, START + 10)


@pytest.mark.parametrize("time", [START - 1001, START + 501])
def test_a_timestamp_outside_the_window_is_refused(root, time):
    """The window is relative to the log's clock; nothing is appended (A7)."""
    config = {"message.timestamp.before.max.ms": 1000, "message.timestamp.after.max.ms": 500}
    log = make_log(root, config)
    log.append([encoded(b"old", b"new", at=[START - 1000, START + 500])])
    with pytest.raises(InvalidTimestampError, match="not within"):
        log.append([encoded(b"fine", at=START), encoded(b"x", at=time)])

    assert log.end_offset() == 2


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("headers", [None, [[("h", b"1")]] * 3])
def test_a_compacted_topic_refuses_records_without_a_key(root, compression, headers):
    """No batch of the call is written, and the error lists the records (A6)."""
    log = make_log(root, {"cleanup.policy": "compact,delete"})
    valid = encoded(b"a", keys=[b"k"])
    keyless = encoded(
        b"b", None, b"d", keys=[None, b"", None], headers=headers, compression=compression
    )
    with pytest.raises(InvalidRecordError, match=r"Records \[1, 3\] have no key") as raised:
        log.append([valid, keyless, valid])

    assert raised.value.indices == [1, 3]
    assert log.end_offset() == 0
    assert log.append([valid]) == [Appended(0, 1)]


def test_keys_are_required_as_soon_as_a_topic_is_compacted(root):
    """The current settings of the topic count, not those a producer has cached (A6)."""
    log = make_log(root)
    log.append([encoded(b"a")])
    root.alter_topic("t", {"cleanup.policy": "compact"})
    with pytest.raises(InvalidRecordError):
        log.append([encoded(b"b")])
    root.alter_topic("t", {"cleanup.policy": None})

    assert log.append([encoded(b"c")]) == [Appended(1, 2)]


def test_a_mirror_keeps_the_offsets_of_its_source(root, log):
    """Offsets may have gaps, also at the beginning; reads skip them (A8, A17)."""
    receipts = log.append_at([(10, encoded(b"a", b"b")), (12, encoded(b"c")), (20, encoded(b"d"))])
    log.append_at([(21, encoded(b"e"))], durability="fsync")

    assert receipts == [Appended(10, 12), Appended(12, 13), Appended(20, 21)]
    assert [row[:4:3] for row in rows(log)] == [
        (10, b"a"),
        (11, b"b"),
        (12, b"c"),
        (20, b"d"),
        (21, b"e"),
    ]
    assert offsets(log, 3) == offsets(log, 10) == [10, 11, 12, 20, 21]
    assert offsets(log, 13) == offsets(log, 15) == [20, 21]
    assert log.append([encoded(b"f")]) == [Appended(22, 23)]
    assert log.append_at([]) == []


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
        with pytest.raises(UnexpectedAppendOffsetError, match="goes on at offset 3"):
            log.append_at([(offset, encoded(b"x"))])
    for second in (4, 0, -1, (1 << 63) - 1, 1 << 64):
        with pytest.raises(OffsetsOutOfOrderError):
            log.append_at([(3, encoded(b"x", b"y")), (second, encoded(b"z"))])

    assert log.end_offset() == 3


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_gap_outlives_a_reboot(tmp_path, durability):
    """Recovery keeps the batches after the gap (A25, A8)."""
    root = open_root(tmp_path)
    log = make_log(root)
    fill(log, 2)
    log.append_at([(100, encoded(b"x")), (200, encoded(b"y"))], durability=durability)
    abandon(root)
    (tmp_path / "live" / "boot").write_bytes(b"another boot")
    root = open_root(tmp_path)
    log = root.partition("t", 0)

    assert offsets(log) == [0, 1, 100, 200]
    assert log.append([encoded(b"z")]) == [Appended(201, 202)]
    assert healthy(root)
    root.close()


def test_threads_and_processes_append_without_mixing_their_batches(root, log):
    """Offsets are dense, batches are whole, and the batches of an appender stay in order (A10)."""

    def work(name):
        for number in range(30):
            log = root.partition("t", 0)
            log.append([encoded(*[b"%b %d" % (name, number)] * 3)])

    def fork(name):
        in_child(lambda: work(name))

    appenders = [partial(work, name) for name in (b"a", b"b")]
    appenders += [partial(fork, name) for name in (b"c", b"d")]
    with in_threads(*appenders):
        pass

    records = rows(log)
    assert [row[0] for row in records] == list(range(360))
    batch_values = [records[position][3] for position in range(0, 360, 3)]
    assert [row[3] for row in records] == [value for value in batch_values for _ in range(3)]
    for name in (b"a", b"b", b"c", b"d"):
        own_batches = [value for value in batch_values if value.startswith(name)]
        assert own_batches == [b"%b %d" % (name, number) for number in range(30)]


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


def test_a_handle_that_reads_cannot_append(root, log, tmp_path):
    """With mode="r" every change raises."""
    fill(log, 3)
    read_only = open_root(tmp_path / "root", mode="r")
    other = read_only.partition("t", 0)

    assert values(other) == [b"v0", b"v1", b"v2"]
    for change in (lambda: other.append([encoded(b"x")]), other.flush, other.roll,
                   lambda: other.truncate_to(0)):  # fmt: skip
        with pytest.raises(ReadOnlyError):
            change()
    fill(log, 1, first=3)
    assert values(other, 3) == [b"v3"]
    read_only.close()


def test_the_log_of_a_deleted_topic_raises(root, log):
    """Its records are gone; a new topic of that name begins at offset 0 (A38)."""
    fill(log, 3)
    root.delete_topic("t")
    with pytest.raises(UnknownTopicOrPartitionError):
        log.append([encoded(b"x")])
    new_log = make_log(root)
    with pytest.raises(UnknownTopicOrPartitionError, match="created again"):
        log.append([encoded(b"x")])

    assert new_log.append([encoded(b"new")]) == [Appended(0, 1)]
    assert root.partition("t", 0) is new_log


# Reading


def test_reading_at_the_end_is_empty_and_past_it_out_of_range(log):
    """The end of the log is a valid position, the offset after it is not (A17)."""
    fill(log, 3)

    assert log.reader(3).read() == []
    for offset in (-1, 4, 1 << 62):
        with pytest.raises(OffsetOutOfRangeError, match=r"offsets \[0, 3\)"):
            log.reader(offset)


def test_a_reader_at_the_end_finds_what_comes(log):
    """Each `read` returns the records that were appended since the last one."""
    reader = log.reader(0)
    assert reader.read() == []
    for number in range(3):
        fill(log, 1, first=number)
        assert [row[3] for batch in reader.read() for row in batch_rows(batch)] == [b"v%d" % number]
        assert reader.read() == []


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


def test_a_read_inside_a_batch_gives_that_batch(log):
    """The caller drops the records below its offset (A17)."""
    fill(log, 3, size=10)
    reader = log.reader(15)

    assert [batch.base_offset for batch in reader.read()] == [10, 20]
    assert reader.offset == 30
    assert offsets(log, 15) == list(range(15, 30))


@pytest.mark.parametrize("max_bytes", [1, 600, 5000, 1 << 20])
def test_reading_piece_by_piece_gives_every_record_once(root, max_bytes):
    """It crosses all segments, for any `max_bytes` (A18, A19)."""
    log = make_log(root, {"segment.bytes": 2000, "index.interval.bytes": 600})
    fill(log, 20, size=3)

    assert len(bases(log)) > 3
    for offset in range(61):
        assert [row[0] for row in rows(log, offset, max_bytes)] == list(range(offset, 60))


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


def test_durable_visibility_shows_only_what_was_flushed(root, log, tmp_path):
    """Consumers see only records that survive a power cut, as in the Kafka paper of 2011 (A20)."""
    durable_root = open_root(tmp_path / "root", visibility="durable")
    durable_log = durable_root.partition("t", 0)
    fill(log, 2)
    assert (durable_log.end_offset(), values(durable_log)) == (0, [])
    with pytest.raises(OffsetOutOfRangeError):
        durable_log.reader(1)
    log.flush()
    assert values(durable_log) == [b"v0", b"v1"]
    fill(log, 1, first=2)
    assert values(durable_log) == [b"v0", b"v1"]
    fill(log, 1, first=3, durability="fsync")
    assert values(durable_log) == values(log) == [b"v0", b"v1", b"v2", b"v3"]
    durable_root.close()


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


def test_a_damaged_batch_is_reported_with_its_position_and_can_be_skipped(root, log):
    """The error has topic, partition, offset, file and byte; other batches are read (A32)."""
    fill(log, 3, size=2)
    log.append([encoded(b"after")])
    (path,) = segment_files(root.path)
    file_positions = [batch.position for batch in log.reader(0).read()]
    with path.open("r+b") as file:
        file.seek(file_positions[1] + 60)
        file.write(b"\xff\xfe\xfd")

    reader = log.reader(0)
    assert [batch.base_offset for batch in reader.read()] == [0]
    for _ in range(2):
        with pytest.raises(CorruptBatchError) as caught:
            reader.read()
        assert (caught.value.topic, caught.value.partition, caught.value.offset) == ("t", 0, 2)
        assert caught.value.path == str(path.relative_to(root.path))
        assert caught.value.position == file_positions[1]
        assert reader.offset == 2
    abandon(root)


def test_a_reader_knows_its_offset_after_the_log_was_truncated_and_written_again(root):
    """After a truncation the reader looks up its position in the file again (A36)."""
    log = make_log(root)
    fill(log, 5)
    reader = log.reader(0)
    assert len(reader.read()) == 5
    log.truncate_to(2)
    with pytest.raises(OffsetOutOfRangeError):
        reader.read()
    log.truncate_to(1)
    reader = log.reader(0)
    assert [batch.next_offset for batch in reader.read()] == [1]
    fill(log, 3)
    log.truncate_to(1)
    log.append([encoded(b"longer than before", b"x"), encoded(b"y")])

    assert isinstance(reader, PartitionReader)
    records = [row[:4:3] for batch in reader.read() for row in batch_rows(batch)]
    assert records == [(1, b"longer than before"), (2, b"x"), (3, b"y")]


def test_a_reader_raises_after_the_log_was_truncated_below_it(log):
    """It raises even if the offsets were used again, and says where to continue (A36, A37)."""
    fill(log, 6)
    reader, behind = log.reader(0), log.reader(3)
    reader.read()
    log.truncate_to(5)
    fill(log, 3, first=10)
    log.truncate_to(4)
    fill(log, 3, first=20)

    for _ in range(2):
        with pytest.raises(LogTruncatedError, match="cut at offset 4") as raised:
            reader.read()
        assert (raised.value.offset, raised.value.next_offset) == (6, 4)
    assert [row[3] for batch in behind.read() for row in batch_rows(batch)] == [
        b"v3",
        b"v20",
        b"v21",
        b"v22",
    ]


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
    assert (operations["sync"], operations["sync_directory"]) == (5, 5 + 2 + 1)
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


def test_flushing_an_empty_partition_is_fine(log):
    """It makes the file of the segment durable (A22)."""
    log.flush()
    log.roll()
    log.flush()

    assert log.end_offset() == 0


def test_flush_messages_flushes_after_that_many_records(root):
    """The setting is Kafka's flush.messages (A22)."""
    log = make_log(root, {"flush.messages": 5})
    durable_offsets = []
    for number in range(12):
        fill(log, 1, first=number)
        durable_offsets.append(log.tail().durable_offset)

    assert durable_offsets == [0, 0, 0, 0, 5, 5, 5, 5, 5, 10, 10, 10]


def test_flush_ms_flushes_when_the_last_flush_is_that_long_ago(root, clock):
    """The setting is Kafka's flush.ms; the next append flushes (A22)."""
    log = make_log(root, {"flush.ms": 100})
    fill(log, 1)
    log.flush()
    fill(log, 1, first=1)
    assert log.tail().durable_offset == 1
    clock.advance(100)
    fill(log, 1, first=2)

    assert log.tail().durable_offset == 3


def test_durability_fsync_is_durable_when_append_returns(log):
    """Earlier appends that were not flushed become durable, too (group commit)."""
    fill(log, 2)
    fill(log, 1, first=2, durability="fsync")

    assert log.tail().durable_offset == log.end_offset() == 3


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


@pytest.mark.parametrize("offset", range(1, 30))
def test_a_truncation_removes_every_record_from_the_offset_on(tmp_path, offset):
    """A batch across the offset is removed entirely; the log ends at the offset (A34)."""
    root = open_root(tmp_path / "root")
    log = make_log(root, {"segment.bytes": 1500, "index.interval.bytes": 500})
    fill(log, 10, size=3)
    log.flush()

    assert log.truncate_to(offset)
    assert offsets(log) == list(range(offset // 3 * 3))
    assert log.end_offset() == offset
    assert log.append([encoded(b"next")]) == [Appended(offset, offset + 1)]
    assert offsets(log) == [*range(offset // 3 * 3), offset]
    assert values(log, offset // 3 * 3) == [b"next"]
    assert healthy(root)
    abandon(root)
    reopened = open_root(tmp_path / "root")
    assert offsets(reopened.partition("t", 0)) == [*range(offset // 3 * 3), offset]
    reopened.close()


def test_a_truncation_to_the_start_empties_the_log(log):
    """The log is empty, and starts and ends at the offset (A35)."""
    fill(log, 3)
    log.truncate_to(0)

    assert (log.start_offset(), log.end_offset(), values(log)) == (0, 0, [])
    assert log.append([encoded(b"x")]) == [Appended(0, 1)]


def test_a_truncation_raises_the_epoch_of_later_batches(log):
    """Epochs distinguish the new records at an offset from the old ones (A36, A37)."""
    fill(log, 5)
    first_epoch = log.tail().leader_epoch
    log.truncate_to(3)
    fill(log, 1, first=3)
    log.truncate_to(2)
    fill(log, 2, first=2)

    assert [batch.leader_epoch - first_epoch for batch in log.reader(0).read()] == [0, 0, 2, 2]
    epochs = log.context.state.read(lambda txn: catalog.epochs(txn, log.key))
    assert epochs == [(first_epoch, 0), (first_epoch + 2, 2)]


# Looking up a time


def test_a_time_lookup_is_the_first_record_in_offset_order(root):
    """If timestamps are out of order, it is not the nearest in time (B10, B13)."""
    log = make_log(root, {"segment.bytes": 1200, "index.interval.bytes": 0})
    times = [10, 30, 20, 50, 40, 40, 70, 5, 60]
    for first in range(0, 9, 3):
        log.append([encoded(b"a", b"b", b"c", at=times[first : first + 3])])
        log.roll()

    for time in range(80):
        expected = [(offset, at) for offset, at in enumerate(times) if at >= time]
        looked_up = log.offset_for_timestamp(time)
        assert (looked_up and looked_up[:2]) == (expected[0] if expected else None)
    assert log.offset_for_timestamp(0).leader_epoch == log.tail().leader_epoch


def test_a_time_lookup_in_an_empty_log_finds_nothing(log):
    """It returns None (B10)."""
    assert log.offset_for_timestamp(0) is None
