"""A Spark session that suits the log, and what is wrong where there is none.

What is missing shows up in Spark as an error of some other process, pages
long; so it is looked for here, where it can be told in a sentence.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from embedlog.errors import SparkSetupError

OLDEST_JAVA = 17
_LOG_FILE = "LOG4J_CONFIGURATION_FILE"
_JAVA = re.compile(r'version "(\d+)')
_PROBE = (
    "import json, sys\n"
    "found = {'version': sys.version_info[:2], 'missing': []}\n"
    "for name in ('embedlog', 'pyarrow', 'pyspark'):\n"
    "    try:\n"
    "        __import__(name)\n"
    "    except ImportError as error:\n"
    "        found['missing'].append(f'{name} ({error})')\n"
    "print(json.dumps(found))\n"
)


_JAVA_OPTIONS = (
    "-XX:+UseParallelGC "
    "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
)


def recommended_conf() -> dict[str, str]:
    """Return the settings that make queries and micro-batches short, on one machine.

    Unix sockets between Spark and its Python processes save 40 ms a task.  The
    other manager of checkpoint files saves a process for each file (85 ms a
    micro-batch instead of 160); it is less sure to notice two drivers that share
    a checkpoint by mistake, so leave it out where that may happen.  Java spares a
    tenth to a fifth of a query's processor time with a collector that has nothing to
    do beside it, and without a check of Arrow's bounds at each value of each row.
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
    app_name: str = "embedlog",
    master: str | None = None,
    conf: Mapping[str, object] | None = None,
) -> Any:
    """Return a Spark session with `recommended_conf`, in which ``format("embedlog")`` is known.

    If it starts a JVM, Spark warns as in its own shell, but of nothing that every
    session would begin with.  A ``log4j2.properties`` of yours is heard instead of ours.

    Args:
        app_name: What Spark shows.
        master: Where it runs; this machine unless given, or what ``conf`` says.
        conf: Settings of Spark, before ours.

    Raises:
        SparkSetupError: Java, pyspark, pyarrow or the workers' Python is missing or wrong.
    """
    check_here()
    from pyspark.sql import SparkSession

    # Workers are started as "python3" unless told otherwise: often another one, without embedlog.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name)
    settings = {**recommended_conf(), **(conf or {})}
    if master is not None or "spark.master" not in settings:
        builder = builder.master(master or "local[*]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with own_log_settings():
        spark = builder.getOrCreate()
    register(spark)
    return spark


@contextmanager
def own_log_settings() -> Iterator[None]:
    """Have a JVM that starts meanwhile log as `log4j2.properties` beside this file says.

    Who has told Spark how to log, by a file or a system property, goes before it.
    """
    # In the environment: it logs before it looks at any setting of the session.
    if _LOG_FILE in os.environ or _conf_has_log_file():
        yield
        return
    os.environ[_LOG_FILE] = os.path.join(os.path.dirname(__file__), "log4j2.properties")
    try:
        yield
    finally:
        # Other programs that this one starts may log by the same library.
        del os.environ[_LOG_FILE]


def _conf_has_log_file() -> bool:
    import pyspark

    home = os.environ.get("SPARK_HOME") or os.path.dirname(pyspark.__file__)
    folder = os.environ.get("SPARK_CONF_DIR") or os.path.join(home, "conf")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return any(name.startswith("log4j2") and not name.endswith(".template") for name in names)


def register(spark: Any) -> None:
    """Let a session know ``format("embedlog")``; a second time does nothing new.

    Raises:
        SparkSetupError: This Spark has no Python data sources, or its workers' Python
            lacks what they need.
    """
    if not hasattr(spark, "dataSource"):
        raise SparkSetupError(
            "this Spark has no Python data sources", todo="install pyspark 4.1 or newer"
        )
    check_workers(worker_python(spark))
    from embedlog.spark.datasource import EmbedlogDataSource

    spark.dataSource.register(EmbedlogDataSource)


def check_here() -> None:
    """Raise unless this process can start Spark.

    Raises:
        SparkSetupError: Says what is missing, and what to do about it.
    """
    for name, package in (("pyspark", "embedlog[spark]"), ("pyarrow", "pyarrow")):
        if importlib.util.find_spec(name) is None:
            raise SparkSetupError(
                f"{name} is not installed for {sys.executable}", todo=f"pip install '{package}'"
            )
    version = java_version(java())
    if version < OLDEST_JAVA:
        raise SparkSetupError(
            f"Java is version {version}", todo=f"Spark 4 needs {OLDEST_JAVA}; set JAVA_HOME to it"
        )


def java() -> str:
    """Return the path of the Java that Spark would start.

    Raises:
        SparkSetupError: There is none.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(os.path.join(home, "bin", "java") if home else "java")
    if found is None:
        where = f"JAVA_HOME is {home}, and has no bin/java" if home else "there is no java on PATH"
        raise SparkSetupError(
            f"Spark needs Java, and {where}",
            todo=f"install a JRE {OLDEST_JAVA} (apt install openjdk-17-jre-headless), or set "
            "JAVA_HOME",
        )
    return found


def java_version(path: str) -> int:
    """Return the major version of a Java.

    Raises:
        SparkSetupError: It does not run.
    """
    try:
        done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SparkSetupError(f"Java does not run: {error}", path=path) from error
    found = _JAVA.search(done.stderr + done.stdout)
    if done.returncode or found is None:
        raise SparkSetupError(
            f"Java does not run: {done.stderr.strip()}", path=path, todo="set JAVA_HOME"
        )
    return int(found[1])


def worker_python(spark: Any) -> str | None:
    """Return the Python of a session's workers; None if it cannot be known, as with Connect."""
    try:
        context = spark.sparkContext
    except Exception:  # noqa: BLE001 - a remote session raises one of pyspark's many here
        return None
    found = context.getConf().get("spark.pyspark.python", None) or context.pythonExec
    return str(found)


def check_workers(python: str | None) -> None:
    """Raise unless a Python has what Spark's workers need of it; this one has.

    Raises:
        SparkSetupError: Says what it lacks, and how to choose another one.
    """
    here = python is None or shutil.which(python) == shutil.which(sys.executable)
    if python is None or here:
        return
    todo = f"set PYSPARK_PYTHON={sys.executable} before the session is made, or use session()"
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=120)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise SparkSetupError(
            f"the workers' Python does not run: {error}", path=python, todo=todo
        ) from error
    if found["missing"]:
        raise SparkSetupError(
            f"the workers' Python lacks {', '.join(found['missing'])}", path=python, todo=todo
        )
    if tuple(found["version"]) != sys.version_info[:2]:
        told = ".".join(map(str, found["version"]))
        raise SparkSetupError(
            f"the workers' Python is {told}, this one {sys.version_info[0]}.{sys.version_info[1]}",
            path=python,
            todo=todo,
        )
