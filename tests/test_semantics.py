"""Rule codes such as (A17) are defined once, in docs/semantics.md, and only comments cite them.

A reader who meets a code can look it up, a user never meets one, and nothing
refers to a page that the repository does not have.
"""

import ast
import functools
import gc
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "semantics.md"
PACKAGES = ("embedlog", "pyspark_embedlog")
"""Searched where Python imports them from: the tests also run against an installed wheel."""
FOLDERS = ("tests", "bench", "docs", "examples")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
KINDS = {".py", ".md", ".ipynb", ".java"}
SHOWN = (*PACKAGES, "bench", "examples")
"""Folders with messages that a user may see."""

DEFINITION = re.compile(r"^- \*\*([A-Z][0-9]+[a-z]?)\*\* (.*)$", re.MULTILINE)
ELSEWHERE = re.compile(
    r"\b(?:reliability|semantics|design|trap|rules?|section),? (?:section |rule )?[0-9]+\b"
    r"|\bthe (?:house|style) (?:guide|page)\b",
    re.IGNORECASE,
)
"""References to documents outside the repository; their rules have codes here."""
REPOSITORY_URL = "https://github.com/embedlog/embedlog/blob/main/"
A_PAGE = re.compile(r"(?<![\w-])[\w-][\w/-]*\.md\b")
LONGEST = 500


@functools.cache
def sources():
    """Return the text of every file to check, by its path from the root of the repository."""
    roots = [ROOT / folder for folder in FOLDERS]
    for package in PACKAGES:
        roots += map(Path, importlib.util.find_spec(package).submodule_search_locations)
    paths = {name: ROOT / name for name in PAGES}
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix in KINDS:
                paths[path.relative_to(root.parent).as_posix()] = path
    # A source distribution has neither benchmarks nor examples.
    return {name: text_of(path) for name, path in paths.items() if path.is_file()}


def text_of(path):
    """Return the text of a file; of a notebook, the source of its cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


@pytest.fixture(scope="module", autouse=True)
def no_collections():
    """Spare the garbage collector what is parsed, and the forks of later tests, too."""
    gc.disable()
    yield
    for cached in (sources, nodes):
        cached.cache_clear()
    gc.enable()


def rules():
    """Return the rules of the page in order, as pairs of code and text."""
    return DEFINITION.findall(PAGE.read_text(encoding="utf-8"))


@functools.cache
def code_pattern():
    """Return a pattern for codes: a letter of a rule of the page, and a number."""
    letters = "".join(sorted({code[0] for code, _ in rules()}))
    return re.compile(rf"\b[{letters}][1-9][0-9]?b?\b")


def lines_with(pattern, text):
    """Yield the number of each line on which a pattern matches, and the match."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in pattern.finditer(line):
            yield number, match.group()


def nodes_with_a_code(shown):
    """Yield the path and the syntax of each module below some folders, but of those without."""
    for path, text in sources().items():
        if path.startswith(shown) and path.endswith(".py") and code_pattern().search(text):
            yield path, nodes(path)


@functools.cache
def nodes(path):
    """Return all nodes of a module's syntax."""
    return tuple(ast.walk(ast.parse(sources()[path], path)))


def docstrings(found):
    """Yield the docstrings of a module, those of attributes too, with their lines."""
    for node in found:
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if constant and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def strings(found):
    """Yield the string literals of a module, with their lines, except docstrings."""
    docstrings = {id(node.value) for node in found if isinstance(node, ast.Expr)}
    for node in found:
        constant = isinstance(node, ast.Constant) and id(node) not in docstrings
        if constant and isinstance(node.value, str):
            yield node.lineno, node.value


def test_every_rule_is_defined_once():
    """A code has one meaning."""
    counts = Counter(code for code, _ in rules())

    assert counts, "docs/semantics.md defines no rules"
    assert [code for code, count in counts.items() if count > 1] == []


def test_every_rule_is_one_short_line():
    """A longer definition belongs on another page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    broken = [line for line in lines if line.startswith(" ")]
    too_long = [code for code, text in rules() if len(text) > LONGEST]

    assert broken + too_long == []


def test_every_code_is_defined():
    """Also those cited in tests, benchmarks, pages and examples."""
    defined = {code for code, _ in rules()}
    offenders = [
        f"{path}:{number}: {code}"
        for path, text in sources().items()
        for number, code in lines_with(code_pattern(), text)
        if code not in defined
    ]

    assert offenders == [], "not defined in docs/semantics.md:\n" + "\n".join(offenders)


def test_no_message_has_a_code():
    """Exceptions, hints, warnings, log records, help and output are for users."""
    offenders = [
        f"{path}:{number}: {string!r}"
        for path, found in nodes_with_a_code(SHOWN)
        for number, string in strings(found)
        if code_pattern().search(string)
    ]

    assert offenders == [], "strings with a rule code:\n" + "\n".join(offenders)


def test_no_docstring_has_a_code():
    """`help` shows docstrings to users; comments and tests cite the rules."""
    offenders = [
        f"{path}:{number}: {code}"
        for path, found in nodes_with_a_code(PACKAGES)
        for number, docstring in docstrings(found)
        for code in code_pattern().findall(docstring)
    ]

    assert offenders == [], "docstrings with a rule code:\n" + "\n".join(offenders)


def test_no_document_is_cited_that_a_reader_does_not_have():
    """A rule is cited by its code, a page by its path."""
    offenders = [
        f"{path}:{number}: {cited}"
        for path, text in sources().items()
        if path != "tests/test_semantics.py"
        for number, cited in lines_with(ELSEWHERE, text)
    ]

    assert offenders == [], "cited, but not in the repository:\n" + "\n".join(offenders)


def test_every_page_that_is_named_is_there():
    """A page is named by its path, or by the end of it."""
    pages = {"/" + path for path in (*sources(), *PAGES)}
    offenders = [
        f"{path}:{number}: {cited}"
        for path, text in sources().items()
        for number, cited in lines_with(A_PAGE, text.replace(REPOSITORY_URL, ""))
        if not any(page.endswith("/" + cited) for page in pages)
    ]

    assert offenders == [], "no such page:\n" + "\n".join(offenders)
