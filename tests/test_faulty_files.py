"""The fault injector injects every fault; a test with an incomplete injector proves nothing."""

from __future__ import annotations

import errno
from functools import partial

import lmdb
import pytest
from support import forks
from support.children import assert_killed
from support.faulty_files import FaultyFiles, materialise, scratch_directory

from embedlog.errors import DurabilityError, StorageError


@pytest.fixture
def files(tmp_path):
    files = FaultyFiles(tmp_path, record=True)
    yield files
    files.close_all()


def power_cut_images(files, **options):
    """Return the images that a power cut at any time may leave."""
    return list(files.power_cut_states(**{"limit": 5000, **options}))


def last_images(files, **options):
    """Return the images of a power cut at the very end; the note tells them from earlier cuts."""
    files.note("last")
    images = power_cut_images(files, **options)
    end = max(image.cut for image in images)
    return [image for image in images if image.cut == end]


def contents(images, path):
    return {image.files.get(path) for image in images}


def new_file(files, path="file", data=b""):
    """Create a file whose name and first bytes are durable."""
    fd = files.open(path, write=True, create=True)
    if data:
        files.write(fd, [data], 0)
    files.sync(fd)
    files.sync_directory(path.rpartition("/")[0])
    return fd


# Faults


@pytest.mark.parametrize("kind", ["write", "sync", "rename", "sync_directory", "create"])
def test_an_operation_fails_once_or_forever(tmp_path, kind):
    """The error has the errno and the path of the operation, and `heal` ends it (P8)."""
    files = FaultyFiles(tmp_path)
    for forever in (False, True):
        files.fail_at(0, errno.EIO, forever=forever, only={kind})
        with pytest.raises(StorageError) as caught:
            files.write_file("file", b"abc")
        assert caught.value.errno == errno.EIO
        assert isinstance(caught.value, DurabilityError) == kind.startswith("sync")
        if forever:
            with pytest.raises(StorageError):
                files.write_file("file", b"abc")
        files.heal()
        files.write_file("file", b"abc")
    assert files.list("") == ["file"]


@pytest.mark.parametrize(("when", "size"), [("before", 0), ("middle", 3), ("after", 6)])
def test_a_kill_leaves_none_half_or_all_of_a_write(tmp_path, when, size):
    """SIGKILL of this process at an exact operation (P1, P2)."""

    def work():
        files = FaultyFiles(tmp_path)
        fd = files.open("file", write=True, create=True)
        files.kill_at(0, when, only={"write"})
        files.write(fd, [b"abc", b"def"], 0)

    assert_killed(work)
    assert (tmp_path / "file").stat().st_size == size


def test_a_kill_is_possible_at_every_operation(tmp_path):
    """The count of a complete run is the number of possible kills."""
    files = FaultyFiles(tmp_path)
    files.write_file("file", b"old")

    def work(number):
        faulty = FaultyFiles(tmp_path)
        faulty.kill_at(number)
        faulty.write_file("file", b"new")

    for number in range(files.count()):
        files.write_file("file", b"old")
        files.unlink("file.0.tmp", missing_ok=True)
        assert_killed(partial(work, number))
        assert (tmp_path / "file").read_bytes() == (b"old" if number < 4 else b"new")


def test_a_stop_waits_to_be_continued(tmp_path):
    """SIGSTOP at an exact operation (P16)."""

    def work():
        files = FaultyFiles(tmp_path)
        files.stop_at(0, only={"sync"})
        files.write_file("file", b"new")

    child = forks.Child(work)
    assert child.stopped()
    assert not (tmp_path / "file").exists()
    child.go_on()
    child.end().result()
    assert (tmp_path / "file").read_bytes() == b"new"


# Power cuts


def test_what_was_synced_is_in_every_image(files):
    """Bytes after `sync` and names after `sync_directory` are never lost (P4)."""
    fd = new_file(files, data=b"synced")
    files.note("acked")
    files.write(fd, [b"x" * 3000], 6)
    files.make_directory("other")

    after = [image for image in power_cut_images(files) if image.notes]

    assert len(after) > 50
    assert all(image.files["file"].startswith(b"synced") for image in after)


def test_what_was_not_synced_may_be_lost_torn_or_complete(files):
    """Appended sectors are written all, none, in part, or as zeros with the new size."""
    fd = new_file(files)
    data = b"a" * 512 + b"b" * 512 + b"c" * 100
    files.write(fd, [data], 0)

    tails = contents(last_images(files), "file")

    a, b, c = data[:512], data[512:1024], data[1024:]
    zero = bytes(512)
    assert {b"", data, a, a + b, zero + b, zero + zero + c, a + zero + c, bytes(1124)} <= tails


