"""How long does `embedlog import` take for the same records as CSV and as JSON lines?"""

import csv
import json

import pytest

import embedlog
from embedlog.cli import main

RECORDS = 100_000


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the directory of both files; the values are JSON as text."""
    folder = tmp_path_factory.mktemp("import")
    names = "key", "value", "timestamp"
    with open(folder / "x.csv", "w", newline="") as rows, open(folder / "x.jsonl", "w") as lines:
        writer = csv.writer(rows)
        writer.writerow(names)
        for number in range(RECORDS):
            value = json.dumps({"carrier": "UA", "flight": number, "dep_delay": number / 7})
            record = f"N{number % 5000}", value, 1_700_000_000_000 + number
            writer.writerow(record)
            lines.write(json.dumps(dict(zip(names, record, strict=True))) + "\n")
    return folder


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
def bench_import(benchmark, note, files, name):
    """One topic for each round."""
    log, numbers = files / "log", iter(range(1000))
    note(records=RECORDS)

    def load():
        return main(["--root", str(log), "import", f"{name}-{next(numbers)}", str(files / name)])

    assert benchmark.pedantic(load, rounds=5, warmup_rounds=1) == 0
    with embedlog.open(log) as opened:
        assert len(opened.topic(f"{name}-0")) == RECORDS
