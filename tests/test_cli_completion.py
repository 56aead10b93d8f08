"""`embedlog completion`: what shells complete, from the parser and from the log."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest
from support.patience import patient

import embedlog
from embedlog.cli.completion import SCRIPTS
from embedlog.record import OffsetAndMetadata, TopicPartition

BASH = shutil.which("bash")


@pytest.fixture
def filled(log_path):
    """Two topics, and a group."""
    with embedlog.open(log_path, maintenance=False) as log:
        log.create_topic("flights")
        log.create_topic("fleet")
        with log.consumer(group_id="delays", enable_auto_commit=False) as consumer:
            consumer.commit({TopicPartition("fleet", 0): OffsetAndMetadata(0)})
        with log.consumer(group_id="two words", enable_auto_commit=False) as consumer:
            consumer.commit({TopicPartition("fleet", 0): OffsetAndMetadata(0)})
    return log_path


@pytest.fixture
def candidates(command_line):
    """Return the candidates for the last word, as a script asks for them."""

    def complete(*words):
        code, out, err = command_line("__complete", *words)
        assert (code, err) == (0, "")
        return [line.split("\t")[0] for line in out.splitlines()]

    return complete


COMPLETIONS = [
    (["topi"], ["topics"]),
    (["co"], ["compact", "completion", "consume", "convert"]),
    (["topics", ""], ["alter", "create", "delete", "describe", "list"]),
    (["groups", "delete"], ["delete", "delete-offsets"]),
    (["topics", "describe", ""], ["fleet", "flights"]),
    (["topics", "describe", "fleet", "fli"], ["flights"]),
    (["consume", "fl"], ["fleet", "flights"]),
    (["consume", "fleet", ""], []),
    (["offsets", "fli"], ["flights"]),
    (["du", "fli"], ["flights"]),
    (["export", "fleet", ""], []),
    (["import", "fli"], ["flights"]),
    (["groups", "describe", ""], ["delays"]),
    (["groups", "delete-offsets", "delays", "fle"], ["fleet"]),
    (["groups", "delete", "delays", "--topic", "fle"], ["fleet"]),
    (["consume", "fleet", "--fo"], ["--follow", "--format"]),
    (["export", "fleet", "x", "--format", ""], ["csv", "jsonl", "parquet"]),
    (["export", "fleet", "x", "--format", "=", "p"], ["parquet"]),
    (["produce", "fleet", "-z", "l"], ["lz4"]),
    (["completion", ""], ["bash", "fish", "zsh"]),
    (["--jso"], ["--json"]),
    (["--json", "topics", "li"], ["list"]),
    (["--root", ""], []),
    (["nonsense", ""], []),
    (["topics", "nonsense", ""], []),
]
"""The words before the cursor, and the candidates."""


def test_commands_options_topics_and_groups_are_completed(filled, candidates):
    """In each place what may stand there; nothing means the names of files.

    The group "two words" is left out, because a shell would take its name for two.
    """
    completions = [(words, candidates(*words)) for words, _ in COMPLETIONS]

    assert completions == COMPLETIONS


def test_the_log_may_be_named_in_the_command(filled, candidates, monkeypatch):
    """Before or after it; without a log, or with none there, no names are completed."""
    monkeypatch.delenv("EMBEDLOG_ROOT")

    assert candidates("--root", filled, "consume", "fli") == ["flights"]
    assert candidates("consume", "--root", filled, "fli") == ["flights"]
    assert candidates("consume", "-r", filled, "fli") == ["flights"]
    assert candidates("consume", "fli") == []
    assert candidates("--root", filled / "missing", "consume", "fli") == []
    assert not (filled / "missing").exists()


def test_candidates_have_descriptions(filled, command_line):
    """Those of the help, after a tab, for shells that show them."""
    assert command_line("__complete", "topics", "cr")[1] == "create\tCreate a topic.\n"


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_printed_for_every_shell(command_line, shell):
    """And a shell that is installed has nothing against it."""
    code, out, err = command_line("completion", shell)

    assert (code, err) == (0, "")
    assert "embedlog __complete" in out
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n", "-c", out], check=True, capture_output=True)


def test_another_shell_is_refused(command_line):
    """With the names of those that there are."""
    code, _, err = command_line("completion", "tcsh")

    assert code == 2
    assert "'bash', 'zsh', 'fish'" in err.replace("bash, zsh, fish", "'bash', 'zsh', 'fish'")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The command `embedlog`, found by shells."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "embedlog").write_text(f'#!/bin/sh\nexec {sys.executable} -m embedlog "$@"\n')
    (folder / "embedlog").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.tier("test")
@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_bash_completes_what_is_typed(filled, program, tmp_path):
    """A user types parts of words, and Tab, in a terminal: the commands run as if typed whole."""
    monitor, terminal = pty.openpty()
    shell = subprocess.Popen(
        [BASH, "--norc", "--noprofile", "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=tmp_path,
        env={**os.environ, "TERM": "dumb", "PS1": "ready> "},
        start_new_session=True,
    )
    os.close(terminal)
    try:
        expect(monitor, "ready> ")
        os.write(monitor, b'eval "$(embedlog completion bash)"\n')
        expect(monitor, "ready> ")
        os.write(monitor, b"embedlog topi\tdesc\tfli\t\n")
        assert "flights  id " in expect(monitor, "leader epoch")
        os.write(monitor, b"embedlog export --form\tjs\tfleet new\t\n")
        assert "fleet new" in expect(monitor, "has no suffix", "ready> embedlog: ", "Exported 0")
    finally:
        os.close(monitor)
        shell.kill()
        shell.wait()


def expect(monitor, *endings):
    """Read from a terminal until it shows one of some texts."""
    shown, end = "", time.monotonic() + patient(20)
    while not any(ending in shown for ending in endings):
        ready, _, _ = select.select([monitor], [], [], end - time.monotonic())
        assert ready, f"no {endings} in {shown!r}"
        shown += os.read(monitor, 4096).decode()
    return shown


BASH_WORDS = """
eval "$(embedlog completion bash)"
words() { COMP_WORDS=(embedlog "$@"); COMP_CWORD=$#; COMPREPLY=(); _embedlog
          echo "${COMPREPLY[@]}"; }
words consume fl
words export fleet x --format = c
words groups describe ""
complete -p embedlog
"""


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_the_function_of_bash_returns_the_candidates(filled, program):
    """For the words as bash splits them; descriptions are left out."""
    process = subprocess.run([BASH, "-c", BASH_WORDS], capture_output=True, text=True, check=True)

    assert process.stdout.splitlines() == [
        "fleet flights",
        "csv",
        "delays",
        "complete -o default -F _embedlog embedlog",
    ]
