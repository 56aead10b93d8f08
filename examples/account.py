"""An account whose events are all of its state, and eight processes that use it at once.

    python examples/account.py [--path DIRECTORY] [--writers 8] [--events 40]

Each process reads the events of the account, decides whether a withdrawal is covered, and appends
its event on the condition that it has read the last one (`expected_key_offset`).  If another
process was faster, nothing is written: it reads the new events, and decides anew.  So no withdrawal
is decided by a balance that is out of date, without any lock around the decision.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import embedlog
from embedlog.errors import ConflictError

TOPIC, ACCOUNT = "account-events", "ann"


class Account(NamedTuple):
    """An account, as of one of its events."""

    balance: int = 0
    last_offset: int | None = None
    """Of the event; None if there is none."""


def read(log: embedlog.Log) -> Account:
    """Rebuild the account from its events."""
    account = Account()
    for event in log.topic(TOPIC).records_of(ACCOUNT):
        account = Account(account.balance + event.value["amount"], event.offset)
        assert account.balance >= 0, f"overdrawn by the event at offset {event.offset}"
    return account


def use(path: str, seed: int, events: int) -> tuple[int, int]:
    """Deposit and withdraw; return the sum of what this process did, and how often it was late."""
    dice, total, conflicts = random.Random(seed), 0, 0
    with embedlog.open(path) as log, log.producer() as producer:
        for _ in range(events):
            amount = dice.choice([20, 5, -10, -15])
            while True:
                account = read(log)
                if account.balance + amount < 0:
                    break  # it is not covered
                event = {"amount": amount, "by": seed}
                try:
                    producer.send(
                        TOPIC, event, ACCOUNT, expected_key_offset=account.last_offset
                    ).result()
                    total += amount
                    break
                except ConflictError:
                    conflicts += 1
    return total, conflicts


def main(path: str, writers: int, events: int) -> None:
    """Let the processes run, and compare what they did with the events."""
    with embedlog.open(path) as log:
        config = {"key.index.enable": True, "retention.ms": -1}
        log.create_topic(TOPIC, key="str", value="json", config=config)
        with multiprocessing.get_context("spawn").Pool(writers) as pool:
            results = pool.starmap(use, [(path, seed, events) for seed in range(writers)])
        account = read(log)
        total, conflicts = map(sum, zip(*results, strict=True))
        print(f"{writers} processes appended {len(log.topic(TOPIC))} events,")
        print(f"and were too late {conflicts} times, after which they decided anew.")
        assert account.balance == total
        print(
            f"The balance of the events is {account.balance}, and by the processes it is {total}."
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, help="an empty directory; a temporary one by default")
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--events", type=int, default=40, help="how many each process tries")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(str(arguments.path or temporary), arguments.writers, arguments.events)
