"""A Chromium without a window, driven over pipes by its own protocol: no package is needed."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATH = next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE_S = 60.0


class Browser:
    """One page. `problems`: what it wrote to its console, and what it was refused."""

    def __init__(self, sends: int, hears: int):
        self._sends, self._hears, self._rest = sends, hears, b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        self._navigations = 0
        self.problems: list[str] = []

    def open(self, url: str) -> None:
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        found = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        self._ask("Page.navigate", url=url)

    def reload(self) -> None:
        """Load the page anew. What runs next runs in the new document: a script that the browser
        holds while it changes documents would be answered by an error.
        """
        before = self._navigations
        self._ask("Page.reload")
        while self._navigations == before:
            self._note(self._hear())

    def run(self, script: str) -> Any:
        """What an expression of JavaScript comes to."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """The same once it is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never: {script}; {self.problems}"
            time.sleep(0.05)
        return value

    def size(self, width: int, height: int, *, scale: int = 1, is_phone: bool = False) -> None:
        """Be a screen of so many pixels."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=is_phone,
        )

    def scheme(self, name: str) -> None:
        """Prefer the colours "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self._ask("Emulation.setEmulatedMedia", features=features)

    def write(self, text: str) -> None:
        """Type a text into what has the focus."""
        self._ask("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False, control: bool = False) -> None:
        """Press a key, such as Enter or Escape."""
        codes = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40, "/": 191}
        event = {
            "key": key,
            "code": key,
            "modifiers": 8 * shift + 2 * control,
            "windowsVirtualKeyCode": codes[key],
        }
        text = {"Enter": "\r", "/": "/"}.get(key)
        begins = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self._ask("Input.dispatchKeyEvent", **event, **begins)
        self._ask("Input.dispatchKeyEvent", **event, type="keyUp")

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a place."""
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def wait(self, script: str) -> Any:
        """Return what a promise comes to."""
        options = {"returnByValue": True, "awaitPromise": True}
        found = self._ask("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def _ask(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._sends, json.dumps(message).encode() + b"\0")
        while True:
            found = self._hear()
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]
            self._note(found)

    def _note(self, event: Any) -> None:
        """Keep what an event tells."""
        method = event.get("method")
        if method in ("Log.entryAdded", "Runtime.exceptionThrown"):
            self.problems.append(json.dumps(event["params"]))
        elif method == "Page.frameNavigated":
            self._navigations += "parentId" not in event["params"]["frame"]

    def _hear(self) -> Any:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._hears], [], [], PATIENCE_S)
            piece = os.read(self._hears, 1 << 20) if ready else b""
            assert piece, "the browser says nothing"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the block."""
    assert PATH is not None
    its_in, sends = os.pipe()
    hears, its_out = os.pipe()
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
    flags += " --window-size=1100,860 --no-first-run --disable-background-networking"
    flags += " --disable-component-update"
    # The protocol is spoken at descriptors 3 and 4.
    command = f'exec "$0" {flags} --user-data-dir="$1" 3<&{its_in} 4>&{its_out}'
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(
        ["bash", "-c", command, PATH, str(profile)], pass_fds=(its_in, its_out), **quiet
    )
    os.close(its_in)
    os.close(its_out)
    try:
        yield Browser(sends, hears)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(sends)
        os.close(hears)
