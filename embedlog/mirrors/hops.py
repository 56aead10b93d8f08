"""The header that says over which sites a record came to a log that merges several sites.

Its value has a hop for each site that the record was at before, from where it was written on:
16 bytes that identify the site, and its offset there, as 8 bytes, big-endian.  So a mirror finds
out from the records alone which ones it must not send to a site, and how far it was.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from embedlog.batch import Batch
from embedlog.batch.wire import headers_type
from embedlog.lazy import np, pa, pc

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[Any]

HEADER = "embedlog.mirror"
"""The name of the header."""
_HOP = struct.Struct(">16sQ")


class Hop(NamedTuple):
    """A site that a record was at before, and its offset there."""

    site: bytes
    offset: int


def site_key(site_id: str) -> bytes:
    """Return the 16 bytes that identify a site: those of its UUID, or a hash of another id."""
    try:
        return uuid.UUID(site_id).bytes
    except ValueError:
        return sha256(site_id.encode()).digest()[:16]


def hops_of(value: bytes | None) -> list[Hop]:
    """Return the hops in the value of a header, the first site first.

    >>> hops_of(bytes(16) + bytes(7) + b"A")[0].offset
    65
    """
    data = value or b""
    return [Hop(*hop) for hop in _HOP.iter_unpack(data[: len(data) // _HOP.size * _HOP.size])]


def with_hop(
    columns: Any, name: str, offsets: Array, site: bytes, target: bytes, *, relay: bool
) -> Any:
    """Return the records that a mirror sends, with one more hop each.

    Args:
        columns: The columns of a batch, as a `pyarrow.RecordBatch`.
        name: The name of its column of headers.
        offsets: The offset of each record at the source.
        site: The key of the source.
        target: The key of the target, whose records are left out.
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
        kept = [
            row
            for row in range(len(lengths))
            if (path := by_row.get(row)) is None
            or (relay and all(hop.site != target for hop in hops_of(path)))
        ]
        columns = columns.take(pa.array(kept, pa.int64()))
        offsets, paths = offsets[kept], [by_row.get(row) or b"" for row in kept]
        headers = columns.column(columns.schema.names.index(name))
        headers = _without_paths(headers)
    values = _hops(offsets, site)
    if paths is not None:
        values = pa.array(
            [path + hop for path, hop in zip(paths, values.to_pylist(), strict=True)], pa.binary()
        )
    index = columns.schema.names.index(name)
    return columns.set_column(index, columns.schema.field(index), _appended(headers, values))


def _hops(offsets: Array, site: bytes) -> Any:
    """Return the last hop of each record, as an array of binary values."""
    count = len(offsets)
    hops = np.empty((count, _HOP.size), np.uint8)
    hops[:, :16] = np.frombuffer(site, np.uint8)
    hops[:, 16:] = offsets.astype(">u8").view(np.uint8).reshape(count, 8)
    ends = np.arange(count + 1, dtype=np.int32) * _HOP.size
    buffers = [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(hops.tobytes())]
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


def last_offset(stored: Sequence[Batch], site: bytes) -> int | None:
    """Return the largest offset at a site from which one of the records came; None if none did."""
    return max((hop.offset for batch in stored for hop in _last_hops(batch, site)), default=None)


def _last_hops(batch: Batch, site: bytes) -> Iterator[Hop]:
    for headers in batch.header_lists() or ():
        for name, value in headers:
            if name == HEADER and (hops := hops_of(value)) and hops[-1].site == site:
                yield hops[-1]
