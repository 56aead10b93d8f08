"""Consumers in groups for tests: listeners that record calls, members in other processes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from embedlog.consumer.consumer import Consumer
from embedlog.consumer.rebalance_notifier import ConsumerRebalanceListener
from embedlog.record import TopicPartition
from support import forks
from support.patience import patient

PATIENCE = 20.0
Partitions = set[TopicPartition]


class RecordingListener(ConsumerRebalanceListener):
    """Records its calls, and runs what the test wants during them.

    Args:
        does: A function of the partitions for "revoked", "assigned" or "lost".
    """

    def __init__(self, **does: Callable[[Partitions], Any]) -> None:
        self.entries: list[tuple[str, Partitions]] = []
        self._does = does

    def on_partitions_revoked(self, revoked: Partitions) -> None:
        self._note("revoked", revoked)

    def on_partitions_assigned(self, assigned: Partitions) -> None:
        self._note("assigned", assigned)

    def on_partitions_lost(self, lost: Partitions) -> None:
        self._note("lost", lost)

    def _note(self, event: str, partitions: Partitions) -> None:
        self.entries.append((event, partitions))
        if event in self._does:
            self._does[event](partitions)

    def taken(self) -> list[tuple[str, Partitions]]:
        """Return the entries since the last call."""
        entries, self.entries = self.entries, []
        return entries


def partitions(topic: str, count: int) -> Partitions:
    return {TopicPartition(topic, number) for number in range(count)}


def poll_until_assigned(
    consumers: Iterable[Consumer], expected: Partitions, *, at_least: int | None = None
) -> int:
    """Poll until all partitions are assigned, each once; return how many records came meanwhile.

    Args:
        at_least: The minimum of partitions for each consumer.
    """
    listed, came = list(consumers), 0

    def fair() -> bool:
        nonlocal came
        for consumer in listed:
            came += sum(map(len, consumer.poll(0).values()))
        assignments = [consumer.assignment() for consumer in listed]
        assigned = set().union(*assignments)
        assert sum(map(len, assignments)) == len(assigned), f"two owners: {assignments}"
        return assigned == expected and (at_least is None or min(map(len, assignments)) >= at_least)

    forks.until(fair, PATIENCE)
    return came


def drained(consumer: Consumer, **options: Any) -> list[Any]:
    """Poll until no records come, and return all of them."""
    records_read: list[Any] = []
    while polled := consumer.poll(**options):
        for records in polled.values():
            records_read += records
    return records_read


class PipedChild:
    """A forked child that communicates with its parent through a pipe.

    Args:
        work: Called with the child's end of the pipe.
    """

    def __init__(self, work: Callable[[Connection], Any]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._child = forks.Child(lambda: work(theirs))
        theirs.close()
        self.pid = self._child.pid
        self._over = False

    def say(self, what: Any) -> None:
        self._pipe.send(what)

    def hear(self, seconds: float = PATIENCE) -> Any:
        """Return the next message of the child; fail with the reason if it died."""
        if self._pipe.poll(patient(seconds)):
            try:
                return self._pipe.recv()
            except EOFError:
                end = self._child.end()
                self._over = True
                raise AssertionError(f"the child is gone: {end.finding()}") from None
        raise AssertionError("the child says nothing")

    def hears(self) -> bool:
        """Return whether there is a message of the child."""
        return self._pipe.poll(0)

    def stop(self) -> None:
        self._child.stop()
        assert self._child.stopped()

    def go_on(self) -> None:
        self._child.go_on()

    def kill(self) -> float:
        """Kill it, and return the time by the monotonic clock."""
        killed_at = time.monotonic()
        self._over = True
        self._child.kill()
        return killed_at

    def over(self) -> bool:
        """Return whether it has ended; call `end` afterwards."""
        return self._child.ends_within(0)

    def end(self) -> Any:
        """Wait until it has ended, and return its result."""
        self._over = True
        return self._child.end().result()

    def __enter__(self) -> PipedChild:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._over:
            self.kill()
        self._pipe.close()


# Many groups side by side


class GroupThreads:
    """Threads that are members of many groups, and read until `end`.

    Args:
        log: The log to read.
        groups: The number of groups.
        members: The number of members of each group.
    """

    def __init__(self, log: Any, groups: int, members: int) -> None:
        self.offsets: list[list[tuple[int, int]]] = [[] for _ in range(groups)]
        self._done = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._work, args=(log, number))
            for number in range(groups)
            for _ in range(members)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, log: Any, number: int) -> None:
        try:
            options = {"auto_offset_reset": "earliest", "auto_commit_interval_ms": 50}
            with log.consumer("t", group_id=f"g{number}", **options) as member:
                while not self._done.is_set():
                    for records in member.poll(100, max_records=20).values():
                        # A list is extended in one step, so threads may share it.
                        self.offsets[number] += [
                            (record.partition, record.offset) for record in records
                        ]
        except BaseException as error:  # noqa: BLE001 - raised again by `end`
            self._errors.append(error)

    def end(self) -> list[list[tuple[int, int]]]:
        """Have all members leave, and return what each group has read."""
        self._done.set()
        for thread in self._threads:
            thread.join()
        for error in self._errors:
            raise error
        return self.offsets
