"""One partition's log: append, read, roll, flush, truncate, recover.

`state` holds what the operations share.  Each operation is a function in a file named
after it; `partition_log` is the class that offers them.
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
