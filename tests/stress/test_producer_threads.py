"""Two threads use one producer: each call is stopped at its lines while another one is made."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support import forks, producer_calls, tiers
from support.faulty_files import scratch_directory
from support.interleaving import watched_locks
from support.mutants import Change
from support.roots import healthy, open_root

from embedlog.root.root import Root

SAMPLE = tiers.choose(test=1, all=3)
"""At how many lines of each pair of calls the sampled test stops the first one."""


@pytest.fixture
def root() -> Iterator[Root]:
    """A root whose locks report when a thread waits for them."""
    with watched_locks(), scratch_directory() as directory:
        root = open_root(directory / "log")
        producer_calls.make_root(root)
        yield root
        assert healthy(root)
        root.close()


@pytest.mark.parametrize("first", tiers.sample(list(producer_calls.CALLS), 4))
def test_a_call_may_be_stopped_anywhere_while_another_is_made(root, first):
    """Everything acknowledged is in the log once, as it was sent; at a sample of the lines."""
    for second in producer_calls.CALLS:
        rng = random.Random(f"{first} {second}")

        def sample(count: int, rng: random.Random = rng) -> list[int]:
            return rng.sample(range(count), min(count, SAMPLE))

        producer_calls.check(root, first, second, sample)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("first", producer_calls.CALLS)
def test_a_call_may_be_stopped_at_every_line_while_another_is_made(root, first):
    """The same at all lines."""
    assert (
        sum(producer_calls.check(root, first, second, range) for second in producer_calls.CALLS)
        > 500
    )


@pytest.mark.tier("all")
@pytest.mark.parametrize("first", ["send_with_everything", "send_and_wait"])
def test_every_line_of_a_send_while_another_thread_drains(root, first):
    """The pairs of calls in which races were found before, at all of their lines."""
    assert producer_calls.check(root, first, "drain", range) > 100


# Planted bugs

BATCHER, FUTURE = "embedlog.producer.batcher", "embedlog.producer.future"
UNLOCKED = {"with self.batcher.lock:": "if 1:"}
SEND = "embedlog.producer.producer:Producer.send"
AGAIN = "ProducerBatch(delivery, batch.partition, batch.encoded, batch.start)"
BUGS = {
    "a drain reads a record that is being added": (
        ("send_with_everything", "drain"),
        Change(
            SEND,
            {
                "            values.append(value)\n": "            pass\n",
                "row = len(values)\n": "row = len(values); values.append(value)\n",
            },
        ),
        Change(f"{BATCHER}:TopicQueue.drain_locked", UNLOCKED),
    ),
    "a future reads an outcome that is being set": (
        ("give_up", "wait_for_all"),
        Change(
            f"{FUTURE}:Delivery.seal",
            {
                "    self.result = result\n    self.sealed = True\n": (
                    "    self.sealed = True\n    self.result = result\n"
                )
            },
        ),
    ),
    "a drain takes the open delivery without the lock": (
        ("send_and_wait", "drain"),
        Change(f"{BATCHER}:TopicQueue.drain_locked", UNLOCKED),
    ),
    "a batcher hands out a batch twice": (
        ("send_and_wait", "drain"),
        Change(
            f"{BATCHER}:TopicQueue._hand_over",
            {"waiting.append(batch)": f"waiting.extend((batch, {AGAIN}))"},
        ),
    ),
}


@pytest.mark.tier("all")
@pytest.mark.parametrize("bug", list(BUGS))
def test_a_race_that_is_planted_is_found(bug):
    """The check finds races: each planted one is reported."""
    pair, *changes = BUGS[bug]

    def play() -> Any:
        for change in changes:
            change()
        with watched_locks(), scratch_directory() as directory:
            root = open_root(directory / "log")
            producer_calls.make_root(root)
            producer_calls.check(root, *pair, range)

    finding = forks.run(play, patience=120).finding()
    assert finding is not None
    assert re.search("while (send_.*|give_up) was stopped at", finding), finding
