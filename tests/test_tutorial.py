"""The README, the tutorial and other pages run as they stand and print what they show."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support.children import run_python

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```(python|sh)\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
MARK = "=== the next block ==="


def script(blocks: list[tuple[str, str, str]]) -> str:
    """Return one program for all blocks, which prints a mark after each of them."""
    statements = ["import subprocess as shell"]
    for kind, code, _ in blocks:
        if kind == "sh":
            options = "shell=True, check=True, text=True, stdout=shell.PIPE"
            code = f"print(shell.run({code!r}, {options}).stdout, end='')"
        statements += [code, f"print({MARK!r}, flush=True)"]
    return "\n".join(statements)


PAGES = ["../README.md", "index.md", "tutorial.md", "values.md", "avro.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_prints_what_it_says(page, tmp_path):
    """The Python blocks run in one session, the shell blocks as its subprocesses."""
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    # tests/spark runs those of Spark.
    blocks = [block for block in blocks if "embedlog.spark" not in block[1]]
    commands = tmp_path / "bin"
    commands.mkdir()
    command = commands / "embedlog"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m embedlog "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    output = run_python("-c", script(blocks), cwd=tmp_path, env=environment, seconds=120)

    printed = output.split(MARK + "\n")
    for (_, code, expected), output in zip(blocks, printed, strict=False):
        if expected:
            assert output == expected, code
    assert len(printed) == len(blocks) + 1
