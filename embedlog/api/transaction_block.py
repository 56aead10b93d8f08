"""`log.transaction`: a block whose records become visible together, or never."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Generic

from embedlog.errors import EmbedlogError
from embedlog.producer import Producer
from embedlog.record import K, V
from embedlog.tasks import in_thread


class Transaction(Generic[K, V]):
    """A context manager, also for ``async with``, that yields the producer of a transaction.

    Args:
        take: Returns the producer, whose transactions are initialized.
        give_back: Gets the producer when the block has ended.
    """

    def __init__(
        self,
        take: Callable[[], Producer[K, V]],
        give_back: Callable[[Producer[K, V]], object],
    ) -> None:
        self._take, self._give_back = take, give_back
        self._producer: Producer[K, V] | None = None

    def __enter__(self) -> Producer[K, V]:
        producer = self._take()
        try:
            producer.begin_transaction()
        except BaseException:
            self._give_back(producer)
            raise
        self._producer = producer
        return producer

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        producer, self._producer = self._producer, None
        assert producer is not None, "it was entered"
        try:
            if error is None:
                producer.commit_transaction()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None:
                with suppress(EmbedlogError):
                    producer.abort_transaction()
            self._give_back(producer)

    async def __aenter__(self) -> Producer[K, V]:
        try:
            return await in_thread(self.__enter__)
        except BaseException as error:
            if self._producer is not None:  # The task was cancelled meanwhile.
                await in_thread(self.__exit__, None, error, None)
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        await in_thread(self.__exit__, kind, error, _)

    def __await__(self) -> Generator[Any, None, Producer[K, V]]:
        """Begin it; the program commits or aborts with the producer."""
        return self.__aenter__().__await__()
