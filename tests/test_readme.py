"""The test in the README passes, and the code on the pages can be typed as it is."""

from __future__ import annotations

import codeop
import re
from pathlib import Path

import pytest
from support.children import run_python

pytest_plugins = ["pytester"]
REPOSITORY = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.tier("test")
def test_the_test_in_the_readme_passes(pytester):
    """With the plugin's fixtures, as in the test suite of a user."""
    pytest.importorskip("kafka")
    (code,) = (
        block
        for block in BLOCK.findall((REPOSITORY / "README.md").read_text())
        if "def test_" in block
    )
    pytester.makepyfile(code)

    pytester.runpytest_subprocess("-q").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(f"docs/{name}.md" for name in ("index", "guide", "tutorial", "spark", "monitoring")),
        "docs/values.md",
    ],
)
def test_what_is_shown_can_be_typed_line_by_line(page):
    """In `python -i` an empty line must end each block, or the next line is a syntax error."""
    for block in BLOCK.findall((REPOSITORY / page).read_text()):
        typed: list[str] = []
        for line in [*block.splitlines(), ""]:
            typed.append(line)
            # None: the interpreter waits for more lines.
            if codeop.compile_command("\n".join(typed)) is not None:
                typed.clear()
        assert typed == []


@pytest.mark.tier("all")
def test_the_page_on_monitoring_runs_from_top_to_bottom(tmp_path):
    """And the numbers in its comments are true."""
    blocks = BLOCK.findall((REPOSITORY / "docs" / "monitoring.md").read_text())
    code = re.sub(r"^(\S.*?)  +# (\d+)$", r"assert (\1) == \2", "\n".join(blocks), flags=re.M)

    assert code.count("assert ") == 3
    run_python("-W", "error", "-c", code, cwd=tmp_path)
