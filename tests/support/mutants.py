"""Planted bugs: a checker proves nothing until it has caught them.

In a child process each mutant has a function do something else (`Behaviour`) or, where a bug is
one step of a longer function, changes its source (`Change`).  If the function or the text is not
there any more, the mutant fails loudly: it must be planted again, not forgotten.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from embedlog.batch import decode
from embedlog.segment import SegmentFile
from support.power_cut import Commit, DiskModel, with_pages

PLANNED: list[Change | Behaviour] = []
"""All changes of the modules that were imported."""


@dataclass(frozen=True)
class Change:
    """Edits of one function: ``where`` is "module:function" or "module:Class.method"."""

    where: str
    edits: dict[str, str]

    def __post_init__(self) -> None:
        PLANNED.append(self)

    def plan(self) -> tuple[Any, Any, str, str]:
        """Return the module, the owner of the function, its name and its new source.

        Raises:
            AttributeError, LookupError: It is not there any more, or has another text.
        """
        module, owner, function_name = _find(self.where)
        source = textwrap.dedent(inspect.getsource(getattr(owner, function_name)))
        for old, new in self.edits.items():
            if old not in source:
                raise LookupError(f"{self.where} has no {old!r} to change")
            source = source.replace(old, new)
        return module, owner, function_name, source

    def __call__(self) -> None:
        module, owner, function_name, source = self.plan()
        namespace: dict[str, Any] = {}
        code = compile(source, f"<mutant of {function_name}>", "exec")
        future = "annotations"
        assert future in vars(module), "the module postpones annotations"
        exec(code, vars(module), namespace)
        _put(owner, function_name, namespace[function_name])


@dataclass(frozen=True)
class Behaviour:
    """Another function in place of one; ``where`` is as that of a `Change`."""

    where: str
    function: Callable[..., Any]

    def __post_init__(self) -> None:
        PLANNED.append(self)

    def plan(self) -> tuple[Any, str]:
        """Return the owner of the function, and its name.

        Raises:
            AttributeError, TypeError: It is not there any more, or has other arguments.
        """
        _, owner, name = _find(self.where)
        parameters = inspect.signature(getattr(owner, name)).parameters
        inspect.signature(self.function).bind(*parameters)
        return owner, name

    def __call__(self) -> None:
        _put(*self.plan(), self.function)


def _find(where: str) -> tuple[Any, Any, str]:
    module_name, _, name = where.partition(":")
    module = import_module(module_name)
    owner_name, _, function_name = name.rpartition(".")
    return module, getattr(module, owner_name) if owner_name else module, function_name


def _put(owner: Any, name: str, made: Any) -> None:
    old = getattr(owner, name)
    setattr(owner, name, made)
    # Other modules may have imported the name.
    for module in list(sys.modules.values()):
        is_searched = getattr(module, "__name__", "").startswith(("embedlog", "support"))
        if is_searched and vars(module).get(name) is old:
            setattr(module, name, made)


class _Equal:
    """Equal to everything: a checksum that is always right."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def no_checksums() -> None:
    decode.crc32c = decode.extend = lambda *_: _Equal()  # type: ignore[assignment]


def commits_are_late() -> None:
    """A commit of `state` is on the disk only when the next one is; its creation is whole."""
    play = DiskModel.play
    late: dict[tuple[int, int], Commit | None] = {}

    def play_late(self: DiskModel, index: int, event: Any) -> None:
        key = (id(self), getattr(event, "inode", 0))
        if not isinstance(event, Commit) or key not in late:
            play(self, index, event)
            if isinstance(event, Commit):
                late[key] = None
            return
        self.flight, before = None, late[key]
        if before is not None:
            old = self.contents.get(before.inode, b"")
            self.contents[before.inode] = with_pages(old, before, None)
        late[key] = event

    DiskModel.play = play_late  # type: ignore[method-assign]


def bad_batches_are_skipped() -> None:
    """A scan goes on after damage with the next batch that is good."""

    def scan(self: SegmentFile, position: int, stop: int) -> Any:
        from embedlog.errors import CorruptBatchError

        while position < stop:
            try:
                for batch in self.read(position, stop):
                    batch.verify()
                    yield batch
                    position += batch.size
            except CorruptBatchError:
                data = self.bytes(0, stop)
                position = data.find(b"\xff\xff\xff\xff", position + 1)
                if position < 0:
                    return

    SegmentFile.scan = scan  # type: ignore[method-assign]
    stale = {"return batch.next_offset": "return False and batch.next_offset"}
    Change("embedlog.partition.recovery:_is_stale", stale)()


def forget_entries(log: Any, segment_id: int) -> None:
    """The names of new files count as flushed."""
    log.note_names_synced(segment_id)


class Mutant(NamedTuple):
    """A planted bug, and the check that must find it."""

    name: str
    check: str
    changes: tuple[Callable[[], None], ...]


RECOVERY, APPEND = "embedlog.partition.recovery", "embedlog.partition.append"
FLUSH, STARTUP = "embedlog.partition.flush", "embedlog.root.startup"
LOG = "embedlog.partition.partition_log"

