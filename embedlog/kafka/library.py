"""Kafka's Python libraries, whose types, errors and records the clients of a log use."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any, NamedTuple


class _Library(NamedTuple):
    name: str
    """As pip knows it; an extra of embedlog has the same name."""
    lowest: tuple[int, int]
    """The oldest version that is supported."""


_LIBRARIES = {
    "kafka": _Library("kafka-python", (3, 0)),
    "confluent_kafka": _Library("confluent-kafka", (2, 10)),
    "aiokafka": _Library("aiokafka", (0, 12)),
}


@functools.cache
def load(module: str) -> ModuleType:
    """Import a module of one of the libraries.

    The answer is kept: later, `patch` may have put other modules under these names.

    Raises:
        ImportError: The library is not installed, or it is too old.
    """
    package = module.partition(".")[0]
    library, lowest = _LIBRARIES[package]
    todo = f'run pip install "embedlog[{library}]"'
    try:
        # kafka-python uses what Python deprecates, which would end programs run with -W error.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            loaded = importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != package:
            raise  # of something that the library itself needs
        raise ImportError(f"{library} is not installed: {todo}", name=module) from error
    version = importlib.import_module(package).__version__
    if tuple(map(int, version.split(".")[:2])) < lowest:
        oldest = ".".join(map(str, lowest))
        raise ImportError(f"{library} {version} is older than {oldest}: {todo}", name=module)
    return loaded


def is_installed(package: str) -> bool:
    """Return whether a library is installed, in whatever version."""
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


def public_name(module: ModuleType, name: str) -> Any:
    """Return a name of a library's module, as an attribute of the module that stands for it."""
    # Not its path: the modules of a package would be imported a second time.
    if name.startswith("__"):
        raise AttributeError(f"module {module.__name__!r} has no public attribute {name!r}")
    return getattr(module, name)
