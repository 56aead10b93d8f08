"""The latest value of each key of a topic, whether or not it was compacted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from typing import TYPE_CHECKING, Any

from embedlog.api.offset_range import OffsetRange
from embedlog.batch import Batch
from embedlog.batch.arrays import numbers, repeated, true
from embedlog.lazy import pa, pc
from embedlog.partitioner import partition_for_key, partitions_for_keys
from embedlog.record import TopicPartition
from embedlog.root.root import Root

if TYPE_CHECKING:
    from embedlog.compaction.last_records import LastRecord, ValueAt
    from embedlog.partition.key_index import FoundRecord

Ranges = Callable[[], Sequence[OffsetRange]]
"""Returns the ranges of the view as of now."""


def get_many(
    root: Root, name: str, ranges: Ranges, keys: Sequence[bytes], value_at: ValueAt | None = None
) -> list[tuple[TopicPartition, LastRecord] | None]:
    """Return the latest record of each key and its partition; None if there is none.

    ``value_at`` is that of `last_record`.
    """
    count, version = root.partitions(name), root.context.catalog.version
    result: list[tuple[TopicPartition, LastRecord] | None] = [None] * len(keys)
    rest: Sequence[int] = range(len(keys))
    while True:
        version_before, parts = version(), _not_empty(ranges)
        for index in rest:
            home = partition_for_key(keys[index], count)
            records = _last_records(root, name, parts, keys[index], home, value_at)
            # It is elsewhere if the program chose the partition, or the topic has grown: then the
            # latest wins.
            newest = home if home in records else None
            if newest is None and records:
                newest = max(records, key=lambda number: (records[number].timestamp, number))
            if newest is not None:
                result[index] = TopicPartition(name, newest), records[newest]
        # Compaction may have removed a record because of one after the ranges.
        if version() == version_before or _not_empty(ranges) == parts:
            return result
        rest = [index for index in rest if not _is_at_home(keys[index], count, result[index])]
        for index in rest:
            result[index] = None


def _is_at_home(key: bytes, count: int, found: tuple[TopicPartition, LastRecord] | None) -> bool:
    return found is not None and found[0].partition == partition_for_key(key, count)


def records_of(root: Root, name: str, ranges: Ranges, key: bytes) -> list[tuple[int, FoundRecord]]:
    """Return all records of a key with their partitions.

    Those of a partition are in order; those of several are merged by their timestamps.
    """
    from embedlog.compaction.last_records import all_records

    version = root.context.catalog.version
    while True:
        version_before, parts, lists = version(), _not_empty(ranges), []
        for part in parts:
            log = root.partition(name, part.partition)
            found = all_records(log, key, part.start, part.stop)
            lists.append([(part.partition, record) for record in found])
        # As in `get_many`.
        if version() == version_before or _not_empty(ranges) == parts:
            return list(merge(*lists, key=lambda item: item[1].timestamp))


def _not_empty(ranges: Ranges) -> list[OffsetRange]:
    return [part for part in ranges() if part.start < part.stop]


def _last_records(
    root: Root,
    name: str,
    parts: list[OffsetRange],
    key: bytes,
    home: int,
    value_at: ValueAt | None,
) -> dict[int, LastRecord]:
    """Return the last record of a key by partition; only of its home partition if it is there."""
    from embedlog.compaction.last_records import last_record

    records = {}
    for part in sorted(parts, key=lambda part: part.partition != home):
        log = root.partition(name, part.partition)
        last = last_record(log, key, part.start, part.stop, value_at)
        if last is not None:
            records[part.partition] = last
            if part.partition == home:
                break
    return records


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
