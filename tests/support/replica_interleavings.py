"""Calls on a log over three directories, each stopped at its lines while another one is made.

Two handles of the log behave as two processes: their file locks are real.  After each pair of
calls all directories work again, the copies catch up, and the log must have every record that
was acknowledged, once, in equal copies.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from embedlog import kv
from embedlog.compaction import CleanOptions, try_clean
from embedlog.config import MaintenanceConfig
from embedlog.errors import (
    CorruptionError,
    EmbedlogError,
    FencedError,
    IllegalStateError,
    InvalidReplicationAssignmentError,
    LogTruncatedError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OffsetOutOfRangeError,
    ReplicaNotAvailableError,
    UnknownTopicOrPartitionError,
)
from embedlog.partition import unnamed_files
from embedlog.partition.replace import rewrite_lock
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.replication import catch_up, jobs, reassign
from embedlog.replication import root as replicated_root
from embedlog.replication.catch_up import repair_copies
from embedlog.replication.mend import verify_copies
from embedlog.retention.retain import delete_records
from support.clock import START
from support.faulty_files import scratch_directory
from support.groups import make_group
from support.interleaving import Pair, watched_locks
from support.patience import patient
from support.replicas import Directories, notice
from support.roots import abandon, encoded, rows

PACKAGES = ("embedlog.replication",)
NEVER = 1 << 40
CONFIG = {
    "segment.bytes": 2600,
    "index.interval.bytes": 500,
    "file.delete.delay.ms": 0,
    "retention.ms": -1,
    "cleanup.policy": "compact",
}
MAY_RAISE = (NotEnoughReplicasError, ReplicaNotAvailableError, NotLeaderOrFollowerError)
"""What any call may raise while directories are lost."""
_EMPTY = hashlib.sha256().hexdigest()
"""Of a file that was opened again, without the partition's lock, after it was compacted."""
ROUNDS = 8
"""Of the housekeeping, in which everything must be in sync again."""


class Sent(NamedTuple):
    """A record whose append returned."""

    offset: int
    value: bytes


