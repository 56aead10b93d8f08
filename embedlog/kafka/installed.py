"""kafka-python and confluent_kafka themselves, if they are installed."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from embedlog.kafka.bootstrap import SCHEME

_PROJECTS = {"kafka": "kafka-python", "confluent_kafka": "confluent-kafka"}
"""What pip calls the packages."""


@functools.cache
def installed(name: str) -> ModuleType | None:
    """Return a module of the libraries; None if they are not installed, or have no such module.

    The answer is kept: later, `patch` may have put other modules under these names.
    """
    try:
        # kafka-python uses what Python deprecates, which would end programs run with -W error.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(name)
    except ImportError:
        return None
    return None if module.__name__.startswith("embedlog.") else module


def pick(module: str, name: str, default: Any) -> Any:
    """Return the class of that name in an installed module; ``default`` if there is none."""
    return getattr(installed(module), name, default)


def use_installed(namespace: dict[str, Any], module: str, names: Iterable[str]) -> None:
    """Replace names of a module by those of an installed one, as far as it has them."""
    for name in names:
        namespace[name] = pick(module, name, namespace[name])


@functools.cache
def find_original(module: str, name: str) -> Any:
    """Return the library's own client, for brokers; None if the library is not installed.

    The answer is kept: later, `patch` may have put another class under this name.
    """
    return pick(module, name, None)


def original_class(module: str, name: str) -> Any:
    """Return the library's own client, for brokers.

    Raises:
        ImportError: The library is not installed.
    """
    client = find_original(module, name)
    if client is None:
        package = module.partition(".")[0]
        setting = "bootstrap_servers=" if package == "kafka" else '"bootstrap.servers": '
        project = _PROJECTS[package]
        raise ImportError(
            f"A {name} for brokers needs {project}: pip install {project}. For a log, set "
            f'{setting}"{SCHEME}:///path/of/the/log".',
            name=package,
        )
    return client
