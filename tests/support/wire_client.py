"""A client of Kafka's protocol that sends any version of any request, and bytes that are none."""

from __future__ import annotations

import socket
import struct
from typing import Any, Self

from embedlog.server import protocol
from support.patience import patient


def flexible(message: str, version: int) -> bool:
    """Whether a version of a message has tagged fields."""
    return protocol._has(protocol._messages()[message].get("flexibleVersions"), version)


def request_bytes(api: str, version: int, correlation_id: int = 7, **fields: Any) -> bytes:
    """Return a request with its length."""
    keys = {name: key for key, name in protocol.api_names().items()}
    head = struct.pack(">hhih", keys[api], version, correlation_id, 4) + b"test"
    tags = b"\0" if flexible(f"{api}Request", version) else b""
    body = head + tags + protocol.encode(f"{api}Request", version, fields)
    return struct.pack(">i", len(body)) + body


class WireClient:
    """A connection.

    Args:
        address: ``host:port``.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout=patient(30))

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(data)

    def answer(self) -> bytes | None:
        """Return the bytes of the next answer; None if the server has closed the connection."""
        head = self._receive(4)
        return None if head is None else self._receive(*struct.unpack(">i", head))

    def _receive(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            try:
                part = self.socket.recv(size - len(data))
            except ConnectionError:
                return None
            if not part:
                return None
            data += part
        return data

    def decoded(self, api: str, version: int) -> Any:
        """Return the next answer."""
        data = self.answer()
        assert data is not None, "the server closed the connection"
        has_tags = api != "ApiVersions" and flexible(f"{api}Response", version)
        return protocol.decode(f"{api}Response", version, data[5 if has_tags else 4 :])

    def ask(self, api: str, version: int, **fields: Any) -> Any:
        """Send a request, and return the answer."""
        self.send(request_bytes(api, version, **fields))
        return self.decoded(api, version)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
