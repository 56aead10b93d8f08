"""`patch`: programs that import a client of Kafka run on a log, unchanged."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any, Self

from embedlog.errors import InvalidConfigError
from embedlog.forks import new_lock
from embedlog.kafka import bootstrap
from embedlog.kafka.client_type import rebased
from embedlog.kafka.library import is_installed, load

_CLIENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "kafka": {
        "KafkaAdminClient": ("kafka", "kafka.admin", "kafka.admin.client"),
        "KafkaConsumer": ("kafka", "kafka.consumer", "kafka.consumer.group"),
        "KafkaProducer": ("kafka", "kafka.producer", "kafka.producer.kafka"),
    },
    "aiokafka": {
        "AIOKafkaAdminClient": ("aiokafka.admin", "aiokafka.admin.client"),
        "AIOKafkaConsumer": ("aiokafka", "aiokafka.consumer", "aiokafka.consumer.consumer"),
        "AIOKafkaProducer": ("aiokafka", "aiokafka.producer", "aiokafka.producer.producer"),
    },
}
"""Where kafka-python and aiokafka have their clients."""
_OURS = {"kafka": "embedlog.kafka", "aiokafka": "embedlog.kafka.aiokafka"}

_patches: list[Patch] = []
"""Those in force; the last one with an address decides where clients go."""
_replaced = ExitStack()
"""Takes back what was replaced, once none is in force."""
_lock = new_lock()


class Patch:
    """The effect of a call of `patch`, until `unpatch` or the end of a ``with`` block."""

    def __init__(self, address: bootstrap.LogAddress | None) -> None:
        self.address = address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Take back what was replaced; may be repeated, and patches may end in any order."""
        with _lock:
            if self in _patches:
                _patches.remove(self)
            _redirect()
            if not _patches:
                _replaced.close()


def _redirect() -> None:
    addresses = [patch.address for patch in _patches if patch.address is not None]
    bootstrap.redirect(addresses[-1] if addresses else None)


def patch(servers: Any = None) -> Patch:
    """Have programs use a log, unchanged: they import ``kafka``, ``confluent_kafka``, ``aiokafka``.

    Args:
        servers: The log that every address names from now on, as ``"embedlog:///path"`` or a
            directory.  Without it, only addresses of that form lead to a log.

    Returns:
        A context manager, which takes everything back; so does `unpatch`.

    Raises:
        InvalidConfigError: ``servers`` does not name a log.
        ImportError: None of these libraries is installed.
    """
    address = None
    if servers is not None:
        address = bootstrap.parse(servers)
        if address is None:
            raise InvalidConfigError(f"{servers!r} does not name a log", todo="Pass its directory.")
    with _lock:
        if not _patches:
            _replace()
        applied = Patch(address)
        _patches.append(applied)
        _redirect()
    return applied


def unpatch() -> None:
    """Take back what `patch` did."""
    with _lock:
        while _patches:
            _patches[-1].undo()


def _replace() -> None:
    """Replace the clients of the libraries that are installed."""
    with ExitStack() as undo:
        libraries = [each for each in (*_CLIENTS, "confluent_kafka") if is_installed(each)]
        if not libraries:
            raise ImportError(
                "There is nothing to patch: neither kafka-python nor confluent-kafka nor aiokafka "
                'is installed: run pip install "embedlog[kafka-python]", '
                '"embedlog[confluent-kafka]" or "embedlog[aiokafka]"'
            )
        for library in libraries:
            ours = importlib.import_module(_OURS.get(library, "embedlog.kafka.confluent"))
            for name, places in _CLIENTS.get(library, {}).items():
                _replace_client(undo, name, places, getattr(ours, name))
        if is_installed("confluent_kafka"):
            _replace_confluent(undo)
        _replaced.push(undo.pop_all())


def _replace_confluent(undo: ExitStack) -> None:
    confluent = importlib.import_module("embedlog.kafka.confluent")
    modules = confluent.modules()
    replacements = {id(client._original): client for client in confluent.clients()}
    before = _replace_modules(undo, "confluent_kafka", modules)
    replacements |= {id(old): modules.get(name) for name, old in before.items()}
    _replace_references(undo, replacements)


def _replace_client(undo: ExitStack, name: str, places: tuple[str, ...], client: Any) -> None:
    """Have a class of kafka-python make clients of a log."""
    original = client._original
    for library in map(load, places):
        if getattr(library, name, None) is original:
            undo.callback(setattr, library, name, original)
            setattr(library, name, client)

    original_init = original.__init__

    @functools.wraps(original_init)
    def __init__(self: Any, *args: Any, **configs: Any) -> None:  # noqa: N807
        if bootstrap.log_address(configs.get("bootstrap_servers")) is None:
            original_init(self, *args, **configs)
        else:
            kind: Any = type(self)
            self.__class__ = client if kind is original else rebased(kind, original, client)
            client.__init__(self, *args, **configs)

    # For programs that have imported the class already, or derived classes from it.  Not __new__:
    # after that was set and deleted, Python refuses the arguments of the constructor.
    undo.callback(setattr, original, "__init__", original_init)
    original.__init__ = __init__


def _replace_modules(
    undo: ExitStack, package: str, modules: Mapping[str, ModuleType]
) -> dict[str, ModuleType]:
    """Have a package consist of these modules; others are imported when they are needed.

    Returns those that were imported before.
    """
    before = _set_modules(package, modules)
    undo.callback(_set_modules, package, before)
    return before


def _replace_references(undo: ExitStack, replacements: Mapping[int, Any]) -> None:
    """Replace what programs imported from confluent_kafka already.

    Its clients are classes of C, which cannot be made to lead elsewhere.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("confluent_kafka", "embedlog"):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            replacement = replacements.get(id(value))
            if value is not None and replacement is not None:
                undo.callback(setattr, module, attribute, value)
                setattr(module, attribute, replacement)


def _set_modules(package: str, modules: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Replace the modules of a package; return those that were imported before."""
    names = [name for name in list(sys.modules) if name.partition(".")[0] == package]
    before = {name: sys.modules.pop(name) for name in names}
    sys.modules.update(modules)
    return before
