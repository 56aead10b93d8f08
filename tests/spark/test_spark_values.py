"""Topics with serializers in Spark, as the page about Spark shows it."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
PAGE = REPOSITORY / "docs" / "spark.md"
README = re.compile(r"```python\n(import embedlog\.spark.*?)```\n\n```text\n(.*?)```", re.DOTALL)
SECTION = re.compile(r"## Topics with serializers\n.*?```python\n(.*?)```", re.DOTALL)


def test_the_block_in_the_readme_prints_what_it_says(spark, log, capfd):
    """With the orders of the README, in the session that runs."""
    log.create_topic("orders", partitions=2, key="str", value="json")
    with log.producer() as producer:
        for table, item in enumerate(["coffee", "tea", "cake"], start=1):
            order = {"item": item, "price": table * 1.5}
            producer.send("orders", order, key=f"table-{table}")
    ((code, expected),) = README.findall((REPOSITORY / "README.md").read_text(encoding="utf-8"))

    exec(code.replace("data/log", log.path), {})

    assert capfd.readouterr().out.endswith(expected)


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
