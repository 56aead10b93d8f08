"""Serves a log to Kafka's clients: a thread for each connection, which answers in order."""

from __future__ import annotations

import os
import re
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from time import monotonic
from typing import Any, Self

from embedlog.api import Log
from embedlog.errors import EmbedlogError, InvalidConfigError
from embedlog.files.peers import is_loopback, may_use, uid_of_peer
from embedlog.forks import new_lock
from embedlog.lazy import logging
from embedlog.metrics import SOCKETS, Metrics, Sample, nested
from embedlog.record import TopicPartition
from embedlog.server.answers import Answers, Caller, Fields
from embedlog.server.authentication import Authentication
from embedlog.server.classic_groups import ClassicGroups
from embedlog.server.cluster import Cluster
from embedlog.server.consumer_group_answers import ConsumerGroupAnswers
from embedlog.server.counts import RequestCounts
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.fetch import Fetcher
from embedlog.server.group_answers import GroupAnswers
from embedlog.server.memory import MemoryBudget
from embedlog.server.produce import Producers
from embedlog.server.protocol import (
    ApiRequest,
    MalformedMessageError,
    api_names,
    decode_request,
    encode_response,
    has_field,
    snake_case,
    versions,
)
from embedlog.server.remote_members import RemoteMembers
from embedlog.server.share_fetch import ShareFetcher
from embedlog.server.share_group_answers import ShareGroupAnswers
from embedlog.server.tail_cache import TailCache
from embedlog.server.tail_watch import TailWatch
from embedlog.server.transaction_answers import TransactionAnswers
from embedlog.server.transaction_coordinator import TransactionCoordinator
from embedlog.server.workers import Worker, Workers, new_workers, passed_on, receive

_logger = logging.getLogger("embedlog.server")

MAX_CONNECTIONS = 1000
MAX_FRAME_BYTES = 100 << 20
"""The largest request, as Kafka's ``socket.request.max.bytes``: only produce requests are large."""
MAX_OTHER_BYTES = 8 << 20
"""The largest request of another API."""
REQUEST_BYTES = ANSWER_BYTES = 256 << 20
"""What the requests, and the answers, of all connections together may take."""
_SMALL_BYTES = 64 << 10
"""Requests up to this size are not counted."""
_IDLE_SECONDS = 600.0
"""A connection without a request for so long is closed, as by ``connections.max.idle.ms``."""
_SENT_BYTES = 1 << 20
"""How much a client must take in the time that follows."""
_STALLED_SECONDS = 30.0
"""A connection is closed if the rest of a request does not come, or an answer is not taken."""
_LENGTH, _KEY = struct.Struct(">i"), struct.Struct(">h")
_PRODUCE = 0
_WORKER = "another process of the server"

APIS = (
    *("Produce", "Fetch", "ListOffsets", "Metadata", "OffsetCommit", "OffsetFetch"),
    *("FindCoordinator", "JoinGroup", "Heartbeat", "LeaveGroup", "SyncGroup", "DescribeGroups"),
    *("ListGroups", "ApiVersions", "CreateTopics", "DeleteTopics", "DeleteRecords"),
    *("InitProducerId", "OffsetForLeaderEpoch", "DescribeConfigs", "AlterConfigs"),
    *("IncrementalAlterConfigs", "CreatePartitions", "DeleteGroups", "OffsetDelete"),
    *("DescribeCluster", "DescribeTopicPartitions", "ElectLeaders", "DescribeLogDirs"),
    *("AlterPartitionReassignments", "ListPartitionReassignments", "ListConfigResources"),
    *("SaslHandshake", "SaslAuthenticate", "ConsumerGroupHeartbeat", "ConsumerGroupDescribe"),
    *("AddPartitionsToTxn", "AddOffsetsToTxn", "EndTxn", "TxnOffsetCommit"),
    *("ListTransactions", "DescribeTransactions"),
    *("ShareGroupHeartbeat", "ShareGroupDescribe", "ShareFetch", "ShareAcknowledge"),
    *("DescribeShareGroupOffsets", "AlterShareGroupOffsets", "DeleteShareGroupOffsets"),
)
"""What the server has, in all stable versions of Kafka's release."""
_VERSIONS = {"SaslHandshake": (1, 1), "AddPartitionsToTxn": (0, 3)}
"""The versions of what it does not have in all: after the handshake of version 0 come bytes that
are no requests, and later versions of the other are for brokers."""
_UNAUTHENTICATED = frozenset({"ApiVersions", "SaslHandshake", "SaslAuthenticate"})
"""What a client may ask before it has proved who it is."""
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
"""What the name and the version of a client's software may be."""
_SOFTWARE_SINCE = 3
"""The first version of ApiVersions that has them."""
_FEATURE, _LEVEL = "transaction.version", 2
"""What clients ask for by a feature: with this one each transaction has an epoch (KIP-890)."""
_MINIMUM_ZERO_SINCE = 4
"""The first version of ApiVersions whose clients accept features that may be off."""
ADVERTISED = {"Produce": 0, "SaslHandshake": 0}
"""The first version that is named, where it is an earlier one: librdkafka takes a server without
it for one that has no codecs, or no SASL.  Requests of those versions are refused."""

