"""One partition's log: append, read, roll, truncate, recover.

`partition` does the appending, `draft` works out one append, `tail` is the row
that publishes, `reader` and `lookup` read, `sequence` is idempotence, and
`recovery` finds the end again after a crash.
"""

from __future__ import annotations

from embedlog.partition.context import DURABILITIES, VISIBILITIES, Context
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.reader import PartitionReader

__all__ = ["DURABILITIES", "VISIBILITIES", "Context", "PartitionLog", "PartitionReader"]
