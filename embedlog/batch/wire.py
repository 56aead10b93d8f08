"""The bytes of a batch: constants, structs, and where Arrow puts the columns of a schema."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, product
from typing import Any, NamedTuple, Self

from embedlog.batch.key_bytes import key_bytes
from embedlog.errors import InvalidConfigError
from embedlog.forks import cached_property
from embedlog.lazy import pa

MAX_GAP = (1 << 32) - 1
"""The most offsets that may be missing before a batch in the same segment."""
MAX_BATCH_BYTES = 64 << 20
"""The most bytes the columns of a batch may take, decoded."""
MAX_HEAD_BYTES = 1 << 20
"""The most bytes before the body: flatbuffer and block."""
MAX_MESSAGE_BYTES = MAX_BATCH_BYTES + MAX_BATCH_BYTES // 64 + MAX_HEAD_BYTES
"""The most bytes a batch may take in a file; compression makes random data a little larger."""

VERSION = 1
COMPRESSED, HEADERS, EXPLICIT_OFFSETS, LOG_APPEND_TIME, CONTROL = 1, 2, 4, 8, 16
TYPED, TOMBSTONES = 32, 64
"""The batch has the columns of a typed topic; it has a column that says which are tombstones."""
MERGED = 128
"""A mirror that merges wrote the records: their header ``embedlog.mirror`` says where they were.
Without the flag a program has passed on the header of another record."""
INHERITED = LOG_APPEND_TIME | CONTROL | MERGED
"""Flags that a batch passes on to a batch that is made of its records."""
COLUMN_FLAGS = 0xFFFF & ~(COMPRESSED | INHERITED)
"""Flags that follow from the columns of a batch, and those that no batch has."""
NOT_FAST = HEADERS | TYPED | EXPLICIT_OFFSETS
"""Flags that a batch for `append_fast` has exactly if the active segment has them."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

PREFIX = struct.Struct("<Ii")
HEADER = struct.Struct("<4sIIHHIHHIqqqIhHiqqqq")
SEALED = struct.Struct("<IHHIHHIqqqIhHiqqqq")  # the header after the block's CRC
SEAL = struct.Struct("<4sI")
ENTRY = struct.Struct("<QII")
TRAILER = struct.Struct("<I4s")
_U16 = struct.Struct("<H").unpack_from
_U32 = struct.Struct("<I").unpack_from
_I32 = struct.Struct("<i").unpack_from
_FIVE = struct.Struct("<5H").unpack_from
_SIX = struct.Struct("<6H").unpack_from
I64 = struct.Struct("<q")
CONTINUATION = 0xFFFFFFFF
MAGIC, END_MAGIC = b"EMBL", b"embl"
CODECS = ("lz4", "zstd")
"""The codecs of Arrow's format, by their number there."""
MIN_BLOCK = HEADER.size + TRAILER.size


KEY, TIME = b"embedlog.key", b"embedlog.timestamp"
"""Metadata of the segments of a typed topic: the key columns, as JSON, and the timestamps'."""
SCHEMA_VERSION = b"embedlog.schema"


@cache
def timestamp_type() -> Any:
    """Return the type of timestamps."""
    return pa.timestamp("ms", tz="UTC")


@cache
def headers_type() -> Any:
    """Return the type of headers."""
    pair = pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.binary())])
    return pa.list_(pa.field("item", pair))


def schema(
    *, headers: bool = False, offsets: bool = False, metadata: Mapping[Any, Any] | None = None
) -> Any:
    """Return the schema of a segment whose keys and values are bytes."""
    fields = [pa.field("timestamp", timestamp_type(), nullable=False)]
    fields += [pa.field("key", pa.binary()), pa.field("value", pa.binary())]
    if headers:
        fields.append(pa.field("headers", headers_type()))
    if offsets:
        fields.append(pa.field("offset", pa.int64(), nullable=False))
    return pa.schema(fields, metadata=metadata)


# Where a schema puts its columns


