"""The state of a replicated partition, and the rules of its in-sync replicas.

`PartitionAssignment` is what the metadata says of a partition: an immutable value, whose
methods return the next one.  Each change has a higher ``partition_epoch``, by which a process
can tell that it decides on an old state; a change of leader has a higher ``leader_epoch``
too, which fences the leader before it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from embedlog.errors import (
    IllegalStateError,
    InvalidReplicationAssignmentError,
    NotEnoughReplicasError,
)

NO_DIRECTORY = 0
"""In an ISR: the copy that was in sync is lost."""


class FlushedCopy(NamedTuple):
    """What a directory had of a partition when it was last in sync."""

    directory: int
    offset: int
    """What is below was flushed."""
    leader_epoch: int | None
    """Of the last of these records: where the log has another one there, it is another log."""


@dataclass(frozen=True, slots=True)
class PartitionAssignment:
    """The replicas of a partition, its leader, and who is in sync."""

    replicas: tuple[int, ...]
    """The directories with a copy, the preferred leader first; in a reassignment, the old and
    the new ones."""
    isr: tuple[int, ...]
    """The in-sync replicas.  It is never empty: without a leader, these alone can lead."""
    leader: int | None
    leader_epoch: int = 0
    """Of each leader; larger than that of any leader before it."""
    partition_epoch: int = 0
    """The number of changes."""
    adding_replicas: tuple[int, ...] = ()
    removing_replicas: tuple[int, ...] = ()
    leader_recovering: bool = False
    """Whether the leader was not in sync when it was elected, so that its log may be another
    one above some offset (Kafka's LeaderRecoveryState, KIP-704).  Without a leader: whether
    those that may lead were not in sync."""
    flushed: tuple[FlushedCopy, ...] = ()
    """What directories had flushed that have come back, and have not caught up yet."""

    @classmethod
    def create(
        cls, replicas: Sequence[int], alive: Collection[int] | None = None
    ) -> PartitionAssignment:
        """Return the state of a new partition: all that are alive are in sync.

        Raises:
            InvalidReplicationAssignmentError: ``replicas`` is empty, or one occurs twice.
            IllegalStateError: None of them is alive.
        """
        check_replicas(replicas)
        isr = tuple(each for each in replicas if alive is None or each in alive)
        if not isr:
            raise IllegalStateError(
                f"None of the replicas {list(replicas)} can be written",
                todo="Bring one of the directories back first.",
            )
        return cls(tuple(replicas), isr, isr[0])

    @property
    def in_sync_followers(self) -> tuple[int, ...]:
        """Those to which an append must be written before it is published."""
        return tuple(each for each in self.isr if each != self.leader)

    @property
    def is_reassigning(self) -> bool:
        """Whether replicas are being added or removed."""
        return bool(self.adding_replicas or self.removing_replicas)

    @property
    def target_replicas(self) -> tuple[int, ...]:
        """The replicas after the reassignment; now, if there is none."""
        return _without(self.replicas, self.removing_replicas)

    @property
    def original_replicas(self) -> tuple[int, ...]:
        """The replicas before the reassignment; now, if there is none."""
        return _without(self.replicas, self.adding_replicas)

    @property
    def given_up_replicas(self) -> tuple[int, ...]:
        """What a reassignment had begun to add that another one has replaced since."""
        return tuple(each for each in self.adding_replicas if each in self.removing_replicas)

    # In-sync replicas

    def check_min_isr(self, min_insync_replicas: int, **where: Any) -> None:
        """Refuse an append with ``acks="all"`` unless enough replicas are in sync.

        As in Kafka, a partition with fewer replicas than the setting says needs all of them.
        ``where`` names the partition in the error.

        Raises:
            NotEnoughReplicasError: Fewer are in sync.
        """
        if self.is_under_min_isr(min_insync_replicas):
            raise NotEnoughReplicasError(
                "The partition has no leader"
                if self.leader is None
                else f"{len(self.isr)} of {len(self.replicas)} replicas are in sync, and "
                f"min.insync.replicas is {min_insync_replicas}",
                todo="Bring the other directories back, or send with acks=1.",
                in_sync=len(self.isr),
                required=min(min_insync_replicas, len(self.replicas)),
                **where,
            )

    def is_under_min_isr(self, min_insync_replicas: int) -> bool:
        """Whether too few replicas are in sync for ``acks="all"``."""
        return self.leader is None or len(self.isr) < min(min_insync_replicas, len(self.replicas))

    def shrink(self, replicas: Collection[int]) -> PartitionAssignment:
        """Return the state without these in-sync replicas; the leader, if there is one, stays.

        The leader epoch stays, too, as in Kafka since 3.6 (KAFKA-15021).
        """
        isr = tuple(each for each in self.isr if each == self.leader or each not in replicas)
        return self if isr in (self.isr, ()) else self._next(isr=isr)

    def expand(self, replica: int) -> PartitionAssignment:
        """Return the state with one more in-sync replica, which has all of the leader's log.

        It is this one without a leader, or if the directory has no replica any more.
        """
        if self.leader is None or replica in self.isr or replica not in self.replicas:
            return self
        isr = tuple(each for each in self.replicas if each in self.isr or each == replica)
        # It may lose something later.
        return self.returned(replica, None)._next(isr=isr)

    def returned(self, directory: int, flushed: FlushedCopy | None) -> PartitionAssignment:
        """Return the state after a directory came back, with what its copy had flushed."""
        after = tuple(each for each in self.flushed if each.directory != directory)
        after = after if flushed is None else (*after, flushed)
        return self if after == self.flushed else replace(self, flushed=after)

    def without_copy(self, directory: int) -> PartitionAssignment:
        """Return the state after a directory came back without the copy that it had.

        If no other one is in sync, only an unclean election can find a leader.
        """
        state = self.returned(directory, None)
        if directory not in self.isr:
            return state
        return state._next(isr=_without(self.isr, [directory]) or (NO_DIRECTORY,))

    # Elections

    def elect(self, alive: Collection[int]) -> PartitionAssignment:
        """Return the state after an election; this one if nothing changes.

        The leader is kept if it is alive and in sync; otherwise the first replica that is both
        leads, as in Kafka.  Only replicas that are alive stay in sync.  If none may lead, the
        partition is offline: it has no leader, and keeps its in-sync replicas, so that they can
        lead when they return.

        Args:
            alive: The directories that work.
        """
        in_sync = tuple(each for each in self.isr if each in alive)
        for each in (self.leader, *self.replicas):
            if each in in_sync and each in self.replicas:
                return self._elected(each, in_sync)
        return self._elected(None, self.isr)

    def elect_unclean(self, leader: int) -> PartitionAssignment:
        """Return the state after a replica that is not in sync was elected.

        It alone is in sync, since the others must truncate to its log first.
        """
        return replace(self._elected(leader, (leader,)), leader_recovering=True)

    def elect_preferred(self, alive: Collection[int]) -> PartitionAssignment:
        """Return the state with the preferred leader; this one if it is not in sync or alive."""
        preferred = self.replicas[0]
        if preferred == self.leader or preferred not in self.isr or preferred not in alive:
            return self
        return self._elected(preferred, tuple(each for each in self.isr if each in alive))

    def _elected(self, leader: int | None, isr: tuple[int, ...]) -> PartitionAssignment:
        if leader != self.leader:
            return self._next(
                leader=leader,
                isr=isr,
                leader_epoch=self.leader_epoch + 1,
                leader_recovering=self.leader is None and self.leader_recovering,
            )
        return self if isr == self.isr else self._next(isr=isr)

    # Reassignments

    def begin_reassignment(self, target: Sequence[int]) -> PartitionAssignment:
        """Return the state in which the partition moves to other replicas.

        The old replicas stay until `finish_reassignment`, and so does what a reassignment that
        this one replaces had begun to add.  A target with the same replicas in another order only
        changes who is preferred.

        Raises:
            InvalidReplicationAssignmentError: ``target`` is empty, or a replica occurs twice.
        """
        check_replicas(target)
        removing = tuple(sorted(set(self.replicas) - set(target)))
        adding = tuple(sorted({*self.adding_replicas, *target} - set(self.original_replicas)))
        begun = replace(
            self,
            replicas=(*target, *removing),
            adding_replicas=adding,
            removing_replicas=removing,
        )
        return self if begun == self else begun._next()

    def finish_reassignment(self, alive: Collection[int]) -> PartitionAssignment:
        """Return the state with the new replicas only, if all of them are in sync.

        Otherwise, or without a reassignment, returns this state.  Replicas that leave are
        fenced by a new leader epoch, also if the leader stays.
        """
        target = self.target_replicas
        if not self.is_reassigning or not target or not set(target) <= set(self.isr):
            return self
        return self._replaced(target, alive, fences=bool(self.removing_replicas))

    def cancel_reassignment(self, alive: Collection[int]) -> PartitionAssignment:
        """Return the state with the old replicas only.

        Raises:
            IllegalStateError: Only new replicas are in sync.
        """
        if not self.is_reassigning:
            return self
        if set(self.isr) <= set(self.adding_replicas):
            raise IllegalStateError(
                "Only replicas that the reassignment added are in sync",
                todo="Let it finish, and move the partition back.",
            )
        return self._replaced(
            self.original_replicas,
            alive,
            fences=bool(self.adding_replicas),
            or_alone=NO_DIRECTORY,  # which is what the ISR was
        )

    def without(
        self, directories: Collection[int], alive: Collection[int], spare: int
    ) -> PartitionAssignment:
        """Return the state after directories were given up, with what only they had.

        If they had all in-sync replicas, the partition waits for an unclean election of another
        one; if they had all replicas, it begins again, empty, in the directory ``spare``.

        Args:
            directories: The directories that are given up.
            alive: The others that work.
            spare: A directory for a partition that would have no replica any more.
        """
        if not set(directories) & {*self.replicas, *self.isr}:
            return self
        replicas = _without(self.replicas, directories) or (spare,)
        return self._replaced(
            replicas,
            alive,
            or_alone=NO_DIRECTORY if set(replicas) & set(self.replicas) else spare,
            adding_replicas=_without(self.adding_replicas, directories),
            removing_replicas=_without(self.removing_replicas, directories),
        )

    def _replaced(
        self,
        replicas: tuple[int, ...],
        alive: Collection[int],
        *,
        fences: bool = False,
        or_alone: int | None = None,
        adding_replicas: tuple[int, ...] = (),
        removing_replicas: tuple[int, ...] = (),
    ) -> PartitionAssignment:
        """Return the state with other replicas, after an election among them.

        Args:
            replicas: The replicas.
            alive: The directories that work.
            fences: Whether the leader epoch is raised although the leader stays.
            or_alone: What the ISR is if none of the replicas was in sync.
            adding_replicas: Those that a reassignment still adds.
            removing_replicas: Those that it still removes.
        """
        isr = tuple(each for each in replicas if each in self.isr)
        if not isr and or_alone is not None:
            isr = (or_alone,)
        state = replace(
            self,
            replicas=replicas,
            isr=isr,
            adding_replicas=adding_replicas,
            removing_replicas=removing_replicas,
        )
        elected = state.elect(alive)
        return replace(
            elected,
            leader_epoch=self.leader_epoch + (fences or elected.leader != self.leader),
            partition_epoch=self.partition_epoch + 1,
            leader_recovering=elected.leader_recovering or not set(elected.isr) & set(self.isr),
        )

    def _next(self, **changes: Any) -> PartitionAssignment:
        return replace(self, partition_epoch=self.partition_epoch + 1, **changes)


def _without(replicas: Sequence[int], leaving: Collection[int]) -> tuple[int, ...]:
    return tuple(each for each in replicas if each not in leaving)


def check_replicas(replicas: Sequence[int]) -> None:
    """Raise unless a partition may have these replicas.

    Raises:
        InvalidReplicationAssignmentError: There are none, or one occurs twice.
    """
    if not replicas or len(set(replicas)) < len(replicas):
        raise InvalidReplicationAssignmentError(
            f"A partition must have distinct replicas, got {list(replicas)}"
        )
