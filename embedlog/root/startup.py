"""What the first process to attach does to a root: it handles boots, damage and leftovers.

Runs while no other process is attached, so it may replace a database.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import dropwhile
from operator import itemgetter
from typing import TypeVar

from embedlog import catalog, keyspace, kv
from embedlog.checksum import crc32c
from embedlog.display import plural
from embedlog.errors import CorruptionError, EmbedlogError, StorageError, raised_in_body
from embedlog.files import Files, forget_waiters
from embedlog.groups import LOCKS
from embedlog.partition import journal, leases, roll, unnamed_files
from embedlog.segment import CHUNK_BYTES, END_MARK, SegmentFile, key_index_path

T = TypeVar("T")
BOOT_FILE = "live/boot"
LOST_PRODUCERS = 1 << 32
"""More ids of producers than can have been assigned since a copy of `state` was made."""
LOST_SCHEMAS = 1 << 20
"""Likewise of registered schemas, whose ids have 31 bits."""
CLEAN_FILE = "closed"
COPY = "state.copy"
CHECKED_AT_CLOSE = 1 << 20
"""A clean close checks databases up to this many bytes, which takes 40 ms at most."""


class Attachment:
    """The locks of a process that has a directory open; its files have the descriptors.

    The first process to attach checks the databases, and the last one marks its close as clean.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._fd: int | None = None
        """Of the lock that each process holds as long as it has the directory open."""

    @contextmanager
    def alone(self, timeout: float) -> Iterator[None]:
        """Keep others from attaching, from marking a close, and from making it a directory."""
        with self._files.opened("locks/root", write=True, create=True) as lock:
            self._files.lock(lock, timeout)
            yield

    def attach(self, timeout: float, check: Callable[[Files], T]) -> T | None:
        """Attach, while `alone`; the first process runs ``check``, and gets what that returns."""
        files, found = self._files, None
        self._fd = files.open("locks/attached", write=True, create=True)
        if files.try_lock(self._fd):
            kv.close_unused()
            found = check(files)
        self.share(timeout)
        return found

    def share(self, timeout: float) -> None:
        """Attach to a directory that was checked, or to read only: no check may run meanwhile."""
        files, write = self._files, self._files.writable
        if self._fd is None:
            if not (write or files.exists("locks/attached")):
                return
            self._fd = files.open("locks/attached", write=write, create=write)
        files.lock(self._fd, timeout, shared=True)

    def is_last(self) -> bool:
        """Give the lock up, and return whether no other process holds it; while `alone`."""
        if self._fd is None:
            return False
        self._files.unlock(self._fd)
        return self._files.try_lock(self._fd)

    def close(self) -> None:
        """Detach; the last process while it is still `alone`, so that the next one is the first."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(EmbedlogError):
                self._files.close(fd)


def prepare(files: Files) -> list[str]:
    """Check `state` and `live`, and repair or replace them; return what was done, in words.

    Then remove what killed processes left.

    Raises:
        CorruptionError: `state` is damaged and there is no copy of it.
    """
    done, is_unclean = check_databases(files)
    return done + _sweep(files) if is_unclean else done


def check_databases(files: Files) -> tuple[list[str], bool]:
    """As `prepare`, but say only whether killed processes may have left files."""
    clean = remove_clean_mark(files)
    for name in ("state", "live"):
        # No process is attached: its slots and mutexes belong to dead processes.
        files.unlink(f"{name}/lock.mdb", missing_ok=True)
    for name in files.list("locks"):
        if f"locks/{name}".startswith(LOCKS):  # the members are dead, too
            files.unlink(f"locks/{name}")
    forget_waiters(files)
    new = not has_state(files)
    rebooted = not live_is_valid(files)
    done = _check_state(files, clean)
    if done or rebooted or not _live_is_whole(files, clean):
        rows = kv.read_unused(files, "state", leases.rows_of_snapshots)
        _begin_live_again(files, rows)
        if not new:
            done.append("live was of another boot, or damaged: it was created again")
    # A power cut can undo the last unlinks, and the unlink of the clean mark.
    return done, not new and bool(clean is None or rebooted or done)


def _begin_live_again(files: Files, rows: dict[bytes, bytes]) -> None:
    kv.discard(files, "live")
    kv.create(files, "live", durable=False, rows=rows)
    # Last: a `live` without it counts as one of another boot.
    files.write_file(BOOT_FILE, _boot(files))


def begin_databases_again(files: Files) -> None:
    """Replace both databases by empty ones, in a directory of which others have all rows.

    Killed in between, `state` is damaged or missing, and the next attempt begins again.
    """
    _begin_live_again(files, {})
    kv.discard(files, "state")
    kv.create(files, "state", durable=True, rows={})


def has_state(files: Files) -> bool:
    """Return whether the root has metadata, so that it is no new one."""
    return files.exists("state") or files.exists(COPY)


def remove_clean_mark(files: Files) -> dict[str, int] | None:
    """Remove the mark of the last clean close, and return what it says."""
    if not files.exists(CLEAN_FILE):
        return None
    try:
        mark: dict[str, int] = json.loads(files.read_file(CLEAN_FILE))
    except ValueError:
        mark = {}
    files.unlink(CLEAN_FILE)
    # Otherwise a power cut could bring it back, and an older `state` would count as checked.
    files.sync_directory("")
    return mark


def copy_state(files: Files, state: kv.LmdbStore) -> None:
    """Copy `state`, unless it has not changed since the last copy.

    Raises:
        CorruptionError: It was damaged while it was open.  The last copy stays.
    """
    problems = _problems_at_close(files, "state")
    if problems:
        raise CorruptionError(
            f"State was damaged while it was open ({problems[0]})",
            path=files.path("state"),
            todo="The next process to open the log restores it from its last copy.",
        )
    version = str(state.version()).encode()
    if files.exists(f"{COPY}/of") and files.read_file(f"{COPY}/of") == version:
        return
    new = f"{COPY}.new"
    kv.discard(files, new)
    files.make_directory(new)
    try:
        state.copy(new)
        files.write_file(f"{new}/of", version)
    except StorageError:
        with suppress(StorageError):
            kv.discard(files, new)  # on a full disk other files need the space
        raise
    kv.discard(files, COPY)
    files.rename(new, COPY)
    files.sync_directory("")


def mark_clean(files: Files) -> None:
    """Write the mark of a clean close, with the checksums of the databases.

    Every process must have closed them.  A damaged `live` is omitted, so the next process to
    open the log creates it again.
    """
    names = ["state", *([] if _problems_at_close(files, "live") else ["live"])]
    mark = {name: _digest(files, f"{name}/data.mdb") for name in names}
    files.write_file(CLEAN_FILE, json.dumps(mark).encode())


def _problems_at_close(files: Files, name: str) -> list[str]:
    """Return the problems of a database that no other process uses.

    An unusually large database is not checked, since a close must not take long.
    """
    data = files.open(f"{name}/data.mdb")
    try:
        small = files.size(data) <= CHECKED_AT_CLOSE
    finally:
        files.close(data)
    return kv.findings(files.path(name)) if small else []


def _digest(files: Files, path: str) -> int:
    digest = position = 0
    data = files.open(path)
    try:
        while chunk := files.read(data, CHUNK_BYTES, position):
            digest, position = crc32c(chunk, digest), position + len(chunk)
    finally:
        files.close(data)
    return digest


def _check_state(files: Files, clean: dict[str, int] | None) -> list[str]:
    kv.discard(files, "state.new")
    if not files.exists("state/data.mdb"):
        if _names(files, "topics"):
            return _restore_state(files, "it is missing")
        kv.create(files, "state", durable=True, rows={})
        return []
    problems = []
    kv.check_size(files, "state")
    if clean is not None and "state" in clean:
        if clean["state"] == _digest(files, "state/data.mdb"):
            return []
        if _copy_is_good(files):
            problems = ["it is not as the last close left it"]
    problems = problems or _damage(files, "state")
    return _restore_state(files, problems[0]) if problems else _adopt_newer(files)


def _copy_is_good(files: Files) -> bool:
    return files.exists(f"{COPY}/data.mdb") and not _damage(files, COPY)


def _damage(files: Files, name: str) -> list[str]:
    """Return the problems of `state`, or of a copy of it.

    Rows are checked too: if the key of a segment's row is damaged, its file would be removed
    as garbage.
    """
    kv.check_size(files, name)
    return kv.findings(files.path(name)) or [
        f"the row {key!r} is not as it was written"
        for key in keyspace.damaged_rows(files, name)
        if not _affects_one_user(key)
    ]


def _affects_one_user(key: bytes) -> bool:
    """Whether damage to a row affects only reads of this row, which raise.

    Restoring an older copy would be worse.  If the letter of the key has a wrong bit, the row
    may be that of a partition: its key has a number after the letter, which begins with zeros.
    """
    table = keyspace.table_of(key, keyspace.STATE)
    is_named = table is keyspace.SEGMENT_INDEXES or key[1:2] != b"\0"
    return table is not None and table.optional and is_named


def _adopt_newer(files: Files) -> list[str]:
    """Adopt segments whose numbers `state` never assigned: then it is older than the log."""
    numbers = [
        number
        for topic in _names(files, "topics")
        for partition in files.list(f"topics/{topic}")
        for _, number, _ in _segment_files(files, f"topics/{topic}/{partition}")
    ]
    with closing(kv.LmdbStore(files, "state", durable=True, timeout=10)) as store:
        if max(numbers, default=0) <= store.read(lambda txn: catalog.last_number(txn, "segment")):
            return []
        return ["state is older than the log", *_adopt(files, store)]


def _restore_state(files: Files, reason: str) -> list[str]:
    """Replace a damaged `state` by its last copy; rename the damaged one to `state.damaged`.

    Segments that the copy does not name are adopted, never removed: metadata
    that looks wrong deletes no data.
    """
    path = files.path("state")
    if not _copy_is_good(files):
        raise CorruptionError(
            f"State is damaged ({reason}), and there is no good copy of it",
            path=path,
            todo="Restore the directory `state` from a backup.",
        )
    data = files.read_file(f"{COPY}/data.mdb")
    if files.exists("state"):
        kv.discard(files, "state.damaged")
        files.rename("state", "state.damaged")
    # Its version numbers start again, so the next close must make a new copy.
    files.unlink(f"{COPY}/of", missing_ok=True)
    files.make_directory("state.new")
    files.write_file("state.new/data.mdb", data)
    # Before the rename: if this process were killed in between, the next one would remove
    # what the copy does not name as garbage.
    with closing(kv.LmdbStore(files, "state.new", durable=True, timeout=10)) as store:
        adopted = _adopt(files, store)
    files.unlink("state.new/lock.mdb")
    files.rename("state.new", "state")
    files.sync_directory("")
    return [f"state was damaged ({reason}) and restored from its last copy", *adopted]


def _adopt(files: Files, store: kv.Store) -> list[str]:
    """Add the topics and segments created after the copy to it; recovery scans them."""

    def step(txn: kv.Txn) -> list[str]:
        # If the copy had assigned a file's number and does not name it, the file is garbage.
        newest = catalog.last_number(txn, "segment")
        done = _adopt_topics(files, txn)
        for info in list(catalog.topics(txn)):
            for number in range(info.partitions):
                done += _adopt_compacted(files, txn, info, number, newest)
                done += _adopt_segments(files, txn, info, number, newest)
        # Much was written, and flushed, after a rollback point that the copy has.
        keyspace.ROLLBACK_POINTS.delete_all(txn)
        # Producers that got their ids after the copy was made wrote records with them: those of
        # a new producer with the same id would be taken for repetitions, and dropped.
        last = catalog.last_number(txn, "producer")
        catalog.raise_number(txn, "producer", last + LOST_PRODUCERS)
        # Likewise for schemas: records with the id of a lost one must not be read by another.
        last = catalog.last_number(txn, "schema")
        catalog.raise_number(txn, "schema", last + LOST_SCHEMAS)
        return done

    return store.write(step)


def _adopt_topics(files: Files, txn: kv.Txn) -> list[str]:
    """Add the topics that the copy does not have; their settings are lost."""
    done = []
    newest = catalog.last_number(txn, "topic")
    for directory in _names(files, "topics"):
        name, _, number = directory.rpartition("-")
        # If the copy had assigned the id and does not have the topic, the topic was deleted.
        if not catalog.NAME.fullmatch(name) or not number.isdecimal() or int(number) <= newest:
            continue
        partitions = [
            int(entry) for entry in files.list(f"topics/{directory}") if entry.isdecimal()
        ]
        if catalog.adopt_topic(txn, name, int(number), max(partitions, default=0) + 1):
            done.append(f"adopted topic {name}, with default settings")
    return done


def _adopt_compacted(
    files: Files, txn: kv.Txn, info: catalog.TopicInfo, number: int, newest: int
) -> list[str]:
    """Add the segments that replaced those that the copy names and whose files are missing."""
    directory, key = f"{info.directory}/{number}", info.key(number)
    present = _segment_files(files, directory)
    names = {name for _, _, name in present}
    named, done = catalog.segments(txn, key), []
    missing = {segment for segment in named if segment.file_name not in names}
    # The highest number first: of several replacements it is the one that was swapped in last.
    for base, file_id, name in sorted(present, key=itemgetter(1), reverse=True):
        if not missing or file_id <= newest:
            break
        new = _compacted(files, f"{directory}/{name}", base, file_id)
        if new is None or new.next_offset is None:
            continue
        replaced = [
            segment for segment in named if new.base_offset <= segment.base_offset < new.next_offset
        ]
        if missing.isdisjoint(replaced):
            continue
        for segment in replaced:
            catalog.drop_segment(txn, key, segment)
            named.remove(segment)
        catalog.put_segment(txn, key, new)
        catalog.raise_number(txn, "segment", new.id)
        done.append(
            f"adopted {directory}/{name}, in the place of {plural(len(replaced), 'segment')}"
        )
    return done


def _compacted(files: Files, path: str, base: int, file_id: int) -> catalog.SegmentInfo | None:
    """Return the manifest row for a compacted segment that is whole; None for any other file."""
    newest, end = None, None
    try:
        file = SegmentFile(files, path)
        stop = file.size() - len(END_MARK)
        if not file.has_offsets or file.bytes(stop, len(END_MARK)) != END_MARK:
            return None
        for batch in file.scan(file.start, stop):
            end = batch.next_offset
            newest = batch.max_timestamp if newest is None else max(newest, batch.max_timestamp)
    except EmbedlogError:
        return None
    info = catalog.SegmentInfo(base, file_id, 0, end, stop + len(END_MARK), stop, newest)
    return roll.with_columns(info, roll.columns_of_layout(file.layout))


def _names(files: Files, directory: str) -> list[str]:
    """Return the names in a directory; none if it is missing."""
    with ignore_missing():
        return files.list(directory)
    return []


def _segment_files(files: Files, directory: str) -> list[tuple[int, int, str]]:
    """Return base offset, number and name of the segment files in a directory, by name."""
    matches = map(catalog.SEGMENT_NAME.fullmatch, _names(files, directory))
    return [(int(match[1]), int(match[2]), match[0]) for match in matches if match]


def _adopt_segments(
    files: Files, txn: kv.Txn, info: catalog.TopicInfo, number: int, newest: int
) -> list[str]:
    """Add the segments that follow the last one that the copy names."""
    from embedlog.schemas.segment_schema import schema_of_segment

    directory, key = f"{info.directory}/{number}", info.key(number)
    present = _segment_files(files, directory)
    names = [name for _, _, name in present]
    named, done = _without_deleted(txn, key, catalog.segments(txn, key), names)
    last = named[-1] if named else None
    for base, file_id, name in present:
        if last is not None:
            # Segments below the end of a compacted one were replaced by it.
            if base < (last.next_offset or last.base_offset) or file_id <= newest:
                continue
            if base == last.base_offset and last.file_name in names:
                continue
            if last.base_offset == base:
                # It was empty when it was rolled, so it was replaced.
                catalog.drop_segment(txn, key, last)
            elif not last.sealed:
                # Recovery finds its size by a scan; it may have ended in a gap (A8).
                sealed = last._replace(next_offset=base, size=0, end_position=1 << 62, dense=False)
                catalog.put_segment(txn, key, sealed)
        elif base:
            _start_at(txn, key, base)
        last = catalog.SegmentInfo(base, file_id, 0)
        with suppress(EmbedlogError):  # an empty file, which recovery creates again
            file = SegmentFile(files, f"{directory}/{name}")
            last = roll.with_columns(last, roll.columns_of_layout(file.layout))
            if file.layout.typed:
                catalog.adopt_schema(txn, info.name, schema_of_segment(file.schema))
        catalog.put_segment(txn, key, last)
        catalog.raise_number(txn, "segment", last.id)
        done.append(f"adopted {directory}/{name}")
    if last is None:
        catalog.new_segment(txn, key, 0)
    elif last.next_offset is not None:
        number = catalog.next_number(txn, "segment")
        catalog.put_segment(txn, key, catalog.SegmentInfo(last.next_offset, number, 0))
    return done


def _without_deleted(
    txn: kv.Txn, key: bytes, named: list[catalog.SegmentInfo], names: list[str]
) -> tuple[list[catalog.SegmentInfo], list[str]]:
    """Drop the segments that retention deleted after the copy was made.

    Those are the first ones whose files are missing and were not replaced.
    """
    rest = list(dropwhile(lambda segment: segment.file_name not in names, named))
    if len(rest) == len(named) or not names:
        return named, []
    first = int(names[0][:20])
    if (rest and first < rest[0].base_offset) or (not rest and first <= named[-1].base_offset):
        return named, []
    for segment in named[: len(named) - len(rest)]:
        catalog.drop_segment(txn, key, segment)
    start = rest[0].base_offset if rest else first
    _start_at(txn, key, start)
    return rest, [f"offsets below {start} were deleted after the copy was made"]


def _start_at(txn: kv.Txn, key: bytes, offset: int) -> None:
    info = catalog.PARTITIONS.get(txn, key) or catalog.PartitionInfo()
    if info.start_offset < offset:
        catalog.PARTITIONS.put(txn, key, value=info._replace(start_offset=offset))


def live_is_valid(files: Files) -> bool:
    """Whether `live` belongs to this boot and this root; decided without opening it.

    After a power cut an unsynced LMDB can kill the process that opens it.
    """
    with ignore_missing():
        return files.read_file(BOOT_FILE) == _boot(files)
    return False


def _boot(files: Files) -> bytes:
    device, inode = files.identity()
    return f"{files.boot_id()} {device} {inode}\n".encode()


def _live_is_whole(files: Files, clean: dict[str, int] | None) -> bool:
    if not files.exists("live/data.mdb"):
        return False
    kv.check_size(files, "live")
    if clean is not None and "live" in clean:
        # Its values have no checksums, but it was not written to since it was closed.
        return clean["live"] == _digest(files, "live/data.mdb")
    return not kv.findings(files.path("live"))


def _sweep(files: Files) -> list[str]:
    """Remove the files of killed processes that the manifest does not name."""
    with closing(kv.LmdbStore(files, "state", durable=True, timeout=10)) as store:
        # No process is attached that could commit these files, so they are garbage.
        if store.read(keyspace.UNCOMMITTED_FILES.any):
            store.write(keyspace.UNCOMMITTED_FILES.delete_all)
        paths = strays(files, store)
    for path in paths:
        remove_stray(files, path)
    return [f"removed {path}: the manifest does not name it" for path in paths]


def remove_uncommitted_files(files: Files, state: kv.Store) -> None:
    """Remove the uncommitted files of all partitions; no process may be attached.

    The operations that created them have failed or were killed, so they are garbage.

    Raises:
        StorageError: A file could not be removed; the next open removes it.
    """

    def step(txn: kv.Txn) -> list[str]:
        return [
            f"{topic.directory}/{number}/{segment.file_name}"
            for topic in catalog.topics(txn)
            for number in range(topic.partitions)
            for segment in catalog.uncommitted_files(txn, topic.key(number))
        ]

    if state.read(keyspace.UNCOMMITTED_FILES.any):
        for path in state.read(step):
            unnamed_files.unlink(files, path)
        state.write(keyspace.UNCOMMITTED_FILES.delete_all)


def strays(files: Files, state: kv.Store) -> list[str]:
    """Return the segment files, and the topics' directories, that the manifest does not name.

    And the key indexes of such segments.

    Without uncommitted files; `unnamed_files.not_pending` leaves out those that are to be
    deleted.  Files with other names do not belong to the log and are ignored.
    """
    # Files before names: a file that is created meanwhile is named already.
    present = _present(files)
    return _unnamed(present, state.read(_named))


def _present(files: Files) -> dict[str, list[str]]:
    """Return the paths of all files of topics, by the directory of the topic."""
    present: dict[str, list[str]] = {}
    for topic in _names(files, "topics"):
        paths = present[f"topics/{topic}"] = []
        with ignore_missing():  # being deleted
            for number in files.list(f"topics/{topic}"):
                directory = f"topics/{topic}/{number}"
                paths += [f"{directory}/{name}" for name in files.list(directory)]
    return present


def _unnamed(
    present: Mapping[str, list[str]], names: tuple[set[str], set[str], set[str]]
) -> list[str]:
    """Return those of the present files, and topics, that are not among what `_named` returns."""
    topics, named, deleted = names
    unnamed = [topic for topic in present if topic not in topics | deleted]
    for topic in sorted(topics & present.keys()):
        unnamed += [
            path
            for path in present[topic]
            if path not in named and catalog.SEGMENT_FILES.fullmatch(path.rpartition("/")[2])
        ]
    return unnamed


def remove_stray(files: Files, path: str) -> None:
    """Remove one of `strays`: a topic's directory, or a segment file."""
    if path.count("/") == 1:
        remove_tree(files, path)
    else:
        files.unlink(path, missing_ok=True)


