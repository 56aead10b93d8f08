"""Removing the files of copies that a partition does not have, or not any more.

Whoever moves a copy away removes its files, unless another process is writing them: that one
has the copy's lock, or has just created a file.  It looks again when it is done, so one of the
two always sees that they are to be removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from embedlog import catalog
from embedlog.errors import StorageError
from embedlog.keyspace import PARTITION_KEY
from embedlog.replication.controller import Controller
from embedlog.replication.directory import LogDirectory
from embedlog.root import startup


def remove_copies(
    controller: Controller, key: bytes, topic: str, directories: Iterable[int] | None = None
) -> None:
    """Remove the files of a partition from directories that have no copy of it, or not any more.

    A process that is making such a copy removes it itself.

    Args:
        controller: Knows the assignment.
        key: The key of the partition.
        topic: The directory of its topic.
        directories: The directories; by default all.
    """
    path = f"{topic}/{PARTITION_KEY.unpack(key)[1]}"
    for each in list(controller.directories) if directories is None else directories:
        directory = controller.directories.get(each)
        if (
            directory is not None
            and _is_unassigned(controller, key, each)
            and directory.files.exists(path)
        ):
            with suppress(StorageError), lock_copy(directory, key) as free:
                # Checked again under the lock: it may have been assigned again meanwhile.
                if free and _is_unassigned(controller, key, each):
                    startup.remove_folder(directory.files, path)
                    if controller.assignment(key) is None:
                        directory.files.remove_directory(topic)


def _is_unassigned(controller: Controller, key: bytes, directory: int) -> bool:
    """Whether a partition has no copy in a directory, or was deleted."""
    assignment = controller.assignment(key)
    if assignment is not None:
        return directory not in assignment.replicas
    topic_id = PARTITION_KEY.unpack(key)[0]
    topics = controller.state.read(lambda txn: list(catalog.topics(txn)))
    return all(topic.id != topic_id for topic in topics)


@contextmanager
def lock_copy(directory: LogDirectory, key: bytes) -> Iterator[bool]:
    """Hold the lock of who makes a copy; yields False if another process or thread has it."""
    topic_id, partition = PARTITION_KEY.unpack(key)
    path = f"locks/{topic_id}-{partition}.copy"
    with directory.files.opened(path, write=True, create=True) as lock:
        yield directory.files.try_lock(lock)
