"""Retention: what is deleted, when, and what may keep it; functions of an open log and a time.

`policy` says what the settings ask for; `constraints` what must be kept nevertheless, for
leases and groups; `retain` deletes, partition by partition, by `partition.log_start`;
`explain` says it in words; `clock` bounds a clock that jumped.
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
