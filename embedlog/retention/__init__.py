"""Retention: what is deleted, when, and what is kept; functions of an open log and a time.

`policy` decides by the settings which segments are due; `retain` deletes them, partition by
partition, unless leases or groups need them; `explain` describes both in words.
"""

from embedlog.retention.explain import describe
from embedlog.retention.retain import RetentionResult, delete_records, retain

__all__ = ["RetentionResult", "delete_records", "describe", "retain"]
