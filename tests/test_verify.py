"""`verify` beside others that change the log: what moves is no damage, damage is still found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.roots import encoded, fill, make_log, open_root, segment_files

from embedlog.errors import StorageError
from embedlog.partition import PartitionLog
from embedlog.partition.log_start import trim
from embedlog.root.root import Root
from embedlog.root.verify import verify_root

EVERY_BATCH = {"index.interval.bytes": 0, "segment.bytes": 3000, "file.delete.delay.ms": 0}


@pytest.fixture
def other(root: Root) -> Iterator[Root]:
    """A second handle, as another process has one."""
    with closing(open_root(root.path)) as other:
        yield other


def append(log: PartitionLog) -> None:
    fill(log, 3)


def append_and_roll(log: PartitionLog) -> None:
    for _ in range(2):
        fill(log, 1)
        log.roll()


def cut(log: PartitionLog) -> None:
    log.truncate_to(5)


def cut_and_append(log: PartitionLog) -> None:
    log.truncate_to(5)
    log.append([encoded(b"another, and longer", at=0)])


def delete_records(log: PartitionLog) -> None:
    trim(log, log.end_offset() - 1)


CHANGES = (append, append_and_roll, cut, cut_and_append, delete_records)


def before_refresh(log: PartitionLog, change: Callable[[], None]) -> None:
    """Let a change happen once, between the look at the tail and that at the manifest."""
    refresh = log.refresh

    def changed() -> None:
        log.refresh = refresh  # type: ignore[method-assign]
        change()
        refresh()

    log.refresh = changed  # type: ignore[method-assign]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_looks_is_no_damage(root, other, change):
    """An append, a roll, a cut or a deletion by another process while `verify` runs."""
    log = make_log(root, EVERY_BATCH)
    fill(log, 12)
    log.roll()
    fill(log, 3, first=12)

    before_refresh(log, lambda: change(other.partition("t", 0)))
    assert verify_root(root) == []


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_while_files_are_read_is_no_damage(root, other, change):
    """The same changes after the first batch was read."""
    log = make_log(root, EVERY_BATCH)
    fill(log, 12)
    log.roll()
    fill(log, 3, first=12)
    left = [change]

    def progress(done: int, total: int) -> None:
        if left:
            left.pop()(other.partition("t", 0))

    assert verify_root(root, progress) == []
    assert not left


@pytest.mark.parametrize("again", [False, True], ids=["gone", "created again"])
def test_a_topic_that_is_deleted_meanwhile_is_no_damage(root, other, again):
    """Neither are its partitions, nor a new topic of its name."""
    fill(make_log(other, EVERY_BATCH), 3)
    log = root.partition("t", 0)

    def delete() -> None:
        other.delete_topic("t")
        if again:
            fill(make_log(other), 2)

    before_refresh(log, delete)
    assert verify_root(root) == []


def test_damage_is_found_beside_a_writer(root, other):
    """It is there in every look, whatever else moves."""
    fill(make_log(other, EVERY_BATCH), 12)
    log = root.partition("t", 0)
    path = segment_files(root.path)[0]
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)

    before_refresh(log, lambda: fill(other.partition("t", 0), 2, first=12))
    found = verify_root(root)

    assert len(found) == 1
    assert found[0].topic == "t"
    other.delete_topic("t")  # the fixture wants a healthy log


def test_damage_is_found_while_another_process_holds_the_partition(root, other):
    """A look beside its owner is second best, and not nothing; a reading handle has no other."""
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
    root.delete_topic("t")  # the fixture wants a healthy log


def topic_directories(root: Root) -> list[str]:
    return sorted(path.name for path in Path(root.path, "topics").iterdir())


class TestDeletionThatFails:
    """A deleted topic leaves nothing behind, whatever fails on the way."""

    @pytest.fixture
    def half_deleted(self, root, monkeypatch, caplog):
        """A topic whose name is gone and whose files could not be unlinked."""
        fill(make_log(root), 3)
        fill(make_log(root, topic="u"), 1)
        files = root.context.files
        with monkeypatch.context() as patched:

            def refuse(path: str, **_: object) -> None:
                raise files._failed(OSError(5, "Input/output error"), "unlink", path)

            patched.setattr(files, "unlink", refuse)
            root.delete_topic("t")
        assert "some of its files are left" in caplog.text
        assert list(root.topics()) == ["u"]
        assert topic_directories(root) == ["t-1", "u-2"]
        return root

    def test_what_is_left_is_no_damage(self, half_deleted):
        """It is known, and will go."""
        assert verify_root(half_deleted) == []

    def test_the_next_open_removes_it(self, half_deleted):
        """Also after a clean close, which otherwise looks at nothing."""
        half_deleted.close()
        with closing(open_root(half_deleted.path)) as again:
            assert topic_directories(again) == ["u-2"]

    def test_a_round_of_retention_removes_it(self, half_deleted):
        """No process needs to open the log again."""
        from embedlog.retention import retain

        retain(half_deleted, half_deleted.clock())
        assert topic_directories(half_deleted) == ["u-2"]

    def test_repair_removes_it_and_says_so(self, half_deleted):
        """A dry run only says so."""
        from embedlog.root.repair import repair_root

        expected = ["topics/t-1: removed, the topic was deleted"]
        assert repair_root(half_deleted, dry_run=True) == expected
        assert topic_directories(half_deleted) == ["t-1", "u-2"]
        assert repair_root(half_deleted, dry_run=False) == expected
        assert topic_directories(half_deleted) == ["u-2"]
        assert repair_root(half_deleted, dry_run=False) == []


def start_over(log: PartitionLog) -> None:
    log.truncate_to(0)


def first_headers(log: PartitionLog) -> None:
    """An empty active segment is replaced by one with the headers column."""
    log.roll()
    log.append([encoded(b"x", headers=[[("a", b"1")]], at=0)])


@pytest.mark.parametrize("work", [cut, start_over, first_headers])
@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside another"])
def test_a_file_that_cannot_be_unlinked_goes_with_the_last_close(root, monkeypatch, work, company):
    """It is noted as one on its way out, so that after a clean close nothing is left to find."""
    fill(make_log(root, {"segment.bytes": 1500}), 12)
    with closing(open_root(root.path)) as handle:
        log = (handle if company else root).partition("t", 0)
        log.tail()
        files = log.context.files

        def refuse(path: str, **_: object) -> None:
            raise files._failed(OSError(5, "Input/output error"), "unlink", path)

        with monkeypatch.context() as patched:
            patched.setattr(files, "unlink", refuse)
            with pytest.raises(StorageError):
                work(log)
        log.append([encoded(b"after", at=0)])
        assert verify_root(root) == []
        files_of_manifest = set(map(log.path_of, log.segments.values()))
    root.close()

    there = {str(path.relative_to(root.path)) for path in segment_files(root.path)}
    assert there == files_of_manifest
    with closing(open_root(root.path)) as again:
        assert again.startup_report == []
        assert verify_root(again) == []
