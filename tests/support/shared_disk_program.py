"""The driver of `spark/test_spark_shared_disk.py`, on the host of the log.

Called with the address of the master, the log, a directory for itself, and the language of readers
and sinks; prints what was counted as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from embedlog.errors import EmbedlogError
from embedlog.files import Files
from embedlog.spark.errors import to_embedlog_error
from embedlog.spark.spark_session import READER
from support.remote_disk import delete_while_read
from support.roots import segment_files
from support.spark_session import begin

ROWS = 3_000


class Driver:
    """A session whose executors see the log over the mount, and what it did."""

    def __init__(self, master: str, path: str, directory: Path, language: str) -> None:
        self.path, self.directory, self.language = path, directory, language
        self.spark = begin(directory, master=master)
        self.spark.conf.set(READER, language)
        self.rows = self.spark.range(ROWS).repartition(4)

    def where(self) -> list[str]:
        """Return the file systems on which the executors see the log."""
        path = self.path

        def look(batches: Iterator[Any]) -> Iterator[Any]:
            import pyarrow as pa

            for _ in batches:
                files = Files(path, writable=False, unsafe_filesystem=True)
                yield pa.RecordBatch.from_pydict({"name": [files.filesystem()]})

        rows = self.rows.mapInArrow(look, "name string").distinct().collect()
        return [row.name for row in rows]

    def read(self, topic: str, **options: str) -> Any:
        """Return what a batch query reads."""
        reader = self.spark.read.format("embedlog").options(path=self.path, subscribe=topic)
        return reader.options(**options).load()

    def write(self, rows: Any, topic: str, path: str | None = None) -> None:
        """Write rows to a topic."""
        writer = rows.write.format("embedlog").mode("append")
        writer.options(path=path or self.path, topic=topic).save()

    def copy(self, topic: str, target: str, *columns: str) -> None:
        """Copy a topic with a stream, in several micro-batches."""
        stream = self.spark.readStream.format("embedlog").options(path=self.path, subscribe=topic)
        stream = stream.options(startingOffsets="earliest", maxOffsetsPerTrigger="2000").load()
        query = stream.select(*columns).writeStream.format("embedlog")
        query = query.options(
            path=self.path,
            topic=target,
            checkpointLocation=str(self.directory / f"checkpoint-{target}"),
        )
        query.trigger(availableNow=True).start().awaitTermination()

    def error(self, work: Any) -> str:
        """Return the text of the error of embedlog that some work raises."""
        try:
            work()
        except (PySparkException, Py4JError, EmbedlogError) as error:
            return f"{type(to_embedlog_error(error)).__name__}: {to_embedlog_error(error)}"
        return "none"

    def run(self) -> dict[str, Any]:
        """Write and read, batches and streams, bytes and columns; then with deleted files.

        Counts are those of records, and of distinct ones.
        """
        t, typed = f"t-{self.language}", f"typed-{self.language}"
        self.write(
            self.rows.selectExpr("cast(id as string) value", "cast(id % 50 as string) key"), t
        )
        self.write(self.rows.selectExpr("id as number", "concat('é', id) as text"), typed)
        self.copy(t, f"{t}-copy", "key", "value")
        self.copy(typed, f"{typed}-copy", "number", "text")
        counts = {}
        for name in (t, f"{t}-copy", typed, f"{typed}-copy"):
            column = "text" if name.startswith("typed") else "cast(value as string) text"
            rows = self.read(name).selectExpr(column).collect()
            counts[name] = [len(rows), len({row.text for row in rows})]
        doomed = f"doomed-{self.language}"
        first, second, *_ = [
            file for file in segment_files(self.path) if f"/{doomed}-" in str(file)
        ]
        delete_while_read(second)
        loss = self.error(lambda: self.read(doomed).select("value").collect())
        delete_while_read(first)
        left = self.read(doomed, failOnDataLoss="false").select("value").collect()
        private = f"{self.path}-private"
        return {
            "where": self.where(),
            "counts": counts,
            "loss": loss,
            "left": len(left),
            "deleted": [not file.exists() for file in (first, second)],
            "no permission to write": self.error(
                lambda: self.write(self.rows.selectExpr("cast(id as string) value"), "t", private)
            ),
            "no permission to read": self.error(
                lambda: (
                    self.spark.read.format("embedlog")
                    .options(path=private, subscribe="t")
                    .load()
                    .select("value")
                    .collect()
                )
            ),
        }


if __name__ == "__main__":
    driver = Driver(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    sys.stdout.write(json.dumps(driver.run()) + "\n")
    driver.spark.stop()
