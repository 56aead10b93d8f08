"""Log compaction keeps the last record of each key, at its offset.

`cleanable` determines what can be cleaned and which partitions are due, and `cleaner`
cleans them with the help of `offset_map` (the last offset of each key), `key_hash`,
`scanner` (reads segments) and `rewriter` (writes them).  Everything works on columns;
nothing is done record by record.

The functions take the time and start no threads: maintenance calls `clean_round`.
`last_records` reads a topic as a table, whether or not it was compacted.
"""

from __future__ import annotations

from embedlog.compaction.cleanable import CleanableRange, explain, inspect, select_due
from embedlog.compaction.cleaner import CleanOptions, CleanResult, clean, clean_round, try_clean

__all__ = [
    "CleanOptions",
    "CleanResult",
    "CleanableRange",
    "clean",
    "clean_round",
    "explain",
    "inspect",
    "select_due",
    "try_clean",
]
