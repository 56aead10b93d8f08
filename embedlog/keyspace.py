"""Every table of the databases `state` and `live`: all that is on disk in LMDB.

A *table* is one kind of row.  To add one, declare a `Table` below: its letter,
the fields of its key and of its value, and what it is for.  That is all: `get`,
`put`, `delete` and `scan` are methods of it, `TABLES` has it, a topic that is
deleted takes its rows along, and `make docs-tables` puts it into docs/format.md.

    LEASES.put(txn, partition, "backup", value=(offset, until_ms))
    for (partition, name), lease in LEASES.scan(txn): ...

A row is a letter, then the fields of the key; the letters are unique over both
databases (`state`: capitals).  Numbers are big-endian, so that keys sort as
numbers.  Text ends with a NUL, except in the last field.  Each value in `state`
begins with the CRC-32C of key and value, for LMDB has no checksums.

A module with a class for a row takes the table as `keyspace.TAILS.typed(Tail)`.
What LMDB itself needs (transactions, locks, damage) is in `kv`.
"""

from __future__ import annotations

import json
import struct
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

from embedlog import kv
from embedlog.checksum import is_sealed, seal
from embedlog.errors import CorruptionError
from embedlog.files import Files

V = TypeVar("V")
W = TypeVar("W")

FORMAT_VERSION = 3
"""Of the root.  Raise it with every change below, and migrate roots of the version before."""
FORMAT_FILE = "embedlog.toml"

PARTITION_KEY = struct.Struct(">QI")
"""Topic id and partition: the field that the rows of a partition share."""

_CHECKSUM_BYTES = 4
_NUL, _ABOVE_NUL = b"\0", b"\1"

DAMAGE = (CorruptionError, struct.error, ValueError)
"""What decoding a damaged row raises; without a checksum only if its length is wrong."""


class FieldType(NamedTuple):
    """The type of a field in a key or value."""

    name: str
    """As docs/format.md calls it."""
    code: str = ""
    """As `struct` calls it; empty if the length varies."""
    encode: Callable[[Any], bytes] = bytes
    decode: Callable[[bytes], Any] = bytes

    @property
    def size(self) -> int:
        """Bytes it takes, if that does not vary."""
        return struct.calcsize(f">{self.code}")


def _number(name: str, code: str) -> FieldType:
    number = struct.Struct(f">{code}")
    return FieldType(name, code, number.pack, lambda data: number.unpack(data)[0])