def _named(txn: kv.Txn) -> tuple[set[str], set[str], set[str]]:
    """Return the directories of topics, the paths of segments, and directories to delete."""
    topics, paths = set[str](), set[str]()
    for info in catalog.topics(txn):
        topics.add(info.directory)
        for number in range(info.partitions):
            key = info.key(number)
            names = journal.file_names(txn, key)
            paths.update(f"{info.directory}/{number}/{name}" for name in names)
    paths |= {key_index_path(path) for path in paths}
    return topics, paths, {topic.directory for topic in catalog.deleted_topics(txn)}


def remove_tree(files: Files, directory: str) -> None:
    """Remove a topic's directory and everything in it."""
    with ignore_missing():
        for partition in files.list(directory):
            remove_folder(files, f"{directory}/{partition}")
        files.remove_directory(directory)


def remove_folder(files: Files, directory: str) -> None:
    """Remove a directory, which may be missing, and the files in it."""
    # Another process may remove it too, so files may be missing.
    with ignore_missing():
        for name in files.list(directory):
            files.unlink(f"{directory}/{name}", missing_ok=True)
        files.remove_directory(directory)


@contextmanager
def ignore_missing() -> Iterator[None]:
    """Suppress the error for a missing file or directory."""
    try:
        yield
    except StorageError as error:
        if not raised_in_body(error).missing:
            raise
