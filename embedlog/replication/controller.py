"""Which directories are online, who leads which partition, and what happens when a disk fails.

Every process has a `Controller`, with the newest `MetadataImage` that it knows.  The process
that finds a directory broken takes it offline itself, in one write of the metadata: the
directory leaves all ISRs, and other in-sync replicas are elected for the partitions that it
led.  So no process waits for another one, and a program that is running continues with its next
operation.

Order, when a directory breaks: the epoch pages show a new epoch; then the metadata is written
to the remaining directories.  If it were the other way round, and the process was killed in
between, the others would continue with old metadata: a new in-sync replica, for example, would
miss what they append.  A process that is killed before it writes the metadata leaves an epoch
that is in no database; until the housekeeping writes one, all processes look for it in every
operation.  A process that has not looked at the pages yet writes to more directories than it
has to.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from embedlog import catalog, kv
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    NotEnoughReplicasError,
    ReplicaNotAvailableError,
    StorageError,
)
from embedlog.files.paths import is_mount_point
from embedlog.keyspace import MIRRORED_TOPICS, PARTITION_KEY
from embedlog.partition import leader_epochs
from embedlog.partition.tail import TAILS
from embedlog.replication.directory import (
    DATABASE_ERRORS,
    LogDirectory,
    describe,
    diverged,
    extra_writes,
    histories,
)
from embedlog.replication.isr import NO_DIRECTORY, FlushedCopy, PartitionAssignment
from embedlog.replication.metadata import (
    ASSIGNMENTS,
    DIRECTORIES,
    JUST_ADDED,
    METADATA_VERSION,
    DirectoryInfo,
    MetadataImage,
    check_quorum,
    counted,
    put_epoch,
    quorum_of,
)
from embedlog.replication.store import EPOCH_BITS, ReplicatedStore

if TYPE_CHECKING:
    from embedlog.replication.root import ReplicatedRoot

_logger = logging.getLogger("embedlog.replication")


class Controller:
    """The directories of a log, as one process has them open.

    Any thread may call it.

    Args:
        root: The log.
        directories: Those that could be opened, by their ids; with open databases.
    """

    def __init__(self, root: ReplicatedRoot, directories: Mapping[int, LogDirectory]) -> None:
        # Other threads may change it at any time: iterate over a copy.
        self.directories = dict(directories)
        self._lock = threading.RLock()
        self._root, self._given_up = root, frozenset(root.given_up)
        self.image = MetadataImage()
        self.epoch = 0
        self.read_from: tuple[LogDirectory, int]
        """The directory that is read, and what the versions of its databases begin with: together,
        since another thread may change both in the middle of a read."""
        self._epoch_pages: tuple[memoryview, ...] = ()
        self.online: tuple[LogDirectory, ...] = ()
        """Those that every write must change, in the order of their ids."""
        self.unopened: Mapping[int, Exception] = {}
        """Those that are online for other processes, and that this one cannot open: until it can,
        or has taken them offline, it must not write without them."""
        self.directory: LogDirectory
        """The controller's directory, which is read."""
        self.state = ReplicatedStore(self, "state")
        self.live = ReplicatedStore(self, "live")

    @property
    def writable(self) -> bool:
        """Whether the log was opened to write."""
        return all(each.files.writable for each in list(self.directories.values()))

    # The image

    def moved(self) -> bool:
        """Whether another process has noted a newer epoch; a load for each directory."""
        epoch = self.epoch
        # Not `any`, which takes three times as long: this is called a dozen times per append.
        for page in self._epoch_pages:  # noqa: SIM110
            if page[0] > epoch:
                return True
        return False

    def is_stale(self) -> bool:
        """Whether the metadata has a newer epoch; by the holder of the lock of a database.

        An epoch is noted before it is committed, so it may not come: its process was killed.
        `ReplicationJob` then writes another one.
        """
        for directory in self.online:
            with suppress(*DATABASE_ERRORS, ClosedError):
                version = METADATA_VERSION.get(directory.state)
                if version is not None and version.epoch > self.epoch:
                    return True
        return False

    def current(self) -> Controller:
        """Return this object, with the newest image."""
        if self.moved():
            self.refresh()
        return self

    def opened(self, directories: Sequence[int]) -> list[LogDirectory]:
        """Return those of some directories that are open, in their order."""
        found = [self.directories.get(each) for each in directories]
        if None in found:
            with self._lock:  # another thread may just be opening one of them again
                found = [self.directories.get(each) for each in directories]
        return [directory for directory in found if directory is not None]

    def refresh(self, failed: Mapping[int, Exception] | None = None) -> None:
        """Take the newest image that any directory has; ``failed`` are known not to work.

        An epoch that was noted may never come, so a write that takes directories offline must not
        come back here for the same ones.
        """
        known = failed or {}
        found = self._take_newest()
        if not found.keys() <= known.keys():
            # Without the lock, which no thread may wait for while it holds that of a database.
            self.take_offline({**known, **found})

    def _take_newest(self) -> dict[int, Exception]:
        """As `refresh`, but return the errors of the directories that cannot be opened."""
        with self._lock:
            best, source = self.image, None
            for directory in list(self.directories.values()):
                if "state" not in directory.stores:
                    continue
                try:
                    version = METADATA_VERSION.get(directory.state)
                    if version is not None and (source is None or version.epoch > best.epoch):
                        image = directory.state.read(MetadataImage.load)
                        if image.epoch >= best.epoch:
                            best, source = image, directory
                except (*DATABASE_ERRORS, ClosedError):
                    continue  # It is broken, or being replaced: others have the metadata.
            return self._adopt(best)

    def _adopt(self, image: MetadataImage) -> dict[int, Exception]:
        """Work with an image from now on; opens the directories that have come back.

        Returns the errors of those that cannot be opened.
        """
        failed: dict[int, Exception] = {}
        for each in self.directories.keys() - image.directories.keys() if image.epoch else ():
            self.directories.pop(each).detach()  # it was removed
        for each, info in image.directories.items():
            opened = self.directories.get(each)
            if opened is not None and (not info.online or info.since > opened.opened_epoch):
                del self.directories[each]
                opened.detach()
            if info.online and each not in self.directories:
                try:
                    directory = self._root.open_directory(each, info.path)
                    directory.opened_epoch = image.epoch
                    self.directories[each] = directory
                except EmbedlogError as error:
                    failed[each] = error
        self.unopened = failed
        online = [each for each in image.online if each not in failed]
        if not online:
            raise NotEnoughReplicasError(
                "No directory of the log can be used", todo="Bring one of them back."
            ) from next(iter(failed.values()), None)
        controller_id = image.controller_id if image.controller_id in online else online[0]
        usable, before = tuple(self.directories[each] for each in online), self.image
        if usable != self.online or (image.epoch, image.directories) != (
            before.epoch,
            before.directories,
        ):
            # Another object: open files compare it with the one that they were looked up by.
            self.image, self.online = replace(image), usable
        self.directory = self.directories[controller_id]
        pages = [directory.epoch_page for directory in self.online]
        self._epoch_pages = tuple(page for page in pages if page is not None)
        # Numbers of one database mean nothing in the next one, which has its own epoch soon.
        base = image.epoch << EPOCH_BITS
        if controller_id != image.controller_id:
            base |= 1 << EPOCH_BITS - 1
        self.read_from = self.directory, base
        # Last: without a lock, others look at the epoch to see whether anything changed.
        self.epoch = image.epoch
        for directory in self.online:
            directory.note_epoch(image.epoch)
        return failed

    # The metadata

    def next_epoch(self, epoch: int) -> int:
        """Return the number of the epoch that follows one in a write: above all that were noted.

        One that was noted may be in a directory that does not work any more, and nowhere else.
        Whoever has seen it there must notice that another one begins without that directory.
        """
        return max(epoch, self.epoch, *(page[0] for page in self._epoch_pages)) + 1

    def change(self, step: Callable[[kv.Txn, MetadataImage], bool]) -> bool:
        """Change the metadata in one write of `state`, and show all processes the new epoch.

        Args:
            step: Gets a transaction, and the image in it; returns whether it changed anything.
        """

        def write(txn: kv.Txn) -> bool:
            image = MetadataImage.load(txn)
            changed = step(txn, image)
            if changed:
                version = METADATA_VERSION.get(txn)
                assert version is not None
                put_epoch(txn, self.next_epoch(image.epoch), version.controller_id)
            return changed

        changed = self.state.write(write)
        if changed:
            self.refresh()
        return changed

    def change_assignment(
        self, key: bytes, change: Callable[[PartitionAssignment], PartitionAssignment]
    ) -> bool:
        """Change the assignment of a partition; see `change`."""
        return bool(self.change_assignments([key], lambda _key, before, _image: change(before)))

    def change_assignments(
        self,
        keys: Collection[bytes],
        change: Callable[[bytes, PartitionAssignment, MetadataImage], PartitionAssignment],
    ) -> list[bytes]:
        """Change the assignments of partitions in one write; return the keys of those that changed.

        Args:
            keys: The keys of the partitions; those of deleted topics are left out.
            change: Gets a key, the assignment and the metadata; returns the next assignment.
        """
        changed: list[bytes] = []

        def step(txn: kv.Txn, image: MetadataImage) -> bool:
            after = _put_assignments(txn, image, lambda key, old: change(key, old, image), keys)
            changed[:] = [key for key in keys if after.get(key) != image.assignments.get(key)]
            return bool(changed)

        self.change(step)
        return changed

    def assignment(self, key: bytes) -> PartitionAssignment | None:
        """Return the assignment of a partition; None if the topic was deleted."""
        assignment = self.current().image.assignments.get(key)
        if assignment is None:
            # A new topic is in the next commit, but may not have a new epoch yet.
            assignment = self.state.read(lambda txn: ASSIGNMENTS.get(txn, key))
        return assignment

    def read_elsewhere(self, key: bytes) -> bool:
        """Read a partition from its next in-sync copy, for a process that may not write."""
        with self._lock:
            assignment = self.image.assignments.get(key)
            followers = () if assignment is None else assignment.in_sync_followers
            others = [each for each in followers if each in self.directories]
            if assignment is not None and others:
                changed = {**self.image.assignments, key: assignment.elect(others)}
                self.image = replace(self.image, assignments=changed)
            return bool(others)

    # Directories that break, and come back

    def take_offline(self, failed: Mapping[int, Exception]) -> None:
        """Give up directories that do not work; others take over what they led.

        If too few would be left, one that has come back may take their place.

        Raises:
            NotEnoughReplicasError: Too few directories would be left.
            EmbedlogError: The error of the directory, if no other one is online.
        """
        with self._lock:
            failed = {each: failed[each] for each in failed if each in self.image.online}
            left = set(self.image.online) - failed.keys()
            if not failed:
                return
            error = next(iter(failed.values()))
            if not left:
                raise error
            epoch, opened = self.epoch, {each: self.directories.get(each) for each in failed}
            if not self.writable:
                # It cannot change the metadata, but it can read on.
                self._log_offline(failed)
                self._adopt(_without(self.image, left, failed))
                return
            refused = None
            try:
                check_quorum(self.image, left, self._given_up)
            except NotEnoughReplicasError as too_few:
                refused = too_few
        if refused is not None:
            # Not `refresh`, which would come back here for the same directories, for ever if the
            # epoch that was noted never comes.
            newly = self._take_newest() if self.moved() else {}
            if self.epoch != epoch:
                # Another process changed which ones are online: these may not be any more.
                left_over = {each: failed[each] for each in failed if opened[each] in self.online}
                self.take_offline({**left_over, **newly})
            elif not self._root.regain_quorum(failed):
                raise refused from error
            return
        reasons = {each: describe(error) for each, error in failed.items()}

        def offline(txn: kv.Txn) -> None:
            image = MetadataImage.load(txn)
            gone = {
                each: reason
                for each, reason in reasons.items()
                if each in image.online and image.directories[each].since <= epoch
            }
            # Otherwise another process was faster, and may have brought it back already.
            if gone:
                check_quorum(image, set(image.online) - gone.keys(), self._given_up)
                self._put_offline(txn, image, gone)

        self.state.write(offline, without=failed)
        self._log_offline(failed)
        self.refresh()

    def _log_offline(self, failed: Mapping[int, Exception]) -> None:
        for each, reason in failed.items():
            if each in self.image.directories:
                path = self.image.directories[each].path
                _logger.error("Directory %s is offline: %s", path, describe(reason))

    def check_directories(self, *, probe: bool = False) -> None:
        """Take directories offline that are not there any more.

        Args:
            probe: Also those that cannot be written.

        Raises:
            NotEnoughReplicasError: Too few directories would be left.
        """
        failed: dict[int, Exception] = {}
        for directory in self.current().online:
            try:
                if probe:
                    directory.probe()
                else:
                    directory.check_in_place()
            except StorageError as error:
                failed[directory.id] = error
        # At once: the second one must not decide without the first.
        self.take_offline(failed)

    def directory_of(self, error: EmbedlogError) -> LogDirectory | None:
        """Return the open directory in which an operation failed; None if it is no other's."""
        for directory in list(self.directories.values()):
            if f"{getattr(error, 'path', None)}/".startswith(f"{directory.files.root}/"):
                return directory
        return None

    def offline_if_broken(self, error: StorageError) -> bool:
        """Take the directory offline that an error says is broken; return whether one is.

        True also if another thread has just done so.
        """
        directory = self.directory_of(error)
        if directory is None:
            return any(
                f"{error.path}/".startswith(f"{info.path}/")
                for info in self.image.directories.values()
            )
        if not directory.is_broken_by(error):
            return False
        self.take_offline({directory.id: error})
        return True

    def _put_offline(self, txn: kv.Txn, image: MetadataImage, gone: Mapping[int, str]) -> None:
        """Write that directories are offline, why, and who leads instead, in a new epoch."""
        epoch = self.next_epoch(image.epoch)
        for each in gone.keys() - self._given_up:
            info = image.directories[each]
            after = info._replace(
                online=False,
                # Of a return that was not confirmed, nothing counts.
                reason=JUST_ADDED if info.reason == JUST_ADDED else gone[each],
                since=epoch,
                offline_since=info.offline_since or epoch,
            )
            DIRECTORIES.put(txn, each, value=after)
        online = [each for each in image.online if each not in gone]
        given_up = self._given_up - set(online)
        if given_up:
            image = _remove_directories(txn, image, given_up, online)
        _put_assignments(txn, image, lambda _, before: before.elect(online))
        controller_id = image.controller_id if image.controller_id in online else online[0]
        put_epoch(txn, epoch, controller_id)

    def give_up(self, directories: Collection[int]) -> None:
        """Remove directories that do not work, with what only they have.

        They do not count for the quorum any more, so it can be called if there is none.

        Raises:
            NotEnoughReplicasError: Too few of the others are online.
        """
        self._given_up |= set(directories)
        broken = {
            each: StorageError("It was given up", path=self.image.directories[each].path)
            for each in directories
            if each in self.image.online
        }
        self.take_offline(broken)
        self.remove(directories, force=True)

    def remove(self, directories: Collection[int], *, force: bool = False) -> bool:
        """Remove directories from the log, in one write of the metadata.

        Returns False, and changes nothing, if they have replicas, unless ``force`` gives these
        up.

        Raises:
            NotEnoughReplicasError: Too few of the others are online.
        """
        has_replicas = False

        def step(txn: kv.Txn, image: MetadataImage) -> bool:
            nonlocal has_replicas
            gone = {each for each in directories if each in image.directories}
            has_replicas = any(gone & set(each.replicas) for each in image.assignments.values())
            if not gone or (has_replicas and not force):
                return False
            left = [each for each in image.online if each not in gone]
            check_quorum(image, left, gone)
            _remove_directories(txn, image, gone, left)
            if image.controller_id in gone:
                version = METADATA_VERSION.get(txn)
                assert version is not None
                METADATA_VERSION.put(txn, value=version._replace(controller_id=left[0]))
            return True

        self.change(step)
        return force or not has_replicas

    def elect(self) -> bool:
        """Elect leaders for partitions without one, if a replica may lead now."""

        def step(txn: kv.Txn, image: MetadataImage) -> bool:
            after = _put_assignments(txn, image, lambda _, before: before.elect(image.online))
            return after != image.assignments

        image = self.current().image
        if all(each.leader in image.online for each in image.assignments.values()):
            return False
        return self.change(step)

    def bring_online(
        self, directory: LogDirectory, failed: Mapping[int, Exception] | None = None
    ) -> bool:
        """Give a directory all rows of the databases, and every write from now on.

        Returns False, and does nothing, if another process or thread has done so, or has removed
        the directory.  It is in no ISR yet, except of partitions that no other directory has in
        sync; if it is new, or lacks what it had, it has lost those, too.  Killed in the middle, it
        is still offline, or counts as online in the others and lacks the write that says so; the
        next attempt starts from the beginning.

        With ``failed`` it takes the place of directories that do not work, and that go offline
        in the same write.  Those that are left have every write, since each goes to all that are
        online; and no process continues without them, since the others are no majority: not even
        together with this directory, whose lock is held, and whose epoch is still lower.
        If this process does not have all open that are online, those may have continued with this
        directory; then it counts for the majority only with all that it had.

        Args:
            directory: The directory, with open databases; also one of ``failed``, opened again.
            failed: The directories that do not work.

        Raises:
            StorageError, CorruptionError: The directory cannot be written.
            NotEnoughReplicasError: Too few directories are online, also with this one.
            ReplicasDivergedError: It has what the others lack.  Nothing was changed.
        """
        reasons = {each: describe(error) for each, error in (failed or {}).items()}
        epoch_before = self.epoch

        def returned(key: bytes, before: PartitionAssignment) -> PartitionAssignment:
            if lost:
                return before.without_copy(directory.id)
            return before.returned(directory.id, flushed.get(key))

        def online(txn: kv.Txn) -> int:
            image = MetadataImage.load(txn)
            gone = {each: reason for each, reason in reasons.items() if each in image.online}
            assignments = _put_assignments(txn, image, returned)
            image = replace(image, assignments=assignments)
            if gone:
                self._put_offline(txn, image, gone)
            after = MetadataImage.load(txn)
            epoch = after.epoch if gone else self.next_epoch(image.epoch)
            changed = after.directories[directory.id]._replace(
                path=directory.path,
                online=True,
                since=epoch,
                is_mount_point=is_mount_point(directory.path),
            )
            DIRECTORIES.put(txn, directory.id, value=changed)
            put_epoch(txn, epoch, after.controller_id)
            return epoch

        # `state` before `live`, as in a checkpoint.
        with (
            self.state.held(failed or {}, directory) as directories,
            self.live.held(failed or {}, directory),
        ):
            if directory.id in {each.id for each in directories}:
                return False
            image = directories[0].state.read(MetadataImage.load)
            if directory.id not in image.directories or (reasons and image.epoch != epoch_before):
                return False
            lost = _has_lost(directory, directories[0], image.directories[directory.id])
            self._check_voters(image, directory.id, reasons, lost=lost)
            flushed = directory.state.read(partial(_flushed, directory.id))
            rows = directories[0].live.read(lambda txn: list(txn.cursor()))
            directory.live.transact_locked(partial(kv.replace_rows, rows))
            # In one write with its rows, which hide that it has lost its files.
            everyone = sorted([*directories, directory], key=lambda each: each.id)
            self._discard_tails(image, everyone, directory, lost=lost)
            directory.opened_epoch = self.state.write_held(everyone, online, replaced=directory)
            for each in everyone:
                each.note_epoch(directory.opened_epoch)
        # Without the locks of databases, which `refresh` may wait for; no thread may work with an
        # older image between this and the next line, and close a directory that it has as offline.
        with self._lock:
            before = self.directories.get(directory.id)
            self.directories[directory.id] = directory
        if before is not None:
            before.detach()
        self.refresh()
        self.state.confirm_epoch()
        return True

    def _discard_tails(
        self,
        image: MetadataImage,
        directories: Sequence[LogDirectory],
        returned: LogDirectory,
        *,
        lost: bool,
    ) -> None:
        """Have partitions recovered whose only copy is in a directory that returns.

        Its disk may have lost what was not flushed, as all disks do in a power cut.  One that has
        ``lost`` its copy does not lead.
        """
        keys = [
            key
            for key, each in image.assignments.items()
            if each.leader is None and each.isr == (returned.id,)
        ]

        def discard(txn: kv.Txn) -> None:
            for key in keys:
                txn.delete(TAILS.key(key))

        if keys and not lost:
            self.live.write_held(directories, discard, replaced=returned)

    def _check_voters(
        self, image: MetadataImage, returned: int, failed: Collection[int], *, lost: bool
    ) -> None:
        """Raise unless a majority is left, with a directory that returns, in the place of some."""
        voters = set(image.online) - set(failed)
        count = len(counted(image, {*voters, returned}))
        # Of four, three have each write, so one of two that lost nothing has it.
        has_all = count - len(voters) < quorum_of(count)
        # The epoch pages of those that failed show whether others went on with them and with it; in
        # the others, a killed process may have noted an epoch that never comes.
        pages = [each.epoch_page for each in self.online if each.id in failed]
        has_moved = any(page is not None and page[0] > self.epoch for page in pages)
        all_open = self.directories.keys() >= set(image.online)
        if not lost or has_all or (all_open and not has_moved):
            voters.add(returned)
        check_quorum(image, voters)

    def close(self) -> None:
        """Close all directories."""
        for directory in list(self.directories.values()):
            with suppress(EmbedlogError):
                directory.close()


