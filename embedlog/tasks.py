"""What the asynchronous faces of the log and of its clients share: calls that wait, in threads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Generator
from threading import get_ident
from typing import Any, ParamSpec, TypeVar

from embedlog.lazy import asyncio

P = ParamSpec("P")
R = TypeVar("R")


class _Done:
    """What can be awaited, and is done."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


DONE = _Done()
"""What calls return that a program may await, although they have done all."""


async def in_thread(call: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
    """Make a call that may wait for the disk in a thread of the loop's pool.

    A call is not left half done: a cancellation is raised when the call has ended, and what the
    call returned or raised is then dropped.
    """
    task = asyncio.ensure_future(asyncio.to_thread(call, *args, **named))
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # or asyncio reports that nobody looked at it
        raise cancelled
    return task.result()


def run_to_end(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that waits for nothing, as the synchronous face does.

    Raises:
        RuntimeError: It waits.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("A synchronous call cannot wait for a coroutine")


def has_running_loop() -> bool:
    """Return whether this thread runs an event loop."""
    return "asyncio" in sys.modules and asyncio._get_running_loop() is not None


def current_caller() -> object:
    """Return the running task; the number of the thread without one."""
    return (asyncio.current_task() if has_running_loop() else None) or get_ident()
