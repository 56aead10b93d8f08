"""Whether a constructor makes a client of a log, or returns the library's own, for brokers."""

from __future__ import annotations

import functools
import logging
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from embedlog.kafka.bootstrap import LogAddress

_LOGGER = logging.getLogger("embedlog.kafka")


class ClientType(ABCMeta):
    """The type of clients: those of brokers count as instances too."""

    def mro(cls) -> list[type]:
        """Return the bases in their order, without those that `rebased` replaces."""
        left_out = vars(cls).get("_left_out", ())
        return [kind for kind in super().mro() if kind not in left_out]

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return whether an object is a client of this kind, of a log or of brokers."""
        if super().__instancecheck__(instance):
            return True
        original = vars(cls).get("_original")
        return original is not None and isinstance(instance, original)


class Client(metaclass=ClientType):
    """A client of a log; its constructor returns the library's own client for brokers."""

    _original: ClassVar[Any]
    """The library's own client, for which it stands; set in each such class."""

    @classmethod
    def _address_of(cls, args: tuple[Any, ...], configs: Mapping[str, Any]) -> LogAddress | None:
        """Return the log that the settings of a constructor name; None if they name brokers."""
        raise NotImplementedError

    @classmethod
    def _with_base_for_brokers(cls) -> Any:
        """Return the library's own client, or for a program's subclass a copy derived from it."""
        client = next(kind for kind in cls.__mro__ if "_original" in vars(kind))
        return cls._original if cls is client else rebased(cls, client, cls._original)

    if not TYPE_CHECKING:  # the libraries' clients have no types, and the same methods

        def __new__(cls, *args: Any, **configs: Any) -> Any:
            """Return a client of the log, or of the brokers, that the settings name."""
            if "_original" in vars(cls) and cls._address_of(args, configs) is None:
                return cls._with_base_for_brokers()(*args, **configs)
            return super().__new__(cls)

    def __enter__(self) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        # A copy would have no settings, and so would look for brokers on localhost.
        raise TypeError(
            f"A {type(self).__name__} of a log cannot be copied or pickled: make another one, with "
            "the same settings"
        )


def or_uses_brokers(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate a constructor: a program's subclass becomes one of the library's, for brokers.

    Only here the settings are known: the constructor of the subclass may have other arguments.
    """

    @functools.wraps(init)
    def __init__(self: Client, *args: Any, **configs: Any) -> None:  # noqa: N807
        if self._address_of(args, configs) is None:
            original = self._original
            self.__class__ = self._with_base_for_brokers()
            original.__init__(self, *args, **configs)
        else:
            init(self, *args, **configs)

    return __init__


@functools.cache
def rebased(cls: type, base: type, replacement: Any) -> Any:
    """Return a subclass of a program's class that has another base in the place of its own.

    So ``super()`` in the methods of ``cls`` leads to ``replacement``.
    """
    left_out = [kind for kind in base.__mro__ if kind not in replacement.__mro__]
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_left_out": left_out}
    return ClientType(cls.__name__, (cls, replacement), namespace)


def log_ignored(names: Iterable[str]) -> None:
    """Log which settings of a client have no effect."""
    ignored = ", ".join(sorted(names))
    if ignored:
        _LOGGER.info("Settings without effect on a log are ignored: %s", ignored)
