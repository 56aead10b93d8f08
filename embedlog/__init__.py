"""Kafka's log as a Python library: a directory, and any number of processes."""

from __future__ import annotations

__version__ = "0.1.0"
