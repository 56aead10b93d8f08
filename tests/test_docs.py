"""The pages say what the code does: the reference is complete, and every link leads somewhere.

`make docs` builds the site; these tests need none of its packages.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest
from support.children import run_python

import embedlog

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(next(iter(importlib.util.find_spec("embedlog").submodule_search_locations)))
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CHANGELOG.md"))])
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
MODULE = re.compile(r"`([a-z_]+(?:/[a-z_0-9]+)+)`")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def loaded(path):
    """Return a script of the docs as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def generator():
    """Return what makes the pages of the reference."""
    return loaded(DOCS / "_generate.py")


def settings():
    """Return each kind of setting with the names of its settings."""
    configs = generator().CONFIGS.items()
    return [
        (kind, [one.name for one in dataclasses.fields(config)]) for kind, (config, *_) in configs
    ]


# The reference


@pytest.mark.parametrize(("kind", "names"), settings(), ids=lambda value: str(value)[:12])
def test_every_setting_is_in_the_reference(kind, names):
    """With its effect, its type, and Kafka's default; and no other is."""
    made = generator()
    config, page = made.CONFIGS[kind][0], made.settings_page()
    effects = made.field_docstrings(config)

    assert set(made.KAFKA_DEFAULTS[kind]) == set(names)
    for name in names:
        assert f'id="{kind}.{name}"' in page
        assert effects.get(name) or (kind, name) in made.NO_EFFECT, f"{name} has no docstring"
    for field in dataclasses.fields(config):
        if str(field.type).split(" |")[0] in ("Any", "str"):
            assert (kind, field.name) in made.VALUES, f"what does {field.name} take?"


def test_settings_without_an_effect_are_not_used():
    """What the page calls without effect is not read by the code, and everything else is."""
    made = generator()
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if "config" not in path.relative_to(PACKAGE).parts
    )
    used = set(re.findall(r"\b[a-z_]+\b", text))
    without = {name for _, name in made.NO_EFFECT}
    only_checked = {"max_in_flight_requests_per_connection"}
    every = {name for _, names in settings() for name in names}

    assert {key for key in made.NO_EFFECT if key[1] not in dict(settings())[key[0]]} == set()
    assert every - used - without <= only_checked


def test_every_error_is_in_the_reference():
    """With what to do about it."""
    made = generator()
    listed = [name for kinds in made.ERRORS.values() for name in kinds]
    page = made.errors_page()

    assert sorted(listed) == sorted(made.error_classes())
    assert all(f'id="{name}"' in page for name in listed)


def test_every_command_is_in_the_reference():
    """With its help, whatever the width of the terminal is."""
    page = generator().command_line_page()
    commands = [name for name, _ in generator().commands()]

    assert len(commands) > 15
    for name in commands:
        assert f"## {name}\n" in page
        assert f"usage: {name} " in page


def test_every_public_name_is_in_the_reference():
    """Of the package, of Spark and of the pipeline."""
    listed = {name for _, names in generator().API.values() for name in names}
    public = {f"embedlog.{name}" for name in embedlog.__all__} - {"embedlog.errors"}
    for name in ("spark", "pipeline"):
        module = importlib.import_module(f"embedlog.{name}")
        public |= {f"embedlog.{name}.{one}" for one in module.__all__}

    # Spark's own interface, which no program calls.
    assert listed == public - {"embedlog.spark.EmbedlogDataSource"}


def test_defaults_are_shown_as_they_are_typed():
    """And in a larger unit, if it is a round number of them."""
    shown = generator().shown

    assert shown("segment_bytes", 1 << 30) == "`1073741824` (1\xa0GiB)"
    assert shown("retention_ms", 604_800_000) == "`604800000` (7\xa0d)"
    assert shown("flush_ms", (1 << 63) - 1) == "no limit"
    assert shown("preallocate", False) == "`false`"
    assert shown("acks", "all") == "`all`"


# Pages


def anchors(page):
    """Return the anchors of the headings of a page, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@each_page
def test_every_link_leads_somewhere(page):
    """To a file of the repository, and to a heading of it."""
    broken = []
    for _, _, target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        # A source distribution has no examples.
        if path.startswith(("../examples/", "examples/")) and not (ROOT / "examples").exists():
            continue
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)

    assert broken == []


@each_page
def test_every_picture_has_an_alternative_text(page):
    """For those who cannot see it."""
    pictures = [one for one in LINK.findall(page.read_text(encoding="utf-8")) if one[0]]

    assert [target for _, text, target in pictures if len(text) < 20] == []


@each_page
def test_every_module_that_is_named_is_there(page):
    """`batch/encode` is embedlog/batch/encode.py; so a rename does not leave the pages behind."""
    named = MODULE.findall(page.read_text(encoding="utf-8"))
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    missing = [
        name
        for name in named
        if name.split("/")[0] in packages
        and not (PACKAGE / f"{name}.py").exists()
        and not (PACKAGE / name).is_dir()
        # Files of a log root, which are described in the same way.
        and name not in ("live/boot",)
    ]

    assert missing == []


def test_every_page_is_in_the_navigation():
    """mkdocs fails otherwise; here without mkdocs."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", navigation))
    there = {page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents}
    made = {f"{name}.md" for name in generator().pages()}

    assert named == there | made


def test_the_pictures_are_those_of_the_script():
    """Run `python docs/pictures/draw.py` after a change; the floors are those of test_house."""
    for draw in loaded(DOCS / "pictures" / "draw.py").DRAWINGS:
        picture = draw()
        drawn = (DOCS / "pictures" / f"{picture.name}.svg").read_text(encoding="utf-8")
        assert drawn == picture.svg(), f"{picture.name}.svg: run python docs/pictures/draw.py"


def test_the_readme_has_no_relative_link_on_pypi():
    """They would lead nowhere there; pyproject.toml says how they are replaced."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for one in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)

    assert "tutorial (`docs/tutorial.md`)" in text
    assert [target for _, _, target in LINK.findall(text) if not target.startswith("http")] == []


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="`make docs` installs it")
def test_the_site_builds_without_a_warning(tmp_path):
    """Strictly: a broken link, or a page outside of the navigation, fails it."""
    run_python(
        *("-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path), cwd=ROOT, seconds=120
    )

    assert 'id="A17"' in (tmp_path / "semantics.html").read_text(encoding="utf-8")
    for page in tmp_path.rglob("*.html"):
        assert "unpkg.com" not in page.read_text(encoding="utf-8"), page
