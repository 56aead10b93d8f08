"""A log root as its user sees it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from embedlog.catalog import INTERNAL, refuse_differences, refuse_internal
from embedlog.config import MaintenanceConfig, TopicConfig
from embedlog.errors import EmbedlogError, InvalidConfigError, TopicAlreadyExistsError
from embedlog.files import Files
from embedlog.partition import DURABILITIES, VISIBILITIES, PartitionLog
from embedlog.record import TopicPartition
from embedlog.root.repair import repair_root
from embedlog.root.root import Root
from embedlog.root.verify import Finding, rebuild_index, verify_root

if TYPE_CHECKING:
    from embedlog.maintenance import Maintenance

Progress = Callable[[int, int], None]
"""Called with how much of a long work is done, and how much there is, in bytes."""

_logger = logging.getLogger("embedlog")
_open_logs: weakref.WeakSet[Log] = weakref.WeakSet()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Log:
    """A log root: topics to write to, to read from, and to look at.

    Any thread may use it; a forked child may go on with it; it pickles as its
    path and options.  Made by `open`.
    """

    def __init__(self, root: Root, options: Mapping[str, Any]) -> None:
        self.root = root
        self._options = dict(options)
        self._maintenance: Maintenance | None = None
        self._making = threading.Lock()
        self._children: weakref.WeakSet[Any] = weakref.WeakSet()
        _open_logs.add(self)

    @property
    def path(self) -> str:
        """The directory."""
        return self.root.path

    @property
    def durability(self) -> str:
        """What an acknowledged record survives; see `open`."""
        return self.root.durability

    @property
    def maintenance(self) -> Maintenance:
        """This handle's part in the housekeeping; made when it is first asked for."""
        from embedlog.maintenance import Maintenance, jobs_of

        with self._making:
            made = self._maintenance
            if made is None:
                config = self._options["maintenance"]
                made = Maintenance(
                    self.root,
                    jobs_of(config or MaintenanceConfig()),
                    bound_clock=self._options["clock"] is None,
                    background=config is not None,
                )
                # A log that its program forgot does none; its threads would keep it open.
                weakref.finalize(self, made.request_stop).atexit = False
                self._maintenance = made
            return made

    def _keep_house(self) -> None:
        """The log is used: from now on this process may do the housekeeping, if it is willing."""
        root = self.root
        if self._options["maintenance"] is not None and root.mode == "rw" and not root.closed:
            (self._maintenance or self.maintenance).start()

    # Topics

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        config: Mapping[str, object] | None = None,
        *,
        exist_ok: bool = False,
    ) -> Any:
        """Add a topic and return a view of it.

        Args:
            name: Letters, digits, '.', '_' and '-'; at most 200.
            partitions: How many, at most 20,000 and by default 1; a topic can grow later, but
                not shrink.
            config: Kafka's topic settings, dotted or with underscores.
            exist_ok: If the topic exists already, return it, unless it differs in what is
                given: another number of partitions, or another value of a setting (None
                means the default).  What is not given may be as it is.

        Raises:
            InvalidTopicError, InvalidPartitionsError, InvalidConfigError: Nothing was made.
            TopicAlreadyExistsError: It exists; with ``exist_ok``, it differs.  Nothing was
                changed, and the error names the `differences` and the calls to apply them.
        """
        settings = config or {}
        refuse_internal(name)
        while True:
            info = self.root.topics().get(name) if exist_ok else None
            if info is not None:
                refuse_differences(info, partitions, settings)
                return self.topic(name)
            count = 1 if partitions is None else partitions
            try:
                self.root.create_topic(name, count, TopicConfig.parse(settings))
                return self.topic(name)
            except TopicAlreadyExistsError:
                # With exist_ok another process made it just now, and it is looked at again.
                if not exist_ok:
                    raise

    def delete_topic(self, name: str) -> None:
        """Remove a topic, its records, and what groups committed for it (A38).

        Readers finish with the files they hold.
        """
        refuse_internal(name)
        self.root.delete_topic(name)

    def create_partitions(self, name: str, total: int) -> None:
        """Let a topic have ``total`` partitions; keys may move to other ones (G5)."""
        refuse_internal(name)
        self.root.grow_topic(name, total)

    def alter_topic(self, name: str, config: Mapping[str, object]) -> None:
        """Change settings of a topic; None returns one to its default."""
        self.root.alter_topic(name, config)

    def topics(self, *, internal: bool = False) -> list[str]:
        """Return the names of all topics, sorted.

        Args:
            internal: With those that begin with ``__``, as ``__activity``.
        """
        names = self.root.topics()
        return [name for name in names if internal or not name.startswith(INTERNAL)]

    def describe_topic(self, name: str) -> dict[str, Any]:
        """Return a topic's id, settings, and per partition its offsets, bytes and segments."""
        info = self.root.topic(name)
        return {
            "name": info.name,
            "id": info.id,
            "created_ms": info.created_ms,
            "config": info.config.to_dict(),
            "overrides": info.config.overrides(),
            "partitions": [
                _describe(self.root.partition(name, number)) for number in range(info.partitions)
            ],
        }

    def topic(self, name: str) -> Any:
        """Return a view of a topic, to slice, count and turn into tables.

        Raises:
            UnknownTopicOrPartitionError: There is none; the nearest name is told.
        """
        from embedlog.api.topic import Topic

        self.root.topic(name)
        self._keep_house()
        return Topic(self.root, name)

    def __getitem__(self, name: str) -> Any:
        """The same as `topic`."""
        return self.topic(name)

    def __contains__(self, name: object) -> bool:
        """Whether there is such a topic."""
        return name in self.root.topics()

    def partition(self, topic: str, number: int) -> PartitionLog:
        """Return the log of one partition, the floor below producers and consumers."""
        self._keep_house()
        return self.root.partition(topic, number)

    # Groups

    def groups(self) -> list[str]:
        """Return the names of all consumer groups, sorted: of those with members or commits."""
        from embedlog.api.consumer_group import group_names

        return group_names(self.root)

    def group(self, name: str) -> Any:
        """Return a view of a consumer group, to watch it and to move it; see `ConsumerGroup`.

        It need not exist: `ConsumerGroup.reset_offsets` says where a new one begins.

        Raises:
            InvalidGroupIdError: It cannot be a name.
        """
        from embedlog.api.consumer_group import ConsumerGroup

        return ConsumerGroup(self.root, name)

    # Writing and reading

    def producer(self, **config: Any) -> Any:
        """Return a producer; see `embedlog.Producer` for its settings (kafka-python's names)."""
        from embedlog.producer import Producer

        self._keep_house()
        made = Producer(self.root, **config)
        self._children.add(made)
        return made

    def consumer(self, *topics: str, **config: Any) -> Any:
        """Return a consumer; see `embedlog.Consumer` for its settings (kafka-python's names)."""
        from embedlog.consumer import Consumer

        self._keep_house()
        made = Consumer(self.root, *topics, **config)
        self._children.add(made)
        return made

    def flush(self) -> None:
        """Put everything this handle appended on the disk."""
        for child in list(self._children):
            if hasattr(child, "flush"):
                child.flush()
        self.root.flush()

    # Housekeeping

    def maintain(self) -> dict[str, Any]:
        """Do the housekeeping once, now, by the log's clock; return what was done, by job.

        Works with ``maintenance=False`` as well.  A process that does the
        housekeeping in the background leaves it to this call for so long.

        Raises:
            EmbedlogError: Something could not be done; all else was.
        """
        return self.maintenance.maintain()

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete what lies below an offset of each partition; -1 is its end.

        At once, durably, and whoever still wants it; returns where each begins then.

        Raises:
            OffsetOutOfRangeError: An offset is past the end; those before it in order are done.
        """
        from embedlog.retention import delete_records

        return {one: delete_records(self.root.partition(*one), to) for one, to in offsets.items()}

    def hold(
        self,
        name: str,
        offsets: Mapping[TopicPartition, int] | None = None,
        *,
        seconds: float = 60.0,
    ) -> Any:
        """Keep records from being deleted for so long: for a query that runs, or as a snapshot.

        Returns a `Lease`: `renew` it in time, `release` it, or use it in a
        ``with``.  It ends with a reboot.  Settings may put a cap on what is
        kept (``retention.bytes.hard``), and `delete_records` heeds nobody.

        Args:
            name: A lease of that name is replaced.
            offsets: What is here and after stays; by default everything there is now.
            seconds: Unless it is renewed.

        Raises:
            OffsetOutOfRangeError: Some of it is deleted already; nothing is held.
        """
        from embedlog.partition.leases import hold

        held = self._starts() if offsets is None else offsets
        return hold(self.root, name, held, seconds)

    def _starts(self) -> dict[TopicPartition, int]:
        return {
            TopicPartition(info.name, number): self.root.partition(info.name, number).start_offset()
            for info in self.root.topics().values()
            for number in range(info.partitions)
            if not info.name.startswith(INTERNAL)
        }

    def leases(self) -> list[Any]:
        """Return who holds what, by name; see `hold`."""
        from embedlog.partition.leases import leases

        return list(leases(self.root))

    @property
    def retention_bytes(self) -> int | None:
        """How many bytes all topics together may hold; None is any number.

        Above it the oldest sealed segments go, of topics that delete, whichever
        they are of.  Set it for all processes, durably, from the next round on.
        """
        return self.root.context.catalog.retention_bytes()

    @retention_bytes.setter
    def retention_bytes(self, most: int | None) -> None:
        if most is not None and (not isinstance(most, int) or most < 0):
            raise InvalidConfigError(f"retention_bytes is {most!r}, not None or a number of bytes")
        self.root.context.check_writable()
        self.root.context.catalog.put_retention_bytes(most)

    # Health

    def verify(self, *, progress: Progress | None = None) -> list[Finding]:
        """Read everything and check every checksum; ``[]`` is healthy.  Changes nothing."""
        return verify_root(self.root, progress)

    def repair(self, *, dry_run: bool = True, progress: Progress | None = None) -> list[str]:
        """Mend what `verify` finds; returns in words what is dropped, before or after.

        Damaged records are left out, the files that held them are kept in
        ``quarantine/``, and the records around them stay at their offsets.

        Args:
            dry_run: Only tell.
        """
        return repair_root(self.root, dry_run, progress)

    def rebuild_index(self, topic: str | None = None) -> int:
        """Make the sparse index anew from the segments; returns how many entries it has."""
        return rebuild_index(self.root, topic)

    # Keeping it small

    def compact(
        self,
        topic: str,
        *,
        force: bool = False,
        progress: Progress | bool = True,
        settings: Mapping[str, object] | None = None,
    ) -> list[Any]:
        """Compact a topic here and now: of each key the last record is kept, at its offset.

        Others read and write meanwhile.  Returns for each partition that was
        looked at what was done, in numbers and, as ``why``, in words.

        Args:
            topic: Its ``cleanup.policy`` has ``compact``.
            force: Also what is not dirty enough to be due, what is in the active
                segment, which is rolled first, and tombstones whose time is over
                where nothing is dirty (D19).
            progress: Called with how many bytes were looked at, and how many there are.
                By default a bar in terminals and notebooks; False is none.
            settings: Kafka's ``log.cleaner.dedupe.buffer.size``, ``.io.buffer.size``,
                ``.io.buffer.load.factor`` and ``.io.max.bytes.per.second``.

        Raises:
            InvalidConfigError: The topic is not compacted, or a setting is unknown.
            CorruptionError, StorageError: A partition could not be compacted; the
                others were.
        """
        from embedlog.api.latest import compact
        from embedlog.progress import Bar

        with Bar(f"compact {topic}") as bar:
            told = (bar if progress else None) if isinstance(progress, bool) else progress
            return compact(self.root, topic, force=force, progress=told, settings=settings)

    # Life

    def close(self) -> None:
        """Flush and close producers and consumers, then the log; later calls raise ClosedError."""
        if self.root.closed:
            return
        # Each of them is closed, in reverse order, whatever the ones before raised.
        with ExitStack() as closing:
            closing.callback(_open_logs.discard, self)
            closing.callback(self.root.close)
            for child in list(self._children):
                closing.callback(child.close)
            if self._maintenance is not None:
                closing.callback(self._maintenance.close)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._options)

    def __repr__(self) -> str:
        if self.root.closed:
            return f"<Log {self.path}: closed>"
        names = self.topics()
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        count = f"{len(names)} topic{'s' * (len(names) != 1)}"
        told = f"{count}: {shown}" if names else "no topics"
        return f"<Log {self.path}: {told}; durability={self.durability!r}, mode={self.root.mode!r}>"


def _describe(log: PartitionLog) -> dict[str, int]:
    return {
        "partition": log.partition,
        "start_offset": log.start_offset(),
        "end_offset": log.end_offset(),
        "bytes": log.size_bytes(),
        "segments": len(log.segments),
        "leader_epoch": log.tail().leader_epoch,
    }


def open(  # noqa: A001 - as in `embedlog.open`, like `shelve.open` and `lmdb.open`
    path: str | os.PathLike[str],
    *,
    mode: str = "rw",
    durability: str = "os",
    visibility: str = "append",
    clock: Callable[[], int] | None = None,
    auto_create_topics: bool = True,
    lock_timeout: float = 10.0,
    maintenance: bool | Mapping[str, object] = True,
    unsafe_filesystem: bool = False,
    files: Callable[..., Files] = Files,
) -> Log:
    """Open a log, or make one; any number of processes may have it open.

    Args:
        path: A directory on a local disk.
        mode: ``"rw"``, or ``"r"`` to read what is there and change nothing.
        durability: What an acknowledged record survives: ``"os"`` the death of any
            process at any instant, ``"fsync"`` also a power cut.
        visibility: When consumers of this handle see a record: ``"append"`` once it
            is published, ``"durable"`` once it would survive a power cut.
        clock: Returns milliseconds since 1970; the system's unless given.
        auto_create_topics: Make a topic with the defaults when it is first written to.
        lock_timeout: Seconds to wait for another process before `LockTimeoutError`.
        maintenance: Whether this process may do the housekeeping; one of those that may does it,
            by its settings: those of a broker in Kafka, such as ``{"log.cleaner.threads": 2}``.
        unsafe_filesystem: Write even on NFS, SMB, 9p or FUSE.
        files: The seam to the file system; for tests.

    Raises:
        NotALogError: The path is a file, or holds something else.
        UnsupportedFormatError: An embedlog of another format wrote it.
        UnsupportedFilesystemError: Locks cannot be trusted there.
        CorruptionError: The catalogue is damaged and has no copy.
        StorageError: The file system refused; ``errno`` says why.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory, open(directory) as log:
    ...     log.create_topic("flights", partitions=4)
    ...     log.topics()
    <Topic flights: 4 partitions, 0 records>
    ['flights']
    """
    options = {
        "mode": _one_of("mode", mode, ("rw", "r")),
        "durability": _one_of("durability", durability, DURABILITIES),
        "visibility": _one_of("visibility", visibility, VISIBILITIES),
        "clock": clock,
        "auto_create_topics": auto_create_topics,
        "lock_timeout": lock_timeout,
        "maintenance": _housekeeping(maintenance),
        "unsafe_filesystem": unsafe_filesystem,
        "files": files,
    }
    return _reopen(_checked_path(path), options)


def _reopen(path: str, options: dict[str, Any]) -> Log:
    root = Root(
        path,
        mode=options["mode"],
        durability=options["durability"],
        visibility=options["visibility"],
        clock=options["clock"] or _now_ms,
        lock_timeout=options["lock_timeout"],
        auto_create=options["auto_create_topics"],
        unsafe_filesystem=options["unsafe_filesystem"],
        files=options["files"],
    )
    return Log(root, options)


def _housekeeping(given: bool | Mapping[str, object]) -> MaintenanceConfig | None:
    if isinstance(given, bool):
        return MaintenanceConfig() if given else None
    return MaintenanceConfig.parse(given)


def _checked_path(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise InvalidConfigError(f"{name} is {value!r}", todo=f"use one of {', '.join(known)}")
    return value


@atexit.register
def _close_all() -> None:
    for log in list(_open_logs):
        try:
            log.close()
        except EmbedlogError as error:
            # The interpreter is going: there is nobody left to raise to.
            _logger.error("%s could not be closed: %s", log.path, error)
