"""Which process is which: its number alone is given to another one when it ends."""

from __future__ import annotations

import os
from typing import NamedTuple

from embedlog.files.filesystem import proc_file


class ProcessId(NamedTuple):
    """One process among all there ever are: of machines, of their boots, and of containers."""

    boot: str
    """The first letters of the kernel's id of the boot, and the process namespace."""
    pid: int
    started: int
    """In ticks of the kernel since the boot."""

    def __str__(self) -> str:
        return f"{self.boot}-{self.pid}-{self.started}"

    @property
    def here(self) -> bool:
        """Whether it can be seen from this process."""
        return self.boot == _boot()

    @property
    def alive(self) -> bool:
        """Whether it still runs; only for one that is `here`."""
        return process(self.pid) == self


def process(pid: int | None = None) -> ProcessId | None:
    """Return a process by its number, this one by default; None if there is none."""
    fields = _fields(os.getpid() if pid is None else pid)
    # proc(5): the state, then the parent as field 4, and the start as field 22; "Z" is dead.
    if not fields or fields[0] in "ZX":
        return None
    return ProcessId(_boot(), os.getpid() if pid is None else pid, int(fields[19]))


def ancestor(program: str) -> ProcessId | None:
    """Return the nearest ancestor of this process that runs a program of that name."""
    pid = os.getpid()
    while pid > 1:
        told = proc_file(f"{pid}/stat")
        if told.partition("(")[2].rpartition(")")[0] == program:
            return process(pid)
        fields = _fields(pid)
        pid = int(fields[1]) if fields else 0
    return None


def parse(name: str) -> ProcessId | None:
    """Return the process that `ProcessId.__str__` named; None if that is no such name."""
    boot, _, rest = name.partition("-")
    pid, _, started = rest.partition("-")
    return ProcessId(boot, int(pid), int(started)) if pid.isdigit() and started.isdigit() else None


def _fields(pid: int) -> list[str]:
    return proc_file(f"{pid}/stat").rpartition(")")[2].split()


def _boot() -> str:
    boot = proc_file("sys/kernel/random/boot_id").replace("-", "")[:12]
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{boot}.{namespace}"
