"""What a server counts: a few numbers for each request, and none for each record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import add

from embedlog.errors import EmbedlogError
from embedlog.forks import new_lock
from embedlog.metrics import ERRORS, REQUESTS, Sample
from embedlog.server.error_codes import ApiError, code_of

_SUMS = ("requests-total", "request-bytes-total", "response-bytes-total", "total-time-ms-total")


class RequestCounts:
    """Requests by their API, and errors by their code; any thread may count."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._requests: dict[str, tuple[float, ...]] = {}
        """The sums of each API, and its longest time."""
        self._errors = Counter[str]()

    def request(self, api: str, received: int, sent: int, seconds: float) -> None:
        """Count a request that was answered, its bytes, those of the answer, and its time."""
        counted = 1, received, sent, seconds * 1000
        with self._lock:
            *sums, longest = self._requests.get(api, (0, 0, 0, 0.0, 0.0))
            self._requests[api] = *map(add, sums, counted), max(longest, counted[-1])

    def error(self, error: EmbedlogError | ApiError) -> None:
        """Count an error that an answer has as a code."""
        with self._lock:
            self._errors[code_of(error).name] += 1

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics."""
        with self._lock:
            requests, errors = dict(self._requests), dict(self._errors)
        for api, numbers in requests.items():
            for name, number in zip((*_SUMS, "total-time-ms-max"), numbers, strict=True):
                yield Sample(REQUESTS, name, number, {"request": api})
        for name, number in errors.items():
            yield Sample(ERRORS, "errors-total", number, {"error": name})
