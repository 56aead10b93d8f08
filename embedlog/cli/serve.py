"""`embedlog serve`: Kafka's protocol on a log."""

from __future__ import annotations

import argparse
import os
import signal
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import embedlog
from embedlog.cli import argument_types as types
from embedlog.cli.open_log import existing, root_of
from embedlog.cli.parser import OK, CommandParser, add_flag, add_option
from embedlog.cli.printing import say_result
from embedlog.errors import InvalidConfigError

if TYPE_CHECKING:
    from embedlog.server.server import KafkaServer
    from embedlog.server.workers import Worker

SERVE = """\
Clients in any language connect as to a Kafka broker; programs in Python and Spark may use the
directory at the same time.  On a loopback address only the owner of the directory, the user of
this command and root can connect.  Stop it with Ctrl-C or SIGTERM.

examples:
  embedlog serve data/log
  embedlog serve data/log --listen 127.0.0.1:0 --read-only
  embedlog serve data/log --workers 4
  embedlog serve --listen 0.0.0.0:9093 --users users.txt --cert cert.pem --key key.pem
  kcat -b 127.0.0.1:9092 -C -t orders -e
"""
_OPTIONS = (
    *("root", "must_exist", "listen", "read_only", "no_auto_create_topics"),
    *("users", "cert", "key", "insecure"),
)
"""What workers need of the arguments."""


def serve_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = SERVE
    about = "the directory of the log; it is created if necessary; by default --root"
    command.add_argument("directory", metavar="DIRECTORY", nargs="?", help=about)
    about = "where clients connect; port 0 is a free one; by default 127.0.0.1:9092"
    default = ("127.0.0.1", 9092)
    add_option(command, "--listen", "HOST:PORT", about, type=types.listen, default=default)
    about = "how many processes serve, each at the next port; by default 1"
    add_option(command, "--workers", "N", about, type=types.workers, default=1)
    add_flag(command, "--read-only", "refuse everything that would change the log")
    about = "do not create a missing topic when a client asks for it, or writes to it"
    add_flag(command, "--no-auto-create-topics", about)
    about = "clients must authenticate by SASL as one of these users: lines of NAME:PASSWORD"
    add_option(command, "--users", "FILE", about)
    about = "encrypt all connections, with the certificate of this file, in PEM"
    add_option(command, "--cert", "FILE", about)
    add_option(command, "--key", "FILE", "its private key; by default in the file of --cert")
    about = "let every host and user that reaches the address do everything, unencrypted"
    add_flag(command, "--insecure", about)


def serve(args: argparse.Namespace) -> int:
    """Serve the log until a signal; print the address."""
    # All workers have the same users, also those that are started later.
    users = None if args.users is None else read_users(args.users)
    if args.key is not None and args.cert is None:
        raise InvalidConfigError("--key is of no use without --cert", todo="Pass both.")
    changed = {"root": args.directory or args.root, "users": users}
    args = argparse.Namespace(**{**vars(args), **changed})
    if args.workers > 1:
        return _serve_by_workers(args)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with served(args) as server:
        _say_where(args, server.bootstrap_servers)
        stopped.wait()
    return OK


@contextmanager
def served(args: argparse.Namespace, worker: Worker | None = None) -> Iterator[KafkaServer]:
    """Yield a server of the log; with a worker, it is one of several."""
    from embedlog.server.server import KafkaServer

    context = None if args.cert is None else encrypted_by(args.cert, args.key)
    if args.read_only:
        log = embedlog.open(existing(args), mode="r")
    else:
        creates = not args.no_auto_create_topics
        log = embedlog.open(root_of(args), must_exist=args.must_exist, auto_create_topics=creates)
    options = {"insecure": args.insecure, "users": args.users, "ssl_context": context}
    with log, KafkaServer(log, *args.listen, worker=worker, **options) as server:
        yield server


def _serve_by_workers(args: argparse.Namespace) -> int:
    from embedlog.cli.serve_workers import serve_by
    from embedlog.server.workers import new_workers

    host, port = args.listen
    if port and port + args.workers > 65_536:
        raise InvalidConfigError(
            f"The ports of {args.workers} workers from {port} on are more than there are",
            todo="Pass a lower port, or 0 for free ones.",
        )
    workers = new_workers(host, port, args.workers)
    name = f"[{host}]" if ":" in host else host
    addresses = ",".join(f"{name}:{each}" for each in workers[0].ports)
    # The parser, which is one of the arguments, cannot be pickled.
    options = argparse.Namespace(**{name: getattr(args, name) for name in _OPTIONS})
    serve_by(workers, partial(served, options), partial(_say_where, args, addresses))
    return OK


def _say_where(args: argparse.Namespace, addresses: str) -> None:
    where = [f"Serving {root_of(args)} at {addresses}"]
    say_result(args, {"bootstrap_servers": addresses}, where)
    sys.stdout.flush()


def read_users(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the passwords of a file with a line ``name:password`` for each user, by their names.

    Empty lines, and those that begin with ``#``, do not count.

    Raises:
        InvalidConfigError: Others than the owner can use the file, or it has a line of another
            form, or no user.
        OSError: It cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise InvalidConfigError(
                f"Users other than its owner can use {os.fspath(path)}, which has passwords",
                todo=f"Run `chmod 600 {os.fspath(path)}`.",
            )
        lines = [line.rstrip("\r\n") for line in file]
    users = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, password = line.partition(":")
        if not name or not password:
            raise InvalidConfigError(
                f"Line {number} of {os.fspath(path)} is not NAME:PASSWORD", todo="Correct it."
            )
        users[name] = password
    if not users:
        raise InvalidConfigError(f"{os.fspath(path)} has no user", todo="Add NAME:PASSWORD.")
    return users


def encrypted_by(certificate: str, key: str | None) -> ssl.SSLContext:
    """Return what encrypts connections with a certificate and its private key, files in PEM.

    Raises:
        InvalidConfigError: They are no certificate and its key.
        OSError: They cannot be read.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise InvalidConfigError(
            f"{certificate} and {key or certificate} are no certificate and its private key: "
            f"{error.reason or error}",
            todo="Pass both in PEM.",
        ) from error
    return context
