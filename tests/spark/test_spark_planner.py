"""The planner process and what Spark's driver asks it: a real process, without Spark."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.sql.types import IntegerType, LongType, StructField, StructType
from support.children import run_python
from support.patience import patient
from support.spark_reads import read_all, values_of

import embedlog
from embedlog import errors
from embedlog.errors import (
    CorruptionError,
    EmbedlogError,
    IllegalStateError,
    InvalidConfigError,
    SparkSetupError,
)
from embedlog.spark.log_cache import LogCache
from embedlog.spark.plan import LogInputPartition
from embedlog.splits.slices import FileChunk, PartitionSlice
from embedlog.version import __version__


class PlannerProgram:
    """A planner in a process of its own, and the driver's end of the pipes to it."""

    def __init__(self, stderr):
        self._stderr = stderr
        command = [sys.executable, "-m", "embedlog.spark.planner"]
        with stderr.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file
            )
        self._deadline = threading.Timer(patient(60), self.process.kill)
        self._deadline.start()
        self._answers = {}
        self._last_id = 0
        self.version = self.read()["version"]

    def write(self, data):
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def send(self, method, **params):
        """Make a request, and return its id."""
        self._last_id += 1
        request = {"id": self._last_id, "method": method, "params": params}
        self.write(json.dumps(request).encode() + b"\n")
        return self._last_id

    def read(self):
        """Return the next line of the answers; a blank one is none, for the driver as well."""
        while (line := self.process.stdout.readline()) == b"\n":
            pass
        assert line.endswith(b"\n"), f"the planner ended: {self.errors()}"
        return json.loads(line)

    def receive(self, request):
        """Return the result of a request, or raise its error; the others may be answered first."""
        while request not in self._answers:
            answer = self.read()
            self._answers[answer["id"]] = answer
        answer = self._answers.pop(request)
        if "error" in answer:
            raise getattr(errors, answer["error"]["type"])(answer["error"]["message"])
        return answer["result"]

    def call(self, method, **params):
        return self.receive(self.send(method, **params))

    def errors(self):
        return self._stderr.read_text()

    def end(self):
        """Close its stdin, and return the rest of its answers and its exit code."""
        self.process.stdin.close()
        rest = [json.loads(line) for line in self.process.stdout]
        return rest, self.process.wait()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._deadline.cancel()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start_planner(tmp_path):
    programs = []

    def start_planner():
        programs.append(PlannerProgram(tmp_path / f"stderr-{len(programs)}"))
        return programs[-1]

    yield start_planner
    for program in programs:
        program.kill()


@pytest.fixture
def planner(start_planner):
    return start_planner()


def values_in(plan):
    """Return the values of all records of a plan, read as an executor does."""
    tasks = []
    for task in plan["tasks"]:
        slices = []
        for topic, partition, start, until, epoch, size, _, chunks, _ in task:
            files = tuple(FileChunk(*chunk) for chunk in chunks)
            slices.append(PartitionSlice(topic, partition, start, until, epoch, files, size))
        tasks.append(LogInputPartition(plan["root"], tuple(slices)))
    return values_of(read_all(tasks))


def test_the_first_line_tells_the_version(planner):
    """The driver compares it with the version of its jar."""
    assert planner.version == __version__


def test_the_options_of_a_reader_are_checked_without_a_log(planner):
    options = {"path": "/no/log", "SUBSCRIBE": "flights, delays", "kafka.client.id": "me"}
    answer = planner.call("check_reader", options=options)

    columns = [(field["name"], field["type"]) for field in json.loads(answer["schema"])["fields"]]
    assert columns[:3] == [("key", "binary"), ("value", "binary"), ("topic", "string")]
    assert "headers" not in dict(columns)
    assert answer["topics"] == "flights,delays"
    assert "kafka.client.id" in planner.errors()

    asked = StructType([StructField("offset", LongType())]).json()
    assert planner.call("check_reader", options=options, schema=asked)["schema"] == asked
    with pytest.raises(InvalidConfigError, match="no column offset of type int"):
        asked = StructType([StructField("offset", IntegerType())]).json()
        planner.call("check_reader", options=options, schema=asked)
    with pytest.raises(InvalidConfigError, match="Did you mean 'subscribe'"):
        planner.call("check_reader", options=options | {"subscribes": "x"})


