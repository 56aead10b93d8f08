"""How much a run of the tests does: `pytest --tier=quick`, `test`, `all` or `nightly`.

Each tier runs what the smaller ones run, and more of it.  A test runs in every tier, unless
`@pytest.mark.tier("all")` or its folder (`FOLDERS`) says which one is the first.  A test that
tries many cases takes their number from `choose`, or a `sample` of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

TIERS = ("quick", "test", "all", "nightly")
FOLDERS = {"crash": "test", "model": "test", "spark": "test", "stress": "test"}
"""The tier in which the tests of a folder run first, if they have no mark of their own."""
EXAMPLES = {"quick": 10, "test": 10, "all": 200, "nightly": 2_000}
"""How many examples hypothesis tries."""

_tier = "test"


def use(tier: str) -> None:
    """Let this process, and those that it forks, run a tier; `tests/conftest.py` calls it."""
    global _tier
    _tier = tier


def runs(first: str) -> bool:
    """Whether this run does what the tier `first` is the first to do."""
    return TIERS.index(_tier) >= TIERS.index(first)


def choose(**values: T) -> T:
    """Return the value for the tier of this run, or for the nearest smaller one with a value.

    ``choose(test=40, all=400, nightly=10_000)``: the smallest tiers may be left out.
    """
    fitting = [tier for tier in TIERS if tier in values and runs(tier)]
    return values[fitting[-1] if fitting else min(values, key=TIERS.index)]


def sample(cases: Sequence[T], most: int) -> list[T]:
    """Return at most so many of the cases; from `all` on, return all of them.

    The first, the last (unless one is all), and between them one of each of so many equal
    stretches.  Which one is chosen at random, but the same in each run: at equal distances all
    might be alike, since the kinds of cases often take turns.
    """
    if runs("all") or len(cases) <= most:
        return list(cases)
    if most == 1:
        return [cases[0]]
    dice, inner, stretches = random.Random(most), cases[1:-1], most - 2
    bounds = [number * len(inner) // max(stretches, 1) for number in range(stretches + 1)]
    chosen = [inner[dice.randrange(low, high)] for low, high in pairwise(bounds)]
    return [cases[0], *chosen, cases[-1]]
