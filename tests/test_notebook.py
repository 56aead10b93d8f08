"""The notebook runs from top to bottom, and notebooks show typed topics as tables."""

from __future__ import annotations

import html as html_module
import json
import os
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from support.children import run_python
from support.patience import patient
from support.spark_session import quick_python

import embedlog
from embedlog.producer import Producer

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
    compacted = shown(cells, having="log.housekeeping.compact(").splitlines()
    assert compacted[0].startswith("4,993 records, ")
    assert compacted[1].startswith("1,876 aircraft, ")
    if shown(cells, having="embedlog.spark.session"):
        assert "|     B6|    920| 10.8|" in shown(cells, having="by_carrier.orderBy")
        assert "1 partition, 15 records" in shown(cells, having="carriers.write")
    assert shown(cells, having="log.housekeeping.verify()") == "[]"


def test_the_notebook_is_saved_without_outputs():
    """Outputs change with each run, and would hide the real changes in a diff."""
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


# What a notebook shows of a typed topic


def tables_of(html: str) -> list[list[list[str]]]:
    """Return the rows of each table of a display, the heads first, after parsing it strictly."""
    # The style sheet is no XML only for its attribute without a value.
    root = ElementTree.fromstring(f"<all>{html.replace('<style scoped>', '<style>')}</all>")
    return [
        [[cell.text or "" for cell in row] for row in table.iter("tr")]
        for table in root.iter("table")
    ]


def titles_of(html: str) -> list[str]:
    return [html_module.unescape(title) for title in re.findall("<b>(.*?)</b>", html)]


@pytest.fixture
def typed_topic(tmp_path):
    """A topic of two partitions with a key, a timestamp, a default, and text that is no HTML."""
    columns = pa.schema(
        [
            pa.field("carrier", pa.string(), nullable=False),
            pa.field("number", pa.int32()),
            pa.field("at", pa.timestamp("ms", "UTC"), nullable=False),
        ]
    )
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t", 2, schema=columns, key="carrier", timestamp="at")
        log.alter_topic(
            "t", schema=columns.append(pa.field("<gate>", pa.string())), defaults={"<gate>": "A&1"}
        )
        yield log.topic("t")


def test_a_typed_topic_shows_its_schema_and_its_last_records(typed_topic):
    """Two tables; of the records the last ones of each partition, and a tombstone as its key."""
    producer = Producer(typed_topic._root)
    at = datetime(2013, 1, 1, tzinfo=UTC)
    for number in range(40):
        row = {"carrier": f"<c{number}>", "number": number, "at": at, "<gate>": "x" * 100}
        producer.send("t", row, partition=number % 2)
    producer.send("t", None, key="<c1>", partition=1)
    producer.close()

    shown = typed_topic._repr_html_()
    schema, records = tables_of(shown)
    assert titles_of(shown)[0].startswith("Topic t: 2 partitions, 41 records, ")
    assert titles_of(shown)[0].endswith(", version 2 of the schema")
    assert schema == [
        ["column", "type", "null", ""],
        ["carrier", "string", "no", "key"],
        ["number", "int32", "yes", ""],
        ["at", "timestamp[ms, tz=UTC]", "no", "timestamp"],
        ["<gate>", "string", "yes", "default A&1"],
    ]
    assert titles_of(shown)[1] == "Last records"
    assert records[0] == ["partition", "offset", "timestamp", *typed_topic._schema().columns.names]
    assert [row[4] for row in records[1:]] == [
        "30",
        "32",
        "34",
        "36",
        "38",
        "33",
        "35",
        "37",
        "39",
        "-",
    ]
    assert records[-1][3] == "<c1>"
    assert max(len(cell) for row in records for cell in row) <= 30
    assert "\n" not in repr(typed_topic)


def test_a_typed_topic_without_records_shows_its_schema(typed_topic):
    """And one that was deleted says so."""
    assert len(tables_of(typed_topic._repr_html_())) == 1
    typed_topic._root.delete_topic("t")
    assert titles_of(typed_topic._repr_html_()) == ["TypedTopic t: There is no such topic"]


def test_of_many_columns_only_the_first_are_shown(tmp_path):
    """The schema has all of them."""
    names = [f"c{number}" for number in range(15)]
    with embedlog.open(tmp_path / "log") as log:
        topic = log.create_topic("t", schema=pa.schema([(name, pa.int64()) for name in names]))
        log.producer().send("t", {"c0": 1}).result()
        schema, records = tables_of(topic._repr_html_())

        assert [row[0] for row in schema[1:]] == names
        assert records[0][3:] == [*names[:12], "…"]
        assert records[1][3:] == ["1", *["-"] * 11, "…"]
        assert tables_of(topic[:1]._repr_html_()) == [records]
