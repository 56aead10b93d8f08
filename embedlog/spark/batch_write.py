"""The driver's side of a write: reads the topics before the tasks, and publishes after them."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import embedlog
from embedlog.api import Log
from embedlog.batch import BatchLimits
from embedlog.catalog import OWN_TOPICS, TopicInfo, check_topic_name
from embedlog.config import TopicConfig
from embedlog.errors import (
    InvalidRecordError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from embedlog.files import Files, process_id
from embedlog.listeners import PRODUCER, Client
from embedlog.publish import staging, transaction
from embedlog.publish.staging import StagedFile
from embedlog.publish.transaction import Publication, PublishResult
from embedlog.root.root import Root
from embedlog.schemas.statistics import text_columns_of
from embedlog.spark.columns import check_column_types, type_name
from embedlog.spark.data_writer import (
    NEW_TOPIC_ID,
    StagedRows,
    TargetTopic,
    WriteTask,
    check_frame,
)
from embedlog.spark.log_cache import is_a_log
from embedlog.spark.options import SinkOptions
from embedlog.spark.partition_reader import freeze_gc

_logger = logging.getLogger("embedlog.spark")
_kept_logs: dict[str, Log] = {}
"""Logs that stay open in this process, by path: a stream commits its next batch in a moment."""


@contextmanager
def open_log(options: SinkOptions, *, keep: bool = False) -> Iterator[Log]:
    """Open the log, or use the one that is open; ``keep`` leaves it open in this process."""
    log = _kept_logs.get(options.path)
    if log is None or log.root.closed or not log.root.context.files.is_in_place():
        log = embedlog.open(
            options.path,
            lock_timeout=options.lock_timeout,
            maintenance=False,
            must_exist=options.must_exist,
        )
        if keep:
            _kept_logs[options.path] = log
    try:
        yield log
    finally:
        if log is not _kept_logs.get(options.path):
            log.close()


def plan_write(
    options: SinkOptions, fields: Sequence[dict[str, Any]], *, keep: bool = False
) -> WriteTask:
    """Return the description of a write for its tasks.

    A topic named in the options that does not exist is created by `publish`, when all rows are
    staged: then it is known how many partitions they need, and no task can fail any more.

    Args:
        options: The options of the writer.
        fields: The columns of the DataFrame as fields of Spark's schema, in JSON.
        keep: Whether to leave the log open in this process.

    Raises:
        InvalidConfigError, SerializationError: The topic cannot take these columns; nothing was
            created.
    """
    freeze_gc()
    if not is_a_log(options.path):
        _check_bytes(options, fields)
    with open_log(options, keep=keep) as log:
        root = log.root
        topics = root.topics()
        schema = None
        if options.topic in topics:
            schema = root.context.catalog.schema(topics[options.topic])
        if schema is not None:
            check_frame(fields, schema, str(options.topic))
        else:
            _check_bytes(options, fields)
        if options.topic is not None:
            topics = {options.topic: _target_topic(root, options.topic)}
        targets = {}
        for name, topic in topics.items():
            limits = BatchLimits(topic.config.max_message_bytes, topic.config.segment_bytes)
            compression = options.compression or topic.config.compression_type
            if compression == "producer":
                compression = "none"
            targets[name] = TargetTopic(
                *(name, topic.id, topic.partitions, limits, compression),
                *(bool(topic.schema_version), schema, text_columns_of(topic.config)),
            )
    # The driver's JVM may publish the staged files as long as it lives.
    owner = process_id.ancestor("java") or process_id.process()
    started_ms = time.time_ns() // 1_000_000
    directory = staging.job_directory(str(owner), started_ms, uuid.uuid4().hex[:12])
    # Of several directories, the one that `publish` reads staged files from.
    path = root.context.files.root if root.replicated else options.path
    return WriteTask(path, directory, options.topic, targets)


def _check_bytes(options: SinkOptions, fields: Sequence[dict[str, Any]]) -> None:
    types = {field["name"]: type_name(field["type"]) for field in fields}
    check_column_types(types, options.topic)


def _target_topic(root: Root, name: str) -> TopicInfo:
    if name not in root.topics() and name not in OWN_TOPICS:
        return TopicInfo(check_topic_name(name), NEW_TOPIC_ID, 1, 0, TopicConfig())
    return root.topic(name)


def batch_publication(options: SinkOptions, topics: Iterable[int]) -> Publication | None:
    """Return the publication of a batch write; None if it has no ``txnAppId``.

    Args:
        options: The options of the writer.
        topics: The ids of topics that count as written to even by a DataFrame without rows.
    """
    if options.txn_app_id is None or options.txn_version is None:
        return None
    return Publication(options.txn_app_id, options.txn_version, topics=tuple(topics))


def micro_batch_publication(
    options: SinkOptions, query_id: str, run_id: str | None, batch_id: int
) -> Publication:
    """Return the publication of a micro-batch, by which its repetition is recognised."""
    application = options.txn_app_id or query_id
    location = options.checkpoint_location
    return Publication(application, batch_id, query_id, run_id or "", location)


def publish(
    options: SinkOptions,
    staged: Sequence[StagedRows],
    publication: Publication | None,
    *,
    keep: bool = False,
) -> PublishResult:
    """Publish the staged files of all tasks, in their order, and remove them.

    A topic that did not exist when the write began is created before, with as many partitions
    as the rows need.  If the disk is full, or the process is killed in between, the topic is there
    and empty.

    Raises:
        UnknownTopicOrPartitionError, InvalidRecordError: The rows do not fit the new topic.
        EmbedlogError: As `embedlog.publish.transaction.publish`; nothing was published,
            and the staged files are left to `discard`.
    """
    freeze_gc()
    with open_log(options, keep=keep) as log:
        files = log.root.context.files
        staged_files = _resolve_new_topic(log.root, staged)
        client = Client(PRODUCER, _client_name(publication))
        result = transaction.publish(
            log.root,
            staged_files,
            publication,
            durability=options.durability,
            timeout=options.lock_timeout,
            restart=options.allow_restart,
            report=partial(log.root.listeners.published, client),
        )
        if result.repeated is not None and publication is not None:
            transaction.log_repetition(publication, result)
        staging.remove(files, staged_files)
        staging.sweep(files, time.time_ns() // 1_000_000)
    return result


def _client_name(publication: Publication | None) -> str:
    """Return the name under which a write of Spark is counted."""
    return "spark" if publication is None else f"spark {publication.application}"


def _resolve_new_topic(root: Root, staged: Sequence[StagedRows]) -> list[StagedFile]:
    """Return the staged files with the id of the topic that was new, after creating it.

    The murmur2 hash of a key selects among all partitions, and a task does not know how many
    the rows of others need; so rows with only a key fit only a topic of one partition.

    Raises:
        UnknownTopicOrPartitionError: Another process created it with too few partitions.
        InvalidRecordError: It has several partitions, and rows have a key and no partition.
    """
    numbers = {
        (topic, number)
        for rows in staged
        for topic, topic_id, number in rows.file.partitions
        if topic_id == NEW_TOPIC_ID
    }
    if not numbers:
        return [rows.file for rows in staged]
    name, highest = max(numbers)
    existing = root.topics().get(name)
    count = highest + 1 if existing is None else existing.partitions
    if highest >= count:
        raise UnknownTopicOrPartitionError(
            f"The topic was created during the write, and has partitions 0 to {count - 1}",
            topic=name,
            partition=highest,
            todo="Nothing was published. Add partitions to the topic and write again.",
        )
    if count > 1 and any(rows.placed_by_key for rows in staged):
        raise InvalidRecordError(
            "Some rows have a partition and others only a key, whose partition depends on how "
            f"many the topic has; it did not exist when the write began, and would have {count}",
            topic=name,
            todo="Nothing was published. Create the topic with the number of partitions that it "
            "should have, or set the partition of each row that has a key.",
        )
    try:
        topic_id = (existing or root.create_topic(name, count, TopicConfig())).id
    except TopicAlreadyExistsError:
        return _resolve_new_topic(root, staged)
    if existing is None:
        _logger.info("Created the topic %s by itself, with %d partitions", name, count)
    return [_with_topic_id(rows.file, topic_id) for rows in staged]


def _with_topic_id(file: StagedFile, new_topic_id: int) -> StagedFile:
    partitions = tuple(
        (topic, new_topic_id if topic_id == NEW_TOPIC_ID else topic_id, number)
        for topic, topic_id, number in file.partitions
    )
    return file._replace(partitions=partitions)


def discard(options: SinkOptions, staged: Sequence[StagedRows]) -> None:
    """Remove staged files; what was published of them is a copy, and stays."""
    files = Files(options.path, unsafe_filesystem=True)
    try:
        staging.remove(files, [rows.file for rows in staged])
    finally:
        files.close_all()
