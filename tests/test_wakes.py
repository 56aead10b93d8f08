"""Who waits is woken, by whichever process publishes, and nobody else costs anything."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from support.children import in_child
from support.patience import patient
from support.roots import abandon, encoded, make_log, open_root

from embedlog.consumer import Consumer, waiter
from embedlog.files import Files

FOR_EVER_SECONDS = 60.0
"""How long a reader sleeps that missed a wake: far longer than any test takes."""


def counted(root):
    """How many may be asleep, as whoever publishes sees it."""
    return root.wake._waiters[0]


def read_and_answer(path, back):
    """Tell how many records came, each time some did, until the last one."""
    dice = random.Random(1)
    root = open_root(path)
    consumer = Consumer(root, "t", auto_offset_reset="earliest")
    values = []
    while b"end" not in values:
        values = [one.value for found in consumer.poll(60_000).values() for one in found]
        os.write(back, bytes([len(values)]))
        # So that the next append comes before, within or after the looks.
        for _ in range(dice.choice([0, 0, 100, 1000])):
            pass
    consumer.close()
    root.close()


@pytest.mark.tier("test")
@pytest.mark.parametrize("readers", [1, 2])
def test_no_append_is_slept_through(tmp_path, monkeypatch, readers):
    """Readers join, look, sleep and leave, and another process appends at any of these moments."""
    monkeypatch.setattr(waiter, "_MAX_SLEEP_SECONDS", FOR_EVER_SECONDS)
    root = open_root(tmp_path / "root")
    log, dice = make_log(root), random.Random(readers)
    pipes = []
    for _ in range(readers):
        come, go = os.pipe()
        if os.fork() == 0:
            try:
                read_and_answer(root.path, go)
            finally:
                os._exit(0)
        os.close(go)
        pipes.append(come)

    rounds, longest = 4000 // readers, 0.0
    for number in range(rounds):
        began = time.monotonic()
        last = number == rounds - 1
        batches = [encoded(b"v")] * dice.choice([1, 1, 2]) + [encoded(b"end")] * last
        for one in batches:
            log.append([one])
            for _ in range(dice.choice([0, 0, 300, 3000])):
                pass
        for come in pipes:
            seen = 0
            while seen < len(batches):
                seen += int.from_bytes(os.read(come, 1)) or pytest.fail("a reader died")
        longest = max(longest, time.monotonic() - began)
    # Of all rounds together a busy machine makes minutes.
    assert longest < FOR_EVER_SECONDS
    for come in pipes:
        os.wait()
        os.close(come)
    assert counted(root) == 0
    abandon(root)


def test_a_killed_waiter_costs_a_call_until_nobody_is_attached(tmp_path):
    """It stays counted; the next one who is alone counts anew, and nobody else."""
    root = open_root(tmp_path / "root")
    log = make_log(root)
    child = os.fork()
    if child == 0:
        Consumer(root, "t").poll(60_000)
        os._exit(0)
    until = time.monotonic() + patient(10)
    while not counted(root) and time.monotonic() < until:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert counted(root) == 1

    beside = open_root(tmp_path / "root")
    consumer = Consumer(beside, "t", auto_offset_reset="earliest")
    # In a shorter time a busy machine may not get from the look to the wait.
    assert consumer.poll(100) == {}
    assert counted(root) == 2
    log.append([encoded(b"v")])
    assert len(consumer.poll(int(patient(10_000)))) == 1
    beside.close()
    assert counted(root) == 1

    root.close()
    root = open_root(tmp_path / "root")
    assert counted(root) == 0
    root.close()


def test_only_who_waits_is_counted(tmp_path):
    """Not who only looks; and no more who finds something at once, or is closed."""
    root = open_root(tmp_path / "root")
    log = make_log(root)
    consumer = Consumer(root, "t", auto_offset_reset="earliest")
    assert consumer.poll(0) == {}
    assert counted(root) == 0
    for _ in range(2):
        assert consumer.poll(100) == {}
        assert counted(root) == 1
    log.append([encoded(b"v")])
    assert consumer.poll(1)
    assert counted(root) == 0
    assert consumer.poll(100) == {}
    assert counted(root) == 1
    consumer.close()
    assert counted(root) == 0
    root.close()


def test_the_child_of_a_fork_counts_for_itself(tmp_path):
    """It neither takes its parent off nor believes itself to be counted."""
    root = open_root(tmp_path / "root")
    make_log(root)
    consumer = Consumer(root, "t")
    assert consumer.poll(100) == {}

    def child():
        before = counted(root)
        assert consumer.poll(100) == {}
        during = counted(root)
        consumer.close()
        after = counted(root)
        root.close()
        return before, during, after

    assert in_child(child) == (1, 2, 1)
    assert counted(root) == 1
    consumer.close()
    assert counted(root) == 0
    root.close()


def test_a_reader_with_mode_r_is_counted_and_woken(tmp_path):
    """To be counted changes nothing of the log, so it sleeps as others do."""
    root = open_root(tmp_path / "root")
    make_log(root)
    watching = open_root(tmp_path / "root", mode="r")
    consumer = Consumer(watching, "t", auto_offset_reset="earliest")
    assert consumer.poll(100) == {}
    assert counted(root) == 1
    watching.close()
    assert counted(root) == 0
    root.close()


def test_every_publication_is_told_to_who_only_looks(tmp_path):
    """With nobody counted, the counter stands still; the time does not."""
    root = open_root(tmp_path / "root")
    log = make_log(root)
    watching = open_root(tmp_path / "root", mode="r")
    before = watching.wake.published()
    log.append([encoded(b"v")])
    assert watching.wake.published() != before
    watching.close()
    root.close()


def test_a_reader_that_may_not_write_sees_an_append_soon(tmp_path, monkeypatch):
    """As on a remote file system: it cannot be counted, so it looks at the page by itself."""
    root = open_root(tmp_path / "root")
    log = make_log(root)
    monkeypatch.setattr(Files, "filesystem", lambda files: "nfs")
    watching = open_root(tmp_path / "root", mode="r")
    consumer = Consumer(watching, "t", auto_offset_reset="earliest")
    assert consumer.poll(100) == {}
    assert counted(root) == 0
    seen = watching.wake.value()
    log.append([encoded(b"v")])
    began = time.monotonic()
    watching.wake.wait(seen, patient(10))
    assert time.monotonic() - began < patient(5)
    assert len(consumer.poll(int(patient(1000)))) == 1
    watching.close()
    root.close()
