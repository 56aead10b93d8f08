"""The log that a bootstrap address names, opened once per process and shared by all clients."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from embedlog.errors import EmbedlogError, InvalidConfigError
from embedlog.forks import new_lock

if TYPE_CHECKING:
    from embedlog.api import Log
    from embedlog.producer import Producer

_LOGGER = logging.getLogger("embedlog.kafka")

SCHEME = "embedlog"


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_OPTIONS: Mapping[str, Any] = {
    "auto_create_topics": _switch,
    "durability": str,
    "lock_timeout": float,
    "maintenance": _switch,
    "must_exist": _switch,
    "unsafe_filesystem": _switch,
    "visibility": str,
}
"""The options of `embedlog.open` that an address may have, and how their text is read."""


class LogAddress(NamedTuple):
    """The directory of a log, and the options to open it with."""

    path: str
    options: tuple[tuple[str, Any], ...] = ()


def log_address(servers: Any) -> LogAddress | None:
    """Return the log that ``bootstrap_servers`` names; None if it names brokers.

    Args:
        servers: ``"embedlog:///path?durability=fsync"``, a directory (a `Path`, or a str with
            a slash), or ``host:port``; or a list of one of these, or of brokers.

    Raises:
        InvalidConfigError: A list names a log and something else, or the address is not valid.

    >>> log_address("embedlog:///data/log?durability=fsync")
    LogAddress(path='/data/log', options=(('durability', 'fsync'),))
    >>> log_address("localhost:9092,localhost:9093")
    """
    return parse(servers) if _redirect is None else _redirect


def parse(servers: Any) -> LogAddress | None:
    """Return the log that an address names itself, also while `patch` redirects all of them."""
    is_list = isinstance(servers, Collection) and not isinstance(servers, str | os.PathLike)
    items = list(servers) if is_list else [servers]
    addresses = [_parse_one(item) for item in items]
    if len(addresses) > 1 and any(addresses):
        raise InvalidConfigError(
            f"bootstrap_servers names a log and something else: {items!r}",
            todo="Name one log, or brokers.",
        )
    return addresses[0] if addresses else None


def _parse_one(server: Any) -> LogAddress | None:
    if isinstance(server, os.PathLike):
        return LogAddress(_absolute(os.fspath(server)))
    if not isinstance(server, str):
        return None
    scheme, separator, _ = server.partition("://")
    if not separator:
        # A host name has no slash, and a relative directory is written ./name.
        is_path = "/" in server or server in (".", "..", "~")
        return LogAddress(_absolute(server)) if is_path else None
    if scheme.lower() not in (SCHEME, "file"):
        return None
    url = urlsplit(server)
    if url.netloc or url.path in ("", "/"):
        raise InvalidConfigError(
            f"The address {server!r} has no absolute path",
            todo=f"Write three slashes: {SCHEME}:///path/of/the/log.",
        )
    if url.fragment:
        raise InvalidConfigError(
            f"The address {server!r} has a '#'",
            todo="In the path of an address, write %23 for it, %3F for '?', and %25 for '%'.",
        )
    options = parse_qsl(url.query, keep_blank_values=True)
    return LogAddress(_absolute(unquote(url.path)), tuple(_option(*pair) for pair in options))


def _absolute(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def _option(name: str, text: str) -> tuple[str, Any]:
    if name not in _OPTIONS:
        raise InvalidConfigError(
            f"The address of a log has no option {name!r}", todo=f"Use {', '.join(_OPTIONS)}."
        )
    try:
        return name, _OPTIONS[name](text)
    except ValueError:
        raise InvalidConfigError(f"The option {name} of an address cannot be {text!r}") from None


# Redirection, for `patch`

_redirect: LogAddress | None = None


def redirect(address: LogAddress | None) -> None:
    """Have every address name this log; None ends that."""
    global _redirect
    _redirect = address


# Open logs


class _SharedLog:
    """A log that clients of this process have open."""

    def __init__(self, log: Log, *, owned: bool) -> None:
        self.log = log
        self.owned = owned
        """Whether the last client closes it; False if the program itself opened it."""
        self.clients = 0


_shared: dict[str, _SharedLog] = {}
_lock = new_lock()


class LogHandle:
    """One client's hold on a shared log, which is closed with its last handle.

    A client that is collected without being closed gives the log back too.
    """

    def __init__(self, path: str, log: Log, client: object) -> None:
        self.log = log
        self._closing = ExitStack()
        self.close = weakref.finalize(client, _release, path, log, self._closing)
        """Gives the log back; may be repeated."""
        # At the exit of the interpreter logs are closed anyway.
        self.close.atexit = False

    def producer(self, **config: Any) -> Producer:
        """Make a producer of the log, which is closed before the log is given back.

        If the client is collected, the producer writes for a second, as kafka-python's does.
        """
        producer: Producer = self.log.producer(**config)
        self._closing.callback(producer.close, 1.0)
        return producer

    @contextmanager
    def closed_after_error(self) -> Iterator[None]:
        """Give the log back if the block, which makes the client, raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _release(path: str, log: Log, closing: ExitStack) -> None:
    try:
        closing.close()
    except EmbedlogError as error:
        _LOGGER.warning("A producer that was not closed lost records: %s", error)
    finally:
        with _lock:
            shared = _shared.get(path)
            if shared is not None and shared.log is log:
                shared.clients -= 1
                if not shared.clients:
                    del _shared[path]
                    if shared.owned:
                        log.close()


def attach(address: LogAddress, client: object) -> LogHandle:
    """Open the log of an address, or share it if this process has it open already.

    If the program itself opened it (`embedlog.open`), that log is used, with its clock, and
    closing clients leaves it open.

    Raises:
        InvalidConfigError: The log is open in this process with other options.
        EmbedlogError: As `embedlog.open`.
    """
    with _lock:
        shared = _shared.get(address.path)
        if shared is None or shared.log.root.closed:
            shared = _shared[address.path] = _open(address)
        # Before anything else: the last of the other clients may be collected at any time.
        shared.clients += 1
        handle = LogHandle(address.path, shared.log, client)
        with handle.closed_after_error():
            _check_options(shared.log, address)
        return handle


def _open(address: LogAddress) -> _SharedLog:
    from embedlog.api.log import open as open_log
    from embedlog.api.log import open_logs

    for log in open_logs():
        if _can_share(log, address.path):
            return _SharedLog(log, owned=False)
    return _SharedLog(open_log(address.path, **dict(address.options)), owned=True)


def _can_share(log: Log, path: str) -> bool:
    root = log.root
    return not root.closed and root.mode == "rw" and os.path.realpath(root.path) == path


def _check_options(log: Log, address: LogAddress) -> None:
    names = {"auto_create_topics": "auto_create"}
    for name, value in address.options:
        current = getattr(log.root, names.get(name, name), value)
        if current != value and name != "must_exist":  # the log is open, so it exists
            raise InvalidConfigError(
                f"The log is open in this process with {name}={current}, not {value}",
                path=address.path,
                todo="Use the same options in all addresses of a process.",
            )
