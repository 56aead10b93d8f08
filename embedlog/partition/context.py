"""What every partition of an open log shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from embedlog.catalog import Catalog
from embedlog.errors import ReadOnlyError
from embedlog.files import Files, WakePage
from embedlog.files.reserve import Reserve
from embedlog.kv import Store
from embedlog.partition.open_files import OpenFiles

DURABILITIES = ("os", "fsync")
VISIBILITIES = ("append", "durable")


@dataclass(slots=True)
class Context:
    """The files, the databases and the options of one open log; `Root` creates it."""

    files: Files
    state: Store
    live: Store
    catalog: Catalog
    wake: WakePage
    reserve: Reserve
    open_files: OpenFiles
    clock: Callable[[], int]
    durability: str
    visibility: str
    lock_timeout: float
    root: str
    closed: bool = False
    """Set before the files and databases are closed: no operation may begin any more."""

    def check_writable(self) -> None:
        """Raise unless the log may be changed."""
        if not self.files.writable:
            raise ReadOnlyError("The log was opened with mode='r'", path=self.root)

    def check_appendable(self) -> None:
        """Raise unless records may be added: also while the disk is known to be full."""
        self.check_writable()
        if self.reserve.short:
            self.reserve.check()
