"""How tests are handed out to the processes that run them (`--dist loadgroup`)."""

from __future__ import annotations

from itertools import count
from typing import Any

from xdist.scheduler import LoadGroupScheduling

from support import tiers

SIZE = 10
"""How many tests of a file are handed out together."""


class Portions(LoadGroupScheduling):
    """Tests in the order in which they are collected, a few of a file at once; groups as a whole.

    One by one they are, without a group, seven thousand units of work, all of which xdist counts
    after each test.  Those of the folders of `tiers.FOLDERS` take long, so they are single ones.
    """

    def __init__(self, config: Any, log: Any) -> None:
        # The largest units would be the first, and so the slow tests the last ones.
        config.option.loadscopereorder = False
        super().__init__(config, log)
        self._scopes: dict[str, str] = {}
        self._numbers: dict[str, count[int]] = {}

    def _split_scope(self, nodeid: str) -> str:
        """Return what stands for all tests of a portion."""
        if nodeid not in self._scopes:
            self._scopes[nodeid] = self._scope(nodeid)
        return self._scopes[nodeid]

    def _scope(self, nodeid: str) -> str:
        group: str = super()._split_scope(nodeid)
        file = nodeid.partition("::")[0]
        if group != nodeid or tiers.FOLDERS.keys() & set(file.split("/")):
            return group
        return f"{file} {next(self._numbers.setdefault(file, count())) // SIZE}"
