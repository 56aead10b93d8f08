"""What the docstrings show is run, in the package that is installed."""

import doctest
import importlib
import importlib.util
import pkgutil

import embedlog

ROOMS = sorted(
    room.name
    for room in pkgutil.walk_packages(embedlog.__path__, "embedlog.")
    if not room.name.endswith("__main__")
)
NO_SPARK = importlib.util.find_spec("pyspark") is None


def test_the_examples_in_docstrings_are_true(tmp_path, monkeypatch):
    """Every session in a docstring prints what it says, in an empty directory."""
    failed, shown = {}, 0
    for room in ["embedlog", *ROOMS]:
        if NO_SPARK and room.startswith("embedlog.spark"):
            continue
        (tmp_path / room).mkdir()
        monkeypatch.chdir(tmp_path / room)
        result = doctest.testmod(importlib.import_module(room), optionflags=doctest.ELLIPSIS)
        shown += result.attempted
        if result.failed:
            failed[room] = result.failed

    assert failed == {}
    assert shown > 0
