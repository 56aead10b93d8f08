"""The pages describe what the code does: the reference is complete, and no link is broken.

`make docs` builds the site; these tests need none of its packages.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import shlex
import sys
import tomllib
from itertools import takewhile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.children import run_python

import embedlog
from embedlog.cli.parser import parser
from embedlog.metrics import GROUPS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(next(iter(importlib.util.find_spec("embedlog").submodule_search_locations)))
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CHANGELOG.md"))])
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
MODULE = re.compile(r"`([a-z_]+(?:/[a-z_0-9]+)+)`")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def loaded(path):
    """Import a script of the docs."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def generator():
    """Return the module that generates the pages of the reference."""
    return loaded(DOCS / "_generate.py")


def settings():
    """Return each kind of setting with the names of its settings, without inherited ones."""
    configs = generator().CONFIGS.items()
    return [
        (kind, [name for name in config.__settings__ if name in config.__annotations__])
        for kind, (config, *_) in configs
    ]


# The reference


@pytest.mark.parametrize(("kind", "names"), settings(), ids=lambda value: str(value)[:12])
def test_every_setting_is_in_the_reference(kind, names):
    """With its effect, its type and Kafka's default; other names are not."""
    reference = generator()
    config, page = reference.CONFIGS[kind][0], reference.settings_page()
    effects = reference.field_docstrings(config)

    assert set(reference.KAFKA_DEFAULTS[kind]) == set(names)
    for name in names:
        assert f'id="{kind}.{name}"' in page
        assert effects.get(name) or (kind, name) in reference.KEPT, f"{name} has no docstring"
        if config.__annotations__[name].split(" |")[0] in ("Any", "str"):
            assert (kind, name) in reference.VALUES, f"what does {name} take?"


def test_settings_that_nothing_depends_on_are_kept_or_refused():
    """The code reads all settings except those that are kept at any value, or only the default."""
    reference = generator()
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if "config" not in path.relative_to(PACKAGE).parts
    )
    used = set(re.findall(r"\b[a-z_]+\b", text))
    kept = {name for _, name in reference.KEPT}
    refused = {
        name
        for config, *_ in reference.CONFIGS.values()
        for name, setting in config.__settings__.items()
        if setting.only_default
    }
    all_names = {name for _, names in settings() for name in names}

    assert {key for key in reference.KEPT if key[1] not in dict(settings())[key[0]]} == set()
    assert all_names - used - kept - refused == set()


def test_every_error_is_in_the_reference():
    """With the action to take."""
    reference = generator()
    listed = [name for kinds in reference.ERRORS.values() for name in kinds]
    page = reference.errors_page()

    assert sorted(listed) == sorted(reference.error_classes())
    assert all(f'id="{name}"' in page for name in listed)


def test_every_metric_is_in_the_reference():
    """With its meaning, and its name in Prometheus."""
    page = generator().metrics_page()

    for group in GROUPS:
        assert page.count(f"### `{group.key}`\n") == 1
        for metric in group.metrics:
            assert f"| `{metric.name}` | {metric.text} | `{metric.exported(group)}`" in page
    assert page.count("\n## ") == len(generator().METRIC_GROUPS)


def test_every_command_is_in_the_reference():
    """With its help, which does not depend on the width of the terminal."""
    page = generator().command_line_page()
    commands = [name for name, _ in generator().commands()]

    assert len(commands) > 15
    for name in commands:
        assert f"## {name}\n" in page
        assert f"usage: {name} " in page


def test_the_examples_in_the_help_are_valid_commands():
    """Those of the reference, and of all pages: with commands, options and values that exist."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    text = "\n".join([generator().command_line_page(), *SHELL.findall(pages)])
    examples = re.findall(r"^ *(embedlog [^\n$]+)", text, re.MULTILINE)
    commands = {name for name, _ in generator().commands()}

    assert len(examples) > 30
    for example in examples:
        command = takewhile(
            lambda word: word not in {"|", ">"}, shlex.split(example, comments=True)
        )
        words = list(command)[1:]
        args = parser().parse_args(words)
        assert args.parser.prog in commands, example


def test_every_logger_is_in_the_table_of_loggers():
    """Those of the code, and no others."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(embedlog\.\w+)` \|", page, re.MULTILINE)
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))

    assert sorted(listed) == sorted(set(re.findall(r'getLogger\("([\w.]+)"\)', code)))


def test_every_public_name_is_in_the_reference():
    """The names of the package, of Spark and of the pipeline."""
    listed = {name for _, names in generator().API.values() for name in names}
    public = {f"embedlog.{name}" for name in embedlog.__all__} - {"embedlog.errors"}
    for name in ("spark", "pipeline"):
        module = importlib.import_module(f"embedlog.{name}")
        public |= {f"embedlog.{name}.{attribute}" for attribute in module.__all__}

    # Spark's own interface, which programs do not call.
    assert listed == public - {"embedlog.spark.EmbedlogDataSource"}


