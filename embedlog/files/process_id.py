"""Identifying a process: its pid alone is not enough, since pids are reused."""

from __future__ import annotations

import os
from typing import NamedTuple

from embedlog.files.filesystem import proc_file


class ProcessId(NamedTuple):
    """One process, unique over machines, their boots, and containers."""

    boot: str
    """The first characters of the kernel's id of the boot, and the process namespace."""
    pid: int
    started: int
    """Its start, in ticks of the kernel since the boot."""

    def __str__(self) -> str:
        return f"{self.boot}-{self.pid}-{self.started}"

    @property
    def here(self) -> bool:
        """Whether the pid belongs to this boot and process namespace, and so has a meaning."""
        return self.boot == _boot()

    @property
    def alive(self) -> bool:
        """Whether the process still runs; valid only if it is `here`."""
        return process(self.pid) == self


def process(pid: int | None = None) -> ProcessId | None:
    """Return a process by its pid, this one by default; None if there is none."""
    pid = os.getpid() if pid is None else pid
    fields = _fields(pid)
    # proc(5): the state, then the parent as field 4, and the start as field 22; "Z" is dead.
    return ProcessId(_boot(), pid, int(fields[19])) if fields and fields[0] not in "ZX" else None


def ancestor(program: str) -> ProcessId | None:
    """Return the nearest ancestor of this process that runs a program of that name."""
    pid = os.getpid()
    while pid > 1:
        status = proc_file(f"{pid}/stat")
        if status.partition("(")[2].rpartition(")")[0] == program:
            return process(pid)
        fields = _fields(pid)
        pid = int(fields[1]) if fields else 0
    return None


def parse(name: str) -> ProcessId | None:
    """Return the process that `ProcessId.__str__` named; None for any other name."""
    boot, _, rest = name.partition("-")
    pid, _, started = rest.partition("-")
    return (
        ProcessId(boot, int(pid), int(started)) if pid.isdecimal() and started.isdecimal() else None
    )


def _fields(pid: int) -> list[str]:
    return proc_file(f"{pid}/stat").rpartition(")")[2].split()


def _boot() -> str:
    boot = proc_file("sys/kernel/random/boot_id").replace("-", "")[:12]
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{boot}.{namespace}"
