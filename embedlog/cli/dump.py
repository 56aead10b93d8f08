"""`embedlog dump`: the batches of a segment file, even if it is damaged."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import product
from typing import Any

from embedlog import batch as batches
from embedlog import kv
from embedlog.batch import Batch
from embedlog.batch.wire import END_OF_STREAM, ENTRY, HEADER, PREFIX, TRAILER
from embedlog.catalog import schema_versions
from embedlog.cli.parser import FAILED, OK, CommandParser, add_flag
from embedlog.cli.printing import say, say_json
from embedlog.display import plural
from embedlog.errors import CorruptBatchError, CorruptionError, EmbedlogError
from embedlog.files import Files
from embedlog.files.paths import FORMAT_FILE
from embedlog.schemas.segment_schema import segment_schema
from embedlog.schemas.topic_schema import TopicSchema
from embedlog.segment import MOST_AHEAD, SegmentFile

_BATCH_START = END_OF_STREAM[:4]
_CHUNK_BYTES = 4 << 20
_FIELDS = (
    *("position", "size", "base_offset", "next_offset", "count", "min_timestamp"),
    *("max_timestamp", "leader_epoch", "producer_id", "producer_epoch"),
    *("base_sequence", "delete_horizon"),
)
_FLAGS = {
    batches.COMPRESSED: "compressed",
    batches.HEADERS: "headers",
    batches.EXPLICIT_OFFSETS: "explicit offsets",
    batches.LOG_APPEND_TIME: "log append time",
    batches.CONTROL: "control",
    batches.MERGED: "merged",
}


class DumpedSegment:
    """A segment file, read without its log."""

    def __init__(self, files: Files, name: str) -> None:
        self.file = SegmentFile(files, name)
        self.size, self.sealed = self.file.size(), False
        self._schema_damage = ""
        try:
            self._start = self.file.start
        except CorruptionError as error:
            self._start, self._schema_damage = self._guess_schema(files, name), error.what

    def _guess_schema(self, files: Files, name: str) -> int:
        """Choose the schema with which a batch is found first; return where it begins."""
        starts = {}
        for schema in _possible_schemas(files.path(name)):
            self.file = SegmentFile(files, name, schema=schema)
            starts[self.file] = self._find_batch(0)
        self.file = min(starts, key=starts.__getitem__)
        return starts[self.file]

    def items(self) -> Iterator[dict[str, Any]]:
        """Yield facts about the batches and the damage between them, in order, to the end."""
        if self._schema_damage:
            yield _damage(0, self._start, self._schema_damage)
        position = self._start
        while position < self.size:
            if self.file.bytes(position, 8) == END_OF_STREAM:
                end = position + 8
                self.sealed = end == self.size
                if not self.sealed:
                    yield _damage(position, end, "an end mark before the end of the file")
                position = end
                continue
            try:
                read = self.file.read(position, self.size)
            except CorruptBatchError as error:
                left = self.size - position
                if left <= MOST_AHEAD and self.file.is_blank(position, left):
                    return  # preallocated
                end = self._find_batch(position + 1)
                yield _damage(position, end, error.reason or error.what)
                position = end
            else:
                yield from (_facts(self.file, batch) for batch in read)
                position = read[-1].position + read[-1].size

    def _find_batch(self, position: int) -> int:
        """Return the position of the next complete batch, of the end mark, or of the end."""
        while position < self.size:
            data = self.file.bytes(position, _CHUNK_BYTES)
            index = data.find(_BATCH_START)
            while index >= 0:
                if self._is_batch(position + index):
                    return position + index
                index = data.find(_BATCH_START, index + 1)
            # The start of a batch may lie across the end of the chunk.
            position += max(len(data) - 3, 1) if position + len(data) < self.size else len(data)
        return self.size

    def _is_batch(self, position: int) -> bool:
        if self.file.bytes(position, 8) == END_OF_STREAM:
            return position + 8 == self.size
        try:
            return bool(self.file.read(position, self.size, 4096))
        except EmbedlogError:
            return False


def _possible_schemas(path: str) -> Iterator[Any]:
    """Yield the schemas that a segment file may have: those of its topic, if the log has it."""
    topic = os.path.dirname(os.path.dirname(path))
    versions: list[TopicSchema] = []
    with suppress(EmbedlogError, ValueError, OSError):
        number = int(topic.rpartition("-")[2])
        versions = _schemas_of_topic(os.path.dirname(os.path.dirname(topic)), number)
    for headers, offsets in product((False, True), repeat=2):
        if not versions:
            yield batches.schema(headers=headers, offsets=offsets)
        for schema, tombstones in product(versions, (False, True)):
            yield segment_schema(schema, headers=headers, tombstones=tombstones, offsets=offsets)


def _schemas_of_topic(root: str, topic_id: int) -> list[TopicSchema]:
    """Return the versions of a topic's schema from the catalogue of a log."""
    if not os.path.isfile(os.path.join(root, FORMAT_FILE)):
        return []
    files = Files(root, writable=False)
    try:
        with closing(kv.LmdbStore(files, "state", durable=True, timeout=10)) as state:
            return state.read(lambda txn: schema_versions(txn, topic_id))
    finally:
        files.close_all()


