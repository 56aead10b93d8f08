"""From the log to Parquet: exactly once, incrementally, audited. `python -m embedlog.pipeline`.

    report = embedlog.pipeline.load("data/log", into="data/parquet", topics=["flights"])

Each record is in one file, under ``topic=…/date=…`` by the day (UTC) of its
timestamp.  Who reads the directory needs to know nothing of this: there is no
table format, and at no moment is a record in two files or a file half written.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedlog.pipeline.audit import AuditReport, audit
    from embedlog.pipeline.load import load

_HOMES = {"AuditReport": "auditing", "audit": "auditing", "load": "loading"}

__all__ = ["AuditReport", "audit", "load"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: `--help` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'embedlog.pipeline' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"embedlog.pipeline.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
