"""`embedlog report`: writes a page about a log to a file, or serves it on this host."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from embedlog.cli import argument_types as types
from embedlog.cli.export import destination
from embedlog.cli.open_log import existing, to_read
from embedlog.cli.parser import FAILED, OK, CommandParser, add_flag, add_option
from embedlog.cli.printing import note, say_result
from embedlog.errors import EmbedlogError
from embedlog.progress import ProgressBar, format_bytes

REPORT = """\
The page needs no other file and no network.  Exits with 1 if --verify finds damage.

examples:
  embedlog report --out report.html --verify
  embedlog report --serve 8080
"""
_LOOPBACK = "127.0.0.1"


def report_options(command: CommandParser) -> None:
    """Add the options."""
    command.epilog = REPORT
    way = command.add_mutually_exclusive_group(required=True)
    add_option(way, "--out -o", "FILE", "the file to write, or to replace; - is stdout")
    about = f"serve the page on {_LOOPBACK}, made for each request; by default on a free port"
    add_option(way, "--serve", "PORT", about, nargs="?", const=0, type=types.port)
    about = "read everything for the page, check all checksums, and show the findings"
    add_flag(command, "--verify", about)


def report(args: argparse.Namespace) -> int:
    """Write the page, and print where; or serve it, and print its address."""
    if args.serve is not None:
        return _serve(args)
    page, is_damaged = _page(args)
    with destination(args.out, force=True) as file:
        file.write(page)
    note(f"{args.out}: {format_bytes(len(page))}")
    return FAILED if is_damaged else OK


def _page(args: argparse.Namespace) -> tuple[bytes, bool]:
    """Return the page, and whether verifying everything for it found damage."""
    with to_read(args) as log, ProgressBar("verify") as bar:
        findings = log.housekeeping.verify(progress=bar) if args.verify else None
        return log.report(findings).encode("utf-8", "replace"), bool(findings)


def _serve(args: argparse.Namespace) -> int:
    """Answer each request with the page, as of then, until Ctrl-C."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Send the page, or why there is none; the browser asks again in a moment."""
            # A page of another site, whose name leads here, could read the answer.
            is_own = self.headers.get("Host", "").rpartition(":")[0] in (_LOOPBACK, "localhost")
            if self.path != "/" or not is_own:
                self.send_error(404)
                return
            status, kind = 200, "html"
            try:
                page, _ = _page(args)
            except (EmbedlogError, OSError) as error:
                status, kind, page = 503, "plain", str(error).encode("utf-8", "replace")
            self.send_response(status)
            self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
            self.send_header("Refresh", "5")  # seconds
            self.end_headers()
            self.wfile.write(page)

        def handle(self) -> None:
            """Answer a connection, which the browser may close at any time."""
            with suppress(ConnectionError):
                super().handle()

        def log_message(self, *_: object) -> None:
            """Log no requests."""

    existing(args)
    with ThreadingHTTPServer((_LOOPBACK, args.serve), Handler) as server:
        url = f"http://{_LOOPBACK}:{server.server_port}/"
        say_result(args, {"url": url}, [url])
        sys.stdout.flush()
        server.serve_forever()
    return OK
