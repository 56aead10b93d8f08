"""Mirrors, killed, failing or without power at every operation: nothing lost, nothing doubled."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pyarrow as pa
import pytest
from support.faulty_files import FALLIBLE
from support.faulty_roots import COMPANY, Acknowledge, Case, FastUptimeFiles, RootFaults
from support.forks import Child
from support.manual_compaction import keep
from support.patience import until_enough
from support.roots import encoded, healthy, no_stray_files, open_root
from support.tiers import choose, sample

import embedlog
from embedlog.api import Log
from embedlog.config import TopicConfig
from embedlog.errors import EmbedlogError
from embedlog.mirrors import merging_target  # noqa: F401 - or each child would import it
from embedlog.mirrors import mirror as mirror_module
from embedlog.mirrors.hops import _HOP, HEADER, Place, hops_of, key_of
from embedlog.partition import unnamed_files
from embedlog.record import TopicPartition
from embedlog.registry.schema_registry import SchemaRegistry
from embedlog.root.root import Root

TOPICS = ("avro", "compacted", "plain", "typed")


def forwarded(site_id: str, topic_id: int) -> list[tuple[str, bytes | None]]:
    """Return the headers of a record that a mirror wrote, as a program forwards them."""
    place, here = Place.of(site_id, str(topic_id), 0), key_of("here")
    return [("h", b"1"), (HEADER, here + _HOP.pack(*place, 0, 1_000_000))]


def fill_source(path: Path) -> None:
    """Create a source with gaps, headers, Avro, two versions of a schema, and a group."""
    root = open_root(path)
    log = Log(root)
    settings = {"segment.bytes": 4000}
    root.create_topic("plain", 2, TopicConfig.parse({**settings, "audit": True}))
    root.create_topic("compacted", 1, TopicConfig.parse({**settings, "cleanup.policy": "compact"}))
    log.create_topic("typed", schema=pa.schema([("n", pa.int64())]), config=settings)
    plain = root.partition("plain", 0)
    for number in range(6):
        plain.append([encoded(b"%d" % number, b"x", producer=(7, 0, 2 * number))])
    plain.append([encoded(b"headers", headers=[[("h", b"1")]])])
    plain.append([encoded(b"forwarded", headers=[forwarded("another site", 1)])])
    root.partition("plain", 1).append([encoded(b"a", b"b")])
    log.delete_records({TopicPartition("plain", 1): 1})
    compacted = root.partition("compacted", 0)
    for number in range(8):
        compacted.append([encoded(b"%d" % number, keys=[b"%d" % number])])
    compacted.roll()
    keep(compacted, [0, 3, 4, 7], parts=2)
    compacted.append([encoded(b"end", keys=[b"end"])])
    with log.producer() as producer:
        producer.send("typed", {"n": 1}).result()
        log.alter_topic("typed", schema=pa.schema([("n", pa.int64()), ("s", pa.string())]))
        producer.send("typed", {"n": 2, "s": "x"}).result()
        log.create_topic("avro", value="avro", config=settings)
        for kind in ("int", "long"):
            log.schema_registry.register("avro-value", kind)
            producer.send("avro", 5).result()
    log.groups["g"].reset_offsets(5, topics="plain", dry_run=False)
    log.close()


def records(root: Root, topic: str) -> list[tuple[object, ...]]:
    """Return all of a record but for the name of its topic and the epoch."""
    return [tuple(record[1:-1]) for record in Log(root).topic(topic)]


class MirrorFaults(RootFaults):
    """A source with all that there is to copy; the faults are at the target."""

    parts: ClassVar = [TopicPartition("own", 0)]
    files = FastUptimeFiles
    options: ClassVar[dict[str, Any]] = {"groups": ".*", "topics": "|".join(TOPICS)}

    def source_path(self, root: Root, *, anew: bool = False) -> Path:
        """Return the directory of the source of a target, a copy of one that is made once."""
        path, template = Path(f"{root.path}-source"), Path(root.path).with_name("source")
        if anew:
            shutil.rmtree(path, ignore_errors=True)
        if not template.exists():
            fill_source(template)
        if not path.exists():
            shutil.copytree(template, path)
        return path

    def fill(self, root: Root) -> None:
        """Create the source, and something of the target's own, also under an id of the source."""
        self.source_path(root, anew=True)
        SchemaRegistry(root).register("own", "string")
        root.create_topic("own", 1, TopicConfig())
        root.partition("own", 0).append([encoded(b"own")])
        root.flush()

    def work(self, root: Root, durability: str, acknowledge: Acknowledge) -> EmbedlogError | None:
        """Copy all of it in small steps, and report each step."""
        source = open_root(self.source_path(root), mode="r")
        try:
            # Not for good: templates are made in the process of the other tests.
            with mock.patch.object(mirror_module, "FETCH_BYTES", 1):
                embedlog.mirror(
                    Log(source),
                    Log(root),
                    durability=durability,
                    progress=lambda done, total: acknowledge(str(done)),
                    **self.options,
                )
        except EmbedlogError as error:
            return error
        finally:
            source.close()
        return None

    def check_between(self, root: Root, acked: set[str]) -> None:
        """The copies have the first records of each partition, and what was acknowledged."""
        source = open_root(self.source_path(root), mode="r")
        copied = 0
        for topic in self.copied_topics(root):
            theirs = records(source, topic)
            for number in range(root.partitions(topic)):
                log = root.partition(topic, number)
                end, start = log.end_offset(), log.start_offset()
                expected = [r for r in theirs if r[0] == number and start <= r[1] < end]
                assert [r for r in records(root, topic) if r[0] == number] == expected
                copied += end
        # Offsets: more than those of the steps, because of where the copies begin.
        assert copied >= max(map(int, acked), default=0), "an acknowledged step is lost"
        source.close()

    def copied_topics(self, root: Root) -> list[str]:
        """Return the topics that were created so far."""
        return [topic for topic in TOPICS if topic in root.topics()]

    def check_failure(
        self, root: Root, error: EmbedlogError | None, number: int, failed: bool, acked: set[str]
    ) -> None:
        """The error has the errno of the fault, or is what a flush left; what is there is right."""
        logs = [
            root.partition(topic, part)
            for topic in self.copied_topics(root)
            for part in range(root.partitions(topic))
        ]
        if any(log.tail().failed for log in logs):
            failed = True
            self.repair(root, acked)
        if not failed or number != errno.EIO:
            self.check_between(root, acked)

    def check_done(self, root: Root, durability: str) -> None:
        """Repeated, the mirror copies what is missing, and nothing twice."""
        error = self.work(root, durability, lambda step: None)
        assert error is None, error
        source = open_root(self.source_path(root), mode="r")
        for topic in TOPICS:
            assert records(root, topic) == records(source, topic)
            mine, theirs = Log(root).describe_topic(topic), Log(source).describe_topic(topic)
            assert mine.get("schema") == theirs.get("schema")
            for ours, original in zip(mine["partitions"], theirs["partitions"], strict=True):
                for bound in ("start_offset", "end_offset"):
                    assert ours[bound] == original[bound], (topic, bound)  # type: ignore[literal-required]
            config = mine["overrides"] | {"mirror.source": None}
            assert config == theirs["overrides"] | {"mirror.source": None}
        assert Log(root).audit("plain").differences == []
        partition = TopicPartition("plain", 0)
        positions = Log(root).groups["g"].describe().partitions
        assert [p.current_offset for p in positions if p[:2] == partition] == [5]
        assert healthy(root)
        source.close()

    def check_state(self, root: Root, acked: set[str], durability: str) -> None:
        """After a power cut what was acknowledged is there only with ``fsync``."""
        super().check_state(root, acked if durability == "fsync" else set(), durability)

    def check_reopened(self, root: Root) -> None:
        """A clean close leaves no file that the manifest does not name."""
        unnamed_files.sweep(root.context, early=True)
        assert no_stray_files(root)
        assert healthy(root)

    def check_reopened_after_fault(self, root: Root) -> None:
        """The mirror goes on."""
        self.check_done(root, "os")

    def check_appends(self, root: Root) -> None:
        """What is appended to the source later is copied, too."""
        source = open_root(self.source_path(root))
        source.partition("plain", 0).append([encoded(b"new")])
        source.close()
        self.check_done(root, "os")


