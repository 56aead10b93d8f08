"""What does it cost to append an encoded batch, until it is published?"""

import pytest

from embedlog import batch

VALUES, KEYS = [b"v" * 100] * 1000, [b"k%09d" % number for number in range(1000)]


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("records", [1, 1000], ids="records={}".format)
def bench_append(benchmark, note, log, single, thousand, records, durability):
    """One batch per append."""
    log.create_topic("t", config={"segment.bytes": 1 << 30})
    part, batches = log.partition("t", 0), [single if records == 1 else thousand]
    part.append(batches, durability=durability)
    floor = {
        ("os", 1): "bench_append_by_hand",
        ("os", 1000): f"bench_pwrite[bytes={126_488}]",
        ("fsync", 1): "bench_fdatasync_in_place[zeros]",
        ("fsync", 1000): f"bench_fdatasync[bytes={126_488}]",
    }[durability, records]
    note(records=records, bytes=batches[0].size, floor=floor)
    if durability == "os":
        benchmark(part.append, batches)
    else:
        benchmark.pedantic(part.append, (batches,), {"durability": "fsync"}, rounds=1000)
    assert part.end_offset() % records == 0
    assert part.end_offset() > records


def bench_append_many(benchmark, note, log, thousand):
    """16 batches per append, as a producer under load does."""
    log.create_topic("t", config={"segment.bytes": 1 << 30})
    part = log.partition("t", 0)
    note(records=16_000, bytes=16 * thousand.size)
    note(floor=f"bench_pwrite[bytes={126_488}]", floors=16)
    benchmark(part.append, [thousand] * 16)
    assert part.end_offset() % 16_000 == 0


def bench_append_lists(benchmark, note, log):
    """Lists of bytes are encoded, then appended."""
    log.create_topic("t", config={"segment.bytes": 1 << 30})
    part = log.partition("t", 0)
    note(records=1000, bytes=126_488, floor=f"bench_pwrite[bytes={126_488}]")
    benchmark(lambda: part.append([batch.encode_lists(VALUES, KEYS, 1_700_000_000_000)]))
    assert part.end_offset() > 0


@pytest.mark.parametrize("records", [1, 1000], ids="records={}".format)
def bench_encode(benchmark, note, records):
    """The work before the lock: lists to bytes, with checksums."""
    note(records=records)
    encoded = benchmark(batch.encode_lists, VALUES[:records], KEYS[:records], 1_700_000_000_000)
    assert encoded.count == records
