"""Loads topics into Parquet: a Spark streaming query that publishes each micro-batch."""

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
from embedlog.listeners import PIPELINE, Client, CopiedRange, Listener
from embedlog.pipeline.parquet_audit import AuditReport, audit
from embedlog.pipeline.parquet_output import HIDDEN, ParquetOutput, count_rows
from embedlog.record import TopicPartition
from embedlog.spark.errors import to_embedlog_error
from embedlog.spark.log_cache import open_existing_log
from embedlog.spark.stream_offset import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from embedlog.api import Log

_logger = logging.getLogger("embedlog.pipeline")

Progress = Callable[[int, int], object]
"""Called with the number of records that are loaded and the total; 0 if that still grows."""

_CODEC = "snappy"
_POLL_SECONDS = 0.2
_MAX_ATTEMPTS, _MACHINE_BUSY = 4, "failed to connect back"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What to load, from where and to where; the arguments of `load`, checked."""

    root: str
    into: str
    topics: tuple[str, ...]
    pattern: str | None
    checkpoint: str | None
    max_records_per_trigger: int
    follow: float | None
    """Seconds between micro-batches; None stops at the records that are there."""
    fail_on_data_loss: bool
    progress: Progress

    def __post_init__(self) -> None:
        if bool(self.topics) == (self.pattern is not None):
            raise InvalidConfigError(
                "Either topics or a pattern must say what to load",
                todo="Pass the names of topics, or a regular expression of names, but not both.",
            )
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise InvalidConfigError(
                    f"The pattern {self.pattern!r} is not a regular expression: {error}"
                ) from error
        most, follow = self.max_records_per_trigger, self.follow
        for wrong, requirement in (
            (most < 1, f"max_records_per_trigger must be at least 1, got {most}"),
            (
                follow is not None and not 0 <= follow < math.inf,
                f"follow must be a number of seconds between micro-batches, got {follow}",
            ),
        ):
            if wrong:
                raise InvalidConfigError(requirement)

    def topic_names(self, log: Log) -> list[str]:
        """Return the topics to load that exist now.

        Raises:
            UnknownTopicOrPartitionError: A topic named in the options does not exist.
        """
        if self.pattern is None:
            return [log.root.topic(name).name for name in self.topics]
        return [name for name in log.topics() if re.fullmatch(self.pattern, name)]

    @property
    def checkpoint_location(self) -> str:
        """The directory of Spark's checkpoint."""
        return os.path.abspath(self.checkpoint or os.path.join(self.into, HIDDEN, "checkpoint"))


def load(
    root: str | os.PathLike[str],
    into: str | os.PathLike[str],
    topics: Iterable[str] = (),
    *,
    pattern: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    max_records_per_trigger: int = 1_000_000,
    follow: float | None = None,
    fail_on_data_loss: bool = True,
    spark: SparkSession | None = None,
    progress: Progress | None = None,
    check: bool = True,
    check_all: bool = False,
) -> AuditReport:
    """Load the new records of topics into Parquet, exactly once, and audit the files.

    Args:
        root: The path of the log.
        into: The directory of the files; one pipeline at a time loads into it.
        topics: The names of the topics.
        pattern: Instead of names, a regular expression of whole names; matching topics that
            are created later are loaded too.
        checkpoint: The directory of Spark's checkpoint; inside the output by default.
        max_records_per_trigger: The most records to publish at once.
        follow: Continue until interrupted, with this many seconds between micro-batches.
        fail_on_data_loss: Whether to stop where records were deleted before they were loaded.
        spark: A session with ``format("embedlog")``; by default one is made.
        progress: Called with the progress.
        check: Whether to compare the files with the log.
        check_all: Whether to compare also unchanged files that an earlier run compared.

    Raises:
        KeyboardInterrupt: On Ctrl-C, once Spark has stopped.  With ``follow``, Ctrl-C and
            SIGTERM end the run normally.  The second Ctrl-C does not wait.
        InvalidConfigError: An argument is invalid.
        SparkSetupError: Java or pyspark is missing.
        NotALogError: There is no log at ``root``.
        LockTimeoutError: Another pipeline loads into the directory.
        DataLossError: Records were deleted before they were loaded, or a topic was deleted
            and created again.
        SparkQueryError: Spark failed for another reason.
    """
    if any("://" in os.fspath(path) for path in (into, checkpoint or "")):
        # Before they become absolute paths, which have no double slash.
        raise InvalidConfigError(
            "The output and the checkpoint must be directories of this machine, not URLs"
        )
    options = LoadOptions(
        root=os.path.abspath(root),
        into=os.path.abspath(into),
        topics=tuple(topics),
        pattern=pattern,
        checkpoint=None if checkpoint is None else os.fspath(checkpoint),
        max_records_per_trigger=max_records_per_trigger,
        follow=follow,
        fail_on_data_loss=fail_on_data_loss,
        progress=progress or (lambda *_: None),
    )
    # Writable if possible: then a lease keeps the records that are read.
    with open_existing_log(options.root, "Check the path of the log.") as log:
        if not options.topic_names(log):
            _logger.warning("No topic of the log matches the pattern %r", pattern)
        with ParquetOutput(options.into) as output:
            with stop_requests(follow is not None) as stop:
                session = _start_session(stop) if spark is None else spark
                if session is not None:
                    try:
                        LoadQuery(options, output, session, log).run(stop)
                    finally:
                        if spark is None:
                            _stop_session(session, stop)
            if stop.is_set() and follow is None:
                raise KeyboardInterrupt
            ends = output.published.ends
            if not check:
                return AuditReport(output.rows, {}, ends)
            known = {} if check_all else output.read_compared()
            report = audit(log, options.into, ends, output.rows, known)
            if not report.problems:
                output.write_compared(report.seen)
            return report


