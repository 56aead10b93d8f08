"""The metadata of a log over several directories: which there are, and who has which partition.

It is in `state`, and so in every directory: the rows of `DIRECTORIES` and `ASSIGNMENTS`, and
one row with the *epoch*, which grows with each change of them.  A process works with a
`MetadataImage` of one epoch, and takes the next one when an epoch page (`LogDirectory`) or
a commit shows a higher one.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from embedlog import kv
from embedlog.errors import InvalidReplicationAssignmentError, NotEnoughReplicasError
from embedlog.hints import GIVE_UP, Hint
from embedlog.keyspace import ASSIGNMENTS as _ASSIGNMENTS
from embedlog.keyspace import DIRECTORIES as _DIRECTORIES
from embedlog.keyspace import METADATA_EPOCHS
from embedlog.keyspace import METADATA_VERSION as _METADATA_VERSION
from embedlog.replication.isr import FlushedCopy, PartitionAssignment

_KEPT = 1000
"""How many epochs are kept at least."""


class Epoch(NamedTuple):
    """An epoch, as one database has it."""

    number: int
    id: int
    start: int
    """The number of its first write."""


class DirectoryHistory(NamedTuple):
    """The epochs that a database has, in order, and the number of its last write."""

    epochs: tuple[Epoch, ...]
    end: int

    def extra(self, other: DirectoryHistory) -> int:
        """Return how many writes this history has that the other lacks.

        The one that may have been on its way when the other went on without it does not count.
        Nor do epochs that were only begun, if the other has begun others instead: until one has
        another write, it may not be in all of its directories, and nothing was done in it.
        """
        mine, others, shared = self._beside(other)
        if not mine or not others:
            return 0
        if shared < len(mine):
            count = self.end - mine[shared].start + 1
            is_begun_only = count == len(mine) - shared
            return 0 if is_begun_only and shared < len(others) else count
        stop = others[shared].start if shared < len(others) else other.end + 1
        return max(self.end - stop, 0)

    def parted(self, other: DirectoryHistory) -> bool:
        """Whether each has begun an epoch that the other lacks."""
        mine, others, shared = self._beside(other)
        return shared < min(len(mine), len(others))

    def beyond(self, other: DirectoryHistory) -> str:
        """Return what this history has after the last epoch that both have, for an error."""
        mine, _, shared = self._beside(other)
        begun = ", ".join(f"{epoch.number} from write {epoch.start}" for epoch in mine[shared:])
        return f"epochs {begun or '-'}, last write {self.end}"

    def _beside(self, other: DirectoryHistory) -> tuple[list[Epoch], list[Epoch], int]:
        """Return the epochs of both that can be compared, and how many both have."""
        # Older ones are not known any more, or of a database that was begun again.
        first = max((each.epochs[0].number for each in (self, other) if each.epochs), default=0)
        mine, others = self._since(first), other._since(first)
        if not mine or not others or (mine[0].id == others[0].id and mine[0] != others[0]):
            return [], [], 0
        shared = 0
        while shared < min(len(mine), len(others)) and mine[shared] == others[shared]:
            shared += 1
        return mine, others, shared

    def has_all(self, other: DirectoryHistory, until: int) -> bool:
        """Return whether this history has each epoch of the other before the one ``until``.

        It may lack one that began in the last write before: that in which its directory failed.
        """
        after = [epoch.start for epoch in other.epochs if epoch.number >= until]
        last_write = (after[0] if after else other.end + 1) - 1
        before = [epoch for epoch in other.epochs if epoch.start < last_write]
        return not before or before[-1] in self.epochs

    def _since(self, number: int) -> list[Epoch]:
        return [epoch for epoch in self.epochs if epoch.number >= number]


def note_epoch(table: Any, txn: kv.Txn, epoch: Epoch, *, keep: int | None = None) -> None:
    """Note an epoch, and forget old ones, but none from the number ``keep`` on."""
    table.put(txn, epoch.number, value=epoch[1:])
    first = epoch.number - _KEPT if keep is None else min(epoch.number - _KEPT, keep)
    for (number,) in list(takewhile(lambda key: key[0] < first, table.keys(txn))):
        table.delete(txn, number)


JUST_ADDED = "it was just added"
"""Why a directory is offline that was never online."""


class DirectoryInfo(NamedTuple):
    """A directory of the log, as the metadata has it."""

    path: str
    rack: str | None = None
    online: bool = True
    reason: str = ""
    """Why it is offline, or was until a return that is not confirmed yet; `JUST_ADDED` if it has
    never been online."""
    since: int = 0
    """The epoch in which it came online, or went offline."""
    is_mount_point: bool = False
    """Whether a file system is mounted at its path: without it, an empty directory there is no
    new disk."""
    offline_since: int = 0
    """The epoch in which it went offline, until a return is confirmed."""


class MetadataVersion(NamedTuple):
    """Which writes a `state` has."""

    version: int
    """The number of writes; each changes every directory that is online."""
    epoch: int
    controller_id: int
    """The directory whose databases are read, and whose wake page counts."""


_pack_json, _unpack_json = _ASSIGNMENTS.pack, _ASSIGNMENTS.unpack
_FIELDS = tuple(each.name for each in fields(PartitionAssignment))


def _unpack_assignment(data: bytes) -> PartitionAssignment:
    values: dict[str, Any] = {
        key: tuple(each) if isinstance(each, list) else each
        for key, each in _unpack_json(data).items()
    }
    values["flushed"] = tuple(FlushedCopy(*each) for each in values["flushed"])
    return PartitionAssignment(**values)


ASSIGNMENTS = _ASSIGNMENTS.coded(
    lambda assignment: _pack_json({name: getattr(assignment, name) for name in _FIELDS}),
    _unpack_assignment,
)
DIRECTORIES = _DIRECTORIES.coded(
    lambda info: _pack_json(info._asdict()), lambda data: DirectoryInfo(**_unpack_json(data))
)
METADATA_VERSION = _METADATA_VERSION.typed(MetadataVersion)


@dataclass(frozen=True, slots=True)
class MetadataImage:
    """The metadata as of one epoch."""

    epoch: int = 0
    epoch_id: int = 0
    controller_id: int = 0
    directories: Mapping[int, DirectoryInfo] = field(default_factory=dict)
    assignments: Mapping[bytes, PartitionAssignment] = field(default_factory=dict)
    """By the key of the partition."""

    @classmethod
    def load(cls, txn: kv.Txn) -> MetadataImage:
        """Read the metadata in a transaction of `state`."""
        version = METADATA_VERSION.get(txn)
        if version is None:
            return cls()
        directories = {directory: info for (directory,), info in DIRECTORIES.scan(txn)}
        assignments = {key: assignment for (key,), assignment in ASSIGNMENTS.scan(txn)}
        row = METADATA_EPOCHS.get(txn, version.epoch)
        return cls(
            version.epoch,
            0 if row is None else row.id,
            version.controller_id,
            MappingProxyType(directories),
            MappingProxyType(assignments),
        )

    @property
    def online(self) -> tuple[int, ...]:
        """The directories that have every write, in order."""
        return tuple(each for each, info in self.directories.items() if info.online)

    def check_directories(self, replicas: Collection[int], **where: Any) -> None:
        """Raise `InvalidReplicationAssignmentError` unless these directories exist."""
        unknown = sorted(each for each in replicas if each not in self.directories)
        if unknown:
            raise InvalidReplicationAssignmentError(
                f"The log has no directory {unknown[0]}",
                **where,
                todo=Hint("See log.replicas.", "See `embedlog replicas list`."),
            )

    @property
    def racks(self) -> dict[int, str | None]:
        """The racks of the directories that are online."""
        return {each: self.directories[each].rack for each in self.online}


def put_epoch(txn: kv.Txn, epoch: int, controller_id: int) -> None:
    """Begin an epoch; the write that this is part of adds the rest of the row."""
    version = METADATA_VERSION.get(txn) or MetadataVersion(0, 0, 0)
    changed = version._replace(epoch=epoch, controller_id=controller_id)
    METADATA_VERSION.put(txn, value=changed)
    # A directory that is offline is compared from where it left on.
    left = [info.offline_since - 1 for _, info in DIRECTORIES.scan(txn) if info.offline_since]
    begun = Epoch(epoch, secrets.randbits(64), version.version + 1)
    note_epoch(METADATA_EPOCHS, txn, begun, keep=min(left, default=None))


def counted(image: MetadataImage, online: Collection[int]) -> dict[int, str]:
    """Return the paths of the directories that count for a majority, by their ids.

    One that was added counts once it is known to have come online: it has written nothing before.
    """
    return {
        each: info.path
        for each, info in image.directories.items()
        if info.reason != JUST_ADDED or each in online
    }


def quorum_of(count: int) -> int:
    """Return how many of the directories of a log have to be online for a change of its metadata.

    A majority; but of two directories, one: that begins an epoch, and if the other one goes on
    alone too, their histories part.
    """
    return 1 if count <= 2 else count // 2 + 1


def check_quorum(
    image: MetadataImage, online: Collection[int], without: Collection[int] = ()
) -> None:
    """Raise unless these directories may decide for all of them, those left out that are given up.

    Raises:
        NotEnoughReplicasError: The others could have decided otherwise, without these.
    """
    paths = {each: path for each, path in counted(image, online).items() if each not in without}
    count = len(paths)
    required = quorum_of(count)
    if len(online) < required:
        offline = [path for each, path in paths.items() if each not in online]
        raise NotEnoughReplicasError(
            f"{len(online)} of {count} directories of the log are online, and a change of its "
            f"metadata needs {required}; {', '.join(offline)} cannot be used",
            todo="Bring a directory back."
            + GIVE_UP
            + Hint('Open the log with mode="r" to read what is there.', ""),
            in_sync=len(online),
            required=required,
        )


def paths_of(directories: Iterable[DirectoryInfo]) -> list[str]:
    """Return the paths of directories."""
    return [info.path for info in directories]
