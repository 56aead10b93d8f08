"""The records that a member of a share group has, from their delivery to what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from embedlog.errors import IllegalStateError
from embedlog.groups.share_state import ACCEPT, GAP, RELEASE, RENEW, RETURN
from embedlog.share.share_group import Acknowledgement
from embedlog.share.stored_records import ShareRecord
from embedlog.tasks import current_caller

Where = tuple[Any, ...]
"""Topic, partition and offset."""


class HeldRecords:
    """The records of one member: which caller has them, and what it said of them.

    Args:
        uptime: Returns milliseconds since boot.
    """

    def __init__(self, uptime: Callable[[], int]) -> None:
        self._uptime = uptime
        self._held: dict[Where, ShareRecord] = {}
        """Records that are acquired and not done."""
        self._judged: dict[Where, ShareRecord] = {}
        """Those of them whose verdicts are not committed."""
        self._returned: dict[object, list[ShareRecord]] = {}
        """Those that each caller got from its last call."""
        self._ahead: deque[ShareRecord] = deque()
        """Those that no caller got yet."""
        self._renewed: dict[Where, ShareRecord] = {}
        """Those whose locks were renewed by a commit; their callers get them again."""
        self._gaps: list[tuple[bytes, Acknowledgement]] = []
        """Acquired offsets of which the program says nothing, by the key of the partition."""

    def add(self, record: ShareRecord) -> None:
        """Add a record that was acquired."""
        self._held[record[:3]] = record

    def add_gap(self, key: bytes, first: int, stop: int, verdict: int) -> None:
        """Add acquired offsets of which the program says nothing."""
        self._gaps.append((key, Acknowledgement(first, stop, verdict)))

    def remove(self, record: ShareRecord) -> None:
        """Forget a record."""
        if self.has(record):
            del self._held[record[:3]]
            self._renewed.pop(record[:3], None)

    def has(self, record: ShareRecord) -> bool:
        """Return whether this delivery of the record is not done."""
        return self._held.get(record[:3]) is record

    @property
    def has_gaps(self) -> bool:
        """Whether the last step acquired offsets that have no record."""
        return any(gap.verdict == GAP for _, gap in self._gaps)

    # Callers

    def keep_ahead(self, records: Iterable[ShareRecord]) -> bool:
        """Keep records for later calls; return whether there are any."""
        self._ahead.extend(records)
        return bool(self._ahead)

    @property
    def has_ahead(self) -> bool:
        """Whether records wait for a call."""
        return bool(self._ahead)

    def next(self) -> ShareRecord | None:
        """Give the caller a record that was kept for it, whose lock has not ended."""
        while self._ahead:
            record = self._ahead.popleft()
            if record._until > self._uptime():
                return self.give(record)
            del self._held[record[:3]]
        return None

    def give(self, record: ShareRecord) -> ShareRecord:
        """Note that the caller gets a record, and return it."""
        record._caller = caller = current_caller()
        self._renewed.pop(record[:3], None)
        self._returned.setdefault(caller, []).append(record)
        return record

    def of_program(self, where: Where) -> ShareRecord:
        """Return a record that the program has.

        Raises:
            IllegalStateError: It does not.
        """
        record = self._held.get(where)
        if record is None or record._caller is None:
            raise IllegalStateError(
                "This consumer does not hold the record: it was acknowledged, or never taken",
                topic=where[0],
                partition=where[1],
                offset=where[2],
            )
        return record

    def judge(self, record: ShareRecord, verdict: int, delay_ms: int = 0) -> None:
        """Note what becomes of a record with the next step."""
        record._verdict = verdict, delay_ms
        self._judged[record[:3]] = record
        self._renewed.pop(record[:3], None)

    def note_renewal(self, record: ShareRecord, until: int) -> None:
        """Note that the lock of a record was renewed."""
        record._verdict, record._until = None, until
        self._renewed[record[:3]] = record

    def end_call(self, *, is_implicit: bool) -> None:
        """Let the caller be done with its records: in implicit mode they are accepted.

        Raises:
            IllegalStateError: It has not acknowledged a record, in explicit mode.
        """
        caller = current_caller()
        for record in self._returned.get(caller, ()):
            if record._verdict is None and self.has(record):
                if is_implicit:
                    self.judge(record, ACCEPT)
                elif record[:3] not in self._renewed:
                    raise IllegalStateError(
                        "The record is not acknowledged, and the mode is explicit",
                        topic=record.topic,
                        partition=record.partition,
                        offset=record.offset,
                        todo="Acknowledge each record before you ask for more.",
                    )
        self._returned.pop(caller, None)

    def renewed(self) -> list[ShareRecord]:
        """Return the records of the caller whose locks were renewed, or are by the next step."""
        caller, judged = current_caller(), self._judged.values()
        renewed = [each for each in judged if each._verdict and each._verdict[0] == RENEW]
        return [each for each in (*self._renewed.values(), *renewed) if each._caller == caller]

    def forget_ended(self) -> None:
        """Forget records whose locks have ended, and that no task can acknowledge any more."""
        now = self._uptime()
        ended = [caller for caller in self._returned if getattr(caller, "done", bool)()]
        for caller in ended:
            for record in self._returned[caller]:
                if record._until <= now:
                    self.remove(record)
            if not any(map(self.has, self._returned[caller])):
                del self._returned[caller]

    # Steps

    def take_verdicts(self) -> tuple[dict[bytes, list[Acknowledgement]], list[ShareRecord]]:
        """Return what was said since the last step, in ranges, and its records."""
        records, self._judged = sorted(self._judged.values()), {}
        found: dict[bytes, list[Acknowledgement]] = {}
        for key, gap in self._gaps:
            found.setdefault(key, []).append(gap)
        for record in records:
            assert record._verdict is not None
            ranges = found.setdefault(record._key, [])
            if ranges and ranges[-1][1:] == (record.offset, *record._verdict):
                ranges[-1] = ranges[-1]._replace(stop=record._stop)
            else:
                ranges.append(Acknowledgement(record.offset, record._stop, *record._verdict))
        return found, records

    @property
    def has_verdicts(self) -> bool:
        """Whether the program has said something since the last step."""
        return bool(self._judged)

    def put_back(self, records: Iterable[ShareRecord]) -> None:
        """Undo `take_verdicts`, since the step failed: the next one takes them."""
        self._judged = {record[:3]: record for record in records}

    def forget_gaps(self) -> None:
        """Forget the offsets of `add_gap`: the group knows of them."""
        self._gaps = []

    def give_back(self) -> None:
        """Release what is left, at the end; what no caller got was not delivered."""
        for record in self._held.values():
            if record._verdict is None:
                verdict = RETURN if record._caller is None else RELEASE
                self.add_gap(record._key, record.offset, record._stop, verdict)

    def clear(self) -> None:
        """Forget all records: others have them."""
        self._held.clear()
        self._judged.clear()
        self._ahead.clear()
        self._renewed.clear()
        self._gaps = []