Handler = Callable[[Any, Caller], Fields | None]


class KafkaServer:
    """Serves an open log to Kafka's clients, in threads of this process, until it is closed.

    Clients connect to `bootstrap_servers`; each is told the IP address at which its connection
    arrived, or, if the connection is encrypted, the host name that the client asked for.

    >>> import embedlog, tempfile
    >>> with embedlog.open(tempfile.mkdtemp()) as log, embedlog.serve(log) as server:
    ...     server.bootstrap_servers.startswith("127.0.0.1:")
    True

    Args:
        log: The log, which stays open when the server is closed.
        host: The address to listen at.
        port: The port; 0 chooses a free one.
        insecure: Accept connections from other hosts, and from all users of this one, without
            authentication.
        users: The passwords of users by their names.  Each client must authenticate as one of
            them, by SASL with SCRAM-SHA-256, SCRAM-SHA-512, or, if the connection is encrypted or
            from this host, PLAIN.
        ssl_context: Encrypts the connections.  If it requires client certificates, these
            authenticate the clients.
        worker: This process is one of several that serve the log, and listens as this says.

    Raises:
        InvalidConfigError: Other hosts can reach the address, and clients need not authenticate,
            but ``insecure`` is not set; or it is set, and they must.
        OSError: The address cannot be used.
    """

    def __init__(
        self,
        log: Log,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        insecure: bool = False,
        users: Mapping[str, str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        worker: Worker | None = None,
    ) -> None:
        has_certificates = ssl_context is not None and ssl_context.verify_mode == ssl.CERT_REQUIRED
        is_proved = users is not None or has_certificates
        if insecure and is_proved:
            raise InvalidConfigError(
                "insecure lets everybody do everything, but clients must prove who they are",
                todo="Leave out one of the two.",
            )
        if not insecure and not is_proved and not is_loopback(host):
            raise InvalidConfigError(
                f"The address {host} can be reached from other hosts, and this server does not "
                "ask who its clients are",
                todo="Name the users (--users), listen at 127.0.0.1, or use insecure (--insecure) "
                "in a network that you trust.",
            )
        self._log, self._is_open = log, insecure or is_proved
        self.users, self.ssl_context = users, ssl_context
        if ssl_context is not None and ssl_context.sni_callback is None:
            ssl_context.sni_callback = _keep_host_name
        worker = worker or new_workers(host, port, 1)[0]
        self.host, self.port = host, worker.ports[worker.number]
        cluster = Cluster(log, worker.ports, worker.number)
        self.workers = Workers(worker, cluster)
        self.counts, self._accepted, self._refused = RequestCounts(), 0, 0
        self.answers = Answers(log, self.counts.error, cluster)
        self.cache, self.ahead = TailCache(), TailCache()
        self.members, self.watch = RemoteMembers(log), TailWatch(log.root)
        self.sharing: set[int] = set()
        """The members of share groups that this server has records for, by number."""
        self.groups = ClassicGroups(self.members.claim)
        self.transactions = TransactionCoordinator(log)
        self.answers.unstable = self._unstable
        self.requests, self.replies = MemoryBudget(REQUEST_BYTES), MemoryBudget(ANSWER_BYTES)
        self._connections: dict[Connection, threading.Thread] = {}
        self._lock, self._closed, self._pid = new_lock(), False, os.getpid()
        self._ending, self._end = socket.socketpair()
        self._worker, self._threads = worker, list[threading.Thread]()
        for listener in filter(None, (worker.listener, worker.links)):
            thread = threading.Thread(
                target=self._accept, args=(listener,), name="embedlog-server", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        log._adopt(self, "server")

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients, ``host:port``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def metrics(self) -> Metrics:
        """Return metrics by group and name, which are Kafka's.

        ``metrics()["kafka.network.RequestMetrics.Produce"]["requests-total"]`` is the number of
        produce requests.  The page on monitoring lists all.
        """
        return nested(self._samples())

    def _samples(self) -> Iterator[Sample]:
        with self._lock:
            accepted, count, refused = self._accepted, len(self._connections), self._refused
        values = {
            "connection-count": count,
            "connection-creation-total": accepted,
            "connection-close-total": accepted - count,
            "connection-refused-total": refused,
            "MemoryPoolAvailable": self.requests.left,
            "memory-pool-depleted-time-total": self.requests.waited_seconds * 1000,
        }
        for name, value in values.items():
            yield Sample(SOCKETS, name, value, {})
        yield from self.counts.samples()

    def _unstable(self, group: str, caller: Caller) -> set[TopicPartition]:
        """Return the partitions of a group whose offsets open transactions commit."""
        own = self.transactions.unstable(group)
        return own if caller.is_worker else own.union(self.workers.unstable(group))

    def _accept(self, listener: socket.socket) -> None:
        # A close does not wake `accept`, and a shutdown would end the listener of others, too.
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        while True:
            poll.poll()
            if self._closed:
                return
            try:
                connected, address = listener.accept()
            except OSError:
                _logger.exception("No connection could be accepted")
                threading.Event().wait(0.1)
                continue
            peer, reason = address[0] if address else _WORKER, self._refusal(connected)
            if reason is not None:
                _logger.warning("Refused a connection from %s: %s", peer, reason)
                with self._lock:
                    self._refused += 1
                connected.close()
                continue
            try:
                connection = Connection(self, connected)
            except OSError as error:  # The client has closed it already.
                _logger.debug("The connection of %s ended: %s", peer, error)
                connected.close()
                continue
            thread = threading.Thread(
                target=connection.run, name="embedlog-server-client", daemon=True
            )
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections[connection] = thread
                self._accepted += 1
            try:
                thread.start()
            except RuntimeError as error:
                _logger.warning("No thread for another connection: %s", error)
                self._forget(connection)

    def _refusal(self, connected: socket.socket) -> str | None:
        """Return why a connection is refused; None if it is not."""
        is_link = connected.family == socket.AF_UNIX
        if not is_link and len(self._connections) >= MAX_CONNECTIONS:
            return f"there are {MAX_CONNECTIONS} connections"
        if not is_link and self._is_open:
            return None
        try:
            uid = uid_of_peer(connected)
        except (OSError, LookupError, ValueError) as error:
            return f"its user is not known: {error}"
        if uid is None:
            return "its user is not known; clients in other network namespaces need --users"
        if not may_use(uid, self._log.path):
            return f"user {uid} does not own {self._log.path}"
        return None

    def _forget(self, connection: Connection) -> None:
        connection.close()
        with self._lock:
            self._connections.pop(connection, None)

    def close(self) -> None:
        """Close all connections, and return once no thread uses the log any more."""
        if self._pid != os.getpid():
            return  # A forked child, which closes the log that it inherited.
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = dict(self._connections)
        self._end.send(b"\0")  # It wakes the threads that accept.
        for connection in connections:
            connection.shut_down()
        self.groups.close()
        self.watch.close()
        for thread in self._threads:
            thread.join()
        if self._worker.links is None:
            # A forked child may have it, too.  That of one of several is their parent's.
            with suppress(OSError):
                self._worker.listener.shutdown(socket.SHUT_RDWR)
        self._worker.close()
        self._ending.close()
        self._end.close()
        for thread in connections.values():
            if thread.ident is not None:
                thread.join()
        self.transactions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<KafkaServer of {self._log.path} at {self.bootstrap_servers}>"


def _keep_host_name(connected: Any, name: str | None, _: ssl.SSLContext) -> None:
    """Note which host a client wants (SNI): it checks the certificate for that name."""
    connected.server_hostname = name


@cache
def offered() -> Mapping[str, tuple[int, int]]:
    """Return the versions that the server answers, by the names of the APIs."""
    return {name: _VERSIONS.get(name) or versions(name) for name in APIS}


def _api_keys() -> list[Fields]:
    keys = {name: key for key, name in api_names().items()}
    found = [
        {"api_key": keys[api], "min_version": ADVERTISED.get(api, first), "max_version": last}
        for api, (first, last) in offered().items()
    ]
    return sorted(found, key=lambda each: each["api_key"])


class Connection:
    """One client.

    Args:
        server: The server.
        connected: The socket.
    """

    def __init__(self, server: KafkaServer, connected: socket.socket) -> None:
        is_worker = connected.family == socket.AF_UNIX
        self._is_worker, self._host, self._port, self._peer = is_worker, "", 0, _WORKER
        if not is_worker:
            self._host, self._port = connected.getsockname()[:2]
            self._peer = str(connected.getpeername()[0])
        self._links: dict[int, socket.socket] = {}
        """To other workers."""
        context = None if is_worker else server.ssl_context
        if context is not None:
            # The thread of this connection waits for the client, not that which accepts.
            connected = context.wrap_socket(
                connected, server_side=True, do_handshake_on_connect=False
            )
        self._server, self._socket = server, connected
        is_private = context is not None or is_loopback(self._peer)
        self._authentication = Authentication(None if is_worker else server.users, is_private)
        answers, groups, members = server.answers, server.groups, server.members
        self._fetcher = Fetcher(
            *(answers, server.cache, server.ahead, server.watch, server.replies)
        )
        self._shares = ShareFetcher(self._fetcher, server.members, server.watch, server.sharing)
        parts = (
            self,
            self._authentication,
            self._fetcher,
            Producers(answers, server.cache, server.transactions),
            TransactionAnswers(answers, server.transactions, groups, members, server.workers),
            GroupAnswers(answers, groups, members),
            ConsumerGroupAnswers(answers, groups, members),
            ShareGroupAnswers(answers, groups, members),
            self._shares,
            answers,
        )
        self._handlers: dict[str, Handler] = {}
        for name in APIS:
            method = snake_case(name)
            part = next(each for each in parts if hasattr(each, method))
            self._handlers[name] = getattr(part, method)

    def run(self) -> None:
        """Answer requests until the client ends, or sends what is not one."""
        connected = self._socket
        _logger.debug("%s has connected", self._peer)
        try:
            if not self._is_worker:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if isinstance(connected, ssl.SSLSocket):
                connected.settimeout(_STALLED_SECONDS)
                connected.do_handshake()
                self._host = connected.server_hostname or self._host
            while self._answer_next():
                pass
            _logger.debug("%s has closed its connection", self._peer)
        except (ConnectionError, TimeoutError) as error:
            _logger.debug("The connection of %s ended: %s", self._peer, error)
        except (MalformedMessageError, EmbedlogError, ApiError, OSError) as error:
            if not self._server._closed:
                _logger.warning("Closed the connection of %s: %s", self._peer, error)
        finally:
            self._server._forget(self)

    def _answer_next(self) -> bool:
        """Answer the next request; False at the end of the connection."""
        head = bytearray(_LENGTH.size + _KEY.size)
        is_pending = self._authentication.is_pending
        idle_seconds = None if self._is_worker else _IDLE_SECONDS
        self._socket.settimeout(_STALLED_SECONDS if is_pending else idle_seconds)
        if not receive(self._socket, memoryview(head)):
            return False
        (size,), (key,) = _LENGTH.unpack_from(head), _KEY.unpack_from(head, _LENGTH.size)
        limit = MAX_FRAME_BYTES if key == _PRODUCE else MAX_OTHER_BYTES
        limit = _SMALL_BYTES if is_pending else limit
        if not _KEY.size < size <= limit:
            raise MalformedMessageError(
                f"a request of {size} bytes; those of API {api_names().get(key, key)} may have "
                f"{limit}"
            )
        # What another worker passes on is counted there: two that wait for each other would block.
        counted = 0 if self._is_worker or size <= _SMALL_BYTES else size
        if counted and not self._server.requests.wait_for(counted, _STALLED_SECONDS):
            raise TimeoutError("the requests of others take all memory")
        try:
            frame = memoryview(bytearray(size))
            frame[: _KEY.size] = head[_LENGTH.size :]
            self._socket.settimeout(_STALLED_SECONDS)
            if not receive(self._socket, frame[_KEY.size :]):
                return False
            began, request = monotonic(), decode_request(frame, offered())
            api, answer = request.api, self._answered(request, frame)
            del frame, request
        finally:
            self._server.requests.give_back(counted)
        if answer:
            self._send(answer)
        self._server.counts.request(api, size, sum(map(len, answer)), monotonic() - began)
        self._authentication.check()
        self._fetcher.sent()
        self._fetcher.read_ahead()
        return True

    def _answered(self, request: ApiRequest, frame: memoryview) -> list[bytes]:
        """Return the parts of the answer to a request, which has these bytes; empty if to none."""
        if request.body is None:
            if request.api != "ApiVersions":
                raise MalformedMessageError(
                    f"a request of API {request.api or 'unknown'}, version {request.version}, "
                    f"which this server does not have, by the client {request.client_id[:50]!r}"
                )
            failed = {"error_code": int(ErrorCode.UNSUPPORTED_VERSION), "api_keys": _api_keys()}
            return encode_response(request, 0, failed)
        if self._authentication.is_pending and request.api not in _UNAUTHENTICATED:
            raise MalformedMessageError(
                f"a request of API {request.api} before SASL, by the client "
                f"{request.client_id[:50]!r}"
            )
        workers, cluster = self._server.workers, self._server.answers.cluster
        worker = None if self._is_worker else workers.other_than_this(request)
        if worker is not None:
            if worker not in self._links:
                self._links[worker] = workers.connect(worker)
            return passed_on(self._links[worker], request, frame)
        caller = Caller(
            *(self._host, self._port, cluster.node()),
            *(request.client_id, self._peer, request.version),
            is_worker=self._is_worker,
        )
        try:
            fields = self._handlers[request.api](request.body, caller)
        except (EmbedlogError, ApiError) as error:
            if not has_field(f"{request.api}Response", request.version, "error_code"):
                raise
            fields = self._server.answers.failure(error)
        return [] if fields is None else encode_response(request, request.version, fields)

    def api_versions(self, request: Any, caller: Caller) -> Fields:
        """Answer: the APIs of the server, and their versions."""
        if caller.version >= _SOFTWARE_SINCE:
            for given in (request.client_software_name, request.client_software_version):
                if not _SOFTWARE.fullmatch(given):
                    text = f"The software of a client cannot be called {given[:50]!r}"
                    raise ApiError(ErrorCode.INVALID_REQUEST, text)
        supported = {"name": _FEATURE, "min_version": 0, "max_version": _LEVEL}
        levels = {"min_version_level": _LEVEL, "max_version_level": _LEVEL}
        return {
            "api_keys": _api_keys(),
            "supported_features": [supported] if caller.version >= _MINIMUM_ZERO_SINCE else [],
            "finalized_features_epoch": 0,
            "finalized_features": [{"name": _FEATURE, **levels}],
        }

    def _send(self, parts: list[bytes]) -> None:
        # Records are not copied; all else is small.
        small: list[bytes] = []
        for part in parts:
            if len(part) > _SMALL_BYTES:
                self._socket.sendall(b"".join(small))
                small = []
                # The timeout of the socket is for each call, however slow a client is.
                for at in range(0, len(part), _SENT_BYTES):
                    self._socket.sendall(memoryview(part)[at : at + _SENT_BYTES])
            else:
                small.append(part)
        if small:
            self._socket.sendall(b"".join(small))

    def shut_down(self) -> None:
        """End the connection; its thread notices."""
        for each in (self._socket, *list(self._links.values())):
            # That of TLS forgets the keys, which the thread may be using.
            with suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, and release the records that the client has of share groups."""
        self._fetcher.sent()
        for each in (self._socket, *self._links.values()):
            each.close()
        self._shares.close()


def serve(
    log: Log,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    insecure: bool = False,
    users: Mapping[str, str] | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> KafkaServer:
    """Serve an open log to Kafka's clients, in threads of this process; see `KafkaServer`."""
    return KafkaServer(log, host, port, insecure=insecure, users=users, ssl_context=ssl_context)