class Log:
    """Three directories, two handles, and what was acknowledged of the present topic."""

    def __init__(self, base: Path, handles: int = 2) -> None:
        self.directories = Directories(base)
        self.handles = [self.open() for _ in range(handles)]
        self.taken: set[int] = set()
        self.topics = self.numbers = 0
        self.extra: list[Any] = []
        """Handles of one pair of calls."""

    def open(self) -> Any:
        return self.directories.open(lock_timeout=patient(20))

    @property
    def first(self) -> Any:
        """The handle of the first call."""
        return self.handles[0]

    @property
    def second(self) -> Any:
        """The handle of the second call; the same one if there is one only."""
        return self.handles[-1]

    @property
    def partition(self) -> TopicPartition:
        return TopicPartition(self.topic, 0)

    # A topic for each pair of calls

    def begin(self, replicas: list[int]) -> None:
        """Create a topic with two segments in sync, of which one can be compacted."""
        self.topics += 1
        self.topic = f"t{self.topics}"
        self.sent: list[Sent] = []
        self.tried: set[bytes] = set()
        self.superseded: set[bytes] = set()
        self.cut_at: int | None = None
        self.deleted = self.damaged = False
        self.read: list[Any] = []
        self.first.create_topic(self.topic, 1, replication_factor=len(replicas), config=CONFIG)
        reassign.run(self.first.root, {self.partition: replicas})
        old = self.append(self.first, key=b"same")
        self.append(self.first, count=2)
        self.append(self.first, key=b"same")
        self.superseded.add(old)
        self.log(self.first).roll()
        self.log(self.first).flush()
        self.append(self.second)
        self.append(self.first)

    def log(self, handle: Any) -> Any:
        return handle.root.partition(self.topic, 0)

    def assignment(self, handle: Any) -> Any:
        controller = handle.root.controller
        return controller.current().image.assignments.get(self.key(handle))

    def key(self, handle: Any) -> bytes:
        return handle.root.topic(self.topic).key(0)

    def append(
        self, handle: Any, acks: Any = "all", key: bytes | None = None, count: int = 1
    ) -> bytes:
        """Append records; those that are acknowledged must stay."""
        values = []
        for _ in range(count):
            self.numbers += 1
            values.append(b"%d-" % self.numbers + b"x" * (self.numbers % 90))
        self.tried.update(values)
        keys = [value if key is None else key for value in values]
        batch = encoded(*values, keys=keys, at=START)
        (receipt,) = self.log(handle).append([batch], acks=acks)
        for offset, value in enumerate(values, receipt.base_offset):
            self.sent.append(Sent(offset, value))
        return values[-1]

    # Directories

    def lose(self, handle: Any, directory: int) -> None:
        self.take(directory)
        notice(handle)

    def take(self, directory: int) -> None:
        if directory not in self.taken:
            self.taken.add(directory)
            self.directories.take(directory)

    def put_back(self) -> None:
        for directory in sorted(self.taken):
            self.directories.put_back(directory)
        self.taken.clear()

    # Afterwards

    def heal(self) -> None:
        """Have everything online and in sync again."""
        self.put_back()
        for handle in self.extra:
            with suppress(EmbedlogError):
                handle.close()
        self.extra.clear()
        job = jobs.ReplicationJob(MaintenanceConfig())
        for _ in range(ROUNDS):
            for handle in {id(each): each for each in self.handles}.values():
                with suppress(NotEnoughReplicasError):
                    job.run(handle.root, lambda: False)
            image = self.first.root.controller.current().image
            if len(image.online) == len(image.directories) and all(
                set(each.isr) == set(each.replicas) and not each.is_reassigning
                for each in image.assignments.values()
            ):
                return
        raise AssertionError(f"it does not heal: {image}")

    def check(self) -> None:
        self.heal()
        if self.damaged:
            # The good copies may have been lost meanwhile.
            repair_copies(self.first.root)
        unnamed_files.sweep(self.first.root.context, early=True)
        if self.topic in self.first.root.topics():
            with rewrite_lock(self.log(self.first)):
                pass  # which removes what an attempt before has left
        if self.topic not in self.first.root.topics():
            assert self.deleted, "the topic is gone"
            left = [
                str(path)
                for directory in self.directories.paths
                for path in directory.glob(f"topics/{self.topic}-*/*/*")
            ]
            assert not left, f"files of the deleted topic: {left}"
        else:
            self._check_topic()
        self._check_databases()
        for handle in self.handles:
            assert [str(each) for each in handle.housekeeping.verify()] == []

    def _check_topic(self) -> None:
        for handle in self.handles:
            self.append(handle)
        replicas = self.assignment(self.first).replicas
        members = self.first.root.controller.image.directories
        for handle in self.handles:
            read = rows(self.log(handle))
            values = [row[3] for row in read]
            assert len(values) == len(set(values)), "a record is there twice"
            assert set(values) <= self.tried, "a record was never sent"
            places = {row[0]: row[3] for row in read}
            for sent in self.sent:
                if sent.value in self.superseded or not self._must_stay(sent):
                    continue
                assert places.get(sent.offset) == sent.value, f"lost {sent}: {places}"
        sent_at = {sent.offset: sent.value for sent in self.sent}
        for row in self.read:
            assert row[3] in self.tried
            if self.cut_at is None:
                assert sent_at.get(row[0], row[3]) == row[3], f"{row} was read"
        copies = {
            each: {path: content for path, content in files.items() if content != _EMPTY}
            for each, files in self.directories.copies(self.topic).items()
            if each in members  # one that was removed while it was away has what it had
        }
        first, *others = [copies[each] for each in replicas]
        assert first
        assert all(other == first for other in others), f"copies differ: {copies}"
        assert not any(files for each, files in copies.items() if each not in replicas), (
            f"files where there is no copy: {copies} {replicas}"
        )
        assert verify_copies(self.first.root) == []

    def _must_stay(self, sent: Sent) -> bool:
        return self.cut_at is None or sent.offset < self.cut_at

    def _check_databases(self) -> None:
        controller = self.first.root.controller
        for store in (controller.state, controller.live):
            with store.held() as directories:
                contents = [
                    directory.stores[store._name].read(lambda txn: list(txn.cursor()))
                    for directory in directories
                ]
            for content in contents[1:]:
                assert content == contents[0], "the databases differ"

    def end(self) -> None:
        if self.topic in self.first.root.topics():
            self.first.delete_topic(self.topic)

    def abandon(self) -> None:
        for handle in (*self.handles, *self.extra):
            with suppress(Exception):
                abandon(handle.root)