def _has_lost(directory: LogDirectory, other: LogDirectory, info: DirectoryInfo) -> bool:
    """Return whether a directory that comes back lacks what it had: it is new, or an old copy.

    Raises:
        ReplicasDivergedError: It has what the other one lacks.
    """
    if extra_writes(directory, other):
        raise diverged(directory, other)
    mine = histories(directory)[0]
    # One that counts as online, since too few others are left to change that, has all of it; but
    # not if its return was cut short.
    until = info.offline_since or sys.maxsize
    return not mine.epochs or not mine.has_all(histories(other)[0], until)


def _flushed(directory: int, txn: kv.Txn) -> dict[bytes, FlushedCopy]:
    """Return the flushed ends of a directory's in-sync copies, by its own rows.

    Of the others it may know more than its files have: when it comes online, it gets the rows
    of other directories immediately, and the records later.
    """
    found = {}
    for (key,), assignment in ASSIGNMENTS.scan(txn):
        for each in assignment.flushed:
            if each.directory == directory:
                found[key] = each
        info = catalog.PARTITIONS.get(txn, key)
        if directory in assignment.isr and info is not None and info.recovery_offset:
            offset = info.recovery_offset
            epoch = leader_epochs.epoch_at(catalog.epochs(txn, key), offset - 1)
            found[key] = FlushedCopy(directory, offset, epoch)
    return found


