"""The README and the pages of the docs run as they stand, and print what they show."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.children import run_python

import embedlog

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
BLOCK = re.compile(r"```(python|sh)\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
MARK = "=== the next block ==="
FORKS = "ignore:This process:DeprecationWarning"
"""Newer Pythons warn about a fork in a process with threads."""

WITH_SHELL = [
    *("../README.md", "index.md", "tutorial.md", "values.md", "avro.md", "guide.md", "mirrors.md"),
    "typed-topics.md typed-topics-doors.md",
]
"""Pages of which the shell blocks are run, too; see `that_ends`."""

PYTHON_ONLY = [
    *("asyncio.md", "audit.md", "background-work.md", "replicas.md", "troubleshooting.md"),
    "kafka-clients.md",
]
"""Pages whose shell blocks are alternatives; tests/test_docs.py looks at their commands.

Two pages in one text are one session.
"""


def blocks_of(page: str) -> list[tuple[str, str, str]]:
    """Return the kind, the code and the output of each block that needs no Spark."""
    kinds = ("python", "sh") if page in WITH_SHELL else ("python",)
    return [
        block
        for name in page.split()
        for block in BLOCK.findall((DOCS / name).read_text(encoding="utf-8"))
        # tests/spark runs those of Spark.
        if block[0] in kinds and not re.search(r"embedlog\.spark|kafka://", block[1])
    ]


def that_ends(code: str) -> str:
    """Return a shell block without what waits for ever, and with roots below the directory."""
    for endless in (" --follow", " --watch 5", " -f", " | jq .value"):
        code = code.replace(endless, "")
    return "set -e\n" + re.sub(r"(?<![\w.])/([\w-]+/log)", r"machines/\1", code)


def script(blocks: list[tuple[str, str, str]]) -> str:
    """Return one program for all blocks, which prints a mark after each of them."""
    statements = ["import subprocess as shell"]
    for kind, code, _ in blocks:
        if kind == "sh":
            options = "shell=True, executable='bash', check=True, text=True, stdout=shell.PIPE"
            code = f"print(shell.run({that_ends(code)!r}, {options}).stdout, end='')"
        statements += [code, f"print({MARK!r}, flush=True)"]
    return "\n".join(statements)


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """An environment in which the command `embedlog` is that of the tests, and some logs."""
    commands = tmp_path / "bin"
    commands.mkdir()
    command = commands / "embedlog"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m embedlog "$@"\n')
    command.chmod(0o755)
    for site in ("data", "site-a", "site-b"):
        with embedlog.open(tmp_path / "machines" / site / "log", maintenance=False) as log:
            log.create_topic("orders")
            log.create_topic("clicks")
            with log.producer() as producer:
                producer.send_batch("orders", [site.encode()] * 3)
            options = {"group_id": "billing", "auto_offset_reset": "earliest"}
            with log.consumer("orders", **options) as consumer:
                consumer.poll(1.0)
    time, texts = pa.array([0], pa.timestamp("us")), ["UA"]
    january = {"tailnum": texts, "time_hour": time, "carrier": texts, "dep_delay": [61]}
    pq.write_table(pa.table(january), tmp_path / "january.parquet")
    path = f"{commands}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "EMBEDLOG_ROOT": "data/log"}


def printed_by(
    blocks: list[tuple[str, str, str]], directory: Path, environment: Mapping[str, str]
) -> list[str]:
    """Run blocks in one session, and return what each of them printed."""
    warnings = ("-W", "error", "-W", FORKS)
    arguments = (*warnings, "-c", script(blocks))
    output = run_python(*arguments, cwd=directory, env=environment, seconds=120)
    *printed, rest = output.split(MARK + "\n")
    assert len(printed) == len(blocks)
    assert rest == ""
    return printed


LONG = (
    *("audit.md", "avro.md", "background-work.md", "guide.md", "mirrors.md"),
    "kafka-clients.md",  # test_confluent_kafka.py runs it, too
    "typed-topics.md typed-topics-doors.md",
)
"""Pages whose commands take seconds; the small tiers leave them out."""


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.tier("all")] if page in LONG else [])
        for page in [*WITH_SHELL, *PYTHON_ONLY]
    ],
)
def test_the_page_prints_what_it_says(page, tmp_path, environment):
    """The Python blocks run in one session, the shell blocks as its subprocesses."""
    blocks = blocks_of(page)

    printed = printed_by(blocks, tmp_path, environment)

    for (_, code, expected), output in zip(blocks, printed, strict=True):
        if expected:
            assert output == expected, code


@pytest.mark.tier("all")
def test_the_readme_runs_a_second_time(tmp_path, environment):
    """The topic exists then, and groups do not handle committed records again."""
    blocks = blocks_of("../README.md")
    first = printed_by(blocks, tmp_path, environment)

    second = printed_by(blocks, tmp_path, environment)

    session, *_ = second
    assert [line.split()[:3] for line in session.splitlines()] == [
        ["0", "2", "table-1"],
        ["0", "3", "table-3"],
        ["1", "1", "table-2"],
    ]
    assert first[0] != session
    assert second[1:-1] == first[1:-1]
    assert second[-1].split()[-3:] == ["0", "new", "records"]
