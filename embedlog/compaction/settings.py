"""How much compaction may take: Kafka's ``log.cleaner.*``, settings of a broker there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from embedlog.errors import InvalidConfigError

PREFIX = "log.cleaner."


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanerSettings:
    """The limits of one compaction.

    >>> CleanerSettings.parse({"log.cleaner.dedupe.buffer.size": 1 << 20}).dedupe_buffer_size
    1048576
    """

    dedupe_buffer_size: int = 128 << 20
    """Bytes for the offsets of keys, 24 a key; with less than it needs it takes several passes."""

    io_buffer_load_factor: float = 0.9
    """How full that may become."""

    io_buffer_size: int = 4 << 20
    """Bytes to read at once; larger than Kafka's 512 KiB, as batches are."""

    io_max_bytes_per_second: float = inf
    """Read and write no more than this (log.cleaner.io.max.bytes.per.second)."""

    def __post_init__(self) -> None:
        for name in ("dedupe_buffer_size", "io_buffer_size", "io_max_bytes_per_second"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InvalidConfigError(f"{name} {value!r} is not above 0", setting=name)
        if not 0 < self.io_buffer_load_factor <= 1:
            raise InvalidConfigError(
                f"io_buffer_load_factor {self.io_buffer_load_factor!r} is not in 0..1",
                setting="io_buffer_load_factor",
            )

    @classmethod
    def parse(cls, settings: Mapping[str, object]) -> CleanerSettings:
        """Make settings of Kafka's names, in either spelling.

        Raises:
            InvalidConfigError: A name is unknown, or a value makes no sense.
        """
        given = {}
        for spelling, value in settings.items():
            name = spelling.replace("_", ".").removeprefix(PREFIX).replace(".", "_")
            if name not in cls.__slots__:
                known = ", ".join(PREFIX + one.replace("_", ".") for one in cls.__slots__)
                raise InvalidConfigError(f"no setting {spelling}; there are {known}")
            given[name] = value
        return cls(**given)  # type: ignore[arg-type]


class Pace:
    """Holds its caller back to so many bytes a second.

    Args:
        bytes_per_second: How many.
        wait: Waits for so many seconds, or less if it is to end.
        monotonic: The clock.
    """

    def __init__(
        self,
        bytes_per_second: float = inf,
        wait: Callable[[float], object] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._monotonic = bytes_per_second, monotonic
        self._wait = wait or threading.Event().wait
        self._free = monotonic()
        """When what was done so far is paid for."""

    def spend(self, size: int) -> None:
        """Note that so many bytes were read or written, and wait until they are paid for."""
        if self._rate == inf:
            return
        now = self._monotonic()
        self._free = max(self._free, now) + size / self._rate
        if self._free > now:
            self._wait(self._free - now)
