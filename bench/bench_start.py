"""How long until a program, or a command, begins?

Processor time of whole processes: a bare Python is the floor.
"""

import resource
import subprocess
import sys

import pytest

import embedlog

STARTS = {
    "python": ["-c", "pass"],
    "import": ["-c", "import embedlog"],
    "open": ["-c", "import embedlog, os; embedlog.open(os.environ['EMBEDLOG_ROOT']).topics()"],
    "command": ["-m", "embedlog", "topics", "list"],
}


def spent(words, environment):
    """Return the processor seconds of a program; `os.times` would tell only hundredths."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("what", STARTS)
def bench_start(benchmark, note, tmp_path, monkeypatch, what):
    """Whole processes; the library itself may take 60 ms of `import` and `open`."""
    monkeypatch.setenv("EMBEDLOG_ROOT", str(tmp_path / "log"))
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
    seconds = []
    benchmark.pedantic(
        lambda: seconds.append(spent(STARTS[what], None)), rounds=10, warmup_rounds=1
    )
    note(cpu_ms=min(seconds) * 1000)
    assert min(seconds) > 0
