"""Deleting a topic: first its name, in one transaction on `state`, then all the rest.

The transaction that drops the name also notes the deletion in `state`, and the
note stays until no file and no row of the topic is left.  If the process dies or
an operation fails in between, the next process to open the log, or the next
round of housekeeping, does the rest.
"""

from __future__ import annotations

import logging

from embedlog import catalog, keyspace, kv
from embedlog.catalog import TopicInfo
from embedlog.errors import ClosedError, EmbedlogError
from embedlog.partition.context import Context
from embedlog.root import startup

_log = logging.getLogger("embedlog.partition")


def wait_for_writers(context: Context, topic: TopicInfo, timeout: float | None = None) -> None:
    """Wait until no operation that has begun goes on in any partition of a topic.

    One partition after the other, each for ``timeout`` seconds, or as long as for any
    lock: once the name is gone, what begins later finds no topic.

    Raises:
        LockTimeoutError: A process holds a partition for longer.
    """
    files = context.files
    for number in range(topic.partitions):
        path = topic.lock_path(number)
        if files.exists(path):
            lock = files.open(path, write=True)
            try:
                files.lock(lock, context.lock_timeout if timeout is None else timeout)
            finally:
                files.close(lock)


def finish(context: Context, topic: TopicInfo, timeout: float | None = None) -> None:
    """Remove the files and rows of a topic whose name is gone.  May be repeated, by anyone.

    Raises:
        LockTimeoutError: As `wait_for_writers`.
        StorageError: Something could not be removed; the note of the deletion stays.
    """
    wait_for_writers(context, topic, timeout)
    # The files first: to unlink them takes no space, which the rows may on a full disk.
    startup.remove_tree(context.files, topic.directory)
    keys = [topic.key(number) for number in range(topic.partitions)]
    context.live.write(lambda txn: keyspace.delete_partitions(txn, keyspace.LIVE, keys))

    def forget(txn: kv.Txn) -> None:
        # Again: a roll that was going on when the name went may have named a segment.
        keyspace.delete_partitions(txn, keyspace.STATE, keys)
        keyspace.DELETED_TOPICS.delete(txn, topic.id)

    context.state.write(forget)


def unfinished(state: kv.Store) -> list[TopicInfo]:
    """Return the deleted topics of which something may be left."""
    return state.read(catalog.deleted_topics)


def finish_all(context: Context) -> int:
    """Finish every deletion that was begun, and return how many.

    A failure is logged and left to the next call: the topics are deleted, and
    nothing else depends on what is left of them.
    """
    finished = 0
    for topic in unfinished(context.state):
        # The process that deletes it may be at it, and does not need us.
        finished += try_to_finish(context, topic, timeout=0)
    return finished


def try_to_finish(context: Context, topic: TopicInfo, timeout: float | None = None) -> bool:
    """Finish one deletion; a failure is logged, and left to the next open or housekeeping.

    Raises:
        ClosedError: The log was closed meanwhile.
    """
    try:
        finish(context, topic, timeout)
    except ClosedError:
        raise
    except EmbedlogError as error:
        _log.warning(
            "topic %s is deleted, but some of it is left in %s until the next round of "
            "housekeeping, or until the log is opened again: %s",
            topic.name,
            context.files.path(topic.directory),
            error,
        )
        return False
    return True
