"""The version of embedlog, and what its jar was tested with; `jvm/build.py` writes both into it."""

from __future__ import annotations

__version__ = "0.1.0"

TESTED_SPARK_VERSIONS = ("4.1", "4.2", "4.3")
"""The versions of Spark that the tests run with; with others, Python reads the log."""
