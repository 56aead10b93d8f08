"""How the records of a group are handled: what a program passes to `run_group`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlog.config import GroupConfig
from embedlog.retry import OnError

if TYPE_CHECKING:
    from datetime import datetime


class Handling(NamedTuple):
    """How the records of a group are handled; the arguments of `run_group`."""

    handler: Callable[[Any], Any]
    on_error: OnError = "stop"
    concurrency: int = 1
    outputs: bool = False
    """Whether the handler returns records to send."""
    initializer: Callable[[], Any] | None = None
    delay: float = 0.0
    not_before: Callable[[Any], datetime | float | None] | None = None
    config: GroupConfig = GroupConfig()

    @property
    def is_async(self) -> bool:
        """Whether the handler is awaited."""
        import inspect  # Imported here: a program may not need it otherwise.

        handler = self.handler
        called = getattr(type(handler), "__call__", None)  # noqa: B004 - the method itself
        return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(called)

    @property
    def is_plain(self) -> bool:
        """Whether records are handled in the thread that polls, until the first one fails."""
        waits = self.delay > 0 or self.not_before is not None
        return self.on_error == "stop" and self.concurrency == 1 and not (waits or self.is_async)

    @property
    def dead_letter(self) -> str | None:
        """The topic of dead letters."""
        return self.config.errors_deadletterqueue_topic_name


def checked_output(output: object) -> tuple[Any, ...]:
    """Return what a handler returned for `Producer.send`.

    Raises:
        TypeError: It is no tuple.
    """
    if not isinstance(output, tuple):
        raise TypeError(
            "A handler with outputs=True must return tuples of topic, value and key, got "
            f"{output!r}"
        )
    return output
