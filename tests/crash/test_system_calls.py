"""Calls to the kernel that fail below Python, those of LMDB among them, in `open` and in use."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import forks, syscalls
from support.children import in_child
from support.forks import tell
from support.patience import patient
from support.program_faults import Templates
from support.roots import make_store
from support.syscalls import SystemCalls
from support.tiers import choose

import embedlog
from embedlog import kv
from embedlog.errors import DiskFullError, DurabilityError, EmbedlogError, StorageError
from embedlog.files import Files

ERRORS = errno.EIO, errno.ENOSPC, errno.EDQUOT
FULL = errno.ENOSPC, errno.EDQUOT
CHANGES = {"allocate", "meta", "mkdir", "open", "rename", "sync", "truncate", "unlink", "write"}

pytestmark = pytest.mark.skipif(
    syscalls.unavailable() is not None, reason=syscalls.unavailable() or ""
)


def traced(root: Path, work: Callable[[SystemCalls], Any]) -> Any:
    """Run `work` in a traced child, and return what it returned."""
    end = syscalls.run(work, root)
    assert end.finding() is None, end.finding()
    return end.value


def check_error(error: BaseException, number: int) -> None:
    """An error is typed, and has the errno of the call that failed."""
    assert isinstance(error, StorageError), repr(error)
    assert error.errno == number, f"{error!r} has errno {error.errno}, not {number}"
    if not isinstance(error, DurabilityError):  # which names the partition
        assert error.path and error.operation, repr(error)
        assert isinstance(error, DiskFullError) == (number in FULL), repr(error)


# Opening a log


class Opening(NamedTuple):
    """Let every so many-th call of an opening fail, with each of `ERRORS` in turn."""

    before: str
    first: int
    step: int
    error: int


def check_opening(case: Opening, *, templates: Templates) -> tuple[int, int]:
    """Let calls of `open` fail; returns how many calls there were, and how many openings raised."""
    root = templates.directory / f"opened-{os.getpid()}"

    def work(calls: SystemCalls) -> tuple[int, int]:
        raised = 0
        n = case.first
        while True:
            templates.fresh(case.before, root.name)
            number = ERRORS[(n // case.step + case.error) % len(ERRORS)]
            calls.fail(n, number)
            log = error = None
            try:
                log = embedlog.open(root, maintenance=False)
            except BaseException as caught:  # noqa: BLE001 - its type is what is tested
                error = caught
            total = calls.heal()
            if log is not None:
                log.close()
            if total <= n:
                return n, raised
            if error is not None:
                check_error(error, number)
                raised += 1
            with embedlog.open(root, maintenance=False) as log:
                assert log.verify() == []
                assert sum(len(log.topic(name)) for name in log.topics()) > 0
            n += case.step

    return traced(root, work)


def openings(templates: Templates, cases: list[Opening]) -> tuple[int, int]:
    """Let calls of openings fail; returns how many calls the longest one has, and how many raised.

    The roots were left by a kill, by a clean close, and by a reboot.
    """
    counts = forks.spread(cases, lambda case: check_opening(case, templates=templates))
    calls, raised = max(n for n, _ in counts), sum(raised for _, raised in counts)
    tell(f"up to {calls} calls in an opening; {raised} openings failed")
    return calls, raised


BEFORE = "killed", "closed", "rebooted"


def test_opening_a_log_fails_with_the_errno_of_the_call_that_failed(
    templates: Templates,
) -> None:
    """P8: whichever call it is, of Python or of LMDB, and the next opening is fine."""
    # An odd number of steps apart, so that each call meets all errors in turn.
    firsts, step = choose(test=((5,), 33), all=((0, 5), 8))
    calls, raised = openings(
        templates, [Opening(before, first, step, 0) for before in BEFORE for first in firsts]
    )
    assert calls > 150 and raised > choose(test=8, all=100)


@pytest.mark.tier("nightly")
def test_every_call_of_an_opening_fails_with_every_error(templates: Templates) -> None:
    """P8 in full."""
    cases = [
        Opening(before, first, 8, error)
        for before in BEFORE
        for first in range(8)
        for error in range(len(ERRORS))
    ]
    assert openings(templates, cases)[1] > 2_000


# Appending


def check_appends(case: tuple[str, int], *, directory: Path) -> tuple[int, int, int]:
    """Let every change on the way of two appends fail; returns how many did, and raised."""
    durability, number = case
    root = directory / f"appended-{os.getpid()}"

    def work(calls: SystemCalls) -> tuple[int, int, int]:
        n = raised = meta = 0
        while True:
            shutil.rmtree(root, ignore_errors=True)
            log = embedlog.open(root, maintenance=False, durability=durability)
            log.create_topic("a", 1, {"segment.bytes": 2000})
            producer = log.producer(retries=1, retry_backoff_ms=1)
            producer.send("a", b"0").result()
            values, error = [b"0"], None
            calls.fail(n, number, kinds=CHANGES)
            try:
                for value in (b"1" * 600, b"2" * 1500):
                    producer.send("a", value).result()
                    values.append(value)
            except BaseException as caught:  # noqa: BLE001 - its type is what is tested
                error = caught
            if calls.heal() <= n:
                log.close()
                return n, raised, meta
            raised += error is not None
            if error is not None:
                check_error(error, number)
                meta += "commit" in str(error)
            _go_on(root, log, producer, values)
            n += 1

    return traced(root, work)


def _go_on(root: Path, log: Any, producer: Any, values: list[bytes]) -> None:
    """The same process goes on, unless a flush failed, and nothing acknowledged is lost."""
    try:
        producer.send("a", b"3").result()
        log.producer().send("a", b"4").result()
        values += [b"3", b"4"]
    except DurabilityError:
        assert log.partition("a", 0).tail().failed
        log.repair(dry_run=False)
    log.close()
    with embedlog.open(root, maintenance=False) as log:
        assert log.verify() == []
        read = [record.value for record in log.topic("a")]
        assert [value for value in read if value in values] == values, "lost or twice"


def test_appending_goes_on_after_any_call_that_failed(directory: Path) -> None:
    """P8: the error has its errno, and the next append of the process works."""
    cases = [(durability, code) for durability in ("os", "fsync") for code in (ERRORS[:2])]
    cases = choose(test=[cases[0], cases[3]], all=cases)
    counts = forks.spread(cases, lambda case: check_appends(case, directory=directory))
    faults, raised, meta = (sum(column) for column in zip(*counts, strict=True))
    tell(f"{faults} calls failed, of which {raised} were told, {meta} by a commit")
    share = len(cases) / 4
    assert faults >= 80 * share and raised >= 40 * share and meta >= 20 * share


# A commit of LMDB


def put(store: kv.LmdbStore, key: bytes) -> None:
    store.write(lambda txn: txn.put(key, b"value"))


def fail_once(calls: SystemCalls, number: int) -> None:
    calls.fail(0, number, kinds={"meta"})


def fail_and_not_undo(calls: SystemCalls, number: int) -> None:
    calls.fail(0, number, kinds={"meta"}, forever=True)


def write_and_report_a_failure(calls: SystemCalls, number: int) -> None:
    calls.fail_late(0, number, kinds={"meta"})


def write_and_not_undo(calls: SystemCalls, number: int) -> None:
    calls.fail_late(0, number, kinds={"meta"}, undone=False)


WAYS = [fail_once, fail_and_not_undo, write_and_report_a_failure, write_and_not_undo]


@pytest.mark.parametrize("name", ["state", "live"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("alone", [True, False])
def test_a_failed_meta_page_is_a_commit_or_an_error_and_never_half(directory, name, way, alone):
    """P8: what the error says is what every reader sees, and the same handle writes on."""
    root = directory / f"{name}-{way.__name__}-{alone}"
    other = None if alone else make_store(root, name)

    def work(calls: SystemCalls) -> None:
        store = make_store(root, name)
        for number in (errno.EIO, errno.ENOSPC):
            key, error = b"key %d" % number, None
            put(store, b"before")
            way(calls, number)
            try:
                put(store, key)
            except EmbedlogError as caught:
                error = caught
            finally:
                calls.heal()
            if error is not None:
                check_error(error, number)
            seen = [
                read(lambda key=key: store.get(key)) is None
                for read in (lambda get: get(), in_a_thread, in_child)
            ]
            assert seen == [error is not None] * 3
            assert store.version() == store.read(lambda txn: txn.id())
            put(store, b"after %d" % number)
            assert store.get(b"after %d" % number) == b"value"
            assert (store.get(key) is None) == (error is not None)
        store.close()

    traced(root, work)
    again = other or make_store(root, name)
    assert again.get(b"after 5") == again.get(b"after 28") == b"value"
    again.close()
    assert kv.findings(str(root / name)) == []


def in_a_thread(work: Callable[[], Any]) -> Any:
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    thread.join()
    return done[0]


def test_a_commit_that_could_not_be_undone_counts(directory):
    """A commit that every reader will see is no error; it lasts beyond a new opening too."""
    root = directory / "counts"

    def work(calls: SystemCalls) -> bool:
        store = make_store(root, "state")
        write_and_not_undo(calls, errno.EIO)
        put(store, b"key")
        # The page that failed, and the commit that takes it to the disk.
        return calls.heal() == 3 and store.get(b"key") == b"value"

    assert traced(root, work)
    store = make_store(root, "state")
    assert store.get(b"key") == b"value"
    store.close()


def test_a_database_that_cannot_be_opened_again_is_tried_at_each_call(directory):
    """While the fault lasts each call has its errno; after it the same handle works."""
    root = directory / "again"

    def work(calls: SystemCalls) -> None:
        store, second = make_store(root), make_store(root)
        put(store, b"first")
        calls.fail(0, errno.EIO, kinds={"meta", "open", "map"}, forever=True)
        uses = (
            *(lambda: put(store, b"key"), lambda: store.get(b"key")),
            *(lambda: put(second, b"key"), lambda: second.get(b"key")),
            *(store.check_readers, store.readers),
        )
        for use in uses:
            with pytest.raises(StorageError) as caught:
                use()
            check_error(caught.value, errno.EIO)
        calls.heal()
        assert second.get(b"key") is None
        put(store, b"key")
        assert second.get(b"key") == b"value"
        store.close()
        second.close()

    traced(root, work)


def test_all_handles_threads_and_children_go_on_after_a_failed_commit(directory):
    """P8, P18: they share the environment that had to be opened again."""
    root = directory / "handles"

    def work(calls: SystemCalls) -> None:
        logs = [embedlog.open(root, maintenance=False) for _ in range(3)]
        logs[0].create_topic("t")
        stop, errors = threading.Event(), []

        def follow() -> None:
            consumer = logs[2].consumer("t", auto_offset_reset="earliest")
            try:
                while not stop.is_set():
                    consumer.poll(timeout_ms=1)
            except BaseException as error:  # noqa: BLE001 - no other handle may see the fault
                errors.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        for number in range(20):
            with logs[0].producer(retries=0) as producer:
                producer.send("t", b"kept").result()
                fail_once(calls, errno.EIO)
                with pytest.raises(StorageError) as caught:
                    producer.send("t", b"lost").result()
                check_error(caught.value, errno.EIO)
                calls.heal()
            logs[number % 3].producer().send("t", b"kept").result()
        stop.set()
        thread.join()
        assert errors == []
        assert in_child(lambda: len(logs[1].topic("t"))) == len(logs[2].topic("t")) == 40
        for log in logs:
            log.close()

    traced(root, work)


def test_a_map_that_cannot_grow_is_an_error_and_the_old_one_is_used_again(directory, monkeypatch):
    """LMDB unmaps the old map first: without it the next transaction would be a SIGSEGV."""
    monkeypatch.setattr(kv, "FIRST_MAP_BYTES", 1 << 20)
    root = directory / "map"

    def work(calls: SystemCalls) -> None:
        store = make_store(root)
        calls.fail(0, errno.ENOMEM, kinds={"map"})
        with pytest.raises(StorageError) as caught:
            store.write(lambda txn: txn.put(b"large", bytes(2 << 20)))
        check_error(caught.value, errno.ENOMEM)
        calls.heal()
        assert store.get(b"first") == b"row"
        store.write(lambda txn: txn.put(b"large", bytes(2 << 20)))
        assert len(store.get(b"large")) == 2 << 20
        store.close()

    traced(root, work)


def test_a_handle_that_writes_may_try_again_to_join_one_that_reads(directory):
    """What only reads goes on when the environment could not be opened to write."""
    root = directory / "joins"
    make_store(root).close()

    def work(calls: SystemCalls) -> None:
        reading = kv.LmdbStore(
            Files(root, writable=False), "live", durable=False, timeout=patient(5)
        )
        calls.fail(1, errno.EIO, kinds={"open"})
        with pytest.raises(StorageError) as caught:
            make_store(root)
        check_error(caught.value, errno.EIO)
        calls.heal()
        assert reading.get(b"first") == b"row"
        writing = make_store(root)
        put(writing, b"key")
        assert reading.get(b"key") == b"value"

    traced(root, work)
