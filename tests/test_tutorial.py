"""The tutorial runs from top to bottom, and prints what stands below each block."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.patience import patient

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(r"```(python|sh)\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
MARK = "=== the next block ==="


def script(blocks: list[tuple[str, str, str]]) -> str:
    """Return one program for all blocks, with a mark after what each of them prints."""
    parts = ["import subprocess as shell"]
    for kind, code, _ in blocks:
        if kind == "sh":
            options = "shell=True, check=True, text=True, stdout=shell.PIPE"
            code = f"print(shell.run({code!r}, {options}).stdout, end='')"
        parts += [code, f"print({MARK!r}, flush=True)"]
    return "\n".join(parts)


def test_the_tutorial_prints_what_it_says(tmp_path):
    """Every block in one session; commands of the shell run beside it."""
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    commands = tmp_path / "bin"
    commands.mkdir()
    command = commands / "embedlog"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m embedlog "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", script(blocks)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )

    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(MARK + "\n")
    for (_, code, expected), output in zip(blocks, printed, strict=False):
        if expected:
            assert output == expected, code
    assert len(printed) == len(blocks) + 1