class ColumnSelection(NamedTuple):
    """Some columns of a schema."""

    indexes: tuple[int, ...]
    schema: Any
    leading: Any
    """The schema up to the last selected column: Arrow reads no further than the schema."""


class BufferLayout:
    """Where each top-level column has its nodes and buffers in a flatbuffer.

    Args:
        names: The columns.
        counts: How many nodes and buffers each of them has.
        metadata: That of the schema.
        time_in_ms: Whether the timestamps are in ms, and in UTC.
    """

    def __init__(
        self,
        names: list[str],
        counts: Sequence[tuple[int, int]],
        metadata: Mapping[bytes, bytes] | None = None,
        time_in_ms: bool = True,
    ) -> None:
        self.names = names
        self.nodes = [0, *accumulate(nodes for nodes, _ in counts)]
        self.buffers = [0, *accumulate(buffers for _, buffers in counts)]
        metadata = metadata or {}
        time = metadata.get(TIME)
        self.typed = time is not None
        """Whether the batch has the columns of a typed topic."""
        self.time = 0 if time is None else names.index(time.decode())
        key: list[str] = ["key"]
        if self.typed:
            key = json.loads(metadata.get(KEY, b"[]"))
        self.key = tuple(key)
        """The names of the key columns."""
        self.time_in_ms = time_in_ms
        self.head = batch_message(self.nodes[-1], self.buffers[-1])
        """The head of an uncompressed batch, whose lengths are zero."""
        self.message = find_message(self.head)
        self.plain_skeleton = SKELETON.unpack_from(self.head, 8)
        """That of all uncompressed batches: their flatbuffer need not be read."""
        self.table = struct.Struct("<" + "QII" * len(counts))
        self.column_indexes = tuple(range(len(counts)))
        self.flags = HEADERS if self.added("headers") in names else 0
        """Those of the `COLUMN_FLAGS` that every batch of this schema has; it has no others."""
        if self.typed:
            self.flags |= TYPED | (TOMBSTONES if "_tombstone" in names else 0)
        self.has_offsets = names[-1] == self.added("offset")
        """Whether its last column has the offsets, as in a compacted segment."""
        if self.has_offsets:
            self.flags |= EXPLICIT_OFFSETS
        self.selections: dict[tuple[str, ...] | bool, ColumnSelection] = {}
        self.head_layout: Any = None
        """The `HeadLayout` of the last batch that was read; `decode` sets it."""

    @classmethod
    def of_schema(cls, original: Any) -> Self:
        """Return the layout of an Arrow schema."""
        metadata = original.metadata or {}
        time = original.names.index(metadata[TIME].decode()) if TIME in metadata else 0
        layout = cls(
            original.names,
            [_count(data_type) for data_type in original.types],
            metadata,
            original.types[time] == timestamp_type(),
        )
        layout.original = original
        return layout

    @cached_property
    def original(self) -> Any:
        """The Arrow schema; with its metadata, if it is of a typed topic."""
        return schema(headers=bool(self.flags & HEADERS), offsets=self.has_offsets)

    @cached_property
    def schema(self) -> Any:
        """The Arrow schema without metadata."""
        return self.original.remove_metadata()

    def has_columns_of(self, other: BufferLayout) -> bool:
        """Whether both schemas have the same columns."""
        return self is other or bool(self.original.equals(other.original))

    def added(self, name: str) -> str:
        """Return the name that a column of embedlog's own has in a segment."""
        return f"_{name}" if self.typed else name

    def keys_of(self, columns: Any) -> Any:
        """Return the key of each row of a `pyarrow.RecordBatch` as a `pyarrow.BinaryArray`."""
        keys = [columns.column(name) for name in self.key]
        return key_bytes(keys) if self.typed else keys[0]

    def is_plain(self, head: bytes) -> bool:
        """Return whether a batch is certainly uncompressed; if not, its flatbuffer must be read."""
        plain = len(head) >= 8 + SKELETON.size
        return plain and SKELETON.unpack_from(head, 8) == self.plain_skeleton

    def select(self, names: tuple[str, ...] | bool) -> ColumnSelection:
        """Return columns by name; True selects all, False all but the last (the offsets)."""
        selection = self.selections.get(names)
        if selection is not None:
            return selection
        if isinstance(names, bool):
            indexes = self.column_indexes if names else self.column_indexes[:-1]
        else:
            indexes = tuple(self.names.index(name) for name in dict.fromkeys(names))
        schema = pa.schema([self.schema.field(i) for i in indexes])
        end = max(indexes, default=-1) + 1
        leading = schema
        if indexes != self.column_indexes[:end]:
            leading = pa.schema([self.schema.field(i) for i in range(end)])
        selection = ColumnSelection(indexes, schema, leading)
        self.selections[names] = selection
        return selection


