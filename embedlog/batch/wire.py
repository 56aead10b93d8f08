"""The bytes of a batch: constants, structs, and where Arrow puts a schema's columns."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pyarrow as pa

from embedlog.errors import InvalidConfigError

MAX_BATCH_BYTES = 64 << 20
"""The most bytes the columns of a batch may take, decoded."""
MAX_HEAD_BYTES = 1 << 20
"""The most bytes before the body: flatbuffer and block."""
MAX_MESSAGE_BYTES = MAX_BATCH_BYTES + MAX_BATCH_BYTES // 64 + MAX_HEAD_BYTES
"""The most bytes a batch may take in a file; compression can make noise a little larger."""

VERSION = 1
COMPRESSED, HEADERS, EXPLICIT_OFFSETS, LOG_APPEND_TIME, CONTROL = 1, 2, 4, 8, 16
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

PREFIX = struct.Struct("<Ii")
HEADER = struct.Struct("<4sIIHHIHHIqqqIhhiqqqq")
SEALED = struct.Struct("<IHHIHHIqqqIhhiqqqq")  # the header after the block's CRC
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
ZSTD_FRAME = b"\x28\xb5\x2f\xfd"
"""How each compressed buffer begins, after its length, if it is not lz4's."""
MIN_BLOCK = HEADER.size + TRAILER.size

TIMESTAMP = pa.timestamp("ms", tz="UTC")
HEADERS_TYPE = pa.list_(
    pa.field(
        "item", pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.binary())])
    )
)


def schema(
    *, headers: bool = False, offsets: bool = False, metadata: Mapping[Any, Any] | None = None
) -> Any:
    """Return the schema of a segment whose keys and values are bytes."""
    fields = [pa.field("timestamp", TIMESTAMP, nullable=False)]
    fields += [pa.field("key", pa.binary()), pa.field("value", pa.binary())]
    if headers:
        fields.append(pa.field("headers", HEADERS_TYPE))
    if offsets:
        fields.append(pa.field("offset", pa.int64(), nullable=False))
    return pa.schema(fields, metadata=metadata)


# What a schema means for the bytes


class ColumnSelection(NamedTuple):
    """Some columns of a schema."""

    indexes: tuple[int, ...]
    schema: Any
    leading: Any
    """The columns to read from a message: Arrow stops where the schema ends."""
    nodes: tuple[int, ...]
    buffers: tuple[int, ...]


class BufferLayout:
    """Where each top-level column has its nodes and buffers in a flatbuffer."""

    __slots__ = (
        "buffers",
        "every",
        "foreign_flags",
        "found",
        "in_ms",
        "names",
        "nodes",
        "original",
        "picks",
        "plain",
        "schema",
        "shape",
        "shapes",
        "table",
        "time",
    )

    def __init__(self, original: Any) -> None:
        self.original, self.schema = original, original.remove_metadata()
        self.names: list[str] = original.names
        counts = [_count(kind) for kind in original.types]
        self.nodes = [0, *accumulate(nodes for nodes, _ in counts)]
        self.buffers = [0, *accumulate(buffers for _, buffers in counts)]
        self.time = self._time_column()
        self.in_ms = original.types[self.time] == TIMESTAMP
        head = _head_of_nulls(list(original))
        self.found = find_message(head)
        self.plain = _plain_skeleton(head)
        self.table = struct.Struct("<" + "QII" * len(counts))
        self.every = tuple(range(len(counts)))
        self.foreign_flags = self._foreign_flags()
        self.picks: dict[tuple[str, ...] | bool, ColumnSelection] = {}
        self.shape: Any = None
        """That of the last batch that was read, of `shapes`: how `reading` took heads apart."""
        self.shapes: dict[tuple[int, int], Any] = {}

    def _time_column(self) -> int:
        told = (self.original.metadata or {}).get(b"embedlog.timestamp")
        return 0 if told is None else self.names.index(told.decode())

    def _foreign_flags(self) -> int:
        """The flags that speak of columns which are not there, and those nobody knows."""
        known = COMPRESSED | LOG_APPEND_TIME | CONTROL
        if {"headers", "_headers"} & set(self.names):
            known |= HEADERS
        if self.names[-1] in ("offset", "_offset"):
            known |= EXPLICIT_OFFSETS
        return 0xFFFF & ~known

    def find(self, head: Any) -> Message:
        """As `find_message`, but a head of the usual shape is known already."""
        usual = SKELETON.unpack_from(head, 8) == self.plain
        return self.found if usual else find_message(head)

    def pick(self, names: tuple[str, ...] | bool) -> ColumnSelection:
        """Return the columns named; all for True, all but the last (the offsets) for False."""
        found = self.picks.get(names)
        if found is None:
            found = self.picks[names] = self._pick(names)
        return found

    def _pick(self, names: tuple[str, ...] | bool) -> ColumnSelection:
        if isinstance(names, bool):
            indexes = self.every if names else self.every[:-1]
        else:
            indexes = tuple(self.names.index(name) for name in dict.fromkeys(names))
        schema = pa.schema([self.schema.field(i) for i in indexes])
        reach = max(indexes, default=-1) + 1
        leading = schema
        if indexes != self.every[:reach]:
            leading = pa.schema([self.schema.field(i) for i in range(reach)])
        nodes = [n for i in indexes for n in range(self.nodes[i], self.nodes[i + 1])]
        buffers = [n for i in indexes for n in range(self.buffers[i], self.buffers[i + 1])]
        return ColumnSelection(indexes, schema, leading, tuple(nodes), tuple(buffers))


