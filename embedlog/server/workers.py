"""The processes of a server, its *workers*: the threads of one process use about one core.

Clients spread their requests by themselves: to them each worker is a broker, which leads partitions
and coordinates groups and transactions (`cluster`).  Any worker reads and writes any partition, and
takes the steps of members that are rows of the log.  What is in memory only is at the coordinator:
open transactions, and groups whose members assign partitions among themselves.  So a request that
names one of these and comes to another worker, as records of a transaction do, is passed on, over a
connection that only users who may do everything with the log can make.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from embedlog.files.peers import listener_of_host
from embedlog.record import TopicPartition
from embedlog.server.cluster import Cluster
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.protocol import ApiRequest, decode_response, encode_request

_BACKLOG, _ASK_SECONDS = 128, 30.0
_LENGTH = struct.Struct(">i")
_KEYS = ("transactional_id", "v3_and_below_transactional_id", "group_id")
"""The fields of requests that name what a worker has in its memory; transactions come first."""
_OF_ROWS = frozenset({"OffsetFetch", "ShareFetch", "ShareAcknowledge"})
"""Requests that name a group, and that any worker answers: by rows of the log, and by what clients
have said to this worker.  Offsets that are pending, each worker asks all others for."""


class Worker(NamedTuple):
    """What a process needs to be one of the workers."""

    number: int
    listener: socket.socket
    """Where clients connect; the parent has it, too, so they wait while the worker is restarted."""
    links: socket.socket | None
    """Where the other workers connect; None without others."""
    ports: tuple[int, ...]
    """Those of all workers."""
    addresses: tuple[Any, ...]
    """Of their ``links``."""

    def close(self) -> None:
        """Close what it listens at."""
        for each in (self.listener, self.links):
            if each is not None:
                each.close()


def new_workers(host: str, port: int, count: int) -> list[Worker]:
    """Return so many workers, which listen at one port after the other, or at free ones.

    Raises:
        OSError: An address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    pairs = list[tuple[socket.socket, socket.socket | None]]()
    with ExitStack() as opened:
        for number in range(count):
            address = host, port and port + number
            try:
                listener = socket.create_server(address, family=family, backlog=_BACKLOG)
            except OSError as error:
                error.strerror = f"{error.strerror}; pass another address, or port 0 for a free one"
                raise
            opened.enter_context(listener)
            links = opened.enter_context(listener_of_host(_BACKLOG)) if count > 1 else None
            pairs.append((listener, links))
        opened.pop_all()
    ports = tuple(listener.getsockname()[1] for listener, _ in pairs)
    addresses = tuple(links.getsockname() for _, links in pairs if links is not None)
    return [Worker(number, *pair, ports, addresses) for number, pair in enumerate(pairs)]


class Workers:
    """The other workers, as one of them sees them.

    Args:
        worker: This one.
        cluster: What clients see.
    """

    def __init__(self, worker: Worker, cluster: Cluster) -> None:
        self._worker, self._cluster = worker, cluster
        self._others = [n for n in range(len(worker.ports)) if n != worker.number]

    def other_than_this(self, request: ApiRequest) -> int | None:
        """Return the worker that has what a request is about; None if it is this one, or any."""
        if not self._others or request.api in _OF_ROWS:
            return None
        named = (getattr(request.body, name, None) for name in _KEYS)
        key = next(filter(None, named), None)
        return None if key is None else self._other_of(key)

    def _other_of(self, key: str) -> int | None:
        number = self._cluster.worker_of(key)
        return number if number in self._others else None

    def connect(self, number: int) -> socket.socket:
        """Return a connection to a worker.

        Raises:
            OSError: It cannot be reached.
        """
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.connect(self._worker.addresses[number])
        except OSError:
            connected.close()
            raise
        return connected

    def _ask(self, number: int, api: str, version: int, **fields: Any) -> Any:
        """Return the answer of a worker.

        Raises:
            ConnectionError: It has ended.
            TimeoutError: It does not answer.
        """
        with self.connect(number) as connected:
            connected.settimeout(_ASK_SECONDS)
            connected.sendall(encode_request(api, version, fields))
            return decode_response(api, version, b"".join(answer_of(connected)))

    def check_committer(self, group: str, generation: int, member: str, instance: Any) -> bool:
        """Check whether a client may commit offsets of a group, if that is in another worker.

        Returns:
            Whether it is.

        Raises:
            ApiError: The client may not, or its group cannot be asked now.
        """
        number = self._other_of(group)
        if number is None:
            return False
        who = {"member_id": member, "group_instance_id": instance, "generation_id": generation}
        try:
            code = self._ask(number, "Heartbeat", 4, group_id=group, **who).error_code
        except ConnectionError as error:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, str(error)) from error
        # Other commits must wait for the assignment, but not those of transactions.
        if code not in (ErrorCode.NONE, ErrorCode.REBALANCE_IN_PROGRESS):
            raise ApiError(ErrorCode(code), f"The client is no member of the group {group} now")
        return True

    def unstable(self, group: str) -> Iterator[TopicPartition]:
        """Yield partitions of a group whose offsets open transactions of others commit."""
        for number in self._others:
            # The transactions of a worker that has just ended are lost.
            with suppress(ConnectionError):
                asked = {"group_id": group, "topics": None, "require_stable": True}
                for topic in self._ask(number, "OffsetFetch", 7, **asked).topics:
                    for item in topic.partitions:
                        if item.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT:
                            yield TopicPartition(topic.name, item.partition_index)


def passed_on(link: socket.socket, request: ApiRequest, frame: memoryview) -> list[bytes]:
    """Return the parts of the answer that another worker gives to a request; empty if to none.

    Raises:
        ConnectionError: It has ended.
    """
    link.sendall(_LENGTH.pack(len(frame)))
    link.sendall(frame)
    wants_none = request.api == "Produce" and not request.body.acks
    return [] if wants_none else answer_of(link)


def answer_of(link: socket.socket) -> list[bytes]:
    """Return the length and the bytes of the next answer.

    Raises:
        ConnectionError: The worker has ended.
    """
    head = _received(link, _LENGTH.size)
    return [head, _received(link, *_LENGTH.unpack(head))]


def _received(link: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    if not receive(link, memoryview(data)):
        raise ConnectionResetError("another process of the server has ended")
    return bytes(data)


def receive(connected: socket.socket, buffer: memoryview) -> bool:
    """Fill a buffer; False if the connection ended."""
    while buffer:
        received = connected.recv_into(buffer)
        if not received:
            return False
        buffer = buffer[received:]
    return True
