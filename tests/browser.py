"""A real headless Chromium, spoken to over pipes (DevTools protocol)."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run about:blank"


class Browser:
    """One page of a browser."""

    def __init__(self, to: Any, since: Any) -> None:
        self._to, self._from, self._count, self._session = to, since, 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol; events that come meanwhile are left out."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        message |= {} if self._session is None else {"sessionId": self._session}
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = b""
            while not answer.endswith(b"\0"):
                byte = self._from.read(1)
                assert byte, "the browser has ended"
                answer += byte
            found = json.loads(answer[:-1])
            if found.get("id") == self._count:
                assert "error" not in found, found
                return found["result"]

    def open(self, url: str, width: int = 1280, dark: bool = False) -> None:
        """Open an address in a window of this width."""
        shape = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **shape)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def wait_for(self, expression: str, limit_s: float = 60.0) -> Any:
        """Return the value once it is true."""
        until = time.monotonic() + limit_s
        while not (found := self.value(expression)):
            assert time.monotonic() < until, (expression, self.value("document.body?.innerText"))
            time.sleep(0.1)
        return found

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page, as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with its profile in `folder`."""
    there, to = os.pipe()
    since, here = os.pipe()
    command = f'exec {CHROMIUM} {_FLAGS} --user-data-dir="{folder}" 3<&{there} 4>&{here}'
    process = subprocess.Popen(
        ["bash", "-c", command], pass_fds=(there, here), stderr=subprocess.DEVNULL
    )
    os.close(there)
    os.close(here)
    with os.fdopen(to, "wb") as writing, os.fdopen(since, "rb") as reading:
        try:
            yield Browser(writing, reading)
        finally:
            process.kill()
            process.wait()
