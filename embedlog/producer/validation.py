"""What a record may be made of: bytes, or what a serializer makes bytes of."""

from __future__ import annotations

from typing import Any

from embedlog import catalog
from embedlog.errors import SerializationError, UnknownTopicOrPartitionError
from embedlog.producer.row_batches import Rows


def serialized(serializer: Any, topic: str, given: Any) -> Any:
    """Return what a serializer makes of a key or value; the thing itself without one."""
    if serializer is None:
        return given
    if hasattr(serializer, "serialize"):
        return serializer.serialize(topic, given)
    return serializer(given)


def to_bytes(given: Any, what: str) -> bytes | None:
    """Return bytes, or None, or say how to get there."""
    if given is None or type(given) is bytes:
        return given
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    todo = f"give a {what}_serializer, or bytes"
    if isinstance(given, str):
        todo = f"encode it: {what}.encode(), or {what}_serializer=str.encode"
    raise SerializationError(f"a {what} is bytes or None, not {type(given).__name__}", todo=todo)


def check_all_bytes(rows: Rows) -> None:
    """Look at the types before the first of several batches is written, not in between."""
    for column, what in ((rows.values, "value"), (rows.keys, "key")):
        if column is not None:
            for kind in set(map(type, column)) - {bytes, type(None), bytearray, memoryview}:
                to_bytes(kind(), what)


def checked_headers(headers: Any) -> Any:
    """Return headers as pairs of str and bytes; None if there are none (A3)."""
    if not headers:
        return None
    for pair in headers:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise SerializationError(f"a header is a pair of str and bytes, not {pair!r}")
    return [(name, to_bytes(value, "header")) for name, value in headers]


def check_time(timestamp: Any) -> None:
    """Refuse what is not milliseconds as an int64."""
    if type(timestamp) is not int or not -(1 << 63) <= timestamp < 1 << 63:
        raise SerializationError(f"a timestamp is milliseconds as an int, not {timestamp!r}")


def check_partition(topic: str, partition: Any, partitions: int) -> None:
    """Refuse a partition that the topic does not have (G1)."""
    catalog.check_partition(topic, partition)
    if not 0 <= partition < partitions:
        raise UnknownTopicOrPartitionError(
            f"the topic has partitions 0 to {partitions - 1}", topic=topic, partition=partition
        )
