"""The recipe of the cookbook that needs a broker."""

from __future__ import annotations

import re
from pathlib import Path

from support.children import run_python

PAGE = Path(__file__).parents[2] / "docs" / "cookbook.md"
RECIPE = re.compile(
    r"## Edge buffer in front of Kafka\n.*?```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL
)


def test_the_edge_buffer_brings_its_readings_to_kafka(kafka, tmp_path):
    """Under a topic of this test; it prints what the page says, and Kafka has the readings."""
    ((code, expected),) = RECIPE.findall(PAGE.read_text(encoding="utf-8"))
    topic = kafka.name("readings")
    code = code.replace('"readings"', f'"{topic}"').replace("kafka://localhost:9092", kafka.address)

    assert run_python("-W", "error", "-c", code, cwd=tmp_path, seconds=120) == expected
    assert sorted(row[4] for row in kafka.rows(topic)) == [
        b'{"celsius":20}',
        b'{"celsius":21}',
        b'{"celsius":22}',
    ]
