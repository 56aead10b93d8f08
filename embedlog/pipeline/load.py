"""Loading: a streaming query of Spark's that hands each micro-batch to the output."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embedlog.errors import EmbedlogError, InvalidConfigError
from embedlog.pipeline.audit import AuditReport, audit
from embedlog.pipeline.parquet_output import HIDDEN, ParquetOutput
from embedlog.record import TopicPartition
from embedlog.spark.errors import typed
from embedlog.spark.source import opened
from embedlog.spark.stream_offset import StreamOffset, from_json

if TYPE_CHECKING:
    from embedlog.api import Log

_logger = logging.getLogger("embedlog")

Progress = Callable[[int, int], object]
"""Told how many records are loaded, and how many there are; 0 if that grows."""

BATCH = 1_000_000
_CODEC = "snappy"
_LOOK_SECONDS = 0.2
_TRIES, _TOO_BUSY = 4, "failed to connect back"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLoader:
    """What is loaded, from where and to where."""

    root: str
    into: str
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    checkpoint: str | None = None
    max_records_per_trigger: int = BATCH
    follow: float | None = None
    """Seconds between micro-batches; None stops at what is there."""

    fail_on_data_loss: bool = True

    def __post_init__(self) -> None:
        if bool(self.topics) == (self.pattern is not None):
            raise InvalidConfigError("say which topics to load: their names, or a pattern")
        if self.pattern is not None:
            _check_pattern(self.pattern)
        if self.max_records_per_trigger < 1:
            raise InvalidConfigError(
                f"max_records_per_trigger is {self.max_records_per_trigger}, and must be at least 1"
            )
        if self.follow is not None and not (self.follow >= 0 and math.isfinite(self.follow)):
            raise InvalidConfigError(f"{self.follow} is no number of seconds between micro-batches")
        if "://" in self.into or "://" in (self.checkpoint or ""):
            raise InvalidConfigError("output and checkpoint are directories of this machine")

    def open(self) -> Log:
        """Open the log to read it, and to hold what is read if it may be written.

        Raises:
            NotALogError: There is none.
        """
        log: Log = opened(self.root)
        return log

    def names(self, log: Log) -> list[str]:
        """Return the topics that there are now."""
        if self.pattern is None:
            return [log.root.topic(name).name for name in self.topics]
        return [name for name in log.topics() if re.fullmatch(self.pattern, name)]

    @property
    def marks(self) -> str:
        """The directory of Spark's checkpoint."""
        return os.path.abspath(self.checkpoint or os.path.join(self.into, HIDDEN, "checkpoint"))


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidConfigError(
            f"the pattern {pattern!r} is no regular expression: {error}"
        ) from error


def load(
    root: str | os.PathLike[str],
    into: str | os.PathLike[str],
    topics: Iterable[str] = (),
    *,
    pattern: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    max_records_per_trigger: int = BATCH,
    follow: float | None = None,
    fail_on_data_loss: bool = True,
    spark: Any = None,
    progress: Progress | None = None,
    check: bool = True,
    check_all: bool = False,
) -> AuditReport:
    """Load what is new in topics into Parquet, exactly once, and audit it.

    Args:
        root: The log.
        into: The directory of the files; one pipeline at a time loads into it.
        topics: Their names.
        pattern: Or a regular expression of whole names; topics that come later are loaded too.
        checkpoint: Where Spark keeps how far it is; in the output unless given.
        max_records_per_trigger: At most so many records are published at once.
        follow: Go on until interrupted, with so many seconds between micro-batches.
        fail_on_data_loss: Stop where records were deleted before they were loaded; else go on.
        spark: A session with ``format("embedlog")``; one is made unless given.
        progress: Is told how far it is.
        check: Compare what is in the files with the log; else only load.
        check_all: Read also those files for it that an earlier run compared, and that are
            as they were then.

    Raises:
        KeyboardInterrupt: On Ctrl-C, once Spark has stopped; if it follows, that (or SIGTERM)
            ends it as it should.  A second one does not wait.
        InvalidConfigError: An argument is wrong.
        SparkSetupError: Java or pyspark is missing.
        LockTimeoutError: Another pipeline loads into the directory.
        DataLossError: Records were deleted before they were loaded, or a topic was made anew.
        SparkQueryError: Spark failed for another reason.
    """
    loading = TopicLoader(
        root=os.path.abspath(root),
        into=os.path.abspath(into),
        topics=tuple(topics),
        pattern=pattern,
        checkpoint=None if checkpoint is None else os.fspath(checkpoint),
        max_records_per_trigger=max_records_per_trigger,
        follow=follow,
        fail_on_data_loss=fail_on_data_loss,
    )
    with loading.open() as log:
        if not loading.names(log):
            _logger.warning("no topic of the log has a name like the pattern %r", pattern)
        with ParquetOutput(loading.into) as output:
            _load(loading, output, log, spark, progress or _silent)
            ends = output.published.ends
            if not check:
                return AuditReport(output.rows, {}, ends)
            report = audit(
                log, loading.into, ends, output.rows, {} if check_all else output.compared()
            )
            if not report.problems:
                output.note_compared(report.seen)
            return report


