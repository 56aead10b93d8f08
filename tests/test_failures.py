"""Work that fails and is tried again: what is logged, and how long it pauses."""

from __future__ import annotations

import errno
import logging

import pytest

from embedlog.errors import (
    ClosedError,
    CorruptionError,
    FencedError,
    LockTimeoutError,
    NotEnoughReplicasError,
    StorageError,
    UnknownTopicOrPartitionError,
)
from embedlog.failures import Failures


@pytest.fixture
def failures():
    return Failures(logging.getLogger("embedlog.test"))


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_state_is_logged_once(failures, caplog):
    """Errors of one type at one place are one state, whatever else their texts say."""
    error = StorageError("no", errno=errno.EIO, path="/a")
    steps = [
        (error, True),
        (StorageError("no, for the second time", errno=errno.EIO, path="/a"), False),
        (StorageError("no", errno=errno.EROFS, path="/a"), True),
        (StorageError("no", errno=errno.EROFS, path="/b"), True),
        (LockTimeoutError("process 7 held the lock for 3 s", path="/b", pid=7), True),
        (LockTimeoutError("process 8 held the lock for 4 s", path="/b", pid=8), False),
        (ValueError("a bug"), True),
        (ValueError("a bug"), False),
        (ValueError("another bug"), True),
    ]
    assert [failures.note("work", error) for error, _ in steps] == [new for _, new in steps]
    assert len(warnings(caplog)) == 6
    assert [record.exc_info is None for record in caplog.records][-3:] == [True, False, False]


def test_work_that_succeeded_may_fail_anew(failures, caplog):
    """The same error is logged again then, and the pauses begin again."""
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            failures.note("work", ValueError("no"))
        assert failures.pause_seconds("work", 1, 60) == 4
        assert failures.errors.keys() == {"work"}
        failures.end("work")
        failures.end("work")
        assert failures.errors == {}
        assert failures.note("work", ValueError("no"))
        assert failures.pause_seconds("work", 1, 60) == 1
    assert warnings(caplog) == ["work: no"] * 2
    assert [record.getMessage() for record in caplog.records if record.levelname == "INFO"] == [
        "work: no error any more, after 3 attempts"
    ]


def test_pauses_grow_up_to_the_longest(failures):
    """Each is twice as long as the one before."""
    pauses = []
    for _ in range(100):
        failures.note("work", ValueError("no"))
        pauses.append(failures.pause_seconds("work", 0.5, 3))
    assert pauses[:5] == [0.5, 1, 2, 3, 3]
    assert set(pauses[5:]) == {3}
    assert failures.is_due("other work", 0.5, 3)
    assert failures.is_due("work", 0, 0)
    assert not failures.is_due("work", 3600, 3600)


def test_parts_are_done_although_others_fail(failures, caplog):
    """The first error is raised when all are done; what is gone or offline is no error."""
    first, done = StorageError("no", errno=errno.EIO), []
    errors = {"a": None, "b": first, "c": UnknownTopicOrPartitionError("gone"), "d": None}
    errors |= {"e": CorruptionError("bad")}
    for _ in range(2):
        with pytest.raises(StorageError) as raised, failures.collecting() as part:
            for name, error in errors.items():
                with part(name):
                    done.append(name)
                    if error is not None:
                        raise error
            done.append("end")
        assert raised.value is first
    assert done == [*errors, "end"] * 2
    assert warnings(caplog) == ["b: no", "e: bad"]
    assert failures.errors == {"b": first, "e": errors["e"]}
    with failures.collecting() as part:
        for name in ("b", "e"):
            with part(name):
                pass
    assert failures.errors == {}


@pytest.mark.parametrize(
    "error",
    [ClosedError("closed"), FencedError("no"), NotEnoughReplicasError("no"), KeyError("bug")],
)
def test_an_error_that_ends_the_round_is_raised_at_once(failures, error):
    """Nobody wants the other parts, or nobody knows what is wrong."""
    with pytest.raises(type(error)), failures.collecting() as part:
        with part("a"):
            raise error
        raise AssertionError("the next part")
    assert failures.errors == {}
