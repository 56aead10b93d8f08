"""Does a log stay as fast when it grows?

At each size of one log, the append rate, a cold lookup and our private memory
are measured.  50 million records (6.3 GB) take a minute and a half:
`EMBEDLOG_BENCH_RECORDS=50000000 make bench ARGS=bench/bench_scale.py`.
"""

import os
import random
import shutil
import time

import pytest
from conftest import anonymous_kib

import embedlog

MOST = int(os.environ.get("EMBEDLOG_BENCH_RECORDS", "1000000"))
SIZES = [size for size in (100_000, 1_000_000, 10_000_000, 50_000_000) if size <= MOST]


@pytest.fixture(scope="module")
def growing(tmp_path_factory):
    path = tmp_path_factory.mktemp("scale")
    if shutil.disk_usage(path).free < MOST * 400:
        pytest.skip("too little space")
    with embedlog.open(path / "log") as log:
        log.create_topic("t", config={"segment.bytes": 256 << 20})
        yield log
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def bare(tmp_path_factory, thousand):
    """CPU time of a bare `pwrite` by stored size, in µs: the kernel's share of the growth.

    It writes files of the same sizes, up to the same total.
    """
    folder, data, done, cpu_us = tmp_path_factory.mktemp("bare"), bytes(thousand.size), 0, {}
    files_of = (256 << 20) // len(data)
    for size in SIZES:
        times = []
        while done < size // 1000:
            fd = os.open(folder / str(done // files_of), os.O_CREAT | os.O_RDWR)
            begin = time.process_time()
            for number in range(done, done + 100):
                os.pwrite(fd, data, number % files_of * len(data))
            times.append(time.process_time() - begin)
            os.close(fd)
            done += 100
        last = sorted(times[-max(len(times) // 10, 1) :])
        cpu_us[size] = round(last[len(last) // 2] / 100 * 1e6, 1)
    shutil.rmtree(folder)
    return cpu_us


@pytest.mark.parametrize("stored", SIZES, ids="records={}".format)
def bench_growth(benchmark, note, bare, growing, thousand, stored):
    """A cold lookup and its first batch at each size; the other figures are facts."""
    part, batches = growing.partition("t", 0), [thousand] * 10
    rates = []
    while part.end_offset() < stored:
        # CPU time: the speed of the disk does not matter here.
        began, wall = time.process_time(), time.perf_counter()
        for _ in range(10):
            part.append(batches)
        rates.append((time.process_time() - began, time.perf_counter() - wall))
    last = rates[-max(len(rates) // 10, 1) :]
    rng = random.Random(stored)

    def lookup():
        offset = rng.randrange(stored)
        growing.root._partitions.clear()
        batch = growing.partition("t", 0).reader(offset).read(1)[0]
        assert batch.base_offset <= offset < batch.next_offset

    benchmark.pedantic(lookup, rounds=200, warmup_rounds=3)
    note(
        stored=stored,
        bare_cpu_us=bare[stored],
        append_cpu_us=round(sorted(cpu for cpu, _ in last)[len(last) // 2] / 100 * 1e6, 1),
        append_wall_us=round(sorted(wall for _, wall in last)[len(last) // 2] / 100 * 1e6, 1),
        anonymous_mib=anonymous_kib() >> 10,
        index_kib=sum(
            os.path.getsize(f"{growing.path}/{name}/data.mdb") for name in ("state", "live")
        )
        >> 10,
        segments=len(growing.partition("t", 0).segments),
    )
    assert part.end_offset() == stored
