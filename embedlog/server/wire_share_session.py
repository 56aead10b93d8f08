"""Share sessions: what a client fetches of a share group, and in whose name it has records.

A session is one of a connection; its records are free when that ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain, groupby
from typing import Any
from uuid import UUID

from embedlog.batch import Batch
from embedlog.config import ConsumerConfig
from embedlog.consumer.deserialize import RecordDecoder
from embedlog.errors import CorruptBatchError, EmbedlogError, UnknownTopicOrPartitionError
from embedlog.groups.share_state import ACCEPT, GAP, REJECT, RELEASE, RENEW, RETURN
from embedlog.lazy import logging
from embedlog.partition import PartitionLog
from embedlog.server.answers import Answers, Fields
from embedlog.server.error_codes import ApiError, ErrorCode
from embedlog.server.fetch import READ_BYTES, rows_of_typed
from embedlog.server.record_batches import WireRows, write_rows
from embedlog.server.remote_members import RemoteMembers
from embedlog.share.share_group import Acknowledgement, StepOutcome, member_number
from embedlog.share.share_member import ShareMember
from embedlog.share.stored_records import StoredRecords

_logger = logging.getLogger("embedlog.server")

INITIAL = 0
"""The epoch of a request that begins a session."""
_MAX_PARTITIONS = 10_000
_VERDICTS = ACCEPT, ACCEPT, RELEASE, REJECT, RENEW
"""By Kafka's numbers.  The first says that there is no record: all the same the client must hold
the offset, unlike one that has read the log."""

Place = tuple[UUID, int]
"""A topic by its id, and a partition."""


class WireShareSession(ShareMember):
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
        self._answers, self._numbers, self.epoch = answers, numbers, INITIAL
        self._asked: dict[Place, None] = {}
        self.places: dict[bytes, Place] = {}
        """The partitions that are asked for, or acknowledged, by key."""
        self._decoder = RecordDecoder(ConsumerConfig(), self._root)
        self._decode: dict[bytes, Callable[[Batch], WireRows]] = {}
        """Of all partitions that were asked for: there it may have records."""
        self._said: dict[bytes, list[Acknowledgement]] = {}
        self.codes: dict[Place, Fields] = {}
        """What became of the acknowledgements of the last request."""
        self.member = members.hold(self.group, client)
        numbers.add(member_number(self.member))

    def follow(self, request: Any) -> dict[Place, Fields]:
        """Change what is asked for, as a request says; return the errors of what is not there.

        The others are served in the order of before.

        Raises:
            ApiError: That is too much.
        """
        for topic in request.forgotten_topics_data:
            for number in topic.partitions:
                self._asked.pop((topic.topic_id, number), None)
        self._asked |= dict.fromkeys(place for place, _ in items_of(request))
        if len(self._asked) > _MAX_PARTITIONS:
            text = f"A session has at most {_MAX_PARTITIONS} partitions"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        errors, found = dict[Place, Fields](), dict[bytes, StoredRecords]()
        for place in self._asked:
            try:
                log = self._partition_at(place)
                log.refresh()
            except (EmbedlogError, ApiError) as error:
                errors[place] = self._answers.failure(error)
                continue
            key = log.key
            self.places[key] = place
            stored = self.partitions.get(key)
            found[key] = stored or StoredRecords(log, self._decoder, READ_BYTES, most=1)
            if key not in self._decode:
                self._decode[key] = partial(WireRows.of, rows_of=rows_of_typed(log))
        self.partitions = {key: found[key] for key in (*self.partitions, *found) if key in found}
        return errors

    def _partition_at(self, place: Place) -> PartitionLog:
        return self._answers.partition(self._answers.named(None, place[0]), place[1])

    # Acknowledging

    def hear(self, request: Any) -> None:
        """Note what a client says of records, by partition; the next step does it."""
        self.codes, self._said = {}, {}
        may_renew = self.group.config().share_renew_acknowledge_enable
        for place, item in items_of(request):
            if not item.acknowledgement_batches:
                continue
            try:
                log = self._partition_at(place)
                said = _acknowledgements(item.acknowledgement_batches, request.is_renew_ack)
                if not may_renew and any(each.verdict == RENEW for each in said):
                    raise ApiError(ErrorCode.INVALID_RECORD_STATE, "The group renews no locks")
            except (EmbedlogError, ApiError) as error:
                self.codes[place] = self._answers.failure(error)
                continue
            self.codes[place], self._said[log.key] = {"error_code": 0}, said
            self.places[log.key] = place

    def step(self, limit: int) -> StepOutcome:
        """Take a step: do what the client said, of each partition all or nothing, and acquire."""
        said, self._said = self._said, {}
        outcome = self.take(said, limit, whole=True)
        for key in {key for key, *_ in outcome.refused}:
            text = "Locks have ended, or records were acknowledged before: all stays as it was"
            error = ApiError(ErrorCode.INVALID_RECORD_STATE, text)
            self.codes[self.places[key]] = self._answers.failure(error)
        if said and self.group.context.durability == "fsync":
            self.checkpoint_after(0.0)
        return outcome

    # Reading

    def read(
        self, outcome: StepOutcome, grant: Callable[[], int], size: int
    ) -> tuple[dict[bytes, Fields], dict[bytes, Fields]]:
        """Return what a step has acquired, and errors, by the keys of partitions.

        Offsets without a record are done then, and what finds no room is given back.

        Args:
            outcome: Of the step.
            grant: Returns how many bytes of records there may be; the first one is in any case.
            size: How many offsets a range of acquired records has at most.
        """
        found, errors = dict[bytes, Fields](), dict[bytes, Fields]()
        rest: dict[bytes, list[Acknowledgement]] = {}
        left = grant() if outcome.acquired else 0
        for key, (start, stop, _, count, *_) in outcome.acquired:
            said, read = rest.setdefault(key, []), self.partitions[key].parts
            try:
                parts, following = read(start, stop, outcome.epochs[key], self._decode[key])
            except UnknownTopicOrPartitionError:
                continue  # It was deleted just now.
            except CorruptBatchError as error:
                errors[key] = self._answers.failure(error)
                said.append(Acknowledgement(start, stop, RELEASE))
                continue
            rows, following = _fitting(parts, min(following, stop), left, 0 if found else 1)
            left -= sum(each.columns.nbytes for each in rows)
            first = after = start
            if rows:
                first, after = int(rows[0].offsets[0]), rows[-1].next_offset
                fields = found.setdefault(key, {"records": [], "acquired_records": []})
                fields["records"] += chain.from_iterable(map(write_rows, rows))
                for at in range(first, after, size):
                    acquired = {"first_offset": at, "last_offset": min(at + size, after) - 1}
                    fields["acquired_records"].append({**acquired, "delivery_count": count})
            around = (start, first, GAP), (after, following, GAP), (following, stop, RETURN)
            said += [Acknowledgement(*each) for each in around if each[0] < each[1]]
        if any(rest.values()):
            self.take(rest, 0)
        return found, errors

    # The end

    def end(self) -> None:
        """Release the records of the client; it stays a member."""
        member = self.member
        assert member is not None
        number = member_number(member)
        try:
            self.write_letters(self.take(dict.fromkeys(self._decode, ()), 0, {number}))
            self.checkpoint_after(0.0)
        except EmbedlogError as error:
            # Whoever wants the records sees that the lock is free.
            _logger.debug("The records of %s are not released: %s", member.id, error)
        self._numbers.discard(number)
        member.unlock()
        with suppress(EmbedlogError):
            self.group.delete_lock_files(member.info.lock)
            self.letters.close()


def items_of(request: Any) -> list[tuple[Place, Any]]:
    """Return the partitions that a request names."""
    return [
        ((topic.topic_id, item.partition_index), item)
        for topic in request.topics
        for item in topic.partitions
    ]


def _acknowledgements(batches: Any, may_renew: bool) -> list[Acknowledgement]:
    """Return what a client says of ranges of offsets.

    Raises:
        ApiError: It makes no sense.
    """
    least, said = 0, list[Acknowledgement]()
    known = _VERDICTS if may_renew else _VERDICTS[:-1]
    for batch in batches:
        first, stop, types = batch.first_offset, batch.last_offset + 1, batch.acknowledge_types
        is_sane = least <= first < stop and len(types) in (1, stop - first)
        if not is_sane or not all(0 <= each < len(known) for each in types):
            raise ApiError(ErrorCode.INVALID_REQUEST, "The acknowledgements make no sense")
        least = stop
        for number, run in groupby(types):
            after = stop if len(types) == 1 else first + len(list(run))
            said.append(Acknowledgement(first, after, known[number]))
            first = after
    return said


def _fitting(
    parts: list[tuple[Batch, WireRows, slice]], following: int, left: int, least: int
) -> tuple[list[WireRows], int]:
    """Return the rows that take so many bytes, at least so many, and the offset of the next."""
    found: list[WireRows] = []
    for _, every, part in parts:
        rows = every.part(part)
        count, size = len(rows.offsets), rows.columns.nbytes
        fits = count if size <= left else max(count * left // size, 0 if found else least)
        if fits < count:
            following = int(rows.offsets[fits])
            return [*found, rows.part(slice(0, fits))] if fits else found, following
        found.append(rows)
        left -= size
    return found, following
