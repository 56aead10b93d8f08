"""Mirrors: copies of topics that another log, or a Kafka cluster, keeps up to date.

`ends` says what the two ends of a mirror must do; `root_source`, `root_target` and
`merging_target` are those that are log roots, `kafka_source` and `kafka_target` those that are
Kafka clusters.  `mirror` drives them.
"""

from __future__ import annotations
