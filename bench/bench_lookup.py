"""How long does it take to read the first batch at an offset or a time?"""

import random

import pytest

import embedlog

RECORDS = 1_600_000


@pytest.mark.parametrize("handle", ["cold", "warm"])
def bench_first_batch(benchmark, note, filled, handle):
    """Look up a random offset in the index, and read and verify its batch.

    Cold: the handle never saw the partition, so it reads the manifest, opens the
    segment and loads its index.
    """
    rng = random.Random(7)

    def cold():
        filled.root._partitions.clear()
        return filled.partition("t", 0)

    def look_up():
        offset = rng.randrange(RECORDS)
        part = filled.partition("t", 0) if handle == "warm" else cold()
        batch = part.reader(offset).read(1)[0]
        batch.columns()
        assert batch.base_offset <= offset < batch.next_offset

    note(records=RECORDS, floor="bench_crc[in cache]")
    benchmark.pedantic(look_up, rounds=500, warmup_rounds=5)


def bench_offset_for_timestamp(benchmark, note, log, thousand):
    """Timestamps to offsets, over 1,000 batches with increasing timestamps."""
    from embedlog import batch

    log.create_topic("t")
    part = log.partition("t", 0)
    values = [b"v" * 100] * 100
    for number in range(1000):
        times = range(number * 100, number * 100 + 100)
        part.append([batch.encode_lists(values, None, list(times))])
    rng = random.Random(7)
    note(records=100_000)

    def look_up():
        timestamp = rng.randrange(100_000)
        assert part.offset_for_timestamp(timestamp).offset == timestamp

    benchmark.pedantic(look_up, rounds=300, warmup_rounds=5)


def bench_open_and_read_one(benchmark, note, filled):
    """Open a log read-only, look up an offset, read a batch, close."""

    def open_and_read():
        with embedlog.open(filled.path, mode="r") as log:
            return log.partition("t", 0).reader(700_000).read(1)[0].columns().num_rows

    note(records=RECORDS)
    assert benchmark.pedantic(open_and_read, rounds=50, warmup_rounds=3) == 1000
