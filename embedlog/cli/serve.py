"""`embedlog serve`: Kafka's protocol on a log."""

from __future__ import annotations

import argparse
import os
import signal
import ssl
import sys
import threading

import embedlog
from embedlog.cli import argument_types as types
from embedlog.cli.open_log import existing, root_of
from embedlog.cli.parser import OK, CommandParser, add_flag, add_option
from embedlog.cli.printing import say_result
from embedlog.errors import InvalidConfigError

SERVE = """\
Clients in any language connect as to a Kafka broker; programs in Python and Spark may use the
directory at the same time.  On a loopback address only the owner of the directory, the user of
this command and root can connect.  Stop it with Ctrl-C or SIGTERM.

examples:
  embedlog serve data/log
  embedlog serve data/log --listen 127.0.0.1:0 --read-only
  embedlog serve --listen 0.0.0.0:9093 --users users.txt --cert cert.pem --key key.pem
  kcat -b 127.0.0.1:9092 -C -t orders -e
"""


def serve_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = SERVE
    about = "the directory of the log; it is created if necessary; by default --root"
    command.add_argument("directory", metavar="DIRECTORY", nargs="?", help=about)
    about = "where clients connect; port 0 is a free one; by default 127.0.0.1:9092"
    default = ("127.0.0.1", 9092)
    add_option(command, "--listen", "HOST:PORT", about, type=types.listen, default=default)
    add_flag(command, "--read-only", "refuse everything that would change the log")
    about = "clients must prove by SASL that they are one of these users: lines of NAME:PASSWORD"
    add_option(command, "--users", "FILE", about)
    about = "encrypt all connections, with the certificate of this file, in PEM"
    add_option(command, "--cert", "FILE", about)
    add_option(command, "--key", "FILE", "its private key; by default in the same file")
    about = "let every host and user that reaches the address do everything, unencrypted"
    add_flag(command, "--insecure", about)


def serve(args: argparse.Namespace) -> int:
    """Serve the log until a signal; print the address."""
    from embedlog.server.server import KafkaServer

    users = None if args.users is None else read_users(args.users)
    if args.key is not None and args.cert is None:
        raise InvalidConfigError("--key is of no use without --cert", todo="Pass both.")
    context = None if args.cert is None else encrypted_by(args.cert, args.key)
    args = argparse.Namespace(**{**vars(args), "root": args.directory or args.root})
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    if args.read_only:
        log = embedlog.open(existing(args), mode="r")
    else:
        log = embedlog.open(root_of(args), must_exist=args.must_exist)
    host, port = args.listen
    options = {"insecure": args.insecure, "users": users, "ssl_context": context}
    with log, KafkaServer(log, host, port, **options) as server:
        address = server.bootstrap_servers
        say_result(args, {"bootstrap_servers": address}, [f"Serving {log.path} at {address}"])
        sys.stdout.flush()
        stopped.wait()
    return OK


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
