"""A headless Chromium, driven over the pipe of its DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Browser", "needs_browser"]

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt install chromium)")


class Browser:
    """One page; use it as a context manager."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._number = 0
        self._left = b""
        self._session = ""
        self.errors: list[str] = []

    def __enter__(self) -> Browser:
        command_read, self._commands = os.pipe()
        self._answers, answer_write = os.pipe()
        flags = (
            f"--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
            f"--remote-debugging-pipe --user-data-dir={self._profile}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {CHROMIUM} {flags} 3<&{command_read} 4>&{answer_write}"],
            pass_fds=(command_read, answer_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result; what the page complains of meanwhile goes to ``errors``."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                self.errors.append(json.dumps(answer["params"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser has ended"
            self._left += data
        line, _, self._left = self._left.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def evaluate(self, expression: str) -> Any:
        """A JavaScript expression's value, awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> Any:
        """Until ``expression`` is true; returns it."""
        deadline = time.monotonic() + seconds
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < deadline, (expression, self.errors)
            time.sleep(0.05)
        return found
