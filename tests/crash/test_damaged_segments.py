"""P12: a bit flip, a zeroed page or a cut anywhere in a segment is found, and nothing is lost."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from support.case_workers import Outcome, Progress, share_out
from support.damage import mutations, readable, replaced, rows_in, scrambled, snapshot
from support.faulty_files import after_reboot, materialise, scratch_directory
from support.power_cut import Image
from support.roots import Row, abandon, encoded, make_log, open_root, rows, segment_files
from support.tiers import choose

from embedlog import batch
from embedlog.errors import CorruptionError, UnsupportedFormatError
from embedlog.root.repair import repair_root
from embedlog.root.root import Root
from embedlog.root.verify import verify_root

KINDS = {
    "plain": {},
    "headers": {"headers": [[("name", b"value"), ("none", None)], [], [("x", b"")]]},
    "lz4": {"compression": "lz4"},
    "zstd": {"compression": "zstd"},
    "producer": {"producer": (7, 1, 0)},
}


def batches_of(kind: str) -> list[batch.EncodedBatch]:
    """Four batches of three records; the keys and values also are null and empty."""
    made = []
    for number in range(4):
        text = [b"%s %d" % (kind.encode(), number) * 3, None, b""]
        encoded_batch = encoded(*text, keys=[None, b"k", b""], at=[5, number, 7], **KINDS[kind])
        if kind == "producer":
            encoded_batch.set_producer(7, 1, 3 * number)
        made.append(encoded_batch)
    return made


def segment_of(kind: str) -> tuple[bytes, int, list[Row]]:
    """A healthy sealed segment in memory: its bytes, where its batches end, and its rows."""
    schema = batch.schema(headers=kind == "headers", metadata={b"embedlog.topic": b"t"})
    data = schema.serialize().to_pybytes()
    for number, encoded_batch in enumerate(batches_of(kind)):
        data += b"".join(map(bytes, encoded_batch.stamp(3 * number, 2)))
    stop = len(data)
    data += b"\xff\xff\xff\xff\0\0\0\0"
    return data, stop, rows_in(data, stop, schema)


def mutate_in_memory(case: tuple[str, int], outcome: Outcome, progress: Progress) -> None:
    """Every mutant of a segment is refused, or has exactly the rows of the healthy one."""
    kind, extra = case
    data, stop, healthy = segment_of(kind)
    schema = batch.schema(headers=kind == "headers")
    for number, (what, bytes_) in enumerate(mutations(data, random.Random(kind), extra)):
        outcome.count += 1
        outcome.keys.add((kind, hash(bytes_)))
        if number % 64 == 0:
            progress.report(f"{kind}: {what}")
        try:
            read = rows_in(bytes_, stop, schema, mapped=number % 2 == 1)
        except (CorruptionError, UnsupportedFormatError):
            outcome.note("refused")
            continue
        except Exception as error:  # noqa: BLE001 - any other error is the finding
            outcome.findings.append(f"{kind}, {what}: {error!r}")
            continue
        outcome.note("harmless")
        if read != healthy:
            outcome.findings.append(f"{kind}, {what}: silently read {read}")


# On the disk


def fill(root: Root) -> None:
    """Three partitions in segments of a few batches, a part of each below the recovery point."""
    for kind in ("plain", "headers", "lz4"):
        log = make_log(root, {"segment.bytes": 3000, "index.interval.bytes": 500}, kind)
        for encoded_batch in [*batches_of(kind), *batches_of(kind), *batches_of(kind)]:
            log.append([encoded_batch])


def original(directory: Path, closed: bool) -> tuple[Image, dict[str, list[Row]]]:
    """A root that was closed, or one whose last records were not flushed."""
    root = open_root(directory)
    fill(root)
    if not closed:
        root.flush()
        for kind in ("plain", "headers", "lz4"):
            for encoded_batch in batches_of(kind)[:3]:
                # Behind them the file has zeros.
                root.partition(kind, 0).append([encoded_batch], durability="fsync")
    expected = {name: rows(root.partition(name, 0)) for name in root.topics()}
    root.close() if closed else abandon(root)
    return snapshot(directory), expected


def mutate_on_disk(case: tuple[int, int, str], outcome: Outcome, progress: Progress) -> None:
    """Damage one segment file of a root, open it, read it, repair it."""
    seed, count, state = case
    rng = random.Random(seed)
    with scratch_directory() as scratch:
        directory = scratch / "root"
        image, expected = original(directory, closed=state != "unflushed")
        paths = [path.relative_to(directory) for path in segment_files(directory)]
        previous = None
        for number in range(count):
            path = str(rng.choice(paths))
            data = image.files[path]
            cut = rng.random() < 0.4
            bytes_ = data[: rng.randrange(len(data))] if cut else scrambled(data, rng)
            progress.report(f"{case} {number}: {path}, {len(data)} -> {len(bytes_)} bytes")
            damaged = replaced(image, path, bytes_)
            shutil.rmtree(directory / "quarantine", ignore_errors=True)
            materialise(damaged, directory, previous)
            previous = damaged
            outcome.count += 1
            outcome.keys.add((case, path, hash(bytes_)))
            boot = {} if state == "same boot" else {"files": after_reboot(f"{number}")}
            with outcome.finding(progress.last):
                check_damaged(open_root(directory, **boot), expected, path, bytes_, outcome)
            if outcome.enough:
                return


def check_damaged(
    root: Root, expected: dict[str, list[Row]], path: str, damaged: bytes, outcome: Outcome
) -> None:
    """What can be read must be right, damage must be reported, and repair must mend it."""
    file = Path(root.path) / path
    victim = path.split("/")[1].rpartition("-")[0]
    try:
        findings = verify_root(root)
        outcome.note("told" if findings else "harmless, or cut past the recovery point")
        for topic in expected:
            got, error = readable(root.partition(topic, 0))
            assert error is None or (topic == victim and findings), f"{topic}: {error!r}"
            assert got == expected[topic][: len(got)], f"{topic} reads {got}"
            if error is None and topic != victim:
                assert len(got) == len(expected[topic]), f"{topic} ends at {len(got)}"
            floor = 36
            assert error is not None or len(got) >= floor, f"{topic} was cut to {len(got)} rows"
        if findings:
            before = file.read_bytes()
            # The end mark holds no record; recovery puts it back.
            assert before[:-8] == damaged[: len(before) - 8], "open changed a damaged file"
            assert repair_root(root, True) != [], f"nothing to repair in {findings}"
            assert file.read_bytes() == before, "a dry run changed the file"
            assert repair_root(root, False) != []
        again = verify_root(root)
        assert again == [], f"after a repair: {again}"
        for topic in expected:
            log = root.partition(topic, 0)
            got, error = readable(log)
            assert error is None, f"after a repair of {victim}, {topic}: {error!r}"
            right = {row[0]: row for row in expected[topic]}
            assert all(right[row[0]] == row for row in got), f"after a repair, {topic}: {got}"
            end = log.end_offset()
            assert log.append([encoded(b"after")])[0].base_offset == end
    finally:
        abandon(root)


@pytest.mark.parametrize(
    "extra", [800, pytest.param(200_000, marks=pytest.mark.tier("nightly"))], ids="extra={}".format
)
def test_no_flipped_byte_zeroed_sector_or_cut_of_a_segment_is_read_silently(extra, record_property):
    """P12: an error says where a mutant is damaged, or else it is harmless: it reads the same."""
    kinds = choose(test=["zstd"], all=list(KINDS))
    outcome = share_out(mutate_in_memory, [(kind, extra) for kind in kinds])
    record_property("states", str(outcome))

    assert not outcome.findings, str(outcome)
    assert outcome.distinct >= 28_000 * len(kinds) / len(KINDS), f"-> {outcome.distinct} states"
    assert outcome.tally["refused"] > 0.9 * outcome.distinct


@pytest.mark.parametrize(
    "count",
    [choose(test=2, all=100), pytest.param(20_000, marks=pytest.mark.tier("nightly"))],
    ids="count={}".format,
)
def test_a_damaged_root_opens_tells_reads_the_rest_and_is_repaired(count, record_property):
    """P12: below the recovery point nothing is ever cut silently, and past it the log is cut."""
    cases = [
        (seed, count, state)
        for seed in range(2)
        for state in ("same boot", "another boot", "unflushed")
    ]
    outcome = share_out(mutate_on_disk, cases)
    record_property("states", str(outcome))

    assert not outcome.findings, str(outcome)
    assert outcome.distinct >= 5.5 * count, f"-> {outcome.distinct} states"
    assert outcome.tally["told"] > count
