"""Kafka's own integration tests, run on `embedlog serve`: fetched from Maven Central, not copied.

As a program it fetches the jars once, runs classes of tests, prints the score of each, and compares
the failures with the list in ``kafka_suite/failing.toml``::

    python tests/support/kafka_suite.py [--table] [class ...]

A class is named without ``org.apache.kafka.``.  Kafka's tests start brokers in their own process by
one class, and those in Scala by another one; ours replace these (``kafka_suite/*.java``), and the
tests are otherwise unchanged.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

VERSION = "4.3.1"
HERE = Path(__file__).parent / "kafka_suite"
WORK = Path(tempfile.gettempdir()) / f"embedlog-tests-kafka-suite-{VERSION}"
"""The jars, 150 MB, which are fetched once, and the classes."""
CLASS_SECONDS = 1800
_TESTED = (
    *("kafka_2.13", "kafka-test-common-runtime", "kafka-test-common-internal-api", "kafka-tools"),
    *(f"{name}:test" for name in ("kafka-clients-integration-tests", "kafka-clients")),
    *(f"{name}:test" for name in ("kafka_2.13", "kafka-server-common", "kafka-tools")),
    *(f"{name}:test" for name in ("kafka-group-coordinator", "kafka-metadata")),
)
_TOOLS = {
    "org.junit.platform:junit-platform-console": "1.13.1",
    "org.junit.jupiter:junit-jupiter": "5.13.1",
    "org.mockito:mockito-core": "5.14.2",
    "org.hamcrest:hamcrest": "2.2",
}
LOGGING = """<Configuration status="ERROR"><Appenders><Console name="c" target="SYSTEM_ERR">
<PatternLayout pattern="%p %c %m%n"/></Console></Appenders>
<Loggers><Root level="error"><AppenderRef ref="c"/></Root></Loggers></Configuration>
"""


class Outcome(NamedTuple):
    """What became of one test."""

    name: str
    """The class without its package, and the method with its parameters."""
    result: str
    """``passed``, ``failed`` or ``skipped``."""
    message: str


def _pom() -> str:
    def dependency(group: str, name: str, version: str) -> str:
        artifact, _, kind = name.partition(":")
        classifier = f"<classifier>{kind}</classifier>" if kind else ""
        return (
            f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
            f"<version>{version}</version>{classifier}</dependency>"
        )

    tools = [dependency(*name.split(":"), version) for name, version in _TOOLS.items()]
    tested = [dependency("org.apache.kafka", name, VERSION) for name in _TESTED]
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>embedlog</groupId><artifactId>suite</artifactId><version>1</version>"
        f"<dependencies>{''.join(tested + tools)}</dependencies></project>"
    )


def prepare() -> str:
    """Fetch the jars unless they are there, compile our classes, and return the class path."""
    jars, classes, fetched = WORK / "jars", WORK / "classes", WORK / "pom.xml"
    if not fetched.exists() or fetched.read_text(encoding="utf-8") != _pom():
        shutil.rmtree(jars, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=WORK.parent) as directory:
            Path(directory, "pom.xml").write_text(_pom(), encoding="utf-8")
            copy = ["mvn", "-q", "-B", "dependency:copy-dependencies"]
            command = [*copy, f"-DoutputDirectory={directory}/jars"]
            subprocess.run(command, cwd=directory, check=True, timeout=900)
            WORK.mkdir(exist_ok=True)
            Path(directory, "jars").rename(jars)
            Path(directory, "pom.xml").rename(fetched)
    shutil.rmtree(classes, ignore_errors=True)
    sources = sorted(HERE.glob("*.java"))
    compiler = ["javac", "-nowarn", "-cp", f"{jars}/*", "-d", str(classes), *sources]
    subprocess.run(compiler, check=True)
    (classes / "log4j2.xml").write_text(LOGGING, encoding="utf-8")
    return f"{classes}:{jars}/*"


def run(
    name: str, class_path: str, server_output: Path, left_out: Iterable[str] = ()
) -> list[Outcome]:
    """Run a class of tests, but for those left out, which fail; return the outcome of each."""
    short = name.rpartition(".")[2]
    left_out = [test for test in left_out if test.startswith(f"{short}.")]
    with tempfile.TemporaryDirectory() as reports:
        java = ["java", "-XX:TieredStopAtLevel=1", "-Xmx600m", f"-Djava.io.tmpdir={reports}"]
        launcher = ["org.junit.platform.console.ConsoleLauncher", "execute"]
        options = [
            *("--select-class", name if name.startswith("kafka.") else f"org.apache.kafka.{name}"),
            *("--config", "junit.jupiter.extensions.autodetection.enabled=true"),
            *("--config", "junit.jupiter.execution.timeout.testtemplate.method.default=120s"),
            *("--reports-dir", reports, "--details=none", "--disable-banner"),
            *(f"--exclude-methodname=.*[.]{test}" for test in left_out),
        ]
        environment = {
            **os.environ,
            "SERVER": f"{sys.executable} -m embedlog serve",
            "SERVER_OUTPUT": str(server_output),
        }
        done = subprocess.run(
            [*java, "-cp", class_path, *launcher, *options],
            env=environment,
            timeout=CLASS_SECONDS,
            capture_output=True,
            text=True,
        )
        report = Path(reports, "TEST-junit-jupiter.xml")
        if not report.exists():
            raise RuntimeError(f"{name} did not run: {(done.stdout + done.stderr)[-2000:]}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        not_run = [Outcome(test, "failed", "left out") for test in left_out]
        return [_outcome(short, case) for case in cases] + not_run


def _outcome(name: str, case: ElementTree.Element) -> Outcome:
    test = case.get("name", "").partition("(")[0]
    # A template runs a test in several ways; ours are `[1]`, `[2]` and so on.
    number = case.get("name", "").rpartition("[")
    if number[1]:
        test += f"[{number[2]}"
    for kind, result in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            message = found.get("message") or (found.text or "").strip().partition("\n")[0]
            if "during @AfterAll" in message:
                break  # That is the class's: another test has failed, and left a thread.
            return Outcome(f"{name}.{test}", result, message)
    return Outcome(f"{name}.{test}", "passed", "")


def main() -> int:
    """Run, compare, and return the exit code: 1 if a test does not do as the list says."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("classes", nargs="*", help="without org.apache.kafka., by default all")
    options.add_argument("--table", action="store_true", help="print the score for the docs")
    given = options.parse_args()
    listed = tomllib.loads((HERE / "failing.toml").read_text(encoding="utf-8"))
    failing = {test: entry["why"] for entry in listed["failing"] for test in entry["tests"].split()}

    def marked(mark: str) -> set[str]:
        entries = (entry for entry in listed["failing"] if entry.get(mark))
        return {test for entry in entries for test in entry["tests"].split()}

    class_path, output = prepare(), WORK / "server.log"
    outcomes: list[Outcome] = []
    for name in given.classes or listed["classes"].split():
        found = run(name, class_path, output, marked("left_out"))
        outcomes += found
        print(f"{_score(found):>20}  {name}", flush=True)
    wrong = list(_unexpected(outcomes, failing, marked("sometimes")))
    print(f"{_score(outcomes):>20}  in all, of Kafka {VERSION}")
    of_brokers = marked("of_brokers")
    others = [outcome for outcome in outcomes if outcome.name not in of_brokers]
    print(f"{_score(others):>20}  without those that need what only brokers have")
    print("\n".join(wrong))
    if given.table:
        print(_table(outcomes, failing))
    return 1 if wrong or not outcomes else 0


def _score(outcomes: Iterable[Outcome]) -> str:
    counts = Counter(outcome.result for outcome in outcomes)
    return f"{counts['passed']} of {counts['passed'] + counts['failed']} pass"


def _unexpected(
    outcomes: Iterable[Outcome], failing: dict[str, str], sometimes: set[str]
) -> Iterable[str]:
    for name, result, message in outcomes:
        if result == "failed" and name not in failing:
            yield f"{name} fails: {message[:200]}"
        if result == "passed" and name in failing.keys() - sometimes:
            yield f"{name} passes, and is listed as failing: {failing[name]}"


def _table(outcomes: Iterable[Outcome], failing: dict[str, str]) -> str:
    by_class: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_class.setdefault(outcome.name.partition(".")[0], []).append(outcome)
    lines = ["| class | passed | failed, and why |", "|---|--:|---|"]
    for name, found in by_class.items():
        reasons = Counter(
            failing.get(test, message) for test, result, message in found if result == "failed"
        )
        why = "; ".join(f"{count}: {reason}" for reason, count in reasons.items())
        lines.append(f"| {name} | {_score(found).removesuffix(' pass')} | {why} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
