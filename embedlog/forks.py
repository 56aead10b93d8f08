"""What a fork waits for: steps of other threads that a child must not find half done.

A child that is forked while another thread imports a module can never import it: a thread that
the child does not have holds the lock of the import.  So a fork waits for the imports of this
package, wherever they are: an ``import`` in a function, or one in a library that is called, as
Arrow imports pandas.  It also waits for functions that are marked with `finished_before_forks`.
The other threads pay nothing for this: the thread that forks looks at where they are.

Locks of `new_lock` are free in the child, whatever the other threads did.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["cached_property", "finished_before_forks", "new_lock"]

_SECONDS = 10.0
"""The longest step that a fork waits for.  An import that runs a whole program never ends."""
_F = TypeVar("_F", bound=Callable[..., object])
_marked: set[CodeType] = set()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def finished_before_forks(function: _F) -> _F:
    """Mark a function that is short and waits for no lock: no fork happens in the middle of it."""
    _marked.add(function.__code__)
    return function


def new_lock() -> threading.RLock:
    """Return a lock that is free in a forked child, unless the thread that forks holds it.

    For what the child goes on with: an object that it drops may have any lock.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property  # noqa: TID251 - that one has no lock
else:

    class cached_property:  # noqa: N801
        """That of `functools`, which until Python 3.12 computes under one lock of all instances.

        A child that is forked meanwhile would wait for that lock for ever.
        """

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self._function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._function(instance)
            return value


def _is_in_a_step(frame: FrameType | None) -> bool:
    """Return True if a thread is in a marked function, or in an import of this package."""
    importing = False
    while frame is not None:
        if frame.f_code in _marked:
            return True
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            importing = True
        elif importing and str(frame.f_globals.get("__name__")).startswith("embedlog."):
            return True
        frame = frame.f_back
    return False


def _frames_without(this: int) -> list[FrameType]:
    """Return what the other threads are doing, without a collection of garbage meanwhile.

    One could let another thread run, which would wait for ever for a lock that CPython holds here
    (gh-106883).
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        return [frame for thread, frame in sys._current_frames().items() if thread != this]
    finally:
        if is_enabled:
            gc.enable()


def _before_fork() -> None:
    this, until = threading.get_ident(), time.monotonic() + _SECONDS
    # The hook of logging runs before, and takes a lock that imports need which get a logger.
    lock: Any = getattr(sys.modules.get("logging"), "_lock", None)
    is_held = lock is not None and lock._is_owned()
    while time.monotonic() < until:
        # After a sleep, this thread keeps the interpreter for longer than the fork takes.
        time.sleep(0)
        others = _frames_without(this)
        if not any(map(_is_in_a_step, others)):
            return
        del others
        if is_held:
            lock.release()
        time.sleep(0.001)
        if is_held:
            lock.acquire()


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        # As `threading` does with its own.
        if not lock._is_owned():
            lock._at_fork_reinit()


# Modules with other hooks import this one first, so theirs run before: they may wait for locks.
os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
