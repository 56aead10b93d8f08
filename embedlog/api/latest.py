"""Compaction as a program asks for it, and the latest value of each key (D19)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embedlog.config import MaintenanceConfig
from embedlog.errors import FencedError, InvalidConfigError
from embedlog.root.root import Root

if TYPE_CHECKING:
    import pyarrow as pa

    from embedlog.api.topic import OffsetRange
    from embedlog.compaction import CleanResult
    from embedlog.compaction.last_records import LastRecord

    Ranges = Callable[[], Sequence[OffsetRange]]

Progress = Callable[[int, int], None]


def compact(
    root: Root,
    name: str,
    *,
    force: bool = False,
    progress: Progress | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[CleanResult]:
    """Compact the partitions of a topic here and now; see `Log.compact`."""
    from embedlog.compaction import select_due, try_clean

    root.context.check_writable()
    info = root.topic(name)
    if not info.config.compacts:
        raise InvalidConfigError(
            f"the topic is not compacted: cleanup.policy is {info.config.cleanup_policy!r}",
            topic=name,
            todo=f'alter_topic("{name}", {{"cleanup.policy": "compact"}})',
        )
    parsed = MaintenanceConfig.parse(settings or {})
    logs = [root.partition(name, number) for number in range(info.partitions)]
    failed: dict[Any, Any] = {}
    if not force:
        logs = [cleanable.log for cleanable in select_due(logs, root.clock(), failed)]
    done = []
    for place, log in enumerate(logs):
        told = _of_all(progress, place, len(logs))
        # Rolled, so that what was just written is compacted too: the active segment never is.
        one = try_clean(log, root.clock(), settings=parsed, progress=told, roll=force)
        done.append(one)
    errors = [*failed.values(), *(one.error for one in done if one.error is not None)]
    # One bad partition does not keep the others from being cleaned; it is told at the end.
    for error in errors:
        if not isinstance(error, FencedError):
            raise error
    return done


def _of_all(progress: Progress | None, place: int, count: int) -> Progress | None:
    """Make the progress of one partition that of all, which are taken to be of one size."""
    if progress is None:
        return None
    told = progress

    def step(done: int, total: int) -> None:
        told(place * total + done, count * total)

    return step


def explain(root: Root, name: str) -> list[str]:
    """Say in words what compaction will do with each partition, or why it does nothing."""
    from embedlog.compaction import explain as explain_one

    now = root.clock()
    return [
        explain_one(root.partition(name, number), now) for number in range(root.partitions(name))
    ]


# The latest value of each key


def get(root: Root, name: str, ranges: Ranges, key: bytes) -> bytes | None:
    """Return the latest value of a key; None if it has none, or was deleted."""
    from embedlog.partitioner import partition_for_key

    home, version = partition_for_key(key, root.partitions(name)), root.context.catalog.version
    while True:
        before, parts = version(), _not_empty(ranges)
        found = _found(root, name, parts, key, home)
        # Compaction may have removed what was there because of what came after the look began.
        if found.get(home) or version() == before or _not_empty(ranges) == parts:
            break
    if (last := found.get(home)) is not None:
        return last.value
    # Elsewhere it is only if somebody chose, or the topic has grown since: then by time.
    newest = max(found, key=lambda number: (found[number].timestamp, number), default=None)
    return None if newest is None else found[newest].value


def _not_empty(ranges: Ranges) -> list[OffsetRange]:
    return [part for part in ranges() if part.start < part.stop]


def _found(
    root: Root, name: str, parts: list[OffsetRange], key: bytes, home: int
) -> dict[int, LastRecord]:
    """Return the last record of a key in each partition; in no other if it is at home."""
    from embedlog.compaction.last_records import last_record

    found = {}
    for part in sorted(parts, key=lambda one: one.partition != home):
        last = last_record(root.partition(name, part.partition), key, part.start, part.stop)
        if last is not None:
            found[part.partition] = last
            if part.partition == home:
                break
    return found


def latest(root: Root, name: str, ranges: Ranges, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the last record of each key that was not deleted, with some columns."""
    parts = _not_empty(ranges)
    if len(parts) == 1:
        for table in _last_of(root, name, parts[0], ranges):
            yield _chosen(table, schema)
        return
    tables = [table for part in parts for table in _last_of(root, name, part, ranges)]
    if tables:
        import pyarrow as pa

        whole = pa.concat_tables(tables, promote_options="default")
        yield _chosen(_one_each(whole, root.partitions(name)), schema)


def _last_of(root: Root, name: str, part: OffsetRange, ranges: Ranges) -> Iterator[pa.Table]:
    import pyarrow as pa

    from embedlog.batch.arrays import repeated
    from embedlog.compaction.last_records import last_records

    def now() -> int:
        found = [each for each in ranges() if each.partition == part.partition]
        return max(each.stop for each in found) if len(found) == 1 else part.stop

    log = root.partition(name, part.partition)
    for table in last_records(log, part.start, part.stop, now):
        number = repeated(part.partition, pa.int32(), table.num_rows)
        yield table.append_column("partition", number)


def _one_each(table: pa.Table, partitions: int) -> pa.Table:
    """Keep one record a key, also where a key is in several partitions, by the rule of `get`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from embedlog.batch.arrays import TRUE, numbers
    from embedlog.partitioner import partitions_for_keys

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
    last = pa.concat_arrays([changes, TRUE])
    kept = table.filter(last).drop_columns(["home"])
    return kept.sort_by([("partition", "ascending"), ("offset", "ascending")])


def _chosen(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the records that are no tombstones, with the columns of a schema."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if table["value"].null_count:
        table = table.filter(pc.is_valid(table["value"]))
    columns = [
        table[field.name]
        if field.name in table.schema.names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
