"""Clients of Kafka's protocol: on a connection, with any version of any request, and bytes that are
none; and without one, which ask a server in this process."""

from __future__ import annotations

import socket
import struct
from typing import Any, Self

from embedlog.api import Log
from embedlog.server import protocol
from embedlog.server.answers import Answers, Caller
from embedlog.server.classic_groups import ClassicGroups
from embedlog.server.consumer_group_answers import ConsumerGroupAnswers
from embedlog.server.error_codes import ErrorCode
from embedlog.server.group_answers import GroupAnswers
from embedlog.server.remote_members import RemoteMembers
from support.patience import patient


def flexible(message: str, version: int) -> bool:
    """Whether a version of a message has tagged fields."""
    return protocol._is_flexible(message, version)


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


class DirectServer:
    """What a server knows of groups, without threads and sockets.

    Args:
        log: The log.
    """

    def __init__(self, log: Log) -> None:
        self.answers, self.members = Answers(log), RemoteMembers(log)
        self.groups = ClassicGroups(self.members.claim)

    def connect(self) -> DirectClient:
        """Return a client that asks it."""
        return DirectClient(self)


class DirectClient:
    """Asks about groups and topics as on a connection, and has the answer when a call returns.

    Args:
        server: The server.
    """

    def __init__(self, server: DirectServer) -> None:
        of_groups = server.answers, server.groups, server.members
        self._parts = GroupAnswers(*of_groups), ConsumerGroupAnswers(*of_groups), server.answers
        self.loses = ""
        """The API whose next answer does not reach the client."""

    def ask(self, api: str, version: int, **fields: Any) -> Any:
        """Send a request, and return the answer.

        Raises:
            ConnectionError: The request was answered, but the answer is lost.
        """
        names, data = f"{api}Request", protocol.encode(f"{api}Request", version, fields)
        name = protocol.snake_case(api)
        part = next(each for each in self._parts if hasattr(each, name))
        caller = Caller("127.0.0.1", 1, 0, "test", "127.0.0.1", version)
        answer = getattr(part, name)(protocol.decode(names, version, data), caller)
        # Who is only told its id has not joined.
        if api == self.loses and answer.get("error_code") != ErrorCode.MEMBER_ID_REQUIRED:
            raise ConnectionError("the answer is lost")
        names = f"{api}Response"
        return protocol.decode(names, version, protocol.encode(names, version, answer))

    def close(self) -> None:
        """End as a connection would: nothing is known of it."""