class MergeFaults(MirrorFaults):
    """The same, into topics that have records of their own."""

    options: ClassVar[dict[str, Any]] = {"merge": True, "topics": "plain|compacted|avro"}
    parts: ClassVar = [TopicPartition("plain", 0)]

    def fill(self, root: Root) -> None:
        """Create the source, and a record of the target's own, with the headers of a merged one."""
        source = open_root(self.source_path(root, anew=True), mode="r")
        headers = [forwarded(source.id, source.topic("plain").id)]
        source.close()
        SchemaRegistry(root).register("own", "string")
        root.create_topic("plain", 2, TopicConfig.parse({"segment.bytes": 2000, "audit": True}))
        root.partition("plain", 0).append([encoded(b"own", headers=headers)])
        root.flush()

    def merged(self, root: Root, topic: str) -> list[tuple[int, int]]:
        """Return partition and offset of the merged records at the source, in their order."""
        return [
            (record.partition, hops_of(value)[-1].offset)
            for record in Log(root).topic(topic, raw=True)
            for name, value in record.headers
            if name == HEADER and record.value != b"own"
        ]

    def check_between(self, root: Root, acked: set[str]) -> None:
        """The first records of each partition are there, once."""
        source = open_root(self.source_path(root), mode="r")
        for topic in ("plain", "compacted", "avro"):
            if topic in root.topics():
                theirs = [(r.partition, r.offset) for r in Log(source).topic(topic)]
                for number in range(root.partitions(topic)):
                    mine = [place for place in self.merged(root, topic) if place[0] == number]
                    expected = [place for place in theirs if place[0] == number]
                    assert mine == expected[: len(mine)], "records are lost, doubled or moved"
        source.close()

    def check_done(self, root: Root, durability: str) -> None:
        """Repeated, the mirror copies what is missing, and nothing twice."""
        error = self.work(root, durability, lambda step: None)
        assert error is None, error
        source = open_root(self.source_path(root), mode="r")
        assert Log(root).audit("plain").differences == []
        if "avro" in root.topics():
            assert {record.value for record in Log(root).topic("avro")} <= {5}
        for topic in ("plain", "compacted", "avro"):
            assert self.merged(root, topic) == [
                (r.partition, r.offset) for r in Log(source).topic(topic)
            ]
        assert healthy(root)
        source.close()


