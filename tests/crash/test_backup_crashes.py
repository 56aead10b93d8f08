"""Backups, restores and clones that are killed, or fail, at every operation, and go on."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.faulty_files import FALLIBLE, FaultyFiles
from support.roots import encoded, open_root, rows
from support.tiers import choose, sample

from embedlog.api.housekeeping import now_ms
from embedlog.config import TopicConfig
from embedlog.errors import EmbedlogError, NotALogError
from embedlog.files import Files
from embedlog.root.root import Root
from embedlog.root.verify import rebuild_index, verify_root
from embedlog.snapshots import backup, manifest, restore, snapshot

SIZE = encoded(b"v0").size
Order = Callable[[FaultyFiles], None]


def opened(path: Path) -> Any:
    """Return a context manager that opens and closes a log."""
    return closing(open_root(path, clock=now_ms))


def fill(path: Path, first: int = 0) -> Root:
    """Open a log with nine more records in each of two partitions, two in a segment."""
    root = open_root(path, clock=now_ms)
    if not first:
        root.create_topic("t", 2, TopicConfig.parse({"segment.bytes": 2 * SIZE}))
    for number in range(first, first + 9):
        for part in (0, 1):
            root.partition("t", part).append([encoded(b"%02d" % number)])
    return root


def records(root: Root) -> list[Any]:
    return [rows(root.partition("t", part)) for part in (0, 1)]


class Work:
    """What is done, killed and repeated: its files are those of the new directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def begin(self, template: Path) -> None:
        """Make the directory, with what the work begins with: a copy of a template."""
        shutil.rmtree(self.directory, ignore_errors=True)  # of a planted bug that was found
        if not template.exists():
            made = type(self)(template)
            template.mkdir()
            forks.call(made.prepare)
        shutil.copytree(template, self.directory)

    def finish(self) -> None:
        """Build the indexes of the new log."""
        with opened(self.directory / "new") as root:
            rebuild_index(root)

    def files(self, order: Order) -> FaultyFiles:
        Files.create_root(self.directory / "new")
        files = FaultyFiles(self.directory / "new")
        order(files)
        self.used = files
        return files

    def prepare(self) -> None:
        """Make what the work begins with."""
        raise NotImplementedError

    def run(self, order: Order) -> None:
        """Do the work."""
        raise NotImplementedError

    def is_done(self) -> bool:
        """Whether it was killed after its last step, so that there is a log."""
        new = self.directory / "new"
        return (new / "embedlog.toml").exists() and not (new / restore.MARK).exists()

    def check_between(self) -> None:
        """Check what there is if it did not end."""

    def check(self) -> None:
        """Check the result."""
        with opened(self.directory / "log") as root:
            expected = records(root)
        with opened(self.directory / "new") as root:
            assert records(root) == expected
            assert verify_root(root) == []
            names = root.context.files.list("")
            assert not [name for name in names if name.startswith(restore.MARK)]


class Backup(Work):
    """The second backup of a log; the first one stays what it is."""

    def prepare(self) -> None:
        root = fill(self.directory / "log")
        backup.back_up(root, self.files(lambda files: None))
        root.close()
        fill(self.directory / "log", 9).close()

    def run(self, order: Order) -> None:
        with opened(self.directory / "log") as root:
            backup.back_up(root, self.files(order))

    def restored(self, name: str) -> Iterator[tuple[manifest.Json, Root]]:
        """Restore each backup of the target, and yield it."""
        source = Files(self.directory / "new")
        for each in backup.backups(source):
            path = self.directory / f"{name}-{each}"
            document = manifest.read(source, manifest.path_of(each))

            def target(path: Path = path) -> Files:
                Files.create_root(path)
                return Files(path)

            restore.restore(source, document, target, lambda: None)
            root = open_root(path)
            yield document, root
            root.close()
            shutil.rmtree(path)
        source.close_all()

    def check_between(self) -> None:
        counts = [len(records(root)[0]) for _, root in self.restored("between")]
        assert counts in ([9], [9, 18])

    def check(self) -> None:
        found = [(records(root), verify_root(root)) for _, root in self.restored("after")]
        with opened(self.directory / "log") as root:
            assert found[-1] == (records(root), [])
            assert not snapshot.snapshots(root.context)
        assert len(found[0][0][0]) == 9


class Restore(Work):
    """A restore."""

    def prepare(self) -> None:
        root = fill(self.directory / "log")
        Files.create_root(self.directory / "target")
        backup.back_up(root, Files(self.directory / "target"))
        root.close()

    def run(self, order: Order) -> None:
        source = Files(self.directory / "target")
        document = restore.find(source, None)
        restore.restore(source, document, lambda: self.files(order), self.finish)

    def check_between(self) -> None:
        if not (self.directory / "new/embedlog.toml").exists() and any(
            (self.directory / "new").glob("[!.]*")
        ):
            with pytest.raises(NotALogError):
                open_root(self.directory / "new")


