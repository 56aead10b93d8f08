"""How fast is a partition compacted, and in how much memory?"""

import resource
import shutil
import tempfile

import numpy as np
import pytest
from conftest import anonymous_kib

import embedlog
from embedlog import batch
from embedlog.compaction import CleanOptions, clean
from embedlog.config import MaintenanceConfig

RECORDS = 1_000_000
START = 1_700_000_000_000
FLOOR = {"floor": "bench_pread_crc"}


@pytest.fixture
def dirty(tmp_path):
    """A function that creates logs of 100-byte values and 10-byte keys, dirty and sealed."""
    logs = []

    def make(unique, records=RECORDS, batch_size=1000):
        directory = tempfile.mkdtemp(dir=tmp_path)
        log = embedlog.open(directory)
        logs.append((log, directory))
        log.create_topic("t", config={"cleanup.policy": "compact", "segment.bytes": 64 << 20})
        part = log.partition("t", 0)
        rng = np.random.default_rng(1)
        keys = max(int(records * unique), 1)
        numbers = rng.permutation(records) if unique == 1 else rng.integers(0, keys, records)
        for first in range(0, records, batch_size):
            batch_numbers = numbers[first : first + batch_size].tolist()
            batch_keys = [b"k%09d" % number for number in batch_numbers]
            part.append([batch.encode_lists([b"v" * 100] * len(batch_keys), batch_keys, START)])
        part.roll()
        part.flush()
        return part

    yield make
    for log, directory in logs:
        assert log.housekeeping.verify() == []
        log.close()
        shutil.rmtree(directory)


def measure_compaction(benchmark, parts):
    """Compact each partition once."""
    remaining = iter(parts)
    setup = lambda: ((next(remaining),), {})  # noqa: E731
    return benchmark.pedantic(lambda part: clean(part, START), setup=setup, rounds=len(parts))


@pytest.mark.parametrize("unique", [0.01, 0.5, 1], ids="unique={:.0%}".format)
def bench_compact(benchmark, note, dirty, unique):
    """One thread, batches of 1,000 records, with the flush and the swap of segments."""
    size = dirty(unique).size_bytes()
    note(records=RECORDS, bytes=size, **FLOOR, floors=size / (64 << 20))
    done = measure_compaction(benchmark, [dirty(unique) for _ in range(3)])
    assert done.records_read == RECORDS
    assert (done.records_kept == RECORDS) == (unique == 1)


@pytest.mark.parametrize("unique", [0.01, 1], ids="unique={:.0%}".format)
def bench_compact_a_trickle(benchmark, note, dirty, unique):
    """Batches of one record, as a producer writes them that waits for each."""
    note(records=50_000)
    done = measure_compaction(benchmark, [dirty(unique, 50_000, 1) for _ in range(3)])
    assert done.records_read == 50_000


@pytest.mark.parametrize("records", [1_000_000, 10_000_000], ids="keys={:,}".format)
def bench_memory_of_a_compaction(benchmark, note, dirty, records):
    """The private memory that it adds with unique keys: a dedupe buffer and a few batches."""
    part = dirty(1, records)
    before, peak = anonymous_kib(), [0]

    def progress(done, total):
        peak[0] = max(peak[0], anonymous_kib())

    settings = MaintenanceConfig(log_cleaner_dedupe_buffer_size=64 << 20)
    done = benchmark.pedantic(
        lambda: clean(part, START, CleanOptions(settings=settings, progress=progress)), rounds=1
    )
    note(
        records=records,
        passes=done.passes,
        added_kib=peak[0] - before,
        peak_rss_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
    assert peak[0] - before < (64 + 100) << 10


def bench_get(benchmark, note, dirty):
    """The latest value of one key without a key index: all keys of the newest segment are read."""
    part = dirty(0.01)
    log = embedlog.open(part.context.root)
    log.alter_topic("t", {"key.index.enable": False})
    topic = log.topic("t")
    note(records=1)
    assert benchmark.pedantic(lambda: topic.get(b"k%09d" % 7), rounds=5) == b"v" * 100


def bench_latest(benchmark, note, dirty):
    """`Topic.to_arrow(latest=True)` of a log that was never compacted."""
    part = dirty(0.01)
    topic = embedlog.open(part.context.root).topic("t")
    note(records=RECORDS)
    rows = benchmark.pedantic(lambda: topic.to_arrow(latest=True).num_rows, rounds=3)
    assert rows == RECORDS // 100