# The first calls: what they find, and what they do


class Call(NamedTuple):
    """A call, and what it needs."""

    run: Callable[[Log], Any]
    prepare: Callable[[Log], Any] = lambda log: None
    replicas: tuple[int, ...] = (1, 2, 3)
    may_raise: tuple[type[Exception], ...] = ()
    second_may_raise: tuple[type[Exception], ...] = ()
    """What the second call may raise besides `SECOND_MAY_RAISE`."""
    is_fresh: bool = False
    """Whether it needs a log of its own."""


def _be_behind(log: Log) -> None:
    log.lose(log.first, 3)
    log.append(log.first, count=2)
    log.append(log.first, acks=1)
    log.put_back()
    replicated_root.try_bring_back(log.first.root)


def _copy(log: Log) -> None:
    directory = log.first.root.controller.directories.get(3)
    if directory is not None:
        catch_up.copy_partition(log.log(log.first), directory)


def _lag(log: Log) -> None:
    log.append(log.second, acks=1, count=2)
    log.append(log.first, acks=1)


def _be_away(log: Log) -> None:
    log.lose(log.first, 3)
    log.append(log.first, count=2)
    log.put_back()


def _part(log: Log) -> None:
    """The first leader has records that only it had, and another one went on with others."""
    log.append(log.first, acks=1, count=3)
    log.lose(log.first, 1)
    log.append(log.first, count=2)
    log.log(log.first).roll()
    log.append(log.first)
    log.put_back()


def _bring_back(log: Log) -> None:
    replicated_root.try_bring_back(log.first.root)
    catch_up.replicate(log.first.root)


def _begin_move(log: Log) -> None:
    reassign.begin(log.first.root, {log.partition: [3, 2]})
    _lag(log)


def _begin_and_copy(log: Log) -> None:
    reassign.begin(log.first.root, {log.partition: [3, 2]})
    catch_up.replicate(log.first.root)
    _lag(log)


def _lead_by_a_new_copy(log: Log) -> None:
    _begin_and_copy(log)
    reassign.elect_preferred(log.first.root, [log.partition])
    _lag(log)


def _prefer_another(log: Log) -> None:
    reassign.begin(log.first.root, {log.partition: [2, 3, 1]})
    _lag(log)


def _take(directory: int) -> Callable[[Log], None]:
    def take(log: Log) -> None:
        _lag(log)
        log.take(directory)

    return take


def _compact(handle: Any, log: Log) -> None:
    options = CleanOptions(settings=MaintenanceConfig())
    result = try_clean(log.log(handle), START, options, roll=True)
    if result.error is not None:
        raise result.error


def _truncate(log: Log) -> None:
    offset = log.sent[4].offset
    log.cut_at = offset
    log.log(log.first).truncate_to(offset)


def _delete(handle: Any, log: Log) -> None:
    log.deleted = True
    handle.delete_topic(log.topic)


def _commit(log: Log) -> None:
    group = make_group(log.first.root)
    group.commit({log.partition: OffsetAndMetadata(3)})


