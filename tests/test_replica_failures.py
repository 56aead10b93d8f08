"""Directories of a log that fail one after the other, or at the wrong moment."""

import errno
import gc
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import product

import lmdb
import pytest
from support import forks
from support.faulty_files import REBOOTED
from support.patience import patient
from support.replicas import assignment, bring_back, notice, send, values
from support.roots import encoded
from support.staged_files import publish, stage
from support.tiers import sample

import embedlog
from embedlog import catalog, errors, kv
from embedlog.files import Files
from embedlog.files.paths import FORMAT_FILE
from embedlog.files.reserve import Reserve
from embedlog.partition import journal, leader_epochs, unnamed_files
from embedlog.partition.replace import Replacement
from embedlog.record import TopicPartition
from embedlog.replication import catch_up, reassign, root
from embedlog.replication import root as replicated_root
from embedlog.replication.catch_up import ReplicaCopy
from embedlog.replication.mend import verify_copies
from embedlog.replication.metadata import METADATA_VERSION
from embedlog.retention.retain import delete_records


@pytest.fixture
def directories(directories, monkeypatch):
    """The same; without a quorum, each call tries at once to bring a lost one back."""
    monkeypatch.setattr(root, "REGAIN_SECONDS", 0)
    return directories


@pytest.fixture
def log(replicated_log):
    """The whole log, over three directories; in other files `log` is that of a partition."""
    return replicated_log


def check_equal(directories, log, topic):
    directories.assert_equal_copies(topic)
    assert set(assignment(log, topic).isr) == {1, 2, 3}


# Too few directories


@pytest.mark.parametrize("empty", [False, True])
def test_a_directory_that_comes_back_takes_the_place_of_one_that_fails(directories, log, empty):
    """Neither alone is a majority; running programs go on with the next call."""
    log.create_topic("t")
    send(log, "t", [b"a"])
    directories.lose(log, 1)
    send(log, "t", [b"b"])
    directories.take(3)
    with pytest.raises(errors.NotEnoughReplicasError):
        notice(log)

    directories.put_back(1)
    if empty:
        shutil.rmtree(directories.path(1))
        directories.path(1).mkdir()
    notice(log)

    assert log.root.controller.image.online == (1, 2)
    assert assignment(log, "t").isr == (2,)
    send(log, "t", [b"c"])
    directories.put_back(3)
    assert bring_back(log) == [3]
    assert values(log, "t") == [b"a", b"b", b"c"]
    check_equal(directories, log, "t")


def test_an_empty_directory_takes_the_place_of_one_that_fails_after_an_epoch_that_never_came(
    directories, log
):
    """Its process was killed after it had noted the epoch, and before it wrote it anywhere."""
    log.create_topic("t")
    send(log, "t", [b"a"])
    directories.lose(log, 1)
    controller = log.root.controller
    controller.directories[2].note_epoch(controller.epoch + 1)
    directories.take(3)
    directories.replace(1)
    notice(log)

    assert controller.image.online == (1, 2)
    send(log, "t", [b"b"])
    assert values(log, "t") == [b"a", b"b"]


@pytest.mark.parametrize("is_noticed", [False, True])
def test_two_of_four_directories_and_an_empty_one_are_a_majority(tmp_path, is_noticed):
    """Three had each write, so one of the two has it, although a fourth one is away."""
    paths = [tmp_path / f"disk{number}" for number in range(4)]
    with embedlog.open(paths, maintenance=False) as log:
        log.create_topic("t")
        if is_noticed:
            shutil.rmtree(paths[2])
            notice(log)
        send(log, "t", [b"a"])
    if not is_noticed:
        shutil.rmtree(paths[2])
    paths[2].mkdir()
    paths[3].rename(tmp_path / "away")

    with embedlog.open(paths, maintenance=False) as log:
        assert log.root.controller.image.online == (1, 2, 3)
        send(log, "t", [b"b"])
        assert values(log, "t") == [b"a", b"b"]


def test_a_directory_counts_for_the_majority_from_when_it_is_online(tmp_path, monkeypatch):
    """A process that dies while it adds one does not make a log of two directories need two."""
    paths = [tmp_path / f"disk{number}" for number in range(3)]
    with embedlog.open(paths[:2], maintenance=False) as log, monkeypatch.context() as patch:
        log.create_topic("t")
        send(log, "t", [b"a"])
        patch.setattr(root, "bring_back", raise_killed)
        with pytest.raises(KeyboardInterrupt):
            log.replicas.add(paths[2])
    shutil.rmtree(paths[2])
    paths[2].mkdir()
    paths[0].rename(tmp_path / "away")

    with embedlog.open(paths[1:], maintenance=False) as log:
        send(log, "t", [b"b"])
        assert values(log, "t") == [b"a", b"b"]
        (tmp_path / "away").rename(paths[0])
        for _ in range(3):
            root.try_bring_back(log.root)
        assert log.root.controller.image.online == (1, 2, 3)


def test_a_directory_that_was_just_added_counts_after_a_power_cut(tmp_path):
    """It is in the metadata, and the process was killed before the files of the others named it."""
    paths = [tmp_path / f"disk{number}" for number in range(4)]
    with embedlog.open(paths[:3], maintenance=False) as log:
        log.create_topic("t")
        send(log, "t", [b"a"])

    def add_and_die():
        log = embedlog.open(paths[:3], maintenance=False)
        log.root.write_members = partial(os.kill, os.getpid(), signal.SIGKILL)
        log.replicas.add(paths[3])

    assert forks.run(add_and_die).killed
    (paths[3] / "live/data.mdb").write_bytes(bytes(8192))
    paths[0].rename(tmp_path / "away")

    with embedlog.open(paths[:3], maintenance=False, files=REBOOTED) as log:
        assert log.root.controller.image.online == (2, 3, 4)
        send(log, "t", [b"b"])
        assert values(log, "t") == [b"a", b"b"]


def test_a_directory_returns_while_another_program_takes_the_locks(directories, log, monkeypatch):
    """For that one it is still online: it has its lock, and waits for those of the others."""
    with directories.open() as other:
        before = other.root.controller.directories
        directories.lose(log, 1)
        directories.put_back(1)
        waits, lock_slowly = threading.Event(), Files._lock_slowly

        def note(files, *options):
            waits.set()
            lock_slowly(files, *options)

        before[1].state.acquire()
        monkeypatch.setattr(Files, "_lock_slowly", note)
        returning = threading.Thread(target=partial(bring_back, log))
        returning.start()
        assert waits.wait(patient(20))
        try:
            before[2].state.acquire(patient(1))
            before[2].state.release()
        finally:
            before[1].state.release()
            returning.join()
        assert log.root.controller.image.online == (1, 2, 3)


