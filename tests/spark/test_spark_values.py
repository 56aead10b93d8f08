"""Topics with serializers in Spark, as the page about Spark shows it."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "spark.md"
SECTION = re.compile(r"## Topics with serializers\n.*?```python\n(.*?)```", re.DOTALL)


def test_json_values_are_read_with_from_json(spark, log):
    """The block of the page runs, and selects the fields."""
    log.create_topic("orders", key="str", value="json")
    with log.producer() as producer:
        producer.send("orders", {"item": "tea", "price": 3.5}, key="ann")
    (code,) = SECTION.findall(PAGE.read_text(encoding="utf-8"))
    names = {"spark": spark}

    exec(code.replace("/data/log", log.path), names)

    orders = names["orders"].select(names["col"]("key").cast("string"), names["value"])
    (row,) = orders.select("key", "order.*").collect()
    assert tuple(row) == ("ann", "tea", 3.5)
