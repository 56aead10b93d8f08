"""Formats the Java sources with google-java-format, or checks that they are formatted.

    python jvm/format.py [--check]

The formatter is fetched from Maven Central once, into the environment of this Python.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import urllib.request
from pathlib import Path

from build import HERE, find_tool

# The last version that runs on Java 17.
VERSION = "1.28.0"
SHA256 = "32342e7c1b4600f80df3471da46aee8012d3e1445d5ea1be1fb71289b07cc735"
URL = (
    "https://repo1.maven.org/maven2/com/google/googlejavaformat/google-java-format/"
    f"{VERSION}/google-java-format-{VERSION}-all-deps.jar"
)
_PACKAGES = ("api", "code", "file", "parser", "tree", "util")
_EXPORTS = [f"--add-exports=jdk.compiler/com.sun.tools.javac.{p}=ALL-UNNAMED" for p in _PACKAGES]


def main(arguments: list[str]) -> int:
    """Format all sources, or with ``--check`` list those that are not; return the exit code."""
    java = find_tool("java")
    if java is None:
        print("No Java was found, so the Java sources are not checked.")
        return 0
    mode = ["--dry-run", "--set-exit-if-changed"] if "--check" in arguments else ["--replace"]
    sources = sorted(HERE.rglob("*.java"))
    return subprocess.run([java, *_EXPORTS, "-jar", formatter(), *mode, *sources]).returncode


def formatter() -> Path:
    """Return the path of the formatter, after a download if it is not there."""
    path = Path(sys.prefix) / f"google-java-format-{VERSION}.jar"
    if not path.exists():
        with urllib.request.urlopen(URL, timeout=60) as response:
            content = response.read()
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise SystemExit(f"{URL} is not what it was: its checksum differs.")
        path.write_bytes(content)
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
