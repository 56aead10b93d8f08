"""`mirror`: copies topics of a log, or of a Kafka cluster, to another one."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import deepcopy
from typing import Self, TypeGuard

from embedlog.api.log import Log
from embedlog.api.log import open as open_log
from embedlog.api.opening import check_choice
from embedlog.api.replicas import several
from embedlog.display import html_table, moment, plural, public_names, text_table
from embedlog.errors import EmbedlogError, InvalidConfigError, NotALogError, StorageError
from embedlog.files.paths import FORMAT_FILE, exists, is_inside, real_path
from embedlog.hints import Hint
from embedlog.mirrors.ends import KAFKA_SCHEME, MirrorSource, MirrorTarget
from embedlog.mirrors.mirror import (
    ALL_TOPICS,
    Mirror,
    MirrorOptions,
    Progress,
    check_some_match,
)
from embedlog.mirrors.root_source import RootSource
from embedlog.mirrors.root_target import RootTarget
from embedlog.mirrors.status import MirrorStatus
from embedlog.partition import DURABILITIES, Durability
from embedlog.progress import ProgressBar, format_bytes
from embedlog.root.location import directory_of
from embedlog.root.root import Root

End = Log | str | os.PathLike[str]
"""An open log, the directory of one, or ``kafka://host:port``."""

_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_STOP_SECONDS = 30.0
_CHECK_SECONDS = 0.05
_logger = logging.getLogger("embedlog.api")
_runs: weakref.WeakSet[MirrorRun] = weakref.WeakSet()


def mirror(
    source: End,
    target: End,
    *,
    topics: str = ALL_TOPICS,
    site: str | None = None,
    groups: str | None = None,
    follow: bool = False,
    merge: bool = False,
    relay: bool = False,
    durability: Durability | None = None,
    name: str | None = None,
    progress: Progress | bool = True,
) -> MirrorRun:
    """Copy topics to another log, or to or from a Kafka cluster, and keep the copies up to date.

    Copies in a log have the offsets, keys, headers, timestamps, settings, partitions and schemas
    of their source, and no other program may write to them, until `Mirrors.failover`.  A mirror
    that was interrupted at any instant continues exactly where it was when it is started again.

    Args:
        source: Where to copy from: an open log, its directory, or ``kafka://host:port``.
        target: Where to copy to, likewise; a directory without a log becomes one.
        topics: A regular expression that the whole name of a topic must match; internal topics,
            and those whose records were at the target before, are never copied.
        site: The name of the source at the target: the topic ``t`` becomes ``site.t``.
        groups: A regular expression of the groups whose committed offsets are copied.  They only
            move forward, and not while the group has members at the target.
        follow: Continue until `MirrorRun.stop`, in a thread, also with topics that are created
            later; by default return once all that there was is copied.
        merge: Append to topics of the same names that others write to, too.  A header of each
            record says where it was, and no mirror sends it there again; offsets differ.
        relay: With ``merge``, also copy records that came to the source from other sites.
        durability: What a copied record survives; by default as the target was opened.
        name: The name of the mirror in `MirrorStatus`; one process at a time runs one of a name.
        progress: Called with the offsets that are done, and all.  By default a progress bar in
            terminals and notebooks; False shows none.

    Raises:
        InvalidConfigError: An argument is not valid.
        NotALogError, StorageError: The source is not a log, or an end cannot be opened.
        UnknownTopicOrPartitionError: Without ``follow``: no topic of the source matches.
        LockTimeoutError: Another process runs a mirror of this name.
        MirrorConflictError, MirrorDivergedError: A topic cannot be copied; all others were.
        EmbedlogError: A partition could not be copied; all others were.
    """
    _check(follow=follow, merge=merge, relay=relay)
    if durability is not None:
        check_choice("durability", durability, DURABILITIES)
    if relay and not merge:
        raise InvalidConfigError(
            "relay is for mirrors that merge", todo=Hint("Pass merge=True too.", "Add --merge.")
        )
    if _is_kafka(source) and _is_kafka(target):
        raise InvalidConfigError(
            "A mirror needs a log at one of its ends",
            todo="To copy from Kafka to Kafka, use Kafka's MirrorMaker.",
        )
    options = MirrorOptions(topics, site, groups, merge, name)
    with ExitStack() as stack:
        source_end, source_root = _source(stack, source)
        if not follow:
            check_some_match(source_end, options)  # Before the target is created.
        target_end, target_root = _target(
            stack,
            target,
            source_root,
            follow=follow,
            merge=merge,
            relay=relay,
            durability=durability,
        )
        root = target_root or source_root
        assert root is not None
        if source_end.site_id == target_end.site_id:
            raise InvalidConfigError(
                "The source and the target are the same log",
                todo="A directory that was copied has the same id; open a new one as the target.",
            )
        run = MirrorRun(Mirror(source_end, target_end, options, root), stack.pop_all())
    if follow:
        run._start()
        return run
    with run:
        if not isinstance(progress, bool):
            run._run(follow=False, progress=progress)
        else:
            with ProgressBar("mirror", lambda count: plural(int(count), "record")) as bar:
                run._run(follow=False, progress=bar if progress else None)
    return run


