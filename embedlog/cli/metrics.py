"""`embedlog metrics`: what to monitor of a log, for Prometheus, as JSON, or as a table."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from embedlog.cli.open_log import to_read
from embedlog.cli.parser import OK
from embedlog.cli.printing import say, say_json
from embedlog.display import text_table
from embedlog.errors import InvalidConfigError
from embedlog.metrics import GROUPS, nested

if TYPE_CHECKING:
    from embedlog.metrics import Sample

_LABEL = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")


def show(args: argparse.Namespace) -> int:
    """Print the metrics of a log."""
    common = dict(map(_parse_label, args.label))
    with to_read(args) as log:
        samples = list(log._samples())
    if args.format == "prometheus":
        say(*prometheus_lines(samples, common))
    elif args.json or args.format == "json":
        say_json(nested(samples))
    else:
        rows = [
            (key, name, f"{value:,}")
            for key, values in nested(samples).items()
            for name, value in values.items()
        ]
        say(*text_table(("GROUP", "METRIC", "VALUE"), rows))
    return OK


def _parse_label(option: str) -> tuple[str, str]:
    name, separator, value = option.partition("=")
    if not (separator and _LABEL.fullmatch(name)):
        raise InvalidConfigError(f"--label must be NAME=VALUE, got {option!r}")
    return name, value


def prometheus_lines(samples: Iterable[Sample], common: Mapping[str, str]) -> Iterator[str]:
    """Yield samples in Prometheus' text format, version 0.0.4, with some more labels."""
    values: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        values.setdefault((sample.key, sample.name), []).append(sample)
    for group in GROUPS:
        for metric in group.metrics:
            name = metric.exported(group)
            for number, sample in enumerate(values.get((group.key, metric.name), ())):
                if not number:
                    yield f"# HELP {name} {_escape(metric.text)}"
                    yield f"# TYPE {name} {metric.kind}"
                labels = {**common, **sample.labels}.items()
                pairs = ",".join(f'{label}="{_quoted(text)}"' for label, text in labels)
                braces = f"{{{pairs}}}" if pairs else ""
                yield f"{name}{braces} {sample.value}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escape(text).replace('"', r"\"")
