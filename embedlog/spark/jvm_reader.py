"""The jar with the reader that runs in Spark's JVM, and whether a session uses it.

Without the jar, with Spark Connect, or with a version of Spark that the jar was not tested
with, the Python source serves: the same answers, more slowly.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from embedlog.errors import SparkSetupError
from embedlog.version import TESTED_SPARK_VERSIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
