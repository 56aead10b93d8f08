"""One partition's log: append, read, roll, flush, truncate, recover.

`partition_log` is the class that offers them.  Each operation is a function over it, in a file
named after it; `state` holds what all partitions of an open log share.
"""

from __future__ import annotations

from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.reader import PartitionReader
from embedlog.partition.state import DURABILITIES, VISIBILITIES, Context, Durability, Visibility

__all__ = [
    "DURABILITIES",
    "VISIBILITIES",
    "Context",
    "Durability",
    "PartitionLog",
    "PartitionReader",
    "Visibility",
]