def test_a_batch_warns_of_options_for_streams(planner, options, send):
    send("t", {0: [1]})
    planner.call("plan_batch", options=options(maxOffsetsPerTrigger=5))
    assert "'maxOffsetsPerTrigger' is for streams" in planner.errors()


def test_requests_of_many_threads_at_once(planner, options, send):
    """Each gets its own answer, and those of a stream come in the order of its requests."""
    send("t", {0: range(5)})
    reader = options(startingOffsets="earliest")
    streams = [planner.call("open_stream", options=reader)["stream"] for _ in range(4)]
    requests = []
    for number in range(60):
        if number % 5 == 4:
            requests.append((None, planner.send("plan_batch", options=options())))
        else:
            stream = streams[number % 5]
            requests.append((stream, planner.send("initial_offset", stream=stream)))
    answers = [planner.read() for _ in requests]

    results = {answer["id"]: answer["result"] for answer in answers}
    assert len(results) == 60
    for stream, request in requests:
        if stream is None:
            assert values_in(results[request]) == list(range(5))
        else:
            assert results[request]["t"] == {"0": 0, "1": 0}
    for stream in streams:
        expected = [request for number, request in requests if number == stream]
        assert [answer["id"] for answer in answers if answer["id"] in expected] == expected


def test_a_request_that_waits_does_not_delay_the_others(planner, log, options, send):
    """Another process holds the lock that leases need."""
    send("t", {0: [1]})
    streams = [planner.call("open_stream", options=options())["stream"] for _ in range(2)]
    # To open a log takes the lock, too.
    planner.call("report_latest_offset", stream=streams[0])
    planner.call("report_latest_offset", stream=streams[1])
    locked, unlock = threading.Event(), threading.Event()

    def hold_lock(txn):
        locked.set()
        assert unlock.wait(patient(30))

    with ThreadPoolExecutor(1) as thread:
        holding = thread.submit(log.root.context.live.write, hold_lock)
        assert locked.wait(patient(30))
        try:
            waiting = [planner.send("plan_batch", options=options())]
            waiting += [planner.send("initial_offset", stream=streams[0])]
            report = planner.call("report_latest_offset", stream=streams[1])
        finally:
            unlock.set()
        holding.result()
    assert report["t"] == {"0": 1, "1": 0}
    assert values_in(planner.receive(waiting[0])) == [1]
    assert planner.receive(waiting[1])["t"] == {"0": 1, "1": 0}


def test_the_end_of_stdin_ends_it(planner, log, options, send):
    """It answers what was asked before, and releases the leases of its streams."""
    send("t", {0: [1]})
    stream = planner.call("open_stream", options=options())["stream"]
    planner.call("initial_offset", stream=stream)
    assert len(log.housekeeping.leases()) == 1
    request = planner.send("report_latest_offset", stream=stream)
    planner.write(b'{"id": 99, "method": "close_st')
    rest, code = planner.end()

    assert [answer["id"] for answer in rest] == [request]
    assert code == 0
    assert log.housekeeping.leases() == []
    assert planner.errors() == ""


def test_ctrl_c_is_left_to_the_driver(planner, options, send):
    send("t", {0: [1]})
    stream = planner.call("open_stream", options=options(startingOffsets="earliest"))["stream"]
    for _ in range(3):
        planner.process.send_signal(signal.SIGINT)
        assert planner.call("initial_offset", stream=stream)["t"] == {"0": 0, "1": 0}
    assert planner.end() == ([], 0)
    assert planner.errors() == ""


