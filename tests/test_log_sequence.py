"""Idempotence: repeated batches are detected, gaps in the sequence raise (G15–G19)."""

import pytest
from support.clock import START, ManualClock
from support.faulty_files import REBOOTED, FaultyFiles
from support.roots import abandon, encoded, fill, make_log, open_root, values

from embedlog.errors import InvalidProducerEpochError, OutOfOrderSequenceError
from embedlog.partition import producer_state
from embedlog.partition.producer_state import LAST_SEQUENCE, SentBatch, remembered
from embedlog.partition.producers import expire_producers, read_producer
from embedlog.record import Appended


def send(log, number, count=1, *, pid=7, epoch=0, **options):
    batch = encoded(
        *[b"%d" % (number + row) for row in range(count)], producer=(pid, epoch, number)
    )
    return log.append([batch], **options)[0]


def test_a_repetition_gets_the_first_receipt(log):
    """The receipt has the same offsets and `duplicate`; nothing is appended (G16)."""
    fill(log, 2)
    first = send(log, 0, 3)

    assert first == Appended(2, 5)
    assert send(log, 0, 3) == Appended(2, 5, None, True)
    assert log.end_offset() == 5
    assert send(log, 3) == Appended(5, 6)


def test_the_last_five_batches_are_remembered(log):
    """A repetition of the sixth last batch is out of order, as in Kafka (G16)."""
    for number in range(8):
        send(log, number)

    for number in range(3, 8):
        assert send(log, number) == Appended(number, number + 1, None, True)
    with pytest.raises(OutOfOrderSequenceError, match="Sequence 2 where 8 is next"):
        send(log, 2)
    assert log.end_offset() == 8


@pytest.mark.parametrize(("number", "count"), [(4, 1), (1, 1), (0, 2), (0, 4), (2, 2)])
def test_a_gap_or_a_partial_repetition_is_out_of_order(log, number, count):
    """No part of the batch is appended (G16)."""
    send(log, 0, 3)

    with pytest.raises(OutOfOrderSequenceError):
        send(log, number, count)
    assert log.end_offset() == 3


def test_one_bad_batch_fails_the_whole_append(log):
    """An append writes all its batches or none."""
    send(log, 0)
    with pytest.raises(OutOfOrderSequenceError):
        log.append([encoded(b"fine"), encoded(b"x", producer=(7, 0, 5))])

    assert values(log) == [b"0"]


def test_repetitions_inside_one_append_are_found(log):
    """The second of two equal batches is the repetition of the first."""
    repeated = [encoded(b"x", producer=(7, 0, 0)) for _ in range(2)]

    assert log.append(repeated) == [Appended(0, 1), Appended(0, 1, None, True)]
    assert log.end_offset() == 1


def test_sequence_numbers_wrap_to_0(log):
    """0 follows 2³¹−1, also inside a batch (G15)."""
    assert producer_state.after(LAST_SEQUENCE, 1) == 0
    send(log, LAST_SEQUENCE - 1, 4)
    send(log, 2)

    assert send(log, LAST_SEQUENCE - 1, 4).duplicate
    with pytest.raises(OutOfOrderSequenceError):
        send(log, 4)
    send(log, 3)


def test_a_lower_epoch_is_fenced_and_a_higher_one_begins_at_0(log):
    """A higher epoch means that a newer producer has taken over (G17)."""
    send(log, 0)
    with pytest.raises(OutOfOrderSequenceError, match="not 0"):
        send(log, 5, epoch=1)
    send(log, 0, epoch=1)
    with pytest.raises(InvalidProducerEpochError, match="Epoch 0 was fenced by epoch 1"):
        send(log, 1, epoch=0)
    assert send(log, 1, epoch=1).base_offset == 2


def test_an_unknown_producer_may_begin_anywhere(log):
    """The state of the producer may have expired (G17)."""
    assert send(log, 1000, pid=1) == Appended(0, 1)
    assert send(log, 1001, pid=1) == Appended(1, 2)
    assert send(log, 5, pid=2) == Appended(2, 3)


def test_producers_and_partitions_count_by_themselves(root):
    """State is kept for each producer in each partition (G15)."""
    root.create_topic("t", 2, make_log(root, topic="u").config)
    first, second = root.partition("t", 0), root.partition("t", 1)
    for log in (first, second):
        for pid in (1, 2):
            send(log, 0, pid=pid)

    assert [log.end_offset() for log in (first, second)] == [2, 2]


@pytest.mark.parametrize("ending", ["closed", "killed", "rebooted"])
@pytest.mark.parametrize("flushed", [0, 3, 9, 10])
@pytest.mark.parametrize("rolled", [False, True])
def test_the_state_of_producers_survives(tmp_path, ending, flushed, rolled):
    """The state is the same after a clean close, a kill and a reboot (G18)."""
    root = open_root(tmp_path / "root")
    log = make_log(root)
    for number in range(10):
        if number == flushed:
            log.flush()
        if rolled and number % 3 == 0:
            log.roll()
        send(log, number)
        send(log, number, pid=8)
    if flushed == 10:
        log.flush()
    _ = root.close() if ending == "closed" else abandon(root)
    root = open_root(tmp_path / "root", files=REBOOTED if ending == "rebooted" else FaultyFiles)
    log = root.partition("t", 0)

    for pid in (7, 8):
        for number in range(5, 10):
            assert send(log, number, pid=pid)[:2] == (2 * number + pid - 7, 2 * number + pid - 6)
        with pytest.raises(OutOfOrderSequenceError):
            send(log, 4, pid=pid)
    assert send(log, 10) == Appended(20, 21)
    root.close()