MIRRORS, MERGES = MirrorFaults(), MergeFaults()


# Real processes that are killed at random


def run_chaos(path: Path, seconds: float, seed: int, *, merge: bool = False) -> Counter[str]:
    """Kill writers of the source and mirrors at random, then compare; return what happened."""
    dice, done = random.Random(seed), Counter[str]()
    with embedlog.open(path / "a", maintenance=False) as source:
        source.create_topic("t", partitions=2, config={"segment.bytes": 100_000})

    def write() -> None:
        with embedlog.open(path / "a", maintenance=False) as log, log.producer() as producer:
            for number in range(1 << 30):
                headers = forwarded("another site", 1) if number % 7 == 0 else []
                value, key = b"%d" % number * 20, b"%d" % (number % 100)
                producer.send("t", value, key=key, headers=headers)

    def copy() -> None:
        embedlog.mirror(
            path / "a", path / "b", follow=True, merge=merge, groups=None if merge else ".*"
        ).wait()

    work: dict[str, Callable[[], None]] = {"writer": write, "mirror": copy}
    children = {name: Child(run) for name, run in work.items()}
    ends = time.monotonic() + seconds
    try:
        while time.monotonic() < ends:
            time.sleep(dice.uniform(0.02, 0.4))
            name = dice.choice(list(work))
            os.kill(children[name].pid, signal.SIGKILL)
            children[name].end()
            done[f"{name}s killed"] += 1
            children[name] = Child(work[name])
    finally:
        for child in children.values():
            child.kill()
    with (
        embedlog.open(path / "a", maintenance=False) as a,
        embedlog.open(path / "b", maintenance=False) as b,
    ):
        a.groups["g"].reset_offsets("latest", topics="t", dry_run=False)
        embedlog.mirror(a, b, merge=merge, groups=None if merge else ".*", progress=False)
        _check_equal(a, b, merge)
        done["records"] = len(a["t"])
    return done