def test_defaults_are_shown_as_a_user_types_them():
    """A round number is also shown in a larger unit."""
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
    """To a file of the repository, and to a heading of that file."""
    broken = []
    for _, _, target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        # A source distribution has no examples.
        if path.startswith(("../examples/", "examples/")) and not (ROOT / "examples").exists():
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)

    assert broken == []


@each_page
def test_every_picture_has_an_alternative_text(page):
    """For readers who cannot see it."""
    pictures = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if link[0]]

    assert [target for _, text, target in pictures if len(text) < 20] == []


@each_page
def test_every_module_on_a_page_exists(page):
    """`batch/encode` is embedlog/batch/encode.py; a rename has to change the pages too."""
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
    """mkdocs fails otherwise; this test does not need mkdocs."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", navigation))
    written = {page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents}
    generated = {f"{name}.md" for name in generator().pages()}

    assert named == written | generated


def test_the_pictures_are_those_of_the_script():
    """Run `python docs/pictures/draw.py` after a change; the floors are those of test_house."""
    for draw in loaded(DOCS / "pictures" / "draw.py").DRAWINGS:
        picture = draw()
        drawn = (DOCS / "pictures" / f"{picture.name}.svg").read_text(encoding="utf-8")
        assert drawn == picture.svg(), f"{picture.name}.svg: run python docs/pictures/draw.py"


@pytest.mark.tier("all")
def test_the_recording_is_drawn_from_a_real_run(tmp_path):
    """Of a group that has all orders done by the worker that was not killed."""
    recorder = loaded(DOCS / "pictures" / "record.py")
    events = recorder.record(tmp_path)

    begun = [(event["worker"], event["order"]) for event in events if event["what"] == "begin"]
    of_killed = [order for worker, order in begun if worker == "A"]
    assert of_killed == list(range(0, recorder.KILLED + 1, 2))
    assert [order for worker, order in begun if worker == "B"].count(recorder.KILLED) == 1
    assert {order for _, order in begun} == set(range(recorder.ORDERS))
    times = re.compile(r"\d+\.\d+%?|\d+ ms")
    drawn = (DOCS / "pictures" / "killed.svg").read_text(encoding="utf-8")
    again = recorder.draw(events)
    assert ElementTree.fromstring(again).get("role") == "img"
    assert sorted(times.sub("", drawn).split()) == sorted(times.sub("", again).split())


def test_the_readme_has_no_relative_link_on_pypi():
    """It would be broken there; pyproject.toml makes it absolute, and the file exists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    hooks = project["tool"]["hatch"]["metadata"]["hooks"]
    for rule in hooks["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)

    files = f"{project['project']['urls']['Homepage']}/blob/main/"
    targets = [target for _, _, target in LINK.findall(CODE.sub("", text))]
    inside = [target.removeprefix(files) for target in targets if target.startswith(files)]
    assert f"[The tutorial]({files}docs/tutorial.md)" in text
    assert [target for target in targets if not target.startswith("https://")] == []
    # A source distribution has no examples.
    if (ROOT / "examples").exists():
        assert [path for path in inside if not (ROOT / path.partition("#")[0]).exists()] == []


def test_the_texts_for_language_models_have_all_pages():
    """The list names each page, and the text has the pages, and the reference's docstrings."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    paths = re.findall(r"[\w/-]+\.md", navigation)
    texts = generator().texts_for_models([{"Pages": paths}], "A log.")

    assert re.findall(r"\]\(([\w/-]+)\.html\)", texts["llms.txt"]) == [
        path.removesuffix(".md") for path in paths
    ]
    full = texts["llms-full.txt"]
    for page in [*DOCS.rglob("*.md"), *(ROOT / name for name in ("CHANGELOG.md",))]:
        assert page.read_text(encoding="utf-8")[-200:].replace("](docs/", "](") in full, page
    assert "## `embedlog.Producer.send(self, topic:" in full
    assert "\n::: " not in full


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="`make docs` installs it")
@pytest.mark.tier("all")  # five seconds of a processor
def test_the_site_builds_without_a_warning(tmp_path):
    """In strict mode, a broken link or a page outside of the navigation fails the build."""
    run_python(
        *("-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path), cwd=ROOT, seconds=120
    )

    assert 'id="A17"' in (tmp_path / "semantics.html").read_text(encoding="utf-8")
    assert "](guide.html)" in (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert "\n# The format\n" in (tmp_path / "llms-full.txt").read_text(encoding="utf-8")
    for page in tmp_path.rglob("*.html"):
        assert "unpkg.com" not in page.read_text(encoding="utf-8"), page