@pytest.mark.parametrize("flush_at", [None, 4, 9])
def test_a_truncation_forgets_the_batches_past_it(tmp_path, flush_at):
    """The state is rolled back and replayed: only the remaining batches are known (A34)."""
    root = open_root(tmp_path / "root")
    log = make_log(root, {"segment.bytes": 1500})
    for number in range(10):
        send(log, number)
        if number == flush_at:
            log.flush()
    log.truncate_to(4)

    assert send(log, 2) == Appended(2, 3, None, True)
    with pytest.raises(OutOfOrderSequenceError, match="Sequence 5 where 4 is next"):
        send(log, 5)
    assert send(log, 4) == Appended(4, 5)
    root.close()


def test_a_truncated_batch_is_no_repetition_after_a_reboot(tmp_path):
    """The truncation also removes the batches from the snapshot on the disk (A34, G18)."""
    root = open_root(tmp_path / "root")
    log = make_log(root)
    for number in range(8):
        send(log, number)
    log.flush()
    log.truncate_to(2)
    fill(log, 20)
    log.flush()
    abandon(root)
    root = open_root(tmp_path / "root", files=REBOOTED)
    log = root.partition("t", 0)

    assert send(log, 2) == Appended(22, 23)
    assert send(log, 1) == Appended(1, 2, None, True)
    root.close()


def test_a_producers_row_comes_back():
    """A state is packed and unpacked alone, and in a snapshot with others (G18)."""
    batches = SentBatch(0, 9, 0, 10), SentBatch(10, 10, 17, 18)
    with_batches, without_batches = remembered(3, 1 << 40, batches), remembered(0x7FFE, -1)

    assert (
        with_batches.epoch,
        with_batches.due,
        producer_state.last_ms(with_batches.row),
        with_batches.batches,
    ) == (
        3,
        11,
        1 << 40,
        batches,
    )
    assert (
        without_batches.epoch,
        without_batches.due,
        producer_state.last_ms(without_batches.row),
        without_batches.batches,
    ) == (
        0x7FFE,
        None,
        -1,
        (),
    )
    assert [producer_state.unpack(state.row) for state in (with_batches, without_batches)] == [
        with_batches,
        without_batches,
    ]
    assert producer_state.unpack_all(
        producer_state.pack_all({1: with_batches, 1 << 40: without_batches})
    ) == {
        1: with_batches,
        1 << 40: without_batches,
    }
    assert producer_state.unpack_all(b"") == {}


# Expiry


DAY = 86_400_000


def test_a_producer_that_was_idle_for_a_day_is_forgotten(log, clock):
    """Its next batch may have any sequence number, like one of a new producer (G17, G19)."""
    send(log, 0)
    clock.advance(1)
    send(log, 0, pid=8)

    assert expire_producers(log, START + DAY - 1) == 0
    assert expire_producers(log, START + DAY) == 1
    assert read_producer(log, 7) is None
    with pytest.raises(OutOfOrderSequenceError):
        send(log, 5, pid=8)
    assert send(log, 5) == Appended(2, 3)
    assert send(log, 5) == Appended(2, 3, None, True)


def test_an_append_keeps_a_producer_for_another_day(log, clock):
    """The idle time counts from the last append, by the log's clock (G19)."""
    send(log, 0)
    clock.advance(DAY - 1)
    send(log, 1)
    clock.advance(DAY - 1)

    assert expire_producers(log, clock()) == 0
    assert send(log, 0) == Appended(0, 1, None, True)


def test_how_long_a_producer_is_remembered_is_a_setting(root, clock):
    """producer.id.expiration.ms is a setting of the topic; in Kafka, of the broker (G19)."""
    log = make_log(root, {"producer.id.expiration.ms": 1000})
    send(log, 0)

    assert expire_producers(log, clock.advance(999)) == 0
    assert expire_producers(log, clock.advance(1)) == 1


def test_a_roll_forgets_idle_producers(log, clock):
    """Every process creates producers with new ids, so rolls drop the idle ones (G19)."""
    send(log, 0)
    clock.advance(DAY)
    send(log, 0, pid=8)
    log.roll()

    assert read_producer(log, 7) is None
    assert read_producer(log, 8) is not None


@pytest.mark.parametrize("later", [0, DAY])
def test_an_idle_producer_does_not_come_back_with_a_recovery(tmp_path, later):
    """Snapshots do not contain it, and recovery drops it from older ones (G18)."""
    clock = ManualClock()
    root = open_root(tmp_path, clock=clock)
    log = make_log(root)
    send(log, 0)
    clock.advance(DAY - later)
    log.flush()
    send(log, 0, pid=8)
    abandon(root)
    (tmp_path / "live" / "boot").write_bytes(b"another boot")
    clock.advance(later)
    root = open_root(tmp_path, clock=clock)
    log = root.partition("t", 0)

    assert read_producer(log, 7) is None
    assert read_producer(log, 8) is not None
    root.close()
