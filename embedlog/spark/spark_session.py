"""A Spark session with the settings that suit a log, and checks of what Spark needs.

If Java, a package or the workers' Python is missing, Spark fails with pages of
errors from another process; this module checks it first and reports one sentence.

The jar has the reader that runs in Spark's JVM.  Without the jar, with Spark Connect, or with a
version of Spark that the jar was not tested with, the Python source serves: the same answers, more
slowly.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from embedlog.errors import SparkSetupError
from embedlog.version import TESTED_SPARK_VERSIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


MIN_JAVA_VERSION = 17
_LOG4J_FILE = "LOG4J_CONFIGURATION_FILE"
_JAVA_VERSION = re.compile(r'version "(\d+)')
_WORKER_PROBE = (
    "import json, sys\n"
    "report = {'version': sys.version_info[:2], 'missing': []}\n"
    "for name in ('embedlog', 'pyarrow', 'pyspark'):\n"
    "    try:\n"
    "        __import__(name)\n"
    "    except ImportError as error:\n"
    "        report['missing'].append(f'{name} ({error})')\n"
    "print(json.dumps(report))\n"
)
_JAVA_OPTIONS = (
    "-XX:+UseParallelGC "
    "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
)


def recommended_conf() -> dict[str, str]:
    """Return the settings that make queries and micro-batches short on one machine.

    Unix sockets between Spark and its Python processes save 40 ms per task.  The
    other manager of checkpoint files starts no process for each file (85 ms per
    micro-batch instead of 160); it is less likely to notice that two drivers share
    a checkpoint by mistake, so leave it out where that may happen.  A collector that
    does no concurrent work, and Arrow without bounds checks at each value of each
    row, save a tenth to a fifth of Java's CPU time.
    """
    streaming = "org.apache.spark.sql.execution.streaming"
    return {
        "spark.driver.extraJavaOptions": _JAVA_OPTIONS,
        "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.worker.reuse": "true",
        "spark.pyspark.python": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "spark.sql.shuffle.partitions": str(len(os.sched_getaffinity(0))),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.checkpointFileManagerClass": (
            f"{streaming}.checkpointing.FileSystemBasedCheckpointFileManager"
        ),
    }


def session(
    app_name: str = "embedlog", master: str | None = None, conf: Mapping[str, object] | None = None
) -> SparkSession:
    """Return a Spark session with `recommended_conf`, ``format("embedlog")`` and its JVM reader.

    If it starts a JVM, Spark logs warnings as in its own shell, except those that
    every session would begin with.  Your own ``log4j2.properties`` replaces this.

    Args:
        app_name: The name that Spark shows.
        master: The master URL; by default that of ``conf``, or this machine.
        conf: Settings of Spark, which override the recommended ones.

    Raises:
        SparkSetupError: Java, pyspark, pyarrow or the workers' Python is missing or wrong.
    """
    check_driver()
    import pyspark
    from pyspark.sql import SparkSession

    # By default Spark starts workers as "python3": often another Python, without embedlog.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings: dict[str, Any]
    settings = {"spark.master": "local[*]", **recommended_conf(), **(conf or {})}
    if master is not None:
        settings["spark.master"] = master
    add_jar(settings, pyspark.__version__)
    builder = SparkSession.builder.appName(app_name).config(map=settings)
    with default_log4j_settings(), worker_startup_for_jvm(), warnings.catch_warnings():
        # A program that uses pandas gets this warning there as well.
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        spark = builder.getOrCreate()
        register(spark)
    return spark


@contextmanager
def default_log4j_settings() -> Iterator[None]:
    """Let a JVM that starts in this context log as `log4j2.properties` beside this file says.

    If the user has configured Spark's logging by a file or a system property, that is used.
    """
    import pyspark

    home = os.environ.get("SPARK_HOME") or os.path.dirname(pyspark.__file__)
    directory = os.environ.get("SPARK_CONF_DIR") or os.path.join(home, "conf")
    names = os.listdir(directory) if os.path.isdir(directory) else []
    if _LOG4J_FILE in os.environ or any(
        name.startswith("log4j2") and not name.endswith(".template") for name in names
    ):
        yield
        return
    # In the environment: the JVM logs before it reads any setting of the session.
    os.environ[_LOG4J_FILE] = os.path.join(os.path.dirname(__file__), "log4j2.properties")
    try:
        yield
    finally:
        # Other programs that this process starts may use Log4j as well.
        del os.environ[_LOG4J_FILE]


@contextmanager
def worker_startup_for_jvm() -> Iterator[None]:
    """Let the Python processes of a JVM that starts in this context import our `sitecustomize`.

    `register` does this for the functions of a session only: Spark also starts processes of
    its own, such as the one that looks for data sources.
    """
    before = os.environ.get("PYTHONPATH")
    add_worker_startup(os.environ)
    try:
        yield
    finally:
        # Other programs that this process starts are not Spark's.
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def register(spark: SparkSession) -> None:
    """Make ``format("embedlog")`` known to a session; calling it again changes nothing.

    Python processes that Spark starts for the functions of this session from now on begin with
    `worker_startup/sitecustomize.py`: a stream can start on a busy machine, and a task that ends
    early prints no traceback.

    Raises:
        SparkSetupError: This Spark has no Python data sources, or its workers' Python
            lacks what they need.
    """
    if not hasattr(spark, "dataSource"):
        raise SparkSetupError(
            "This Spark has no Python data sources", todo="Install pyspark 4.1 or newer."
        )
    try:
        context = spark.sparkContext
    except Exception:  # noqa: BLE001 - a remote session raises one of many pyspark errors here
        pass  # The Python of its workers is unknown.
    else:
        python = context.getConf().get("spark.pyspark.python", None) or context.pythonExec
        check_worker_python(str(python))
        add_worker_startup(context.environment)
    from embedlog.spark.datasource import EmbedlogDataSource

    spark.dataSource.register(EmbedlogDataSource)
    report_reader(spark)


def add_worker_startup(environment: MutableMapping[str, str]) -> None:
    """Let the workers that get these environment variables import our `sitecustomize`.

    Spark appends the PYTHONPATH of the host that they run on.
    """
    directory = os.path.join(os.path.dirname(__file__), "worker_startup")
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if directory not in path:
        environment["PYTHONPATH"] = os.pathsep.join([directory, *path])


def check_driver() -> None:
    """Check that this process can start Spark.

    Raises:
        SparkSetupError: pyspark, pyarrow or Java is missing or too old.
    """
    for name, package in (("pyspark", "embedlog[spark]"), ("pyarrow", "pyarrow")):
        if importlib.util.find_spec(name) is None:
            raise SparkSetupError(
                f"{name} is not installed for {sys.executable}",
                todo=f"Run: pip install '{package}'.",
            )
    version = java_version(find_java())
    if version < MIN_JAVA_VERSION:
        raise SparkSetupError(
            f"Java has version {version}, and Spark 4 needs {MIN_JAVA_VERSION}",
            todo=f"Set JAVA_HOME to a Java {MIN_JAVA_VERSION}.",
        )


def find_java() -> str:
    """Return the path of the Java that Spark would start.

    Raises:
        SparkSetupError: There is none.
    """
    home = os.environ.get("JAVA_HOME")
    path = shutil.which(os.path.join(home, "bin", "java") if home else "java")
    if path is None:
        problem = f"JAVA_HOME={home} has no bin/java" if home else "there is no java on PATH"
        raise SparkSetupError(
            f"Spark needs Java, and {problem}",
            todo=f"Install a JRE {MIN_JAVA_VERSION} (apt install openjdk-17-jre-headless), or set "
            "JAVA_HOME.",
        )
    return path


def java_version(path: str) -> int:
    """Return the major version of the Java at a path.

    Raises:
        SparkSetupError: It does not run.
    """
    try:
        process = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=60)
        match = _JAVA_VERSION.search(process.stderr + process.stdout)
        if process.returncode == 0 and match is not None:
            return int(match[1])
        problem = process.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    raise SparkSetupError(
        f"Java does not run: {problem}", path=path, todo="Set JAVA_HOME to another one."
    )


def check_worker_python(python: str) -> None:
    """Check that a Python has what Spark's workers need, as this process's Python has.

    Raises:
        SparkSetupError: A package is missing, or the Python has another version.
    """
    if shutil.which(python) == shutil.which(sys.executable):
        return
    command = [python, "-c", _WORKER_PROBE]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=120)
        report = json.loads(process.stdout)
        theirs, ours = (".".join(map(str, v)) for v in (report["version"], sys.version_info[:2]))
        if not report["missing"] and theirs == ours:
            return
        problem = f"is {theirs}, the driver's {ours}"
        if report["missing"]:
            problem = f"lacks {', '.join(report['missing'])}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        problem = f"does not run: {error}"
    raise SparkSetupError(
        f"The workers' Python {problem}",
        path=python,
        todo=f"Set PYSPARK_PYTHON={sys.executable} before you make the session, or use session().",
    )


READER = "spark.embedlog.reader"
"""The setting of a session that selects the reader: "jvm" or "python"."""

_JAR = os.path.join(os.path.dirname(__file__), "embedlog-spark.jar")
_logger = logging.getLogger("embedlog.spark")
_reported = False


def jar_path() -> str:
    """Return the path of the jar for Spark's setting ``spark.jars``.

    Raises:
        SparkSetupError: This installation has no jar.
    """
    if not os.path.exists(_JAR):
        raise SparkSetupError(
            "This installation of embedlog has no jar for Spark's JVM",
            path=_JAR,
            todo="It was built without a JDK: run `make jar` in the repository with a JDK 17, and "
            "build and install the wheel again. Without the jar, Python reads the log.",
        )
    return _JAR


def problem(version: str) -> str | None:
    """Return why the reader in the JVM cannot serve a version of Spark; None if it can."""
    if not os.path.exists(_JAR):
        return "this installation of embedlog has no jar, since it was built without a JDK 17"
    if ".".join(version.split(".")[:2]) not in TESTED_SPARK_VERSIONS:
        return f"it was not tested with Spark {version}"
    return None


def add_jar(settings: dict[str, Any], version: str) -> None:
    """Add the jar to the settings of a new session, unless Python is to read."""
    if settings.get(READER) != "python" and problem(version) is None:
        jars = [jar for jar in str(settings.get("spark.jars", "")).split(",") if jar]
        settings["spark.jars"] = ",".join(dict.fromkeys([*jars, _JAR]))


def report_reader(spark: SparkSession) -> None:
    """Warn once per process if Python serves a session that does not ask for it."""
    global _reported
    if _reported or spark.conf.get(READER, None) == "python" or is_loaded(spark):
        return
    _reported = True
    reason = problem(spark.version)
    if reason is None:
        reason = "this session was started without its jar"
        todo = " Start it with .config('spark.jars', embedlog.spark.jar_path())."
    else:
        todo = ""
    _logger.warning(
        "The log is read by Python, which is slower than the reader in the JVM: %s.%s "
        "(%s=python hides this message.)",
        reason,
        todo,
        READER,
    )


def is_loaded(spark: SparkSession) -> bool:
    """Whether the JVM of a session has the reader; False for a remote session."""
    jvm = getattr(spark, "_jvm", None)
    # py4j returns a package for the name of a class that does not exist.
    return jvm is not None and type(jvm.embedlog.spark.EmbedlogSource).__name__ == "JavaClass"
