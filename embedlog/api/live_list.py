"""A list that is read at each use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class LiveList(Sequence[T]):
    """A sequence with the items as of each call, such as the directories of a log.

    It equals a list with the same items; ``list(...)`` keeps them.
    """

    def _items(self) -> list[T]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._items())

    def __iter__(self) -> Iterator[T]:
        return iter(self._items())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._items()[index]

    def __eq__(self, other: object) -> bool:
        return self._items() == (other._items() if isinstance(other, LiveList) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._items())
