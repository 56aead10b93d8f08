"""`embedlog doctor`: the machine below the log, and the state the log is in."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from embedlog import checksum, kv
from embedlog.cli.open_log import is_log, root_of
from embedlog.cli.parser import FAILED, OK
from embedlog.cli.printing import say, say_json
from embedlog.errors import EmbedlogError, NotALogError
from embedlog.files import Files
from embedlog.files.filesystem import REMOTE_FILESYSTEMS, process_state
from embedlog.files.reserve import Reserve
from embedlog.keyspace import FORMAT_FILE, FORMAT_VERSION
from embedlog.progress import format_bytes
from embedlog.publish import staging
from embedlog.root import startup
from embedlog.version import __version__

_LIBRARIES = ("pyarrow", "lmdb", "numpy", "sortedcontainers", "google-crc32c", "crcmod")
_SLOW_CHECKSUM = 500
_SLOW_FSYNC_US = 50_000
_LITTLE_SPACE = 1 << 30
_LOCK_SECONDS = 1.0
_LONG_READ_SECONDS = 1.0
"""A read of embedlog's own takes microseconds."""
_PROBES = 9

Report = dict[str, Any]


def doctor(args: argparse.Namespace) -> int:
    """Print what was measured, and what is not as it should be."""
    report: Report = {"versions": _versions(), "checksum": _checksum()}
    root = root_of(args)
    if os.path.isdir(root):
        files = Files(root, writable=False)
        try:
            report["storage"] = _storage(files)
            if is_log(root):
                report["log"] = _log(files)
        finally:
            files.close_all()
    elif os.path.exists(root):
        raise NotALogError("the path is a file", path=root)
    findings = _findings(report)
    if args.json:
        say_json({**report, "findings": findings})
    else:
        _say(report, findings)
    return FAILED if findings else OK