def _count(data_type: Any) -> tuple[int, int]:
    """Return how many nodes and buffers a column of a type has in an Arrow message."""
    types = pa.types
    if isinstance(data_type, pa.BaseExtensionType):
        return _count(data_type.storage_type)
    if types.is_null(data_type):
        return 1, 0
    storable = (
        *(types.is_primitive, types.is_decimal, types.is_fixed_size_binary),
        *(types.is_binary, types.is_string, types.is_large_binary, types.is_large_string),
        *(types.is_list, types.is_large_list, types.is_fixed_size_list),
        *(types.is_map, types.is_struct),
    )
    if not any(is_type(data_type) for is_type in storable):
        raise InvalidConfigError(f"A column of Arrow type {data_type} cannot be stored")
    nodes, buffers = 1, int(data_type.num_buffers)
    for i in range(data_type.num_fields):
        child_nodes, child_buffers = _count(data_type.field(i).type)
        nodes, buffers = nodes + child_nodes, buffers + child_buffers
    return nodes, buffers


class Message(NamedTuple):
    """The positions of the fields of an Arrow RecordBatch message in its head.

    ``body_length`` and ``length`` are 0 if the flatbuffer omits them, which means zero.
    """

    body_length: int
    length: int
    nodes: int
    node_count: int
    buffers: int
    buffer_count: int
    codec: str
    """The compression: ``none``, ``lz4`` or ``zstd``."""

    @property
    def compressed(self) -> bool:
        """Whether the columns are compressed."""
        return self.codec != "none"


def _tables(head: Any) -> tuple[int, int, int, int, int]:
    """Return where the message and its record batch have their fields, and how many."""
    root = 8 + _U32(head, 8)[0]
    fields = root - _I32(head, root)[0]
    size, _, _, header_type, header, body_length = _SIX(head, fields)
    if size < 10 or head[root + header_type] != 3:
        raise struct.error("the message is not a record batch")
    table = root + header + _U32(head, root + header)[0]
    # The length of an empty body, as of no rows of numbers, is left out with its position.
    body_length = root + body_length if body_length and size >= 12 else 0
    inner = table - _I32(head, table)[0]
    return fields, body_length, table, inner, _U16(head, inner)[0]


def find_message(head: Any) -> Message:
    """Return where the fields of a flatbuffer are; raise `struct.error` if outside of ``head``."""
    _, body_length, table, fields, size = _tables(head)
    _, _, length, nodes, buffers = _FIVE(head, fields)
    nodes += table + _U32(head, table + nodes)[0]
    buffers += table + _U32(head, table + buffers)[0]
    return Message(
        body_length,
        length and table + length,
        nodes + 4,
        _U32(head, nodes)[0],
        buffers + 4,
        _U32(head, buffers)[0],
        _codec(head, table, fields, size),
    )


