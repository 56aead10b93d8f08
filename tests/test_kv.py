"""Access to LMDB: processes share, grow, stop, fork and die."""

import errno
import os
import random
import threading
import time
from pathlib import Path

import pytest
from support.children import PausedChild, assert_killed, in_child, meanwhile
from support.faulty_files import FaultyFiles
from support.patience import patient
from support.roots import make_store
from support.tiers import choose

from embedlog import kv
from embedlog.errors import ClosedError, CorruptionError, LockTimeoutError, StorageError
from embedlog.files import Files

pytestmark = pytest.mark.disk  # what it promises depends on the file system


@pytest.fixture
def store(tmp_path):
    store = make_store(tmp_path)
    yield store
    store.close()


def put(store: kv.LmdbStore, key: bytes, value: bytes) -> None:
    store.write(lambda txn: txn.put(key, value))


# Reading and writing


def test_a_version_is_never_ahead_of_what_a_read_sees(store):
    """A read after `version` sees that commit, so a caller may cache it by version (P19)."""
    written: dict[int, int] = {}

    def check_count():
        version = store.version()
        assert int(store.get(b"count") or 0) >= written.get(version, 0)

    with meanwhile(check_count, 2):
        for number in range(1, 3000):

            def step(txn, number=number):
                written[txn.id()] = number
                txn.put(b"count", b"%d" % number)

            store.write(step)


# One environment per path and process


def test_two_stores_on_one_path_share_an_environment(store, tmp_path):
    """A process must not open an LMDB path twice, so both stores share one handle (A31)."""
    other = make_store(tmp_path)
    put(other, b"key", b"value")

    assert other._shared is store._shared
    assert store.get(b"key") == b"value"
    other.close()
    put(store, b"still", b"open")
    assert store.get(b"still") == b"open"


def test_a_handle_that_writes_may_join_one_that_reads(tmp_path):
    """A read-only and then a writable store in one process: both work and see the same rows."""
    make_store(tmp_path).close()
    reader = kv.LmdbStore(Files(tmp_path, writable=False), "live", durable=False, timeout=5)
    assert reader.get(b"first") == b"row"
    writer = make_store(tmp_path)
    put(writer, b"key", b"value")

    assert reader.get(b"key") == b"value"
    writer.close()
    assert reader.get(b"key") == b"value"
    reader.close()


# Growing


@pytest.fixture
def small_map(monkeypatch):
    """New environments begin with a map of 1 MiB."""
    monkeypatch.setattr(kv, "FIRST_MAP_BYTES", 1 << 20)


def test_one_transaction_may_be_larger_than_the_map(small_map, tmp_path):
    """The map doubles as often as necessary."""
    store = make_store(tmp_path)

    def step(txn):
        for number in range(10):
            txn.put(b"%d" % number, bytes(1 << 20))

    store.write(step)

    assert len(store.get(b"9")) == 1 << 20
    store.close()


def test_a_map_that_another_process_grew_is_adopted(small_map, tmp_path):
    """`get`, `read` and `write` adopt the new size after MapResized (P21)."""
    for use in (
        lambda store: store.get(b"9"),
        lambda store: store.read(lambda txn: txn.get(b"9")),
        lambda store: store.write(lambda txn: txn.get(b"9")),
    ):
        store = make_store(tmp_path / str(id(use)))
        assert store.get(b"first") == b"row"

        def fill(store=store):
            for number in range(10):
                put(store, b"%d" % number, bytes(500_000))

        in_child(fill)
        assert len(use(store)) == 500_000
        store.close()


def test_a_file_that_grows_while_its_length_is_looked_at_is_not_damaged(store, monkeypatch):
    """Readers check the length of the file while another thread writes to it."""
    file_size = store._files.size

    def size_of_a_moment_ago(fd):
        length = file_size(fd)
        time.sleep(0.0005)
        return length

    monkeypatch.setattr(store._files, "size", size_of_a_moment_ago)

    with meanwhile(lambda: store.read(lambda txn: txn.get(b"first")), count=3):
        for number in range(100):
            put(store, b"%d" % number, bytes(8000))


def test_a_map_grows_while_other_threads_read(small_map, tmp_path):
    """No transaction of the process is open while the map is resized: nothing crashes."""
    store = make_store(tmp_path)

    def check_first():
        assert store.get(b"first") == b"row"

    with meanwhile(check_first, 3):
        for number in range(20):
            put(store, b"%d" % number, bytes(200_000))
    store.close()