def _damage(start: int, stop: int, what: str) -> dict[str, Any]:
    return {"position": start, "size": stop - start, "damage": what}


def _facts(segment: SegmentFile, batch: Batch) -> dict[str, Any]:
    facts: dict[str, Any] = {name: getattr(batch, name) for name in _FIELDS}
    facts["flags"] = [name for bit, name in _FLAGS.items() if batch.flags & bit]
    facts |= _block(segment, batch)
    try:
        batch.verify()
    except CorruptBatchError as error:
        facts["damage"] = error.reason or error.what
    return facts


def _block(segment: SegmentFile, batch: Batch) -> dict[str, Any]:
    """Return the checksums and the sizes of the columns from the block of a batch."""
    _, extent = PREFIX.unpack(segment.bytes(batch.position, PREFIX.size))
    head = segment.bytes(batch.position, PREFIX.size + extent)
    length, _ = TRAILER.unpack_from(head, len(head) - TRAILER.size)
    block = len(head) - length
    header = HEADER.unpack_from(head, block)
    columns, before = [], 0
    for index, name in enumerate(segment.schema.names):
        end, crc, nulls = ENTRY.unpack_from(head, block + HEADER.size + ENTRY.size * index)
        columns.append({"name": name, "bytes": end - before, "crc": f"{crc:08x}", "nulls": nulls})
        before = end
    return {
        "head_size": len(head),
        "block_size": length,
        "body_size": batch.size - len(head),
        "block_crc": f"{header[1]:08x}",
        "metadata_crc": f"{header[2]:08x}",
        "columns": columns,
    }


def lines_of(facts: dict[str, Any], *, columns: bool) -> Iterator[str]:
    """Yield the lines to print for a batch, or for damage, of `DumpedSegment.items`."""
    where = f"{facts['position']:>10} +{facts['size']}"
    if "count" not in facts:
        yield f"{where}  DAMAGED: {facts['damage']}"
        return
    producer = ""
    if facts["producer_id"] is not None:
        identity = f"{facts['producer_id']}:{facts['producer_epoch']}"
        producer = f"  producer {identity} from {facts['base_sequence']}"
    flags = f"  ({', '.join(facts['flags'])})" if facts["flags"] else ""
    yield (
        f"{where}  offsets [{facts['base_offset']}, {facts['next_offset']}), "
        f"{plural(facts['count'], 'record')}  "
        f"times {facts['min_timestamp']} to {facts['max_timestamp']}  "
        f"epoch {facts['leader_epoch']}{producer}  head {facts['head_size']} "
        f"body {facts['body_size']}  crc {facts['block_crc']} {facts['metadata_crc']}{flags}"
    )
    for column in facts["columns"] if columns else ():
        yield (
            f"{'':>12}{column['name']}: {column['bytes']} bytes, crc {column['crc']}, "
            f"{plural(column['nulls'], 'null')}"
        )
    if "damage" in facts:
        yield f"{'':>12}DAMAGED: {facts['damage']}"


def dump_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument("file", metavar="SEGMENT_FILE")
    add_flag(command, "--columns", "also print a line per column")


def dump(args: argparse.Namespace) -> int:
    """Print every batch, and the damage between them."""
    path = os.path.abspath(args.file)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"No such file: {args.file}")
    files = Files(os.path.dirname(path), writable=False, unsafe_filesystem=True)
    try:
        segment, damaged = DumpedSegment(files, os.path.basename(path)), 0
        for facts in segment.items():
            damaged += "damage" in facts
            if args.json:
                say_json(facts)
            else:
                say(*lines_of(facts, columns=args.columns))
    finally:
        files.close_all()
    if not args.json:
        state = "sealed" if segment.sealed else "not sealed"
        damage = plural(damaged, "damaged place")
        say(f"{args.file}: {plural(segment.size, 'byte')}, {state}, {damage}")
    return FAILED if damaged else OK
