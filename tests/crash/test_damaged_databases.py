"""P13, P21: lost, garbled, cut or old databases; full maps and reader tables."""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import signal
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.case_workers import Outcome, Progress, share_out
from support.children import PausedChild
from support.damage import readable, replaced, scrambled, snapshot
from support.faulty_files import after_reboot, materialise, scratch_directory
from support.patience import patient
from support.power_cut import Image
from support.roots import Row, abandon, encoded, make_log, make_store, open_root, rows
from support.tiers import choose, sample

import embedlog
from embedlog import kv
from embedlog.errors import CorruptionError, EmbedlogError, StorageError
from embedlog.files import Files
from embedlog.root import verify
from embedlog.root.root import Root
from embedlog.root.verify import verify_root

PAGE = 4096
STATE, LIVE, COPY = "state/data.mdb", "live/data.mdb", "state.copy/data.mdb"


def append_some(root: Root, topic: str, count: int, first: int = 0) -> None:
    log = root.partition(topic, 0)
    for number in range(first, first + count):
        log.append([encoded(b"%s %d " % (topic.encode(), number) * 20, at=number)])


def original(directory: Path, clean: bool) -> tuple[Image, Image, dict[str, list[Row]]]:
    """Two images of a root with two topics, older and newer; the last process closed it or died."""
    root = open_root(directory)
    for topic in ("a", "b"):
        make_log(root, {"segment.bytes": 2000, "index.interval.bytes": 300}, topic)
        append_some(root, topic, 6)
    root.close()
    older = snapshot(directory)
    root = open_root(directory)
    for topic in ("a", "b"):
        append_some(root, topic, 12, first=6)
    root.flush()
    expected = {topic: rows(root.partition(topic, 0)) for topic in root.topics()}
    root.close() if clean else abandon(root)
    return older, snapshot(directory), expected