def _load(
    loading: TopicLoader, output: ParquetOutput, log: Log, spark: Any, progress: Progress
) -> None:
    with asked_to_stop(loading.follow is not None) as asked:
        session = _session(asked) if spark is None else spark
        if session is not None:
            try:
                LoadQuery(loading, output, session, log, progress).run(asked)
            finally:
                if spark is None:
                    _stop(session, asked)
    if asked.is_set() and loading.follow is None:
        raise KeyboardInterrupt


def _silent(_done: int, _total: int) -> None:
    pass


def _session(asked: threading.Event) -> Any:
    """Return a session; None if asked to stop before there is one."""
    made: Future[Any] = Future()

    def begin() -> None:
        try:
            made.set_result(_begin())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            made.set_exception(error)

    # In the main thread Spark would take Ctrl-C for itself, and break off what is said to it;
    # and there nobody could do without a session that is not there yet.
    threading.Thread(target=begin, name="embedlog-pipeline-spark", daemon=True).start()
    while not wait([made], timeout=_LOOK_SECONDS).done:
        if asked.is_set():
            made.add_done_callback(lambda _: None if made.exception() else made.result().stop())
            return None
    return made.result()


def _begin() -> Any:
    from embedlog.spark import session

    conf = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    try:
        made = session("embedlog.pipeline", conf=conf)
    except EmbedlogError:
        raise
    except Exception as error:
        raise typed(error) from error
    # What goes wrong later is told as an error of ours, in a sentence.
    made.sparkContext.setLogLevel("OFF")
    return made


def _stop(session: Any, asked: threading.Event) -> None:
    try:
        session.stop()
    except Exception:
        # SIGTERM to a group of processes ends Java as well.
        if not asked.is_set():
            raise


