"""Removing a directory from a log.

Order: its copies are made in other directories; one write of the metadata removes it, in all
directories that are online; the files of the others stop naming it; then its own files are
deleted, `embedlog.toml` last.  Killed before the write, the copies have moved, and nothing else
has changed; after it, the directory does not belong to the log any more, and what it still has
is garbage.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress

from embedlog.display import plural
from embedlog.errors import (
    EmbedlogError,
    IllegalStateError,
    NotEnoughReplicasError,
    ReplicaNotAvailableError,
)
from embedlog.files.paths import FORMAT_FILE
from embedlog.files.reserve import RESERVE_FILE
from embedlog.files.throttle import Throttle
from embedlog.hints import Hint
from embedlog.record import TopicPartition
from embedlog.replication import reassign
from embedlog.replication.directory import EPOCH_FILE, PROBE_FILE, LogDirectory
from embedlog.replication.metadata import MetadataImage, check_quorum, without
from embedlog.replication.recovery import HasDirectories
from embedlog.replication.unclean_election import elect_unclean
from embedlog.root import startup

_logger = logging.getLogger("embedlog.replication")
_FOLDERS = ("state", "live", "state.copy", "locks")


def remove_directories(
    root: HasDirectories,
    directories: Collection[int],
    *,
    force: bool = False,
    throttle: Throttle | None = None,
    progress: reassign.Progress | None = None,
) -> None:
    """Remove directories; their copies are made in the others first.

    Args:
        root: The log.
        directories: Their ids.
        force: Also remove those that cannot be used and have the only copy of a partition, and
            those without which too few would be left to decide: what only they have is lost.
        throttle: Limits the copying.
        progress: Called with the bytes that are copied, and all bytes.

    Raises:
        IllegalStateError: No other directory is online.
        NotEnoughReplicasError: Too few others are online, also with ``force``.
        ReplicaNotAvailableError: They have the only copy of a partition.
        EligibleLeadersNotAvailableError: They were given up, and had all in-sync copies of a
            partition, which waits for an election: see `elect_unclean`.
    """
    controller, gone = root.controller, set(directories)
    image = controller.current().image
    check_left(image, gone)
    usable = {each.id for each in controller.opened(sorted(gone)) if each.works()}
    broken = gone - usable
    only = only_copies(root, broken)
    if only and not force:
        raise ReplicaNotAvailableError(
            f"Without {_paths(root, broken)}, {plural(len(only), 'partition')} would have no copy: "
            + ", ".join(f"{name}-{number}" for name, number in only[:5])
            + (", …" if len(only) > 5 else ""),
            replicas=tuple(image.directories[each].path for each in broken),
            todo="Bring the directory back."
            + Hint(
                "Or lose these records with remove_replica(path, force=True).",
                "Or lose these records with `embedlog replicas remove PATH --force`.",
            ),
        )
    moves = reassign.plan(root, gone)
    opened = {each: controller.directories.get(each) for each in gone}
    if force and broken:
        controller.give_up(broken)
        gone -= broken
        root.write_members()
        elect_unclean(root, only)
    else:
        check_quorum(without(image, gone), set(image.online) - gone)
    while True:
        outcome = reassign.run(root, moves, throttle=throttle, progress=progress)
        left = [
            f"{info.name}-{number}"
            for info, number, assignment in reassign.assignments(root)
            if (info.name, number) in moves and gone & set(assignment.replicas)
        ]
        if left:
            why = "another process cancelled the moves" if outcome.superseded else "one is offline"
            raise NotEnoughReplicasError(
                f"{plural(len(left), 'partition')} still have copies in the directories, such as "
                f"{left[0]}: {why}",
                todo="Try again.",
            )
        if not gone or controller.remove(gone):
            break
        moves = reassign.plan(root, gone)  # a topic was created meanwhile
    root.write_members()
    for directory in opened.values():
        if directory is not None and directory.id not in broken:
            with suppress(EmbedlogError):
                _clear(directory)
    take_over(root)


def take_over(root: HasDirectories) -> None:
    """Make the log of each partition that of its leader: programs that only read cannot do it.

    Where it is not possible now, the next program that writes does it.
    """
    for log in root.partition_logs(root.topics().values()):
        try:
            log.tail()
        except EmbedlogError as error:
            _logger.warning("%s-%d: %s", log.topic, log.partition, error)


def check_left(image: MetadataImage, directories: Collection[int]) -> None:
    """Raise if no directory that is online would be left.

    Raises:
        IllegalStateError: That is so.
    """
    if set(image.online) <= set(directories):
        raise IllegalStateError(
            "No directory that is online would be left", todo="Bring another one online first."
        )


def only_copies(root: HasDirectories, broken: Collection[int]) -> list[TopicPartition]:
    """Return the partitions whose in-sync replicas are all in some directories."""
    return [
        TopicPartition(info.name, number)
        for info, number, assignment in reassign.assignments(root)
        if set(assignment.isr) <= set(broken)
    ]


def _paths(root: HasDirectories, directories: Collection[int]) -> str:
    infos = root.controller.image.directories
    return ", ".join(infos[each].path for each in directories)


def _clear(directory: LogDirectory) -> None:
    """Delete what a directory has of a log that it does not belong to any more."""
    files = directory.files
    for topic in files.list("topics"):
        startup.remove_tree(files, f"topics/{topic}")
    for folder in ("topics", *_FOLDERS):
        if files.exists(folder):
            for name in files.list(folder):
                files.unlink(f"{folder}/{name}", missing_ok=True)
            files.remove_directory(folder)
    for name in (PROBE_FILE, "wake", RESERVE_FILE, EPOCH_FILE, startup.CLEAN_FILE, FORMAT_FILE):
        files.unlink(name, missing_ok=True)
