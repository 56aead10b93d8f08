"""A log over several directories against lists of acknowledged records, whatever happens to it.

`ReplicasModel` loses directories, brings them back old or empty, lags, crashes, elects,
reassigns, retains, compacts and truncates, by two handles, and knows of each record whether
it may be lost: never, as long as one of the replicas that were in sync has it.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from embedlog import kv
from embedlog.batch import Batch
from embedlog.compaction import CleanOptions, try_clean
from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.errors import (
    CorruptionError,
    EligibleLeadersNotAvailableError,
    EmbedlogError,
    FencedError,
    LogTruncatedError,
    NotALogError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OffsetOutOfRangeError,
    ReplicaNotAvailableError,
    StorageError,
)
from embedlog.groups import offsets
from embedlog.partition import PartitionLog
from embedlog.partition.producer_state import after
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.replication import jobs, reassign
from embedlog.replication.isr import NO_DIRECTORY, PartitionAssignment
from embedlog.replication.metadata import MetadataImage
from embedlog.replication.reassign import elect_unclean
from embedlog.replication.root import ReplicatedRoot
from embedlog.retention.retain import delete_records
from embedlog.root.verify import verify_root
from support.clock import ManualClock
from support.failing_disks import READABLE, FailingDisks, count_commits
from support.forks import Child, in_memory
from support.groups import make_group
from support.roots import Row, abandon, encoded, rows, segment_files

CONFIG = {
    "segment.bytes": 2600,
    "index.interval.bytes": 500,
    "file.delete.delay.ms": 0,
    "retention.ms": -1,
}
KILLED = (
    *("roll", "flush", "compact", "truncate", "delete_records", "commit", "checkpoint"),
    *("create_topic", "delete_topic", "elect_preferred", "reassign", "keep_house", "close"),
)
"""What a process may be killed in, besides appending."""
DISTURBANCES = ("lose the leader", "roll", "compact", "elect", "move", "cancel", "move again")
"""What may happen in the middle of the housekeeping."""
LOST = (NotEnoughReplicasError, ReplicaNotAvailableError, StorageError, NotALogError)
"""What may be raised while too few directories are left to decide anything."""


@dataclass
class Acknowledged:
    """A record that was acknowledged, or seen."""

    offset: int
    key: bytes | None
    value: bytes
    losable: bool = False


@dataclass
class Producer:
    """An idempotent producer of one partition."""

    number: int
    sequence: int = 0
    last: tuple[int, list[tuple[bytes | None, bytes]], tuple[int, int] | None] | None = None
    """What it sent last: sequence number, records, and the offsets it got, if it got any."""


@dataclass
class Part:
    """One partition, as the model has it."""

    topic: str
    number: int
    min_isr: int
    compacts: bool
    records: dict[int, Acknowledged] = field(default_factory=dict)
    start: int = 0
    maybe_start: int = 0
    """Where it begins, if a call that failed nevertheless did something."""
    sure_start: int = 0
    """Where it begins at least, after a power cut, or once directories were lost."""
    uncertain: set[bytes] = field(default_factory=set)
    """Values whose appends failed, or died: each may be there, or not."""
    losses: int = 0
    """How often records were lost."""
    holders: set[int] = field(default_factory=set)
    """The directories that have all records that must not be lost."""
    destroyed: bool = False
    """Whether no directory has it any more."""
    key: bytes = b""
    """Its key in the metadata, once it was looked up."""
    producer: Producer | None = None
    flushed: int = 0

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.number)

    @property
    def end(self) -> int:
        return max(self.records, default=self.start - 1) + 1


class ReplicasModel(RuleBasedStateMachine):
    """A log over directories, and what must be in it."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.base = os.path.realpath(tempfile.mkdtemp(prefix="embedlog-replicas-", dir=in_memory()))
        self._quiet = mock.patch.object(logging.getLogger("embedlog"), "disabled", True)
        self._eager = mock.patch.multiple(jobs, PROBE_SECONDS=0.0, RETRY_SECONDS=0.0)
        self._quiet.start()
        self._eager.start()
        self.disks, self.clock = FailingDisks(), ManualClock()
        self.roots: list[ReplicatedRoot] = []
        self.parts: dict[tuple[str, int], Part] = {}
        self.numbers = 0
        self.away: set[int] = set()
        """The directories whose path was renamed."""
        self.unelected = False
        """Whether a directory may be online again without the elections that follow."""
        self.emptied: dict[int, int] = {}
        """Those that are empty, and the epoch in which they became so, until they are online."""
        self.lost: set[int] = set()
        """The directories that were lost, and are not online again."""
        self.committed: dict[TopicPartition, set[int | None]] = {}
        self.saved: dict[TopicPartition, set[int | None]] = {}
        self.readers: list[tuple[ReplicatedRoot, Part, int, Any]] = []
        self.image = MetadataImage()
        self.electing = b""
        """The key of the partition for which an operator elects a copy that is not in sync."""
        self.boots = 0
        self.topics_made = 0

    # Opening and closing

    @initialize(
        count=st.sampled_from([2, 3, 3, 3]),
        topics=st.lists(
            st.tuples(
                st.integers(1, 2),
                st.sampled_from([1, 2, 2, 3]),
                st.integers(1, 2),
                st.sampled_from([False, False, True]),
            ),
            min_size=1,
            max_size=2,
        ),
    )
    def begin(self, count: int, topics: list[tuple[int, int, int, bool]]) -> None:
        """A log of two or three directories, with some topics."""
        self.paths = {number: f"{self.base}/d{number}" for number in range(1, count + 1)}
        self.roots = [self._open()]
        for topic in topics:
            self._create(*topic)

    @property
    def quorum(self) -> int:
        return 1 if len(self.paths) == 2 else len(self.paths) // 2 + 1

    def _open(self) -> ReplicatedRoot:
        return ReplicatedRoot(
            list(self.paths.values()),
            mode="rw",
            durability="os",
            visibility="append",
            clock=self.clock,
            lock_timeout=20.0,
            auto_create=False,
            unsafe_filesystem=False,
            files=self.disks,
        )

    def _create(self, partitions: int, factor: int, min_isr: int, compacts: bool) -> None:
        self.topics_made += 1
        name, factor = f"t{self.topics_made}", min(factor, len(self.paths))
        config = {
            **CONFIG,
            "min.insync.replicas": min(min_isr, factor),
            "cleanup.policy": "compact" if compacts else "delete",
        }
        done, _ = self._attempt(
            None,
            lambda: self.roots[0].create_topic(
                name, partitions, TopicConfig.parse(config), replication_factor=factor
            ),
        )
        if done:
            for number in range(partitions):
                part = Part(name, number, min(min_isr, factor), compacts)
                self.parts[name, number] = part
            self._observe()

    def root(self, handle: int) -> ReplicatedRoot:
        return self.roots[handle % len(self.roots)]

    def part(self, which: int) -> Part:
        return list(self.parts.values())[which % len(self.parts)]

    def log(self, part: Part, handle: int = 0) -> Any:
        return self.root(handle).partition(part.topic, part.number)

    # What is there

    def usable(self) -> set[int]:
        """The directories that work."""
        return {
            each
            for each, path in self.paths.items()
            if each not in self.away and path not in self.disks.broken
        }

    def alive(self) -> set[int]:
        """Those that work and are part of the log."""
        return self.usable() & set(self.image.online) - self.emptied.keys()

    def assignment(self, part: Part) -> PartitionAssignment | None:
        for root in self.roots:
            info = root.topics().get(part.topic)
            if info is None:
                return None
            part.key = info.key(part.number)
            return self.image.assignments.get(part.key)
        return None

    def _observe(self) -> None:
        """Take the metadata as they are now; each change must be allowed."""
        for root in self.roots:
            try:
                image = root.controller.current().image
            except EmbedlogError:
                continue
            before, self.image = self.image, image
            assert image.epoch >= before.epoch, "the metadata went back"
            assert len(image.online) >= self.quorum, "a minority decided something"
            offline = set(before.online) - set(image.online)
            assert offline <= self.lost, f"{offline - self.lost} went offline, but works"
            self._check_elections(before, image)
            # Until a second write confirms it, a return that was cut short may count as none.
            returned = {each for each in image.online if not image.directories[each].offline_since}
            for each in returned & self.emptied.keys():
                if image.directories[each].since > self.emptied[each]:
                    del self.emptied[each]
            self.lost -= returned & self.alive()
            for part in self.parts.values():
                assignment = self.assignment(part)
                if assignment is not None:
                    self._forget_copies(part, part.holders - set(assignment.replicas))
            return

    def _check_elections(self, before: MetadataImage, image: MetadataImage) -> None:
        for key, old in before.assignments.items():
            new = image.assignments.get(key)
            if new is None or new == old:
                continue
            assert new.leader_epoch >= old.leader_epoch
            assert set(new.isr) <= {*new.replicas, NO_DIRECTORY}
            assert new.isr, "no in-sync replica is left"
            if new.partition_epoch == old.partition_epoch + 1 and new.leader not in (
                None,
                *old.isr,
            ):
                assert key == self.electing, "a leader was elected that was not in sync"
            if new.leader != old.leader and new.leader is not None and old.leader is not None:
                assert new.leader_epoch > old.leader_epoch, "a leader without an epoch of its own"

    def _attempt(
        self, part: Part | None, operation: Callable[[], Any], *, strong: bool = False
    ) -> tuple[bool, Any]:
        """Do something that may fail if directories are missing; return whether it worked."""
        epoch = self.image.epoch
        try:
            return True, operation()
        except EmbedlogError as error:
            self._observe()
            retried = isinstance(error, (NotLeaderOrFollowerError, FencedError))
            is_expected = retried and self.image.epoch > epoch
            if not is_expected and not self._may_fail(part, error, strong):
                raise
            return False, error

    def _may_fail(self, part: Part | None, error: EmbedlogError, strong: bool) -> bool:
        if len(self.alive()) < self.quorum:
            return isinstance(error, LOST)
        if part is None:
            return False
        if part.destroyed:
            return isinstance(error, (*LOST, CorruptionError, OffsetOutOfRangeError))
        assignment = self.assignment(part)
        if assignment is None:
            return False
        isr = set(assignment.isr) & self.alive()
        if isinstance(error, NotEnoughReplicasError) and strong:
            return len(isr) < part.min_isr
        if isinstance(error, ReplicaNotAvailableError):
            return not isr or (assignment.leader is None and self.unelected)
        if isinstance(error, (NotLeaderOrFollowerError, FencedError)):
            return bool(self.lost)  # the call may be repeated
        return False

    # Appending

    def _values(self, part: Part, count: int, size: int) -> list[tuple[bytes | None, bytes]]:
        made = []
        for _ in range(count):
            self.numbers += 1
            key = b"k%d" % (self.numbers % 4) if part.compacts else None
            made.append((key, b"%d-" % self.numbers + b"x" * size))
        return made

    @staticmethod
    def _encode(lines: list[tuple[bytes | None, bytes]], producer: Any = None) -> Any:
        keys = [key for key, _ in lines]
        return encoded(*[value for _, value in lines], keys=keys, producer=producer)

    def _append(
        self,
        part: Part,
        handle: int,
        lines: list[tuple[bytes | None, bytes]],
        acks: Any,
        durability: str | None,
        producer: tuple[int, int, int] | None = None,
    ) -> Any:
        strong = acks in ("all", -1)
        batch = self._encode(lines, producer)
        before = self.image
        done, result = self._attempt(
            part,
            lambda: self.log(part, handle).append([batch], acks=acks, durability=durability),
            strong=strong,
        )
        if not done:
            part.uncertain.update(value for _, value in lines)
            refused = isinstance(result, NotEnoughReplicasError) and before == self.image
            if refused and strong and durability is None:
                part.uncertain.difference_update(value for _, value in lines)
            return None
        (receipt,) = result
        self._observe()
        if receipt.duplicate:
            return receipt
        directories = self.image.directories
        unconfirmed = [each for each in self.image.online if directories[each].offline_since]
        assert not unconfirmed, f"acknowledged before the return of {unconfirmed} was confirmed"
        assert receipt.next_offset == receipt.base_offset + len(lines)
        self._note(part, receipt.base_offset, lines, strong)
        return receipt

    def _note(
        self,
        part: Part,
        base: int,
        lines: list[tuple[bytes | None, bytes]],
        strong: bool,
    ) -> None:
        assignment = self.assignment(part)
        assert assignment is not None
        if part.destroyed:
            return
        replaced = [record for offset, record in part.records.items() if offset >= base]
        assert all(record.losable for record in replaced), f"{part.tp} lost {replaced}"
        part.start = min(part.start, base)
        if replaced:
            part.losses, part.producer = part.losses + 1, None
            for record in replaced:
                del part.records[record.offset]
        for offset, (key, value) in enumerate(lines, base):
            part.records[offset] = Acknowledged(offset, key, value)
        if strong:
            assert len(assignment.isr) >= part.min_isr or self._have(part, lines[-1][1]), (
                f"acknowledged with {assignment.isr} in sync, min.insync.replicas is {part.min_isr}"
            )
        self._strengthen(part, assignment, part.end)

    def _have(self, part: Part, value: bytes) -> bool:
        """Whether enough copies have a value, although fewer are in sync a moment later."""
        return sum(value in data for data in self._files(part, self.paths)) >= part.min_isr

    def _files(self, part: Part, directories: Collection[int]) -> Iterator[bytes]:
        """The bytes of the segment files in each of some directories."""
        for directory in directories:
            place = Path(self.paths[directory] + (".away" if directory in self.away else ""))
            files = place.glob(f"topics/{part.topic}-*/{part.number}/*.arrows")
            yield b"".join(file.read_bytes() for file in files)

    def _strengthen(self, part: Part, assignment: PartitionAssignment, end: int) -> None:
        part.holders = set(assignment.isr)
        for record in part.records.values():
            # Those above the end were lost just now.
            if record.offset < end:
                record.losable = False

    @rule(
        which=st.integers(0, 3),
        handle=st.integers(0, 1),
        count=st.integers(1, 3),
        size=st.sampled_from([0, 10, 700]),
        acks=st.sampled_from(["all", "all", 1, 1, 0]),
        durability=st.sampled_from([None, None, "fsync"]),
    )
    @precondition(lambda self: self.roots and self.parts)
    def append(
        self, which: int, handle: int, count: int, size: int, acks: Any, durability: str | None
    ) -> None:
        """Offsets are dense, and with acks="all" enough replicas have the records."""
        part = self.part(which)
        self._append(part, handle, self._values(part, count, size), acks, durability)

    @rule(which=st.integers(0, 3), handle=st.integers(0, 1), size=st.sampled_from([0, 700]))
    @precondition(lambda self: self.roots and self.parts)
    def append_to_all(self, which: int, handle: int, size: int) -> None:
        """In two records."""
        part = self.part(which)
        self._append(part, handle, self._values(part, 2, size), "all", None)

    @rule(
        which=st.integers(0, 3),
        handle=st.integers(0, 1),
        count=st.integers(1, 3),
        acks=st.sampled_from(["all", 1]),
        repeats=st.booleans(),
    )
    @precondition(lambda self: self.roots and self.parts)
    def produce(self, which: int, handle: int, count: int, acks: Any, repeats: bool) -> None:
        """An idempotent producer repeats what failed, and nothing is there twice."""
        part = self.part(which)
        if part.destroyed:
            return
        producer = part.producer
        if producer is None:
            self.numbers += 1
            producer = part.producer = Producer(1000 + self.numbers)
        last = producer.last
        pending = last is not None and last[2] is None
        if last is not None and (pending or repeats):
            sequence, lines, got = last
        else:
            sequence, lines, got = producer.sequence, self._values(part, count, 10), None
        losses = part.losses
        receipt = self._append(part, handle, lines, acks, None, (producer.number, 0, sequence))
        if receipt is None:
            producer.last = sequence, lines, None
            return
        base, following = receipt.base_offset, receipt.next_offset
        if got is not None and part.losses == losses:
            if not receipt.duplicate:
                # It was lost meanwhile, which is only noticed now.
                assert not any(got[0] <= offset < got[1] for offset in part.records)
            else:
                assert (base, following) == got, "a repetition got other offsets"
        if receipt.duplicate:
            assignment = self.assignment(part)
            if assignment is not None and base >= part.start:
                for offset, (key, value) in enumerate(lines, base):
                    part.records.setdefault(offset, Acknowledged(offset, key, value))
        producer.last = sequence, lines, (base, following)
        if part.producer is producer and sequence == producer.sequence:
            producer.sequence = after(sequence, len(lines))

    # Directories

    def _may_lose(self, both: bool) -> bool:
        if both and len(self.paths) == 3:
            return len(self.usable()) > 1
        return not self.lost and self.usable() == set(self.paths)

    @rule(
        which=st.integers(0, 2),
        number=st.sampled_from([errno.EIO, errno.EIO, errno.EROFS, errno.ENOSPC]),
        after=st.integers(0, 12),
        times=st.sampled_from([1, 1 << 30, 1 << 30]),
        databases=st.booleans(),
        both=st.sampled_from([False, False, False, True]),
    )
    def break_disk(
        self, which: int, number: int, after: int, times: int, databases: bool, both: bool
    ) -> None:
        """A disk begins to fail, at once or some operations later."""
        directory = which % len(self.paths) + 1
        if self._may_lose(both) and directory in self.usable():
            path = self.paths[directory]
            self.disks.break_disk(path, number, after=after, times=times, databases=databases)
            self._lose(directory)

    @rule(
        directory=st.integers(0, 2),
        number=st.sampled_from([errno.EIO, errno.EROFS, errno.ENOSPC]),
        after=st.integers(0, 30),
        times=st.sampled_from([1, 1 << 30, 1 << 30]),
        databases=st.booleans(),
        which=st.integers(0, 3),
        handle=st.integers(0, 1),
        acks=st.sampled_from(["all", "all", 1]),
        what=st.sampled_from(
            [
                *("append", "append", "append", "produce", "roll", "compact", "truncate"),
                *("delete_records", "keep_house", "elect_preferred", "commit", "flush"),
                *("open_another", "checkpoint", "reassign"),
            ]
        ),
    )
    @precondition(lambda self: self.roots and self.parts)
    def break_during(
        self,
        directory: int,
        number: int,
        after: int,
        times: int,
        databases: bool,
        which: int,
        handle: int,
        acks: Any,
        what: str,
    ) -> None:
        """A disk breaks in the middle of an operation."""
        directory = directory % len(self.paths) + 1
        if not self._may_lose(False):
            return
        path = self.paths[directory]
        self.disks.break_disk(path, number, after=after, times=times, databases=databases)
        self._lose(directory)
        if what == "append":
            self.append(which, handle, 2, 10, acks, None)
        elif what == "produce":
            self.produce(which, handle, 2, acks, False)
        elif what in ("roll", "flush"):
            getattr(self, what)(which, handle)
        elif what == "compact" and any(part.compacts for part in self.parts.values()):
            self.compact(which, handle)
        elif what in ("truncate", "delete_records"):
            getattr(self, what)(which, handle, 0.5)
        elif what == "keep_house":
            self.keep_house(handle, False)
        elif what in ("elect_preferred", "checkpoint"):
            getattr(self, what)(handle)
        elif what == "commit":
            self.commit(which, handle, after)
        elif what == "reassign":
            self.reassign(which, handle, after)
        elif what == "open_another" and len(self.roots) == 1:
            self.open_another()

    @rule(which=st.integers(0, 2), both=st.sampled_from([False, False, False, True]))
    def unmount(self, which: int, both: bool) -> None:
        """A directory is not at its path any more; what is open stays open."""
        directory = which % len(self.paths) + 1
        if self._may_lose(both) and directory in self.usable():
            os.rename(self.paths[directory], f"{self.paths[directory]}.away")
            self.away.add(directory)
            self._lose(directory)

    @rule(
        which=st.integers(0, 3),
        handle=st.integers(0, 1),
        before=st.integers(0, 2),
        size=st.sampled_from([0, 10, 700]),
        rolls=st.booleans(),
        returns=st.booleans(),
    )
    @precondition(lambda self: self.roots and self.parts)
    def diverge(
        self, which: int, handle: int, before: int, size: int, rolls: bool, returns: bool
    ) -> None:
        """A leader is lost; another one goes on."""
        part = self.part(which)
        assignment = self.assignment(part)
        if assignment is None or assignment.leader is None or not self._may_lose(False):
            return
        for _ in range(before):
            self._append(part, handle, self._values(part, 2, 700), 1, None)
        leader = assignment.leader
        self.unmount(leader - 1, False)
        self.keep_house(handle, False)
        self._append(part, handle, self._values(part, 2, size), "all", None)
        if rolls:
            self.roll(which, handle)
        if returns:
            self.bring_back(leader - 1, False)
            self.keep_house(handle, not rolls)

    @rule(which=st.integers(0, 3), directory=st.integers(0, 2), handle=st.integers(0, 1))
    @precondition(lambda self: len(self.roots) == 2 and self.parts and len(self.paths) == 3)
    def come_back_for_one(self, which: int, directory: int, handle: int) -> None:
        """A directory comes back, but the other program cannot open it; then a third one is lost.

        The other program has to refuse its appends, or to write them to all copies in sync.  (Of
        two directories, each program would go on with one: they diverge.)
        """
        if not self._may_lose(False):
            return
        part, count = self.part(which), len(self.paths)
        self.unmount(directory % count, False)
        self.keep_house(handle, False)
        self._attempt(None, lambda: self.root(handle + 1).controller.current())
        self.bring_back(directory, False)
        self.keep_house(handle, False)
        self.disks.hidden = {self.paths[directory % count + 1]}
        self.unmount((directory + 1) % count, False)
        self.keep_house(handle, False)
        for _ in range(2):
            lines = self._values(part, 1, 10)
            part.uncertain.update(value for _, value in lines)
            with suppress(EmbedlogError):
                (receipt,) = self.log(part, handle + 1).append([self._encode(lines)])
                self._observe()
                self._note(part, receipt.base_offset, lines, True)
        self.disks.hidden = set()

    @rule(
        which=st.integers(0, 3),
        handle=st.integers(0, 1),
        size=st.sampled_from([0, 700]),
        is_readable=st.booleans(),
    )
    @precondition(lambda self: self.roots and self.parts)
    def lose_the_last_in_sync(self, which: int, handle: int, size: int, is_readable: bool) -> None:
        """The followers lag, each by more than the one before, when the leader is lost."""
        part = self.part(which)
        assignment = self.assignment(part)
        if assignment is None or assignment.leader is None or not self._may_lose(False):
            return
        for follower in reversed(assignment.in_sync_followers):
            self.unmount(follower - 1, False)
            self.keep_house(handle, True)
            self._append(part, handle, self._values(part, 2, size), "all", None)
            self.bring_back(follower - 1, False)
            self.keep_house(handle, True)
        if is_readable:
            self.break_disk(assignment.leader - 1, errno.EROFS, 0, 1 << 30, True, False)
        else:
            self.unmount(assignment.leader - 1, False)
        self.keep_house(handle, True)
        self.elect_unclean(which, handle)

    def _forget_copies(self, part: Part, directories: Collection[int]) -> None:
        """The files of copies were removed."""
        part.holders -= set(directories)

    def _lose(self, directory: int) -> None:
        self.lost.add(directory)

    @rule(which=st.integers(0, 2), empty=st.sampled_from([False, False, True]))
    def bring_back(self, which: int, empty: bool) -> None:
        """A directory works again: as it was, or as an empty one."""
        directory = which % len(self.paths) + 1
        path = self.paths[directory]
        self.disks.repair(path)
        if directory in self.away:
            # Of three directories two must be left that know what was decided.
            others = set(self.image.online) - self.emptied.keys() - {directory}
            if empty and len(others) >= self.quorum:
                os.mkdir(path, 0o700)
                shutil.rmtree(f"{path}.away")
                self._empty(directory)
            else:
                os.rename(f"{path}.away", path)
            self.away.discard(directory)

    def _empty(self, directory: int) -> None:
        self.emptied[directory] = self.image.epoch
        for part in self.parts.values():
            part.holders.discard(directory)
            # Also while no process has the log open.
            assignment = self.image.assignments.get(part.key)
            isr = set(assignment.isr) if assignment is not None else part.holders
            if not part.holders or isr == {directory}:
                part.destroyed = True

    def _lose_leader(self, handle: int) -> None:
        """The directory that leads the first partition is lost, and the handle notices it."""
        self._observe()
        assignment = self.assignment(self.part(0))
        if assignment is None or assignment.leader is None or not self._may_lose(False):
            return
        self.unmount(assignment.leader - 1, False)
        controller = self.root(handle).controller
        for directory in controller.online:
            try:
                directory.check_in_place()
            except StorageError as error:
                controller.take_offline({directory.id: error})
        self._observe()

    def _disturb(self, what: str, handle: int) -> None:
        """Change something in the middle of the housekeeping."""
        if what == "lose the leader":
            self._lose_leader(handle)
        elif what == "roll":
            self.roll(0, handle)
        elif what == "compact" and any(part.compacts for part in self.parts.values()):
            self.compact(0, handle)
        elif what == "elect":
            self.elect_preferred(handle)
        elif what == "move":
            self.reassign(0, handle, self.numbers)
        elif what == "cancel":
            self.cancel(handle)
        elif what == "move again":
            self.cancel(handle)
            self.reassign(0, handle, self.numbers)

    def _append_meanwhile(self, handle: int, at: int, disturbance: str) -> Callable[[], bool]:
        """Return a function that the job calls, and that appends when it is called so often.

        Then it stops the job once all copies are in sync: the job would copy what they lack.

        Args:
            handle: Whose appends these are.
            at: The number of the call.
            disturbance: What else happens, before.
        """
        calls = iter(range(1, 1 << 30))

        def is_stopped() -> bool:
            call = next(calls)
            if call == at:
                self._disturb(disturbance, handle)
                for part in list(self.parts.values()):
                    lines = self._values(part, 1, 10)
                    part.uncertain.update(value for _, value in lines)
                    # The job may hold the partition's lock.
                    with suppress(EmbedlogError):
                        log = self.log(part, handle)
                        (receipt,) = log.append([self._encode(lines)], timeout=0)
                        self._observe()
                        self._note(part, receipt.base_offset, lines, True)
            image = self.root(handle).controller.current().image
            return call > at and all(
                set(each.isr) == set(each.replicas) for each in image.assignments.values()
            )

        return is_stopped

    @rule(
        handle=st.integers(0, 1),
        stopped=st.sampled_from([False, False, True]),
        meanwhile=st.integers(0, 8),
        disturbance=st.sampled_from(["", "", *DISTURBANCES]),
    )
    @precondition(lambda self: self.roots)
    def keep_house(
        self, handle: int, stopped: bool, meanwhile: int = 0, disturbance: str = ""
    ) -> None:
        """What works is online after a round, and in sync."""
        root = self.root(handle)
        # A leader that breaks during the round makes copies wait for the next one.
        online = self.alive()
        noticed = set(self.image.online) == online
        job = jobs.ReplicationJob(MaintenanceConfig())
        if meanwhile and self.parts and not stopped:
            is_stopped = self._append_meanwhile(handle + 1, meanwhile, disturbance)
        else:
            is_stopped = lambda: stopped  # noqa: E731
        done, _ = self._attempt(None, lambda: job.run(root, is_stopped))
        self._observe()
        if not done or len(self.alive()) < self.quorum:
            return
        self.unelected = False
        noticed &= self.alive() == online and not (meanwhile and disturbance)
        assert self.usable() <= set(self.image.online), "a directory that works is not online"
        for part in self.parts.values():
            assignment = self.assignment(part)
            if assignment is None or part.destroyed or set(assignment.isr).isdisjoint(self.alive()):
                continue
            assert assignment.leader is not None, "no leader was elected"
            if not stopped and noticed:
                missing = set(assignment.replicas) & self.alive() - set(assignment.isr)
                assert not missing, f"{part.tp}: {missing} did not join the ISR"

    @rule(which=st.integers(0, 3), handle=st.integers(0, 1))
    @precondition(lambda self: self.roots and self.parts)
    def elect_unclean(self, which: int, handle: int) -> None:
        """The longest copy that is online leads, unless one that can be read has more."""
        part = self.part(which)
        if part.destroyed or self.assignment(part) is None:
            return
        read_only = {path for path, disk in self.disks.broken.items() if disk.number in READABLE}
        readable = self.usable() | {
            each for each, path in self.paths.items() if path in read_only and each not in self.away
        }
        self.electing, can_be_had = part.key, part.holders & readable
        kept = b"".join(self._files(part, self.alive()))
        try:
            done, elected = self._attempt(part, lambda: elect_unclean(self.root(handle), [part.tp]))
        except EligibleLeadersNotAvailableError:
            assert set(self.image.online) < self.paths.keys(), "no copy with more is offline"
            return
        if done and elected:
            assignment = self.root(handle).controller.assignment(part.key)
            assert assignment is not None
            part.holders = set(assignment.isr)
            # A copy ends where it has a hole: what is beyond that is lost, too.
            lacks = part.compacts
            for _, record in sorted(part.records.items()):
                lacks |= record.value not in kept
                record.losable |= lacks and not can_be_had
        self._observe()
        self.electing = b""

    @rule(handle=st.integers(0, 1))
    @precondition(lambda self: self.roots)
    def elect_preferred(self, handle: int) -> None:
        """Preferred leaders lead again; nothing is lost by that."""
        self._attempt(None, lambda: reassign.elect_preferred(self.root(handle)))

    @rule(which=st.integers(0, 3), handle=st.integers(0, 1), seed=st.integers(0, 1 << 16))
    @precondition(lambda self: self.roots and self.parts)
    def reassign(self, which: int, handle: int, seed: int) -> None:
        """Copies move to other directories."""
        part = self.part(which)
        dice = random.Random(seed)
        target = dice.sample(sorted(self.paths), dice.randint(1, len(self.paths)))
        if len(target) >= part.min_isr:
            moves = {part.tp: target}
            self._attempt(part, lambda: reassign.begin(self.root(handle), moves))

    @rule(handle=st.integers(0, 1))
    @precondition(lambda self: self.roots and self.parts)
    def cancel(self, handle: int) -> None:
        """All moves are cancelled whose old copies can lead."""
        root = self.root(handle)
        for info, number, assignment in list(root.assignments()):
            if assignment.is_reassigning and not set(assignment.isr) <= {
                *assignment.adding_replicas,
                NO_DIRECTORY,
            }:
                part = self.parts[info.name, number]
                self._attempt(part, partial(reassign.cancel, root, [part.tp]))
                self._forget_copies(part, assignment.adding_replicas)

    # Segments

    @rule(which=st.integers(0, 3), handle=st.integers(0, 1))
    @precondition(lambda self: self.roots and self.parts)
    def roll(self, which: int, handle: int) -> None:
        """No record moves by it."""
        part = self.part(which)
        self._attempt(part, lambda: self.log(part, handle).roll())

    @rule(which=st.integers(0, 3), handle=st.integers(0, 1), share=st.floats(0, 1))
    @precondition(lambda self: self.roots and self.parts)
    def delete_records(self, which: int, handle: int, share: float) -> None:
        """The start moves, and nothing else."""
        part = self.part(which)
        if part.destroyed:
            return
        offset = part.start + int((part.end - part.start) * share)
        log = self.log(part, handle)
        done, result = self._attempt(
            part, lambda: delete_records(log, min(offset, log.end_offset()))
        )
        if done:
            part.start = part.sure_start = max(part.start, result)
        part.maybe_start = max(part.maybe_start, offset)

    @rule(which=st.integers(0, 3), handle=st.integers(0, 1), share=st.floats(0, 1))
    @precondition(lambda self: self.roots and self.parts)
    def truncate(self, which: int, handle: int, share: float) -> None:
        """Records at and above an offset are removed everywhere."""
        part = self.part(which)
        if part.destroyed or part.compacts or part.end == part.start:
            return
        offset = part.start + int((part.end - part.start) * share)
        done, _ = self._attempt(part, lambda: self.log(part, handle).truncate_to(offset))
        part.producer = None
        for record in list(part.records.values()):
            if not done:
                record.losable = True
            elif record.offset >= offset:
                del part.records[record.offset]
        part.losses += 1
        if done:
            # A batch that straddles the offset is removed entirely.
            read = self._read(part, handle)
            if read is not None:
                kept = {row[0] for row in read}
                low = max(offset - 2, part.start)
                for straddling in range(low, offset):
                    if straddling not in kept:
                        part.records.pop(straddling, None)
            part.start = min(part.start, offset)

    @rule(which=st.integers(0, 3), handle=st.integers(0, 1))
    @precondition(lambda self: self.roots and any(part.compacts for part in self.parts.values()))
    def compact(self, which: int, handle: int) -> None:
        """The last record of each key stays."""
        chosen = [part for part in self.parts.values() if part.compacts]
        part = chosen[which % len(chosen)]

        def work() -> None:
            log = self.log(part, handle)
            result = try_clean(
                log, self.clock(), CleanOptions(settings=MaintenanceConfig()), roll=True
            )
            if result.error is not None:
                raise result.error

        self._attempt(part, work)

    @rule(which=st.integers(0, 3), handle=st.integers(0, 1))
    @precondition(lambda self: self.roots and self.parts)
    def flush(self, which: int, handle: int) -> None:
        """What is flushed survives a power cut."""
        part = self.part(which)
        self._attempt(part, lambda: self.log(part, handle).flush())

    # Topics

    @rule(topic=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.booleans()))
    @precondition(lambda self: self.roots and len(self.parts) < 5)
    def create_topic(self, topic: tuple[int, int, int, bool]) -> None:
        """A topic gets its copies on distinct directories."""
        if len(self.alive()) == len(self.paths):
            self._create(*topic)

    @rule(which=st.integers(0, 3), handle=st.integers(0, 1))
    @precondition(lambda self: self.roots and len({topic for topic, _ in self.parts}) > 1)
    def delete_topic(self, which: int, handle: int) -> None:
        """It is gone in all directories."""
        name = self.part(which).topic
        if any(part.destroyed for part in self.parts.values() if part.topic == name):
            return
        if len(self.alive()) < len(self.paths):
            return
        self.root(handle).delete_topic(name)
        self._forget_deleted()
        assert name not in {topic for topic, _ in self.parts}

    # Groups

    @rule(which=st.integers(0, 3), handle=st.integers(0, 1), offset=st.integers(0, 50))
    @precondition(lambda self: self.roots and self.parts)
    def commit(self, which: int, handle: int, offset: int) -> None:
        """A group's offset is kept."""
        tp = self.part(which).tp

        def work() -> None:
            group = make_group(self.root(handle))
            group.commit({tp: OffsetAndMetadata(offset)})

        done, _ = self._attempt(None, work)
        before = self.committed.get(tp, {None})
        self.committed[tp] = {offset} if done else before | {offset}

    @rule(handle=st.integers(0, 1))
    @precondition(lambda self: self.roots)
    def checkpoint(self, handle: int) -> None:
        """Committed offsets are saved for after a power cut."""
        context = self.root(handle).context
        done, _ = self._attempt(None, lambda: offsets.checkpoint(context.live, context.state))
        if done:
            self.saved = {tp: set(values) for tp, values in self.committed.items()}

    # Processes

    @rule()
    @precondition(lambda self: len(self.roots) == 1)
    def open_another(self) -> None:
        """A second handle, which learns of everything by itself."""
        done, root = self._attempt(None, self._open)
        if done:
            self.roots.append(root)

    @rule(handle=st.integers(0, 1), crash=st.booleans())
    @precondition(lambda self: len(self.roots) == 2)
    def end_one(self, handle: int, crash: bool) -> None:
        """The other handle is not disturbed."""
        self._end([self.roots.pop(handle)], crash)

    @rule(crash=st.booleans())
    @precondition(lambda self: self.roots)
    def end_all(self, crash: bool) -> None:
        """All processes end, or are killed."""
        ended, self.roots = self.roots, []
        self._end(ended, crash)

    def _end(self, ended: list[ReplicatedRoot], crash: bool) -> None:
        self.readers = [entry for entry in self.readers if entry[0] not in ended]
        for root in ended:
            if crash:
                abandon(root)
                continue
            try:
                root.close()
            except EmbedlogError as error:
                broken = self.lost or any(part.destroyed for part in self.parts.values())
                if not broken or not isinstance(error, (*LOST, CorruptionError)):
                    raise
                abandon(root)
        if not crash and not self.lost:
            self.saved = {tp: set(values) for tp, values in self.committed.items()}

    @rule()
    @precondition(lambda self: not self.roots)
    def open_again(self) -> None:
        """A new process finds everything."""
        usable = self.usable()
        try:
            self.roots = [self._open()]
        except EmbedlogError as error:
            # Those that are usable may be offline in the metadata.
            if not self.lost or not isinstance(error, LOST):
                raise
            offline = self.paths.keys() - set(self.image.online)
            missing = set(self.paths) - usable | offline | self.emptied.keys()
            if len(self.paths) - len(missing) >= self.quorum:
                raise
            return
        self._observe()

    @rule(
        which=st.integers(0, 3),
        what=st.sampled_from(["append", *KILLED]),
        at=st.integers(1, 90),
    )
    @precondition(lambda self: self.roots and self.parts)
    def kill_another(self, which: int, what: str, at: int) -> None:
        """Another process is killed in the middle of an operation."""
        self.kill_in(what, self.part(which), at)

    @rule(
        which=st.integers(0, 3),
        what=st.sampled_from(["reassign", "create_topic", "delete_topic", "elect_preferred"]),
        at=st.integers(1, 40),
    )
    @precondition(lambda self: self.roots and self.parts)
    def kill_and_lose(self, which: int, what: str, at: int) -> None:
        """The directory is lost that may alone have the epoch that a killed process began."""
        if self._may_lose(False):
            self.kill_in(what, self.part(which), at)
            self.unmount(self.image.controller_id - 1, False)
            self.keep_house(0, False)
            made = f"t{self.topics_made}"
            if what == "create_topic" and (made, 0) in self.parts:
                # It was seen where its creation began; nobody was told of it, or wrote to it.
                exists, topics = self._attempt(None, lambda: self.roots[0].topics())
                if exists and made not in topics:
                    del self.parts[made, 0]

    def kill_in(self, what: str, part: Part, at: int | None) -> int | None:
        """Have a child do something, and die before an operation of its files or databases.

        Returns how many operations it took; None if it was killed.
        """
        lines, other = self._values(part, 2, 10), random.Random(at).sample(sorted(self.paths), 2)
        middle = part.start + (part.end - part.start) // 2
        child = Child(lambda: self._work_and_die(what, part, at, lines, middle, other))
        end = child.end()
        assert end.killed or end.finding() is None, end.finding()
        operations, result = (None, None) if end.killed else end.value
        self.unelected |= end.killed
        done = not end.killed and not isinstance(result, str)
        self._observe()
        if what.startswith("append"):
            if done:
                self._note(part, result, lines, what == "append")
            else:
                part.uncertain.update(value for _, value in lines)
        elif what == "commit":
            before = self.committed.get(part.tp, {None})
            self.committed[part.tp] = {7} if done else before | {7}
        elif what == "delete_records":
            part.maybe_start = max(part.maybe_start, middle)
        elif what == "truncate" and not part.compacts:
            part.losses, part.producer = part.losses + 1, None
            part.start = min(part.start, middle)
            for record in part.records.values():
                # A batch that straddles the offset is removed entirely.
                record.losable |= record.offset >= middle - 2
        elif what == "create_topic":
            self.topics_made += 1
            name = f"t{self.topics_made}"
            exists, topics = self._attempt(None, lambda: self.roots[0].topics())
            if exists and name in topics:
                self.parts[name, 0] = Part(name, 0, 1, False)
        elif what == "delete_topic":
            self._forget_deleted()
        return operations

    def _forget_deleted(self) -> None:
        exists, topics = self._attempt(None, lambda: self.roots[0].topics())
        if not exists:
            return
        self.parts = {key: part for key, part in self.parts.items() if part.topic in topics}
        self.readers = [entry for entry in self.readers if entry[1].topic in topics]
        for positions in (self.committed, self.saved):
            for tp in [tp for tp in positions if tp.topic not in topics]:
                del positions[tp]

    def _work_and_die(
        self,
        what: str,
        part: Part,
        at: int | None,
        lines: list[tuple[bytes | None, bytes]],
        middle: int,
        other: list[int],
    ) -> tuple[int, Any]:
        """Do something in a forked child; a string is an error."""
        result: Any = None
        try:
            root = self.roots[0] if self.roots else None
            log = None if root is None else root.partition(part.topic, part.number)
            count_commits(self.disks)
            self.disks.operations, self.disks.kill_at = 0, at
            if root is None or log is None:
                self._open()
            elif what == "append":
                result = log.append([self._encode(lines)])[0].base_offset
            elif what == "roll":
                log.roll()
            elif what == "flush":
                log.flush()
            elif what == "compact" and part.compacts:
                options = CleanOptions(settings=MaintenanceConfig())
                try_clean(log, self.clock(), options, roll=True)
            elif what == "truncate" and not part.compacts:
                log.truncate_to(middle)
            elif what == "delete_records":
                delete_records(log, middle)
            elif what == "commit":
                make_group(root).commit({part.tp: OffsetAndMetadata(7)})
            elif what == "checkpoint":
                offsets.checkpoint(root.context.live, root.context.state)
            elif what == "create_topic":
                name = f"t{self.topics_made + 1}"
                root.create_topic(name, 1, TopicConfig.parse(CONFIG), replication_factor=2)
            elif what == "delete_topic" and len({topic for topic, _ in self.parts}) > 1:
                root.delete_topic(part.topic)
            elif what == "elect_preferred":
                reassign.elect_preferred(root)
            elif what == "reassign":
                reassign.begin(root, {part.tp: other})
                jobs.ReplicationJob(MaintenanceConfig()).run(root, lambda: False)
            elif what == "keep_house":
                jobs.ReplicationJob(MaintenanceConfig()).run(root, lambda: False)
            elif what == "close":
                root.close()
        except EmbedlogError as error:
            result = f"{type(error).__name__}: {error}"
        finally:
            self.disks.kill_at = None
        return self.disks.operations, result

    @rule(seed=st.integers(0, 1 << 16), more=st.integers(0, 3))
    @precondition(lambda self: self.roots and self.parts and not self.lost)
    def power_cut(self, seed: int, more: int) -> None:
        """What was flushed is there; of the rest, each copy may have lost another part."""
        if self.alive() != set(self.paths) or any(p.destroyed for p in self.parts.values()):
            return
        if any(part.sure_start < part.start for part in self.parts.values()):
            return  # who moved it was killed: what was deleted may be there again
        floors: dict[Path, int] = {}
        for part in self.parts.values():
            assignment = self.assignment(part)
            if assignment is None or assignment.leader is None:
                return
            log = self.log(part)
            log.flush()
            part.flushed = log.end_offset()
            for path, _, _ in self._segments(part):
                for directory in assignment.isr:
                    file = Path(self.paths[directory], path)
                    floors[file] = file.stat().st_size if file.exists() else 0
        dice = random.Random(seed)
        for _ in range(more):
            part = dice.choice(list(self.parts.values()))
            acks = dice.choice(["all", 1])
            self._append(part, 0, self._values(part, 2, dice.choice([0, 700])), acks, None)
            if dice.random() < 0.3:
                self.log(part).roll()
        self.check()
        before, self.committed = self.committed, {}
        self.end_all(crash=True)
        for directory in self.paths.values():
            for file in segment_files(directory):
                size = file.stat().st_size
                os.truncate(file, dice.randint(min(floors.get(file, 0), size), size))
        self.boots += 1
        self.disks.boot = f"boot {self.boots}"
        for part in self.parts.values():
            part.producer = None
            for record in part.records.values():
                record.losable |= record.offset >= part.flushed
        self.open_again()
        for part in self.parts.values():
            if part.tp in before:
                # The offset that was saved last, or a later one; at most the end of the log.
                saved = self.saved.get(part.tp, {None})
                self.committed[part.tp] = before[part.tp] | saved | {self.log(part).end_offset()}

    # Looking

    def _read(self, part: Part, handle: int) -> list[Row] | None:
        for _ in range(3):
            with suppress(LogTruncatedError):  # a leader was elected in the middle
                done, read = self._attempt(part, lambda: rows(self.log(part, handle)))
                return read if done else None
        raise AssertionError(f"{part.tp} is cut again and again")

    @invariant()
    def check(self) -> None:
        """Each handle reads what must be there, and the copies are equal."""
        self.steps += 1
        for handle in range(len(self.roots)):
            for part in list(self.parts.values()):
                if part.destroyed:
                    continue
                log = partial(self.log, part, handle)
                done, start = self._attempt(part, lambda log=log: log().start_offset())
                read = self._read(part, handle) if done else None
                if read is not None:
                    self._reconcile(part, start, read)
        self._observe()
        if self.roots:
            for part in list(self.parts.values()):
                if not part.destroyed:
                    self._check_copies(part)
            self._check_commits()

    def _reconcile(self, part: Part, start: int, read: list[Row]) -> None:
        if start < part.start and all(record.losable for record in part.records.values()):
            # What was deleted was lost, too; its offsets are given to other records.
            part.start, part.losses = start, part.losses + 1
        # Who deleted records and was killed may have done so in one directory only, lost since.
        lowest = min(part.start, part.sure_start)
        assert lowest <= start <= max(part.start, part.maybe_start), (
            f"{part.tp} begins at {start}, not at {part.start}"
        )
        part.start = start
        for offset in [offset for offset in part.records if offset < start]:
            record = part.records.pop(offset)
            if start > part.sure_start:
                part.uncertain.add(record.value)
        values = [row[3] for row in read]
        assert len(set(values)) == len(values), f"{part.tp}: a record is there twice"
        found = {row[0]: row for row in read}
        assert len(found) == len(read)
        missing = [record for offset, record in part.records.items() if offset not in found]
        changed = [
            record
            for offset, record in part.records.items()
            if offset in found and found[offset][3] != record.value
        ]
        if part.compacts:
            latest = {row[2]: row[0] for row in read}
            missing = [r for r in missing if latest.get(r.key, -1) <= r.offset]
        gone = sorted(missing + changed, key=lambda record: record.offset)
        if gone:
            wrong = [record for record in gone if not record.losable]
            assert not wrong, f"{part.tp} lost {wrong} of {self.image}: read {sorted(found)}"
            first = gone[0].offset
            part.losses += 1
            part.producer = None
            for offset in [offset for offset in part.records if offset >= first]:
                if offset not in found or found[offset][3] != part.records[offset].value:
                    del part.records[offset]
                else:
                    raise AssertionError(f"{part.tp} lost {first}, but not {offset}")
        elif part.compacts:
            for offset in [offset for offset in part.records if offset not in found]:
                del part.records[offset]
        for offset, row in found.items():
            if offset not in part.records:
                value = row[3]
                assert value in part.uncertain, f"{part.tp}: {row} was never appended"
                part.records[offset] = Acknowledged(offset, row[2], value)

    def _segments(self, part: Part) -> Iterator[tuple[str, int, bool]]:
        """The paths of a partition's files, up to where they are published."""
        log = self.log(part)
        tail = log.tail()
        log.refresh()
        for info in log.segments.values():
            if info.sealed:
                yield log.path_of(info), info.size, True
            elif info.id == tail.segment_id:
                yield log.path_of(info), tail.log_end_position, False

    def _bytes(self, directory: int, path: str, stop: int) -> bytes:
        place = self.paths[directory] + (".away" if directory in self.away else "")
        file = Path(place, path)
        return file.read_bytes()[:stop] if file.exists() else b""

    def _check_copies(self, part: Part) -> None:
        """In-sync copies are equal byte for byte."""
        done, segments = self._attempt(part, lambda: list(self._segments(part)))
        self._observe()
        assignment = self.assignment(part)
        if not done or assignment is None or assignment.leader is None:
            return
        usable = self.usable() - self.emptied.keys()
        if assignment.leader not in usable:
            return
        # Without an active segment the log was cut while its segments were listed.
        complete = any(not sealed for _, _, sealed in segments)
        for path, stop, _ in segments:
            leader = self._bytes(assignment.leader, path, stop)
            # Another leader may have been elected since.
            complete &= len(leader) == stop
            for follower in assignment.in_sync_followers:
                if follower not in usable:
                    continue
                copy = self._bytes(follower, path, stop)
                assert copy == leader, f"{part.tp}: {path} differs in {follower}"
        if complete and set(assignment.isr) <= usable:
            done, end = self._attempt(part, lambda: self.log(part).end_offset())
            if done:
                self._strengthen(part, assignment, end)

    def _check_commits(self) -> None:
        for root in self.roots:
            if self.committed:
                done, found = self._attempt(
                    None, lambda root=root: make_group(root).committed(list(self.committed))
                )
                if not done:
                    continue
                for tp, committed in found.items():
                    offset = None if committed is None else committed.position.offset
                    # After a power cut an offset past the end moves back to the end.
                    log = root.partition(*tp)
                    found_end, end = self._attempt(self.parts[tuple(tp)], log.end_offset)
                    if not (self.boots and found_end and offset == end):
                        assert offset in self.committed[tp], (tp, offset, self.committed[tp])
                    self.committed[tp] = {offset}

    @rule(which=st.integers(0, 3), handle=st.integers(0, 1))
    @precondition(lambda self: self.roots and self.parts and len(self.readers) < 3)
    def begin_to_read(self, which: int, handle: int) -> None:
        """A reader that stays open over everything that happens."""
        part = self.part(which)
        if part.destroyed:
            return
        try:
            done, reader = self._attempt(part, lambda: self.log(part, handle).reader(part.start))
        except OffsetOutOfRangeError:
            # What was deleted was lost, too; see `_reconcile`.
            assert all(record.losable for record in part.records.values())
            return
        if done:
            self.readers.append((self.root(handle), part, part.losses, reader))

    @rule(which=st.integers(0, 2))
    @precondition(lambda self: self.readers)
    def read_on(self, which: int) -> None:
        """Offsets never change under a reader."""
        root, part, losses, reader = self.readers.pop(which % len(self.readers))
        if part.destroyed:
            return
        from support.roots import batch_rows

        offset = reader.offset
        try:
            done, batches = self._attempt(part, reader.read)
        except (LogTruncatedError, OffsetOutOfRangeError):
            assert part.losses > losses or part.start > offset or part.maybe_start > offset
            return
        if done:
            for batch in batches:
                for row in batch_rows(batch):
                    if row[0] >= offset and row[0] in part.records:
                        assert row[3] == part.records[row[0]].value
            self.readers.append((root, part, losses, reader))

    @rule(handle=st.integers(0, 1))
    @precondition(lambda self: self.roots)
    def verify(self, handle: int) -> None:
        """Nothing is wrong with a log whose directories work."""
        if self.alive() == set(self.paths) and not any(p.destroyed for p in self.parts.values()):
            if any(self._offline(part) for part in self.parts.values()):
                return
            findings = [str(finding) for finding in verify_root(self.root(handle))]
            assert findings == [], findings

    def _offline(self, part: Part) -> bool:
        assignment = self.assignment(part)
        return assignment is None or assignment.leader is None

    # The end

    def _heal(self) -> None:
        for directory in sorted(self.paths):
            self.bring_back(directory - 1, False)
        if not self.roots:
            self.open_again()
        assert self.roots, "it cannot be opened although all directories work"
        for _ in range(3):
            self.keep_house(0, False)
        assert set(self.image.online) == set(self.paths)
        for part in self.parts.values():
            assignment = self.assignment(part)
            if not part.destroyed and assignment is not None:
                assert set(assignment.isr) == set(assignment.replicas), f"{part.tp}: {assignment}"
                assert not assignment.is_reassigning, "a reassignment does not end"

    def _check_databases(self) -> None:
        """Every directory has the same rows."""
        controller = self.roots[0].controller
        for store in (controller.state, controller.live):
            with store.held() as directories:
                contents = [
                    directory.stores[store._name].read(lambda txn: list(txn.cursor()))
                    for directory in directories
                ]
            assert len(contents) == len(self.paths), controller.image.directories
            for content in contents[1:]:
                assert content == contents[0], "the databases differ"

    def _check_alone(self) -> None:
        """Each directory can be opened alone, and has all that it must have."""
        ended, self.roots = self.roots, []
        if any(part.destroyed for part in self.parts.values()):
            self._end(ended, True)
            return
        assignments = {
            part.tp: ended[0].controller.assignment(ended[0].topic(part.topic).key(part.number))
            for part in self.parts.values()
        }
        self._end(ended, False)
        alone: dict[int, ReplicatedRoot] = {}
        for directory, path in self.paths.items():
            self.disks.hidden = set(self.paths.values()) - {path}
            alone[directory] = ReplicatedRoot(
                [path],
                mode="r",
                durability="os",
                visibility="append",
                clock=self.clock,
                lock_timeout=20.0,
                auto_create=False,
                unsafe_filesystem=False,
                files=self.disks,
            )
        self.disks.hidden = set()
        try:
            for part in self.parts.values():
                assignment = assignments[part.tp]
                assert assignment is not None
                heads = {}
                for directory in assignment.replicas:
                    log = alone[directory].partition(part.topic, part.number)
                    read = {row[0]: row[3] for row in rows(log)}
                    expected = {offset: each.value for offset, each in part.records.items()}
                    # The last flush publishes what was written when an earlier one failed.
                    more = {value for offset, value in read.items() if offset not in expected}
                    read = {offset: value for offset, value in read.items() if offset in expected}
                    assert read == expected, f"{part.tp} alone in {directory}: {read}"
                    assert more <= part.uncertain, f"{part.tp} alone in {directory}: {more}"
                    heads[directory] = [batch.head_fields for batch in _batches(log)]
                # One may have more that was not acknowledged.
                for batches in zip(*heads.values(), strict=False):
                    assert len(set(batches)) == 1, f"{part.tp}: the copies differ: {batches}"
            for directory, root in alone.items():
                held = {tp for tp, each in assignments.items() if each and directory in each.isr}
                findings = [
                    finding
                    for finding in verify_root(root)
                    if TopicPartition(finding.topic, finding.partition) in held
                ]
                assert findings == [], f"alone in {directory}: {findings}"
        finally:
            for root in alone.values():
                abandon(root)

    def teardown(self) -> None:
        try:
            if hasattr(self, "paths"):
                self._heal()
                self.check()
                self._check_databases()
                self.verify(0)
                self._check_alone()
        finally:
            self.abandon()
            self._eager.stop()
            self._quiet.stop()

    def abandon(self) -> None:
        """Leave everything, and delete the directories."""
        for root in self.roots:
            abandon(root)
        kv.close_unused()
        shutil.rmtree(self.base, ignore_errors=True)


def _batches(log: PartitionLog) -> Iterator[Batch]:
    reader = log.reader(log.start_offset())
    while read := reader.read():
        yield from read


def run_some(examples: int, seed: int | None = None, steps: int = 25) -> None:
    """Run the model on examples of its own, without shrinking."""
    run_state_machine_as_test(
        ReplicasModel,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


__all__ = ["ReplicasModel", "run_some"]