@pytest.mark.parametrize("count", [2, 3])
def test_an_addition_that_is_cut_short_leaves_the_majority_as_it_was(tmp_path, count):
    """It is online in the others, without the write that says so; then one of those is lost."""
    paths = [tmp_path / f"disk{number}" for number in range(count + 1)]
    with embedlog.open(paths[:count], maintenance=False) as log:
        log.create_topic("t")
        send(log, "t", [b"a"])
    check_killed(lambda: add(paths[:count], paths[-1]), paths[-1])
    paths[0].rename(tmp_path / "away")

    with embedlog.open(paths[:count], maintenance=False) as log:
        send(log, "t", [b"b"])
        (tmp_path / "away").rename(paths[0])
        bring_back(log)
        assert log.root.controller.image.online == tuple(range(1, count + 2))
        assert values(log, "t") == [b"a", b"b"]


@pytest.mark.parametrize("others", [1, 2])
def test_the_only_copy_leads_after_a_return_that_was_cut_short(directories, others):
    """It has all that it had; what it lacks is the write that says that it is online."""
    with directories.open() as log:
        log.create_topic("t", replicas=[(2,)])
        send(log, "t", [b"a"])
        directories.lose(log, 2)
        for name in ("u", "v"):
            log.create_topic(name)
    directories.put_back(2)
    check_killed(lambda: bring_back(directories.open()), directories.path(2))
    if others == 1:
        directories.take(1)

    with directories.open() as log:
        bring_back(log)
        send(log, "t", [b"b"])
        assert values(log, "t") == [b"a", b"b"]


def add(paths, path):
    """Add a directory to a log."""
    embedlog.open(paths, maintenance=False).replicas.add(path)


def kill_before(path):
    """Kill this process before the next write of `state` that reaches a directory."""
    commit_all = kv._commit_all

    def killed(stores, txns):
        for index, store in enumerate(stores):
            if store.path == f"{path}/state":
                for txn in txns.txns[:index]:
                    txn.commit()
                os.kill(os.getpid(), signal.SIGKILL)
        return commit_all(stores, txns)

    kv._commit_all = killed


def check_killed(work, path):
    """Let a process do something, and kill it as `kill_before`."""

    def patched():
        kill_before(path)
        work()

    assert forks.Child(patched).end().killed


def raise_killed(*_):
    """Take the place of a function in a process that dies before it."""
    raise KeyboardInterrupt


def test_a_directory_that_was_replaced_before_that_was_noticed_is_used_again(directories, log):
    """Too few others worked to note that it was gone; now it is empty."""
    log.create_topic("t")
    send(log, "t", [b"a"])
    directories.lose(log, 1)
    directories.take(2)
    with pytest.raises(errors.NotEnoughReplicasError):
        notice(log)

    directories.replace(2)
    notice(log)

    assert log.root.controller.image.online == (2, 3)
    bring_back(log)
    send(log, "t", [b"b"])
    directories.put_back(1)
    assert bring_back(log) == [1]
    assert values(log, "t") == [b"a", b"b"]
    check_equal(directories, log, "t")


@pytest.mark.parametrize("empty", [False, True])
def test_a_directory_whose_return_was_cut_short_still_takes_the_place_of_one_that_fails(
    directories, log, monkeypatch, empty
):
    """It counts as online in the other one, without the write that says so, nor any before."""
    log.create_topic("t")
    send(log, "t", [b"a"])
    directories.lose(log, 1)
    for name in ("u", "v"):
        log.create_topic(name)
    send(log, "t", [b"b"])
    commit_all, cut_short = kv._commit_all, []

    def fail_once(stores, txns):
        paths = [store.path for store in stores]
        if not cut_short and f"{directories.path(1)}/state" in paths:
            at = paths.index(f"{directories.path(1)}/state")
            cut_short.append(at)
            txns.txns = [*txns.txns[:at], _FailingTxn(txns.txns[at]), *txns.txns[at + 1 :]]
        return commit_all(stores, txns)

    monkeypatch.setattr(kv, "_commit_all", fail_once)
    directories.take(3)
    directories.put_back(1)
    if empty:
        shutil.rmtree(directories.path(1))
        directories.path(1).mkdir()
    with pytest.raises(errors.NotEnoughReplicasError):
        notice(log)
    assert cut_short == [1]

    send(log, "t", [b"c"])
    directories.put_back(3)
    bring_back(log)
    assert values(log, "t") == [b"a", b"b", b"c"]
    check_equal(directories, log, "t")


def test_a_program_that_starts_without_a_quorum_waits_for_a_directory_only(directories):
    """It can open the log as soon as one is back, and what it tried before leaks nothing."""
    with directories.open() as log:
        log.create_topic("t")
        send(log, "t", [b"a"])
        directories.lose(log, 1)
        send(log, "t", [b"b"])
    directories.take(2)
    counts = []
    for _ in range(4):
        with pytest.raises(errors.NotEnoughReplicasError):
            directories.open()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts[1:]) <= counts[0]

    directories.put_back(1)
    with directories.open() as log:
        assert log.root.controller.image.online == (1, 3)
        directories.put_back(2)
        bring_back(log)
        send(log, "t", [b"c"])
        assert values(log, "t") == [b"a", b"b", b"c"]
        check_equal(directories, log, "t")


@pytest.mark.parametrize(
    ("what_is_left", "is_online", "running"),
    sample([*product(["empty", "old copy"], [False, True], [False, True])], 3),
)
def test_a_directory_that_lost_what_it_had_does_not_outvote_the_one_with_the_records(
    directories, what_is_left, is_online, running
):
    """The third one was away when the two others went on: it knows nothing of what they wrote.

    In what it knows, the one that is emptied later may be offline or not.
    """
    with directories.open() as log:
        log.create_topic("t", replicas=[(1, 2, 3)])
        send(log, "t", [b"a"])
        backup = directories.path(2).with_name("backup")
        shutil.copytree(directories.path(2), backup)
        for name in ("u", "v", "w"):
            log.create_topic(name)
        if not is_online:
            directories.lose(log, 2)
    stopped = directories.open()
    directories.take(3)
    if not is_online:
        directories.put_back(2)
    with directories.open() as log:
        notice(log)
        bring_back(log)
        assert log.root.controller.image.online == (1, 2)
        send(log, "t", [b"b"])
        if not running:
            stopped.close()
    directories.take(1)
    shutil.rmtree(directories.path(2))
    if what_is_left == "empty":
        directories.path(2).mkdir()
    else:
        backup.rename(directories.path(2))
    directories.put_back(3)

    if running:
        with suppress(errors.EmbedlogError):  # while it has the first one open, it may go on
            notice(stopped)
            send(stopped, "t", [b"c"], delivery_timeout_ms=300, request_timeout_ms=100)
    else:
        with pytest.raises(errors.NotEnoughReplicasError):
            directories.open()
    directories.put_back(1)
    if running:
        stopped.close()
    with directories.open() as log:
        bring_back(log)
        send(log, "t", [b"d"])
        assert [each for each in values(log, "t") if each != b"c"] == [b"a", b"b", b"d"]
        check_equal(directories, log, "t")


