"""Each recipe of the cookbook runs by itself and prints what the page says."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import re
from pathlib import Path
from time import monotonic, sleep

import pytest
from support.children import run_python
from support.patience import patient
from support.tiers import sample

from embedlog.errors import OutOfOrderSequenceError
from embedlog.testing import DiskFaults, open_log

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.tier("test")

PAGE = Path(__file__).parent.parent / "docs" / "cookbook.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
FORKS = "ignore:This process:DeprecationWarning"
RECIPES = {
    section.partition("\n")[0]: BLOCK.findall(section) for section in TEXT.split("\n## ")[1:]
}
ELSEWHERE = {"Edge buffer in front of Kafka", "Tests without a container"}
"""The first needs a broker (tests/kafka), the second pytest (below)."""


@pytest.mark.parametrize("title", sample(sorted(RECIPES.keys() - ELSEWHERE), 4))
def test_the_recipe_prints_what_it_says(title, tmp_path):
    """In an empty directory, in a new process, with no warning."""
    (_, code), (_, expected) = RECIPES[title]

    assert run_python("-W", "error", "-W", FORKS, "-c", code, cwd=tmp_path) == expected


def test_the_table_has_all_recipes():
    """In their order."""
    table = TEXT.partition("\n## ")[0]

    assert re.findall(r"\]\(#([\w-]+)\)", table) == [
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in RECIPES
    ]


@pytest.mark.tier("all")
def test_the_tests_without_a_container_pass(pytester):
    """In a directory of their own, as pytest runs them."""
    pytest.importorskip("kafka")
    (_, conftest), (_, tests), (_, expected) = RECIPES["Tests without a container"]
    pytester.makeconftest(conftest)
    pytester.makepyfile(test_service=tests)

    result = pytester.runpytest_subprocess("-q")

    result.stdout.fnmatch_lines([f"{expected.strip()} in *"])


def test_the_logging_handler_drops_while_the_disk_is_full(tmp_path):
    """No call waits for the disk, and each record is in the log, in order, or was counted."""
    (_, code), _ = RECIPES["Application logs that never block"]
    recipe: dict = {}
    exec(code.partition("\nlog = ")[0], recipe)
    faults, waiting = DiskFaults(), queue.Queue(100)
    handler, logger = recipe["NeverBlocks"](waiting), logging.Logger("shop")
    logger.addHandler(handler)

    with open_log(tmp_path / "log", faults=faults) as log:
        writer = recipe["ToLog"](log, "app-logs")
        listener = logging.handlers.QueueListener(waiting, writer)
        listener.start()
        with faults.full_disk():
            # More than the queue and the memory of the producer hold.
            for number in range(3000):
                logger.warning("%d %s", number, "x" * 5000)
        deadline = monotonic() + patient(30)
        while waiting.full():
            assert monotonic() < deadline, "the listener takes nothing"
            sleep(0.01)
        listener.stop()
        writer.close()
        numbers = [int(record.value["text"].split()[0]) for record in log.topic("app-logs")]

    assert handler.dropped > 0
    assert writer.failed == 0
    assert len(numbers) + handler.dropped == 3000
    assert numbers == sorted(set(numbers))


def test_the_logging_handler_counts_what_cannot_be_written(tmp_path, capsys):
    """A record that is too large, and one whose arguments do not fit; the next one is written."""
    (_, code), _ = RECIPES["Application logs that never block"]
    recipe: dict = {}
    exec(code.partition("\nlog = ")[0], recipe)
    logger = logging.Logger("shop")

    with open_log(tmp_path / "log") as log:
        writer = recipe["ToLog"](log, "app-logs")
        logger.addHandler(writer)
        logger.warning("x" * (2 << 20))
        logger.warning("%d pots", "many")
        logger.warning("no more tea")
        writer.close()
        texts = [record.value["text"] for record in log.topic("app-logs")]

    assert texts == ["no more tea"]
    assert writer.failed == 2
    assert "TypeError" in capsys.readouterr().err


def test_the_outbox_stops_at_a_gap_and_goes_on_when_it_is_filled(tmp_path, monkeypatch):
    """What is before the gap is written once, and nothing after it until then."""
    (_, code), _ = RECIPES["Outbox: events of a SQLite transaction"]
    monkeypatch.chdir(tmp_path)
    recipe: dict = {}
    exec(code.partition('\norder("tea")')[0], recipe)
    log, db, order, relay = (recipe[name] for name in ("log", "db", "order", "relay"))
    with log:
        order("tea")
        order("cake")
        with db:
            db.execute("delete from outbox where id = 2")
        order("pie")

        relay()
        with pytest.raises(OutOfOrderSequenceError, match="Sequence 3 where 2 is next"):
            relay()
        with db:
            db.execute("insert into outbox values (2, 'null')")
        relay()
        relay()

        assert [record.value for record in log.topic("events")] == [
            b'{"ordered": "tea"}',
            b"null",
            b'{"ordered": "pie"}',
        ]
        assert db.execute("select count(*) from outbox").fetchone() == (0,)
    db.close()
