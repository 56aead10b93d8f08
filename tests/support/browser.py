"""A headless Chromium, driven by the messages of its developer tools through a pipe."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from support.patience import patient

CHROMIUM = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), ""
)
"""The path of the browser; empty if there is none."""


class Browser:
    """One page of a browser, and the errors in its console.

    Args:
        profile: A directory for what the browser stores.
        seconds: How long an answer or a page may take.
    """

    def __init__(self, profile: Path, seconds: float = 30) -> None:
        self.errors: list[str] = []
        self._seconds, self._number, self._buffer = patient(seconds), 0, b""
        self._events: list[str] = []
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        # It reads from descriptor 3 and writes to 4.
        script = f'exec "$@" 3<&{command_read} 4>&{answer_write}'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command = [CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(command_read, answer_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(command_read)
        os.close(answer_write)
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def show(self, width: int, height: int, scheme: str) -> None:
        """Set the size of the window, and whether the reader prefers `light` or `dark`."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        """Open a page, and wait until it and its pictures are loaded."""
        self._events.clear()
        opened = self._call("Page.navigate", url=url)
        assert "errorText" not in opened, f"{url}: {opened['errorText']}"
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)
        self._process.terminate()
        self._process.wait(self._seconds)
        os.close(self._read)

    def _call(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """Return the next message, and note what it says about errors."""
        deadline = monotonic() + self._seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, "the browser does not answer"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        method, details = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if (
            method == "Runtime.exceptionThrown"
            or (method == "Runtime.consoleAPICalled" and details["type"] == "error")
            or (method == "Log.entryAdded" and details["entry"]["level"] == "error")
        ):
            self.errors.append(json.dumps(details)[:500])
        return message