def _versions() -> Report:
    found = {"embedlog": __version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = "not installed"
    return {**found, "kernel": f"{platform.system()} {platform.release()} {platform.machine()}"}


def _checksum() -> Report:
    """How fast CRC-32C is: the best of some runs over a mebibyte."""
    data = bytes(1 << 20)
    seconds = min(_timed(lambda: checksum.crc32c(data)) for _ in range(_PROBES))
    return {"backend": checksum.BACKEND, "mb_per_second": round(len(data) / 1e6 / seconds)}


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _storage(files: Files) -> Report:
    writable = os.access(files.root, os.W_OK | os.X_OK)
    return {
        "root": files.root,
        "filesystem": files.filesystem(),
        "free_bytes": files.free_bytes(),
        "reserve_bytes": Reserve(files).held(),
        "writable": writable,
        "fsync_us": _fsync_us(files.root) if writable else None,
    }


def _fsync_us(root: str) -> int:
    """Return the median time of a flush of 4 KiB, in a file that is gone afterwards."""
    files = Files(root, unsafe_filesystem=True)
    # With a dot before it, nobody takes it for a part of a log.
    name = f".doctor-{os.getpid()}.tmp"
    fd = files.open(name, write=True, create=True)
    try:
        times = []
        for probe in range(_PROBES):
            files.write(fd, [bytes(4096)], 4096 * probe)
            times.append(_timed(lambda: files.sync(fd)))
        return round(statistics.median(times) * 1e6)
    finally:
        files.unlink(name)
        files.close_all()


def _log(files: Files) -> Report:
    current = startup.live_is_valid(files)
    return {
        "format": _format(files),
        "in_use": _in_use(files),
        "closed_cleanly": files.exists(startup.CLEAN_FILE),
        "live_is_of_this_boot": current,
        "boot_id": files.boot_id(),
        **_staged(files),
        **{name: _database(files, name) for name in ("state", "live")[: 1 + current]},
    }


def _staged(files: Files) -> Report:
    """How many jobs have staged something, and how many of them nobody will publish."""
    jobs, now_ms = staging.job_directories(files), time.time_ns() // 1_000_000
    orphans = sum(staging.is_orphaned(each, now_ms) for each in jobs)
    return {"staged_jobs": len(jobs), "orphaned_jobs": orphans}


def _format(files: Files) -> int | None:
    import tomllib

    try:
        found = tomllib.loads(files.read_file(FORMAT_FILE).decode()).get("format")
    except ValueError:
        return None
    return found if isinstance(found, int) else None


def _in_use(files: Files) -> bool | None:
    """Whether some process has the log open to write; asked as a newcomer does, at the door."""
    if not files.exists("locks/root") or not files.exists("locks/attached"):
        return False
    door, attached = files.open("locks/root"), files.open("locks/attached")
    try:
        files.lock(door, _LOCK_SECONDS)
        if not files.try_lock(attached):
            return True
        files.unlock(attached)
        return False
    except EmbedlogError:
        return None
    finally:
        files.close(attached)
        files.close(door)


def _database(files: Files, name: str) -> Report:
    try:
        store = kv.Store(files, name, durable=name == "state", timeout=_LOCK_SECONDS)
    except EmbedlogError as error:
        return {"error": str(error)}
    try:
        used, most = store.readers()
        rows = store.read(lambda txn: int(txn.stat()["entries"]))
        old = _old_readers(store)
        return {"rows": rows, "reader_slots_used": used, "reader_slots": most, "old_readers": old}
    except EmbedlogError as error:
        return {"error": str(error)}
    finally:
        store.close()


def _old_readers(store: kv.Store) -> list[int]:
    """Return the processes that are in one read for long; sleeps only if one may be."""
    before = store.lagging()
    if not before:
        return []
    threading.Event().wait(_LONG_READ_SECONDS)
    # One that began meanwhile would read something newer, so these are the same ones.
    return sorted({pid for pid, _, _ in before & store.lagging()})


def _findings(report: Report) -> list[str]:
    """What somebody should do something about."""
    found = []
    speed = report["checksum"]["mb_per_second"]
    if speed < _SLOW_CHECKSUM:
        found.append(f"checksums run at {speed} MB/s: install google-crc32c")
    found += [f"{name} is not installed" for name in _LIBRARIES[:4] if _absent(report, name)]
    storage, log = report.get("storage"), report.get("log")
    if storage is not None:
        found += _storage_findings(storage)
    if log is not None:
        found += _log_findings(log)
    return found


def _absent(report: Report, library: str) -> bool:
    return bool(report["versions"][library] == "not installed")


def _storage_findings(storage: Report) -> list[str]:
    found = []
    if storage["filesystem"] in REMOTE_FILESYSTEMS.values():
        found.append(f"locks cannot be trusted on {storage['filesystem']}: move to a local disk")
    if storage["free_bytes"] < _LITTLE_SPACE:
        found.append(f"only {format_bytes(storage['free_bytes'])} are free")
    if not storage["writable"]:
        found.append("this user may not write here")
    if (storage["fsync_us"] or 0) > _SLOW_FSYNC_US:
        found.append(f"a flush takes {storage['fsync_us']} µs")
    return found


def _log_findings(log: Report) -> list[str]:
    found = []
    if log["format"] != FORMAT_VERSION:
        older = log["format"] is not None and log["format"] < FORMAT_VERSION
        what = "the one that wrote it" if older else "a newer embedlog"
        found.append(f"the log has format {log['format']}: use {what}")
    if log["in_use"] is None:
        found.append("the door is locked: another process has been opening the log for long")
    if not log["live_is_of_this_boot"]:
        found.append("live is of another boot: the next process to open the log builds it anew")
    elif not log["in_use"] and not log["closed_cleanly"]:
        found.append("the last process did not close it: the next one to open it looks it over")
    if log["orphaned_jobs"]:
        found.append(
            f"{log['orphaned_jobs']} jobs have left staged files that nobody will publish: "
            "the next publication, or `embedlog repair`, removes them"
        )
    for name in ("state", "live"):
        database = log.get(name, {})
        if "error" in database:
            found.append(f"{name} cannot be read: {database['error']}")
        elif database and database["reader_slots_used"] > 0.9 * database["reader_slots"]:
            found.append(f"{name} has almost no reader slots left")
        for pid in database.get("old_readers", ()):
            found.append(
                f"process {pid} (state {process_state(pid) or 'unknown'}) reads {name} for more "
                f"than {_LONG_READ_SECONDS:g} s: its file grows until that ends"
            )
    return found


def _say(report: Report, findings: list[str]) -> None:
    for section, facts in report.items():
        say(f"{section}:")
        for name, fact in facts.items():
            say(f"  {name.replace('_', ' ')}: {_shown(name, fact)}")
    say("findings:" if findings else "findings: none")
    say(*(f"  {one}" for one in findings))


def _shown(name: str, fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in fact.items())
    if isinstance(fact, bool) or fact is None:
        return {True: "yes", False: "no", None: "unknown"}[fact]
    return format_bytes(fact) if name.endswith("_bytes") else str(fact)