MUTANTS = [
    Mutant(
        "no fdatasync before the ack",
        "fsync",
        (Behaviour("embedlog.segment:SegmentFile.sync", lambda self: None),),
    ),
    Mutant(
        "no directory fsync after creating a file",
        "fsync",
        (Behaviour(f"{FLUSH}:sync_entries", forget_entries),),
    ),
    Mutant("durable state is not synced", "fsync", (commits_are_late,)),
    Mutant(
        "the recovery point moves without a flush",
        "os",
        (Change(f"{FLUSH}:flush", {"sync_one(log, sync_data)": "log.tail()"}),),
    ),
    Mutant("no checksum is checked in memory", "memory", (no_checksums,)),
    Mutant("no checksum is checked after a power cut", "torn batch", (no_checksums,)),
    Mutant(
        "a writer does not truncate an unpublished tail",
        "uniform",
        (
            Change(
                f"{LOG}:PartitionLog.file_at",
                {"if size > end and not": "if size < 0 and not"},
            ),
        ),
    ),
    Mutant(
        "what a killed writer left in preallocated space is not looked for",
        "uniform",
        (
            Change(
                f"{LOG}:PartitionLog.file_at",
                {"file.is_blank(end)": "file.is_blank(size - 8)"},
            ),
        ),
    ),
    Mutant(
        "a preallocated tail is read as records",
        "fsync",
        (Change(f"{RECOVERY}:rebuild", {"else result.position\n": "else file.size()\n"}),),
    ),
    Mutant(
        "recovery does not raise the epoch",
        "recovery",
        (Change(f"{RECOVERY}:_write_state", {"result.epoch) + 1": "result.epoch)"}),),
    ),
    Mutant(
        "recovery takes stale batches for new ones",
        "recovery",
        (Behaviour(f"{RECOVERY}:_is_stale", lambda result, batch: False),),
    ),
    Mutant("recovery goes on after a bad batch", "os", (bad_batches_are_skipped,)),
    Mutant(
        "a batch does not say that there is a gap before it",
        "os",
        (Change(f"{APPEND}:PendingAppend.add", {"gap=base - expected": "gap=0"}),),
    ),
    Mutant(
        "the manifest does not learn of gaps",
        "os",
        (Behaviour("embedlog.partition.append:_note_gaps", lambda log: None),),
    ),
    Mutant(
        "recovery cuts below the recovery point",
        "disk",
        (
            Change(
                f"{RECOVERY}:_scan_batches", {"if result.next_offset < recovery_point": "if False"}
            ),
        ),
    ),
    Mutant(
        "published before it was flushed",
        "failed flush",
        (Change(f"{APPEND}:append_locked", {"publish=not synced": "publish=True"}),),
    ),
    Mutant(
        "a lone append is published before it is flushed",
        "failed flush",
        (
            Change(
                f"{LOG}:PartitionLog.commit_locked",
                {
                    "if synced:\n            self.sync(file)": "",
                    "return self.context.live.write(publish)": (
                        "result = self.context.live.write(publish)\n"
                        "        if synced: self.sync(file)\n"
                        "        return result"
                    ),
                },
            ),
        ),
    ),
    Mutant(
        "a failed flush is forgotten",
        "failed flush",
        (
            Behaviour(
                f"{LOG}:PartitionLog.mark_flush_failed",
                lambda self, error: self.flush_failed(error.errno),
            ),
        ),
    ),
    Mutant(
        "live is believed after a reboot",
        "os",
        (
            Behaviour(f"{STARTUP}:live_is_valid", lambda files: True),
            Behaviour(
                f"{STARTUP}:_live_is_whole", lambda files, clean: files.exists("live/data.mdb")
            ),
        ),
    ),
    Mutant(
        "state is not verified before it is opened",
        "state",
        (Behaviour("embedlog.kv:findings", lambda path: []),),
    ),
    Mutant(
        "files that the manifest does not name are kept",
        "fsync",
        (Behaviour(f"{STARTUP}:remove_stray", lambda files, path: None),),
    ),
    Mutant(
        "what a truncation leaves is not synced",
        "fsync",
        (
            Change(f"{RECOVERY}:rebuild", {"or limit != _NO_LIMIT": ""}),
            Change(
                f"{RECOVERY}:_copy_active", {"files.sync(fd)": "...", "files.sync_directory": "str"}
            ),
            Change(
                "embedlog.partition.recovery:truncate_locked",
                {"synced=True": "synced=False"},
            ),
        ),
    ),
]


def hunt(model: type[RuleBasedStateMachine], bug: Callable[[], None]) -> str | None:
    """Run a model with a bug, in a process of its own; return what it found."""
    bug()
    found = settings(
        stateful_step_count=40,
        max_examples=2_000,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
    )
    try:
        run_state_machine_as_test(model, settings=found)
    except Exception as error:  # noqa: BLE001 - whatever it is, it was found
        return f"{type(error).__name__}: {error}"[:200]
    return None