def _start_session(stop: threading.Event) -> Any:
    """Return a new session; None if a stop is requested before it has started."""
    future: Future[Any] = Future()

    def start() -> None:
        try:
            future.set_result(_new_session())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is used
            future.set_exception(error)

    # In the main thread Spark would install its own handler of Ctrl-C, which breaks off calls
    # to the JVM; and the main thread must not block on a session that takes long to start.
    threading.Thread(target=start, name="embedlog-pipeline-spark", daemon=True).start()
    while not wait([future], timeout=_POLL_SECONDS).done:
        if stop.is_set():
            future.add_done_callback(
                lambda _: None if future.exception() else future.result().stop()
            )
            return None
    return future.result()


def _new_session() -> Any:
    from embedlog.spark import session

    conf = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    try:
        spark = session("embedlog.pipeline", conf=conf)
    except EmbedlogError:
        raise
    except Exception as error:
        raise to_embedlog_error(error) from error
    # Later failures are reported as embedlog errors, in one sentence.
    spark.sparkContext.setLogLevel("OFF")
    return spark


def _stop_session(session: Any, stop: threading.Event) -> None:
    try:
        session.stop()
    except Exception:
        # SIGTERM to the process group ends the JVM too, perhaps before this call.
        if not stop.is_set():
            raise


