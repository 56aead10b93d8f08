"""What a disk may hold after the power went away: the model behind `FaultyFiles`.

The model is stricter than ext4.  A write is on the disk for certain after a sync
of its file, a name after a sync of its directory; until then each of them may be
there, or not, or in part (sectors of 512 bytes), and in any order.  A rename is
there as a whole or not at all.  An LMDB commit is synced by LMDB itself: it is
there for certain, and while it is the last thing that happened, also in part.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

SECTOR = 512
PAGE = 4096
ROOT = 0
OLD = 1_000_000_000
"""The modification time of every file of an image: any write to the file changes it."""


class Write(NamedTuple):
    inode: int
    position: int
    data: bytes


class Truncate(NamedTuple):
    inode: int
    size: int


class Sync(NamedTuple):
    inode: int
    upto: int
    """Events before this one are synced: those after it came while the sync ran."""


class SyncDirectory(NamedTuple):
    inode: int
    upto: int


class FailedSync(NamedTuple):
    """What was pending may be lost for ever, whatever a later sync says."""

    inode: int
    upto: int


class Forgotten(NamedTuple):
    """The cache was dropped after a failed sync: what was pending reads as zeros now."""

    inode: int


class Enter(NamedTuple):
    directory: int
    name: str
    inode: int
    is_directory: bool = False


class Remove(NamedTuple):
    directory: int
    name: str
    inode: int


class Rename(NamedTuple):
    directory: int
    name: str
    new_directory: int
    new_name: str
    inode: int


class Commit(NamedTuple):
    """One LMDB commit: the pages that changed, by number, and the file's size."""

    inode: int
    pages: dict[int, bytes]
    size: int
    whole_only: bool
    """Several commits in one: pages of the first may be used again by the last."""


class Note(NamedTuple):
    what: Any


Tree = dict[int, dict[str, int]]
"""Directories by inode: the names in each, and their inodes."""


class Choice(NamedTuple):
    """What became of one pending event; a mask says which sectors or pages arrived."""

    whole: bool
    mask: int | None = None
    grow: bool = False


LOST, KEPT = Choice(False), Choice(True)


@dataclass(slots=True)
class Image:
    """One state of the disk after a power cut, and what the program had noted before it."""

    files: dict[str, bytes]
    directories: list[str]
    notes: list[Any]
    """The notes that preceded the cut, in order; shared by all images of one cut."""
    cut: int
    """How many recorded events preceded the cut."""
    choices: list[tuple[Any, Choice]]
    """What became of each event that was not certain."""
    key: int
    """Equal for equal disks (of one process)."""

    def explain(self) -> str:
        """Say in a few lines what this state is, for the message of a failed check."""
        lines = [f"cut after event {self.cut}, {len(self.notes)} notes before it"]
        lines.extend(f"  {tell(event)}: {choice}" for event, choice in self.choices)
        lines.extend(f"  {name}: {len(data)} bytes" for name, data in self.files.items())
        return "\n".join(lines)


def tell(event: Any) -> str:
    """One event in one line, without its bytes."""
    if isinstance(event, Write):
        return f"Write(inode={event.inode}, {event.position}+{len(event.data)})"
    if isinstance(event, Commit):
        return f"Commit(inode={event.inode}, pages={sorted(event.pages)})"
    return repr(event)


@dataclass(slots=True)
class Pending:
    index: int
    event: Any
    certain: bool = False
    doomed: bool = False


