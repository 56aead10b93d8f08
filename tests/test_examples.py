"""The examples run, and print what they promise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import patient
from support.spark_session import quick_python

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.tier("all")
@pytest.mark.xdist_group("spark")
@pytest.mark.skipif(
    shutil.which("java") is None and "JAVA_HOME" not in os.environ, reason="there is no Java"
)
def test_the_flights_come_back_as_they_went_in(tmp_path):
    """The main job on real input: nothing lost, nothing twice, checksums equal.

    On the first sixth of it; `make demo` takes it all.
    """
    quick = {
        "PYSPARK_PYTHON": quick_python(tmp_path),
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
    }
    words = ["--path", str(tmp_path / "log"), "--first", "60000"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "flights.py"), *words],
        capture_output=True,
        text=True,
        timeout=patient(300),
        env={**os.environ, **quick},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "60,000 flights" in done.stdout
    assert "agree, as records and as columns" in done.stdout
    assert "one was killed half way: lost 0," in done.stdout
    assert re.search(r"failover took [0-9.]+ ms", done.stdout)
    assert re.search(r"each of [34],\d+ aircraft: [\d.]+ MB became [01]\.\d MB", done.stdout)
    assert "loaded 60,000 flights into Parquet, and then 0 more: files and log agree" in done.stdout
    assert "lost 0   duplicated 0" in done.stdout
    assert done.stdout.endswith("equal: by Spark from the Parquet, and by pandas from the CSV\n")


@pytest.mark.tier("test")
def test_the_flights_are_read_without_setuptools():
    """Their package imports pkg_resources, which Python 3.12 and newer do not come with."""
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); sys.modules['pkg_resources'] = None; "
        "import flights; print(len(flights.load(7).values), len(flights.latest_by_pandas(7)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )

    assert (done.stdout, done.returncode) == ("7 4\n", 0), done.stderr
