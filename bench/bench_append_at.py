"""What does it cost to copy batches to another log, at the same offsets?"""

import pytest

from embedlog import batch

BATCHES = 500
STARTS = {"dense": lambda base: base, "gaps": lambda base: base + base // 2}


def small(number):
    """Return ten records of 100 bytes."""
    return batch.encode_lists([b"v" * 100] * 10, [b"k%09d" % number] * 10, 1_700_000_000_000)


def fill(log, name, gaps):
    """Return a partition with `BATCHES` batches of ten records, perhaps with gaps before them."""
    log.create_topic(name, config={"segment.bytes": 1 << 30})
    part = log.partition(name, 0)
    step = 25 if gaps else 10
    part.append_at([(number * step, small(number)) for number in range(BATCHES)])
    return part


@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
def bench_read_encoded(benchmark, note, log, gaps):
    """Read batches as they are stored, checksums verified."""
    part = fill(log, "source", gaps)
    note(records=10 * BATCHES, batches=BATCHES)
    placed = benchmark(lambda: part.reader(0).read_encoded(64 << 20))
    assert len(placed) == BATCHES


@pytest.mark.parametrize("identical", [False, True], ids=["copy", "identical"])
@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
def bench_append_at(benchmark, note, log, gaps, identical):
    """Write all of them in one call."""
    placed = fill(log, "source", gaps).reader(0).read_encoded(64 << 20)
    log.create_topic("target", config={"segment.bytes": 1 << 30})
    part, rounds = log.partition("target", 0), iter(range(1 << 30))
    step = placed[-1].offset + 100
    note(records=10 * BATCHES, batches=BATCHES)

    def setup():
        base = next(rounds) * step
        return ([(base + offset, encoded) for offset, encoded in placed],), {"identical": identical}

    benchmark.pedantic(part.append_at, setup=setup, rounds=40, warmup_rounds=2)
    assert len(part.segments) <= 2


def bench_copy_of_thousands(benchmark, note, log, thousand):
    """Read and write batches of 1,000 records, 1 MiB at a time."""
    log.create_topic("source", config={"segment.bytes": 1 << 30})
    source = log.partition("source", 0)
    source.append([thousand] * 100)
    source.roll()
    names = (f"target{number}" for number in range(1000))
    note(records=100_000, batches=100)

    def setup():
        name = next(names)
        log.create_topic(name, config={"segment.bytes": 1 << 30})
        return (log.partition(name, 0),), {}

    def copy(target):
        reader = source.reader(0)
        while placed := reader.read_encoded(1 << 20):
            target.append_at(placed, identical=True)

    benchmark.pedantic(copy, setup=setup, rounds=20)
    assert log.partition("target3", 0).end_offset() == 100_000
