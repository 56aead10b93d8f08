"""pyarrow, numpy, asyncio and logging, which are imported when an attribute is first used.

The import of the first two takes 0.4 s of CPU, which programs that read and write a few records
need not spend, and that of logging as long as a tenth of all modules that these need.  An
attribute that was used is kept in the module that stands for the library, so that later uses
cost the same as with the library itself.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from embedlog.forks import finished_before_forks

if TYPE_CHECKING:
    import asyncio
    import logging

    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

__all__ = ["asyncio", "logging", "np", "pa", "pc"]


@finished_before_forks
def _load(module: ModuleType, attribute: str) -> Any:
    library = importlib.import_module(module.__name__)
    if library.__name__ == "pyarrow":
        # At its first use Arrow's allocator sets up its memory, under a lock that a child that
        # is forked meanwhile would wait for.
        library.allocate_buffer(1)
    value = getattr(library, attribute)
    setattr(module, attribute, value)
    return value


def _lazy(name: str) -> ModuleType:
    # A plain module with a `__getattr__` (PEP 562): Python reads its attributes fastest.
    module = ModuleType(name)
    module.__getattr__ = partial(_load, module)  # type: ignore[method-assign]
    return module


def _ignore(*_: object, **__: object) -> None:
    pass


class _Logger:
    """A logger that is looked up when something is logged.

    As long as nothing has imported logging, no program has asked for what is less than a warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("debug", "info", "isEnabledFor") and "logging" not in sys.modules:
            return _ignore
        get = importlib.import_module("logging").getLogger
        return getattr(get(self._name), attribute)


if not TYPE_CHECKING:
    np, pa, pc, logging = map(_lazy, ("numpy", "pyarrow", "pyarrow.compute", "logging"))
    asyncio = _lazy("asyncio")
    vars(logging).update(getLogger=_Logger, DEBUG=10, INFO=20, WARNING=30)
