"""What a segment of bytes begins with: Arrow's message with its schema, laid out without Arrow.

To load pyarrow takes a program that sends and reads a few records longer than all the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from embedlog.batch.wire import CONTINUATION, PREFIX

_U32 = struct.Struct("<I").unpack_from
_MESSAGE = bytes.fromhex(
    "1000000000000a000e000600050008000a00000000010400100000000000"  # a message, which has
    "0a000c00000004000800"  # a schema: its fields, and its metadata
)
_METADATA = 8 + len(_MESSAGE) + 12
"""Where the metadata is in a message with a schema."""
_PAIR = bytes.fromhex("08000c0004000800")
"""The vtable of a key with its value in the metadata."""
_FIELDS = bytes.fromhex(
    "03000000 7c000000 40000000 04000000"
    "d8ffffff 00000104 10000000 18000000 04000000 00000000 05000000 76616c7565000000"  # value
    "ccffffff 10001400 08000600 07000c00 00001000 10000000"
    "00000104 10000000 18000000 04000000 00000000 03000000 6b657900 04000400 04000000"  # key
    "10001400 08000000 07000c00 00001000 10000000"
    "0000000a 10000000 24000000 04000000 00000000 09000000 74696d657374616d70000000"  # timestamp
    "08000c00 06000800 08000000 00000100 04000000 03000000 55544300"  # in ms, in UTC
)


def _text(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data + bytes(4 - len(data) % 4)


def schema_message(metadata: Mapping[bytes, bytes]) -> bytes:
    """Return what a segment of timestamps, keys and values begins with.

    The bytes of ``schema(metadata=metadata).serialize()``.

    Args:
        metadata: What the file says about itself; not empty.
    """
    # As a flatbuffer, from the end to the beginning: positions count from the end.
    pairs, positions, vtable = b"", list[int](), 0
    for key, value in metadata.items():
        data = _text(value)
        texts = data + _text(key)
        position = len(pairs) + 12 + len(texts)
        vtable = vtable or position + len(_PAIR)
        positions.append(position)
        pair = struct.pack("<iII", vtable - position, 8 + len(data), 4) + texts
        pairs = pair + pairs if positions[1:] else _PAIR + pair
    rest, count = len(pairs), len(positions)
    places = [rest - position + 4 * (count - row) for row, position in enumerate(positions)]
    vector = struct.pack(f"<{count + 1}I", count, *places)
    table = struct.pack("<III", 10, 8 + len(vector) + rest, 4)
    message = b"".join((_MESSAGE, table, vector, pairs, _FIELDS))
    message += bytes(-len(message) % 8)
    return PREFIX.pack(CONTINUATION, len(message)) + message


def is_of_bytes(message: bytes) -> bool:
    """Whether a segment that begins with this has timestamps, keys and values, and no more.

    Any other bytes than those of `schema_message` are left to Arrow, which says what is wrong.
    """
    try:
        return message == schema_message(_metadata(message))
    except (struct.error, IndexError):
        return False


def _metadata(message: bytes) -> dict[bytes, bytes]:
    pairs = {}
    for row in range(min(_U32(message, _METADATA)[0], 16)):
        at = _METADATA + 4 + 4 * row
        at += _U32(message, at)[0]
        key, value = (
            message[text + 4 : text + 4 + _U32(message, text)[0]]
            for text in (at + field + _U32(message, at + field)[0] for field in (4, 8))
        )
        pairs[key] = value
    return pairs
