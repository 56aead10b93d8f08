"""Writes `embedlog/server/kafka-messages.jsonl` from Kafka's schemas, for `make kafka-messages`.

The schemas are in the jar of Kafka's clients, which Maven fetches.  A new release of Kafka is
another VERSION here; the functions that encode and decode follow from the schemas.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

VERSION = "4.3.1"
FILE = Path(__file__).parent.parent.parent / "embedlog" / "server" / "kafka-messages.jsonl"
_MESSAGE_KEYS = "apiKey type name validVersions latestVersionUnstable flexibleVersions".split()
_FIELD_KEYS = (
    "name type versions nullableVersions taggedVersions tag default flexibleVersions".split()
)
_DATA = {"ConsumerProtocolAssignment", "ConsumerProtocolSubscription"}
"""What consumers put into the bytes of requests of groups."""


def main() -> int:
    """Write the file, and return the exit code."""
    plugin = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [
                *("mvn", "-q", "-B", plugin, f"-DoutputDirectory={directory}"),
                f"-Dartifact=org.apache.kafka:kafka-clients:{VERSION}",
            ],
            check=True,
        )
        with zipfile.ZipFile(f"{directory}/kafka-clients-{VERSION}.jar") as jar:
            names = sorted(name for name in jar.namelist() if name.startswith("common/message/"))
            texts = [jar.read(name).decode() for name in names if name.endswith(".json")]
    messages = [json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.M)) for text in texts]
    keys = {each["apiKey"] for each in messages if "broker" in each.get("listeners", ())}
    about = {
        "source": f"The message schemas of kafka-clients {VERSION}, without comments",
        "license": "Apache License 2.0; Copyright The Apache Software Foundation",
    }
    kept = [m for m in messages if m.get("apiKey") in keys or m["name"] in _DATA]
    lines = [about, *map(_stripped, kept)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    FILE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {FILE.name}: {len(kept)} messages, {len(text):,} bytes\n")
    return 0


def _stripped(message: dict[str, Any]) -> dict[str, Any]:
    stripped = {key: message[key] for key in _MESSAGE_KEYS if key in message}
    stripped["fields"] = list(map(_field, message["fields"]))
    structs = message.get("commonStructs", ())
    if structs:
        stripped["commonStructs"] = {
            each["name"]: list(map(_field, each["fields"])) for each in structs
        }
    return stripped


def _field(field: dict[str, Any]) -> dict[str, Any]:
    stripped = {key: field[key] for key in _FIELD_KEYS if key in field}
    if "fields" in field:
        stripped["fields"] = list(map(_field, field["fields"]))
    return stripped


if __name__ == "__main__":
    sys.exit(main())
