"""Headless Chromium over its debugging pipe: loads a page, says what it logged and asked for."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
PATIENCE_S = 120.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)


@dataclass
class Seen:
    """One loaded page."""

    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    session: str = ""


class Browser:
    """A Chromium of its own profile; ends with the context."""

    def __enter__(self) -> Browser:
        assert PROGRAM is not None
        self.profile = tempfile.mkdtemp(prefix="report-browser-")
        theirs_in, ours_out = _pipe()
        ours_in, theirs_out = _pipe()
        silent = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        actions = [
            (os.POSIX_SPAWN_DUP2, theirs_in, 3),
            (os.POSIX_SPAWN_DUP2, theirs_out, 4),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            silent,
        ]
        command = [PROGRAM, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = os.posix_spawn(
            PROGRAM, command, dict(os.environ), file_actions=actions, setpgroup=0
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.reader, self.writer = ours_in, ours_out
        self.buffer, self.number = b"", 0
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        os.close(self.writer)
        os.close(self.reader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        shutil.rmtree(self.profile, ignore_errors=True)

    def load(self, page: Path, *, width: int, scheme: str = "light") -> Seen:
        """Open a file at a viewport width in a colour scheme, in a tab that stays open."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        seen = Seen(session=attached["sessionId"])
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable", seen)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", seen, **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", seen, features=features)
        self.events.clear()
        self.call("Page.navigate", seen, url=page.resolve().as_uri())
        while not any(one["method"] == "Page.loadEventFired" for one in self.events):
            self.events.append(self._next())
        # A round trip more, so that what the load logged has arrived.
        self.evaluate(seen, "1")
        for event in self.events:
            self._note(seen, event)
        return seen

    def evaluate(self, seen: Seen, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", seen, expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"]["value"]

    def picture(self, seen: Seen, path: Path) -> None:
        """The whole page as PNG."""
        found = self.call("Page.captureScreenshot", seen, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def printed(self, seen: Seen) -> bytes:
        """The page as PDF."""
        found = self.call("Page.printToPDF", seen, printBackground=False)
        return base64.b64decode(found["data"])

    def call(self, method: str, seen: Seen | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of one command of the DevTools protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if seen is not None:
            message["sessionId"] = seen.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reader], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self.reader, 1 << 20) if ready else b""
            assert part, "the browser does not answer"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return dict(json.loads(message))

    @staticmethod
    def _note(seen: Seen, event: dict[str, Any]) -> None:
        if event.get("sessionId") != seen.session:
            return
        parameters = event["params"]
        match event["method"]:
            case "Runtime.consoleAPICalled":
                seen.messages.append(str(parameters["args"]))
            case "Runtime.exceptionThrown":
                seen.messages.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                seen.messages.append(str(parameters["entry"]["text"]))
            case "Network.requestWillBeSent":
                seen.requests.append(str(parameters["request"]["url"]))


def _pipe() -> tuple[int, int]:
    """A pipe of numbers that stay clear of the 3 and 4 that the browser reads and writes."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
