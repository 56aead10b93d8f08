"""What is handled next, and which offsets are committed: against a list of what happened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from embedlog.record import Record, TopicPartition
from embedlog.workers.in_flight import InFlight, InFlightRecord

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
KEYS = (None, b"a", b"b", b"c")

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.sampled_from([T0, T1]), st.lists(st.sampled_from(KEYS), max_size=4)
        ),
        st.tuples(st.just("take")),
        st.tuples(st.just("finish"), st.integers(0, 5)),
        st.tuples(st.just("postpone"), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("commit")),
        st.tuples(st.just("revoke"), st.sampled_from([T0, T1])),
    ),
    max_size=60,
)


class Model:
    """A list of the records of each partition, in which nothing is cleverly kept."""

    def __init__(self):
        self.woken = 0
        self.in_flight = InFlight(self.wake, low=2)
        self.now = 1.0
        self.next = {T0: 0, T1: 0}
        self.lists = {T0: [], T1: []}
        self.done, self.due, self.running, self.committed = set(), {}, [], {T0: 0, T1: 0}

    def wake(self):
        self.woken += 1

    def add(self, key, keys):
        partition = self.in_flight.partition(key)
        added = []
        for each in keys:
            offset = self.next[key]
            self.next[key] += 1 + offset % 2  # with gaps
            record = Record("t", key.partition, offset, 0, 0, each, b"v", [], 7)
            added.append(InFlightRecord(partition, record, record))
        self.lists[key] += added
        self.in_flight.add(added)

    def may_begin(self, record):
        """Whether no record of its key is before it, and it is due."""
        if record in self.done or record in self.running or self.due.get(record, 0) > self.now:
            return False
        before = self.lists[record.partition.key]
        before = before[: before.index(record)]
        key = record.stored.key
        return key is None or not any(
            each.stored.key == key and each not in self.done for each in before
        )

    def take(self):
        self.now += 1
        record = self.in_flight.take(self.now)
        allowed = [each for records in self.lists.values() for each in records]
        allowed = [each for each in allowed if self.may_begin(each)]
        assert record in allowed if allowed else record is None
        if record is not None:
            self.running.append(record)

    def finish(self, number):
        if self.running:
            record = self.running.pop(number % len(self.running))
            self.in_flight.finish(record, [("out", record.stored.offset)])
            self.done.add(record)

    def postpone(self, number, pause):
        if self.running:
            record = self.running.pop(number % len(self.running))
            self.due[record] = self.now + pause
            self.in_flight.postpone(record, self.due[record])

    def commit(self):
        committable = self.in_flight.committable()
        for key, records in self.lists.items():
            finished = []
            for record in records:
                if record not in self.done:
                    break
                finished.append(record)
            if not finished:
                assert key not in committable
                continue
            position = committable[key].position
            assert position.offset == finished[-1].stored.offset + 1
            assert position.leader_epoch == 7
            assert committable[key].outputs == [("out", each.stored.offset) for each in finished]
            del records[: len(finished)]
        self.in_flight.committed(committable)

    def revoke(self, key):
        running = [each for each in self.running if each.partition.key == key]
        self.in_flight.revoke([key], 0.0)
        for record in running:  # they may finish, which does not count any more
            self.running.remove(record)
            self.in_flight.finish(record, [("lost",)])
        self.in_flight.drop([key])
        self.lists[key] = []


@given(STEPS)
def test_records_are_handled_in_the_order_of_their_keys_and_committed_in_order(steps):
    """E31, E32: whatever is taken, finished, postponed, committed and revoked."""
    model = Model()
    for name, *arguments in steps:
        getattr(model, name)(*arguments)
        left = [each for records in model.lists.values() for each in records]
        assert model.in_flight.unfinished == len([each for each in left if each not in model.done])
        assert model.in_flight.running == set(model.running)
    # All that is left can be handled.
    for _ in range(1000):
        if not model.in_flight.unfinished:
            break
        model.take()
        model.finish(0)
    model.commit()
    assert not any(model.lists.values())


def test_the_thread_that_polls_is_woken_once_when_nothing_is_left():
    """Not for each record: a wake is a system call, and wakes other readers of the log."""
    model = Model()
    model.add(T0, [b"a", b"b"])
    model.take()
    model.take()
    model.finish(0)
    assert model.woken == 0
    model.finish(0)
    assert model.woken == 1
    model.add(T0, [b"a"])
    model.take()
    model.finish(0)
    assert model.woken == 1  # it has not looked since
    assert model.in_flight.is_due()


def test_a_failure_for_good_ends_what_is_handed_out():
    """Its record stays unfinished, so the position stays below it."""
    model = Model()
    model.add(T0, [b"a", b"b", b"c"])
    model.take()
    model.take()
    model.finish(0)
    error = ValueError("for good")
    model.in_flight.fail(error, model.running[0])
    assert model.in_flight.error is error
    assert model.in_flight.take(model.now) is None
    assert model.in_flight.committable()[T0].position.offset == 1