def test_a_log_opens_with_two_of_three_directories_and_fills_the_third(directories):
    """It was replaced while no program had the log open."""
    with directories.open() as log:
        log.create_topic("t")
        send(log, "t", [b"a"])
    directories.take(2)
    directories.replace(2)

    with directories.open() as log:
        send(log, "t", [b"b"])
        bring_back(log)
        assert values(log, "t") == [b"a", b"b"]
        check_equal(directories, log, "t")


def test_a_log_opens_without_the_directory_whose_file_is_damaged(directories):
    """Nobody knows what it is, so it is left alone, as anything else at its path would be."""
    with directories.open() as log:
        log.create_topic("t")
        send(log, "t", [b"a"])
    file = directories.path(2) / "embedlog.toml"
    whole = file.read_bytes()
    file.write_bytes(bytes(len(whole)))

    with directories.open() as log:
        send(log, "t", [b"b"])
        assert [each.online for each in log.replicas] == [True, False, True]
        assert bring_back(log) == []
        assert file.read_bytes() == bytes(len(whole))
        file.write_bytes(whole)
        assert bring_back(log) == [2]
        check_equal(directories, log, "t")


def test_the_only_copy_ends_where_its_disk_ends_after_it_lost_what_was_not_flushed(
    directories, log
):
    """As after a power cut of the whole log: what was flushed is there, and appends go on."""
    log.create_topic("t", replication_factor=1)
    send(log, "t", [b"a"])
    log.flush()
    leader = assignment(log, "t").leader
    (file,) = directories.path(leader).glob("topics/t-*/0/*.arrows")
    flushed = log.partition("t", 0).tail().log_end_position
    send(log, "t", [b"b"])
    directories.lose(log, leader)
    directories.put_back(leader)
    os.truncate(file, flushed)

    bring_back(log)

    send(log, "t", [b"c"])
    assert values(log, "t") == [b"a", b"c"]
    assert log.housekeeping.verify() == []


def test_a_directory_with_an_old_copy_leads_nothing(directories):
    """It went offline with more than it has now."""
    log = directories.open()
    log.create_topic("t", replication_factor=1)
    leader = assignment(log, "t").leader
    send(log, "t", [b"a"])
    log.flush()
    aside = directories.path(leader).with_name("backup")
    shutil.copytree(directories.path(leader), aside)
    for name in ("u", "v", "w"):
        log.create_topic(name)
    send(log, "t", [b"b"])
    directories.lose(log, leader)
    directories.replace(leader)
    shutil.rmtree(directories.path(leader))
    aside.rename(directories.path(leader))

    bring_back(log)

    with pytest.raises(errors.ReplicaNotAvailableError, match="lost"):
        send(log, "t", [b"c"], delivery_timeout_ms=300, request_timeout_ms=100)
    log.delete_topic("t")
    log.close()


def test_a_directory_that_comes_back_is_compared_with_what_is_on_its_disk(
    directories, log, monkeypatch
):
    """The kernel takes a page for clean that it could not write, and has it in its cache."""
    log.create_topic("t", replication_factor=2)
    send(log, "t", [b"a", b"b"])
    leader, follower = assignment(log, "t").isr
    (file,) = directories.path(follower).glob("topics/t-*/0/*.arrows")
    (whole,) = directories.path(leader).glob("topics/t-*/0/*.arrows")
    directories.lose(log, follower)
    directories.put_back(follower)
    cached = {str(file): file.read_bytes()}
    file.write_bytes(cached[str(file)][:-64] + bytes(64))
    read, drop_cache = Files.read, Files.drop_cache

    def read_from_cache(self, fd, length, position):
        data = cached.get(self._absolute(fd))
        if data is None:
            return read(self, fd, length, position)
        return data[position : position + length]

    def drop(self, fd):
        cached.pop(self._absolute(fd), None)
        drop_cache(self, fd)

    monkeypatch.setattr(Files, "read", read_from_cache)
    monkeypatch.setattr(Files, "drop_cache", drop)
    bring_back(log)

    assert file.read_bytes() == whole.read_bytes()


def test_an_append_to_a_directory_that_is_being_deleted_finds_it_offline(directories, log):
    """Its files go one after the other, and the log's before those that show what it is."""
    log.create_topic("t", replication_factor=1)
    send(log, "t", [b"a"])
    leader = directories.path(assignment(log, "t").leader)
    (file,) = leader.glob("topics/t-*/0/*.arrows")
    os.truncate(file, 0)
    (leader / "embedlog.toml").rename(leader / "elsewhere")

    with pytest.raises(errors.ReplicaNotAvailableError):
        log.partition("t", 0).append([encoded(b"b")])
    (leader / "elsewhere").rename(leader / "embedlog.toml")
    log.delete_topic("t")


def test_a_publication_to_a_leader_that_is_being_deleted_goes_to_the_others(directories, log):
    """The file is opened again after a change of the metadata; its directory may go first."""
    log.create_topic("t")
    send(log, "t", [b"a"])
    leader = assignment(log, "t").leader
    (folder,) = directories.path(leader).glob("topics/t-*/0")
    shutil.rmtree(folder)
    other = next(each for each in assignment(log, "t").isr if each != leader)
    log.root.controller.take_offline({other: errors.StorageError("It was unplugged")})

    publish(log.root, [stage(log.root, t_0=[b"b"])])

    assert assignment(log, "t").leader not in (leader, other)
    bring_back(log)
    assert values(log, "t") == [b"a", b"b"]
    check_equal(directories, log, "t")


def test_an_append_to_a_copy_that_is_being_deleted_goes_on_in_the_others(
    directories, log, monkeypatch
):
    """The rest of the directory is still there."""
    log.create_topic("t")
    send(log, "t", [b"a"])
    follower = assignment(log, "t").isr[-1]
    (folder,) = directories.path(follower).glob("topics/t-*/0")
    open_file, deleted = Files.open, []

    def delete_first(self, path, **options):
        is_copy = os.path.samefile(self.root, directories.path(follower))
        if is_copy and path.startswith("topics/t-") and options.get("create") and len(deleted) < 2:
            shutil.rmtree(folder, ignore_errors=True)
            deleted.append(path)
        return open_file(self, path, **options)

    monkeypatch.setattr(Files, "open", delete_first)
    log.partition("t", 0).roll()
    send(log, "t", [b"b"])
    monkeypatch.undo()

    assert len(deleted) == 2
    assert follower not in assignment(log, "t").isr
    bring_back(log)
    assert values(log, "t") == [b"a", b"b"]
    check_equal(directories, log, "t")