@dataclass(slots=True)
class DiskModel:
    """The disk after a prefix of the events: what is certain, and what is not."""

    tree: Tree
    contents: dict[int, bytes]
    data: dict[int, list[Pending]] = field(default_factory=dict)
    names: list[Pending] = field(default_factory=list)
    flight: tuple[Commit, bytes] | None = None
    notes: list[Any] = field(default_factory=list)

    def play(self, index: int, event: Any) -> None:
        self.flight = None
        match event:
            case Write() | Truncate():
                self.data.setdefault(event.inode, []).append(Pending(index, event))
            case Enter() | Remove() | Rename():
                self.names.append(Pending(index, event))
            case Sync():
                self._sync(event)
            case SyncDirectory():
                self._sync_directory(event)
            case FailedSync():
                for entry in self.data.get(event.inode, ()):
                    entry.doomed = entry.doomed or entry.index < event.upto
            case Forgotten():
                self._forget(event.inode)
            case Commit():
                old = self.contents.get(event.inode, b"")
                self.flight = (event, old)
                self.contents[event.inode] = with_pages(old, event, None)
            case Note():
                self.notes = [*self.notes, event.what]

    def _sync(self, event: Sync) -> None:
        pending = self.data.get(event.inode, [])
        for entry in pending:
            entry.certain = entry.certain or (entry.index < event.upto and not entry.doomed)
        self._settle(event.inode)

    def _settle(self, inode: int) -> None:
        pending = self.data.get(inode, [])
        certain = 0
        while certain < len(pending) and pending[certain].certain:
            certain += 1
        if certain:
            content = bytearray(self.contents.get(inode, b""))
            for entry in pending[:certain]:
                apply(content, entry.event, KEPT)
            self.contents[inode] = bytes(content)
            del pending[:certain]

    def _forget(self, inode: int) -> None:
        for entry in self.data.get(inode, ()):
            if entry.doomed:
                if isinstance(entry.event, Write):
                    entry.event = entry.event._replace(data=bytes(len(entry.event.data)))
                entry.certain, entry.doomed = True, False
        self._settle(inode)

    def _sync_directory(self, event: SyncDirectory) -> None:
        for entry in self.names:
            if entry.index < event.upto and event.inode == home(entry.event):
                entry.certain = True
        while self.names and self.names[0].certain:
            change(self.tree, self.names.pop(0).event, certain=True)

    def content(self, inode: int) -> bytes:
        """The file as the running system sees it: everything arrived."""
        chosen = {entry.index: KEPT for entry in self.data.get(inode, ())}
        return self._content(inode, chosen, {})

    # Images

    def uncertain(self) -> list[Pending]:
        """The events that may be lost, in order; a commit in flight is the last."""
        events = [entry for entry in self.names if not entry.certain]
        for pending in self.data.values():
            events.extend(entry for entry in pending if not entry.certain)
        if self.flight and not self.flight[0].whole_only:
            events.append(Pending(1 << 60, self.flight[0]))
        return sorted(events, key=lambda entry: entry.index)

    def files(
        self, chosen: dict[int, Choice], cache: dict[Any, bytes]
    ) -> tuple[dict[str, bytes], list[str]]:
        """Build the disk in which each uncertain event became what was chosen for it."""
        tree = self.tree
        if self.names:
            tree = {inode: dict(names) for inode, names in tree.items()}
            for entry in self.names:
                if entry.certain or chosen[entry.index].whole:
                    change(tree, entry.event, entry.certain)
        files: dict[str, bytes] = {}
        directories: list[str] = []
        queue = [(ROOT, "")]
        for inode, prefix in queue:
            for name, inner in tree[inode].items():
                if inner in tree:
                    directories.append(prefix + name)
                    queue.append((inner, f"{prefix}{name}/"))
                else:
                    files[prefix + name] = self._content(inner, chosen, cache)
        return files, directories

    def _content(self, inode: int, chosen: dict[int, Choice], cache: dict[Any, bytes]) -> bytes:
        if self.flight and inode == self.flight[0].inode and (1 << 60) in chosen:
            key: Any = (inode, chosen[1 << 60])
            if key not in cache:
                cache[key] = with_pages(self.flight[1], self.flight[0], chosen[1 << 60])
            return cache[key]
        pending = self.data.get(inode)
        if not pending:
            return self.contents.get(inode, b"")
        choices = [KEPT if entry.certain else chosen[entry.index] for entry in pending]
        key = (inode, *choices)
        if key not in cache:
            content = bytearray(self.contents.get(inode, b""))
            for entry, choice in zip(pending, choices, strict=True):
                apply(content, entry.event, choice)
            cache[key] = bytes(content)
        return cache[key]


def home(event: Enter | Remove | Rename) -> int:
    """The directory whose sync makes a change of names certain."""
    return event.new_directory if isinstance(event, Rename) else event.directory


def change(tree: Tree, event: Enter | Remove | Rename, certain: bool) -> None:
    """Apply a change of names; one that hangs on a change that was lost is lost too."""
    names = tree.setdefault(event.directory, {})
    match event:
        case Enter(_, name, inode, is_directory):
            if is_directory:
                tree.setdefault(inode, {})
            if certain or name not in names:
                names[name] = inode
        case Remove(_, name, inode):
            if names.get(name) == inode and (certain or not tree.get(inode)):
                del names[name]
        case Rename(_, name, new_directory, new_name, inode):
            if certain or names.get(name) == inode:
                if names.get(name) == inode:
                    del names[name]
                tree.setdefault(new_directory, {})[new_name] = inode


def sectors(event: Write) -> list[tuple[int, int]]:
    """The byte ranges of a write, cut at the sectors of the disk."""
    start, end = event.position, event.position + len(event.data)
    edges = [start, *range(start - start % SECTOR + SECTOR, end, SECTOR), end]
    return list(pairwise(edges))