def test_a_later_write_may_arrive_before_an_earlier_one(files):
    """A hole of zeros within a file, and another order of writes between files."""
    first, second = new_file(files, "first"), new_file(files, "second")
    files.write(first, [b"a" * 10], 0)
    files.write(second, [b"b" * 10], 0)
    files.write(first, [b"c" * 10], 10)

    images = last_images(files)

    assert bytes(10) + b"c" * 10 in contents(images, "first")
    assert any(not image.files["first"] and image.files["second"] == b"b" * 10 for image in images)


def test_a_sync_covers_only_earlier_writes_of_its_file(files):
    """A sync of another file, or a write after the sync, is not covered."""
    first, second = new_file(files, "first"), new_file(files, "second")
    files.write(first, [b"a"], 0)
    files.sync(first)
    files.write(first, [b"b"], 1)
    files.sync(second)

    assert contents(last_images(files), "first") >= {b"a", b"ab"}
    assert b"" not in contents(last_images(files), "first")


def test_a_name_needs_a_sync_of_its_directory(files):
    """A synced file may be missing if its directory was not synced (strict, unlike ext4)."""
    fd = files.open("file", write=True, create=True)
    files.write(fd, [b"abc"], 0)
    files.sync(fd)
    files.note("file")
    assert contents(last_images(files), "file") == {None, b"abc"}

    files.sync_directory("")
    files.note("name")
    assert contents(last_images(files), "file") == {b"abc"}


def test_a_rename_is_done_or_undone_but_never_partial(files):
    """The file has one of its names; if undone, the replaced file has its old name."""
    new_file(files, "new", b"new")
    new_file(files, "old", b"old")
    files.rename("new", "old")

    pairs = {(image.files.get("new"), image.files.get("old")) for image in last_images(files)}
    assert pairs == {(b"new", b"old"), (None, b"new")}

    files.sync_directory("")
    assert contents(last_images(files), "old") == {b"new"}


def test_a_rename_of_a_directory_takes_its_files_along(files):
    files.make_directory("aside")
    new_file(files, "aside/file", b"abc")
    files.sync_directory("")
    files.rename("aside", "target")

    pairs = {
        (image.files.get("aside/file"), image.files.get("target/file"))
        for image in last_images(files)
    }
    assert pairs == {(b"abc", None), (None, b"abc")}


def test_a_rename_between_directories_needs_a_sync_of_the_new_one(files):
    files.make_directory("a")
    files.make_directory("b")
    files.sync_directory("")
    new_file(files, "a/file", b"abc")
    files.rename("a/file", "b/file")
    assert len(last_images(files)) == 2

    files.sync_directory("b")
    assert contents(last_images(files), "b/file") == {b"abc"}
    assert contents(last_images(files), "a/file") == {None}


def test_an_atomic_write_is_old_or_new_in_every_image(files):
    """`write_file` is atomic at every cut, and durable when it returns."""
    files.write_file("file", b"old" * 500)
    files.note("old")
    files.write_file("file", b"new" * 500)
    files.note("new")

    for image in power_cut_images(files):
        if "new" in image.notes:
            allowed = [b"new" * 500]
        elif "old" in image.notes:
            allowed = [b"old" * 500, b"new" * 500]
        else:
            allowed = [None, b"old" * 500]
        assert image.files.get("file") in allowed, image.explain()


@pytest.mark.parametrize("omitted", ["sync", "sync_directory"])
def test_an_atomic_write_without_one_of_its_steps_is_caught(files, omitted):
    """A file may be partial without its sync, or old without the sync of its directory."""
    files.write_file("file", b"old" * 500)
    setattr(files, omitted, lambda path: None)
    files.write_file("file", b"new" * 500)
    files.note("new")

    assert any(
        image.files.get("file") != b"new" * 500 for image in power_cut_images(files) if image.notes
    )


def test_a_failed_sync_cannot_be_repaired(files):
    """A later sync that succeeds does not restore the lost bytes (P9)."""
    fd = new_file(files, data=b"abc")
    files.write(fd, [b"def"], 3)
    files.fail_at(0, errno.EIO, only={"sync"})
    with pytest.raises(DurabilityError):
        files.sync(fd)
    files.sync(fd)
    assert contents(last_images(files), "file") >= {b"abc", b"abcdef"}
    assert files.read(fd, 9, 0) == b"abcdef"

    files.drop_cache(fd)
    assert files.read(fd, 9, 0) == b"abc" + bytes(3)


