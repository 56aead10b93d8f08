"""How fast is everything read as columns, with every checksum verified?"""

import resource

import pytest
from conftest import anonymous_kib

RECORDS = 1_600_000
FLOOR = {"floor": "bench_pread_crc"}


def floor_blocks(thousand, records, bytes_each=None):
    """Return how many blocks of 64 MiB the columns of some records fill."""
    return records / 1000 * (bytes_each or thousand.size) / (64 << 20)


@pytest.mark.parametrize(
    ("columns", "bytes_each"),
    [(None, None), (("timestamp", "key"), 22_008)],
    ids=["all", "timestamp+key"],
)
def bench_scan(benchmark, note, filled, thousand, columns, bytes_each):
    """`PartitionReader.read` and `Batch.columns`, on which all other reads are built."""
    part = filled.partition("t", 0)

    def scan():
        reader, count = part.reader(0), 0
        while batches := reader.read():
            count += sum(batch.columns(columns).num_rows for batch in batches)
        return count

    note(records=RECORDS, bytes=part.size_bytes())
    note(**FLOOR, floors=floor_blocks(thousand, RECORDS, bytes_each))
    assert benchmark.pedantic(scan, rounds=9, warmup_rounds=1) == RECORDS


def bench_hop(benchmark, note, filled):
    """From header to header without columns: the cost of a batch without its records."""
    part = filled.partition("t", 0)

    def scan():
        reader, count = part.reader(0), 0
        while batches := reader.read():
            count += sum(batch.count for batch in batches)
        return count

    note(records=RECORDS)
    assert benchmark.pedantic(scan, rounds=9, warmup_rounds=1) == RECORDS


@pytest.mark.parametrize(
    "columns", [None, ["value"], ["timestamp", "key"]], ids=["all", "value", "timestamp+key"]
)
def bench_view_batches(benchmark, note, filled, thousand, columns):
    """`Topic.batches`: the columns with offset and partition."""
    topic = filled.topic("t")
    bytes_each = {"value": 104_008, "key": 22_008}.get(columns[-1]) if columns else None
    note(records=RECORDS, **FLOOR, floors=floor_blocks(thousand, RECORDS, bytes_each))
    rows = benchmark.pedantic(
        lambda: sum(batch.num_rows for batch in topic.batches(columns)), rounds=7, warmup_rounds=1
    )
    assert rows == RECORDS


def bench_to_arrow(benchmark, note, filled, thousand):
    """`Topic.to_arrow`: all records as one table."""
    note(records=RECORDS, **FLOOR, floors=floor_blocks(thousand, RECORDS))
    topic = filled.topic("t")
    rounds = {"rounds": 7, "warmup_rounds": 1}
    assert benchmark.pedantic(lambda: topic.to_arrow().num_rows, **rounds) == RECORDS


def bench_records(benchmark, note, filled):
    """`for record in topic`: an object for each record."""
    note(records=100_000)
    view = filled.topic("t")[:100_000]
    assert benchmark.pedantic(lambda: sum(1 for _ in view), rounds=5, warmup_rounds=1) == 100_000


def bench_memory_of_a_scan(benchmark, note, filled):
    """The private memory that a scan of 200 MB adds, in KiB in the facts: a few batches."""
    topic = filled.topic("t")
    sum(batch.num_rows for batch in topic[:10_000].batches())
    before, peak = anonymous_kib(), [0]

    def scan():
        for batch in topic.batches():
            if batch["offset"][0].as_py() % 50_000 == 0:
                peak[0] = max(peak[0], anonymous_kib())

    benchmark.pedantic(scan, rounds=1)
    note(
        added_kib=peak[0] - before, peak_rss_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    assert peak[0] - before < 100 << 10
