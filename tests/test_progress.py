"""The progress bar is shown on terminals and in notebooks only."""

from __future__ import annotations

import io
import sys
import types

import pytest

from embedlog import progress
from embedlog.progress import ProgressBar, format_bytes


@pytest.fixture(autouse=True)
def redraw_at_every_call(monkeypatch):
    """Every call redraws the bar."""
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0.0)


def test_a_pipe_sees_no_bar(capsys):
    """stderr is not a terminal, as with a pipe or a file."""
    with ProgressBar("compact") as bar:
        bar(1, 2)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_drawn_on_a_terminal_and_wiped(monkeypatch):
    """It is on stderr, redrawn at most ten times a second, and removed at the end."""
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0.1)
    times = iter([0.0, 0.01, 0.2, 0.21, 0.5])
    monkeypatch.setattr("embedlog.progress.time.monotonic", lambda: next(times))
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)

    with ProgressBar("verify") as bar:
        for done in (1, 50, 60, 100):
            bar(done * 1000, 100_000)

    assert screen.getvalue().count("\r") == 3
    assert "verify ███████████████" in screen.getvalue()
    assert " 50% of 100.0 kB" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")


@pytest.fixture
def lines(monkeypatch):
    """The lines that a notebook shows: a display adds one, an update replaces it."""
    lines = []

    def show(data, raw, display_id=None):
        lines.append(data["text/plain"])
        return types.SimpleNamespace(update=show)

    kernel = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=show))
    return lines


def test_a_notebook_sees_one_line_that_changes(lines):
    """The line is a display of its own, which is emptied at the end."""
    with ProgressBar("compact") as bar:
        bar(1, 4)
        bar(2, 4)
    assert [line[:7] for line in lines] == ["compact", "compact", ""]
    assert "25%" in lines[0]
    assert "50%" in lines[1]


def test_a_notebook_shows_nothing_for_a_short_operation(lines, monkeypatch):
    """It does not leave an empty line below the cell either."""
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 60.0)
    with ProgressBar("compact") as bar:
        bar(1, 4)
    assert lines == []


def test_sizes_are_formatted_in_powers_of_ten():
    """Disks are sold in these units."""
    texts = [format_bytes(count) for count in (0, 999, 1000, 1.5e6, 2e9, 3e12, 4e15)]
    assert texts == ["0 B", "999 B", "1.0 kB", "1.5 MB", "2.0 GB", "3.0 TB", "4000.0 TB"]
