"""docs/format.md promises: no release refuses, or reads otherwise, what an earlier one wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.released_roots import RELEASED, check, keep, released_versions

THIS_VERSION = "this version"
KEPT = {path.name.removesuffix(".tar.xz"): path for path in RELEASED.glob("*.tar.xz")}


def test_each_release_has_kept_its_roots() -> None:
    """CHANGELOG.md has a date for its version, and `make keep-roots` was called for it."""
    assert set(KEPT) == set(released_versions())


@pytest.mark.parametrize(
    "version", [*sorted(KEPT), pytest.param(THIS_VERSION, marks=pytest.mark.tier("all"))]
)
def test_what_a_release_wrote_is_read_and_continued(version: str, tmp_path: Path) -> None:
    """P12: everything that was read in its log, and in a mirror of that over two directories."""
    archive = KEPT.get(version, tmp_path / "this.tar.xz")
    if version == THIS_VERSION:
        keep(archive)
    check(archive, tmp_path / "roots")