class LoadQuery:
    """The streaming query, and what it does with each micro-batch."""

    def __init__(
        self, loading: TopicLoader, output: ParquetOutput, spark: Any, log: Log, progress: Progress
    ) -> None:
        self._loading, self._output, self._spark = loading, output, spark
        self._log, self._progress = log, progress
        self._failure: BaseException | None = None
        # Spark does not wait for the thread that publishes when a query is stopped.
        self._publishing, self._over = threading.Lock(), False

    def run(self, asked: threading.Event) -> None:
        """Load until there is nothing more, or until asked to stop.

        Raises:
            EmbedlogError: What went wrong, without the pages that Spark says about it.
        """
        for left in range(_TRIES - 1, -1, -1):
            try:
                self._run(asked)
                break
            except Exception as error:
                if asked.is_set() and self._failure is None:
                    return  # Java was told to end as well, and may be quicker
                # The processes of Spark find each other within ten seconds, or not at all.
                if not (left and _TOO_BUSY in str(error)):
                    raise self._failure or typed(error) from error

    def _run(self, asked: threading.Event) -> None:
        self._tell()
        if asked.is_set():
            return
        self._over = False
        query = self._start()
        try:
            while not asked.is_set() and not query.awaitTermination(_LOOK_SECONDS):
                self._tell()
        finally:
            query.stop()
            with self._publishing:
                self._over = True

    def _start(self) -> Any:
        loading, follow = self._loading, self._loading.follow
        stream = self._spark.readStream.format("embedlog").options(**self._options()).load()
        writer = stream.writeStream.foreachBatch(self._publish)
        writer = writer.option("checkpointLocation", loading.marks).queryName("embedlog.pipeline")
        if follow is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{follow * 1000:.0f} milliseconds").start()

    def _options(self) -> dict[str, str]:
        loading = self._loading
        which = (
            {"subscribe": ",".join(loading.topics)}
            if loading.pattern is None
            else {"subscribePattern": loading.pattern}
        )
        return {
            "path": loading.root,
            "includeHeaders": "true",
            "failOnDataLoss": str(loading.fail_on_data_loss).lower(),
            "startingOffsets": self._starting(),
            "maxOffsetsPerTrigger": str(loading.max_records_per_trigger),
            **which,
        }

    def _starting(self) -> str:
        """Return where a query begins that has no checkpoint: at the end of what is published."""
        ends, names = self._output.published.ends, self._loading.names(self._log)
        if not (ends and names):
            return "earliest"
        return json.dumps(
            {
                name: {str(part): ends.get(TopicPartition(name, part), -2) for part in range(count)}
                for name in names
                for count in [self._log.root.partitions(name)]
            }
        )

    def _publish(self, frame: Any, number: int) -> None:
        """Publish one micro-batch; what is published already, as of one that is repeated, is not.

        Spark calls this in a thread of its own and tells of an error in text only, so it is kept.
        """
        try:
            stage = self._output.stage()
            self._write(frame, stage)
            with self._publishing:
                if not self._over:
                    self._output.publish(stage, planned(self._loading.marks, number))
        except BaseException as error:
            if isinstance(error, EmbedlogError | OSError):
                self._failure = error
            raise

    def _write(self, frame: Any, stage: str) -> None:
        fresh = frame.where(unpublished(self._output.published.ends))
        dated = fresh.selectExpr("*", "date_format(timestamp, 'yyyy-MM-dd') as date")
        # A few files of a good size for each day, rather than one of each task; sorted, so
        # that a reader of one partition or of some offsets skips the rest.
        sorted_ = dated.hint("rebalance", "topic", "date").sortWithinPartitions(
            "topic", "date", "partition", "offset"
        )
        writer = sorted_.write.option("compression", _CODEC).partitionBy("topic", "date")
        # Spark's default is a type of 96 bits, which others deprecate and have no statistics of.
        self._spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        writer.parquet(stage)

    def _tell(self) -> None:
        ends = self._output.published.ends
        if self._loading.follow is not None:
            self._progress(sum(ends.values()), 0)
            return
        parts = [
            (one.start, max(one.stop, one.start), ends.get(TopicPartition(name, one.partition), 0))
            for name in self._loading.names(self._log)
            for one in self._log.topic(name).ranges()
        ]
        done = sum(max(min(end, stop) - start, 0) for start, stop, end in parts)
        self._progress(done, sum(stop - start for start, stop, _ in parts))


@contextmanager
def asked_to_stop(follows: bool) -> Iterator[threading.Event]:
    """Set an event on Ctrl-C, which else breaks off what is being said to Spark.

    On SIGTERM too if it follows.  Who asks a second time does not want to wait.
    """
    asked = threading.Event()

    def ask(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    main = threading.current_thread() is threading.main_thread()
    kinds = (signal.SIGINT, signal.SIGTERM)[: 1 + follows] if main else ()
    before = {kind: signal.signal(kind, ask) for kind in kinds}
    try:
        yield asked
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def planned(checkpoint: str, number: int) -> StreamOffset:
    """Return where a micro-batch ends: Spark writes its plan down before the batch is run.

    The file has a version, a line about the batch, and a line for each source.
    """
    with open(os.path.join(checkpoint, "offsets", str(number)), encoding="utf-8") as file:
        return from_json(json.loads(file.read().splitlines()[2]))


def unpublished(ends: Mapping[TopicPartition, int]) -> str:
    """Return SQL for the rows that are not published yet.

    >>> unpublished({TopicPartition("t", 0): 7})
    "not (topic = 't' and partition = 0 and offset < 7)"
    """
    each = (
        f"not (topic = '{one.topic}' and partition = {one.partition} and offset < {end})"
        for one, end in sorted(ends.items())
    )
    return " and ".join(each) or "true"
