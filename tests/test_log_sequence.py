"""Idempotence: repeated batches are detected, gaps in the sequence raise (G15–G19)."""

import pytest
from support.clock import ManualClock
from support.roots import abandon, encoded, make_log, open_root, values

from embedlog.errors import InvalidProducerEpochError, OutOfOrderSequenceError
from embedlog.partition.producer_state import read_producer
from embedlog.record import Appended


def send(log, number, count=1, *, pid=7, epoch=0, **options):
    batch = encoded(
        *[b"%d" % (number + row) for row in range(count)], producer=(pid, epoch, number)
    )
    return log.append([batch], **options)[0]


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


def test_a_lower_epoch_is_fenced_and_a_higher_one_begins_at_0(log):
    """A higher epoch means that a newer producer has taken over (G17)."""
    send(log, 0)
    with pytest.raises(OutOfOrderSequenceError, match="not 0"):
        send(log, 5, epoch=1)
    send(log, 0, epoch=1)
    with pytest.raises(InvalidProducerEpochError, match="Epoch 0 was fenced by epoch 1"):
        send(log, 1, epoch=0)
    assert send(log, 1, epoch=1).base_offset == 2


# Expiry


DAY = 86_400_000


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
