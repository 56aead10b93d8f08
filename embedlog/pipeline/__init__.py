"""Loads topics into Parquet: exactly once, incrementally, audited. `python -m embedlog.pipeline`.

    report = embedlog.pipeline.load("data/log", into="data/parquet", topics=["flights"])

Each record is in one file, under ``topic=…/date=…`` by the day (UTC) of its
timestamp.  Plain Parquet readers see each record once: there is no table
format, and at no moment is a record in two files or a file half written.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedlog.pipeline.load_query import load
    from embedlog.pipeline.parquet_audit import AuditReport, audit

_MODULES = {"AuditReport": "parquet_audit", "audit": "parquet_audit", "load": "load_query"}

__all__ = ["AuditReport", "audit", "load"]


# For type checkers every name would exist.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: `--help` needs none of them."""
        if name not in _MODULES:
            raise AttributeError(f"module 'embedlog.pipeline' has no attribute {name!r}")
        return getattr(importlib.import_module(f"embedlog.pipeline.{_MODULES[name]}"), name)
