"""What errors say to do, in the words of a program and in those of the command line."""

from __future__ import annotations

from collections.abc import Mapping


class Hint(str):
    """Sentences for a program, which are the text, and the same for the command line.

    ``+`` joins hints, and hints with text that is the same for both, with a blank between them.

    Args:
        python: For a program.
        shell: For a user of the command line.

    >>> hint = "The topic exists." + Hint("Pass exist_ok=True.", "Add --if-not-exists.")
    >>> hint
    'The topic exists. Pass exist_ok=True.'
    >>> hint.shell
    'The topic exists. Add --if-not-exists.'
    """

    shell: str

    def __new__(cls, python: str, shell: str) -> Hint:
        """Make a hint."""
        hint = super().__new__(cls, python)
        hint.shell = shell
        return hint

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.shell

    def __add__(self, other: str) -> Hint:
        return _joined(self, other)

    def __radd__(self, other: str) -> Hint:
        return _joined(other, self)


def _joined(first: str, second: str) -> Hint:
    shell = f"{for_shell(first)} {for_shell(second)}".strip()
    return Hint(" ".join((str(first), str(second))), shell)


def for_shell(text: str) -> str:
    """Return a text in the words of the command line."""
    return text.shell if isinstance(text, Hint) else text


def settings_options(changes: Mapping[str, object]) -> list[str]:
    """Return the options of `embedlog topics alter` for settings; None resets one."""
    from shlex import quote

    words: list[str] = []
    for name, value in changes.items():
        words += ["--reset", name] if value is None else ["-c", quote(f"{name}={value}")]
    return words


def alter_topic(topic: str, changes: Mapping[str, object]) -> Hint:
    """Return the call that changes settings of a topic, and the command."""
    options = " ".join(settings_options(changes))
    return Hint(
        f"log.alter_topic({topic!r}, {changes!r})", f"embedlog topics alter {topic} {options}"
    )


VERIFY = Hint("Call log.housekeeping.verify().", "Run `embedlog verify`.")
REPAIR = Hint(
    "Call log.housekeeping.repair(), which first reports what it would drop.",
    "Run `embedlog repair`, which first reports what it would drop.",
)
VERIFY_THEN_REPAIR = Hint(
    "Call log.housekeeping.verify(), then log.housekeeping.repair().",
    "Run `embedlog verify`, then `embedlog repair`.",
)
FAILOVER = Hint(
    "Write to the source; if that is lost, call log.mirrors.failover() here first.",
    "Write to the source; if that is lost, run `embedlog failover` here first.",
)
ADD_REPLICA = Hint(
    "Add directories with log.replicas.add(path).",
    "Add directories with `embedlog replicas add PATH`.",
)
GIVE_UP = Hint(
    "Or give it up with log.replicas.remove(path, force=True).",
    "Or give it up with `embedlog replicas remove PATH --force`.",
)
MIRRORS = Hint("log.mirrors lists all.", "`embedlog mirror status` lists all.")
AS_SITE = Hint(
    "Mirror as a site, which becomes a part of the names of the copies; or merge.",
    "Pass a name with --as, which becomes a part of the names of the copies; or --merge.",
)
