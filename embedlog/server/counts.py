"""What a server counts: a few numbers for each request, and none for each record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from embedlog.errors import EmbedlogError
from embedlog.forks import new_lock
from embedlog.metrics import ERRORS, REQUESTS, Sample
from embedlog.server.error_codes import ApiError, code_of

_NAMES = ("requests", "request-bytes", "response-bytes", "total-time-ms")


class RequestCounts:
    """Requests by their API, and errors by their code; any thread may count."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._totals: dict[str, tuple[float, ...]] = {}
        self._longest_ms: dict[str, float] = {}
        self._errors = Counter[str]()

    def request(self, api: str, received: int, sent: int, seconds: float) -> None:
        """Count a request that was answered, its bytes, those of the answer, and its time."""
        counted = 1, received, sent, seconds * 1000
        with self._lock:
            before = self._totals.get(api, (0,) * len(counted))
            self._totals[api] = tuple(map(sum, zip(before, counted, strict=True)))
            self._longest_ms[api] = max(self._longest_ms.get(api, 0.0), seconds * 1000)

    def error(self, error: EmbedlogError | ApiError) -> None:
        """Count an error that an answer has as a code."""
        with self._lock:
            self._errors[code_of(error).name] += 1

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics."""
        with self._lock:
            totals, longest_ms = dict(self._totals), dict(self._longest_ms)
            errors = dict(self._errors)
        for api, numbers in totals.items():
            for name, number in zip(_NAMES, numbers, strict=True):
                yield Sample(REQUESTS, f"{name}-total", number, {"request": api})
            yield Sample(REQUESTS, "total-time-ms-max", longest_ms[api], {"request": api})
        for name, number in errors.items():
            yield Sample(ERRORS, "errors-total", number, {"error": name})
