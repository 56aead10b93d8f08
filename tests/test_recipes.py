"""The recipes of docs/splits.md, each with the library that it is for: `make engines`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from support.patience import patient

import embedlog

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "splits.md").read_text(encoding="utf-8")
ROWS = 6_000
FLIGHTS = pa.schema(
    [("carrier", pa.string()), ("distance", pa.int64()), ("dep_delay", pa.float64())]
)
BEFORE = """
import sys
import embedlog

log = embedlog.open(sys.argv[1], maintenance=False)
"""
TORCH = """
used, trained = [], []

def train(tensors):
    if len(trained) == 3:
        raise KeyboardInterrupt
    trained.append(tensors)
    used.extend(tensors["distance"].tolist())

try:
    {block}
except KeyboardInterrupt:
    rows = Rows(log.topic("flights").in_ranges(torch.load("rows.pt")), ["distance", "dep_delay"])
    assert 0 < len(used) < {rows} - 1000
    for _, _, tensors in DataLoader(rows, batch_size=None, num_workers=2):
        used += tensors["distance"].tolist()
assert sorted(used) == [*range({rows})], len(used)
"""
RAY = """
import tempfile
import ray
import ray.data

with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
    ray.init(
        num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=directory
    )
    try:
        {block}
        assert flights.count() == {rows}
        assert late == log.topic("flights").to_arrow(where="dep_delay > 60").num_rows
        assert flights.schema().names == ["carrier", "dep_delay"]
    finally:
        ray.shutdown()
"""
DASK = """
import dask

dask.config.set({{"scheduler": "processes", "multiprocessing.context": "fork", "num_workers": 2}})
{block}
expected = log.topic("flights").to_pandas().groupby("carrier").dep_delay.mean()
assert (delays.sort_index() - expected.sort_index()).abs().max() < 1e-9
assert len(flights) == {rows} and flights.npartitions > 10
"""
DELTA = """
{block}
copy(log, "flights", "lake/flights")
table = DeltaTable("lake/flights")
assert table.version() == 1, "nothing new, so nothing was committed"
log.topic("flights")
stale = DeltaTable("lake/flights")
log.producer().send("flights", {{"carrier": "AA", "distance": {rows}}}).result()
copy(log, "flights", "lake/flights")
DeltaTable = lambda uri: stale
DeltaTable.create = lambda *_, **__: None
try:
    copy(log, "flights", "lake/flights")
except Exception as error:
    assert type(error).__name__ == "CommitFailedError", repr(error)
else:
    raise AssertionError("two runs copied the same records")
"""
KILLED = """
import itertools
{block}
for number in itertools.count({rows}):
    print(number, flush=True)
    log.producer().send("flights", {{"carrier": "AA", "distance": number}}).result()
    copy(log, "flights", "lake/flights")
"""


def block(heading):
    """Return the code below a heading of the page."""
    section = PAGE.split(f"\n## {heading}", 1)[1]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


def command(heading, program, log, engine="engines"):
    """Return the command that runs a recipe in a program, and its environment."""
    home = ROOT / ".venv" / engine
    if not home.exists():
        pytest.skip(f"{home.name} is not installed: run `make engines`")
    indent = re.search(r"^( *)\{block\}", program, re.MULTILINE)[1]
    code = BEFORE + program.format(
        block=block(heading).replace("\n", "\n" + indent).strip(), rows=ROWS
    )
    script = log.with_name("recipe.py")
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{home}", "RAY_USAGE_STATS_ENABLED": "0"}
    return {"args": [sys.executable, script, log], "env": environment, "cwd": log.parent}


@pytest.fixture
def path(tmp_path):
    """A log with a topic of flights, of which `distance` numbers the rows."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log, log.producer() as producer:
        log.create_topic("flights", 3, {"segment.bytes": 20_000}, schema=FLIGHTS)
        for start in range(0, ROWS, 100):
            numbers = range(start, start + 100)
            delays = [None if number % 9 == 0 else number % 100 - 10 for number in numbers]
            columns = [["AA", "UA"] * 50, numbers, delays]
            table = pa.table(columns, schema=FLIGHTS)
            producer.append_table("flights", table, partition=start // 100 % 3).result()
    return tmp_path / "log"


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("heading", "program", "engine"),
    [
        ("PyTorch", TORCH, "torch"),
        ("Ray", RAY, "engines"),
        ("Dask", DASK, "engines"),
        ("A topic in a Delta table", DELTA, "engines"),
    ],
    ids=["torch", "ray", "dask", "deltalake"],
)
def test_a_recipe_runs_as_it_stands(path, heading, program, engine):
    """With each row once: after an interruption, in a task or partition each, and in a commit."""
    run = command(heading, program, path, engine)

    done = subprocess.run(**run, capture_output=True, text=True, timeout=patient(200))

    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.tier("all")
def test_a_copy_to_delta_that_is_killed_has_each_record_once(path):
    """At any time; the next run copies what is missing."""
    for copies, delay in ((0, 0.0), (1, 0.02), (2, 0.1)):
        run = command("A topic in a Delta table", KILLED, path)
        process = subprocess.Popen(**run, stdout=subprocess.PIPE, text=True)
        assert all(process.stdout.readline() for _ in range(copies + 1))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    check = "{block}\nimport collections\nrows = DeltaTable('lake/flights').to_pyarrow_table()\n"
    check += "rows = rows.sort_by([('partition', 'ascending'), ('offset', 'ascending')])\n"
    check += "expected = log.topic('flights').to_arrow()\nassert len(expected) > {rows}\n"
    check += "assert rows.select(['partition', 'offset', 'distance']).equals(\n"
    check += (
        "    expected.select(['partition', 'offset', 'distance'])), (len(rows), len(expected))\n"
    )
    run = command("A topic in a Delta table", check, path)
    done = subprocess.run(**run, capture_output=True, text=True, timeout=patient(200))
    assert done.returncode == 0, done.stderr[-3000:]
