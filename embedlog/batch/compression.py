"""Compresses a batch, and decompresses columns of one.

Arrow's own reader decompresses a whole message, and passes each buffer to another thread:
for the buffers of a batch, which are small, both take longer than the decompression.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

from embedlog.batch.wire import (
    CODECS,
    END_OF_STREAM,
    I64,
    MAX_BATCH_BYTES,
    PREFIX,
    BufferLayout,
    Message,
    decoded_size,
)
from embedlog.errors import InvalidConfigError
from embedlog.lazy import pa


def serialize(columns: Any, compression: str) -> Any:
    """Return the IPC message of a batch, perhaps with Arrow's body compression."""
    if compression == "none":
        return columns.serialize()
    if compression not in CODECS:
        raise InvalidConfigError(f"compression must be none, lz4 or zstd, got {compression!r}")
    # The thread pool costs more than it gains at the size of a batch.
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.schema, options=options) as writer:
        writer.write_batch(columns)
    stream = sink.getvalue()
    begin = 8 + int(PREFIX.unpack_from(stream)[1])  # the schema has no body
    return stream.slice(begin, stream.size - begin - len(END_OF_STREAM))


def columns(
    head: memoryview,
    body: Any,
    message: Message,
    layout: BufferLayout,
    indexes: Sequence[int],
    count: int,
) -> list[Any]:
    """Return columns of a compressed batch as `pyarrow.Array` objects.

    Args:
        head: The flatbuffer and what precedes it.
        body: The buffers, as a `pyarrow.Buffer`.
        message: Where the fields of the flatbuffer are.
        layout: Where the columns are.
        indexes: Which columns.
        count: How many rows the batch has.

    Raises:
        struct.error: The flatbuffer contradicts the layout or the body.
        ValueError, OSError: A buffer cannot be decompressed, or does not fit its type.
    """
    if (message.node_count, message.buffer_count) != (layout.nodes[-1], layout.buffers[-1]):
        raise struct.error("the number of buffers is not that of the schema")
    rows = I64.unpack_from(head, message.length)[0] if message.length else 0
    if rows != count:
        raise struct.error(f"it has {rows} rows, not {count}")
    ranges = struct.unpack_from(f"<{2 * message.buffer_count}q", head, message.buffers)
    nodes = struct.unpack_from(f"<{2 * message.node_count}q", head, message.nodes)
    needed = [n for i in indexes for n in range(layout.buffers[i], layout.buffers[i + 1])]
    if decoded_size(body, 0, ranges, needed, message) > MAX_BATCH_BYTES:
        raise struct.error(f"it would decompress to more than {MAX_BATCH_BYTES} bytes")
    reader = _Reader(body, ranges, nodes, _codec(message.codec))
    arrays = []
    for index in indexes:
        reader.node, reader.buffer = layout.nodes[index], layout.buffers[index]
        arrays.append(reader.array(layout.schema.field(index).type))
    return arrays


class _Reader:
    """Returns arrays from the next nodes and buffers of a message, as Arrow orders them."""

    def __init__(
        self, body: Any, ranges: Sequence[int], nodes: Sequence[int], codec: pa.Codec
    ) -> None:
        self._body, self._ranges, self._nodes = body, ranges, nodes
        self._decompress = codec.decompress
        self.node = self.buffer = 0
        """The next ones."""

    def array(self, data_type: Any) -> Any:
        if isinstance(data_type, pa.BaseExtensionType):
            return pa.ExtensionArray.from_storage(data_type, self.array(data_type.storage_type))
        length, nulls = self._nodes[2 * self.node : 2 * self.node + 2]
        self.node += 1
        if data_type == pa.null():
            return pa.nulls(length)
        buffers = [self._next_buffer() for _ in range(data_type.num_buffers)]
        if not nulls:
            buffers[0] = None
        children = [
            self.array(data_type.field(i).type) for i in range(data_type.num_fields)
        ] or None
        return pa.Array.from_buffers(data_type, length, buffers, nulls, children=children)

    def _next_buffer(self) -> Any:
        begin, length = self._ranges[2 * self.buffer : 2 * self.buffer + 2]
        self.buffer += 1
        if not length:
            return self._body.slice(0, 0)
        (size,) = I64.unpack_from(self._body, begin)
        stored = self._body.slice(begin + 8, length - 8)
        return stored if size < 0 else self._decompress(stored, size)


@cache
def _codec(name: str) -> pa.Codec:
    return pa.Codec(name)