@pytest.mark.tier("all")  # it waits for five seconds
def test_a_terminated_planner_leaves_its_leases_to_the_next(planner, log, options, send):
    """The driver goes on, and with it the query, whose records must not be deleted meanwhile."""
    send("t", {0: [1]})
    planner.call("initial_offset", stream=planner.call("open_stream", options=options())["stream"])
    planner.process.terminate()
    assert planner.process.wait(patient(30)) == 1
    assert len(log.housekeeping.leases()) == 1
    assert "without releasing leases" in planner.errors()


def test_a_planner_that_is_terminated_with_its_driver_releases_its_leases(
    planner, log, options, send
):
    """As if someone ends a program and all that it has started."""
    send("t", {0: [1]})
    stream = planner.call("open_stream", options=options())["stream"]
    planner.call("initial_offset", stream=stream)
    planner.process.terminate()
    # It serves until then, and the driver is ending the query.
    assert planner.call("initial_offset", stream=stream)["t"] == {"0": 1, "1": 0}
    assert planner.end() == ([], 0)
    assert log.housekeeping.leases() == []


def test_a_ping_is_answered_while_all_else_waits(planner, log, options, send):
    """The driver kills a planner that does not answer it."""
    send("t", {0: [1]})
    stream = planner.call("open_stream", options=options())["stream"]
    planner.call("report_latest_offset", stream=stream)
    locked, unlock = threading.Event(), threading.Event()

    def hold_lock(txn):
        locked.set()
        assert unlock.wait(patient(30))

    with ThreadPoolExecutor(1) as thread:
        holding = thread.submit(log.root.context.live.write, hold_lock)
        assert locked.wait(patient(30))
        try:
            waiting = planner.send("initial_offset", stream=stream)
            assert planner.call("ping") is None
        finally:
            unlock.set()
        holding.result()
    assert planner.receive(waiting)["t"] == {"0": 1, "1": 0}


def test_a_session_of_many_batches_has_one_lease_until_it_ends(planner, log, options, send):
    send("t", {0: range(3), 1: range(3)})
    for _ in range(100):
        planner.call("plan_batch", options=options())
    # Two if its time has come.
    assert 1 <= len(log.housekeeping.leases()) <= 2
    assert planner.end() == ([], 0)
    assert log.housekeeping.leases() == []


def test_a_driver_that_is_gone_ends_it(planner, options, send):
    """Nothing reads its answers any more."""
    send("t", {0: [1]})
    planner.process.stdout.close()
    planner.send("plan_batch", options=options())
    planner.process.stdin.close()
    assert planner.process.wait(patient(30)) == 0
    assert planner.errors() == ""


BAD_LINES = {
    "no JSON": b"plan something",
    "no object": b"[1]",
    "no id": b'{"method": "plan_batch"}',
    "no method": b'{"id": 1}',
    "a method that is no text": b'{"id": 1, "method": ["plan_batch"]}',
    "params that are no object": b'{"id": 1, "method": "plan_batch", "params": [1]}',
    "bytes that are no UTF-8": b'{"id": 1, "method": "\xff"}',
}


def test_a_line_that_is_no_request_gets_an_error(planner):
    for line in BAD_LINES.values():
        planner.write(line + b"\n")
        with pytest.raises(SparkSetupError, match=r"is not a request.*same version of embedlog"):
            planner.receive(None)
        answer = planner.call("check_reader", options={"path": "/x", "subscribe": "t"})
        assert answer["topics"] == "t", line


BAD_REQUESTS = {
    "an unknown method": ("no_method", {}),
    "a method that is none of a driver's": ("close", {}),
    "an unknown parameter": ("commit", {"stream": 1, "end": {}, "now": True}),
    "a missing parameter": ("latest_offset", {"stream": 1}),
}


def test_a_request_of_another_version_gets_an_error(planner):
    for method, params in BAD_REQUESTS.values():
        with pytest.raises(SparkSetupError, match="same version of embedlog"):
            planner.call(method, **params)
        answer = planner.call("check_reader", options={"path": "/x", "subscribe": "t"})
        assert answer["topics"] == "t", method


