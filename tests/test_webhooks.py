"""The example of a web service with workers in the background: `make engines` installs FastAPI."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import forks
from support.patience import patient

HOME = Path(__file__).parents[1] / ".venv" / "fastapi"
EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = [
    pytest.mark.tier("all"),
    pytest.mark.skipif(not HOME.exists(), reason=f"{HOME.name} is not installed: `make engines`"),
]


class Receiver:
    """The server to which webhooks are delivered; it refuses some, and others at first."""

    def __init__(self):
        self.delivered, self.refused, self.is_mended = [], Counter(), False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = body["number"]
                bad = number % 21 == 7 and not outer.is_mended
                if bad or (number % 21 == 3 and outer.refused[number] < 2):
                    outer.refused[number] += 1
                    self.send_response(503)
                else:
                    outer.delivered.append((body["customer"], number))
                    self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


class Service:
    """The service in a process of its own, with an HTTP client."""

    def __init__(self, path):
        import httpx

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HOME), str(EXAMPLES)]),
            "WEBHOOKS_LOG": str(path),
        }
        command = [sys.executable, "-m", "uvicorn", "webhooks:app", "--port", str(self.port)]
        self.process = subprocess.Popen([*command, "--log-level", "warning"], env=environment)
        forks.until(self.is_up, 30)

    def is_up(self):
        assert self.process.poll() is None, "the service has ended"
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def call(self, method, path, **options):
        answer = self.client.request(method, path, timeout=patient(30), **options)
        answer.raise_for_status()
        return answer.json()

    def end(self, number):
        self.client.close()
        self.process.send_signal(number)
        self.process.wait(patient(60))


def test_webhooks_are_delivered_in_the_background(tmp_path, receiver, monkeypatch):
    """With retries, dead letters, and a kill; in order for each customer."""
    monkeypatch.syspath_prepend(HOME)
    service = Service(tmp_path / "log")
    try:
        for number in range(200):
            customer = f"customer {number % 20}"
            body = {"number": number, "customer": customer}
            sent = {"url": receiver.url, "body": body}
            assert service.call("POST", f"/webhooks/{customer}", json=sent) is None
            if number == 100:
                service.end(signal.SIGKILL)
                service = Service(tmp_path / "log")
        good = {number for number in range(200) if number % 21 != 7}
        forks.until(lambda: {number for _, number in receiver.delivered} == good, 60)
        letters = []
        deadline = time.monotonic() + patient(60)
        while len(letters) < 10 and time.monotonic() < deadline:
            time.sleep(0.2)
            letters = service.call("GET", "/dead-letters")
        assert len(letters) == 10
        assert {letter["exception"] for letter in letters} == {"httpx.HTTPStatusError"}
        assert {letter["delivery_count"] for letter in letters} == {5}
        by_customer = {}
        for customer, number in receiver.delivered:
            numbers = by_customer.setdefault(customer, [])
            if number not in numbers:
                numbers.append(number)
        assert all(numbers == sorted(numbers) for numbers in by_customer.values())

        receiver.is_mended = True
        assert service.call("POST", "/dead-letters/replay") == {"replayed": 10}
        forks.until(lambda: {number for _, number in receiver.delivered} == set(range(200)), 60)
        assert all(letter["replayed"] for letter in service.call("GET", "/dead-letters"))
        service.end(signal.SIGTERM)
    finally:
        service.process.kill()
        service.process.wait()


def test_the_service_is_short():
    """With its comments, less than 80 lines."""
    assert len((EXAMPLES / "webhooks.py").read_text().splitlines()) < 80
