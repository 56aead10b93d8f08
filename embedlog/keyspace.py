"""Every table of the databases `state` and `live`: all that is on disk in LMDB.

A *table* is one kind of row.  To add one, declare a `Table` below: its letter,
the fields of its key and of its value, and what it is for.  `TABLES` then has it, a
deleted topic takes its rows along, and `make docs-tables` puts it into docs/format.md,
which uses the same notation.  `get`, `put`, `delete` and `scan` are its methods:

    LEASES.put(txn, partition, "backup", value=(offset, until_ms))
    for (partition, name), lease in LEASES.scan(txn): ...

A row is a letter, then the fields of the key; the letters are unique over both
databases (`state`: capitals and digits).  Numbers are big-endian, so that keys sort as
numbers.  Text ends with a NUL, except in the last field.  Each value in `state`
begins with the CRC-32C of key and value, because LMDB has no checksums.

A module with a class for a row takes the table as `keyspace.TAILS.typed(Tail)`.
What LMDB itself needs (transactions, locks, damage) is in `kv`.
"""

from __future__ import annotations

import json
import re
import struct
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import copy
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

from embedlog import kv
from embedlog.checksum import is_sealed, seal
from embedlog.errors import CorruptionError
from embedlog.files import Files
from embedlog.forks import cached_property
from embedlog.hints import REPAIR

V = TypeVar("V")
W = TypeVar("W")

FORMAT_VERSION = 7
"""Of the root.  Raise it with every change below, and migrate roots of the version before."""

PARTITION_KEY = struct.Struct(">QI")
"""Topic id and partition: the field that the rows of a partition share."""

_CHECKSUM_BYTES = 4
_NUL, _ABOVE_NUL = b"\0", b"\1"

DAMAGE = (CorruptionError, struct.error, ValueError)
"""What decoding a damaged row raises; without a checksum only if its length is wrong."""


class FieldType(NamedTuple):
    """The type of a field in a key or value."""

    name: str
    """As declarations and docs/format.md call it."""
    code: str = ""
    """As `struct` calls it; empty if the length varies."""
    encode: Callable[[Any], bytes] = bytes
    decode: Callable[[bytes], Any] = bytes

    @property
    def size(self) -> int:
        """Bytes it takes; 0 if that varies."""
        return struct.calcsize(f">{self.code}")


def _number(name: str, code: str) -> FieldType:
    number = struct.Struct(f">{code}")
    return FieldType(name, code, number.pack, lambda data: number.unpack(data)[0])


def _list_of(name: str) -> FieldType:
    """Return the type ``list of (field: type, ...)``: tuples of numbers, to the end of a value."""
    fields = _parse(name.removeprefix("list of (").removesuffix(")")).values()
    entry = struct.Struct(">" + "".join(field.code for field in fields))
    return FieldType(
        name,
        encode=lambda entries: b"".join(entry.pack(*values) for values in entries),
        decode=lambda data: list(entry.iter_unpack(data)),
    )


