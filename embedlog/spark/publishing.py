"""What the driver of a write does: looks at the topics before, and publishes after."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import embedlog
from embedlog.batch import BatchLimits
from embedlog.engine import Log
from embedlog.files import Files, processes
from embedlog.log import publishing, staging
from embedlog.log.publishing import Publication, Published
from embedlog.log.staging import Staged
from embedlog.spark import workers
from embedlog.spark.sink_options import SinkOptions
from embedlog.spark.staging import Target, Task

_kept: dict[str, Log] = {}
"""Logs that stay open in this process, by path: that of a stream commits again in a moment."""


@contextmanager
def opened(options: SinkOptions, *, keep: bool = False) -> Iterator[Log]:
    """Have the log open, and leave it so with ``keep``, for as long as the process lives."""
    log = _kept.get(options.path)
    if log is None or log.root.closed or not log.root.context.files.is_in_place():
        log = embedlog.open(options.path, lock_timeout=options.lock_timeout, maintenance=False)
        if keep:
            _kept[options.path] = log
    try:
        yield log
    finally:
        if log is not _kept.get(options.path):
            log.close()


def plan(options: SinkOptions, *, keep: bool = False) -> Task:
    """Look at the topics, and say what every task of the write is to know.

    A topic that the option names is made if it is not there, as by any producer.
    """
    workers.freeze()
    with opened(options, keep=keep) as log:
        root = log.root
        infos = root.topics()
        if options.topic is not None:
            infos = {options.topic: root.ensure_topic(options.topic)}
        targets = {
            name: Target(
                name,
                info.id,
                info.partitions,
                BatchLimits(info.config.max_message_bytes, info.config.segment_bytes),
                _compression(options, info.config.compression_type),
            )
            for name, info in infos.items()
        }
    return Task(options.path, _directory(), options.topic, targets)


def _compression(options: SinkOptions, topics: str) -> str:
    if options.compression is not None:
        return options.compression
    return "none" if topics == "producer" else topics


def _directory() -> str:
    """Name a directory for what is staged: the driver's JVM, while it lives, may publish it."""
    owner = processes.ancestor("java") or processes.process()
    return staging.job_directory(str(owner), time.time_ns() // 1_000_000, uuid.uuid4().hex[:12])


def publish(
    options: SinkOptions,
    staged: Sequence[Staged],
    publication: Publication | None,
    *,
    keep: bool = False,
) -> Published:
    """Publish what tasks staged, in their order, and remove what was staged.

    Raises:
        EmbedlogError: As `embedlog.log.publishing.publish`; nothing was published, and
            what was staged is left to `discard`.
    """
    workers.freeze()
    with opened(options, keep=keep) as log:
        files = log.root.context.files
        told = publishing.publish(
            log.root,
            staged,
            publication,
            durability=options.durability,
            timeout=options.lock_timeout,
            restart=options.restart,
        )
        if told.repeated is not None and publication is not None:
            publishing.log_repetition(publication, told)
        staging.remove(files, staged)
        staging.sweep(files, time.time_ns() // 1_000_000)
    return told


def discard(options: SinkOptions, staged: Sequence[Staged]) -> None:
    """Remove what tasks staged; if it was published, that stays as it is: it is a copy."""
    files = Files(options.path, unsafe_filesystem=True)
    try:
        staging.remove(files, staged)
    finally:
        files.close_all()
