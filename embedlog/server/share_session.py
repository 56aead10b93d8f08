"""Share sessions: what a client fetches of a share group, and in whose name it has records.

A session is one of a connection, and its records are free when that ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from embedlog.batch import Batch
from embedlog.config import ConsumerConfig
from embedlog.consumer.deserialize import RecordDecoder
from embedlog.errors import CorruptBatchError, EmbedlogError, UnknownTopicOrPartitionError
from embedlog.groups.share_state import GAP, RELEASE, RETURN, RecordRange
from embedlog.lazy import logging
from embedlog.partition import PartitionLog
from embedlog.server.answers import Answers, Fields
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.fetch import READ_BYTES, rows_of_typed
from embedlog.server.record_batches import WireRows
from embedlog.server.remote_members import RemoteMembers
from embedlog.server.tail_watch import Ends, end_of
from embedlog.share.share_group import Acknowledgement, StepOutcome, member_number
from embedlog.share.share_member import ShareMember
from embedlog.share.stored_records import StoredRecords

_logger = logging.getLogger("embedlog.server")

FINAL, INITIAL = -1, 0
"""The epochs of requests that end a session, and that begin one."""
_LAST_EPOCH = (1 << 31) - 1
_MAX_PARTITIONS = 10_000

Place = tuple[UUID, int]
"""A topic by its id, and a partition."""


class Found(NamedTuple):
    """What a session has acquired in a partition: batches of the wire, and ranges of offsets."""

    records: list[bytes]
    acquired: list[Fields]


def partition_at(answers: Answers, place: Place) -> PartitionLog:
    """Return a partition.

    Raises:
        ApiError, UnknownTopicOrPartitionError: There is none.
    """
    return answers.partition(answers.named(None, place[0]), place[1])


class ShareSession(ShareMember):
    """A session, as of its last request.

    Args:
        answers: Of the log.
        members: The members of groups of the log that are clients.
        group: The id of the group.
        client: The id of the member.
        numbers: Those of all sessions of this server, in states; this one is added.

    Raises:
        UnknownMemberIdError: No client is this member of the group.
    """

    def __init__(
        self, answers: Answers, members: RemoteMembers, group: str, client: str, numbers: set[int]
    ) -> None:
        super().__init__(answers.log.root, group, numbers)
        self._root.context.check_writable()
        self._answers, self._numbers = answers, numbers
        self.member = members.hold(self.group, client)
        self._numbers.add(member_number(self.member))
        self.epoch = INITIAL
        self.places: dict[Place, bytes | None] = {}
        """What is asked for, with the keys of the partitions that exist."""
        self._decoder = RecordDecoder(ConsumerConfig(), self._root)
        self._decode: dict[bytes, Callable[[Batch], WireRows]] = {}
        """Of all partitions that were asked for: there it may have records."""

    def advance(self) -> None:
        """Await the next epoch."""
        self.epoch = 1 if self.epoch == _LAST_EPOCH else self.epoch + 1

    def change(self, request: Any) -> None:
        """Change what is asked for, as a request says.

        Raises:
            ApiError: That is too much.
        """
        for topic in request.forgotten_topics_data:
            for number in topic.partitions:
                self.places.pop((topic.topic_id, number), None)
        for topic in request.topics:
            for item in topic.partitions:
                self.places.setdefault((topic.topic_id, item.partition_index))
        if len(self.places) > _MAX_PARTITIONS:
            text = f"A session has at most {_MAX_PARTITIONS} partitions"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)

    def follow(self) -> dict[Place, Fields]:
        """Look for the partitions that are asked for; return the errors of those that do not exist.

        The others are served in the order of before.
        """
        errors, found = dict[Place, Fields](), dict[bytes, StoredRecords]()
        for place in self.places:
            self.places[place] = None
            try:
                log = partition_at(self._answers, place)
                log.refresh()
            except (EmbedlogError, ApiError) as error:
                errors[place] = self._answers.failure(error)
                continue
            self.places[place] = key = log.key
            stored = self._partitions.get(key)
            found[key] = stored or StoredRecords(log, self._decoder, READ_BYTES)
            if key not in self._decode:
                self._decode[key] = partial(WireRows.of, rows_of=rows_of_typed(log))
        self._partitions = {key: found[key] for key in (*self._partitions, *found) if key in found}
        return errors

    def ends(self) -> Ends:
        """Return the ends of the partitions."""
        return {stored.log: end_of(stored.log) for stored in self._partitions.values()}

    def has_changed(self) -> bool:
        """Whether another member has changed what is whose since the last step."""
        return self.group.has_changed(list(self._partitions))

    # Reading

    def read(
        self, outcome: StepOutcome, grant: Callable[[], int]
    ) -> tuple[dict[bytes, Found], dict[bytes, Fields]]:
        """Return what a step has acquired, and errors, by the keys of partitions.

        Offsets without a record are done then, and what finds no room is given back.

        Args:
            outcome: Of the step.
            grant: Returns how many bytes of records there may be; the first one is in any case.
        """
        found, errors = dict[bytes, Found](), dict[bytes, Fields]()
        rest: dict[bytes, list[Acknowledgement]] = {}
        left = grant() if outcome.acquired else 0
        for key, acquired in outcome.acquired:
            said = rest.setdefault(key, [])
            try:
                parts, following = self._partitions[key].parts(
                    *acquired[:2], outcome.epochs[key], self._decode[key]
                )
            except UnknownTopicOrPartitionError:
                continue  # It was deleted just now.
            except CorruptBatchError as error:
                errors[key] = self._answers.failure(error)
                said.append(Acknowledgement(*acquired[:2], RELEASE))
                continue
            rows, following = _fitting(parts, following, left, least=0 if found else 1)
            left -= sum(each.columns.nbytes for each in rows)
            first, last = acquired.first, acquired.first - 1
            if rows:
                first, last = int(rows[0].offsets[0]), rows[-1].next_offset - 1
                records, ranges = found.setdefault(key, Found([], []))
                records += [each.written() for each in rows]
                count = {"delivery_count": acquired.delivery_count}
                ranges.append({"first_offset": first, "last_offset": last, **count})
            said += _of_rest(acquired, first, last + 1, min(following, acquired.stop))
        if any(rest.values()):
            self.take(rest, 0)
        return found, errors

    # The end

    def end(self) -> None:
        """Release the records of the client; it stays a member."""
        member, number = self.member, 0 if self.member is None else member_number(self.member)
        if member is None:
            return
        try:
            self.write_letters(self.take(dict.fromkeys(self._decode, ()), 0, {number}))
            self.checkpoint_after(0.0)
        except EmbedlogError as error:
            # Whoever wants the records sees that the lock is free.
            _logger.debug("The records of %s are not released: %s", member.id, error)
        self.member = None
        self._numbers.discard(number)
        member.unlock()
        with suppress(EmbedlogError):
            self.group.delete_lock_file(member.info.lock)
            self.letters.close()


def _fitting(
    parts: list[tuple[Batch, WireRows, slice]], following: int, left: int, least: int
) -> tuple[list[WireRows], int]:
    """Return the rows of parts that take so many bytes, and the offset of the next row."""
    found: list[WireRows] = []
    for _, every, part in parts:
        rows = every.part(part)
        count, size = len(rows.offsets), rows.columns.nbytes
        if size > left:
            fits = max(count * left // size, 0 if found else least)
            if fits < count:
                following = int(rows.offsets[fits])
                return [*found, rows.part(slice(0, fits))] if fits else found, following
        found.append(rows)
        left -= size
    return found, following


def _of_rest(
    acquired: RecordRange, first: int, stop: int, following: int
) -> Iterator[Acknowledgement]:
    """Yield what becomes of what was acquired around the records ``[first, stop)``."""
    around = (
        (acquired.first, first, GAP),
        (stop, following, GAP),
        (following, acquired.stop, RETURN),
    )
    return (Acknowledgement(*each) for each in around if each[0] < each[1])
