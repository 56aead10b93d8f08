"""Reports of those that know what they did in whole ranges: pipelines, mirrors and publications.

report_range(root, MIRROR, "north", log, first, stop, counts)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from embedlog.audit.audit_topic import COUNT, NO_MINUTE, PRODUCER, SKIP, START, Client, Report
from embedlog.audit.producer_counts import CountedRun
from embedlog.audit.reporter import reporter_of, this_client
from embedlog.batch import CONTROL, MINUTE_MS, Batch, EncodedBatch
from embedlog.partition import PartitionLog
from embedlog.publish.transaction import PublishedBatches
from embedlog.root.root import Root


class RangeCount(NamedTuple):
    """What was read or written in a range of offsets of a partition."""

    log: PartitionLog
    first_offset: int
    next_offset: int
    minutes: Mapping[int, Sequence[int]]
    """Records and bytes by the minute of their timestamps, since 1970."""


def report_ranges(
    root: Root, tier: str, name: str, counts: Iterable[RangeCount], client: str = ""
) -> None:
    """Report counts, at once; those of topics that are not audited are left out.

    Call it when the records are safe where they went, so that what is counted is there.  If the
    process dies between the two, the audit counts the range from where the next one begins.

    Args:
        root: The log that was read or written.
        tier: `audit_topic.PIPELINE`, `MIRROR`, or another one.
        name: The name of the pipeline or mirror: all its ranges together must cover the log.
        counts: The counts.
        client: What else tells clients of the same name apart.
    """
    counted = (count for count in counts if count.first_offset < count.next_offset)
    _report(root, COUNT, this_client(tier, name, client), counted)


def report_starts(root: Root, tier: str, name: str, counts: Iterable[RangeCount]) -> None:
    """Report where a pipeline or mirror begins with partitions, before it does their first range.

    So the first range is counted, even if the process dies before it reports it.
    """
    starts = (RangeCount(log, first, first, {}) for log, first, _, _ in counts)
    _report(root, START, this_client(tier, name), starts)


def report_skips(root: Root, tier: str, name: str, skips: Iterable[RangeCount]) -> None:
    """Report which ranges a pipeline or mirror moved over, since retention deleted them before."""
    _report(root, SKIP, this_client(tier, name), skips)


def _report(root: Root, kind: str, client: Client, counts: Iterable[RangeCount]) -> None:
    reports = []
    for log, first, stop, minutes in counts:
        log.refresh()
        if log.config.audit:
            where = log.topic, log.topic_id, log.partition, first, stop
            reports.append(Report(client, kind, *where, minutes))
    if reports:
        reporter_of(root).report(reports=reports)


def count_batches(batches: Iterable[Batch | EncodedBatch]) -> dict[int, list[int]]:
    """Return records and bytes of batches by minute, from their heads.

    The records of a batch that spans minutes count without one; the audit takes it from the log.
    """
    minutes: dict[int, list[int]] = {}
    for batch in batches:
        if batch.count and not batch.flags & CONTROL:
            minute = batch.min_timestamp // MINUTE_MS
            if batch.max_timestamp // MINUTE_MS != minute:
                minute = NO_MINUTE
            count = minutes.setdefault(minute, [0, 0])
            count[0] += batch.count
            count[1] += batch.size
    return minutes


def report_published(
    root: Root, name: str, published: Iterable[PublishedBatches], client: str = ""
) -> None:
    """Report what a publication wrote, as that of a producer without an id.

    Args:
        root: The log.
        name: The application.
        published: What it wrote.
        client: The ``client_id``.
    """
    counts = []
    for state, batches in published:
        if not state.config.audit or not batches:
            continue
        run = CountedRun(batches[0][0].base_offset)
        for receipt, batch in batches:
            run.add_batch(receipt, batch)
        log = root.partition(state.topic, state.partition)
        counts.append(RangeCount(log, run.first, run.stop, run.minutes()))
    report_ranges(root, PRODUCER, name, counts, client)
