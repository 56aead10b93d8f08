"""An append of any process wakes the readers that wait, and costs nothing if none waits."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from support import forks
from support.children import in_child
from support.patience import patient
from support.roots import abandon, encoded, make_log, open_root
from support.tiers import choose, sample

from embedlog.consumer import waiter
from embedlog.consumer.consumer import Consumer
from embedlog.files import Files

MISSED_WAKE_SECONDS = 60.0
"""How long a reader sleeps after it missed a wake: far longer than any test takes."""


def waiters(root):
    """Return the number of waiting readers that an append counts."""
    return root.wake._waiters[0]


def wait_until(consumer, root, counted):
    """Poll in vain until so many waiters are counted.

    On a busy machine a poll may be over before it waits, and then it does not count.
    """

    def poll():
        assert consumer.poll(100) == {}
        return waiters(root) == counted

    forks.until(poll)


def read_and_answer(path, pipe):
    """Write the number of records of each poll to a pipe, until the last record."""
    rng = random.Random(1)
    root = open_root(path)
    consumer = Consumer(root, "t", auto_offset_reset="earliest")
    values = []
    while b"end" not in values:
        values = [record.value for records in consumer.poll(60_000).values() for record in records]
        os.write(pipe, bytes([len(values)]))
        # Vary whether the next append comes before, during or after a read.
        for _ in range(rng.choice([0, 0, 100, 1000])):
            pass
    consumer.close()
    root.close()


@pytest.mark.tier("test")
@pytest.mark.parametrize("readers", sample([2, 1], 1))
def test_no_append_is_slept_through(tmp_path, monkeypatch, readers):
    """Readers join, read, sleep and leave; another process may append at any of these moments."""
    monkeypatch.setattr(waiter, "_MAX_SLEEP_SECONDS", MISSED_WAKE_SECONDS)
    root = open_root(tmp_path / "root")
    log, rng = make_log(root), random.Random(readers)
    pipes = []
    for _ in range(readers):
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            try:
                read_and_answer(root.path, write_end)
            finally:
                os._exit(0)
        os.close(write_end)
        pipes.append(read_end)

    rounds, longest = choose(test=1500, all=4000) // readers, 0.0
    for number in range(rounds):
        began = time.monotonic()
        last = number == rounds - 1
        batches = [encoded(b"v")] * rng.choice([1, 1, 2]) + [encoded(b"end")] * last
        for encoded_batch in batches:
            log.append([encoded_batch])
            for _ in range(rng.choice([0, 0, 300, 3000])):
                pass
        for read_end in pipes:
            received = 0
            while received < len(batches):
                received += int.from_bytes(os.read(read_end, 1)) or pytest.fail("a reader died")
        longest = max(longest, time.monotonic() - began)
    # All rounds together may take minutes on a busy machine.
    assert longest < MISSED_WAKE_SECONDS
    for read_end in pipes:
        os.wait()
        os.close(read_end)
    assert waiters(root) == 0
    abandon(root)


def test_a_killed_waiter_is_counted_until_no_process_is_attached(tmp_path):
    """The next process that opens the root alone resets the count."""
    root = open_root(tmp_path / "root")
    log = make_log(root)
    child = os.fork()
    if child == 0:
        Consumer(root, "t").poll(60_000)
        os._exit(0)
    forks.until(lambda: waiters(root))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert waiters(root) == 1

    other = open_root(tmp_path / "root")
    consumer = Consumer(other, "t", auto_offset_reset="earliest")
    wait_until(consumer, root, counted=2)
    log.append([encoded(b"v")])
    assert len(consumer.poll(int(patient(10_000)))) == 1
    other.close()
    assert waiters(root) == 1

    root.close()
    root = open_root(tmp_path / "root")
    assert waiters(root) == 0
    root.close()


def test_only_a_waiting_consumer_is_counted(tmp_path):
    """A poll that does not wait, or finds records, and a closed consumer do not count."""
    root = open_root(tmp_path / "root")
    log = make_log(root)
    consumer = Consumer(root, "t", auto_offset_reset="earliest")
    assert consumer.poll(0) == {}
    assert waiters(root) == 0
    for _ in range(2):
        wait_until(consumer, root, counted=1)
    log.append([encoded(b"v")])
    assert consumer.poll(1)
    assert waiters(root) == 0
    wait_until(consumer, root, counted=1)
    consumer.close()
    assert waiters(root) == 0
    root.close()


def test_the_child_of_a_fork_counts_for_itself(tmp_path):
    """It neither uncounts its parent nor inherits its count."""
    root = open_root(tmp_path / "root")
    make_log(root)
    consumer = Consumer(root, "t")
    wait_until(consumer, root, counted=1)

    def poll_and_close():
        before = waiters(root)
        wait_until(consumer, root, counted=2)
        during = waiters(root)
        consumer.close()
        after = waiters(root)
        root.close()
        return before, during, after

    assert in_child(poll_and_close) == (1, 2, 1)
    assert waiters(root) == 1
    consumer.close()
    assert waiters(root) == 0
    root.close()


def test_a_reader_with_mode_r_is_counted_and_woken(tmp_path):
    """Being counted does not change the log."""
    root = open_root(tmp_path / "root")
    make_log(root)
    read_only = open_root(tmp_path / "root", mode="r")
    consumer = Consumer(read_only, "t", auto_offset_reset="earliest")
    wait_until(consumer, root, counted=1)
    read_only.close()
    assert waiters(root) == 0
    root.close()


def test_every_append_changes_the_published_time(tmp_path):
    """The counter does not advance if no reader waits; the time does."""
    root = open_root(tmp_path / "root")
    log = make_log(root)
    read_only = open_root(tmp_path / "root", mode="r")
    before = read_only.wake.published()
    log.append([encoded(b"v")])
    assert read_only.wake.published() != before
    read_only.close()
    root.close()


def test_a_reader_that_may_not_write_sees_an_append_soon(tmp_path, monkeypatch):
    """On a remote file system it cannot be counted, so it polls the page."""
    root = open_root(tmp_path / "root")
    log = make_log(root)
    monkeypatch.setattr(Files, "filesystem", lambda files: "nfs")
    read_only = open_root(tmp_path / "root", mode="r")
    consumer = Consumer(read_only, "t", auto_offset_reset="earliest")
    assert consumer.poll(100) == {}
    assert waiters(root) == 0
    value = read_only.wake.value()
    log.append([encoded(b"v")])
    began = time.monotonic()
    read_only.wake.wait(value, patient(10))
    assert time.monotonic() - began < patient(5)
    assert len(consumer.poll(int(patient(1000)))) == 1
    read_only.close()
    root.close()
