"""`embedlog compact`, `maintain` and `explain`: keeping a log small, and why it is not smaller."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import FAILED, OK
from embedlog.cli.printing import note, say, say_json

if TYPE_CHECKING:
    from embedlog.compaction import CleanResult

_NUMBERS = ("bytes_before", "bytes_after", "records_read", "records_kept", "tombstones", "why")


def compact(args: argparse.Namespace) -> int:
    """Compact topics, and print what each partition lost."""
    with to_write(args) as log:
        done = [one for name in args.topics for one in log.compact(name, force=args.force)]
    _say_compacted(args, done)
    if not done:
        note("nothing is due; embedlog explain says why, --force does it all the same")
    return OK


def _say_compacted(args: argparse.Namespace, done: list[CleanResult]) -> None:
    if args.json:
        say_json([_numbers(one) for one in done])
    else:
        say(*(f"{one.topic}-{one.partition}: {one.why}" for one in done))


def _numbers(one: CleanResult) -> dict[str, Any]:
    numbers = {name: getattr(one, name) for name in _NUMBERS}
    return {"topic": one.topic, "partition": one.partition, **numbers}


def maintain(args: argparse.Namespace) -> int:
    """Do one round, and print what it deleted and compacted."""
    with to_write(args) as log:
        done = log.maintain()
    deleted, compacted = done["retention"], done["compaction"]
    if args.json:
        say_json(
            {
                "deleted": [one._asdict() for one in deleted],
                "compacted": [_numbers(one) for one in compacted],
                "offsets_expired": done["offsets"],
            }
        )
    else:
        say(
            *(
                f"{one.topic}-{one.partition}: deleted {one.segments} segments, "
                f"{one.bytes:,} bytes; begins at {one.start_offset}"
                for one in deleted
            )
        )
        _say_compacted(args, compacted)
        if not deleted and not compacted:
            note("nothing was due")
    return FAILED if any(one.error is not None for one in compacted) else OK


def explain(args: argparse.Namespace) -> int:
    """Print what happens to the records of topics, and why."""
    with to_read(args) as log:
        told = {name: _words(log.topic(name)) for name in args.topics or log.topics()}
    if args.json:
        say_json(told)
    else:
        say(*(line for lines in told.values() for line in lines))
    return OK


def _words(topic: Any) -> list[str]:
    compacted = "compact" in topic.config["cleanup.policy"]
    return [*topic.describe_retention(), *(topic.explain_compaction() if compacted else [])]
