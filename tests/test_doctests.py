"""What the docstrings show is run, in the package that is installed."""

import doctest
import importlib
import pkgutil

import pytest

import embedlog

ROOMS = sorted(
    room.name
    for room in pkgutil.walk_packages(embedlog.__path__, "embedlog.")
    if not room.name.endswith("__main__")
)


@pytest.mark.parametrize("room", ["embedlog", *ROOMS])
def test_the_examples_in_docstrings_are_true(room, tmp_path, monkeypatch):
    """Every session in a docstring prints what it says."""
    if room.startswith("embedlog.spark"):
        pytest.importorskip("pyspark")
    monkeypatch.chdir(tmp_path)

    result = doctest.testmod(importlib.import_module(room), optionflags=doctest.ELLIPSIS)

    assert result.failed == 0
