"""What all tests share: roots that are checked when a test is done with them."""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import os
import shutil
import signal
import sys
import tempfile
import weakref

# Before Arrow is loaded: its own allocator has locks that a fork copies as they are, and
# tests fork from threads that are in it (docs/guarantees.md).
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
# Hundreds of programs are started, which would all be compiled each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Each process that imports numpy starts threads for matrices, which no test has, and they
# wait for work in a loop at first: 80 ms of a processor.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from support import tiers
from support.clock import ManualClock
from support.replicas import Directories
from support.roots import healthy, make_log, open_root

import embedlog
from embedlog.cli import main
from embedlog.partition import PartitionLog
from embedlog.root.root import Root

_M_MMAP_THRESHOLD = -3
"""From malloc.h: what is at least so large is taken from the kernel, and given back."""
_MEMORY = Path("/dev/shm")
_MEMORY_BYTES = 2 << 30
"""What must be free there for the directories of the tests; they need some hundred MiB."""
_passed: list[Path] = []
"""Directories in memory to remove when this process ends."""

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
for _tier, _examples in tiers.EXAMPLES.items():
    # The same examples each time, so that a red test is red on every machine; new ones each night.
    _fixed = {} if _tier == "nightly" else {"derandomize": True, "database": None}
    settings.register_profile(_tier, max_examples=_examples, **_fixed, **_COMMON)
settings.register_profile(
    "debug", max_examples=int(os.environ.get("EXAMPLES", "50")), phases=[Phase.generate], **_COMMON
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that the targets of the Makefile use."""
    parser.addoption(
        "--tier",
        choices=tiers.TIERS,
        default="test",
        help="how much to run: see tests/support/tiers.py (default: test)",
    )
    parser.addoption(
        "--kafka",
        action="store_true",
        help="also run tests/kafka, which start a broker from Maven Central",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process, and choose how much it does, before any test is collected."""
    # A shell ignores Ctrl-C in what it runs in the background, and all children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # LMDB takes 2 MiB of zeros for an environment, and tests open them by the ten thousand. By
    # default the C library soon keeps such memory, and fills it each time; the kernel has zeros.
    with suppress(AttributeError):  # not every C library has it
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    tiers.use(config.getoption("tier"))
    if not tiers.runs("all"):
        _use_memory()
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or config.getoption("tier"))


def _use_memory() -> None:
    """Let pytest make its directories in memory: half of the time is otherwise spent on the disk.

    From `all` on they are on the disk, and in each tier those of the tests marked `disk`.
    """
    with suppress(OSError):  # no such directory
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
    # It runs after the finalizers of logs that tests left open: those are younger.
    weakref.finalize(tiers, _remove_directories, os.getpid())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Give the memory back after a run that passed; the next run replaces what is left."""
    directory = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    is_worker = hasattr(session.config, "workerinput")
    if exitstatus == 0 and not is_worker and directory.is_relative_to(_MEMORY):
        _passed.append(directory)


def _remove_directories(pid: int) -> None:
    if os.getpid() == pid:  # not in a child that was forked
        for directory in _passed:
            shutil.rmtree(directory, ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what a tier runs nothing of: Spark alone takes seconds."""
    runs = tiers.runs(tiers.FOLDERS.get(collection_path.name, "quick"))
    if collection_path.name == "kafka" and collection_path.is_dir():
        runs = config.getoption("--kafka")
    return None if runs else True


@pytest.hookimpl(tryfirst=True)  # before pytest notes where it collects
def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the files, each worker another one, before all of them are collected.

    What imports a test file first rewrites its asserts, which takes far longer than the rest, and
    keeps that for the others: in a new clone each worker would do it for all files.
    """
    gc.disable()  # what is collected stays; `pytest_collection_finish` goes on
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in _files_below(session.config)[number::count]:
        folder = str(path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # as pytest will
        with suppress(Exception, pytest.skip.Exception):  # pytest will tell
            importlib.import_module(path.stem)


def _files_below(config: pytest.Config) -> list[Path]:
    """Return the files of tests in the folders that this run was given."""
    given = [Path(config.invocation_params.dir, argument) for argument in config.args]
    files = [path for folder in given if folder.is_dir() for path in folder.rglob("test_*.py")]
    skipped = {path.parent: pytest_ignore_collect(path.parent, config) for path in files}
    return sorted(path for path in files if not skipped[path.parent])


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out the tests of `--dist loadgroup` in portions: see `Portions`."""
    if config.getoption("dist") != "loadgroup":
        return None
    from support.portions import Portions

    return Portions(config, log)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a large value by its beginning: what runs tests sends each id around several times."""
    text = val if isinstance(val, (str, bytes)) else ""
    return f"{text[:20]!r}..." if len(text) > 200 else None


@pytest.hookimpl(trylast=True)  # marks may be set by others
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only larger tiers run."""
    chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        chosen[tiers.runs(_first_tier(item))].append(item)
    items[:] = chosen[True]
    config.hook.pytest_deselected(items=chosen[False])


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over the tests themselves: 0.2 s each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _first_tier(item: pytest.Item) -> str:
    """Return the smallest tier that runs a test: the largest of its marks, or else its folder's."""
    marked = [tier for mark in item.iter_markers("tier") for tier in mark.args]
    if not marked:
        return tiers.FOLDERS.get(item.path.parent.name, "quick")
    return max(marked, key=tiers.TIERS.index)


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new directory; on the disk for a test marked `disk`, otherwise see `_use_memory`."""
    if request.node.get_closest_marker("disk") and tmp_path.is_relative_to(_MEMORY):
        with tempfile.TemporaryDirectory(prefix="embedlog-", ignore_cleanup_errors=True) as path:
            yield Path(path)
    else:
        yield tmp_path


@pytest.fixture
def command_line(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; return its code, and stdout and stderr as text."""

    def command(*arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return code, out.decode("utf-8", "backslashreplace"), err.decode()

    return command


@pytest.fixture
def log_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a log, which commands take from the environment."""
    path = tmp_path / "log"
    monkeypatch.setenv("EMBEDLOG_ROOT", str(path))
    return path


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still until a test moves it."""
    return ManualClock()


@pytest.fixture
def root(tmp_path: Path, clock: ManualClock) -> Iterator[Root]:
    """A new root; healthy when the test is done."""
    root = open_root(tmp_path / "root", clock=clock)
    yield root
    if not root.closed:
        assert healthy(root)
        root.close()


@pytest.fixture
def log(root: Root) -> PartitionLog:
    """The log of a partition with Kafka's defaults, in a root that is checked."""
    return make_log(root)


@pytest.fixture
def directories(tmp_path: Path) -> Directories:
    """Three directories, of which none has a log yet."""
    return Directories(tmp_path)


@pytest.fixture
def replicated_log(directories: Directories) -> Iterator[embedlog.Log]:
    """A log over three directories; healthy when the test is done."""
    log = directories.open()
    yield log
    assert log.housekeeping.verify() == []
    log.close()
