"""The records of one topic that `send` collects before they become batches."""

from __future__ import annotations

from typing import Any

from embedlog.producer.delivery import Delivery, DeliveryQueue
from embedlog.producer.row_batches import Rows


class OpenBatch(Delivery):
    """Records that `send` collects, column by column, until a drain encodes them."""

    __slots__ = (
        "explicit_partitions",
        "free",
        "headers",
        "keys",
        "opened_at",
        "reserved",
        "values",
    )

    def __init__(self, queue: DeliveryQueue) -> None:
        # Not super().__init__: one is created for every record that a caller waits for.
        self.queue, self.deadline = queue, 0.0
        self.batches, self.starts, self.timestamps, self.callbacks = [], [], [], []
        self.order = self.positions = self.error = self.metadata = None
        self.sealed = False
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] = []
        self.headers: dict[int, Any] = {}
        """By row; most records have none."""
        self.explicit_partitions: dict[int, int] = {}
        """By row, for records whose caller named the partition."""
        self.reserved = self.free = 0
        """Bytes of the buffer pool that it holds, and how many of them are unused."""
        self.opened_at = 0.0

    @property
    def size(self) -> int:
        """About how many bytes were collected."""
        return self.reserved - self.free

    def add_row(
        self,
        value: bytes | None,
        key: bytes | None,
        timestamp: int,
        headers: Any,
        partition: int | None,
    ) -> int:
        """Add a record and return its row; `send` does the same inline for most records."""
        row = len(self.values)
        if headers:
            self.headers[row] = headers
        if partition is not None:
            self.explicit_partitions[row] = partition
        self.keys.append(key)
        self.timestamps.append(timestamp)
        # Last: `drop_partial_row` takes a record without a value for an interrupted one.
        self.values.append(value)
        return row

    def drop_partial_row(self) -> None:
        """Remove the record of an interrupted `send`, which only some of the columns have."""
        count = min(len(self.values), len(self.keys), len(self.timestamps))
        for column in (self.values, self.keys, self.timestamps):
            del column[count:]
        for by_row in (self.headers, self.explicit_partitions):
            by_row.pop(count, None)

    def rows(self) -> Rows:
        """Return the records."""
        headers = None
        if self.headers:
            headers = [self.headers.get(row) for row in range(len(self.values))]
        keys = None if self.keys.count(None) == len(self.keys) else self.keys
        return Rows(self.values, keys, self.timestamps, headers)

    def seal(self) -> None:
        """Drop the records: they are in batches now, and no more are added."""
        self.values = self.keys = []
        self.headers = self.explicit_partitions = {}
        self.sealed = True