class Clone(Restore):
    """A clone."""

    def prepare(self) -> None:
        fill(self.directory / "log").close()

    def run(self, order: Order) -> None:
        with opened(self.directory / "log") as root:
            restore.clone(root, lambda: self.files(order), self.finish)


def counted(kind: type[Work], directory: Path, only: Any = None) -> int:
    """Return how many operations the work makes in the new directory."""

    def run() -> int:
        work = kind(directory / "count")
        shutil.rmtree(work.directory, ignore_errors=True)
        work.directory.mkdir()
        work.prepare()
        work.run(lambda files: None)
        work.check()
        shutil.rmtree(work.directory)
        counts = work.used.counts
        return sum(counts.values()) if only is None else sum(counts[each] for each in only)

    return int(forks.call(run))


def check_kill(case: tuple[int, str], *, kind: type[Work], directory: Path) -> bool:
    """Kill at an operation, look, and repeat."""
    work = kind(directory / f"{case[0]}-{case[1]}")
    work.begin(directory / f"before {kind.__name__}")
    killed = forks.was_killed(lambda: work.run(lambda files: files.kill_at(*case)))
    forks.call(work.check_between)
    if killed and not work.is_done():
        forks.call(lambda: work.run(lambda files: None))
    forks.call(work.check)
    shutil.rmtree(work.directory)
    return killed


def kill_everywhere(kind: type[Work], directory: Path, most: int) -> int:
    total = counted(kind, directory)
    cases = [(n, when) for n in range(total) for when in ("before", "middle")]
    killed = [check_kill(case, kind=kind, directory=directory) for case in sample(cases, most)]
    return sum(killed)


@pytest.mark.parametrize("kind", choose(test=[Backup, Clone], all=[Backup, Restore, Clone]))
def test_what_is_killed_goes_on_when_it_is_repeated(directory, kind):
    """P1: at each operation; until then there are only complete backups, and no log."""
    assert kill_everywhere(kind, directory, 3) >= choose(test=1, all=60)


@pytest.mark.tier("all")
@pytest.mark.parametrize("kind", [Backup, Restore, Clone])
def test_what_fails_goes_on_when_it_is_repeated(directory, kind):
    """P8: any operation fails with its errno, and nothing is taken for complete."""
    total = counted(kind, directory, FALLIBLE)
    failed = 0
    for n in sample(range(total), 8):
        work = kind(directory / str(n))
        work.begin(directory / f"before {kind.__name__}")

        def run(work: Work = work, n: int = n) -> bool:
            failure = None
            try:
                work.run(lambda files: files.fail_at(n, errno.ENOSPC, True, FALLIBLE))
            except EmbedlogError as error:
                failure = error
            if failure is not None:
                assert failure.errno == errno.ENOSPC  # type: ignore[attr-defined]
                work.check_between()
                work.run(lambda files: None)
            work.check()
            return failure is not None

        failed += forks.call(run)
        shutil.rmtree(work.directory)
    assert failed >= choose(test=4, all=40)


def manifest_first(monkeypatch: Any) -> None:
    """The manifest of a backup is written before its segments."""
    copy = backup._copy

    def planted(root: Root, target: Files, document: Any, *args: Any) -> Any:
        files = {
            segment["path"]: [backup.bytes_of(segment), 0]
            for part in backup.partitions(document)
            for segment in part["segments"]
        }
        for path in files:
            with root.context.files.opened(path) as fd:
                checksum = backup.checksum_of(root.context.files, fd, files[path][0])
                files[path][1] = checksum
        manifest.write(target, document["name"], {**document, "files": files})
        return copy(root, target, document, *args)

    monkeypatch.setattr(backup, "_copy", planted)


def format_first(monkeypatch: Any) -> None:
    """The directory is a log before its files are there."""
    begin = restore._begin

    def planted(files: Files, document: Any) -> None:
        begin(files, document)
        restore.write_format(files)

    monkeypatch.setattr(restore, "_begin", planted)


def half_files(monkeypatch: Any) -> None:
    """Segment files get their names before they are complete."""

    def write_file(files: Files, path: str, data: Any) -> None:
        files.unlink(path, missing_ok=True)
        position = 0
        with files.opened(path, write=True, create=True) as fd:
            for part in [data] if isinstance(data, bytes) else data:
                for start in range(0, len(part), max(len(part) // 2, 1)):
                    piece = part[start : start + max(len(part) // 2, 1)]
                    position += files.write(fd, [piece], position)

    monkeypatch.setattr(FaultyFiles, "write_file", write_file)
    # As if what is there were always whole.
    monkeypatch.setattr(backup, "checksum_of", lambda files, fd, size: 0)


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (format_first, Restore),
        (manifest_first, Backup),
        (half_files, Backup),
    ],
)
def test_a_planted_bug_is_found(directory, monkeypatch, plant, kind):
    """What the checks above are worth."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, EmbedlogError)):
        kill_everywhere(kind, directory, 1000)
