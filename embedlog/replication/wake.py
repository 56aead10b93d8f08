"""The wake page of a log over several directories: that of the controller's directory."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from embedlog.errors import EmbedlogError, NotEnoughReplicasError, StorageError
from embedlog.files import WakePage
from embedlog.replication.controller import Controller
from embedlog.replication.directory import LogDirectory

LONGEST_WAIT: Final = 0.2
"""Seconds after which a waiter checks whether there is another controller, whose page counts."""


class ReplicatedWake(WakePage):
    """The pages of all directories; has the methods of `WakePage`."""

    def __init__(self, controller: Controller) -> None:
        # Not that of `WakePage`: it opens a page.
        self._controller = controller
        self._pages: dict[LogDirectory, WakePage] = {}
        self._joined_pages: list[WakePage] = []

    @property
    def _page(self) -> WakePage:
        while True:
            directory = self._controller.current().directory
            page = self._pages.get(directory)
            if page is not None:
                return page
            try:
                self._pages[directory] = WakePage(directory.files)
            except StorageError as error:
                if not directory.is_broken_by(error):
                    raise
                self._controller.take_offline({directory.id: error})

    @property
    def rings(self) -> bool:  # type: ignore[override]
        """As `WakePage.rings`."""
        return self._page.rings

    def join(self) -> None:
        """As `WakePage.join`."""
        page = self._page
        page.join()
        self._joined_pages.append(page)

    def leave(self) -> None:
        """As `WakePage.leave`."""
        with suppress(IndexError):
            self._joined_pages.pop().leave()

    def value(self) -> int:
        """As `WakePage.value`."""
        return self._page.value()

    def published(self) -> int:
        """As `WakePage.published`."""
        return self._page.published()

    def advance(self) -> None:
        """As `WakePage.advance`; what was committed stays so if too few directories are left."""
        with suppress(NotEnoughReplicasError):  # waiters look by themselves after a short time
            self._page.advance()

    def wait(self, seen: int, timeout: float) -> None:
        """As `WakePage.wait`, for a short time: then the caller looks again."""
        self._page.wait(seen, min(timeout, LONGEST_WAIT))

    def close(self) -> None:
        """As `WakePage.close`."""
        for page in self._pages.values():
            with suppress(EmbedlogError):
                page.close()
