"""`embedlog dump`: the batches of a segment file as they stand there, damaged or not."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from embedlog import batch as batches
from embedlog.batch import Batch
from embedlog.batch.wire import END_OF_STREAM, ENTRY, HEADER, TRAILER
from embedlog.cli.parser import FAILED, OK
from embedlog.cli.printing import say, say_json
from embedlog.errors import CorruptBatchError, CorruptionError, EmbedlogError
from embedlog.files import Files
from embedlog.segment import SegmentFile

_BEGINNING = END_OF_STREAM[:4]
_CHUNK_BYTES = 4 << 20
_FLAGS = {
    batches.COMPRESSED: "compressed",
    batches.HEADERS: "headers",
    batches.EXPLICIT_OFFSETS: "explicit offsets",
    batches.LOG_APPEND_TIME: "log append time",
    batches.CONTROL: "control",
}


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes ``[start, stop)`` that are no batch; ``what`` says why."""

    start: int
    stop: int
    what: str


class DumpedBatch:
    """A segment file, read without the log it belongs to."""

    def __init__(self, files: Files, name: str) -> None:
        self._files, self._name = files, name
        self._file = SegmentFile(files, name)
        self.size, self.sealed = self._file.size(), False
        self._start = 0
        self._damage: Damage | None = None
        try:
            self._start = self._file.start
        except CorruptionError as error:
            self._guess(error.what)

    def _guess(self, what: str) -> None:
        """Take the columns of a topic of bytes, with headers and offsets or without: what fits."""
        tried = []
        for headers, offsets in product((False, True), repeat=2):
            schema = batches.schema(headers=headers, offsets=offsets)
            self._file = SegmentFile(self._files, self._name, schema=schema)
            tried.append((self._find(0), headers, offsets))
        self._start, headers, offsets = min(tried)
        schema = batches.schema(headers=headers, offsets=offsets)
        self._file = SegmentFile(self._files, self._name, schema=schema)
        self._damage = Damage(0, self._start, what)

    @property
    def columns(self) -> list[str]:
        """The names of the columns, as the file says or as was guessed."""
        return list(self._file.schema.names)

    def bytes_at(self, position: int, length: int) -> bytes:
        """Return bytes of the file."""
        assert self._file.fd is not None
        return self._files.read(self._file.fd, length, position)

    def items(self) -> Iterator[Batch | Damage]:
        """Yield batches and what is between them, in order, to the end of the file."""
        if self._damage is not None:
            yield self._damage
        position = self._start
        while position < self.size:
            if self.bytes_at(position, 8) == END_OF_STREAM:
                self.sealed = position + 8 == self.size
                if not self.sealed:
                    yield Damage(position, position + 8, "an end mark before the end")
                position += 8
                continue
            try:
                found = self._file.read(position, self.size)
                yield from found
                position = found[-1].position + found[-1].size
            except CorruptBatchError as error:
                following = self._find(position + 1)
                yield Damage(position, following, error.reason or error.what)
                position = following

    def _find(self, position: int) -> int:
        """Return where the next batch that is whole begins, or the end mark, or the end."""
        while position < self.size:
            data = self.bytes_at(position, _CHUNK_BYTES)
            place = data.find(_BEGINNING)
            while place >= 0:
                if self._begins(position + place):
                    return position + place
                place = data.find(_BEGINNING, place + 1)
            # A beginning may lie across the end of the chunk.
            position += max(len(data) - 3, 1) if position + len(data) < self.size else len(data)
        return self.size

    def _begins(self, position: int) -> bool:
        if self.bytes_at(position, 8) == END_OF_STREAM:
            return position + 8 == self.size
        try:
            return bool(self._file.read(position, self.size, 4096))
        except EmbedlogError:
            return False


def dump(args: argparse.Namespace) -> int:
    """Print every batch, and where there is none although there should be."""
    path = os.path.abspath(args.file)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no such file: {args.file}")
    files = Files(os.path.dirname(path), writable=False)
    try:
        dumped = DumpedBatch(files, os.path.basename(path))
        show = _json_line if args.json else partial(_lines, args.columns)
        damaged = 0
        for item in dumped.items():
            facts = _facts(dumped, item)
            damaged += "damage" in facts
            show(facts)
    finally:
        files.close_all()
    if not args.json:
        state = "sealed" if dumped.sealed else "not sealed"
        say(f"{args.file}: {dumped.size} bytes, {state}, {damaged} damaged places")
    return FAILED if damaged else OK


def _json_line(facts: dict[str, Any]) -> None:
    say_json(facts)


def _facts(dumped: DumpedBatch, item: Batch | Damage) -> dict[str, Any]:
    if isinstance(item, Damage):
        size = item.stop - item.start
        return {"position": item.start, "size": size, "damage": item.what}
    facts: dict[str, Any] = {
        name: getattr(item, name)
        for name in (
            *("position", "size", "base_offset", "next_offset", "count", "min_timestamp"),
            *("max_timestamp", "leader_epoch", "producer_id", "producer_epoch"),
            *("base_sequence", "delete_horizon"),
        )
    }
    facts["flags"] = [name for bit, name in _FLAGS.items() if item.flags & bit]
    facts |= _block(dumped, item)
    try:
        item.verify()
    except CorruptBatchError as error:
        facts["damage"] = error.reason or error.what
    return facts


def _block(dumped: DumpedBatch, one: Batch) -> dict[str, Any]:
    """Return what only the block knows: checksums, and where the columns end."""
    head = dumped.bytes_at(one.position, 8)
    head = dumped.bytes_at(one.position, 8 + int.from_bytes(head[4:8], "little"))
    length, _ = TRAILER.unpack_from(head, len(head) - TRAILER.size)
    block = len(head) - length
    header = HEADER.unpack_from(head, block)
    columns, before = [], 0
    for place, name in enumerate(dumped.columns):
        end, crc, nulls = ENTRY.unpack_from(head, block + HEADER.size + ENTRY.size * place)
        columns.append({"name": name, "bytes": end - before, "crc": f"{crc:08x}", "nulls": nulls})
        before = end
    return {
        "head_size": len(head),
        "block_size": length,
        "body_size": one.size - len(head),
        "block_crc": f"{header[1]:08x}",
        "metadata_crc": f"{header[2]:08x}",
        "columns": columns,
    }


def _lines(columns: bool, facts: dict[str, Any]) -> None:
    place = f"{facts['position']:>10} +{facts['size']}"
    if "count" not in facts:
        say(f"{place}  DAMAGED: {facts['damage']}")
        return
    producer = facts["producer_id"]
    by = (
        ""
        if producer is None
        else (f"  producer {producer}:{facts['producer_epoch']} from {facts['base_sequence']}")
    )
    flags = f"  ({', '.join(facts['flags'])})" if facts["flags"] else ""
    say(
        f"{place}  offsets {facts['base_offset']} to {facts['next_offset']}, "
        f"{facts['count']} records  times {facts['min_timestamp']} to {facts['max_timestamp']}  "
        f"epoch {facts['leader_epoch']}{by}  head {facts['head_size']} body {facts['body_size']}  "
        f"crc {facts['block_crc']} {facts['metadata_crc']}{flags}"
    )
    for column in facts["columns"] if columns else ():
        say(
            f"{'':>12}{column['name']}: {column['bytes']} bytes, crc {column['crc']}, "
            f"{column['nulls']} nulls"
        )
    if "damage" in facts:
        say(f"{'':>12}DAMAGED: {facts['damage']}")
