"""What does a condition cost? Records that are sent and waited for, one by one.

The topic has a million keys, which are indexed, except for the records that the benchmarks send.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from bench_keys import KEYS, key, open_embedlog

import embedlog
from embedlog.api import Log

SENDS = 300
CONDITIONS = ["none", "get, then none", "end", "new key", "key"]


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Log]:
    """A log with a compacted topic of a million keys."""
    path = tmp_path_factory.mktemp("million")
    with open_embedlog(path), embedlog.open(path) as log:
        yield log


@pytest.mark.parametrize("condition", CONDITIONS)
def bench_conditional_send(benchmark, note, million, condition):
    """`send().result()` of a key at random: a condition on a key adds about a `get`."""
    topic, first = million.topic("t"), CONDITIONS.index(condition)
    # Keys of its own, at the offsets of their numbers, which compaction has kept.
    numbers = list(range(first, KEYS, len(CONDITIONS)))
    random.Random(7).shuffle(numbers)
    end = million.partition("t", 0).end_offset()

    def send_all() -> None:
        nonlocal end
        for _ in range(SENDS):
            number = numbers.pop()
            name, expected = key(number), {}
            if condition == "end":
                expected = {"expected_offset": end}
            elif condition == "new key":
                name, expected = b"new%013d" % number, {"expected_key_offset": None}
            elif condition == "key":
                expected = {"expected_key_offset": number}
            elif condition != "none":
                assert topic.get(name) is not None
            end = producer.send("t", bytes(100), name, **expected).result().offset + 1

    with million.producer() as producer:
        note(records=SENDS)
        benchmark.pedantic(send_all, rounds=20, warmup_rounds=2)
