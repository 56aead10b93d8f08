"""What the options of readers and of writers have in common."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

from embedlog.errors import InvalidConfigError


def absolute(path: str) -> str:
    """Return one spelling of a place on this host."""
    return os.path.abspath(os.path.expanduser(path.removeprefix("file://")))


def root(given: Mapping[str, str]) -> str:
    """Return where the log is, from options whose names are in small letters.

    Raises:
        InvalidConfigError: They do not say.
    """
    path = given.get("path", "").strip()
    if not path:
        raise InvalidConfigError(
            "the option 'path' is missing",
            todo="say where the log is: .option('path', '/data/log'), in the place of "
            "kafka.bootstrap.servers",
        )
    return absolute(path)


def refuse(who: str, name: str, known: Sequence[str], hint: str = "") -> NoReturn:
    """Raise for an option that is unknown, with the nearest known one.

    Raises:
        InvalidConfigError: Always.
    """
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    nearest = f"did you mean {lower[near[0]]!r}?" if near else f"there are {', '.join(known)}"
    raise InvalidConfigError(f"{who} has no option {name!r}", todo=hint or nearest)
