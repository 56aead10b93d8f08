"""The recipes of docs/splits.md, each with the library that it is for: `make engines`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import indent

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
used, trained, interrupt_at = [], 0, 3

def train(tensors):
    global trained
    if trained == interrupt_at:
        raise KeyboardInterrupt
    trained += 1
    used.extend(tensors["distance"].tolist())

try:
    {block}
    raise AssertionError("it was not interrupted")
except KeyboardInterrupt:
    assert not log.housekeeping.leases()
    epoch, left = torch.load("rows.pt")
    rows = Rows(log.topic("flights").in_ranges(left), ["distance", "dep_delay"])
    assert epoch == 0 and 0 < len(used) < {rows} - 1000
    for _, _, tensors in DataLoader(rows, batch_size=None, num_workers=2):
        used += tensors["distance"].tolist()
assert sorted(used) == [*range({rows})], len(used)

used, interrupt_at = [], None
{block}
assert [*map(sorted, (used[:{rows}], used[{rows}:]))] == [[*range({rows})]] * 2, len(used)
assert torch.load("rows.pt")[0] == 1
"""
IN_PLACE_OF_TORCH = {
    "torch/__init__.py": """
import pickle
import numpy
tensor = numpy.array

def save(what, path):
    with open(path, "wb") as file:
        pickle.dump(what, file)

def load(path):
    with open(path, "rb") as file:
        return pickle.load(file)
""",
    "torch/utils/__init__.py": "",
    "torch/utils/data.py": """
import pickle
from types import SimpleNamespace

class IterableDataset:
    pass

def get_worker_info():
    return worker

def DataLoader(rows, batch_size, num_workers):
    global worker
    copy = pickle.dumps(rows)
    for number in range(num_workers):
        worker = SimpleNamespace(id=number, num_workers=num_workers)
        yield from pickle.loads(copy)
""",
}
"""Just what the recipe uses, with the workers one after the other, for where PyTorch is missing."""
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

dask.config.set({"scheduler": "processes", "multiprocessing.context": "fork", "num_workers": 2})
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
log.producer().send("flights", {"carrier": "AA", "distance": {rows}}).result()
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
    log.producer().send("flights", {"carrier": "AA", "distance": number}).result()
    copy(log, "flights", "lake/flights")
"""


def block(heading):
    """Return the code below a heading of the page."""
    section = PAGE.split(f"\n## {heading}", 1)[1]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


def command(heading, program, log, engine="engines"):
    """Return the command that runs a recipe in a program, and its environment."""
    home = ROOT / ".venv" / engine  # or a path
    if not home.exists():
        pytest.skip(f"{home.name} is not installed: run `make engines`")
    code = BEFORE + re.sub(
        r"^( *)\{block\}",
        lambda found: indent(block(heading), found[1]),
        program.replace("{rows}", str(ROWS)),
        flags=re.MULTILINE,
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
def test_the_recipe_for_pytorch_reads_each_row_once_in_each_epoch(path):
    """Also after an interruption: its own code, with just enough in place of PyTorch."""
    home = path.with_name("engine")
    for name, code in IN_PLACE_OF_TORCH.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(code)
    run = command("PyTorch", TORCH, path, str(home))

    done = subprocess.run(**run, capture_output=True, text=True, timeout=patient(60))

    assert done.returncode == 0, done.stderr[-3000:]


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
