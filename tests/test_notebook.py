"""The notebook runs from top to bottom, and its outputs are those that its text describes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.children import run_python
from support.patience import patient
from support.spark_session import quick_python

NOTEBOOK = Path(__file__).parent.parent / "examples" / "flights.ipynb"
RUN = "from nbclient.cli import main; main()"


def run(directory: Path) -> list[dict[str, Any]]:
    """Run the notebook in a process of its own, and return its cells with their outputs.

    Without Java the cells for Spark are skipped.
    """
    notebook = Path(shutil.copy(NOTEBOOK, directory))
    arguments = ["--inplace", f"--timeout={patient(240):.0f}"]
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        arguments.append("--NbClientApp.skip_cells_with_tag=spark")
    # The first two make Spark start sooner; the others keep the user's files unused.
    settings = {
        "PYSPARK_PYTHON": quick_python(directory),
        "SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1 -Xmx1g",
        "JUPYTER_PLATFORM_DIRS": "1",
        "JUPYTER_RUNTIME_DIR": str(directory / "runtime"),
        "IPYTHONDIR": str(directory / "ipython"),
    }
    run_python("-c", RUN, *arguments, notebook, seconds=500, env={**os.environ, **settings})
    return [cell for cell in json.loads(notebook.read_text())["cells"] if "outputs" in cell]


def shown(cells: list[dict[str, Any]], *, having: str) -> str:
    """Return all output of the one cell whose source contains `having`, as text."""
    (cell,) = [cell for cell in cells if having in "".join(cell["source"])]
    texts = []
    for output in cell["outputs"]:
        forms = output.get("data", {output.get("name"): output.get("text")})
        # What one cell prints may come in several pieces.
        texts += [
            "".join(form).removesuffix("\n") for kind, form in forms.items() if kind != "stderr"
        ]
    return "\n".join(texts)


@pytest.mark.tier("all")
@pytest.mark.xdist_group("spark")
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    """The outputs are those that its text describes; one test starts the kernel and Spark once."""
    cells = run(tmp_path)

    assert shown(cells, having="topic[100:110]").count("<tr><td>") == 10
    assert "<Topic flights: 4 partitions, 4,000 records" in shown(cells, having="\ntopic")
    assert "<View of flights: 80 records, " in shown(cells, having="topic.between(")
    plots = [cell for cell in cells if ".plot" in "".join(cell["source"])]
    assert len(plots) == 2
    for plot in plots:
        assert any("image/png" in output.get("data", {}) for output in plot["outputs"])
    assert "{'ann': [0, 1], 'ben': [2, 3]}" in shown(cells, having="consumers = {")
    later = shown(cells, having='print("lag"')
    assert "lag 1000" in later
    assert "0 members, lag 0 in 4 partitions" in later
    # The progress bar of a short compaction leaves no line before the output.
    compacted = shown(cells, having="log.compact(").splitlines()
    assert compacted[0].startswith("4,993 records, ")
    assert compacted[1].startswith("1,876 aircraft, ")
    if shown(cells, having="embedlog.spark.session"):
        assert "|     B6|    920| 10.8|" in shown(cells, having="by_carrier.orderBy")
        assert "1 partition, 15 records" in shown(cells, having="carriers.write")
    assert shown(cells, having="log.verify()") == "[]"


def test_the_notebook_is_saved_without_outputs():
    """Outputs change with each run, and would hide the real changes in a diff."""
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
