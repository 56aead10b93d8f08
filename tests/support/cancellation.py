"""Cancels a task at each of its awaits, one after another, before, while and after it waits.

A task that is cancelled gets `CancelledError` where it waits: before what it waits for has begun,
some steps of the loop later, or when it is there already but the task did not run since.  The
await is chosen by its number, so a run can be repeated.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import embedlog
from support import tiers
from support.roots import healthy

VALUES = [b"%d" % number for number in range(6)]


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
        for after in tiers.choose(quick=(1, None), all=(0, 1, 2, None)):
            plan = Cancelling(number, after)
            asyncio.run(case(plan))
        if not plan.reached:
            return number
        number += 1
        assert number < 200, "it waits again and again"


Case = Callable[["World", Cancelling], Coroutine[Any, Any, None]]


class Cases(dict[str, Case]):
    """Cases by the names of the methods that they call, such as ``Consumer.getone``."""

    def of(self, *methods: str) -> Callable[[Case], Case]:
        """Register a case."""

        def register(case: Case) -> Case:
            self.update(dict.fromkeys(methods, case))
            return case

        return register

    def run(self, method: str, path: Path) -> int:
        """Run the case of a method, with a cancellation at each of its awaits."""

        async def case(plan: Cancelling) -> None:
            async with World(path) as world:
                await self[method](world, plan)

        return at_every_await(case)

    def once(self) -> list[str]:
        """Return a method of each case."""
        return list({case: method for method, case in self.items()}.values())


def public_async_methods(*kinds: type) -> set[str]:
    """Return the coroutine functions and asynchronous generators of classes, by name."""
    return {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, function in inspect.getmembers(kind)
        if (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function))
        and (not name.startswith("_") or name.startswith("__"))
    } | {f"{kind.__name__}.__await__" for kind in kinds if hasattr(kind, "__await__")}


class World:
    """A log in which another task appends while the call under test waits."""

    def __init__(self, path: Path) -> None:
        self.path = path / "log"

    async def __aenter__(self) -> Self:
        self.log = embedlog.open(self.path, maintenance=False)
        self.log.create_topic("t", exist_ok=True)
        self.base = len(self.log.topic("t"))
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.log.root.closed:
            healthy(self.log.root)
        self.log.close()

    def append(self, values: Sequence[bytes]) -> None:
        """Append records."""
        with self.log.producer() as producer:
            for value in values:
                producer.send("t", value)

    def append_soon(self, values: Sequence[bytes]) -> None:
        """Append records while the call under test waits."""
        asyncio.get_running_loop().call_later(0.002, self.append, values)

    def values(self) -> list[bytes]:
        """Return the values of all records since the world began."""
        return [record.value for record in self.log.topic("t")[self.base :]]

    def all_values(self) -> list[bytes]:
        """Return the values of all records, also of those from before the world began."""
        return [record.value for record in self.log.topic("t")]

    def consumer(self, **config: Any) -> embedlog.Consumer:
        """Return a consumer of the topic that is assigned its partition."""
        consumer = self.log.consumer("t", **config)
        consumer.poll(0)
        return consumer


async def check_rest(consumer: Any, taken: list[bytes], expected: list[bytes]) -> None:
    """Check that a consumer returns what was not taken yet, each record once."""
    while len(taken) < len(expected):
        for records in (await consumer.getmany(timeout_ms=60_000)).values():
            taken += [record.value for record in records]
    assert taken == expected
