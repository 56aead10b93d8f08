"""Run the examples in the docstrings of the installed package."""

import doctest
import importlib
import importlib.util
import pkgutil
from pathlib import Path

import embedlog

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(embedlog.__path__, "embedlog.")
    if not module.name.endswith("__main__")
)
OPTIONAL = {"embedlog.spark": "pyspark", "embedlog.opentelemetry": "opentelemetry"}
MISSING = tuple(module for module, name in OPTIONAL.items() if not importlib.util.find_spec(name))


def has_examples(module: str) -> bool:
    """Whether there are any: to look for them in all objects of all modules takes seconds."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return ">>>" in Path(spec.origin).read_text(encoding="utf-8")


def test_the_examples_in_docstrings_are_true(tmp_path, monkeypatch):
    """Every example prints what its docstring shows, in an empty directory."""
    failed, shown = {}, 0
    for module in ["embedlog", *MODULES]:
        if module.startswith(MISSING) or not has_examples(module):
            continue
        (tmp_path / module).mkdir()
        monkeypatch.chdir(tmp_path / module)
        result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
        shown += result.attempted
        if result.failed:
            failed[module] = result.failed

    assert failed == {}
    assert shown > 0
