"""`embedlog compact`, `maintain` and `explain`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from embedlog.cli.open_log import to_read, to_write
from embedlog.cli.parser import FAILED, OK
from embedlog.cli.printing import note, say, say_json

if TYPE_CHECKING:
    from embedlog.compaction import CleanResult

_FIELDS = ("bytes_before", "bytes_after", "records_read", "records_kept", "tombstones", "why")


def compact(args: argparse.Namespace) -> int:
    """Compact topics, and print the result for each partition."""
    with to_write(args) as log:
        results = [result for name in args.topics for result in log.compact(name, force=args.force)]
    if args.json:
        say_json([_to_dict(result) for result in results])
    else:
        say(*map(_line, results))
    if not results:
        note("No partition is due; see embedlog explain, or use --force")
    return OK


def _line(result: CleanResult) -> str:
    return f"{result.topic}-{result.partition}: {result.why}"


def _to_dict(result: CleanResult) -> dict[str, Any]:
    fields = {name: getattr(result, name) for name in _FIELDS}
    return {"topic": result.topic, "partition": result.partition, **fields}


def maintain(args: argparse.Namespace) -> int:
    """Run all jobs once, and print what was deleted and compacted."""
    with to_write(args) as log:
        results = log.maintain()
    deleted, compacted = results["retention"], results["compaction"]
    if args.json:
        say_json(
            {
                "deleted": [result._asdict() for result in deleted],
                "compacted": [_to_dict(result) for result in compacted],
                "offsets_expired": results["offsets"],
            }
        )
    else:
        say(
            *(
                f"{result.topic}-{result.partition}: deleted {result.segments} segments, "
                f"{result.bytes:,} bytes; the log begins at {result.start_offset}"
                for result in deleted
            ),
            *map(_line, compacted),
        )
        if not deleted and not compacted:
            note("Nothing was due")
    return FAILED if any(result.error is not None for result in compacted) else OK


def explain(args: argparse.Namespace) -> int:
    """Print what retention and compaction will do with topics, and why."""
    with to_read(args) as log:
        lines = {name: _explain(log.topic(name)) for name in args.topics or log.topics()}
    if args.json:
        say_json(lines)
    else:
        say(*(line for topic in lines.values() for line in topic))
    return OK


def _explain(topic: Any) -> list[str]:
    compacts = "compact" in topic.config["cleanup.policy"]
    return [*topic.describe_retention(), *(topic.explain_compaction() if compacts else [])]