def _to_text(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")


def _from_text(data: bytes) -> str:
    # A damaged name must not keep others from being read.
    return data.decode(errors="surrogateescape")


def _to_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def list_of(**fields: FieldType) -> FieldType:
    """Return the type of a list of tuples, which takes the rest of a value."""
    entry = struct.Struct(">" + "".join(field.code for field in fields.values()))
    return FieldType(
        "list of (" + ", ".join(f"{name}: {field.name}" for name, field in fields.items()) + ")",
        encode=lambda entries: b"".join(entry.pack(*each) for each in entries),
        decode=lambda data: list(entry.iter_unpack(data)),
    )


U8, U16 = _number("u8", "B"), _number("u16", "H")
U32, U64 = _number("u32", "I"), _number("u64", "Q")
I16, I32, I64 = _number("i16", "h"), _number("i32", "i"), _number("i64", "q")
PARTITION = FieldType("partition key", f"{PARTITION_KEY.size}s")
"""What `PARTITION_KEY` packs."""
TEXT = FieldType("text", "", _to_text, _from_text)
"""UTF-8; may be passed as bytes."""
BYTES = FieldType("bytes")
JSON = FieldType("JSON", "", _to_json, json.loads)


class Layout:
    """The fields of a key or a value, one after the other, behind a prefix.

    How to encode and decode is worked out once, here: appends and commits do it often.
    """

    def __init__(self, fields: Mapping[str, FieldType], prefix: bytes = b"") -> None:
        self.fields = dict(fields)
        types = list(self.fields.values())
        codes = [field.code for field in types]
        count = codes.index("") if "" in codes else len(codes)
        self.head = struct.Struct(">" + "".join(codes[:count]))
        """The numbers that it begins with."""
        self._rest = types[count:]
        # By the number of fields: fewer than all are a prefix, for scans.
        self._packers = [_packer(prefix, types, count) for count in range(len(types) + 1)]
        self.pack = self._packers[-1]
        """Encode all fields."""
        self.unpack: Callable[[bytes], tuple[Any, ...]] = self._unpack
        """Decode all fields; raise struct.error or ValueError if these are not the fields."""
        if not self._rest:
            self.unpack = self.head.unpack
        elif all(field is TEXT for field in self._rest):
            self.unpack = self._unpack_texts

    def pack_first(self, *fields: Any) -> bytes:
        """Encode the first fields."""
        return self._packers[len(fields)](*fields)

    def _unpack_texts(self, data: bytes) -> tuple[Any, ...]:
        texts = data[self.head.size :].split(_NUL, len(self._rest) - 1)
        if len(texts) != len(self._rest):
            raise ValueError("a field is missing")
        return *self.head.unpack_from(data), *map(_from_text, texts)

    def _unpack(self, data: bytes) -> tuple[Any, ...]:
        values, position = [*self.head.unpack_from(data)], self.head.size
        for place, field in enumerate(self._rest):
            following = self._rest[place + 1 :]
            if field.code:
                end = position + field.size
            elif not following:
                end = len(data)
            elif all(other.code for other in following):
                # From the end: a name may contain a NUL.
                end = len(data) - sum(other.size for other in following) - len(_NUL)
            else:
                end = data.index(_NUL, position)
            values.append(field.decode(data[position:end]))
            position = end + (0 if field.code else len(_NUL))
        return tuple(values)


def _packer(prefix: bytes, types: list[FieldType], count: int) -> Callable[..., bytes]:
    """Return what encodes the first ``count`` fields of these types, behind a prefix."""
    fields = types[:count]
    numbers = [field.code for field in fields]
    if all(numbers):
        if not prefix:
            return struct.Struct(">" + "".join(numbers)).pack
        return partial(struct.Struct(f">{len(prefix)}s" + "".join(numbers)).pack, prefix)
    # Only text comes before other fields, so each field of varying length but the last is text.
    ends = [b"" if field.code else _NUL for field in fields]
    if count == len(types):
        ends[-1] = b""
    template = prefix.replace(b"%", b"%%") + b"".join(b"%b" + end for end in ends)
    if fields == [TEXT, PARTITION]:
        return lambda text, partition: template % (_to_text(text), partition)
    if fields == [TEXT]:
        return lambda text: template % _to_text(text)
    if fields == [TEXT, TEXT]:
        return lambda text, other: template % (_to_text(text), _to_text(other))
    if all(numbers[:-1]) and count == len(types):
        head, encode = _packer(prefix, types, count - 1), types[-1].encode
        return lambda *values: head(*values[:-1]) + encode(values[-1])
    encoders = [field.encode for field in fields]
    return lambda *values: (
        template % tuple([encode(value) for encode, value in zip(encoders, values, strict=True)])
    )


class Table(Generic[V]):
    """One kind of row.

    Its methods take a transaction of its database, or, to read, a `kv.Store`.
    A key is passed as its fields, in order, and a prefix as the first of them.
    A value with one field is that field, without fields None, and else a tuple, which is
    read as a named tuple; `typed` and `coded` replace it by a class.

    Args:
        name: For messages and docs/format.md.
        database: `STATE` or `LIVE`.
        letter: What its keys begin with; no other table has it.
        key: Fields of the key, and their types.
        value: Fields of the value, and their types.
        purpose: One line for docs/format.md.
        dropped_with_topic: Whether a deleted topic takes its rows along; by default if the
            key has a partition.
        optional: Whether a damaged row is reported by whoever reads it, instead of making
            the whole of `state` be restored from its last copy.
    """

    def __init__(
        self,
        name: str,
        database: str,
        *,
        letter: str,
        key: Mapping[str, FieldType],
        value: Mapping[str, FieldType],
        purpose: str,
        dropped_with_topic: bool | None = None,
        optional: bool = False,
    ) -> None:
        self.name, self.database, self.letter = name, database, letter.encode()
        self.key_layout, self.value_layout = Layout(key, self.letter), Layout(value)
        self.purpose, self.optional = purpose, optional
        of_partition = PARTITION in key.values()
        self.dropped_with_topic = of_partition if dropped_with_topic is None else dropped_with_topic
        self.checksum = database == STATE
        """Whether its values begin with a checksum."""
        self.key: Callable[..., bytes] = self.key_layout.pack
        """Return the key of a row."""
        self.prefix: Callable[..., bytes] = self.key_layout.pack_first
        """Return what the keys of the rows with these first fields begin with."""
        self.pack: Callable[[V], bytes]
        """Encode a value, without its checksum."""
        self.unpack: Callable[[bytes], V]
        """Decode a value, without its checksum."""
        if len(value) == 1:
            self._set_codec(lambda field: field, lambda field: (field,))
        elif value:
            self._set_codec(namedtuple(name.title().replace(" ", ""), value), lambda fields: fields)
        else:
            self._set_codec(lambda: None, lambda _: ())
            self.pack = lambda _: b""

    def _set_codec(self, make: Callable[..., Any], fields: Callable[[Any], Iterable[Any]]) -> None:
        pack, unpack = self.value_layout.pack, self.value_layout.unpack
        # As `_make` of a named tuple, which is in Python.
        new: Any = tuple.__new__
        self.pack = lambda value: pack(*fields(value))
        self.unpack = lambda data: make(*unpack(data))
        if isinstance(make, type) and issubclass(make, tuple):
            self.unpack = lambda data: new(make, unpack(data))

    def typed(
        self, make: Callable[..., W], fields: Callable[[W], Iterable[Any]] | None = None
    ) -> Table[W]:
        """Return this table with values of another type.

        Args:
            make: Makes such a value of the fields.
            fields: Returns the fields of one; not needed for a tuple of them.
        """
        table = cast("Table[W]", copy(self))
        table._set_codec(make, fields or (lambda value: value))  # type: ignore[arg-type, return-value]
        return table

    def coded(self, pack: Callable[[W], bytes], unpack: Callable[[bytes], W]) -> Table[W]:
        """Return this table with a codec of its own, for values that are more than fields."""
        table = cast("Table[W]", copy(self))
        table.pack, table.unpack = pack, unpack
        return table

    # Rows

    def key_like(self, key: bytes) -> bytes:
        """Return the key of a row with the fields of another table's key."""
        return self.letter + key[1:]

    def parse_key(self, key: bytes) -> tuple[Any, ...]:
        """Return the fields of a key."""
        return self.key_layout.unpack(key[1:])

    def load(self, key: bytes, row: bytes) -> V:
        """Return the value of a row.

        Raises:
            CorruptionError: It is not what was written under this key.
        """
        if not self.checksum:
            return self.unpack(row)
        if not is_sealed(row, key):
            raise CorruptionError(
                f"A row of {self.name} in {self.database} is damaged, under the key {key!r}",
                todo="Run `embedlog repair`; it reports what it finds before it changes anything.",
            )
        return self.unpack(row[_CHECKSUM_BYTES:])

    def load_if_valid(self, key: bytes, row: bytes) -> V | None:
        """Return the value of a row, or None if it is damaged."""
        try:
            return self.load(key, row)
        except DAMAGE:
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
        """Yield fields of the key, and value, of each row, in the order of keys.

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
                fields = self.load(key, row), self.parse_key(key)
            except DAMAGE:
                continue
            yield fields[1], fields[0]

    def keys(self, txn: kv.Txn, *prefix: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the fields of each key, in order; values are not looked at."""
        for key, _ in kv.rows(txn, self.prefix(*prefix)):
            yield self.parse_key(key)

    def any(self, txn: kv.Txn, *prefix: Any) -> bool:
        """Return whether there is a row."""
        return any(True for _ in kv.rows(txn, self.prefix(*prefix)))

    def first_fields(self, txn: kv.Txn) -> Iterator[str]:
        """Yield the first field of the keys, such as the group, each once, by one seek each.

        For text that other fields follow.
        """
        with txn.cursor() as cursor:
            found = cursor.set_range(self.letter)
            while found and cursor.key().startswith(self.letter):
                field = cursor.key()[1:].partition(_NUL)[0]
                yield _from_text(field)
                found = cursor.set_range(self.letter + field + _ABOVE_NUL)

    def delete_all(self, txn: kv.Txn, *prefix: Any) -> None:
        """Delete rows."""
        kv.remove(txn, self.prefix(*prefix))

    def delete_partitions(self, txn: kv.Txn, partitions: Collection[bytes]) -> None:
        """Delete the rows of partitions, which are given by their `PARTITION_KEY`."""
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

# state

TOPICS = Table[Any](
    "topics",
    STATE,
    letter="T",
    key={"topic": TEXT},
    value={"fields": JSON},
    purpose="A topic: `id`, `partitions`, `created_ms`, and `config`, without defaults",
)
SEGMENTS = Table[Any](
    "segments",
    STATE,
    letter="S",
    key={"partition": PARTITION, "base_offset": U64, "segment_id": U64},
    value={
        "flags": U8,
        "next_offset": I64,
        "created_ms": I64,
        "max_timestamp": I64,
        "appended_ms": I64,
        "size": U64,
        "end_position": U64,
        "has_headers": U8,
    },
    purpose="The manifest: a segment file; those that no row names are garbage",
)
SEGMENT_INDEXES = Table[bytes](
    "segment indexes",
    STATE,
    letter="X",
    key={"partition": PARTITION, "base_offset": U64, "segment_id": U64},
    value={"entries": BYTES},
    purpose="The index of a sealed segment",
    optional=True,
)
PARTITIONS = Table[Any](
    "partitions",
    STATE,
    letter="L",
    key={"partition": PARTITION},
    value={
        "start_offset": U64,
        "recovery_offset": U64,
        "leader_epoch": U32,
        "appended_ms": I64,
        "appended_offset": U64,
    },
    purpose="Start and recovery point of a partition",
)
PRODUCER_SNAPSHOTS = Table[bytes](
    "producer snapshots",
    STATE,
    letter="P",
    key={"partition": PARTITION},
    value={"producers": BYTES},
    purpose="The producers of a partition, as of its recovery point",
)
LEADER_EPOCHS = Table[list[tuple[int, int]]](
    "leader epochs",
    STATE,
    letter="E",
    key={"partition": PARTITION},
    value={"epochs": list_of(leader_epoch=U32, start_offset=U64)},
    purpose="Where each leader epoch of a partition starts",
)
CLEANED_OFFSETS = Table[int](
    "cleaned offsets",
    STATE,
    letter="K",
    key={"partition": PARTITION},
    value={"first_dirty_offset": U64},
    purpose="How far a partition is compacted",
)
UNCOMMITTED_FILES = Table[None](
    "uncommitted files",
    STATE,
    letter="W",
    key={"partition": PARTITION, "base_offset": U64, "segment_id": U64},
    value={},
    purpose="A segment file on its way into the manifest or out of it: no garbage yet",
)
JOURNAL = Table[Any](
    "journal",
    STATE,
    letter="J",
    key={"partition": PARTITION},
    value={
        "committed": U8,
        "number": U64,
        "segment_id": U64,
        "log_end_offset": U64,
        "position": U64,
        "leader_epoch": U32,
        "partition_count": U16,
        "file_count": U16,
        "rest": BYTES,
    },
    purpose="The last publication over several partitions, in each of them",
)
DELETED_TOPICS = Table[Any](
    "deleted topics",
    STATE,
    letter="D",
    key={"topic_id": U64},
    value={"fields": JSON},
    purpose="A deleted topic of which files or rows may be left: `name`, `partitions`",
)
COUNTERS = Table[int](
    "counters",
    STATE,
    letter="N",
    key={"counter": TEXT},
    value={"last": U64},
    purpose="The last number given to a `topic`, `segment`, `producer` or `publication`",
)
NAMED_PRODUCERS = Table[Any](
    "named producers",
    STATE,
    letter="Q",
    key={"producer": TEXT},
    value={"producer_id": U64, "producer_epoch": U16},
    purpose="Id and epoch of a producer with a name",
    optional=True,
)
RETENTION_BYTES = Table[int](
    "retention bytes",
    STATE,
    letter="R",
    key={},
    value={"bytes": U64},
    purpose="How many bytes all topics together may hold; any number without this row",
    optional=True,
)
APP_VERSIONS = Table[Any](
    "app versions",
    STATE,
    letter="M",
    key={"application": TEXT, "topic_id": U64},
    value={"fields": JSON},
    purpose="The last publication of an application to a topic, or of a query (topic id 0)",
    optional=True,
)
PUBLICATION_CLOCK = Table[Any](
    "publication clock",
    STATE,
    letter="B",
    key={},
    value={"elapsed_ms": U64, "uptime_ms": U64, "time_ms": I64, "boot_id": TEXT},
    purpose="The clock by which `app versions` age, and what it was advanced from",
    optional=True,
)
OFFSET_CHECKPOINTS = Table[Any](
    "offset checkpoints",
    STATE,
    letter="C",
    key={"group": TEXT, "partition": PARTITION},
    value={"offset": I64, "leader_epoch": I32, "committed_ms": I64, "metadata": TEXT},
    purpose="An offset that a group committed, as of the last checkpoint",
    optional=True,
)
REPORTED_TOPICS = Table[Any](
    "reported topics",
    STATE,
    letter="A",
    key={"topic_id": U64},
    value={"fields": JSON},
    purpose="What `__activity` has of a topic: `name`, `id`, `config`, and `partitions`",
)

# live

TAILS = Table[Any](
    "tails",
    LIVE,
    letter="t",
    key={"partition": PARTITION},
    value={
        "segment_id": U64,
        "base_offset": U64,
        "log_end_offset": U64,
        "position": U64,
        "high_watermark": U64,
        "end_position": U64,
        "durable_offset": U64,
        "start_offset": U64,
        "leader_epoch": U32,
        "max_timestamp": I64,
        "first_timestamp": I64,
        "created_ms": I64,
        "appended_ms": I64,
        "unindexed": U64,
        "flushed_ms": I64,
        "failed": U8,
    },
    purpose="Where a partition ends: to write this row is to publish",
)
INDEX_ENTRIES = Table[Any](
    "index entries",
    LIVE,
    letter="i",
    key={"partition": PARTITION, "segment_id": U64, "offset": U64},
    value={"position": U64, "timestamp_before": I64},
    purpose="An index entry of the active segment",
)
PRODUCERS = Table[Any](
    "producers",
    LIVE,
    letter="p",
    key={"partition": PARTITION, "producer_id": U64},
    value={
        "producer_epoch": I16,
        "appended_ms": I64,
        "batches": list_of(first_sequence=I32, last_sequence=I32, base_offset=I64, next_offset=I64),
    },
    purpose="A producer as a partition knows it: its last five batches",
)
PENDING_DELETES = Table[Any](
    "pending deletes",
    LIVE,
    letter="z",
    key={"partition": PARTITION, "base_offset": U64, "segment_id": U64},
    value={"due_ms": U64, "end_offset": U64, "path": TEXT},
    purpose="A file to unlink, at a time since boot; it is no garbage until then",
)
LEASES = Table[Any](
    "leases",
    LIVE,
    letter="l",
    key={"partition": PARTITION, "lease": TEXT},
    value={"offset": U64, "until_ms": U64},
    purpose="From which offset on nothing is deleted or rewritten, until a time since boot",
)
GROUPS = Table[Any](
    "groups",
    LIVE,
    letter="g",
    key={"group": TEXT},
    value={"fields": JSON},
    purpose="A group's document: the fields of `Membership` in `embedlog/groups/membership.py`",
)
GROUP_VERSIONS = Table[int](
    "group versions",
    LIVE,
    letter="v",
    key={"group": TEXT},
    value={"version": U64},
    purpose="The version of a group's document: a small row to look at for changes",
)
MEMBER_DEADLINES = Table[int](
    "member deadlines",
    LIVE,
    letter="d",
    key={"group": TEXT, "member": TEXT},
    value={"deadline_ms": U64},
    purpose="When a member's session ends, since boot",
)
OWNERS = Table[Any](
    "owners",
    LIVE,
    letter="o",
    key={"group": TEXT, "partition": PARTITION},
    value={"epoch": U64, "start_offset": I64, "member": TEXT, "topic": TEXT},
    purpose="Which member of a group owns a partition",
    # The next rebalance drops them: a member may own the partition still.
    dropped_with_topic=False,
)
COMMITTED_OFFSETS = Table[Any](
    "committed offsets",
    LIVE,
    letter="c",
    key={"group": TEXT, "partition": PARTITION},
    value={"offset": I64, "leader_epoch": I32, "committed_ms": I64, "metadata": TEXT},
    purpose="An offset that a group committed",
)
UNSAVED_OFFSETS = Table[None](
    "unsaved offsets",
    LIVE,
    letter="u",
    key={"group": TEXT, "partition": PARTITION},
    value={},
    purpose="This committed offset, or that it was deleted, is not in `state` yet",
)
MAINTENANCE_OWNER = Table[Any](
    "maintenance owner",
    LIVE,
    letter="m",
    key={},
    value={"epoch": U64, "deadline_ms": U64, "pid": U32},
    purpose="The process that does the housekeeping, and until when since boot",
)
JOB_RUNS = Table[int](
    "job runs",
    LIVE,
    letter="j",
    key={"job": TEXT},
    value={"done_ms": U64},
    purpose="When a job of the housekeeping was last done, since boot",
)
CLOCK_READING = Table[Any](
    "clock reading",
    LIVE,
    letter="k",
    key={},
    value={"believed_ms": I64, "uptime_ms": U64},
    purpose="What the wall clock showed last, as far as it was believed, and when since boot",
)
REPORTED_VERSION = Table[int](
    "reported version",
    LIVE,
    letter="s",
    key={},
    value={"version": U64},
    purpose="The version of `state` up to which `__activity` has its changes",
)
REPORTED_GROUPS = Table[Any](
    "reported groups",
    LIVE,
    letter="a",
    key={"group": TEXT},
    value={"version": U64, "generation": U64},
    purpose="The version of a group's document, and its generation, that `__activity` has",
)
REPORTED_OWNER = Table[int](
    "reported owner",
    LIVE,
    letter="w",
    key={},
    value={"pid": U32},
    purpose="The process that `__activity` has as the maintenance owner",
)
REPORTED_LIVE = Table[None](
    "reported live",
    LIVE,
    letter="b",
    key={},
    value={},
    purpose="`__activity` has events from this `live`",
)

TABLES: tuple[Table[Any], ...] = tuple(
    value for value in list(vars().values()) if isinstance(value, Table)
)
"""All of them."""


def table_of(key: bytes, database: str) -> Table[Any] | None:
    """Return the table of a row; None if there is none with its letter."""
    return _BY_LETTER.get((database, key[:1]))


_BY_LETTER = {(table.database, table.letter): table for table in TABLES}


def delete_partitions(txn: kv.Txn, database: str, partitions: Iterable[bytes]) -> None:
    """Delete all rows of partitions of a deleted topic, by their `PARTITION_KEY`."""
    partitions = list(partitions)
    for table in TABLES:
        if table.database == database and table.dropped_with_topic:
            table.delete_partitions(txn, partitions)


def damaged_rows(files: Files, name: str) -> list[bytes]:
    """Return the keys of the damaged rows of `state`, or of a copy of it, that nobody uses.

    Reads all rows: nobody asks for one that got another key by damage.

    Raises:
        StorageError: It cannot be read for now.
    """
    return kv.read_unused(
        files, name, lambda txn: [key for key, row in kv.rows(txn, b"") if not is_sealed(row, key)]
    )