def test_a_directory_without_its_locks_is_offline_also_for_a_write_of_a_database(directories, log):
    """It is just being deleted, and the lock of the database was not open yet."""
    log.create_topic("t")
    store = log.root.controller.directories[3].live
    store._files.close(store._lock)
    store._lock = None
    (directories.path(3) / "locks").rename(directories.path(3) / "elsewhere")

    log.root.context.live.write(lambda txn: None)

    assert log.root.controller.image.online == (1, 2)
    (directories.path(3) / "elsewhere").rename(directories.path(3) / "locks")
    bring_back(log)


# The wrong moment


def test_a_takeover_that_was_refused_is_done_by_the_next_call(directories, log, monkeypatch):
    """Otherwise the log would be appended to in the epoch of the leader before."""
    log.create_topic("t")
    send(log, "t", [b"a"])
    begin, calls = leader_epochs.begin, []

    def refuse_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise errors.NotEnoughReplicasError("Another directory failed")
        begin(*arguments)

    monkeypatch.setattr(leader_epochs, "begin", refuse_once)
    directories.lose(log, assignment(log, "t").leader)
    part = log.partition("t", 0)
    with pytest.raises(errors.NotEnoughReplicasError):
        part.acquire()

    send(log, "t", [b"b"])
    assert part.tail().leader_epoch >= assignment(log, "t").leader_epoch
    assert values(log, "t") == [b"a", b"b"]


def test_no_database_is_ahead_of_the_one_that_is_read(directories, log, monkeypatch):
    """If the controller's commit fails, nothing was changed anywhere, and another one is read."""
    log.create_topic("t")
    directories.lose(log, 1)
    directories.put_back(1)
    bring_back(log)
    controller, commit_all, orders = log.root.controller, kv._commit_all, []
    assert controller.directory.id == 2

    def fail_once(stores, txns):
        orders.append([store.path for store in stores])
        key, intact = METADATA_VERSION.key(), controller.opened((1, 3))
        before.append([bytes(each.state.get(key)) for each in intact])
        if len(orders) == 1:
            txns.txns = [_FailingTxn(txns.txns[0]), *txns.txns[1:]]
        return commit_all(stores, txns)

    before = []
    monkeypatch.setattr(kv, "_commit_all", fail_once)
    log.create_topic("u")

    assert orders[0][0].startswith(f"{directories.path(2)}/")
    assert before[1] == before[0]
    assert controller.image.online == (1, 3)
    assert log.topics() == ["t", "u"]
    monkeypatch.undo()
    bring_back(log)


def test_a_directory_that_is_missing_while_an_epoch_was_noted_that_never_comes(directories):
    """Its process was killed before it wrote it; the next one to open the log does not wait."""
    with directories.open() as log:
        log.create_topic("t")
        for directory in log.root.controller.online:
            directory.note_epoch(log.root.controller.epoch + 5)
    directories.take(1)

    with directories.open() as log:
        send(log, "t", [b"a"])
        assert [each.online for each in log.replicas] == [False, True, True]


def test_a_database_is_not_kept_open_if_the_other_one_cannot_be_opened(
    directories, log, monkeypatch
):
    """Another process would take it for unused, and begin a table of readers without this one's."""
    log.create_topic("t")
    directories.lose(log, 1)
    directories.put_back(1)
    forks.call(lambda: bring_back(directories.open()))
    begin = kv.LmdbStore.__init__

    def refuse_live(store, files, name, **options):
        if (files.root, name) == (os.fspath(directories.path(1)), "live"):
            raise errors.CorruptionError("It is damaged", path=f"{files.root}/live")
        begin(store, files, name, **options)

    monkeypatch.setattr(kv.LmdbStore, "__init__", refuse_live)
    gc.disable()
    try:
        notice(log)
        assert log.root.controller.image.online == (2, 3)
        kv.close_unused()
        databases = [each for each in open_files() if "/state/" in each or "/live/" in each]
        assert not [each for each in databases if each.startswith(f"{directories.path(1)}/")]
    finally:
        gc.enable()


def test_a_return_that_fails_at_its_end_closes_no_files_that_other_threads_use(
    directories, log, monkeypatch
):
    """By then others read and lock in the directory, and another one may find it broken."""
    directories.lose(log, 1)
    directories.put_back(1)
    controller, used = log.root.controller, []

    def break_again():
        files = controller.directories[1].files
        used.append((files, files.open(FORMAT_FILE)))
        controller.take_offline({1: errors.StorageError("It is broken", path=files.root)})
        raise errors.ClosedError("The log was closed", path=files.root)

    monkeypatch.setattr(controller.state, "confirm_epoch", break_again)
    root.try_bring_back(log.root)
    ((files, file),) = used
    assert files.read(file, 1, 0)
    monkeypatch.undo()
    bring_back(log)
    assert controller.image.online == (1, 2, 3)


def test_an_open_notes_no_places_at_which_the_directories_are_not_any_more(
    directories, monkeypatch
):
    """Two disks are swapped back while it goes on; later one of the two is lost."""
    with directories.open() as log:
        log.create_topic("t")
        send(log, "t", [b"a"])

    def swap():
        directories.take(1)
        directories.path(3).rename(directories.path(1))
        directories.aside(1).rename(directories.path(3))

    def swap_back_first(log_root, paths):
        assert paths[1] == os.fspath(directories.path(3))
        swap()
        update(log_root, paths)

    update = root.ReplicatedRoot._update_directories
    swap()
    with monkeypatch.context() as patch:
        patch.setattr(root.ReplicatedRoot, "_update_directories", swap_back_first)
        with suppress(errors.EmbedlogError):
            directories.open().close()
    directories.take(1)

    with directories.open() as log:
        assert log.root.controller.image.online == (2, 3)
        assert values(log, "t") == [b"a"]


