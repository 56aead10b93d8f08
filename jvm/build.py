"""Builds the jar of Spark's JVM reader from the Java sources beside this file.

    python jvm/build.py

It is compiled against the jars of the installed pyspark and needs nothing else.  Without
a JDK there is no jar, which is no error: Spark then uses the Python source.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
JAR = HERE.parent / "embedlog" / "spark" / "embedlog-spark.jar"
VERSION = HERE.parent / "embedlog" / "version.py"
JAVA_RELEASE = "17"
"""The oldest Java that Spark 4 runs on."""
_ENTRY_DATE = "2020-01-01T00:00:00+00:00"
"""The date of every entry, so that the same sources give the same jar."""


def main() -> int:
    """Build the jar unless it is newer than its sources; return the exit code."""
    sources = sorted(HERE.rglob("*.java"))
    inputs = [*sources, *(HERE / "resources").rglob("*"), Path(__file__), VERSION]
    if JAR.exists() and JAR.stat().st_mtime >= max(file.stat().st_mtime for file in inputs):
        return 0
    javac, jar = find_tool("javac"), find_tool("jar")
    if javac is None or jar is None or release_of(javac) < int(JAVA_RELEASE):
        print(
            f"WARNING: no JDK {JAVA_RELEASE} was found, so {JAR.name} is not built: Spark reads "
            "and writes logs in Python, more slowly, also from wheels that are built here."
        )
        return 0
    import pyspark

    classpath = os.path.join(os.path.dirname(pyspark.__file__), "jars", "*")
    with tempfile.TemporaryDirectory() as directory:
        classes = Path(directory, "classes")
        lint = "-Xlint:all,-path,-processing,-classfile,-serial,-options"
        compiler = [javac, "--release", JAVA_RELEASE, "-Werror", lint, "-g", "-encoding", "UTF-8"]
        compiled = subprocess.run([*compiler, "-cp", classpath, "-d", classes, *sources])
        if compiled.returncode:
            return compiled.returncode
        # Another process may be starting Spark with the jar: replace it in one step.
        partial = JAR.with_suffix(f".{os.getpid()}.partial")
        manifest = Path(directory, "MANIFEST.MF")
        version = runpy.run_path(str(VERSION))
        manifest.write_text(
            f"Implementation-Version: {version['__version__']}\n"
            f"Specification-Version: {' '.join(version['TESTED_SPARK_VERSIONS'])}\n"
        )
        archive = [jar, "--create", "--file", partial, "--date", _ENTRY_DATE]
        archive += ["--manifest", manifest]
        content = ["-C", classes, ".", "-C", HERE / "resources", "."]
        archived = subprocess.run([*archive, *content])
        if archived.returncode == 0:
            os.replace(partial, JAR)
        return archived.returncode


def release_of(javac: str) -> int:
    """Return the release of a compiler; 0 if it does not run."""
    process = subprocess.run([javac, "-version"], capture_output=True, text=True)
    found = re.search(r"javac (\d+)", process.stdout + process.stderr)
    return int(found[1]) if found else 0


def find_tool(name: str) -> str | None:
    """Return the path of a tool of the JDK, from ``JAVA_HOME`` or else ``PATH``."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which(os.path.join(home, "bin", name) if home else name) or shutil.which(name)


if __name__ == "__main__":
    sys.exit(main())
