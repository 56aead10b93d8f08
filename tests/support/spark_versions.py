"""Reads and writes a log with the Spark that this Python imports, and prints what it saw.

    PYTHONPATH=.venv/spark-4.1 python tests/support/spark_versions.py DIRECTORY READER

`tests/spark/test_spark_versions.py` compares what it prints.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import pyspark  # noqa: E402 - its imports warn
from pyspark.errors import PySparkException  # noqa: E402

import embedlog  # noqa: E402
from embedlog.spark.spark_session import READER, is_loaded  # noqa: E402
from support.spark_session import begin  # noqa: E402

COUNT = 1000


def main(directory: Path, reader: str) -> dict[str, Any]:
    """Write a topic, read it in each way, copy it by a stream; return what was seen."""
    root = directory / "log"
    with embedlog.open(root, maintenance=False) as log:
        log.create_topic("t", partitions=2)
        with log.producer() as producer:
            for number in range(COUNT):
                value = None if number % 10 == 0 else b"%d" % number
                headers = [("h", b"%d" % number)] if number % 3 == 0 else None
                producer.send("t", key=b"%d" % (number % 7), value=value, headers=headers)
    spark = begin(directory / "spark")
    spark.conf.set(READER, reader)
    options = {"path": str(root), "subscribe": "t", "includeHeaders": "true"}
    frame = spark.read.format("embedlog").options(**options).load()
    rows = sorted(frame.collect(), key=lambda row: (row.partition, row.offset))
    first = frame.where("partition = 1 and offset < 5")
    stream = spark.readStream.format("embedlog").options(**options, startingOffsets="earliest")
    copy = stream.load().drop("partition").writeStream.format("embedlog")
    sink = {"path": str(root), "topic": "copy", "checkpointLocation": str(directory / "checkpoint")}
    query = copy.options(**sink).trigger(availableNow=True).start()
    query.awaitTermination()
    first.select("key", "value").write.format("embedlog").mode("append").options(
        path=str(root), topic="few"
    ).save()
    spark.sql(f"CREATE TABLE flights USING embedlog OPTIONS (path '{root}', subscribe 't')")
    spark.conf.set("spark.sql.catalog.log", "embedlog.spark.LogCatalog")
    spark.conf.set("spark.sql.catalog.log.path", str(root))
    spark.sql("CREATE TABLE log.default.made TBLPROPERTIES (partitions = 3)")
    spark.sql("INSERT INTO log.default.made SELECT key, value FROM flights LIMIT 9")
    spark.sql("CREATE TABLE log.default.selected AS SELECT * FROM log.default.t")
    table_copy = spark.readStream.option("startingOffsets", "earliest").table("log.default.few")
    query_of_table = table_copy.select("value").writeStream.option(
        "checkpointLocation", str(directory / "table checkpoint")
    )
    query_of_table.trigger(availableNow=True).toTable("log.default.streamed").awaitTermination()
    typed = _use_typed_topics(spark, root, directory)
    seen = {
        **typed,
        "version": pyspark.__version__,
        "jvm": is_loaded(spark),
        "plan": frame._jdf.queryExecution().executedPlan().toString(),
        "rows": [[row.partition, row.offset, _text(row.key), _text(row.value)] for row in rows],
        "headers": [row.headers and _text(row.headers[0].value) for row in rows],
        "count": frame.count(),
        "first": first.count(),
        "limited": len(frame.limit(7).collect()),
        "metrics": query.lastProgress["sources"][0]["metrics"],
        "copied": _count(root, "copy"),
        "written": _count(root, "few"),
        "tables": [row.tableName for row in spark.sql("SHOW TABLES IN log").collect()],
        "inserted": _count(root, "made"),
        "selected": spark.table("log.default.selected").count(),
        "streamed": _count(root, "streamed"),
        "errors": [_error(spark, root, columns) for columns in _WRONG],
    }
    spark.stop()
    return seen


def _use_typed_topics(spark: Any, root: Path, directory: Path) -> dict[str, Any]:
    """Create, fill, read, change and copy typed topics; return what was seen."""
    spark.sql(
        "CREATE TABLE log.default.typed (name STRING NOT NULL, n INT, price DECIMAL(9,2), "
        "at TIMESTAMP, day DATE, tags ARRAY<STRING>, place STRUCT<x: DOUBLE, y: MAP<STRING, INT>>) "
        "TBLPROPERTIES (key = 'name', timestamp = 'at', partitions = 2)"
    )
    rows = spark.range(COUNT).selectExpr(
        *("concat('n', id % 7) AS name", "int(id) AS n", "cast(id AS decimal(9, 2)) AS price"),
        *("timestamp_seconds(id) AS at", "date_from_unix_date(int(id)) AS day"),
        *("if(id % 3 = 0, NULL, array('a', NULL)) AS tags",),
        "named_struct('x', double(id) / 2, 'y', map('k', int(id))) AS place",
    )
    rows.writeTo("log.default.typed").append()
    spark.sql("ALTER TABLE log.default.typed ADD COLUMN gate STRING")
    spark.sql("ALTER TABLE log.default.typed ALTER COLUMN n TYPE BIGINT")
    options = {"path": str(root), "topic": "typed"}
    frame = spark.read.format("embedlog").options(**options).load()
    expected = rows.selectExpr("name", "bigint(n)", "price", "at", "day", "tags", "string(place)")
    actual = frame.selectExpr("name", "n", "price", "at", "day", "tags", "string(place)")
    spark.sql(
        "CREATE TABLE log.default.selection AS "
        "SELECT name, count(*) AS n FROM log.default.typed GROUP BY name"
    )
    with embedlog.open(root, maintenance=False) as log:
        log.create_topic("typed-copy", schema=log.topic("typed").schema_history()[-1].columns)
        with log.producer() as producer:
            producer.send("typed", None, key="n1")
    structs = {**options, "values": "struct", "includeTombstones": "true"}
    tombstones = spark.read.format("embedlog").options(**structs).load().where("_tombstone")
    stream = spark.readStream.format("embedlog").options(**options, startingOffsets="earliest")
    copy = stream.load().drop("partition").writeStream.format("embedlog")
    sink = {"topic": "typed-copy", "checkpointLocation": str(directory / "typed checkpoint")}
    query = copy.options(path=str(root), **sink).trigger(availableNow=True).start()
    query.awaitTermination()
    return {
        "typed_plan": frame._jdf.queryExecution().executedPlan().toString(),
        "typed_missing": expected.exceptAll(actual).count(),
        "typed_count": frame.count(),
        "typed_filtered": frame.where("n >= 990 and place.x < 498").count(),
        "typed_selected": sorted(
            map(list, spark.table("log.default.selection").selectExpr("name", "n").collect())
        ),
        "typed_tombstones": [row.value.name for row in tombstones.collect()],
        "typed_copied": _count(root, "typed-copy"),
    }


_WRONG = ("'v' key, 't' topic", "'v' value, cast(null as string) topic")
"""The driver refuses the columns of the first, and a task the row of the second."""


def _error(spark: Any, root: Path, columns: str) -> list[Any]:
    """Return what PySpark says of a wrong write: the class, the condition and the text."""
    writer = spark.sql(f"select {columns}").write.format("embedlog").mode("append")
    try:
        writer.option("path", str(root)).save()
    except PySparkException as error:
        return [type(error).__name__, error.getCondition(), str(error)]
    return []


def _text(value: Any) -> str | None:
    return None if value is None else bytes(value).decode()


def _count(root: Path, topic: str) -> int:
    with embedlog.open(root, mode="r") as log:
        return len(log.topic(topic))


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