@pytest.mark.tier("test")
def test_files_that_are_bound_to_a_boot_survive_in_no_image(files):
    """`live` is garbage or missing, lock files are empty or missing."""
    for path in ("locks", "live"):
        files.make_directory(path)
    for path in ("locks/partition", "live/data.mdb", "wake"):
        fd = files.open(path, write=True, create=True)
        files.write(fd, [b"abc"], 0)
        files.sync(fd)
    files.note("end")
    files.make_directory("topics")
    for name in range(20):
        files.make_directory(f"topics/{name}")

    images = power_cut_images(files)

    assert contents(images, "locks/partition") == contents(images, "wake") == {None, b""}
    garbage = contents(images, "live/data.mdb")
    assert None in garbage
    assert len(garbage) > 1
    assert b"abc" not in garbage


# LMDB


def environment(files):
    """Create an environment as the log does: under another name, synced, renamed."""
    files.make_directory("state.tmp")
    lmdb.open(files.path("state.tmp"), map_size=1 << 20).close()
    files.sync_directory("state.tmp")
    files.rename("state.tmp", "state")
    files.sync_directory("")
    return lmdb.open(files.path("state"), map_size=1 << 20)


def put(env, key, value):
    with env.begin(write=True) as transaction:
        transaction.put(key, value)


def stored(directory):
    """The size of the value of each key, in the environment of a materialised image."""
    with lmdb.open(str(directory / "state"), map_size=1 << 20, lock=False) as env:
        with env.begin() as transaction:
            return {bytes(key): len(value) for key, value in transaction.cursor()}


def test_a_commit_is_durable_and_one_in_flight_may_be_lost(files):
    """Every image has an environment that opens, with the commits before the cut or one more."""
    with environment(files) as env:
        files.note(0)
        for number in range(1, 9):
            put(env, b"%d" % number, b"x" * 3000)
            files.note(number)

    in_flight = set()
    with scratch_directory() as directory:
        previous = None
        for image in power_cut_images(files, limit=600):
            if image.notes:
                materialise(image, directory, previous)
                previous = image
                count = len(stored(directory))
                assert count in (image.notes[-1], image.notes[-1] + 1), image.explain()
                if count == image.notes[-1]:
                    in_flight.add(image.key)
    assert len(in_flight) > 50


def test_a_recording_may_start_from_an_image(files, tmp_path):
    """Recovery is recorded too: the content of an image counts as synced (P6)."""
    with environment(files) as env:
        put(env, b"key", b"value")
        files.write_file("file", b"abc")
    image = [image for image in power_cut_images(files) if "state" in image.directories][-1]
    with scratch_directory() as directory:
        materialise(image, directory)
        recovered = FaultyFiles(directory, boot="second", record=True)
        recovered.note("recovered")

        assert {other.key for other in power_cut_images(recovered)} == {image.key}
        recovered.close_all()


# The number, order and cost of the images


def workload(files, appends=60):
    """Append to two partitions, with syncs that are noted, and commit to an environment."""
    with environment(files) as env:
        files.make_directory("topics")
        files.sync_directory("")
        segments, ends = [], [0, 0]
        for partition in range(2):
            segments.append(new_file(files, f"topics/{partition}"))
        for number in range(appends):
            partition = number % 2
            data = bytes([number + 1]) * (300 + 97 * number)
            files.write(segments[partition], [data], ends[partition])
            ends[partition] += len(data)
            if number % 3 == 0:
                files.sync(segments[partition])
                files.note((partition, ends[partition]))
            if number % 10 == 9:
                put(env, b"end", b"%d" % number)
                files.write_file("config", data)


def test_a_materialised_image_is_exactly_the_image(files):
    """Also after a check changed, added and removed files of the image before."""
    workload(files, appends=12)
    with scratch_directory() as directory:
        previous = None
        for number, image in enumerate(power_cut_images(files, limit=300)):
            materialise(image, directory, previous)
            previous = image
            contents_on_disk = {
                str(path.relative_to(directory)): path.read_bytes()
                for path in directory.rglob("*")
                if path.is_file()
            }
            assert contents_on_disk == image.files
            if contents_on_disk and number % 2:
                changed_file = directory / sorted(contents_on_disk)[number % len(contents_on_disk)]
                changed_file.write_bytes(
                    bytes(len(contents_on_disk[str(changed_file.relative_to(directory))]))
                )
                (directory / "extra").mkdir()
                (directory / "extra/file").touch()
