"""The driver's side of a write: reads the topics before the tasks, and publishes after them."""

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
from embedlog.spark.data_writer import TargetTopic, WriteTask
from embedlog.spark.partition_reader import freeze_gc
from embedlog.spark.sink_options import SinkOptions

_kept_logs: dict[str, Log] = {}
"""Logs that stay open in this process, by path: a stream commits its next batch in a moment."""


@contextmanager
def open_log(options: SinkOptions, *, keep: bool = False) -> Iterator[Log]:
    """Open the log, or use the one that is open; ``keep`` leaves it open in this process."""
    log = _kept_logs.get(options.path)
    if log is None or log.root.closed or not log.root.context.files.is_in_place():
        log = embedlog.open(options.path, lock_timeout=options.lock_timeout, maintenance=False)
        if keep:
            _kept_logs[options.path] = log
    try:
        yield log
    finally:
        if log is not _kept_logs.get(options.path):
            log.close()


def plan_write(options: SinkOptions, *, keep: bool = False) -> WriteTask:
    """Return what the tasks of a write need to know.

    A topic named in the options is created if it does not exist, as by any producer.
    """
    freeze_gc()
    with open_log(options, keep=keep) as log:
        root = log.root
        topics = root.topics()
        if options.topic is not None:
            topics = {options.topic: root.ensure_topic(options.topic)}
        targets = {}
        for name, topic in topics.items():
            limits = BatchLimits(topic.config.max_message_bytes, topic.config.segment_bytes)
            compression = options.compression or topic.config.compression_type
            if compression == "producer":
                compression = "none"
            targets[name] = TargetTopic(name, topic.id, topic.partitions, limits, compression)
    # The driver's JVM may publish the staged files as long as it lives.
    owner = process_id.ancestor("java") or process_id.process()
    started_ms = time.time_ns() // 1_000_000
    directory = staging.job_directory(str(owner), started_ms, uuid.uuid4().hex[:12])
    return WriteTask(options.path, directory, options.topic, targets)


def publish(
    options: SinkOptions,
    staged: Sequence[StagedFile],
    publication: Publication | None,
    *,
    keep: bool = False,
) -> PublishResult:
    """Publish the staged files of all tasks, in their order, and remove them.

    Raises:
        EmbedlogError: As `embedlog.publish.transaction.publish`; nothing was published,
            and the staged files are left to `discard`.
    """
    freeze_gc()
    with open_log(options, keep=keep) as log:
        files = log.root.context.files
        result = transaction.publish(
            log.root,
            staged,
            publication,
            durability=options.durability,
            timeout=options.lock_timeout,
            restart=options.allow_restart,
        )
        if result.repeated is not None and publication is not None:
            transaction.log_repetition(publication, result)
        staging.remove(files, staged)
        staging.sweep(files, time.time_ns() // 1_000_000)
    return result


def discard(options: SinkOptions, staged: Sequence[StagedFile]) -> None:
    """Remove staged files; what was published of them is a copy, and stays."""
    files = Files(options.path, unsafe_filesystem=True)
    try:
        staging.remove(files, staged)
    finally:
        files.close_all()