def _codec(head: Any, table: int, fields: int, size: int) -> str:
    """Return the compression of a record batch.

    Args:
        head: The flatbuffer and what precedes it.
        table: Where the record batch is.
        fields: Where the positions of its fields are.
        size: How many bytes these positions have.
    """
    at = _U16(head, fields + 10)[0] if size >= 12 else 0
    if not at:
        return "none"
    compression = table + at + _U32(head, table + at)[0]
    inner = compression - _I32(head, compression)[0]
    codec = _U16(head, inner + 4)[0] if _U16(head, inner)[0] >= 6 else 0
    number = head[compression + codec] if codec else 0
    if number >= len(CODECS):
        raise struct.error(f"the compression is {number}, which Arrow does not have")
    return CODECS[number]


SKELETON = struct.Struct("<32s8x24s")
"""The tables of a head as pyarrow writes them, from byte 8, without the body's length."""


_BATCH = bytes.fromhex(
    "14000000 00000000 0c001600 06000500 08000c00 0c000000 00030400 18000000"
    "00000000 00000000 00000a00 18000c00 04000800 0a000000"
)
"""The tables of an uncompressed batch as pyarrow writes them, up to the place of its vectors."""


def batch_message(nodes: int, buffers: int) -> bytes:
    """Return the head of an uncompressed batch whose lengths are zero.

    Args:
        nodes: How many nodes its columns have.
        buffers: How many buffers its columns have.
    """
    vectors = struct.pack("<IIqII", 28 + 16 * buffers, 16, 0, 0, buffers) + bytes(16 * buffers)
    message = _BATCH + vectors + struct.pack("<II", 0, nodes) + bytes(16 * nodes)
    return PREFIX.pack(CONTINUATION, len(message)) + message


def decoded_size(
    body: Any, start: int, ranges: Sequence[int], buffers: Sequence[int], message: Message
) -> int:
    """Return how many bytes the buffers take decompressed; check that they are in the body."""
    total, body_bytes = 0, len(body) - start
    for i in buffers:
        begin, length = ranges[2 * i], ranges[2 * i + 1]
        if begin < 0 or length < 0 or begin + length > body_bytes:
            raise struct.error("a buffer is outside of the body")
        if length and begin & 7:
            raise struct.error(f"a buffer begins at {begin}, which is no multiple of 8")
        if message.compressed and length:
            raw = I64.unpack_from(body, start + begin)[0] if length >= 8 else -2
            if raw < -1:
                raise struct.error("a compressed buffer has no length")
            length = length - 8 if raw == -1 else raw
        total += length
    return total


def _bytes_layout(headers: bool, offsets: bool) -> BufferLayout:
    columns = {"timestamp": (1, 2), "key": (1, 3), "value": (1, 3)}
    if headers:
        columns["headers"] = 4, 9
    if offsets:
        columns["offset"] = 1, 2
    return BufferLayout(list(columns), list(columns.values()))


_OF_BYTES = {columns: _bytes_layout(*columns) for columns in product((False, True), repeat=2)}


def bytes_layout(headers: bool = False, offsets: bool = False) -> BufferLayout:
    """Return the layout of `schema`: the same object for all segments of topics of bytes."""
    return _OF_BYTES[headers, offsets]


_layouts: dict[int, BufferLayout] = {}
_recent: list[BufferLayout] = []


def layout_of(schema: Any) -> BufferLayout:
    """Return the layout of an Arrow schema, cached by identity and then by equality."""
    layout = _layouts.get(id(schema))
    if layout is not None and layout.original is schema:
        return layout
    # Read the list once: another thread may change it between two reads.
    cached, typed = [*_recent[::-1], *_OF_BYTES.values()], TIME in (schema.metadata or ())
    equal = (each for each in cached if each.typed is typed and each.original.equals(schema, typed))
    layout = next(equal, None) or BufferLayout.of_schema(schema)
    if _recent and layout is _recent[-1]:
        return layout
    # Bounded: a program that creates schemas all the time must not leak memory.
    if len(_layouts) >= 256:
        _layouts.clear()
    _layouts[id(layout.original)] = layout
    _recent[:] = [*(other for other in _recent[-63:] if other is not layout), layout]
    return layout
