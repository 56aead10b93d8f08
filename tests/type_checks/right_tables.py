"""Right uses of tables; pyarrow and pandas ship no types, which pyright's strict mode reports."""

# pyright: standard

from __future__ import annotations

from typing import assert_type

import pandas
import polars
import pyarrow

from embedlog import Log, Topic, TopicPartition


def tables(log: Log, topic: Topic) -> None:
    """Views as tables, and tables as records."""
    assert_type(topic.to_polars(), polars.DataFrame)
    frame: pandas.DataFrame = topic.to_pandas(latest=True)
    frame.groupby("key")
    table: pyarrow.Table = topic.to_arrow(["key", "value"])
    with log.producer() as producer:
        producer.append_table("copy", table)
        producer.append_table("copy", frame)
        producer.append_table("copy", topic.to_polars(), key="key")
        producer.append_table("copy", topic)


def batches(log: Log) -> None:
    """Batches of Arrow."""
    consumer = log.consumer("flights")
    polled: dict[TopicPartition, list[pyarrow.RecordBatch]] = consumer.poll_batches(100)
    for partition in polled:
        print(partition.topic)
    for batch in consumer.iter_batches(until="end"):
        print(batch.num_rows)
