"""The examples run, and print the expected results."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from support.children import run_python
from support.spark_session import quick_python

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.tier("all")
@pytest.mark.xdist_group("spark")
@pytest.mark.skipif(
    shutil.which("java") is None and "JAVA_HOME" not in os.environ, reason="there is no Java"
)
def test_the_flights_come_back_as_they_went_in(tmp_path):
    """The main job on real input: no flight is lost or repeated, and the checksums are equal.

    This runs on the first sixth of the input; `make demo` runs on all of it.
    """
    quick = {
        "PYSPARK_PYTHON": quick_python(tmp_path),
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
    }
    arguments = ["--path", str(tmp_path / "log"), "--first", "60000"]
    output = run_python(
        EXAMPLES / "flights.py", *arguments, seconds=300, env={**os.environ, **quick}
    )

    assert "60,000 flights" in output
    assert "agree, as records and as columns" in output
    assert "one was killed half way: lost 0," in output
    assert re.search(
        r"the mean delay by carrier: \d+ ms from JSON, [\d.]+ ms from two columns", output
    )
    assert re.search(r"failover took [0-9.]+ ms", output)
    assert re.search(r"each of [34],\d+ aircraft: [\d.]+ MB became [01]\.\d MB", output)
    assert "loaded 60,000 flights into Parquet, and then 0 more: files and log agree" in output
    assert "lost 0   duplicated 0" in output
    assert output.endswith("equal: by Spark from the Parquet, and by pandas from the CSV\n")


@pytest.mark.tier("all")
def test_without_java_the_flights_do_all_but_spark(tmp_path):
    """It says so at the start, and succeeds."""
    nowhere = {"PATH": str(tmp_path), "JAVA_HOME": str(tmp_path)}
    arguments = ["--path", str(tmp_path / "log"), "--first", "60000"]
    output = run_python(
        EXAMPLES / "flights.py", *arguments, seconds=300, env={**os.environ, **nowhere}
    )

    assert output.startswith("Spark needs Java, and JAVA_HOME=")
    assert output.splitlines()[1] == "The steps of Spark are left out."
    assert output.rstrip().endswith("lost 0   duplicated 0   (verify: [])")


@pytest.mark.tier("all")
def test_the_flights_are_read_without_setuptools():
    """Their package imports pkg_resources, which Python 3.12 and newer do not include."""
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); sys.modules['pkg_resources'] = None; "
        "import flights; print(len(flights.load(7).values), len(flights.latest_by_pandas(7)))"
    )

    assert run_python("-c", code) == "7 4\n"


@pytest.mark.tier("all")
def test_an_account_with_eight_writers_ends_at_the_right_balance(tmp_path):
    """A41: no decision is made by a balance that is out of date."""
    output = run_python(
        *(EXAMPLES / "account.py", "--path", tmp_path / "log", "--writers", 8, "--events", 25),
        seconds=120,
    )

    found = re.search(r"balance of the events is (\d+), and by the processes it is (\d+)", output)
    assert found[1] == found[2]
    assert re.search(r"8 processes appended \d{2,3} events", output)
    assert int(re.search(r"too late (\d+) times", output)[1]) > 0
