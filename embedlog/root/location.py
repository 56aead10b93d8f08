"""What a program passes as the path of a log: a directory, as a path or as a ``file:`` URL."""

from __future__ import annotations

import os
import re

from embedlog.errors import NotALogError

_URL = re.compile(r"(?s)(?P<scheme>[A-Za-z][\w+.-]+):(//(?P<host>[^/?#]*))?(?P<path>.*)")
_LOCAL_SCHEMES = ("file", "embedlog")
_LOCAL_HOSTS = ("", "localhost")
_BROKERS = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:]+\]):\d{1,5}/?")
_WINDOWS = re.compile(r"[A-Za-z]:(?:[\\/]|$)|\\\\")
_LOCAL_DISK = "Pass a directory on a local disk, such as 'data/log'."


def directory_of(path: str | bytes | os.PathLike[str]) -> str:
    """Return the absolute path of the directory that a program names.

    Accepts paths, ``file:///path`` and ``embedlog:///path``.  A text that looks like an
    address or like a path of Windows is refused, even if there is a directory of that name:
    ``./localhost:9092`` and `pathlib.Path` objects are always paths.

    Raises:
        NotALogError: The text names something else than a local directory.
        TypeError: It is not a path.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"path must be a str or a Path of a directory, got {path!r}")
    directory = os.fsdecode(path)
    if not isinstance(path, os.PathLike):
        directory = _parse(directory)
    if "\0" in directory:
        raise NotALogError(
            f"No directory has a NUL in its name, got {directory!r}", todo=_LOCAL_DISK
        )
    return os.path.abspath(os.path.expanduser(directory))


def _parse(text: str) -> str:
    """Return the path in a text; raise if it is the address of something else."""
    if not text.strip():
        raise NotALogError(
            "The path of the log is empty", todo=f"{_LOCAL_DISK} For this directory, pass '.'."
        )
    if _WINDOWS.match(text):
        raise NotALogError(
            f"{text!r} is a path of Windows, and embedlog runs on Linux only",
            todo="In WSL 2, pass the path of a directory inside of it, such as '/home/me/log'.",
        )
    if all(map(_BROKERS.fullmatch, text.split(","))):
        raise NotALogError(
            f"{text!r} is the address of a broker, and embedlog connects to none",
            todo=f"{_LOCAL_DISK} A directory of that name is './{text}'.",
        )
    url = _URL.fullmatch(text)
    if url is None:
        return text
    if url["scheme"].lower() in _LOCAL_SCHEMES:
        return _path_of_url(text, url)
    if url["host"] is None:
        return text  # a name with a colon
    raise NotALogError(
        f"embedlog cannot open {text!r}: a log is a directory, and embedlog connects to nothing",
        todo=f"{_LOCAL_DISK} As a URL, it is written 'file:///path'.",
    )


def _path_of_url(text: str, url: re.Match[str]) -> str:
    from urllib.parse import unquote

    if (url["host"] or "").lower() not in _LOCAL_HOSTS or not url["path"].startswith("/"):
        raise NotALogError(
            f"{text!r} does not name an absolute path of this machine",
            todo=f"Write {url['scheme']}:///path, with three slashes.",
        )
    if "?" in url["path"] or "#" in url["path"]:
        raise NotALogError(
            f"{text!r} has a query or a fragment",
            todo="Pass options as arguments, such as durability='fsync'; in a name, write '?' as "
            "%3F and '#' as %23.",
        )
    return unquote(url["path"])