def _without(
    image: MetadataImage, online: Collection[int], failed: Mapping[int, Exception]
) -> MetadataImage:
    """Return an image in which only these directories are online."""
    directories = {
        each: info._replace(online=False, reason=describe(failed[each])) if each in failed else info
        for each, info in image.directories.items()
    }
    assignments = {key: assignment.elect(online) for key, assignment in image.assignments.items()}
    return replace(image, directories=directories, assignments=assignments)


def _put_assignments(
    txn: kv.Txn,
    image: MetadataImage,
    change: Callable[[bytes, PartitionAssignment], PartitionAssignment],
    keys: Collection[bytes] | None = None,
) -> Mapping[bytes, PartitionAssignment]:
    """Change the assignments of some partitions, by default of all; return those of all."""
    assignments = dict(image.assignments)
    for key in image.assignments if keys is None else image.assignments.keys() & keys:
        before = assignments[key]
        after = raised_epoch(txn, key, before, change(key, before))
        if after != before:
            ASSIGNMENTS.put(txn, key, value=after)
            assignments[key] = after
    return assignments


def _remove_directories(
    txn: kv.Txn, image: MetadataImage, directories: Collection[int], online: Sequence[int]
) -> MetadataImage:
    """Remove directories, and the replicas that they have, from the metadata."""
    for each in directories:
        DIRECTORIES.delete(txn, each)
    assignments = _put_assignments(
        txn, image, lambda _, before: before.without(directories, online, online[0])
    )
    return replace(image, assignments=assignments)


