"""`embedlog consume` and `embedlog tail`: records to stdout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from embedlog.api import Log, TopicView
from embedlog.api.topic import OffsetRange
from embedlog.cli.formats import writer
from embedlog.cli.open_log import to_follow, to_read
from embedlog.cli.parser import OK
from embedlog.errors import InvalidConfigError, OffsetOutOfRangeError

_PRINT_AT_ONCE = 1000
_WAIT_SECONDS = 60.0

Place = Callable[[Log, OffsetRange], OffsetRange]
"""Where in a partition to begin, of what it holds."""


def consume(args: argparse.Namespace) -> int:
    """Print records from a place on."""
    return _run(args, _place(args), args.max)


def tail(args: argparse.Namespace) -> int:
    """Print the last records, and those that come."""
    return _run(args, _before_end(args.topic, args.last), None)


def _place(args: argparse.Namespace) -> Place:
    word = args.offset or ("latest" if args.follow and not args.from_beginning else "earliest")
    if word in ("earliest", "latest"):
        return _whole if word == "earliest" else _before_end(args.topic, 0)
    try:
        number = int(word)
    except ValueError:
        todo = "Use a number, -number, earliest or latest"
        raise InvalidConfigError(f"{word!r} is no offset", todo=todo) from None
    if number < 0 or word.startswith("-"):
        return _before_end(args.topic, -number)
    if args.partition is not None:
        return partial(_exactly, args.topic, number)
    # One number for many partitions: those that do not have it begin as near as they can.
    return lambda _, part: part._replace(start=min(max(number, part.start), part.stop))


def _whole(_: Log, part: OffsetRange) -> OffsetRange:
    return part


def _before_end(topic: str, count: int) -> Place:
    """Return where so many records are left; compaction may have removed others between them."""

    def place(log: Log, part: OffsetRange) -> OffsetRange:
        records = log.partition(topic, part.partition).record_counts
        return part._replace(start=records.before(part.start, part.stop, count))

    return place


def _exactly(topic: str, number: int, _: Log, part: OffsetRange) -> OffsetRange:
    if not part.start <= number <= part.stop:
        what = f"the log holds offsets {part.start} to {part.stop}"
        raise OffsetOutOfRangeError(what, topic=topic, partition=part.partition, offset=number)
    return part._replace(start=number)


def _run(args: argparse.Namespace, place: Place, most: int | None) -> int:
    write, out, printed = writer(args.format, args.json), sys.stdout.buffer, 0
    with to_follow(args) if args.follow else to_read(args) as log:
        for view in _views(log, args, place):
            records = islice(view, None if most is None else most - printed)
            while chunk := list(islice(records, _PRINT_AT_ONCE)):
                out.write(write(chunk))
                printed += len(chunk)
            out.flush()
            if printed == most:
                break
    return OK


def _views(log: Log, args: argparse.Namespace, place: Place) -> Iterator[TopicView]:
    """Yield what is there, and with ``--follow`` for ever what has come since."""
    done: dict[int, int] = {}
    if args.follow:
        log.root.wake.join()
    while True:
        seen = log.root.wake.value()
        parts = [_next(log, part, done, place) for part in _ranges(log, args)]
        yield TopicView(log.root, args.topic, parts)
        if not args.follow:
            return
        done = {part.partition: part.stop for part in parts}
        # A partition that is added from now on is shown from its beginning.
        place = _whole
        log.root.wake.wait(seen, _WAIT_SECONDS)


def _ranges(log: Log, args: argparse.Namespace) -> list[OffsetRange]:
    topic = log.topic(args.topic)
    found: list[OffsetRange] = (
        topic.ranges() if args.partition is None else topic.partition(args.partition).ranges()
    )
    return found


def _next(log: Log, part: OffsetRange, done: dict[int, int], place: Place) -> OffsetRange:
    start = done.get(part.partition)
    return place(log, part) if start is None else part._replace(start=max(start, part.start))
