"""The rows of a batch with the sizes that Kafka's Python clients have in their records."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from embedlog.batch import Batch
from embedlog.consumer.deserialize import RowLists
from embedlog.schemas.reading import TypedReader


class SizedRowLists(RowLists):
    """Rows with the sizes that their keys and values have before they are deserialized."""

    __slots__ = ("key_sizes", "value_sizes")

    def __init__(
        self, batch: Batch, position: int, verify: bool, typed: TypedReader | None = None
    ) -> None:
        super().__init__(batch, position, verify, typed)
        # `keep` drops rows at the end only, after this: `zip` ignores their sizes.
        self.key_sizes, self.value_sizes = _sizes(self.keys), _sizes(self.values)


def _sizes(items: list[bytes | None]) -> Iterable[int]:
    absent = items.count(None)
    if absent == len(items):
        return repeat(-1)
    if absent or not isinstance(items[0], bytes):
        return [len(item) if isinstance(item, bytes) else -1 for item in items]
    return list(map(len, items))  # type: ignore[arg-type]
