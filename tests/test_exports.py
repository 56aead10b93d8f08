"""The public names, and the cost of their import."""

from __future__ import annotations

from support.children import run_python

import embedlog


def test_every_public_name_can_be_imported():
    """Every name in `__all__` is an attribute, and `dir` lists it."""
    for name in embedlog.__all__:
        assert getattr(embedlog, name) is not None
        assert name in dir(embedlog)


def test_an_unknown_name_is_an_attribute_error():
    """As for every module."""
    assert not hasattr(embedlog, "broker")


def test_importing_embedlog_loads_nothing_heavy():
    """pyarrow, numpy and LMDB are loaded by the first log that is opened."""
    heavy = {"pyarrow", "numpy", "lmdb", "pyspark", "pandas"}
    code = f"import sys, embedlog; print(sorted({heavy} & set(sys.modules)))"

    assert run_python("-c", code) == "[]\n"
