"""The settings of the maintenance jobs."""

from __future__ import annotations

from math import inf

from embedlog.config.settings import Settings
from embedlog.config.values import number, switch


class MaintenanceConfig(Settings):
    """The settings of the maintenance jobs; in Kafka they are broker settings.

    >>> MaintenanceConfig.parse({"log.cleaner.threads": 2}).log_cleaner_threads
    2
    """

    log_retention_check_interval_ms: int = number(30_000, 1)
    """The interval of retention; Kafka's 300000 would save nothing here."""
    offsets_retention_minutes: int = number(10_080, 1)
    """Delete the offsets of a group that was not used for this long."""
    offsets_retention_check_interval_ms: int = number(600_000, 1)
    """The interval of the check for such groups."""
    producer_id_expiration_check_interval_ms: int = number(600_000, 1)
    """The interval of the check for producers idle for ``producer_id_expiration_ms``."""
    log_cleaner_enable: bool = switch(True)
    """Whether to compact topics with ``cleanup.policy=compact``."""
    log_cleaner_threads: int = number(1, 1, 64)
    """The number of partitions to compact at the same time."""
    log_cleaner_backoff_ms: int = number(15_000, 1)
    """The interval of the check for partitions to compact."""
    log_cleaner_dedupe_buffer_size: int = number(128 << 20, 1)
    """Bytes for the offset map, 24 per key; if too small, compaction takes more passes."""
    log_cleaner_io_buffer_load_factor: float = number(0.9, 0.01, 1.0)
    """How full the offset map may become."""
    log_cleaner_io_buffer_size: int = number(4 << 20, 1)
    """Bytes to read at once; larger than Kafka's 512 KiB, as batches are."""
    log_cleaner_io_max_bytes_per_second: float = number(inf, 1.0, inf)
    """Limits what all compaction threads together read and write."""
    auto_leader_rebalance_enable: bool = switch(True)
    """Whether to elect preferred leaders again, where too many partitions have others."""
    leader_imbalance_per_broker_percentage: int = number(10, 0, 100)
    """How many of the partitions that prefer a directory may be led by another one, in percent."""
    leader_imbalance_check_interval_seconds: int = number(300, 1)
    """The interval of the check for preferred leaders."""
    follower_replication_throttled_rate: float = number(inf, 1.0, inf)
    """Limits the bytes per second that are copied to directories that catch up; appends with
    ``acks="all"`` are not limited."""
