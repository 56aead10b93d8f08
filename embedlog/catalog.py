"""Topics, their settings, and the manifest: which segment files exist.

The manifest in `state` is the only truth about files: a file it does not name
is garbage, a named empty tail that is missing is created again, a named sealed
file that is missing is an error.  Order of work: name it, create it; and
backwards: drop the name, unlink it (R5).

Every function that takes a transaction is one step of somebody's transaction;
the rows are described in docs/format.md.
"""

from __future__ import annotations

import difflib
import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from embedlog import kv
from embedlog.checksum import seal, unseal
from embedlog.config import TopicConfig
from embedlog.errors import (
    InvalidPartitionError,
    InvalidPartitionsError,
    InvalidTopicError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
FORBIDDEN_ENDS = (".tmp", ".deleted")
INTERNAL = "__"
"""Internal topics begin so: they are shown to whoever asks for them, and to no one else."""
ACTIVITY = "__activity"
"""The one that is embedlog's own; see `activity`."""

MAX_PARTITIONS = 20_000
"""Of one topic.  To create so many takes a third of a second, in which no other process
can create a topic or begin a segment."""

PARTITION_KEY = struct.Struct(">QI")
_SEGMENT_KEY = struct.Struct(">QIQQ")
_SEGMENT_ROW = struct.Struct(">BqqqqQQB")
_DENSE = 4
"""Among the flags of a segment's row, which come right after the checksum."""
_SEAL_BYTES = 4
_PARTITION = struct.Struct(">QQIqQ")
_PRODUCER = struct.Struct(">QH")
_EPOCH = struct.Struct(">IQ")
_U64 = struct.Struct(">Q")
_NO_OFFSET = (1 << 63) - 1
"""Above every offset."""

TOPIC, SEGMENT, PARTITION, INDEX, PRODUCERS, EPOCHS = b"T", b"S", b"L", b"X", b"P", b"E"
PRODUCER_NAME, COUNTER, ROOT = b"Q", b"N", b"R"
_BUDGET = ROOT + b"retention.bytes"
CLEANED, PASSING, JOURNAL = b"K", b"W", b"J"
DELETED = b"D"
"""Deleted topics of which files or rows may be left, by id; see `deletion`."""
TOLD = b"A"
"""What `activity` told of a topic; by the topic's id, for it outlives the topic."""
OF_PARTITIONS = (SEGMENT, PARTITION, INDEX, PRODUCERS, EPOCHS, CLEANED, PASSING, JOURNAL)
"""The kinds of rows that go with a partition."""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the catalogue knows it; ``id`` keeps a re-created topic apart."""

    name: str
    id: int
    partitions: int
    created_ms: int
    config: TopicConfig

    @property
    def directory(self) -> str:
        """Where its partitions' segments are, from the root."""
        return f"topics/{self.name}-{self.id}"

    def key(self, partition: int) -> bytes:
        """The key that the rows of one partition share."""
        return PARTITION_KEY.pack(self.id, partition)

    def lock_path(self, partition: int) -> str:
        """Where the lock file of one partition is, from the root."""
        return f"locks/{self.id}-{partition}"

    def pack(self) -> bytes:
        """Return the row as stored."""
        return json.dumps(
            {
                "id": self.id,
                "partitions": self.partitions,
                "created_ms": self.created_ms,
                "config": self.config.overrides(),
            }
        ).encode()


@lru_cache(maxsize=1024)
def unpack_topic(name: str, row: bytes) -> TopicInfo:
    """Return a topic from its stored row; the same rows come again and again."""
    fields: dict[str, Any] = json.loads(unseal(row, f"topic {name}", TOPIC + name.encode()))
    return TopicInfo(
        name,
        fields["id"],
        fields["partitions"],
        fields["created_ms"],
        TopicConfig.parse(fields["config"]),
    )


def topic_of_row(row: tuple[bytes, bytes]) -> TopicInfo:
    """Return a topic from its key and value."""
    # A name that is no text is damaged: then the checksum does not fit either.
    return unpack_topic(row[0][1:].decode(errors="replace"), row[1])


class SegmentInfo(NamedTuple):
    """One line of the manifest; the active segment has no ``next_offset`` yet."""

    base_offset: int
    id: int
    created_ms: int
    next_offset: int | None = None
    size: int = 0
    """Bytes of the file, with its end marker; only known once sealed."""
    end_position: int = 0
    """Where the batches end, and the end marker begins."""
    max_timestamp: int | None = None
    headers: bool = False
    appended_ms: int = 0
    """When the last batch was appended to it, as `Tail.appended_ms`; only known once sealed."""
    dense: bool = False
    """Every offset has a record, as far as it goes; if False, records have to be counted."""

    @property
    def sealed(self) -> bool:
        """Whether the file is complete and never written again."""
        return self.next_offset is not None

    @property
    def file_name(self) -> str:
        """Fixed-width base offset first, so that `ls` shows the order."""
        return f"{self.base_offset:020d}-{self.id}.arrows"


class PartitionInfo(NamedTuple):
    """What is durable about a partition besides its segments."""

    start_offset: int = 0
    recovery_offset: int = 0
    """Everything below was flushed: recovery need not look at it (A23)."""
    leader_epoch: int = 0
    appended_ms: int = 0
    """When everything below `appended_offset` was appended at the latest, as `Tail.appended_ms`."""
    appended_offset: int = 0


def check_topic_name(name: object) -> str:
    """Return a legal topic name.

    Raises:
        InvalidTopicError: Kafka would refuse it, or a path could escape by it.
    """
    if not isinstance(name, str):
        raise InvalidTopicError(f"a topic's name is a str, not {type(name).__name__}")
    if not NAME.fullmatch(name) or name.endswith(FORBIDDEN_ENDS):
        raise InvalidTopicError(
            f"{name!r} is no topic name",
            todo="use 1 to 200 letters, digits, '.', '_' or '-', not starting with '.' or '-'",
        )
    return name


def refuse_internal(name: str) -> None:
    """Raise for a topic that only the housekeeping makes, and writes to.

    Raises:
        InvalidTopicError: It is one.
    """
    if name == ACTIVITY:
        raise InvalidTopicError(
            f"{name} is what the housekeeping writes",
            todo="read it, or change its settings; all else is done by itself",
            topic=name,
        )


def check_partition(topic: str, number: object) -> None:
    """Refuse what cannot be the number of a partition.

    Raises:
        InvalidPartitionError: It is not an int.
    """
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidPartitionError(
            f"partition must be an int, got {number!r}",
            topic=topic,
            todo="Partitions are numbered from 0",
        )


class Catalog:
    """Reads and changes the catalogue; each call is one transaction on `state`."""

    def __init__(self, state: kv.Store) -> None:
        self._state = state
        self.version = state.version
        """Returns a number that grows with every change of anything in `state`."""
        self._version = -1
        self._cache: dict[str, TopicInfo] = {}

    def topics(self) -> dict[str, TopicInfo]:
        """Return every topic by name, sorted."""
        prefix = TOPIC

        def step(txn: kv.Txn) -> dict[str, TopicInfo]:
            return {info.name: info for info in map(topic_of_row, kv.rows(txn, prefix))}

        return self._state.read(step)

    def topic(self, name: str) -> TopicInfo:
        """Return one topic; from memory while nothing changed.

        Raises:
            UnknownTopicOrPartitionError: There is none; the nearest name is told.
        """
        version = self._state.version()
        if version != self._version:
            self._cache, self._version = {}, version
        # The dictionary of now: another thread may begin one for a later version before
        # the row that is read here is put there.
        cache = self._cache
        found = cache.get(name)
        if found is None:
            key = TOPIC + check_topic_name(name).encode()
            # Not `get`: this is rare, and `read` looks whether the database is whole.
            row = self._state.read(lambda txn: txn.get(key))
            if row is None:
                raise self._unknown(name)
            found = cache[name] = unpack_topic(name, row)
        return found

    def _unknown(self, name: str) -> UnknownTopicOrPartitionError:
        near = difflib.get_close_matches(name, self.topics(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "create it with create_topic"
        if name == ACTIVITY:
            hint = "it is made when the housekeeping has something to tell"
        return UnknownTopicOrPartitionError("there is no such topic", topic=name, todo=hint)

    def create_topic(
        self, name: str, partitions: int, config: TopicConfig, now_ms: int
    ) -> TopicInfo:
        """Add a topic with one empty segment in each partition; files come with first use."""
        key = TOPIC + check_topic_name(name).encode()
        check_partition_count(partitions)

        def step(txn: kv.Txn) -> TopicInfo:
            if txn.get(key) is not None:
                raise TopicAlreadyExistsError("the topic exists already", topic=name)
            info = TopicInfo(name, next_number(txn, b"topic"), partitions, now_ms, config)
            txn.put(key, seal(info.pack(), key))
            for partition in range(partitions):
                _new_partition(txn, info.key(partition), now_ms)
            return info

        return self._state.write(step)

    def grow_topic(self, name: str, partitions: int, now_ms: int) -> TopicInfo:
        """Give a topic more partitions; records already there stay where they are (G5)."""
        check_partition_count(partitions)

        def grown(txn: kv.Txn, info: TopicInfo) -> TopicInfo:
            if partitions < info.partitions:
                raise InvalidPartitionsError(
                    f"{info.partitions} partitions cannot become {partitions}",
                    topic=name,
                    todo="a topic only grows",
                )
            for partition in range(info.partitions, partitions):
                _new_partition(txn, info.key(partition), now_ms)
            return TopicInfo(name, info.id, partitions, info.created_ms, info.config)

        return self._change(name, grown)

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicInfo:
        """Change settings; None returns one to its default."""

        def altered(txn: kv.Txn, info: TopicInfo) -> TopicInfo:
            config = info.config.changed(changes)
            return TopicInfo(name, info.id, info.partitions, info.created_ms, config)

        return self._change(name, altered)

    def _change(self, name: str, change: Callable[[kv.Txn, TopicInfo], TopicInfo]) -> TopicInfo:
        key = TOPIC + check_topic_name(name).encode()

        def step(txn: kv.Txn) -> TopicInfo:
            row = txn.get(key)
            if row is None:
                raise UnknownTopicOrPartitionError("there is no such topic", topic=name)
            info = change(txn, unpack_topic(name, row))
            txn.put(key, seal(info.pack(), key))
            return info

        return self._state.write(step)

    def retention_bytes(self) -> int | None:
        """Return how many bytes all topics together may hold; None is any number."""
        row = self._state.get(_BUDGET)
        return None if row is None else int(_U64.unpack(unseal(row, "the budget", _BUDGET))[0])

    def put_retention_bytes(self, most: int | None) -> None:
        """Set what `retention_bytes` returns."""

        def step(txn: kv.Txn) -> None:
            if most is None:
                txn.delete(_BUDGET)
            else:
                txn.put(_BUDGET, seal(_U64.pack(most), _BUDGET))

        self._state.write(step)

    def delete_topic(self, info: TopicInfo) -> TopicInfo:
        """Drop a topic's name and the rows of its partitions, and note that the rest is to go.

        Returns the topic as it was last, perhaps with more partitions than ``info`` has.

        Raises:
            UnknownTopicOrPartitionError: Another process deleted it, and perhaps made
                another topic of that name.
        """
        key = TOPIC + info.name.encode()

        def step(txn: kv.Txn) -> TopicInfo:
            row = txn.get(key)
            last = None if row is None else unpack_topic(info.name, row)
            if last is None or last.id != info.id:
                raise UnknownTopicOrPartitionError("the topic was just deleted", topic=info.name)
            txn.delete(key)
            remove_partitions(txn, map(last.key, range(last.partitions)))
            deleted_key = DELETED + _U64.pack(last.id)
            blob = json.dumps({"name": last.name, "partitions": last.partitions}).encode()
            txn.put(deleted_key, seal(blob, deleted_key))
            return last

        return self._state.write(step)

    def producer_identity(self, name: str | None) -> tuple[int, int]:
        """Return a new producer's (id, epoch); a named one keeps its id, its epoch grows.

        The epoch fences an older producer of the same name (G17, KIP-98).
        """

        def step(txn: kv.Txn) -> tuple[int, int]:
            if name is None:
                return next_number(txn, b"producer"), 0
            key = PRODUCER_NAME + name.encode()
            row = txn.get(key)
            if row is None:
                identity = (next_number(txn, b"producer"), 0)
            else:
                number, epoch = _PRODUCER.unpack(unseal(row, f"producer {name}", key))
                # Kafka takes a new id when the epoch is used up (KIP-360).
                used_up = epoch >= 0x7FFE
                identity = (next_number(txn, b"producer"), 0) if used_up else (number, epoch + 1)
            txn.put(key, seal(_PRODUCER.pack(*identity), key))
            return identity

        return self._state.write(step)


def check_partition_count(partitions: object) -> None:
    """Refuse what cannot be the number of partitions of a topic.

    Raises:
        InvalidPartitionsError: It is not an int from 1 to `MAX_PARTITIONS`.
    """
    if not isinstance(partitions, int) or isinstance(partitions, bool):
        raise InvalidPartitionsError(f"partitions must be an int, got {partitions!r}")
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidPartitionsError(
            f"partitions must be from 1 to {MAX_PARTITIONS}, got {partitions}"
        )


def refuse_differences(
    info: TopicInfo, partitions: int | None, settings: Mapping[str, object]
) -> None:
    """Raise unless a topic has this number of partitions, if any is given, and these settings.

    Raises:
        InvalidPartitionsError, InvalidConfigError: No topic, or not this one, could have them.
        TopicAlreadyExistsError: It has others; the error says what would apply these.
    """
    differences: dict[str, tuple[object, object]] = {}
    calls = []
    if partitions is not None:
        check_partition_count(partitions)
        if partitions != info.partitions:
            differences["partitions"] = info.partitions, partitions
            calls.append(f"create_partitions({info.name!r}, {partitions})")
    before, after = info.config.to_dict(), info.config.changed(settings).to_dict()
    changes: dict[str, object] = {}
    for spelling, value in settings.items():
        name = str(spelling).replace("_", ".")
        if before[name] != after[name]:
            differences[name] = before[name], after[name]
            changes[name] = None if value is None else after[name]
    if changes:
        calls.append(f"alter_topic({info.name!r}, {changes!r})")
    if not differences:
        return
    todo = f"To apply what was asked for, call {' and '.join(calls)}"
    if partitions is not None and partitions < info.partitions:
        rest = f"; to apply the rest, call {calls[-1]}" if changes else ""
        todo = f"A topic cannot lose partitions{rest}"
    found = (f"{name} is {its!r}, not {asked!r}" for name, (its, asked) in differences.items())
    raise TopicAlreadyExistsError(
        f"the topic exists with other settings: {'; '.join(found)}",
        todo=todo,
        topic=info.name,
        differences=differences,
    )


def _new_partition(txn: kv.Txn, key: bytes, now_ms: int) -> None:
    new_segment(txn, key, now_ms)
    put_partition(txn, key, PartitionInfo())


# Steps of other rooms' transactions


def next_number(txn: kv.Txn, name: bytes) -> int:
    """Return a number that was never used before for ``name``; it starts at 1."""
    number = last_number(txn, name) + 1
    txn.put(COUNTER + name, seal(_U64.pack(number), COUNTER + name))
    return number


def last_number(txn: kv.Txn, name: bytes) -> int:
    """Return the last number that was given out for ``name``; 0 if none was."""
    row = txn.get(COUNTER + name)
    if row is None:
        return 0
    number: int = _U64.unpack(unseal(row, f"counter {name!r}", COUNTER + name))[0]
    return number


def raise_number(txn: kv.Txn, name: bytes, number: int) -> None:
    """Make sure that ``number`` is not given out again."""
    if last_number(txn, name) < number:
        txn.put(COUNTER + name, seal(_U64.pack(number), COUNTER + name))


def new_segment(txn: kv.Txn, key: bytes, now_ms: int) -> None:
    """Name the first segment of a partition."""
    put_segment(txn, key, SegmentInfo(0, next_number(txn, b"segment"), now_ms, dense=True))


def adopt_topic(txn: kv.Txn, name: str, number: int, partitions: int) -> bool:
    """Name a topic whose row was lost, but whose files are there; False if the name is taken.

    The caller names its segments.
    """
    info = TopicInfo(name, number, partitions, 0, TopicConfig())
    raise_number(txn, b"topic", number)
    if txn.get(TOPIC + name.encode()) is not None:
        return False
    txn.put(TOPIC + name.encode(), seal(info.pack(), TOPIC + name.encode()))
    for each in range(partitions):
        put_partition(txn, info.key(each), PartitionInfo())
    return True


def remove_partitions(txn: kv.Txn, keys: Iterable[bytes]) -> None:
    """Drop everything recorded of some partitions."""
    for key in keys:
        for kind in OF_PARTITIONS:
            kv.remove(txn, kind + key)


def deleted_topics(txn: kv.Txn) -> list[TopicInfo]:
    """Return the deleted topics of which something may be left; their settings are not known."""
    topics = []
    for key, row in kv.rows(txn, DELETED):
        fields: dict[str, Any] = json.loads(unseal(row, "a deleted topic", key))
        (number,) = _U64.unpack(key[len(DELETED) :])
        topics.append(TopicInfo(fields["name"], number, fields["partitions"], 0, TopicConfig()))
    return topics


def forget_deleted_topic(txn: kv.Txn, topic: TopicInfo) -> None:
    """Drop the note about a deleted topic; nothing of it is left."""
    txn.delete(DELETED + _U64.pack(topic.id))


def segments(txn: kv.Txn, key: bytes) -> list[SegmentInfo]:
    """Return a partition's part of the manifest, in offset order."""
    return [_segment(row_key, row) for row_key, row in kv.rows(txn, SEGMENT + key)]


def gapped_segments(txn: kv.Txn, key: bytes) -> list[SegmentInfo]:
    """Return the segments of a partition that are not dense, in offset order.

    Of the others, thousands perhaps, only one byte is looked at.
    """
    return [
        _segment(bytes(row_key), bytes(row))
        for row_key, row in kv.rows(txn, SEGMENT + key)
        if not row[_SEAL_BYTES] & _DENSE
    ]


def segment_at(txn: kv.Txn, key: bytes, offset: int) -> SegmentInfo | None:
    """Return the segment that ``offset`` lies in, the first one if it is below; by one seek.

    None when the partition has no segments, which means that its topic is gone.
    """
    prefix = SEGMENT + key
    with txn.cursor() as cursor:
        above = cursor.set_range(prefix + _U64.pack(offset + 1))
        found = cursor.prev() if above else cursor.last()
        if found and cursor.key().startswith(prefix):
            return _segment(*cursor.item())
    return next((_segment(*row) for row in kv.rows(txn, prefix)), None)


def segment_after(txn: kv.Txn, key: bytes, base_offset: int) -> SegmentInfo | None:
    """Return the segment that follows the one at ``base_offset``; None if that is the last."""
    prefix = SEGMENT + key
    with txn.cursor() as cursor:
        if not cursor.set_range(prefix + _U64.pack(base_offset + 1)):
            return None
        if not cursor.key().startswith(prefix):
            return None
        found = _segment(*cursor.item())
    return segment_at(txn, key, found.base_offset)


def count_after(txn: kv.Txn, key: bytes, base_offset: int) -> int:
    """Return how many segments begin after ``base_offset``."""
    prefix, count = SEGMENT + key, 0
    with txn.cursor() as cursor:
        if cursor.set_range(prefix + _U64.pack(base_offset + 1)):
            for row_key in cursor.iternext(values=False):
                if not row_key.startswith(prefix):
                    break
                count += 1
    return count


def last_segment(txn: kv.Txn, key: bytes) -> SegmentInfo | None:
    """Return the active segment; None when the topic is gone."""
    return segment_at(txn, key, _NO_OFFSET)


def _segment(row_key: bytes, row: bytes) -> SegmentInfo:
    # The seal is of the key too, which may be damaged in its length even.
    value = unseal(row, f"segment {row_key[-16:].hex()}", row_key)
    _, _, base, number = _SEGMENT_KEY.unpack(row_key[1:])
    flags, end, created, latest, appended, size, position, headers = _SEGMENT_ROW.unpack(value)
    next_offset = end if flags & 1 else None
    max_timestamp = latest if flags & 2 else None
    return SegmentInfo(
        *(base, number, created, next_offset, size, position, max_timestamp),
        headers=bool(headers),
        appended_ms=appended,
        dense=bool(flags & _DENSE),
    )


def put_segment(txn: kv.Txn, key: bytes, segment: SegmentInfo) -> None:
    """Write one line of the manifest."""
    flags = segment.sealed | (segment.max_timestamp is not None) << 1
    flags |= _DENSE if segment.dense else 0
    row = _SEGMENT_ROW.pack(
        flags,
        segment.next_offset or 0,
        segment.created_ms,
        segment.max_timestamp or 0,
        segment.appended_ms,
        segment.size,
        segment.end_position,
        segment.headers,
    )
    row_key = _segment_key(SEGMENT, key, segment)
    txn.put(row_key, seal(row, row_key))


def drop_segment(txn: kv.Txn, key: bytes, segment: SegmentInfo) -> None:
    """Take one line off the manifest, and its index; the caller unlinks the file after."""
    txn.delete(_segment_key(SEGMENT, key, segment))
    txn.delete(_segment_key(INDEX, key, segment))


def put_passing(txn: kv.Txn, key: bytes, segment: SegmentInfo) -> None:
    """Name a file that is on its way into the manifest, or out of it: it is no garbage yet."""
    row_key = _segment_key(PASSING, key, segment)
    txn.put(row_key, seal(b"", row_key))


def drop_passing(txn: kv.Txn, key: bytes, segment: SegmentInfo) -> None:
    """Forget a file on its way; it is in the manifest by now, or unlinked."""
    txn.delete(_segment_key(PASSING, key, segment))


def passing(txn: kv.Txn, key: bytes) -> list[SegmentInfo]:
    """Return the files of a partition that are on their way; of them only the name is known."""
    found = [_SEGMENT_KEY.unpack(row_key[1:]) for row_key, _ in kv.rows(txn, PASSING + key)]
    return [SegmentInfo(base, number, 0) for _, _, base, number in found]


def cleaned_offset(txn: kv.Txn, key: bytes) -> int | None:
    """Return how far compaction got in a partition: where its dirty part begins (D1)."""
    row = txn.get(CLEANED + key)
    if row is None:
        return None
    offset: int = _U64.unpack(unseal(row, "how far a partition is compacted", CLEANED + key))[0]
    return offset


def put_cleaned_offset(txn: kv.Txn, key: bytes, offset: int) -> None:
    """Note how far compaction got."""
    txn.put(CLEANED + key, seal(_U64.pack(offset), CLEANED + key))


def clamp_cleaned_offset(txn: kv.Txn, key: bytes, end: int) -> None:
    """What comes after a cut was never compacted (D26)."""
    if (cleaned_offset(txn, key) or 0) > end:
        put_cleaned_offset(txn, key, end)


def _segment_key(kind: bytes, key: bytes, segment: SegmentInfo) -> bytes:
    return kind + key + _U64.pack(segment.base_offset) + _U64.pack(segment.id)


def partition(txn: kv.Txn, key: bytes) -> PartitionInfo | None:
    """Return the durable row of a partition; None when its topic is gone."""
    row = txn.get(PARTITION + key)
    if row is None:
        return None
    return PartitionInfo(*_PARTITION.unpack(unseal(row, "a partition", PARTITION + key)))


def put_partition(txn: kv.Txn, key: bytes, info: PartitionInfo) -> None:
    """Write the durable row of a partition."""
    txn.put(PARTITION + key, seal(_PARTITION.pack(*info), PARTITION + key))


def index_blob(txn: kv.Txn, key: bytes, segment: SegmentInfo) -> bytes | None:
    """Return the index of a sealed segment, as `index` packed it."""
    row_key = _segment_key(INDEX, key, segment)
    row = txn.get(row_key)
    return None if row is None else unseal(row, f"index of {segment.file_name}", row_key)


def put_index_blob(txn: kv.Txn, key: bytes, segment: SegmentInfo, blob: bytes) -> None:
    """Keep the index of a sealed segment: written once, at the roll."""
    row_key = _segment_key(INDEX, key, segment)
    txn.put(row_key, seal(blob, row_key))


def producers_blob(txn: kv.Txn, key: bytes) -> bytes | None:
    """Return the producers' sequences as of the recovery point (G18)."""
    row = txn.get(PRODUCERS + key)
    return None if row is None else unseal(row, "the producers of a partition", PRODUCERS + key)


def put_producers_blob(txn: kv.Txn, key: bytes, blob: bytes) -> None:
    """Keep the producers' sequences; written with the recovery point they belong to."""
    txn.put(PRODUCERS + key, seal(blob, PRODUCERS + key))


def epochs(txn: kv.Txn, key: bytes) -> list[tuple[int, int]]:
    """Return (leader epoch, its first offset), both strictly increasing (A37)."""
    row = txn.get(EPOCHS + key)
    if row is None:
        return [(0, 0)]
    blob = unseal(row, "the epochs of a partition", EPOCHS + key)
    return [(epoch, start) for epoch, start in _EPOCH.iter_unpack(blob)]


def put_epochs(txn: kv.Txn, key: bytes, entries: list[tuple[int, int]]) -> None:
    """Keep the epochs of a partition."""
    blob = b"".join(_EPOCH.pack(*entry) for entry in entries)
    txn.put(EPOCHS + key, seal(blob, EPOCHS + key))