# Readers that died


def test_reader_slots_of_killed_processes_are_freed(store):
    """`check_readers` frees the slot of a reader that was killed (P21)."""

    def read_and_stay(ready):
        store.read(lambda txn: ready())

    with PausedChild(read_and_stay) as child:
        assert store.check_readers() == 0
        child.kill()

    assert store.readers() == (1, kv.MAX_READERS)
    assert store.check_readers() == 1
    assert store.check_readers() == 0


def test_a_full_table_of_dead_readers_does_not_stop_reading(tmp_path, monkeypatch):
    """After ReadersFull a read frees the slots of dead readers and tries again (P21)."""
    monkeypatch.setattr(kv, "MAX_READERS", 2)
    store = make_store(tmp_path)
    store.close()
    store = make_store(tmp_path)
    for _ in range(2):
        with PausedChild(lambda ready: store.read(lambda txn: ready())):
            pass

    assert store.get(b"first") == b"row"
    store.close()


def test_readers_of_old_snapshots_are_listed(store):
    """They keep LMDB from reusing free pages (P21)."""

    def pids():
        return sorted(pid for pid, _, _ in store.lagging())

    with PausedChild(lambda ready: store.read(lambda txn: ready())) as child:
        assert pids() == [], "it reads the newest snapshot, which keeps no pages"
        put(store, b"key", b"value")
        assert pids() == [child.pid]
        with PausedChild(lambda ready: store.read(lambda txn: ready())) as second_child:
            put(store, b"key", b"value")
            assert pids() == sorted([child.pid, second_child.pid])
        child.kill()

    store.check_readers()
    assert pids() == []


# The lock of a write


def hold_the_write_lock(store):
    """Return work that stays inside a write transaction."""

    def work(ready):
        store.write(lambda txn: ready())

    return work


def test_a_stopped_writer_is_named_after_the_timeout(tmp_path):
    """The error has the pid and the state of the process that holds the lock (P16)."""
    store = make_store(tmp_path, timeout=0.2)
    with PausedChild(hold_the_write_lock(store)) as child:
        child.stop()
        started = time.monotonic()
        with pytest.raises(LockTimeoutError) as caught:
            put(store, b"key", b"value")

        assert 0.15 < time.monotonic() - started < patient(2)
        assert caught.value.pid == child.pid
        assert caught.value.state.startswith("T")
        assert caught.value.retriable
        assert store.get(b"first") == b"row"
    store.close()


def test_a_thread_that_waits_while_another_closes_the_store_finds_it_closed(tmp_path):
    """Another process is stopped with the lock, so the one that closes gives up waiting, too."""
    make_store(tmp_path).close()
    store = kv.LmdbStore(Files(tmp_path), "live", durable=False, timeout=0.1)
    files, raised = Files(tmp_path), []
    with files.opened("locks/live", write=True, create=True) as fd:
        files.lock(fd, 1)

        def wait():
            try:
                store.acquire(patient(10))
            except ClosedError as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while not store._queue.locked():
            time.sleep(0.01)
        store.close()
        thread.join()
    assert raised


def test_a_thread_that_waits_too_long_gets_an_error(tmp_path):
    """Threads wait for each other with the same timeout as processes."""
    store = make_store(tmp_path, timeout=0.1)
    inside, leave = threading.Event(), threading.Event()

    def step(txn):
        inside.set()
        leave.wait(patient(5))

    thread = threading.Thread(target=store.write, args=(step,))
    thread.start()
    inside.wait(patient(5))
    with pytest.raises(LockTimeoutError, match="thread"):
        put(store, b"key", b"value")
    leave.set()
    thread.join()
    store.close()


# Forks


def test_a_fork_waits_until_no_transaction_is_open(store):
    """Threads write while another one forks: no child inherits an open transaction."""

    def busy():
        put(store, b"busy", b"%d" % int(store.get(b"busy") or 0))

    forks = choose(quick=8, all=20)
    with meanwhile(busy):
        for number in range(forks):
            in_child(lambda number=number: put(store, b"child", b"%d" % number))
    assert store.get(b"child") == b"%d" % (forks - 1)


def test_a_child_that_exits_leaves_the_parents_lock_alone(tmp_path):
    """The child closes the inherited lock file without unlocking it."""
    store = make_store(tmp_path, timeout=0.2)
    other = make_store(tmp_path, timeout=0.2)

    # A fork inside a transaction would wait for it: only the lock file is held here.
    lock = store._open_lock()
    store._files.lock(lock, 1)
    in_child(lambda: None)
    assert not other._files.try_lock(other._lock or other._open_lock())
    store._files.unlock(lock)
    store.close()
    other.close()


