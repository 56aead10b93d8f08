"""How long tests wait for what must happen: seconds of an idle machine, times a common factor.

A test that waits for something must give up one day, and on a busy machine that day
is later.  The factor grows with the processes that want to run, and with the priority
that this process has been given.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping

_ATTEMPTS = 8
_AT_LEAST = 3.0
"""Also where nothing else runs: another process may begin to at any time."""
_AT_MOST = 200.0
_NICE_STEP = 1.25
"""How much less of a processor each step of `nice` gives, beside a process that has none."""


def factor() -> float:
    """Return by how much longer than on an idle machine something may take now."""
    with open("/proc/loadavg", encoding="ascii") as file:
        fields = file.read().split()
    wanting = max(float(fields[0]), float(fields[3].partition("/")[0]))
    crowd = wanting / len(os.sched_getaffinity(0))
    slower = _NICE_STEP ** os.nice(0) if crowd > 1 else 1.0
    return min(_AT_LEAST * max(1.0, crowd) * slower, _AT_MOST)


def patient(seconds: float) -> float:
    """Return how long to wait for what takes at most so many seconds on an idle machine."""
    return seconds * factor()


def until_enough(
    run: Callable[[int], Mapping[str, int]], required: dict[str, float]
) -> Counter[str]:
    """Run with the seeds 1, 2, ... until so much of each kind has happened; returns all that did.

    For runs that take a number of seconds: on a busy machine little happens in one.
    """
    done = Counter[str]()
    for seed in range(1, _ATTEMPTS + 1):
        done.update(run(seed))
        missing = {kind: done[kind] for kind, least in required.items() if done[kind] < least}
        if not missing:
            return done
    raise AssertionError(f"of {required} there were only {missing}")
