"""Attaching to a log root, and the partitions and topics of an open log.

The first process to attach runs the startup (boots, damage, leftovers) while no other
process can attach; the others join.  A forked child attaches again at its first call.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from embedlog import catalog, kv
from embedlog.catalog import (
    OWN_TOPICS,
    Catalog,
    NewPartitions,
    SchemaChange,
    TopicInfo,
    check_partition,
)
from embedlog.config import TopicConfig
from embedlog.errors import (
    ClosedError,
    CorruptionError,
    DiskFullError,
    EmbedlogError,
    InvalidReplicationAssignmentError,
    InvalidReplicationFactorError,
    NotALogError,
    ReplicaNotAvailableError,
    StorageError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    UnsupportedFormatError,
)
from embedlog.files import Files, WakePage
from embedlog.files.paths import FORMAT_FILE, is_there
from embedlog.files.reserve import RESERVE_FILE, Reserve, is_reserve
from embedlog.forks import new_lock
from embedlog.hints import ADD_REPLICA, Hint
from embedlog.keyspace import FORMAT_VERSION, PARTITION_KEY
from embedlog.lazy import logging
from embedlog.listeners import Listeners
from embedlog.partition import checkpoint, flush, journal, tail
from embedlog.partition.partition_log import PartitionLog
from embedlog.partition.state import Context, Durability, LogLock, OpenFiles, limit_for
from embedlog.partition.tail import Tail, peek_tail
from embedlog.record import TopicPartition, random_id
from embedlog.root import startup, topic_deletion
from embedlog.version import __version__

if TYPE_CHECKING:
    from embedlog.schemas.topic_schema import TopicSchema

_OPTIONS = (
    *("mode", "durability", "visibility", "clock", "lock_timeout"),
    *("auto_create", "unsafe_filesystem", "files", "allow_pickle", "must_exist"),
)
_NEW_FILE = ".embedlog.new"
"""Locked while the format file is written; hidden, so that the directory counts as empty."""
_NEW_SECONDS = 10.0
_logger = logging.getLogger("embedlog.root")
_PLAIN_FORMAT = re.compile(r'# .*\nformat = (\d+)\nid = "([0-9a-f-]{36})"\n')
"""What `write_format` writes; any other file is TOML."""
_roots: weakref.WeakSet[Root] = weakref.WeakSet()


class HasReplicasError(EmbedlogError):
    """The directory is one of several of a log: `ReplicatedRoot` opens it."""


class NotRecoveredError(EmbedlogError):
    """A partition must be recovered first; the caller does so, and tries again."""


class Root:
    """One handle on a log root.

    Args:
        path: The directory; created with ``mode="rw"``.
        mode: ``"rw"`` or ``"r"``.
        durability, visibility: See `embedlog.open`.
        clock: Returns milliseconds since 1970.
        lock_timeout: Seconds to wait for any lock.
        auto_create: Create a topic when it is first written to.
        unsafe_filesystem: Write even where locks are not reliable.
        files: The class of the file operations; tests pass one that injects faults.
        allow_pickle: Use ``"pickle"`` for topics that keep it as their serializer.
        must_exist: Raise `NotALogError` instead of creating a log; true once it is open, also for
            a forked child, and for the process that unpickles it.
    """

    replicated = False
    """Whether the log has several directories."""

    def __init__(
        self,
        path: str,
        *,
        mode: str,
        durability: Durability,
        visibility: str,
        clock: Callable[[], int],
        lock_timeout: float,
        auto_create: bool,
        unsafe_filesystem: bool,
        files: Callable[..., Files],
        allow_pickle: bool = False,
        must_exist: bool = False,
    ) -> None:
        self.path, self.mode, self.clock = path, mode, clock
        self.durability, self.visibility = durability, visibility
        self.lock_timeout, self.auto_create = lock_timeout, auto_create
        self.unsafe_filesystem, self.files = unsafe_filesystem, files
        self.allow_pickle, self.must_exist = allow_pickle, must_exist
        self.closed = False
        self.listeners = Listeners()
        """Listeners to the clients of this log."""
        self.generation = 0
        """Grows with each fork, after which no object taken from this root is valid."""
        self.startup_report: list[str] = []
        """What the startup found and repaired, in words; empty after a clean close."""
        self._lock = new_lock()
        self._context: Context | None = None
        self._partitions: dict[tuple[str, int], PartitionLog] = {}
        self._id = ""
        self._attach()
        _roots.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Root, self.path, **self.options()), ()

    def options(self) -> dict[str, Any]:
        """Return the options that it was opened with."""
        return {name: getattr(self, name) for name in _OPTIONS}

    def reopen(self, kind: type[Root], *arguments: Any, **options: Any) -> None:
        """Open the log again after `close`, in the same object, which may become of another kind.

        Views of topics and groups then continue to work.  If it fails, the log stays closed.
        """
        options, generation = {**self.options(), **options}, self.generation
        self.__class__ = kind
        initialize: Callable[..., None] = kind.__init__
        try:
            initialize(self, *arguments, **options)
        except BaseException:
            self.closed = True
            raise
        finally:
            self.generation = generation + 1

    @property
    def context(self) -> Context:
        """What the partitions share; attaches again in a forked child."""
        return self._context or self._attach()

    @property
    def id(self) -> str:
        """The id of the log, which it keeps wherever the directory is moved."""
        if not self._id:
            self._id = str(_format_fields(self.context.files)["id"])
        return self._id

    @property
    def wake(self) -> WakePage:
        """The page that waiting readers sleep on."""
        return self.context.wake

    # Topics

    def topics(self) -> dict[str, TopicInfo]:
        """Return every topic by name."""
        return self.context.catalog.topics()

    def topic(self, name: str) -> TopicInfo:
        """Return one topic; see `Catalog.topic`."""
        return self.context.catalog.topic(name)

    def ensure_topic(self, name: str) -> TopicInfo:
        """Return a topic; creates it with the defaults if auto.create.topics.enable is set."""
        try:
            return self.topic(name)
        except UnknownTopicOrPartitionError:
            # Those have other settings, and are created where they are written.
            if not self.auto_create or name in OWN_TOPICS or not self.context.files.writable:
                raise
        with suppress(TopicAlreadyExistsError):
            info = self.create_topic(name, 1, TopicConfig())
            _logger.info("Created the topic %s by itself, with one partition and defaults", name)
            return info
        return self.topic(name)

    def create_topic(
        self,
        name: str,
        partitions: int,
        config: TopicConfig,
        schema: TopicSchema | None = None,
        *,
        replication_factor: int | None = None,
        replicas: Sequence[Sequence[int]] | None = None,
        typed_defaults: bool = True,
    ) -> TopicInfo:
        """Create a topic; every process sees it when this returns.

        Args:
            name: The name.
            partitions: The number of partitions.
            config: The settings.
            schema: The columns of a typed topic.
            replication_factor: In how many directories each partition is.
            replicas: The directories of each partition.
            typed_defaults: Whether a typed topic gets the defaults of its own; a copy has the
                settings of its source.

        Raises:
            InvalidReplicationFactorError: The log has not as many directories.
            InvalidReplicationAssignmentError: A partition cannot have these ``replicas``.
        """
        self.context.check_writable()
        if schema is not None and typed_defaults:
            from embedlog.schemas.settings import with_typed_defaults

            config = with_typed_defaults(config)
        assign = self._assign_replicas(replication_factor, replicas)
        catalog = self.context.catalog
        info = catalog.create_topic(name, partitions, config, self.clock(), schema, assign=assign)
        self.wake.advance()
        return info

    def _assign_replicas(
        self, replication_factor: int | None, replicas: Sequence[Sequence[int]] | None = None
    ) -> NewPartitions | None:
        """Return the function that places new partitions in the transaction that creates them."""
        if replicas is not None:
            raise InvalidReplicationAssignmentError(
                "The log is in one directory, so there is nothing to choose",
                path=self.path,
                todo=ADD_REPLICA,
            )
        if replication_factor not in (None, 1):
            raise InvalidReplicationFactorError(
                f"The log is in one directory, so there is no second place for a copy: "
                f"replication_factor must be 1, got {replication_factor!r}",
                path=self.path,
                todo=ADD_REPLICA,
            )
        return None

    def _unassign_replicas(self) -> Callable[[kv.Txn], None] | None:
        """Return a hook to run inside the delete-topic transaction, or None."""
        return None

    def grow_topic(self, name: str, partitions: int, *, mirror: str = "") -> TopicInfo:
        """Add partitions to a topic; those of a copy only its mirror, which copies ``mirror``."""
        self.context.check_writable()
        assign = self._assign_replicas(None)
        info = self.context.catalog.grow_topic(
            name, partitions, self.clock(), assign=assign, mirror=mirror
        )
        self.wake.advance()
        return info

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicInfo:
        """Change the settings of a topic, for every process from its next call on."""
        self.context.check_writable()
        return self.context.catalog.alter_topic(name, changes)

    def alter_schema(self, name: str, change: SchemaChange) -> TopicInfo:
        """Add the next version of a typed topic's schema, for every process; see `Catalog`."""
        self.context.check_writable()
        info = self.context.catalog.alter_schema(name, change)
        self.wake.advance()
        return info

    def delete_topic(self, name: str) -> None:
        """Delete a topic; readers that have its files open finish with them.

        Housekeeping, or the next open, removes what cannot be removed now.
        """
        context = self.context
        context.check_writable()
        info = self.topic(name)
        # If a stopped process holds a partition, nothing is deleted.
        topic_deletion.wait_for_writers(context, info)
        info = context.catalog.delete_topic(info, unassign=self._unassign_replicas())
        for key, log in list(self._partitions.items()):
            if log.topic_id == info.id:
                log.close()
                del self._partitions[key]
        topic_deletion.try_to_finish(context, info)
        context.wake.advance()

    def version(self) -> int:
        """Return a number that grows with every change of topics, settings and segments."""
        return self.context.catalog.version()

    def partitions(self, topic: str) -> int:
        """Return how many partitions a topic has."""
        return self.topic(topic).partitions

    def partition(self, topic: str, number: int) -> PartitionLog:
        """Return the log of one partition; the same object until a fork or re-creation.

        Raises:
            UnknownTopicOrPartitionError: No such topic, or not that many partitions.
            InvalidPartitionError: The number is not an int.
        """
        context = self.context
        info = context.catalog.topic(topic)
        # Before the dictionary is used: as a key, True equals 1.
        check_partition(topic, number)
        log = self._partitions.get((topic, number))
        if log is not None and log.topic_id == info.id:
            return log
        if not 0 <= number < info.partitions:
            raise UnknownTopicOrPartitionError(
                f"The topic has partitions 0 to {info.partitions - 1}",
                topic=topic,
                partition=number,
                todo=Hint(
                    "Add partitions with create_partitions.",
                    "Add partitions with `embedlog topics alter TOPIC -p N`.",
                ),
            )
        with self._lock:
            log = self._partitions.get((topic, number))
            if log is None or log.topic_id != info.id:
                log = self._partitions[topic, number] = self._new_partition(context, info, number)
            return log

    def _new_partition(self, context: Context, info: TopicInfo, number: int) -> PartitionLog:
        return PartitionLog(context, info, number)

    def _partition_of(self, key: bytes) -> PartitionLog | None:
        topic_id, number = PARTITION_KEY.unpack(key)
        for info in self.topics().values():
            if info.id == topic_id:
                with suppress(UnknownTopicOrPartitionError):
                    return self.partition(info.name, number)
        return None

    def ends(self, topic: str) -> list[tuple[int, int]]:
        """Return the log start offset and the visible end of each partition, as of one instant."""
        info = self.topic(topic)
        if info.partitions == 1:
            log = self.partition(topic, 0)
            return [(log.start_offset(), log.end_offset())]
        durable = self.visibility == "durable"
        return [tail.ends_of(found, durable=durable) for found in self.tails([info]).values()]

    def tails(
        self,
        topics: Sequence[TopicInfo],
        note: Callable[[kv.Txn, Mapping[TopicPartition, Tail | None]], None] | None = None,
        *,
        recover: bool = True,
    ) -> dict[TopicPartition, Tail | None]:
        """Return the tails of all partitions of topics as of one instant.

        None for a partition that was never written to; any other is recovered if it was not yet
        since the boot.  Of 20,000 partitions it takes 0.1 s.

        Args:
            topics: The topics.
            note: Called with the tails in their transaction, which it may write to; more than
                once if partitions are recovered.
            recover: Whether to recover partitions; not in a transaction of `state`.

        Raises:
            NotRecoveredError: One must be recovered, and may not be.
        """
        context = self.context
        keys = {
            TopicPartition(info.name, number): info.key(number)
            for info in topics
            for number in range(info.partitions)
        }

        def step(txn: kv.Txn) -> dict[TopicPartition, Tail | None]:
            found = {partition: peek_tail(txn, key) for partition, key in keys.items()}
            if note is not None:
                note(txn, found)
            return found

        if self.replicated and recover:  # Those without a leader elect one.
            for partition in keys:
                self.partition(*partition).tail()
        while True:
            found = context.live.read(step) if note is None else context.live.write(step)
            missing = self._to_recover(topics, found) if None in found.values() else []
            if not missing:
                return found
            if not recover:
                raise NotRecoveredError("A partition was not recovered yet", path=self.path)
            recovered = {partition: self.partition(*partition).tail() for partition in missing}
            if not context.files.writable:  # Nothing was recovered, so nobody writes.
                return found | recovered

    def _to_recover(
        self, topics: Sequence[TopicInfo], found: Mapping[TopicPartition, Tail | None]
    ) -> list[TopicPartition]:
        """Return the partitions without a tail, except those that were never written to."""
        files, missing = self.context.files, list[tuple[TopicInfo, int]]()
        written: dict[int, set[str]] = {}
        for info in topics:
            # The files after the tails: what is written in between is newer than those.
            exists = files.exists(info.directory)
            written[info.id] = set(files.list(info.directory) if exists else ())
            numbers = range(info.partitions)
            missing += [(info, n) for n in numbers if found[TopicPartition(info.name, n)] is None]
        return self.context.state.read(
            lambda txn: [
                TopicPartition(info.name, number)
                for info, number in missing
                if str(number) in written[info.id] or not catalog.is_new(txn, info.key(number))
            ]
        )

    def partition_logs(self, topics: Iterable[TopicInfo]) -> Iterator[PartitionLog]:
        """Yield the partitions of topics, except those of topics that were deleted meanwhile."""
        for info in topics:
            for number in range(info.partitions):
                try:
                    log = self.partition(info.name, number)
                except UnknownTopicOrPartitionError:
                    break
                yield log

    def producer_identity(
        self, name: str | None, before: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Return a producer id and epoch; see `Catalog.producer_identity`."""
        self.context.check_writable()
        return self.context.catalog.producer_identity(name, before)

    def flush(self) -> None:
        """Flush every partition that this handle appended to.

        Raises:
            LogDeletedError: The log was deleted while it was open.
        """
        self.context.state.check_linked()
        flush.flush([log for log in list(self._partitions.values()) if log.dirty])

    # Attaching

    def _attach(self) -> Context:
        with self._lock:
            if self.closed:
                raise ClosedError("The log was closed", path=self.path)
            if self._context is not None:
                return self._context
            writable = self.mode == "rw"
            files = self._open_files(writable)
            try:
                context = self._context = Reserve(files).used_by(lambda: self._join(files))
                if self.startup_report:
                    # After a reboot: recover all partitions now, rather than on first use.
                    for log in self.partition_logs(self.topics().values()):
                        try:
                            log.tail()
                        except UnknownTopicOrPartitionError:
                            pass  # Another process has just deleted the topic.
                        except (CorruptionError, ReplicaNotAvailableError) as error:
                            # Using this partition raises it again; the others can be used.
                            self.startup_report.append(str(error))
                if writable:
                    topic_deletion.finish_all(context)
                report = "; ".join(self.startup_report) or "nothing to repair"
                _logger.debug("Opened %s with mode %s: %s", self.path, self.mode, report)
                self.must_exist = True
                return context
            except BaseException:
                self._detach(files)
                raise

    def _open_files(self, writable: bool) -> Files:
        """Open the directory; creates it if the log may be created."""
        if writable and not self.must_exist:
            Files.create_root(self.path)
        elif writable and not is_there(self.path):
            raise _no_log(self.path)
        return self.files(self.path, writable=writable, unsafe_filesystem=self.unsafe_filesystem)

    def _detach(self, files: Files) -> None:
        """Undo an attachment that failed, so that the next attempt starts from nothing."""
        context, self._context = self._context, None
        self._close_partitions()
        if context is not None:
            context.live.close()
            context.wake.close()
            context.state.close()
        files.close_all()

    def _close_partitions(self) -> None:
        for log in self._partitions.values():
            log.close()
        self._partitions.clear()

    def _check_format(self, files: Files) -> None:
        check_format(files, must_exist=self.must_exist)

    def _join(self, files: Files) -> Context:
        """Join the attached processes; runs the startup first if there are none."""
        self._check_format(files)
        attachment = self._attachment = startup.Attachment(files)
        if not files.writable:
            with suppress(StorageError):
                attachment.share(self.lock_timeout)
            return self._open_context(files)
        for directory in ("locks", "topics"):
            files.make_directory(directory)
        with attachment.alone(self.lock_timeout):
            # Again: a log may have made it one of its directories meanwhile.
            self._check_format(files)
            report = attachment.attach(self.lock_timeout, startup.prepare)
            self.startup_report = report or []
            return self._open_context(files)

    def _open_context(self, files: Files) -> Context:
        timeout = self.lock_timeout
        with ExitStack() as stack:
            state = kv.LmdbStore(files, "state", durable=True, timeout=timeout)
            stack.callback(state.close)
            live: kv.Store = kv.EmptyStore()
            if files.writable or startup.live_is_valid(files):
                live = kv.LmdbStore(files, "live", durable=False, timeout=timeout)
                stack.callback(live.close)
            context = self._context_of(files, state, live, WakePage(files))
            stack.pop_all()
            return context

    def _context_of(self, files: Files, state: kv.Store, live: kv.Store, wake: WakePage) -> Context:
        return Context(
            files=files,
            state=state,
            live=live,
            catalog=Catalog(state),
            wake=wake,
            log_lock=LogLock(files, state),
            reserve=Reserve(files),
            open_files=OpenFiles(limit_for(files.most_descriptors())),
            clock=self.clock,
            durability=self.durability,
            visibility=self.visibility,
            lock_timeout=self.lock_timeout,
            root=self.path,
            settle=journal.settle_offsets,
            take_checkpoint=checkpoint.take,
            partition_of=self._partition_of,
            checkpointing=threading.Lock(),
        )

    # Detaching

    def close(self) -> None:
        """Flush what this handle wrote, save what groups committed, and detach.

        A partition that is offline is not flushed, which is logged.  The last process to close
        marks the close as clean.
        """
        with self._lock:
            if self.closed:
                return
            try:
                if self._context is not None and self._context.files.writable:
                    try:
                        self.flush()
                    except ReplicaNotAvailableError as error:
                        _logger.warning("Not flushed: %s", error)
                    self._context.checkpoint()
            finally:
                self.closed = True
                _roots.discard(self)
                if self._context is not None:
                    self._leave(self._context)
                    _logger.debug("Closed %s", self.path)

    def _leave(self, context: Context) -> None:
        files = context.files
        context.closed = True
        self._close_partitions()
        try:
            # The next process to open the log trusts the mark and does not check the rows.
            whole = files.writable and context.live.is_whole() and context.state.is_whole()
        finally:
            context.live.close()
            context.wake.close()
        try:
            if whole:
                self._mark_clean(context)
        finally:
            context.state.close()
            files.close_all()

    def _mark_clean(self, context: Context) -> None:
        files = context.files
        context.state.check_linked()
        if not files.is_in_place():
            self._warn_of_move()
            return
        with self._attachment.alone(self.lock_timeout), closing(self._attachment):
            if self._attachment.is_last():
                # If the disk is too full for the mark, the next open checks everything.
                with suppress(DiskFullError):
                    startup.remove_uncommitted_files(files, context.state)
                    assert isinstance(context.state, kv.LmdbStore)
                    startup.copy_state(files, context.state)
                    context.state.close()
                    startup.mark_clean(files)

    def _warn_of_move(self) -> None:
        _logger.warning(
            "%s was moved while it was open; nothing is lost, and the next open checks it",
            self.path,
        )

    def after_fork(self) -> None:
        """In a forked child: drop the parent's objects; the next call attaches again."""
        self.generation += 1
        self._context = None
        self._partitions = {}


def check_root(root: object, instead: str) -> Root:
    """Return the first argument of a constructor that programs do not call themselves.

    Constructors have None as its default, so that this text is shown without arguments too.

    Raises:
        TypeError: It is no root; the text says what to call instead.
    """
    if not isinstance(root, Root):
        raise TypeError(f"root must be the root of an open log, got {root!r}; call {instead}")
    return root


def check_new(files: Files) -> None:
    """Raise unless a directory that is not a log can become one: it must be empty and writable."""
    names = files.list("")
    # A program that has the log open may make a reserve after all files were deleted.
    if RESERVE_FILE in names and is_reserve(files):
        names.remove(RESERVE_FILE)
    foreign = [name for name in names if not name.startswith(("embedlog.toml", "."))]
    # Looked for again: another process may have written it and made directories since.
    if (foreign or not files.writable) and not files.exists(FORMAT_FILE):
        raise NotALogError(
            "The directory holds other files" if foreign else "There is no log here",
            path=files.root,
            todo="Name a new or empty directory.",
        )


def check_format(files: Files, *, replicated: bool = False, must_exist: bool = False) -> None:
    """Raise if this is not a log root or has another format; write the format file of a new one.

    Args:
        files: The files of the root.
        replicated: Whether it may be one of several directories of a log.
        must_exist: Whether it must be a log root already.

    Raises:
        HasReplicasError: It is, and it may not be.
    """
    if not files.exists(FORMAT_FILE):
        if must_exist:
            raise _no_log(files.root)
        check_new(files)
        if files.writable:
            write_format(files)
    try:
        fields = _format_fields(files)
        format_version = fields["format"]
    except (ValueError, KeyError) as error:
        raise NotALogError(
            f"{FORMAT_FILE} is not readable: {error}", path=files.path(FORMAT_FILE)
        ) from error
    if format_version != FORMAT_VERSION:
        todo = (
            "An embedlog before the first release wrote it; create a new root and write the "
            "records again."
        )
        if not isinstance(format_version, int) or format_version > FORMAT_VERSION:
            todo = "Use a newer embedlog."
        raise UnsupportedFormatError(
            f"The root has format {format_version}, this embedlog {__version__} knows "
            f"{FORMAT_VERSION}",
            path=files.root,
            todo=todo,
        )
    # A list is what a user wrote: the next process that may write adds these directories.
    listed = isinstance(fields.get("replicas"), list) and not files.writable
    if "replicas" in fields and not replicated and not listed:
        raise HasReplicasError("The log has several directories", path=files.root)


def _format_fields(files: Files) -> dict[str, Any]:
    """Read the format file."""
    text = files.read_file(FORMAT_FILE).decode()
    if plain := _PLAIN_FORMAT.fullmatch(text):
        return {"format": int(plain[1]), "id": plain[2]}
    import tomllib  # for what a user has changed, or a log of several directories

    return tomllib.loads(text)


def write_format(files: Files) -> None:
    """Write the format file, unless another process is faster: what that adds to it must stay."""
    text = (
        f"# A log root of embedlog: read docs/format.md before you touch anything here.\n"
        f"format = {FORMAT_VERSION}\n"
        f'id = "{random_id()}"\n'
    )
    with files.opened(_NEW_FILE, write=True, create=True) as lock:
        files.lock(lock, _NEW_SECONDS)
        if not files.exists(FORMAT_FILE):
            files.write_file(FORMAT_FILE, text.encode())
        # A process that waits for its lock finds the other file.
        files.unlink(_NEW_FILE, missing_ok=True)


def _no_log(path: str) -> NotALogError:
    return NotALogError(
        "There is no log here, and it must exist", path=path, todo="Check that its disk is mounted."
    )


def _after_fork_in_child() -> None:
    for root in list(_roots):
        root.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
