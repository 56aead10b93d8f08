"""Copies topics between `format("embedlog")` and Spark's own connector for Kafka, on a server.

    PYTHONPATH=.venv/spark-4.2 python tests/support/spark_kafka.py DIRECTORY LOG ADDRESS JARS

Each topic is a copy of the one before: ``source`` is written on the directory, ``batch`` and
``stream`` on the wire, and ``back`` on the directory.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

from support.spark_session import begin  # noqa: E402

COUNT = 1000
COLUMNS = ("key", "value", "headers")


def main(directory: Path, log: str, address: str, jars: str) -> None:
    """Write and copy the topics."""
    spark = begin(directory, jars=jars)
    wire = {"kafka.bootstrap.servers": address, "includeHeaders": "true"}
    on_disk = {"path": log, "includeHeaders": "true"}
    rows = spark.range(COUNT).selectExpr(
        "if(id % 5 = 0, NULL, cast(string(id % 7) AS binary)) AS key",
        "if(id % 10 = 1, NULL, cast(string(id) AS binary)) AS value",
        "if(id % 3 = 0, array(struct('h' AS key, cast(string(id) AS binary) AS value)), NULL) "
        "AS headers",
    )
    rows.write.format("embedlog").mode("append").options(path=log, topic="source").save()
    source = spark.read.format("kafka").options(**wire, subscribe="source").load()
    source.select(*COLUMNS).write.format("kafka").options(**wire, topic="batch").save()
    stream = spark.readStream.format("kafka").options(
        **wire, subscribe="batch", startingOffsets="earliest", maxOffsetsPerTrigger="300"
    )
    query = stream.load().select(*COLUMNS).writeStream.format("kafka")
    checkpoint = {"topic": "stream", "checkpointLocation": str(directory / "checkpoint")}
    query.options(**wire, **checkpoint).trigger(availableNow=True).start().awaitTermination()
    copied = spark.read.format("embedlog").options(**on_disk, subscribe="stream").load()
    copied.select(*COLUMNS).write.format("embedlog").mode("append").options(
        path=log, topic="back"
    ).save()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