def apply(content: bytearray, event: Write | Truncate, choice: Choice) -> None:
    """Apply what arrived of a write or truncate to the bytes of a file."""
    if isinstance(event, Truncate):
        if choice.whole:
            resize(content, event.size)
        return
    start = event.position
    if choice.whole:
        if len(content) < start:
            resize(content, start)
        content[start : start + len(event.data)] = event.data
    elif choice.mask is not None:
        for number, (first, last) in enumerate(sectors(event)):
            if choice.mask >> number & 1:
                if len(content) < first:
                    resize(content, first)
                content[first:last] = event.data[first - start : last - start]
        if choice.grow and len(content) < start + len(event.data):
            resize(content, start + len(event.data))


def resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def with_pages(old: bytes, commit: Commit, choice: Choice | None) -> bytes:
    """The LMDB file after a commit, or with some of its pages but the old meta pages."""
    content = bytearray(old)
    whole = choice is None or choice.whole
    mask = -1 if whole else (choice.mask or 0) if choice else 0
    numbers = [number for number in sorted(commit.pages) if whole or number > 1]
    for bit, number in enumerate(numbers):
        if mask >> bit & 1:
            if len(content) < number * PAGE:
                resize(content, number * PAGE)
            content[number * PAGE : (number + 1) * PAGE] = commit.pages[number]
    if whole or (choice and choice.grow):
        resize(content, commit.size if whole else max(len(content), commit.size))
    return bytes(content)


# Which of the states to look at


def parts_of(event: Any) -> int:
    """Of how many pieces a pending event is that may arrive one without the other."""
    match event:
        case Write():
            return len(sectors(event))
        case Commit():
            return sum(number > 1 for number in event.pages)
        case _:
            return 0


