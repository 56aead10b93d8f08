"""Cancels a task at each of its awaits, one after another, before, while and after it waits.

A task that is cancelled gets `CancelledError` where it waits: before what it waits for has begun,
some steps of the loop later, or when it is there already but the task did not run since.  The
await is chosen by its number, so a run can be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any


@dataclass
class Cancelling:
    """Runs a coroutine, and cancels it at one of its awaits.

    Args:
        at: The number of the await, from 0; those of coroutines that it awaits count too.
        after: How many steps of the loop later; None when what it awaits is there.
    """

    at: int
    after: int | None
    reached = False
    """Whether there was such an await."""
    outcome: Any = None
    """What the coroutine returned; None if it was cancelled."""

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> bool:
        """Return whether the coroutine ended normally, in spite of the cancellation or before."""
        try:
            self.outcome = await _Steps(self, coroutine)
        except asyncio.CancelledError:
            assert self.reached, "nobody cancelled it"
            return False
        return True


class _Steps:
    def __init__(self, plan: Cancelling, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._plan, self._coroutine, self._ended = plan, coroutine, False
        self._task = asyncio.current_task()

    def _cancel(self, after: int) -> None:
        if after:
            asyncio.get_running_loop().call_soon(self._cancel, after - 1)
        elif not self._ended:
            assert self._task is not None
            self._task.cancel()

    def __await__(self) -> Generator[Any, Any, Any]:
        plan, number = self._plan, 0
        step: Callable[[], Any] = lambda: self._coroutine.send(None)  # noqa: E731
        while True:
            try:
                awaited = step()
            except StopIteration as end:
                self._ended = True
                return end.value
            except BaseException:
                self._ended = True
                raise
            chosen, number = number == plan.at, number + 1
            plan.reached |= chosen
            try:
                if chosen and plan.after is not None:
                    self._cancel(plan.after)
                yield awaited
            except BaseException as error:  # noqa: BLE001 - the coroutine gets it
                step = _thrown(self._coroutine, error)
            else:
                step = lambda: self._coroutine.send(None)  # noqa: E731
                if chosen and plan.after is None:
                    step = _thrown(self._coroutine, asyncio.CancelledError())


def _thrown(coroutine: Coroutine[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: coroutine.throw(error)


def at_every_await(case: Callable[[Cancelling], Coroutine[Any, Any, None]]) -> int:
    """Run a case with a cancellation at each await, in a loop of its own; return how many.

    The case runs one call with `Cancelling.run`, and checks what is left.
    """
    number = 0
    while True:
        for after in (0, 1, 2, None):
            plan = Cancelling(number, after)
            asyncio.run(case(plan))
        if not plan.reached:
            return number
        number += 1
        assert number < 200, "it waits again and again"
