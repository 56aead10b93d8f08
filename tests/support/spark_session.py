"""A Spark session for tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from embedlog.spark import session
from support import planner_faults


def begin(directory: Path, *, quick: bool = True, master: str = "local[2]", jars: str = "") -> Any:
    """Start a session that knows `format("embedlog")`; a quick one starts soon, and runs slowly."""
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["PYSPARK_PYTHON"] = quick_python(directory)
    settings = {
        "spark.ui.enabled": "false",
        "spark.log.level": "OFF",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "1g",
        "spark.executor.memory": "512m",  # of executors in JVMs of their own
        "spark.sql.streaming.pollingDelay": "10ms",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.jars": jars,
    }
    if quick:
        settings["spark.driver.extraJavaOptions"] = "-XX:TieredStopAtLevel=1"
    return session("tests", master, settings)


def faults_of(spark: Any) -> Path:
    """Return the directory in which faults of the session's planner are ordered."""
    return Path(spark.sparkContext.getConf().get("spark.pyspark.python")).with_name("faults")


def quick_python(directory: Path) -> str:
    """Return a Python for the workers that starts three times as fast, and for the planner.

    Spark puts a zip of pyspark first on their path, which has no bytecode: each
    process would compile it again, for more than a second.  In the planner, tests
    can order faults: see `faults_of`.
    """
    script = directory / "python"
    startup = Path(planner_faults.__file__).with_name("planner_startup")
    script.write_text(
        "#!/bin/sh\n"
        "PYTHONPATH=$(echo \"$PYTHONPATH\" | sed 's/[^:]*pyspark[.]zip//')\n"
        'if [ "$2" = embedlog.spark.planner ]; then\n'
        f'  PYTHONPATH="{startup}:$PYTHONPATH"\n'
        f'  export {planner_faults.VARIABLE}="{directory / "faults"}"\n'
        "fi\n"
        f'export PYTHONPATH\nexec "{sys.executable}" "$@"\n'
    )
    script.chmod(0o755)
    return str(script)
