"""Run a program that imports ``kafka`` or ``confluent_kafka`` on a log, unchanged.

::

    python -m embedlog.kafka /path/of/the/log script.py arguments…
    python -m embedlog.kafka /path/of/the/log -m module arguments…
"""

from __future__ import annotations

import os
import re
import runpy
import sys

from embedlog.kafka.patching import patch

_HOST_AND_PORT = re.compile(r"[^/]+:\d+")
"""Brokers, where a directory is expected."""


def main(arguments: list[str]) -> None:
    """Run the program that the arguments name."""
    if len(arguments) < 2 or arguments[1:] == ["-m"]:
        sys.exit("usage: python -m embedlog.kafka PATH (SCRIPT | -m MODULE) [ARGUMENT …]")
    path, program, *rest = arguments
    if os.path.isfile(path) or _HOST_AND_PORT.fullmatch(path):
        sys.exit(f"{path} is not the directory of a log; the first argument must be")
    if program != "-m" and not os.path.exists(program):
        sys.exit(f"There is no script {program}")
    patch(path if "://" in path else os.path.abspath(os.path.expanduser(path)))
    if program == "-m":
        program, *rest = rest
        sys.argv = [program, *rest]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.argv = [program, *rest]
    sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
