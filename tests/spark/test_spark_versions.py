"""Every version of Spark that the jar is said to work with, with both readers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import spark_versions

from embedlog.version import TESTED_SPARK_VERSIONS

ROOT = Path(__file__).parents[2]


def _home(version: str) -> Path:
    """Where `make test-all` installs a version of Spark beside the newest."""
    return ROOT / ".venv" / f"spark-{version}"


@pytest.mark.tier("all")
@pytest.mark.parametrize("reader", ["jvm", "python"])
@pytest.mark.parametrize("version", TESTED_SPARK_VERSIONS[:-1])
def test_a_version_of_spark_reads_and_writes(tmp_path, version, reader):
    """Batches, filters, limits, headers, streams, both sinks, tables, a catalog, typed topics."""
    if not _home(version).exists():
        pytest.skip(f"Spark {version} is not installed: run `make spark-versions`")
    support = ROOT / "tests"
    environment = {**os.environ, "PYTHONPATH": f"{_home(version)}:{support}:{ROOT}"}
    command = [sys.executable, spark_versions.__file__, str(tmp_path), reader]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-3000:]
    seen = json.loads(process.stdout.strip().splitlines()[-1])
    assert seen["version"].startswith(version)
    assert seen["jvm"]
    assert ("read by the JVM" in seen["plan"]) == (reader == "jvm")
    count = spark_versions.COUNT
    assert seen["count"] == count == len(seen["rows"]) == seen["copied"]
    partitions, offsets, keys, values = zip(*seen["rows"], strict=True)
    for partition in set(partitions):
        own = [offset for p, offset in zip(partitions, offsets, strict=True) if p == partition]
        assert own == list(range(len(own)))
    assert set(keys) == {str(number) for number in range(7)}
    numbers = [value for value in values if value is not None]
    assert sorted(numbers, key=int) == [str(n) for n in range(count) if n % 10]
    assert len([header for header in seen["headers"] if header]) == -(-count // 3)
    assert seen["first"] == seen["written"] == 5
    assert seen["limited"] == 7
    names = ["copy", "few", "made", "selected", "selection", "streamed", "t", "typed", "typed-copy"]
    assert seen["tables"] == names
    assert seen["inserted"] == 9
    assert seen["selected"] == count
    assert seen["streamed"] == 5
    assert bool(seen["metrics"]) == (reader == "jvm")
    assert ("read by the JVM" in seen["typed_plan"]) == (reader == "jvm")
    assert seen["typed_missing"] == 0
    assert seen["typed_count"] == seen["typed_copied"] == count
    assert seen["typed_filtered"] == 6
    sizes = [[f"n{number}", len(range(number, count, 7))] for number in range(7)]
    assert seen["typed_selected"] == sizes
    assert seen["typed_tombstones"] == ["n1"]
    refused, failed = seen["errors"]
    assert refused[0] == "AnalysisException"
    assert "Required attribute 'value' not found" in refused[2]
    assert "Null topic present in the data" in failed[2]
    if reader == "jvm":
        assert refused[1] == "EMBEDLOG_INVALID_CONFIG"
        assert refused[2].startswith("Required attribute")
        assert failed[:2] == ["SparkRuntimeException", "EMBEDLOG_INVALID_RECORD"]
        assert failed[2].startswith("Null topic")
