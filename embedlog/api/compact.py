"""Compaction on demand: `Log.compact` and `Topic.explain_compaction`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from embedlog.compaction import CleanOptions, CleanResult, explain, select_due, try_clean
from embedlog.config import MaintenanceConfig
from embedlog.errors import EmbedlogError, FencedError, InvalidConfigError
from embedlog.partition import PartitionLog
from embedlog.root.root import Root

Progress = Callable[[int, int], None]


def compact(
    root: Root,
    name: str,
    *,
    force: bool = False,
    progress: Progress | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[CleanResult]:
    """Compact the partitions of a topic in this thread; see `Log.compact`."""
    root.context.check_writable()
    info = root.topic(name)
    if not info.config.compacts:
        raise InvalidConfigError(
            f"The topic is not compacted: cleanup.policy is {info.config.cleanup_policy!r}",
            topic=name,
            todo=f'Call alter_topic("{name}", {{"cleanup.policy": "compact"}}).',
        )
    config = MaintenanceConfig.parse(settings or {})
    logs = [root.partition(name, number) for number in range(info.partitions)]
    failed: dict[PartitionLog, EmbedlogError] = {}
    if not force:
        logs = [cleanable.log for cleanable in select_due(logs, root.clock(), failed)]
    results = []
    for index, log in enumerate(logs):
        options = CleanOptions(settings=config, progress=_scale(progress, index, len(logs)))
        # With force, roll first: the active segment, with the latest records, is never cleaned.
        results.append(try_clean(log, root.clock(), options, roll=force))
    errors = [*failed.values(), *(result.error for result in results if result.error is not None)]
    # All partitions were tried before the first error is raised.
    for error in errors:
        if not isinstance(error, FencedError):
            raise error
    return results


def _scale(progress: Progress | None, index: int, count: int) -> Progress | None:
    """Make the progress of one partition that of all, assuming partitions of the same size."""
    if progress is None:
        return None
    return lambda done, total: progress(index * total + done, count * total)


def explain_topic(root: Root, name: str) -> list[str]:
    """Say in words whether compaction will clean each partition, and why or why not."""
    now_ms = root.clock()
    return [
        explain(root.partition(name, number), now_ms) for number in range(root.partitions(name))
    ]