def raised_epoch(
    txn: kv.Txn, key: bytes, before: PartitionAssignment, after: PartitionAssignment
) -> PartitionAssignment:
    """Return an assignment whose leader epoch, if it changed, is above every one in the log.

    A copy of a topic of another log keeps the leader epochs of the source, so a leader that was in
    sync begins none.
    """
    if after.leader_epoch == before.leader_epoch:
        return after
    if after.leader in before.isr and MIRRORED_TOPICS.exists(txn, PARTITION_KEY.unpack(key)[0]):
        return replace(after, leader_epoch=before.leader_epoch)
    info = catalog.PARTITIONS.get(txn, key)
    in_log = 0 if info is None else info.leader_epoch
    return replace(after, leader_epoch=max(after.leader_epoch, in_log + 1))


def offline_error(
    image: MetadataImage, assignment: PartitionAssignment, where: Mapping[str, Any]
) -> ReplicaNotAvailableError:
    """Return the error of a partition that has no leader."""

    def paths(ids: Collection[int]) -> tuple[str, ...]:
        # One may have been removed since.
        return tuple(image.directories[each].path for each in ids if each in image.directories)

    replicas = paths(assignment.replicas)
    if set(assignment.isr) == {NO_DIRECTORY}:
        return ReplicaNotAvailableError(
            f"The partition is offline: its last copy that was in sync is lost, of "
            f"{', '.join(replicas)}",
            **where,
            replicas=replicas,
            todo="An unclean election continues with what another copy has.",
        )
    away = paths([each for each in assignment.isr if each not in image.online])
    if assignment.leader is not None or not away:
        return ReplicaNotAvailableError(
            "The leader of the partition has just changed",
            **where,
            replicas=replicas,
            todo="Try again.",
        )
    return ReplicaNotAvailableError(
        f"The partition is offline: its in-sync copies are in {', '.join(away)}",
        **where,
        replicas=away,
        todo="Bring one of these directories back.",
    )
