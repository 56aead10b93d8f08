"""confluent_kafka itself, if it is installed: for brokers, and for its types of arguments.

A program passes the same `TopicPartition` or `NewTopic` to a client on a log and to one on
brokers, which accepts only confluent_kafka's own types.  So these are used wherever they are
installed, and embedlog's equivalents only where they are not.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any


def installed(name: str) -> ModuleType | None:
    """Return a module of confluent_kafka, or None if that is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# Imported once, before `patch` puts embedlog's modules under these names.
CONFLUENT = {
    name: installed(name)
    for name in (
        *("confluent_kafka", "confluent_kafka.admin", "confluent_kafka.error"),
        *("confluent_kafka.serialization",),
    )
}


def use_installed(namespace: dict[str, Any], module: str, names: Iterable[str]) -> None:
    """Replace names of a module by those of confluent_kafka, as far as that is installed."""
    source = CONFLUENT[module]
    for name in names:
        namespace[name] = getattr(source, name, namespace[name])


def broker_client(module: str, name: str, args: tuple[Any, ...], config: dict[str, Any]) -> Any:
    """Return confluent_kafka's own client, for ``bootstrap.servers`` that names brokers.

    Raises:
        ImportError: confluent_kafka is not installed.
    """
    package = CONFLUENT[module]
    if package is None:
        raise ImportError(
            f"A {name} for brokers needs confluent_kafka: pip install confluent-kafka. For a log, "
            'set "bootstrap.servers" to "embedlog:///path/of/the/log".',
            name="confluent_kafka",
        )
    return getattr(package, name)(*args, **config)
