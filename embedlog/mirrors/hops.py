"""The header that says over which sites a record came to a log that merges several sites.

Its value begins with the 16 bytes that identify the topic to which a mirror wrote the record.  A
hop for each place follows at which the record was before, from where it was written on: 16 bytes
each for the site and the topic, 4 for the partition and for the leader epoch in which it was read,
and 8 for the offset, big-endian.  So a mirror finds out from the records alone which ones it must
not send to a site, and how far it was.

A program that forwards headers forwards this one, too.  So it counts only in batches with the
flag `MERGED`, which mirrors set.  Kafka has no such flag: there it counts only in the topic and
the partition that it names (`is_written_to`).
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from embedlog.batch import MERGED, Batch
from embedlog.batch.wire import headers_type
from embedlog.lazy import np, pa, pc

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[Any]

HEADER = "embedlog.mirror"
"""The name of the header."""
_KEY_BYTES = 16
_HOP = struct.Struct(">16s16sIIQ")


class Place(NamedTuple):
    """A partition of a topic at a site."""

    site: bytes
    topic: bytes
    partition: int

    @classmethod
    def of(cls, site_id: str, topic_id: str, partition: int) -> Place:
        """Return the place of a partition."""
        return cls(key_of(site_id), key_of(topic_id), partition)


class Hop(NamedTuple):
    """A place that a record was at before, and its offset there."""

    site: bytes
    topic: bytes
    partition: int
    leader_epoch: int
    """Of the site, when it was read."""
    offset: int

    @property
    def place(self) -> Place:
        """Where it was."""
        return Place(*self[:3])


def key_of(id: str) -> bytes:  # noqa: A002
    """Return the 16 bytes that stand for the id of a site or topic: its UUID, or a hash of it."""
    try:
        return uuid.UUID(id).bytes
    except ValueError:
        return sha256(id.encode()).digest()[:_KEY_BYTES]


def hops_of(value: bytes | None) -> list[Hop]:
    """Return the hops in the value of a header, the first site first.

    >>> hops_of(bytes(16) + bytes(47) + b"A")[0].offset
    65
    """
    data = (value or b"")[_KEY_BYTES:]
    return [Hop(*hop) for hop in _HOP.iter_unpack(data[: len(data) // _HOP.size * _HOP.size])]


def is_written_to(value: bytes | None, topic_id: str, partition: int) -> bool:
    """Return whether a mirror wrote the record of a header to a partition of a Kafka topic."""
    hops = hops_of(value)
    return bool(hops) and hops[-1].partition == partition and value[:16] == key_of(topic_id)  # type: ignore[index]


def with_hop(
    columns: Any,
    name: str,
    offsets: Array,
    source: Hop,
    target: Place,
    *,
    merged: bool,
    relay: bool,
) -> Any:
    """Return the records that a mirror sends, with one more hop each.

    Args:
        columns: The columns of a batch, as a `pyarrow.RecordBatch`.
        name: The name of its column of headers.
        offsets: The offset of each record at the source.
        source: The hop of the first one; the others differ in the offset only.
        target: Where they are sent; those that were at its site are left out.
        merged: Whether their batch has the flag `MERGED`.  Without it the headers that they
            have are those of other records, and are dropped.
        relay: Whether to send records that came to the source from other sites.
    """
    headers = columns.column(columns.schema.names.index(name))
    lengths = np.asarray(pc.fill_null(pc.list_value_length(headers), 0))
    entries = headers.flatten()
    is_path = np.asarray(pc.equal(entries.field(0), HEADER)).astype(bool)
    paths: list[bytes] | None = None
    if is_path.any():
        rows = np.repeat(np.arange(len(lengths)), lengths)[is_path]
        by_row = dict(
            zip(rows.tolist(), entries.field(1).filter(pa.array(is_path)).to_pylist(), strict=True)
        )
        if merged:
            kept = [
                row
                for row in range(len(lengths))
                if (path := by_row.get(row)) is None
                or (relay and all(hop.site != target.site for hop in hops_of(path)))
            ]
            columns = columns.take(pa.array(kept, pa.int64()))
            offsets, paths = offsets[kept], [by_row.get(row) or b"" for row in kept]
            headers = columns.column(columns.schema.names.index(name))
        headers = _without_paths(headers)
    values = _last_hops_of(offsets, source, target)
    if paths is not None:
        values = pa.array(
            [
                value[:_KEY_BYTES] + path[_KEY_BYTES:] + value[_KEY_BYTES:]
                for path, value in zip(paths, values.to_pylist(), strict=True)
            ],
            pa.binary(),
        )
    index = columns.schema.names.index(name)
    return columns.set_column(index, columns.schema.field(index), _appended(headers, values))


def _last_hops_of(offsets: Array, source: Hop, target: Place) -> Any:
    """Return values with one hop for each record, as an array of binary values."""
    count, size = len(offsets), _KEY_BYTES + _HOP.size
    values = np.empty((count, size), np.uint8)
    values[:] = np.frombuffer(target.topic + _HOP.pack(*source), np.uint8)
    values[:, -8:] = offsets.astype(">u8").view(np.uint8).reshape(count, 8)
    ends = np.arange(count + 1, dtype=np.int32) * size
    buffers = [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(values.tobytes())]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def _without_paths(headers: Any) -> Any:
    entries = headers.flatten()
    lengths = np.asarray(pc.fill_null(pc.list_value_length(headers), 0))
    stays = ~np.asarray(pc.equal(entries.field(0), HEADER)).astype(bool)
    rows = np.repeat(np.arange(len(lengths)), lengths)[stays]
    left = np.bincount(rows, minlength=len(lengths))
    return _lists(left, entries.filter(pa.array(stays)))


def _appended(headers: Any, values: Any) -> Any:
    """Return lists of headers with one more entry each."""
    count, old = len(headers), headers.flatten()
    lengths = np.asarray(pc.fill_null(pc.list_value_length(headers), 0)) + 1
    names = pa.array([HEADER], pa.string()).take(pa.array(np.zeros(count, np.int64)))
    new = pa.StructArray.from_arrays([names, values], fields=list(headers_type().value_type))
    is_new = np.zeros(len(old) + count, bool)
    is_new[np.cumsum(lengths) - 1] = True
    indexes = np.empty(len(old) + count, np.int64)
    indexes[is_new] = len(old) + np.arange(count)
    indexes[~is_new] = np.arange(len(old))
    return _lists(lengths, pa.concat_arrays([old, new]).take(pa.array(indexes)))


def _lists(lengths: Array, entries: Any) -> Any:
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return pa.ListArray.from_arrays(pa.array(ends), entries, type=headers_type())


def last_hop(stored: Sequence[Batch], source: Place) -> Hop | None:
    """Return the hop with the largest offset of what a mirror has copied of a source, if any."""
    hops = (hop for batch in stored if batch.flags & MERGED for hop in _last_hops(batch, source))
    return max(hops, key=lambda hop: hop.offset, default=None)


def _last_hops(batch: Batch, source: Place) -> Iterator[Hop]:
    for headers in batch.header_lists() or ():
        for name, value in headers:
            if name == HEADER and (hops := hops_of(value)) and hops[-1].place == source:
                yield hops[-1]
