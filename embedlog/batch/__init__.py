"""The batch: records as Arrow columns, and as the bytes of a segment file.

A batch is one encapsulated Arrow IPC message with a block of embedlog's own between the
flatbuffer and the body (``docs/format.md`` describes every byte).  `encode`, `encode_lists` and
`encode_one` do the expensive work without a lock; `EncodedBatch.stamp` fills in what is known
only under the lock.  `parse` and `BatchSource` check the head and the block; a `Batch` checks
and decodes only the columns that are read.
"""

from __future__ import annotations

from embedlog.batch.add_headers import (
    add_headers,
    placed,
    rows_outside,
    rows_without_key,
    to_encoded,
    trimmed,
    with_columns,
)
from embedlog.batch.decode import (
    Batch,
    BatchSource,
    Reread,
    message_length,
    offset_range,
    parse,
)
from embedlog.batch.decode_run import BatchRun, batches_fast
from embedlog.batch.encode import EncodedBatch, PlacedBatch, encode, encode_lists, from_lists
from embedlog.batch.encode_one import encode_one
from embedlog.batch.limits import BatchLimits, is_over, kafka_size
from embedlog.batch.time_windows import MINUTE_MS, count_windows, windows_of
from embedlog.batch.wire import (
    COMPRESSED,
    CONTROL,
    EXPLICIT_OFFSETS,
    HEADERS,
    INHERITED,
    LOG_APPEND_TIME,
    MAX_GAP,
    MERGED,
    NOT_FAST,
    TOMBSTONES,
    TYPED,
    schema,
)

__all__ = [
    "COMPRESSED",
    "CONTROL",
    "EXPLICIT_OFFSETS",
    "HEADERS",
    "INHERITED",
    "LOG_APPEND_TIME",
    "MAX_GAP",
    "MERGED",
    "MINUTE_MS",
    "NOT_FAST",
    "TOMBSTONES",
    "TYPED",
    "Batch",
    "BatchLimits",
    "BatchRun",
    "BatchSource",
    "EncodedBatch",
    "PlacedBatch",
    "Reread",
    "add_headers",
    "batches_fast",
    "count_windows",
    "encode",
    "encode_lists",
    "encode_one",
    "from_lists",
    "is_over",
    "kafka_size",
    "message_length",
    "offset_range",
    "parse",
    "placed",
    "rows_outside",
    "rows_without_key",
    "schema",
    "to_encoded",
    "trimmed",
    "windows_of",
    "with_columns",
]
