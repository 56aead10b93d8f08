"""The producer: `send`, `send_batch` and `append_table` write records to topics.

From top to bottom: `producer` is what programs use; `batcher` collects the records of each topic,
and is the only place that knows what is not written yet; `topic_settings` is what it knows of a
topic; `partition_writer` numbers, appends and retries the batches of a partition; `future` is what
callers wait on, and `unretrieved` logs the failures that no caller looks at.  `row_batches` goes
from lists and columns to batches, each with its partition; `typed_rows` and `table_rows` make
columns of what a program passes, and `validation` checks it.  `transactions` keep the
batches of a transaction until it is published.
"""

from embedlog.producer.future import BatchFuture, BatchRange, RecordFuture
from embedlog.producer.producer import Producer, flush_producers

__all__ = ["BatchFuture", "BatchRange", "Producer", "RecordFuture", "flush_producers"]
