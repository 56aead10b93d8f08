"""Takes the picture of a report: `python docs/pictures/report.py` writes report.png beside this file.

embedlog must be importable, and Chromium on the path.
The log is made for it: six hours of an audited topic of which one group is stopped for a while, a
compacted topic, and one with a lease.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
from pathlib import Path

import embedlog
from embedlog.audit.reporter import reporter_of
from embedlog.record import TopicPartition

HERE = Path(__file__).parent
NOON = 1_767_268_800_000
STEP_MS = 5 * 60_000
GROUP = {"enable_auto_commit": False, "auto_offset_reset": "earliest"}


class Clock:
    """Milliseconds since 1970, which the program moves."""

    now = NOON

    def __call__(self) -> int:
        """Return the time."""
        return self.now


def fill(log: embedlog.Log, clock: Clock) -> None:
    """Write for six hours; the group `billing` reads nothing in the middle of them."""
    audited = {"segment.bytes": 60_000, "audit": True, "retention.min.consumed": "billing"}
    log.create_topic("orders", partitions=2, config=audited)
    log.create_topic("customers", config={"segment.bytes": 30_000, "cleanup.policy": "compact"})
    log.create_topic("clicks", config={"segment.bytes": 100_000, "retention.ms": 3_600_000})
    numbers = random.Random(4)
    with log.producer() as producer, log.consumer("orders", group_id="billing", **GROUP) as billing:
        for step in range(72):
            clock.now += STEP_MS
            for number in range(numbers.randint(100, 400)):
                key, value = b"%d" % numbers.randint(0, 200), numbers.randbytes(60)
                producer.send("orders", value, key=key)
                producer.send("clicks", value)
                if number % 3 == 0:
                    producer.send("customers", value[:40], key=key)
            producer.flush()
            if not 20 < step < 45:
                billing.poll(timeout_ms=0, max_records=420)
                billing.commit()
            reporter_of(log.root).report_all()
            if step % 6 == 0:
                log.housekeeping.run()
            if step == 60:
                log.housekeeping.compact("customers", force=True)
        end = log.partition("clicks", 0).end_offset()
        log.housekeeping.hold("nightly export", {TopicPartition("clicks", 0): end - 900})
        page = log.report().replace(log.path, "/data/shop")
    Path(log.path, "report.html").write_text(page, encoding="utf-8")


def main() -> None:
    """Make the log, and take the picture."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "shop")
        with embedlog.open(path, maintenance=False, clock=clock) as log:
            fill(log, clock)
        options = ("--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=900,1450")
        picture = f"--screenshot={HERE / 'report.png'}"
        subprocess.run(["chromium", *options, picture, path / "report.html"], check=True)


if __name__ == "__main__":
    main()
