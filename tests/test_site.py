"""The built site in a real browser: each page, wide and narrow, light and dark."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import threading
from pathlib import Path

import pytest
from support.browser import CHROMIUM, Browser
from support.children import run_python

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.tier("all"),
    pytest.mark.xdist_group("site"),
    pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on the path"),
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None, reason="`make docs` installs mkdocs"
    ),
]

WIDE = """
    [...document.querySelectorAll("body *")]
        .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
        .filter(each => document.documentElement.scrollWidth > innerWidth + 1)
        .map(each => each.tagName + "." + each.className).slice(0, 5)
"""
BROKEN = "[...document.images].filter(each => !each.naturalWidth).map(each => each.src)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site: its directory, and its address."""
    directory = tmp_path_factory.mktemp("site")
    arguments = ("-m", "mkdocs", "build", "--strict", "--quiet", "-d", directory)
    run_python(*arguments, cwd=ROOT, seconds=120)
    handler = functools.partial(Quiet, directory=str(directory))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield directory, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def browser(tmp_path):
    """A browser with one page."""
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


def faults_of(browser: Browser, url: str, scheme: str) -> list[str]:
    """Open a page, and return what is wrong with it on a telephone and on a large screen."""
    browser.errors.clear()
    browser.show(1280, 900, scheme)
    browser.open(url)
    faults = [f"broken picture: {each}" for each in browser.evaluate(BROKEN)]
    for width in (1280, 390):
        browser.show(width, 900, scheme)
        faults += [f"too wide for {width}: {each}" for each in browser.evaluate(WIDE)]
    return faults + [f"console: {each}" for each in browser.errors]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_and_has_its_pictures(site, browser, scheme):
    """In the reader's colours, with nothing in the console."""
    directory, address = site
    faults = {}
    for page in sorted(directory.rglob("*.html")):
        name = page.relative_to(directory).as_posix()
        faults[name] = faults_of(browser, f"{address}/{name}", scheme)
        assert (sum(browser.evaluate(BACKGROUND)) < 384) == (scheme == "dark"), name

    assert len(faults) > 40
    assert {name: found for name, found in faults.items() if found} == {}


def test_faults_of_a_page_are_found(tmp_path, browser):
    """A table that is too wide, a picture that is missing, an error of a script."""
    page = tmp_path / "page.html"
    page.write_text(
        "<table style='width: 2000px'><td>wide</table><img src='none.svg'><script>none()</script>"
    )

    kinds = {fault.partition(":")[0] for fault in faults_of(browser, page.as_uri(), "light")}

    assert kinds == {"too wide for 390", "too wide for 1280", "broken picture", "console"}
