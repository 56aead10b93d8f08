"""`embedlog produce`: lines of stdin to records."""

from __future__ import annotations

import argparse
import base64
import binascii
import io
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog.cli.open_log import to_write
from embedlog.cli.parser import OK
from embedlog.cli.printing import note, say_json
from embedlog.errors import InvalidRecordError
from embedlog.progress import ProgressBar

if TYPE_CHECKING:
    from embedlog.producer import Producer

_CHUNK_BYTES = 4 << 20
_FIELDS = {"value", "key", "headers", "partition", "timestamp"}
# What `consume --json` adds is no mistake, but says nothing here.
_IGNORED = {"topic", "offset", "timestamp_type"}


class InputRecord(NamedTuple):
    """One record to send."""

    value: bytes | None
    key: bytes | None
    headers: list[tuple[str, bytes | None]]
    partition: int | None
    timestamp: int | None


class InputBatch(NamedTuple):
    """Records for one partition, or for any, all with a time or none."""

    partition: int | None
    values: list[bytes | None]
    keys: list[bytes | None] | None = None
    headers: list[list[tuple[str, bytes | None]]] | None = None
    timestamps: list[int] | None = None


def produce(args: argparse.Namespace) -> int:
    """Send the lines, a chunk at a time; of a chunk with a line that is no record, none."""
    durability = "fsync" if args.sync else "os"
    total, done, lines_before, count = _size_of_input(), 0, 0, 0
    with to_write(args, create=True, durability=durability) as log, ProgressBar("produce") as bar:
        log.root.ensure_topic(args.topic)
        with log.producer(compression_type=args.compression) as producer:
            for lines in _chunks():
                # A list, so that the last line is looked at before the first is sent.
                ready = list(_rows(args, lines, lines_before))
                count += sum([_send(producer, args.topic, rows) for rows in ready])
                lines_before += len(lines)
                done += sum(map(len, lines)) + len(lines)
                bar(done, total)
    if args.json:
        say_json({"records": count})
    elif sys.stderr.isatty():
        note(f"{count} records")
    return OK


def _send(producer: Producer, topic: str, rows: InputBatch) -> int:
    future = producer.send_batch(
        topic,
        rows.values,
        keys=rows.keys,
        headers=rows.headers,
        timestamps=rows.timestamps,
        partition=rows.partition,
    )
    future.result()
    return len(rows.values)


def _size_of_input() -> int:
    try:
        status = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _chunks() -> Iterator[list[bytes]]:
    """Yield lines without their ends, as many as arrive at once."""
    rest = b""
    source: io.BufferedReader = sys.stdin.buffer  # type: ignore[assignment]
    # read1 returns what is there: whoever types a line has it sent.
    while data := source.read1(_CHUNK_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


def _rows(args: argparse.Namespace, lines: list[bytes], before: int) -> Iterable[InputBatch]:
    if args.json:
        return _of_objects(lines, before, args.partition)
    if args.key_separator is None:
        return [InputBatch(args.partition, list(lines))]
    separator = args.key_separator.encode("utf-8", "surrogateescape")
    pairs = [line.partition(separator) for line in lines]
    # A line without the separator is a value without a key, as for kcat.
    keys = [key if found else None for key, found, _ in pairs]
    values: list[bytes | None] = [value if found else line for line, found, value in pairs]
    return [InputBatch(args.partition, values, keys)]


def _of_objects(lines: list[bytes], before: int, partition: int | None) -> Iterable[InputBatch]:
    """Parse a JSON object a line, and put those that go alike together, in order."""
    groups: dict[tuple[int | None, bool], list[InputRecord]] = {}
    for number, line in enumerate(lines, before + 1):
        if line.strip():
            row = _parsed(line, number)
            where = row.partition if row.partition is not None else partition
            groups.setdefault((where, row.timestamp is None), []).append(row)
    for (where, now), rows in groups.items():
        headers = [row.headers for row in rows]
        yield InputBatch(
            where,
            [row.value for row in rows],
            [row.key for row in rows],
            headers if any(headers) else None,
            None if now else [row.timestamp or 0 for row in rows],
        )


def _parsed(line: bytes, number: int) -> InputRecord:
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        unknown = found.keys() - _FIELDS - _IGNORED
        if unknown:
            raise ValueError(f"{min(unknown)!r} is none of {', '.join(sorted(_FIELDS))}")
        return InputRecord(
            _bytes(found.get("value")),
            _bytes(found.get("key")),
            _headers(found.get("headers")),
            _integer(found, "partition"),
            _integer(found, "timestamp"),
        )
    except (ValueError, TypeError) as error:
        raise InvalidRecordError(f"line {number}: {error}") from None


def _bytes(given: Any) -> bytes | None:
    """Return text as UTF-8, ``{"base64": …}`` as what it stands for, other JSON as its text."""
    if given is None:
        return None
    if isinstance(given, str):
        return given.encode()
    if isinstance(given, dict) and given.keys() == {"base64"}:
        try:
            return base64.b64decode(given["base64"], validate=True)
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"base64: {error}") from None
    return json.dumps(given, ensure_ascii=False, separators=(",", ":")).encode()


def _headers(given: Any) -> list[tuple[str, bytes | None]]:
    pairs = given.items() if isinstance(given, dict) else given or ()
    found = []
    for pair in pairs:
        name, value = pair
        if not isinstance(name, str):
            raise ValueError("a header's name is text")
        found.append((name, _bytes(value)))
    return found


def _integer(found: dict[str, Any], name: str) -> int | None:
    value = found.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{name} is a whole number, not {value!r}")
    return value
