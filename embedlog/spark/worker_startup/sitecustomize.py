"""Python imports this when one of Spark's Python processes starts, before it imports pyspark.

Spark gives the process that plans a stream ten seconds to connect, which no setting changes.
pyspark connects only after all of its imports; on a busy machine that may be too late, and
the query fails ("Python worker failed to connect back").  So this module connects immediately,
and makes the imports three times as fast.

It also keeps pyspark's daemon from printing a traceback when Spark closes the socket of a
worker early, as it does after `show()` and `limit()`.

`embedlog.spark.register` puts this directory on the path of Spark's workers.  It imports
nothing of embedlog, and a failure here is printed and otherwise without effect.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

_ZIP = os.path.join("python", "lib", "pyspark.zip")


def _skip_zip() -> None:
    """Import pyspark from its package, not from the zip in it, which Spark puts first.

    The zip has no bytecode: each process would compile it again, for about a second.
    """
    for entry in list(sys.path):
        package = entry.removesuffix(os.sep + _ZIP)
        if package != entry and os.path.dirname(package) in sys.path:
            sys.path.remove(entry)


def _connect_early() -> None:
    """Connect to Spark now, and let pyspark use this connection when it connects.

    Only with a Unix socket: over TCP, Spark waits ten seconds for the next step, too.
    """
    address = os.environ.get("PYTHON_WORKER_FACTORY_SOCK_PATH")
    if address is None or not _pyspark_module():
        return
    import socket

    early = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        early.connect(address)
    except OSError:
        early.close()  # pyspark reports it
        return
    connect = socket.socket.connect

    def connect_once(self: socket.socket, to: Any) -> None:
        if to != address:
            connect(self, to)
            return
        socket.socket.connect = connect  # type: ignore[method-assign]
        os.dup2(early.fileno(), self.fileno(), inheritable=False)
        early.close()
        # Whether calls block is a property of the connection, which is another one now.
        self.settimeout(self.gettimeout())

    socket.socket.connect = connect_once  # type: ignore[assignment, method-assign]


def _silence_daemon() -> None:
    """Let the daemon print no traceback for a worker whose socket was closed."""
    if _pyspark_module() != "pyspark.daemon":
        return
    import traceback

    print_exc = traceback.print_exc

    def print_other_exc(*args: Any, **kwargs: Any) -> None:
        # The daemon is the main module; the code of a task, in a fork of it, is not.
        called_by_daemon = sys._getframe(1).f_globals.get("__name__") == "__main__"
        is_closed = isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError)
        if not (called_by_daemon and is_closed):
            print_exc(*args, **kwargs)

    traceback.print_exc = print_other_exc


def _pyspark_module() -> str:
    """Return the module of pyspark that Spark started this process for; empty if there is none."""
    option, module, *_ = *sys.orig_argv[1:3], "", ""
    return module if option == "-m" and module.startswith("pyspark.") else ""


def _import_shadowed() -> None:
    """Import the `sitecustomize` that Python would have imported without this one."""
    here = os.path.dirname(__file__)
    path = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


_connect_early()
_skip_zip()
_silence_daemon()
_import_shadowed()
