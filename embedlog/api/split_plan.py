"""Plans `TopicView.splits`: parts of about the same size, each of one partition; reads no data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from embedlog.api.frames import decoded_items
from embedlog.errors import UnsupportedFormatError
from embedlog.lazy import pa
from embedlog.record import TopicPartition
from embedlog.schemas.row_filter import row_filter
from embedlog.splits.locate import locate, split, split_counts, topic_versions
from embedlog.splits.slices import PartitionOffsets, PartitionSlice, TopicVersions
from embedlog.splits.split import Split

if TYPE_CHECKING:
    from embedlog.api.topic import TopicView
    from embedlog.schemas.row_filter import Where


def plan_splits(
    view: TopicView[Any, Any], n: int, columns: Sequence[str] | None, where: Where | None
) -> list[Split]:
    """Return about ``n`` splits of a view; the arguments are those of `TopicView.splits`."""
    decode, known = None, view._all_columns()
    if view._serializers() != ("bytes", "bytes"):
        decode = partial(
            decoded_items, topic=view.name, serializers=view._serializers(), bind=_no_registry
        )
        known = decode(known.empty_table()).schema
    condition = None if where is None else row_filter(where, known, view.name)
    names = view.schema(columns).names
    # Offset and partition say where a record is that cannot be decoded.
    read = [*names, *(condition.columns if condition else ()), "offset", "partition"]
    stored = view.schema(list(dict.fromkeys(read)))
    slices, versions, root = view._pruned(condition)._slices(n)
    schema = pa.schema([known.field(name) for name in names])
    how = versions, stored, decode, condition
    return [Split(view.name, schema, root, tuple(each), *how) for each in _grouped(slices, n)]


def slices_of(
    view: TopicView[Any, Any], n: int
) -> tuple[list[PartitionSlice], TopicVersions | None, str]:
    """Return about ``n`` slices of a view or, of one with many ranges, more.

    And the schemas of a typed topic, and where the files are.
    """
    ranges = [
        PartitionOffsets(TopicPartition(view.name, part.partition), part.start, part.stop)
        for part in view.ranges()
    ]
    logs = {key: view._log(key.partition) for key, _, _ in ranges}
    located = list(locate(logs, ranges, None))
    for part in located:
        part.log.reader(part.from_offset)  # Raises if records were deleted before this.
    counts = split_counts([part.size for part in located], n)
    parts = zip(located, counts, strict=True)
    slices = [each for part, count in parts for each in split(part, count, None)]
    typed = view._typed_schema()
    versions = topic_versions(logs, slices, {} if typed is None else {view.name: typed})
    return slices, versions.get(view.name), view._root.context.files.path("")


def _grouped(slices: Sequence[PartitionSlice], n: int) -> list[list[PartitionSlice]]:
    """Return neighbours of one partition together, up to an ``n``-th of all bytes."""
    target = sum(part.size for part in slices) // n
    groups: list[list[PartitionSlice]] = []
    size = 0
    for part in slices:
        size += part.size
        if groups and groups[-1][0].partition == part.partition and size <= target:
            groups[-1].append(part)
        else:
            groups.append([part])
            size = part.size
    return groups


def _no_registry(setting: object, action: str, field: str, topic: str) -> NoReturn:
    raise UnsupportedFormatError(
        "Splits do not decode Avro, whose schemas are in a database of the log",
        topic=topic,
        todo="Read its bytes with log.topic(name, raw=True), or all of it with to_arrow.",
    )
