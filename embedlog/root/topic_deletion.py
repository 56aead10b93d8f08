"""Deleting a topic: first its name, in one transaction on `state`, then its files and rows.

The transaction that drops the name also notes the deletion in `state`.  The note stays
until no file and no row of the topic is left.  If the process dies or an operation fails
before that, the next process to open the log, or the next round of housekeeping, removes
the rest.
"""

from __future__ import annotations

from embedlog import catalog, keyspace, kv
from embedlog.catalog import TopicInfo
from embedlog.errors import ClosedError, EmbedlogError
from embedlog.lazy import logging
from embedlog.partition.state import Context
from embedlog.root import startup

_logger = logging.getLogger("embedlog.root")


def wait_for_writers(context: Context, topic: TopicInfo, timeout: float | None = None) -> None:
    """Wait until all operations in progress in the partitions of a topic have ended.

    Waits ``timeout`` seconds for each partition, by default the ``lock_timeout``.  Once the
    name is dropped, no operation can begin.

    Raises:
        LockTimeoutError: A process holds a partition for longer.
    """
    files, timeout = context.files, context.lock_timeout if timeout is None else timeout
    with context.log_lock.shared(timeout):
        for path in filter(files.exists, map(topic.lock_path, range(topic.partitions))):
            with files.opened(path, write=True) as lock:
                files.lock(lock, timeout)


def finish(context: Context, topic: TopicInfo, timeout: float | None = None) -> None:
    """Remove the files and rows of a topic whose name was dropped; any process may repeat it.

    Raises:
        LockTimeoutError: As `wait_for_writers`.
        StorageError: Something could not be removed; the note of the deletion stays.
    """
    wait_for_writers(context, topic, timeout)
    # The files first: unlinking them takes no space, while deleting rows may.
    startup.remove_tree(context.files, topic.directory)
    keys = [topic.key(number) for number in range(topic.partitions)]
    context.live.write(lambda txn: keyspace.delete_partitions(txn, keyspace.LIVE, keys))

    def forget(txn: kv.Txn) -> None:
        # Again: a roll in progress when the name was dropped may have named a segment.
        keyspace.delete_partitions(txn, keyspace.STATE, keys)
        keyspace.DELETED_TOPICS.delete(txn, topic.id)

    context.state.write(forget)


def finish_all(context: Context) -> None:
    """Finish all deletions in progress, as `try_to_finish`."""
    for topic in context.state.read(catalog.deleted_topics):
        # With timeout 0: the process that deletes it may still be doing so.
        try_to_finish(context, topic, timeout=0)


def try_to_finish(context: Context, topic: TopicInfo, timeout: float | None = None) -> None:
    """Finish one deletion; a failure is logged and left to the next open or housekeeping.

    Nothing depends on what is left of a deleted topic.

    Raises:
        ClosedError: The log was closed meanwhile.
    """
    try:
        finish(context, topic, timeout)
    except ClosedError:
        raise
    except EmbedlogError as error:
        _logger.warning(
            "topic %s is deleted, but some of its files are left in %s until the next round of "
            "housekeeping, or until the log is opened again: %s",
            topic.name,
            context.files.path(topic.directory),
            error,
        )