def _count(kind: Any) -> tuple[int, int]:
    """Return how many nodes and buffers a column of this type has in an Arrow message."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _count(kind.storage_type)
    if types.is_null(kind):
        return 1, 0
    if types.is_struct(kind):
        return _sum(1, [kind.field(i).type for i in range(kind.num_fields)])
    if types.is_fixed_size_list(kind):
        return _sum(1, [kind.value_type])
    if types.is_map(kind):
        return _sum(2, [pa.struct([kind.key_field, kind.item_field])])
    if types.is_list(kind) or types.is_large_list(kind):
        return _sum(2, [kind.value_type])
    if any(is_type(kind) for is_type in (types.is_binary, types.is_string)):
        return 1, 3
    if types.is_large_binary(kind) or types.is_large_string(kind):
        return 1, 3
    if types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind):
        return 1, 2
    raise InvalidConfigError(f"a column of Arrow type {kind} cannot be stored")


def _sum(own: int, children: list[Any]) -> tuple[int, int]:
    counts = [_count(kind) for kind in children]
    return 1 + sum(nodes for nodes, _ in counts), own + sum(buffers for _, buffers in counts)


_layouts: dict[int, BufferLayout] = {}
_recent: list[BufferLayout] = []


def layout_of(given: Any) -> BufferLayout:
    """Return the layout of a schema, remembered by identity and then by equality."""
    found = _layouts.get(id(given))
    if found is not None and found.original is given:
        return found
    # One look at the list: another thread may change it between two.
    found = next((one for one in _recent[::-1] if one.original.equals(given, True)), None)
    if found is not None and found is _recent[-1]:
        return found
    if found is None:
        found = BufferLayout(given)
    # Bounded: a program that makes schemas all the time must not leak them.
    if len(_layouts) >= 256:
        _layouts.clear()
    _layouts[id(found.original)] = found
    _recent[:] = [*(one for one in _recent[-63:] if one is not found), found]
    return found


class Message(NamedTuple):
    """Where the facts of an Arrow RecordBatch message stand in its head.

    ``body_length`` and ``length`` are 0 if the flatbuffer leaves them out, which means zero.
    """

    body_length: int
    length: int
    nodes: int
    node_count: int
    buffers: int
    buffer_count: int
    compressed: bool


def _tables(head: Any) -> tuple[int, int, int, int, int]:
    """Return where the message and the record batch in it have their fields, and how many."""
    root = 8 + _U32(head, 8)[0]
    fields = root - _I32(head, root)[0]
    size, _, _, kind, header, body_length = _SIX(head, fields)
    if size < 12 or head[root + kind] != 3:
        raise struct.error("the message is not a record batch")
    table = root + header + _U32(head, root + header)[0]
    body_length = body_length and root + body_length
    inner = table - _I32(head, table)[0]
    return fields, body_length, table, inner, _U16(head, inner)[0]


def find_message(head: Any) -> Message:
    """Find the facts of a flatbuffer; raise `struct.error` if they lie outside ``head``."""
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
        size >= 12 and _U16(head, fields + 10)[0] != 0,
    )


SKELETON = struct.Struct("<32s8x24s")
"""Of a head, from byte 8: the tables' shape as pyarrow writes them, around the body's length."""


def _head_of_nulls(fields: list[Any]) -> bytes:
    """Return the head of a batch of one row: of an empty one, flatbuffers leave the zeros out."""
    arrays = [pa.nulls(1, field.type) for field in fields]
    message = pa.RecordBatch.from_arrays(arrays, names=[field.name for field in fields]).serialize()
    head: bytes = message.slice(0, 8 + PREFIX.unpack_from(message)[1]).to_pybytes()
    return head


def _plain_skeleton(head: bytes) -> tuple[bytes, bytes] | None:
    """Return the skeleton that says "not compressed", if pyarrow still writes it like that.

    A batch that has it needs no look at its flatbuffer: a compressed one would differ.
    """
    outer, body_length, table, inner, size = _tables(head)
    shape_is_inside = outer >= 8 and body_length == 40 and inner + size <= 72 and table + 4 <= 72
    if not shape_is_inside or find_message(head).compressed:
        return None
    first, second = SKELETON.unpack_from(head, 8)
    return first, second


def decoded_size(
    body: Any, start: int, ranges: Sequence[int], buffers: Sequence[int], found: Message
) -> int:
    """Return how many bytes the buffers take once decompressed; check that they lie in the body."""
    total, room = 0, len(body) - start
    for i in buffers:
        begin, length = ranges[2 * i], ranges[2 * i + 1]
        if begin < 0 or length < 0 or begin + length > room:
            raise struct.error("a buffer lies outside the body")
        if found.compressed and length:
            raw = I64.unpack_from(body, start + begin)[0] if length >= 8 else -2
            if raw < -1:
                raise struct.error("a compressed buffer has no length")
            length = length - 8 if raw == -1 else raw
        total += length
    return total
