"""Bytes that are not those written: segments and databases, mutated in memory or on the disk."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from embedlog.batch.wire import layout_of
from embedlog.errors import EmbedlogError
from embedlog.segment import SegmentFile
from support.power_cut import Image
from support.roots import Row, batch_rows

PAGE = 512


class OneFile:
    """What a `SegmentFile` needs of `Files`, for one file that is only in memory."""

    maps_segments = True

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self, path: str, *, write: bool = False) -> int:
        return 1

    def close(self, fd: int) -> None:
        return None

    def keep(self, fd: int) -> None:
        return None

    def size(self, fd: int) -> int:
        return len(self._data)

    def read(self, fd: int, length: int, position: int) -> bytes:
        return self._data[position : position + length]

    def read_into(self, fd: int, memory: Any, position: int) -> int:
        data = self._data[position : position + len(memory)]
        memoryview(memory).cast("B")[: len(data)] = data
        return len(data)

    def map_data(self, fd: int, length: int) -> Any:
        return pa.py_buffer(self._data[:length])


def rows_in(data: bytes, stop: int, schema: Any, *, mapped: bool = False) -> list[Row]:
    """Read and verify every batch up to where the manifest says that they end."""
    file = SegmentFile(OneFile(data), "a segment", expected=lambda: (layout_of(schema),))  # type: ignore[arg-type]
    records: list[Row] = []
    position = file.start
    while position < stop:
        batches = file.mapped(position, stop) if mapped else file.read(position, stop)
        for decoded in batches:
            decoded.verify()
            records += batch_rows(decoded)
        position = batches[-1].position + batches[-1].size
    return records


def mutations(data: bytes, rng: random.Random, extra: int) -> Iterator[tuple[str, bytes]]:
    """Yield (what was done, the bytes after): every byte, every length, every sector, and more."""
    for position in range(len(data)):
        for bit in range(8) if extra > len(data) else [rng.randrange(8)]:
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            yield f"byte {position}, bit {bit}", bytes(changed)
    for length in range(len(data)):
        yield f"cut at {length}", data[:length]
    for start in range(0, len(data), PAGE):
        for fill in (b"\0", b"\xff"):
            size = min(PAGE, len(data) - start)
            yield f"sector {start} is {fill!r}", data[:start] + fill * size + data[start + size :]
    for number in range(extra):
        yield f"random {number}", scrambled(data, rng)


def scrambled(data: bytes, rng: random.Random) -> bytes:
    """Change some bytes, or move some, at random."""
    changed = bytearray(data)
    if rng.random() < 0.3 and len(data) > 64:
        size = rng.randrange(1, min(PAGE, len(data) // 2))
        source, target = (rng.randrange(len(data) - size) for _ in range(2))
        changed[target : target + size] = data[source : source + size]
    else:
        for _ in range(rng.choice((1, 2, 8, 64))):
            changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)


def snapshot(directory: str | os.PathLike[str]) -> Image:
    """A directory as an image, to be put there again and again."""
    root = Path(directory)
    files = {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
    directories = [str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_dir()]
    return Image(files, directories, [], 0, [], 0)


def replaced(image: Image, path: str, data: bytes | None) -> Image:
    """The image with one file replaced, or removed if its bytes are None."""
    files = dict(image.files)
    if data is None:
        files.pop(path, None)
    else:
        files[path] = data
    return Image(files, image.directories, [], 0, [], 0)


def readable(log: Any) -> tuple[list[Row], EmbedlogError | None]:
    """Read a partition up to its end, or to the error that stops it."""
    records: list[Row] = []
    try:
        reader = log.reader(log.start_offset())
        while batches := reader.read():
            for decoded in batches:
                records += batch_rows(decoded)
    except EmbedlogError as error:
        return records, error
    return records, None