def open_files():
    """Return the paths of the files that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_a_program_is_not_the_first_one_since_nobody_uses_a_directory_that_is_offline(
    directories, log
):
    """The first one removes what the manifest does not name, such as what was just deleted."""
    log.create_topic("t", replicas=[(2, 3)])
    directories.lose(log, 1)
    directories.put_back(1)
    for value in b"a", b"b":
        send(log, "t", [value])
        log.root.partition("t", 0).roll()
    delete_records(log.root.partition("t", 0), 2)
    send(log, "t", [b"c"])
    before = directories.copies("t")
    assert [len(files) for files in before.values()] == [0, 3, 3]

    forks.call(lambda: directories.open().close())

    assert directories.copies("t") == before
    assert bring_back(log) == [1]
    assert values(log, "t") == [b"c"]


def test_what_the_database_that_is_read_from_now_on_lacks_is_not_truncated(directories, log):
    """It failed in the last commit, and the one that was read before has failed since."""
    log.create_topic("t", replicas=[(1, 2, 3)])
    send(log, "t", [b"a"])
    second = log.root.controller.directories[2].live
    rows = second.read(lambda txn: list(txn.cursor()))
    send(log, "t", [b"b"])
    second.write(partial(kv.replace_rows, rows))
    directories.lose(log, 1)
    assert log.root.controller.directory.id == 2

    send(log, "t", [b"c"])

    assert values(log, "t") == [b"a", b"b", b"c"]
    directories.put_back(1)
    bring_back(log)
    check_equal(directories, log, "t")


def test_a_wake_page_on_a_broken_disk_is_that_of_another_directory(directories, log):
    """Also if the first use of the page finds out that the disk is broken."""
    log.create_topic("t")
    wake = log.root.context.wake
    wake._pages.clear()
    (directories.path(1) / "wake").unlink()
    directories.take(1)
    shutil.rmtree(directories.path(1).with_name("unmounted"))

    wake.advance()

    assert log.root.controller.image.online == (2, 3)
    send(log, "t", [b"a"])
    assert values(log, "t") == [b"a"]


class _FailingTxn:
    """A transaction whose commit fails."""

    def __init__(self, txn):
        self.id = txn.id

    def commit(self):
        error = lmdb.DiskError("mdb_txn_commit: Input/output error")
        error.code = errno.EIO
        raise error


def test_a_directory_is_added_although_another_one_turns_out_to_be_behind(
    directories, log, monkeypatch, tmp_path
):
    """Its disk lost more than the last write; the next write finds that out."""
    log.create_topic("t")
    behind, prepare = log.root.controller.directories[2], replicated_root._prepare

    def lose_writes(*arguments):
        prepare(*arguments)
        version = METADATA_VERSION.get(behind.state)
        older = version._replace(version=version.version - 2)
        behind.state.write(lambda txn: METADATA_VERSION.put(txn, value=older))

    monkeypatch.setattr(replicated_root, "_prepare", lose_writes)
    added = log.replicas.add(tmp_path / "added")
    monkeypatch.undo()

    assert log.root.controller.image.online == (1, 3, added)
    assert bring_back(log) == [2]
    check_equal(directories, log, "t")


def test_a_directory_is_added_although_it_goes_offline_again_at_once(
    directories, log, monkeypatch, tmp_path
):
    """Another process may find it broken while this one removes what is left in it."""
    log.create_topic("t")
    controller, write_members = log.root.controller, log.root.write_members

    def lose_it():
        write_members()
        controller.take_offline({max(controller.directories): errors.StorageError("broken")})

    monkeypatch.setattr(log.root, "write_members", lose_it)
    added = log.replicas.add(tmp_path / "added")
    monkeypatch.undo()

    assert controller.image.online == (1, 2, 3)
    assert bring_back(log) == [added]


def test_a_directory_is_added_although_another_one_breaks_in_that_commit(
    directories, log, monkeypatch, tmp_path
):
    """The one that broke goes offline, and the rest is done again."""
    log.create_topic("t")
    send(log, "t", [b"a"])
    commit_all, broken = kv._commit_all, []

    def fail_once(stores, txns):
        paths = [store.path for store in stores]
        if not broken and any(path.startswith(f"{tmp_path}/added/") for path in paths):
            at = paths.index(f"{directories.path(2)}/state")
            broken.append(at)
            txns.txns = [*txns.txns[:at], _FailingTxn(txns.txns[at]), *txns.txns[at + 1 :]]
        return commit_all(stores, txns)

    monkeypatch.setattr(kv, "_commit_all", fail_once)
    added = log.replicas.add(tmp_path / "added")

    assert broken
    assert log.root.controller.image.online == (1, 3, added)
    monkeypatch.undo()
    assert bring_back(log) == [2]
    check_equal(directories, log, "t")


def test_a_compacted_segment_is_in_a_copy_that_joined_while_it_was_written(
    directories, log, monkeypatch
):
    """It was written to the copies that were in sync at that time."""
    settings = {"cleanup.policy": "compact", "segment.bytes": 2000, "min.cleanable.dirty.ratio": 0}
    log.create_topic("t", config=settings)
    with log.producer() as producer:
        for number in range(200):
            producer.send("t", b"%d" % number, key=b"%d" % (number % 5)).result()
    follower = assignment(log, "t").isr[-1]
    directories.lose(log, follower)
    directories.put_back(follower)
    seal, joined = Replacement._seal, []

    def join_after(self, *arguments):
        seal(self, *arguments)
        joined.extend(bring_back(log))

    monkeypatch.setattr(Replacement, "_seal", join_after)
    log.housekeeping.compact("t", force=True)

    assert joined == [follower]
    check_equal(directories, log, "t")


def test_files_that_only_a_directory_behind_names_are_removed(directories, monkeypatch):
    """Killed when the rows of replaced files were deleted; a power cut took those of `live`."""
    with directories.open() as log:
        settings = {"cleanup.policy": "compact", "segment.bytes": 2000}
        log.create_topic("t", config=settings)
        with log.producer() as producer:
            for number in range(100):
                producer.send("t", b"%d" % number, key=b"%d" % (number % 5)).result()
        kept = log.topic("t").to_arrow()["value"].to_pylist()[-5:]
    forget = unnamed_files.forget

    def forget_in_two(*arguments):
        kill_before(directories.path(3))
        forget(*arguments)

    def compact():
        unnamed_files.forget = forget_in_two
        directories.open().housekeeping.compact("t", force=True)

    assert forks.was_killed(compact)
    monkeypatch.setattr(Files, "boot_id", lambda _: "another")
    with directories.open() as log:
        assert any("the manifest does not name it" in line for line in log.root.startup_report)
        assert log.housekeeping.verify() == []
        assert values(log, "t")[-5:] == kept


def test_a_copy_that_joins_has_no_files_that_are_removed_at_that_moment(directories, log):
    """They are unlinked where copies are in sync, and its own would stay."""
    log.create_topic("t")
    send(log, "t", [b"a"])
    part = log.partition("t", 0)
    part.refresh()
    info = unnamed_files.new_file(part, part.active_segment)
    (directories.path(3) / part.path_of(info)).write_bytes(b"x")
    directories.lose(log, 3)
    directories.put_back(3)

    bring_back(log)

    assert not (directories.path(3) / part.path_of(info)).exists()
    unnamed_files.discard(part, [info])
    assert not log.root.context.state.read(lambda txn: catalog.uncommitted_files(txn, part.key))


def test_a_copy_whose_files_were_deleted_is_made_again(directories, log):
    """The directory is there, and works; what it lost is copied when it comes back."""
    log.create_topic("t")
    send(log, "t", [b"a"])
    leader = assignment(log, "t").leader
    shutil.rmtree(directories.path(leader) / "topics" / f"t-{log.root.topic('t').id}")

    with directories.open() as another:
        assert values(another, "t") == [b"a"]
        send(another, "t", [b"b"])
        bring_back(another)
        assert values(another, "t") == [b"a", b"b"]
        check_equal(directories, another, "t")


# Leaders that were not in sync


@pytest.mark.parametrize("came_back", [True, False])
def test_a_copy_with_another_history_leads_after_a_removal_with_what_it_shares(
    directories, log, came_back
):
    """It was in no election, but is as little in sync as after an unclean one."""
    log.create_topic("t", replication_factor=2)
    send(log, "t", [b"shared"])
    first, second = assignment(log, "t").isr
    directories.lose(log, first)
    send(log, "t", [b"of 2", b"of 2"])
    directories.put_back(first)
    replicated_root.try_bring_back(log.root)
    directories.lose(log, second)
    log.replicas.elect_leaders(election="unclean")
    send(log, "t", [b"of 1"])
    directories.put_back(second)
    if came_back:
        replicated_root.try_bring_back(log.root)
    directories.lose(log, first)

    log.replicas.remove(str(directories.path(first)), force=True)
    replicated_root.try_bring_back(log.root)

    assert assignment(log, "t").leader == second
    assert values(log, "t") == [b"shared"]
    assert send(log, "t", [b"next"])[0].offset == 1
    assert values(log, "t") == [b"shared", b"next"]


def test_a_leader_that_was_not_in_sync_has_no_files_of_deleted_segments(directories, log):
    """Segments are deleted in the in-sync copies only, so the new leader must remove its own."""
    config = {"segment.bytes": 1200, "file.delete.delay.ms": 0}
    log.create_topic("t", replication_factor=2, config=config)
    send(log, "t", [b"%d" % n for n in range(20)])
    leader, follower = assignment(log, "t").isr
    directories.lose(log, follower)
    send(log, "t", [b"more"])
    directories.put_back(follower)
    replicated_root.try_bring_back(log.root)
    delete_records(log.root.partition("t", 0), 10)
    before = directories.copies("t")
    deleted = before[follower].keys() - before[leader].keys()
    directories.lose(log, leader)
    log.replicas.elect_leaders(election="unclean")

    assert values(log, "t")[-1] == b"19"
    assert deleted
    assert deleted.isdisjoint(directories.copies("t")[follower])
    directories.put_back(leader)
    bring_back(log)


def test_a_copy_that_catches_up_while_another_leader_is_elected_has_all_of_both(directories, log):
    """The copy goes on with the bytes of the second."""
    log.create_topic("t")
    send(log, "t", [b"shared"])
    leader, _, behind = assignment(log, "t").isr
    directories.lose(log, behind)
    send(log, "t", [b"of 1"] * 5, acks=1)
    directories.put_back(behind)
    replicated_root.try_bring_back(log.root)
    lost = []

    def fail_over(_: int) -> None:
        if not lost:
            lost.append(leader)
            directories.lose(log, leader)
            send(log, "t", [b"of 2"] * 8)

    catch_up.copy_partition(
        log.root.partition("t", 0), log.root.controller.directories[behind], progress=fail_over
    )

    assert lost
    directories.put_back(leader)
    bring_back(log)
    assert values(log, "t") == [b"shared", *[b"of 1"] * 5, *[b"of 2"] * 8]
    check_equal(directories, log, "t")


def test_a_copy_whose_directory_is_replaced_by_an_old_one_while_it_is_made_begins_again(
    directories, log
):
    """Files that were open still write to the old image, which nobody reads any more."""
    log.create_topic("t", replicas=[(1, 2, 3)])
    send(log, "t", [b"a"])
    directories.lose(log, 3)
    shutil.copytree(directories.aside(3), directories.path(3).with_name("old"))
    send(log, "t", [b"b"])
    directories.put_back(3)
    replicated_root.try_bring_back(log.root)
    done = []

    def replace(_: int) -> None:
        if not done:
            directories.lose(log, 3)
            directories.path(3).with_name("old").rename(directories.path(3))
            done.extend(replicated_root.try_bring_back(log.root))

    part, directory = log.root.partition("t", 0), log.root.controller.directories[3]
    catch_up.copy_partition(part, directory, progress=replace)

    assert done == [3]
    assert assignment(log, "t").isr == (1, 2)
    catch_up.replicate(log.root)
    check_equal(directories, log, "t")
    assert values(log, "t") == [b"a", b"b"]


def test_what_a_killed_writer_left_in_a_follower_is_not_taken_for_a_copy(directories, log):
    """It had written there first."""
    log.create_topic("t", replication_factor=2)
    send(log, "t", [b"x"])
    leader, follower = assignment(log, "t").isr
    (file,) = directories.path(follower).glob("topics/t-*/0/*.arrows")
    with file.open("ab") as left:
        left.write(b"of a batch" * 500)

    send(log, "t", [b"y"])
    directories.lose(log, leader)

    assert values(log, "t") == [b"x", b"y"]


def test_a_publication_that_was_undone_does_not_come_back_in_one_partition(
    directories, monkeypatch
):
    """Killed between a follower and the leader, undone in that partition, and then a power cut."""
    with directories.open() as log:
        log.create_topic("t", replicas=[(2, 1), (1, 2)])

    def publish_half() -> None:
        log = directories.open()
        staged = stage(log.root, t_0=[b"x"], t_1=[b"x"])
        files, positions = log.root.controller.directories[1].files, []
        write = files.write

        def write_once(fd, buffers, position):
            positions.extend([position] if position else ())  # not those of the schemas
            if len(positions) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(fd, buffers, position)

        files.write = write_once
        publish(log.root, [staged])

    def undo() -> None:
        log = directories.open().root.partition("t", 1)
        with log.owned():
            pass

    assert forks.was_killed(publish_half)
    forks.call(undo)
    monkeypatch.setattr(Files, "boot_id", lambda _: "another")
    with directories.open() as log:
        assert values(log, "t") == []


def test_a_committed_publication_is_finished_before_another_leader_begins(directories):
    """Its process was killed before it was visible, and a leader of one partition is lost."""
    with directories.open() as log:
        log.create_topic("t", replicas=[(1, 2, 3), (2, 3, 1)])

    def publish_and_die() -> None:
        log = directories.open()
        staged = stage(log.root, t_0=[b"x"], t_1=[b"x"])
        journal.make_visible = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        publish(log.root, [staged], 1)

    assert forks.was_killed(publish_and_die)
    directories.take(1)
    with directories.open() as log:
        assert values(log, "t") == [b"x", b"x"]
        staged = stage(log.root, t_0=[b"x"], t_1=[b"x"])
        assert publish(log.root, [staged], 1).repeated
        assert values(log, "t") == [b"x", b"x"]


@pytest.mark.parametrize("lost", sample([1, 2, 3], 1))
def test_a_transaction_moves_outputs_and_positions_whatever_directory_is_lost(directories, lost):
    """G22: its process was killed before it was visible; the next transaction goes on."""
    with directories.open() as log:
        log.create_topic("t", replicas=[(1, 2, 3)])
        log.create_topic("out", replicas=[(1, 2, 3), (2, 3, 1)])
        send(log, "t", [b"a", b"b"])

    def transform(log, number):
        with log.transaction("name") as transaction:
            for partition in (0, 1):
                transaction.send("out", b"of %d" % number, partition=partition)
            transaction.send_offsets_to_transaction({TopicPartition("t", 0): number}, "g")
            yield

    def transform_and_die():
        for _ in transform(directories.open(), 1):
            journal.make_visible = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    assert forks.was_killed(transform_and_die)
    directories.take(lost)
    with directories.open() as log, log.consumer(group_id="g") as consumer:
        assert consumer.committed(TopicPartition("t", 0)) == 1
        assert values(log, "out") == [b"of 1", b"of 1"]
        assert [*transform(log, 2)] == [None]
        assert consumer.committed(TopicPartition("t", 0)) == 2
        assert values(log, "out") == [b"of 1", b"of 2"] * 2


@pytest.mark.parametrize(("homes", "away"), [([1, 2], [2, 3]), ([1, 3], [1, 2]), ([1], [2])])
def test_a_copy_that_was_moved_away_and_back_is_not_written_to_where_it_was_deleted(
    directories, log, homes, away
):
    """A program did nothing meanwhile, and has the file open that was deleted."""
    partition = TopicPartition("t", 0)
    with directories.open() as idle:
        log.create_topic("t", replication_factor=len(homes))
        reassign.run(log.root, {partition: homes})
        send(idle, "t", [b"a"])
        reassign.run(log.root, {partition: away})
        reassign.run(log.root, {partition: homes})
        send(log, "t", [b"b"])

        send(idle, "t", [b"c"])

        assert values(log, "t") == values(idle, "t") == [b"a", b"b", b"c"]
        directories.assert_equal_copies("t", len(homes))
        assert log.root.controller.current().image.online == (1, 2, 3)


@pytest.mark.parametrize("before", ["write", "refresh"])
def test_a_directory_that_comes_back_while_it_is_taken_offline_gets_every_write(
    directories, log, monkeypatch, before
):
    """Another process brings it back before the first one has written, or seen, that it is gone."""
    log.create_topic("t")
    with directories.open() as another:
        send(another, "t", [b"a"])
        directories.take(2)
        controller = log.root.controller
        place = controller.state if before == "write" else controller
        call = getattr(place, before)

        def come_back(*arguments, **options):
            monkeypatch.undo()
            notice(another)
            directories.put_back(2)
            assert bring_back(another) == [2]
            return call(*arguments, **options)

        monkeypatch.setattr(place, before, come_back)
        notice(log)

        assert [each.id for each in controller.online] == [1, 2, 3]
        send(log, "t", [b"b"])
        check_equal(directories, log, "t")
        assert len(another.root.controller.current().online) == 3


# What was begun with one leader, or one assignment, and ends with another one


def no_files(directories, directory, topic):
    return not list(directories.path(directory).glob(f"topics/{topic}-*/*/*.arrows"))


def test_a_roll_goes_on_at_a_leader_that_is_elected_in_it(directories, log, monkeypatch):
    """Nothing is lost, also not what was sent with acks=1."""
    log.create_topic("t")
    send(log, "t", [b"shared"])
    send(log, "t", [b"of 1"] * 5, acks=1)
    leader = assignment(log, "t").leader
    partition = log.root.partition("t", 0)
    partition.close()
    lost, open_file = [], partition.active_file

    def fail_over():
        if not lost:
            lost.append(leader)
            directories.lose(log, leader)
        return open_file()

    monkeypatch.setattr(partition, "active_file", fail_over)

    assert partition.roll()
    assert values(log, "t") == [b"shared", *[b"of 1"] * 5]
    directories.put_back(leader)
    bring_back(log)
    check_equal(directories, log, "t")


def test_a_thread_that_reads_waits_until_another_has_taken_over(directories, log, monkeypatch):
    """It then reads all that was published."""
    log.create_topic("t")
    send(log, "t", [b"shared"])
    send(log, "t", [b"of 1"] * 5, acks=1)
    leader = assignment(log, "t").leader
    partition, read = log.root.partition("t", 0), []
    take_over = partition._take_over
    reader = threading.Thread(target=lambda: read.append(values(log, "t")))

    def take_over_while_it_is_read(*arguments):
        reader.start()
        reader.join(0.2)
        take_over(*arguments)

    monkeypatch.setattr(partition, "_take_over", take_over_while_it_is_read)
    directories.lose(log, leader)
    send(log, "t", [b"of 2"])
    reader.join()

    published = [b"shared", *[b"of 1"] * 5]
    assert read in ([published], [[*published, b"of 2"]])
    directories.put_back(leader)
    bring_back(log)
    check_equal(directories, log, "t")


def test_a_file_that_is_just_being_deleted_is_not_created_again_in_a_follower(directories, log):
    """Its name is not in the manifest any more, so nothing would remove it there."""
    log.create_topic("t", config={"segment.bytes": 1200})
    send(log, "t", [b"x" * 100] * 9)
    partition = log.root.partition("t", 0)
    oldest = partition.segment_at(0)
    path, follower = partition.path_of(oldest), assignment(log, "t").in_sync_followers[0]
    (directories.path(follower) / path).unlink()

    files = log.root.context.files
    files.close(files.open(path, write=True))
    assert (directories.path(follower) / path).exists()  # one that lags gets it
    delete_records(partition, oldest.next_offset)
    (directories.path(follower) / path).unlink()
    with pytest.raises(errors.StorageError, match="No such file"):
        files.open(path, write=True)

    assert not (directories.path(follower) / path).exists()


def test_a_reader_returns_nothing_of_a_new_leader_that_is_cut_next(directories, log, monkeypatch):
    """It knew the end of the log of before; Kafka's fetch has the leader epoch for that."""
    log.create_topic("t", replication_factor=2)
    send(log, "t", [b"shared"])
    first, second = assignment(log, "t").isr

    def fail_over(leader, to):
        directories.put_back(to)
        replicated_root.try_bring_back(log.root)
        directories.lose(log, leader)
        log.replicas.elect_leaders(election="unclean")
        assert assignment(log, "t").leader == to

    directories.lose(log, second)
    send(log, "t", [b"of the first"])
    fail_over(first, second)
    send(log, "t", [b"of the second", b"more"])
    reader = log.root.partition("t", 0).reader(1)
    read = reader._read

    def read_after_failover(*arguments):
        monkeypatch.undo()
        fail_over(second, first)
        return read(*arguments)

    monkeypatch.setattr(reader, "_read", read_after_failover)
    assert reader.read() == []
    assert reader.offset == 1
    assert values(log, "t") == [b"shared"]
    directories.put_back(second)
    bring_back(log)
    assert sorted(assignment(log, "t").isr) == sorted([first, second])
    assert log.housekeeping.verify(replicas=True) == []


