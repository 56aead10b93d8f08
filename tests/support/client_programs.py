"""Clients in other languages: each is a program in ``clients/`` that takes the same steps.

    create TOPIC PARTITIONS          with retention.ms=1234567
    produce TOPIC CODEC FIRST END    idempotently: for each number n the key kn, the value n, and
                                     the header n=n; at last the key kEND without a value
    consume TOPIC GROUP COUNT        prints so many records as JSON, commits them, and leaves
    transfer FROM GROUP TO COUNT     copies records in a transaction that commits their offsets;
                                     then aborts a transaction with a record
    describe TOPIC GROUP             prints what an admin client says of both
    delete TOPIC GROUP

What they need is fetched from npm and Go's module proxy, once, in the versions of their lock files.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent / "clients"
HOME = Path(__file__).parents[2] / ".venv" / "clients"
"""Where packages and programs are."""
NODE_EXAMPLE = Path(__file__).parents[2] / "examples" / "invoices-node"
"""A project in JavaScript; our program for kafkajs uses its packages."""
_FETCH_SECONDS = 550


class Program(NamedTuple):
    """A program, and what it can do."""

    name: str
    codecs: tuple[str, ...]
    assignors: tuple[str, ...]
    """Those that members in Python need."""
    environment: dict[str, str]

    def command(self) -> list[str]:
        """Return how it is started; builds it first, and skips the test if that is impossible."""
        if self.name == "kafkajs":
            node_project()
            return ["node", str(HERE / "kafkajs.js")]
        need("go")
        _fetch(["go", "mod", "download"], HERE / "go")
        # It compiles what has changed since the last time.
        build = ["go", "build", "-p=1", "-o", f"{HOME}/bin/", "./..."]
        subprocess.run(build, cwd=HERE / "go", check=True)
        return [str(HOME / "bin" / self.name)]


_ALL_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_BY_NAME = {"NODE_PATH": str(HOME / NODE_EXAMPLE.name / "node_modules")}
PROGRAMS = {
    "kafkajs": Program("kafkajs", ("none", "gzip"), ("roundrobin",), _BY_NAME),
    "franz-go": Program("franz-go", _ALL_CODECS, ("cooperative-sticky",), {}),
    "franz-go, KIP-848": Program(
        "franz-go", _ALL_CODECS, ("range",), {"GROUP_PROTOCOL": "consumer"}
    ),
    "sarama": Program("sarama", _ALL_CODECS, ("range",), {}),
}


def node_project() -> Path:
    """Return a copy of the example in JavaScript with its packages, or skip the test."""
    need("node", "npm")
    if not NODE_EXAMPLE.exists():
        pytest.skip("a source distribution has no examples")
    copy = HOME / NODE_EXAMPLE.name
    shutil.copytree(NODE_EXAMPLE, copy, dirs_exist_ok=True)
    lock = copy / "package-lock.json"
    fetched = copy / "node_modules" / lock.name
    if not fetched.exists() or fetched.read_bytes() != lock.read_bytes():
        _fetch(["npm", "ci"], copy)
        shutil.copy(lock, fetched)
    return copy


def need(*tools: str) -> None:
    """Skip the test if a tool is not installed."""
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")


def _fetch(command: list[str], directory: Path) -> None:
    done = subprocess.run(
        command, cwd=directory, timeout=_FETCH_SECONDS, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"{command[0]} does not bring the client: {done.stderr[-300:]}")
