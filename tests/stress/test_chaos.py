"""Many processes at once, at random: killed, stopped, overtaken."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.chaos import Chaos, check_chaos
from support.faulty_files import scratch_directory
from support.forks import tell
from support.patience import until_enough
from support.tiers import choose

import embedlog
from embedlog import batch
from embedlog.errors import OffsetOutOfRangeError, UnknownTopicOrPartitionError
from embedlog.files import Files

HELD = 64


class CountingFiles(Files):
    """Counts how often segments are opened or mapped."""

    opens = 0

    def open(self, path: str, **how: Any) -> int:  # type: ignore[override]
        self.opens += path.startswith("topics/")
        return super().open(path, **how)

    def map(self, fd: int, length: int, *, write: bool = False) -> Any:
        self.opens += not write
        return super().map(fd, length, write=write)


def check_concurrent_deletes(directory: Path, opens: int, seed: int) -> Counter[str]:
    """Read until so many segments were opened; return what happened, and how often."""
    root, stop = directory / "root", directory / "stop"
    embedlog.open(root).close()
    churn = forks.Child(lambda: _churn(root, stop, seed))
    readers = [forks.Child(lambda n=n: _read(root, opens // 2, seed + n)) for n in range(2)]
    ends = [reader.end(patience=3600) for reader in readers]
    stop.touch()
    ends.append(churn.end())
    counts = [end.result() for end in ends]
    log = embedlog.open(root)
    assert log.housekeeping.verify() == []
    log.close()
    return sum(counts, Counter())


def _churn(root: Path, stop: Path, seed: int) -> Counter[str]:
    """Fill, truncate and delete a topic over and over."""
    dice, done = random.Random(seed), Counter[str]()
    log = embedlog.open(root)
    while not stop.exists():
        log.create_topic("t", 1, {"segment.bytes": 2000, "index.interval.bytes": 500})
        here = log.partition("t", 0)
        for _ in range(dice.randint(2, 12)):
            for _ in range(dice.randint(5, 40)):
                base = here.tail().log_end_offset
                values = [b"%d" % (base + row) for row in range(dice.randint(1, 4))]
                here.append([batch.encode_lists(values, None, base, None)])
                done["appends"] += 1
            if dice.random() < 0.7:
                # Batches that straddle the place go whole, so the next offset is the place itself.
                done["cuts"] += here.truncate_to(dice.randrange(here.tail().log_end_offset))
            # Else the readers wait for the lock of a new topic for half of their time.
            time.sleep(dice.random() * 0.004)
        log.delete_topic("t")
        done["deletions"] += 1
    return done


def _read(root: Path, opens: int, seed: int) -> Counter[str]:
    dice, done = random.Random(seed), Counter[str]()
    log = embedlog.open(root, files=CountingFiles)
    files: Any = log.root.context.files
    held: deque[Any] = deque(maxlen=HELD)
    while files.opens < opens:
        try:
            part = log.partition("t", 0)
            reader = part.reader(dice.randint(0, part.end_offset()))
            for _ in range(dice.randint(1, 4)):
                held += (_checked(decoded) for decoded in reader.read(dice.choice([1, 4000])))
                done["reads"] += 1
            if dice.random() < 0.25:
                done["out of range"] += _is_out_of_range(part)
        except OffsetOutOfRangeError:
            done["overtaken"] += 1
        except UnknownTopicOrPartitionError:
            done["deleted"] += 1
        if held and done["reads"] % 16 == 0:
            # Truncated, unlinked or rolled long ago: batches that were read do not change.
            _checked(dice.choice(held))
            done["held"] += 1
    done["opens"] = files.opens
    return done


def _checked(decoded: Any) -> Any:
    decoded.verify()
    offsets, values = decoded.offsets().to_pylist(), decoded.lists()[2]
    assert values == [b"%d" % offset for offset in offsets], f"{offsets} hold {values}"
    return decoded


def _is_out_of_range(here: Any) -> bool:
    try:
        here.reader(here.end_offset() + 1_000_000)
    except OffsetOutOfRangeError:
        return True
    raise AssertionError("an offset past the end can be read")


pytestmark = pytest.mark.stress


def chaos(case: Chaos) -> dict[str, int]:
    with scratch_directory() as directory:
        done = check_chaos(case, directory)
    tell(f"seed {case.seed}: {dict(done)}")
    return done


def test_random_kills_and_stops_lose_and_repeat_nothing() -> None:
    """P3: acked records are there, once; offsets never change under a reader, batches are whole."""
    case = choose(test=Chaos(seconds=1.5, least=40), all=Chaos())
    least = {"acked": 10 * case.least, "seen": 10 * case.least}
    done = until_enough(lambda seed: chaos(case._replace(seed=seed)), least)
    assert done["kills"] + done["stops"] >= case.least


def test_nothing_is_torn_from_readers_of_what_is_cut_and_deleted() -> None:
    """P20: they finish what they hold, or get OffsetOutOfRangeError; none dies of SIGBUS."""
    opens = choose(test=6_000, all=100_000)

    def run(seed: int) -> dict[str, int]:
        with scratch_directory() as directory:
            done = check_concurrent_deletes(directory, opens, seed)
        tell(f"seed {seed}: {dict(done)}")
        return done

    # On a busy machine fewer of them meet.
    least = dict.fromkeys(("cuts", "deletions", "overtaken", "held"), 10)
    assert until_enough(run, least)["opens"] >= opens


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("seed", range(2, 12))
def test_random_kills_and_stops_for_hours(seed: int) -> None:
    """P3 in full: 10 × 10,000 kills and stops, with 3 to 8 writers."""
    writers = 3 + seed % 6
    done = chaos(Chaos(seconds=300, least=10_000, writers=writers, readers=3, seed=seed))
    assert done["kills"] + done["stops"] >= 10_000


@pytest.mark.tier("nightly")
def test_ten_million_opens_of_what_is_cut_and_deleted() -> None:
    """P20 in full."""
    for seed in range(2, 102):
        with scratch_directory() as directory:
            assert check_concurrent_deletes(directory, 100_000, seed)["opens"] >= 100_000