def test_a_process_does_not_wait_for_itself_when_a_directory_is_lost_while_it_deletes_records(
    directories, monkeypatch
):
    """In a transaction of one database it would read the other one, and close the directory."""

    def lose_and_delete():
        # No wait for a lock ends before the child counts as hung.
        with directories.open(lock_timeout=3600) as log, directories.open() as another:
            log.create_topic("t")
            send(log, "t", [b"a"])
            log.root.partition("t", 0).roll()
            send(log, "t", [b"b"])
            live = log.root.context.live
            write = live.write

            def lose_then_write(step, timeout=None):
                monkeypatch.undo()

                def lose_and_step(txn):
                    if 3 in another.root.controller.image.online:
                        directories.lose(another, 3)
                    return step(txn)

                return write(lose_and_step, timeout)

            monkeypatch.setattr(live, "write", lose_then_write)

            assert delete_records(log.root.partition("t", 0), 1) == 1

            directories.put_back(3)
            bring_back(log)
            assert values(log, "t") == [b"b"]
            assert set(assignment(log, "t").isr) == {1, 2, 3}

    # In a child, which can be killed: a thread that waits for itself never ends.
    forks.call(lose_and_delete, patience=20)


def test_a_topic_that_is_deleted_while_it_is_copied_leaves_nothing(directories, log):
    """Neither files nor a process that waits for the copy."""
    partition = TopicPartition("t", 0)
    log.create_topic("t", replication_factor=1)
    reassign.run(log.root, {partition: [1]})
    send(log, "t", [b"x"])

    def delete(*_) -> None:
        if "t" in log.root.topics():
            with directories.open() as another:
                another.delete_topic("t")

    outcome = reassign.run(log.root, {partition: [2]}, progress=delete)

    assert outcome == reassign.Outcome(pending=[], superseded=[partition])

    assert "t" not in log.root.topics()
    assert log.root.controller.current().image.assignments == {}
    assert all(no_files(directories, each, "t") for each in (1, 2, 3))


