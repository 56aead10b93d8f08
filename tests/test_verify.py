"""`verify` beside processes that change the log: it reports no change as damage, but all damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.roots import encoded, fill, make_log, open_root, segment_files

from embedlog.errors import StorageError
from embedlog.files import Files
from embedlog.partition import PartitionLog
from embedlog.partition.log_start import move_log_start
from embedlog.retention import retain
from embedlog.root.repair import repair_root
from embedlog.root.root import Root
from embedlog.root.verify import verify_root

EVERY_BATCH = {"index.interval.bytes": 0, "segment.bytes": 3000, "file.delete.delay.ms": 0}


@pytest.fixture
def other(root: Root) -> Iterator[Root]:
    """A second handle, as that of another process."""
    with closing(open_root(root.path)) as other:
        yield other


def append(log: PartitionLog) -> None:
    fill(log, 3)


def append_and_roll(log: PartitionLog) -> None:
    for _ in range(2):
        fill(log, 1)
        log.roll()


def truncate(log: PartitionLog) -> None:
    log.truncate_to(5)


def truncate_and_append(log: PartitionLog) -> None:
    log.truncate_to(5)
    log.append([encoded(b"another, and longer", at=0)])


def delete_records(log: PartitionLog) -> None:
    move_log_start(log, log.end_offset() - 1)


def two_segments(root: Root) -> PartitionLog:
    """Create a topic of one partition with a sealed segment and an active one."""
    log = make_log(root, EVERY_BATCH)
    fill(log, 12)
    log.roll()
    fill(log, 3, first=12)
    return log


CHANGES = (append, append_and_roll, truncate, truncate_and_append, delete_records)


def before_refresh(log: PartitionLog, change: Callable[[], None]) -> None:
    """Let a change happen once, after the tail was read and before the manifest is."""
    refresh = log.refresh

    def changed() -> None:
        log.refresh = refresh  # type: ignore[method-assign]
        change()
        refresh()

    log.refresh = changed  # type: ignore[method-assign]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_tail_and_manifest_is_no_damage(root, other, change):
    """Another process appends, rolls, truncates or deletes while `verify` runs."""
    log = two_segments(root)

    before_refresh(log, lambda: change(other.partition("t", 0)))
    assert verify_root(root) == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_files_are_read_is_no_damage(root, other, change):
    """The same changes after the first batch was read."""
    two_segments(root)
    pending = [change]

    def progress(done: int, total: int) -> None:
        if pending:
            pending.pop()(other.partition("t", 0))

    assert verify_root(root, progress) == []
    assert not pending


@pytest.mark.parametrize("again", [False, True], ids=["gone", "created again"])
def test_a_topic_that_is_deleted_meanwhile_is_no_damage(root, other, again):
    """A new topic with its name is no damage either."""
    fill(make_log(other, EVERY_BATCH), 3)
    log = root.partition("t", 0)

    def delete() -> None:
        other.delete_topic("t")
        if again:
            fill(make_log(other), 2)

    before_refresh(log, delete)
    assert verify_root(root) == []


def test_damage_is_found_beside_a_writer(root, other):
    """`verify` repeats a check after a change; damage is found each time."""
    fill(make_log(other, EVERY_BATCH), 12)
    log = root.partition("t", 0)
    path = segment_files(root.path)[0]
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)

    before_refresh(log, lambda: fill(other.partition("t", 0), 2, first=12))
    findings = verify_root(root)

    assert len(findings) == 1
    assert findings[0].topic == "t"
    other.delete_topic("t")  # the fixture expects a healthy log


def test_damage_is_found_while_another_process_holds_the_partition(root, other):
    """Without the lock `verify` reads beside the owner, as a handle with mode="r" always does."""
    log = make_log(root)
    fill(log, 2)
    path = segment_files(root.path)[0]
    path.write_bytes(path.read_bytes()[:-8])
    with closing(open_root(root.path, lock_timeout=0.05)) as impatient:
        other.partition("t", 0).acquire()
        assert len(verify_root(impatient)) == 1
        other.partition("t", 0).release()
    with closing(open_root(root.path, mode="r")) as reading:
        assert len(verify_root(reading)) == 1
    root.delete_topic("t")  # the fixture expects a healthy log


def fail_unlinks(patched: pytest.MonkeyPatch, files: Files) -> None:
    """Let each unlink fail with EIO."""

    def refuse(path: str, **_: object) -> None:
        raise files._failed(OSError(5, "Input/output error"), "unlink", path)

    patched.setattr(files, "unlink", refuse)


def topic_directories(root: Root) -> list[str]:
    return sorted(path.name for path in Path(root.path, "topics").iterdir())


class TestDeletionThatFails:
    """A deleted topic leaves nothing behind, even if deleting its files fails."""

    @pytest.fixture
    def half_deleted(self, root, monkeypatch, caplog):
        """A topic that is deleted, but whose files could not be unlinked."""
        fill(make_log(root), 3)
        fill(make_log(root, topic="u"), 1)
        files = root.context.files
        with monkeypatch.context() as patched:
            fail_unlinks(patched, files)
            root.delete_topic("t")
        assert "some of its files are left" in caplog.text
        assert list(root.topics()) == ["u"]
        assert topic_directories(root) == ["t-1", "u-2"]
        return root

    def test_what_is_left_is_no_damage(self, half_deleted):
        """Its directory will be removed."""
        assert verify_root(half_deleted) == []

    def test_the_next_open_removes_it(self, half_deleted):
        """Also after a clean close, after which an open checks nothing else."""
        half_deleted.close()
        with closing(open_root(half_deleted.path)) as again:
            assert topic_directories(again) == ["u-2"]

    def test_a_round_of_retention_removes_it(self, half_deleted):
        """The log need not be opened again."""
        retain(half_deleted, half_deleted.clock())
        assert topic_directories(half_deleted) == ["u-2"]

    def test_repair_removes_it_and_says_so(self, half_deleted):
        """A dry run reports it, and removes nothing."""
        expected = ["topics/t-1: removed, the topic was deleted"]
        assert repair_root(half_deleted, dry_run=True) == expected
        assert topic_directories(half_deleted) == ["t-1", "u-2"]
        assert repair_root(half_deleted, dry_run=False) == expected
        assert topic_directories(half_deleted) == ["u-2"]
        assert repair_root(half_deleted, dry_run=False) == []


def truncate_to_0(log: PartitionLog) -> None:
    log.truncate_to(0)


def first_headers(log: PartitionLog) -> None:
    """Replace an empty active segment by one with the column of headers."""
    log.roll()
    log.append([encoded(b"x", headers=[[("a", b"1")]], at=0)])


@pytest.mark.parametrize("work", [truncate, truncate_to_0, first_headers])
@pytest.mark.parametrize("second_handle", [False, True], ids=["alone", "beside another"])
def test_a_file_that_cannot_be_unlinked_is_removed_by_the_last_close(
    root, monkeypatch, work, second_handle
):
    """It becomes a pending delete, so that no stray is left after a clean close."""
    fill(make_log(root, {"segment.bytes": 1500}), 12)
    with closing(open_root(root.path)) as handle:
        log = (handle if second_handle else root).partition("t", 0)
        log.tail()
        files = log.context.files
        with monkeypatch.context() as patched:
            fail_unlinks(patched, files)
            with pytest.raises(StorageError):
                work(log)
        log.append([encoded(b"after", at=0)])
        assert verify_root(root) == []
        files_of_manifest = set(map(log.path_of, log.segments.values()))
    root.close()

    remaining = {str(path.relative_to(root.path)) for path in segment_files(root.path)}
    assert remaining == files_of_manifest
    with closing(open_root(root.path)) as reopened:
        assert reopened.startup_report == []
        assert verify_root(reopened) == []
