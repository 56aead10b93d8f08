"""How long from an offset or a time to the first batch?"""

import random

import pytest

import embedlog

RECORDS = 1_600_000


@pytest.mark.parametrize("handle", ["cold", "warm"])
def bench_first_batch(benchmark, note, filled, handle):
    """Index lookup and first batch, verified, at random offsets.

    Cold: a handle that never saw the partition, so that the manifest is read,
    the segment is opened and its index is fetched.
    """
    chance = random.Random(7)

    def cold():
        filled.root._partitions.clear()
        return filled.partition("t", 0)

    def once():
        offset = chance.randrange(RECORDS)
        part = filled.partition("t", 0) if handle == "warm" else cold()
        one = part.reader(offset).read(1)[0]
        one.columns()
        assert one.base_offset <= offset < one.next_offset

    note(records=RECORDS, floor="bench_crc[in cache]")
    benchmark.pedantic(once, rounds=500, warmup_rounds=5)


def bench_offset_for_timestamp(benchmark, note, log, thousand):
    """A time to an offset, over 1,000 batches of rising time."""
    from embedlog import batch

    log.create_topic("t")
    part = log.partition("t", 0)
    values = [b"v" * 100] * 100
    for number in range(1000):
        times = range(number * 100, number * 100 + 100)
        part.append([batch.encode_lists(values, None, list(times))])
    chance = random.Random(7)
    note(records=100_000)

    def once():
        moment = chance.randrange(100_000)
        assert part.offset_for_timestamp(moment).offset == moment

    benchmark.pedantic(once, rounds=300, warmup_rounds=5)


def bench_open_and_read_one(benchmark, note, filled):
    """A second handle from nothing: open to read, look up, first batch, close."""

    def once():
        with embedlog.open(filled.path, mode="r") as log:
            return log.partition("t", 0).reader(700_000).read(1)[0].columns().num_rows

    note(records=RECORDS)
    assert benchmark.pedantic(once, rounds=50, warmup_rounds=3) == 1000
