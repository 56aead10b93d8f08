"""The sticky assignors against Kafka's own, on random groups; needs a JDK, Maven and its jars."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from support.forks import tell
from support.random_groups import quality, random_group

from embedlog.assignor import by_name, compute_target
from embedlog.record import TopicPartition

pytestmark = pytest.mark.tier("nightly")

GROUPS = 12_000
DRIVER = Path(__file__).parent / "support" / "StickyAssignments.java"
POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>embedlog</groupId>
<artifactId>assignors</artifactId><version>1</version>
<dependencies><dependency><groupId>org.apache.kafka</groupId>
<artifactId>kafka-clients</artifactId><version>4.1.0</version></dependency></dependencies>
</project>
"""


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """A class path with Kafka's clients and the driver."""
    for tool in ("java", "javac", "mvn"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    directory = tmp_path_factory.mktemp("kafka")
    (directory / "pom.xml").write_text(POM)
    command = [
        "mvn",
        "-q",
        "-B",
        "dependency:copy-dependencies",
        f"-DoutputDirectory={directory}/jars",
    ]
    maven = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if maven.returncode:
        pytest.skip(f"Maven does not bring Kafka's clients: {maven.stdout[-300:]}")
    jars = f"{directory}/jars/*"
    subprocess.run(["javac", "-cp", jars, "-d", f"{directory}/classes", DRIVER], check=True)
    return os.pathsep.join([jars, f"{directory}/classes"])


def line(topics, members):
    """Write a group as the driver reads it; Kafka sees only topics with subscribers."""
    subscribed = set().union(*(member.topics for member in members))
    parts = [" ".join(f"{topic}={n}" for topic, n in topics.items() if topic in subscribed)]
    for member in members:
        owned = " ".join(f"{tp.topic}-{tp.partition}" for tp in sorted(member.owned))
        parts.append(f"{member.id};{member.generation};{' '.join(sorted(member.topics))};{owned}")
    return "|".join(parts)


def read(answer):
    """Read an assignment that the driver wrote; None where Kafka failed."""
    assignment = {}
    for entry in answer.split("|") if answer else ():
        name, _, names = entry.partition(":")
        partitions = (name.rsplit("-", 1) for name in names.split())
        assignment[name] = [TopicPartition(topic, int(number)) for topic, number in partitions]
    return assignment or None


def keeps_the_rules(assignment, members):
    """Kafka returns partitions to members that no longer subscribe to their topics."""
    topics = {member.id: member.topics for member in members}
    return all(tp.topic in topics[name] for name, taken in assignment.items() for tp in taken)


def test_no_assignment_is_less_even_than_kafkas_or_keeps_less_where_it_is_as_even(classes):
    """KIP-54, KIP-429: by Kafka's balance score; then by what stays with its owner, then claims."""
    groups = [random_group(Random(seed)) for seed in range(GROUPS)]
    java = ["java", "-cp", classes, "StickyAssignments"]
    text = "".join(f"{line(*group)}\n" for group in groups)
    answers = subprocess.run(java, input=text, capture_output=True, text=True, check=True)
    lines, results = answers.stdout.splitlines(), Counter()
    assert len(lines) == 3 * GROUPS
    for number, (topics, members) in enumerate(groups):
        ours = quality(compute_target(by_name("sticky"), topics, members), members)
        for answer in lines[3 * number : 3 * number + 2]:
            kafkas = read(answer)
            if kafkas is None or not keeps_the_rules(kafkas, members):
                results["not compared"] += 1
                continue
            assert ours >= quality(kafkas, members), line(topics, members)
            results["better" if ours > quality(kafkas, members) else "as good"] += 1
    tell(f"{GROUPS} groups, two assignors: {dict(results)}")
    assert results["not compared"] < 2 * GROUPS / 20