def _create(log: Log) -> None:
    log.first.create_topic(f"other-{log.topics}", 2, config=CONFIG)
    log.first.root.partition(f"other-{log.topics}", 1).append([encoded(b"x", keys=[b"k"])])


def _open(log: Log) -> None:
    log.extra.append(log.open())


def _close(log: Log) -> None:
    log.extra[0].close()


def _open_and_use(log: Log) -> None:
    _open(log)
    log.append(log.extra[0])


def _read(log: Log) -> None:
    log.read = rows(log.log(log.first), max_bytes=300)


def _damage(log: Log) -> None:
    log.damaged = True
    path = log.directories.path(2)
    file = min(path.glob(f"topics/{log.topic}-*/0/*.arrows"))
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - 40)
        opened.write(b"damaged")


def _add(log: Log) -> None:
    path = log.directories.path(3).parent.parent / "disk4" / "log"
    path.parent.mkdir(parents=True)
    replicated_root.add_directory(log.first.root, str(path))


def _verify(log: Log) -> None:
    differences = verify_copies(log.first.root)
    assert differences == [], "\n".join(map(str, differences))


READS = (LogTruncatedError, OffsetOutOfRangeError)
FIRST: dict[str, Call] = {
    "copy a partition": Call(_copy, _be_behind),
    "bring back an old directory": Call(_bring_back, _be_away),
    "bring back a leader with its own records": Call(_bring_back, _part),
    "run a reassignment": Call(
        lambda log: reassign.run(log.first.root, {log.partition: [3, 2]}), _lag, (1, 2)
    ),
    "finish a reassignment": Call(
        lambda log: reassign.finish(log.first.root), _begin_and_copy, (1, 2)
    ),
    "cancel a reassignment": Call(
        lambda log: reassign.cancel(log.first.root, [log.partition]),
        _begin_and_copy,
        (1, 2),
        (IllegalStateError,),
    ),
    "cancel one that leads": Call(
        lambda log: reassign.cancel(log.first.root, [log.partition]),
        _lead_by_a_new_copy,
        (1, 2),
        (IllegalStateError,),
    ),
    "elect preferred leaders": Call(
        lambda log: reassign.elect_preferred(log.first.root, [log.partition]), _prefer_another
    ),
    "take the leader offline": Call(lambda log: notice(log.first), _take(1)),
    "take a follower offline": Call(lambda log: notice(log.first), _take(2)),
    "append": Call(lambda log: log.append(log.first)),
    "append after the leader was lost": Call(lambda log: log.append(log.first), _take(1)),
    "append to the leader": Call(lambda log: log.append(log.first, acks=1), _lag),
    "append during a move": Call(lambda log: log.append(log.first), _begin_and_copy, (1, 2)),
    "roll": Call(lambda log: log.log(log.first).roll(), _lag),
    "flush": Call(lambda log: log.log(log.first).flush(), _lag),
    "compact": Call(lambda log: _compact(log.first, log), _lag, (1, 2), (FencedError,)),
    "truncate": Call(_truncate, _lag),
    "delete records": Call(
        lambda log: delete_records(log.log(log.first), 1), _lag, may_raise=READS
    ),
    "commit": Call(_commit),
    "create a topic": Call(_create, is_fresh=True),
    "delete a topic": Call(lambda log: _delete(log.first, log), _lag),
    "open": Call(_open_and_use, _lag),
    "close": Call(_close, _open_and_use),
    "read": Call(_read, _lag, may_raise=READS),
    "repair copies": Call(
        lambda log: repair_copies(log.first.root),
        _damage,
        second_may_raise=(CorruptionError,),  # a damaged leader is not copied
        is_fresh=True,
    ),
    "verify copies": Call(_verify),
    "add a directory": Call(_add, _lag, is_fresh=True),
    "remove a directory": Call(
        lambda log: reassign.remove_directories(log.first.root, [1]),
        _lag,
        may_raise=(IllegalStateError,),
        is_fresh=True,
    ),
    "keep house": Call(
        lambda log: jobs.ReplicationJob(MaintenanceConfig()).run(log.first.root, lambda: False),
        _part,
    ),
}


