"""How many records per second does a mirror copy, beside a plain copy of the same bytes?"""

import os
import random
import shutil

import pytest

import embedlog
from embedlog import batch

RECORDS = {1000: 1_000_000, 1: 20_000}
"""By the number of records in a batch."""
VALUE_BYTES = 100
START = 1_700_000_000_000
CHUNK_BYTES = 8 << 20
ROUNDS = 3
SIZES = pytest.mark.parametrize("size", RECORDS, ids="batches={}".format)


@pytest.fixture
def source(tmp_path):
    """A function that creates a log, flushed, with a topic of such batches."""
    logs = []

    def make(size):
        log = embedlog.open(tmp_path / "source", maintenance=False)
        logs.append(log)
        log.create_topic("t", config={"retention.ms": -1})
        part, values = log.partition("t", 0), random.Random(1)
        encoded = batch.encode_lists(
            [values.randbytes(VALUE_BYTES) for _ in range(size)], [b"k%09d" % size] * size, START
        )
        for _ in range(0, RECORDS[size], size * 100):
            part.append([encoded] * 100)
        log.flush()
        return log

    yield make
    for log in logs:
        log.close()


def fresh(tmp_path, names=iter(range(1 << 30))):  # noqa: B008 - one sequence for all
    """Return the path of a target that does not exist yet."""
    return tmp_path / f"target-{next(names)}"


@SIZES
@pytest.mark.parametrize("merge", [False, True], ids=["copies", "merges"])
def bench_mirror(benchmark, note, source, tmp_path, size, merge):
    """Open a new target, copy everything, flush and close it."""
    log = source(size)
    part = log.partition("t", 0)
    note(records=RECORDS[size], bytes=part.size_bytes(), floor=f"bench_plain_copy[batches={size}]")

    def copy(target):
        run = embedlog.mirror(log, target, merge=merge, progress=False)
        assert run.status.records == RECORDS[size]
        shutil.rmtree(target)

    benchmark.pedantic(copy, setup=lambda: ((fresh(tmp_path),), {}), rounds=ROUNDS)


@SIZES
def bench_plain_copy(benchmark, note, source, tmp_path, size):
    """The floor: read the segment files, write them elsewhere, and flush that."""
    log = source(size)
    part = log.partition("t", 0)
    paths = [os.path.join(log.path, part.path_of(info)) for info in part.segments.values()]
    note(records=RECORDS[size], bytes=part.size_bytes())

    def copy(target):
        os.mkdir(target)
        for number, path in enumerate(paths):
            with open(path, "rb") as source, open(target / str(number), "wb") as copied:
                while chunk := source.read(CHUNK_BYTES):
                    copied.write(chunk)
                copied.flush()
                os.fsync(copied.fileno())
        shutil.rmtree(target)

    benchmark.pedantic(copy, setup=lambda: ((fresh(tmp_path),), {}), rounds=ROUNDS)