class LoadQuery:
    """The streaming query, and how it publishes each micro-batch."""

    def __init__(self, options: LoadOptions, output: ParquetOutput, spark: Any, log: Log) -> None:
        self._options, self._output, self._spark, self._log = options, output, spark, log
        self._failure: BaseException | None = None
        # Spark stops a query without waiting for the thread that runs `_publish`.
        self._publish_lock, self._stopped = threading.Lock(), False

    def run(self, stop: threading.Event) -> None:
        """Load until everything is loaded, or until a stop is requested.

        Raises:
            EmbedlogError: The cause of a failure, without Spark's pages about it.
        """
        for attempts_left in range(_MAX_ATTEMPTS - 1, -1, -1):
            try:
                self._run(stop)
                break
            except Exception as error:
                if stop.is_set() and self._failure is None:
                    return  # the JVM got the signal as well, and may have ended first
                # On a busy machine Spark's processes may not connect within ten seconds.
                if not (attempts_left and _MACHINE_BUSY in str(error)):
                    raise self._failure or to_embedlog_error(error) from error

    def _run(self, stop: threading.Event) -> None:
        self._report_progress()
        if stop.is_set():
            return
        self._stopped = False
        query = self._start()
        try:
            while not stop.is_set() and not query.awaitTermination(_POLL_SECONDS):
                self._report_progress()
        finally:
            query.stop()
            with self._publish_lock:
                self._stopped = True

    def _start(self) -> Any:
        options = self._options
        subscription = {"subscribe": ",".join(options.topics)}
        if options.pattern is not None:
            subscription = {"subscribePattern": options.pattern}
        stream = self._spark.readStream.format("embedlog").options(
            path=options.root,
            includeHeaders=True,
            failOnDataLoss=options.fail_on_data_loss,
            startingOffsets=self._starting_offsets(),
            maxOffsetsPerTrigger=options.max_records_per_trigger,
            **subscription,
        )
        writer = stream.load().writeStream.foreachBatch(self._publish)
        writer = writer.option("checkpointLocation", options.checkpoint_location)
        writer = writer.queryName("embedlog.pipeline")
        if options.follow is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{options.follow * 1000:.0f} milliseconds").start()

    def _starting_offsets(self) -> str:
        """Return where a query without a checkpoint starts: at the end of what is published."""
        ends, names = self._output.published.ends, self._options.topic_names(self._log)
        if not (ends and names):
            return "earliest"
        offsets: dict[str, dict[int, int]] = {}
        for name in names:
            numbers = range(self._log.root.partitions(name))
            offsets[name] = {n: ends.get(TopicPartition(name, n), -2) for n in numbers}
        return json.dumps(offsets)

    def _publish(self, frame: Any, batch_id: int) -> None:
        """Publish the rows of a micro-batch that are not published yet.

        Spark calls this in another thread and passes on only the text of an error, so the
        error is kept here.
        """
        try:
            stage = self._output.new_stage()
            self._write_files(frame, stage)
            with self._publish_lock:
                if not self._stopped:
                    end = planned_end(self._options.checkpoint_location, batch_id)
                    ends = self._output.published.ends
                    client = Client(PIPELINE, self._options.into)
                    ranges = self._ranges(client, stage, ends, end.offsets)
                    for listener, counted in ranges:
                        if (counted.log.topic, counted.log.partition) not in ends:
                            listener.began(counted.log, counted.first_offset)
                    self._output.publish(stage, end)
                    # If this process dies before, the audit counts up to where the next begins.
                    for listener, counted in ranges:
                        listener.copied(counted)
                    client.close()
        except BaseException as error:
            if isinstance(error, EmbedlogError | OSError):
                self._failure = error
            raise

    def _ranges(
        self,
        client: Client,
        stage: str,
        before: Mapping[TopicPartition, int],
        after: Mapping[TopicPartition, int],
    ) -> list[tuple[Listener, CopiedRange]]:
        """Return the events for listeners: the staged rows, counted by partition and minute."""
        root = self._log.root
        heard = {tp: root.listeners.of(root.topic(tp.topic).config, client) for tp in after}
        topics = {tp.topic for tp, listeners in heard.items() if listeners}
        minutes = count_rows(stage, topics) if topics else {}
        ranges = []
        for tp, listeners in heard.items():
            log = root.partition(*tp)
            first = before.get(tp, log.start_offset())
            counted = CopiedRange(log, first, after[tp], minutes.get(tp, {}))
            ranges += [(listener, counted) for listener in listeners]
        return ranges

    def _write_files(self, frame: Any, stage: str) -> None:
        new_rows = frame.where(unpublished_filter(self._output.published.ends))
        dated = new_rows.selectExpr("*", "date_format(timestamp, 'yyyy-MM-dd') as date")
        # A few files of a good size for each day, rather than one for each task; sorted, so
        # that a reader of one partition or of some offsets skips the rest.
        files = dated.hint("rebalance", "topic", "date")
        in_order = files.sortWithinPartitions("topic", "date", "partition", "offset")
        writer = in_order.write.option("compression", _CODEC).partitionBy("topic", "date")
        # Spark's default, INT96, is deprecated elsewhere and has no statistics.
        self._spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        writer.parquet(stage)

    def _report_progress(self) -> None:
        ends = self._output.published.ends
        if self._options.follow is not None:
            self._options.progress(sum(ends.values()), 0)
            return
        done = total = 0
        for name in self._options.topic_names(self._log):
            for in_log in self._log.topic(name).ranges():
                start, stop = in_log.start, max(in_log.stop, in_log.start)
                end = ends.get(TopicPartition(name, in_log.partition), 0)
                done += max(min(end, stop) - start, 0)
                total += stop - start
        self._options.progress(done, total)


@contextmanager
def stop_requests(follow: bool) -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets; with ``follow``, SIGTERM sets it too.

    Without this, Ctrl-C would break off calls to the JVM.  The second signal raises
    `KeyboardInterrupt` immediately.
    """
    stop = threading.Event()

    def request_stop(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    is_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM)[: 1 + follow] if is_main else ()
    previous = {number: signal.signal(number, request_stop) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def planned_end(checkpoint: str, batch_id: int) -> StreamOffset:
    """Return where a micro-batch ends: Spark writes that down before it runs the batch.

    The file has a line with a version, one about the batch, and one for each source.
    """
    with open(os.path.join(checkpoint, "offsets", str(batch_id)), encoding="utf-8") as file:
        return StreamOffset.from_json(json.loads(file.read().splitlines()[2]))


def unpublished_filter(ends: Mapping[TopicPartition, int]) -> str:
    """Return an SQL condition for the rows that are not published yet.

    >>> unpublished_filter({TopicPartition("t", 0): 7})
    "not (topic = 't' and partition = 0 and offset < 7)"
    """
    conditions = (
        f"not (topic = '{key.topic}' and partition = {key.partition} and offset < {end})"
        for key, end in sorted(ends.items())
    )
    return " and ".join(conditions) or "true"