def few_choices(event: Any) -> list[Choice]:
    """Every outcome of a small event, and the typical ones of a large event."""
    count = parts_of(event)
    if not count:
        return [KEPT, LOST]
    every = (1 << count) - 1
    half = (1 << count // 2) - 1
    masks = range(1 << count) if count <= 3 else (0, 1, half, every ^ half, every ^ 1, every)
    return [KEPT, LOST, *(Choice(False, mask, grow) for mask in masks for grow in (False, True))]


def any_choice(event: Any, keep: float, rng: random.Random) -> Choice:
    count = parts_of(event)
    if rng.random() < (0.3 if count else 1.0):
        return KEPT if rng.random() < keep else LOST
    every = (1 << count) - 1
    first = (1 << rng.randrange(count + 1)) - 1
    mask = rng.choice([first, every ^ first, rng.getrandbits(count), 1 << rng.randrange(count)])
    return Choice(False, mask, rng.random() < 0.5)


Chosen = dict[int, Choice]


def all_choices(pending: list[Pending], rng: random.Random, few: int) -> Iterator[Chosen]:
    """Every combination if they are few, else the corners and then random ones without end."""
    numbers = [entry.index for entry in pending]
    options = [few_choices(entry.event) for entry in pending]
    total = 1
    for event_choices in options:
        total *= len(event_choices)
    if total <= few:
        combinations = list(product(*options))
        rng.shuffle(combinations)
        for combination in combinations:
            yield dict(zip(numbers, combination, strict=True))
    else:
        yield from corners(numbers, rng, few)
    while any(parts_of(entry.event) > 3 for entry in pending) or total > few:
        keep = rng.choice((0.1, 0.5, 0.9))
        yield {entry.index: any_choice(entry.event, keep, rng) for entry in pending}


def corners(numbers: list[int], rng: random.Random, few: int) -> Iterator[Chosen]:
    """All, none, all but one, and one alone."""
    yield dict.fromkeys(numbers, LOST)
    yield dict.fromkeys(numbers, KEPT)
    for number in rng.sample(numbers, min(len(numbers), few // 4)):
        yield dict.fromkeys(numbers, KEPT) | {number: LOST}
        yield dict.fromkeys(numbers, LOST) | {number: KEPT}


@dataclass(slots=True)
class Recording:
    """What was on the disk at first, and everything that happened since."""

    tree: Tree
    contents: dict[int, bytes]
    events: list[Any]
    volatile: list[str]
    """Names under `locks`, and `wake`: they may be there or not, their bytes do not matter."""

    def cuts(self) -> list[int]:
        """The lengths of the prefixes to look at: a sync alone only makes states fewer."""
        syncs = (Sync, SyncDirectory, FailedSync)
        return [
            0,
            *(n for n, event in enumerate(self.events, 1) if not isinstance(event, syncs)),
        ]

    def states(self, limit: int | None, seed: int = 1, per_cut: int = 24) -> Iterator[Image]:
        """See `FaultyFiles.power_cut_states`."""
        rng = random.Random(seed)
        seen: set[tuple[int, int]] = set()
        cuts = set(self.cuts())
        while True:
            before = len(seen)
            quota = len(cuts) * per_cut if limit is None else limit - before
            yield from self._round(cuts, quota, rng, seen)
            gained = len(seen) - before
            # The last few of a space that is nearly used up are not worth another round.
            if limit is None or len(seen) >= limit or gained <= limit // 1000:
                return

    def _round(
        self, cuts: set[int], quota: int, rng: random.Random, seen: set[tuple[int, int]]
    ) -> Iterator[Image]:
        """Yield up to `quota` new images, shared evenly among the cuts."""
        tree = {inode: dict(names) for inode, names in self.tree.items()}
        disk = DiskModel(tree, dict(self.contents))
        first, done = len(seen), 0
        for cut in range(len(self.events) + 1):
            if cut:
                disk.play(cut - 1, self.events[cut - 1])
            if cut in cuts:
                done += 1
                budget = first + quota * done // len(cuts) - len(seen)
                yield from self._images(disk, cut, budget, rng, seen)

    def _images(
        self,
        disk: DiskModel,
        cut: int,
        budget: int,
        rng: random.Random,
        seen: set[tuple[int, int]],
    ) -> Iterator[Image]:
        pending = disk.uncertain()
        cache: dict[Any, bytes] = {}
        tries = 2 * budget + 8
        for chosen in all_choices(pending, rng, 4 * budget):
            if budget <= 0 or tries <= 0:
                return
            tries -= 1
            files, directories = disk.files(chosen, cache)
            # As many notes, as much was promised: the same disk may be fine before and not after.
            content = hash((frozenset(files.items()), frozenset(directories)))
            key = (content, len(disk.notes))
            if key not in seen:
                seen.add(key)
                budget -= 1
                outcomes = [(entry.event, chosen[entry.index]) for entry in pending]
                self._add_volatile(files, directories, rng)
                yield Image(files, directories, disk.notes, cut, outcomes, content)

    def _add_volatile(
        self, files: dict[str, bytes], directories: list[str], rng: random.Random
    ) -> None:
        dice = rng.getrandbits(5)
        if dice & 1 and self.volatile:
            for name in self.volatile:
                files[name] = b""
                if "/" in name and name.split("/")[0] not in directories:
                    directories.append(name.split("/")[0])
        if dice >> 1 == 0:
            directories.append("live")
            files["live/data.mdb"] = rng.randbytes(2 * PAGE)


# Images as directories


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory in memory if the system has one, removed at the end."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tempfile.mkdtemp(prefix=f"embedlog-{os.getpid()}-", dir=memory)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_scratch_of(pid: int) -> None:
    """Remove the directories of a process that died in them."""
    for directory in ("/dev/shm", tempfile.gettempdir()):
        for path in Path(directory).glob(f"embedlog-{pid}-*"):
            shutil.rmtree(path, ignore_errors=True)


def materialise(
    image: Image, directory: str | os.PathLike[str], previous: Image | None = None
) -> None:
    """Make `directory` hold exactly the image.

    With the image that was put there before, only what differs is written: what another
    image has, and what was changed since (seen by the modification time).
    """
    root = os.fspath(directory)
    _clean(root, "", image)
    for name in image.directories:
        path = f"{root}/{name}"
        if not os.path.isdir(path):
            os.makedirs(path, exist_ok=True)
    previous_files = previous.files if previous else {}
    for name, data in image.files.items():
        path = f"{root}/{name}"
        if not (previous_files.get(name) is data and _untouched(path, len(data))):
            _put(path, data)


def materialised(images: Iterable[Image], directory: Path) -> Iterator[Image]:
    """Yield images, each while `directory` holds it."""
    directory.mkdir(exist_ok=True)
    previous = None
    for image in images:
        remove_impossible(image)
        materialise(image, directory, previous)
        previous = image
        yield image


def remove_impossible(image: Image) -> None:
    """Remove volatile files from a root without a format file, which is there before them."""
    if "embedlog.toml" not in image.files:
        for name in [name for name in image.files if name.startswith(("locks/", "live/", "wake"))]:
            del image.files[name]
        image.directories[:] = [name for name in image.directories if name not in ("locks", "live")]


def _clean(root: str, prefix: str, image: Image) -> None:
    """Remove what the image does not have."""
    directories = set(image.directories)
    with os.scandir(f"{root}/{prefix}") as entries:
        for entry in list(entries):
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                if name in directories:
                    _clean(root, f"{name}/", image)
                else:
                    shutil.rmtree(entry.path)
            elif name not in image.files:
                os.unlink(entry.path)


def _untouched(path: str, size: int) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return status.st_mtime_ns == OLD and status.st_size == size


def _put(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        done = os.write(fd, data)
        while done < len(data):
            done += os.write(fd, data[done:])
        os.utime(fd, ns=(OLD, OLD))
    finally:
        os.close(fd)
