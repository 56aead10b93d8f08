"""Spark reads and writes a log: ``format("embedlog")``, as ``format("kafka")`` without a broker.

    spark = embedlog.spark.session()
    spark.read.format("embedlog").option("path", "/data/log").option("subscribe", "flights").load()

The driver plans from metadata; executors map the files and open no database.
The options and columns are those of Spark's Kafka connector (docs/spark.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedlog.spark.datasource import EmbedlogDataSource
    from embedlog.spark.spark_session import jar_path, recommended_conf, register, session
    from embedlog.spark.stream_offset import offsets_behind_latest

_MODULES = {
    "EmbedlogDataSource": "datasource",
    "jar_path": "spark_session",
    "offsets_behind_latest": "stream_offset",
    "recommended_conf": "spark_session",
    "register": "spark_session",
    "session": "spark_session",
}

__all__ = [
    "EmbedlogDataSource",
    "jar_path",
    "offsets_behind_latest",
    "recommended_conf",
    "register",
    "session",
]


# For type checkers every name would exist.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: executors need none of them."""
        if name not in _MODULES:
            raise AttributeError(f"module 'embedlog.spark' has no attribute {name!r}")
        return getattr(importlib.import_module(f"embedlog.spark.{_MODULES[name]}"), name)
