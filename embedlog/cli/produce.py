"""`embedlog produce`: appends the lines of stdin as records."""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from embedlog.cli.file_formats import file_size, input_lines
from embedlog.cli.open_log import existing_topic, to_write
from embedlog.cli.parser import OK
from embedlog.cli.printing import note, say_json
from embedlog.config import INT_MAX
from embedlog.display import plural
from embedlog.errors import InvalidConfigError, InvalidRecordError
from embedlog.progress import ProgressBar
from embedlog.registry import JsonToAvro
from embedlog.serializers import shortened

if TYPE_CHECKING:
    from embedlog.partition import Durability

FIELDS = {"value", "key", "headers", "partition", "timestamp"}
IGNORED = {"topic", "offset", "timestamp_type"}
"""Fields of `embedlog consume --json` that have no meaning here."""


class InputRecord(NamedTuple):
    """One record to send."""

    value: Any
    key: Any
    headers: list[tuple[str, bytes | None]]
    partition: int | None
    timestamp: int | None


class InputBatch(NamedTuple):
    """The arguments of `Producer.send_batch`; either all records have a timestamp, or none."""

    partition: int | None
    values: list[Any]
    keys: list[Any] | None = None
    headers: list[list[tuple[str, bytes | None]]] | None = None
    timestamps: list[int] | None = None


def produce(args: argparse.Namespace, file: IO[bytes] | None = None) -> int:
    """Send the lines, a chunk at a time; a chunk with an invalid line is not sent at all.

    Args:
        args: The options.
        file: Where the lines are; by default stdin.
    """
    durability: Durability = "fsync" if args.sync else "os"
    total, done, lines_before, count = file_size(file or sys.stdin), 0, 0, 0
    with (
        to_write(args, create=True, durability=durability) as log,
        existing_topic(log, args.topic),
        ProgressBar("produce") as bar,
    ):
        info = log.root.topic(args.topic)
        if info.schema_version:
            raise InvalidConfigError(
                "Rows of a typed topic come from a file",
                topic=args.topic,
                todo="Use --from FILE, or --from - for JSON lines of stdin.",
            )
        config = info.config
        serializers = config.key_serializer, config.value_serializer
        codec = args.compression
        # The lines have JSON for Avro.
        own: dict[str, Any] = {
            f"{field}_serializer": JsonToAvro()
            for field, name in zip(("key", "value"), serializers, strict=True)
            if name == "avro"
        }
        # The setting max.message.bytes of the topic is the only limit of a record's size.
        with log.producer(compression_type=codec, max_request_size=INT_MAX, **own) as producer:
            for lines in input_lines(file or sys.stdin.buffer):
                # A list, so that the last line is parsed before the first is sent.
                batches = list(_batches(args, serializers, lines, lines_before))
                for batch in batches:
                    producer.send_batch(args.topic, **batch._asdict()).result()
                    count += len(batch.values)
                lines_before += len(lines)
                done += sum(map(len, lines)) + len(lines)
                bar(done, total)
    if args.json:
        say_json({"records": count})
    elif sys.stderr.isatty():
        note(plural(count, "record"))
    return OK


def _batches(
    args: argparse.Namespace, serializers: tuple[str, str], lines: list[bytes], lines_before: int
) -> Iterable[InputBatch]:
    """Parse lines to the keys and values that the topic's serializers take."""
    key_type, value_type = serializers
    if args.json:
        return _json_batches(lines, lines_before, args.partition, serializers)
    if args.key_separator is None:
        return [InputBatch(args.partition, _parse_all(value_type, lines, lines_before))]
    separator = args.key_separator.encode("utf-8", "surrogateescape")
    pairs = [line.partition(separator) for line in lines]
    # A line without the separator is a value without a key, as for kcat.
    keys = [key if mark else None for key, mark, _ in pairs]
    values = [value if mark else line for line, mark, value in pairs]
    return [
        InputBatch(
            args.partition,
            _parse_all(value_type, values, lines_before),
            _parse_all(key_type, keys, lines_before),
        )
    ]


def _integer_from(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{shortened(text)} is no whole number") from None


FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": _integer_from,
    "float": float,
    "uuid": UUID,
    "json": json.loads,
    "avro": json.loads,
}
"""By the name of a serializer: returns what it takes, of text."""


def _parse_all(serializer: str, texts: Sequence[bytes | None], lines_before: int) -> list[Any]:
    """Parse typed text into values for a serializer."""
    parse = FROM_TEXT.get(serializer)
    if parse is None:
        return list(texts)
    items = []
    for number, text in enumerate(texts, lines_before + 1):
        try:
            items.append(None if text is None else parse(text.decode()))
        except ValueError as error:
            raise InvalidRecordError(
                f"Line {number} is not of the type {serializer!r}: {error}"
            ) from None
    return items


def _json_batches(
    lines: list[bytes], lines_before: int, partition: int | None, serializers: tuple[str, str]
) -> Iterable[InputBatch]:
    """Parse a JSON object per line, and group records that can be sent together, in order."""
    groups: dict[tuple[int | None, bool], list[InputRecord]] = {}
    for number, line in enumerate(lines, lines_before + 1):
        if line.strip():
            record = parse_record(line, number, serializers)
            target = record.partition if record.partition is not None else partition
            groups.setdefault((target, record.timestamp is None), []).append(record)
    for (target, without_timestamp), records in groups.items():
        values, keys, headers, _, timestamps = map(list, zip(*records, strict=True))
        yield InputBatch(
            target,
            values,
            keys,
            headers if any(headers) else None,
            None if without_timestamp else timestamps,
        )


def parse_record(line: bytes, number: int, serializers: tuple[str, str]) -> InputRecord:
    """Return the record of a JSON object.

    Args:
        line: The object.
        number: The number of the line, for the error.
        serializers: The names of the serializers of keys and values.

    Raises:
        InvalidRecordError: The line is not such an object.
    """
    key_type, value_type = serializers
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("must be a JSON object")
        unknown = fields.keys() - FIELDS - IGNORED
        if unknown:
            raise ValueError(f"unknown field {min(unknown)!r}, not in {', '.join(sorted(FIELDS))}")
        return InputRecord(
            _item(value_type, fields.get("value")),
            _item(key_type, fields.get("key")),
            parse_headers(fields.get("headers")),
            _integer(fields, "partition"),
            _integer(fields, "timestamp"),
        )
    except ValueError as error:
        raise InvalidRecordError(f"Line {number}: {error}") from None


def _item(serializer: str, value: Any) -> Any:
    """Convert a JSON value to one for a serializer."""
    if serializer == "bytes":
        return _bytes(value)
    return UUID(value) if serializer == "uuid" and isinstance(value, str) else value


def _bytes(value: Any) -> bytes | None:
    """Return text as UTF-8, ``{"base64": …}`` decoded, and other JSON as its text."""
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and value.keys() == {"base64"}:
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"base64: {error}") from None
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def parse_headers(value: Any) -> list[tuple[str, bytes | None]]:
    """Return the headers in a JSON document.

    Raises:
        ValueError: It has another form.
    """
    pairs = list(value.items()) if isinstance(value, dict) else value or []
    headers = []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        match pair:
            case [str(name), content]:
                headers.append((name, _bytes(content)))
            case _:
                raise ValueError(
                    f"headers must be {{name: value}} or [[name, value], ...], got {value!r}"
                )
    return headers


def _integer(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return value
