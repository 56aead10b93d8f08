"""`embedlog completion`: scripts for shells, and the candidates that the scripts ask for.

A script runs ``embedlog __complete WORD...`` at each Tab, which prints candidates for the last
word, each with a description after a tab.  So all shells complete the same, from the parser
itself, and also names of topics, groups and subjects.  No candidates mean the names of files.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

from embedlog.cli.open_log import to_read
from embedlog.cli.parser import OK, CommandParser, parser
from embedlog.cli.printing import say
from embedlog.cli.topics import topic_names
from embedlog.errors import EmbedlogError

COMPLETION = """\
For bash, put this into ~/.bashrc:  eval "$(embedlog completion bash)"
"""

BASH = """\
# Put this into ~/.bashrc:  eval "$(embedlog completion bash)"
_embedlog() {
    local IFS=$'\\n'
    COMPREPLY=($(embedlog __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f 1))
}
complete -o default -F _embedlog embedlog
"""
ZSH = """\
#compdef embedlog
# Put this into ~/.zshrc, after compinit:  eval "$(embedlog completion zsh)"
_embedlog() {
    local -a lines
    lines=("${(@f)$(embedlog __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$lines" ]]; then
        compadd -- "${(@)lines%%$'\\t'*}"
    else
        _files
    fi
}
compdef _embedlog embedlog
"""
FISH = """\
# Put this into a file:  embedlog completion fish > ~/.config/fish/completions/embedlog.fish
function __embedlog_complete
    set -l words (commandline -opc) (commandline -ct | string collect --allow-empty)
    embedlog __complete $words[2..-1] 2>/dev/null
end
complete -c embedlog -a '(__embedlog_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
_PLAIN = re.compile(r"[\w.+,@%/-]+")
"""What a shell takes as it is; other names of groups and subjects are not completed."""

Candidate = tuple[str, str]
"""A word, and what it means; the latter may be empty."""


def completion_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = COMPLETION
    command.add_argument("shell", choices=("bash", "zsh", "fish"))


def completion(args: argparse.Namespace) -> int:
    """Print the script for a shell."""
    say(SCRIPTS[args.shell].rstrip("\n"))
    return OK


def complete(words: list[str]) -> int:
    """Print the candidates for the last of the words after `embedlog`."""
    # bash splits --option=value into three words.
    *before, prefix = [word for word in words if word != "="] or [""]
    for word, about in sorted(_candidates(before, prefix)):
        if word.startswith(prefix) and _PLAIN.fullmatch(word):
            say(f"{word}\t{about}" if about else word)
    return OK


def _candidates(before: list[str], prefix: str) -> Iterable[Candidate]:
    command = parser()
    positionals = 0
    option: argparse.Action | None = None
    root = command.get_default("root")
    for word in before:
        if option is not None:
            root = word if option.dest == "root" else root
            option = None
        elif word.startswith("-"):
            options = (each for each in command.options() if each.nargs != 0)
            option = next((each for each in options if word in each.option_strings), None)
        elif command.verbs is not None:
            verb: CommandParser | None = command.verbs.choices.get(word)
            if verb is None:
                return ()
            command = verb
        else:
            positionals += 1
    if option is not None:
        return _values(option, root)
    if prefix.startswith("-"):
        named = [(name, each) for each in command.options() for name in each.option_strings]
        return [(name, each.help or "") for name, each in named if name.startswith("--")]
    if command.verbs is not None:
        return [(name, verb.description or "") for name, verb in command.verbs.choices.items()]
    actions = command.positionals()
    if actions and positionals >= len(actions) and actions[-1].nargs not in ("*", "+"):
        return ()
    return _values(actions[min(positionals, len(actions) - 1)], root) if actions else ()


def _values(action: argparse.Action, root: str | None) -> Iterable[Candidate]:
    """Return the values that an option or argument may have."""
    if action.choices is not None:
        return [(str(choice), "") for choice in action.choices]
    args = argparse.Namespace(root=root)
    metavar = str(action.metavar)
    try:
        if metavar.startswith("TOPIC"):
            return [(name, "") for name in topic_names(args)]
        if metavar == "GROUP":
            with to_read(args) as log:
                return [(name, "") for name in log.groups]
        if metavar == "DIRECTORY":
            with to_read(args) as log:
                return [(each.path, each.reason or "online") for each in log.replicas]
        if metavar.startswith("SUBJECT"):
            with to_read(args) as log:
                return [(name, "") for name in log.schema_registry.subjects()]
    except (EmbedlogError, OSError):
        pass  # A shell can show no error here.
    return ()
