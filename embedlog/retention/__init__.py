"""What is deleted, when, and who may keep it: plain functions over an open log and a clock.

`deciding` says what the settings ask for; `keeping` who may not be overtaken
(leases, and groups that have not consumed); `rounds` does it, partition by
partition, through `partition.log_start`; `telling` says it in words; `believing`
doubts a clock that jumped.
"""

from embedlog.retention.clock import BoundedClock
from embedlog.retention.explain import describe
from embedlog.retention.retain import RetentionResult, delete_records, retain

__all__ = [
    "BoundedClock",
    "RetentionResult",
    "delete_records",
    "describe",
    "retain",
]
