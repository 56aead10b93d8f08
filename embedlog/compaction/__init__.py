"""Log compaction: of each key the last record is kept, at its offset (D1-D27).

`selecting` says what can be cleaned and what is due, `cleaning` cleans one
partition, `offsetmap` knows the last offset of each key, by the hashes of
`hashing`, and `rewriting` makes few large batches of what is left.  All of it
works on columns: nothing is done record by record.

Each step is a plain function that takes the time; whoever has threads calls
`clean_round`, or `choose` and then `attempt`.  `latest` is what readers see of
a topic as a table, whether or not it was compacted.
"""

from __future__ import annotations

from embedlog.compaction.clean_round import attempt, clean_round
from embedlog.compaction.cleanable import CleanableRange, choose, explain, inspect
from embedlog.compaction.cleaner import CleanResult, clean
from embedlog.compaction.throttle import Throttle

__all__ = [
    "CleanResult",
    "CleanableRange",
    "Throttle",
    "attempt",
    "choose",
    "clean",
    "clean_round",
    "explain",
    "inspect",
]
