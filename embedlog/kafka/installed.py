"""Modules of kafka-python, if it is installed."""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType
from typing import Any

from embedlog.kafka.bootstrap import SCHEME


@functools.cache
def kafka_python(name: str = "kafka") -> ModuleType | None:
    """Return a module of kafka-python; None if it is not installed, or has no such module.

    The answer is kept: later, `patch` may have put other modules under these names.
    """
    try:
        # Its import uses what Python deprecates, which would end programs run with -W error.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(name)
    except ImportError:
        return None
    return None if module.__name__.startswith("embedlog.") else module


def pick(module: str, name: str, default: Any) -> Any:
    """Return kafka-python's class of that name; ``default`` if it has none."""
    return getattr(kafka_python(module), name, default)


@functools.cache
def broker_client(name: str) -> Any:
    """Return kafka-python's own client, for brokers.

    Raises:
        ImportError: kafka-python is not installed.
    """
    client = getattr(kafka_python(), name, None)
    if client is None:
        raise ImportError(
            f"A {name} for brokers needs kafka-python: pip install kafka-python. For a log, set "
            f'bootstrap_servers="{SCHEME}:///path/of/the/log".',
            name="kafka",
        )
    return client