def test_a_copy_that_is_moved_away_as_it_joins_is_removed(directories, log, monkeypatch):
    """The one that moves it away leaves that to the one that makes it, and is not done yet."""
    log.create_topic("t")
    send(log, "t", [b"x"])
    directories.lose(log, 3)
    directories.put_back(3)
    replicated_root.try_bring_back(log.root)
    join = ReplicaCopy.join

    def move_away(copy):
        join(copy)
        reassign.run(log.root, {TopicPartition("t", 0): [1, 2]})

    monkeypatch.setattr(ReplicaCopy, "join", move_away)
    catch_up.replicate(log.root)

    assert assignment(log, "t").replicas == (1, 2)
    assert no_files(directories, 3, "t")


@pytest.mark.parametrize("what", ["lose", "move"])
def test_copies_that_are_lost_or_moved_while_they_are_compared_are_no_difference(
    directories, log, what
):
    """Nor does the comparison end with an error."""
    log.create_topic("t")
    send(log, "t", [b"x"])
    done = []

    def change(*_):
        if not done:
            done.append(what)
            if what == "lose":
                directories.lose(log, 3)
            else:
                reassign.run(log.root, {TopicPartition("t", 0): [1, 2]})

    assert verify_copies(log.root, change) == []


@pytest.mark.parametrize(
    ("left", "directory"), sample([*product(["reserve", ".probe"], [1, 2, 3])], 2)
)
def test_an_emptied_directory_is_filled_again_although_a_program_wrote_to_it(
    directories, log, directory, left
):
    """The first program that looks at it may be the one that keeps the reserve."""
    log.create_topic("t")
    send(log, "t", [b"1"])
    path = directories.path(directory)
    for entry in list(path.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if left == "reserve":
        Reserve(log.root.controller.directories[directory].files).keep()
    else:
        (path / left).write_bytes(b"embedlog")

    notice(log)
    send(log, "t", [b"2"])
    assert bring_back(log) == [directory]

    assert values(log, "t") == [b"1", b"2"]
    directories.assert_equal_copies("t")


# Followers that lag


@pytest.mark.parametrize("acks", [1, "all"])
def test_a_follower_whose_disk_is_slow_leaves_the_isr_and_joins_when_it_has_everything(
    directories, log, monkeypatch, acks
):
    """Its write is waited for, and may take `replica.lag.time.max.ms`; later writes go on alone."""
    log.create_topic("t", replication_factor=2, config={"replica.lag.time.max.ms": 20})
    send(log, "t", [b"x"])
    leader, follower = assignment(log, "t").isr
    files = log.root.controller.directories[follower].files
    write = files.write

    def write_slowly(*arguments):
        time.sleep(0.03)
        return write(*arguments)

    monkeypatch.setattr(files, "write", write_slowly)
    send(log, "t", [b"y"], acks=acks)
    assert assignment(log, "t").isr == (leader,)
    directories.assert_equal_copies("t", 2)
    send(log, "t", [b"z"], acks=acks)
    monkeypatch.undo()
    log.alter_topic("t", {"min.insync.replicas": 2})
    with pytest.raises(errors.NotEnoughReplicasError):
        send(log, "t", [b"refused"], delivery_timeout_ms=300, request_timeout_ms=100)

    assert catch_up.replicate(log.root) == 1
    assert assignment(log, "t").isr == (leader, follower)
    directories.assert_equal_copies("t", 2)


def test_a_copy_in_sync_that_was_cut_short_gets_no_hole(directories, log):
    """What its disk lost is copied from the leader before the next batch is written."""
    log.create_topic("t", replication_factor=2)
    send(log, "t", [b"x" * 500, b"y" * 500])
    (file,) = directories.path(assignment(log, "t").isr[1]).glob("topics/t-*/0/*.arrows")
    os.truncate(file, file.stat().st_size - 300)

    send(log, "t", [b"z"])

    directories.assert_equal_copies("t", 2)
