"""The examples run, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_flights_come_back_as_they_went_in(tmp_path):
    """The main job on real input: nothing lost, nothing twice, checksums equal.

    On the first sixth of it; `make demo` takes it all.
    """
    words = ["--path", str(tmp_path / "log"), "--first", "60000"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "flights.py"), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "60,000 flights" in done.stdout
    assert "agree, as records and as columns" in done.stdout
    assert "one was killed half way: lost 0," in done.stdout
    assert re.search(r"failover took [0-9.]+ ms", done.stdout)
    assert re.search(r"each of [34],\d+ aircraft: [\d.]+ MB became [01]\.\d MB", done.stdout)
    assert "lost 0   duplicated 0" in done.stdout
