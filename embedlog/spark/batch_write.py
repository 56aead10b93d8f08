"""What the driver of a write does: looks at the topics before, and publishes after."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import embedlog
from embedlog.api import Log
from embedlog.batch import BatchLimits
from embedlog.files import Files, process_id
from embedlog.publish import staging, transaction
from embedlog.publish.staging import StagedFile
from embedlog.publish.transaction import Publication, PublishResult
from embedlog.spark import python_worker
from embedlog.spark.data_writer import TargetTopic, WriteTask
from embedlog.spark.sink_options import SinkOptions

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


def plan(options: SinkOptions, *, keep: bool = False) -> WriteTask:
    """Look at the topics, and say what every task of the write is to know.

    A topic that the option names is made if it is not there, as by any producer.
    """
    python_worker.freeze()
    with opened(options, keep=keep) as log:
        root = log.root
        infos = root.topics()
        if options.topic is not None:
            infos = {options.topic: root.ensure_topic(options.topic)}
        targets = {
            name: TargetTopic(
                name,
                info.id,
                info.partitions,
                BatchLimits(info.config.max_message_bytes, info.config.segment_bytes),
                _compression(options, info.config.compression_type),
            )
            for name, info in infos.items()
        }
    return WriteTask(options.path, _directory(), options.topic, targets)


def _compression(options: SinkOptions, topics: str) -> str:
    if options.compression is not None:
        return options.compression
    return "none" if topics == "producer" else topics


def _directory() -> str:
    """Name a directory for what is staged: the driver's JVM, while it lives, may publish it."""
    owner = process_id.ancestor("java") or process_id.process()
    return staging.job_directory(str(owner), time.time_ns() // 1_000_000, uuid.uuid4().hex[:12])


def publish(
    options: SinkOptions,
    staged: Sequence[StagedFile],
    publication: Publication | None,
    *,
    keep: bool = False,
) -> PublishResult:
    """Publish what tasks staged, in their order, and remove what was staged.

    Raises:
        EmbedlogError: As `embedlog.partition.publishing.publish`; nothing was published, and
            what was staged is left to `discard`.
    """
    python_worker.freeze()
    with opened(options, keep=keep) as log:
        files = log.root.context.files
        told = transaction.publish(
            log.root,
            staged,
            publication,
            durability=options.durability,
            timeout=options.lock_timeout,
            restart=options.restart,
        )
        if told.repeated is not None and publication is not None:
            transaction.log_repetition(publication, told)
        staging.remove(files, staged)
        staging.sweep(files, time.time_ns() // 1_000_000)
    return told


def discard(options: SinkOptions, staged: Sequence[StagedFile]) -> None:
    """Remove what tasks staged; if it was published, that stays as it is: it is a copy."""
    files = Files(options.path, unsafe_filesystem=True)
    try:
        staging.remove(files, staged)
    finally:
        files.close_all()