def _to_text(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")


def _from_text(data: bytes) -> str:
    # A damaged name must not keep others from being read.
    return data.decode("utf-8", "surrogateescape")


PARTITION = FieldType("partition key", f"{PARTITION_KEY.size}s")
"""What `PARTITION_KEY` packs."""
TEXT = FieldType("text", "", _to_text, _from_text)
"""UTF-8; may be passed as bytes."""
_JSON = FieldType(
    "JSON",
    encode=lambda value: json.dumps(value, separators=(",", ":")).encode(),
    decode=json.loads,
)
_TYPES = {field.name: field for field in (PARTITION, TEXT, _JSON, FieldType("bytes"))} | {
    name: _number(name, code)
    for name, code in zip("u8 u16 u32 u64 i16 i32 i64".split(), "BHIQhiq", strict=True)
}
_FIELD = re.compile(r"(\w+): (list of \(.+\)|[\w ]+)")


def _parse(fields: str) -> dict[str, FieldType]:
    """Return the fields that ``name: type, ...`` declares."""
    kinds = dict(_FIELD.findall(fields))
    if fields != ", ".join(f"{name}: {kind}" for name, kind in kinds.items()):
        raise ValueError(f"fields must be 'name: type, ...', got {fields!r}")
    return {
        name: _list_of(kind) if kind.startswith("list of") else _TYPES[kind]
        for name, kind in kinds.items()
    }


class Layout:
    """The fields of a key or a value: numbers, then fields of any length, behind a prefix.

    A NUL separates the fields of any length; only the last may be something other than text.
    How to encode and decode is worked out once, here: appends and commits do it often.
    """

    def __init__(self, fields: str, prefix: bytes = b"") -> None:
        self.fields = _parse(fields)
        self._prefix, self._types = prefix, list(self.fields.values())
        codes = [*(field.code for field in self._types), ""]
        self._numbers = codes.index("")
        self.head = struct.Struct(">" + "".join(codes[: self._numbers]))
        """The numbers that it begins with."""
        # By the number of fields: fewer than all are a prefix, for scans.
        self._packers = [self._packer(count) for count in range(len(codes))]
        self.pack = self._packers[-1]
        """Encode all fields."""
        self.unpack: Callable[[bytes], tuple[Any, ...]] = self.head.unpack
        """Decode all fields; raise struct.error or ValueError if these are not the fields."""
        if self._numbers < len(self._types):
            self.unpack = self._unpack
            self._texts = len(self._types) - self._numbers - 1
            self._last, self._last_size = self._types[-1].decode, self._types[-1].size

    def _packer(self, count: int) -> Callable[..., bytes]:
        """Return an encoder of the first ``count`` fields, behind the prefix."""
        prefix, fields, numbers = self._prefix, self._types[:count], min(self._numbers, count)
        codes = "".join(field.code for field in fields[:numbers])
        head = struct.Struct(f">{len(prefix)}s{codes}").pack
        if numbers == count:
            return partial(head, prefix) if prefix else struct.Struct(f">{codes}").pack
        encode, end = fields[-1].encode, b"" if count == len(self._types) else _NUL
        if fields == [TEXT, PARTITION]:  # of each offset that a group commits
            return lambda text, partition: b"%b%b\0%b" % (prefix, _to_text(text), partition)
        if count == 1:
            return lambda value: prefix + encode(value) + end
        return lambda *values: (
            head(prefix, *values[:numbers])
            + _NUL.join([*map(_to_text, values[numbers:-1]), encode(values[-1])])
            + end
        )

    def pack_first(self, *fields: Any) -> bytes:
        """Encode the first fields."""
        return self._packers[len(fields)](*fields)

    def _unpack(self, data: bytes) -> tuple[Any, ...]:
        rest = data[self.head.size :]
        if self._last_size:
            # From the end: a name may contain a NUL.
            end = len(rest) - self._last_size
            texts, last = rest[: end - len(_NUL)].split(_NUL, self._texts - 1), rest[end:]
        else:
            *texts, last = rest.split(_NUL, self._texts)
        if len(texts) != self._texts:
            raise ValueError("a field is missing")
        return *self.head.unpack_from(data), *map(_from_text, texts), self._last(last)


class Table(Generic[V]):
    """One kind of row; in `TABLES` it has the name of its constant.

    Its methods take a transaction of its database, or, to read, a `kv.Store`.
    A key is passed as its fields, in order, and a prefix as the first of them.
    A value with one field is that field; without fields it is None; with several it is a
    tuple, which is read as a named tuple.  `typed` and `coded` replace it by a class.

    Args:
        letter: What its keys begin with; no other table has it.  Small letters are in `LIVE`,
            capitals and digits in `STATE`.
        key: Fields of the key, and their types, as ``name: type, ...``.
        value: Fields of the value, likewise.
        purpose: One line for docs/format.md.
        dropped_with_topic: Whether a deleted topic takes its rows along; by default if the
            key has a partition.
        optional: Whether a damaged row is reported when it is read; any other has the whole
            of `state` restored from its last copy.
    """

    name = ""
    """For messages and docs/format.md."""

    def __init__(
        self,
        letter: str,
        key: str,
        value: str,
        purpose: str,
        *,
        dropped_with_topic: bool | None = None,
        optional: bool = False,
    ) -> None:
        self.letter, self.purpose, self.optional = letter.encode(), purpose, optional
        self.database = LIVE if letter.islower() else STATE
        self.key_layout: Layout = Layout(key, prefix=self.letter)
        self.value_layout: Layout = Layout(value)
        of_partition = PARTITION in self.key_layout.fields.values()
        self.dropped_with_topic = of_partition if dropped_with_topic is None else dropped_with_topic
        self.checksum = self.database == STATE
        """Whether its values begin with a checksum."""
        self.key: Callable[..., bytes] = self.key_layout.pack
        """Return the key of a row."""
        self.prefix: Callable[..., bytes] = self.key_layout.pack_first
        """Return the common prefix of the keys of rows with these first fields."""
        fields, pack = self.value_layout.fields, self.value_layout.pack
        self.pack: Callable[[V], bytes] = pack
        """Encode a value, without its checksum."""
        if len(fields) != 1:
            self.pack = lambda value: pack(*cast("tuple[Any, ...]", value or ()))

    @cached_property
    def unpack(self) -> Callable[[bytes], V]:
        """Decode a value, without its checksum."""
        fields, unpack = self.value_layout.fields, self.value_layout.unpack
        if len(fields) > 1:
            return cast("Table[V]", self.typed(namedtuple("Row", fields))).unpack
        if fields:
            return lambda data: unpack(data)[0]
        return lambda data: cast("V", unpack(data) or None)

    def typed(
        self, make: Callable[..., W], fields: Callable[[W], Iterable[Any]] | None = None
    ) -> Table[W]:
        """Return this table with values of another type.

        Args:
            make: Makes such a value of the fields.
            fields: Returns the fields of a value; not needed if ``make`` is a named tuple.
        """
        pack, unpack = self.value_layout.pack, self.value_layout.unpack
        if fields is not None:
            return self.coded(lambda value: pack(*fields(value)), lambda data: make(*unpack(data)))
        # As `_make` of a named tuple, which is in Python.
        new: Any = tuple.__new__
        return self.coded(lambda value: pack(*value), lambda data: new(make, unpack(data)))

    def coded(self, pack: Callable[[W], bytes], unpack: Callable[[bytes], W]) -> Table[W]:
        """Return this table with another codec, for values that are more than fields."""
        table = cast("Table[W]", copy(self))
        table.pack, table.unpack = pack, unpack
        return table

    # Rows

    def parse_key(self, key: bytes) -> tuple[Any, ...]:
        """Return the fields of a key."""
        return self.key_layout.unpack(key[1:])

    def load(self, key: bytes, row: bytes) -> V:
        """Return the value of a row.

        Raises:
            CorruptionError: It is not what was written under this key.
        """
        if not self.checksum:
            try:
                return self.unpack(row)
            except (struct.error, ValueError):
                todo = (
                    "Close the log in all programs, and delete its directory `live`, which is "
                    "created again."
                )
        elif is_sealed(row, key):
            return self.unpack(row[_CHECKSUM_BYTES:])
        else:
            todo = REPAIR
        raise CorruptionError(
            f"A row of {self.name} in {self.database} is damaged, under the key {key!r}", todo=todo
        )

    def load_if_valid(self, key: bytes, row: bytes) -> V | None:
        """Return the value of a row, or None if it is damaged."""
        try:
            return self.load(key, row)
        except CorruptionError:
            return None

    def dump(self, key: bytes, value: V) -> bytes:
        """Return the row for a value."""
        data = self.pack(value)
        return seal(data, key) if self.checksum else data

    def get(self, txn: kv.Txn, *key: Any) -> V | None:
        """Return a value, or None.

        Raises:
            CorruptionError: The row is damaged.
        """
        packed = self.key(*key)
        row = txn.get(packed)
        return None if row is None else self.load(packed, row)

    def exists(self, txn: kv.Txn, *key: Any) -> bool:
        """Return whether there is such a row."""
        return txn.get(self.key(*key)) is not None

    def put(self, txn: kv.Txn, *key: Any, value: V) -> None:
        """Write a row, over the one before."""
        packed, data = self.key(*key), self.pack(value)
        txn.put(packed, seal(data, packed) if self.checksum else data)

    def delete(self, txn: kv.Txn, *key: Any) -> bool:
        """Delete a row; return whether there was one."""
        deleted: bool = txn.delete(self.key(*key))
        return deleted

    def scan(self, txn: kv.Txn, *prefix: Any) -> Iterator[tuple[tuple[Any, ...], V]]:
        """Yield the fields of the key and the value of each row, in the order of keys.

        Raises:
            CorruptionError: A row is damaged.
        """
        for key, row in kv.rows(txn, self.prefix(*prefix)):
            value = self.load(key, row)  # first, since the checksum covers the key
            yield self.parse_key(key), value

    def scan_valid(self, txn: kv.Txn, *prefix: Any) -> Iterator[tuple[tuple[Any, ...], V]]:
        """As `scan`, without damaged rows."""
        for key, row in kv.rows(txn, self.prefix(*prefix)):
            try:
                value = self.load(key, row)
                yield self.parse_key(key), value
            except DAMAGE:
                continue

    def keys(self, txn: kv.Txn, *prefix: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the fields of each key, in order, without checking the values."""
        for key, _ in kv.rows(txn, self.prefix(*prefix)):
            yield self.parse_key(key)

    def any(self, txn: kv.Txn, *prefix: Any) -> bool:
        """Return whether there is a row."""
        return any(True for _ in kv.rows(txn, self.prefix(*prefix)))

    def first_fields(self, txn: kv.Txn) -> Iterator[str]:
        """Yield each value of the first field of the keys, such as the group, by one seek each.

        The field must be text, and other fields must follow it.
        """
        with txn.cursor() as cursor:
            has_row = cursor.set_range(self.letter)
            while has_row and cursor.key().startswith(self.letter):
                field = cursor.key()[1:].partition(_NUL)[0]
                yield _from_text(field)
                has_row = cursor.set_range(self.letter + field + _ABOVE_NUL)

    def delete_all(self, txn: kv.Txn, *prefix: Any) -> None:
        """Delete rows."""
        kv.remove(txn, self.prefix(*prefix))

    def delete_partitions(self, txn: kv.Txn, partitions: Collection[bytes]) -> None:
        """Delete the rows of partitions, by their `PARTITION_KEY`, and of their topics."""
        if "topic_id" in self.key_layout.fields:
            for topic_id in {PARTITION_KEY.unpack(partition)[0] for partition in partitions}:
                self.delete_all(txn, topic_id)
            return
        if next(iter(self.key_layout.fields.values())) == PARTITION:
            for partition in partitions:
                self.delete_all(txn, partition)
            return
        for field in list(self.first_fields(txn)):
            for partition in partitions:
                self.delete(txn, field, partition)

    def __repr__(self) -> str:
        return f"<Table {self.name} of {self.database}>"


STATE, LIVE = "state", "live"
"""Synced at each commit: survives a power cut; not synced: survives the death of a process."""

_SEGMENT = "partition: partition key, base_offset: u64, segment_id: u64"

# state

TOPICS = Table[Any](
    "T",
    "topic: text",
    "fields: JSON",
    "A topic: `id`, `partitions`, `created_ms`, `config`, without defaults, and, if it is typed, "
    "`schema_version`",
)
SEGMENTS = Table[Any](
    "S",
    _SEGMENT,
    "flags: u8, next_offset: i64, created_ms: i64, max_timestamp: i64, appended_ms: i64, "
    "size: u64, end_position: u64, columns: u8, schema_version: u32",
    "The manifest: a segment file; a file without a row is garbage",
)
SCHEMAS = Table[bytes](
    "F",
    "topic_id: u64, version: u32",
    "schema: bytes",
    "A version of the schema of a typed topic, as an Arrow schema",
    dropped_with_topic=True,
)
SEGMENT_INDEXES = Table[bytes](
    "X", _SEGMENT, "entries: bytes", "The index of a sealed segment", optional=True
)
SEGMENT_STATISTICS = Table[bytes](
    "G",
    _SEGMENT,
    "statistics: bytes",
    "Nulls, smallest and largest values of the columns of a sealed segment of a typed topic",
    optional=True,
)
PARTITIONS = Table[Any](
    "L",
    "partition: partition key",
    "start_offset: u64, recovery_offset: u64, leader_epoch: u32, appended_ms: i64, "
    "appended_offset: u64",
    "Start and recovery point of a partition",
)
PRODUCER_SNAPSHOTS = Table[bytes](
    "P",
    "partition: partition key",
    "producers: bytes",
    "The producers of a partition, as of its recovery point",
)
LEADER_EPOCHS = Table[list[tuple[int, int]]](
    "E",
    "partition: partition key",
    "epochs: list of (leader_epoch: u32, start_offset: u64)",
    "Where each leader epoch of a partition starts",
)
CLEANED_OFFSETS = Table[int](
    "K", "partition: partition key", "first_dirty_offset: u64", "How far a partition is compacted"
)
UNCOMMITTED_FILES = Table[None](
    "W", _SEGMENT, "", "A segment file on its way into the manifest or out of it: no garbage yet"
)
JOURNAL = Table[Any](
    "J",
    "partition: partition key",
    "committed: u8, number: u64, segment_id: u64, log_end_offset: u64, position: u64, "
    "leader_epoch: u32, partition_count: u16, file_count: u16, group_size: u16, rest: bytes",
    "The partition's part in its last publication over several partitions",
)
OFFSET_JOURNAL = Table[Any](
    "5",
    "group: text, partition: partition key",
    "committed: u8, number: u64, partition_count: u16, rest: bytes",
    "The offset that a group commits with its last publication, and the partitions of that",
    optional=True,
)
ROLLBACK_POINTS = Table[Any](
    "6",
    "partition: partition key",
    "number: u64, offset: u64",
    "Where the partition ends after a power cut: what transactions wrote there is not flushed yet",
)
LOG_LOCKED = Table[None](
    "3", "", "", "A publication holds the lock of the whole log, or its process died while it did"
)
DELETED_TOPICS = Table[Any](
    "D",
    "topic_id: u64",
    "fields: JSON",
    "A deleted topic whose files or rows may not all be removed yet: `name`, `partitions`",
)
COUNTERS = Table[int](
    "N",
    "counter: text",
    "last: u64",
    "The last number assigned to a `topic`, `segment`, `producer`, `publication` or `schema`",
)
NAMED_PRODUCERS = Table[Any](
    "Q",
    "producer: text",
    "producer_id: u64, producer_epoch: u16",
    "Id and epoch of a producer with a name",
    optional=True,
)
RETENTION_BYTES = Table[int](
    "R",
    "",
    "bytes: u64",
    "How many bytes all topics together may hold; unlimited without this row",
    optional=True,
)
APP_VERSIONS = Table[Any](
    "M",
    "application: text, topic_id: u64",
    "fields: JSON",
    "The last publication of an application to a topic, or of a query (topic id 0)",
    optional=True,
)
PUBLICATION_CLOCK = Table[Any](
    "B",
    "",
    "elapsed_ms: u64, uptime_ms: u64, time_ms: i64, boot_id: text",
    "The clock by which `app versions` age, and the clocks that it was advanced from",
    optional=True,
)
OFFSET_CHECKPOINTS = Table[Any](
    "C",
    "group: text, partition: partition key",
    "offset: i64, leader_epoch: i32, committed_ms: i64, metadata: text",
    "An offset that a group committed, as of the last checkpoint",
    optional=True,
)
GROUP_CONFIGS = Table[Any](
    "7",
    "group: text",
    "fields: JSON",
    "The settings of a share group, without defaults",
    optional=True,
)
REPORTED_TOPICS = Table[Any](
    "A",
    "topic_id: u64",
    "fields: JSON",
    "A topic as last reported in `__activity`: `name`, `id`, `config`, `partitions`",
)
REGISTERED_SCHEMAS = Table[str](
    "I",
    "schema_id: u32",
    "schema: text",
    "A schema of the registry, as JSON: never changed nor deleted, since records have its id",
)
SCHEMA_FINGERPRINTS = Table[int](
    "H",
    "fingerprint: bytes",
    "schema_id: u32",
    "The id of a registered schema, by its SHA-256: equal schemas have one id",
    optional=True,
)
SUBJECT_VERSIONS = Table[Any](
    "V",
    "subject: text, version: u32",
    "schema_id: u32, deleted: u8",
    "A version of a subject of the schema registry",
    optional=True,
)
COMPATIBILITY_LEVELS = Table[str](
    "Y",
    "subject: text",
    "level: text",
    "The compatibility level of a subject; of all others without a subject",
    optional=True,
)
DIRECTORIES = Table[Any](
    "U",
    "directory_id: u32",
    "fields: JSON",
    "A directory of a log with replicas: `path`, `rack`, `online`, and why it is not",
)
ASSIGNMENTS = Table[Any](
    "1",
    "partition: partition key",
    "fields: JSON",
    "The replicas of a partition: `replicas`, `isr`, `leader`, `leader_epoch`, `partition_epoch`, "
    "`adding_replicas`, `removing_replicas`, `leader_recovering` and `flushed`",
)
METADATA_EPOCHS = Table[Any](
    "4",
    "epoch: u64",
    "id: u64, start: u64",
    "An epoch of the metadata of a log with replicas, and the number of its first write in `state`",
)
METADATA_VERSION = Table[Any](
    "2",
    "",
    "version: u64, epoch: u64, controller_id: u32",
    "How many writes this `state` has of all directories, their epoch, and the directory that is "
    "read",
)
MIRRORED_TOPICS = Table[Any](
    "Z",
    "topic_id: u64",
    "fields: JSON",
    "A topic that is a copy: `source` (its setting `mirror.source`), `address`, `source_topic_id`, "
    "`path`, `config`, `begun`, `epochs` and `ends`, as in `embedlog/mirrors/mirrored_topic.py`",
    dropped_with_topic=True,
)
MIRROR_POSITIONS = Table[Any](
    "O",
    "partition: partition key, source: text",
    "offset: i64, leader_epoch: i32, target_offset: i64, target_epoch: i64",
    "Where a mirror that merges the records of a source, `SITE/TOPIC_ID`, continues, as of an "
    "offset of the partition",
    optional=True,
)

SNAPSHOTS = Table[Any](
    "8",
    "snapshot: text",
    "fields: JSON",
    "A snapshot: `created_ms`, `expires_ms`, whether it is `complete`, and, by `topics`, their "
    "`id`, `schema_version`, and the first offset and the end of each partition, in `ranges`",
    optional=True,
)

# live

TAILS = Table[Any](
    "t",
    "partition: partition key",
    "segment_id: u64, base_offset: u64, log_end_offset: u64, position: u64, high_watermark: u64, "
    "end_position: u64, durable_offset: u64, start_offset: u64, leader_epoch: u32, "
    "max_timestamp: i64, first_timestamp: i64, created_ms: i64, appended_ms: i64, "
    "unindexed: u64, flushed_ms: i64, failed: u8",
    "Where a partition ends: writing this row publishes records",
)
INDEX_ENTRIES = Table[Any](
    "i",
    "partition: partition key, segment_id: u64, offset: u64",
    "position: u64, timestamp_before: i64",
    "An index entry of the active segment",
)
PRODUCERS = Table[Any](
    "p",
    "partition: partition key, producer_id: u64",
    "producer_epoch: i16, appended_ms: i64, batches: list of (first_sequence: i32, "
    "last_sequence: i32, base_offset: i64, next_offset: i64)",
    "A producer as a partition knows it: its last five batches",
)
PENDING_DELETES = Table[Any](
    "z",
    _SEGMENT,
    "due_ms: u64, end_offset: u64, path: text",
    "A file to unlink, and when, since boot; until then `verify` does not report it",
)
LEASES = Table[Any](
    "l",
    "partition: partition key, lease: text",
    "offset: u64, until_ms: u64",
    "Nothing from this offset on is deleted or rewritten before a time since boot; 2^63 - 1 is "
    "until the snapshot is deleted",
)
GROUPS = Table[Any](
    "g",
    "group: text",
    "fields: JSON",
    "A group's document: the fields of `Membership` in `embedlog/groups/membership.py`",
)
GROUP_VERSIONS = Table[int](
    "v",
    "group: text",
    "version: u64",
    "The version of a group's document: small, so that members can poll it for changes",
)
MEMBER_SESSIONS = Table[Any](
    "d",
    "group: text, member: text",
    "deadline_ms: u64, due_ms: u64, epoch: i32, previous_epoch: i32",
    "When a member's session ends, since boot; and of a client of a server, when it must have done "
    "what it was told, its epoch, and the one before",
)
OWNERS = Table[Any](
    "o",
    "group: text, partition: partition key",
    "epoch: u64, start_offset: i64, generation: i64, member: text, topic: text",
    "Which member of a group owns a partition",
    # The next rebalance drops them: a member may own the partition still.
    dropped_with_topic=False,
)
COMMITTED_OFFSETS = Table[Any](
    "c",
    "group: text, partition: partition key",
    "offset: i64, leader_epoch: i32, committed_ms: i64, metadata: text",
    "An offset that a group committed",
)
UNSAVED_OFFSETS = Table[None](
    "u",
    "group: text, partition: partition key",
    "",
    "Marks a committed offset, or its deletion, that is not in `state` yet",
)
PENDING_OFFSETS = Table[Any](
    "n",
    "group: text, partition: partition key",
    "number: u64, rest: bytes",
    "The publication that is about to commit an offset of a group, and checked its member; if it "
    "is 0, a transaction has committed the offset, which is `rest`, and is not flushed yet",
)
UNFLUSHED = Table[Any](
    "f",
    "partition: partition key",
    "offset: u64, position: u64",
    "From where on a partition has transactions that are not flushed",
)
TRANSACTIONS = Table[Any](
    "x",
    "transactional_id: text",
    "producer_id: u64, number: u64, version: u64",
    "The last transaction of a producer: its number has the producer's epoch above 32 bits, and is "
    "odd while a transaction of a client of a server has begun; and the version of `live` "
    "that committed it",
)
CHECKPOINTED = Table[int](
    "q", "", "version: u64", "The version of `live` up to which transactions are flushed"
)
MAINTENANCE_OWNER = Table[Any](
    "m",
    "",
    "epoch: u64, deadline_ms: u64, pid: u32",
    "The process that does the housekeeping, its epoch and its deadline since boot",
)
JOB_RUNS = Table[int](
    "j", "job: text", "done_ms: u64", "When a job of the housekeeping was last done, since boot"
)
CLOCK_READING = Table[Any](
    "k",
    "",
    "believed_ms: i64, uptime_ms: u64",
    "The last accepted reading of the wall clock, and when it was taken, since boot",
)
REPORTED_VERSION = Table[int](
    "s", "", "version: u64", "The version of `state` up to which `__activity` has its changes"
)
REPORTED_GROUPS = Table[Any](
    "a",
    "group: text",
    "version: u64, generation: u64",
    "The version and generation of a group as last reported in `__activity`",
)
REPORTED_OWNER = Table[int](
    "w", "", "pid: u32", "The process that `__activity` has as the maintenance owner"
)
MIRRORS = Table[Any](
    "y",
    "mirror: text",
    "fields: JSON",
    "What a mirror has done and how far it is behind: the fields of `MirrorStatus` in "
    "`embedlog/mirrors/status.py`",
)
REPORTED_LIVE = Table[None]("b", "", "", "`__activity` has events from this `live`")
REPORTED_REPLICAS = Table[dict[str, Any]](
    "r",
    "topic_id: u64",
    "fields: JSON",
    "What `__activity` has of the leaders and in-sync replicas of a topic; for 0, of the "
    "directories, and how many changes there were",
    optional=True,
)

LIVE_EPOCHS = Table[Any](
    "h",
    "epoch: u64",
    "id: u64, start: u64",
    "An epoch of the metadata of a log with replicas, and the number of its first write in `live`",
)
LIVE_VERSION = Table[Any](
    "e",
    "",
    "version: u64",
    "How many writes this `live` has of all directories",
)


def _named(constants: dict[str, object]) -> Iterator[Table[Any]]:
    """Yield the tables, after giving each the name of its constant."""
    for constant, table in constants.items():
        if isinstance(table, Table):
            table.name = constant.lower().replace("_", " ")
            yield table


TABLES = tuple(_named(dict(vars())))
"""All of them, in the order of their declarations."""


def table_of(key: bytes, database: str) -> Table[Any] | None:
    """Return the table of a row; None if no table has its letter."""
    rows = (table for table in TABLES if (table.database, table.letter) == (database, key[:1]))
    return next(rows, None)


def delete_partitions(txn: kv.Txn, database: str, partitions: Iterable[bytes]) -> None:
    """Delete all rows of partitions of a deleted topic, by their `PARTITION_KEY`."""
    partitions = list(partitions)
    for table in TABLES:
        if table.database == database and table.dropped_with_topic:
            table.delete_partitions(txn, partitions)


def damaged_rows(files: Files, name: str) -> list[bytes]:
    """Return the keys of the damaged rows of `state`, or of a copy of it, while it is not in use.

    Reads all rows, since no lookup would find a row whose key was damaged.

    Raises:
        StorageError: It cannot be read for now.
    """
    return kv.read_unused(
        files, name, lambda txn: [key for key, row in kv.rows(txn, b"") if not is_sealed(row, key)]
    )
