"""The command line, `embedlog`; `parser.COMMANDS` lists the commands.

Results go to stdout, everything else to stderr; an error is one line, never a traceback; the
exit codes are in `embedlog --help`.  The module of a command is imported when it runs, so
that commands which read no records do not load pyarrow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from embedlog import errors
from embedlog.cli.parser import FAILED, INTERRUPTED, NOT_FOUND, PIPE_CLOSED, STORAGE, USAGE, parse
from embedlog.hints import for_shell

__all__ = ["code_of", "main"]

_CODES: dict[int, tuple[type[Exception], ...]] = {
    USAGE: (
        errors.InvalidConfigError,
        errors.InvalidGroupIdError,
        errors.InvalidPartitionError,
        errors.InvalidPartitionsError,
        errors.InvalidQueryError,
        errors.InvalidReplicationAssignmentError,
        errors.InvalidReplicationFactorError,
        errors.InvalidSchemaError,
        errors.InvalidTopicError,
    ),
    NOT_FOUND: (
        errors.UnknownTopicOrPartitionError,
        errors.OffsetOutOfRangeError,
        errors.GroupIdNotFoundError,
        errors.UnknownSchemaError,
        errors.UnknownSnapshotError,
        errors.NotALogError,
        FileNotFoundError,
    ),
    STORAGE: (
        errors.StorageError,
        errors.LockTimeoutError,
        errors.CorruptionError,
        errors.EligibleLeadersNotAvailableError,
        errors.NotEnoughReplicasError,
        errors.ReadOnlyError,
        errors.ReplicaNotAvailableError,
        errors.ReplicasDivergedError,
        errors.UnsupportedFilesystemError,
        errors.UnsupportedFormatError,
        OSError,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    >>> main(["--version"])
    embedlog 0.1.0
    0
    """
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        if words[:1] == ["__complete"]:
            from embedlog.cli.completion import complete

            return complete(words[1:])
        args = parse(words)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse: 0 after --help, 2 after a wrong argument
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except (errors.EmbedlogError, OSError) as error:
        sys.stderr.write(f"embedlog: {_text_of(error)}\n")
        return code_of(error)


def _text_of(error: errors.EmbedlogError | OSError) -> str:
    """Return the message of an error, with its hint in the words of the command line."""
    if isinstance(error, errors.EmbedlogError):
        return f"{error.problem}. {for_shell(error.todo)}" if error.todo else error.problem
    return f"{error.strerror} [{error.filename}]" if error.filename else str(error)


def code_of(error: Exception) -> int:
    """Return the exit code of an error."""
    return next((code for code, kinds in _CODES.items() if isinstance(error, kinds)), FAILED)


def _discard_output() -> None:
    """Redirect stdout, which is flushed at exit, because its reader has ended (`| head`)."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)
