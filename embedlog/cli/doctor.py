"""`embedlog doctor`: checks the machine, and the state of the log."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import metadata
from typing import Any

from embedlog import checksum, kv
from embedlog.cli.open_log import is_log, root_of, to_read
from embedlog.cli.parser import FAILED, OK
from embedlog.cli.printing import say_result
from embedlog.display import plural
from embedlog.errors import EmbedlogError, NotALogError
from embedlog.files import Files
from embedlog.files.filesystem import REMOTE_FILESYSTEMS, process_state
from embedlog.files.paths import FORMAT_FILE
from embedlog.files.reserve import Reserve
from embedlog.keyspace import FORMAT_VERSION
from embedlog.progress import format_bytes
from embedlog.publish import staging
from embedlog.replication.member_file import DirectoryMember, read_member
from embedlog.root import startup
from embedlog.version import __version__

_LIBRARIES = ("pyarrow", "lmdb", "numpy", "sortedcontainers", "google-crc32c", "crcmod")
_ABSENT = "not installed"
_REMOTE = frozenset(REMOTE_FILESYSTEMS.values())
_SLOW_CHECKSUM = 500
_SLOW_FSYNC_US = 50_000
_LITTLE_SPACE = 1 << 30
_LOCK_SECONDS = 1.0
_LONG_READ_SECONDS = 1.0
"""Reads by embedlog take microseconds."""
_PROBES = 9

Report = dict[str, Any]


def report_of(args: argparse.Namespace) -> Report:
    """Return the measurements of the machine, and of the log if there is one."""
    report: Report = {"versions": _versions(), "checksum": _checksum()}
    root = root_of(args)
    if os.path.isdir(root):
        files = Files(root, writable=False, unsafe_filesystem=True)
        try:
            report["storage"] = _storage(files)
            # Its databases must not be opened, nor its locks be taken, from another host.
            if is_log(root) and report["storage"]["filesystem"] not in _REMOTE:
                report["log"] = _log(files)
                member = read_member(files)
                if member is not None:
                    report["directories"] = {
                        str(number): _directory(member, number) for number in sorted(member.paths)
                    }
                    report["copies"] = _copies(args)
        finally:
            files.close_all()
    elif os.path.exists(root):
        raise NotALogError("The path is a file", path=root)
    return report


def _versions() -> Report:
    versions = {"embedlog": __version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            versions[library] = _ABSENT
    return {**versions, "kernel": f"{platform.system()} {platform.release()} {platform.machine()}"}


def _checksum() -> Report:
    """Return the speed of CRC-32C: the best of several runs over a mebibyte."""
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
        "free_bytes": _free_bytes(files.root),
        "reserve_bytes": Reserve(files).held(),
        "writable": writable,
        "fsync_us": _fsync_us(files.root) if writable else None,
    }


def _free_bytes(path: str) -> int:
    """Return the free bytes for any user; root may also use blocks that ext4 reserves."""
    return shutil.disk_usage(path).free


def _fsync_us(root: str) -> int:
    """Return the median time of a flush of 4 KiB, in a temporary file."""
    files = Files(root, unsafe_filesystem=True)
    # Files that begin with a dot are not part of a log.
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
    try:
        version = tomllib.loads(files.read_file(FORMAT_FILE).decode()).get("format")
    except ValueError:
        version = None
    live_is_valid = startup.live_is_valid(files)
    jobs, now_ms = staging.job_directories(files), time.time_ns() // 1_000_000
    return {
        "format": version if isinstance(version, int) else None,
        "in_use": _in_use(files),
        "closed_cleanly": files.exists(startup.CLEAN_FILE),
        "live_is_of_this_boot": live_is_valid,
        "boot_id": files.boot_id(),
        "staged_jobs": len(jobs),
        "orphaned_jobs": sum(staging.is_orphaned(job, now_ms) for job in jobs),
        **{name: _database(files, name) for name in ("state", "live")[: 1 + live_is_valid]},
    }


def _directory(member: DirectoryMember, number: int) -> Report:
    """Check the path of a directory of the log."""
    path = member.paths[number]
    report: Report = {"path": path, "device": None, "free_bytes": 0, "state": "missing"}
    if not os.path.isdir(path):
        return report
    try:
        files = Files(path, writable=False)
        try:
            other, (device, _) = read_member(files), files.identity()
        finally:
            files.close_all()
    except EmbedlogError as error:
        return {**report, "state": str(error)}
    is_it = other is not None and other[:2] == (member.cluster_id, number)
    return {
        "path": path,
        "device": f"{os.major(device)}:{os.minor(device)}",
        "free_bytes": _free_bytes(path),
        "state": "present" if is_it else f"there, but not directory {number} of the log",
    }


def _copies(args: argparse.Namespace) -> Report:
    """Count the partitions that lack copies, by the metadata."""
    try:
        with to_read(args) as log:
            directories, leaderless = list(log.replicas), log.replicas.leaderless
            infos = log.root.topics().values()
            placements = [part.placement for part in log.root.partition_logs(infos)]
    except EmbedlogError as error:
        return {"error": str(error)}
    return {
        "online": sum(each.online for each in directories),
        "offline": sum(not each.online for each in directories),
        "under_replicated": sum(len(each.isr) < len(each.replicas) for each in placements),
        "single": sum(len(each.replicas) == 1 for each in placements),
        "leaderless": len(leaderless),
    }


def _in_use(files: Files) -> bool | None:
    """Whether a process has the log open for writing; None if the lock stays taken."""
    if not files.exists("locks/root") or not files.exists("locks/attached"):
        return False
    root, attached = files.open("locks/root"), files.open("locks/attached")
    try:
        files.lock(root, _LOCK_SECONDS)
        if not files.try_lock(attached):
            return True
        files.unlock(attached)
        return False
    except EmbedlogError:
        return None
    finally:
        files.close(attached)
        files.close(root)


def _database(files: Files, name: str) -> Report:
    durable = name == "state"
    try:
        with closing(kv.LmdbStore(files, name, durable=durable, timeout=_LOCK_SECONDS)) as store:
            used, slots = store.readers()
            return {
                "rows": store.read(lambda txn: int(txn.stat()["entries"])),
                "reader_slots_used": used,
                "reader_slots": slots,
                "old_readers": _old_readers(store),
            }
    except EmbedlogError as error:
        return {"error": str(error)}


def _old_readers(store: kv.LmdbStore) -> list[int]:
    """Return the processes with a long read; waits only if there may be one."""
    before = store.lagging()
    if not before:
        return []
    threading.Event().wait(_LONG_READ_SECONDS)
    # A read that began meanwhile would have a newer snapshot, so these are the same reads.
    return sorted({pid for pid, _, _ in before & store.lagging()})


def findings_of(report: Report) -> Iterator[str]:
    """Yield the problems that the user should solve."""
    speed = report["checksum"]["mb_per_second"]
    if speed < _SLOW_CHECKSUM:
        yield f"Checksums run at {speed} MB/s only; install google-crc32c"
    for name in _LIBRARIES[:4]:
        if report["versions"][name] == _ABSENT:
            yield f"{name} is not installed"
    if "storage" in report:
        yield from _storage_findings(report["storage"])
    if "log" in report:
        yield from _log_findings(report["log"])
    if "directories" in report:
        yield from _directory_findings(report["directories"], report["copies"])


def _storage_findings(storage: Report) -> Iterator[str]:
    if storage["filesystem"] in _REMOTE:
        yield (
            f"{storage['filesystem']} is a remote file system: open the log on the host that has "
            "its disk"
        )
    if storage["free_bytes"] < _LITTLE_SPACE:
        yield f"Only {format_bytes(storage['free_bytes'])} are free"
    if not storage["writable"]:
        yield "This user has no permission to write to the directory"
    if (storage["fsync_us"] or 0) > _SLOW_FSYNC_US:
        yield f"A flush takes {storage['fsync_us']} µs"


def _log_findings(log: Report) -> Iterator[str]:
    if log["format"] != FORMAT_VERSION:
        older = log["format"] is not None and log["format"] < FORMAT_VERSION
        version = "the version of embedlog that wrote it" if older else "a newer embedlog"
        yield f"The log has format {log['format']}; use {version}"
    if log["in_use"] is None:
        yield "Another process has been opening the log for a long time"
    if not log["live_is_of_this_boot"]:
        yield "live is from another boot; the next process to open the log rebuilds it"
    elif not log["in_use"] and not log["closed_cleanly"]:
        yield "The log was not closed cleanly; the next process to open it recovers it"
    if log["orphaned_jobs"]:
        yield (
            f"There are staged files of {plural(log['orphaned_jobs'], 'job')} that will not be "
            "published; the next publication, or embedlog repair, removes them"
        )
    for name in ("state", "live"):
        database = log.get(name, {})
        if "error" in database:
            yield f"{name} cannot be read: {database['error']}"
        elif database and database["reader_slots_used"] > 0.9 * database["reader_slots"]:
            yield f"{name} has almost no reader slots left"
        for pid in database.get("old_readers", ()):
            yield (
                f"Process {pid} (state {process_state(pid) or 'unknown'}) has been reading {name} "
                f"for more than {_LONG_READ_SECONDS:g} s; the file grows until the read ends"
            )


def _directory_findings(directories: Report, copies: Report) -> Iterator[str]:
    devices: dict[str, list[str]] = {}
    for directory in directories.values():
        if directory["state"] != "present":
            yield f"{directory['path']} is {directory['state']}"
            continue
        devices.setdefault(directory["device"], []).append(directory["path"])
        if directory["free_bytes"] < _LITTLE_SPACE:
            yield f"Only {format_bytes(directory['free_bytes'])} are free in {directory['path']}"
    for paths in devices.values():
        if len(paths) > 1:
            yield f"{' and '.join(paths)} are on one file system, and break together"
    if "error" in copies:
        yield f"The log cannot be read: {copies['error']}"
        return
    if copies["offline"]:
        yield f"{plural(copies['offline'], 'directory', 'directories')} offline"
    if copies["leaderless"]:
        yield f"{plural(copies['leaderless'], 'partition')} without a leader"
    if copies["under_replicated"]:
        yield f"{plural(copies['under_replicated'], 'partition')} with copies that are not in sync"


def lines_of(report: Report, findings: list[str]) -> Iterator[str]:
    """Yield the lines to print for a report and its findings."""
    for title, facts in report.items():
        yield f"{title}:"
        for name, fact in facts.items():
            yield f"  {name.replace('_', ' ')}: {_format_fact(name, fact)}"
    yield "findings:" if findings else "findings: none"
    yield from (f"  {finding}" for finding in findings)


def _format_fact(name: str, fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(
            f"{key.replace('_', ' ')} {_format_fact(key, value)}" for key, value in fact.items()
        )
    if isinstance(fact, bool) or fact is None:
        return {True: "yes", False: "no", None: "unknown"}[fact]
    return format_bytes(fact) if name.endswith("_bytes") else str(fact)


def doctor(args: argparse.Namespace) -> int:
    """Print measurements and findings."""
    report = report_of(args)
    findings = list(findings_of(report))
    say_result(args, {**report, "findings": findings}, lines_of(report, findings))
    return FAILED if findings else OK