def test_a_stream_that_is_not_open(planner):
    for stream in (0, 17, "1", None, [1], True):
        with pytest.raises(IllegalStateError, match="no open stream"):
            planner.call("initial_offset", stream=stream)


def test_a_checkpoint_of_another_source(planner, options):
    for offset in ({"logOffset": 3}, 3, {"t": {"x": 1}}, {"t": {"0": None}}, None):
        stream = planner.call("open_stream", options=options())["stream"]
        requests = [
            planner.send("latest_offset", stream=stream, start=offset, limited=True),
            planner.send("plan_micro_batch", stream=stream, start={}, end=offset),
            planner.send("commit", stream=stream, end=offset),
            planner.send("open_stream", options=options(), state={"initial": offset or 1}),
        ]
        for request in requests:
            with pytest.raises(InvalidConfigError, match="not a position in a log"):
                planner.receive(request)


def test_an_unexpected_exception_is_an_error_with_a_traceback_on_stderr(planner, options):
    with pytest.raises(EmbedlogError, match="The planner failed in check_reader: AttributeError"):
        planner.call("check_reader", options=[])
    assert "Traceback" in planner.errors()
    assert planner.call("check_reader", options=options())["topics"] == "t"


def test_a_damaged_log_is_an_error_of_its_own_queries(planner, log, options, send, tmp_path):
    send("t", {0: [1]})
    with embedlog.open(tmp_path / "damaged", maintenance=False) as damaged:
        damaged.create_topic("t")
    for copy in ("state", "state.copy"):
        database = tmp_path / "damaged" / copy / "data.mdb"
        database.write_bytes(b"\xff" * database.stat().st_size)

    with pytest.raises(CorruptionError):
        planner.call("plan_batch", options=options() | {"path": str(tmp_path / "damaged")})
    assert values_in(planner.call("plan_batch", options=options())) == [1]


def test_it_needs_no_pyspark():
    """To import that takes longer than to plan most queries."""
    program = "import embedlog.spark.query_planner, sys; print('pyspark' in sys.modules)"
    assert run_python("-c", program) == "False\n"


def test_queries_share_a_log_that_stays_open(log):
    cache = LogCache()
    first, second = cache.acquire(log.path), cache.acquire(log.path)
    assert first is second
    cache.release(first)
    cache.release(second)
    assert cache.acquire(log.path) is first
    assert not first.root.closed
    cache.close()
    assert first.root.closed


def test_a_replaced_log_stays_open_for_its_queries(tmp_path):
    path = str(tmp_path / "log")
    cache = LogCache()
    embedlog.open(path, maintenance=False).close()
    replaced = cache.acquire(path)
    os.rename(path, path + "-old")
    embedlog.open(path, maintenance=False).close()

    assert cache.acquire(path) is not replaced
    assert not replaced.root.closed
    cache.release(replaced)
    assert replaced.root.closed
    cache.close()


def test_few_unused_logs_stay_open(tmp_path):
    cache = LogCache(max_idle=2)
    logs = []
    for name in "abcd":
        embedlog.open(tmp_path / name, maintenance=False).close()
        logs.append(cache.acquire(str(tmp_path / name)))
    assert cache.acquire(logs[1].path) is logs[1]
    for log in logs:
        cache.release(log)

    # The first was used longest ago; the second is still in use.
    assert [log.root.closed for log in logs] == [True, False, False, False]
    cache.release(logs[1])
    assert [log.root.closed for log in logs] == [True, False, True, False]
    cache.close()


def test_threads_that_open_a_log_at_once_share_it(log):
    cache = LogCache()
    with ThreadPoolExecutor(8) as threads:
        logs = list(threads.map(cache.acquire, [log.path] * 16))
    assert len({id(log) for log in logs}) == 1
    for shared in logs:
        cache.release(shared)
    cache.close()
    assert logs[0].root.closed
