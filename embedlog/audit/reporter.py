"""The reporter of an open log: appends what its clients counted to ``__audit``.

One thread for all producers and consumers of a log in this process.  It appends every few
seconds, if there is anything to report, and a client that is closed reports immediately.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache

from embedlog.audit import audit_topic
from embedlog.audit.audit_topic import SKIP, START, ClientProcess, Report
from embedlog.errors import ClosedError
from embedlog.forks import new_lock
from embedlog.listeners import Client, Listener
from embedlog.partition import PartitionLog
from embedlog.root.root import Root

REPORT_SECONDS = 10.0
"""How long a count waits for its report, unless its client is closed before."""

_MAX_UNWRITTEN = 10_000
"""Reports that are kept while none can be appended; older ones are dropped."""
_log = logging.getLogger("embedlog.audit")


class AuditReporter:
    """Appends the reports of the clients of one log.

    A report that cannot be appended, as when the disk is full, is tried again with the next
    ones.  Errors are only logged: counting must not stop a client.
    """

    def __init__(self, root: Root) -> None:
        # Weak: the root is the key under which the reporter is kept.
        self._root = weakref.ref(root)
        self.generation = root.generation
        self._counters: weakref.WeakSet[Counts] = weakref.WeakSet()
        self._unwritten: list[Report] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        # Random bits, so that the numbers of two processes differ; they must not be negative.
        self._numbers = itertools.count(int.from_bytes(os.urandom(7)) << 7)

    def add(self, counter: Counts) -> None:
        """Report what a client counts, from now on until it is garbage."""
        with self._lock:
            self._counters.add(counter)
            if self._thread is None:
                thread = threading.Thread(
                    target=_run,
                    name="embedlog-audit",
                    args=(weakref.ref(self), self._stopped),
                    daemon=True,
                )
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:
                    # What it counts is reported when it is closed, or by a later thread.
                    _log.warning("Counts are not reported meanwhile: %s", error)

    def remove(self, counter: Counts) -> None:
        """Report what a client counted, now and for the last time."""
        self.report([counter])
        with self._lock:
            self._counters.discard(counter)

    def report_all(self) -> None:
        """Report what all clients counted."""
        with self._lock:
            counters = list(self._counters)
        self.report(counters)

    def report(self, counters: Sequence[Counts] = (), reports: Sequence[Report] = ()) -> None:
        """Append what clients counted, and other reports, now."""
        root = self._root()
        with self._lock:
            for counter in counters:
                self._unwritten += counter.take_reports()
            self._unwritten += reports
            if root is None or not self._unwritten:
                return
            if len(self._unwritten) > _MAX_UNWRITTEN:
                dropped = len(self._unwritten) - _MAX_UNWRITTEN
                _log.error("Lost %d reports of %s: none can be appended", dropped, root.path)
                del self._unwritten[:dropped]
            self._unwritten = [
                report if report.number else report._replace(number=next(self._numbers))
                for report in self._unwritten
            ]
            try:
                audit_topic.append(root, self._unwritten)
            except ClosedError:
                self._stopped.set()  # the log was closed before the client
            except Exception as error:  # noqa: BLE001 - the client continues
                count = len(self._unwritten)
                _log.warning("Cannot append %d reports of %s: %s", count, root.path, error)
                return
            self._unwritten = []


def _run(reference: weakref.ref[AuditReporter], stopped: threading.Event) -> None:
    """Report every few seconds, until the log is closed or garbage."""
    while not stopped.wait(REPORT_SECONDS):
        reporter = reference()
        root = None if reporter is None else reporter._root()
        if reporter is None or root is None or root.closed:
            return
        reporter.report_all()
        del reporter, root


_reporters: weakref.WeakKeyDictionary[Root, AuditReporter] = weakref.WeakKeyDictionary()
_reporters_lock = new_lock()


def reporter_of(root: Root) -> AuditReporter:
    """Return the reporter of an open log; another one in a forked child."""
    with _reporters_lock:
        reporter = _reporters.get(root)
        if reporter is None or reporter.generation != root.generation:
            reporter = _reporters[root] = AuditReporter(root)
        return reporter


@cache
def _host() -> str:
    return socket.gethostname()


class Counts(Listener):
    """What one client counts in topics with ``audit=true``.

    Args:
        root: The log.
        client: The client.
    """

    def __init__(self, root: Root, client: Client) -> None:
        self.root, self.client = root, client
        self.restart()
        _all.add(self)

    def restart(self) -> None:
        """Begin without counts, at first or in a forked child: the parent reports its own."""
        client = self.client
        self.process = ClientProcess(
            client.kind, client.name, client.client_id, _host(), os.getpid()
        )
        self.lock = threading.Lock()
        """Guards the counts: the reporter takes them in its own thread."""

    @property
    def reporter(self) -> AuditReporter:
        """Where the counts are reported; another one in a forked child."""
        return reporter_of(self.root)

    def take_reports(self) -> list[Report]:
        """Return the counts since the last call; any thread may call it."""
        return []

    def report(
        self,
        kind: str,
        log: PartitionLog,
        first: int,
        stop: int,
        minutes: Mapping[int, Sequence[int]] | None = None,
    ) -> Report:
        """Return a report about a range of offsets of a partition."""
        where = log.topic, log.topic_id, log.partition, first, stop
        return Report(self.process, kind, *where, minutes or {})

    def began(self, log: PartitionLog, offset: int) -> None:
        """Report where the client begins."""
        self.reporter.report(reports=[self.report(START, log, offset, offset)])

    def skipped(self, log: PartitionLog, first: int, stop: int) -> None:
        """Report a range that is left out."""
        self.reporter.report([self], [self.report(SKIP, log, first, stop)])

    def closed(self) -> None:
        """Report what was counted, for the last time."""
        self.reporter.remove(self)


_all: weakref.WeakSet[Counts] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for counts in list(_all):
        counts.restart()


os.register_at_fork(after_in_child=_after_fork_in_child)