def damage(data: bytes, older: bytes, rng: random.Random) -> tuple[str, bytes | None]:
    """One of the things that happen to a database file."""
    page = rng.randrange(max(len(data) // PAGE, 1)) * PAGE
    kinds: dict[str, Any] = {
        "lost": None,
        "empty": b"",
        "cut": data[: rng.randrange(len(data))],
        "cut at a page": data[:page],
        "random": rng.randbytes(len(data)),
        "a page is zero": data[:page] + bytes(PAGE) + data[page + PAGE :],
        "a page is random": data[:page] + rng.randbytes(PAGE) + data[page + PAGE :],
        "older": older,
        "a bit": _with_bit(data, rng),
        "bytes": scrambled(data, rng),
        "meta": _with_bit(data[: 2 * PAGE], rng) + data[2 * PAGE :],
    }
    kind = rng.choice([*kinds, "a bit", "a page is random", "bytes", "cut"])
    return kind, kinds[kind]


def _with_bit(data: bytes, rng: random.Random) -> bytes:
    position, changed_ = rng.randrange(len(data)), bytearray(data)
    changed_[position] ^= 1 << rng.randrange(8)
    return bytes(changed_)


def damage_databases(
    case: tuple[int, int, str, bool], outcome: Outcome, progress: Progress
) -> None:
    """Damage a database, open, and hold what is read against what was written."""
    _, count, path, clean = case
    rng = random.Random(repr(case))
    with scratch_directory() as scratch:
        directory = scratch / "root"
        older, image, expected = original(directory, clean)
        previous = None
        for number in range(count):
            kind, data = damage(image.files[path], older.files[path], rng)
            if kind == "older" and path == LIVE and not clean:
                # Of this boot, whole and older: what a kill leaves looks the same.
                kind, data = "lost", None
            damaged = replaced(image, path, data)
            twice = path == STATE and rng.random() < 0.15
            if twice:
                copied = image.files[COPY]
                damaged = replaced(damaged, COPY, damage(copied, copied, rng)[1])
            rebooted = rng.random() < 0.4
            progress.report(f"{case} {number}: {kind}, copy too: {twice}, rebooted: {rebooted}")
            materialise(damaged, directory, previous)
            previous = damaged
            outcome.count += 1
            outcome.keys.add((case, hash(data), twice and number, rebooted))
            files = after_reboot(str(number)) if rebooted else Files
            with outcome.finding(progress.last):
                if path == LIVE and not clean and not rebooted:
                    _survive(directory)
                    # What is wrong with it goes with the boot, or by hand.
                    files = after_reboot(str(number))
                outcome.note(_outcome_of(directory, files, expected, image, path, kind, clean))
            if outcome.enough:
                return


def _survive(directory: Path) -> None:
    """Values in `live` have no checksums: after a kill only its structure can be checked.

    Whatever is in it, the process must live and errors must be ours.
    """
    try:
        root = open_root(directory)
    except EmbedlogError:
        return
    try:
        for topic in root.topics():
            readable(root.partition(topic, 0))
        verify_root(root)
    except EmbedlogError:
        pass
    finally:
        abandon(root)


def _outcome_of(
    directory: Path,
    files: Any,
    expected: dict[str, list[Row]],
    image: Image,
    path: str,
    kind: str,
    clean: bool,
) -> str:
    try:
        root = open_root(directory, files=files)
    except CorruptionError:
        assert path == STATE, "a log without its index must open"
        _nothing_is_lost(directory, image)
        return "refused"
    try:
        if set(root.topics()) != set(expected):
            raise AssertionError(f"topics {sorted(root.topics())}")
        # Of every topic, not up to the first that is not whole.
        checked = [_check_topic(root, topic, expected[topic], path) for topic in expected]
        whole = all(checked)
        if whole:
            if path == STATE and verify_root(root) != []:
                # The records are whole; the index of a sealed segment is missing.
                verify.rebuild_index(root)
            findings = verify_root(root)
            if findings and path == STATE and not clean:
                # Rows that are gone without a trace in their page: no copy is as new.
                return "an error told"
            assert findings == [], findings
            for topic, right in expected.items():
                end = root.partition(topic, 0).append([encoded(b"after")])[0].base_offset
                assert end == len(right)
        return "as it was" if whole else "an error told"
    except CorruptionError:
        return "an error told"
    finally:
        abandon(root)
        _nothing_is_lost(directory, image)


def _check_topic(root: Root, topic: str, right: list[Row], path: str) -> bool:
    """Whether all records are readable; if not, there must have been an error."""
    try:
        log = root.partition(topic, 0)
        read, error = readable(log)
    except CorruptionError as raised:
        read, error = [], raised
    assert read == right[: len(read)], f"{topic} reads {read[-2:]}"
    if error is None:
        assert len(read) == len(right), f"{topic} silently ends at {len(read)}"
        return True
    assert isinstance(error, CorruptionError), repr(error)
    assert path == STATE, f"a log must be whole without its index: {error!r}"
    return False


def _nothing_is_lost(directory: Path, image: Image) -> None:
    """No record's bytes are gone, whatever the metadata said."""
    for name, data in image.files.items():
        if name.endswith(".arrows"):
            assert (directory / name).exists(), f"{name} was removed"
            assert (directory / name).read_bytes()[: len(data)] == data, f"{name} was changed"


@pytest.mark.parametrize(
    "count",
    [choose(test=4, all=430), pytest.param(8_600, marks=pytest.mark.tier("nightly"))],
    ids="count={}".format,
)
def test_no_damage_to_a_database_loses_a_record_or_kills_the_process(count, record_property):
    """P13: the index is rebuilt; state comes from its copy, or an error names the place."""
    cases = [
        (seed, count, path, clean)
        for seed in range(2)
        for path in (STATE, LIVE)
        for clean in (True, False)
    ]
    outcome = share_out(damage_databases, cases)
    record_property("states", str(outcome))

    assert not outcome.findings, str(outcome)
    assert outcome.distinct >= 5.85 * count, f"-> {outcome.distinct} states"
    assert outcome.tally["as it was"] > outcome.count // 2, str(outcome)


@pytest.fixture
def stores(tmp_path):
    """Open stores of one database, which are closed after the test."""
    opened = []

    def open_store(**options: Any) -> kv.LmdbStore:
        opened.append(make_store(tmp_path, timeout=patient(10), **options))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()
        store._files.close_all()


# P21


@pytest.mark.parametrize("number", sample(range(10), 2))
def test_a_log_goes_on_in_a_tiny_map_with_a_forgotten_reader(tmp_path, monkeypatch, number):
    """P21: a reader that never ends makes the file grow, and does nothing else."""
    monkeypatch.setattr(kv, "FIRST_MAP_BYTES", 1 << 16)
    root = open_root(tmp_path / "root")
    log = make_log(root, {"segment.bytes": 2000})
    append_some(root, "t", 3)
    live = root.context.live
    shared = live._shared or live._attach()
    old = shared.handle.begin() if number % 2 else None
    with PausedChild(lambda pause: pause()):
        if old is not None:
            old.abort()
    append_some(root, "t", 40 + number, first=3)

    assert [row[0] for row in rows(log)] == list(range(43 + number))
    assert verify_root(root) == []
    root.close()


def test_a_map_does_not_grow_without_end(stores, tmp_path, monkeypatch):
    """P21: the size is bounded, and the error says which database it was."""
    monkeypatch.setattr(kv, "FIRST_MAP_BYTES", 1 << 16)
    monkeypatch.setattr(kv, "LARGEST_MAP_BYTES", 1 << 18)
    store = stores(rows={b"k": b"v"})
    with pytest.raises(StorageError, match="live"):
        store.write(lambda txn: txn.put(b"large", bytes(1 << 19)))

    assert store.get(b"k") == b"v"
    assert store.get(b"large") is None
    store.write(lambda txn: txn.put(b"k", b"w"))


# Damaged while the log is open


RUNNING = [
    (path, kind, part) for path in (STATE, LIVE) for kind in ("cut", "zero") for part in range(8)
]


def use_and_damage(directory: Path, path: str, kind: str, part: int, acked: Path) -> None:
    """Append, damage a database, and use and close the log as if nothing had happened."""
    faulthandler.disable()  # a death is an end like another here
    log = embedlog.open(directory, maintenance=False, lock_timeout=patient(2))
    producer = log.producer(retries=0)

    def send(topic: str, value: bytes) -> None:
        producer.send(topic, value).result(patient(5))
        with acked.open("ab") as file:
            file.write(b"%s %s\n" % (topic.encode(), value))

    log.create_topic("c")
    for topic in ("a", "b", "c"):
        send(topic, b"before")
    data = directory / path
    size = data.stat().st_size
    if kind == "cut":
        os.truncate(data, size * part // 8)
    elif part * PAGE < size:
        with data.open("r+b") as file:
            file.seek(part * PAGE)
            file.write(bytes(PAGE))
    for topic in ("a", "b", "c"):
        for use in (
            partial(send, topic, b"after"),
            lambda topic=topic: list(log.topic(topic)),
            lambda topic=topic: log.create_topic(f"new-{topic}"),
            log.housekeeping.verify,
        ):
            with suppress(EmbedlogError):
                use()
    with suppress(EmbedlogError):
        log.close()


def check_running(case: tuple[str, str, int], *, directory: Path) -> str:
    """Damage a database of a running process; the next one to open the log finds all records."""
    root = directory / f"running-{os.getpid()}"
    acked = root.with_suffix(".acked")
    shutil.rmtree(root, ignore_errors=True)
    acked.write_bytes(b"")

    def fill() -> None:
        with embedlog.open(root, maintenance=False) as log:
            for topic in ("a", "b"):
                log.create_topic(topic)
                log.producer().send(topic, b"first").result()

    forks.call(fill)
    used = forks.run(lambda: use_and_damage(root, *case, acked))
    assert used.error is None, used.error

    def look() -> None:
        with embedlog.open(root, maintenance=False) as log:
            assert log.housekeeping.verify() == []
            values = {topic: [record.value for record in log.topic(topic)] for topic in "abc"}
            log.producer().send("a", b"more").result()
        for line in acked.read_bytes().splitlines():
            topic, value = line.split()
            assert values[topic.decode()].count(value) == 1, f"{line} of {values}"

    forks.run(look).result(f"after {used}")
    return "went on" if used.signal is None else signal.Signals(used.signal).name


def test_a_database_damaged_under_a_running_process_loses_no_record() -> None:
    """P13: the process gets a typed error or dies, and the next one restores the database."""
    with scratch_directory() as directory:
        cases = sample(RUNNING, 4)
        ends = forks.spread(cases, check_running, directory=directory)
    forks.tell(f"{len(ends)} damages: {dict(Counter(ends))}")
    # Those that die read what does not exist any more: see docs/guarantees.md.
    assert set(ends) <= {"went on", "SIGBUS", "SIGABRT", "SIGSEGV"}
    of_state = [end for end, case in zip(ends, cases, strict=True) if case[:2] == (STATE, "cut")]
    assert of_state.count("went on") >= len(of_state) - 2