# Creation and damage


def fill_200(txn):
    for number in range(200):
        txn.put(b"%05d" % number, bytes(500))


def test_a_large_value_that_a_small_one_replaces_in_one_transaction_is_no_damage(tmp_path):
    """LMDB then leaves it all of its pages; real damage beside it is still found."""
    store = make_store(tmp_path, "state")
    store.write(fill_200)

    def shrink(txn: kv.Txn) -> None:
        for key in (b"a", b"b"):
            txn.put(key, bytes(9000))
            txn.put(key, b"small")

    store.write(shrink)
    assert store.get(b"a") == b"small"
    store.close()

    assert kv.findings(str(tmp_path / "state")) == []
    cut_in_half(tmp_path / "state" / "data.mdb")
    assert kv.findings(str(tmp_path / "state"))


def no_file(data: Path) -> None:
    data.unlink()


def empty_file(data: Path) -> None:
    data.write_bytes(b"")


def one_byte(data: Path) -> None:
    data.write_bytes(b"x")


def cut_in_half(data: Path) -> None:
    os.truncate(data, data.stat().st_size // 2)


def zeros(data: Path) -> None:
    data.write_bytes(bytes(data.stat().st_size))


def noise(data: Path) -> None:
    data.write_bytes(os.urandom(data.stat().st_size))


def no_meta_pages(data: Path) -> None:
    with data.open("r+b") as file:
        file.write(bytes(8192))


@pytest.mark.parametrize(
    "damage", [no_file, empty_file, one_byte, cut_in_half, zeros, noise, no_meta_pages]
)
def test_findings_tell_damage_without_opening_the_environment(tmp_path, damage):
    """Mapping a damaged LMDB file may kill the process, so the file is checked before."""
    store = make_store(tmp_path, "state")
    store.write(fill_200)
    store.close()
    damage(tmp_path / "state" / "data.mdb")

    assert kv.findings(str(tmp_path / "state"))


def test_a_database_truncated_while_it_is_open_is_damage_and_not_a_sigbus(tmp_path):
    """The next `write` or `read` detects it; after that no call touches the map."""
    for detect in (lambda store: put(store, b"key", b"value"), lambda store: store.read(len)):
        store = make_store(tmp_path / str(id(detect)))
        store.write(fill_200)
        os.truncate(data := f"{store.path}/data.mdb", 3 * 4096)
        uses = [
            *(
                detect,
                lambda store: store.get(b"00001"),
                kv.LmdbStore.version,
                kv.LmdbStore.catch_up,
            ),
            *(lambda store: put(store, b"key", b"value"), kv.LmdbStore.readers),
        ]
        for use in uses:
            with pytest.raises(CorruptionError, match="truncated from") as caught:
                use(store)
            assert caught.value.path == data
        assert not store.is_whole()
        assert os.path.getsize(data) == 3 * 4096
        store.close()


def test_the_lock_file_has_room_for_every_reader(tmp_path):
    """A reader stores to its slot through a map: without room on the disk that is a SIGBUS."""
    store = make_store(tmp_path)
    lock = Path(store.path, "lock.mdb").stat()
    assert lock.st_size == kv.LOCK_BYTES <= lock.st_blocks * 512
    assert store.readers()[1] == kv.MAX_READERS
    store.close()


@pytest.mark.parametrize("damage", [empty_file, one_byte, cut_in_half])
def test_a_database_truncated_while_others_use_it_cannot_be_opened(tmp_path, damage):
    """The first process checked the file, before it was truncated."""
    store = make_store(tmp_path)
    store.write(fill_200)
    with PausedChild(lambda ready: (store.get(b"first"), ready())):
        store.close()
        damage(data := tmp_path / "live" / "data.mdb")
        damaged = data.read_bytes()
        with pytest.raises(CorruptionError):
            make_store(tmp_path)
    assert data.read_bytes() == damaged


def test_a_database_that_grows_while_it_is_opened_is_not_damaged(tmp_path, monkeypatch):
    """Other processes write to it, and a check takes that for damage."""
    make_store(tmp_path).close()
    reserve = kv._reserve_lock_file

    def grow_and_reserve(files, path):
        monkeypatch.setattr(kv, "_reserve_lock_file", reserve)
        in_child(lambda: make_store(tmp_path).write(fill_200))
        reserve(files, path)

    monkeypatch.setattr(kv, "findings", lambda path: [f"{path} is being written"])
    monkeypatch.setattr(kv, "_reserve_lock_file", grow_and_reserve)
    store = make_store(tmp_path)
    assert store.get(b"first") == b"row"
    store.close()


def test_other_processes_overwrite_nothing_while_a_database_is_checked(tmp_path, monkeypatch):
    """LMDB keeps the pages of a version for as long as a transaction reads it."""
    make_store(tmp_path).close()
    readers = []

    def check(path):
        for each in kv._environments.values():
            if each.handle.path() == path:
                lines = each.handle.readers().splitlines()[1:]
                readers.extend(line.split()[-1] for line in lines)
        return []

    monkeypatch.setattr(kv, "findings", check)
    monkeypatch.setattr(Files, "size", lambda *_: kv.META_BYTES)
    make_store(tmp_path).close()
    assert [each for each in readers if each.isdecimal()]


def test_a_database_is_that_of_the_directory_and_not_of_one_mounted_there_since(tmp_path):
    """LMDB opens a path; all else follows the descriptor of the root."""
    for name in ("first", "second"):
        make_store(tmp_path / name, rows={b"name": name.encode()}).close()
    files = Files(tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "moved")
    (tmp_path / "second").rename(tmp_path / "first")

    with pytest.raises(StorageError, match="Another directory is at its path") as caught:
        kv.LmdbStore(files, "live", durable=False, timeout=5)
    assert caught.value.errno == errno.ENOENT
    store = make_store(tmp_path / "first")
    assert store.get(b"name") == b"second"
    store.close()


def test_a_whole_database_whose_last_pages_were_never_written_is_not_refused(tmp_path):
    """LMDB counts pages that a transaction took and gave back, but does not write them."""
    store, dice = make_store(tmp_path), random.Random(0)
    for _ in range(300):
        keys = [b"%d" % number for number in range(dice.randint(1, 60))]
        dice.shuffle(keys)

        def step(txn, keys=keys):
            for key in keys:
                txn.put(key, bytes(dice.choice((10, 700, 1500, 5000, 30_000))))
            for key in keys[: dice.randint(0, len(keys))]:
                txn.delete(key)

        store.write(step)
        missing = (store._shared.handle.info()["last_pgno"] + 1) * 4096
        missing -= (tmp_path / "live" / "data.mdb").stat().st_size
        if missing:
            break
    store.close()

    assert missing > 0
    reopened = make_store(tmp_path)
    assert reopened.get(b"first") == b"row"
    reopened.close()


@pytest.mark.parametrize("name", ["state", "live"])
def test_creation_is_all_or_nothing(tmp_path, name):
    """After a kill at any operation there is no environment, or a complete one (R5)."""
    counting = FaultyFiles(_rooted(tmp_path / "count"))
    kv.create(counting, name, durable=name == "state", rows={b"key": b"value"})
    for number in range(counting.count()):
        path = _rooted(tmp_path / str(number))
        files = FaultyFiles(path)
        files.kill_at(number)
        assert_killed(lambda files=files: kv.create(files, name, durable=True, rows={b"key": b"v"}))
        rebooted = Files(path)
        if not rebooted.exists(name):
            kv.create(rebooted, name, durable=True, rows={b"key": b"v"})
        rebooted.make_directory("locks")
        store = kv.LmdbStore(rebooted, name, durable=True, timeout=1)
        assert store.get(b"key") == b"v"
        store.close()


def _rooted(path: Path) -> Path:
    Files.create_root(path)
    return path


@pytest.mark.parametrize("small", [0, kv.SMALL_PAGES])
def test_a_copy_holds_what_was_committed(store, tmp_path, monkeypatch, small):
    """A small database is copied with all its pages, a large one without the free pages."""
    monkeypatch.setattr(kv, "SMALL_PAGES", small)
    put(store, b"key", b"value")
    (tmp_path / "copy").mkdir()
    store.copy("copy")
    copied = kv.LmdbStore(store._files, "copy", durable=True, timeout=1)

    assert copied.get(b"key") == b"value"
    copied.close()


def test_nothing_stands_for_an_environment_without_rows():
    """A reader after a reboot uses it in place of `live`: it has no rows."""
    empty = kv.EmptyStore()

    assert empty.get(b"key") is None
    assert empty.read(lambda txn: list(kv.rows(txn, b""))) == []
    empty.close()
