"""`Mirror`: copies topics from a source to a target, round after round.

A round copies every partition up to where it ended when the round began.  An error in one
partition or topic does not keep the others from being copied; it is counted, reported, and
tried again in the next round.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event as Flag
from time import monotonic
from typing import NamedTuple

from embedlog.display import plural
from embedlog.errors import (
    ClosedError,
    EmbedlogError,
    InvalidConfigError,
    LogTruncatedError,
    MirrorDivergedError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from embedlog.groups.share_state import is_share
from embedlog.hints import Hint
from embedlog.listeners import MIRROR, Client, CopiedRange, Listener, count_minutes
from embedlog.maintenance.activity import Event, report
from embedlog.mirrors.ends import MirrorPosition, MirrorSource, MirrorTarget, SourceTopic
from embedlog.mirrors.root_source import RootSource
from embedlog.mirrors.status import MirrorStatus, TopicStatus, put_status
from embedlog.partition import PartitionLog
from embedlog.record import OffsetAndMetadata, TopicPartition
from embedlog.root.root import Root

_logger = logging.getLogger("embedlog.mirrors")
_REPORT_SECONDS = 1.0
"""How often the status is written."""
_IDLE_REPORT_SECONDS = 5.0
"""How often while nothing is copied."""
_GROUPS_SECONDS = 5.0
"""How often the offsets of groups are copied while records are."""
_ACTIVITY_SECONDS = 60.0
"""How often a mirror that follows is reported in ``__activity``, if it copied anything."""
_WAIT_SECONDS = 1.0
"""How long to wait for changes at most: so often groups, starts and errors are looked at again."""
_RETRY_SECONDS = 5.0
"""How long a partition, or a topic, is left alone after an error."""
_WHOLE = -1
"""Stands for the number of a partition: all of the topic."""
_GROUPS, _SOURCE = ("", _WHOLE), ("", _WHOLE - 1)
"""Stand for the topic and the partition of errors with groups, and with the source as a whole."""
_NOWHERE = (*_GROUPS, *_SOURCE)
FETCH_BYTES = 8 << 20
ALL_TOPICS = ".*"
_MOST_NAMES = 10
"""Topics that a message names."""

Progress = Callable[[int, int], None]
"""Called with the number of offsets that are done, and of all of the round."""


@dataclass(frozen=True)
class MirrorOptions:
    """What a user says about a mirror."""

    topics: str = ALL_TOPICS
    """A regular expression that the whole name of a topic must match."""
    site: str | None = None
    """If given, the topic ``t`` becomes ``site.t``."""
    groups: str | None = None
    """A regular expression of the groups whose committed offsets are copied; None for none."""
    merge: bool = False
    """Whether the target has records of its own in the same topics."""
    name: str | None = None
    """The name of the mirror in its status; by default it is made of the rest."""
    fetch_bytes: int = field(default_factory=lambda: FETCH_BYTES)
    """About how much is read and written in one step."""

    def __post_init__(self) -> None:
        for option, pattern in (("topics", self.topics), ("groups", self.groups)):
            if pattern is not None or option == "topics":
                _compiled(option, pattern)
        for option, text in (("site", self.site), ("name", self.name)):
            if text is not None and not isinstance(text, str):
                raise InvalidConfigError(f"{option} must be a str, got {text!r}")
        if self.name is not None and not (self.name.isprintable() and len(self.name) <= 200):
            raise InvalidConfigError(
                "The name of a mirror must have at most 200 characters, which can be printed, got "
                f"{self.name[:200]!r}"
            )
        if self.site is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", self.site):
            raise InvalidConfigError(
                f"The name of a site must be letters, digits, '_' and '-', got {self.site!r}"
            )
        if self.site is not None and self.merge:
            raise InvalidConfigError(
                "merge=True keeps the names of topics, so `site` cannot be used with it",
                todo="Leave out `merge` or `site`.",
            )
        if self.groups is not None and self.merge:
            raise InvalidConfigError(
                "Offsets of groups are not copied by a mirror that merges, which has other offsets",
                todo=Hint(
                    'Use a time: log.groups[name].reset_offsets("1h").',
                    "Use a time: `embedlog groups reset GROUP --by-duration 1h`.",
                ),
            )

    def match(self, topic: str) -> bool:
        """Return whether to copy a topic."""
        return re.fullmatch(self.topics, topic) is not None


def check_some_match(source: MirrorSource, options: MirrorOptions) -> None:
    """Check that there is a topic to copy, unless all are to be copied, if there are any.

    Raises:
        UnknownTopicOrPartitionError: No topic of the source matches.
    """
    topics = source.topics()
    if options.topics != ALL_TOPICS and not any(map(options.match, topics)):
        raise UnknownTopicOrPartitionError(
            no_topic(options, topics),
            path=source.address,
            todo="Correct the regular expression, which must match the whole name of a topic.",
        )


def no_topic(options: MirrorOptions, topics: Iterable[str]) -> str:
    """Return, in words, that no topic of a source matches, and which ones it has."""
    names = sorted(topics)
    if not names:
        return "The source has no topics"
    more = ", …" if len(names) > _MOST_NAMES else ""
    listed = ", ".join(names[:_MOST_NAMES])
    return f"No topic of the source matches {options.topics!r}; it has {listed}{more}"


def _compiled(option: str, pattern: object) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise InvalidConfigError(
            f"{option} must be a regular expression as a str, got {pattern!r}",
            todo=f"Pass several names as one, such as {option}='clicks|orders'.",
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidConfigError(
            f"{option} must be a regular expression, got {pattern!r}: {error}"
        ) from error


class MirrorError(NamedTuple):
    """What went wrong in a partition, or, if its number is -1, in a topic."""

    topic: str
    partition: int
    error: EmbedlogError


class Mirror:
    """Copies topics; for one thread.

    Args:
        source: Where to copy from.
        target: Where to copy to.
        options: What to copy.
        root: The root that keeps the status and gets the events: one of the ends.
    """

    def __init__(
        self,
        source: MirrorSource,
        target: MirrorTarget,
        options: MirrorOptions,
        root: Root,
    ) -> None:
        self._source, self._target, self._options, self._root = source, target, options, root
        self._group_pattern = None if not options.groups else _compiled("groups", options.groups)
        self._positions: dict[tuple[str, int], MirrorPosition] = {}
        self._prepared: dict[str, SourceTopic] = {}
        self._unsure: set[str] = set()
        """The topics of which a partition failed, so that they are prepared again."""
        self._starts: dict[tuple[str, int], int] = {}
        """The log start offsets of the source that the target follows already."""
        self._retry_at: dict[tuple[str, int], float] = {}
        self._failing: dict[tuple[str, int], MirrorError] = {}
        """By topic and partition: what is not copied at present."""
        name = options.name or _name_of(source.address, options)
        self.status = MirrorStatus(
            name,
            source.address,
            target.address,
            options.topics,
            options.site,
            options.groups,
            options.merge,
            pid=os.getpid(),
            started_ms=root.clock(),
        )
        self._client = Client(MIRROR, name)
        self._warned_of_none = False
        self._stop = Flag()
        self.begun = Flag()
        """Set once `run` holds the lock of the mirror."""
        self._began_at = self._reported_at = self._activity_at = monotonic()
        self._groups_at = self._reported_at - _GROUPS_SECONDS
        self._reported = (0, 0)
        """Records and bytes as of the last report of the status."""
        self._active_records = 0
        """Records as of the last event."""

    # Running

    def run(self, *, follow: bool, progress: Progress | None = None) -> MirrorStatus:
        """Copy what there is; with ``follow`` continue until `stop` is called.

        Raises:
            LockTimeoutError: Another process runs a mirror of this name.
            EmbedlogError: Without ``follow``: the first error; all else was copied.
        """
        status = self.status
        status.follow = follow
        with self._target.exclusive(status.mirror):
            try:
                self._begin()
                self.begun.set()
                self._round(progress)
                while follow and not self._stop.is_set():
                    self._source.wait(_WAIT_SECONDS)
                    self._round(None)
                    self._report_if_due()
                if follow and self._group_pattern is not None:
                    self._copy_groups()
                self._target.flush()
                status.state = "stopped" if self._stop.is_set() else "finished"
                if self._failing and not follow:
                    status.state = "failed"
            except BaseException as error:
                status.state = "failed"
                if isinstance(error, EmbedlogError):
                    status.add_error(str(error))
                raise
            finally:
                self._end()
        if self._failing and not follow:
            raise self.errors[0].error
        return status

    @property
    def errors(self) -> list[MirrorError]:
        """What keeps topics, partitions and groups from being copied at present."""
        return list(self._failing.values())

    def stop(self) -> None:
        """End `run` after the batch that is being copied; any thread may call it."""
        self._stop.set()

    def _begin(self) -> None:
        self._report()
        _logger.info("Mirror %s: begins", self.status.mirror)

    def _end(self) -> None:
        """Report how it ended, unless the root was closed before."""
        if self._root.closed:
            return
        with suppress(ClosedError):
            self._client.close()
            self._report_activity(always=True)
            self._report(self._began_at)

    # A round

    def _round(self, progress: Progress | None) -> None:
        """Copy every partition up to where it ends now, then the offsets of groups."""
        status = self.status
        goals = dict(self._goals())
        left = {key: max(goal - self._positions[key].offset, 0) for key, goal in goals.items()}
        whole, behind = sum(left.values()), [key for key in goals if self._must_read(key, goals)]
        while behind and not self._stop.is_set():
            for key in list(behind):
                if self._stop.is_set():
                    break
                if not self._copies_more(key, goals):
                    behind.remove(key)
                if key in self._positions:
                    left[key] = max(goals[key] - self._positions[key].offset, 0)
                if progress is not None:
                    progress(whole - sum(left.values()), whole)
                self._report_if_due()
        if self._group_pattern is not None and (not status.follow or self._groups_are_due()):
            self._copy_groups()
        self._report_activity()

    def _goals(self) -> Iterator[tuple[tuple[str, int], int]]:
        """Prepare the topics, and yield each partition with the end of it at the source."""
        topics: dict[str, SourceTopic] | None = None
        with self._collected(*_SOURCE):
            topics = self._source.topics()
        if topics is None:
            return
        self._failing.pop(_SOURCE, None)
        for name in self.status.by_topic.keys() - topics.keys():
            del self.status.by_topic[name]  # It was deleted at the source; the copy stays.
            self._forget(name)
        matching = [topic for topic in topics.values() if self._options.match(topic.name)]
        if not matching and not self._warned_of_none:
            self._warned_of_none = True
            waits = "; the mirror waits for one" if self.status.follow else ""
            reason = no_topic(self._options, topics)
            _logger.warning("Mirror %s: %s%s", self.status.mirror, reason, waits)
        for topic in matching:
            if not self._prepare(topic):
                continue
            for partition in range(topic.partitions):
                key = topic.name, partition
                if self._retry_at.get(key, 0) > monotonic():
                    continue
                with self._collected(*key):
                    bounds = self._source.bounds(*key)
                    self._follow_start(key, bounds.start_offset)
                    self._note_lag(key, bounds.end_offset - self._position(*key).offset)
                    yield key, bounds.end_offset

    def _prepare(self, topic: SourceTopic) -> bool:
        """Make the copy of a topic like the source; return whether to copy records."""
        name, key = self.target_name(topic.name), (topic.name, _WHOLE)
        known = self._prepared.get(topic.name)
        if known is not None and known.id != topic.id:
            self._forget(topic.name)  # Its positions are those of the topic that was deleted.
        if known == topic and topic.name not in self._unsure:
            with self._collected(*key):
                if self._target.is_copy(name):
                    return True
                self._forget(topic.name)
        if self._retry_at.get(key, 0) > monotonic():
            return False
        self._retry_at[key] = monotonic() + _RETRY_SECONDS
        with self._collected(*key):
            if self._target.prepare(topic, name, self._source):
                self._prepared[topic.name] = topic
                self._unsure.discard(topic.name)
                del self._retry_at[key]
                self._failing.pop(key, None)
                status = self.status.by_topic.setdefault(topic.name, TopicStatus(name))
                status.lags += [0] * (topic.partitions - len(status.lags))
                return True
        return False

    def _forget(self, topic: str) -> None:
        self._prepared.pop(topic, None)
        for by_key in (self._positions, self._starts, self._retry_at, self._failing):
            for key in [key for key in by_key if key[0] == topic]:
                del by_key[key]

    def target_name(self, topic: str) -> str:
        """Return the name of the copy of a topic."""
        site = self._options.site
        return topic if site is None else f"{site}.{topic}"

    def _position(self, topic: str, partition: int) -> MirrorPosition:
        """Return the next offset to copy; the first time, ask the target."""
        position = self._positions.get((topic, partition))
        if position is None:
            position = self._target.position(self.target_name(topic), partition)
            if position is None:
                position = MirrorPosition(self._source.bounds(topic, partition).start_offset)
            self._positions[topic, partition] = position
        return position

    def _note_lag(self, key: tuple[str, int], lag: int) -> None:
        self.status.by_topic[key[0]].lags[key[1]] = max(lag, 0)

    def _follow_start(self, key: tuple[str, int], start: int) -> None:
        if self._starts.get(key) != start:
            self._target.move_start(self.target_name(key[0]), key[1], start)
            self._starts[key] = start

    def _must_read(self, key: tuple[str, int], goals: Mapping[tuple[str, int], int]) -> bool:
        """Return whether a partition has more, or may have been truncated and have grown since.

        A read says where it was truncated.
        """
        position = self._positions[key]
        return position.offset != goals[key] or not self._source.is_current(*key, position)

    def _copies_more(self, key: tuple[str, int], goals: Mapping[tuple[str, int], int]) -> bool:
        """Copy the next batches of a partition; return whether more follow up to its goal."""
        if key[0] not in self._prepared:
            return False  # After an error in another partition the topic is prepared again first.
        with self._collected(*key):
            position = self._position(*key)
            self._copy(key, position)
            self._failing.pop(key, None)
            return position.offset < self._position(*key).offset < goals[key]
        return False

    def _copy(self, key: tuple[str, int], position: MirrorPosition) -> None:
        topic, partition = key
        name, status = self.target_name(topic), self.status
        try:
            fetch = self._source.fetch(topic, partition, position, self._options.fetch_bytes)
        except LogTruncatedError as error:
            raise _diverged(topic, partition, position.offset, error.next_offset or 0) from error
        except OffsetOutOfRangeError as error:
            self._skip(key, position.offset, error)
            return
        known = self._prepared[topic]
        if fetch.topic not in (None, known) and (
            not self._prepare(fetch.topic) or fetch.topic.id != known.id
        ):
            # After the topics were listed a schema was added, which cannot be copied, or the topic
            # was created again, and is copied from its start.
            return
        listening = self._listening(*key)
        for listener, log in listening:
            listener.began(log, position.offset)
        written = self._target.append(name, partition, fetch)
        for listener, log in listening:
            minutes = count_minutes(batch for _, batch in fetch.batches)
            copied = CopiedRange(log, position.offset, fetch.next_offset, minutes)
            listener.copied(copied)
        self._positions[key] = MirrorPosition(fetch.next_offset, fetch.leader_epoch)
        self._note_lag(key, fetch.end_offset - fetch.next_offset)
        read = fetch.records
        status.by_topic[topic].records += written
        status.records += written
        status.dropped += read - written
        status.bytes += fetch.bytes
        status.batches += len(fetch.batches)
        if written:
            status.copied_ms = self._root.clock()

    def _listening(self, topic: str, partition: int) -> list[tuple[Listener, PartitionLog]]:
        """Return the listeners of a partition of the source, with its log; none in Kafka."""
        if not isinstance(self._source, RootSource):
            return []
        root = self._source.root
        log = root.partition(topic, partition)
        log.refresh()
        return [(listener, log) for listener in root.listeners.of(log.config, self._client)]

    def _skip(self, key: tuple[str, int], offset: int, error: OffsetOutOfRangeError) -> None:
        """Continue where the source begins, if retention deleted records before they were copied.

        Raises:
            MirrorDivergedError: The source ends before the position.
        """
        (topic, partition), (start, end) = key, self._source.bounds(*key)
        if end < offset:
            raise _diverged(topic, partition, offset, end) from error
        if start <= offset:
            raise error  # The source has the offset again: a later round tries it.
        self._target.skip_to(self.target_name(topic), partition, start)
        for listener, log in self._listening(*key):
            listener.began(log, offset)
            listener.skipped(log, offset, start)
        self._positions[key] = MirrorPosition(start)
        count = start - offset
        self.status.skipped += count
        self.status.by_topic[topic].skipped += count
        _logger.warning(
            "Mirror %s: retention at the source deleted offsets [%d, %d) of %s-%d before they were "
            "copied; the copy continues at %d without them",
            *(self.status.mirror, offset, start, topic, partition, start),
        )
        self._event(
            "skipped",
            {
                "topic": self.target_name(topic),
                "partition": partition,
                "source_topic": topic,
                "first_offset": offset,
                "next_offset": start,
                "offsets": count,
            },
        )

    # Groups

    def _copy_groups(self) -> None:
        """Commit at the target what groups have committed at the source."""
        assert self._group_pattern is not None
        self._groups_at = monotonic()
        self._failing.pop(_GROUPS, None)
        with self._collected(*_GROUPS):
            for group in self._source.groups():
                if self._group_pattern.fullmatch(group):
                    self._copy_group(group)

    def _copy_group(self, group: str) -> None:
        positions = {}
        for (topic, partition), position in self._source.committed(group).items():
            if topic not in self._prepared or (topic, partition) not in self._positions:
                continue
            if is_share(position.metadata):
                continue  # The states of its records are those of this log.
            name = self.target_name(topic)
            offset = self._target.translate(name, partition, position.offset)
            if offset is not None:
                # The epoch is one of the source.
                positions[TopicPartition(name, partition)] = OffsetAndMetadata(
                    offset, position.metadata
                )
        if positions:
            self.status.commits += len(self._target.commit(group, positions))

    # Errors and reports

    def _collected(self, topic: str, partition: int) -> _Collected:
        return _Collected(self, topic, partition)

    def note_error(self, topic: str, partition: int, error: EmbedlogError) -> None:
        """Count an error, log and report it, unless there was the same before."""
        is_gone = isinstance(error, UnknownTopicOrPartitionError)
        if is_gone and topic and topic not in self._source.topics():
            return  # It was deleted at the source meanwhile.
        self._failing[topic, partition] = MirrorError(topic, partition, error)
        self._retry_at[topic, partition] = monotonic() + _RETRY_SECONDS
        # What is known of it may be wrong: ask the target again.
        self._positions.pop((topic, partition), None)
        self._unsure.add(topic)
        text, status = str(error), self.status
        is_new = text not in status.errors
        status.add_error(text)
        if is_new:
            _logger.error("Mirror %s: %s", status.mirror, text)
            where = {"topic": topic, "partition": partition}
            facts = {name: value for name, value in where.items() if value not in _NOWHERE}
            self._event("failed", {"job": "mirror", **facts, "error": text})

    def _event(self, kind: str, facts: Mapping[str, object]) -> None:
        name = self.status.mirror
        report(self._root, [Event(kind, name, {"mirror": name, **facts})])

    def _report_if_due(self) -> None:
        seconds, status = monotonic() - self._reported_at, self.status
        is_idle = (status.records, status.bytes) == self._reported
        if seconds >= (_IDLE_REPORT_SECONDS if is_idle else _REPORT_SECONDS):
            self._report()
        if self._group_pattern is not None and self._groups_are_due():
            self._copy_groups()

    def _groups_are_due(self) -> bool:
        return monotonic() - self._groups_at >= _GROUPS_SECONDS

    def _report(self, since: float | None = None) -> None:
        """Write the status, with the rate since the last time, or since another time."""
        now, status = monotonic(), self.status
        records, size = (0, 0) if since is not None else self._reported
        seconds = now - (self._reported_at if since is None else since)
        if seconds > 0:
            status.records_per_second = round((status.records - records) / seconds, 1)
            status.bytes_per_second = round((status.bytes - size) / seconds, 1)
        self._reported_at, self._reported = now, (status.records, status.bytes)
        for topic, part in status.by_topic.items():
            errors = (str(error.error) for error in self.errors if error.topic == topic)
            part.error = next(errors, None)
        status.updated_ms = self._root.clock()
        try:
            put_status(self._root, status)
        except ClosedError:
            raise
        except EmbedlogError as error:
            # As on a full disk: the copies are more important.
            _logger.warning("Mirror %s: cannot report its status: %s", status.mirror, error)

    def _report_activity(self, *, always: bool = False) -> None:
        """Report in ``__activity`` what was copied since the last time."""
        now, status = monotonic(), self.status
        if not always and now - self._activity_at < _ACTIVITY_SECONDS:
            return
        copied = status.records - self._active_records
        if copied or always:
            seconds = now - self._activity_at
            self._event(
                "mirrored",
                {
                    "source": status.source,
                    "target": status.target,
                    "state": status.state,
                    "topics": len(status.by_topic),
                    "records": copied,
                    "records_per_second": round(copied / seconds) if seconds > 0 else 0,
                    "lag": status.lag,
                    "skipped": status.skipped,
                    "errors": status.error_count,
                },
            )
        self._activity_at, self._active_records = now, status.records


class _Collected:
    """Adds an error of a topic to those of the round, so that the rest is copied."""

    def __init__(self, mirror: Mirror, topic: str, partition: int) -> None:
        self._mirror, self._where = mirror, (topic, partition)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        if not isinstance(error, EmbedlogError) or isinstance(error, ClosedError):
            return False
        self._mirror.note_error(*self._where, error)
        return True


def _diverged(topic: str, partition: int, offset: int, cut: int) -> MirrorDivergedError:
    return MirrorDivergedError(
        f"The source was truncated at offset {cut}, and {plural(offset - cut, 'offset')} from "
        "there on were copied before",
        topic=topic,
        partition=partition,
        offset=offset,
        next_offset=cut,
        todo=Hint(
            f"Truncate the copy with log.partition(…).truncate_to({cut}), or delete it.",
            f"Truncate the copy at offset {cut} with a Python program, or delete it.",
        ),
    )


def _name_of(source: str, options: MirrorOptions) -> str:
    """Return the default name of a mirror."""
    copies = f" as {options.site}" if options.site else " merged" if options.merge else ""
    return f"{source} {options.topics}{copies}"
