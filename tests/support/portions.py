"""How tests are handed out to the processes that run them (`--dist loadgroup`)."""

from __future__ import annotations

from itertools import count
from typing import Any

from xdist.scheduler import LoadGroupScheduling

from support import tiers

SIZE = 10
"""How many tests of a file are handed out together."""


class Scopes:
    """The portions of tests, by their ids in the order in which they are collected."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._numbers: dict[str, count[int]] = {}

    def of(self, nodeid: str, group: str) -> str:
        """Return the portion of a test; `group` is its group, or its own id."""
        if nodeid not in self._known:
            file = nodeid.partition("::")[0]
            slow = not tiers.FOLDERS.keys().isdisjoint(file.split("/"))
            alone = slow or group != nodeid
            number = 0 if alone else next(self._numbers.setdefault(file, count())) // SIZE
            self._known[nodeid] = group if alone else f"{file} {number}"
        return self._known[nodeid]


class Portions(LoadGroupScheduling):
    """Tests in the order in which they are collected, a few of a file at once; groups as a whole.

    Without a group each test is a unit of work, and after each test xdist counts all units that
    are done: with thousands of them that takes longer than many a test.  The tests of the folders
    in `tiers.FOLDERS` take long, so they are single ones, and early.
    """

    def __init__(self, config: Any, log: Any) -> None:
        # Otherwise the largest units are the first ones, and the slow tests the last.
        config.option.loadscopereorder = False
        super().__init__(config, log)
        self._portions = Scopes()

    def _split_scope(self, nodeid: str) -> str:
        return self._portions.of(nodeid, super()._split_scope(nodeid))
