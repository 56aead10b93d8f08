"""The public names, and the cost of their import."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

from support.children import run_python

import embedlog
from embedlog.record import OffsetAndMetadata, TopicPartition


def test_every_public_name_can_be_imported():
    """Every name in `__all__` is an attribute, and `dir` lists it."""
    for name in embedlog.__all__:
        assert getattr(embedlog, name) is not None
        assert name in dir(embedlog)


def test_an_unknown_name_is_an_attribute_error():
    """As for every module."""
    assert not hasattr(embedlog, "broker")


def test_importing_embedlog_loads_nothing_heavy():
    """pyarrow, numpy and LMDB are loaded by the first log that is opened."""
    heavy = {"pyarrow", "numpy", "lmdb", "pyspark", "pandas"}
    code = f"import sys, embedlog; print(sorted({heavy} & set(sys.modules)))"

    assert run_python("-c", code) == "[]\n"


LIGHT = [
    ["--help"],
    ["--version"],
    ["completion", "bash"],
    ["__complete", "consume", ""],
    ["__complete", "groups", "describe", ""],
    ["topics", "create", "u", "-p", "2"],
    ["topics", "list"],
    ["topics", "describe"],
    ["groups", "list"],
    ["groups", "list", "--state"],
    ["groups", "describe"],
    ["groups", "lag"],
    ["offsets"],
    ["du", "--segments"],
    ["metrics"],
]
LOADED = """
    import json, sys
    from embedlog.cli import main
    for words in json.loads(sys.argv[1]):
        assert main(words) == 0
        print(sorted({"pyarrow", "numpy", "pandas"} & set(sys.modules)), words, file=sys.stderr)
"""


def test_commands_that_read_no_records_load_neither_pyarrow_nor_numpy(tmp_path, monkeypatch):
    """They start in a third of the time, which prompts and shells that complete words notice."""
    monkeypatch.setenv("EMBEDLOG_ROOT", str(tmp_path / "log"))
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        with log.producer() as producer:
            producer.send("t", b"x")
        with log.consumer(group_id="g", enable_auto_commit=False) as consumer:
            # At the end: for a group that lags, the time of a record is read.
            consumer.commit({TopicPartition("t", 0): OffsetAndMetadata(1)})

    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOADED), json.dumps(LIGHT)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert process.stderr.splitlines() == [f"[] {words}" for words in LIGHT]
