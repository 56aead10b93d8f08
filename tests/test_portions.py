"""Tests are handed out in portions, those that belong together at once."""

from __future__ import annotations

import pytest

pytest.importorskip("xdist")

from support.portions import SIZE, Scopes


def test_tests_of_a_file_are_handed_out_some_at_a_time():
    """In their order; asked again, a test is in the same portion."""
    scopes = Scopes()
    ids = [f"tests/{file}.py::test[{n}]" for file in ("a", "b") for n in range(2 * SIZE + 1)]

    found = [scopes.of(each, each) for each in ids]

    assert found == [scopes.of(each, each) for each in ids]
    assert [found.count(each) for each in dict.fromkeys(found)] == [SIZE, SIZE, 1] * 2


def test_groups_stay_whole_and_slow_tests_single():
    """A group is one portion, however many files it is in."""
    scopes = Scopes()
    slow = [f"tests/crash/test_a.py::test[{n}]" for n in range(3)]

    assert [scopes.of(each, each) for each in slow] == slow
    assert scopes.of("tests/spark/test_b.py::test@spark", "spark") == "spark"
    assert scopes.of("tests/test_c.py::test@spark", "spark") == "spark"
