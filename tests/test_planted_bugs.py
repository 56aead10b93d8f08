"""Bugs are planted in the larger tiers; that they still can be is seen at once."""

import importlib
from pathlib import Path

import pytest
from support import mutants

HERE = Path(__file__).parent
MODULES = [
    file
    for folder in ("crash", "model", "stress")
    for file in sorted((HERE / folder).glob("test_*.py"))
    if "support.mutants" in file.read_text()
]


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.stem)
def test_what_is_changed_to_plant_a_bug_is_still_there(file, monkeypatch):
    """A bug must be planted again when its function was renamed or rewritten."""
    monkeypatch.syspath_prepend(file.parent)
    importlib.import_module(file.stem)
    assert mutants.PLANNED
    for change in mutants.PLANNED:
        change.plan()
