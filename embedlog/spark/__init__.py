"""Spark reads and writes a log: ``format("embedlog")``, as ``format("kafka")`` without a broker.

    spark = embedlog.spark.session()
    spark.read.format("embedlog").option("path", "/data/log").option("subscribe", "flights").load()

The driver plans from metadata; executors map the files and open no database.
Options and columns are those of Spark's Kafka source (docs/spark.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedlog.spark.datasource import EmbedlogDataSource
    from embedlog.spark.session import recommended_conf, register, session
    from embedlog.spark.stream_offset import offsets_behind_latest

_HOMES = {
    "EmbedlogDataSource": "datasource",
    "offsets_behind_latest": "positions",
    "recommended_conf": "starting",
    "register": "starting",
    "session": "starting",
}

__all__ = [
    "EmbedlogDataSource",
    "offsets_behind_latest",
    "recommended_conf",
    "register",
    "session",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: an executor needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'embedlog.spark' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"embedlog.spark.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__]