def _check_equal(a: Log, b: Log, merge: bool) -> None:
    theirs = [record[1:7] for record in a["t"]]
    if merge:
        places = [
            (record.partition, hops_of(record.headers[-1][1])[-1].offset) for record in b["t"]
        ]
        assert places == [(record[0], record[1]) for record in theirs]
        assert [record[3:7] for record in b["t"]] == [record[2:] for record in theirs]
    else:
        assert [record[1:7] for record in b["t"]] == theirs
        ends = {TopicPartition("t", part.partition): part.stop for part in b["t"].ranges()}
        positions = b.groups["g"].describe().partitions
        committed = {
            TopicPartition(part.topic, part.partition): part.current_offset for part in positions
        }
        assert committed == ends
    assert healthy(b.root)


MOST = 200
"""How many operations of one mirror are tried."""
DURABILITIES = ("os", "fsync")


@pytest.fixture
def own(directory: Path, faults: RootFaults) -> Path:
    """A directory for each kind of mirror."""
    path = directory / type(faults).__name__
    path.mkdir(exist_ok=True)
    return path


BOTH = pytest.mark.parametrize(
    "faults",
    [
        pytest.param(MIRRORS, id="copies"),
        pytest.param(MERGES, id="merges", marks=pytest.mark.tier("all")),
    ],
)


@BOTH
@COMPANY
def test_a_mirror_that_is_killed_goes_on_where_it_was(own: Path, faults: RootFaults, company: bool):
    """At every operation: records, settings, schemas, starts and groups are those of the source."""
    total = sum(faults.count(own, "fsync").values())
    step = max(total // MOST, 1)  # All of them would take an hour.
    cases = [
        Case(n, ("before", "middle", "after")[n % 3], company, durability=DURABILITIES[index % 2])
        for index, n in enumerate(range(0, total, step))
    ]
    assert faults.check_kills(own, sample(cases, 3)) >= choose(test=1, all=80)


@pytest.mark.tier("all")
@BOTH
def test_a_mirror_that_fails_loses_nothing(own: Path, faults: RootFaults):
    """Any operation, once or from then on; a repetition completes the copy."""
    counted = faults.count(own, "fsync")
    total = sum(counted.get(kind, 0) for kind in FALLIBLE)
    step = max(total // MOST, 1)
    cases = [
        Case(n, ("once", "forever")[index % 2], durability=DURABILITIES[index // 2 % 2])
        for index, n in enumerate(range(0, total, step))
    ]
    assert faults.check_faults(own, cases) >= 20


@pytest.mark.tier("all")
@BOTH
@pytest.mark.parametrize("durability", DURABILITIES)
def test_after_a_power_cut_a_mirror_goes_on_where_the_copy_ends(
    own: Path, faults: RootFaults, durability: str
):
    """The target may lose what was not flushed, and gets it again."""
    limit = 300
    recording = faults.record(own, durability)
    assert faults.check_power_cuts(recording, limit, own, durability) >= limit / 4


@pytest.mark.tier("all")
@pytest.mark.parametrize("merge", [False, True], ids="merges: {}".format)
def test_writers_and_mirrors_that_are_killed_at_random_leave_the_same_records(
    tmp_path: Path, merge: bool
):
    """Real processes and SIGKILL, at any instant."""
    least = 20

    def run(seed: int):
        return run_chaos(tmp_path / str(seed), 20, seed, merge=merge)

    until_enough(run, {"writers killed": least, "mirrors killed": least, "records": 100})
