"""What is deleted, when, and who may keep it: plain functions over an open log and a clock.

`deciding` says what the settings ask for; `keeping` who may not be overtaken
(leases, and groups that have not consumed); `rounds` does it, partition by
partition, through `log.trimming`; `telling` says it in words; `believing`
doubts a clock that jumped.
"""

from embedlog.retention.believing import BelievedClock
from embedlog.retention.rounds import Deleted, delete_records, retain
from embedlog.retention.telling import describe

__all__ = [
    "BelievedClock",
    "Deleted",
    "delete_records",
    "describe",
    "retain",
]
