"""Who is at the other end of a connection on this host.

A socket of loopback has no permissions: any user could read a log through it that the directory
forbids.  The kernel lists the user of each connection.
"""

from __future__ import annotations

import os
import socket
import stat
import struct

_TABLES = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}


def is_loopback(host: str) -> bool:
    """Whether only this host can connect to an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    return host == "::1" or host == "localhost" or host.startswith("127.")


def uid_of_peer(connection: socket.socket) -> int | None:
    """Return the user at the other end of a connection of this host; None if it is not listed."""
    local, remote = connection.getsockname(), connection.getpeername()
    mine, theirs = _as_listed(connection.family, local), _as_listed(connection.family, remote)
    with open(_TABLES[connection.family], encoding="ascii") as table:
        for line in table:
            fields = line.split()
            # The other end has this connection the other way round.
            if fields[1] == theirs and fields[2] == mine:
                return int(fields[7])
    return None


def _as_listed(family: int, address: tuple[str, int]) -> str:
    """Return an address in the form of the table: words of 32 bits in the order of the machine."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"


def may_read(uid: int, directory: str) -> bool:
    """Whether the permissions of a directory let a user read it.

    The superuser may, and the owner, and the others if all may; members of its group are not
    looked up.
    """
    status = os.stat(directory)
    if uid in (0, status.st_uid):
        return True
    return stat.S_IMODE(status.st_mode) & 0o5 == 0o5
