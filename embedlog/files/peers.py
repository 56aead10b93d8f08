"""Who is at the other end of a connection on this host.

A socket of loopback has no permissions: any user could read a log through it that the directory
forbids.  The kernel lists the user of each connection.
"""

from __future__ import annotations

import os
import socket
import struct
from ipaddress import ip_address

_MAPPED = "0000000000000000FFFF0000"
"""Before an address of IPv4 in the table of IPv6: of sockets that are for both, such as Java's."""
_CREDENTIALS = struct.Struct("=3i")
"""The process, the user and the group at the other end of a Unix socket."""


def is_loopback(host: str) -> bool:
    """Whether only this host can connect to an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("127.example.com")
    (True, True, False)
    """
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # The name of a host may mean any address.
        return False


def listener_of_host(backlog: int) -> socket.socket:
    """Return a listening socket that only processes of this host reach."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # The kernel chooses a name, which is no file.
    listener.listen(backlog)
    return listener


def uid_of_peer(connection: socket.socket) -> int | None:
    """Return the user at the other end of a connection of this host; None if it is not listed."""
    if connection.family == socket.AF_UNIX:
        _, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return int(uid)
    mine, theirs = _as_listed(connection.getsockname()), _as_listed(connection.getpeername())
    tables = {"/proc/net/tcp6": ""}
    if len(mine) == len("0100007F:0000"):
        tables = {"/proc/net/tcp": "", "/proc/net/tcp6": _MAPPED}
    for name, prefix in tables.items():
        # The other end has this connection the other way round.
        ends = [prefix + theirs, prefix + mine]
        with open(name, encoding="ascii") as table:
            for line in table:
                fields = line.split()
                if fields[1:3] == ends:
                    return int(fields[7])
    return None


def _as_listed(address: tuple[str, int]) -> str:
    """Return an address in the form of the table: words of 32 bits in the order of the machine."""
    host = address[0].partition("%")[0].removeprefix("::ffff:")
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"


def may_use(uid: int, directory: str) -> bool:
    """Whether a user may do with a directory all that this process may: its owner, and root.

    What `share` lets a group do is less than a server does for its clients.
    """
    return uid in (0, os.geteuid(), os.stat(directory).st_uid)
