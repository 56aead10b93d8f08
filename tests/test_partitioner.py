"""Records get the partitions that Kafka would give them."""

from collections import Counter
from itertools import pairwise
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlog import partitioner
from embedlog.partitioner import (
    RoundRobinPartitioner,
    StickyPartitioner,
    murmur2,
    murmur2_many,
    partition_for_key,
    partitions_for_keys,
)

KAFKAS_VECTORS = [
    (b"21", -973932308),
    (b"foobar", -790332482),
    (b"a-little-bit-long-string", -985981536),
    (b"a-little-bit-longer-string", -1486304829),
    (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    (b"abc", 479470107),
]
COUNTS = (2, 3, 4, 6, 10, 12, 50)
EXPECTED_PARTITIONS = [
    (b"", 275646681, (1, 0, 1, 3, 1, 9, 31)),
    (b"a", -1563381124, (0, 1, 0, 4, 4, 4, 24)),
    (b"b", -1853091852, (0, 2, 0, 2, 6, 8, 46)),
    (b"c", -1877468854, (0, 1, 2, 4, 4, 10, 44)),
    (b"ab", 316155434, (0, 2, 2, 2, 4, 2, 34)),
    (b"abc", 479470107, (1, 0, 3, 3, 7, 3, 7)),
    (b"key", -1079937367, (1, 1, 1, 1, 1, 1, 31)),
    (b"key-1", 193331640, (0, 0, 0, 0, 0, 0, 40)),
    (b"key-2", 852269702, (0, 2, 2, 2, 2, 2, 2)),
    (b"0", 971027396, (0, 2, 0, 2, 6, 8, 46)),
    (b"1", -1993445489, (1, 0, 3, 3, 9, 3, 9)),
    (b"\0", 375494588, (0, 2, 0, 2, 8, 8, 38)),
]


def hashed(keys, width=np.int32):
    """Hash a column of keys with `murmur2_many`."""
    offsets = np.cumsum([0, *map(len, keys)]).astype(width)
    return murmur2_many(offsets, np.frombuffer(b"".join(keys), np.uint8)).tolist()


@pytest.mark.parametrize(("key", "expected"), KAFKAS_VECTORS)
def test_murmur2_is_kafkas(key, expected):
    """G2: Kafka's published vectors."""
    assert murmur2(key) == expected
    assert hashed([key]) == [expected]


@pytest.mark.parametrize(("key", "expected", "partitions"), EXPECTED_PARTITIONS)
def test_a_key_lies_where_kafka_puts_it(key, expected, partitions):
    """G1: the partition is (hash & 0x7fffffff) % partitions, also for an empty key."""
    assert murmur2(key) == expected
    assert tuple(partition_for_key(key, count) for count in COUNTS) == partitions
    for count, partition in zip(COUNTS, partitions, strict=True):
        assert partitions_for_keys(pa.array([key], pa.binary()), count).tolist() == [partition]


@given(st.lists(st.binary(max_size=40), max_size=60), st.sampled_from([np.int32, np.int64]))
def test_many_keys_are_hashed_as_one_by_one(keys, width):
    """G2: the vectorised hash equals `murmur2` for keys of any lengths."""
    assert hashed(keys, width) == [murmur2(key) for key in keys]


@given(st.integers(0, 20), st.integers(0, 60), st.randoms(use_true_random=False))
def test_keys_of_one_length_are_hashed_as_one_by_one(length, count, random):
    """G2: the fast path for keys of equal lengths equals `murmur2`."""
    keys = [random.randbytes(length) for _ in range(count)]

    assert hashed(keys) == [murmur2(key) for key in keys]


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=30), min_size=1, max_size=120), st.integers(1, 40))
def test_chunks_do_not_change_the_hash(keys, chunk):
    """G2: the result does not depend on the size of the chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioner, "_CHUNK_KEYS", chunk)
        patch.setattr(partitioner, "_CHUNK_BYTES", chunk * 3)

        assert hashed(keys) == [murmur2(key) for key in keys]


def test_one_huge_key_among_many_small_ones_is_hashed_right():
    """G2: the few long keys are hashed one by one, and each hash keeps its position."""
    random = Random(20)
    sizes = [100_000, *[3] * 50, 5_000, *range(40)]
    keys = [random.randbytes(size) for size in sizes]

    assert hashed(keys) == [murmur2(key) for key in keys]


@pytest.mark.parametrize("kind", ["binary", "large_binary", "string", "large_string"])
def test_a_column_of_keys_goes_where_its_keys_go(kind):
    """G1: a column of bytes or text, or a slice of one, is accepted; a null has no partition."""
    keys = ["out", None, "", "key-1", "a longer key", None, "x" * 33, "out"]
    column = pa.array(keys, getattr(pa, kind)()).slice(1, 6)

    partitions = partitions_for_keys(column, 12).tolist()

    assert partitions == [
        -1 if key is None else partition_for_key(key.encode(), 12) for key in keys[1:7]
    ]


def test_columns_without_bytes_have_partitions_too():
    """G1: columns without rows, with nulls only and with empty keys only are accepted."""
    assert partitions_for_keys(pa.array([], pa.binary()), 3).tolist() == []
    assert partitions_for_keys(pa.array([None, None], pa.binary()), 3).tolist() == [-1, -1]
    assert partitions_for_keys(pa.array([b"", b""], pa.binary()), 50).tolist() == [31, 31]


def test_a_column_of_numbers_is_no_column_of_keys():
    """A key is bytes; the caller decides how a number becomes bytes."""
    with pytest.raises(TypeError, match="int64"):
        partitions_for_keys(pa.array([1, 2]), 3)


def test_sticky_gives_each_partition_its_turn():
    """G3: every partition is chosen before one repeats, and none twice in a row."""
    sticky = StickyPartitioner(1, rng=Random(3))
    chosen = []
    for _ in range(50):
        chosen.append(sticky.choose(5))
        sticky.added(1, batch_closed=True)
    assert all(sorted(chosen[n : n + 5]) == [0, 1, 2, 3, 4] for n in range(0, 50, 5))
    assert all(a != b for a, b in pairwise(chosen))
    assert len({tuple(chosen[n : n + 5]) for n in range(0, 50, 5)}) > 3


def choices(count, **kwargs):
    sticky = StickyPartitioner(1, rng=Random(5))
    counts = Counter()
    for _ in range(count):
        counts[sticky.choose(3, **kwargs)] += 1
        sticky.added(1, batch_closed=True)
    return counts


def test_sticky_prefers_short_queues():
    """G3: queues of 0, 3 and 1 weigh 4, 1 and 3."""
    counts = choices(8000, queues=[0, 3, 1])

    for partition, weight in enumerate([4, 1, 3]):
        assert counts[partition] == pytest.approx(1000 * weight, rel=0.15)


def test_more_partitions_take_effect_at_once():
    """G5: each choice takes the number of partitions, and leaves one that no longer exists."""
    round_robin, sticky = RoundRobinPartitioner(), StickyPartitioner(100, rng=Random(3))

    assert {round_robin.choose(2) for _ in range(4)} == {0, 1}
    assert {round_robin.choose(3) for _ in range(3)} == {0, 1, 2}
    sticky.choose(1000)
    assert sticky.choose(1) == 0
