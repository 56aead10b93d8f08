"""How fast is everything read as columns, every checksum verified?"""

import resource

import pytest
from conftest import anonymous_kib

RECORDS = 1_600_000
FLOOR = {"floor": "bench_pread_crc"}


def share(thousand, records, each=None):
    """How many of the floor's 64 MiB the columns of so many records are."""
    return records / 1000 * (each or thousand.size) / (64 << 20)


@pytest.mark.parametrize(
    ("columns", "bytes_each"),
    [(None, None), (("timestamp", "key"), 22_008)],
    ids=["all", "timestamp+key"],
)
def bench_scan(benchmark, note, filled, thousand, columns, bytes_each):
    """`PartitionReader.read` and `Batch.columns`: what all others are made of."""
    part = filled.partition("t", 0)

    def scan():
        reader, count = part.reader(0), 0
        while found := reader.read():
            count += sum(one.columns(columns).num_rows for one in found)
        return count

    note(records=RECORDS, bytes=part.size_bytes())
    note(**FLOOR, floors=share(thousand, RECORDS, bytes_each))
    assert benchmark.pedantic(scan, rounds=9, warmup_rounds=1) == RECORDS


def bench_hop(benchmark, note, filled):
    """From head to head, no column looked at: the cost of a batch without its records."""
    part = filled.partition("t", 0)

    def scan():
        reader, count = part.reader(0), 0
        while found := reader.read():
            count += sum(one.count for one in found)
        return count

    note(records=RECORDS)
    assert benchmark.pedantic(scan, rounds=9, warmup_rounds=1) == RECORDS


@pytest.mark.parametrize(
    "columns", [None, ["value"], ["timestamp", "key"]], ids=["all", "value", "timestamp+key"]
)
def bench_view_batches(benchmark, note, filled, thousand, columns):
    """`Topic.batches`: offset and partition beside the columns."""
    topic = filled.topic("t")
    each = {"value": 104_008, "key": 22_008}.get(columns[-1]) if columns else None
    note(records=RECORDS, **FLOOR, floors=share(thousand, RECORDS, each))
    found = benchmark.pedantic(
        lambda: sum(one.num_rows for one in topic.batches(columns)), rounds=7, warmup_rounds=1
    )
    assert found == RECORDS


def bench_to_arrow(benchmark, note, filled, thousand):
    """`Topic.to_arrow`: everything as one table."""
    note(records=RECORDS, **FLOOR, floors=share(thousand, RECORDS))
    topic = filled.topic("t")
    rounds = {"rounds": 7, "warmup_rounds": 1}
    assert benchmark.pedantic(lambda: topic.to_arrow().num_rows, **rounds) == RECORDS


def bench_records(benchmark, note, filled):
    """`for record in topic`: an object for each."""
    note(records=100_000)
    view = filled.topic("t")[:100_000]
    assert benchmark.pedantic(lambda: sum(1 for _ in view), rounds=5, warmup_rounds=1) == 100_000


def bench_memory_of_a_scan(benchmark, note, filled):
    """Private memory that a scan of 200 MB adds: that of a few batches (KiB in the facts)."""
    topic = filled.topic("t")
    sum(one.num_rows for one in topic[:10_000].batches())
    before, most = anonymous_kib(), [0]

    def scan():
        for one in topic.batches():
            most[0] = max(most[0], anonymous_kib() if one["offset"][0].as_py() % 50_000 == 0 else 0)

    benchmark.pedantic(scan, rounds=1)
    note(
        added_kib=most[0] - before, peak_rss_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    assert most[0] - before < 100 << 10
