"""The latest value of each key of a topic, whether or not it was compacted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from embedlog.api.offset_range import OffsetRange
from embedlog.batch import Batch
from embedlog.batch.arrays import numbers, repeated, true
from embedlog.errors import OffsetOutOfRangeError
from embedlog.lazy import pa, pc
from embedlog.partitioner import partition_for_key, partitions_for_keys
from embedlog.root.root import Root

if TYPE_CHECKING:
    from embedlog.partition.key_index import FoundRecord
    from embedlog.schemas.reading import TypedReader

Ranges = Callable[[], Sequence[OffsetRange]]
"""Returns the ranges of the view as of now."""


def _steady(root: Root, ranges: Ranges, look_up: Callable[[list[OffsetRange]], None]) -> None:
    """Look up, and again if segments were replaced and the ranges have other ends since.

    Compaction may have removed a record because of one after the ranges, and retention a part of
    them.
    """
    version = root.context.catalog.version
    while True:
        version_before, parts = version(), _not_empty(ranges)
        try:
            look_up(parts)
            if version() == version_before or _not_empty(ranges) == parts:
                return
        except OffsetOutOfRangeError:
            if _not_empty(ranges) == parts:
                raise


def get_many(
    root: Root, name: str, ranges: Ranges, keys: Sequence[bytes], reader: TypedReader | None = None
) -> list[FoundRecord | None]:
    """Return the latest record of each key; None if there is none."""
    homes = [partition_for_key(key, root.partitions(name)) for key in keys]
    found: list[FoundRecord | None] = [None] * len(keys)

    def look_up(parts: list[OffsetRange]) -> None:
        for index, key in enumerate(keys):
            known = found[index]
            if known is None or known.partition != homes[index]:
                found[index] = _get(root, name, parts, key, homes[index], reader)

    _steady(root, ranges, look_up)
    return found


def _get(
    root: Root, name: str, parts: list[OffsetRange], key: bytes, home: int, reader: Any
) -> FoundRecord | None:
    from embedlog.compaction.last_records import last_record

    found: dict[int, FoundRecord] = {}
    # The last part of a partition first.
    for part in sorted(parts, key=lambda part: (part.partition != home, -part.start)):
        if part.partition not in found:
            log = root.partition(name, part.partition)
            record = last_record(log, key, part.start, part.stop, reader)
            if record is not None:
                if part.partition == home:
                    return record
                found[part.partition] = record
    # It is elsewhere if the program chose the partition, or the topic has grown: the latest wins.
    return max(found.values(), key=lambda each: (each.timestamp, each.partition), default=None)


def records_of(
    root: Root, name: str, ranges: Ranges, key: bytes, reader: TypedReader | None = None
) -> list[FoundRecord]:
    """Return all records of a key.

    Those of a partition are in order; those of several are merged by their timestamps.
    """
    from embedlog.compaction.last_records import all_records

    found: list[FoundRecord] = []

    def look_up(parts: list[OffsetRange]) -> None:
        lists = [
            all_records(root.partition(name, part.partition), key, part.start, part.stop, reader)
            for part in parts
        ]
        found[:] = merge(*lists, key=attrgetter("timestamp"))

    _steady(root, ranges, look_up)
    return found


def _not_empty(ranges: Ranges) -> list[OffsetRange]:
    return [part for part in ranges() if part.start < part.stop]


def latest(
    root: Root,
    name: str,
    ranges: Ranges,
    schema: pa.Schema,
    read: Callable[[Batch], Any] = Batch.columns,
) -> Iterator[pa.Table]:
    """Yield the last record of each key that was not deleted, with the columns of a schema.

    ``read`` is that of `last_records`; of a typed topic it adds the column ``_tombstone``.
    """
    parts = _not_empty(ranges)
    if len(parts) == 1:
        for table in _last_of_partition(root, name, parts[0], ranges, read):
            yield _select(table, schema)
        return
    tables = [
        table for part in parts for table in _last_of_partition(root, name, part, ranges, read)
    ]
    if tables:
        table = pa.concat_tables(tables, promote_options="default")
        yield _select(_deduplicate(table, root.partitions(name)), schema)


def _last_of_partition(
    root: Root, name: str, part: OffsetRange, ranges: Ranges, read: Callable[[Batch], Any]
) -> Iterator[pa.Table]:
    from embedlog.compaction.last_records import last_records

    def current_end() -> int:
        same = [current for current in ranges() if current.partition == part.partition]
        return same[0].stop if len(same) == 1 else part.stop

    log = root.partition(name, part.partition)
    for table in last_records(log, part.start, part.stop, current_end, read):
        number = repeated(part.partition, pa.int32(), table.num_rows)
        yield table.append_column("partition", number)


def _deduplicate(table: pa.Table, partitions: int) -> pa.Table:
    """Keep one record per key if a key is in several partitions, by the same rule as `get_many`."""
    keys = table["key"].combine_chunks()
    homes = numbers(partitions_for_keys(keys, partitions), pa.int32())
    at_home = pc.equal(homes, table["partition"].combine_chunks())
    if pc.all(at_home).as_py():
        return table
    order = ("key", "home", "timestamp", "partition")
    table = table.append_column("home", at_home)
    table = table.sort_by([(name, "ascending") for name in order]).combine_chunks()
    keys = table["key"].combine_chunks()
    count = table.num_rows
    changes = pc.not_equal(keys.slice(1), keys.slice(0, count - 1))
    last = pa.concat_arrays([changes, true()])
    kept = table.filter(last).drop_columns(["home"])
    return kept.sort_by([("partition", "ascending"), ("offset", "ascending")])


def _select(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the records that are not tombstones, with the columns of a schema."""
    if "_tombstone" in table.column_names:
        table = table.filter(pc.invert(table["_tombstone"]))
    elif table["value"].null_count:
        table = table.filter(pc.is_valid(table["value"]))
    for field in schema:
        if field.name not in table.schema.names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return pa.Table.from_arrays(table.select(schema.names).columns, schema=schema)
