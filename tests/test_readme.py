"""The code in the README and the guide runs as a user would paste it."""

from __future__ import annotations

import codeop
import re
from pathlib import Path

import pytest
from support.children import run_python

REPOSITORY = Path(__file__).parent.parent
FORKS = "ignore:This process:DeprecationWarning"
"""Newer Pythons warn about a fork in a process with threads; `run_group` forks by default."""
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def run(code: str, directory: Path) -> str:
    """Run a session in its own directory and return what it printed."""
    return run_python("-W", "error", "-W", FORKS, "-c", code, cwd=directory)


def test_the_session_in_the_readme_runs_as_it_stands(tmp_path):
    """It prints an offset, the record, and a table with one row."""
    session, _, _ = BLOCK.findall((REPOSITORY / "README.md").read_text())

    printed = run(session, tmp_path).splitlines()

    assert printed[0] == "0"
    assert printed[1].endswith("""0 b'N14228' b'{"dest": "IAH"}'""")
    assert printed[2] == "pyarrow.Table"


def run_session(directory: Path) -> str:
    """Run the session of the README, whose consumer waits for a second, with one that does not."""
    session, _, _ = BLOCK.findall((REPOSITORY / "README.md").read_text())
    assert "consumer_timeout_ms=1000" in session
    return run(session.replace("consumer_timeout_ms=1000", "consumer_timeout_ms=10"), directory)


@pytest.mark.tier("test")
def test_the_session_in_the_readme_runs_a_second_time(tmp_path):
    """The topic exists already, and the record gets the second offset."""
    run_session(tmp_path)

    assert run_session(tmp_path).splitlines()[0] == "1"


@pytest.mark.tier("test")
def test_the_group_in_the_readme_handles_each_record_once(tmp_path):
    """A second run of the group does not handle committed records again."""
    _, shared, _ = BLOCK.findall((REPOSITORY / "README.md").read_text())
    run_session(tmp_path)

    first, second = (run(shared, tmp_path).splitlines() for _ in range(2))

    handled = ["""handled b'{"dest": "IAH"}'""", """handled b'{"dest": "MIA"}'"""]
    assert sorted(first) == [*handled, "left: 0"]
    assert second == [handled[1], "left: 0"]


@pytest.mark.tier("test")
def test_the_values_in_the_readme_come_back(tmp_path):
    """A field of the last order, and a frame with a column for each field."""
    *_, values = BLOCK.findall((REPOSITORY / "README.md").read_text())

    item, heads, row = run(values, tmp_path).splitlines()

    assert item == "coffee"
    assert heads.split() == ["offset", "partition", "timestamp", "key", "item", "price"]
    assert row.split()[-3:] == ["table-7", "coffee", "2.5"]


@pytest.mark.parametrize(
    "page",
    [
        *("README.md", "docs/index.md", "docs/tutorial.md", "docs/spark.md", "docs/monitoring.md"),
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


@pytest.mark.tier("test")
def test_the_guide_runs_from_top_to_bottom(tmp_path):
    """Its blocks can be pasted into one session, in an empty directory, as they are."""
    blocks = BLOCK.findall((REPOSITORY / "docs" / "index.md").read_text())

    run("\n".join([*blocks, "log.close()"]), tmp_path)


@pytest.mark.tier("test")
def test_the_page_about_typed_topics_runs_from_top_to_bottom(tmp_path):
    """In one session, as it is."""
    blocks = BLOCK.findall((REPOSITORY / "docs" / "typed-topics.md").read_text())

    run("\n".join([*blocks, "log.close()"]), tmp_path)


@pytest.mark.tier("test")
def test_the_page_on_monitoring_runs_from_top_to_bottom(tmp_path):
    """And the numbers in its comments are true."""
    blocks = BLOCK.findall((REPOSITORY / "docs" / "monitoring.md").read_text())
    code = re.sub(r"^(\S.*?)  +# (\d+)$", r"assert (\1) == \2", "\n".join(blocks), flags=re.M)

    assert code.count("assert ") == 3
    run(code, tmp_path)
