"""The producer: `send`, `send_batch` and `append_table` write records to topics.

From top to bottom: `producer` is what programs use, `topic_queue` collects the records of one
topic and makes batches of them, `partition_rows` chooses partitions, `partition_writer` numbers,
appends and retries batches, `future` is what callers wait on, `delivery` holds the outcomes,
`delivery_reports` counts them, `unretrieved` logs the failures that no caller looks at,
`context` is what the queues of a producer share, `sender` is its background thread, `metrics`
is what is counted, and `row_batches` turns lists and tables into batches.
"""

from embedlog.producer.delivery import BatchRange
from embedlog.producer.future import BatchFuture, RecordFuture
from embedlog.producer.producer import Producer, flush_producers

__all__ = ["BatchFuture", "BatchRange", "Producer", "RecordFuture", "flush_producers"]