# The second calls


def _lose_leader(log: Log) -> None:
    assignment = log.assignment(log.second)
    if assignment.leader is not None:
        log.lose(log.second, assignment.leader)
    log.append(log.second)


def _lose_follower(log: Log) -> None:
    followers = log.assignment(log.second).in_sync_followers
    if followers:
        log.lose(log.second, followers[-1])
    log.append(log.second)


def _lose_and_return(log: Log) -> None:
    _lose_leader(log)
    _return(log)


def _return(log: Log) -> None:
    log.put_back()
    replicated_root.try_bring_back(log.second.root)
    catch_up.replicate(log.second.root)


def _move(log: Log) -> None:
    replicas = log.assignment(log.second).target_replicas
    others = [each for each in (1, 2, 3) if each not in replicas]
    target = [*others, *replicas[1:]]
    reassign.begin(log.second.root, {log.partition: target})
    catch_up.replicate(log.second.root)
    reassign.finish(log.second.root)
    log.append(log.second, acks=1)


def _move_there_and_back(log: Log) -> None:
    before = log.assignment(log.second).target_replicas
    _move(log)
    reassign.begin(log.second.root, {log.partition: before})
    catch_up.replicate(log.second.root)
    reassign.finish(log.second.root)
    log.append(log.second)


def _cancel(log: Log) -> None:
    reassign.cancel(log.second.root, [log.partition])
    log.append(log.second)


def _cancel_and_move(log: Log) -> None:
    _cancel(log)
    _move(log)


def _elect(log: Log) -> None:
    replicas = log.assignment(log.second).target_replicas
    reassign.begin(log.second.root, {log.partition: [*replicas[1:], replicas[0]]})
    reassign.elect_preferred(log.second.root, [log.partition])
    log.append(log.second, acks=1)


def _leave_and_join(log: Log) -> None:
    """A follower leaves the ISR, as one that lags, and joins again."""

    def shrink(before: Any) -> Any:
        return before.shrink(before.in_sync_followers[-1:])

    log.second.root.controller.change_assignment(log.key(log.second), shrink)
    log.append(log.second)
    catch_up.replicate(log.second.root)


SECOND: dict[str, Callable[[Log], Any]] = {
    "lose the leader": _lose_leader,
    "lose a follower": _lose_follower,
    "lose the leader, and bring it back": _lose_and_return,
    "bring back": _return,
    "append": lambda log: log.append(log.second),
    "append to the leader": lambda log: log.append(log.second, acks=1),
    "move": _move,
    "move there and back": _move_there_and_back,
    "cancel": _cancel,
    "cancel, and move again": _cancel_and_move,
    "elect": _elect,
    "leave the ISR, and join": _leave_and_join,
    "roll": lambda log: log.log(log.second).roll(),
    "compact": lambda log: _compact(log.second, log),
    "flush": lambda log: log.log(log.second).flush(),
    "delete the topic": lambda log: _delete(log.second, log),
    "keep house": lambda log: jobs.ReplicationJob(MaintenanceConfig()).run(
        log.second.root, lambda: False
    ),
}
SECOND_MAY_RAISE = (
    *MAY_RAISE,
    FencedError,
    IllegalStateError,
    InvalidReplicationAssignmentError,
)


# Pairs


class Fault(NamedTuple):
    """What went wrong."""

    first: str
    second: str
    line: int
    stopped_at: str
    error: BaseException


