"""Executors in JVMs of their own, as on a cluster whose hosts share the log's directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyspark
import pytest
from support.children import run_python

import embedlog

APPLICATION = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.spark_session import quick_python
import embedlog.spark

directory = Path(sys.argv[2])
log = {"path": str(directory / "log")}
conf = {
    "spark.master": "local[1]",  # the argument `master` overrides it
    "spark.ui.enabled": "false",
    "spark.log.level": "OFF",
    "spark.executor.memory": "512m",
    "spark.pyspark.python": quick_python(directory),
    "spark.sql.warehouse.dir": str(directory / "warehouse"),
}
spark = embedlog.spark.session("tests", "local-cluster[2,1,1024]", conf)

def with_jvm(batches):
    import pyarrow as pa
    from embedlog.files import process_id
    for batch in batches:
        jvm = pa.repeat(process_id.ancestor("java").pid, batch.num_rows)
        yield pa.RecordBatch.from_arrays([*batch.columns, jvm], ["key", "value", "jvm"])

written = spark.range(2000).selectExpr("cast(id as string) value", "cast(id % 50 as string) key")
written.repartition(4).write.format("embedlog").options(**log, topic="t").mode("append").save()

read = spark.read.format("embedlog").options(**log, subscribe="t", minPartitions=4)
rows = read.load().select("key", "value").mapInArrow(
    with_jvm, "key binary, value binary, jvm bigint"
).collect()

stream = spark.readStream.format("embedlog").options(**log, subscribe="t")
stream = stream.options(startingOffsets="earliest", maxOffsetsPerTrigger=1000).load()
copy = stream.select("key", "value").writeStream.format("embedlog").options(**log, topic="copy")
copy = copy.option("checkpointLocation", str(directory / "checkpoint"))
copy.trigger(availableNow=True).start().awaitTermination()

print(json.dumps({
    "values": sorted(int(row.value) for row in rows),
    "jvms": sorted({row.jvm for row in rows}),
    "driver": spark.sparkContext._gateway.proc.pid,
}))
spark.stop()
"""


@pytest.mark.tier("nightly")
def test_executors_in_other_jvms_read_and_write_a_log(tmp_path: Path) -> None:
    """A batch is written, read by both executors, and copied by a stream, each record once."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        log.create_topic("t", partitions=4)
        log.create_topic("copy", partitions=3)
        paths = {
            "PYTHONPATH": str(Path(embedlog.__file__).parents[1]),
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_WORKER_DIR": str(tmp_path / "work"),
        }
        arguments = ("-c", APPLICATION, Path(__file__).parents[1], tmp_path)
        environment = {**os.environ, **paths}
        result = json.loads(run_python(*arguments, env=environment, cwd=tmp_path, seconds=300))

        assert result["values"] == list(range(2000))
        assert len(result["jvms"]) == 2
        assert result["driver"] not in result["jvms"]
        assert sorted(int(record.value) for record in log.topic("copy")) == list(range(2000))
        assert log.verify() == []
