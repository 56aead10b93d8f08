"""How long does a round of retention take if nothing is due, and if everything is?"""

import shutil
import time

import pytest

import embedlog
from embedlog import batch

SEGMENTS = 10_000
CONFIG = {"segment.bytes": 1, "retention.ms": -1, "file.delete.delay.ms": 0}


@pytest.fixture(scope="module")
def many_segments(tmp_path_factory):
    """A partition of 10,000 segments with one old record each."""
    path = tmp_path_factory.mktemp("retention") / "log"
    with embedlog.open(path, maintenance=False) as log:
        encoded = batch.encode_lists([b"v"], None, 1_000)
        log.create_topic("t", config=CONFIG | {"segment.bytes": encoded.size})
        log.partition("t", 0).append([encoded] * SEGMENTS)
    return path


def bench_idle_round(benchmark, note, many_segments):
    """By time alone, with nothing due: only the oldest segment is read."""
    with embedlog.open(many_segments, maintenance=False) as log:
        log.alter_topic("t", {"retention.ms": 1 << 60})
        note(segments=SEGMENTS)
        done = benchmark.pedantic(log.housekeeping.run, rounds=20, warmup_rounds=2)
        assert done["retention"] == []
        log.alter_topic("t", {"retention.ms": -1})


def bench_delete_all(benchmark, note, many_segments, tmp_path):
    """10,000 segments are deleted at once and their files unlinked."""
    logs = []

    def copy_log():
        while logs:
            logs.pop().close()
        shutil.rmtree(tmp_path / "log", ignore_errors=True)
        shutil.copytree(many_segments, tmp_path / "log")
        logs.append(embedlog.open(tmp_path / "log", maintenance=False))
        logs[0].alter_topic("t", {"retention.ms": 1})
        assert logs[0].partition("t", 0).start_offset() == 0

    cpu_seconds = []

    def run_retention():
        begin = time.process_time()
        logs[0].housekeeping.run()
        cpu_seconds.append(time.process_time() - begin)

    benchmark.pedantic(run_retention, setup=copy_log, rounds=3)
    note(segments=SEGMENTS, cpu_us_per_segment=round(min(cpu_seconds) * 1e6 / SEGMENTS, 1))
    print(f"{min(cpu_seconds):.3f} s of CPU")
    assert logs[0].partition("t", 0).start_offset() == SEGMENTS
    logs.pop().close()
