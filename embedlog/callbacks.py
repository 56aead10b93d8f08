"""Functions of a program that are called for what they do: a call must run them.

A call of an ``async def`` function, or of a generator, runs nothing and only returns an object,
so what the function should do would never happen, in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any


def check_callback(
    function: object, name: str, *, iterated: bool = False, awaited: bool = False
) -> None:
    """Raise unless a call of a function runs it.

    Args:
        function: The function.
        name: What the program calls it.
        iterated: Whether the result is iterated, so that it may be a generator.
        awaited: Whether the result is awaited, so that it may be an ``async def`` function.

    Raises:
        TypeError: It is not callable, an ``async def`` function, or a generator.
    """
    if not callable(function):
        raise TypeError(f"{name} must be callable, got {function!r}")
    import inspect

    called = type(function).__call__
    kinds: list[Callable[[Any], bool]] = [inspect.isasyncgenfunction]
    if not awaited:
        kinds.append(inspect.iscoroutinefunction)
    if not iterated:
        kinds.append(inspect.isgeneratorfunction)
    if any(is_kind(function) or is_kind(called) for is_kind in kinds):
        raise _never_runs(name, function)


def check_ran(result: object, name: str) -> None:
    """Raise if a call returned an object that has yet to run, as a lambda around one may.

    Raises:
        TypeError: It did.
    """
    if isinstance(result, (CoroutineType, GeneratorType, AsyncGeneratorType)):
        if isinstance(result, CoroutineType):
            result.close()  # so that Python does not warn of it, too
        raise _never_runs(name, result)


def _never_runs(name: str, what: object) -> TypeError:
    return TypeError(
        f"{name} must do its work when it is called, got {what!r}: an async function or a "
        "generator only returns an object that nothing would run. Write it with `def` and without "
        "`yield`; it may call asyncio.run."
    )
