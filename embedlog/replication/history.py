"""The histories of directories: which epochs of the metadata each has, and where each begins.

Each change of the metadata begins an *epoch*, with a number, and an id that no other epoch has.
Both databases of each directory that takes part note at which of their writes it began.  So
two directories can be compared as two logs of Raft can: what they have of the same epochs is
equal, and where the epochs part, each has what the other lacks.

When an epoch begins in some directories, one more write of the epoch before may be on its way
in another one: it was never acknowledged, since no directory takes part in two epochs.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any, NamedTuple

from embedlog import catalog, kv
from embedlog.catalog import PartitionInfo
from embedlog.errors import ReplicasDivergedError
from embedlog.hints import Hint
from embedlog.keyspace import LIVE_EPOCHS, LIVE_VERSION, METADATA_EPOCHS, METADATA_VERSION
from embedlog.partition.tail import peek_tail
from embedlog.replication.directory import LogDirectory

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
        """
        # Older ones are not known any more, or of a database that was begun again.
        first = max((each.epochs[0].number for each in (self, other) if each.epochs), default=0)
        mine, others = self._since(first), other._since(first)
        if not mine or not others or (mine[0].id == others[0].id and mine[0] != others[0]):
            return 0
        shared = 0
        while shared < min(len(mine), len(others)) and mine[shared] == others[shared]:
            shared += 1
        if shared < len(mine):
            return self.end - mine[shared].start + 1
        stop = others[shared].start if shared < len(others) else other.end + 1
        return max(self.end - stop, 0)

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


def put_epoch(table: Any, txn: kv.Txn, epoch: Epoch, *, keep: int | None = None) -> None:
    """Note an epoch, and forget old ones, but none from the number ``keep`` on."""
    table.put(txn, epoch.number, value=epoch[1:])
    first = epoch.number - _KEPT if keep is None else min(epoch.number - _KEPT, keep)
    for (number,) in list(takewhile(lambda key: key[0] < first, table.keys(txn))):
        table.delete(txn, number)


def histories(directory: LogDirectory) -> tuple[DirectoryHistory, ...]:
    """Return the histories of `state`, and of `live` since the boot, if that is open."""
    state = directory.state.read(lambda txn: _load(METADATA_EPOCHS, METADATA_VERSION, txn))
    if "live" not in directory.stores:
        return (state,)
    return state, directory.live.read(lambda txn: _load(LIVE_EPOCHS, LIVE_VERSION, txn))


def _load(epochs: Any, versions: Any, txn: kv.Txn) -> DirectoryHistory:
    version = versions.get(txn)
    return DirectoryHistory(
        tuple(Epoch(number, *row) for (number,), row in epochs.scan(txn)),
        0 if version is None else getattr(version, "version", version),
    )


def extra_writes(directory: LogDirectory, other: LogDirectory) -> int:
    """Return how many acknowledged writes a directory has that another one lacks.

    Without locks: the other one is read later, so it has what was written to both meanwhile.
    """
    mine = histories(directory)
    return sum(ours.extra(theirs) for ours, theirs in zip(mine, histories(other), strict=False))


def diverged(first: LogDirectory, second: LogDirectory) -> ReplicasDivergedError:
    """Return the error of two directories of which each has what the other lacks."""
    shared = {*histories(first)[0].epochs} & {*histories(second)[0].epochs}
    parted = max((epoch.number for epoch in shared), default=0)
    ends, other_ends = _ends(first), _ends(second)
    # The log's own topics last.
    names = sorted(ends.keys() | other_ends.keys(), key=lambda name: name.replace("_", "~"))
    different = [
        f"{name} ends at {ends.get(name, 0)} and at {other_ends.get(name, 0)}"
        for name in names
        if ends.get(name) != other_ends.get(name)
    ]
    records = "; ".join(different[:5]) or "all partitions end at the same offsets"
    return ReplicasDivergedError(
        f"{first.path} and {second.path} were each written to without the other",
        todo=f"After epoch {parted} of the metadata they have {extra_writes(first, second)} and "
        f"{extra_writes(second, first)} writes of their own; {records}. Decide which one counts, "
        "and remove the other."
        + Hint(
            f"Open {first.path} and call log.replicas.remove({second.path!r}, force=True), or the "
            "other way round.",
            f"Run `embedlog --root {first.path} replicas remove --force {second.path}`, or the "
            "other way round.",
        )
        + "Then move its files away, and add it again.",
    )


def _ends(directory: LogDirectory) -> dict[str, int]:
    """Return where each partition ends, as a directory has it."""
    ends = {}
    for topic in directory.state.read(lambda txn: list(catalog.topics(txn))):
        for number in range(topic.partitions):
            key = topic.key(number)
            tail = peek_tail(directory.live, key) if "live" in directory.stores else None
            info = catalog.PARTITIONS.get(directory.state, key) or PartitionInfo()
            end = info.recovery_offset if tail is None else tail.log_end_offset
            ends[f"{topic.name}-{number}"] = end
    return ends
