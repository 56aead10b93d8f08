"""`embedlog metrics`: what to monitor of a log, for Prometheus, as JSON, or as a table."""

from __future__ import annotations

import argparse

from embedlog.cli.open_log import to_read
from embedlog.cli.parser import OK, CommandParser, add_list
from embedlog.cli.printing import say, say_json
from embedlog.display import text_table
from embedlog.errors import InvalidConfigError
from embedlog.metrics import check_labels


def metrics_options(command: CommandParser) -> None:
    """Add the options."""
    command.add_argument(
        "--format",
        choices=("prometheus", "json", "table"),
        default="table",
        help="by default a table; prometheus is for node_exporter's textfile collector",
    )
    about = "a label for all metrics in Prometheus' format, such as the name of the log"
    add_list(command, "--label", "NAME=VALUE", about)


def metrics(args: argparse.Namespace) -> int:
    """Print the metrics of a log."""
    labels = dict(map(_parse_label, args.label))
    check_labels(labels)
    with to_read(args) as log:
        if args.format == "prometheus":
            say(*log.prometheus(labels).splitlines())
            return OK
        metrics = log.metrics()
    if args.json or args.format == "json":
        say_json(metrics)
    else:
        rows = [
            (key, name, f"{value:,}")
            for key, values in metrics.items()
            for name, value in values.items()
        ]
        say(*text_table(("GROUP", "METRIC", "VALUE"), rows))
    return OK


def _parse_label(option: str) -> tuple[str, str]:
    name, separator, value = option.partition("=")
    if not separator:
        raise InvalidConfigError(f"--label must be NAME=VALUE, got {option!r}")
    return name, value