def _check(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidConfigError(f"{name} must be True or False, got {value!r}")


def _source(stack: ExitStack, end: End) -> tuple[MirrorSource, Root | None]:
    if _is_kafka(end):
        from embedlog.mirrors.kafka_source import KafkaSource

        kafka_source = KafkaSource(end)
        stack.callback(kafka_source.close)
        return kafka_source, None
    log = end if isinstance(end, Log) else stack.enter_context(_open_existing(end))
    source = RootSource(log.root)
    stack.callback(source.close)
    return source, log.root


def _open_existing(path: str | os.PathLike[str]) -> Log:
    """Open a log to read it for long: attached if this user may write to it, else read-only."""
    try:
        open_log(path, mode="r").close()  # Raises if there is none, which would be created.
    except (NotALogError, StorageError) as error:
        if isinstance(error, StorageError) and not error.missing:
            raise
        if exists(f"{directory_of(path)}/{FORMAT_FILE}"):
            raise  # There is one, which cannot be opened.
        raise NotALogError(
            "There is no log to copy from",
            path=directory_of(path),  # Raises if it is no path.
            todo="Check the path of the source.",
        ) from error
    try:
        return open_log(path, maintenance=False)
    except StorageError as error:
        if error.errno not in _NO_PERMISSION:
            raise
        return open_log(path, mode="r")


def _target(
    stack: ExitStack,
    end: End,
    source: Root | None,
    *,
    follow: bool,
    merge: bool,
    relay: bool,
    durability: Durability | None,
) -> tuple[MirrorTarget, Root | None]:
    if _is_kafka(end):
        assert source is not None
        from embedlog.mirrors.kafka_target import KafkaTarget

        kafka_target = KafkaTarget(end, source, merge=merge, relay=relay)
        stack.callback(kafka_target.close)
        return kafka_target, None
    if source is not None:
        _check_outside(end, source)
    # A standby that only its mirror has open must be kept house, too.
    log = end if isinstance(end, Log) else stack.enter_context(open_log(end, maintenance=follow))
    target: MirrorTarget
    if merge:
        from embedlog.mirrors.merging_target import MergingTarget

        target = MergingTarget(log.root, durability, relay=relay)
    else:
        target = RootTarget(log.root, durability)
    stack.callback(target.close)
    return target, log.root


def _check_outside(end: End, source: Root) -> None:
    """Check that the target is not a directory inside of the source, whose files it would be among.

    Raises:
        InvalidConfigError: It is.
    """
    several_targets = isinstance(end, list | tuple)
    for target in end if several_targets else [end]:  # type: ignore[union-attr]
        path = real_path(target.path if isinstance(target, Log) else directory_of(target))
        for directory in _directories(source):
            if is_inside(path, directory):
                raise InvalidConfigError(
                    f"The target is a directory inside of the source {directory}",
                    path=path,
                    todo="Use a directory outside of it, if possible on another disk.",
                )


def _directories(root: Root) -> list[str]:
    """Return the directories of a log."""
    if not root.replicated:
        return [real_path(root.path)]
    return [info.path for info in several(root).controller.current().image.directories.values()]


def _is_kafka(end: object) -> TypeGuard[str]:
    return isinstance(end, str) and end.startswith(KAFKA_SCHEME)


class MirrorRun:
    """A mirror that was started; returned by `mirror`.

    It ends with `stop`, its ``with`` block, or the end of this process; the next one continues
    where it was.
    """

    def __init__(self, mirror: Mirror, ends: ExitStack) -> None:
        self._mirror, self._ends = mirror, ends
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        _runs.add(self)

    @property
    def status(self) -> MirrorStatus:
        """What was copied so far, and how far the copies are behind; a copy, as of now."""
        while True:
            with suppress(RuntimeError):  # A topic was added meanwhile.
                return deepcopy(self._mirror.status)

    @property
    def running(self) -> bool:
        """Whether the mirror is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def errors(self) -> list[EmbedlogError]:
        """What keeps topics and partitions from being copied at present."""
        return [error.error for error in list(self._mirror.errors)]

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it ends, or for some time; return whether it has ended.

        Raises:
            EmbedlogError: It ended with an error.
        """
        if self._thread is not None:
            self._thread.join(seconds)
        if self.running:
            return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def stop(self) -> MirrorStatus:
        """End it after the batches that are being copied, and return its last status.

        Raises:
            EmbedlogError: It ended with an error before.
        """
        self._mirror.stop()
        if self._thread is None:
            self._ends.close()
        self.wait(_STOP_SECONDS)
        return self.status

    def _start(self) -> None:
        thread = threading.Thread(target=self._follow, name="embedlog-mirror", daemon=True)
        try:
            thread.start()
        except BaseException:
            self._ends.close()
            raise
        self._thread = thread
        while not self._mirror.begun.wait(_CHECK_SECONDS) and self.running:
            pass
        self.wait(0)  # Raises if another process runs it.

    def _follow(self) -> None:
        try:
            self._run(follow=True, progress=None)
        except BaseException as error:  # noqa: BLE001 - `wait` and `stop` raise it
            self._error = error
            _logger.error("The mirror %s ended: %s", self._mirror.status.mirror, error)

    def _run(self, *, follow: bool, progress: Callable[[int, int], None] | None) -> None:
        with self._ends:
            self._mirror.run(follow=follow, progress=progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Display

    def __dir__(self) -> list[str]:
        """Return the names that completion offers."""
        return public_names(self)

    def __repr__(self) -> str:
        status = self.status
        return "\n".join((title_of(status), *text_table(HEADS, rows_of(status))))

    def _repr_html_(self) -> str:
        """For notebooks: what was copied, by topic."""
        status = self.status
        return html_table(title_of(status), HEADS, rows_of(status))


HEADS = ("topic", "copy", "records", "lag", "skipped", "error")


def title_of(status: MirrorStatus) -> str:
    """Return a mirror in one line."""
    rate = f"{status.records_per_second:,.0f} records/s"
    copied = f"{plural(status.records, 'record')} ({format_bytes(status.bytes)})"
    parts = [f"Mirror {status.mirror}: {status.state}", copied, rate, f"lag {status.lag:,}"]
    if status.skipped:
        parts.append(f"{plural(status.skipped, 'offset')} skipped")
    if status.dropped:
        parts.append(f"{plural(status.dropped, 'record')} left out")
    if status.error_count:
        parts.append(plural(status.error_count, "error"))
    if status.updated_ms:
        parts.append(f"as of {moment(status.updated_ms)}")
    return ", ".join(parts)


def rows_of(status: MirrorStatus) -> list[tuple[object, ...]]:
    """Return a row for each topic of a mirror, under `HEADS`."""
    return [
        (name, topic.target, f"{topic.records:,}", f"{topic.lag:,}", topic.skipped, topic.error)
        for name, topic in sorted(status.by_topic.items())
    ]


@atexit.register
def _stop_all() -> None:
    for run in list(_runs):
        if run.running:
            run._mirror.stop()
            assert run._thread is not None
            run._thread.join(_STOP_SECONDS)
