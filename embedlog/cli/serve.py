"""`embedlog serve`: Kafka's protocol on a log."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

import embedlog
from embedlog.cli import argument_types as types
from embedlog.cli.open_log import existing, root_of
from embedlog.cli.parser import OK, CommandParser, add_flag, add_option
from embedlog.cli.printing import say_result

SERVE = """\
Clients in any language connect as to a Kafka broker; programs in Python and Spark may use the
directory at the same time.  On a loopback address only the owner of the directory, the user of
this command and root can connect.  Stop it with Ctrl-C or SIGTERM.

examples:
  embedlog serve data/log
  embedlog serve data/log --listen 127.0.0.1:0 --read-only
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
    about = "let every host and user that reaches the address do everything, unencrypted"
    add_flag(command, "--insecure", about)


def serve(args: argparse.Namespace) -> int:
    """Serve the log until a signal; print the address."""
    from embedlog.server.server import KafkaServer

    args = argparse.Namespace(**{**vars(args), "root": args.directory or args.root})
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    if args.read_only:
        log = embedlog.open(existing(args), mode="r")
    else:
        log = embedlog.open(root_of(args), must_exist=args.must_exist)
    host, port = args.listen
    with log, KafkaServer(log, host, port, insecure=args.insecure) as server:
        address = server.bootstrap_servers
        say_result(args, {"bootstrap_servers": address}, [f"Serving {log.path} at {address}"])
        sys.stdout.flush()
        stopped.wait()
    return OK