class Pairs:
    """Runs pairs of calls on one log, as long as all is well."""

    def __init__(self, handles: int = 2, packages: tuple[str, ...] = PACKAGES) -> None:
        self._handles, self._packages = handles, packages
        self._log: Log | None = None
        self._scratch: Any = None
        self.runs = 0

    def close(self) -> None:
        if self._log is not None:
            self._log.abandon()
            kv.close_unused()
            self._scratch.__exit__(None, None, None)
            self._log = None

    def _open(self) -> Log:
        if self._log is None:
            self._scratch = scratch_directory()
            base = self._scratch.__enter__()
            self._log = Log(Path(base), self._handles)
        return self._log

    def run(self, first: str, second: str, line: int) -> Pair:
        """Make a pair of calls, and check the log."""
        call = FIRST[first]
        if call.is_fresh:
            self.close()
        log = self._open()
        self.runs += 1
        pair = None
        try:
            log.begin(list(call.replicas))
            call.prepare(log)
            pair = Pair(
                lambda: call.run(log),
                lambda: SECOND[second](log),
                self._packages,
                line,
                wait_seconds=patient(5),
            )
            pair.run()
            may_raise = (
                (*MAY_RAISE, *call.may_raise),
                (*SECOND_MAY_RAISE, *call.second_may_raise),
            )
            for error, allowed in zip(pair.errors, may_raise, strict=True):
                if getattr(error, "missing", False) and first == "compact":
                    continue  # the copy that it wrote to was moved away and back
                if log.deleted:
                    allowed = (*allowed, UnknownTopicOrPartitionError)
                if error is not None and not isinstance(error, allowed):
                    raise error
            log.check()
            log.end()
        except BaseException as error:
            place = "nowhere" if pair is None else pair.stopped_at
            error.add_note(f"{second!r} while {first!r} was stopped at {place}, line {line}")
            self.close()
            raise
        if call.is_fresh:
            self.close()
        return pair

    def lines(self, first: str, second: str) -> list[int]:
        """Return the first and the last time at which each line of the first call is reached."""
        pair = self.run(first, second, NEVER)
        places: dict[str, list[int]] = {}
        for line, place in enumerate(pair.places):
            places.setdefault(place, []).append(line)
        return sorted({line for lines in places.values() for line in (lines[0], lines[-1])})


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("embedlog")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def made() -> Iterator[None]:
    """Have the housekeeping wait for nothing, and locks report who waits for them."""
    with (
        watched_locks(),
        _quiet(),
        mock.patch.multiple(jobs, PROBE_SECONDS=0.0, RETRY_SECONDS=0.0),
        mock.patch.object(replicated_root, "REGAIN_SECONDS", 0),
        mock.patch.object(reassign, "_RETRY_SECONDS", 0.01),
    ):
        yield


def find_faults(
    first: str, seconds: list[str], most: int | None, handles: int = 2, seed: int = 0
) -> tuple[int, list[Fault]]:
    """Return how many pairs were run, and what went wrong.

    Args:
        first: The first call.
        seconds: The second calls.
        most: At how many lines of each pair to stop; by default at all.
        handles: One if both calls are made by the same process.
        seed: Of the choice of the lines.
    """
    faults, pairs = [], Pairs(handles)
    try:
        for second in seconds:
            try:
                lines = pairs.lines(first, second)
            except Exception as error:  # noqa: BLE001
                faults.append(Fault(first, second, -1, "after the end", error))
                continue
            rng = random.Random(f"{first} {second} {seed}")
            chosen = lines if most is None else sorted(rng.sample(lines, min(most, len(lines))))
            for line in chosen:
                try:
                    pairs.run(first, second, line)
                except Exception as error:  # noqa: BLE001
                    place = (error.__notes__ or [""])[-1]
                    faults.append(Fault(first, second, line, place, error))
    finally:
        pairs.close()
    return pairs.runs, faults


def check_pair(first: str, second: str) -> None:
    """Make a pair of calls at all lines, in any order, up to the first fault, which is raised."""
    pairs = Pairs()
    try:
        lines = pairs.lines(first, second)
        random.Random(len(lines)).shuffle(lines)
        for line in lines:
            pairs.run(first, second, line)
    finally:
        pairs.close()


__all__ = ["FIRST", "SECOND", "Pairs", "check_pair", "find_faults", "made"]
