"""Offsets of a log translated to those that its records got in Kafka; and addresses of clusters."""

import random

import pytest

import embedlog
from embedlog.errors import InvalidConfigError
from embedlog.mirrors import offset_translation
from embedlog.mirrors.offset_translation import OffsetRun, OffsetSync, OffsetTranslation, runs_of


@pytest.mark.parametrize("seed", range(20))
def test_each_offset_is_translated_to_that_of_the_next_record(seed):
    """Whatever gaps the source has, and however many markers Kafka has put between."""
    dice = random.Random(seed)
    translation, target, source, expected = OffsetTranslation(), dice.randrange(9), 0, []
    for _ in range(dice.randrange(1, 30)):
        start, records, runs = source, [], []
        for _ in range(dice.randrange(4)):
            source += dice.choice([0, 0, 1, 7])
            batch = []
            for _ in range(dice.randrange(1, 9)):
                source += dice.choice([0, 0, 0, 2])
                batch.append(source)
                source += 1
            runs += runs_of(batch, target)
            records += [(offset, target + row) for row, offset in enumerate(batch)]
            target += len(batch)
        if records:
            for part in OffsetSync(start, runs).parts():
                translation.add(OffsetSync.unpack(part.pack()))
            expected += records
            target += dice.choice([1, 2, 50])
        else:
            source = start
    for offset in range(source + 1):
        following = [to for at, to in expected if at >= offset]
        end = expected[-1][1] + 1 if expected else None
        assert translation.translate(offset) == (following[0] if following else end)


def test_what_is_unknown_is_not_guessed():
    """Before the first transaction that is known, and in one that is lost."""
    translation = OffsetTranslation()
    assert translation.translate(0) is None
    translation.add(OffsetSync(10, [OffsetRun(10, 100, 5)]))
    translation.add(OffsetSync(30, [OffsetRun(30, 200, 5)]))

    assert [translation.translate(offset) for offset in (9, 10, 14, 15, 29)] == [
        *(None, 100, 104),
        *(None, None),
    ]
    assert [translation.translate(offset) for offset in (30, 34, 35, 99)] == [200, 204, 205, 205]


def test_a_copy_that_is_made_again_replaces_what_was_known():
    """From the offset on at which it begins."""
    translation = OffsetTranslation()
    translation.add(OffsetSync(0, [OffsetRun(0, 0, 10), OffsetRun(20, 11, 10)]))
    translation.add(OffsetSync(20, [OffsetRun(20, 500, 3)]))

    assert [translation.translate(offset) for offset in (9, 20, 23)] == [9, 500, 503]


def test_a_sync_of_many_runs_is_sent_in_parts(monkeypatch):
    """A message has a limit."""
    monkeypatch.setattr(offset_translation, "MOST_RUNS", 3)
    sync = OffsetSync(1, [OffsetRun(2 * number, number, 1) for number in range(1, 9)])
    parts = list(sync.parts())

    assert [len(part.runs) for part in parts] == [3, 3, 2]
    assert [part.start for part in parts] == [1, 7, 13]
    assert list(OffsetSync(5, []).parts()) == [OffsetSync(5, [])]
    assert OffsetSync.unpack(b"\x02" + OffsetSync(5, []).pack()[1:]) is None


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("kafka://", "must be kafka://HOST:PORT"),
        ("kafka://h:1/topic", "must be kafka://HOST:PORT"),
        ("kafka://h:1?exactly.once=maybe", "exactly.once must be true or false"),
        ("kafka://h:1?sasl.password=${NO_SUCH_VARIABLE}", "no variable 'NO_SUCH_VARIABLE'"),
        ("kafka://h:1?no.such.setting=1", "No such configuration property"),
    ],
)
def test_an_address_that_is_not_valid_is_refused(tmp_path, address, message):
    """Before anything is asked of a cluster."""
    pytest.importorskip("confluent_kafka")
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        for ends in ((address, log), (log, address)):
            with pytest.raises(InvalidConfigError, match=message):
                embedlog.mirror(*ends)
